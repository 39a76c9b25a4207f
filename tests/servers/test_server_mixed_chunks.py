"""Requests that decode while others' prompts are read, on a real server: in the same passes (mixed chunks), or between
two chunks of a prompt."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.server_args import ServerArgs

from benchmarks import splits
from benchmarks.paths import NANO
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.client import Record
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server, stock_backend
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.srt.hooks.table import mix_with_running
from sglang_diffkv.srt.scheduling.allocator import DiffKVAllocator
from sglang_diffkv.srt.scheduling.lifecycle import RequestLifecycle
from sglang_diffkv.srt.scheduling.mixed_chunks import MixedChunks
from tests.servers.identity import check_tokens
from tests.servers.shared import STRICT, check_idle, stats_of

pytestmark = pytest.mark.server

CHUNKS = ["--chunked-prefill-size", "96"]
MIXED = [*CHUNKS, "--enable-mixed-chunk"]
REQUESTS, SHARED, NEW_TOKENS = 10, 3, 32
ROOM = 6000
"""Tokens of a pool in which all fit."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of one chunk and of several, some over one prefix."""
    items = reference.select(splits.load("dev"), levels=["easy", "medium"], n=REQUESTS - SHARED, seed=5)
    items += [x for x in splits.load("dev") if x.task == "fewshot_shared"][:SHARED]
    found = [chat_ids(load_tokenizer(NANO), x.prompt) for x in items]
    assert min(map(len, found)) < 96 < 2 * 96 < max(map(len, found))
    return found


def one_by_one(server: Server, prompts: list[list[int]]) -> list[Record]:
    return client.run(server.url, prompts, NEW_TOKENS, concurrency=1, top_logprobs=2)


STOCK: list[Record] = []


def stock_tokens(server_of: Callable[..., Server], prompts: list[list[int]]) -> list[Record]:
    """Stock's replies to one prompt after another, by one server for all tests."""
    if not STOCK:
        STOCK.extend(one_by_one(server_of(stock_backend(), CHUNKS), prompts))
    return STOCK


def crowd(server: Server, prompts: list[list[int]], **more: Any) -> list[list[int]]:
    """Replies to requests that come while others decode. None asks for log-probabilities, with which SGLang does not
    mix."""
    parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS, **more}

    def ask(number: int) -> list[int]:
        time.sleep(0.1 * number)
        payload = {"input_ids": prompts[number], "sampling_params": parameters}
        ids: list[int] = server.generate(payload)["output_ids"]
        return ids

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(ask, range(len(prompts))))


def crowds(
    server: Server, prompts: list[list[int]], expected: list[Record], what: str, met: Callable[[], bool]
) -> None:
    """Crowds whose tokens are the expected ones, until so many have met. On a quick machine one may end before the
    next comes."""
    for _ in range(5):
        check_tokens(crowd(server, prompts), expected, what)
        if met():
            return
        server.flush_cache()


def check_mixed(server: Server, least: int) -> dict[str, Any]:
    """Requests decoded in passes over prompts, at least so many, and nothing is lost."""
    stats = stats_of(server)
    assert stats["mixed_chunks"]["passes"] >= least and stats["faults"] == 0
    check_idle(server)
    return stats


@pytest.mark.parametrize("flags", [[], pytest.param(["--disable-overlap-schedule"], marks=pytest.mark.full)])
def test_lossless_gives_stock_tokens(
    flags: list[str], prompts: list[list[int]], server_of: Callable[..., Server]
) -> None:
    expected = stock_tokens(server_of, prompts)
    server = server_of("diffkv", [*MIXED, *flags], config={"tiers": ["BF16"]}, env=STRICT)
    least = REQUESTS // 2
    crowds(server, prompts, expected, "mixed", lambda: stats_of(server)["mixed_chunks"]["passes"] >= least)
    check_mixed(server, least)


BETWEEN = [*CHUNKS, "--prefill-decode-interval", "1", "--decode-log-interval", "1"]
between_chunks = pytest.mark.skipif(
    "prefill_decode_interval" not in ServerArgs.__annotations__, reason="this SGLang has no --prefill-decode-interval"
)


