"""The device-resident state of the page manager: tensors only, no decisions.

Shapes use ``P`` pages, ``R`` rows, ``L`` layers, ``H`` KV heads, ``T`` tiers, ``C`` table blocks.
A *row* is one owner: a request (its index is SGLang's ``req_pool_idx``) or a radix-tree segment.

Bidirectional page table (DiffKV, section 5.2): a row has ``width = max_blocks * TABLE_BLOCK``
columns for each (layer, head). Entry ``i`` of tier 0 is column ``i``, entry ``i`` of tier 1 is column
``width - 1 - i``. With more tiers the columns are two such tables (section 5.3), a half each. Tier 2 grows from the
right end of the first half towards tier 0, tier 3 from the left end of the second half towards tier 1
(``table_column``). Columns are backed by blocks of ``TABLE_BLOCK`` columns that the host hands out as a row grows, so
table memory follows need and not ``max_requests x max_length``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from sglang_diffkv.layout.geometry import TABLE_BLOCK, Geometry
from sglang_diffkv.layout.page_format import EMPTY, PageFormat, TierLayout
from sglang_diffkv.layout.spans import retained_tokens

NO_LIMIT = 2**31 - 1
"""Upper end of the position range of a page that its owner wrote itself. Its lower 16 bits, all ones, are above every
position that has 16 bits."""


def range_dtype(fmt: PageFormat) -> torch.dtype:
    """Of the ends of position ranges in the page table: int16, for the lower 16 bits, where positions have 16."""
    return {2: torch.int16, 4: torch.int32}[fmt.position_bytes]


def bounds(stored: torch.Tensor) -> torch.Tensor:
    """Ends of position ranges as int32, whatever they take in the page table."""
    return stored if stored.dtype == torch.int32 else stored.int() & 0xFFFF


class Positions:
    """The positions [P + 1, tokens] of a tier's pages: indexed, they are int32 and ``EMPTY`` where a slot is empty,
    whatever they take in the pages."""

    def __init__(self, stored: torch.Tensor):
        """``stored``: int32, or int16 for the lower 16 bits."""
        self.stored = stored

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self.stored[index]
        return found if found.dtype == torch.int32 else ((found.int() + 1) & 0xFFFF) - 1

    def __setitem__(self, index: Any, position: torch.Tensor | int) -> None:
        self.stored[index] = torch.as_tensor(position, device=self.stored.device).to(self.stored.dtype)


@dataclass(frozen=True)
class TierView:
    """Views into the page buffer for the pages of one tier; all share its memory.

    ``keys``/``values`` are [P + 1, tokens, bytes] uint8 codes, or [P + 1, tokens, dim] in the model's
    dtype for the raw tier; the metadata is [P + 1, tokens, 2] fp16 (scale, zero point) or None. Scores are None where
    the tier has none.
    """

    layout: TierLayout
    keys: torch.Tensor
    key_meta: torch.Tensor | None
    values: torch.Tensor
    value_meta: torch.Tensor | None
    scores: torch.Tensor | None  # [P + 1, tokens] float32
    positions: Positions

    @classmethod
    def of(cls, pages: torch.Tensor, layout: TierLayout, dtype: torch.dtype) -> TierView:
        n = layout.tokens

        def cut(offset: int, token_bytes: int, view: torch.dtype) -> torch.Tensor:
            flat = pages[:, offset : offset + n * token_bytes]
            return (flat if view is torch.uint8 else flat.view(view)).unflatten(1, (n, -1))

        raw = layout.tier.is_raw
        payload = dtype if raw else torch.uint8
        position = {2: torch.int16, 4: torch.int32}[layout.position_bytes]
        return cls(
            layout,
            cut(layout.key_offset, layout.key_bytes, payload),
            None if raw else cut(layout.key_meta_offset, 4, torch.float16),
            cut(layout.value_offset, layout.value_bytes, payload),
            None if raw else cut(layout.value_meta_offset, 4, torch.float16),
            None if layout.score_offset is None else cut(layout.score_offset, 4, torch.float32).squeeze(2),
            Positions(cut(layout.position_offset, layout.position_bytes, position).squeeze(2)),
        )

    def scores_of(self, *index: torch.Tensor) -> torch.Tensor:
        """Scores at an index of [P + 1, tokens]; 0 where the tier has none."""
        if self.scores is not None:
            return self.scores[index]
        return torch.zeros_like(self.positions[index], dtype=torch.float32)


def tensor_bytes(thing: object) -> int:
    """Bytes of the tensors that an object's attributes are."""
    return sum(x.nbytes for x in vars(thing).values() if isinstance(x, torch.Tensor))


