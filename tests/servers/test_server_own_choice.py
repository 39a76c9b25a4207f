"""A server that chooses its configuration itself: with its own model, before it has pools, once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.paths import NANO
from sglang_diffkv.attention.emulated import Fp8, RoundedAgain, Stored, stored_of
from sglang_diffkv.calibrate.emulated import FP8, Judge
from sglang_diffkv.config import CACHE_ENV, DiffKVConfig, load_config
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.ladder import (
    BY_LAYER,
    JUDGING,
    LEAST_TOKENS,
    RUNGS,
    Loss,
    climb,
    config_of,
    rungs,
    scored_positions,
    text_of,
)
from sglang_diffkv.srt.startup.own_choice import ROUNDING
from tests.servers.shared import START_TIMEOUT, STRICT, check_idle, stats_of, tokens
from tests.tools.test_doctor import _run as run_doctor

pytestmark = pytest.mark.server

ROOM = ("--max-total-tokens", "6000", "--chunked-prefill-size", str(LEAST_TOKENS))
AUTO = {"thresholds": "auto", "page_tokens": 16}
PLAIN = list(RUNGS)[:-2]
"""Rungs with fewer than 8 bits somewhere: nano as it is takes one of them."""
LARGE, SMALL, CHANNEL, HALF = 12.0, 1 / 16, 9, 32
"""Keys of the spoiled model are so many times larger in a channel, and in the one that RoPE turns it with, and so many
times smaller in all others."""


def judged(model: Path, names: Sequence[str] = tuple(RUNGS)) -> dict[str, Loss]:
    """What these rungs lose of transformers' model, and FP8."""
    judge = Judge(str(model), None)
    ids = load_tokenizer(str(model))(text_of(JUDGING))["input_ids"][:LEAST_TOKENS]
    configs = {name: config for name, config in rungs(DiffKVConfig()).items() if name in names}
    ways: dict[str, Stored] = {FP8: Fp8(), **{name: stored_of(x, judge.means) for name, x in configs.items()}}
    found = judge.losses(ids, {**ways, ROUNDING: RoundedAgain()})
    prompt, off = len(scored_positions(len(ids))[0]), found.pop(ROUNDING)
    return {name: Loss.of(x, found[FP8], prompt, off) for name, x in found.items()}


def spoil(model: Path) -> None:
    """Nano with the same attention and outliers in its keys, which few bits do not hold: what a channel of keys has
    more, that of queries has less."""
    model.mkdir()
    for file in NANO.iterdir():
        if file.suffix == ".json":
            (model / file.name).write_bytes(file.read_bytes())
    weights = load_file(NANO / "model.safetensors")
    for name, weight in weights.items():
        factors = torch.full(weight.shape[-1:], SMALL, dtype=weight.dtype)
        factors[[CHANNEL, CHANNEL + HALF]] = LARGE
        if "k_norm" in name:
            weight *= factors
        elif "q_norm" in name:
            weight /= factors
    save_file(weights, model / "model.safetensors", {"format": "pt"})


@contextmanager
def told_nothing(args: Sequence[str], env: Mapping[str, str]) -> Iterator[Server]:
    """A server without a configuration: ``server_of`` gives it an empty one."""
    with Server(NANO, "diffkv", args, env=env, timeout=START_TIMEOUT) as server:
        yield server
        check_idle(server)


