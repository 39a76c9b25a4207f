"""The figures' measurements on stand-in servers, and what is drawn from them."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from threading import Barrier

import pytest

from benchmarks import redraw
from benchmarks.figures import breakdown, cases, cli, pareto, precision, style, thresholds
from benchmarks.figures.cases import Thresholds, diffkv, uniform
from benchmarks.figures.data import FigureData
from benchmarks.paths import NANO
from sglang_diffkv.evaluate import runner
from sglang_diffkv.evaluate.server import ServerError
from sglang_diffkv.evaluate.store import Store
from tests.tools.evaluation import REFERENCE
from tests.tools.figures import BASE, figure, point, servers

USUAL = "rotated both sinks 4"
"""Of the built-in defaults, in a configuration's name."""


@pytest.fixture
def started(monkeypatch):
    """Names of the servers started."""
    return servers(monkeypatch)


def test_precisions_with_their_mirror_images(tmp_path, started):
    assert cli.main(["fig8", *BASE, "--output", str(tmp_path)]) == 0
    data = figure(tmp_path, "fig8")
    assert started == ["stock", *precision.TIERS]
    assert [x.label for x in data.points] == ["bf16", *precision.TIERS]
    found = {x.label: x for x in data.points}
    assert (found["K4V8"].series, found["K8V2"].series) == (cases.MORE_VALUES, cases.MORE_KEYS)
    assert (found["K8V4"].accuracy, found["K4V2"].accuracy, found["K4V2"].difference) == (1.0, 6 / 8, -2 / 8)
    assert (found["K8V4"].ratio_pages, found["bf16"].ratio_pages) == (pytest.approx(0.4, abs=0.01), 1.0)
    bars = sorted((found[x] for x in ("K2V4", "K4V1", "K4V8", "K4V2", "bf16", "K8V4")), key=precision.order)
    assert [x.label for x in bars] == ["bf16", "K8V4", "K4V8", "K4V2", "K2V4", "K4V1"], "mirror images side by side"
    assert (data.model, data.points[0].n) == ("nano", 8)


def test_figures_share_answers_and_a_broken_run_goes_on(tmp_path, started, monkeypatch):
    args = [*BASE, "--output", str(tmp_path), "--tiers", "K8V4", "--alpha-high", "0", "1", "--alpha-low", "0"]

    working = runner.start

    def start(configuration, model, args):
        if configuration.name == "K8V4":
            raise ServerError("no memory")
        return working(configuration, model, args)

    with monkeypatch.context() as broken:
        broken.setattr(runner, "start", start)
        assert cli.main(["fig8", *args]) == 1
    assert started == ["stock"] and not (tmp_path / "fig8.json").exists()
    assert cli.main(["fig8", "fig10", *args]) == 0
    assert started == ["stock", "K8V4", f"diffkv K8V4-K4V2 (1, 0) {USUAL}", f"diffkv K8V4-K4V2 (3, 0) {USUAL}"]
    assert cli.main(["fig10", "fig11", "--parts", "uniform", "thresholds", *args]) == 0
    assert len(started) == 4, "all answers were there"
    labels = [(x.series, x.label) for x in figure(tmp_path, "fig10").points]
    assert labels == [
        ("stock bf16", "bf16"),
        (cases.ALPHA_HIGH, "low tier off"),
        (cases.ALPHA_HIGH, "(1, 0)"),
        (cases.ALPHA_LOW, "(3, 0)"),
    ]


def test_several_jobs_draw_the_same(tmp_path, started, monkeypatch):
    args = [*BASE, "--parts", "uniform", "thresholds", "--concurrency", "1", "--alpha-high", "0", "3"]
    assert cli.main(["fig8", "fig11", *args, "--output", str(tmp_path / "1")]) == 0
    alone, working = list(started), runner.start
    together = Barrier(3)

    @contextmanager
    def start(configuration, model, args):
        if configuration.name in ("stock", *precision.TIERS[:2]):
            together.wait(20)
        with working(configuration, model, args) as endpoint:
            yield endpoint

    monkeypatch.setattr(runner, "start", start)
    started.clear()
    assert cli.main(["fig8", "fig11", *args, "--jobs", "3", "--output", str(tmp_path / "3")]) == 0
    assert sorted(started) == sorted(alone), "each configuration once"
    for name in ("fig8", "fig11"):
        one, three = (figure(tmp_path / jobs, name).model_dump(exclude={"about"}) for jobs in ("1", "3"))
        assert one == three


