"""LeanKV's procedure: the grid, runs in shuffled orders, what is neutral and within the loss, and the command against a
stand-in for the servers."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paths import DATA as SPLITS
from benchmarks.paths import NANO
from sglang_diffkv.calibrate import cli, leankv
from sglang_diffkv.calibrate.arguments import LEAN_HIGHS, LEAN_LOWS, PAPER_TIERS
from sglang_diffkv.calibrate.shuffled import shuffled
from sglang_diffkv.calibration import FILE_NAME, CalibratedPolicy, read_file, resolve
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.evaluate import runner
from sglang_diffkv.evaluate.configuration import STOCK
from sglang_diffkv.evaluate.endpoint import Endpoint
from sglang_diffkv.evaluate.store import Answer, Store
from sglang_diffkv.evaluate.task import Outcome
from sglang_diffkv.evaluate.tasks import TaskFileError, load_task
from sglang_diffkv.evaluate.tasks.generation import Options
from sglang_diffkv.policies.leankv import LeanKVPolicyConfig
from tests.tools.evaluation import REFERENCE, answers, tokenizer
from tests.tools.fake_server import FakeServer

PAIR, LOW_PAIR = PAPER_TIERS


def test_the_grid_is_the_paper_s() -> None:
    lines = leankv.lines(PAPER_TIERS, LEAN_HIGHS, LEAN_LOWS, 64, "none")
    assert {line[0].mass_high for line in lines} == {0.005, 0.01, 0.05, 0.1, 0.2}
    assert {x.mass_low for line in lines for x in line} == {0, 0.001, 0.005, 0.01}
    assert len(lines) == 10 and sum(map(len, lines)) == 2 * (3 + 4 * 4), "mass_low is at most mass_high"
    for line in lines:
        assert [x.mass_low for x in line] == sorted(x.mass_low for x in line)
        assert len({(x.tiers, x.mass_high) for x in line}) == 1
    assert len({x.name for line in lines for x in line}) == 38


def test_runs_are_orders_of_the_same_questions() -> None:
    def runs(n: int, share: float, seed: int = 0) -> Any:
        task = load_task(f"reference={SPLITS / 'calib.jsonl.xz'}", Options(n=n, levels=["easy"]))
        return shuffled(task, tokenizer(), 3, share, seed)

    found = runs(60, 0.25)
    ids = [[x.id for x in suite.questions] for suite in found.chosen_on]
    held = [[x.id for x in suite.questions] for suite in found.held_out]
    assert len({tuple(x) for x in ids}) == len({tuple(x) for x in held}) == 3, "each run has an order of its own"
    assert len({frozenset(x) for x in ids}) == len({frozenset(x) for x in held}) == 1
    assert not set(ids[0]) & set(held[0]) and len(ids[0]) + len(held[0]) == 60 and 8 < len(held[0]) < 24
    assert [[x.id for x in suite.questions] for suite in runs(60, 0.25).chosen_on] == ids, "not by chance"
    more = runs(90, 0.25)
    assert set(ids[0]) < {x.id for x in more.chosen_on[0].questions}
    assert set(held[0]) < {x.id for x in more.held_out[0].questions}
    assert len({x.task.name for x in [*found.chosen_on, *found.held_out]}) == 6
    assert not runs(60, 0.0).held_out and len(runs(60, 0.0).chosen_on[0].questions) == 60
    with pytest.raises(TaskFileError, match="too few questions"):
        runs(1, 0.25)


def test_accuracy_by_hand(tmp_path: Path) -> None:
    task = load_task(REFERENCE, Options(n=4))
    suites = shuffled(task, tokenizer(), 2, 0.0, 0).chosen_on
    ids = sorted(x.id for x in suites[0].questions)
    rights = {STOCK: ((1, 1, 0, 1), (1, 1, 1, 1)), "a": ((1, 0, 0, 1), (0, 0, 1, 1))}
    with Store(tmp_path) as store:
        for name, runs in rights.items():
            for suite, right in zip(suites, runs, strict=True):
                for x, correct in zip(ids, right, strict=True):
                    outcome = Outcome(prompt_tokens=1, right=bool(correct))
                    store.add(Answer(configuration=name, suite=suite.task.name, id=x, task="t", outcome=outcome))
        stock, mine = (leankv.accuracy(store, name, suites) for name in rights)
    assert stock.runs == (0.75, 1.0) and stock.mean == 0.875 and stock.difference == stock.difference_error == 0
    assert mine.runs == (0.5, 0.5) and mine.difference == -0.375
    assert mine.difference_error == pytest.approx(statistics.stdev([-0.5, -1, 0, 0]) / math.sqrt(4))


class StandIn:
    """Starts a stand-in for every server. ``wrong``: questions, in the file's order, that each run gets wrong."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.asked: dict[str, int] = {}
        self.orders: dict[str, list[tuple[int, ...]]] = {}
        self.default_share = 0.399

    def wrong(self, policy: LeanKVPolicyConfig | None, tiers: tuple[str, ...], run: int) -> set[int]:
        first = set() if run % 2 else {0}  # rounding: of every second run
        if policy is None:
            return first
        lost = {1} if policy.mass_high > 0.05 else set()
        lost |= {1, 2} if tiers == LOW_PAIR else set()
        lost |= {3, 4, 5} if policy.mass_low > 0.001 else {6} if policy.mass_low else set()
        return first | lost

    @contextmanager
    def __call__(self, configuration: Any, model: str, args: Any) -> Iterator[Endpoint]:
        name, config = configuration.name, configuration.diffkv
        self.started.append(name)
        policy, tiers = (None, ()) if config is None else (config.policy, config.tiers)
        known = list(answers().items())

        def reply(ids: Any) -> str:
            wrong = {known[i][0] for i in self.wrong(policy, tiers, fake.flushes)}
            return "Answer: ?" if tuple(ids) in wrong else f"Answer: {answers()[tuple(ids)][1]}"

        share = None if config is None else self.default_share  # without a policy of its own
        if policy is not None:
            share = 0.4 - 0.1 * (tiers == LOW_PAIR) - 0.5 * policy.mass_high - 2 * policy.mass_low
        with FakeServer(reply, share=share) as fake:
            yield Endpoint.connect(fake.url, owned=True)
            self.asked[name] = self.asked.get(name, 0) + len(fake.requests)
            self.orders.setdefault(name, []).extend(tuple(x["input_ids"]) for x in fake.requests)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(runner, "start", found)
    monkeypatch.setattr(cli, "load_tokenizer", lambda path: tokenizer())
    return found


