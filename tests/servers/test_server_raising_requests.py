"""Errors of SGLang's that name no request, injected by a plugin of the test while a batch of several is prepared: the
request that raises ends with the error, and nobody else notices."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmarks.quality.random_adapters import adapter_args, make_adapters
from sglang_diffkv.evaluate.server import Server
from tests.helpers import until
from tests.servers.failing_plugin import failing_server
from tests.servers.hybrid_models import KINDS
from tests.servers.pair import ENGINE, MARKS, Pair, request
from tests.servers.second_plugin import install
from tests.servers.shared import EVERY_STEP, SHALLOW, check_idle, stats_of, tokens

pytestmark = pytest.mark.server
_, DISAGGREGATED = MARKS

UNPINNED = Path(__file__).parents[1] / "data" / "unpinned"

HOLDS, HELD_SECONDS = 61, 3.0
"""A prompt of so many tokens holds the scheduler up for so long."""
HELD = "held"
"""What the name of a request begins with that waits for others: ``held-3-...`` until three such have come."""
ROWS, BETWEEN, SAMPLING = 71, 72, 73
"""What fails of SGLang's for prompts of so many tokens: before anything is allocated, behind the allocation of KV slots
of which no request knows yet, and at the end."""
LAST_CHUNK = 2 * 1024 + 199
"""The same as the last for a prompt of several chunks, and only in its last."""
LINE = 200
"""Tokens that prompts have in common."""

PLUGIN = f"""
import time


def register():
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from sglang_diffkv.srt.scheduling.allocator import SERVED

    receive, came = SchedulerRequestReceiver.recv_requests, []

    def receive_(self, *args, **more):
        found = receive(self, *args, **more)
        while True:
            held = [name for x in found if (name := str(getattr(x, "rid", ""))).startswith("{HELD}-")]
            for name in held[len(came):]:
                print("come:", name, flush=True)
            came[:] = held
            if not held or len(held) == int(held[0].split("-")[1]):
                came.clear()
                return found
            time.sleep(0.005)
            found += receive(self)

    rows, write, sampling = ReqToTokenPool.alloc, allocation.write_cache_indices, SamplingBatchInfo.from_schedule_batch

    def check(prompts, length, error):
        if length in prompts:
            print(f"injected among {{len(prompts)}}", flush=True)
            raise error

    def rows_(self, reqs):
        prompts = [len(req.origin_input_ids) for req in reqs]
        if {HOLDS} in prompts:
            slots = SERVED["diffkv"]
            found = slots.kv_slots_free() + slots.requests.tree.evictable_tokens()
            print("kv slots:", found, "of", slots.ledger.kv_slots, flush=True)
            time.sleep({HELD_SECONDS})
        check(prompts, {ROWS}, LookupError("injected before rows are allocated"))
        return rows(self, reqs)

    def write_(*args):
        check(args[6].tolist(), {BETWEEN}, RuntimeError("injected behind KV slots"))
        return write(*args)

    def sampling_(batch, vocab_size):
        check([len(req.origin_input_ids) for req in batch.reqs], {SAMPLING}, ValueError("injected at the end"))
        check(batch.seq_lens_cpu.tolist(), {LAST_CHUNK}, TypeError("injected in a last chunk"))
        return sampling(batch, vocab_size)

    SchedulerRequestReceiver.recv_requests = receive_
    ReqToTokenPool.alloc = rows_
    allocation.write_cache_indices = write_
    SamplingBatchInfo.from_schedule_batch = staticmethod(sampling_)
"""

RAISED = {
    ROWS: (500, "LookupError: injected before rows are allocated"),
    BETWEEN: (500, "RuntimeError: injected behind KV slots"),
    SAMPLING: (400, "ValueError: injected at the end"),
    LAST_CHUNK: (400, "TypeError: injected in a last chunk"),
}
"""Status and reason that a client is told."""


@pytest.fixture(scope="module", params=["compressed", pytest.param("exact", marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("plugin")
    with failing_server(folder, PLUGIN, {"prefix_fidelity": request.param}, SHALLOW) as running:
        yield running


def ask(server: Server, prompt: list[int], **more: Any) -> requests.Response:
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    return server.post("/generate", {"input_ids": prompt, "sampling_params": sampling, **more})


@contextmanager
def among(server: Server) -> Iterator[list[int]]:
    """Inside, errors are injected. Yields the numbers of requests of the batches that they met, once it is left."""
    found: list[int] = []
    before = len(server.log_text())
    yield found
    found += [int(count) for count in re.findall(r"injected among (\d+)", server.log_text()[before:])]


def together(server: Server, prompts: Sequence[list[int]], **more: Any) -> list[requests.Response]:
    """Answers to prompts that wait at once, in this order."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers: list[Future[requests.Response]] = []
        for number, prompt in enumerate(prompts):
            name = f"{HELD}-{len(prompts)}-{number}-{uuid.uuid4().hex}"
            answers.append(pool.submit(ask, server, prompt, rid=name, **more))
            until(lambda name=name: f"come: {name}" in server.log_text())  # type: ignore[misc]
        return [x.result() for x in answers]


