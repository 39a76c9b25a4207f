"""Memory of decode attention on the GPU, how both passes are shared out, and who keeps how many logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.decode_attention.cuda import page_slots, resident_of
from sglang_diffkv.kernels.decode_attention.triton_ranges import LEAST_TILES, MOST_RANGES, TURN_TILES, ranges_kernel
from sglang_diffkv.kernels.device import processors_of, shared_memory_of
from sglang_diffkv.kernels.triton_table import check_rows
from sglang_diffkv.layout.page_format import PageFormat, TierLayout
from sglang_diffkv.layout.state import PageState


@dataclass(frozen=True)
class DecodeConfig:
    """How the first pass is cut: at most ``tile`` tokens an iteration, and ``stages`` asynchronous copies in flight. A
    thread has at most ``registers`` up to head_dim 128 (0: the compiler's choice). ``programs`` (0: as many as the GPU
    holds at once) look up the pages of ``ahead`` tiles (a power of two) at once. The score pass gives a head at most
    ``score_parts`` programs (0: as many as fill the GPU) of ``score_warps`` warps, ``score_tokens`` tokens an
    iteration. A step of more than ``requests`` attends in slices of so many, one after the other, which share
    scratch."""

    tile: int = 64
    warps: int = 1
    stages: int = 2
    registers: int = 168
    programs: int = 0
    ahead: int = 64
    score_parts: int = 0
    score_tokens: int = 256
    score_warps: int = 2
    requests: int = 512
    cuda: bool = False
    resident: int = 12
    copies: int = 2


COST_BYTES = 512
"""Bytes that are worth 1 where the work of tiers is weighed: a layer's line, int32, is 0.9 TB long at most. Pages that
several requests share count for each."""

SLOT_BYTES = 34
"""What a slot costs beside its bytes, in bytes; a tile costs 16 times more. It is fitted to times of tiers on an H100:
K8V4 takes 2.49 ns for 32 tokens of 128 dimensions, K4V2 2.83 ns for 59."""


def tile_tokens(layout: TierLayout, limit: int) -> int:
    """Slots of a tile, a power of two up to ``limit``: few tiles a page and few slots past its end.

    A tile's fixed work is worth about 16 slots.
    """
    sizes = [n for n in (16, 32, 64, 128) if n <= max(limit, 16)]
    return min(sizes, key=lambda n: (-(-layout.tokens // n) * (n + 16), -n))


def tile_cost(layout: TierLayout, tile: int) -> int:
    """Of one of the tiles of a page, in ``COST_BYTES``: the bytes of its tokens and the work of its slots."""
    tiles = -(-layout.tokens // tile)
    return max(round((layout.tokens * layout.token_bytes / tiles + SLOT_BYTES * (tile + 16)) / COST_BYTES), 1)


def tile_constants(fmt: PageFormat, config: DecodeConfig) -> dict[str, Any]:
    """Tokens and cost of a tile of each tier, in units of which the layer's line fits in int32; and the cost of turning
    to a tier of a head."""
    if config.cuda:
        cost = (max(round(fmt.page_bytes / COST_BYTES), 1),) * len(fmt.layouts)
        return {"TILES": tuple(map(page_slots, fmt.layouts)), "WEIGHTS": cost, "TURN": TURN_TILES * max(cost)}
    sizes = tuple(tile_tokens(layout, config.tile) for layout in fmt.layouts)
    cost = tuple(map(tile_cost, fmt.layouts, sizes))
    return {"TILES": sizes, "WEIGHTS": cost, "TURN": TURN_TILES * max(cost)}


def padded_slots(layout: TierLayout, tile: int) -> int:
    """Slots of a page in whole tiles."""
    return -(-layout.tokens // tile) * tile


@triton.jit(
    do_not_specialize=["batch", "parts", "most_parts"],
    do_not_specialize_on_alignment=["rows"],
)
def offsets_kernel(
    offsets, parts_of, rows, num_valid, batch, parts, most_parts, entries, own_entry,
    SLOTS: tl.constexpr, TIERS_SCORED: tl.constexpr, TIERS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
    ROOM_FOR: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid (L * H): exclusive prefix sum over the requests of the slots that a head's own pages have, ``SLOTS`` each in
    the first ``TIERS_SCORED`` tiers. It also gives how many programs of the score pass each request's head gets. That
    is its share of the layer's slots, of ``parts`` for each head if all were equal, and ``most_parts`` at most."""
    b = tl.arange(0, R)
    place = tl.program_id(0)
    layer, head = place // H, place % H
    valid = tl.minimum(tl.load(num_valid), batch)
    live = b < valid
    row = tl.load(rows + b, mask=live, other=0).to(tl.int64)
    need = tl.zeros([R], tl.int32)
    total = tl.zeros([R], tl.int64)
    for one in tl.static_range(H):
        at = ((row * L + layer) * H + one) * TIERS
        for tier in tl.static_range(TIERS_SCORED):
            own = tl.load(entries + at + tier, mask=live, other=0) - tl.load(own_entry + at + tier, mask=live, other=0)
            total += own * SLOTS[tier]
            need = tl.where(head == one, need + own * SLOTS[tier], need)
    tl.store(offsets + place * ROOM_FOR + b, tl.cumsum(need, 0) - need, mask=b < batch)
    programs = (valid * H * parts).to(tl.int64)
    each = tl.maximum(tl.cdiv(tl.sum(total, 0), tl.maximum(programs, 1)), 1)
    mine = tl.minimum(((need + each * 7 // 8) // each).to(tl.int32), most_parts)
    tl.store(parts_of + place * ROOM_FOR + b, tl.maximum(mine, 1), mask=b < batch)


UNEVEN = 2
"""How many times the score programs of an even batch a head may get, and as many more."""
IDLE = 8
"""Score programs, in those that run at once, of which most may have nothing to do."""


TILE_SPACE = 3200
"""Shared memory that a program of the first pass takes beside a tile's keys and values, at most, with what a GPU
reserves for it."""


def resident_programs(state: PageState, config: DecodeConfig) -> int:
    """Programs of the first pass, of one warp, that registers and shared memory of a GPU hold at once."""
    if config.cuda:
        fitting = resident_of(state.fmt, config.copies, config.resident, shared_memory_of(state.device))
        return processors_of(state.device) * fitting
    layouts = state.fmt.layouts
    largest = max(tile_tokens(x, config.tile) * (x.key_bytes + x.value_bytes) for x in layouts)
    fitting = shared_memory_of(state.device) // (largest + TILE_SPACE)
    return processors_of(state.device) * max(min(12 if state.fmt.head_dim <= 128 else 8, fitting), 1)


MAX_SCORE_PARTS = 8
"""Programs of the score pass that share a head, at most."""


JOINERS = 8
"""Programs of the score pass that join a head's splits in a small batch, each a slice of the head's dimensions."""


def score_programs(state: PageState, batch: int, config: DecodeConfig) -> tuple[int, int]:
    """How many programs share a head's scores at most, and how many join its partial results and do nothing else.

    As many as run at once with 64 registers a thread: then a very large batch has none to spare for joining alone. (The
    kernel takes 72, and 127 where eight programs join; held to 64, or with fewer programs, it is no faster on an H200.)
    """
    even, joiners = even_parts(state, batch, config)
    if config.score_parts:
        return even, joiners
    spare = IDLE * score_residents(state, config) // (batch * state.num_heads)
    return max(even, min(UNEVEN * even + UNEVEN, spare, MAX_SCORE_PARTS)), joiners


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
    """Scratch of a step's decode attention, shared by all layers; static addresses for graph capture.

    ``logits`` and ``tile_max`` are empty unless scores are kept. The requests share a head's ``room`` slots, cut up by
    :meth:`plan`; slots past it are attended to, but keep their old score.
    """

    config: DecodeConfig
    programs: int
    room: int
    partial_out: torch.Tensor  # [``result_slots``, G, v_head_dim] float32
    partial_lse: torch.Tensor  # [``result_slots``, G] float32, base 2
    logits: torch.Tensor  # [H, room, G] fp16, base 2, relative to tile_max
    tile_max: torch.Tensor  # [H, room / 16, G] float32
    offsets: torch.Tensor  # [L, H, at least B] int32, first slot of each request
    parts_of: torch.Tensor  # [L, H, at least B] int32, programs of the score pass of each request
    starts: torch.Tensor  # [L, at least B * H * T] int32, where the work of each unit begins
    begun: torch.Tensor  # [L, programs, 4] int32: the unit in which each begins, where that begins, its row, nothing
    ranges: torch.Tensor  # [L, 2] int32, work of a program and of all
    planned: int = 0
    """Requests of the step that ``plan`` was called for."""

    @classmethod
    def create(
        cls, state: PageState, batch: int, q_heads: int, *, max_tokens: int = 0, config: DecodeConfig | None = None
    ) -> DecodeWorkspace:
        """``max_tokens`` is the longest sequence whose scores are kept; 0 if none are."""
        return DecodeScratch.create(state, batch, q_heads, max_tokens=max_tokens, config=config).workspace(state, batch)

    def plan(self, state: PageState, rows: torch.Tensor, num_valid: torch.Tensor, *, score_low: bool = True) -> None:
        """Share out the work of all layers, and give each request room for its logits: once a step, after ``reserve``.

        ``rows`` [B] and ``num_valid`` [1] as for :func:`decode_attention`.
        """
        check_rows(rows, num_valid, state)
        batch, layers, heads = rows.shape[0], state.num_layers, state.num_heads
        tiers, room_for = len(state.fmt.tiers), self.offsets.shape[2]
        assert batch <= room_for
        self.planned = batch
        constants = tile_constants(state.fmt, self.config)
        slots = tuple(padded_slots(x, n) for x, n in zip(state.fmt.layouts, constants["TILES"], strict=True))
        costs = tuple(n // tile * w for n, tile, w in zip(slots, constants["TILES"], constants["WEIGHTS"], strict=True))
        shape: dict[str, Any] = {"TIERS": tiers, "L": layers, "H": heads}
        ranges_kernel[(layers,)](
            self.starts, self.begun, self.ranges, rows, num_valid, batch, self.programs,
            LEAST_TILES * max(constants["WEIGHTS"]), state.entries,
            COSTS=costs, TURN=constants["TURN"], MOST=MOST_RANGES, UNITS=self.starts.shape[1], PROGRAMS=self.programs,
            R=min(triton.next_power_of_2(room_for * heads), RANGE_HEADS), **shape, num_warps=4,
        )  # fmt: skip
        if self.room:
            even, most = even_parts(state, batch, self.config)[0], score_programs(state, batch, self.config)[0]
            offsets_kernel[(layers * heads,)](
                self.offsets, self.parts_of, rows, num_valid, batch, even, most, state.entries, state.own_entry,
                SLOTS=slots, TIERS_SCORED=tiers if score_low else 1, ROOM_FOR=room_for,
                R=triton.next_power_of_2(room_for), **shape, num_warps=1,
            )  # fmt: skip


RANGE_HEADS = 1024
"""Heads of a layer whose work is laid out in an iteration."""
ALIGN = 256
"""Bytes at whose multiples tensors in the scratch begin."""


def aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of the scratch that a tensor takes."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGN) * ALIGN


def result_slots(state: PageState, batch: int, programs: int, config: DecodeConfig) -> int:
    """Slots of the first pass's partial results, see ``triton_ranges``."""
    return programs + batch * state.num_heads * (1 if config.cuda else len(state.fmt.tiers))


def layer_parts(
    state: PageState, batch: int, group: int, programs: int, room: int, config: DecodeConfig
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of what a layer's two passes hand over: logits, tile_max, partial_out and partial_lse."""
    heads = state.num_heads
    slots = result_slots(state, batch, programs, config)
    return [
        ((heads, room, group), torch.float16),
        ((heads, room // 16, group), torch.float32),
        ((slots, group, state.fmt.v_head_dim), torch.float32),
        ((slots, group), torch.float32),
    ]


def cut(memory: torch.Tensor, parts: list[tuple[tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
    """Tensors of these shapes and types, one behind the other in ``memory``, uint8."""
    found, at = [], 0
    for shape, dtype in parts:
        found.append(memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
        at += aligned_bytes(shape, dtype)
    return found


@dataclass
class DecodeScratch:
    """Memory from which workspaces for all batch sizes are cut, for steps that follow one another.

    Nothing in ``memory`` outlives a decode step, so other steps on the same stream may use it in between. ``of_layers``
    holds what no later layer reads, so it is free after a step's last layer.
    """

    config: DecodeConfig
    programs: int
    room: int
    group: int
    memory: torch.Tensor  # uint8
    of_layers: torch.Tensor  # uint8, the first part of ``memory``
    rest: torch.Tensor  # uint8, the part of ``memory`` behind all others, for the caller
    offsets: torch.Tensor  # [slices, L, H, requests of a slice] int32, and all below: in ``memory``
    parts_of: torch.Tensor  # [slices, L, H, requests of a slice] int32
    starts: torch.Tensor  # [slices, L, requests of a slice * H * T] int32
    begun: torch.Tensor  # [slices, L, programs, 4] int32
    ranges: torch.Tensor  # [slices, L, 2] int32

    @classmethod
    def create(
        cls,
        state: PageState,
        max_batch: int,
        q_heads: int,
        *,
        max_tokens: int = 0,
        densest: float = 0.0,
        least_bytes: int = 0,
        layer_bytes: int = 0,
        rest_bytes: int = 0,
        score_low: bool = True,
        config: DecodeConfig | None = None,
    ) -> DecodeScratch:
        """``max_tokens`` is the longest sequence whose scores are kept, 0 if none are; ``densest``, how many times its
        share of all pages a head may own; by default what heads can differ by without pruning. ``least_bytes``,
        ``layer_bytes``, ``rest_bytes``: of ``memory``, ``of_layers`` and ``rest``, for others that use them.
        ``score_low``: whether lower tiers' scores are kept, too."""
        config = config or DecodeConfig()
        fmt, heads, layers = state.fmt, state.num_heads, state.num_layers
        programs = config.programs or resident_programs(state, config)
        # The ends of all tiers may be part-filled: half as many slots again as tokens. All requests together own no
        # more pages than there are; a head whose tokens are all high owns the more of them the denser the low tier is.
        most = min(max_batch, config.requests)
        layouts = tuple(zip(fmt.layouts, tile_constants(fmt, config)["TILES"], strict=True))
        layouts = layouts if score_low else layouts[:1]
        waste = max(padded_slots(x, n) / x.tokens for x, n in layouts)
        longest = (int(max_tokens * waste * 1.5) // 128 + 4) * 128 if max_tokens else 0
        page_slots = max(padded_slots(x, n) for x, n in layouts)
        skew = max(2.0, densest, fmt.low.tokens / fmt.high.tokens)
        held = (int(skew * state.num_pages * page_slots / (layers * heads)) // 128 + 1) * 128
        room = min(most * longest, max(longest, held))
        units, group = most * heads * len(fmt.tiers), q_heads // heads
        parts = layer_parts(state, most, group, programs, room, config)
        shapes = ((heads, most), (heads, most), (units,), (programs, 4), (2,))
        plan = [((-(-max_batch // most), layers, *shape), torch.int32) for shape in shapes]
        layer_bytes = max(sum(aligned_bytes(*x) for x in parts), aligned_bytes((layer_bytes,), torch.uint8))
        end = layer_bytes + sum(aligned_bytes(*x) for x in plan)
        memory = torch.empty(max(end + rest_bytes, least_bytes), dtype=torch.uint8, device=state.device)
        planned = cut(memory[layer_bytes:], plan)
        planned[0].zero_()
        planned[1].fill_(1)
        return cls(config, programs, room, group, memory, memory[:layer_bytes], memory[end:], *planned)

    def workspaces(self, state: PageState, batch: int) -> tuple[DecodeWorkspace, ...]:
        """The scratch of each slice of a step of ``batch`` requests, at most the scratch's."""
        most = self.offsets.shape[3]
        return tuple(self.workspace(state, min(batch - first, most), first // most) for first in range(0, batch, most))

    def workspace(self, state: PageState, batch: int, number: int = 0) -> DecodeWorkspace:
        """The scratch of ``batch`` requests, at most those of a slice, that are slice ``number`` of a step."""
        assert 0 < batch <= self.offsets.shape[3]
        parts = layer_parts(state, batch, self.group, self.programs, self.room, self.config)
        logits, tile_max, partial_out, partial_lse = cut(self.of_layers, parts)
        plan = (self.offsets, self.parts_of, self.starts, self.begun, self.ranges)
        offsets, parts_of, starts, begun, ranges = (x[number] for x in plan)
        return DecodeWorkspace(
            self.config,
            self.programs,
            self.room,
            partial_out,
            partial_lse,
            logits,
            tile_max,
            offsets,
            parts_of,
            starts,
            begun,
            ranges,
        )
