"""First pass of decode attention: each program attends to a range of the layer's work (``triton_ranges``).

Shapes: ``B`` requests, ``H`` KV heads, ``G`` query heads of a KV head (``GP`` padded for the tensor core),
``N`` tokens of a tile. A tile is a run of slots of one page, so that everything about the page is a
scalar and no token divides by the (odd) number of tokens of a page. Tokens are the long side of both
products (``K q^T`` and ``V^T p^T``), so a group of up to 8 query heads fills the tensor core's narrow side.
"""

import triton
import triton.language as tl

from sglang_diffkv.kernels.decode_attention.triton_ranges import range_tiles
from sglang_diffkv.kernels.decode_attention.triton_tiles import (
    LOG2E,
    NEVER,
    head_tiles,
    kept_slots,
    kept_tiles,
    observes,
    tile_page,
)
from sglang_diffkv.kernels.quantize.triton import chunks_of
from sglang_diffkv.kernels.triton_codec import (
    MAGIC,
    load_words,
    meta_pair,
    operand_shift,
    operand_weight,
    parts_of,
    power_scale,
    query_operand,
    shifted_codes,
    weight_exponent,
    whole_plane,
)
from sglang_diffkv.kernels.triton_table import (
    I_KB,
    I_KEYS,
    I_KMETA,
    I_POSITIONS,
    I_TOKENS,
    I_VALUES,
    I_VB,
    I_VMETA,
    ceil_div,
    dot_padded,
    layout_of,
    load_positions_ahead,
    padded,
)


