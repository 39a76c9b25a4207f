"""A vector taken off all keys of a head: attention stays the same, keys are stored better, and files that do not fit
are refused."""

from __future__ import annotations

import pytest
import torch

from sglang_diffkv.attention.wrappers import DecodeWrapper, ExtendWrapper
from sglang_diffkv.config import load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.kernels.rotate.fitted import NOT_FITTED, FittedTransform
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation
from sglang_diffkv.key_means import of_rank, read_key_means, write_key_means
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.page_format import PageFormat, Tier
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.ops import Scaling
from sglang_diffkv.policies.uniform import UniformPolicy
from tests.policies import diffkv_policy

LAYERS, HEADS, GROUP, DIM = 2, 2, 3, 64
SCALING = Scaling(0.1)


def queries_and_values(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(count, HEADS * GROUP, DIM, generator=generator).bfloat16()
    return q, torch.randn(count, HEADS, DIM, generator=generator).bfloat16()


def dense(key: torch.Tensor, attention_span: int = 0) -> torch.Tensor:
    """What attention over ``key`` gives, in float32."""
    q, value = (x.float() for x in queries_and_values(key.shape[0]))
    k, v = (x.float().repeat_interleave(GROUP, 1) for x in (key, value))
    logits = torch.einsum("qhd,khd->hqk", q, k) * SCALING.scale
    unseen = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
    if attention_span:
        unseen |= torch.ones_like(unseen).tril(-attention_span)
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(unseen, float("-inf")).softmax(2), v)


def error(
    tiers: str, means: torch.Tensor | None, rotation: Rotation, key: torch.Tensor, attention_span: int = 0,
    fitted: FittedTransform = NOT_FITTED,
) -> float:  # fmt: skip
    """Of attention over pages, relative."""
    exact = dense(key, attention_span)
    return float((outputs(tiers, means, rotation, key, attention_span, fitted).float() - exact).norm() / exact.norm())


def outputs(
    tiers: str, means: torch.Tensor | None, rotation: Rotation, key: torch.Tensor, attention_span: int = 0,
    fitted: FittedTransform = NOT_FITTED,
) -> torch.Tensor:  # fmt: skip
    """[tokens, Hq, DIM] of a prompt in two chunks and three decode steps, in the second layer, whose reach it is. With
    one the prompt is compacted behind each chunk."""
    fmt = PageFormat(DIM, DIM, tuple(Tier.parse(x) for x in tiers.split()), 8)
    policy = diffkv_policy(1e9, 0.0, 8) if len(fmt.tiers) > 1 else UniformPolicy()
    attention_spans = (0, attention_span) if attention_span else ()
    geometry = Geometry(
        fmt, LAYERS, HEADS, 400, num_rows=3, num_segments=2, max_tokens=200, attention_spans=attention_spans
    )
    manager = PageManager(geometry, policy, dtype=torch.bfloat16)
    form = {"rotation": rotation, "key_means": means, "fitted": fitted}
    extend, decode = (kind(manager.ops, **form) for kind in (ExtendWrapper, DecodeWrapper))
    q, value = queries_and_values(key.shape[0])
    count = key.shape[0]
    row, outs, start = torch.tensor([1]), [], 0
    for new in (20, count - 23, 1, 1, 1):
        manager.space.append(1, new)
        manager.rows.grow(1, new, in_prompt=False)
        manager.space.flush()
        part = slice(start, start + new)
        if new > 1:
            extend.plan(row, torch.tensor([start]), torch.tensor([new]), [start], [new], prompts=[count - 3])
        else:
            decode.plan(row, torch.tensor([start + 1]))
        wrapper = extend if new > 1 else decode
        wrapper.begin()
        for layer in range(LAYERS):
            out = wrapper.run(layer, q[part], key[part], value[part], SCALING)
        outs.append(out.clone())
        start += new
        if new > 1 and (attention_span or start == count - 3):
            extend.end_prompt(1, start)
        elif new == 1:
            decode.end()
    return torch.cat(outs)


def keys_with_much_in_common() -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [tokens, H, DIM] and what they have in common, [L, H, DIM]."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(LAYERS, HEADS, DIM, generator=generator) * 4
    return (common[1] + torch.randn(60, HEADS, DIM, generator=generator) * 0.5).bfloat16(), common


