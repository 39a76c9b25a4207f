"""A vision-language model: images are embeddings before the first layer, and its language part is served like any.

The model is a Qwen2.5-VL of random weights; its positions have three parts (mrope), which the cache does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality.random_vision import IMAGE_TOKENS, PICTURE, make_qwen2_5_vl, picture
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.server import Server, stock_backend
from tests.servers.identity import check_tokens
from tests.servers.shared import STRICT, check_idle, stats_of

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., Any]:
    make_qwen2_5_vl(tmp_path)

    @contextmanager
    def start(config: dict[str, Any] | None, *args: str) -> Iterator[Server]:
        backend = stock_backend() if config is None else "diffkv"
        args = ("--mm-attention-backend", "sdpa", "--max-total-tokens", "4000", *args)
        with Server(tmp_path, backend, args, diffkv_config=config, env=STRICT, timeout=600) as server:
            yield server
            check_idle(server)

    return start


ASKED = [
    ("the cat sat on the mat", None), ("what is in this picture", 1), ("what is in this picture", 1),
    ("what is in this picture", 2), ("what is in this picture tell me", 2), ("name the colours", 1),
]  # fmt: skip
"""Texts, and the picture before each."""


def _ask(server: Server) -> list[client.Record]:
    replies = []
    for text, number in ASKED:
        more = {} if number is None else {"image_data": picture(number)}
        request = {
            "text": text if number is None else f"{PICTURE} {text}", "return_logprob": True,
            "top_logprobs_num": 2, "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
        }  # fmt: skip
        replies.append(client.record(server.generate({**request, **more})))
    return replies


def test_a_picture_is_cached_and_answered_as_stock_does(serve: Callable[..., Any]) -> None:
    with serve(None) as server:
        stock = _ask(server)
    assert stock[1].output_ids != stock[3].output_ids, "the picture changes nothing"
    with serve({"tiers": ["BF16"]}, "--chunked-prefill-size", "32") as server:
        found = _ask(server)
    check_tokens([x.output_ids for x in found], stock, "with pictures")
    assert [x.cached_tokens for x in found] == [x.cached_tokens for x in stock]
    assert found[2].cached_tokens == found[2].prompt_tokens - 1 > IMAGE_TOKENS, "the picture was not found again"
    assert found[3].cached_tokens < IMAGE_TOKENS, "another picture was taken for the first"
    with serve({"policy": {"name": "diffkv", "window": 16}}) as server:
        compressed = _ask(server)
        assert stats_of(server)["finished"]["low"] > 0
    assert [x.cached_tokens for x in compressed] == [x.cached_tokens for x in stock]
