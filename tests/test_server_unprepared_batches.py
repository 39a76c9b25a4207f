"""SGLang's own errors while it gives a prefill batch rows and names: the batch is undone, though it got nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_diffkv.testing.paths import NANO
from sglang_diffkv.testing.server import Server
from tests.test_server_refused_requests import ask, tokens

pytestmark = pytest.mark.server

NAMES, ROWS = 333, 222
"""What fails: names for so many new tokens, rows for a request with so many."""

PLUGIN = f"""
def register():
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from sglang_diffkv.mem_pool.allocator import DiffKVAllocator

    alloc, rows = DiffKVAllocator.alloc, ReqToTokenPool.alloc

    def alloc_(self, need_size):
        return None if need_size == {NAMES} else alloc(self, need_size)

    def rows_(self, reqs):
        return None if any(len(req.origin_input_ids) == {ROWS} for req in reqs) else rows(self, reqs)

    DiffKVAllocator.alloc, ReqToTokenPool.alloc = alloc_, rows_
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("plugin")
    (folder / "failing_plugin.py").write_text(PLUGIN)
    (folder / "failing_plugin-0.dist-info").mkdir()
    (folder / "failing_plugin-0.dist-info" / "METADATA").write_text("Name: failing-plugin\nVersion: 0\n")
    entry = "[sglang.srt.plugins]\nfailing = failing_plugin:register\n"
    (folder / "failing_plugin-0.dist-info" / "entry_points.txt").write_text(entry)
    path = os.pathsep.join(x for x in (str(folder), os.environ.get("PYTHONPATH")) if x)
    env = {"PYTHONPATH": path, "SGLANG_DIFFKV_CHECK_INTEGRITY": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    args = ["--max-total-tokens", "12000", "--chunked-prefill-size", "1024"]
    with Server(NANO, "diffkv", args, env=env) as running:
        yield running
        assert running.alive(), "the server died during the tests"
        running.flush_cache()
        stats = running.stats()
        assert stats is not None
        assert stats["pages_used"] == 0, "pages are lost after all tests"


@pytest.mark.parametrize("length", [NAMES, ROWS])
def test_a_batch_without_names_or_rows(server: Server, length: int) -> None:
    (end,) = ask(server, [tokens(length, 1)], [4])
    assert "Retry it" in end
    assert ask(server, [tokens(50, 2)], [4]) == ["length"]


def test_names_for_a_request_behind_a_prefix(server: Server) -> None:
    prompt = tokens(400, 3)
    assert ask(server, [prompt], [2]) == ["length"]
    (end,) = ask(server, [prompt + tokens(NAMES, 4)], [4])
    assert "Retry it" in end
    assert ask(server, [prompt + tokens(9, 5)], [4]) == ["length"]
