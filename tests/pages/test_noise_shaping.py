"""Matrices that shape the noise of codes: attention stays the same, the error lies where it counts less, and files that
do not fit are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_diffkv.attention.emulated import Stored, stored_of
from sglang_diffkv.attention.whole import Sight, attention_rows, error_weights
from sglang_diffkv.attention.wrappers import ExtendWrapper
from sglang_diffkv.config import load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.kernels.rotate.fitted import NOT_FITTED, FittedTransform
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation, rotated
from sglang_diffkv.key_means import SINKS
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.page_format import PageFormat, Tier
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.noise_shaping import (
    FREE_STRETCH,
    MOST_STRETCH,
    Moments,
    NoiseShaping,
    balanced,
    fitted_to,
    output_products,
    read_noise_shaping,
    with_free_direction,
    write_noise_shaping,
)
from sglang_diffkv.ops import Scaling
from sglang_diffkv.policies.uniform import UniformPolicy
from tests.pages.test_key_means import DIM, GROUP, HEADS, LAYERS, error, keys_with_much_in_common

BOTH = Rotation(True, True)


def uneven(count: int, dim: int, spread: float, seed: int) -> torch.Tensor:
    """[count, dim] of which some directions, unlike the axes, are larger than others by up to ``e^spread``."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64)).Q
    sizes = torch.linspace(-spread / 2, spread / 2, dim, dtype=torch.float64).exp()
    return torch.randn(count, dim, generator=generator, dtype=torch.float64) * sizes @ basis


def moment(x: torch.Tensor) -> torch.Tensor:
    return x.mT @ x / x.shape[-2]


def stretched(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random symmetric matrices [..., dim, dim] float32 with an inverse."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(*shape, generator=generator)).Q
    sizes = torch.empty(shape[:-1]).uniform_(-1, 1, generator=generator).exp()
    return (basis * sizes.unsqueeze(-2)) @ basis.mT


@pytest.mark.parametrize("dim", [5, 64, 96])
def test_what_reads_and_what_is_stored_are_balanced(dim: int) -> None:
    reads, stored = moment(uneven(4 * dim, dim, 2, 1)), moment(uneven(4 * dim, dim, 2, 2))
    found = balanced(reads, stored)
    torch.testing.assert_close(found, found.mT)
    assert abs(float(torch.logdet(found))) < 1e-6
    back = torch.linalg.inv(found)
    kept, read = found @ stored @ found, back @ reads @ back
    assert (kept / kept.trace() - read / read.trace()).norm() < 0.05 * (read / read.trace()).norm()
    loss, before = float(kept.trace() * read.trace()), float(stored.trace() * reads.trace())
    assert loss < 0.8 * before
    for seed in range(20):  # no other one near it loses less, but for what the shrinkage takes
        other = found + 0.05 * stretched(dim, dim, seed=seed).double()
        undone = torch.linalg.inv(other)
        assert float((other @ stored @ other.mT).trace() * (undone.mT @ reads @ undone).trace()) > 0.995 * loss


def test_stretch_is_limited() -> None:
    reads, stored = (torch.diag(torch.logspace(-9, 9, 12, dtype=torch.float64)) for _ in range(2))
    found = balanced(reads, stored.flip(0, 1))
    assert torch.linalg.cond(found) < MOST_STRETCH * 1.001
    assert torch.equal(
        balanced(torch.zeros(2, 7, 7).double(), torch.zeros(2, 7, 7).double()), torch.eye(7).double().expand(2, 7, 7)
    )


@pytest.mark.parametrize("rotation", [BOTH, NO_ROTATION])
@pytest.mark.parametrize("dim", [64, 96])
def test_the_direction_of_most_becomes_that_of_the_zero_point(dim: int, rotation: Rotation) -> None:
    """With the Hadamard matrix behind the matrices, and without it. Others are as long as before."""
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).Q
    sizes = torch.linspace(1, 2, dim, dtype=torch.float64)
    sizes[5] = 9.0
    stored, reads = (turn * sizes.square()) @ turn.mT, torch.eye(dim, dtype=torch.float64)
    before = balanced(reads, stored)
    found = with_free_direction(before, stored).float().expand(1, 1, dim, dim)
    transform = NoiseShaping(found, found).transform(torch.float32, "cpu", rotation)
    assert transform.keys is not None and transform.queries is not None
    went = turn[:, 5].float() @ transform.keys[0, 0]
    length = float(went.norm())
    torch.testing.assert_close(went.abs(), torch.full((dim,), length * dim**-0.5), rtol=1e-3, atol=1e-4)
    assert (went > 0).all() or (went < 0).all()
    assert length == pytest.approx(FREE_STRETCH * float((turn[:, 5] @ before).norm()), rel=1e-3)
    other = turn[:, 7].float()
    assert float((other @ transform.keys[0, 0]).norm()) == pytest.approx(float((turn[:, 7] @ before).norm()), rel=1e-3)
    torch.testing.assert_close(
        (went[None] @ transform.queries[0, 0].mT).squeeze(0), turn[:, 5].float(), rtol=1e-3, atol=1e-3
    )


