"""A pool too small for its requests, whose pages go to the host when they are retracted: they come back, the replies
are those of a roomy pool where nothing is lost, and nobody's pages or host memory stay behind."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import splits
from benchmarks.paths import NANO
from benchmarks.quality.random_drafts import model_drafts
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.client import Record
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.srt.models.speculation import CHAIN
from tests.helpers import until
from tests.servers.events import Events
from tests.servers.hybrid_models import KINDS
from tests.servers.identity import check_tokens
from tests.servers.shared import SHALLOW, STRICT, SharedServer, check_idle, stats_of, tokens

pytestmark = pytest.mark.server

LOSSLESS = {"tiers": ["BF16"]}
COMPRESSED = {"prefix_fidelity": "compressed"}
EXACT = {"prefix_fidelity": "exact"}
TIGHT = ("--max-total-tokens", "620", "--schedule-conservativeness", "0.1")
"""Two or three requests fill the pool."""
NGRAM_TREES = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
NGRAMS = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "5", *CHAIN.split())
CHUNKED, ALONE = ("--chunked-prefill-size", "64"), ("--disable-overlap-schedule",)


def _reply(server: Server, prompt: list[int], new_tokens: int, *, whole: bool = False, **named: Any) -> Any:
    least = {"min_new_tokens": new_tokens} if whole else {}
    parameters = {"temperature": 0, "max_new_tokens": new_tokens, **least}
    return server.generate({"input_ids": prompt, "sampling_params": parameters, **named})


def _questions(count: int) -> list[list[int]]:
    """With long replies, in pairs that share all but their last tokens."""
    items = [x for x in splits.load("dev") if x.task == "recur" and x.level == "hard"][: count // 2]
    ids = [chat_ids(load_tokenizer(NANO), x.prompt) for x in items]
    return [x for prompt in ids for x in (prompt, prompt[:-8] + prompt[-4:])]


def _until_restored(server: Server, load: Callable[[], object]) -> dict[str, int]:
    """The counts once a retracted request has come back. How many requests meet is the machine's choice, so the load
    may come again."""
    for _ in range(5):
        load()
        if (found := _check_balanced(server))["restored"]:
            break
    return found


def _load(server: Server, prompts: list[list[int]], new_tokens: int = 280, name: str = "") -> list[list[int]]:
    """Replies to all prompts at once. ``name``: the clients choose their requests' ids, which begin so."""

    def ask(index: int) -> list[int]:
        time.sleep(0.1 * index)
        named = {"rid": f"{name}{index}"} if name else {}
        return _reply(server, prompts[index], new_tokens, **named)["output_ids"]

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(ask, range(len(prompts))))


TURNS = [tokens(40 + 10 * index, 100 + index) for index in range(4)]
STATES = ("--chunked-prefill-size", "64", "--max-mamba-cache-size", "12")
"""Four requests run."""


def _answers(server: Server) -> list[list[int]]:
    """Replies of 120 tokens to ``TURNS``, all at once."""
    with ThreadPoolExecutor(len(TURNS)) as threads:
        asked = [threads.submit(_reply, server, prompt, 120, whole=True) for prompt in TURNS]
        return [x.result()["output_ids"] for x in asked]


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        pytest.param(kind, args, marks=() if (kind, args) == ("lfm2", ()) else pytest.mark.full)
        for kind in KINDS
        for args in ((), ALONE)
    ],
    ids=str,
)
def test_a_model_s_states_come_back(
    kind: str, args: tuple[str, ...], tmp_path: Path, server_of: Callable[..., Server]
) -> None:
    """Under overlap scheduling the state is that behind a pass whose results are not out. Where rounding changes
    replies that run together in a roomy pool too, half of them stay."""
    hybrid = KINDS[kind](tmp_path)
    roomy = hybrid.serve(server_of, (*STATES, "--max-total-tokens", "6000", *args), LOSSLESS)
    expected = [client.ask(roomy.url, prompt, 120, top_logprobs=2) for prompt in TURNS]
    alike = _answers(roomy) == [x.output_ids for x in expected]
    server = hybrid.serve(server_of, (*STATES, "--max-total-tokens", "360", *TIGHT[2:], *args), LOSSLESS)
    counts = _until_restored(
        server, lambda: check_tokens(_answers(server), expected, "retracted", equal=1 if alike else 0.5)
    )
    assert counts["restored"] > 2 * counts["recomputed"] and not counts["no_host_memory"]
    assert _one_token_passes(server, *map(len, TURNS))


