"""Page management of a prompt's pass: on the GPU, and on a CPU (the prompt phase of DiffKV's figure 13).

Prompts of one length take high-tier pages for all of their tokens in 32 layers x 8 KV heads; at their end half of the
tokens go to the low tier, and pages that fall free return. On the GPU both are launched from the host, as in a pass
that reads prompts, so times include launches. The CPU runs the plain PyTorch ops, which take one prompt after the
other: one is timed, and counts as often as there are prompts.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.budget import Budget
from benchmarks.kernels import management
from benchmarks.kernels.budgets import Clock, gpu_clock
from benchmarks.kernels.cases import Case
from benchmarks.kernels.timing import free_bytes, lacking
from sglang_diffkv.kernels.allocate.reference import reserve as reserve_on_cpu
from sglang_diffkv.kernels.allocate.triton import reserve
from sglang_diffkv.kernels.compact_prompt.reference import compact_prompts as compact_on_cpu
from sglang_diffkv.kernels.compact_prompt.triton import PROMPTS, PromptWorkspace, compact_prompts
from sglang_diffkv.kernels.cuts import Cuts
from sglang_diffkv.kernels.triton_ring import Spans
from sglang_diffkv.layout.state import NO_LIMIT, TABLE_BLOCK, PageState

WINDOW = 64
HIGH = 0.5
"""Threshold of scores that are evenly spread up to the mean attention: half of the tokens outside the window stay."""
SPARE = 2
"""Pages beyond those that all tokens take, for each head and prompt: low ones are borrowed before high ones return."""
REPEATS = 7

Row = dict[str, Any]


def held_case(batch: int, length: int) -> Case:
    """The prompts as they are before they are compacted."""
    return Case(batch, management.Q_HEADS, management.KV_HEADS, management.HEAD_DIM, length, "K8V4 K4V2", 1.0)


def empty_state(case: Case, device: str) -> PageState:
    """Rows 1 to ``batch`` own nothing and have table blocks for all that they may hold; the ring has all pages."""
    layers, blocks = management.LAYERS, case.max_blocks()
    pages = case.batch * layers * case.kv_heads * (case.page_counts()[0] + SPARE)
    state = PageState.create(
        case.fmt,
        num_pages=pages,
        num_rows=case.batch + 1,
        num_layers=layers,
        num_heads=case.kv_heads,
        max_blocks=blocks,
        num_blocks=case.batch * blocks + 1,
        device=device,
    )
    numbers = torch.arange(1, case.batch * blocks + 1, dtype=torch.int32, device=device)
    state.row_blocks[1:] = numbers.view(case.batch, blocks)
    state.range_hi.copy_(torch.tensor(NO_LIMIT).to(state.range_hi.dtype))
    state.ring.copy_(torch.randperm(pages, device=device).int())
    return state


def fill(state: PageState, case: Case) -> None:
    """Positions and scores of all tokens, as appending and attending leave them."""
    view, count = state.tiers[0], case.page_counts()[0]
    tokens, entry = view.layout.tokens, torch.arange(count, device=state.device)
    block = state.row_blocks[1:][:, entry // TABLE_BLOCK].long()  # [B, count]
    page = state.page_table[block, :, :, entry % TABLE_BLOCK].long()  # [B, count, L, H]
    position = entry.view(-1, 1) * tokens + torch.arange(tokens, device=state.device)  # [count, tokens]
    score = torch.rand(count, tokens, device=state.device) / (position + 1)
    held = torch.where(position < case.length, position, -1).int()
    shape = (*page.shape, tokens)
    view.positions[page] = held.view(1, count, 1, 1, tokens).expand(shape)
    assert view.scores is not None
    view.scores[page] = score.view(1, count, 1, 1, tokens).expand(shape)


def cuts_of(state: PageState) -> Cuts:
    """Half of the tokens stay high, none is pruned."""
    shape = (state.num_layers, state.num_heads)
    high = torch.full(shape, HIGH, device=state.device)
    return Cuts(high, torch.zeros(shape, device=state.device), WINDOW)


@dataclass(frozen=True)
class Pass:
    """What is timed: pages for all tokens, and the end of the prompts."""

    take: Callable[[], None]
    compact: Callable[[], None]


def gpu_pass(state: PageState, case: Case) -> Pass:
    """By the Triton kernels."""
    rows = torch.arange(1, case.batch + 1, device=state.device)
    lengths = torch.full_like(rows, case.length)
    valid = torch.tensor([case.batch], dtype=torch.int32, device=state.device)
    spans, workspace, cuts = Spans.create(state, case.batch), PromptWorkspace.create(state), cuts_of(state)

    def compact() -> None:
        for part, length in zip(rows.split(PROMPTS), lengths.split(PROMPTS)):
            compact_prompts(state, part, length, workspace, cuts)

    return Pass(lambda: reserve(state, rows, lengths, spans, valid), compact)


def cpu_pass(state: PageState, case: Case) -> Pass:
    """By the plain PyTorch ops."""
    rows = torch.arange(1, case.batch + 1)
    lengths, cuts = torch.full_like(rows, case.length), cuts_of(state)
    return Pass(
        lambda: reserve_on_cpu(state, rows, lengths, case.length), lambda: compact_on_cpu(state, rows, lengths, cuts)
    )


def pass_ms(state: PageState, case: Case, made: Pass, clock: Clock, repeats: int) -> tuple[float, float]:
    """Milliseconds to take the pages and to compact, medians from the same start; the first pass does not count."""
    held = {name: x for name, x in vars(state).items() if isinstance(x, torch.Tensor) and name != "pages"}
    saved = {name: x.clone() for name, x in held.items()}
    taken, compacted = [], []
    for _ in range(repeats + 1):
        for name, x in held.items():
            x.copy_(saved[name])
        times = [clock()]
        made.take()
        times.append(clock())
        fill(state, case)
        times.append(clock())
        made.compact()
        times.append(clock())
        taken.append(times[1] - times[0])
        compacted.append(times[3] - times[2])
    if int(state.fault.sum()):
        raise RuntimeError("the free pages did not last for the measurement")
    return 1e3 * statistics.median(taken[1:]), 1e3 * statistics.median(compacted[1:])


def best_cpu_ms(case: Case, repeats: int) -> tuple[float, int]:
    """Milliseconds of one prompt with one thread or PyTorch's number, whichever is faster."""
    usual, times = torch.get_num_threads(), {}
    state = empty_state(case, "cpu")
    try:
        for threads in {1, usual}:
            torch.set_num_threads(threads)
            times[threads] = sum(pass_ms(state, case, cpu_pass(state, case), time.perf_counter, repeats))
            state = empty_state(case, "cpu")
    finally:
        torch.set_num_threads(usual)
    best = min(times, key=lambda threads: times[threads])
    return times[best], best


