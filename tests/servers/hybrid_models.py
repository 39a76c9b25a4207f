"""Models with states beside keys and values, and what servers of them need on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmarks.quality.random_hybrids import make_lfm2, make_qwen3_5, make_qwen3_next
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.client import Record
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.srt.models.speculation import CHAIN, MODEL_CHAIN
from sglang_diffkv.srt.versions.compat import installed
from tests.servers.second_plugin import install
from tests.servers.shared import STRICT

INTERPRETED = {"TRITON_INTERPRET": "1"}
"""Layers with states call Triton on a CPU where they do not call the placeholder of ``sgl_kernel``."""
GATED_NORM = """
import torch


def layernorm_fn(original, x, weight, bias, z=None, eps=1e-6, group_size=None, **more):
    assert bias is None and group_size is None and more["norm_before_gate"] and more["is_rms_norm"]
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight.float()
    return (normed * torch.nn.functional.silu(z.float())).to(x.dtype)


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.kernels.ops.attention.fla.layernorm_gated.layernorm_fn"
    HookRegistry.register(target, layernorm_fn, HookType.AROUND)
"""
"""A plugin with the gated norm of Qwen3.5's states, whose Triton kernel asks for a GPU before it is interpreted."""


@dataclass
class Hybrid:
    """A model, and what servers of it need beside it; ``plugin``: a second one, for stock too."""

    model: Path
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    plugin: str = "none"

    @property
    def stock_env(self) -> dict[str, str]:
        return {**self.env, "SGLANG_PLUGINS": self.plugin}

    def serve(self, server_of: Callable[..., Server], args: Sequence[str], config: dict[str, Any]) -> Server:
        """A server of ours that checks itself."""
        env = {**STRICT, **self.env}
        return server_of("diffkv", (*args, *self.args), model=self.model, config=config, env=env)


def _qwen3_next(folder: Path) -> Hybrid:
    make_qwen3_next(folder)
    return Hybrid(folder, env=INTERPRETED)


def _qwen3_5(folder: Path) -> Hybrid:
    make_qwen3_5(folder / "model")
    (folder / "plugin").mkdir()
    return Hybrid(folder / "model", env=install(folder / "plugin", "gated_norm", GATED_NORM), plugin="gated_norm")


def _lfm2(folder: Path) -> Hybrid:
    """Triton's interpreter makes NaN of bfloat16 in convolutions."""
    make_lfm2(folder)
    return Hybrid(folder, ("--dtype", "float16"), {**INTERPRETED, "SGLANG_MAMBA_CONV_DTYPE": "float16"})


def foreseeing(folder: Path) -> Hybrid:
    """A Qwen3-Next whose own drafts are often right."""
    make_qwen3_next(folder, foreseen=True)
    return Hybrid(folder, env=INTERPRETED)


OWN_DRAFTS = ("--speculative-algorithm", "NEXTN", "--decode-log-interval", "2", *MODEL_CHAIN.split())
"""Drafts of the model's layer for the token after the next."""
NGRAMS = (
    *["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "5", "--decode-log-interval", "2"],
    *CHAIN.split(),
)

KINDS = {"qwen3_next": _qwen3_next, "qwen3_5": _qwen3_5, "lfm2": _lfm2}


drafts_run = pytest.mark.skipif(
    not installed().draft_states_on_cpu, reason="this SGLang has no room for states behind drafts on a CPU"
)


def accepted(server: Server) -> float:
    """Tokens of a pass over drafts, lately."""
    return float(server.server_info()["internal_states"][0]["avg_spec_accept_length"])


def load(server: Server, prompts: Sequence[list[int]], replies: Sequence[int]) -> list[Record]:
    """All prompts, a tenth of a second apart, for replies of so many tokens."""

    def ask(index: int) -> Record:
        time.sleep(0.1 * index)
        return client.ask(server.url, prompts[index], replies[index], top_logprobs=2)

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(ask, range(len(prompts))))


def abort_some(server: Server, prompts: Sequence[list[int]]) -> None:
    """Requests that are left in the middle of their prompt or reply."""
    for prompt in prompts:
        with requests.post(
            f"{server.url}/generate",
            json={"input_ids": prompt, "sampling_params": {"max_new_tokens": 160, "ignore_eos": True}, "stream": True},
            stream=True,
            timeout=60.0,
        ) as response:
            next(response.iter_lines())