def _passes(server: Server) -> tuple[list[list[int]], int]:
    """Replies of 180 tokens to four questions at once, and passes that verified drafts for them."""

    def ask(index: int) -> Any:
        time.sleep(0.1 * index)
        return _reply(server, questions[index], 180, whole=True)

    questions = _questions(4)
    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(ask, range(4)))
    return [x["output_ids"] for x in replies], sum(x["meta_info"]["spec_verify_ct"] for x in replies)


@pytest.mark.full
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("overlap", [(), ALONE], ids=["overlap", "alone"])
def test_a_draft_model_finds_what_it_stored(
    branches: int, overlap: tuple[str, ...], server_of: Callable[..., Server]
) -> None:
    """A model that drafts for itself is right nearly always, unless it has lost what it stored."""
    drafts = (*model_drafts("STANDALONE", NANO, branches=branches, drafts=4 if branches == 1 else 8), *overlap)
    usual, passes = _passes(server_of("diffkv", ("--max-total-tokens", "16384", *drafts), config=LOSSLESS, env=STRICT))
    server = server_of("diffkv", (*TIGHT, *drafts), config=LOSSLESS, env=STRICT)
    replies, found = _passes(server)
    assert replies == usual
    counts = _check_balanced(server)
    assert counts["restored"] and not counts["no_host_memory"] and _one_token_passes(server)
    assert passes < 0.4 * 4 * 180, "a model that drafts for itself is often wrong"
    assert found <= passes + 2 * counts["restored"], "drafts are worse once a request has come back"


@pytest.mark.full
@pytest.mark.parametrize("config", [LOSSLESS, COMPRESSED], ids=str)
def test_pages_of_several_tokens(config: dict[str, Any], roomy: list[Record], server_of: Callable[..., Server]) -> None:
    """What is behind the last of them is computed again."""
    server = server_of("diffkv", (*TIGHT, "--page-size", "16"), config=config, env=STRICT)
    replies = _load(server, _questions(4), 180)
    assert all(replies)
    if config is LOSSLESS:
        check_tokens(replies, roomy, "retracted")
    counts = _check_balanced(server)
    assert counts["restored"] > counts["recomputed"] and counts["tokens_restored"] >= 60 * counts["restored"]


def _counts(server: Server) -> dict[str, int]:
    return stats_of(server)["retracted"]


def _check_balanced(server: Server) -> dict[str, int]:
    """All that was kept came back or was dropped."""
    found = _counts(server)
    assert found["kept"] == found["restored"] + found["recomputed"] + found["dropped"]
    assert (found["waiting"], found["host_bytes"]) == (0, 0)
    check_idle(server)
    return found


def _one_token_passes(server: Server, *begun: int) -> int:
    """Prefill passes of the log that compute one new token of each request behind cached prefixes. A prompt of one of
    ``begun`` tokens may begin in the same pass."""
    passes = re.findall(r"#new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+)", server.log_text())
    found = [(int(seqs), int(new)) for seqs, new, cached in passes if int(cached) > 60]
    return sum(new == seqs or (seqs > 1 and new - seqs + 1 in begun) for seqs, new in found)


@pytest.fixture(scope="module")
def roomy(shared_server: SharedServer) -> list[Record]:
    """Replies of a pool where nothing is lost."""
    server = shared_server.get("diffkv", ("--max-total-tokens", "16384"), config=LOSSLESS, env=STRICT)
    return client.run(server.url, _questions(4), 180, top_logprobs=2)


@pytest.mark.parametrize("drafts", [(), NGRAMS, pytest.param(NGRAM_TREES, marks=pytest.mark.full)], ids=str)
def test_replies_are_those_of_a_roomy_pool(
    drafts: tuple[str, ...], roomy: list[Record], server_of: Callable[..., Server]
) -> None:
    server = server_of("diffkv", (*TIGHT, *drafts), config=LOSSLESS, env=STRICT)
    found = _until_restored(server, lambda: check_tokens(_load(server, _questions(4), 180), roomy, "retracted"))
    assert found["restored"] and not found["no_host_memory"]
    assert found["tokens_restored"] >= 60 * found["restored"]
    assert _one_token_passes(server)


