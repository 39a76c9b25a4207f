"""The first pass of decode attention in CUDA C++ (``split.cu``): what it supports, and its launch."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from sglang_diffkv.kernels.cuda.load import load
from sglang_diffkv.kernels.cuda.source import CudaSource, defined
from sglang_diffkv.kernels.device import shared_memory_of
from sglang_diffkv.kernels.quantize.reference import slices
from sglang_diffkv.layout.page_format import PageFormat, TierLayout
from sglang_diffkv.layout.state import PageState, range_dtype

SOURCE = Path(__file__).parent / "split.cu"
STAGE_ALIGN = 128
"""Bytes at whose multiples pages lie in shared memory."""
SLOTS_AT_ONCE = 16
"""Slots of a page that are read together."""
HELD_BYTES = 16 + 8
"""Of a page in shared memory beside itself: where it belongs, and the barrier that its copy counts on."""
RESERVED_SHARED = 1024
"""Bytes of shared memory that the GPU takes for each block."""
MOST_SLOTS = 128
"""Of a page: logits of them are in registers."""


def missing() -> str | None:
    """What this machine lacks for kernels in CUDA C++, or None if it has all of it."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"a GPU of compute capability {major}.{minor}, not a Hopper GPU"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "the package cuda-bindings is not installed"
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as error:
        return f"NVRTC cannot be loaded ({error})"
    return None


def unsupported(fmt: PageFormat, group: int) -> str | None:
    """Why this pass does not serve a page format and ``group`` query heads of a KV head, or None if it does."""
    if group > 8:
        return f"{group} query heads of a KV head, more than 8"
    if {fmt.head_dim, fmt.v_head_dim} - {64, 128}:
        return f"heads of {fmt.head_dim} and {fmt.v_head_dim}, not of 64 or 128"
    for layout in fmt.layouts:
        if layout.tier.is_raw:
            return "tier BF16, which gains nothing from it"
        keys, values = slices(layout.tier.k_bits), slices(layout.tier.v_bits)
        if fmt.head_dim * keys[0] // 8 % 32 or fmt.v_head_dim * values[-1] // 8 % 16:
            return f"tier {layout.tier.name} in heads of {fmt.head_dim} and {fmt.v_head_dim}"
        if layout.tokens > MOST_SLOTS:
            return f"pages of {layout.tokens} tokens, more than {MOST_SLOTS}"
    return None


def page_slots(layout: TierLayout) -> int:
    """Slots of a page's tile: all of them, rounded up to a power of two."""
    return max(triton.next_power_of_2(layout.tokens), 16)


