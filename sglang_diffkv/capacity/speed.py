"""Output tokens a second, as a range: what a decode step reads, at the efficiencies that kernels and servers were
measured to have.

Sources: ``benchmarks/results/kernels.csv`` (attention), ``step_llama3-8b_h100.md`` (matrix products and the rest of a
step), ``latency.csv`` and docs/kernels.md (prompts). The servers of ``stationary.csv`` lie within the ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_diffkv.capacity.gpus import Gpu
from sglang_diffkv.capacity.held import SAMPLES, Holding, StockHolding
from sglang_diffkv.capacity.model import Model

Kind = Literal["bf16", "fp8", "diffkv"]

ATTENTION: dict[Kind, tuple[float, float]] = {"bf16": (0.90, 0.97), "fp8": (0.51, 0.75), "diffkv": (0.59, 0.88)}
"""Share of the read bandwidth at which decode attention reads keys and values, least and most. Batches of 64 and 128,
lengths from 2,048 to 16,384. bf16 and fp8 are FlashInfer's; at fp8 an H200 has the least and an H100 the most."""
PRODUCTS = 1.3
"""Matrix products of 128 requests take up to so many times what reading their weights takes (6.16 to 4.8 ms)."""
LAYER = (40e-6, 60e-6)
"""Seconds a layer for all else: norms, rotary embedding, appending, launches. Of one request's step, and of 128's."""
RANKS_LAYER = 20e-6
"""The same, at most, for exchanges between ranks; two H100s."""
PROMPT_ATTENTION = 6.2e14
"""Operations a second of attention in a prompt of 8,190 tokens, H100 (28.5 ms)."""
PROMPTS: dict[Kind, tuple[float, float]] = {"bf16": (1.05, 1.25), "fp8": (1.05, 1.25), "diffkv": (1.15, 1.45)}
"""A prompt's time to that of its matrix products and attention: 202 and 232 of 181 ms, and a fifth more in servers."""
LEAST_PARAMETERS = 1e9
"""Of a model whose steps the GPU bounds. Those of smaller ones wait for the host."""


@dataclass(frozen=True)
class Speed:
    """Output tokens a second of all requests together, least and most.

    Attributes:
        decode: while all only decode. served: if each request's whole prompt is computed too; None where prompts were
            not measured. scaled: whether the GPU was not measured, and bandwidth alone scales the figures.
    """

    decode: tuple[float, float]
    served: tuple[float, float] | None
    scaled: bool


def speed_of(
    model: Model, gpu: Gpu, ranks: int, kind: Kind, holding: Holding | StockHolding, requests: float, prompt: int,
    reply: int,
) -> Speed:  # fmt: skip
    """Of so many ``requests`` of ``prompt`` + ``reply`` tokens that run at once, at least one."""
    requests = max(requests, 1.0)
    lengths = [round(reply * (x + 0.5) / SAMPLES) for x in range(SAMPLES)]
    cache = requests * sum(holding.bytes_of(prompt, x) for x in lengths) / SAMPLES
    read = model.weights.read_by(requests) / ranks / gpu.reads
    computed = 2 * model.weights.products * requests / ranks / gpu.prompt_flops if gpu.prompt_flops else 0.0
    layers = len(model.fields["layer_types"])
    steps = []
    for end in (0, 1):  # the slowest step, then the fastest
        products = max(read * (PRODUCTS, 1.0)[end], computed)
        attention = cache / gpu.reads / ATTENTION[kind][end]
        other = layers * (LAYER[1 - end] + (RANKS_LAYER if ranks > 1 and not end else 0.0))
        steps.append(products + attention + other)
    decode = (requests / steps[0], requests / steps[1])
    served = None
    if gpu.prompt_flops:
        whole = _prompt_seconds(model, gpu, prompt) / ranks
        least, most = (
            requests * reply / (reply * step + requests * whole * part)
            for step, part in zip(steps, reversed(PROMPTS[kind]), strict=True)
        )
        served = least, most
    return Speed(decode, served, not gpu.measured)


def _prompt_seconds(model: Model, gpu: Gpu, prompt: int) -> float:
    """Of the matrix products and the attention of a prompt on one GPU of which prompts were measured."""
    assert gpu.prompt_flops is not None
    products = 2 * model.weights.products * prompt / gpu.prompt_flops
    seen = sum(min(x, prompt) * prompt if x else prompt * prompt / 2 for x in model.spans or (0,) * model.layers)
    return products + 2 * (model.head_dim + model.v_head_dim) * model.query_heads * seen / PROMPT_ATTENTION
