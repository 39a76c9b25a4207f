"""Scores by a row's newest queries on the GPU: one pass over its keys for the softmax's sums, one for the scores."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.triton_table import INTERPRETED, dot_padded, layout_constants, padded
from sglang_diffkv.kernels.triton_tokens import dequantized, held_page
from sglang_diffkv.layout.state import PageState

PROGRAMS = 4
"""Programs that share a head's pages."""
MOST_VECTORS = 128
"""Query vectors of a program."""
DOT_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1e30)


@triton.jit
def query_tile(
    queries, seq_len, first, layer, head, W: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    WC: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """``WC`` queries from number ``first`` on, of the query heads of a KV head: vectors [WC * GP, dot_padded(D)], and
    their positions, -1 for those that are none."""
    vector = tl.arange(0, WC * GP)
    number, member = first + vector // GP, vector % GP
    live = (number < W) & (member < G)
    position = seq_len - W + number
    d = tl.arange(0, dot_padded(D))[None, :]
    at = ((layer * W + position % W).to(tl.int64) * (H * G) + head * G + member)[:, None] * D + d
    q = tl.load(queries + at, mask=live[:, None] & (d < D), other=0.0)
    return q, tl.where(live, position, -1)


@triton.jit
def page_logits(q, asked, key, position, held, sm_scale, logit_cap, HAS_CAP: tl.constexpr, DOT: tl.constexpr):
    """Logits in base 2, [vectors, tokens]; -inf for what a query does not see."""
    s = tl.dot(q.to(DOT), tl.trans(key.to(DOT))) * sm_scale
    if HAS_CAP:
        s = logit_cap * (2.0 / (1.0 + tl.exp2(s * (-2.0 * LOG2E / logit_cap))) - 1.0)
    seen = held[None, :] & (position[None, :] <= asked[:, None])
    return tl.where(seen, s * LOG2E, float("-inf"))


@triton.jit(do_not_specialize=["row", "seq_len", "first", "part"], do_not_specialize_on_alignment=["entries"])
def sums_kernel(
    queries, row, seq_len, first, part, tops, sums, sm_scale, logit_cap, pages, page_table, range_lo, range_hi,
    row_blocks, entries,
    TIER: tl.constexpr, TIERS: tl.constexpr, TOKENS: tl.constexpr, KB: tl.constexpr, KEYS: tl.constexpr,
    KMETA: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    WC: tl.constexpr, GP: tl.constexpr, HAS_CAP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Grid (layers * H, programs): largest logit and sum of exponentials of the pages of one tier, round robin; parts
    ``part`` and on of tops and sums [parts, L * H, vectors]."""
    flat = tl.program_id(0)
    layer, head = flat // H, flat % H
    raw = tl.pointer_type(queries.dtype.element_ty)
    q, asked = query_tile(queries, seq_len, first, layer, head, W, H, G, D, WC, GP)
    top = tl.full([WC * GP], NEVER, tl.float32)
    norm = tl.zeros([WC * GP], tl.float32)
    count = tl.load(entries + ((row.to(tl.int64) * L + layer) * H + head) * TIERS + TIER)
    for entry in range(tl.program_id(1), count, tl.num_programs(1)):
        page, _, position, held = held_page(
            entry, row, 0, seq_len, layer, head, tops, 0, pages, page_table, range_lo, range_hi, row_blocks,
            TIER, TOKENS, SCORES, POSITIONS, PAGE_BYTES, MAX_BLOCKS, L, H,
        )  # fmt: skip
        slot = tl.arange(0, padded(TOKENS))
        key = dequantized(page, slot, held, raw, D, KB, KEYS, KMETA)
        s = page_logits(q, asked, key, position, held, sm_scale, logit_cap, HAS_CAP, DOT)
        new = tl.maximum(top, tl.max(s, 1))
        norm = norm * tl.exp2(top - new) + tl.sum(tl.exp2(s - new[:, None]), 1)
        top = new
    at = ((part + tl.program_id(1)).to(tl.int64) * (L * H) + flat) * (WC * GP) + tl.arange(0, WC * GP)
    tl.store(tops + at, top)
    tl.store(sums + at, norm)


@triton.jit(do_not_specialize=["row", "seq_len", "first", "values_len"], do_not_specialize_on_alignment=["entries"])
def scores_kernel(
    queries, row, seq_len, first, tops, sums, values, values_len, sm_scale, logit_cap, pages, page_table, range_lo,
    range_hi, row_blocks, entries,
    TIER: tl.constexpr, TIERS: tl.constexpr, TOKENS: tl.constexpr, KB: tl.constexpr, KEYS: tl.constexpr,
    KMETA: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    WC: tl.constexpr, GP: tl.constexpr, HAS_CAP: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
    MORE: tl.constexpr,
):  # fmt: skip
    """Grid (layers * H, programs). ``MORE``: add to what the queries before ``first`` gave."""
    flat = tl.program_id(0)
    layer, head = flat // H, flat % H
    raw = tl.pointer_type(queries.dtype.element_ty)
    values += flat.to(tl.int64) * values_len
    q, asked = query_tile(queries, seq_len, first, layer, head, W, H, G, D, WC, GP)
    vector = tl.arange(0, WC * GP)
    top = tl.full([WC * GP], NEVER, tl.float32)
    norm = tl.zeros([WC * GP], tl.float32)
    for part in range(PARTS):
        at = (part * (L * H) + flat).to(tl.int64) * (WC * GP) + vector
        other = tl.load(tops + at)
        new = tl.maximum(top, other)
        norm = norm * tl.exp2(top - new) + tl.load(sums + at) * tl.exp2(other - new)
        top = new
    inverse = tl.where(norm > 0, 1.0 / norm, 0.0)
    count = tl.load(entries + ((row.to(tl.int64) * L + layer) * H + head) * TIERS + TIER)
    for entry in range(tl.program_id(1), count, tl.num_programs(1)):
        page, _, position, held = held_page(
            entry, row, 0, seq_len, layer, head, tops, 0, pages, page_table, range_lo, range_hi, row_blocks,
            TIER, TOKENS, SCORES, POSITIONS, PAGE_BYTES, MAX_BLOCKS, L, H,
        )  # fmt: skip
        slot = tl.arange(0, padded(TOKENS))
        key = dequantized(page, slot, held, raw, D, KB, KEYS, KMETA)
        s = page_logits(q, asked, key, position, held, sm_scale, logit_cap, HAS_CAP, DOT)
        prob = tl.exp2(s - top[:, None]) * inverse[:, None]
        best = tl.max(tl.reshape(prob, [WC, GP, padded(TOKENS)]), 1)
        score = tl.sum(best, 0) / W
        if MORE:
            score += tl.load(values + position, mask=held, other=0.0)
        tl.store(values + position, score, mask=held)


def window_scores(
    state: PageState,
    row: int,
    seq_len: int,
    queries: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    logit_cap: float = 0.0,
) -> None:
    """``reference.window_scores``; queries contiguous, in the state's dtype."""
    layers, window, q_heads, dim = queries.shape
    heads, fmt = state.num_heads, state.fmt
    assert layers == state.num_layers and q_heads % heads == 0 and dim == fmt.head_dim
    assert queries.is_contiguous() and queries.dtype == state.dtype
    assert values.shape[:2] == (layers, heads) and values.shape[2] >= seq_len >= window
    assert values.dtype == torch.float32 and values.is_contiguous()
    values.fill_(float("nan"))
    group = q_heads // heads
    members = padded(group)
    together = min(padded(window), max(MOST_VECTORS // members, 1), MOST_VECTORS)
    together = max(together, -(-16 // members))
    parts = PROGRAMS * len(fmt.tiers)
    tops = torch.empty(parts, state.row_layers * heads, together * members, device=values.device)
    sums = torch.empty_like(tops)
    dot = tl.float32 if INTERPRETED else DOT_TYPES[state.dtype]
    rest = (state.pages, state.page_table, state.range_lo, state.range_hi, state.row_blocks, state.entries)
    for first in range(0, window, together):
        for kernel in (sums_kernel, scores_kernel):
            for tier, layout in enumerate(fmt.layouts):
                every = layout_constants(layout)
                names = ("TOKENS", "KB", "KEYS", "KMETA", "SCORES", "POSITIONS")
                constants = {
                    "TIER": tier, "TIERS": len(fmt.tiers), **{name: every[name] for name in names},
                    "PAGE_BYTES": fmt.page_bytes, "MAX_BLOCKS": state.row_blocks.shape[1], "L": state.row_layers,
                    "H": heads, "G": group, "D": dim, "W": window, "WC": together, "GP": members,
                    "HAS_CAP": bool(logit_cap), "DOT": dot,
                }  # fmt: skip
                given: tuple[Any, ...] = (tier * PROGRAMS, tops, sums)
                if kernel is scores_kernel:
                    given = (tops, sums, values, values.shape[2])
                    constants.update(PARTS=parts, MORE=first > 0)
                given = (queries, row, seq_len, first, *given, scale, logit_cap)
                kernel[(layers * heads, PROGRAMS)](*given, *rest, **constants, num_warps=4)