def test_a_skipped_fp8_is_named_in_the_figure(tmp_path, started, capsys):
    assert cli.main(["fig11", "--parts", "uniform", "--tiers", "K8V4", *BASE, "--output", str(tmp_path)]) == 0
    data = figure(tmp_path, "fig11")
    assert data.skipped.keys() == {"fp8"} and "measured on a GPU" in data.skipped["fp8"]
    assert any(remark.startswith("not shown: fp8: stock SGLang's fp8") for remark in data.remarks())
    assert "fp8: skipped: " in capsys.readouterr().err
    assert [x.configuration for x in data.points] == ["stock", "K8V4"], "each configuration once"


def test_pareto_front():
    points = [
        point("bf16", 0.9, 1.0),
        point("dominated", 0.7, 0.5),
        point("best", 0.9, 0.4),
        point("as good, larger", 0.9, 0.45),
        point("same bytes, worse", 0.6, 0.3),
        point("small", 0.65, 0.3),
        point("worse and small", 0.2, 0.1),
        point("answers nothing", 0.0, 0.05),
        point("unknown bytes", 1.0, None),
    ]
    assert [x.configuration for x in pareto.front(points, "pages")] == ["worse and small", "small", "best"]
    assert pareto.front([], "tokens") == []
    assert pareto.once([points[0], points[1], points[0]]) == points[:2]


def test_the_front_follows_the_ratio_shown():
    a, b = point("a", 0.9, 0.4, ratio_tokens=0.2), point("b", 0.9, 0.3, ratio_tokens=0.3)
    assert pareto.front([a, b], "pages") == [b] and pareto.front([a, b], "tokens") == [a]


def test_shares_by_task_are_asked_task_by_task(tmp_path, started):
    assert cli.main(["fig12", *BASE, "--output", str(tmp_path)]) == 0
    data = figure(tmp_path, "fig12")
    assert {x.suite: x.n for x in data.points} == {
        "reference/reference/add": 3, "reference/reference/few": 4, "reference/reference/sort": 1
    }  # fmt: skip
    assert {x.configuration for x in data.points} == {f"diffkv K8V4-K4V2 (3, 0) {USUAL}"} == set(started)
    for x in data.points:
        assert (x.share_high, x.share_low, x.share_pruned) == pytest.approx((0.6, 0.3, 0.1))
    assert "thresholds: defaults, none are calibrated for this model" in data.notes
    given = ["--config", "a={}", "--config", 'b={"tiers": ["K8V4"]}']
    assert cli.main(["fig12", *BASE, *given, "--output", str(tmp_path)]) == 0
    assert {x.configuration for x in figure(tmp_path, "fig12").points} == {"a", "b"}


def test_a_file_of_one_task_is_not_split(tmp_path, started):
    assert cli.main(["fig12", *BASE, "--only", "add", "--output", str(tmp_path)]) == 0
    assert figure(tmp_path, "fig12").suites() == ["reference/reference"]


def test_sweeps_of_thresholds():
    at = Thresholds(("K8V4", "K4V2"), 0.05, 0.02, 64, "")
    high, low = thresholds.sweeps(at, [3, 0, 0.1], [0.1, 0.02, 0])
    assert [x.label for x in high] == ["low tier off", "(0.1, 0)", "(3, 0)"]
    assert [x.label for x in low] == ["(0.05, 0)", "(0.05, 0.02)"], "alpha_low stays below alpha_high"
    assert high[0].name == uniform("K8V4").name, "its answers are shared with figure 8"
    single = Thresholds(("K8V4",), None, 0.04, 64, "")
    high, low = thresholds.sweeps(single, [1], [0, 0.04])
    assert high[0].configuration.diffkv.tiers == ("K8V4", "K4V2")
    assert [x.configuration.diffkv.tiers for x in low] == [("K8V4",)] * 2


def test_thresholds_are_the_model_s_and_never_the_figure_s_choice():
    small = cases.chosen("small")
    assert (small.alpha_high, small.source) == (1e9, "calibrated, measured")
    published = cases.chosen("Qwen/QwQ-32B")
    assert (published.window, published.source) == (256, "defaults, none are calibrated for this model")
    assert (cases.chosen(str(NANO)).alpha_high, cases.chosen(str(NANO)).rotate) == (3.0, "both")
    assert (cases.chosen(str(NANO), 2.0).alpha_high, cases.chosen(str(NANO), 2.0).source) == (2.0, "command line")
    assert diffkv(Thresholds(("K8V4",), None, 0.04, 64, ""), "").label == "(-, 0.04)"


def test_calibrated_thresholds_are_served_with_all_that_was_chosen():
    at = replace(cases.chosen(str(NANO)), rotate="keys", window=32, sinks=4, horizon=256)
    case = diffkv(at, cases.ALPHA_HIGH)
    assert case.name.endswith("window 32 rotated sinks 4 horizon 256") and case.configuration.diffkv.rotate == "keys"
    policy = case.configuration.diffkv.policy
    assert (policy.window, policy.sinks, policy.horizon) == (32, 4, 256)


