"""Thresholds from plain text: the two parts, the choice, and the command against a stand-in and a real server."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.paths import NANO, REPOSITORY
from sglang_diffkv.calibrate.search import DEFAULT, Setting
from sglang_diffkv.calibrate.text import cli, search
from sglang_diffkv.calibrate.text.parts import parts
from sglang_diffkv.calibrate.text.search import best, settings
from sglang_diffkv.calibration import FILE_NAME, TextBudget, TextPoint, TextProvenance, lookup, read_file, resolve
from sglang_diffkv.evaluate import runner
from sglang_diffkv.evaluate.endpoint import Endpoint
from sglang_diffkv.evaluate.tasks import TaskFileError, wikitext
from sglang_diffkv.evaluate.tasks.generation import Options
from tests.tools.evaluation import DATA, tokenizer, tokenizer_of
from tests.tools.fake_server import FakeServer

PAIR, SINGLE = ("K8V4", "K4V2"), ("K8V4",)
PROSE = DATA / "prose.txt"
WINDOWS = Options(prefix_tokens=40, window_tokens=8, top_logprobs=2)


def tokens_of(suite: runner.Suite) -> set[int]:
    """Places of the text that a part's windows read."""
    size = len(suite.questions[0].prompt_ids) - 1
    return {place for question in suite.questions for place in range(int(question.id), int(question.id) + size)}


def test_the_parts_share_no_token_and_the_end_is_held_out() -> None:
    choosing, held_out = parts(wikitext.load(PROSE, WINDOWS), 0.4, 1000, tokenizer())
    assert max(tokens_of(choosing)) < min(tokens_of(held_out))
    assert len(choosing.questions) > len(held_out.questions) > 3
    few, _ = parts(wikitext.load(PROSE, WINDOWS), 0.4, 4, tokenizer())
    assert few.questions == choosing.questions[:4]
    names = [x.task.name for x in (choosing, held_out)]
    assert len(set(names)) == 2 and choosing.task.fingerprint() != held_out.task.fingerprint()


def test_a_text_that_is_too_short_for_two_parts_is_refused() -> None:
    with pytest.raises(TaskFileError, match="in the part for held-out"):
        parts(wikitext.load(PROSE, WINDOWS), 0.05, 10, tokenizer())


def point(ratio: float, kl: float, perplexity: float = 0.0, error: float = 0.0) -> TextPoint:
    return TextPoint(
        tiers=PAIR, alpha_high=1.0, alpha_low=0.0, window=64, n=9, divergence=kl, divergence_error=error,
        agreement=0.9, agreement_error=0.01, covered=0.9, perplexity_change=perplexity,
        perplexity_change_error=error, ratio_pages=ratio, ratio_tokens=ratio,
    )  # fmt: skip


def test_the_cheapest_within_the_budget_by_the_margin_is_chosen() -> None:
    tried = settings([PAIR], [1.0, 3.0, 5.0], [64], [""], [4])[1:]
    off, one, three, five = tried
    points = dict(zip(tried, [point(0.44, 0.001), point(0.35, 0.006, 0.03, 0.002), point(0.3, 0.009, -0.01, 0.002)]))
    points[five] = point(0.28, 0.02, 0.02, 0.002)
    assert best(points, TextBudget(measure="kl", limit=0.01), 0.0) == three
    assert best(points, TextBudget(measure="kl", limit=0.01), 1.0) == one
    assert best(points, TextBudget(measure="kl", limit=0.002), 1.0) == off
    assert best(points, TextBudget(measure="kl", limit=0.0001), 1.0) is None
    assert best(points, TextBudget(measure="perplexity", limit=0.0), 1.0) == three
    assert best(points, TextBudget(measure="perplexity", limit=0.025), 1.0) == five


def test_the_grid_has_each_high_tier_alone_once() -> None:
    found = settings([PAIR, ("K8V4", "K4V4")], [1.0, 3.0], [64, 128], ["none"], [0, 4])
    assert found[:2] == [DEFAULT, Setting(SINGLE, None, 0.0, rotate="none")]
    assert len(found) == len(set(found)) == 2 + 2 * 2 * 2 * 2
    assert settings([PAIR], [3.0], [256], [""], [4]) == [DEFAULT, Setting(SINGLE, None, 0.0)], "each once"


