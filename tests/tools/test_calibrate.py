"""The calibration search on made-up accuracies, and the command against a stand-in for the server."""

from __future__ import annotations

import json
import random
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from threading import Barrier

import pytest

from benchmarks.paths import NANO
from sglang_diffkv.calibrate import cli
from sglang_diffkv.calibrate.heads import fit
from sglang_diffkv.calibrate.heads.result import HeadScaleFile
from sglang_diffkv.calibrate.search import DEFAULT, Search, Setting, grid, grid_starts, paper
from sglang_diffkv.calibration import FILE_NAME, GridPoint, lookup, policy_fields, read_file, resolve
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.evaluate import runner
from sglang_diffkv.evaluate.endpoint import Endpoint
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from tests.tools.fake_server import FakeServer

DATA = Path(__file__).parents[1] / "data" / "evaluate"
PAIR = ("K8V4", "K4V2")
OFF = Setting(("K8V4",), None, 0.0)
HIGHS, LOWS = (1.0, 2.0, 3.0, 4.0, 5.0), (0.0, 0.02, 0.04)


def point(setting: Setting, difference: float, error: float = 0.0) -> GridPoint:
    """A made-up measurement: a higher alpha saves more, a second tier saves, pruning saves."""
    high = 0.0 if setting.alpha_high is None else 0.02 + 0.01 * setting.alpha_high
    ratio = 0.45 - high - 0.5 * setting.alpha_low
    return GridPoint(
        tiers=setting.tiers, alpha_high=setting.alpha_high, alpha_low=setting.alpha_low, n=100,
        accuracy=0.9 + difference, accuracy_error=0.03, difference=difference, difference_error=error, p=0.5,
        ratio_pages=ratio, ratio_tokens=ratio,
    )  # fmt: skip


def search(losses: dict[tuple[float | None, float], float], error: float = 0.0, **options: float) -> Search:
    """A search over settings whose losses are given by (alpha_high, alpha_low), 0.5 elsewhere."""

    def measure(setting: Setting) -> GridPoint:
        return point(setting, -losses.get((setting.alpha_high, setting.alpha_low), 0.5), error)

    return Search(measure, 0.01, **options)


def tried(found: Search) -> list[tuple[float | None, float]]:
    return [(setting.alpha_high, setting.alpha_low) for setting in found.tried]


def test_paper_takes_the_largest_saving_within_the_tolerance():
    losses = {(None, 0.0): 0.0, (1.0, 0.0): 0.0, (2.0, 0.0): 0.004, (3.0, 0.0): 0.01, (4.0, 0.0): 0.011}
    found = search(losses)
    assert paper(found, PAIR, HIGHS, LOWS) == Setting(PAIR, 3.0, 0.0)
    assert tried(found) == [(3.0, 0.0), (None, 0.0), (1.0, 0.0), (2.0, 0.0), (4.0, 0.0), (3.0, 0.02)]


def test_paper_prunes_at_the_chosen_alpha_high():
    losses = {(None, 0.0): 0.0, (1.0, 0.0): 0.0, (1.0, 0.02): 0.01, (1.0, 0.04): 0.02}
    assert paper(search(losses), PAIR, HIGHS, LOWS) == Setting(PAIR, 1.0, 0.02)


def test_paper_turns_the_low_tier_off_where_it_costs_too_much():
    found = search({(None, 0.0): 0.0, (None, 0.02): 0.005, (None, 0.04): 0.008})
    assert paper(found, PAIR, HIGHS, LOWS) == Setting(("K8V4",), None, 0.04)
    assert tried(found) == [(3.0, 0.0), (None, 0.0), (1.0, 0.0), (None, 0.02), (None, 0.04)]


def test_nothing_is_chosen_where_the_high_tier_alone_is_too_lossy():
    found = search({})
    assert paper(found, PAIR, HIGHS, LOWS) is None
    assert all(setting.alpha_low == 0 for setting in found.tried)


def test_a_loss_within_two_standard_errors_of_the_tolerance_goes_on():
    losses = {(None, 0.0): 0.0, (1.0, 0.0): 0.03, (2.0, 0.0): 0.005, (3.0, 0.0): 0.04}
    found = search(losses, error=0.012, margin=0.0)
    assert paper(found, PAIR, HIGHS, [0.0]) == Setting(PAIR, 2.0, 0.0)
    assert tried(found) == [(3.0, 0.0), (None, 0.0), (1.0, 0.0), (2.0, 0.0)]


