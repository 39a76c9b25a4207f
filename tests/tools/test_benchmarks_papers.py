"""LeanKV's table 1 and XKV's tables II and III, on stand-ins for the servers."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from benchmarks.paths import NANO
from benchmarks.quality import leankv, xkv
from sglang_diffkv.config import DiffKVConfig, load_config
from sglang_diffkv.evaluate import cli, runner
from sglang_diffkv.evaluate.endpoint import Endpoint
from sglang_diffkv.evaluate.server import ServerError
from sglang_diffkv.policies.xkv import XKVPolicyConfig
from tests.tools.evaluation import DATA, REFERENCE, tokenizer, tokenizer_of
from tests.tools.fake_server import FakeServer
from tests.tools.test_benchmarks_tables import lines_of
from tests.tools.test_calibrate_leankv import StandIn, stand_in  # noqa: F401, a fixture

GRID = ["--runs", "2", "--held-out", "0.5", "--mass-high", "0.1", "0.2", "--mass-low", "0"]


def test_leankv_s_table_has_the_paper_s_form(tmp_path, stand_in: StandIn):  # noqa: F811
    args = ["--model", str(NANO), "--task", REFERENCE, "--output", str(tmp_path), "--tolerance", "40", *GRID]
    assert leankv.main(args) == 0
    text = (tmp_path / "table1.md").read_text()
    title = "# LeanKV's table 1: cache bytes over bf16's, nano"
    header, _, neutral, loss = [x.strip("|").split("|") for x in text.split(f"{title}\n\n")[1].splitlines()[:4]]
    assert [x.strip() for x in header] == ["model", "", "reference/reference"]
    assert [x[1].strip() for x in (neutral, loss)] == ["perf-neutral", "5% perf-loss"]
    assert "% (K" in loss[2] and "no choice saw" in text and "points (n = " in text
    data = json.loads((tmp_path / "table1.json").read_text())["found"]["reference/reference"]
    chosen = data["choices"]["loss"]["setting"]
    assert chosen in loss[2] and len(data["grid"]) == 4
    assert (tmp_path / "table1.png").read_bytes().startswith(b"\x89PNG")
    del stand_in.started[:]
    assert leankv.main(args) == 0 and not stand_in.started, "all answers were there"


def test_leankv_s_table_says_where_nothing_is_chosen(tmp_path, stand_in: StandIn, capsys):  # noqa: F811
    stand_in.wrong = lambda policy, tiers, run: set() if policy is None else {1}  # type: ignore[method-assign]
    args = ["--model", str(NANO), "--task", REFERENCE, "--output", str(tmp_path), "--tolerance", "0"]
    assert leankv.main([*args, *GRID[:2], "--held-out", "0", *GRID[4:], "--tiers", "k4v2,k4v1"]) == 0
    assert "| nano | perf-neutral | none |\n| nano | 5% perf-loss | none |" in (tmp_path / "table1.md").read_text()


def test_leankv_s_table_is_not_written_where_a_server_fails(tmp_path, monkeypatch, capsys):
    def start(configuration, model, args):
        raise ServerError("no memory")

    monkeypatch.setattr(runner, "start", start)
    args = ["--model", str(NANO), "--task", REFERENCE, "--output", str(tmp_path), *GRID]
    assert leankv.main(args) == 1 and "no memory" in capsys.readouterr().err
    assert not (tmp_path / "table1.md").exists()


def test_methods_keep_the_share_that_they_are_given():
    found = xkv.policies(0.016, 8000)
    assert list(found) == list(xkv.FEATURES) and all(x["name"] == xkv.FEATURES[name][0] for name, x in found.items())
    assert found[xkv.STREAMING]["window"] + found[xkv.STREAMING]["sinks"] == 128 and found[xkv.H2O]["window"] == 64
    for ratio, tokens in [(0.016, 8000), (0.012, 40), (0.5, 100_000)]:
        for spec in xkv.configurations([ratio], tokens)[1:]:
            config = load_config(spec.partition("=")[2])
            assert isinstance(config, DiffKVConfig) and config.tiers == ("BF16",)
    assert isinstance(config.policy, XKVPolicyConfig) and config.policy.keep == 0.5


def test_xkv_s_tables_have_the_paper_s_form(tmp_path, monkeypatch, capsys):
    started = []

    @contextmanager
    def start(configuration, model, args):
        started.append(configuration.name)
        right = configuration.name in ("stock", "XKV 10%")

        def reply(ids):
            return "Person" if right and "Lovelace" in tokenizer().decode(ids) else "Wind."

        with FakeServer(reply, share=configuration.diffkv and 0.1, context=4096) as fake:
            yield Endpoint.connect(fake.url, owned=True)

    for module in (cli, xkv):
        monkeypatch.setattr(module, "load_tokenizer", tokenizer_of)
    monkeypatch.setattr(runner, "start", start)
    args = [
        "--model",
        str(NANO),
        "--task",
        f"longbench={DATA / 'longbench'}",
        "--task",
        f"gsm8k={DATA / 'gsm8k.jsonl'}",
    ]
    assert xkv.main([*args, "--ratios", "0.1", "0.05", "--output", str(tmp_path)]) == 0
    assert started == ["stock", *(f"{name} {ratio}%" for ratio in (10, 5) for name in xkv.FEATURES)]
    text = (tmp_path / "xkv.md").read_text()
    table = lines_of(text, "Table II: methods")
    assert table[0][1:3] == ["policy", "scores by attention"] and table[-1] == ["XKV", "`xkv`", *["yes"] * 4]
    header, _, *rows = lines_of(text, "Table III: 10% of the prompt's tokens kept")
    assert header == ["model", "method", "lcc", "qasper", "trec", "gsm8k/gsm8k", "mean"]
    assert [x[1] for x in rows] == ["bf16", *xkv.FEATURES]
    means = {x[1]: float(x[-1].split(" ")[0]) for x in rows}
    assert means["XKV"] == means["bf16"] > means["SnapKV"] and "(1" in rows[-1][4]
    assert "Table III: 5% of" in text and (tmp_path / "xkv.png").read_bytes().startswith(b"\x89PNG")
    assert xkv.main([*args, "--output", str(tmp_path), "--task", "gsm8k=none.jsonl"]) == 1
    assert "there is no file none.jsonl" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        xkv.main([*args, "--output", str(tmp_path), "--ratios", "1.5"])