def check_raised(answer: requests.Response, length: int) -> None:
    status, reason = RAISED[length]
    assert answer.status_code == status, answer.text
    assert reason in answer.text and "cannot be prepared" in answer.text


def check_well(answer: requests.Response, cached: int = 0) -> dict[str, Any]:
    """The request went on as if nothing had been."""
    assert answer.ok, answer.text
    told: dict[str, Any] = answer.json()["meta_info"]
    assert (told["completion_tokens"], told["num_retractions"], told["cached_tokens"]) == (6, 0, cached)
    return told


@pytest.mark.parametrize("length", [ROWS, BETWEEN, SAMPLING])
def test_one_of_several(server: Server, length: int) -> None:
    with among(server) as met:
        first, second, third = together(server, [tokens(x, length + x) for x in (50, length, 90)])
    check_raised(second, length)
    check_well(first)
    check_well(third)
    assert met == [3, 1], "it was met in a batch of all, and alone"


@pytest.mark.parametrize("length", [ROWS, BETWEEN, SAMPLING])
def test_alone(server: Server, length: int) -> None:
    with among(server) as met:
        check_raised(ask(server, tokens(length, 9)), length)
    assert met == [1]


def test_kv_slots_come_back(server: Server) -> None:
    """All that the tree does not have are free once nothing runs."""
    together(server, [tokens(BETWEEN, 20), tokens(50, 21)])
    together(server, [tokens(SAMPLING, 22), tokens(51, 23)])
    check_well(ask(server, tokens(HOLDS, 24)))
    free, every = re.findall(r"kv slots: (\d+) of (\d+)", server.log_text())[-1]
    assert free == every


def test_two_of_several(server: Server) -> None:
    answers = together(server, [tokens(x, 200 + x) for x in (SAMPLING, 50, ROWS)])
    check_raised(answers[0], SAMPLING)
    check_well(answers[1])
    check_raised(answers[2], ROWS)


def test_others_behind_a_prefix(server: Server) -> None:
    """What they have found in the prefix cache they find again."""
    prompt = tokens(LINE, 30)
    check_well(ask(server, prompt))
    cached = check_well(ask(server, prompt + tokens(7, 31)), cached=LINE)["cached_tokens"]
    with among(server) as met:
        first, second = together(server, [prompt + tokens(8, 32), tokens(SAMPLING, 33)])
    check_well(first, cached)
    check_raised(second, SAMPLING)
    assert met == [2, 1]


@pytest.mark.parametrize("length", [ROWS, BETWEEN, SAMPLING])
def test_beside_the_last_chunk_of_a_prompt(server: Server, length: int) -> None:
    """The prompt is computed anew, with all of its logprobs."""
    prompt = tokens(2 * 1024 + 100 + length, length)
    with among(server) as met:
        long, short, other = together(
            server, [prompt, tokens(length, 300 + length), tokens(55, 400 + length)],
            return_logprob=True, logprob_start_len=0,
        )  # fmt: skip
    assert len(check_well(long)["input_token_logprobs"]) == len(prompt)
    check_raised(short, length)
    check_well(other)
    assert met == [3, 1]


def test_the_last_chunk_of_a_prompt(server: Server) -> None:
    with among(server) as met:
        long, short = together(server, [tokens(LAST_CHUNK, 50), tokens(55, 51)])
    check_raised(long, LAST_CHUNK)
    check_well(short)
    assert met == [2, 1]


def test_replies_under_way(server: Server) -> None:
    """They go on while others' batch is undone."""
    with ThreadPoolExecutor(1) as pool:
        sampling = {"max_new_tokens": 120, "temperature": 0, "ignore_eos": True}
        reply = pool.submit(server.post, "/generate", {"input_ids": tokens(40, 60), "sampling_params": sampling})
        until(lambda: bool(stats_of(server)["running"]))
        first, second = together(server, [tokens(50, 61), tokens(BETWEEN, 62)])
        assert not reply.done()
        assert reply.result().json()["meta_info"]["completion_tokens"] == 120
    check_well(first)
    check_raised(second, BETWEEN)