def command(folder: Path, *args: str) -> list[str]:
    paths = ["--work", str(folder / "work"), "--output", str(folder / FILE_NAME)]
    return ["--model", str(NANO), "--task", REFERENCE, "--procedure", "leankv", "--concurrency", "1", *paths, *args]


def read(folder: Path) -> CalibratedPolicy:
    (entry,) = read_file(folder / FILE_NAME).entries
    assert isinstance(entry, CalibratedPolicy)
    return entry


ALL = ("--held-out", "0", "--runs", "4")


def test_what_is_neutral_and_what_loses_little(tmp_path: Path, stand_in: StandIn, capsys: Any) -> None:
    """bf16 has one of 8 wrong in every second run, a deviation of 7.2 points: one question more in all runs is within
    three of them, two are not."""
    assert cli.main(command(tmp_path, *ALL, "--tolerance", "40")) == 0
    entry = read(tmp_path)
    about = leankv.LeanProvenance.model_validate(entry.provenance)
    assert about.bf16.runs == (1.0, 0.875, 1.0, 0.875) and about.bf16.mean == 0.9375
    assert about.bf16_deviation == pytest.approx(statistics.stdev(about.bf16.runs))
    policy = entry.config().policy
    assert isinstance(policy, LeanKVPolicyConfig)
    assert (entry.tiers, policy.mass_high, policy.mass_low, policy.window) == (PAIR, 0.2, 0.0, 64)
    lost = {x: round(-8 * grid.difference) for x, grid in zip(map(_name, about.grid), about.grid)}
    assert lost["K8V4-K4V2 mass_high=0.2 mass_low=0"] == 1 and lost["K8V4-K4V2 mass_high=0.2 mass_low=0.001"] == 2
    assert lost["K4V2-K4V1 mass_high=0.2 mass_low=0.001"] == 3
    assert about.choices["loss"].setting == "K4V2-K4V1 mass_high=0.2 mass_low=0.001"
    assert about.choices["loss"].allowed == pytest.approx(0.4 * 0.9375)
    assert about.choices["neutral"].allowed == pytest.approx(3 * about.bf16_deviation)
    out = capsys.readouterr().out
    assert "8 questions of reference/reference, 4 runs in random orders; bf16's deviation over runs: 7.22 points" in out
    assert "| nano | perf-neutral | 27.0% | 30.0% | K8V4-K4V2 mass_high=0.2 mass_low=0 | -12.5 ± 12.5 |" in out
    assert "|  | 40% perf-loss | 17.8% | 19.8% | K4V2-K4V1 mass_high=0.2 mass_low=0.001 | -37.5 ± 18.3 |" in out
    assert stand_in.asked[STOCK] == 4 * 8
    orders = [tuple(stand_in.orders[STOCK][8 * run : 8 * run + 8]) for run in range(4)]
    assert len(set(orders)) == 4 and {frozenset(x) for x in orders} == {frozenset(answers())}


def _name(point: leankv.LeanPoint) -> str:
    return leankv.LeanSetting(point.tiers, point.mass_high, point.mass_low).name


def test_the_other_target_is_written_without_asking_again(tmp_path: Path, stand_in: StandIn) -> None:
    assert cli.main(command(tmp_path, *ALL, "--tolerance", "40")) == 0
    del stand_in.started[:]
    assert cli.main(command(tmp_path, *ALL, "--tolerance", "40", "--target", "loss")) == 0
    assert not stand_in.started
    entry = read(tmp_path)
    assert entry.tiers == LOW_PAIR and entry.provenance["target"] == "loss"
    given = json.dumps({"thresholds": str(tmp_path / FILE_NAME), "page_tokens": 16})
    config, origin = resolve(given, NANO)
    assert config.tiers == LOW_PAIR and config.page_tokens == 16 and "calibrated for nano, measured" in origin
    assert config.policy == LeanKVPolicyConfig(mass_high=0.2, mass_low=0.001)
    assert resolve(None, tmp_path)[0] == DiffKVConfig(), "what prunes is not taken unasked"


