"""Page management and compaction of one decode step against its attention and a CPU's (DiffKV's figure 13).

One step of 32 layers x 8 KV heads: every head reserves a slot and moves one token to the low tier. The CPU runs the
plain PyTorch ops on a state of the same sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.budget import Budget
from benchmarks.kernels.attention import diffkv_ms
from benchmarks.kernels.cases import Case, build_state
from benchmarks.kernels.timing import Timer, cpu_median_ms, free_bytes, lacking, median_ms
from sglang_diffkv.kernels.allocate.reference import reserve as reserve_on_cpu
from sglang_diffkv.kernels.allocate.triton import reserve
from sglang_diffkv.kernels.compact_step.reference import compact_step as compact_on_cpu
from sglang_diffkv.kernels.compact_step.reference import step_moves
from sglang_diffkv.kernels.compact_step.triton import CompactWorkspace, compact_step
from sglang_diffkv.kernels.cuts import StepRule
from sglang_diffkv.kernels.decode_attention.triton import FoundTokens
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.ops.decisions import Decisions
from sglang_diffkv.policies.diffkv import DiffKVPolicyConfig

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 32, 32, 8, 128
POLICY = DiffKVPolicyConfig(
    alpha_high=1.0, alpha_low=0.02, window=256, sinks=0, observe_every=1, pressure_window=None
).build()
HELD = 256
"""Tokens of a request whose pages are managed: the cost depends on the heads, hardly on the length."""
GPU_SPARE, CPU_SPARE = 12, 6
"""Free pages for each head, for all the repetitions."""

Row = dict[str, Any]
Step = tuple[Callable[[], None], Callable[[], None]]


def held_case(batch: int) -> Case:
    """The state whose pages are managed."""
    return Case(batch, Q_HEADS, KV_HEADS, HEAD_DIM, HELD, "K8V4 K4V2", 0.5, scored=2)


def attended_case(batch: int, length: int) -> Case:
    """The state that the step's attention reads."""
    return Case(batch, Q_HEADS, KV_HEADS, HEAD_DIM, length, "K8V4 K4V2", 0.5)


def spread(state: PageState) -> None:
    """Let the heads be at different places in their last pages, so that in every step a few need a new one."""
    for tier, layout in enumerate(state.fmt.layouts):
        full = state.entries[1:, :, :, tier] * layout.tokens
        state.own_tokens[1:, :, :, tier] = full - torch.randint_like(full, layout.tokens)


def candidates(state: PageState, batch: int) -> FoundTokens:
    """Every head's candidate is the token in own slot 3, with a score that sends it to the low tier."""
    found = FoundTokens.create(state, batch)
    score = int(torch.tensor([0.5 / HELD]).view(torch.int32))
    found.packed[:, :, :, 0, 0] = (score << 32) | 3
    return found


def rule_of(state: PageState) -> StepRule:
    rule = Decisions().step(state, POLICY)
    assert rule is not None
    return rule


def gpu_step(state: PageState, batch: int) -> Step:
    """``reserve`` alone, and ``reserve`` with plan and compaction, by the Triton kernels."""
    rows = torch.arange(1, batch + 1, device=state.device)
    one, lengths = torch.ones_like(rows), torch.full_like(rows, HELD)
    valid = torch.tensor([batch], dtype=torch.int32, device=state.device)
    workspace, found = CompactWorkspace.create(state, batch), candidates(state, batch)
    rule = rule_of(state)

    def reserve_only() -> None:
        reserve(state, rows, one, workspace.spans, valid)

    def both() -> None:
        reserve_only()
        compact_step(state, rows, lengths, found, workspace, valid, rule)

    return reserve_only, both


def cpu_step(state: PageState, batch: int) -> Step:
    """The same by the plain PyTorch ops."""
    rows = torch.arange(1, batch + 1)
    one, lengths = torch.ones_like(rows), torch.full_like(rows, HELD)
    found, rule = candidates(state, batch).unpack(), rule_of(state)

    def reserve_only() -> None:
        reserve_on_cpu(state, rows, one, 1)

    def both() -> None:
        reserve_only()
        compact_on_cpu(state, rows, step_moves(rule, found, lengths, len(state.fmt.tiers)))

    return reserve_only, both


def step_ms(state: PageState, step: Step, timer: Timer) -> tuple[float, float]:
    """Milliseconds of ``reserve`` alone and of all, from the same start."""
    names = ("own_tokens", "hole", "entries")
    saved = {name: getattr(state, name).clone() for name in names}
    times = []
    for run in step:
        times.append(timer(run, 1))
        for name in names:
            getattr(state, name).copy_(saved[name])
    if int(state.fault.sum()):
        raise RuntimeError("the free pages did not last for the measurement")
    return times[0], times[1]


def best_cpu_ms(state: PageState, batch: int) -> tuple[tuple[float, float], int]:
    """Milliseconds of all and of ``reserve`` alone with one thread or PyTorch's number, whichever is faster."""
    usual, times = torch.get_num_threads(), {}
    try:
        for threads in {1, usual}:
            torch.set_num_threads(threads)
            reserve_ms, both_ms = step_ms(state, cpu_step(state, batch), cpu_median_ms)
            times[threads] = (both_ms, reserve_ms)
    finally:
        torch.set_num_threads(usual)
    best = min(times, key=lambda threads: times[threads])
    return times[best], best


def _short_median(run: Callable[[], None], calls: int) -> float:
    """Few repetitions, for which the free pages last."""
    return median_ms(run, calls, repeats=5)


def management_row(
    batch: int, length: int, *, device: str = "cuda", timer: Timer = _short_median, attention: Timer = median_ms
) -> Row:
    """The figures of one batch size."""
    case, heads = held_case(batch), batch * LAYERS * KV_HEADS
    state = build_state(case, LAYERS, GPU_SPARE * heads, device)
    spread(state)
    reserve_ms, both_ms = step_ms(state, gpu_step(state, batch), timer)
    del state
    attention_ms = LAYERS * diffkv_ms(attended_case(batch, length), True, attention)
    state = build_state(case, LAYERS, CPU_SPARE * heads, "cpu")
    spread(state)
    (cpu_ms, cpu_reserve_ms), threads = best_cpu_ms(state, batch)
    return {
        "batch": batch,
        "reserve_ms": reserve_ms,
        "management_ms": both_ms,
        "attention_ms": attention_ms,
        "share": both_ms / (both_ms + attention_ms),
        "cpu_reserve_ms": cpu_reserve_ms,
        "cpu_management_ms": cpu_ms,
        "cpu_ratio": cpu_ms / both_ms,
        "cpu_threads": threads,
    }


def needed_bytes(batch: int, length: int) -> int:
    """GPU memory of the larger of the two measurements."""
    case = attended_case(batch, length)
    managed = held_case(batch).state_bytes(LAYERS, GPU_SPARE * batch * LAYERS * KV_HEADS)
    return max(managed, case.state_bytes(case.layers()))


def management_rows(batches: Iterable[int], length: int, budget: Budget, keep: Callable[[Row], None]) -> None:
    """Measure the batch sizes; ``keep`` gets a row of each, with the reason of those that were skipped."""
    for batch in batches:
        row: Row = {"batch": batch}
        if reason := budget.refusal("management") or lacking(needed_bytes(batch, length), free_bytes()):
            row["skipped"] = reason
        else:
            try:
                with budget.step("management"):
                    row = management_row(batch, length)
            except torch.OutOfMemoryError as error:
                row["skipped"] = str(error).partition(". ")[0]
        keep(row)
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
