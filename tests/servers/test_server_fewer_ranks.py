"""A prefill server of two ranks and a decode server of one, which makes one row of what both send.

The row is that of the two ranks bit for bit (``tests/pages/test_rows_of_parts.py``), and so is the first token with its
log-probability, which the prefill server has computed. What follows is computed by one rank, which does not add up
halves: it is that of servers of two ranks, or of one, up to rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.key_means import write_key_means
from tests.helpers import until
from tests.servers.loopback.mooncake.engine import DAMAGE_ENV
from tests.servers.pair import MARKS, Pair, of_ranks, request
from tests.servers.shared import STRICT, stats_of
from tests.servers.test_server_disaggregation import (
    CHATS,
    DEFAULT,
    FILLING,
    KEEPS_PREFIXES,
    LOSSLESS,
    PROMPTS,
    ROOMY,
    TIGHT,
    check_alone,
    equal_but_for_rounding,
    prompt,
    settled,
)
from tests.servers.test_server_ranks_disaggregation import DAMAGE, aborts_in_each_phase, asked, scores

pytestmark = [*MARKS, pytest.mark.timeout(1800)]

ROUNDING = 0.3
"""Of log-probabilities of this small model. One server of two ranks and one of one differ by as much."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def config(folder: Path) -> dict[str, Any]:
    """With key means, of which each rank takes its heads'."""
    path = folder / "means.safetensors"
    write_key_means(path, torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(3)), {})
    return {**DEFAULT, "key_means": str(path)}


@pytest.fixture(scope="module")
def fewer(folder: Path, config: dict[str, Any]) -> Iterator[Pair]:
    with Pair(config, ROOMY, ranks=2, decode_ranks=1, env={DAMAGE_ENV: str(folder / DAMAGE)}) as pair:
        yield pair


def same_as_two(pair: Pair, config: dict[str, Any], server_of: Callable[..., Server]) -> list[dict[str, Any]]:
    """Tokens are those of one server of two ranks up to rounding, the first one to the last digit. All replies."""
    payloads = [{**asked(x), "top_logprobs_num": 2} for x in PROMPTS]
    replies = [pair.ask(x).json() for x in payloads]
    sent, received = (stats_of(server)["transfer"] for server in (pair.prefill, pair.decode))
    assert sent["sent"] == received["received"] == len(PROMPTS)
    assert [stats_of(x)["ranks"] for x in (pair.prefill, pair.decode)] == [2, 1]
    two = server_of("diffkv", ["--tp-size", "2", *ROOMY], config=config, env={**STRICT, **of_ranks(2)})
    for payload, reply in zip(payloads, replies, strict=True):
        expected = two.generate(payload)
        assert scores(reply)[0] == scores(expected)[0]
        equal_but_for_rounding(reply, expected, ROUNDING)
    settled(pair)
    return replies


def test_one_rank_goes_on_with_the_row_of_two(
    fewer: Pair, config: dict[str, Any], server_of: Callable[..., Server]
) -> None:
    same_as_two(fewer, config, server_of)


@pytest.mark.parametrize("again", range(2))
def test_a_damaged_part_ends_its_request_alone(again: int, fewer: Pair, folder: Path) -> None:
    (folder / DAMAGE).touch()
    response = fewer.ask(request(prompt(150, 21 + again), 8))
    assert response.status_code == 500
    assert re.search(r"DiffKV refuses what has come: of rank [01] there: (its pages are|it is) damaged", response.text)
    assert not (folder / DAMAGE).exists()
    assert len(fewer.reply(PROMPTS[2], 8)) == 8
    settled(fewer)


def test_aborts_in_each_phase_end_their_request_alone(fewer: Pair) -> None:
    aborts_in_each_phase(fewer)


def test_a_full_lossless_server_gives_the_tokens_of_one(server_of: Callable[..., Server]) -> None:
    """Of two ranks, and of one, up to rounding. Retracted requests have the tokens that they have alone."""
    with Pair(LOSSLESS, ROOMY, decode_args=TIGHT, ranks=2, decode_ranks=1) as pair:
        replies = same_as_two(pair, LOSSLESS, server_of)
        one = server_of("diffkv", ROOMY, config=LOSSLESS, env=STRICT)
        for tokens, reply in zip(PROMPTS, replies, strict=True):
            equal_but_for_rounding(reply, one.generate({**asked(tokens), "top_logprobs_num": 2}), ROUNDING)
        prompts = [prompt(100 + 17 * k, 10 + k) for k in range(4)]
        for together in pair.until_retracted(prompts, FILLING):
            check_alone(pair, prompts, FILLING, together)
        settled(pair)


@KEEPS_PREFIXES
def test_turns_of_a_chat_send_what_is_new() -> None:
    """Of each rank's heads the decode server has the beginning."""
    with Pair(DEFAULT, ROOMY, decode_args=CHATS, ranks=2, decode_ranks=1) as pair:
        chat = prompt(150, 60)
        for turn in range(3):
            before = stats_of(pair.prefill)["transfer"]
            reply = pair.reply(chat, 20)
            until(lambda: stats_of(pair.prefill)["transfer"]["sent"] == turn + 1)  # noqa: B023
            after = stats_of(pair.prefill)["transfer"]
            sent, left = (after[x] - before[x] for x in ("pages_sent", "pages_left"))
            assert bool(left) == bool(turn) and (not turn or sent < left)
            chat = [*chat, *reply, *prompt(20, 70 + turn)]
        settled(pair)
