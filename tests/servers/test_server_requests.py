"""What users send to a compressed server: choices, streams, logprobs, grammar, shared prefixes, bad requests."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import torch
from safetensors.torch import save_file

from benchmarks import splits
from benchmarks.paths import NANO
from sglang_diffkv.calibrate import means
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.srt.versions.compat import installed
from tests.servers.shared import STRICT

pytestmark = pytest.mark.server

POOL = 6000
BEAMS = bool(installed().target("validate_beams"))
"""Whether a request may ask SGLang for beam search."""
QUESTION = {"role": "user", "content": "What is 23 * 45? Show the steps."}


@pytest.fixture
def server(server_of: Callable[..., Server]) -> Server:
    return server_of("diffkv", ["--max-total-tokens", str(POOL), "--decode-log-interval", "5"], env=STRICT)


def _chat(server: Server, **fields: object) -> dict:
    reply = server.post("/v1/chat/completions", {"model": "nano", "messages": [QUESTION], "temperature": 0, **fields})
    assert reply.ok, reply.text
    return reply.json()


def test_shared_prefix_is_attached_not_computed(server: Server) -> None:
    group = [x for x in splits.load("dev") if x.task == "fewshot_shared" and x.level == "medium"][:2]
    tokenizer = load_tokenizer(NANO)
    ids = [chat_ids(tokenizer, x.prompt) for x in group]
    shared = next(i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
    server.flush_cache()
    first = client.ask(server.url, ids[0], 64)
    before = server.stats()
    second = client.ask(server.url, ids[1], 64)
    after = server.stats()
    assert before is not None
    assert after is not None
    assert first.cached_tokens == 0
    assert second.cached_tokens == shared
    assert all(reference.grade(r.text, x.answers) for r, x in zip((first, second), group, strict=True))
    private = after["pages_used"] - before["pages_used"]
    assert private < before["pages_used"] / 2, "the second question took pages for the shared prefix"


def test_ratio_and_shares_are_reported(server: Server) -> None:
    long = next(x for x in splits.load("dev") if x.task == "fewshot_shared" and x.level == "medium")
    client.ask(server.url, chat_ids(load_tokenizer(NANO), long.prompt), 64)
    _chat(server, max_tokens=200)
    stats = server.stats()
    assert stats is not None
    assert 0.2 < stats["ratio_tokens"] < stats["ratio_pages"] < 0.7
    assert stats["share_high"] + stats["share_low"] + stats["share_pruned"] == pytest.approx(1)
    assert stats["share_low"] > 0.1
    line = re.findall(r"kv ratio: (0\.\d+) \(high (\d+)%, low (\d+)%, pruned", server.log_text())
    assert line, "no decode log line carries the ratio"
    heads = stats["by_head"]
    assert sum(map(sum, heads["high"])) + sum(map(sum, heads["low"])) == heads["tokens"] * 12, "6 layers of 2 heads"
    assert sum(map(sum, heads["pages"])) == stats["pages_used"]


def test_the_configuration_served_is_told(server: Server) -> None:
    """Whole, with the source of each part, in ``/server_info`` and in the plugin's first line of the log."""
    stats = server.stats()
    assert stats is not None
    told = stats["configuration"]
    assert set(told) == {"values", "thresholds", "sources", "files"}
    assert told["values"] == DiffKVConfig().whole() and told["values"]["policy"]["alpha_high"] == 3.0
    assert set(told["sources"].values()) == {"default"} and told["files"] == {}
    first = next(line for line in server.log_text().splitlines() if "DiffKV" in line or "diffkv" in line.split("=")[0])
    assert f"DiffKV configuration ({told['thresholds']}): " in first
    assert json.loads(first.split("): ", 1)[1]) == told


def test_several_choices(server: Server) -> None:
    reply = _chat(server, n=3, max_tokens=60)
    texts = {choice["message"]["content"] for choice in reply["choices"]}
    assert len(reply["choices"]) == 3
    assert len(texts) == 1, "greedy choices of one prompt differ"


def test_streaming_gives_the_text_of_a_plain_reply(server: Server) -> None:
    plain = _chat(server, max_tokens=60)["choices"][0]["message"]["content"]
    payload = {"model": "nano", "messages": [QUESTION], "temperature": 0, "max_tokens": 60, "stream": True}
    parts = []
    with requests.post(f"{server.url}/v1/chat/completions", json=payload, stream=True, timeout=120) as reply:
        for line in reply.iter_lines():
            if line.startswith(b"data: {"):
                parts.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
    assert "".join(parts) == plain


def test_logprobs(server: Server) -> None:
    payload = {"text": "1 2 3 4", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    reply = server.generate({**payload, "sampling_params": {"temperature": 0, "max_new_tokens": 8}})
    meta = reply["meta_info"]
    assert len(meta["output_token_logprobs"]) == 8
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])