@pytest.mark.full  # quick: replies of a roomy pool, and new weights
@pytest.mark.parametrize(
    ("config", "args"),
    [
        (COMPRESSED, ()),
        (EXACT, (*ALONE, *CHUNKED)),
        *((COMPRESSED, args) for args in (ALONE, CHUNKED, ("--schedule-policy", "lpm"))),
        (EXACT, ()),
        (LOSSLESS, ALONE),
    ],
    ids=str,
)
def test_only_the_last_token_of_a_retracted_request_is_computed(
    config: dict[str, Any], args: tuple[str, ...], server_of: Callable[..., Server]
) -> None:
    events = Events() if config is EXACT else None
    if events is not None:
        args = (*args, "--kv-events-config", events.option())
    server, prompts = server_of("diffkv", (*TIGHT, *args), config=config, env=STRICT), _questions(6)
    replies = _load(server, prompts)
    assert all(replies)
    found = _check_balanced(server)
    assert found["kept"] and found["restored"] > found["recomputed"]
    assert found["tokens_restored"] >= 60 * found["restored"]
    assert _one_token_passes(server)
    assert stats_of(server)["faults"] == 0
    if events is not None:
        _check_events(server, events, [x + reply for x, reply in zip(prompts, replies, strict=True)])
        _check_names(server, prompts)


def _check_events(server: Server, events: Events, asked: list[list[int]]) -> None:
    """A router knows of each sequence how much the server finds, and no more."""
    for ids in asked:
        events.read()
        known = events.cached(ids)
        assert _reply(server, ids, 1)["meta_info"]["cached_tokens"] == known
    server.flush_cache()
    events.read()
    assert not events.blocks
    events.socket.close()


@contextmanager
def _some_on_the_host(server: Server) -> Iterator[list[Future[Any]]]:
    """Requests that nobody ends early; the body runs while one of them has its pages on the host."""
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):  # on a quick machine it may have come back before anybody looks
            asked = [threads.submit(_reply, server, tokens(120, seed), 200, whole=True) for seed in range(4)]
            while not (waits := _counts(server)["waiting"]) and not all(x.done() for x in asked):
                time.sleep(0.01)
            if waits:
                break
        assert waits, "no request was retracted"
        yield asked


@pytest.fixture
def server(server_of: Callable[..., Server]) -> Server:
    """Of which requests are retracted, and not compressed once more instead."""
    config = {**COMPRESSED, "policy": {"name": "diffkv", "pressure_window": None}}
    return server_of("diffkv", ("--max-total-tokens", "480", *TIGHT[2:], *SHALLOW), config=config, env=STRICT)


def test_one_that_is_aborted_leaves_no_host_memory(server: Server) -> None:
    before = _counts(server)["dropped"]
    for _ in range(5):  # the one on the host may have come back before the abort does
        with _some_on_the_host(server) as asked:
            server.post("/abort_request", {"abort_all": True})
            ends = {x.result()["meta_info"]["finish_reason"]["type"] for x in asked if not x.exception()}
            assert ends <= {"abort", "length"}, "some may have been about to end"
        until(lambda: not _counts(server)["waiting"])
        if (dropped := _check_balanced(server)["dropped"]) > before:
            break
    assert dropped > before and "abort" in ends


def _check_names(server: Server, prompts: list[list[int]]) -> None:
    """Clients put tokens where the private prefix of a retracted request might be."""
    before = _counts(server)
    for index, prompt in enumerate(prompts):
        for name in (f"None\0retracted mine{index}", f"mine{index}"):
            _reply(server, prompt[:30], 1, extra_key=name)
    assert all(_load(server, prompts, name="mine"))
    assert _check_balanced(server)["restored"] > before["restored"]


def _again(server: Server, seeds: range) -> dict[str, int]:
    """The counts once requests that fill the pool have been served."""
    with ThreadPoolExecutor(len(seeds)) as threads:
        replies = list(threads.map(lambda seed: _reply(server, tokens(120, seed), 200, whole=True), seeds))
    assert all(len(x["output_ids"]) == 200 for x in replies)
    return _counts(server)


def _until_one_is_kept(server: Server, first: int, before: int) -> int:
    """How many retracted requests were kept, once it is more than ``before``. On a slow machine requests may come too
    far apart for a retraction, so some more are asked, of an empty cache: one that is full gives way instead."""
    for seed in range(first, first + 40, 4):
        server.flush_cache()
        if (kept := _again(server, range(seed, seed + 4))["kept"]) > before:
            return kept
    raise AssertionError("no retracted request was kept")


