"""Errors while a batch is prepared, ours and SGLang's own, injected by a plugin of the test: they end the requests that
they concern, by name, and nobody else's. An urgent prompt that is refused after others made room for it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from sglang_diffkv.evaluate.server import Server
from tests.servers.failing_plugin import failing_server
from tests.servers.shared import SHALLOW, tokens

pytestmark = pytest.mark.server

PREFIX, CHUNK, REPLY = 400, 333, 555
"""What fails of ours: a matched prefix of so many tokens, a prompt of so many new ones, a decode step at this
position."""
URGENT = 888
"""New tokens of a prompt for which there are no pages the first time that it is asked for."""
RUNNING, LONG = 4, 250
"""Requests that may run at once, and tokens of replies that have not ended when an urgent one comes."""
KV_SLOTS, ROWS = 444, 222
"""What fails of SGLang's: KV slots for so many new tokens, rows for a request with so many."""

PLUGIN = f"""
def register():
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from sglang_diffkv.mem_pool.ledger import PageLedger
    from sglang_diffkv.mem_pool.page_manager import PageManager
    from sglang_diffkv.mem_pool.table_space import TableFull, TableSpace
    from sglang_diffkv.srt.scheduling.allocator import DiffKVAllocator

    alloc, rows = DiffKVAllocator.alloc, ReqToTokenPool.alloc

    def alloc_(self, need_size):
        return None if need_size == {KV_SLOTS} else alloc(self, need_size)

    def rows_(self, reqs):
        return None if any(len(req.origin_input_ids) == {ROWS} for req in reqs) else rows(self, reqs)

    DiffKVAllocator.alloc, ReqToTokenPool.alloc = alloc_, rows_

    admits, has_spare, asked = PageLedger.admits, PageLedger.has_spare, []

    def admits_(self, new_tokens, blocks):
        if new_tokens != {URGENT}:
            return admits(self, new_tokens, blocks)
        asked.append(len(self.manager.rows))
        print("urgent: asked with", asked[-1], "running", flush=True)
        return len(asked) > 1 and admits(self, new_tokens, blocks)

    def has_spare_(self, new_tokens):
        return new_tokens != {URGENT} and has_spare(self, new_tokens)

    PageLedger.admits, PageLedger.has_spare = admits_, has_spare_

    attach, append_all, refused = PageManager.attach_prefix, TableSpace.append_all, TableSpace.refused

    def attach_prefix(self, row, parts):
        if parts[-1][2] == {PREFIX}:
            raise ValueError("injected while a prefix is attached")
        attach(self, row, parts)

    def append_all_(self, rows, new_tokens):
        if {CHUNK} in new_tokens:
            raise TableFull(rows[new_tokens.index({CHUNK})], "injected while a step is planned")
        append_all(self, rows, new_tokens)

    def refused_(self, rows, new_tokens):
        found = refused(self, rows, new_tokens)
        found.update({{row: "injected in decode" for row in rows if self.rows_for_test.length(row) == {REPLY}}})
        return found

    init = PageManager.__init__

    def init_(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.space.rows_for_test = self.rows

    PageManager.__init__ = init_
    PageManager.attach_prefix, TableSpace.refused = attach_prefix, refused_
    TableSpace.append_all = append_all_
"""