def test_what_is_worse_at_more_bytes_is_never_chosen() -> None:
    """The default, less sure and so not within the budget, loses less at fewer bytes than what is."""
    kl = TextBudget(measure="kl", limit=0.01)
    points = {DEFAULT: point(0.32, 0.006, error=0.005), Setting(PAIR, 1.0, 0.0): point(0.35, 0.008, error=0.001)}
    assert best(points, kl, 1.0) is None and best(points, kl, 0.0) == DEFAULT
    points[Setting(SINGLE, None, 0.0)] = point(0.44, 0.001)
    assert best(points, kl, 1.0) == Setting(SINGLE, None, 0.0)
    points[Setting(PAIR, 5.0, 0.0)] = point(0.32, 0.004, error=0.001)
    assert best(points, kl, 1.0) == Setting(PAIR, 5.0, 0.0)


def test_the_command_searches_as_a_plain_server_is_set() -> None:
    given = ["--text", "t", "--model", "m", "--work", "w", "--output", "o", "--max-kl", "1"]
    args = cli.parse_args(given)
    tried = settings(args.tiers, args.alpha_high, args.window, args.rotate, args.sinks)
    assert tried[0] == DEFAULT and {(x.rotate, x.sinks) for x in tried if len(x.tiers) > 1} == {("both", 4)}
    args = cli.parse_args([*given, "--sinks", "0", "8", "--rotate", "keys"])
    tried = settings(args.tiers, args.alpha_high, args.window, args.rotate, args.sinks)
    assert {(x.rotate, x.sinks) for x in tried[2:]} == {("keys", 0), ("keys", 8)}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeServer]:
    """A stand-in for every server: the more is low, the further its likeliest token is from stock's."""
    started: dict[str, FakeServer] = {}

    @contextmanager
    def start(configuration, model, args):
        policy = None if configuration.diffkv is None else configuration.diffkv.policy
        low = 0.0 if policy is None or len(configuration.diffkv.tiers) == 1 else min(policy.alpha_high, 5) / 5
        share = None if policy is None else 0.45 - 0.1 * low - 0.0001 * (256 - policy.window)
        top = 0.8 - 0.2 * low
        tops = [(math.log(top), 5), (math.log(0.1), 6)]
        with FakeServer(share=share, logprob=lambda at: -1 - 0.1 * low, tops=lambda at: tops) as fake:
            started[f"{configuration.name}{' again' * (configuration.name in started)}"] = fake
            yield Endpoint.connect(fake.url, owned=True)

    monkeypatch.setattr(runner, "start", start)
    monkeypatch.setattr(cli, "load_tokenizer", tokenizer_of)
    return started


def command(folder: Path, *args: str) -> list[str]:
    paths = ["--work", str(folder / "work"), "--output", str(folder / FILE_NAME)]
    size = ["--prefix-tokens", "40", "--window-tokens", "8", "--n", "5"]
    return ["--text", str(PROSE), "--model", str(NANO), *paths, *size, *args]


def divergence(low: float) -> float:
    p, q = (0.8, 0.1, 0.1), (0.8 - 0.2 * low, 0.1, 0.1 + 0.2 * low)
    return sum(a * math.log(a / b) for a, b in zip(p, q))