def test_structured_output(server: Server) -> None:
    parameters = {"temperature": 0, "max_new_tokens": 16, "regex": "(yes|no)-[0-9]{3}"}
    reply = server.generate({"text": "Answer:", "sampling_params": parameters})
    assert re.fullmatch("(yes|no)-[0-9]{3}", reply["text"])


def test_cancelled_stream_returns_its_pages(server: Server) -> None:
    server.flush_cache()
    payload = {
        "text": "Count: 1 2 3",
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True},
    }
    with requests.post(f"{server.url}/generate", json=payload, stream=True, timeout=120) as reply:
        lines = reply.iter_lines()
        for _ in range(10):
            next(lines)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        server.flush_cache()
        stats = server.stats()
        assert stats is not None
        if stats["pages_used"] == 0:
            return
        time.sleep(0.2)
    pytest.fail("the cancelled request still holds pages")


def test_bad_requests_fail_alone(server: Server) -> None:
    url = f"{server.url}/generate"
    good = {"text": "1 2 3 4 5", "sampling_params": {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}}
    too_long = {"input_ids": [400] * (POOL + 50), "sampling_params": {"max_new_tokens": 4}}
    impossible = {"text": "x", "sampling_params": {"temperature": -1}}
    with ThreadPoolExecutor(4) as threads:
        others = [threads.submit(requests.post, url, json=good, timeout=120) for _ in range(2)]
        bad = [threads.submit(requests.post, url, json=x, timeout=120).result() for x in (too_long, impossible)]
        replies = [x.result().json() for x in others]
    for reply, word in zip(bad, ("longer|exceed|too long", "temperature"), strict=True):
        assert reply.status_code == 400, reply.text
        assert re.search(word, reply.text), reply.text
    assert [len(x["output_ids"]) for x in replies] == [100, 100]
    assert replies[0]["output_ids"] == replies[1]["output_ids"]


def test_beams_are_declined(server: Server) -> None:
    """They need no option of the server: a client asks for them, in ``sampling_params``. Elsewhere SGLang has no such
    field and ignores it, as it does without the plugin."""
    plain = {"max_new_tokens": 4, "temperature": 0}
    beams = {**plain, "beam_width": 4}
    refused = "Drop beam_width" if BEAMS else "Internal Server Error"
    for text, sampling in (("Hello", beams), (["Hello", "You"], beams), (["Hello", "You"], [plain, beams])):
        response = server.post("/generate", {"text": text, "sampling_params": sampling})
        assert response.status_code == (400 if BEAMS else 500) and refused in response.text
    if BEAMS:  # a stream has begun by then; before, SGLang breaks it off
        response = server.post("/generate", {"text": "Hello", "sampling_params": beams, "stream": True})
        last = [x for x in response.text.splitlines() if x.startswith("data: {")][-1]
        reason = json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]
        assert (reason["type"], reason["status_code"]) == ("abort", 400) and refused in reason["message"]
    server.generate({"text": "Hello", "sampling_params": plain})  # the prompt is cached for both that are compared
    reply = server.generate({"text": "Hello", "sampling_params": plain})
    ignored = server.generate({"text": "Hello", "sampling_params": plain, "beam_width": 4})
    assert ignored["output_ids"] == reply["output_ids"]


def test_rotations_and_key_means_answer_over_chunks_and_prefix_hits(
    server_of: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> None:
    items = reference.select(splits.load("calib"), tasks=["kvupd", "count", "hop", "copy"], levels=["easy"], n=8)
    tokenizer = load_tokenizer(NANO)
    prompts = [chat_ids(tokenizer, x.prompt) for x in items]
    folder = tmp_path_factory.mktemp("means")
    (folder / "text.txt").write_text("\n".join(x.prompt for x in splits.load("calib")[:20]), encoding="utf-8")
    path = str(folder / "means.safetensors")
    assert means.main(["--model", str(NANO), "--text", str(folder / "text.txt"), "--output", path]) == 0
    rotation = str(folder / "rotation.safetensors")  # some for each layer and KV head
    save_file({"rotation": torch.linalg.qr(torch.randn(6, 2, 64, 64)).Q.contiguous()}, rotation)
    config = {"rotate": "keys", "key_means": path, "policy": {"name": "diffkv", "alpha_high": 5, "window": 32}}
    config = {**config, "value_rotation": rotation}
    server = server_of("diffkv", ["--chunked-prefill-size", "64"], config=config)
    for _ in range(2):
        replies = client.run(server.url, prompts, 400, concurrency=6)
        assert sum(reference.grade(r.text, x.answers) for r, x in zip(replies, items, strict=True)) >= 7
    assert all(r.cached_tokens for r in replies)
    assert f"rotation keys, values by {rotation}; key means {path}" in server.log_text()