@triton.jit
def eighths(x):
    """[N, GP] to [8, GP]: sums of every eighth row, which the accumulator layout keeps in one thread."""
    return tl.sum(tl.reshape(x, [x.shape[0] // 8, 8, x.shape[1]]), 0)


@triton.jit
def top_eighths(x):
    """[N, GP] to [8, GP]: the largest of every eighth row, likewise."""
    return tl.max(tl.reshape(x, [x.shape[0] // 8, 8, x.shape[1]]), 0)


@triton.jit
def attend_tier(
    q_ptr, sm_scale, logit_cap,
    pages, page_table, range_lo, range_hi, row_blocks, row, layer, head, count, first, last,
    logits_ptr, tile_max_ptr, shared, room, out_ptr, lse_ptr, oldest,
    TIER: tl.constexpr, LAYOUT: tl.constexpr, N: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HAS_CAP: tl.constexpr, KEEP: tl.constexpr, ASM: tl.constexpr, AHEAD: tl.constexpr, SLIDES: tl.constexpr,
):  # fmt: skip
    """Attention over tiles [first, last) of one tier; writes the normalised output and its base-2 lse.

    ``q_ptr`` points at the group's [G, D], which a power of two brings into fp16.
    The softmax is relative to a running maximum of logits and value scales together. So the largest weight, a
    probability times its value scale, is about 2^15, and small ones stay in fp16's normal range. ``KEEP`` stores each
    token's logits for the score pass, relative to that maximum at its tile. They stay in the L2 cache if they can.
    There is room for ``room`` tiles; the first ``shared`` tiles are not scored, so their logits are not stored. The
    pages of ``AHEAD`` tiles are looked up at once, so that no tile waits for its address. With ``SLIDES`` positions
    below ``oldest`` are out of its span.
    """
    KB: tl.constexpr = LAYOUT[I_KB]
    VB: tl.constexpr = LAYOUT[I_VB]
    TOKENS: tl.constexpr = LAYOUT[I_TOKENS]
    RAW: tl.constexpr = KB == 16
    BYTES: tl.constexpr = 1 if RAW else 2  # codes of a plane that a word holds
    KPARTS: tl.constexpr = parts_of(KB)
    VPARTS: tl.constexpr = parts_of(VB)
    LAST_V: tl.constexpr = whole_plane(VB)
    KW: tl.constexpr = D // KPARTS  # words of a chunk of a vector
    VW: tl.constexpr = DV // VPARTS
    KWP: tl.constexpr = dot_padded(KW)
    VWP: tl.constexpr = dot_padded(VW)
    CHUNKS: tl.constexpr = ceil_div(TOKENS, N)
    raw_type: tl.constexpr = q_ptr.dtype.element_ty
    dot_type: tl.constexpr = raw_type if ASM or raw_type == tl.float16 else tl.float32  # not bf16 when interpreted
    word_ptr = pages.to(tl.pointer_type(raw_type if RAW else tl.int16))

    g = tl.arange(0, GP)
    d = tl.arange(0, padded(D))
    whole = (g[:, None] < G) & (d[None, :] < D)
    largest = tl.max(tl.max(tl.abs(tl.load(q_ptr + g[:, None] * D + d[None, :], mask=whole, other=0.0)), 1), 0)
    qscale = power_scale(largest)
    kcol = tl.arange(0, KWP)
    vcol = tl.arange(0, VWP)
    q_parts = ()
    offset = tl.zeros([GP], tl.float32)
    total = tl.zeros([GP], tl.float32)
    for part in tl.static_range(KPARTS):
        inside = (kcol[:, None] < KW) & (g[None, :] < G)
        if RAW:
            x = tl.load(q_ptr + g[None, :] * D + kcol[:, None], mask=inside, other=0.0).to(dot_type)
        else:
            x = query_operand(q_ptr + g[None, :] * D, kcol[:, None], inside, qscale, part, KB, KW)  # [KWP, GP]
            column_sum = tl.sum(x.to(tl.float32), 0)
            offset += column_sum * MAGIC
            total += column_sum * operand_weight(KB, part)
        q_parts = q_parts + (x,)
    factor = sm_scale * LOG2E if RAW else sm_scale * LOG2E / qscale

    m = tl.full([GP], NEVER, tl.float32)
    l_part = tl.zeros([8, GP], tl.float32)
    z_part = tl.zeros([8, GP], tl.float32)
    accs = ()
    for _ in tl.static_range(VPARTS):
        accs = accs + (tl.zeros([VWP, GP], tl.float32),)

    ahead = tl.arange(0, AHEAD)
    for some in range(first, last, AHEAD):
        pages_of, lo_of, hi_of = tile_page(
            some + ahead, count, row_blocks, page_table, range_lo, range_hi, row, layer, head,
            TIER, CHUNKS, MAX_BLOCKS, L, H,
        )  # fmt: skip
        if SLIDES:
            lo_of = tl.maximum(lo_of, oldest)
        for tile in range(some, tl.minimum(some + AHEAD, last)):
            here = ahead == tile - some
            page = tl.sum(tl.where(here, pages_of, 0), 0)
            lo, hi = tl.sum(tl.where(here, lo_of, 0), 0), tl.sum(tl.where(here, hi_of, 0), 0)
            slot = (tile % CHUNKS) * N + tl.arange(0, N)
            live = slot < TOKENS
            page_at = page.to(tl.int64) * PAGE_BYTES
            numbers = (pages + page_at).to(tl.pointer_type(tl.int32))
            words = word_ptr + page_at // 2
            position = load_positions_ahead(pages + page_at, LAYOUT[I_POSITIONS], slot, live, TOKENS)
            kptr = words + LAYOUT[I_KEYS] // 2 + slot[:, None] * (KW * chunks_of(KB)) + kcol[None, :]
            vptr = words + LAYOUT[I_VALUES] // 2 + slot[None, :] * (VW * chunks_of(VB)) + vcol[:, None]
            kmask = live[:, None] if KWP == KW else live[:, None] & (kcol[None, :] < KW)
            vmask = live[None, :] if VWP == VW else live[None, :] & (vcol[:, None] < VW)
            k = load_words(kptr, kmask, KW, KB)
            v = load_words(vptr, vmask, VW, VB)  # [VWP, N] each
            valid = (position >= lo) & (position < hi)
            if RAW:
                s = tl.dot(k[0].to(dot_type), q_parts[0]) * factor
            else:
                kscale, kzero = meta_pair(tl.load(numbers + LAYOUT[I_KMETA] // 4 + slot, mask=live, other=0))
                vword = tl.load(numbers + LAYOUT[I_VMETA] // 4 + slot, mask=live, other=0)
                vscale, vzero = meta_pair(tl.where(valid, vword, 0))
                s = tl.broadcast_to(-offset[None, :], [N, GP])
                for part in tl.static_range(KPARTS):
                    s = tl.dot(shifted_codes(k, KB, part // BYTES, part % BYTES, ASM), q_parts[part], s)
                s = s * (kscale * factor)[:, None] + total[None, :] * (kzero * factor)[:, None]
            if HAS_CAP:
                cap = logit_cap * LOG2E
                s = cap * (2.0 / (1.0 + tl.exp2(s * (-2.0 / logit_cap))) - 1.0)
            s = tl.where(valid[:, None], s, float("-inf"))
            top = top_eighths(s)
            if not RAW:
                top += weight_exponent(top_eighths(tl.broadcast_to(vscale[:, None], [N, GP])))
            elif dot_type == tl.float16:
                top += weight_exponent(tl.full([8, GP], 1.0, tl.float32))
            m_new = tl.maximum(m, tl.max(top, 0))
            s -= m_new[None, :]
            prob = tl.exp2(s)
            alpha = tl.exp2(m - m_new)
            m = m_new
            l_part = l_part * alpha[None, :] + eighths(prob)
            if RAW:
                weight = prob.to(dot_type)
                raw_v = tl.where(valid[None, :], v[0].to(dot_type), tl.zeros([VWP, N], dot_type))
            else:
                z_part = z_part * alpha[None, :] + eighths(prob * vzero[:, None])
                weight = (prob * vscale[:, None]).to(tl.float16)
                excess = tl.dot(tl.full([VWP, N], -MAGIC, tl.float16), weight)  # [VWP, GP], equal rows
            updated = ()
            for part in tl.static_range(VPARTS):
                if RAW:
                    updated = updated + (tl.dot(raw_v, weight, accs[part] * alpha[None, :]),)
                else:
                    codes = shifted_codes(v, VB, part // BYTES, part % BYTES, ASM)
                    updated = updated + (tl.dot(codes, weight, accs[part] * alpha[None, :] + excess),)
            accs = updated
            if KEEP:
                kept = tile - shared
                token = kept * N + tl.arange(0, N)
                fits = (g < G) & (kept >= 0) & (kept < room)
                logit_ptr = logits_ptr + token[:, None] * G + g[None, :]
                tl.store(logit_ptr, s.to(tl.float16), mask=fits[None, :], eviction_policy="evict_last")
                tl.store(tile_max_ptr + kept * G + g, m, mask=fits, eviction_policy="evict_last")

    norm = tl.sum(l_part, 0)
    z = tl.sum(z_part, 0)
    inverse = tl.where(norm > 0, 1.0 / norm, 0.0)
    tl.store(lse_ptr + g, m + tl.log2(norm), mask=g < G)
    for part in tl.static_range(VPARTS):
        o = accs[part]
        if part // BYTES == LAST_V:
            for plane in tl.static_range(LAST_V):
                o -= accs[plane * BYTES + part % BYTES]
        o = (o * (1.0 / (1 << operand_shift(VB, part // BYTES))) + z[None, :]) * inverse[None, :]
        at = vcol * BYTES + part // BYTES * (VW * BYTES) + part % BYTES
        inside = (vcol[:, None] < VW) & (g[None, :] < G)
        tl.store(out_ptr + g[None, :] * DV + at[:, None], o, mask=inside)


@triton.jit(do_not_specialize=["layer", "attention_span", "every"], do_not_specialize_on_alignment=["rows", "seq_lens"])
def split_kernel(
    q, partial_out, partial_lse, logits, tile_max, offsets, begun, ranges, pages, page_table, range_lo, range_hi,
    row_blocks, entries, own_entry, rows, layer, sm_scale, logit_cap, room, seq_lens, attention_span, every,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, TILES: tl.constexpr, WEIGHTS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr,
    HAS_CAP: tl.constexpr, KEEP: tl.constexpr, KEEP_LOW: tl.constexpr, ASM: tl.constexpr, ROOM_FOR: tl.constexpr,
    TURN: tl.constexpr, PROGRAMS: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr, SLIDES: tl.constexpr,
):  # fmt: skip
    """Grid (programs): a range of the layer's work each, of those that have one. With ``SLIDES`` the newest
    ``attention_span`` tokens are seen; all others are kernels without a word of it. Logits are kept of each
    ``every``-th step of a request, in which its newest token observes the others.
    ``EARLY``: the launch may begin while the one before it ends, for which all programs wait; then so may the second
    pass, which thus finds all but this pass's results in memory."""
    if EARLY:  # in this order: the second pass, once begun, reads what was written before this one
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    at_program = begun + (layer * PROGRAMS + program) * 4
    unit, start, row = tl.load(at_program), tl.load(at_program + 1), tl.load(at_program + 2).to(tl.int64)
    each, end = tl.load(ranges + layer * 2), tl.load(ranges + layer * 2 + 1)
    begin = program * each
    if begin >= end:
        return
    stop = tl.minimum(begin + each, end)
    while start < stop:
        bh = unit // TIERS
        b, head = bh // H, bh % H
        at_head = ((row * L + layer) * H + head) * TIERS
        held, tiles = head_tiles(entries + at_head, LAYOUTS, TILES, TIERS)
        _, shared = head_tiles(own_entry + at_head, LAYOUTS, TILES, TIERS)
        kept = ()
        for tier in tl.static_range(TIERS):
            kept = kept + (tiles[tier] - shared[tier],)
        kept_from = kept_slots(offsets, b, layer, head, room, H, ROOM_FOR)
        tokens_before, tiles_before, rooms = kept_tiles(kept, room - kept_from, TILES, TIERS)
        q_ptr = q + bh.to(tl.int64) * G * D
        slot = (program + unit).to(tl.int64)
        oldest = 0
        if SLIDES:
            oldest = tl.load(seq_lens + b).to(tl.int32) - attention_span
        keeps = 1
        if KEEP:
            keeps = observes(tl.load(seq_lens + b).to(tl.int32) - 1, every).to(tl.int32)
        logits_ptr = logits + (head.to(tl.int64) * room + kept_from) * G
        tile_max_ptr = tile_max + (head.to(tl.int64) * room + kept_from) // 16 * G

        for tier in tl.static_range(TIERS):
            if unit % TIERS == tier:
                first, last, start = range_tiles(begin, stop, start, tiles[tier], WEIGHTS[tier], TURN)
                if first < last:
                    attend_tier(
                        q_ptr, sm_scale, logit_cap, pages, page_table, range_lo, range_hi, row_blocks, row,
                        layer, head, held[tier], first, last, logits_ptr + tokens_before[tier] * G,
                        tile_max_ptr + tiles_before[tier] * G, shared[tier], rooms[tier] * keeps,
                        partial_out + slot * G * DV, partial_lse + slot * G, oldest, tier, layout_of(LAYOUTS, tier),
                        TILES[tier], PAGE_BYTES, MAX_BLOCKS, L, H, G, GP, D, DV, HAS_CAP,
                        KEEP if tier == 0 else KEEP_LOW, ASM, AHEAD, SLIDES,
                    )  # fmt: skip
        unit += 1
        if unit % TIERS == 0 and start < stop:
            row = tl.load(rows + unit // (TIERS * H)).to(tl.int64)