def test_the_choice_is_judged_on_the_other_part_and_found_by_servers(tmp_path, servers, capsys) -> None:
    search = ["--alpha-high", "1", "2", "5", "--window", "64", "256", "--max-kl", str(divergence(0.4) + 1e-4)]
    assert cli.main(command(tmp_path, *search)) == 0
    found = lookup(tmp_path)
    assert found is not None and (found.tiers, found.alpha_high, found.window) == (PAIR, 2.0, 64)
    assert isinstance(found.chosen, TextPoint) and isinstance(found.provenance, TextProvenance)
    assert found.chosen.divergence == pytest.approx(divergence(0.4), rel=1e-4)
    assert found.chosen.perplexity_change == pytest.approx(math.exp(0.04) - 1)
    assert (found.chosen.n, found.provenance.held_out.n, len(found.provenance.grid)) == (5, 5, 8)
    assert found.provenance.budget.measure == "kl" and found.provenance.text_file == "prose.txt"
    config, origin = resolve('{"thresholds": "calibrated"}', tmp_path)
    assert (config.policy.alpha_high, config.policy.window) == (2.0, 64) and "measured with this package" in origin
    assert read_file(tmp_path / FILE_NAME).entries == (found,)

    chosen = "K8V4-K4V2 alpha_high=2 alpha_low=0 window=64"
    asked = {name: [tuple(x["input_ids"]) for x in fake.requests] for name, fake in servers.items()}
    assert set(asked[f"{chosen} again"]).isdisjoint(asked[chosen]), "other windows than it was chosen on"
    assert set(asked["stock"]) == set(asked[chosen]) | set(asked[f"{chosen} again"])
    assert [name for name in asked if name.endswith("again")] == [f"{chosen} again"]
    out = capsys.readouterr().out
    assert (
        out.count("chosen |") == 1
        and out.count("too lossy") == 3
        and out.count("the default |") == 1
        and "| held out | 0.0" in out
    )

    servers.clear()
    assert cli.main(command(tmp_path, *search)) == 0 and not servers, "all answers were kept"


def test_a_budget_of_perplexity(tmp_path, servers) -> None:
    search = ["--alpha-high", "1", "5", "--window", "256"]
    assert cli.main(command(tmp_path, *search, "--max-perplexity", "2.1")) == 0
    assert lookup(tmp_path).alpha_high == 1.0
    assert cli.main(command(tmp_path, *search, "--max-perplexity", "1")) == 0
    assert lookup(tmp_path).tiers == SINGLE


def test_nothing_within_the_budget_writes_nothing(tmp_path, servers, capsys, monkeypatch) -> None:
    for place in (cli, search):
        monkeypatch.setattr(place, "within", lambda point, budget, margin: False)
    assert cli.main(command(tmp_path, "--max-kl", "0", "--alpha-high", "1", "--window", "64")) == 1
    assert not (tmp_path / FILE_NAME).exists() and "no setting is within a KL of 0 nats" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--base", '{"rotate": "keys"}'], "--base sets rotate"),
        (["--base", '{"polcy": 1}'], "polcy"),
        (["--text", "/no/text"], "there is no file"),
    ],
)
def test_what_cannot_be_searched_is_refused(tmp_path, servers, capsys, args, message) -> None:
    assert cli.main(command(tmp_path, "--max-kl", "1", *args)) == 1
    assert message in capsys.readouterr().err


def test_the_command_with_a_text_is_this_one() -> None:
    command = [sys.executable, "-m", "sglang_diffkv.calibrate", "--text", "x", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--max-kl" in out and "--max-perplexity" in out
    assert cli.wanted(["--text=x"]) and not cli.wanted(["--task", "x"])


@pytest.mark.full
@pytest.mark.server
def test_a_real_search(tmp_path: Path) -> None:
    text = tmp_path / "docs.txt"
    pages = sorted((REPOSITORY / "docs").glob("*.md"))
    text.write_text("\n".join(page.read_text(encoding="utf-8") for page in pages), encoding="utf-8")
    args = command(tmp_path, "--text", str(text), "--alpha-high", "1", "1e9", "--window", "64", "--max-kl", "0.02")
    assert cli.main([*args, "--prefix-tokens", "512", "--window-tokens", "64", "--n", "6"]) == 0
    found = lookup(tmp_path)
    default, off, one, none = found.provenance.grid
    assert default.sinks == found.sinks == 4 and default.rotate == "both"
    assert 0 < off.divergence < one.divergence < none.divergence
    assert off.ratio_tokens > one.ratio_tokens > none.ratio_tokens
    assert found.chosen.divergence < 0.02 and found.provenance.held_out.divergence < 0.04
