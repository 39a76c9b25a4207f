"""What is emulated of a cache is what its pages give: ``attention/emulated.py`` beside the wrappers over a page
manager."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_diffkv.attention.emulated import (
    AS_COMPUTED,
    Fp8,
    RoundedAgain,
    Span,
    Stored,
    attend,
    divergence,
    evidence_ends,
    placed,
    stored_of,
)
from sglang_diffkv.attention.whole import Sight, causal
from sglang_diffkv.attention.wrappers import DecodeWrapper, ExtendWrapper
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation
from sglang_diffkv.layout.page_format import Tier
from sglang_diffkv.ops import Scaling
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.uniform import UniformPolicy
from tests.helpers import make_format, make_manager, tier_map
from tests.policies import diffkv_policy

HEADS, GROUP, DIM, SCALE, ROW = 2, 2, 64, 0.125, 3
SPAN, TOKENS = Span(19, 33), 52
ALL = Sight()


def given(seed: int = 0, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [N, Hq, D], keys and values [N, H, D]. Keys of a head have much in common, and one large channel."""
    random = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(tokens, x, DIM, generator=random) for x in (HEADS * GROUP, HEADS, HEADS))
    key += 2 * torch.randn(1, HEADS, DIM, generator=random)
    key[:, :, 5] *= 6
    return (1.5 * query).bfloat16(), key.bfloat16(), value.bfloat16()


def paged(policy: Policy, tiers: tuple[str, ...], rotation: Rotation, means: torch.Tensor | None, span: Span) -> tuple[
    torch.Tensor, list[list[int]]
]:  # fmt: skip
    """What a request gets [N, Hq, D]: a prompt, another behind it where ``span`` has one, and a reply token by token.
    And the prompt's tiers by head, -1 for none, once it has ended."""
    query, key, value = given()
    fmt = replace(make_format(tiers, DIM, DIM), turned=(rotation.keys, rotation.values))
    manager = make_manager(fmt, layers=1, heads=HEADS, policy=policy)
    extend, decode = (x(manager.ops, rotation=rotation, key_means=means) for x in (ExtendWrapper, DecodeWrapper))
    ids = torch.tensor([ROW])

    def grow(count: int) -> None:
        manager.space.append(ROW, count)
        manager.rows.grow(ROW, count, in_prompt=False)
        manager.space.flush()

    outs, tiers_of_prompt = [], []
    for start, end in ((0, span.cached), (span.cached, span.prompt)):
        if end == start:
            continue
        grow(end - start)
        extend.plan(ids, torch.tensor([start]), torch.tensor([end - start]), [start], [end - start])
        extend.begin()
        outs.append(extend.run(0, query[start:end], key[start:end], value[start:end], Scaling(SCALE)))
        extend.end_prompt(ROW, end)
    tiers_of_prompt = [tier_map(manager.state, ROW, span.prompt)[0, head].tolist() for head in range(HEADS)]
    for at in range(span.prompt, TOKENS):
        grow(1)
        decode.plan(ids, torch.tensor([at + 1]))
        decode.begin()
        outs.append(decode.run(0, query[at : at + 1], key[at : at + 1], value[at : at + 1], Scaling(SCALE)))
        decode.end()
    return torch.cat([x.reshape(-1, HEADS * GROUP, DIM).float() for x in outs]), tiers_of_prompt


def emulated(stored: Stored, span: Span = SPAN, sight: Sight = ALL) -> torch.Tensor:
    """[N, Hq, D] float32."""
    query, key, value = (x.transpose(0, 1) for x in given())
    return attend(query, key, value, SCALE, 0, stored, span, sight).float()


def parsed(tiers: tuple[str, ...]) -> tuple[Tier, ...]:
    return tuple(Tier.parse(x) for x in tiers)


@pytest.mark.parametrize(
    ("tiers", "window"), [(("K8V4", "K4V2"), 6), (("K8V4", "K5V2"), 11), (("K8V8",), 0), (("BF16", "K8V4"), 6)]
)
@pytest.mark.parametrize("rotation", [NO_ROTATION, Rotation(True, True)])
def test_a_request_over_pages(tiers: tuple[str, ...], window: int, rotation: Rotation) -> None:
    """A window alone decides, so that both place the same tokens."""
    policy = diffkv_policy(1e9, 0.0, window=window, sinks=2) if window else UniformPolicy()
    means = given(1)[1].float().mean(0)[None] if tiers[-1] != "K8V8" else None
    if tiers[0] == "BF16":
        means, rotation = None, NO_ROTATION
    expected, _ = paged(policy, tiers, rotation, means, SPAN)
    found = emulated(Stored(parsed(tiers), policy, rotation, means))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    wrong = emulated(AS_COMPUTED)
    late, error = slice(SPAN.cached, None), (found - expected).abs().mean()
    if tiers != ("K8V8",):
        assert (wrong - expected)[late].abs().mean() > 5 * error, "the test sees whether anything was rounded"


