"""``python -m benchmarks.quality.tables``: the paper's tables from task files, on stand-ins and on the nano model."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from benchmarks.paths import NANO
from benchmarks.quality import tables
from sglang_diffkv.evaluate import cli, runner
from sglang_diffkv.evaluate.endpoint import Endpoint
from tests.tools.evaluation import DATA, REFERENCE, tokenizer, tokenizer_of
from tests.tools.fake_server import FakeServer

TASKS = [f"math={DATA / 'math.jsonl'}", f"gsm8k={DATA / 'gsm8k.jsonl'}", f"longbench={DATA / 'longbench'}", REFERENCE]
ARGS = ["--model", str(NANO), *(x for task in TASKS for x in ("--task", task))]


def lines_of(text, title):
    """The rows of a table as lists of cells."""
    after = text.split(f"## {title}\n\n")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in after.splitlines()]


def test_tables_have_the_paper_s_form(tmp_path, monkeypatch):
    def reply(ids):
        text = tokenizer().decode(ids)
        return "#### 39" if "jars" in text else "Person" if "Lovelace" in text else "Wind."

    @contextmanager
    def start(configuration, model, args):
        with FakeServer(reply, share=configuration.diffkv and 0.4, context=4096) as fake:
            yield Endpoint.connect(fake.url, owned=True)

    monkeypatch.setattr(cli, "load_tokenizer", tokenizer_of)
    monkeypatch.setattr(runner, "start", start)
    monkeypatch.setattr("sglang_diffkv.evaluate.configuration.has_gpu", lambda: False)
    aime = tmp_path / "aime.jsonl"
    aime.write_text('{"problem": "p", "answer": "25"}\n')
    assert tables.main([*ARGS, "--task", f"aime={aime}", "--output", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "tables.md").read_text()
    header, _, *rows = lines_of(text, "Table 1: benchmarks")
    columns = ["bf16", "K4V4", "K2V2", "SnapKV 50%", "DiffKV"]
    assert header == ["benchmark", "n", *(f"nano: {name}" for name in columns)]
    found = {row[0]: row[1:] for row in rows}
    assert list(found) == ["GSM8K", "MATH"], "in the paper's order"
    assert found["GSM8K"][:2] == ["3", "33.3 ± 27.2"]
    assert found["GSM8K"][-1].startswith("33.3 ± 27.2 (40.") and found["MATH"][0] == "2"
    header, _, *rows = lines_of(text, "Table 2: LongBench")
    assert header == ["model", "configuration", "lcc (n = 1)", "qasper (n = 2)", "trec (n = 1)"]
    assert rows[0][:2] == ["nano", "bf16"] and rows[0][3] == "50.0 ± 50.0"
    assert rows[-1][1] == "DiffKV" and rows[-1][4].startswith("100.0 (")
    assert [row[0] for row in lines_of(text, "Table 3: thinking models")[2:]] == ["MATH", "AIME24"]
    assert [row[0] for row in lines_of(text, "Other task files")[2:]] == ["reference/reference"]
    assert "nano, fp8 was skipped: stock SGLang's fp8" in text and "--task math=math.jsonl" in text
    again = ["--tables", "2", "others", "--name", "some", "--output", str(tmp_path / "out")]
    assert tables.main([*ARGS, *again]) == 0
    text = (tmp_path / "out" / "some.md").read_text()
    assert [x for x in text.splitlines() if x.startswith("## ")] == ["## Table 2: LongBench", "## Other task files"]
    data = json.loads((tmp_path / "out" / "some.json").read_text())
    assert [x["model"] for x in data["models"]] == ["nano"] and "--tables 2 others" in data["about"]["command"]
    assert {x["suite"] for x in data["models"][0]["results"]} >= {"longbench/longbench", "reference/reference"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--task", f"wikitext={DATA / 'prose.txt'}"], "perplexity is not in these tables"),
        (["--model", str(NANO)], "two models have the same name"),
    ],
)
def test_what_tables_cannot_hold_is_refused(args, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        tables.main([*ARGS, *args, "--output", str(tmp_path)])
    assert message in capsys.readouterr().err


def test_a_failed_evaluation_writes_no_tables(tmp_path, capsys):
    missing = ["--model", str(NANO), "--task", "gsm8k=none.jsonl", "--output", str(tmp_path)]
    assert tables.main(missing) == 1 and not (tmp_path / "tables.md").exists()
    assert "there is no file none.jsonl" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.server
def test_tables_of_the_nano_model(tmp_path):
    tasks = ["--task", f"ruler={DATA / 'ruler'}", "--task", f"humaneval_plus={DATA / 'humaneval_plus.jsonl'}"]
    more = ["--run-generated-code", "--max-new-tokens", "8", "--max-prompt-tokens", "200"]
    configs = ["--config", "stock", "--config", "DiffKV={}"]
    assert tables.main([*ARGS, *tasks, *more, *configs, "--output", str(tmp_path)]) == 0
    text = (tmp_path / "tables.md").read_text()
    rows = {row[0]: row for row in lines_of(text, "Table 1: benchmarks")[2:]}
    assert rows.keys() == {"GSM8K", "MATH", "HumanEval+"} and rows["HumanEval+"][1] == "2"
    assert all(row[2] and row[3].endswith("%)") for row in rows.values()), "DiffKV's bytes were measured"
    assert [row[1] for row in lines_of(text, "Table 2: LongBench")[2:]] == ["bf16", "DiffKV"]