@pytest.fixture(scope="module", params=["compressed", pytest.param("exact", marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("plugin")
    args = ["--enable-priority-scheduling", "--max-running-requests", str(RUNNING), *SHALLOW]
    with failing_server(folder, PLUGIN, {"prefix_fidelity": request.param}, args) as running:
        yield running


def ask(server: Server, ids: list[list[int]], longest: list[int]) -> list[str]:
    """How prompts sent at once ended, each: its finish reason, or the message of its error."""

    def one(prompt: list[int], count: int) -> str:
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        reply = server.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
        return reply.json()["meta_info"]["finish_reason"]["type"] if reply.ok else reply.text

    with ThreadPoolExecutor(len(ids)) as pool:
        return list(pool.map(one, ids, longest))


def test_a_prefix_that_cannot_be_attached(server: Server) -> None:
    prompt = tokens(900, 1)
    ask(server, [prompt], [2])
    ends = ask(server, [prompt + [7], prompt[:PREFIX] + tokens(9, 2), prompt[:300] + tokens(9, 3)], [4, 4, 4])
    assert [ends[0], ends[2]] == ["length", "length"]
    assert "injected while a prefix is attached" in ends[1]


def test_a_step_that_cannot_be_planned(server: Server) -> None:
    ends = ask(server, [tokens(50, 4), tokens(CHUNK, 5), tokens(70, 6)], [4, 4, 4])
    assert [ends[0], ends[2]] == ["length", "length"]
    assert "injected while a step is planned" in ends[1]


def test_the_last_chunk_of_a_long_prompt(server: Server) -> None:
    (end,) = ask(server, [tokens(2 * 1024 + CHUNK, 8)], [4])
    assert "injected while a step is planned" in end
    assert ask(server, [tokens(2 * 1024, 8), tokens(70, 9)], [8, 8]) == ["length", "length"]


def test_a_step_of_decode(server: Server) -> None:
    ends = ask(server, [tokens(REPLY - 10, 10), tokens(30, 11)], [30, 30])
    assert "injected in decode" in ends[0]
    assert ends[1] == "length"
    ends = ask(server, [tokens(REPLY - 10, 12)], [30])
    assert "injected in decode" in ends[0], "alone in its batch"
    assert ask(server, [tokens(30, 13)], [5]) == ["length"]


@pytest.mark.parametrize("length", [KV_SLOTS, ROWS])
def test_a_batch_without_kv_slots_or_rows(server: Server, length: int) -> None:
    (end,) = ask(server, [tokens(length, 21)], [4])
    assert "cannot be prepared: RuntimeError" in end
    assert ask(server, [tokens(50, 22)], [4]) == ["length"]


def test_kv_slots_for_a_request_behind_a_prefix(server: Server) -> None:
    """The batch got nothing, and is undone all the same."""
    prompt = tokens(390, 23)
    assert ask(server, [prompt], [2]) == ["length"]
    (end,) = ask(server, [prompt + tokens(KV_SLOTS, 24)], [4])
    assert "cannot be prepared: RuntimeError" in end
    assert ask(server, [prompt + tokens(9, 25)], [4]) == ["length"]


def test_who_made_room_for_a_request_that_is_refused(server: Server) -> None:
    """SGLang takes a running request from the batch, and then the urgent one finds no pages. Nobody is forgotten."""

    def stream(seed: int, first: threading.Barrier) -> int:
        sampling = {"max_new_tokens": LONG, "temperature": 0, "ignore_eos": True}
        request = {"input_ids": tokens(60, seed), "sampling_params": sampling, "stream": True}
        with requests.post(f"{server.url}/generate", json=request, stream=True, timeout=100) as response:
            lines = (x for x in response.iter_lines() if x.startswith(b"data: {"))
            last = next(lines)
            first.wait(120)
            for last in lines:  # noqa: B007
                pass
        return int(json.loads(last.removeprefix(b"data: "))["meta_info"]["completion_tokens"])

    full = threading.Barrier(RUNNING + 1)
    with ThreadPoolExecutor(RUNNING) as pool:
        replies = [pool.submit(stream, 30 + i, full) for i in range(RUNNING)]
        full.wait(120)
        sampling = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
        urgent = {"input_ids": tokens(URGENT, 40), "sampling_params": sampling, "priority": 50}
        assert len(server.generate(urgent)["output_ids"]) == 2
        assert not any(x.done() for x in replies), "it waited for one to end"
        assert [x.result() for x in replies] == [LONG] * RUNNING
    asked = re.findall(r"urgent: asked with (\d+) running", server.log_text())
    assert asked[0] == str(RUNNING - 1), "nobody made room for it"
