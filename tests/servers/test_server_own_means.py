"""Servers that find key means themselves: the served model's, as transformers has them, of each rank its heads'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.paths import NANO
from benchmarks.quality.random_windows import make_gemma3
from sglang_diffkv.config import CACHE_ENV
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.key_means import SINKS, read_key_means
from sglang_diffkv.srt.startup import own_means
from tests.servers.shared import STRICT, stats_of, tokens

pytestmark = pytest.mark.server

ROOM = ("--max-total-tokens", "6000", "--chunked-prefill-size", "512")
AUTO = {"key_means": "auto"}


def found_of(server: Server) -> Path:
    """The file of the means that a server has found, of its first rank."""
    found = stats_of(server)["key_means"]
    assert found["found"], found
    return Path(found["file"])


def own(model: Path) -> torch.Tensor:
    """[layers, heads, head_dim] by transformers, of the tokens that a server reads."""
    from transformers import AutoModelForCausalLM

    ids = load_tokenizer(str(model))(own_means.text())["input_ids"][:512]
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        layers = loaded(torch.tensor([ids]), use_cache=True).past_key_values.layers
    return torch.stack([x.keys[0, :, SINKS:].float().mean(1) for x in layers])


@pytest.mark.full
def test_a_server_measures_its_model(tmp_path: Path, server_of: Callable[..., Server]) -> None:
    env = {**STRICT, CACHE_ENV: str(tmp_path)}
    server = server_of("diffkv", ROOM, config=AUTO, env=env)
    expected = own(NANO)
    means = read_key_means(str(found_of(server)), *expected.shape)
    assert (means - expected).norm() < 0.02 * expected.norm()
    assert len(client.run(server.url, [tokens(300, 1)], 24)[0].output_ids) == 24
    assert "measured in" in server.log_text() and stats_of(server)["configuration"]["values"]["key_means"] == "auto"


def test_each_rank_has_the_means_of_its_heads(tmp_path: Path, server_of: Callable[..., Server]) -> None:
    env = {**STRICT, CACHE_ENV: str(tmp_path), "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    server = server_of("diffkv", ["--tp-size", "2", *ROOM], config=AUTO, env=env)
    first, expected = found_of(server), own(NANO)
    files = [first, *(x for x in tmp_path.iterdir() if x != first)]
    halves = [read_key_means(str(x), expected.shape[0], 1, expected.shape[2]) for x in files]
    assert len(halves) == 2
    assert (torch.cat(halves, 1) - expected).norm() < 0.02 * expected.norm()
    assert len(client.run(server.url, [tokens(300, 1)], 8)[0].output_ids) == 8


def test_layers_that_slide_are_read_with_their_windows(tmp_path: Path, server_of: Callable[..., Server]) -> None:
    """The last layer sees all; its keys depend on five layers that do not."""
    model = tmp_path / "model"
    make_gemma3(model)
    env = {**STRICT, CACHE_ENV: str(tmp_path / "cache")}
    server = server_of("diffkv", ROOM, model=model, config=AUTO, env=env)
    from transformers import AutoModelForCausalLM

    ids = load_tokenizer(str(model))(own_means.text())["input_ids"][:512]
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        last = loaded(torch.tensor([ids]), use_cache=True).past_key_values.layers[5].keys[0, :, SINKS:].float().mean(1)
    found = read_key_means(str(found_of(server)), 6, *last.shape)[5]
    assert (found - last).norm() < 0.03 * last.norm()