def prompt_row(
    batch: int, length: int, *, device: str = "cuda", clock: Clock = gpu_clock, repeats: int = REPEATS
) -> Row:
    """The figures of one number of prompts."""
    case = held_case(batch, length)
    state = empty_state(case, device)
    take_ms, compact_ms = pass_ms(state, case, gpu_pass(state, case), clock, repeats)
    del state
    one_ms, threads = best_cpu_ms(held_case(1, length), min(repeats, 3))
    return {
        "batch": batch,
        "reserve_ms": take_ms,
        "compact_ms": compact_ms,
        "management_ms": take_ms + compact_ms,
        "cpu_management_ms": batch * one_ms,
        "cpu_ratio": batch * one_ms / (take_ms + compact_ms),
        "cpu_threads": threads,
    }


def needed_bytes(batch: int, length: int) -> int:
    """GPU memory of a measurement."""
    return held_case(batch, length).state_bytes(
        management.LAYERS, SPARE * batch * management.LAYERS * management.KV_HEADS
    )


def prompt_rows(batches: Iterable[int], length: int, budget: Budget, keep: Callable[[Row], None]) -> None:
    """Measure the numbers of prompts; ``keep`` gets a row of each, with the reason of those that were skipped."""
    for batch in batches:
        row: Row = {"batch": batch}
        if reason := budget.refusal("prompts") or lacking(needed_bytes(batch, length), free_bytes()):
            row["skipped"] = reason
        else:
            try:
                with budget.step("prompts"):
                    row = prompt_row(batch, length)
            except torch.OutOfMemoryError as error:
                row["skipped"] = str(error).partition(". ")[0]
        keep(row)
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
