"""Low tiers by layer: the fewest bytes that hold a limit, and the tool that measures what layers lose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.paths import NANO
from benchmarks.quality.random_windows import WINDOW, make_gemma3, make_gpt_oss
from sglang_diffkv import ladder, layer_tiers
from sglang_diffkv.attention.emulated import AS_COMPUTED, Fp8, Stored
from sglang_diffkv.calibrate import emulated, tiers
from sglang_diffkv.config import load_config
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.ladder import ALPHA_HIGH
from sglang_diffkv.layer_tiers import KEYS, VALUES, Given, LayerLoss, fewest_bytes, low_bytes
from sglang_diffkv.layout.page_format import Tier

LOW = [Tier.parse(x) for x in ("K6V4", "K5V4", "K4V3", "K3V2")]
HIGH = Tier.parse("K8V6")
ONE = LayerLoss((0.016, 0.032), (0.004, 0.001))


def drawn(count: int, seed: int, spread: float = 3.0) -> list[LayerLoss]:
    """Layers that differ by up to ``e^(2 spread)``."""
    numbers = torch.empty(count, 4).uniform_(-spread, spread, generator=torch.Generator().manual_seed(seed)).exp()
    return [LayerLoss((a, b), (c, d)) for a, b, c, d in (1e-3 * numbers).tolist()]


def test_each_bit_takes_three_quarters_of_a_loss() -> None:
    assert ONE.at(Tier(KEYS.k_bits, VALUES.v_bits)) == pytest.approx((0.02, 0.033))
    assert ONE.at(Tier(5, 4)) == pytest.approx((0.02 / 16, 0.033 / 16))
    assert ONE.at(Tier(4, 2)) == pytest.approx((0.008, 0.009))
    assert LayerLoss((-1e-3, 1e-3), (1e-3, -1e-3)).at(Tier(3, 2)) == (1e-3, 1e-3), "chance makes no gain"


def total(layers: Sequence[LayerLoss], given: Sequence[Tier], part: int) -> float:
    return sum(layer.at(tier)[part] for layer, tier in zip(layers, given, strict=True))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [0.1, 0.3, 1.0])
def test_nearly_the_fewest_bytes_that_hold_a_limit(seed: int, size: float) -> None:
    """Beside all that there are, of a few layers."""
    layers, shares = drawn(5, seed), [1.0, 0.25, 1.0, 1.0, 0.5]
    limit = (size * total(layers, [LOW[-1]] * 5, 0), 0.7 * size * total(layers, [LOW[-1]] * 5, 1))
    found = fewest_bytes(layers, shares, LOW, 128, limit)
    assert found is not None
    given = [found.tiers[at] for at in found.of]
    assert found.loss == pytest.approx((total(layers, given, 0), total(layers, given, 1)))
    assert all(lost <= most for lost, most in zip(found.loss, limit)) and len(found.tiers) <= 3

    def size_of(given: Sequence[Tier]) -> float:
        return sum(share * low_bytes(tier, 128) for share, tier in zip(shares, given)) / sum(shares)

    assert found.size == pytest.approx(size_of(given))
    best = min(
        size_of(x)
        for x in product(LOW, repeat=5)
        if len(set(x)) <= 3 and all(total(layers, x, part) <= limit[part] for part in range(2))
    )
    assert best <= found.size <= 1.04 * best


def test_what_a_layer_gains_counts_by_the_bytes_that_it_takes() -> None:
    """Either of two layers may be raised: the one that loses less holds a tenth of the tokens."""
    layers, limit = [LayerLoss((x, x), (0.0, 0.0)) for x in (0.012, 0.010)], (0.015, 0.015)
    found = fewest_bytes(layers, [1.0, 0.1], LOW[-2:], 64, limit)
    assert found is not None and [found.tiers[at].name for at in found.of] == ["K3V2", "K4V3"]


def test_a_limit_that_nothing_holds() -> None:
    assert fewest_bytes([ONE] * 3, [1.0] * 3, LOW, 64, (1e-6, 1.0)) is None
    assert fewest_bytes([ONE] * 3, [1.0] * 3, LOW, 64, (0.0, 0.0)) is None
    nothing = LayerLoss((0.0, 0.0), (0.0, 0.0))
    found = fewest_bytes([nothing] * 3, [1.0] * 3, LOW, 64, (0.0, 0.0))
    assert found is not None and found.tiers[found.of[0]].name == "K3V2" and found.size == low_bytes(LOW[-1], 64)


def test_no_two_tiers_of_one_size() -> None:
    """Pages could not tell which goes first."""
    candidates = [Tier.parse(x) for x in ("K5V3", "K4V4", "K3V2", "K2V3")]
    for sets in layer_tiers._sets(candidates, 128):
        sizes = [low_bytes(x, 128) for x in sets]
        assert sizes == sorted(set(sizes), reverse=True)


@pytest.mark.parametrize(
    ("of", "used"),
    [
        ((2, 0, 1, 1, 2, 0), ["K6V4", "K5V4", "K3V2"]),
        ((0, 2, 2, 0, 0, 0), ["K6V4", "K3V2"]),
        ((1,) * 6, ["K5V4"]),
    ],
)
def test_a_configuration_says_which_layer_has_which(of: tuple[int, ...], used: list[str]) -> None:
    given = Given((LOW[0], LOW[1], LOW[3]), of, (0.0, 0.0), 0.0)
    config = load_config(json.dumps(given.fields(HIGH)))
    config.check_heads(6, 2)
    assert list(config.tiers) == ["K8V6", *used]
    policy = config.build_policy()
    assert policy.scored_tiers(len(config.tiers)) == 1, "no byte more a token"
    for layer, place in enumerate(of):
        ours = [config.tiers[x] for x in policy.prompt.used_tiers(len(config.tiers), layer)]  # type: ignore[attr-defined]
        assert ours == ["K8V6", given.tiers[place].name]
    assert config.policy is not None and config.policy.alpha_high == ALPHA_HIGH  # type: ignore[union-attr]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(emulated, "READ", 512)
    path = tmp_path / "text.txt"
    path.write_text(ladder.text_of(ladder.JUDGING) * 2, encoding="utf-8")
    return path


def run(text: Path, *more: str, model: Path = NANO, tokens: int = ladder.LEAST_TOKENS) -> int:
    output = text.parent / "tiers.json"
    args = ["--model", str(model), "--text", str(text), "--n", "1", "--held-out", "1", "--window-tokens", str(tokens)]
    return tiers.main([*args, "--output", str(output), *more])


def test_the_tool_holds_the_limit(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the passage that it chose from; and the file that it writes is a configuration."""
    sizes = []
    for share, more in (("0.5", ()), ("1", ("--noise-shaping",))):
        assert run(text, "--fp8-share", share, *more) == 0
        said = capsys.readouterr().out
        config = load_config(str(text.parent / "tiers.json"))
        config.check_heads(6, 2)
        assert config.rotate == "both" and config.key_means == "auto" and (config.noise_shaping == "auto") == bool(more)
        words = said.split("they lose ")[1].split()
        prompt, reply, fp8 = float(words[0]), float(words[3]), said.split("; FP8 ")[1].split()
        assert prompt <= float(share) * float(fp8[0]) + 0.01 and reply <= float(share) * float(fp8[2]) + 0.01
        assert "On 1 other passages" in said and "| chosen |" in said and "--diffkv-config" in said
        sizes.append(float(said.split(" of bf16's bytes")[0].split()[-1]))
    assert sizes[0] > sizes[1]