@between_chunks
def test_tokens_between_chunks_are_stock_s(prompts: list[list[int]], server_of: Callable[..., Server]) -> None:
    """A prompt that has begun waits while others decode."""
    expected = stock_tokens(server_of, prompts)
    server = server_of("diffkv", BETWEEN, config={"tiers": ["BF16"]}, env=STRICT)
    crowds(server, prompts, expected, "between chunks", lambda: any_between(server.log_text()))
    assert any_between(server.log_text())
    check_idle(server)


@pytest.mark.full
@between_chunks
@pytest.mark.parametrize("fidelity", ["compressed", "exact"])
def test_a_small_pool_between_chunks(fidelity: str, prompts: list[list[int]], server_of: Callable[..., Server]) -> None:
    args = [*BETWEEN, "--max-total-tokens", "1100", "--schedule-conservativeness", "0.1"]
    server = server_of("diffkv", args, config={"prefix_fidelity": fidelity}, env=STRICT)
    short = [x for x in prompts if len(x) < 600]
    assert {len(x) for x in crowd(server, short, max_new_tokens=160, min_new_tokens=160)} == {160}
    assert stats_of(server)["faults"] == 0
    check_idle(server)


def any_between(log: str) -> bool:
    """Whether requests decoded after a chunk and before the next of the same prompt, by a server's log of each pass."""
    passes = re.findall(r"(Prefill|Decode) batch(?:, #new-seq: \d+, #new-token: (\d+))?", log)
    kinds = [(kind, int(tokens or 0)) for kind, tokens in passes]
    triples = zip(kinds, kinds[1:], kinds[2:])
    return any(a == ("Prefill", 96) and b[0] == "Decode" and c[0] == "Prefill" for a, b, c in triples)


CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "exact": {"prefix_fidelity": "exact"},
    "zipage": {"tiers": ["BF16"], "policy": {"name": "zipage", "max_blocks": 4, "block": 32}, "page_tokens": 16},
    "snapkv": {"tiers": ["K8V4"], "policy": {"name": "snapkv", "fraction": 0.5, "window": 16}},
}


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_passes_apart(
    name: str, prompts: list[list[int]], server_of: Callable[..., Server]
) -> None:
    """What is kept of a request does not depend on what else is in its passes. No prompt is cut: where it is decides
    how its keys round, and so which of two tokens of nearly one score a method keeps."""
    prompts = [x for x in prompts if len(x) < 600]
    args = ["--max-total-tokens", str(2 * ROOM), "--chunked-prefill-size", "2048", "--disable-radix-cache"]
    apart = server_of("diffkv", args, config=CONFIGS[name], env=STRICT)
    expected = one_by_one(apart, prompts)
    assert "mixed_chunks" not in stats_of(apart)
    server = server_of("diffkv", [*args, "--enable-mixed-chunk"], config=CONFIGS[name], env=STRICT)
    check_tokens(crowd(server, prompts), expected, name)
    check_mixed(server, 3)


def parts(*, running: int = 1, fits: bool = True, **scheduler: Any) -> tuple[MixedChunks, Any, Any]:
    """With SGLang's scheduler and the batch of those that run."""
    counts: Any = SimpleNamespace(upcoming=None, waits=True)
    counts.wait_for_device = partial(setattr, counts, "waits")
    fields = {"is_mixed_chunk": True, "chunked_req": None, "chunked_prefill_size": 8, **scheduler}

    def check_decode_mem() -> bool:
        assert not counts.waits, "what the pass that runs leaves is not waited for"
        return fits

    reqs = list(range(running))
    batch = SimpleNamespace(reqs=reqs, is_empty=lambda: not reqs, check_decode_mem=check_decode_mem)
    return MixedChunks(counts), SimpleNamespace(**fields), batch


@pytest.mark.parametrize("fits", [True, False])
def test_those_that_do_not_fit_sit_the_pass_out(fits: bool) -> None:
    """And SGLang mixes the next one, if that fits."""
    mixed, scheduler, running = parts(fits=fits)
    for number in (1, 2):
        with mixed.scheduling(scheduler, running):
            assert not mixed.joins(running.reqs)  # no prompts are planned yet
            mixed.counts.upcoming = object()  # type: ignore[assignment]
            mixed.prompts_planned()
            assert scheduler.is_mixed_chunk == fits
            if fits:
                assert mixed.joins(running.reqs)
        mixed.counts.upcoming = None
        assert scheduler.is_mixed_chunk and mixed.counts.waits and not mixed.joins([])
        assert mixed.report() == {"passes": number * fits, "left_out": number * (not fits)}
        assert mixed.decoding == running.reqs[: int(fits)]
    scheduler.is_mixed_chunk = False
    with mixed.scheduling(scheduler, running):
        mixed.prompts_planned()
    assert mixed.report()["left_out"] == 2 * (not fits) and not scheduler.is_mixed_chunk and not mixed.decoding