@pytest.mark.parametrize("rotation", [NO_ROTATION, Rotation(keys=True), Rotation(True, True)])
def test_attention_stays_and_keys_lose_less(rotation: Rotation) -> None:
    key, common = keys_with_much_in_common()
    assert error("BF16", None, NO_ROTATION, key) < 2e-2 and error("BF16", common, rotation, key) < 2e-2
    for tiers, share in (("K8V8", 0.8), ("K4V8", 0.5)):
        assert error(tiers, common, rotation, key) < share * error(tiers, None, rotation, key)
    assert error("K8V4 K4V2", common, rotation, key) < 0.9 * error("K8V4 K4V2", None, rotation, key)


@pytest.mark.parametrize("attention_span", [5, 24])
@pytest.mark.parametrize("rotation", [NO_ROTATION, Rotation(keys=True), Rotation(True, True)])
def test_sliding_layers_too(rotation: Rotation, attention_span: int) -> None:
    """Though most of the prompt has been dropped, behind its first chunk and at its end."""
    key, common = keys_with_much_in_common()
    assert error("BF16", common, rotation, key, attention_span) < 2e-2
    plain, without = (error("K8V8", means, rotation, key, attention_span) for means in (None, common))
    assert without < 0.8 * plain < 1e-2


def test_any_vector_leaves_attention_as_it_is() -> None:
    """One that has nothing to do with the keys too: it only costs range."""
    key, common = keys_with_much_in_common()
    assert error("BF16", common.flip(2), NO_ROTATION, key) < 3e-2


def test_a_logit_cap_is_no_place_for_them() -> None:
    key, common = keys_with_much_in_common()
    fmt = PageFormat(DIM, DIM, (Tier(8, 8),), 8)
    manager = PageManager(Geometry(fmt, LAYERS, HEADS, 100, 3, 2, 100), UniformPolicy(), dtype=torch.bfloat16)
    wrapper = ExtendWrapper(manager.ops, key_means=common)
    wrapper.plan(torch.tensor([1]), torch.tensor([0]), torch.tensor([4]), [0], [4])
    with pytest.raises(AssertionError, match="cap"):
        wrapper.run(0, torch.zeros(4, 6, DIM), key[:4], key[:4], Scaling(0.1, 30.0))


def test_files_that_do_not_fit_are_refused(tmp_path) -> None:
    path = tmp_path / "means.safetensors"
    means = torch.randn(3, 4, 64)
    write_key_means(path, means, {"model": "x"})
    assert torch.equal(read_key_means(str(path), 3, 4, 64), means)
    with pytest.raises(ConfigError, match=r"\[3, 4, 64\].*has \[3, 8, 64\]"):
        read_key_means(str(path), 3, 8, 64)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_means(str(tmp_path / "none"), 3, 4, 64)
    path.write_bytes(b"no such format")
    with pytest.raises(ConfigError, match="is not a file of key means"):
        read_key_means(str(path), 3, 4, 64)
    write_key_means(path, means * float("inf"), {})
    with pytest.raises(ConfigError, match="finite"):
        read_key_means(str(path), 3, 4, 64)


@pytest.mark.parametrize(
    ("ranks", "heads", "expected"), [(2, 2, [[0, 1], [2, 3]]), (8, 1, [[0], [0], [1], [1], [2], [2], [3], [3]])]
)
def test_each_rank_has_those_of_its_heads(ranks: int, heads: int, expected: list[list[int]]) -> None:
    means = torch.arange(4.0).view(1, 4, 1)
    assert [of_rank(means, rank, ranks, heads).flatten().tolist() for rank in range(ranks)] == expected


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('{"tiers": ["BF16"], "key_means": "x"}', "BF16 is none"),
        ('{"tiers": ["K8V4"], "policy": {"name": "zipage", "max_blocks": 4}, "key_means": "x"}', "compares keys"),
        ('{"tiers": ["K8V4"], "policy": {"name": "knorm", "budget": 99}, "key_means": "x"}', "norms of their keys"),
        ('{"key_means": ""}', "key_means"),
    ],
)
def test_configurations_without_use_for_them(config: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(config)
