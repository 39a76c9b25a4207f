"""One server computes prompts and another goes on with them: tokens are those of a server that does both, what fails
ends its own request alone, and no page or block is lost on either."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_diffkv.mem_pool.row_transfer import SET_ASIDE_SECONDS
from sglang_diffkv.srt.versions import compat
from tests.helpers import until
from tests.servers.identity import UNDECIDED
from tests.servers.pair import MARKS, Pair, request
from tests.servers.router import LEAVES, LOST, WHOLE, Asked, Downtime, ask, kill, start_again
from tests.servers.sglang_router import needs_router, router
from tests.servers.shared import STRICT, SharedServer, check_idle, stats_of

pytestmark = MARKS

LOSSLESS = {"tiers": ["BF16"]}
DEFAULT = {"policy": {"name": "diffkv", "window": 24}, "page_tokens": 16, "share_min_tokens": 32}


def prompt(tokens: int, seed: int) -> list[int]:
    return [(7 * k * k + 3 * k * seed + 11 * seed) % 900 + 10 for k in range(tokens)]


PREFIX = prompt(200, 1)
PROMPTS = [prompt(5, 2), prompt(47, 3), prompt(333, 4), PREFIX + prompt(70, 5), PREFIX + prompt(91, 6)]
"""Shorter than the window, frozen, in chunks, and two that share a prefix."""


ROOMY = ("--max-total-tokens", "16384", "--chunked-prefill-size", "128")
TIGHT = ("--max-total-tokens", "620", "--num-reserved-decode-tokens", "16")
FILLING = 100
"""Tokens of replies of which three or four fill the pool of the decode server."""
SMALL = ("--max-total-tokens", "1000", "--num-reserved-decode-tokens", "16")
ROUNDING = 0.1
"""Of log-probabilities."""
CHATS = ("--disaggregation-decode-enable-radix-cache",)
KEEPS_PREFIXES = pytest.mark.skipif(compat.sglang_version() == "0.5.17", reason="this SGLang is refused with it")


def settled(pair: Pair) -> None:
    """Nothing is on its way, and no page, block or request is left behind."""
    for server in (pair.prefill, pair.decode):
        until(lambda server=server: stats_of(server)["transfer"]["on_the_way"] == 0)  # type: ignore[misc]
        check_idle(server)


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[str, Pair]]:
    """Of each configuration, started together. The decode server of the lossless one is small."""
    found = {"default": Pair(DEFAULT, ROOMY), "lossless": Pair(LOSSLESS, ROOMY, decode_args=TIGHT)}
    with ExitStack() as stack:
        for pair in found.values():
            stack.enter_context(pair)
        yield found


@pytest.mark.parametrize("name", ["default", "lossless"])
def test_two_servers_give_the_tokens_of_one(name: str, pairs: dict[str, Pair], shared_server: SharedServer) -> None:
    two, config = pairs[name], {"default": DEFAULT, "lossless": LOSSLESS}[name]
    replies = [two.reply(x, 24) for x in PROMPTS]
    one = shared_server.get("diffkv", ROOMY, config=config, env=STRICT)
    assert replies == [one.generate(request(x, 24))["output_ids"] for x in PROMPTS]
    sent, received = (stats_of(server)["transfer"] for server in (two.prefill, two.decode))
    assert (sent["sent"], received["received"]) == (len(PROMPTS), len(PROMPTS))
    settled(two)


@needs_router
def test_sglang_s_router_asks_both_servers(pairs: dict[str, Pair], shared_server: SharedServer, tmp_path: Path) -> None:
    """Of many requests at once, and of one whose client leaves."""
    two, new = pairs["default"], 24
    args = ["--pd-disaggregation", "--prefill", two.prefill.url, str(two.bootstrap.number), "--decode", two.decode.url]
    with router(args, 2, tmp_path / "router.log") as url, ThreadPoolExecutor(8) as threads:

        def ask(tokens: list[int]) -> list[int]:
            response = requests.post(f"{url}/generate", json=request(tokens, new), timeout=120)
            response.raise_for_status()
            return list(response.json()["output_ids"])

        alone = [ask(x) for x in PROMPTS]
        with pytest.raises(requests.Timeout):
            requests.post(f"{url}/generate", json=request(PROMPTS[2], 2000), timeout=1)
        together = list(threads.map(ask, [prompt(40 + k, 70 + k) for k in range(16)]))
    assert {len(x) for x in together} == {new}
    one = shared_server.get("diffkv", ROOMY, config=DEFAULT, env=STRICT)
    assert alone == [one.generate(request(x, new))["output_ids"] for x in PROMPTS]
    settled(two)


def test_a_full_decode_server_retracts_and_all_replies_are_those_of_a_roomy_one(pairs: dict[str, Pair]) -> None:
    two = pairs["lossless"]
    prompts = [prompt(60 + 17 * k, 10 + k) for k in range(5)]
    for together in two.until_retracted(prompts, FILLING):
        check_alone(two, prompts, FILLING, together)
    settled(two)


@pytest.fixture(scope="module")
def chatting() -> Iterator[dict[str, Pair]]:
    """Pairs whose decode servers have prefix caches; that of the lossless one is small."""
    found = {
        "default": Pair(DEFAULT, ROOMY, decode_args=CHATS),
        "lossless": Pair(LOSSLESS, ROOMY, decode_args=(*SMALL, *CHATS)),
    }
    with ExitStack() as stack:
        for pair in found.values():
            stack.enter_context(pair)
        yield found


def equal_but_for_rounding(found: dict[str, Any], expected: dict[str, Any], rounding: float = ROUNDING) -> None:
    """Tokens are the same, with about the same log-probabilities, up to where two were about as likely."""
    left, right = (x["meta_info"]["output_token_logprobs"] for x in (found, expected))
    best = expected["meta_info"]["output_top_logprobs"]
    for (score, token, _), (wanted, other, _), ((first, *_), (second, *_)) in zip(left, right, best, strict=True):
        if token != other:
            assert first - second < max(rounding, UNDECIDED)
            return
        assert abs(score - wanted) < rounding


def same_up_to_a_tie(tokens: list[int], expected: dict[str, Any]) -> None:
    """Tokens are the same up to where the expected reply's two likeliest were about as likely: there the first is the
    other of them. Products of a larger batch are rounded otherwise on some processors."""
    wanted = expected["output_ids"]
    assert len(tokens) == len(wanted)
    for token, other, (first, second) in zip(tokens, wanted, expected["meta_info"]["output_top_logprobs"], strict=True):
        if token != other:
            assert first[0] - second[0] < UNDECIDED and token in (first[1], second[1]), (token, other, first, second)
            return


def check_alone(pair: Pair, prompts: list[list[int]], length: int, replies: list[list[int]]) -> None:
    """Replies of so many tokens are those to the same prompts one at a time, up to a tie."""
    for asked, tokens in zip(prompts, replies, strict=True):
        alone = pair.ask({**request(asked, length), "return_logprob": True, "top_logprobs_num": 2})
        same_up_to_a_tie(tokens, alone.json())


@KEEPS_PREFIXES
@pytest.mark.parametrize("name", ["default", "lossless"])
def test_turns_of_chats_send_what_is_new(name: str, chatting: dict[str, Pair], shared_server: SharedServer) -> None:
    """Two chats take turns. What a turn sends is less than what the decode server has. Lossless tokens are those of one
    server up to rounding: the prefill server computes replies anew, in another order, before it computes what follows.
    """
    two, config = chatting[name], {"default": DEFAULT, "lossless": LOSSLESS}[name]
    one = shared_server.get("diffkv", ROOMY, config=config, env=STRICT)
    chats = [prompt(150, 60), prompt(110, 61)]
    for turn in range(3):
        for number, asked in enumerate(chats):
            before = stats_of(two.prefill)["transfer"]
            payload = {**request(asked, 20), "return_logprob": True, "top_logprobs_num": 2}
            response = two.ask(payload)
            response.raise_for_status()
            reply = response.json()["output_ids"]
            until(lambda before=before: stats_of(two.prefill)["transfer"]["sent"] == before["sent"] + 1)  # type: ignore[misc]
            after = stats_of(two.prefill)["transfer"]
            sent, left = (after[x] - before[x] for x in ("pages_sent", "pages_left"))
            expected = one.generate(payload)
            if not turn:
                assert reply == expected["output_ids"]
            elif name == "lossless":
                equal_but_for_rounding(response.json(), expected)
            assert bool(left) == bool(turn), "what the decode server has was sent, or what it has not was left out"
            assert not turn or sent < left
            chats[number] = [*asked, *reply, *prompt(20 + 11 * number, 70 + turn)]
    settled(two)


@KEEPS_PREFIXES
def test_a_full_decode_server_with_a_prefix_cache_makes_room(chatting: dict[str, Pair]) -> None:
    """Prompts that fill it alone, a chat that fits only without what the prefix cache has of it, and more replies at
    once than fit: each has the tokens that it has alone."""
    two = chatting["lossless"]
    asked = prompt(700, 80)
    first = two.reply(asked, 60)
    left = stats_of(two.prefill)["transfer"]["pages_left"]
    assert len(two.reply([*asked, *first, *prompt(60, 81)], 30)) == 30
    assert stats_of(two.prefill)["transfer"]["pages_left"] == left
    assert two.reply(asked, 60) == first
    prompts = [prompt(100 + 17 * k, 90 + k) for k in range(5)]
    for together in two.until_retracted(prompts, FILLING):
        check_alone(two, prompts, FILLING, together)
    settled(two)


def test_aborts_end_their_request_alone(pairs: dict[str, Pair]) -> None:
    """Some wait, some are on their way and some generate when they are aborted, on one server and then on the other."""
    two = pairs["default"]
    asked = [two.send({**request(prompt(150 + 9 * k, 30 + k), 50), "rid": f"abort-{k}"}) for k in range(12)]
    for k in range(0, 12, 2):
        time.sleep(0.15)
        for server in (two.prefill, two.decode) if k % 4 else (two.decode, two.prefill):  # as a router tells both
            server.post("/abort_request", {"rid": f"abort-{k}"})
    answers = [(first.result(), second.result()) for first, second in asked]
    for _, response in answers[1::2]:
        assert response.status_code == 200 and len(response.json()["output_ids"]) == 50
    settled(two)
    assert two.reply(PROMPTS[1], 10) == two.reply(PROMPTS[1], 10)


def test_a_server_of_another_configuration_is_refused_in_words(pairs: dict[str, Pair]) -> None:
    """It and the prefill server go on, and the other decode server still gets its prompts."""
    two = pairs["default"]
    with two.another_decode({**DEFAULT, "page_tokens": 32}) as other:
        waits, refused = two.send(request(PROMPTS[1], 5), decode=other)
        assert refused.result().status_code == 500
        assert "page_tokens is" in refused.result().text and "Start both servers alike" in refused.result().text
        assert other.alive() and two.prefill.alive()
        two.prefill.post("/abort_request", {"abort_all": True})
        waits.result()
    assert len(two.reply(PROMPTS[1], 5)) == 5
    settled(two)


def test_a_decode_server_of_more_ranks_is_refused_with_both_numbers(pairs: dict[str, Pair]) -> None:
    two = pairs["default"]
    with two.another_decode(DEFAULT, ranks=2) as other:
        waits, refused = two.send(request(PROMPTS[1], 5), decode=other)
        assert refused.result().status_code == 500
        assert "--tp-size is 1 there and 2 here: start both with as many ranks" in refused.result().text
        two.prefill.post("/abort_request", {"abort_all": True})
        waits.result()
        assert other.alive()
    assert len(two.reply(PROMPTS[1], 5)) == 5
    settled(two)


def test_a_decode_server_that_dies_takes_its_own_requests_along(pairs: dict[str, Pair]) -> None:
    """Its prompts are given up on the prefill server, which serves others."""
    two = pairs["default"]
    with two.another_decode(DEFAULT) as other:
        assert two.ask(request(PROMPTS[1], 5), decode=other).status_code == 200
        asked = [two.send(request(prompt(500, 50 + k), 200), decode=other) for k in range(3)]
        time.sleep(0.5)
        other.stop(grace=0.0)
        for _, second in asked:
            assert second.exception() is not None, "the server that died has answered"
    assert two.prefill.alive() and len(two.reply(PROMPTS[2], 5)) == 5
    two.prefill.post("/abort_request", {"abort_all": True})  # what had not met the server that died
    for first, _ in asked:
        first.result()
    settled(two)


def test_a_client_that_leaves_the_prefill_server_lets_the_other_go(pairs: dict[str, Pair]) -> None:
    """SGLang's prefill server tells nobody that a prompt was aborted: the decode server would wait for five minutes."""
    two = pairs["default"]
    asked = [two.send({**request(prompt(300 + k, 90 + k), 30), "rid": f"leaves-{k}"}) for k in range(6)]
    time.sleep(0.3)
    for k in range(1, 6):
        two.prefill.post("/abort_request", {"rid": f"leaves-{k}"})
    until(lambda: all(half.done() for both in asked for half in both))
    assert len(asked[0][1].result().json()["output_ids"]) == 30
    settled(two)


