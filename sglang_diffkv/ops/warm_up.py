"""Launches every kernel once on nothing, so that none is compiled while requests wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import triton

from sglang_diffkv.kernels.append.triton import ONE_BY_ONE, append
from sglang_diffkv.kernels.rotate.reference import Rotation
from sglang_diffkv.layout.query_cache import QueryCache
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.ops.base import Scaling, Step, usual_scaling
from sglang_diffkv.ops.decisions import compacts, tail_tokens
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.diffkv import KEEP, STAY

if TYPE_CHECKING:
    from sglang_diffkv.ops.triton import TritonOps

logger = logging.getLogger(__name__)

SLOW_SECONDS = 0.1
"""A compilation that takes longer is logged; one found in Triton's cache on disk is faster."""


def log_compilations() -> None:
    """Log every compilation of a kernel of this package: one while requests are served stops them all."""
    runtime, began = triton.knobs.runtime, {}
    if runtime.jit_cache_hook is not None or runtime.jit_post_compile_hook is not None:
        return

    def begin(*, fn: Any, **_: Any) -> None:
        began[fn.name] = time.perf_counter()

    def end(*, fn: Any, **_: Any) -> None:
        seconds = time.perf_counter() - began.pop(fn.name, time.perf_counter())
        if seconds > SLOW_SECONDS and fn.module.startswith("sglang_diffkv."):
            logger.info("DiffKV: %s compiled in %.1f s", fn.name, seconds)

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = begin, end


def compile_kernels(
    ops: TritonOps, state: PageState, policy: Policy, *, dtype: torch.dtype, scalings: Sequence[Scaling],
    rotation: Rotation, copies: bool, queries: QueryCache | None = None, sinks: torch.dtype | None = None,
    key_means: torch.Tensor | None = None, drafts: int = 0, trees: bool = False, tails: bool = False,
) -> None:  # fmt: skip
    """``warm_up`` on a GPU, with what it compiles, and all compilations from then on, in the log."""
    began = time.perf_counter()
    log_compilations()
    warm_up(
        ops, state, policy, dtype=dtype, scalings=scalings, rotation=rotation, copies=copies, queries=queries,
        sinks=sinks, key_means=key_means, drafts=drafts, trees=trees, tails=tails,
    )  # fmt: skip
    torch.cuda.synchronize(state.device)
    logger.info("DiffKV: kernels ready after %.1f s", time.perf_counter() - began)