def test_what_the_zero_point_takes_costs_no_codes() -> None:
    """Keys that vary mostly along one direction are stored as well as without it."""
    drawn = torch.randn(3, 200, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    along = 30 * torch.randn(3, 200, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    key, even = drawn + along * torch.eye(64, dtype=torch.float64)[9], torch.eye(64).double().expand(3, 64, 64)
    errors = []
    for x, fit in ((key, balanced), (key, fitted_to), (drawn, balanced)):
        found = fit(even, moment(x)).float()[None]
        fitted = NoiseShaping(found).transform(torch.float32, "cpu", BOTH)
        forms = Stored((Tier(4, 4),), None, NO_ROTATION, None, fitted, turned=(True, True)).keys(x.float(), 0)
        errors.append(float((forms.stored[0] - forms.computed).square().mean()))
    assert errors[1] < 0.6 * errors[0] and errors[1] < 1.1 * errors[2]


def vectors(count: int, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of a layer, some directions larger than others."""
    q = uneven(count * HEADS * GROUP, DIM, 4, 7).view(count, HEADS * GROUP, DIM)
    return q, *(uneven(count * HEADS, DIM, 4, seed + layer).view(count, HEADS, DIM) for seed in (8, 20))


def moments(layers: int = LAYERS, count: int = 400) -> Moments:
    """Of tokens that count alike, behind sinks that do not."""
    found = Moments()
    weights = torch.ones(HEADS, count)
    weights[:, :SINKS] = 0
    for layer in range(layers):
        q, key, value = vectors(count, layer)
        for x in (q, key, value):
            x[:SINKS] = 1e4
        found.add(3 * layer + 1, q, key + 30, value, weights)
    return found


def test_moments_are_of_tokens_behind_the_sinks_without_what_keys_share() -> None:
    shaping = moments(1).fit({})
    assert shaping.keys.shape == (1, HEADS, DIM, DIM) and shaping.values is None and not shaping.impossible()
    q, key, _ = (x[SINKS:] for x in vectors(400))
    key = key - key.mean(0)
    for head in range(HEADS):
        mine = q[:, head * GROUP : (head + 1) * GROUP].flatten(0, 1)
        torch.testing.assert_close(shaping.keys[0, head], fitted_to(moment(mine), moment(key[:, head])).float())
    with pytest.raises(ValueError, match="layers of one shape"):
        Moments().fit({})


def test_tokens_that_attention_looks_at_count_more() -> None:
    """A few keys that lie along one direction: what is stored of it is larger before it is rounded, or smaller. If they
    count for more than all others, it is the zero point's."""
    q, key, value = vectors(400)
    key[50:60] = torch.randn(10, HEADS, 1, generator=torch.Generator().manual_seed(1)) * 20 * torch.eye(DIM)[3]
    sizes, uneven_numbers = [], []
    for weight in (0.0, 1.0, 100.0):
        weights = torch.ones(HEADS, 400)
        weights[:, 50:60] = weight
        found = Moments()
        found.add(0, q, key, value, weights)
        stored = rotated(torch.eye(DIM)[3] @ found.fit({}).keys[0])  # [H, DIM]
        sizes.append(float(stored.norm()))
        uneven_numbers.append(float(stored.std(1).max() / stored.norm(dim=1).max()))
    assert sizes[0] > sizes[1] and sizes[2] < FREE_STRETCH * sizes[1]
    assert uneven_numbers[2] < 0.03 < min(uneven_numbers[:2])


def test_errors_count_by_what_they_move_of_attention() -> None:
    q, key, _ = (x.transpose(0, 1).float() for x in vectors(700))
    found = error_weights(q, key, 0.1, Sight(window=90))
    every = torch.cat([x for _, x in attention_rows(q, key, 0.1, Sight(window=90))], 1)[:, 1::2]
    torch.testing.assert_close(found, (every * (1 - every)).unflatten(0, (HEADS, GROUP)).sum((1, 2)))
    assert error_weights(q[:, :9], key[:, :9], 0.1).shape == (HEADS, 9)


def test_weights_behind_attention_are_summed_over_query_heads() -> None:
    weight = torch.randn(10, 6 * 5, generator=torch.Generator().manual_seed(1))
    found = output_products(weight, 2, 5)
    for head in range(2):
        mine = [weight[:, 5 * x : 5 * x + 5].double() for x in range(3 * head, 3 * head + 3)]
        torch.testing.assert_close(found[head], sum(x.mT @ x for x in mine), rtol=1e-5, atol=1e-5)


def random_shaping(*, values: bool) -> NoiseShaping:
    keys, other = (stretched(LAYERS, HEADS, DIM, DIM, seed=x) for x in (2, 3))
    return NoiseShaping(keys, other if values else None)


@pytest.mark.parametrize(
    ("values", "rotation", "with_means", "group"),
    [(False, BOTH, False, 1), (True, BOTH, True, GROUP), (True, NO_ROTATION, True, 1)],
)
def test_attention_stays(values: bool, rotation: Rotation, with_means: bool, group: int) -> None:
    """In prompts of several chunks and in decode steps, with the Hadamard matrix and with key means."""
    key, common = keys_with_much_in_common()
    means, shaping = common if with_means else None, random_shaping(values=values)
    fitted, left = shaping.transform(torch.bfloat16, "cpu", rotation, group), shaping.left_of(rotation)
    assert left == (Rotation(values=True) if rotation == BOTH and not values else NO_ROTATION)
    assert error("BF16", means, left, key, fitted=fitted) < 3e-2
    assert error("BF16", means, left, key, 24, fitted=fitted) < 3e-2, "a sliding layer"


@pytest.mark.parametrize("tiers", ["K8V8", "K8V6 K4V3"])
@pytest.mark.parametrize(("rotation", "group"), [(NO_ROTATION, 1), (BOTH, GROUP)])
def test_what_keys_have_in_common_is_not_rounded_with_them(tiers: str, rotation: Rotation, group: int) -> None:
    """It is hundreds of times larger than what they differ by, and comes off before the product."""
    common = torch.zeros(LAYERS, HEADS, DIM)
    common[..., [3, 20, 41]] = torch.tensor([300.0, -210.0, 120.0])
    drawn = torch.randn(60, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    near, far = drawn.bfloat16(), (common[1] + drawn).bfloat16()
    shaping = random_shaping(values=True)
    fitted = shaping.transform(torch.bfloat16, "cpu", rotation, group)
    without = error(tiers, None, NO_ROTATION, near, fitted=fitted)
    assert error(tiers, common, NO_ROTATION, far, fitted=fitted) < 1.2 * without
    for attention_span in (5, 24):
        alone = error(tiers, None, NO_ROTATION, near, attention_span, fitted=fitted)
        assert error(tiers, common, NO_ROTATION, far, attention_span, fitted=fitted) < 1.2 * alone
    by_head = shaping.transform(torch.bfloat16, "cpu", rotation)
    found = Stored((Tier(8, 8),), None, NO_ROTATION, common, by_head).keys(far.transpose(0, 1), 1)
    assert (found.stored[0] - far.transpose(0, 1).float()).norm() < 0.02 * drawn.norm(), "as it is emulated"


def test_logit_caps_do_not_bear_means_that_come_off_first() -> None:
    common = torch.ones(LAYERS, HEADS, DIM)
    manager = PageManager(
        Geometry(PageFormat(DIM, DIM, (Tier(8, 8),), 8), LAYERS, HEADS, 100, 3, 2, 100), UniformPolicy(),
        dtype=torch.bfloat16,
    )  # fmt: skip
    fitted = random_shaping(values=False).transform(torch.bfloat16, "cpu")
    wrapper = ExtendWrapper(manager.ops, key_means=common, fitted=fitted)
    wrapper.plan(torch.tensor([1]), torch.tensor([0]), torch.tensor([4]), [0], [4])
    q, key = torch.zeros(4, HEADS * GROUP, DIM).bfloat16(), torch.zeros(4, HEADS, DIM).bfloat16()
    with pytest.raises(AssertionError, match="cap"):
        wrapper.run(0, q, key, key, Scaling(0.1, 30.0))
    with pytest.raises(AssertionError, match="sink"):
        wrapper.run(0, q, key, key, Scaling(0.1), torch.zeros(HEADS * GROUP))


@pytest.mark.parametrize("dim", [64, 96])
def test_the_hadamard_matrix_comes_behind(dim: int) -> None:
    """In one product, blocks where the dimension is no power of two."""
    keys, values = (stretched(1, 2, dim, dim, seed=x) for x in (1, 2))
    shaping = NoiseShaping(keys, values)
    key, value = (torch.randn(2, 30, dim, generator=torch.Generator().manual_seed(x)) for x in (3, 4))
    once = shaping.transform(torch.float32, "cpu", BOTH)
    apart = FittedTransform(keys, values, torch.linalg.inv(keys).mT, torch.linalg.inv(values))
    assert once.keys is not None and apart.keys is not None and once.values is not None and apart.values is not None
    torch.testing.assert_close(key @ once.keys[0], rotated(key @ apart.keys[0]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(value @ once.values[0], rotated(value @ apart.values[0]), rtol=1e-4, atol=1e-4)
    config = load_config('{"tiers": ["K4V3"], "rotate": "both", "noise_shaping": "auto"}')
    stored = stored_of(config, None, shaping, torch.float32)
    both = replace(stored, rotation=BOTH, fitted=apart)
    for mine, other in ((stored.keys(key, 0), both.keys(key, 0)), (stored.values(value, 0), both.values(value, 0))):
        found, expected = (float((x.stored[0] - x.computed).norm()) for x in (mine, other))
        assert found == pytest.approx(expected, rel=1e-3) and found < 0.4 * float(mine.computed.norm())


def test_pages_lose_less_where_queries_hardly_look() -> None:
    """Over pages as a server has them: the queries of ``error`` look everywhere alike, so keys must have the spread."""
    key = torch.stack([uneven(60, DIM, 6, head) for head in range(HEADS)], 1).bfloat16()
    even = torch.eye(DIM).double().expand(HEADS, DIM, DIM)
    found = balanced(even, moment(key.transpose(0, 1).double())).float().expand(LAYERS, HEADS, DIM, DIM)
    shaped = NoiseShaping(found).transform(torch.bfloat16, "cpu")
    rotation = Rotation(keys=True)
    assert error("K4V8", None, rotation, key, fitted=shaped) < 0.75 * error("K4V8", None, rotation, key)


@pytest.mark.parametrize("with_means", [False, True])
def test_new_tokens_are_emulated_behind_their_matrices(with_means: bool) -> None:
    """Logits, and values, have the rounding of the products, as those of pages have."""
    shaping, common = random_shaping(values=True), keys_with_much_in_common()[1]
    q, key, value = (x.bfloat16() for x in vectors(50))
    means = common if with_means else None
    stored = Stored((Tier(8, 8),), None, NO_ROTATION, means, shaping.transform(torch.bfloat16, "cpu", BOTH))
    less = key if means is None else key - means[1].bfloat16()
    asked, kept, held = shaping.transform(torch.bfloat16, "cpu", BOTH, GROUP).turn(1, q, less, value)
    fitted = stored.fitted
    assert fitted.outputs is not None

    def logits(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Less what softmax does not see. [Hq, N, D] and [H, N, D]."""
        found = queries.float() @ keys.float().repeat_interleave(GROUP, 0).mT
        return found - found.mean(2, keepdim=True)

    by_head = q.transpose(0, 1)
    expected = logits(asked.transpose(0, 1), kept.transpose(0, 1))
    found = logits(stored.asked(by_head, 1), stored.keys(key.transpose(0, 1), 1).computed)
    plain = logits(by_head, key.transpose(0, 1))
    assert (found - expected).norm() < 1e-4 * expected.norm() < 0.1 * (plain - expected).norm()
    values = stored.values(value.transpose(0, 1), 1).computed
    torch.testing.assert_close(values, held.transpose(0, 1).float() @ fitted.outputs[1].float())


def test_the_emulation_loses_less_too() -> None:
    """What queries make of the error of keys, and weights behind attention of that of values."""
    looks = {}
    weight = uneven(300, DIM, 4, 5).float()
    shaping = moments().fit({3 * x + 1: output_products(weight.repeat(1, HEADS), HEADS, DIM) for x in range(LAYERS)})
    q = uneven(500, DIM, 4, 7).float()
    key, value = (uneven(200 * HEADS, DIM, 4, x).view(200, HEADS, DIM).transpose(0, 1) for x in (9, 21))
    shaped = shaping.transform(torch.float32, "cpu", BOTH)
    for name, rotation, fitted in (("plain", BOTH, NOT_FITTED), ("shaped", NO_ROTATION, shaped)):
        stored = Stored((Tier(4, 4),), None, rotation, None, fitted)
        keys, values = stored.keys(key.float(), 1), stored.values(value.float(), 1)
        looks[name] = (
            float(((keys.stored[0] - keys.computed) @ q.T).square().mean()),
            float(((values.stored[0] - values.computed) @ weight.T).square().mean()),
        )
    assert looks["shaped"][0] < 0.6 * looks["plain"][0] and looks["shaped"][1] < 0.6 * looks["plain"][1]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    for values in (stretched(3, 2, 5, 5, seed=1), None):
        shaping = NoiseShaping(stretched(3, 2, 8, 8), values)
        write_noise_shaping(path, shaping, {"text": "x"})
        found = read_noise_shaping(str(path), 3, 2, 8, 5)
        assert torch.equal(found.keys, shaping.keys) and (found.values is None) == (values is None)
    for shape, said in (
        ((3, 2, 16, 5), r"keys of \[3, 2, 8, 8\], this model takes \[3, 2, 16, 16\]"),
        ((4, 2, 8, 5), "keys of"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_noise_shaping(str(path), *shape)
    save_file({"other": stretched(3, 2, 8, 8)}, path)
    with pytest.raises(ConfigError, match="no file of matrices"):
        read_noise_shaping(str(path), 3, 2, 8, 5)
    path.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="no file of matrices"):
        read_noise_shaping(str(path), 3, 2, 8, 5)


GOOD = stretched(3, 2, 8, 8)
SIZE = "times as long, or under"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (GOOD * float("nan"), "not finite"), (GOOD * 0, SIZE), (GOOD * 100, SIZE), (GOOD / 100, SIZE),
        (GOOD * torch.eye(8)[:7].sum(0) * torch.eye(8)[:7].sum(0)[:, None], SIZE),
        (torch.diag(torch.logspace(-1, 1, 8)).expand(3, 2, 8, 8), SIZE),
    ],
    ids=["nan", "zeros", "large", "small", "singular", "stretch"],
)  # fmt: skip
def test_damaged_files(bad: torch.Tensor, said: str, tmp_path: Path) -> None:
    """One matrix among good ones is enough, of keys or of values."""
    path = tmp_path / "s.safetensors"
    one = GOOD.clone()
    one[2, 1] = bad[2, 1]
    for shaping in (NoiseShaping(bad), NoiseShaping(one), NoiseShaping(GOOD, one)):
        write_noise_shaping(path, shaping, {})
        with pytest.raises(ConfigError, match=said):
            read_noise_shaping(str(path), 3, 2, 8, 8)


def test_a_direction_that_lapack_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are of no use then, which ``impossible`` says, and a start goes on without."""
    even, eigh, calls = torch.eye(8).double().expand(1, 2, 8, 8), torch.linalg.eigh, iter([1, 1, 1, 1, 0])

    def fails(x: torch.Tensor) -> object:
        if next(calls):
            return eigh(x)
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    assert NoiseShaping(fitted_to(even, even).float()).impossible() == "numbers that are not finite"
    assert next(calls, None) is None, "the last one failed"


def test_what_is_fitted_is_never_taken_for_damaged() -> None:
    """As far as a fit goes, in single precision."""
    sizes = torch.logspace(-9, 9, 64, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    for moment_ in (sizes.diag(), (turn * sizes) @ turn.mT, torch.zeros(64, 64).double()):
        other = moment_.flip(0, 1)
        found = torch.stack([fitted_to(moment_, other), fitted_to(other, moment_)]).float()[None]
        assert NoiseShaping(found, found).impossible() == ""


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ('"tiers": ["BF16"]', "noise_shaping serves quantised tiers, and BF16 is none: drop noise_shaping"),
        ('"key_rotation": "x.pt"', "noise_shaping and key_rotation both fit matrices"),
        ('"value_rotation": "x.pt"', "noise_shaping and value_rotation both fit matrices"),
        ('"tiers": ["K8V4"], "policy": {"name": "knorm", "budget": 99}', "norms of their keys, which noise_shap"),
        ('"tiers": ["K8V4"], "policy": {"name": "zipage", "max_blocks": 4}', "compares keys with each other: drop noi"),
        ('"thresholds": "auto"', "decides on them too; drop noise_shaping"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(fields: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(f'{{"noise_shaping": "auto", {fields}}}')
    assert load_config('{"noise_shaping": "auto"}').rotation == BOTH, "the Hadamard matrix comes behind it"
