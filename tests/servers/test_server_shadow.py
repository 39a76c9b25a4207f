"""A server's traffic judged by a lossless one, both real: through the proxy and from a file."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from openai import OpenAI

from benchmarks.paths import NANO
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.shadow import cli
from tests.browser import Browser, check_looks
from tests.servers.shared import START_TIMEOUT, STRICT, stats_of, tokens
from tests.tools.shadowing import Shadow
from tests.tools.test_page import check_page

pytestmark = pytest.mark.server

ARGS = ["--max-total-tokens", "4000"]
SMALL = {"tiers": ["K4V2"]}
TEXT = "word " * 60


@pytest.fixture(scope="module")
def reference() -> Iterator[Server]:
    with Server(NANO, "diffkv", ARGS, diffkv_config="lossless", timeout=START_TIMEOUT) as server:
        yield server


def judged(shadow: Shadow, count: int) -> dict[str, Any]:
    """The figures once so many samples are judged or left out."""
    deadline = time.monotonic() + 60
    while True:
        told = shadow.told()
        if told["requests"]["judged"] + sum(told["requests"]["left_out"].values()) >= count:
            return told
        assert time.monotonic() < deadline, told["requests"]
        time.sleep(0.1)


def test_traffic_is_judged(reference: Server, server_of: Callable[..., Server]) -> None:
    """Of all interfaces, streams and not; a server that loses much is told from one that loses nothing."""
    server = server_of("diffkv", ARGS, config=SMALL, env=STRICT)
    ids = tokens(200, 3)
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    bodies = {
        "/generate": {"input_ids": ids, "sampling_params": sampling},
        "/v1/completions": {"model": "nano", "prompt": TEXT, "max_tokens": 9, "temperature": 0},
        "/v1/chat/completions": {
            "model": "nano", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 9, "temperature": 0,
        },
    }  # fmt: skip
    with Shadow(server.url, reference.url, share=1.0) as shadow:
        for path, body in bodies.items():
            _, direct, through = (
                requests.post(url + path, json=body, timeout=60).json() for url in (server.url, server.url, shadow.url)
            )
            assert _said(direct) == _said(through), "behind the cached prompt"
        body = {**bodies["/generate"], "stream": True}
        with requests.post(f"{shadow.url}/generate", json=body, stream=True, timeout=60) as reply:
            parts = [x for x in reply.iter_lines() if x]
        assert parts[-1] == b"data: [DONE]" and len(parts) > 5
        ended = json.loads(parts[-2][6:])["meta_info"]
        assert ended["completion_tokens"] == 12 and ended["finish_reason"]["type"] == "length"
        openai = OpenAI(base_url=f"{shadow.url}/v1", api_key="none")
        chat = bodies["/v1/chat/completions"]
        assert "".join(
            x.choices[0].delta.content or "" for x in openai.chat.completions.create(**chat, stream=True)
        ) == _said(requests.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).json())
        assert requests.get(f"{shadow.url}/health", timeout=10).status_code == 200
        told = judged(shadow, 5)
        page = check_page(requests.get(f"{shadow.report}/", timeout=10).text)
        text = requests.get(f"{shadow.report}/metrics", timeout=10).text
    assert told["requests"] == {"forwarded": 6, "sampled": 5, "waiting": 0, "judged": 5, "left_out": {}}
    assert told["tokens"]["tokens"] >= 40 and told["share_cached"] > 0.5
    assert told["divergence"]["mean"] > 0.01 and told["agreement"]["mean"] < 1
    assert told["parted"]["requests"] >= 1 and "same likeliest token" in page.text
    assert "diffkv_shadow_judged_requests_total 5\n" in text
    assert "word word" not in page.text + text + json.dumps(told), "a prompt"


def test_the_page_in_a_browser(reference: Server, server_of: Callable[..., Server], browser: Browser) -> None:
    """It can be read, and has the figures of ``/json``."""
    server = server_of("diffkv", ARGS, config=SMALL, env=STRICT)
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    with Shadow(server.url, reference.url, share=1.0) as shadow:
        for seed in range(3):
            body = {"input_ids": tokens(150 * (seed + 1), seed), "sampling_params": sampling}
            requests.post(f"{shadow.url}/generate", json=body, timeout=60).raise_for_status()
        told = judged(shadow, 3)
        check_looks(browser, f"{shadow.report}/", "shadow")
    assert browser.tile("requests judged") == "3"
    assert browser.tile("same likeliest token") == f"{100 * told['agreement']['mean']:.2f}%" != "100.00%"
    assert browser.tile("divergence, nats") == f"{told['divergence']['mean']:.5f}"
    assert browser.tile("replies that part") == f"{100 * told['parted']['share']:.2f}%"


def _said(reply: dict[str, Any]) -> Any:
    if "output_ids" in reply:
        return reply["output_ids"]
    (choice,) = reply["choices"]
    return choice.get("text") or choice["message"]["content"]


def test_a_lossless_server_agrees(
    reference: Server, server_of: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a file, in each of its forms; and a compressing server is no reference."""
    server = server_of("diffkv", ARGS, config=SMALL, env=STRICT)
    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 9}
    lines = [
        {"input_ids": tokens(150, 4), "sampling_params": {"max_new_tokens": 6}},
        {"prompt": TEXT, "max_tokens": 5},
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"no": "prompt"},
    ]
    path, page, data = tmp_path / "requests.jsonl", tmp_path / "page.html", tmp_path / "told.json"
    path.write_text("".join(json.dumps(x) + "\n" for x in lines) + "no json\n\n")
    files = ["--file", str(path), "--html", str(page), "--json", str(data)]
    itself = reference.url.replace("127.0.0.1", "localhost")
    assert itself != reference.url and cli.main(["--url", reference.url, "--reference", itself, *files]) == 0
    told = json.loads(data.read_text())
    assert told["requests"]["judged"] == 3 and told["requests"]["left_out"] == {"not_text": 1, "unreadable": 2}
    assert told["agreement"]["mean"] == 1 and told["divergence"]["mean"] < 1e-3 and not told["parted"]["requests"]
    assert "100.00%" in check_page(page.read_text()).text
    assert "100.00%" in capsys.readouterr().out
    assert cli.main(["--url", reference.url, "--reference", server.url, "--file", str(path)]) == 1
    assert "the reference compresses: start it with --diffkv-config lossless" in capsys.readouterr().err


def test_who_leaves_is_told_to_the_server(reference: Server) -> None:
    """The server stops generating, and nothing is judged."""
    body = {"input_ids": tokens(40, 5), "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
    with Shadow(reference.url, reference.url, share=1.0) as shadow:
        for stream in (True, False):
            with pytest.raises(requests.Timeout), requests.Session() as session:
                reply = session.post(f"{shadow.url}/generate", json={**body, "stream": stream}, timeout=2, stream=True)
                begun = time.monotonic()
                for _ in reply.iter_content(1):
                    if time.monotonic() - begun > 1:
                        raise requests.Timeout
            deadline = time.monotonic() + 20
            while stats_of(reference)["fidelity"]["running"]["default"]:
                assert time.monotonic() < deadline, "the server goes on"
                time.sleep(0.1)
        told = judged(shadow, 2)
    assert told["requests"]["left_out"] == {"not_answered": 2}
    assert threading.active_count() < 50