@pytest.mark.parametrize(("between", "pair"), [(0.0, ("K8V6", "K4V3")), (1e9, ("K8V6", "K3V2"))])
def test_a_layer_with_two_of_three_tiers(between: float, pair: tuple[str, str]) -> None:
    """Is as one of the two alone, and as pages of three tiers."""
    tiers, policy = ("K8V6", "K4V3", "K3V2"), diffkv_policy(1e9, 0.0, window=6, alpha_between=((between,),))
    found, alone = emulated(Stored(parsed(tiers), policy)), diffkv_policy(1e9, 0.0, window=6)
    assert torch.equal(found, emulated(Stored(parsed(pair), alone)))
    expected, _ = paged(policy, tiers, NO_ROTATION, None, SPAN)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    computed = Stored(parsed(tiers), policy, only=frozenset({1}))
    assert torch.equal(emulated(computed), emulated(AS_COMPUTED)), "layer 0 is not among those"
    assert torch.equal(emulated(replace(computed, only=frozenset({0}))), found)


@pytest.mark.parametrize(
    ("names", "between"),
    [
        (("K8V4", "K4V2"), ()),
        (("K8V6", "K5V4", "K3V2"), (0.7,)),
        (("K8V6", "K5V4", "K3V2"), ((0.7,),)),
        (("K8V6", "K6V4", "K5V4", "K3V2"), (0.8, 0.6)),
        (("K8V6", "K6V4", "K5V4", "K3V2"), ((1.0,), (0.7,))),
    ],
)
def test_a_prompt_s_tokens_are_placed_by_their_scores(names: tuple[str, ...], between: tuple[Any, ...]) -> None:
    policy = diffkv_policy(1.0, 0.0, window=6, sinks=2, alpha_between=between)
    span = Span(0, SPAN.prompt)
    expected, tiers = paged(policy, names, NO_ROTATION, None, span)
    query, key, _ = (x.transpose(0, 1).float() for x in given())
    ends = evidence_ends(TOKENS, 6, span, query.device)
    logits = (query.view(HEADS, GROUP, TOKENS, DIM) @ key[:, None].mT) * SCALE
    column = torch.arange(TOKENS)
    weights = logits.masked_fill(column > column[:, None], float("-inf")).softmax(-1)
    received = (weights * ((column[:, None] > column) & (column[:, None] <= ends))).sum(2)
    stored = Stored(parsed(names), policy)
    here = stored.in_layer(0)
    found_tiers = placed(received, here.scored, ends, span)[:, : span.prompt]
    found_tiers[:, span.prompt - 6 :] = 0  # they are in the window yet
    used = [names.index(tier.name) for tier in here.tiers]
    assert [[used[x] for x in head] for head in found_tiers.tolist()] == tiers
    assert len({x for head in tiers for x in head}) == len(used), "each tier that is used has some"
    found = emulated(stored, span)
    torch.testing.assert_close(found[: span.prompt + 1], expected[: span.prompt + 1], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("sight", [ALL, Sight(window=9), Sight(softcap=4.0)])
def test_nothing_is_rounded_as_computed(sight: Sight) -> None:
    query, key, value = (x.transpose(0, 1)[None].float() for x in given())
    expected = causal(query, key, value, SCALE, sight)[0]
    torch.testing.assert_close(emulated(AS_COMPUTED, sight=sight), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("sight", [ALL, Sight(window=40), Sight(softcap=4.0)])
def test_a_lossless_configuration_loses_exactly_nothing(sight: Sight) -> None:
    """By another order of sums it would: what bfloat16 makes of that grows from layer to layer."""
    random = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(x * HEADS, 600, DIM, generator=random).bfloat16() for x in (4, 1, 1))
    found, expected = (
        attend(query, key, value, SCALE, 0, stored, Span(200, 400), sight)
        for stored in (stored_of(DiffKVConfig(tiers=("BF16",)), None), AS_COMPUTED)
    )
    assert torch.equal(found, expected)


def test_fp8_rounds_what_is_read_of_a_cache() -> None:
    found, exact = emulated(Fp8()), emulated(AS_COMPUTED)
    assert torch.equal(found[: SPAN.cached], exact[: SPAN.cached]), "a pass sees its own tokens as computed"
    query, key, value = given()
    key, value = (x.to(torch.float8_e4m3fn).float() for x in (key, value))
    last = query[-1].to(torch.float8_e4m3fn).float().view(HEADS, GROUP, DIM)
    weights = (last @ key.permute(1, 2, 0) * SCALE).softmax(-1)
    largest = weights.amax(-1, keepdim=True)
    rounded = (weights / largest * 256).to(torch.float8_e4m3fn).float() * largest / 256
    expected, closer = ((x @ value.transpose(0, 1)).flatten(0, 1) for x in (rounded, weights))
    torch.testing.assert_close(found[-1], expected, rtol=2**-7, atol=0.0)
    assert (found[-1] - expected).abs().max() < 0.5 * (found[-1] - closer).abs().max(), "weights are rounded too"
    assert not Fp8().weights(torch.zeros(2, 3)).any(), "a row that sees nothing stored"


def test_keys_and_values_are_rounded_once_more() -> None:
    """Each number changes by half a unit of its last place at most, and many do change."""
    key = given()[1].transpose(0, 1)
    found = RoundedAgain().keys(key, 0)
    assert torch.equal(found.computed, *found.stored)
    change = (found.computed - key.float()).abs()
    assert (change <= key.float().abs() * 2.0**-8).all() and (change > 0).float().mean() > 0.2
    assert torch.equal(RoundedAgain().keys(key.float(), 0).computed.to(key.dtype), key), "float32 loses next to nothing"
    assert not torch.equal(emulated(RoundedAgain()), emulated(AS_COMPUTED))


@pytest.mark.parametrize("stored", [AS_COMPUTED, Stored(parsed(("K8V8",))), Fp8()])
def test_prompts_in_8_bits(stored: Stored) -> None:
    """Queries, keys, values and weights are rounded, whatever a prompt sees; what its reply sees is as it was."""
    found, usual = emulated(replace_in(stored)), emulated(stored)
    assert torch.equal(found[SPAN.prompt :], usual[SPAN.prompt :])
    assert not torch.equal(found[: SPAN.cached], usual[: SPAN.cached])
    query, key, value = (x.to(torch.float8_e4m3fn).float() for x in given())
    at = SPAN.cached - 1  # it sees what a pass has computed
    logits = query[at].view(HEADS, GROUP, DIM) @ key[: at + 1].permute(1, 2, 0) * SCALE
    weights = logits.softmax(-1)
    largest = weights.amax(-1, keepdim=True)
    rounded = (weights / largest * 256).to(torch.float8_e4m3fn).float() * largest / 256
    expected = (rounded @ value[: at + 1].transpose(0, 1)).flatten(0, 1)
    torch.testing.assert_close(found[at], expected, rtol=2**-7, atol=1e-6)


def replace_in(stored: Stored) -> Stored:
    return Fp8(prompts_in_8_bits=True) if isinstance(stored, Fp8) else replace(stored, prompts_in_8_bits=True)


def test_what_is_not_emulated_is_refused() -> None:
    with pytest.raises(ValueError, match="DiffKV's thresholds"):
        Stored(parsed(("K8V4", "K4V2")), UniformPolicy())
    for policy, tiers in (
        ({"name": "diffkv", "alpha_low": 0.1}, ["K8V4", "K4V2"]),
        ({"name": "snapkv", "budget": 64}, ["K8V4"]),
    ):
        with pytest.raises(ValueError, match="drop tokens"):
            stored_of(DiffKVConfig.model_validate({"policy": policy, "tiers": tiers}), None)


def test_divergence() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    other = torch.tensor([[0.0, 1.0, 2.5], [3.0, 0.0, float("nan")]])
    found = divergence(logits, other)
    p, q = logits[0].softmax(-1), other[0].softmax(-1)
    assert float(found[0]) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-4)
    assert found[1] == float("inf") and not divergence(logits, logits + 7).abs().max() > 1e-6
