"""What two servers note of a prompt between them, and what becomes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.serving import two_servers
from benchmarks.serving.client import BenchmarkError
from benchmarks.serving.two_servers import NOTED_ENGINE, NOTES_ENV, Asked, reckoned

ASKED = Asked("a", begin=10.0, second=11.5, end=12.0)
SENT = [
    {"what": "pass", "at": 10.2, "requests": ["a"]},
    {"what": "pass", "at": 10.5, "requests": ["b", "a"]},  # its last chunk
    {"what": "write", "begin": 10.6, "end": 10.8, "bytes": 100, "code": 0},
    {"what": "write", "begin": 10.8, "end": 10.9, "bytes": 50, "code": 0},
    {"what": "write", "begin": 12.5, "end": 12.9, "bytes": 7, "code": 0},  # of the next one
]
RECEIVED = [{"what": "pass", "at": 11.3, "requests": ["a"]}, {"what": "pass", "at": 11.4, "requests": ["a"]}]


def test_a_request_is_reckoned_from_its_last_pass_on():
    found = reckoned(ASKED, SENT, RECEIVED)
    assert found == pytest.approx(
        {
            "bytes": 150,
            "prompt_s": 0.5,
            "second_token_s": 1.0,
            "first_step_s": 0.8,
            "writes_s": 0.3,
            "before_writes_s": 0.1,
            "behind_writes_s": 0.4,
        }
    )


@pytest.mark.parametrize(("sent", "received"), [(SENT[:2], RECEIVED), (SENT[2:], RECEIVED), (SENT, [])])
def test_what_was_not_noted_is_an_error(sent, received):
    with pytest.raises(BenchmarkError, match="were noted"):
        reckoned(ASKED, sent, received)


def test_a_failed_write_is_an_error():
    with pytest.raises(BenchmarkError, match="a write failed"):
        reckoned(ASKED, [*SENT[:3], {**SENT[3], "code": -1}], RECEIVED)


def test_pairs_are_told_over_the_first_that_did_not_fail():
    row = {"length": 1000, **reckoned(ASKED, SENT, RECEIVED)}
    records = [
        {"servers": "x", "status": "failed", "error": "why"},
        {"servers": "y", "status": "ok", "prompts": [row]},
        {"servers": "z", "status": "ok", "prompts": [{**row, "bytes": 75, "second_token_s": 0.8}]},
    ]
    text = two_servers.table(records)
    assert "|  | x | why |" in text and "| 1,000 | y | 0.0, 1.00 | 1,000, 1.00 |" in text
    assert "| 1,000 | z | 0.0, 0.50 | 800, 0.80 |" in text


def test_the_engine_that_notes_is_the_installed_one(tmp_path: Path):
    """A package of that name further on in the path, with a scheduler whose passes end."""
    package, notes = tmp_path / "mooncake", tmp_path / "notes"
    package.mkdir()
    notes.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").write_text("here = True\n")
    (package / "engine.py").write_text(
        "import sys, types\n"
        "sys.modules[__name__] = types.ModuleType(__name__)\n"  # as a library of C++ does
        "class TransferEngine:\n"
        "    def transfer_sync_write(self, session, source, target, length):\n        return 0\n"
        "    def batch_transfer_sync_write(self, session, sources, targets, lengths):\n        return -1\n"
        "class TransferNotify:\n    pass\n"
    )
    program = (
        "import sys\nfrom types import SimpleNamespace as N\n"
        "class Scheduler:\n    def process_batch_result(self, batch, result):\n        return 5\n"
        "path = 'sglang.srt.managers.scheduler'\n"
        "sys.modules |= {path[:at]: N() for at in (6, 10, 19)} | {path: N(Scheduler=Scheduler)}\n"
        "from mooncake.engine import TransferEngine, TransferNotify\nimport mooncake.other\n"
        "e = TransferEngine()\n"
        "assert e.transfer_sync_write('s', 1, 2, 30) == 0\n"
        "assert e.batch_transfer_sync_write('s', [1, 2], [3, 4], [30, 40]) == -1\n"
        "assert Scheduler().process_batch_result(N(reqs=[N(rid='a')]), N()) == 5\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(NOTED_ENGINE), str(tmp_path)]), NOTES_ENV: str(notes)}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
    (file,) = notes.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("bytes") for line in lines] == [30, 70, None] and lines[2]["requests"] == ["a"]
    assert [line["code"] for line in lines[:2]] == [0, -1]