def test_an_adapter_can_be_unloaded(tmp_path: Path) -> None:
    """SGLang waits for all requests that have it to end, and notices that of one that raised."""
    (tmp_path / "plugin").mkdir()
    make_adapters(tmp_path / "adapters")
    args = ("--disable-cuda-graph", *adapter_args(tmp_path / "adapters"), "--lora-backend", "torch_native")
    path = os.pathsep.join([str(UNPINNED), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        with failing_server(tmp_path / "plugin", PLUGIN, {}, args) as server:
            first, second = together(server, [tokens(50, 75), tokens(SAMPLING, 76)], lora_path="a")
            check_well(first)
            assert second.status_code == 500 and RAISED[SAMPLING][1] in second.text
            unloaded = server.post("/unload_lora_adapter", {"lora_name": "a"}, timeout=60.0)
            assert unloaded.ok and unloaded.json()["success"]


def test_states(tmp_path: Path) -> None:
    """Of a model whose other layers have states, of which one is free for each request that may run."""
    (tmp_path / "plugin").mkdir()
    (tmp_path / "model").mkdir()
    hybrid = KINDS["qwen3_next"](tmp_path / "model")
    args = ("--max-mamba-cache-size", "12", "--chunked-prefill-size", "256")
    with failing_server(tmp_path / "plugin", PLUGIN, {}, args, model=hybrid.model, env=hybrid.env) as server:
        for length in (ROWS, BETWEEN, SAMPLING):
            with among(server) as met:
                first, second, third = together(server, [tokens(x, length + x) for x in (300, length, 90)])
            check_raised(second, length)
            assert [x.json()["meta_info"]["completion_tokens"] for x in (first, third)] == [6, 6]
            assert len(met) == 2 and met[0] > met[1] == 1


def test_prompts_brought_back_to_the_gpu(tmp_path: Path) -> None:
    """A batch is undone whose requests have just got prefixes back from host memory."""
    args = ("--enable-hierarchical-cache", "--hicache-ratio", "20", "--hicache-write-policy", "write_through")
    config = {"policy": {"name": "diffkv", "window": 16}, "share_min_tokens": 32}
    first, second = tokens(150, 70), tokens(160, 71)
    with failing_server(tmp_path, PLUGIN, config, (*args, *SHALLOW, "--max-total-tokens", "900")) as server:
        for prompt in (first, second, *(tokens(240, 80 + seed) for seed in range(6))):
            check_well(ask(server, prompt))
        with among(server) as met:
            answers = together(server, [first + [7], tokens(SAMPLING, 72), second + [7]])
        check_raised(answers[1], SAMPLING)
        for answer in (answers[0], answers[2]):
            assert answer.ok and answer.json()["meta_info"]["cached_tokens"] > 100
        assert stats_of(server)["host_prefixes"]["hits"] >= 1
        assert met == [3, 1]


@DISAGGREGATED
@pytest.mark.parametrize("failing", [SAMPLING, LAST_CHUNK])
def test_a_prefill_server(failing: int, tmp_path: Path) -> None:
    """Another server goes on with prompts that come in several chunks, of which one is in the middle when a batch is
    undone."""
    env = install(tmp_path, "failing_plugin", PLUGIN)
    env["PYTHONPATH"] = os.pathsep.join([str(ENGINE), env["PYTHONPATH"]])
    args = ("--max-total-tokens", "12000", "--chunked-prefill-size", "1024", *SHALLOW)
    prompts = [tokens(LAST_CHUNK if failing == LAST_CHUNK else 2 * 1024 + 100, 90), tokens(50, 91)]
    prompts += [tokens(SAMPLING, 92)] * (failing == SAMPLING)
    with Pair({}, args, env={**EVERY_STEP, **env}) as pair, among(pair.prefill) as met:
        held = pair.send(request(tokens(HOLDS, 93), 6))
        until(lambda: "kv slots:" in pair.prefill.log_text())
        sent = []
        for prompt in prompts:
            sent.append(pair.send(request(prompt, 6)))
            time.sleep(0.05)
        for first, second in (held, *sent):
            first.result()
            ids = second.result().json().get("output_ids", [])
            failed = prompts[sent.index((first, second))] if (first, second) in sent else []
            assert len(ids) == (0 if len(failed) == failing else 6)
            if len(failed) == failing:
                assert RAISED[failing][1] in first.result().text
        for server in (pair.prefill, pair.decode):
            until(lambda server=server: stats_of(server)["transfer"]["on_the_way"] == 0)  # type: ignore[misc]
            check_idle(server)
    assert met[0] > met[-1] == 1
