"""Token identity without servers: what is known is kept when a later server fails."""

from __future__ import annotations

import json

import pytest

from benchmarks.quality import identity
from sglang_diffkv.evaluate.client import Record
from sglang_diffkv.evaluate.server import ServerError


def test_what_is_known_is_kept(tmp_path, monkeypatch, capsys):
    def collect(args, backend, config, prompts, drafts=()):
        if backend == "broken":
            raise ServerError("no room")
        return {"batch 1": [Record("", [1, 2], 3, 2, 0, 0.0, "length", logprobs=[-0.1, -0.1]) for _ in prompts]}

    monkeypatch.setattr(identity, "collect", collect)
    output = tmp_path / "identity.json"
    args = ["--n", "3", "--shared", "1", "--output", str(output)]
    assert identity.main(args) == 0
    assert [row["server"] for row in json.loads(output.read_text())["table"]] == ["stock", "diffkv"]
    with pytest.raises(ServerError):
        identity.main([*args, "--controls", "fa3", "broken"])
    assert [row["server"] for row in json.loads(output.read_text())["table"]] == ["stock", "stock, fa3"]
    assert "| stock, fa3 | batch 1 | 3 | 0 | 0 |" in capsys.readouterr().out
