"""What SGLang leaves of a GPU for keys and values, and the plan of a pool in it: the server's own ``MemoryPlan``."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sglang_diffkv.capacity.gpus import Gpu
from sglang_diffkv.capacity.model import Model
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.plan import CONTEXT_SLACK, STATES_TO_CACHE, MemoryPlan, StateRoom, planned_request_rows, state_room

GIB, MIB = 1 << 30, 1 << 20
CONTEXT_MIB = 700
"""Of a GPU, taken before weights load: the CUDA context and communication."""
PREFILL_GRAPHS_MIB = 464
"""That SGLang sets aside for the graphs of its usual 58 prompt sizes."""

_STEPS = ((20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160), (90, 8192, 256, 512), (160, 8192, 256, 512))


@dataclass(frozen=True)
class Budget:
    """Bytes on each rank. ``total`` is for keys, values and states; ``cache`` what of it is not for states.

    ``states``: room for them, None for a model without. ``notes``: what was assumed, for people.
    """

    total: int
    cache: int
    states: StateRoom | None
    notes: tuple[str, ...]


def _usual_sizes(gpu: Gpu, ranks: int) -> tuple[int, int]:
    """Tokens of a chunk, and requests of the largest decode graph, by SGLang's rule."""
    chunk, alone, many = next((x[1:] for x in _STEPS if gpu.mib < x[0] * 1024), (16384, 512, 512))
    return chunk, alone if ranks < 4 else many


def graph_requests(gpu: Gpu, ranks: int) -> int:
    """Requests up to which SGLang 0.5.17 decodes in CUDA graphs unless told otherwise."""
    return _usual_sizes(gpu, ranks)[1]


def static_fraction(gpu: Gpu, ranks: int) -> float:
    """SGLang's ``--mem-fraction-static`` unless told otherwise, as 0.5.17 estimates it."""
    chunk, batch = _usual_sizes(gpu, ranks)
    reserved = 512 + 1.5 * max(chunk, 2048) + ranks / 8 * 1024 + 2 * batch + PREFILL_GRAPHS_MIB
    if gpu.mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((gpu.mib - reserved) / gpu.mib, 3)


def budget_of(
    model: Model,
    gpu: Gpu | None,
    ranks: int,
    *,
    kv_gib: float | None = None,
    fraction: float | None = None,
    state_mib: float | None = None,
) -> Budget:
    """What is left for keys and values on each of so many ranks.

    Args:
        kv_gib: GiB for keys, values and states, instead of an estimate. fraction: ``--mem-fraction-static``.
        state_mib: MiB of a request's states, instead of what ``config.json`` says.

    Raises ConfigError where nothing is left, or no request's states fit.
    """
    notes: list[str] = []
    if kv_gib is not None:
        total = int(kv_gib * GIB)
        notes.append(f"{kv_gib:g} GiB for keys and values on each rank, as given")
    else:
        assert gpu is not None
        share = static_fraction(gpu, ranks) if fraction is None else fraction
        total = int((gpu.mib - CONTEXT_MIB) * MIB * share - model.weights.total / ranks)
        given = "given" if fraction is not None else "SGLang 0.5.17's estimate"
        notes.append(
            f"{gpu.name}: {gpu.mib - CONTEXT_MIB:,} MiB, of which SGLang uses {share:g} "
            f"(--mem-fraction-static, {given}), less "
            f"{model.weights.total / ranks / 1e9:,.2f} GB of weights ({model.weights.source})"
        )
    size = model.state_bytes(ranks) if state_mib is None else int(state_mib * MIB)
    states = state_room(total, size, STATES_TO_CACHE) if size and total > 0 else None
    cache = total - (states.taken if states else 0)
    if states is not None:
        if states.most < 1:
            raise ConfigError(
                f"states of {size / MIB:,.2f} MiB a request leave room for none in {total / GIB:,.3f} GiB: take more "
                "ranks (--tp) or a larger GPU"
            )
        notes.append(
            f"states of {size / MIB:.2f} MiB a request: {states.taken / GIB:.1f} GiB, for {states.most:,} requests and "
            "the prefix cache"
        )
    if cache <= 0:
        raise ConfigError(
            f"nothing is left for keys and values: {notes[0]}. Take more ranks (--tp), a larger GPU, or --weights-gb "
            "if the weights are smaller"
        )
    return Budget(total, cache, states, tuple(notes))


def plan_of(model: Model, config: DiffKVConfig, ranks: int) -> MemoryPlan:
    """The plan of one rank, as a server makes it. Raises ConfigError for heads and methods that it would refuse.

    It is that of a CPU. A GPU's scratch takes up to 1% of a pool more.
    """
    heads, queries = model.ranks_heads(ranks)

    def kv_heads(of: int) -> int:
        return max(model.kv_heads // of, 1)

    shape = SimpleNamespace(
        head_dim=model.head_dim,
        v_head_dim=model.v_head_dim,
        num_attention_heads=queries * ranks,
        get_total_num_kv_heads=lambda: model.kv_heads,
        get_num_kv_heads=kv_heads,
    )
    configurator: Any = SimpleNamespace(model_config=shape, server_args=SimpleNamespace(tp_size=ranks), device="cpu")
    assert heads == kv_heads(ranks)
    return MemoryPlan.of(configurator, config, model.layers, model.context + CONTEXT_SLACK, model.spans)


def capacity_of(plan: MemoryPlan, model: Model, budget: Budget, most: int | None) -> int:
    """High-tier tokens that fit in the bytes of a rank: ``max_total_num_tokens`` of a server.

    ``most``: ``--max-running-requests``, None for SGLang's rule.
    """
    rows = min(filter(None, (most, budget.states.most if budget.states else None)), default=None)
    return plan.capacity_in(
        budget.cache, lambda tokens: planned_request_rows(rows, tokens, model.context), model.context + CONTEXT_SLACK
    )
