"""Token identity without servers: what is known is kept when a later server fails."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks.quality import identity
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.client import Record
from sglang_diffkv.evaluate.server import ServerError
from tests.tools.fake_server import FakeServer


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


@pytest.mark.parametrize("size", [1, 2])
def test_each_prompt_has_fields_of_its_own(size):
    """At every concurrency, and the request's own fields stand."""
    fields = [{"lora_path": "a"}, {"lora_path": None, "sampling_params": {}}, {"lora_path": "b"}]
    with FakeServer(lambda ids: "xy") as fake:
        server = SimpleNamespace(url=fake.url, flush_cache=lambda: None)
        identity.ask(server, SimpleNamespace(max_new_tokens=2), [[1], [2], [3]], size, fields)
        client.score(fake.url, [4, 5], 0, fields={"lora_path": "c"})
        with pytest.raises(ValueError, match="3 prompts but 1 sets of fields"):
            client.run(fake.url, [[1], [2], [3]], 2, fields=[{}])
    asked = {tuple(x["input_ids"]): x["lora_path"] for x in fake.requests}
    assert asked == {(1,): "a", (2,): None, (3,): "b", (4, 5): "c"}
    assert all(x["sampling_params"]["temperature"] == 0 for x in fake.requests)
