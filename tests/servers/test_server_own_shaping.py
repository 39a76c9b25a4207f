"""Servers that fit matrices to their model themselves: those of transformers' model, of each rank its heads', and
with them replies stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import splits
from benchmarks.paths import NANO
from sglang_diffkv.calibrate import emulated
from sglang_diffkv.config import CACHE_ENV
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.noise_shaping import NoiseShaping, read_noise_shaping
from tests.servers.shared import STRICT, stats_of, tokens

pytestmark = pytest.mark.server

READ = 512
"""Tokens that the server reads, as its chunks have them."""
LAYERS, HEADS, DIM = 6, 2, 64
AUTO = {
    "tiers": ["K8V4", "K5V3"], "rotate": "both", "key_means": "auto", "noise_shaping": "auto",
    "policy": {"name": "diffkv", "alpha_high": 10, "window": 32},
}  # fmt: skip


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> NoiseShaping:
    """By transformers, of the tokens that a server reads."""
    monkeypatch.setattr(emulated, "READ", READ)
    found = emulated.Judge(str(NANO), None).shaping
    assert found is not None
    return found


def check(found: NoiseShaping, expected: NoiseShaping) -> None:
    """That they are the same, but for what products in bfloat16 differ by."""
    for mine, other in ((found.keys, expected.keys), (found.values, expected.values)):
        assert mine is not None and other is not None
        assert (mine - other).norm() < 0.05 * (other - torch.eye(DIM)).norm()


def test_a_server_fits_its_model(tmp_path: Path, expected: NoiseShaping, server_of: Callable[..., Server]) -> None:
    """Its replies are right over chunks, decode steps, the low tier and prefix hits."""
    items = reference.select(splits.load("calib"), tasks=["kvupd", "count", "hop", "copy"], levels=["easy"], n=6)
    tokenizer = load_tokenizer(NANO)
    prompts = [chat_ids(tokenizer, x.prompt) for x in items]
    env = {**STRICT, CACHE_ENV: str(tmp_path)}
    server = server_of(
        "diffkv", ["--max-total-tokens", "6000", "--chunked-prefill-size", str(READ)], config=AUTO, env=env
    )
    for _ in range(2):
        replies = client.run(server.url, prompts, 400, concurrency=6)
        assert sum(reference.grade(r.text, x.answers) for r, x in zip(replies, items, strict=True)) >= 5
    assert all(r.cached_tokens for r in replies)
    told = stats_of(server)["noise_shaping"]
    assert told["found"] and told["values"] and told["tokens"] < READ
    assert "noise shaping: fitted in" in server.log_text() and "; noise shaping auto" in server.log_text()
    assert Path(told["file"]).stat().st_mode & 0o777 == 0o600
    check(read_noise_shaping(told["file"], LAYERS, HEADS, DIM, DIM), expected)


@pytest.mark.full
def test_each_rank_has_those_of_its_heads(
    tmp_path: Path, expected: NoiseShaping, server_of: Callable[..., Server]
) -> None:
    env = {**STRICT, CACHE_ENV: str(tmp_path), "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    args = ["--tp-size", "2", "--max-total-tokens", "6000", "--chunked-prefill-size", str(READ)]
    server = server_of("diffkv", args, config=AUTO, env=env)
    first = Path(stats_of(server)["noise_shaping"]["file"])
    files = [first, *(x for x in tmp_path.glob("noise-shaping-*") if x != first)]
    halves = [read_noise_shaping(str(x), LAYERS, 1, DIM, DIM) for x in files]
    assert len(halves) == 2
    keys, values = (torch.cat([getattr(x, name) for x in halves], 1) for name in ("keys", "values"))
    check(NoiseShaping(keys, values), expected)
    assert len(client.run(server.url, [tokens(300, 1)], 8)[0].output_ids) == 8
