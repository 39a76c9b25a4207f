"""The search for thresholds that give a wanted share."""

import json

import pytest

from benchmarks.budget import Budget
from benchmarks.serving import pin_shares
from benchmarks.serving.backends import pinned_backends


@pytest.mark.parametrize("wanted", [0.05, 0.34, 0.6, 0.97])
def test_search_for_a_share(wanted):
    measured = []

    def share(alpha):
        measured.append(alpha)
        return 1 / (1 + (alpha / 0.3) ** 1.7)

    trials = pin_shares.search(share, [wanted], 0.02, 12)
    assert abs(trials[pin_shares.nearest(trials, wanted)] - wanted) <= 0.02
    assert len(measured) == len(trials) <= 9


def test_search_shares_its_trials_and_ends():
    trials = pin_shares.search(lambda alpha: 1 / (1 + alpha), [0.34, 0.6], 0.02, 20)
    assert len(trials) <= 8
    assert len(pin_shares.search(lambda alpha: 0.9, [0.5], 0.02, 50)) < 10  # no threshold gives it
    assert len(pin_shares.search(lambda alpha: float(alpha < 2), [0.5], 0.02, 5)) == 5


def test_first_thresholds_are_measured_together(monkeypatch):
    args = pin_shares.parse_args(["--high", "0.34", "--first", "0.5", "1", "2"])
    asked = []

    def run(backends, points, setup, budget, add):
        for backend in backends:
            asked.append(backend.config.policy.alpha_high)
            share = 1 / (1 + asked[-1])
            add({"status": "ok", **dict.fromkeys(pin_shares.SHARES, 0.0), "share_high": share})

    monkeypatch.setattr(pin_shares, "run_together", run)
    meter = pin_shares.Meter(args, None, Budget(None))
    known = meter.together(args.first)
    assert asked == [0.5, 1.0, 2.0] and known == {alpha: 1 / (1 + alpha) for alpha in asked}
    assert pin_shares.search(lambda alpha: pytest.fail("known well enough"), [0.34], 0.02, 5, known) == known
    assert len(meter.records) == 3 and meter.together([]) == {}


def test_pinned_configurations(tmp_path):
    args = pin_shares.parse_args(
        ["--high", "0.34", "0.6", "--config", '{"page_tokens": 16}', "--output", str(tmp_path)]
    )
    meter = pin_shares.Meter(args, None, Budget(None))
    trial = {"share_low": 0.6, "share_pruned": 0.0, "ratio_pages": 0.4, "ratio_tokens": 0.4}
    meter.records = [{"alpha_high": 3.0, "share_high": 0.35, **trial}]
    args.argv = []
    data = pin_shares.result(args, meter)
    assert data["missed"] == [0.6] and data["configs"]["high0.34"]["policy"]["alpha_high"] == 3.0
    path = tmp_path / "shares.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"no thresholds were found for the high shares \[0.6\]"):
        pinned_backends(path, "llama3-8b")
    path.write_text(json.dumps({**data, "missed": []}))
    (backend,) = pinned_backends(path, "llama3-8b")
    assert backend.name == "high0.34" and backend.config.page_tokens == 16
    with pytest.raises(ValueError, match=r"was found for llama3-8b, not for qwen2\.5-32b"):
        pinned_backends(path, "qwen2.5-32b")


@pytest.mark.parametrize("argv", [["--high", "1.5"], ["--high", "0.5", "--config", '{"tiers": ["K8V4"]}'], []])
def test_search_command_line_refuses(argv):
    with pytest.raises(SystemExit):
        pin_shares.parse_args(argv)
