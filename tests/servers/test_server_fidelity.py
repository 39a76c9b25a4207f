"""Requests with a tier or a window of their own on real servers: theirs is what a server of that tier or window says,
under load too, and others notice nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests as http

from benchmarks.paths import REPOSITORY
from sglang_diffkv.evaluate.server import Server
from tests.servers.shared import STRICT, check_idle, stats_of, tokens

pytestmark = pytest.mark.server

ARGS = ["--max-total-tokens", "1800", "--chunked-prefill-size", "2048", "--schedule-policy", "lpm"]
MIXED = {"rotate": "both", "policy": {"name": "diffkv", "window": 32, "alpha_high": 1e9}}
ALONE = {"rotate": "both", "tiers": ["K8V4"]}
EXACT = {**MIXED, "prefix_fidelity": "exact"}
LOSSLESS = {"tiers": ["BF16", "K4V2"], "policy": {"name": "diffkv", "window": 32, "alpha_high": 1e9}}
PROMPTS = [tokens(count, seed) for count, seed in ((420, 511), (300, 386), (150, 231))]
"""In whose replies the two best tokens are far enough apart for the roundings of any batch."""
REPLY = 16
LICENCE = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
TEXTS = [LICENCE[start : start + 1500] for start in (0, 3000, 6000)]
"""Real text, whose next words are rarely toss-ups for the model."""


def ask(server: Server, ids: list[int], params: Any = None, reply: int = REPLY, **more: Any) -> http.Response:
    sampling = {"max_new_tokens": reply, "temperature": 0, "ignore_eos": True, "custom_params": params, **more}
    return server.post("/generate", {"input_ids": ids, "sampling_params": sampling})


def window(size: Any) -> dict[str, Any]:
    return {"diffkv": {"window": size}}


def tier(name: str) -> dict[str, Any]:
    return {"diffkv": {"tier": name}}


def replies(
    server: Server, params: Any = None, prompts: list[list[int]] = PROMPTS, reply: int = REPLY
) -> list[list[int]]:
    """To all prompts, one after the other: first computed, then behind the cached prompt."""
    server.flush_cache()
    found = []
    for _ in range(2):
        found += [ask(server, ids, params, reply).json()["output_ids"] for ids in prompts]
    return found


ONE_TIER: list[list[int]] = []


@pytest.fixture
def of_one_tier(server_of: Callable[..., Server]) -> list[list[int]]:
    """The replies of a server that has the high tier only; asked once."""
    if not ONE_TIER:
        ONE_TIER.extend(replies(server_of("diffkv", ARGS, config=ALONE, env=STRICT)))
    return ONE_TIER


def test_under_load_it_is_what_a_server_of_that_tier_says(
    of_one_tier: list[list[int]], server_of: Callable[..., Server]
) -> None:
    """Alone, and among twice as many requests as fit, of which some are retracted."""
    server = server_of("diffkv", ARGS, config=MIXED, env=STRICT)
    default = replies(server)
    assert replies(server, tier("high")) == of_one_tier != default
    before = stats_of(server)

    def one(number: int) -> tuple[int, http.Response]:
        high, ids = number % 2, PROMPTS[number // 2 % len(PROMPTS)]
        return number, ask(server, ids, tier("high") if high else None, REPLY if high else 4 * REPLY)

    seen: list[dict[str, int]] = []
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(one, number) for number in range(18)]
        while not all(x.done() for x in asked):
            seen.append(stats_of(server)["fidelity"]["running"])
            time.sleep(0.1)
        found = dict(x.result() for x in asked)
    assert all(x.ok for x in found.values())
    for number, reply in found.items():
        got = reply.json()["output_ids"]
        if number % 2:
            assert got == of_one_tier[len(PROMPTS) + number // 2 % len(PROMPTS)], "behind its cached prompt"
    after = stats_of(server)
    assert any(x["high"] and x["default"] for x in seen), "they ran one kind after the other"
    assert after["fidelity"] == before["fidelity"], "none runs, and none was refused"
    assert after["admission"]["waited"] > before["admission"]["waited"], "the pool was never full"


def test_others_notice_nothing(server_of: Callable[..., Server]) -> None:
    """A default request finds no prompt of a high one, and says what it says without any."""
    server = server_of("diffkv", ARGS, config=MIXED, env=STRICT)
    default = replies(server)
    server.flush_cache()
    found = []
    for _ in range(2):
        for ids in PROMPTS:
            ask(server, ids, tier("high"))
            reply = ask(server, ids).json()
            found.append(reply["output_ids"])
            assert (reply["meta_info"]["cached_tokens"] > 1) == (len(found) > len(PROMPTS))
    assert found == default


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.full)], ids=["compressed", "exact"])
def test_a_window_of_its_own_is_that_of_a_server_with_it(exact: bool, server_of: Callable[..., Server]) -> None:
    """Of two servers each says with the other's window what the other says: a larger and a smaller one than its own,
    for prompts that are computed and cached. Requests of both run at once."""
    form, prompts = {"prefix_fidelity": "exact"} if exact else {}, [PROMPTS[2], tokens(131, 5)]
    narrow = server_of("diffkv", ARGS, config={**MIXED, **form}, env=STRICT)
    usual = {32: replies(narrow, None, prompts, 12), 96: replies(narrow, window(96), prompts, 12)}
    assert usual[32] != usual[96], "the window makes no difference"
    for reply in (50, 100, 200, 400):  # until somebody has looked while both kinds run
        narrow.flush_cache()
        seen: list[dict[str, int]] = []
        with ThreadPoolExecutor(4) as pool:
            asked = {
                (size, number): pool.submit(ask, narrow, ids, window(size), reply)
                for number, ids in enumerate(prompts)
                for size in usual
            }
            while not all(x.done() for x in asked.values()):
                seen.append(stats_of(narrow)["fidelity"]["running"])
        for (size, number), answer in asked.items():
            assert answer.result().json()["output_ids"][:12] == usual[size][number], "as computed alone"
        if met := any(x["window"] and x["default"] for x in seen):
            break
    assert met, "they ran one kind after the other"
    counts = {"default": 0, "high": 0, "window": 0}
    assert stats_of(narrow)["fidelity"]["running"] == counts
    policy = {**MIXED["policy"], "window": 96}
    wide = server_of("diffkv", ARGS, config={**MIXED, **form, "policy": policy}, env=STRICT)
    assert replies(wide, None, prompts, 12) == usual[96]
    assert replies(wide, window(32), prompts, 12) == usual[32]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"difkv": {"tier": "high"}}, "did you mean diffkv?"),
        ({"diffkv": {"teir": "high"}}, "did you mean tier?"),
        ({"tier": "high"}, 'custom_params.tier is outside "diffkv"'),
        (tier("lossles"), "did you mean"),
        (tier("lossless"), "K8V4, which rounds"),
        ({"diffkv": {"tier": {"a": "b"}}}, "tier is an object"),
        (window(3), "this server needs 4 at least"),
        (window(4097), "allowed is a whole number from 1 to 4,096"),
        ({"diffkv": {"tier": "high", "window": 64}}, "drop one of the two"),
        ({"diffkv": [tier("high")]}, "the whole is a list"),
    ],
)
def test_what_cannot_be_is_an_error_of_its_request(params: Any, said: str, server_of: Callable[..., Server]) -> None:
    server = server_of("diffkv", ARGS, config=MIXED, env=STRICT)
    before = stats_of(server)["fidelity"]["refused"]
    reply = ask(server, PROMPTS[0], params)
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400 and said in message and "\n" not in message
    assert stats_of(server)["fidelity"]["refused"] == before + 1
    assert ask(server, PROMPTS[2], None, 3).ok


def test_a_prompt_without_tokens_is_an_error_of_its_own(server_of: Callable[..., Server]) -> None:
    """SGLang lets it come in one batch with others."""
    server = server_of("diffkv", ARGS, config=MIXED, env=STRICT)
    answer = server.post("/generate", {"input_ids": [PROMPTS[2], []], "sampling_params": {"max_new_tokens": 4}})
    assert answer.status_code == 400 and "the prompt is empty" in answer.text
    assert len(ask(server, PROMPTS[2]).json()["output_ids"]) == REPLY
    check_idle(server)


def test_the_openai_interfaces_take_it(server_of: Callable[..., Server]) -> None:
    """As a field of the body, ``extra_body`` of OpenAI's client."""
    server = server_of("diffkv", ARGS, config=MIXED, env=STRICT)
    text, more = "word " * 200, {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    bodies = {
        "/v1/completions": {"model": "nano", "prompt": text, **more},
        "/v1/chat/completions": {"model": "nano", "messages": [{"role": "user", "content": text}], **more},
    }
    for path, body in bodies.items():
        server.flush_cache()
        finished = stats_of(server)["prompts"]
        assert server.post(path, {**body, "custom_params": tier("high")}).ok
        after = stats_of(server)["prompts"]
        assert after["as computed"] == finished["as computed"] + 1 and after["compressed"] == finished["compressed"]
        wrong = server.post(path, {**body, "custom_params": tier("hihg")})
        assert wrong.status_code == 400 and "did you mean" in wrong.text
    stream = {"input_ids": PROMPTS[2], "sampling_params": {"custom_params": tier("hihg")}, "stream": True}
    assert "did you mean" in server.post("/generate", stream).text


@pytest.mark.full
def test_with_exact_prefixes(of_one_tier: list[list[int]], server_of: Callable[..., Server]) -> None:
    server = server_of("diffkv", ARGS, config=EXACT, env=STRICT)
    assert replies(server, tier("high")) == of_one_tier
    assert stats_of(server)["prompts"]["as computed"] == 2 * len(PROMPTS)


def known(server: Server, params: Any = None) -> list[list[tuple[int, dict[int, float]]]]:
    """Tokens of the replies to all texts, each with the log-probabilities of the two likeliest there; with each prompt
    computed, then cached."""
    server.flush_cache()
    found = []
    for text in [x for x in TEXTS for _ in range(2)]:
        sampling = {"max_new_tokens": REPLY, "temperature": 0, "ignore_eos": True, "custom_params": params}
        reply = server.generate(
            {"text": text, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
        )
        tops = [{token: value for value, token, _ in top} for top in reply["meta_info"]["output_top_logprobs"]]
        found.append(list(zip(reply["output_ids"], tops, strict=True)))
    return found


def distance(ours: list[tuple[int, dict[int, float]]], stock: list[tuple[int, dict[int, float]]]) -> float:
    """How far a reply strays from stock's, in nats: by log-probabilities as far as both say the same; where they part,
    by how much stock prefers its token."""
    far = 0.0
    for (mine, values), (token, wanted) in zip(ours, stock, strict=True):
        if mine != token:
            return max(far, wanted[token] - wanted.get(mine, min(wanted.values()) - 1))
        far = max(far, abs(values.get(token, 0.0) - wanted[token]))
    return far


def test_lossless_is_stock(server_of: Callable[..., Server]) -> None:
    """But for roundings of attention: where two tokens are a rounding apart either may be said."""
    stock = known(server_of("torch_native", ARGS))
    server = server_of("diffkv", ARGS, config=LOSSLESS, env=STRICT)
    lossless, default = known(server, tier("lossless")), known(server)
    near, far = (max(map(distance, ours, stock)) for ours in (lossless, default))
    assert near < 0.2 < far, "bf16 logits of 16 and more are 0.125 apart"