def test_what_is_chosen_answers_questions_that_no_choice_saw(tmp_path: Path, stand_in: StandIn, capsys: Any) -> None:
    args = ["--held-out", "0.5", "--runs", "2", "--mass-high", "0.01", "0.1", "--mass-low", "0", "--whole-grid"]
    assert cli.main(command(tmp_path, *args)) == 0
    about = leankv.LeanProvenance.model_validate(read(tmp_path).provenance)
    chosen = {x.setting for x in about.choices.values()}
    assert about.bf16_held_out is not None and about.bf16.n + about.bf16_held_out.n == 8
    assert len(about.grid) == 4
    fit, held = 2 * about.bf16.n, 2 * about.bf16_held_out.n
    for name, asked in stand_in.asked.items():
        assert asked == fit + held * (name in chosen | {STOCK}), name
    for choice in about.choices.values():
        assert choice.held_out is not None and choice.held_out.n == about.bf16_held_out.n
    assert f"(n = {about.bf16_held_out.n})" in capsys.readouterr().out


def test_several_jobs_write_the_same_file(tmp_path: Path, stand_in: StandIn, capsys: Any) -> None:
    written = []
    for jobs in ("1", "3"):
        folder = tmp_path / jobs
        assert cli.main(command(folder, *ALL, "--jobs", jobs, "--mass-high", "0.01", "0.2")) == 0
        written.append((capsys.readouterr().out.replace(str(folder), ""), (folder / FILE_NAME).read_text()))
    assert written[0] == written[1]


def test_a_target_that_nothing_meets(tmp_path: Path, stand_in: StandIn, capsys: Any) -> None:
    """bf16 never differs, so neutral is no loss at all, which K4V2-K4V1 has."""
    stand_in.wrong = lambda policy, tiers, run: set() if policy is None else {1}  # type: ignore[method-assign]
    args = [*ALL, "--tiers", "k4v2,k4v1", "--mass-high", "0.1", "--mass-low", "0"]
    assert cli.main(command(tmp_path, *args)) == 1
    found = capsys.readouterr()
    assert "no setting is within the target 'neutral'" in found.err and "| nano | perf-neutral | none |" in found.out
    assert not (tmp_path / FILE_NAME).exists()
    assert cli.main(command(tmp_path, *args, "--target", "loss", "--tolerance", "13")) == 0
    assert cli.main(command(tmp_path, *args, "--target", "loss", "--tolerance", "13", "--margin", "1")) == 1


def test_a_plain_server_is_a_row_and_what_it_outdoes_is_not_written(
    tmp_path: Path, stand_in: StandIn, capsys: Any
) -> None:
    stand_in.wrong = lambda policy, tiers, run: set() if policy is None else {1}  # type: ignore[method-assign]
    stand_in.default_share = 0.1
    args = [
        *ALL,
        "--tiers",
        "k4v2,k4v1",
        "--mass-high",
        "0.1",
        "--mass-low",
        "0",
        "--target",
        "loss",
        "--tolerance",
        "13",
    ]
    assert cli.main(command(tmp_path, *args)) == 1 and not (tmp_path / FILE_NAME).exists()
    found = capsys.readouterr()
    assert "is not written: a plain server loses less at fewer bytes" in found.err
    rows = [line for line in found.out.splitlines() if line.startswith("| ")]
    stock = next(row for row in rows if row.startswith("| stock"))
    assert rows[rows.index(stock) + 1].startswith("| default (diffkv) | 100.0 |")
    assert stand_in.started[1] == "default (diffkv)"


def test_settings_are_rotated_as_a_plain_server_does() -> None:
    assert leankv.LeanSetting(PAIR, 0.1, 0.0).rotate == DiffKVConfig(tiers=PAIR).rotate == "both"
    assert leankv.LeanSetting(("K8V4",), 0.1, 0.0).rotate == "none"


def test_options_of_another_procedure_are_refused(tmp_path: Path, capsys: Any) -> None:
    for args, message in [
        (["--alpha-high", "1"], "--alpha-high does not go with --procedure leankv"),
        (["--sinks", "2"], "--sinks does not go"),
        (["--window", "64", "128"], "takes one choice of --window"),
        (["--runs", "1"], "--runs is a number from 2 on"),
        (["--procedure", "paper", "--mass-high", "0.1"], "--mass-high does not go with --procedure paper"),
    ]:
        with pytest.raises(SystemExit):
            cli.main(command(tmp_path, *args))
        assert message in capsys.readouterr().err


def test_what_is_for_reporting_is_not_fitted_to(tmp_path: Path, capsys: Any) -> None:
    args = command(tmp_path, "--task", f"reference={SPLITS / 'dev.jsonl.xz'}")
    assert cli.main(args) == 1 and "fit on another file" in capsys.readouterr().err
