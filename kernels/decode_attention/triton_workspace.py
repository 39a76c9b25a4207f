"""Memory of decode attention on the GPU, how the first pass is cut, and who keeps how many logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.decode_attention.triton_tiles import PARTS_UNIT
from sglang_diffkv.kernels.device import processors_of
from sglang_diffkv.kernels.triton_table import check_rows
from sglang_diffkv.mem_pool.page_format import PageFormat, TierLayout
from sglang_diffkv.mem_pool.state import PageState


@dataclass(frozen=True)
class DecodeConfig:
    """How the first pass is cut: at most ``tile`` tokens an iteration, ``stages`` asynchronous copies in flight,
    at most ``registers`` of a thread up to head_dim 128 (0: the compiler's choice); the score pass gives a head
    ``score_parts`` programs (0: as many as fill the GPU) of ``score_warps`` warps, ``score_tokens`` tokens an
    iteration. ``by_length``: requests and heads that hold more than others get more programs in either pass; else all
    get as many."""

    tile: int = 64
    warps: int = 1
    stages: int = 2
    registers: int = 168
    score_parts: int = 0
    score_tokens: int = 256
    score_warps: int = 2
    by_length: bool = False


def tile_tokens(layout: TierLayout, limit: int) -> int:
    """Slots of a tile, a power of two up to ``limit``: few tiles a page and few slots past its end.

    A tile's fixed work is worth about 16 slots.
    """
    sizes = [n for n in (16, 32, 64, 128) if n <= max(limit, 16)]
    return min(sizes, key=lambda n: (-(-layout.tokens // n) * (n + 16), -n))


def tile_constants(fmt: PageFormat, config: DecodeConfig) -> dict[str, tuple[int, ...]]:
    """Tokens and bytes of a tile of each tier."""
    sizes = tuple(tile_tokens(layout, config.tile) for layout in fmt.layouts)
    cost = tuple(
        n * x.tier.token_bytes(fmt.head_dim, fmt.v_head_dim) // 16 for n, x in zip(sizes, fmt.layouts, strict=True)
    )
    return {"TILES": sizes, "WEIGHTS": cost}


def padded_slots(layout: TierLayout, tile: int) -> int:
    """Slots of a page in whole tiles."""
    return -(-layout.tokens // tile) * tile


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["rows"])
def offsets_kernel(
    offsets, rows, num_valid, batch, entries, own_entry,
    SLOTS: tl.constexpr, JUDGED: tl.constexpr, TIERS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
    ROOM_FOR: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid (L * H): exclusive prefix sum over the requests of the slots that a head's own pages have, ``SLOTS`` each in
    the first ``JUDGED`` tiers."""
    b = tl.arange(0, R)
    live = (b < batch) & (b < tl.load(num_valid))
    row = tl.load(rows + b, mask=live, other=0).to(tl.int64)
    at = (row * (L * H) + tl.program_id(0)) * TIERS
    own = tl.load(entries + at, mask=live, other=0) - tl.load(own_entry + at, mask=live, other=0)
    need = own * SLOTS[0]
    for tier in tl.static_range(1, JUDGED):
        own = tl.load(entries + at + tier, mask=live, other=0) - tl.load(own_entry + at + tier, mask=live, other=0)
        need += own * SLOTS[tier]
    tl.store(offsets + tl.program_id(0) * ROOM_FOR + b, tl.cumsum(need, 0) - need, mask=b < batch)


@triton.jit
def fair_share(work, total, heads, programs):
    """Programs of a head with ``work`` [R] if ``total``, of so many ``heads``, is spread over ``programs`` for each; an
    eighth more than an even share is no reason for one more."""
    each = tl.maximum(tl.cdiv(total, tl.maximum(heads * programs, 1).to(tl.int64)), 1)
    return ((work.to(tl.int64) + each * 7 // 8) // each).to(tl.int32)


@triton.jit(
    do_not_specialize=["batch", "splits", "most_splits", "parts", "most_parts"],
    do_not_specialize_on_alignment=["rows"],
)
def shares_kernel(
    shares, rows, num_valid, batch, splits, most_splits, parts, most_parts, entries, own_entry,
    SLOTS: tl.constexpr, COSTS: tl.constexpr, JUDGED: tl.constexpr, TIERS: tl.constexpr, L: tl.constexpr,
    H: tl.constexpr, ROOM_FOR: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid (L * H): how many programs each request's head gets in either pass. ``SLOTS``, ``COSTS``: of a page of each
    tier. ``splits`` and ``parts``: of each head, were all equal."""
    b = tl.arange(0, R)
    place = tl.program_id(0)
    layer, head = place // H, place % H
    valid = tl.load(num_valid)
    live = (b < batch) & (b < valid)
    row = tl.load(rows + b, mask=live, other=0).to(tl.int64)
    need = tl.zeros([R], tl.int32)
    work = tl.zeros([R], tl.int32)
    all_work = tl.zeros([R], tl.int64)
    all_need = tl.zeros([R], tl.int64)
    for one in tl.static_range(H):
        at = ((row * L + layer) * H + one) * TIERS
        for tier in tl.static_range(TIERS):
            pages = tl.load(entries + at + tier, mask=live, other=0)
            all_work += pages * COSTS[tier]
            work = tl.where(head == one, work + pages * COSTS[tier], work)
            if tier < JUDGED:
                own = pages - tl.load(own_entry + at + tier, mask=live, other=0)
                all_need += own * SLOTS[tier]
                need = tl.where(head == one, need + own * SLOTS[tier], need)
    heads = tl.minimum(valid, batch) * H
    of_splits = tl.minimum(fair_share(work, tl.sum(all_work, 0), heads, splits), most_splits)
    of_parts = tl.minimum(fair_share(need, tl.sum(all_need, 0), heads, parts), most_parts)
    packed = tl.maximum(of_splits, 1) + tl.maximum(of_parts, 1) * PARTS_UNIT
    tl.store(shares + place * ROOM_FOR + b, packed, mask=b < batch)


MAX_SLOTS = 128
"""Partial results of a head at most: with T tiers T - 1 more than splits."""


UNEVEN = 2
"""By length, how many times the programs of an even batch a head may get, and as many more."""
IDLE = 8
"""Programs, in those that run at once, of which most may have nothing to do."""


def resident_programs(state: PageState) -> int:
    """Programs of the first pass, of one warp, that the registers of a GPU hold at once."""
    return processors_of(state.device) * (12 if state.fmt.head_dim <= 128 else 8)


def even_splits(state: PageState, batch: int) -> int:
    """Splits of a head's pages that fill the GPU once for a batch of this size, of equal lengths."""
    most = MAX_SLOTS - max(len(state.fmt.tiers) - 1, 1)
    return max(1, min(most, resident_programs(state) // (batch * state.num_heads)))


def default_splits(state: PageState, batch: int, config: DecodeConfig) -> int:
    """Splits of a head at most."""
    even = even_splits(state, batch)
    if not config.by_length:
        return even
    return uneven(even, resident_programs(state), batch * state.num_heads, even_splits(state, 1))


def uneven(even: int, resident: int, heads: int, most: int) -> int:
    """Programs at most of one of ``heads`` that would get ``even`` each."""
    return max(even, min(UNEVEN * even + UNEVEN, IDLE * resident // heads, most))


MAX_SCORE_PARTS = 8
"""Programs of the score pass that share a head, at most."""


JOINERS = 8
"""Programs of the score pass that join a head's splits in a small batch, each a slice of the head's dimensions."""


def score_programs(state: PageState, batch: int, config: DecodeConfig) -> tuple[int, int]:
    """How many programs share a head's scores, and how many join its splits and do nothing else.

    As many as run at once with 64 registers a thread: then a very large batch has none to spare for joining alone. (The
    kernel takes 72, and 127 where eight programs join; held to 64, or with fewer programs, it is no faster on an H200.)
    Of the former so many at most, by length.
    """
    even, joiners = even_parts(state, batch, config)
    if config.score_parts or not config.by_length:
        return even, joiners
    return uneven(even, score_residents(state, config), batch * state.num_heads, MAX_SCORE_PARTS), joiners


def score_residents(state: PageState, config: DecodeConfig) -> int:
    """Programs of the score pass that run at once."""
    return processors_of(state.device) * 32 // config.score_warps


def even_parts(state: PageState, batch: int, config: DecodeConfig) -> tuple[int, int]:
    """``score_programs`` for a batch of equal lengths."""
    each = score_residents(state, config) // (batch * state.num_heads)
    joiners = JOINERS if each >= JOINERS + MAX_SCORE_PARTS // 2 else int(each > 2)
    return config.score_parts or max(1, min(MAX_SCORE_PARTS, each - joiners)), joiners


@dataclass
class DecodeWorkspace:
    """Scratch of decode attention, shared by all layers; static addresses for graph capture.

    ``logits`` and ``tile_max`` are empty unless scores are kept. The requests share a head's ``room`` slots, cut up by
    :meth:`plan`; slots past it are attended to, but keep their old score.
    """

    config: DecodeConfig
    splits: int
    room: int
    partial_out: torch.Tensor  # [B, H, slots, G, v_head_dim] float32
    partial_lse: torch.Tensor  # [B, H, slots, G] float32, base 2
    logits: torch.Tensor  # [H, room, G] fp16, base 2, relative to tile_max
    tile_max: torch.Tensor  # [H, room / 16, G] float32
    offsets: torch.Tensor  # [L, H, at least B] int32, first slot of each request
    shares: torch.Tensor  # [L, H, at least B] int32, programs of each request, see ``triton_tiles.share_of``

    @classmethod
    def create(
        cls,
        state: PageState,
        batch: int,
        q_heads: int,
        *,
        splits: int = 0,
        max_tokens: int = 0,
        config: DecodeConfig | None = None,
    ) -> DecodeWorkspace:
        """``max_tokens`` is the longest sequence whose scores are kept; 0 if none are. ``splits`` 0 chooses."""
        scratch = DecodeScratch.create(state, batch, q_heads, splits=splits, max_tokens=max_tokens, config=config)
        return scratch.workspace(state, batch)

    def plan(self, state: PageState, rows: torch.Tensor, num_valid: torch.Tensor, *, judge_low: bool = True) -> None:
        """Give each request room for its logits in all layers, and by length its share of the programs: once a step
        whose scores are kept or whose programs go by length, after ``reserve``.

        ``rows`` [B] and ``num_valid`` [1] as for :func:`decode_attention`.
        """
        check_rows(rows, num_valid, state)
        batch, layers, heads = rows.shape[0], state.num_layers, state.num_heads
        assert batch <= self.offsets.shape[2]
        constants = tile_constants(state.fmt, self.config)
        slots = tuple(padded_slots(x, n) for x, n in zip(state.fmt.layouts, constants["TILES"], strict=True))
        costs = tuple(n // tile * w for n, tile, w in zip(slots, constants["TILES"], constants["WEIGHTS"], strict=True))
        room_for = self.offsets.shape[2]
        shape: dict[str, Any] = {"TIERS": len(slots), "L": layers, "H": heads, "ROOM_FOR": room_for}
        shape |= {"R": triton.next_power_of_2(room_for), "JUDGED": len(slots) if judge_low else 1, "SLOTS": slots}
        if self.room:
            offsets_kernel[(layers * heads,)](
                self.offsets, rows, num_valid, batch, state.entries, state.own_entry, **shape, num_warps=1
            )
        if not self.config.by_length:
            return
        even = self.splits if self.splits != default_splits(state, batch, self.config) else even_splits(state, batch)
        of_parts = even_parts(state, batch, self.config)[0], score_programs(state, batch, self.config)[0]
        shares_kernel[(layers * heads,)](
            self.shares, rows, num_valid, batch, even, self.splits, *of_parts, state.entries, state.own_entry,
            COSTS=costs, **shape, num_warps=1,
        )  # fmt: skip


ALIGN = 256
"""Bytes at whose multiples tensors in the scratch begin."""


def aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of the scratch that a tensor takes."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGN) * ALIGN


@dataclass
class DecodeScratch:
    """Memory from which workspaces for all batch sizes are cut, for steps that follow one another: a smaller batch
    gets more splits in the same memory.

    Nothing in ``memory`` outlives a layer, so other steps on the same stream may use it in between.
    """

    config: DecodeConfig
    splits: int  # of every batch size; 0: as many as fill the GPU
    slots: int  # of one head, all requests together
    room: int
    group: int
    memory: torch.Tensor  # uint8
    offsets: torch.Tensor  # [L, H, max batch] int32
    shares: torch.Tensor  # [L, H, max batch] int32

    @classmethod
    def create(
        cls,
        state: PageState,
        max_batch: int,
        q_heads: int,
        *,
        splits: int = 0,
        max_tokens: int = 0,
        densest: float = 0.0,
        least_bytes: int = 0,
        config: DecodeConfig | None = None,
    ) -> DecodeScratch:
        """``max_tokens`` is the longest sequence whose scores are kept, 0 if none are; ``densest``, how many times its
        share of all pages a head may own; by default what heads can differ by without pruning. ``least_bytes``: of
        ``memory``, for others that use it."""
        config = config or DecodeConfig()
        fmt, heads = state.fmt, state.num_heads
        extra = len(fmt.tiers) - 1
        slots = max(b * ((splits or default_splits(state, b, config)) + extra) for b in range(1, max_batch + 1))
        # The ends of all tiers may be part-filled: half as many slots again as tokens. All requests together own no
        # more pages than there are; a head whose tokens are all high owns the more of them the denser the low tier is.
        layouts = tuple(zip(fmt.layouts, tile_constants(fmt, config)["TILES"], strict=True))
        waste = max(padded_slots(x, n) / x.tokens for x, n in layouts)
        longest = (int(max_tokens * waste * 1.5) // 128 + 4) * 128 if max_tokens else 0
        page_slots = max(padded_slots(x, n) for x, n in layouts)
        skew = max(2.0, densest, fmt.low.tokens / fmt.high.tokens)
        held = (int(skew * state.num_pages * page_slots / (state.num_layers * heads)) // 128 + 1) * 128
        room = min(max_batch * longest, max(longest, held))
        offsets = torch.zeros(state.num_layers, heads, max_batch, dtype=torch.int32, device=state.device)
        scratch = cls(config, splits, slots, room, q_heads // heads, torch.empty(0), offsets, torch.zeros_like(offsets))
        size = sum(aligned_bytes(shape, dtype) for shape, dtype in scratch._parts(state, slots, 1))
        scratch.memory = torch.empty(max(size, least_bytes), dtype=torch.uint8, device=state.device)
        return scratch

    def _parts(self, state: PageState, batch: int, splits: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of the tensors of a workspace."""
        heads, group = state.num_heads, self.group
        partial = (batch, heads, splits, group)
        return [
            ((heads, self.room, group), torch.float16),
            ((heads, self.room // 16, group), torch.float32),
            ((*partial, state.fmt.v_head_dim), torch.float32),
            (partial, torch.float32),
        ]

    def workspace(self, state: PageState, batch: int) -> DecodeWorkspace:
        """The scratch of a step of ``batch`` requests, at most the scratch's."""
        assert batch <= self.offsets.shape[2]
        splits = self.splits or default_splits(state, batch, self.config)
        cut, at = [], 0
        for shape, dtype in self._parts(state, batch, splits + len(state.fmt.tiers) - 1):
            end = at + math.prod(shape) * dtype.itemsize
            cut.append(self.memory[at:end].view(dtype).view(shape))
            at += aligned_bytes(shape, dtype)
        logits, tile_max, partial_out, partial_lse = cut
        rest = partial_out, partial_lse, logits, tile_max, self.offsets, self.shares
        return DecodeWorkspace(self.config, splits, self.room, *rest)
