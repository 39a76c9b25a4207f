"""One server computes prompts and another goes on with them: tokens are those of a server that does both, what fails
ends its own request alone, and no page or block is lost on either."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.srt.versions import compat
from tests.helpers import until
from tests.servers.pair import Pair, request
from tests.servers.shared import STRICT, SharedServer, check_idle, stats_of

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not compat.installed().disaggregation, reason="this SGLang is refused with it"),
]

LOSSLESS = {"tiers": ["BF16"]}
DEFAULT = {"policy": {"name": "diffkv", "window": 24}, "page_tokens": 16, "share_min_tokens": 32}


def prompt(tokens: int, seed: int) -> list[int]:
    return [(7 * k * k + 3 * k * seed + 11 * seed) % 900 + 10 for k in range(tokens)]


PREFIX = prompt(200, 1)
PROMPTS = [prompt(5, 2), prompt(47, 3), prompt(333, 4), PREFIX + prompt(70, 5), PREFIX + prompt(91, 6)]
"""Shorter than the window, frozen, in chunks, and two that share a prefix."""


def settled(pair: Pair) -> None:
    """Nothing is on its way, and no page, block or request is left behind."""
    for server in (pair.prefill, pair.decode):
        until(lambda server=server: stats_of(server)["transfer"]["on_the_way"] == 0)  # type: ignore[misc]
        check_idle(server)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair(DEFAULT, ("--chunked-prefill-size", "128")) as found:
        yield found


@pytest.mark.parametrize("config", [DEFAULT, LOSSLESS], ids=["default", "lossless"])
def test_two_servers_give_the_tokens_of_one(
    config: dict[str, Any], request_pair: Any, shared_server: SharedServer
) -> None:
    two: Pair = request_pair(config)
    replies = [two.reply(x, 60) for x in PROMPTS]
    one: Server = shared_server.get("diffkv", ("--chunked-prefill-size", "128"), config=config, env=STRICT)
    assert replies == [one.generate(request(x, 60))["output_ids"] for x in PROMPTS]
    sent, received = (stats_of(server)["transfer"] for server in (two.prefill, two.decode))
    assert (sent["sent"], received["received"]) == (len(PROMPTS), len(PROMPTS))
    settled(two)


@pytest.fixture
def request_pair(pair: Pair) -> Iterator[Any]:
    """The shared pair for its configuration, or one of its own."""
    own: list[Pair] = []

    def of(config: dict[str, Any]) -> Pair:
        if config == DEFAULT:
            return pair
        own.append(Pair(config, ("--chunked-prefill-size", "128")).__enter__())
        return own[0]

    yield of
    for found in own:
        found.__exit__()