def stage_bytes(fmt: PageFormat) -> int:
    """Shared memory of a page that is on its way or attended to: with what its last slots, read together with others
    that it does not have, reach into behind it."""
    least = max(fmt.page_bytes, *map(read_bytes, fmt.layouts))
    return -(-least // STAGE_ALIGN) * STAGE_ALIGN


def read_bytes(layout: TierLayout) -> int:
    """End of the slots of a page that are read."""
    slots = -(-layout.tokens // SLOTS_AT_ONCE) * SLOTS_AT_ONCE
    fields = (
        (layout.key_offset, layout.key_bytes), (layout.value_offset, layout.value_bytes),
        (layout.key_meta_offset, 4), (layout.value_meta_offset, 4), (layout.position_offset, layout.position_bytes),
    )  # fmt: skip
    return max(offset + slots * size for offset, size in fields)


def shared_bytes(fmt: PageFormat, stages: int) -> int:
    """Shared memory of a program."""
    return stages * (stage_bytes(fmt) + HELD_BYTES)


def resident_of(fmt: PageFormat, stages: int, most: int, shared_memory: int) -> int:
    """Programs that a multiprocessor with so much shared memory holds at once, at most ``most``."""
    return max(min(most, shared_memory // (shared_bytes(fmt, stages) + RESERVED_SHARED)), 1)


class Arguments(ctypes.Structure):
    """``Arguments`` of ``split.cu``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "q", "partial_out", "partial_lse", "logits", "tile_max", "offsets", "begun", "ranges", "pages",
            "page_table", "range_lo", "range_hi", "row_blocks", "entries", "own_entry", "rows", "seq_lens",
        )),
        *((name, ctypes.c_int) for name in ("batch", "layer", "room", "attention_span", "every")),
        *((name, ctypes.c_float) for name in ("sm_scale", "logit_cap")),
    ]  # fmt: skip


@cache
def split_source(
    fmt: PageFormat, group: int, layers: int, heads: int, max_blocks: int, room_for: int, programs: int, turn: int,
    weights: tuple[int, ...], tiles: tuple[int, ...], stages: int, resident: int, kept_tiers: int, capped: bool,
    slides: bool, early: bool, wide_rows: bool, wide_lengths: bool, bfloat: bool,
) -> CudaSource:  # fmt: skip
    """The pass for these constants; see the head of ``split.cu``."""
    tiers = ", ".join(
        "{" + ", ".join(map(str, (
            x.tier.k_bits, x.tier.v_bits, x.tokens, x.key_offset, x.key_meta_offset, x.value_offset,
            x.value_meta_offset, x.position_offset, x.position_bytes, weight, tile,
        ))) + "}"
        for x, weight, tile in zip(fmt.layouts, weights, tiles, strict=True)
    )  # fmt: skip
    integer = {True: "i64", False: "int"}
    return CudaSource(SOURCE, "split_kernel", defined({
        "TIERS": len(fmt.tiers), "TIER_LIST": tiers, "LAYERS": layers, "HEADS": heads, "GROUP": group,
        "DIM": fmt.head_dim, "V_DIM": fmt.v_head_dim, "PAGE_BYTES": fmt.page_bytes, "MAX_BLOCKS": max_blocks,
        "ROOM_FOR": room_for, "PROGRAMS": programs, "TURN": turn, "STAGES": stages,
        "STRIDE": stage_bytes(fmt), "RESIDENT": resident,
        "KEPT_TIERS": kept_tiers, "CAPPED": capped, "SLIDES": slides, "EARLY": early, "BFLOAT": bfloat,
        "row_t": integer[wide_rows], "length_t": integer[wide_lengths],
        "range_t": {2: "u16", 4: "int"}[fmt.position_bytes],
    }))  # fmt: skip


def pointer(tensor: torch.Tensor) -> int:
    """Address of a contiguous tensor's data."""
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def table_pointers(state: PageState) -> dict[str, int]:
    """Addresses of what the page table consists of, by the names of :class:`Arguments`."""
    names = ("pages", "page_table", "range_lo", "range_hi", "row_blocks", "entries", "own_entry")
    return {name: pointer(getattr(state, name)) for name in names}


def prepare_split(
    state: PageState, q: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, sm_scale: float,
    workspace: Any, constants: dict[str, Any],
    *, logit_cap: float, attention_span: int, every: int, scored: bool, score_low: bool, early: bool,
) -> Callable[..., None]:  # fmt: skip
    """What starts the pass for a ``layer`` and its ``q``, of the form of this one. Arguments as of
    :func:`~sglang_diffkv.kernels.decode_attention.triton.decode_attention`, which has checked them; ``workspace`` is a
    ``DecodeWorkspace``, ``constants`` are of ``tile_constants``."""
    fmt, config = state.fmt, workspace.config
    group = q.shape[1] // state.num_heads
    assert (why := unsupported(fmt, group)) is None, why
    assert state.range_lo.dtype == state.range_hi.dtype == range_dtype(fmt)
    assert state.pages.data_ptr() % 16 == 0 and fmt.page_bytes % 16 == 0
    tiers = len(fmt.tiers)
    source = split_source(
        fmt, group, state.num_layers, state.num_heads, state.row_blocks.shape[1], workspace.offsets.shape[2],
        workspace.programs, constants["TURN"], constants["WEIGHTS"], constants["TILES"], config.copies,
        resident_of(fmt, config.copies, config.resident, shared_memory_of(state.device)),
        (tiers if score_low else 1) if scored else 0, logit_cap > 0, attention_span > 0, early, rows.dtype ==
        torch.int64, seq_lens.dtype == torch.int64, q.dtype == torch.bfloat16,
    )  # fmt: skip
    arguments = Arguments(
        rows=pointer(rows), seq_lens=pointer(seq_lens), **table_pointers(state),
        **{name: pointer(getattr(workspace, name)) for name in (
            "partial_out", "partial_lse", "logits", "tile_max", "offsets", "begun", "ranges",
        )},
        batch=rows.shape[0], room=workspace.room, attention_span=attention_span, every=every,
        sm_scale=sm_scale, logit_cap=logit_cap,
    )  # fmt: skip
    launch = load(source, not q.is_cuda).prepare(workspace.programs, shared_bytes(fmt, config.copies), early)

    def start(q: torch.Tensor, layer: int) -> None:
        arguments.q, arguments.layer = pointer(q), layer
        assert arguments.q % 16 == 0
        launch(arguments)

    return start
