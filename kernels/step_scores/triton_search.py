"""A launch for all layers: a token's score takes in one query more, and the policy's searches go by the scores."""

import triton
import triton.language as tl

from sglang_diffkv.kernels.decode_attention.triton_finish import (
    NOTHING,
    packed_score,
    rescored,
    store_found,
    window_of,
)
from sglang_diffkv.kernels.decode_attention.triton_tiles import LOG2E, observes, tile_page
from sglang_diffkv.kernels.extend_attention.triton_scores import capped
from sglang_diffkv.kernels.quantize.triton import chunks_of
from sglang_diffkv.kernels.triton_codec import load_words, meta_pair, parts_of, plane_codes
from sglang_diffkv.kernels.triton_table import (
    I_KB,
    I_KEYS,
    I_KMETA,
    I_POSITIONS,
    I_SCORES,
    I_TOKENS,
    ceil_div,
    dot_padded,
    layout_of,
    load_positions,
)


@triton.jit
def query_parts(
    q_ptr, live, KB: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, dot_type: tl.constexpr
):  # fmt: skip
    """What multiplies the codes of each part of a word: a tuple of [padded words, GP]."""
    KPARTS: tl.constexpr = parts_of(KB)
    BYTES: tl.constexpr = 1 if KB == 16 else 2
    KW: tl.constexpr = D // KPARTS
    kcol = tl.arange(0, dot_padded(KW))
    g = tl.arange(0, GP)
    inside = (kcol[:, None] < KW) & live[None, :]
    parts = ()
    for part in tl.static_range(KPARTS):
        at = kcol * BYTES + part // BYTES * (KW * BYTES) + part % BYTES
        parts = parts + (tl.load(q_ptr + g[None, :] * D + at[:, None], mask=inside, other=0.0).to(dot_type),)
    return parts