@pytest.mark.parametrize(("margin", "chosen"), [(0.0, 3.0), (1.0, 2.0), (2.0, 1.0), (3.0, None)])
def test_a_loss_stays_below_the_tolerance_by_a_margin(margin, chosen):
    losses = {(1.0, 0.0): 0.002, (2.0, 0.0): 0.005, (3.0, 0.0): 0.01}
    found = grid(search(losses, error=0.003, margin=margin, whole=True), grid_starts([PAIR], HIGHS), [0.0])
    assert (found and found.alpha_high) == chosen


def test_the_whole_grid_is_measured_if_asked_for():
    found = search({(None, 0.0): 0.0, (5.0, 0.0): 0.0}, whole=True)
    assert paper(found, PAIR, HIGHS, [0.0]) == Setting(PAIR, 5.0, 0.0)
    assert len(found.tried) == 6


def test_grid_tries_all_pairs_once():
    found = search({(high, low): 0.0 for high in (None, 0.01, *HIGHS) for low in LOWS})
    best = grid(found, grid_starts([PAIR, ("K8V4",), ("K8V4", "K4V4")], [2.0, 0.01, 1.0]), LOWS)
    assert best == Setting(PAIR, 2.0, 0.04)
    by_tiers = [s.tiers for s in found.tried]
    assert by_tiers.count(PAIR) == 1 + 7 and by_tiers.count(("K8V4", "K4V4")) == 7, "alpha_low never above alpha_high"
    assert by_tiers.count(("K8V4",)) == 3


def test_grid_tries_windows_rotations_sinks_and_horizons():
    found = search({(high, 0.0): 0.0 for high in (1.0, 2.0)})
    choices = ([64, 128], ["none", "keys"], [0, 4], [0, 256])
    grid(found, grid_starts([PAIR], [1.0, 2.0], *choices), [0.0])
    assert [(s.alpha_high, s.window, s.rotate, s.sinks, s.horizon) for s in list(found.tried)[1:]] == [
        (high, *rest) for rest in product(*choices) for high in (1.0, 2.0)
    ]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("procedure", ["paper", "grid"])
def test_several_jobs_try_and_choose_the_same(procedure, whole):
    """What lies behind the end of a line may be within the tolerance, and must not be chosen."""
    chances, behind = random.Random(0), 0

    def go(losses: dict[Setting, float], jobs: int) -> tuple[Search, Setting | None, list[Setting]]:
        ahead: list[Setting] = []

        def measure(setting: Setting) -> GridPoint:
            return point(setting, -losses.setdefault(setting, chances.choice([0.0, 0.009, 0.02])))

        found = Search(measure, 0.01, 1.0, whole, jobs, ahead.extend)
        if procedure == "paper":
            return found, paper(found, PAIR, HIGHS, LOWS), ahead
        return found, grid(found, grid_starts([PAIR, ("K8V4",)], HIGHS, [64, 128]), LOWS), ahead

    for _ in range(50):
        losses: dict[Setting, float] = {}
        one, chosen, _ = go(losses, 1)
        for jobs in (2, 3, 40):
            several, same, ahead = go(losses, jobs)
            assert same == chosen and list(several.tried.items()) == list(one.tried.items())
            assert set(ahead) >= several.tried.keys()
            assert len(ahead) == len(set(ahead)), "each is asked for once"
            behind += len(set(ahead) - several.tried.keys())
    assert behind == 0 if whole else behind > 0


def test_the_next_values_of_all_lines_are_measured_at_once():
    batches: list[list[tuple[float | None, float]]] = []

    def ahead(settings):
        batches.append([(x.alpha_high, x.alpha_low) for x in settings])

    found = search({(high, low): 0.0 for high in (1.0, 2.0, 4.0) for low in LOWS if high < 4})
    found.jobs, found.measure_ahead = 4, ahead
    grid(found, grid_starts([PAIR], [1.0, 2.0, 4.0]), LOWS)
    assert batches == [[(3, 0), (1, 0), (2, 0), (4, 0)], [(1, 0.02), (1, 0.04), (2, 0.02), (2, 0.04)]]


