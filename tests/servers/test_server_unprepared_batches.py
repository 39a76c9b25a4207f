"""SGLang's own errors while it gives a prefill batch rows and KV slots: the batch is undone, though it got nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_diffkv.evaluate.server import Server
from tests.servers.failing_plugin import failing_server
from tests.servers.shared import tokens
from tests.servers.test_server_refused_requests import ask

pytestmark = pytest.mark.server

KV_SLOTS, ROWS = 333, 222
"""What fails: KV slots for so many new tokens, rows for a request with so many."""

PLUGIN = f"""
def register():
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from sglang_diffkv.srt.allocator import DiffKVAllocator

    alloc, rows = DiffKVAllocator.alloc, ReqToTokenPool.alloc

    def alloc_(self, need_size):
        return None if need_size == {KV_SLOTS} else alloc(self, need_size)

    def rows_(self, reqs):
        return None if any(len(req.origin_input_ids) == {ROWS} for req in reqs) else rows(self, reqs)

    DiffKVAllocator.alloc, ReqToTokenPool.alloc = alloc_, rows_
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with failing_server(tmp_path_factory.mktemp("plugin"), PLUGIN, {}) as running:
        yield running


@pytest.mark.parametrize("length", [KV_SLOTS, ROWS])
def test_a_batch_without_kv_slots_or_rows(server: Server, length: int) -> None:
    (end,) = ask(server, [tokens(length, 1)], [4])
    assert "Retry it" in end
    assert ask(server, [tokens(50, 2)], [4]) == ["length"]


def test_kv_slots_for_a_request_behind_a_prefix(server: Server) -> None:
    prompt = tokens(400, 3)
    assert ask(server, [prompt], [2]) == ["length"]
    (end,) = ask(server, [prompt + tokens(KV_SLOTS, 4)], [4])
    assert "Retry it" in end
    assert ask(server, [prompt + tokens(9, 5)], [4]) == ["length"]
