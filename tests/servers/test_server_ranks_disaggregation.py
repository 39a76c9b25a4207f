"""Two servers of two ranks each, of which one computes prompts and the other goes on with them: tokens are those of one
server of two ranks, what fails on one rank ends its request on all, and no page or block is lost on any.

With SGLANG_DIFFKV_CHECK_INTEGRITY ranks also compare all that they decide on, and a difference ends the server.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.srt.versions import compat
from tests.helpers import until
from tests.servers.loopback.mooncake.engine import DAMAGE_ENV
from tests.servers.pair import MARKS, Pair, of_ranks, request
from tests.servers.shared import STRICT, stats_of
from tests.servers.test_server_disaggregation import (
    CHATS,
    DEFAULT,
    FILLING,
    HELD_SECONDS,
    LOSSLESS,
    PROMPTS,
    ROOMY,
    SMALL,
    TIGHT,
    check_alone,
    prompt,
    settled,
)

pytestmark = [*MARKS, pytest.mark.timeout(1800)]

NEW = 12
DAMAGE = "damage"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Pair]:
    with Pair(DEFAULT, ROOMY, ranks=2, env={DAMAGE_ENV: str(folder / DAMAGE)}) as pair:
        yield pair


def asked(tokens: list[int]) -> dict[str, Any]:
    return {**request(tokens, NEW), "return_logprob": True}


def scores(reply: dict[str, Any]) -> list[tuple[float, int]]:
    """Log-probability and token, of each that was generated."""
    return [(score, token) for score, token, *_ in reply["meta_info"]["output_token_logprobs"]]


def same_as_one(pair: Pair, config: dict[str, Any], server_of: Callable[..., Server]) -> None:
    """Tokens and log-probabilities are those of one server of two ranks, to the last digit."""
    replies = [pair.ask(asked(x)).json() for x in PROMPTS]
    sent, received = (stats_of(server)["transfer"] for server in (pair.prefill, pair.decode))
    assert sent["sent"] == received["received"] == len(PROMPTS)
    assert [stats_of(x)["ranks"] for x in (pair.prefill, pair.decode)] == [2, 2]
    one = server_of("diffkv", ["--tp-size", "2", *ROOMY], config=config, env={**STRICT, **of_ranks(2)})
    assert [scores(x) for x in replies] == [scores(one.generate(asked(x))) for x in PROMPTS]
    settled(pair)


def test_two_servers_of_two_ranks_give_the_tokens_of_one(two: Pair, server_of: Callable[..., Server]) -> None:
    same_as_one(two, DEFAULT, server_of)


def test_a_row_that_is_damaged_on_one_rank_ends_its_request_alone(two: Pair, folder: Path) -> None:
    (folder / DAMAGE).touch()
    response = two.ask(request(prompt(150, 21), 8))
    assert response.status_code == 500 and "DiffKV refuses what has come" in response.text
    assert not (folder / DAMAGE).exists()
    told = re.findall(r"TP(\d)\].*Decode transfer failed.*DiffKV refuses what has come: (.*)", two.decode.log_text())
    assert sum("damaged" in reason for _, reason in told) == 1, "one rank alone knows why"
    assert len(two.reply(PROMPTS[2], 8)) == 8
    settled(two)


def test_aborts_in_each_phase_end_their_request_alone(two: Pair) -> None:
    aborts_in_each_phase(two)


def aborts_in_each_phase(two: Pair) -> None:
    """While it waits, is computed, is sent and generates; told to one server, the other, or both."""
    with ThreadPoolExecutor(8) as threads:
        sent = [two.send({**request(prompt(130 + 31 * k, 30 + k), 24), "rid": f"abort-{k}"}) for k in range(8)]

        def abort(k: int) -> None:
            time.sleep(0.9 * k)
            for server in ((two.prefill,), (two.decode,), (two.prefill, two.decode))[k % 3]:
                server.post("/abort_request", {"rid": f"abort-{k}"})

        list(threads.map(abort, range(0, 8, 2)))
        answers = [(first.result(), second.result()) for first, second in sent]
    for _, response in answers[1::2]:
        assert response.status_code == 200 and len(response.json()["output_ids"]) == 24
    settled(two)
    assert two.reply(PROMPTS[1], 6) == two.reply(PROMPTS[1], 6)


def test_a_full_lossless_server_of_two_ranks_gives_the_tokens_of_one(server_of: Callable[..., Server]) -> None:
    """And those of requests alone, though some are retracted, and come back on both ranks."""
    with Pair(LOSSLESS, ROOMY, decode_args=TIGHT, ranks=2) as pair:
        same_as_one(pair, LOSSLESS, server_of)
        prompts = [prompt(100 + 17 * k, 10 + k) for k in range(4)]
        for together in pair.until_retracted(prompts, FILLING):
            check_alone(pair, prompts, FILLING, together)
        settled(pair)


@pytest.mark.full
@pytest.mark.skipif(compat.sglang_version() == "0.5.17", reason="this SGLang is refused with it")
def test_ranks_of_a_decode_server_with_a_prefix_cache_decide_alike() -> None:
    """Turns of chats, of which the decode server has the beginning, in a small pool; and a prefill server that dies
    while it sends."""
    with Pair(DEFAULT, ROOMY, decode_args=(*SMALL, *CHATS), ranks=2, env=HELD_SECONDS) as pair:
        chats = [prompt(150, 60), prompt(110, 61), prompt(90, 62)]
        for turn in range(3):
            with ThreadPoolExecutor(len(chats)) as threads:
                replies = list(threads.map(lambda x: pair.reply(x, 20), chats))
            chats = [[*x, *reply, *prompt(20, 70 + turn)] for x, reply in zip(chats, replies, strict=True)]
        assert stats_of(pair.prefill)["transfer"]["pages_left"] > 0
        settled(pair)
        sent = [pair.send(request(prompt(300 + k, 90 + k), 40)) for k in range(4)]
        time.sleep(1.0)
        pair.prefill.stop(grace=0.0)
        for _, second in sent:
            assert second.result().status_code in (200, 500)
        until(lambda: stats_of(pair.decode)["transfer"]["on_the_way"] == 0)
        assert pair.decode.alive()
