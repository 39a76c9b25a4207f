"""Shares by layer: attention and retention by hand, sizes as a server finds them, and the command on the nano model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import matplotlib.image
import pytest
import torch

from benchmarks.paths import DATA as SPLITS
from benchmarks.paths import NANO
from sglang_diffkv.calibrate.layers import cli
from sglang_diffkv.calibrate.layers.measure import SHARES, Layers, Rule, score_layers, window_scores
from sglang_diffkv.calibrate.layers.result import LayerProvenance
from sglang_diffkv.calibration import CalibratedPolicy, read_file, resolve
from sglang_diffkv.policies.xkv import XKVPolicy, XKVPolicyConfig
from tests.deciding import classify_prompt
from tests.policies import xkv_policy
from tests.tools.test_calibrate import DATA


def test_scores_are_the_window_s_mean_attention() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(heads, 30, 64, generator=generator) for heads in (6, 3))
    got = window_scores(q, k, 0.125, window=5)
    shown = torch.ones(30, 30).tril().bool()
    attention = (q @ k.repeat_interleave(2, 0).mT * 0.125).masked_fill(~shown, -torch.inf).softmax(-1)
    expected = torch.stack([attention[2 * head : 2 * head + 2, 25:, :25].mean((0, 1)) for head in range(3)])
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("size", [{"keep": 0.3}, {"min_retention": 0.7}])
@pytest.mark.parametrize("pool", [1, 7])
def test_sizes_are_those_that_a_server_finds(size: dict[str, float], pool: int) -> None:
    scores = torch.rand(4, 2, 90, generator=torch.Generator().manual_seed(2)) ** torch.tensor([1, 2, 4, 8]).view(
        4, 1, 1
    )
    found = score_layers(scores[..., :82].contiguous(), Rule(8, pool, **size))
    policy = xkv_policy(window=8, pool=pool, **size)
    tier = classify_prompt(policy, scores, torch.arange(90).expand(4, 2, -1), 90, 1)
    assert (tier[..., :82] == 0).sum(2).tolist() == [[n, n] for n in found.kept.tolist()]
    assert len(set(found.kept.tolist())) > 2
    if "keep" in size:
        assert int(found.kept.sum()) == math.ceil(0.3 * 4 * 82)
    else:
        assert float(found.retained.mean()) >= 0.7 - 1e-4


def test_retention_by_hand() -> None:
    """One layer with half of its importance in one of 100 tokens, and one that is even."""
    scores = torch.ones(2, 1, 100)
    scores[0, 0, 40] = 99.0
    found = score_layers(scores, Rule(8, 1, keep=0.005))
    assert found.kept.tolist() == [1, 0]
    torch.testing.assert_close(found.retained, torch.tensor([0.5, 0.0]).double(), rtol=1e-6, atol=0)
    assert SHARES[:3] == (0.01, 0.02, 0.05)
    expected = torch.tensor([[0.5, 100 / 198, 103 / 198], [0.01, 0.02, 0.05]]).double()
    torch.testing.assert_close(found.at_shares[:, :3], expected, rtol=1e-5, atol=0)
    ratio = Layers([found]).isr()
    assert ratio[:, 0].isnan().all(), "of one token there is no ratio"
    torch.testing.assert_close(ratio[:, 1], expected[:, 1], rtol=1e-5, atol=0)
    torch.testing.assert_close(ratio[:, 2], expected[:, 2] / math.log2(5), rtol=1e-5, atol=0)
    other = score_layers(scores, Rule(8, 1, keep=1.0))
    assert Layers([found, other]).fractions().mean(0).tolist() == pytest.approx([0.505, 0.5])


def command(path: Path, *args: str) -> list[str]:
    task = f"reference={SPLITS / 'calib.jsonl.xz'}"
    return ["--model", str(NANO), "--task", task, "--levels", "easy", "--output", str(path), *args]


@pytest.mark.parametrize("size", ["--keep", "--min-retention"])
def test_the_file_is_taken_by_a_configuration(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layers.json"
    assert cli.main(command(path, "--sample", "0.02", size, "0.4")) == 0
    (content,) = read_file(path).entries
    assert isinstance(content, CalibratedPolicy) and isinstance(content.policy, XKVPolicyConfig)
    found, fractions = LayerProvenance.model_validate(content.provenance), content.policy.layer_fractions
    assert fractions is not None
    assert found.n == math.ceil(0.02 * found.questions) > 1 and found.task_file == "calib.jsonl.xz"
    assert len(fractions) == 6 == len(found.spread) and len(found.retention[0]) == len(SHARES)
    assert len(set(fractions)) == 6, "layers differ"
    if size == "--keep":
        assert sum(fractions) / 6 == pytest.approx(0.4, abs=0.01)
    else:
        assert 0.4 <= sum(found.retained) / 6 < 0.45
    assert all(list(row) == sorted(row) for row in found.retention)
    shown = capsys.readouterr().out
    assert "| layer | R at 1% |" in shown and "ISR at 50%" in shown and f"{found.n} of {found.questions}" in shown
    assert matplotlib.image.imread(path.with_suffix(".png"))[..., :3].std() > 0.05
    given = json.dumps({"thresholds": str(path)})
    assert f"--diffkv-config '{given}'" in shown
    config, origin = resolve(given, NANO)
    config.check_heads(6, 2)
    assert origin.startswith("calibrated for nano, measured with this package")
    assert config.tiers == ("BF16",) and config.build_policy() == xkv_policy(layer_fractions=fractions)


def test_tiers_window_and_pool_are_those_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    more = ["--keep", "0.4", "--n", "2", "--tiers", "k8v4,k4v2", "--high", "0.5", "--window", "16", "--pool", "1"]
    assert cli.main(command(path, *more)) == 0
    config, _ = resolve(json.dumps({"thresholds": str(path), "prefix_fidelity": "exact"}), NANO)
    policy = config.build_policy()
    assert isinstance(policy, XKVPolicy) and (policy.window, policy.pool, policy.high) == (16, 1, 0.5)
    assert (config.tiers, config.prefix_fidelity) == (("K8V4", "K4V2"), "exact")


def test_unfit_files_and_settings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dev, path = tmp_path / "dev.jsonl", tmp_path / "layers.json"
    dev.write_text((DATA / "reference.jsonl").read_text())
    for args, message in [
        (["--task", f"reference={dev}"], "fit on another file"),
        (["--pool", "4"], "pool 4 is even"),
        (["--tiers", "K9V9"], "K9V9"),
        (["--max-tokens", "5"], "no prompt is longer than the window of 8 tokens and within 5"),
        (["--model", str(tmp_path / "none")], "none"),
    ]:
        size = [] if "--keep" in args else ["--keep", "0.5"]
        assert cli.main(command(path, *size, *args)) == 1
        assert message in capsys.readouterr().err
    usual = ["--keep", "0.5"]
    for args in (
        [],
        ["--keep", "1.5"],
        *([*usual, *x] for x in (["--min-retention", "0.5"], ["--sample", "0"], ["--high", "2"])),
    ):
        with pytest.raises(SystemExit):
            cli.main(command(path, *args))
    assert not path.exists()
