"""Synthetic page states and timers for the kernel benchmark: random pages, shuffled page tables, graph replay."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_diffkv.mem_pool.page_format import PageFormat, Tier
from sglang_diffkv.mem_pool.state import TABLE_BLOCK, PageState


@dataclass(frozen=True)
class Case:
    """One decode step's attention: ``batch`` requests of ``length`` tokens, ``high`` of them in the high tier."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    length: int
    tiers: str
    high: float

    @property
    def name(self) -> str:
        mix = {1.0: "all high", 0.0: "all low"}.get(self.high, f"{self.high:.0%} high")
        return f"{self.tiers.replace(' ', '+')} {mix}"

    @property
    def fmt(self) -> PageFormat:
        return PageFormat(self.head_dim, self.head_dim, tuple(Tier.parse(t) for t in self.tiers.split()))

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of a request in each tier."""
        high = round(self.length * self.high)
        return high, self.length - high

    def page_counts(self) -> tuple[int, int]:
        """Pages of a (request, KV head) in each tier."""
        high, low = self.tokens
        return -(-high // self.fmt.high.tokens), -(-low // self.fmt.low.tokens)

    def kv_bytes(self) -> int:
        """Bytes that attention must read: tokens' codes, metadata and positions (not scores)."""
        fmt = self.fmt
        per = [x.tier.token_bytes(fmt.head_dim, fmt.v_head_dim) - 4 for x in (fmt.high, fmt.low)]
        return self.batch * self.kv_heads * sum(n * b for n, b in zip(self.tokens, per))


def build_state(case: Case, layers: int, free_pages: int = 0) -> PageState:
    """A state of ``layers`` layers on the GPU; row ``b + 1`` is request ``b``, and every page is its own."""
    fmt, counts = case.fmt, case.page_counts()
    heads = layers * case.kv_heads
    blocks = [-(-n // TABLE_BLOCK) for n in counts]
    state = PageState.create(
        fmt,
        num_pages=case.batch * heads * sum(counts) + free_pages,
        num_rows=case.batch + 1,
        num_layers=layers,
        num_heads=case.kv_heads,
        max_blocks=sum(blocks) + 1,
        num_blocks=case.batch * sum(blocks) + 1,
        device="cuda",
    )
    state.pages.random_(0, 256)
    state.block_table[1:, : blocks[0]] = _numbers(case.batch, blocks[0], 1)
    if blocks[1]:
        at = 1 + case.batch * blocks[0]
        state.block_table[1:, -blocks[1] :] = _numbers(case.batch, blocks[1], at).flip(1)
    ids = torch.randperm(state.num_pages, device="cuda").int()
    state.ring.copy_(ids)
    state.counters[0] = state.num_pages - free_pages
    state.range_hi.fill_(2**31 - 1)
    taken = 0
    for tier, seg in enumerate(state.segments):
        count, tokens = counts[tier], seg.layout.tokens
        state.entries[1:, :, :, tier] = count
        state.own_tokens[1:, :, :, tier] = case.tokens[tier]
        if not count:
            continue
        size = case.batch * heads * count
        page = ids[taken : taken + size].view(case.batch, count, layers, case.kv_heads)
        taken += size
        entry = torch.arange(count, device="cuda")
        column = entry if tier == 0 else state.width - 1 - entry
        block = state.block_table[1:][:, column // TABLE_BLOCK].long()  # [B, count]
        state.page_table[block, :, :, column % TABLE_BLOCK] = page
        flat = page.reshape(-1).long()
        if seg.key_meta is not None and seg.value_meta is not None:
            for meta in (seg.key_meta, seg.value_meta):
                meta[flat] = torch.tensor([0.02, -1.0], dtype=torch.float16, device="cuda")
        else:
            seg.keys[flat] = torch.randn(tokens, case.head_dim, device="cuda").to(state.dtype)
            seg.values[flat] = torch.randn(tokens, case.head_dim, device="cuda").to(state.dtype)
        number = entry.view(1, -1, 1) * tokens + torch.arange(tokens, device="cuda")
        position = torch.where(number < case.tokens[tier], number + (case.tokens[0] if tier else 0), -1)
        position = position.view(1, count, 1, 1, tokens).expand(case.batch, count, layers, case.kv_heads, tokens)
        seg.positions[flat] = position.reshape(-1, tokens).int()
        seg.scores[flat] = torch.rand(tokens, device="cuda") / case.length
    return state


def _numbers(rows: int, columns: int, start: int) -> torch.Tensor:
    return torch.arange(start, start + rows * columns, dtype=torch.int32, device="cuda").view(rows, columns)


def median_ms(run: Callable[[], None], calls: int, repeats: int = 15) -> float:
    """Median over replays of a CUDA graph of ``run``, in milliseconds for each of its ``calls`` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    del graph
    return statistics.median(times) / calls


@triton.jit
def _read_kernel(source, sink, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """Grid (elements / (BLOCK * ROUNDS)): reads int32 [elements], keeps one number a program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK * ROUNDS + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(ROUNDS):
        total += tl.load(source + at + step * BLOCK)
    tl.store(sink + tl.program_id(0), tl.sum(total, 0))


def read_bandwidth() -> float:
    """GB/s of a plain streaming read of 4 GiB."""
    block, rounds = 4096, 8
    source = torch.zeros(2**30, dtype=torch.int32, device="cuda").random_()
    grid = source.numel() // (block * rounds)
    sink = torch.empty(grid, dtype=torch.int32, device="cuda")
    ms = median_ms(lambda: _read_kernel[(grid,)](source, sink, BLOCK=block, ROUNDS=rounds, num_warps=8), 1)
    return source.nbytes / ms / 1e6