HELD_SECONDS = {"SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "5"}
"""For which pages wait for a prefill server that was killed."""


@pytest.mark.full
def test_two_hundred_requests_with_aborts_and_kills(shared_server: SharedServer) -> None:
    """A third of whom asks leave, and each server is killed twice: once it is back at once, once later. Each request
    has all its tokens, or a message. Those that met neither have their tokens. Nothing is held in the end."""
    draw, down, asked = random.Random(49), list[Downtime](), list[Future[Asked]]()
    with Pair(DEFAULT, ROOMY, seconds=0.02, env=HELD_SECONDS) as two, ThreadPoolExecutor(16) as threads:
        kills = {40: (two.prefill, 0), 80: (two.decode, 0), 120: (two.prefill, 12), 160: (two.decode, 12)}
        starts: Future[None] | None = None
        for k in range(200):
            leaves = draw.choice(LEAVES) if draw.random() < 1 / 3 else ""
            tokens, new = prompt(draw.randrange(5, 260), 100 + k), draw.randrange(2, 50)
            this, after = Asked(f"request-{k}-of", new, leaves), 2.0 * draw.random()
            asked.append(threads.submit(_ask, two, tokens, this, after))
            if k in kills:
                server, later = kills[k]
                down.append(kill(server))
                starts = threads.submit(_start_later, down[-1], later)
            if starts is not None and k - 12 in kills:  # these met no server
                starts.result()
            if k - 20 in kills:  # these may have met one of which the other did not know yet
                time.sleep(max(down[-1].end - time.monotonic(), 0.0))
            while sum(not x.done() for x in asked) >= 12:
                time.sleep(0.05)
            time.sleep(0.2 * draw.random())
        found = [x.result() for x in asked]
        for server in (two.prefill, two.decode):
            assert server.alive(), f"a server died that nobody killed:\n{server.log_text()[-20000:]}"
        calm = [x for x in found if not x.leaves and not any(y.meets(x.begun, x.ended) for y in down)]
        assert len(calm) >= 20
        assert not [x for x in calm if x.halves != [WHOLE, WHOLE]], down
        assert all(len(x.tokens) == x.new_tokens for x in found if x.tokens)
        lost = [x for x in found if any(half.startswith(LOST) for half in x.halves)]
        assert not [x for x in lost if not any(y.meets(x.begun, x.ended) for y in down)], down
        settled(two)
        time.sleep(SET_ASIDE_SECONDS)
        last = two.reply(PROMPTS[2], 24)
        settled(two)
        assert [stats_of(x)["transfer"]["blocks_used"] for x in (two.prefill, two.decode)] == [0, 0]
    one = shared_server.get("diffkv", ROOMY, config=DEFAULT, env=STRICT)
    assert last == one.generate(request(PROMPTS[2], 24))["output_ids"]


def _ask(two: Pair, tokens: list[int], asked: Asked, after: float) -> Asked:
    asked.begun = time.monotonic()
    return ask(two, request(tokens, asked.new_tokens), asked, after, 90.0)


def _start_later(down: Downtime, seconds: float) -> None:
    time.sleep(seconds)
    start_again(down)