@pytest.mark.parametrize("procedure", ["paper", "grid"])
def test_a_search_begins_at_what_a_plain_server_runs(procedure):
    """Whatever it is asked to search; and what is left out is as a plain server has it."""
    default = Setting(PAIR, 3.0, 0.0)
    config = DiffKVConfig.model_validate(
        {
            **{"tiers": default.tiers, "rotate": default.rotate},
            "policy": policy_fields(3.0, 0.0, default.window, default.sinks, default.horizon),
        }
    )
    assert config.whole() == DiffKVConfig().whole() and default == DEFAULT
    for tiers in (PAIR, ("K8V4",), ("K4V2",), ("BF16", "K8V4")):
        assert Setting(tiers, 1.0, 0.0).rotate == DiffKVConfig(tiers=tiers).rotate
    found = search({(high, 0.0): 0.0 for high in (None, 5.0)}, whole=True)
    if procedure == "paper":
        paper(found, ("K8V4",), [5.0], [0.0], window=64, sinks=0)
    else:
        grid(found, grid_starts([("K8V4",), ("K8V4", "K4V4")], [5.0], [64], ["keys"], [0]), [0.0])
    assert next(iter(found.tried)) == default


def test_what_is_worse_at_more_bytes_is_never_chosen():
    """Also if what is better is less sure, and so not within the tolerance by the margin."""

    def measure(setting: Setting) -> GridPoint:
        loss, error = {None: (0.008, 0.001), 1.0: (0.001, 0.001), 2.0: (0.009, 0.0001), 3.0: (0.005, 0.02)}[
            setting.alpha_high
        ]
        return point(setting, -loss, error)

    found = Search(measure, 0.01)
    chosen = grid(found, grid_starts([("K8V4",), PAIR], [1.0, 2.0]), [0.0])
    assert [found.within(x) for x in found.tried.values()] == [False, True, True, True]
    assert chosen == Setting(PAIR, 1.0, 0.0) and found.outdone(Setting(PAIR, 2.0, 0.0))
    alone = Search(measure, 0.01)
    assert grid(alone, grid_starts([("K8V4",)], []), [0.0]) is None and alone.outdone(OFF)


def test_of_equal_bytes_the_smaller_loss_is_chosen():
    losses = {64: 0.004, 128: 0.001}
    found = Search(lambda x: point(x, -losses.get(x.window, 0.5)), 0.01)
    assert grid(found, grid_starts([PAIR], [5.0], [64, 128]), [0.0]).window == 128


def test_names_tell_settings_apart():
    settings = [OFF, Setting(PAIR, 1.0, 0.0), Setting(PAIR, 1.0, 0.02), Setting(("K8V4", "K4V4"), 1.0, 0.02)]
    settings += [
        Setting(PAIR, 1.0, 0.0, 128),
        Setting(PAIR, 1.0, 0.0, 64, "keys"),
        Setting(PAIR, 1.0, 0.0, sinks=8),
        Setting(PAIR, 1.0, 0.0, horizon=4),
        Setting(PAIR, 1.0, 0.0, heads=True),
    ]
    assert len({setting.name for setting in settings}) == 9


@pytest.fixture
def servers(monkeypatch):
    """A stand-in for every server: the lower the tier, the more questions it gets wrong."""
    tokenizer = load_tokenizer(NANO)
    with (DATA / "reference.jsonl").open(encoding="utf-8") as lines:
        items = [json.loads(line) for line in lines]
    answers = {tuple(chat_ids(tokenizer, x["prompt"])): x["answer"] for x in items}
    started: list[str] = []

    @contextmanager
    def start(configuration, model, args):
        started.append(configuration.name)
        policy = None if configuration.diffkv is None else configuration.diffkv.policy
        two = configuration.diffkv is not None and len(configuration.diffkv.tiers) > 1
        lost = 0 if policy is None else (policy.alpha_high > 2) * two + 4 * (policy.alpha_low > 0)
        known = dict(list(answers.items())[lost:])
        share = None if policy is None else 0.45 - (0.05 * min(policy.alpha_high, 5) * two) - policy.alpha_low
        if policy is not None and policy.head_scale is not None:
            share -= 0.01
        with FakeServer(lambda ids: f"Answer: {known.get(tuple(ids))}", share=share) as fake:
            yield Endpoint.connect(fake.url, owned=True)

    monkeypatch.setattr(runner, "start", start)
    monkeypatch.setattr(cli, "load_tokenizer", lambda path: tokenizer)
    return started


