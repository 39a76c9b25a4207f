"""A server as users meet it: planned by ``python -m sglang_diffkv.capacity``, then used in each way that SGLang has, by
the examples. ``engine.py`` is in ``test_engine.py``."""

from __future__ import annotations

import importlib
import random
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from benchmarks.paths import NANO, REPOSITORY
from sglang_diffkv.capacity.held import Holding, running
from sglang_diffkv.capacity.memory import Budget, capacity_of, plan_of
from sglang_diffkv.capacity.model import read_model
from sglang_diffkv.config import CACHE_ENV, DiffKVConfig
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.evaluate.tasks import reference
from tests.servers.shared import STRICT, stats_of

pytestmark = pytest.mark.server

EXAMPLES = REPOSITORY / "examples"
CONFIG = {"tiers": ["K8V4", "K4V2"], "policy": {"name": "diffkv", "alpha_high": 1e9, "window": 64}}
TOKENS, REQUESTS, PROMPT, REPLY = 5000, 16, 600, 40


@pytest.fixture
def server(server_of: Callable[..., Server]) -> Server:
    args = ["--max-total-tokens", str(TOKENS), "--max-running-requests", "64", "--decode-log-interval", "1"]
    return server_of("diffkv", [*args, "--enable-cache-report"], config=CONFIG, env=STRICT)


def test_tokens_and_requests_are_those_of_a_plan(server: Server) -> None:
    """More requests than run at once, all at the same time: within 10%."""
    model = read_model(str(NANO))
    plan = plan_of(model, DiffKVConfig.model_validate(CONFIG), 1)
    total = stats_of(server)["memory"]["total"]
    fitting = capacity_of(plan, model, Budget(total, total, None, ()), 64)
    served = server.server_info()["max_total_num_tokens"]
    assert abs(fitting - served) <= plan.fmt.high.tokens and abs(served - TOKENS) <= plan.fmt.high.tokens

    before, seen = stats_of(server)["finished"], len(server.log_text())
    draw = random.Random(1)
    prompts = [[draw.randrange(100, 1900) for _ in range(PROMPT)] for _ in range(REQUESTS)]
    sampling = {"max_new_tokens": REPLY, "temperature": 0, "ignore_eos": True}
    server.generate({"input_ids": prompts, "sampling_params": sampling})
    holding = Holding(plan, served)
    after = stats_of(server)["finished"]
    held, length = (after[x] - before[x] for x in ("page_bytes", "tokens"))
    assert holding.bytes_of(PROMPT, REPLY) / (PROMPT + REPLY) == pytest.approx(held / length, rel=0.1)

    steps = re.findall(r"Decode batch.*?#running-req: (\d+).*?#queue-req: (\d+)", server.log_text()[seen:])
    waiting = [int(x) for x, others in steps if int(others)]
    planned = running(holding, PROMPT, REPLY, 64)
    assert 6 < planned.together < REQUESTS / 1.5
    assert 0.9 * planned.together <= mean(waiting) <= 1.1 * planned.mean
    assert max(waiting) == pytest.approx(planned.mean, abs=1)


class Served(Server):
    """A server of ``sglang serve``."""

    def __init__(self, *args: Any, **given: Any):
        super().__init__(*args, **given)
        assert self.command[:3] == [sys.executable, "-m", "sglang.launch_server"]
        self.command[:3] = [str(Path(sys.executable).with_name("sglang")), "serve"]


def test_a_preset_is_served_and_asked_by_openai_s_client(tmp_path: Path) -> None:
    """``sglang serve --diffkv-config balanced``, which measures key means; one request asks for the high tier."""
    room = ["--max-total-tokens", "4000", "--max-running-requests", "8"]
    env = {**STRICT, CACHE_ENV: str(tmp_path)}
    with Served(NANO, "diffkv", room, diffkv_config="balanced", env=env) as server:
        told = stats_of(server)
        assert told["configuration"]["thresholds"] == "those of the preset balanced"
        assert told["configuration"]["sources"]["key_means"] == "preset balanced"
        assert told["key_means"]["found"] and Path(told["key_means"]["file"]).parent == tmp_path
        ask = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).completions.create
        prompt: dict[str, Any] = {"model": "default", "prompt": "word " * 300, "max_tokens": 8, "temperature": 0}
        assert ask(**prompt).usage.completion_tokens == 8
        assert ask(**prompt, extra_body={"custom_params": {"diffkv": {"tier": "high"}}}).usage.completion_tokens == 8
        after = stats_of(server)
        assert after["prompts"]["compressed"] == told["prompts"]["compressed"] + 1
        assert after["prompts"]["as computed"] == told["prompts"]["as computed"] + 1
        with pytest.raises(BadRequestError, match="did you mean tier"):
            ask(**prompt, extra_body={"custom_params": {"diffkv": {"teir": "high"}}})
        assert stats_of(server)["fidelity"]["refused"] == after["fidelity"]["refused"] + 1


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of ``examples/``, which imports others as a script there does."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_each_kind_of_use_has_an_example() -> None:
    names = {x.stem for x in EXAMPLES.glob("*.py")}
    assert {"engine", "frontend", "openai_client", "router", "decode_wrapper", "demo"} == names
    assert Path(__file__).with_name("test_engine.py").is_file()


def test_a_program_in_the_frontend_language(server: Server, example: Callable[[str], Any]) -> None:
    server.flush_cache()
    replies, second = example("frontend").run(server.url, "easy-1", 4)
    right = sum(reference.grade(reply, item.answers) for item, reply in replies)
    assert right >= 3
    assert second.strip()


def test_a_chat_of_the_openai_client(server: Server, example: Callable[[str], Any], capsys: Any) -> None:
    server.flush_cache()
    before = stats_of(server)["finished"]["requests"]
    assert example("openai_client").main(["--url", server.url]) == 0
    first, *_ = out = capsys.readouterr().out.splitlines()
    second = next(x for x in out if x.startswith("turn 2"))
    assert first.endswith(" 0 of them cached") and not second.endswith(" 0 of them cached")
    assert stats_of(server)["finished"]["requests"] == before + 2


def test_what_make_demo_shows(
    server: Server, example: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """But for its own server and most of the worked steps, which take long: most answers are right, and a ratio."""
    server.flush_cache()
    demo = example("demo")
    monkeypatch.setattr(demo, "Server", lambda *args, **options: nullcontext(server))
    monkeypatch.setattr(demo, "WORKED_STEPS", demo.WORKED_STEPS[:1])
    assert demo.main([]) == 0
    out = capsys.readouterr().out
    answers = len(demo.WORKED_STEPS) + 1 + len(demo.SHARED_PREFIX)
    assert answers - 1 <= len(re.findall(r"\bright +│", out)) <= answers
    (ratio,) = re.findall(r"measured ratio (0\.\d+) of bf16 bytes", out)
    assert 0.2 < float(ratio) < 0.6


def test_a_chat_through_the_router(server: Server, example: Callable[[str], Any], capsys: Any) -> None:
    """The second turn finds the first in the server's prefix cache, behind the router too."""
    server.flush_cache()
    before = stats_of(server)["finished"]["requests"]
    assert example("router").main(["--workers", server.url]) == 0
    out = capsys.readouterr().out.splitlines()
    second = next(x for x in out if x.startswith("turn 2"))
    assert not second.endswith(" 0 of them cached")
    assert stats_of(server)["finished"]["requests"] >= before + 2
