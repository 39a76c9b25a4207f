"""Settings as users name them, on real servers: presets by their names, and rotations from files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import splits
from benchmarks.paths import NANO
from sglang_diffkv.config import CACHE_ENV
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server, stock_backend
from tests.servers.identity import check_tokens
from tests.servers.shared import STRICT, check_idle, stats_of

pytestmark = pytest.mark.server

ROOM = ("--max-total-tokens", "4000", "--max-running-requests", "8")
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    items = [x for x in splits.load("dev") if x.level == "easy"][:4]
    return [chat_ids(load_tokenizer(NANO), x.prompt) for x in items]


@pytest.fixture
def stock(prompts: list[list[int]], server_of: Callable[..., Server]) -> list[client.Record]:
    server = server_of(stock_backend(), ROOM)
    return client.run(server.url, prompts, NEW_TOKENS, top_logprobs=2)


def test_presets_and_fitted_rotations_are_served(
    prompts: list[list[int]], stock: list[client.Record], tmp_path: Path, server_of: Callable[..., Server]
) -> None:
    """In one test, so that stock is asked once. What stores 8 bits or more gives its tokens but for ties."""
    turns = torch.linalg.qr(torch.randn(6, 2, 64, 64, generator=torch.Generator().manual_seed(0)))[0]
    save_file({"rotation": turns.contiguous()}, tmp_path / "r.safetensors")
    file = str(tmp_path / "r.safetensors")
    rotated = {"tiers": ["K8V8"], "key_rotation": file, "value_rotation": file}
    for config in ("lossless", "safe", "small", rotated):
        server = server_of("diffkv", ROOM, config=config, env={**STRICT, CACHE_ENV: str(tmp_path)})
        found = client.run(server.url, prompts, NEW_TOKENS)
        told = stats_of(server)["configuration"]
        if isinstance(config, str):
            assert told["thresholds"] == f"those of the preset {config}"
        else:
            assert told["values"]["key_rotation"] == file
        if config in ("lossless", rotated):
            check_tokens([x.output_ids for x in found], stock, str(config))
        assert [len(x.output_ids) for x in found] == [len(x.output_ids) for x in stock] or config == "small"
        check_idle(server)