@pytest.mark.parametrize("tier", ["K8V8", "K4V8", "K2V4", "K1V8", "BF16"])
def test_any_single_tier_can_be_compared(tier):
    config = uniform(tier).configuration.diffkv
    assert config.tiers == (tier,) and not config.build_policy().compresses


def test_another_first_configuration_is_refused(tmp_path, started, capsys):
    with Store(tmp_path) as store:
        store.add_configuration("other", {})
    assert cli.main(["fig8", *BASE, "--output", str(tmp_path)]) == 1
    assert "use a new --output folder" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["fig8"], ["fig8", "--task", REFERENCE, "--tiers", "K9V4"], ["fig7"]])
def test_unusable_command_lines(tmp_path, args):
    with pytest.raises(SystemExit):
        cli.parse_args([*args, "--output", str(tmp_path)])


def test_figures_are_drawn_again_from_their_json(tmp_path, started):
    assert cli.main(["fig12", *BASE, "--output", str(tmp_path)]) == 0
    image = (tmp_path / "fig12.png").read_bytes()
    (tmp_path / "fig12.png").unlink()
    redraw.main([str(tmp_path / "fig12.json")])
    assert (tmp_path / "fig12.png").read_bytes() == image


def test_titles_name_model_and_questions():
    data = FigureData(figure="fig8", model="m", ratio="pages", points=[point("a", 0.5, 0.5)], skipped={"fp8": "no"})
    assert style.headline(data, "What") == "What\nm, n = 10"
    assert "reference/dev n = 10" in style.subject(data)
    failed = data.model_copy(update={"points": [point("a", 0.5, 0.5, failed=2)]})
    assert failed.remarks() == ["not shown: fp8: no", "a: 2 requests failed on reference/dev"]


def test_bars_hold_each_task_s_shares(monkeypatch, tmp_path):
    drawn = {}
    monkeypatch.setattr(style, "finish", lambda figure, *rest: drawn.update(axes=figure.axes))
    shares = [(0.2, 0.7, 0.1), (0.6, 0.4, 0.0)]
    points = [
        point("c", 1, 0.5, suite=f"reference/dev/{name}", share_high=h, share_low=low, share_pruned=out)
        for name, (h, low, out) in zip(("sort", "add"), shares)
    ]
    breakdown.draw(FigureData(figure="fig12", model="m", ratio="pages", points=points), tmp_path / "x.png")
    axis = drawn["axes"][0]
    assert [x.get_text() for x in axis.get_yticklabels()] == ["add (n = 10)", "sort (n = 10)"], "by the high share"
    widths = [[bar.get_width() for bar in bars] for bars in axis.containers]
    assert widths == [[60, 20], [40, 70], pytest.approx([0, 10])]


def test_json_holds_all_that_is_drawn(tmp_path, started):
    assert cli.main(["fig8", *BASE, "--tiers", "K8V4", "--output", str(tmp_path)]) == 0
    raw = json.loads((tmp_path / "fig8.json").read_text())
    assert raw["kind"] == "figure" and raw["about"]["command"].startswith("python -m benchmarks.figures fig8")
    assert str(tmp_path.parent) not in raw["about"]["command"]


@pytest.mark.parametrize("name", ["fig8", "fig9", "fig10", "fig11"])
def test_each_task_file_has_its_place(name, monkeypatch, tmp_path):
    drawn = {}
    monkeypatch.setattr(style, "finish", lambda figure, *rest: drawn.update(axes=figure.axes))
    at = {"alpha_high": 1.0, "alpha_low": 0.0, "share_pruned": 0.1}
    series = [("bf16", "stock bf16"), ("K8V4", cases.MORE_KEYS)]
    if name != "fig8":
        series += [("(1, 0)", cases.ALPHA_HIGH), ("(1, 0)", cases.ALPHA_LOW), ("keep 0.9", cases.STEP_BUDGET)]
    points = [
        point(label, 0.5, 0.5, suite=suite, series=line, **at) for suite in ("a/b", "c/d") for label, line in series
    ]
    cli.SERVED[name].draw(FigureData(figure=name, model="m", ratio="tokens", points=points), tmp_path / "x.png")
    assert len(drawn["axes"]) == (4 if name in ("fig8", "fig10") else 2)
    if name == "fig10":
        assert [x.get_label() for x in drawn["axes"][0].containers] == ["a/b", "c/d"]
    else:
        assert [x.get_title() for x in drawn["axes"][:2]] == ["a/b", "c/d"]
    labels = " ".join(axis.get_xlabel() + axis.get_ylabel() for axis in drawn["axes"])
    assert "accuracy, %" in labels and "pages held" not in labels