def test_what_nothing_rounds_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all tries, as far as there is room for it; losses are the same."""
    monkeypatch.setattr(emulated, "READ", 512)
    judge = emulated.Judge(str(NANO), None)
    passages = [list(range(10 + x, 10 + x + ladder.LEAST_TOKENS)) for x in range(2)]
    read: list[Stored] = []
    logits = judge.logits

    def counted(ids: Sequence[int], stored: Stored) -> torch.Tensor:
        read.append(stored)
        return logits(ids, stored)

    monkeypatch.setattr(judge, "logits", counted)
    tries = [judge.on(passages, {emulated.FP8: Fp8()})[emulated.FP8] for _ in range(3)]
    assert len([x for x in read if x is AS_COMPUTED]) == 2
    monkeypatch.setattr(emulated, "KEPT_BYTES", judge.as_computed(passages[0]).nbytes)
    judge._as_computed.clear()
    read.clear()
    tries += [judge.on(passages, {emulated.FP8: Fp8()})[emulated.FP8] for _ in range(3)]
    assert len([x for x in read if x is AS_COMPUTED]) == 4, "there is room for one"
    for found in tries[1:]:
        assert all(torch.equal(x, y) for a, b in zip(found, tries[0]) for x, y in zip(a, b))


def test_layers_that_slide_hold_less(text: Path, tmp_path: Path) -> None:
    make_gemma3(tmp_path / "gemma")
    args = tiers.parse_args(
        ["--model", str(tmp_path / "gemma"), "--tokenizer", str(NANO), "--text", str(text), "--n", "1", "--held-out"]
        + ["1", "--window-tokens", "1024", "--context", str(4 * WINDOW), "--output", str(tmp_path / "x.json")]
    )
    calibration = tiers.Calibration(args)
    assert set(calibration.shares) == {0.25, 1.0} and len(calibration.shares) == calibration.judge.layers


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--low", "BF16"), "BF16 rounds nothing"),
        (("--low", "K9V9"), "impossible tier"),
        (("--low", "K8V8"), "--low K8V8 takes no fewer bytes than the high tier K8V6"),
        (("--fp8-share", "0"), "--fp8-share"),
        (("--window-tokens", "100"), "--window-tokens must be at least"),
    ],
)
def test_wrong_options(text: Path, more: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(text, *more)
    assert said in capsys.readouterr().err


def judged(layers: list[LayerLoss], losses: list[tuple[float, float]]) -> Any:
    """A calibration whose configurations lose what is given, one after the other."""
    told = iter([(1.0, 1.0), *losses])  # FP8's is among the layers'

    def lost(passages: Any, ways: Any, what: str) -> dict[str, Any]:
        prompt, reply = next(told)
        return {tiers.CHOSEN: [(torch.tensor([prompt]), torch.tensor([reply]))]}

    return SimpleNamespace(
        args=SimpleNamespace(fp8_share=1.0, low=LOW, high=HIGH), layers=lambda: (layers, next(told)),
        shares=[1.0] * len(layers), head_dim=64, stored=lambda x: x, judge=SimpleNamespace(on=lost), fit=[],
    )  # fmt: skip


def test_a_part_that_loses_nothing_bears_the_other() -> None:
    """A configuration that loses too much in replies and nothing in prompts is followed by one of more bytes."""
    layers = [LayerLoss((0.0, 0.4), (0.0, 0.1)) for _ in range(4)]
    given, lost, _ = tiers.choose(judged(layers, [(0.0, 1.5), (0.0, 0.9)]))
    assert lost == pytest.approx((0.0, 0.9)) and given.loss[1] <= 0.97 / 1.5


def test_numbers_that_are_not_finite_choose_nothing() -> None:
    """FP8's loss is infinite then, and would be a limit that anything holds."""
    inf, one = torch.tensor([float("inf")]), torch.tensor([1.0])
    found = {name: [(inf, one)] for name in (tiers.FP8, "K3V8 0", "K8V2 0")}
    calibration = tiers.Calibration.__new__(tiers.Calibration)
    for name, value in {
        "args": SimpleNamespace(model="m"), "judge": SimpleNamespace(layers=1, on=lambda *x: found), "fit": [],
        "stored": lambda x: Stored((HIGH,)),
    }.items():  # fmt: skip
        setattr(calibration, name, value)
    with pytest.raises(EvaluationError, match="m gives numbers that are not finite"):
        calibration.layers()


def test_what_cannot_be_done_is_said(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(text, "--held-out", "90") == 1
    assert "passages of 1024 tokens, and 1 + 90 are asked for" in capsys.readouterr().err
    assert run(text, "--low", "K2V1") == 1
    assert "name some with more bits" in capsys.readouterr().err
    make_gpt_oss(tmp_path / "sinks")
    assert run(text, "--tokenizer", str(NANO), model=tmp_path / "sinks") == 1
    assert "attention sinks are not emulated" in capsys.readouterr().err
    assert not (tmp_path / "tiers.json").exists()