def command(folder: Path, *args: str) -> list[str]:
    paths = ["--work", str(folder / "work"), "--output", str(folder / FILE_NAME)]
    return ["--model", str(NANO), "--task", f"reference={DATA / 'reference.jsonl'}", *paths, *args]


def test_the_result_is_found_by_lookup(tmp_path, servers, capsys):
    assert cli.main(command(tmp_path, "--tolerance", "10")) == 0
    found = lookup(tmp_path)
    assert found is not None and (found.tiers, found.alpha_high, found.alpha_low) == (PAIR, 2.0, 0.0)
    assert found.models == ("nano",) and found.source == "measured" and found.geometry is not None
    assert found.chosen is not None and found.chosen.difference == 0
    provenance = found.provenance
    assert provenance is not None and provenance.n == 8 and provenance.task_file == "reference.jsonl"
    assert provenance.bf16_accuracy == 1.0 and len(provenance.task_sha256) == 64
    points = {(x.alpha_high, x.alpha_low): x.difference for x in provenance.grid}
    assert points == {
        (None, 0.0): 0,
        (1, 0): 0,
        (2, 0): 0,
        (3, 0): -0.125,
        (4, 0): -0.125,
        (5, 0): -0.125,
        (2, 0.02): -0.5,
    }
    out = capsys.readouterr().out
    assert "| K8V4-K4V2 alpha_high=2 alpha_low=0 | 100.0 ± 0.0 | +0.0 ± 0.0 (p = 1) |" in out
    assert out.count("chosen") == 1 and out.count("too lossy") == 4 and out.count("the default |") == 1
    default = next(x for x in out.splitlines() if "the default |" in x)
    assert default.startswith("| K8V4-K4V2 alpha_high=3 alpha_low=0 |")
    assert read_file(tmp_path / FILE_NAME).entries == (found,)


@pytest.mark.parametrize("procedure", ["paper", "grid"])
def test_several_jobs_write_the_same_file(tmp_path, servers, capsys, procedure):
    written = []
    for jobs in ("1", "3"):
        folder = tmp_path / jobs
        args = ["--tolerance", "10", "--procedure", procedure, "--concurrency", "1", "--jobs", jobs]
        assert cli.main(command(folder, *args)) == 0
        written.append((capsys.readouterr().out.replace(str(folder), ""), (folder / FILE_NAME).read_text()))
    assert written[0] == written[1]
    assert servers[0] == "stock" and servers.count("stock") == 2


def test_stock_is_asked_beside_the_first_settings(tmp_path, servers, monkeypatch):
    together, start = Barrier(3), runner.start

    @contextmanager
    def meet(configuration, model, args):
        if configuration.name in ("stock", "K8V4-K4V2 alpha_high=3 alpha_low=0", "K8V4 alpha_low=0"):
            together.wait(20)
        with start(configuration, model, args) as endpoint:
            yield endpoint

    monkeypatch.setattr(runner, "start", meet)
    assert cli.main(command(tmp_path, "--alpha-high", "1", "--alpha-low", "0", "--jobs", "3")) == 0


def test_a_search_goes_on_where_it_stopped(tmp_path, servers):
    cli.main(command(tmp_path, "--alpha-high", "1", "--alpha-low", "0"))
    default = "K8V4-K4V2 alpha_high=3 alpha_low=0"
    assert servers == ["stock", default, "K8V4 alpha_low=0", "K8V4-K4V2 alpha_high=1 alpha_low=0"]
    cli.main(command(tmp_path, "--alpha-high", "1", "2", "--alpha-low", "0"))
    assert servers[4:] == ["K8V4-K4V2 alpha_high=2 alpha_low=0"]


def test_a_wider_tolerance_saves_more(tmp_path, servers):
    grid_args = ["--procedure", "grid", "--tiers", "k8v4,k4v4", "--tiers", "K8V4", "--alpha-high", "2", "4"]
    assert cli.main(command(tmp_path, *grid_args, "--alpha-low", "0", "0.1", "--tolerance", "13", "--margin", "0")) == 0
    found = lookup(tmp_path)
    assert found is not None and (found.tiers, found.alpha_high, found.alpha_low) == (("K8V4", "K4V4"), 4.0, 0.0)