def test_a_server_that_is_told_nothing_chooses_for_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the doctor says what it chose."""
    env = {**STRICT, CACHE_ENV: str(tmp_path)}
    with told_nothing(ROOM, env) as server:
        stats = stats_of(server)
        assert len(client.run(server.url, [tokens(300, 1)], 24)[0].output_ids) == 24
    choice, configuration = stats["choice"], stats["configuration"]
    rung, raised, losses = choice["chosen"], choice.get("layers"), judged(NANO, list(choice["millinats"]))
    assert choice["tokens"] == LEAST_TOKENS
    assert 0 < choice["millinats"].pop(ROUNDING)["prompt"] < choice["millinats"][FP8]["prompt"]
    compared = {name: found for name, found in choice["millinats"].items() if name in losses}
    assert len(compared) > 2 and (raised is not None or rung in PLAIN)
    for name, found in compared.items():  # a token that was a toss-up may weigh much, by the CPU's bf16
        expected = losses[name].report()
        assert found["prompt"] == pytest.approx(expected["prompt"], rel=0.5), name
        assert found["reply"] == pytest.approx(expected["reply"], rel=0.8), name
    taken, fp8 = choice["millinats"][rung], choice["millinats"][FP8]
    assert taken["prompt"] <= fp8["prompt"] and taken["reply"] <= fp8["reply"]
    (_, upper), layers = BY_LAYER[0], json.loads((NANO / "config.json").read_text())["num_hidden_layers"]
    by_layer = None if raised is None else config_of(DiffKVConfig(), upper, tuple(raised), layers)
    served = by_layer or load_config(json.dumps(RUNGS[rung]))
    assert configuration["values"] == served.whole() and rung in configuration["thresholds"]
    assert configuration["sources"]["tiers"] == "auto"
    (file,) = tmp_path.glob("choice-*.json")
    assert file.stat().st_mode & 0o777 == 0o600 and choice["file"] == str(file)
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    report = json.loads(run_doctor("--model-path", str(NANO), "--json", *ROOM).stdout)
    (line,) = (x for x in report["sections"]["Model"] if x["name"] == "rungs")
    assert f"{rung} was chosen at the start; figures here are of {rung}" in line["text"]


def test_a_server_that_is_told_nothing_and_cannot_choose(tmp_path: Path) -> None:
    with told_nothing(("--max-total-tokens", "6000", "--chunked-prefill-size", "512"), {CACHE_ENV: str(tmp_path)}) as x:
        told = stats_of(x)["configuration"]
        assert len(client.run(x.url, [tokens(700, 1)], 24)[0].output_ids) == 24
        log = x.log_text()
    assert told["values"] == load_config("careful").whole() and told["sources"]["tiers"] == "preset careful"
    assert "--chunked-prefill-size does not allow" in told["thresholds"] and told["thresholds"] in log
    assert not list(tmp_path.iterdir()), "nothing was read"


@pytest.mark.full
def test_the_next_start_takes_what_was_kept(tmp_path: Path, server_of: Callable[..., Server]) -> None:
    env = {**STRICT, CACHE_ENV: str(tmp_path)}
    found: list[dict[str, Any]] = []
    for seed in ("1", "2"):
        server = server_of("diffkv", [*ROOM, "--random-seed", seed], config=AUTO, env=env)
        found.append(stats_of(server)["choice"])
    assert "seconds" in found[0] and "seconds" not in found[1]
    assert {x: y for x, y in found[0].items() if x not in ("seconds", "how")} == {
        x: y for x, y in found[1].items() if x != "how"
    }


@pytest.mark.full
def test_ranks_choose_together(tmp_path: Path, server_of: Callable[..., Server]) -> None:
    env = {**STRICT, CACHE_ENV: str(tmp_path), "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    server = server_of("diffkv", ["--tp-size", "2", *ROOM], config=AUTO, env=env)
    choice, expected = stats_of(server)["choice"], judged(NANO, [])
    assert choice["millinats"][FP8]["prompt"] == pytest.approx(expected[FP8].report()["prompt"], rel=0.3)
    assert choice["chosen"] in RUNGS
    assert len(client.run(server.url, [tokens(300, 1)], 8)[0].output_ids) == 8


def test_a_model_with_outliers_in_its_keys_takes_a_safer_rung(tmp_path: Path) -> None:
    """FP8 has an exponent in each number, so it loses what it lost; codes of a range lose more."""
    spoil(tmp_path / "spoiled")
    losses = judged(tmp_path / "spoiled")
    rung = climb(list(RUNGS), losses[FP8], losses.__getitem__).rung
    assert rung not in PLAIN and losses[rung].within(losses[FP8])