@pytest.mark.parametrize(("running", "chunked", "mixes"), [(7, True, True), (8, True, False), (8, False, True)])
def test_a_prompt_goes_on_where_those_that_run_fill_its_chunk(running: int, chunked: bool, mixes: bool) -> None:
    """SGLang gives its next chunk what those that run leave, and would give it nothing, or less."""
    mixed, scheduler, batch = parts(running=running, chunked_req=object() if chunked else None)
    with mixed.scheduling(scheduler, batch):
        assert scheduler.is_mixed_chunk == mixes
    assert scheduler.is_mixed_chunk and mixed.left_out == (not mixes)


@pytest.mark.parametrize("known", [4, 5])
def test_a_token_is_where_its_sequence_ends(known: int) -> None:
    """Of a request whose fifth token is to run, whether or not it was in the pass before: then its fourth is the last
    that SGLang knows of."""
    req = SimpleNamespace(origin_input_ids=[0] * 10, output_ids=[0] * known, full_untruncated_fill_ids=[0] * 14)
    req.set_extend_range = lambda start, end: None
    req.refresh_fill_ids = req._refresh_fill_ids = lambda: None
    lengths, slots = torch.tensor([15]), torch.tensor([9])
    both = {"seq_lens_cpu": lengths, "req_pool_indices": slots, "req_pool_indices_cpu": slots, "out_cache_loc": slots}
    running = SimpleNamespace(reqs=[req], batch_size=lambda: 1, is_empty=lambda: False, **both)
    allocator = object.__new__(DiffKVAllocator)
    allocator.requests = SimpleNamespace()  # type: ignore[assignment]
    batch = SimpleNamespace(
        **both, token_to_kv_pool_allocator=allocator, spec_algorithm=SimpleNamespace(is_none=lambda: True),
        enable_overlap=True, mamba_track_indices=None, merge_batch=lambda other: None, prefix_lens=[3], extend_lens=[6],
        extend_num_tokens=6, extend_logprob_start_lens=[0],
    )  # fmt: skip
    mix_with_running(ScheduleBatch.mix_with_running, batch, running)
    assert batch.prefix_lens == [3, 14] and batch.extend_lens == [6, 1]


def test_budgets_see_those_that_decode_beside_prompts() -> None:
    """Each once, behind the results of the pass before: SGLang's running batch does not have them then."""
    followed: list[Any] = []
    budgets = SimpleNamespace(results_out=lambda reqs: None, runs_on=followed.extend)
    prompt, runs, ended, joined = (SimpleNamespace(finished=lambda ends=ends: ends) for ends in (0, 0, 1, 0))
    requests: Any = SimpleNamespace(listeners=[budgets], mixed=SimpleNamespace(decoding=[runs, joined]))
    RequestLifecycle.after_step(requests, [prompt, ended], [runs])
    assert followed == [prompt, runs, joined]


@pytest.mark.versions
@pytest.mark.parametrize("fidelity", ["compressed", pytest.param("exact", marks=pytest.mark.full)])
def test_a_small_pool(fidelity: str, prompts: list[list[int]], server_of: Callable[..., Server]) -> None:
    """Where the next tokens of those that run do not fit beside a prompt, the pass is one over prompts alone, and
    requests are retracted as ever. All get their tokens."""
    args = [*MIXED, "--max-total-tokens", "1100", "--schedule-conservativeness", "0.1"]
    server = server_of("diffkv", args, config={"prefix_fidelity": fidelity}, env=STRICT)
    short = [x for x in prompts if len(x) < 600]
    for _ in range(3):  # until they have come close enough together for it
        assert {len(x) for x in crowd(server, short, max_new_tokens=160, min_new_tokens=160)} == {160}
        if "Retract requests" in server.log_text():
            break
        server.flush_cache()
    assert "Retract requests" in server.log_text()
    check_mixed(server, 1)