def test_window_rotation_sinks_and_horizon_are_kept(tmp_path, servers):
    args = ["--alpha-high", "1", "--alpha-low", "0", "--window", "128", "--rotate", "keys"]
    args += ["--sinks", "2", "--horizon", "99"]
    assert cli.main(command(tmp_path, *args)) == 0
    assert servers[-1] == "K8V4-K4V2 alpha_high=1 alpha_low=0 window=128 rotate=keys sinks=2 horizon=99"
    found = lookup(tmp_path)
    assert found is not None and (found.window, found.rotate, found.chosen.window) == (128, "keys", 128)
    config, _ = resolve('{"thresholds": "calibrated", "page_tokens": 16}', tmp_path)
    assert (config.policy.window, config.rotate, config.page_tokens) == (128, "keys", 16)
    assert found.sinks == found.chosen.sinks == config.policy.sinks == 2
    assert found.horizon == found.chosen.horizon == config.policy.horizon == 99


def test_factors_by_head_are_served_and_kept(tmp_path, servers, capsys):
    factors = tmp_path / "factors.json"
    args = command(tmp_path, "--alpha-high", "1", "--alpha-low", "0", "--head-scale", str(factors))
    assert cli.main(args) == 1 and "factors.json" in capsys.readouterr().err
    factors.write_text("[[1, 0]]")
    assert cli.main(args) == 1 and "a number from 1e-06 to 1e+06" in capsys.readouterr().err
    factors.write_text(json.dumps([[1, 0.5]] * 6))
    assert cli.main(args) == 0
    found = lookup(tmp_path)
    assert found is not None and found.head_scale == found.config().policy.head_scale == ((1.0, 0.5),) * 6


def test_factors_are_fitted_at_every_setting(tmp_path, servers, capsys, monkeypatch):
    args = ["--procedure", "grid", "--alpha-high", "1", "1e9", "--alpha-low", "0", "--window", "16"]
    args += ["--fit-heads", "2", "--tolerance", "10"]
    assert cli.main(command(tmp_path, *args)) == 0
    plain = [f"K8V4-K4V2 alpha_high={high} alpha_low=0 window=16" for high in ("1", "1e+09")]
    default = "K8V4-K4V2 alpha_high=3 alpha_low=0"
    assert servers == ["stock", default, *plain, f"{plain[0]} heads"], "nothing to gain where none is high"
    found = lookup(tmp_path)
    assert found is not None and (found.alpha_high, found.chosen.heads) == (1.0, True)
    written = {x.stem: HeadScaleFile.model_validate_json(x.read_text()) for x in (tmp_path / "work/heads").iterdir()}
    assert set(written) == set(plain) and found.head_scale == written[plain[0]].head_scale
    assert found.config().policy.head_scale == found.head_scale
    about = written[plain[0]].provenance
    assert (about.n, about.rule["policy"]["alpha_high"], about.rule["policy"]["window"]) == (2, 1, 16)

    monkeypatch.setattr(fit, "load_model", lambda path: pytest.fail("fitted again"))
    del servers[:]
    assert cli.main(command(tmp_path, *args)) == 0 and not servers
    capsys.readouterr()
    assert cli.main(command(tmp_path, *args, "--fit-heads", "1")) == 1
    assert "fitted to other questions" in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["--procedure", "grid", "--head-scale", "x"]])
def test_fitting_heads_needs_the_grid_and_no_factors_given(tmp_path, args):
    with pytest.raises(SystemExit):
        cli.main(command(tmp_path, "--fit-heads", "2", *args))


def test_nothing_within_the_tolerance_writes_nothing(tmp_path, servers, capsys):
    args = ["--procedure", "grid", "--alpha-high", "5", "--alpha-low", "0.02"]
    assert cli.main(command(tmp_path, *args)) == 1
    assert not (tmp_path / FILE_NAME).exists()
    assert "no setting is within 1 points of bf16" in capsys.readouterr().err


def test_unfit_files_and_settings_are_refused(tmp_path, servers, capsys):
    dev = tmp_path / "dev.jsonl"
    dev.write_text((DATA / "reference.jsonl").read_text())
    refused = [
        (["--task", f"reference={dev}"], "fit on another file"),
        (["--task", f"wikitext={DATA / 'prose.txt'}"], "right and wrong answers"),
        (["--tiers", "K8V4,K9V2"], "K9V2"),
        (["--base", '{"rotate": "keys"}'], "--base sets rotate"),
    ]
    for args, message in refused:
        assert cli.main(command(tmp_path, *args)) == 1
        assert message in capsys.readouterr().err