def test_a_pause_drops_what_was_computed(server: Server) -> None:
    """With or without a flush: what SGLang retracts then is to be computed again, and so is all that was kept
    before."""
    for _ in range(5):  # the one on the host may have come back before the pause begins
        with _some_on_the_host(server) as asked:
            before = _counts(server)
            assert server.post("/pause_generation", {"mode": "retract"}).ok
            try:
                paused = _counts(server)
            finally:
                assert server.post("/continue_generation", {}).ok
            assert (paused["waiting"], paused["host_bytes"]) == (0, 0)
            assert all(len(x.result()["output_ids"]) == 200 for x in asked)
        _check_balanced(server)
        if paused["dropped"] > before["dropped"]:
            break
    assert paused["dropped"] > before["dropped"] and paused["kept"] <= before["kept"] + 1


def test_new_weights_get_nothing_of_old_ones(server: Server) -> None:
    """An update without a flush under running requests drops host copies, and requests are computed again until the
    prefix cache is flushed."""
    update = {"model_path": str(NANO), "flush_cache": False}
    with _some_on_the_host(server) as asked:
        assert server.post("/update_weights_from_disk", update).json()["success"]
        updated = _counts(server)
        assert (updated["waiting"], updated["host_bytes"]) == (0, 0)
        assert all(len(x.result()["output_ids"]) == 200 for x in asked)
    assert _counts(server)["kept"] == updated["kept"]
    assert _again(server, range(20, 24))["kept"] == updated["kept"]
    kept = _until_one_is_kept(server, 24, updated["kept"])
    server.flush_cache()
    assert server.post("/update_weights_from_disk", {**update, "flush_cache": True}).json()["success"]
    _until_one_is_kept(server, 64, kept)
    assert _check_balanced(server)["restored"]
    assert server.log_text().count("retracted requests are computed again until the cache is flushed") == 1


@pytest.mark.parametrize("prompt", [False, True], ids=["", "of the prompt too"])
def test_logprobs_are_neither_lost_nor_doubled(prompt: bool, server_of: Callable[..., Server]) -> None:
    """Those of a roomy pool, whichever a client asks for."""
    asked = {"return_logprob": True, "top_logprobs_num": 2, **({"logprob_start_len": 20} if prompt else {})}
    prompts = [tokens(120, seed) for seed in range(10, 14)]

    def ask(server: Server, ids: list[int]) -> Any:
        return _reply(server, ids, 200, whole=True, **asked)["meta_info"]

    roomy = server_of("diffkv", ("--max-total-tokens", "8192", *SHALLOW), config=LOSSLESS, env=STRICT)
    usual = [ask(roomy, ids) for ids in prompts]
    server = server_of("diffkv", ("--max-total-tokens", "480", *TIGHT[2:], *SHALLOW), config=LOSSLESS, env=STRICT)

    def compare() -> None:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda ids: ask(server, ids), prompts))
        for one, other in zip(found, usual, strict=True):
            check(one, other)

    def check(one: Any, other: Any) -> None:
        for name in ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs"):
            assert len(one[name]) == len(other[name]), name
            assert [x[1] for x in one[name] if "top" not in name] == [x[1] for x in other[name] if "top" not in name]
        values = [[x[0] for x in side["output_token_logprobs"]] for side in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=0.3)
        assert len(one["input_token_logprobs"]) == (100 if prompt else 0)

    counts = _until_restored(server, compare)
    assert counts["restored"] > counts["recomputed"] and _one_token_passes(server)


@pytest.mark.full
def test_host_memory_for_none_is_said_once(server_of: Callable[..., Server]) -> None:
    config = {**COMPRESSED, "host_gib": 1e-5}
    server = server_of("diffkv", ("--max-total-tokens", "480", *TIGHT[2:]), config=config, env=STRICT)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda seed: _reply(server, tokens(120, seed), 200, whole=True), range(4)))
    assert _check_balanced(server)["no_host_memory"] > 0
    assert server.log_text().count("host memory for retracted requests is full") == 1


def test_switched_off_by_name(server_of: Callable[..., Server]) -> None:
    server = server_of("diffkv", ("--disable-radix-cache", *SHALLOW), config=COMPRESSED)
    assert "retracted requests are computed again: they come back through the prefix cache" in server.log_text()
    assert "retracted" not in stats_of(server)