@triton.jit
def attention_to(
    pages, page_at, slot, live, query, query_sums, norm, factor, logit_cap, raw_type: tl.constexpr,
    dot_type: tl.constexpr, LAYOUT: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, N: tl.constexpr,
    HAS_CAP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """[N, GP]: log2 of what the tokens in slots [N] of a page receive from the queries ``query``, of which
    ``query_sums`` [GP] are the sums and ``norm`` [GP] the log-sum-exp."""
    KB: tl.constexpr = LAYOUT[I_KB]
    RAW: tl.constexpr = KB == 16
    KPARTS: tl.constexpr = parts_of(KB)
    KW: tl.constexpr = D // KPARTS
    kcol = tl.arange(0, dot_padded(KW))
    words = pages.to(tl.pointer_type(raw_type if RAW else tl.int16)) + page_at // 2 + LAYOUT[I_KEYS] // 2
    mask = live[:, None] & (kcol[None, :] < KW)
    k = load_words(words + slot[:, None] * (KW * chunks_of(KB)) + kcol[None, :], mask, KW, KB)  # [N, padded words] each
    s = tl.zeros([N, GP], tl.float32)
    for part in tl.static_range(KPARTS):
        if RAW:
            keys = k[0].to(dot_type)
        else:
            keys = plane_codes(k, KB, part // 2, part % 2, ASM).to(dot_type)
        s = tl.dot(keys, query[part], s)
    if not RAW:
        meta = (pages + page_at + LAYOUT[I_KMETA]).to(tl.pointer_type(tl.int32)) + slot
        scale, zero = meta_pair(tl.load(meta, mask=live, other=0))
        s = s * scale[:, None] + zero[:, None] * query_sums[None, :]
    return capped(s * factor, logit_cap, HAS_CAP) - norm[None, :]


@triton.jit
def search_tier(
    part, parts, q_ptr, norm, query_sums, newest, window, sinks, horizon, every, factor, logit_cap, pages, page_table,
    range_lo, range_hi, row_blocks, entries, own_entry, row, layer, head,
    TIER: tl.constexpr, LAYOUT: tl.constexpr, N: tl.constexpr, TIERS: tl.constexpr, SCORED: tl.constexpr,
    D: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, HAS_CAP: tl.constexpr, ASM: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """A program's share of a head's own tiles of one tier; the packed candidate and least significant token, int64."""
    TOKENS: tl.constexpr = LAYOUT[I_TOKENS]
    CHUNKS: tl.constexpr = ceil_div(TOKENS, N)
    raw_type: tl.constexpr = q_ptr.dtype.element_ty
    dot_type: tl.constexpr = raw_type if ASM else tl.float32
    at = ((row * L + layer) * H + head) * TIERS + TIER
    count = tl.load(entries + at)
    own_first = tl.load(own_entry + at)
    query = ()
    if SCORED:
        query = query_parts(q_ptr, tl.arange(0, GP) < G, LAYOUT[I_KB], D, GP, dot_type)
    observed = observes(newest, every)
    candidates = tl.full([N], NOTHING, tl.int64)
    leasts = tl.full([N], NOTHING, tl.int64)
    for tile in range(own_first * CHUNKS + part, count * CHUNKS, parts):
        page, lo, hi = tile_page(
            tile, count, row_blocks, page_table, range_lo, range_hi, row, layer, head, TIER, CHUNKS, MAX_BLOCKS, L, H
        )
        page_at = page.to(tl.int64) * PAGE_BYTES
        slot = (tile % CHUNKS) * N + tl.arange(0, N)
        live = slot < TOKENS
        position = load_positions(pages + page_at, LAYOUT[I_POSITIONS], slot, live)
        own = live & (position >= lo) & (position < hi)
        packed = ((tile // CHUNKS - own_first) * TOKENS + slot).to(tl.int64)
        if SCORED:
            score_ptr = (pages + page_at + LAYOUT[I_SCORES]).to(tl.pointer_type(tl.float32)) + slot
            old = tl.load(score_ptr, mask=own, other=0.0)
            power = attention_to(
                pages, page_at, slot, own & observed, query, query_sums, norm, factor, logit_cap, raw_type, dot_type,
                LAYOUT, D, GP, N, HAS_CAP, ASM,
            )  # fmt: skip
            received = tl.sum(tl.exp2(power), 1) / G if MEAN else tl.exp2(tl.max(power, 1))
            new = rescored(old, received, position, newest, horizon, every)
            tl.store(score_ptr, new, mask=own & observed)
            packed = packed_score(new, packed)
            outside = own & (position <= newest - window) & (position >= sinks)
            leasts = tl.minimum(leasts, tl.where(outside, packed, NOTHING))
        if TIER == 0:
            leaving = own & (position == newest - window) & (position >= sinks)
            candidates = tl.minimum(candidates, tl.where(leaving, packed, NOTHING))
    return tl.min(candidates, 0), tl.min(leasts, 0)


@triton.jit(
    do_not_specialize=["first", "tokens", "max_parts", "window", "sinks", "horizon", "every"],
    do_not_specialize_on_alignment=["chosen", "rows", "seq_lens"],
)
def search_kernel(
    first, q, lse, tokens, chosen, found, max_parts, pages, page_table, range_lo, range_hi, row_blocks, entries,
    own_entry, rows, seq_lens, num_valid, window, sinks, horizon, every, sm_scale, logit_cap, row_windows,
    LAYOUTS: tl.constexpr, TILES: tl.constexpr, TIERS: tl.constexpr, TIERS_SCORED: tl.constexpr, SCORED: tl.constexpr,
    D: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, HAS_CAP: tl.constexpr, ASM: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Grid (B * H, parts, layers): the programs of a head share its own tiles of the first ``TIERS_SCORED`` tiers round
    robin. ``first``: of the layers; ``tokens``: of ``q`` and ``lse`` of a layer; ``found`` has room for ``max_parts``.
    """
    bh, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, head = bh // H, bh % H
    layer = first + tl.program_id(2)
    found_ptr = found + ((b.to(tl.int64) * L + layer) * H + head) * (TIERS + 1) * max_parts
    if b >= tl.load(num_valid):
        for k in tl.static_range(TIERS + 1):
            store_found(found_ptr + k * max_parts, tl.full([], NOTHING, tl.int64), part, parts, max_parts)
        return
    GP: tl.constexpr = dot_padded(G)
    row = tl.load(rows + b).to(tl.int64)
    newest = tl.load(seq_lens + b).to(tl.int32) - 1
    window = window_of(row_windows, row, window)
    g = tl.arange(0, GP)
    norm = tl.zeros([GP], tl.float32)
    query_sums = tl.zeros([GP], tl.float32)
    q_ptr = q
    if SCORED:
        vector = ((tl.cast(tokens, tl.int64) * layer + tl.load(chosen + b)) * H + head) * G
        norm = tl.load(lse + vector + g, mask=g < G, other=float("inf"))
        q_ptr = q + vector * D
        d = tl.arange(0, dot_padded(D))
        inside = (d[:, None] < D) & (g[None, :] < G)
        query_sums = tl.sum(tl.load(q_ptr + g[None, :] * D + d[:, None], mask=inside, other=0.0).to(tl.float32), 0)
    for tier in tl.static_range(TIERS):
        least = tl.full([], NOTHING, tl.int64)
        if tier < TIERS_SCORED:
            candidate, least = search_tier(
                part, parts, q_ptr, norm, query_sums, newest, window, sinks, horizon, every, sm_scale * LOG2E,
                logit_cap, pages, page_table, range_lo, range_hi, row_blocks, entries, own_entry, row, layer, head,
                tier, layout_of(LAYOUTS, tier), TILES[tier], TIERS, SCORED, D, PAGE_BYTES, MAX_BLOCKS, L, H, G, GP,
                HAS_CAP, ASM, MEAN,
            )  # fmt: skip
            if tier == 0:
                store_found(found_ptr, candidate, part, parts, max_parts)
        store_found(found_ptr + (1 + tier) * max_parts, least, part, parts, max_parts)
