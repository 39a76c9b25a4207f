"""Figure 9: static policies that prune as much as the dynamic one."""

from __future__ import annotations

import pytest

from benchmarks.figures import cases, cli, session, sparsity
from benchmarks.paths import NANO
from sglang_diffkv.evaluate.store import Answer, Store, UsageRecord
from sglang_diffkv.evaluate.task import Outcome
from tests.tools.figures import BASE, figure, servers


@pytest.fixture
def started(monkeypatch):
    """Names of the servers started."""
    return servers(monkeypatch)


LENGTHS = [(200, 400), (1000, 1200), (60, 90), (640, 2640)]


@pytest.mark.parametrize("prompt_only", [True, False])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.25])
def test_equal_pruning_matches_the_share(share, prompt_only):
    fraction, reached = sparsity.matching_fraction(LENGTHS, share, prompt_only)
    assert reached == pytest.approx(share, abs=0.002)
    assert reached == sparsity.predicted_share(LENGTHS, fraction, prompt_only)
    every = [sparsity.predicted_share(LENGTHS, x / 1000, prompt_only) for x in range(1, 1001)]
    assert abs(reached - share) == min(abs(x - share) for x in every)


def test_a_budget_counts_what_the_policy_keeps():
    assert sparsity.predicted_share([(100, 300)], 0.5, prompt_only=False) == 0.5
    assert sparsity.predicted_share([(100, 300)], 0.9, prompt_only=True) == pytest.approx(10 / 300)
    assert sparsity.predicted_share([(100, 100)], 0.1, prompt_only=True) == 0.36, "the window of 64 always stays"


def filled(folder, pruned: float) -> Store:
    """A store with one configuration that pruned a share of the tokens of ``LENGTHS``."""
    store = Store(folder)
    for number, (prompt, total) in enumerate(LENGTHS):
        outcome = Outcome(prompt, total - prompt, right=True)
        store.add(Answer(configuration="d", suite="s", id=str(number), task="t", outcome=outcome))
    totals = {"finished": {"high": 1000 * (1 - pruned), "low": 0.0, "pruned": 1000 * pruned}}
    store.add(UsageRecord(configuration="d", suite="s", run="r", totals=totals))
    return store


def matched(folder, pruned: float) -> tuple[list[cases.Case], session.Session]:
    class Args:
        model, server_args, concurrency, ratio = str(NANO), (), 1, "pages"

    source = cases.Case(cases.Configuration("d"), cases.DYNAMIC, "(-, 0.1)")
    with filled(folder, pruned) as store:
        where = session.Session(Args, [], store)
        return sparsity.equal_pruning(where, source, "BF16"), where


def test_static_policies_get_the_fraction_that_prunes_as_much(tmp_path):
    found, where = matched(tmp_path, 0.2)
    assert [x.series for x in found] == [cases.PROMPT_BUDGET, cases.STEP_BUDGET]
    for case, prompt_only in zip(found, (True, False)):
        policy = case.configuration.diffkv.policy
        assert policy.window == 64 and policy.fraction == case.fraction and case.matched_to == "d"
        assert sparsity.predicted_share(LENGTHS, case.fraction, prompt_only) == pytest.approx(0.2, abs=0.002)
    assert not where.skipped


def test_pruning_out_of_reach_is_named(tmp_path):
    found, where = matched(tmp_path / "a", 0.5)
    assert [x.series for x in found] == [cases.STEP_BUDGET]
    assert "snapkv prunes" in where.skipped["snapkv as (-, 0.1)"] and "50.0%" in where.skipped["snapkv as (-, 0.1)"]
    found, where = matched(tmp_path / "b", 0.0)
    assert not found and "nothing to compare" in where.notes[0]


def test_pruning_figure_measures_the_matched_policies(tmp_path, started):
    args = ["--prune-alpha", "0.1", "--output", str(tmp_path)]
    assert cli.main(["fig9", *BASE, *args]) == 0
    data = figure(tmp_path, "fig9")
    assert [x.series for x in data.points] == ["stock bf16", cases.DYNAMIC], "the prompts are shorter than the window"
    assert len(data.skipped) == 2 and started == ["stock", "diffkv BF16 (-, 0.1) window 64"]


def test_static_policies_run_as_the_dynamic_one_does():
    for series in cases.STATIC:
        case = cases.static(series, "BF16", 0.5, 64, "d")
        assert case.configuration.diffkv.gpu_ops == "triton"
