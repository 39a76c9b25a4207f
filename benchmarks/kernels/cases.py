"""Cases of the kernel benchmark and synthetic page states for them: random pages, shuffled page tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.kernels.timing import layers_for
from sglang_diffkv.kernels.table import table_column
from sglang_diffkv.layout.page_format import SCORE_BYTES, PageFormat, Tier, TierLayout, position_bytes_for
from sglang_diffkv.layout.state import NO_LIMIT, TABLE_BLOCK, PageState


@dataclass(frozen=True)
class Case:
    """One decode step's attention: ``batch`` requests of ``length`` tokens, ``high`` of them in the first of the
    ``tiers``, the others in equal parts in the rest."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    length: int
    tiers: str
    high: float
    longest: int = 0  # the longest sequence that pages have room for, if it is longer
    scored: int = 1  # tiers whose tokens have scores: as DiffKV without pruning

    @property
    def name(self) -> str:
        mix = {1.0: "all high", 0.0: "all low"}.get(self.high, f"{self.high:.0%} high")
        return f"{self.tiers.replace(' ', '+')} {mix}"

    @property
    def fmt(self) -> PageFormat:
        tiers = tuple(Tier.parse(t) for t in self.tiers.split())
        position_bytes = position_bytes_for(max(self.length, self.longest))
        turned = (True, True)  # as servers do by default
        return PageFormat(
            self.head_dim, self.head_dim, tiers, scored=self.scored, position_bytes=position_bytes, turned=turned
        )  # fmt: skip

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of a request in each tier."""
        high, lower = round(self.length * self.high), max(len(self.fmt.layouts) - 1, 1)
        rest = self.length - high
        return high, *(rest * (n + 1) // lower - rest * n // lower for n in range(lower))

    def page_counts(self) -> tuple[int, ...]:
        """Pages of a (request, KV head) in each tier."""
        return tuple(-(-n // layout.tokens) for n, layout in zip(self.tokens, self.fmt.layouts))

    def max_blocks(self) -> int:
        """Table blocks of a row, the same for all mixes of the tiers: kernels are compiled for this number."""
        layouts = self.fmt.layouts
        blocks = [-(-self.length // layout.tokens // TABLE_BLOCK) for layout in layouts]
        return 1 + sum(blocks) if len(layouts) <= 2 else 2 * sum(blocks)

    def layers(self) -> int:
        """Layers to cycle through, the same for all mixes of the tiers."""
        fmt = self.fmt
        least = _read_bytes(fmt.low)
        return layers_for(self.batch * self.kv_heads * self.length * least)

    def state_bytes(self, layers: int, free_pages: int = 0) -> int:
        """Memory of a state of this case, with what building it and attending to it take besides."""
        pages = self.batch * layers * self.kv_heads * sum(self.page_counts()) + free_pages
        scratch = 4 * self.batch * self.q_heads * self.length
        return int(1.3 * pages * self.fmt.page_bytes) + scratch + (256 << 20)

    def bf16_bytes(self) -> int:
        """Bytes of the same tokens in an uncompressed cache."""
        return self.batch * self.length * self.kv_heads * self.fmt.bf16_token_bytes

    def kv_bytes(self) -> int:
        """Bytes that attention must read: tokens' codes, metadata and positions (not scores)."""
        fmt = self.fmt
        per = map(_read_bytes, fmt.layouts)
        return self.batch * self.kv_heads * sum(n * b for n, b in zip(self.tokens, per))


def _read_bytes(layout: TierLayout) -> int:
    """Of a token, what attention reads."""
    return layout.token_bytes - (0 if layout.score_offset is None else SCORE_BYTES)


def build_state(case: Case, layers: int, free_pages: int = 0, device: str = "cuda") -> PageState:
    """A state of ``layers`` layers; row ``b + 1`` is request ``b``, and every page is its own."""
    fmt, counts = case.fmt, case.page_counts()
    heads = layers * case.kv_heads
    blocks = [-(-n // TABLE_BLOCK) for n in counts]
    state = PageState.create(
        fmt,
        num_pages=case.batch * heads * sum(counts) + free_pages,
        num_rows=case.batch + 1,
        num_layers=layers,
        num_heads=case.kv_heads,
        max_blocks=case.max_blocks(),
        num_blocks=case.batch * sum(blocks) + 1,
        device=device,
    )
    state.pages.view(torch.int64).random_()
    given = 1
    for tier, count in enumerate(blocks):
        column = table_column(state, tier, TABLE_BLOCK * torch.arange(count, device=device))
        state.row_blocks[1:, column // TABLE_BLOCK] = _numbers(case.batch, count, given, device)
        given += case.batch * count
    ids = torch.randperm(state.num_pages, device=device).int()
    state.ring.copy_(ids)
    state.counters[0] = state.num_pages - free_pages
    state.range_hi.copy_(torch.tensor(NO_LIMIT).to(state.range_hi.dtype))
    taken = before = 0
    for tier, view in enumerate(state.tiers):
        count, tokens = counts[tier], view.layout.tokens
        state.entries[1:, :, :, tier] = count
        state.own_tokens[1:, :, :, tier] = case.tokens[tier]
        first, before = before, before + case.tokens[tier]
        if not count:
            continue
        size = case.batch * heads * count
        page = ids[taken : taken + size].view(case.batch, count, layers, case.kv_heads)
        taken += size
        entry = torch.arange(count, device=device)
        column = table_column(state, tier, entry)
        block = state.row_blocks[1:][:, column // TABLE_BLOCK].long()  # [B, count]
        state.page_table[block, :, :, column % TABLE_BLOCK] = page
        flat = page.reshape(-1).long()
        if view.key_meta is not None and view.value_meta is not None:
            for meta in (view.key_meta, view.value_meta):
                meta[flat] = torch.tensor([0.02, -1.0], dtype=torch.float16, device=device)
        else:
            view.keys[flat] = torch.randn(tokens, case.head_dim, device=device).to(state.dtype)
            view.values[flat] = torch.randn(tokens, case.head_dim, device=device).to(state.dtype)
        number = entry.view(1, -1, 1) * tokens + torch.arange(tokens, device=device)
        position = torch.where(number < case.tokens[tier], number + first, -1)
        position = position.view(1, count, 1, 1, tokens).expand(case.batch, count, layers, case.kv_heads, tokens)
        view.positions[flat] = position.reshape(-1, tokens).int()
        if view.scores is not None:
            view.scores[flat] = torch.rand(tokens, device=device) / case.length
    return state


def _numbers(rows: int, columns: int, start: int, device: str) -> torch.Tensor:
    return torch.arange(start, start + rows * columns, dtype=torch.int32, device=device).view(rows, columns)