@dataclass
class PageState:
    """All tensors of the page manager. ``pages`` has one page more than the ring: the scratch page,
    where a token lands whose head found the ring empty (``fault`` tells the host)."""

    fmt: PageFormat
    dtype: torch.dtype
    pages: torch.Tensor  # [P + 1, page_bytes] uint8
    ring: torch.Tensor  # [P] int32, page ids
    counters: torch.Tensor  # [2] int64: pages ever taken from the ring, pages ever put into it
    refcount: torch.Tensor  # [P + 1] int32
    row_blocks: torch.Tensor  # [R, max_blocks] int32; block 0 backs columns that are not in use
    page_table: torch.Tensor  # [C, L, H, TABLE_BLOCK] int32, page ids
    range_lo: torch.Tensor  # [C, L, H, TABLE_BLOCK] ``range_dtype``: a slot counts if its position is in
    range_hi: torch.Tensor  # [range_lo, range_hi), both as ``bounds`` has them
    entries: torch.Tensor  # [R, L, H, T] int32, table entries in use
    kept_entry: torch.Tensor  # [R, L, H, T] int32, first entry that no segment holds
    own_entry: torch.Tensor  # [R, L, H, T] int32, first entry whose page this row may write
    own_tokens: torch.Tensor  # [R, L, H, T] int32, slots used in own pages, a hole included
    hole: torch.Tensor  # [R, L, H] int32, own high slot that a token left, or -1
    write_slot: torch.Tensor  # [R, L, H] int32, own high slot of the step's first new token
    fault: torch.Tensor  # [R] int32, non-zero once the ring was empty for this row
    row_sign: torch.Tensor  # [R] int32: -1 for a request's row that keeps all tokens in the high tier, else 1
    row_window: torch.Tensor  # [R] int32: a request's own window; EMPTY for rows that have the policy's
    sliding: torch.Tensor  # [S, 2] int32: layers with a sliding window, and how many newest tokens they keep
    attention_spans: tuple[int, ...] = ()  # as of ``Geometry``
    first_layer: int = 0  # of a group of layers, the first one's number

    @classmethod
    def create(
        cls,
        fmt: PageFormat,
        *,
        num_pages: int,
        num_rows: int,
        num_layers: int,
        num_heads: int,
        max_blocks: int,
        num_blocks: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        attention_spans: tuple[int, ...] = (),
    ) -> PageState:
        assert not attention_spans or len(attention_spans) == num_layers, (
            f"attention spans of {len(attention_spans)} layers for {num_layers}"
        )
        sliding = [
            (layer, retained_tokens(attention_span))
            for layer, attention_span in enumerate(attention_spans)
            if attention_span
        ]

        def ints(*shape: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        heads = (num_rows, num_layers, num_heads)
        table = (num_blocks, num_layers, num_heads, TABLE_BLOCK)
        return cls(
            fmt=fmt,
            dtype=dtype,
            pages=torch.zeros(num_pages + 1, fmt.page_bytes, dtype=torch.uint8, device=device),
            ring=torch.arange(num_pages, dtype=torch.int32, device=device),
            counters=torch.tensor([0, num_pages], dtype=torch.int64, device=device),
            refcount=ints(num_pages + 1),
            row_blocks=ints(num_rows, max_blocks),
            page_table=ints(*table, fill=EMPTY),
            range_lo=ints(*table, dtype=range_dtype(fmt)),
            range_hi=ints(*table, dtype=range_dtype(fmt)),
            entries=ints(*heads, len(fmt.tiers)),
            kept_entry=ints(*heads, len(fmt.tiers)),
            own_entry=ints(*heads, len(fmt.tiers)),
            own_tokens=ints(*heads, len(fmt.tiers)),
            hole=ints(*heads, fill=EMPTY),
            write_slot=ints(*heads),
            fault=ints(num_rows),
            row_sign=ints(num_rows, fill=1),
            row_window=ints(num_rows, fill=EMPTY),
            sliding=torch.tensor(sliding, dtype=torch.int32, device=device).view(-1, 2),
            attention_spans=attention_spans,
        )

    @classmethod
    def of(
        cls, geometry: Geometry, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
    ) -> PageState:
        """An empty state of these sizes."""
        return cls.create(
            geometry.fmt,
            num_pages=geometry.num_pages,
            num_rows=geometry.num_rows + geometry.num_segments,
            num_layers=geometry.num_layers,
            num_heads=geometry.num_heads,
            max_blocks=geometry.max_blocks,
            num_blocks=geometry.num_blocks,
            dtype=dtype,
            device=device,
            attention_spans=geometry.attention_spans,
        )

    def attention_span(self, layer: int) -> int:
        """Tokens that a query of the layer may see, itself included; 0 for all."""
        return self.attention_spans[layer] if self.attention_spans else 0

    @property
    def slides(self) -> bool:
        """Whether any layer has a sliding window."""
        return any(self.attention_spans)

    @cached_property
    def tiers(self) -> tuple[TierView, ...]:
        return tuple(TierView.of(self.pages, layout, self.dtype) for layout in self.fmt.layouts)

    @property
    def num_pages(self) -> int:
        return self.ring.shape[0]

    @property
    def scratch_page(self) -> int:
        return self.ring.shape[0]

    @property
    def num_layers(self) -> int:
        return self.entries.shape[1]

    @property
    def num_heads(self) -> int:
        return self.entries.shape[2]

    @cached_property
    def row_layers(self) -> int:
        """Layers from a row's numbers, or a table block's, to the next one's: more than there are in a group."""
        return self.entries.stride(0) // self.entries.stride(1)

    def groups(self, stride: int | None) -> Iterator[tuple[slice, PageState]]:
        """So many layers at a time, which ones and the state as one of these alone: pages, ring and rows are the same,
        and what has numbers for each layer is a view. The state itself where ``stride`` is None or not below its
        layers.

        Ops that score and compact by a policy's prompt rule take a group for a state, ``transfer_pages`` does too.
        """
        if stride is None or stride >= self.num_layers:
            yield slice(None), self
            return
        assert not self.slides, "layers with a sliding window are compacted together"
        names = ("page_table", "range_lo", "range_hi", "entries", "kept_entry", "own_entry", "own_tokens", "hole")
        for first in range(0, self.num_layers, stride):
            layers = slice(first, min(first + stride, self.num_layers))
            views = {name: getattr(self, name)[:, layers] for name in names}
            yield layers, replace(self, **views, first_layer=self.first_layer + first)

    @property
    def width(self) -> int:
        """Columns of a row of the page table."""
        return self.row_blocks.shape[1] * TABLE_BLOCK

    @property
    def device(self) -> torch.device:
        return self.pages.device