def warm_up(
    ops: TritonOps, state: PageState, policy: Policy, *, dtype: torch.dtype, scalings: Sequence[Scaling] = (),
    rotation: Rotation, copies: bool, queries: QueryCache | None = None, sinks: torch.dtype | None = None,
    key_means: torch.Tensor | None = None, drafts: int = 0, trees: bool = False, tails: bool = False,
) -> None:  # fmt: skip
    """Compile all kernels, by launches that change nothing: no request has a new token and every row is empty.

    Args:
        dtype: of the model. scalings: of its layers; by default the usual one. rotation: what is rotated.
            copies: whether requests copy their prompts. queries: where decode steps keep theirs. sinks: the type of the
            layers' attention sinks, None if they have none. key_means: [L, H, head_dim], what is taken off keys.
            drafts: of each request that a pass verifies; 0 without speculation. trees: whether they are trees. tails:
            whether prompts get tails whatever the policy.
    """
    fmt, device, heads = state.fmt, state.device, state.num_heads
    scalings = scalings or (usual_scaling(fmt.head_dim),)
    many = ONE_BY_ONE + 1
    q = torch.zeros(many, ops.q_heads, fmt.head_dim, dtype=dtype, device=device)
    key = torch.zeros(many, heads, fmt.head_dim, dtype=dtype, device=device)
    value = torch.zeros(many, heads, fmt.v_head_dim, dtype=dtype, device=device)
    none = torch.zeros(many, dtype=torch.int64, device=device)
    one_row, no_rows = torch.ones(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    changes = compacts(state, policy)
    shared_scores = [{0: torch.zeros(state.num_layers, heads, 1, device=device)}] if changes and copies else []
    form: dict[str, Any] = {"rotation": rotation, "key_means": None if key_means is None else key_means[0]}
    rotation.of(ops.rotate, q[:1], key[:1], value[:1])
    if rotation.values:
        ops.rotate(value.new_zeros(1, ops.q_heads, fmt.v_head_dim))
    for prefix, scores in [(0, {}), (1, {}), *((1, x) for x in shared_scores)]:
        one, zero = none[:1], none[:1]
        for stored in ((), (prefix,)) if prefix else ((),):  # pages as they are, and read back where that is done
            step = Step(
                one_row, zero, zero, zero, one, zero, zero, no_rows, no_rows, 1, prefix, (1,), shared_scores=scores
            )
            step.prefixes, step.as_computed = stored, bool(stored)
            ops.begin(step, decode=False)
            ops.append(0, key[:1], value[:1], step, **form)
            for layer, scaling, sink in _kinds_of_layers(ops, state, scalings, sinks):
                tokens = (q[:1], key[:1], value[:1])
                if ops.extend_unpacked(layer, *tokens, step, scaling, **form, sink_logits=sink) is None:
                    ops.extend(layer, *tokens, step, scaling, sink)
    if drafts:
        step = Step(one_row, zero, zero, zero, one, zero, zero, no_rows, no_rows, drafts, 1, (drafts,))
        step.ancestors = none[:1] if trees else None
        for layer, scaling, sink in _kinds_of_layers(ops, state, scalings, sinks):
            ops.verify(layer, q[:1], key[:1], value[:1], step, scaling, sink)
        _warm_up_scores(ops, state, policy, q[:1], scalings)
    append(state, 0, key, value, none, none, none, no_rows, **form)
    _warm_up_decode(ops, state, policy, dtype, scalings, sinks, form)
    ops.set_blocks([0], [0])  # row 0 has no blocks
    for tier_kept in (False, True):
        ops.attach(2, 1, 0, 0, kept_only=tier_kept)
    ops.attach_paths([(2, [(1, 0, 0)]), (0, [(1, 0, 0)])])  # row 0 holds nothing, and nobody asks for it
    ops.seal(2)
    ops.trim(2, 0)
    ops.release(2)
    ops.count_rows(one_row, steps=1, low_grows=policy.compresses and len(fmt.tiers) > 1)
    ops.measure(one_row, none[:1], none[:1])
    ops.add_held(one_row, none[:1], none[:1], torch.zeros(1, len(fmt.tiers), dtype=torch.int64, device=device))
    ops.tally(1, 0, torch.zeros(1, len(state.fmt.tiers) + 2, dtype=torch.int64, device=state.device), 0)
    ops.list_pages(torch.zeros(5, 1, dtype=torch.int64, device=device), 1)  # none of row 0
    ops.count_owners(one_row)
    if changes:
        ops.compact_prompts([(1, 0)], policy)
        if tail_tokens(state, policy):
            ops.compact_prompts([(1, 0)], policy, [0])
    if tails:
        ops.compact_prompts([(1, 0)], STAY, [0])
    for own in shared_scores:
        for known in (None, own[0]):
            ops.copy_compact(2, [(1, 0, 0)], 0, policy, known)
    if queries is not None:
        _warm_up_running(ops, state, policy, queries, scalings[0])
    ops.copy_compact(2, [(1, 0, 0)], 0, KEEP, None)  # the prefix cache joins segments whatever the policy


def _warm_up_scores(
    ops: TritonOps, state: PageState, policy: Policy, q: torch.Tensor, scalings: Sequence[Scaling]
) -> None:  # fmt: skip
    """Of a step whose attention is known, of padding alone. ``q``: [1, Hq, head_dim]."""
    rows = torch.zeros(1, dtype=torch.int64, device=state.device)
    step = ops.decode_step(rows, torch.ones_like(rows))
    if step.found is None:
        return
    ops.begin(step, decode=True, attends=False)
    queries = q.expand(state.num_layers, *q.shape).contiguous()
    for scaling in set(scalings):
        ops.score_step(range(state.num_layers), queries, queries[..., 0].float(), rows, step, scaling)


def _kinds_of_layers(
    ops: TritonOps, state: PageState, scalings: Sequence[Scaling], sinks: torch.dtype | None
) -> Iterator[tuple[int, Scaling, torch.Tensor | None]]:
    """A layer of each kind, with each scaling, without and with sinks where there are any."""
    layers = {bool(state.attention_span(layer)): layer for layer in range(state.num_layers)}
    every: list[torch.Tensor | None] = [None]
    if sinks is not None:
        every.append(torch.zeros(ops.q_heads, dtype=sinks, device=state.device))
    for layer in layers.values():
        for scaling in scalings:
            for sink in every:
                yield layer, scaling, sink


def _warm_up_running(ops: TritonOps, state: PageState, policy: Policy, queries: QueryCache, scaling: Scaling) -> None:
    """Of an empty row, the first time and later, in each group of layers: grids and places in memory differ."""
    _, _, window, q_heads, dim = queries.queries.shape
    rows = torch.zeros(1, dtype=torch.int64, device=state.device)
    q = torch.zeros(1, q_heads, dim, dtype=queries.queries.dtype, device=state.device)
    ops.store_queries(queries, 0, q, ops.decode_step(rows, torch.ones_like(rows)))
    for first, (at, layers) in product((True, False), state.groups(policy.layer_stride)):
        asked = queries.queries[0, at]
        scoring = ops.score_running(layers, 1, window, asked, scaling, first=first, most=window)
        if len(state.fmt.tiers) == 1:
            ops.compact_scored(layers, 1, window, scoring)
            ops.transfer_pages(layers, 1, 2)
        ops.copy_scored(layers, 2, [(1, 0, window)], window, scoring)


def _warm_up_decode(
    ops: TritonOps, state: PageState, policy: Policy, dtype: torch.dtype, scalings: Sequence[Scaling],
    sinks: torch.dtype | None, form: dict[str, Any],
) -> None:  # fmt: skip
    """Decode steps of padding alone, of the sizes that differ in kernels: SGLang's graphs hold batches up to a size of
    its own, and a server may run without any."""
    fmt, device = state.fmt, state.device
    most = ops.buffers[-1].max_batch if ops.buffers else 1
    for batch in ops.decode_batches(most):
        q, key, value = (
            torch.zeros(batch, heads, dim, dtype=dtype, device=device)
            for heads, dim in (
                (ops.q_heads, fmt.head_dim),
                (state.num_heads, fmt.head_dim),
                (state.num_heads, fmt.v_head_dim),
            )
        )
        rows, lengths = (torch.full((batch,), x, dtype=torch.int64, device=device) for x in (0, 1))
        step = ops.decode_step(rows, lengths)
        ops.begin(step, decode=True)
        ops.append(0, key, value, step, **form, query=q)
        for layer, scaling, sink in _kinds_of_layers(ops, state, scalings, sinks):
            ops.decode(layer, q, step, scaling, sink)
        ops.slide(rows, lengths, step.num_valid)
        if step.found is not None:
            ops.compact_step(rows, lengths, step.found, step.num_valid)
