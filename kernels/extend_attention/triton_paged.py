"""Attention of new tokens over earlier tokens' pages, and over each other, with log-sum-exp for merging.

``M`` rows of a program are (query, query head of the group) pairs, flat, so any group size fills a tile.
"""

import triton
import triton.language as tl

from sglang_diffkv.kernels.decode_attention.triton_tiles import LOG2E, NEVER, tile_page
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
    ceil_div,
    dot_padded,
    earlier_entries,
    load_positions_ahead,
    padded,
    request_head_tile,
)


@triton.jit
def query_rows(start, head, first, count, M: tl.constexpr, HQ: tl.constexpr, G: tl.constexpr):
    """Rows first.. of a request's (query, head of the group) pairs: vector index [M] int64, query [M], mask."""
    r = first + tl.arange(0, M)
    query = r // G
    return (start + query).to(tl.int64) * HQ + head * G + r % G, query, query < count


@triton.jit
def thread_tops(x):
    """[M, N] to [M, 4]: the largest of columns 2 j and 2 j + 1 of every 8, which the layout of products keeps in one
    thread."""
    return tl.max(tl.max(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2]), 3), 1)


@triton.jit
def largest_of(q, vector, live, D: tl.constexpr):
    d = tl.arange(0, padded(D))
    inside = live[:, None] & (d[None, :] < D)
    x = tl.load(q + vector[:, None] * D + d[None, :], mask=inside, other=0.0)
    return tl.max(tl.max(tl.abs(x), 1), 0)


@triton.jit(
    do_not_specialize=["layer", "attention_span", "splits", "part"],
    do_not_specialize_on_alignment=["lse", "starts", "extend_lens", "prefix_lens", "rows", "before_lse"],
)
def paged_kernel(
    q, out, lse, before, before_lse, starts, extend_lens, prefix_lens, rows, pages, page_table, range_lo, range_hi,
    row_blocks, entries, own_entry, write_slot, layer, sm_scale, logit_cap, attention_span, splits, part,
    TIER: tl.constexpr, TIERS: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr,
    TOKENS: tl.constexpr, KEYS: tl.constexpr, KMETA: tl.constexpr, VALUES: tl.constexpr, VMETA: tl.constexpr,
    SCORES: tl.constexpr, POSITIONS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HAS_CAP: tl.constexpr, ASM: tl.constexpr,
    SLIDES: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(longest extend * G / M), H, B); one tier. Writes out [tokens, Hq, DV], lse [tokens, Hq] base 2. With
    ``SLIDES`` a query sees the newest ``attention_span`` tokens, its own included. ``STORED``: new tokens are in the
    pages, and what is written is joined with ``before`` and ``before_lse``, the attention to others, which may be out
    and lse. If not, the grid is (.., H * splits, B): so many programs share a head's pages, and each writes a part of
    out [splits, tokens, Hq, DV] and lse, whose parts are ``part`` vectors long."""
    b = tl.program_id(2)
    head = tl.program_id(1)
    split = 0
    if not STORED:
        split = head // H
        head = head % H
    first = tl.program_id(0) * M
    extend = tl.load(extend_lens + b).to(tl.int32)
    if first >= extend * G:
        return
    RAW: tl.constexpr = KB == 16
    KPARTS: tl.constexpr = parts_of(KB)
    VPARTS: tl.constexpr = parts_of(VB)
    KW: tl.constexpr = D // KPARTS
    VW: tl.constexpr = DV // VPARTS
    KWP: tl.constexpr = dot_padded(KW)
    VWP: tl.constexpr = dot_padded(VW)
    BYTES: tl.constexpr = 1 if RAW else 2
    LAST_V: tl.constexpr = whole_plane(VB)
    CHUNKS: tl.constexpr = ceil_div(TOKENS, N)
    raw_type: tl.constexpr = q.dtype.element_ty
    dot_type: tl.constexpr = raw_type if ASM or raw_type == tl.float16 else tl.float32
    vector, query, live_row = query_rows(tl.load(starts + b), head, first, extend, M, H * G, G)
    prefix = tl.load(prefix_lens + b).to(tl.int32)
    row = tl.load(rows + b).to(tl.int64)
    head_at = (row * L + layer) * H + head
    if STORED:
        count = earlier_entries(entries, own_entry, write_slot, head_at, extend, TIER, TIERS, TOKENS)
    else:
        count = tl.load(entries + head_at * TIERS + TIER)
    count = tl.where(prefix > 0, count, 0)

    kcol = tl.arange(0, KWP)
    vcol = tl.arange(0, VWP)
    qscale = power_scale(largest_of(q, vector, live_row, D))
    q_parts = ()
    offset = tl.zeros([M], tl.float32)
    total = tl.zeros([M], tl.float32)
    for plane in tl.static_range(KPARTS):
        inside = live_row[:, None] & (kcol[None, :] < KW)
        if RAW:
            x = tl.load(q + vector[:, None] * D + kcol[None, :], mask=inside, other=0.0).to(dot_type)
        else:
            x = query_operand(q + vector[:, None] * D, kcol[None, :], inside, qscale, plane, KB, KW)  # [M, KWP]
            row_sum = tl.sum(x.to(tl.float32), 1)
            offset += row_sum * MAGIC
            total += row_sum * operand_weight(KB, plane)
        q_parts = q_parts + (x,)
    factor = sm_scale * LOG2E if RAW else sm_scale * LOG2E / qscale

    m = tl.full([M], NEVER, tl.float32)
    norm = tl.zeros([M], tl.float32)
    z = tl.zeros([M], tl.float32)
    accs = ()
    for _ in tl.static_range(VPARTS):
        accs = accs + (tl.zeros([M, VWP], tl.float32),)
    begin = 0
    end = count * CHUNKS
    if not STORED:
        share = (end + splits - 1) // splits
        begin = split * share
        end = tl.minimum(begin + share, end)
        lse += split.to(tl.int64) * part
        out += split.to(tl.int64) * part * DV
    page, lo, hi = tile_page(
        begin, count, row_blocks, page_table, range_lo, range_hi, row, layer, head, TIER, CHUNKS, MAX_BLOCKS, L, H
    )
    for tile in range(begin, end):
        slot = (tile % CHUNKS) * N + tl.arange(0, N)
        live = slot < TOKENS
        page_at = page.to(tl.int64) * PAGE_BYTES
        numbers = (pages + page_at).to(tl.pointer_type(tl.int32)) + slot
        words = pages.to(tl.pointer_type(raw_type if RAW else tl.int16)) + page_at // 2
        position = load_positions_ahead(pages + page_at, POSITIONS, slot, live, TOKENS)
        kmask = live[None, :] & (kcol[:, None] < KW)
        k = load_words(words + KEYS // 2 + slot[None, :] * (KW * chunks_of(KB)) + kcol[:, None], kmask, KW, KB)
        vmask = live[:, None] & (vcol[None, :] < VW)
        v = load_words(words + VALUES // 2 + slot[:, None] * (VW * chunks_of(VB)) + vcol[None, :], vmask, VW, VB)
        valid = (position >= lo) & (position < tl.minimum(hi, prefix))
        if RAW:
            s = tl.dot(q_parts[0], k[0].to(dot_type)) * factor
        else:
            kscale, kzero = meta_pair(tl.load(numbers + KMETA // 4, mask=live, other=0))
            vword = tl.load(numbers + VMETA // 4, mask=live, other=0)
            vscale, vzero = meta_pair(tl.where(valid, vword, 0))
            s = tl.broadcast_to(-offset[:, None], [M, N])
            for plane in tl.static_range(KPARTS):
                s = tl.dot(q_parts[plane], shifted_codes(k, KB, plane // BYTES, plane % BYTES, ASM), s)
            s = s * (kscale * factor)[None, :] + total[:, None] * (kzero * factor)[None, :]
        if HAS_CAP:
            s = (logit_cap * LOG2E) * (2.0 / (1.0 + tl.exp2(s * (-2.0 / logit_cap))) - 1.0)
        seen = valid[None, :]
        if SLIDES:
            seen = seen & (position[None, :] > (prefix + query - attention_span)[:, None])
        s = tl.where(seen, s, float("-inf"))
        top = thread_tops(s)
        if not RAW:
            top += weight_exponent(thread_tops(tl.broadcast_to(vscale[None, :], [M, N])))
        elif dot_type == tl.float16:
            top += weight_exponent(tl.full([M, 4], 1.0, tl.float32))
        m_new = tl.maximum(m, tl.max(top, 1))
        prob = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        m = m_new
        norm = norm * alpha + tl.sum(prob, 1)
        if RAW:
            weight = prob.to(dot_type)
            excess = tl.zeros([M], tl.float32)
            raw_v = tl.where(valid[:, None], v[0].to(dot_type), tl.zeros([N, VWP], dot_type))
        else:
            z = z * alpha + tl.sum(prob * vzero[None, :], 1)
            weight = (prob * vscale[None, :]).to(tl.float16)
            excess = tl.sum(weight.to(tl.float32), 1) * MAGIC
        updated = ()
        for plane in tl.static_range(VPARTS):
            codes = raw_v if RAW else shifted_codes(v, VB, plane // BYTES, plane % BYTES, ASM)
            updated = updated + (tl.dot(weight, codes, accs[plane] * alpha[:, None] - excess[:, None]),)
        accs = updated
        page, lo, hi = tile_page(
            tile + 1, count, row_blocks, page_table, range_lo, range_hi, row, layer, head,
            TIER, CHUNKS, MAX_BLOCKS, L, H,
        )  # fmt: skip

    inverse = tl.where(norm > 0, 1.0 / norm, 0.0)
    if STORED:
        others = tl.load(before_lse + vector, mask=live_row, other=0.0)  # finite: a token sees itself
        mine = m + tl.log2(norm)
        highest = tl.maximum(others, mine)
        of_others = tl.exp2(others - highest)
        of_mine = tl.exp2(mine - highest)
        both = 1.0 / (of_others + of_mine)
        of_others *= both
        inverse *= of_mine * both
        tl.store(lse + vector, highest - tl.log2(both), mask=live_row)
    else:
        tl.store(lse + vector, m + tl.log2(norm), mask=live_row)
    for plane in tl.static_range(VPARTS):
        o = accs[plane]
        if plane // BYTES == LAST_V:
            for lower in tl.static_range(LAST_V):
                o -= accs[lower * BYTES + plane % BYTES]
        o = (o * (1.0 / (1 << operand_shift(VB, plane // BYTES))) + z[:, None]) * inverse[:, None]
        at = vcol * BYTES + plane // BYTES * (VW * BYTES) + plane % BYTES
        inside = live_row[:, None] & (vcol[None, :] < VW)
        where = vector[:, None] * DV + at[None, :]
        if STORED:
            o += tl.load(before + where, mask=inside, other=0.0).to(tl.float32) * of_others[:, None]
        tl.store(out + where, o.to(out.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["batch", "attention_span"],
    do_not_specialize_on_alignment=["starts", "extend_lens", "ancestors"],
)
def ragged_kernel(
    q, key, value, key_stride, key_head, value_stride, value_head, out, lse, starts, extend_lens, batch, sm_scale,
    logit_cap, attention_span, ancestors,
    D: tl.constexpr, DV: tl.constexpr, H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    HAS_CAP: tl.constexpr, ASM: tl.constexpr, SLIDES: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Grid (B * H * ceil(longest extend * G / M)): causal attention among new tokens, with ``SLIDES`` the newest
    ``attention_span`` of them. With ``TREE`` a query sees the tokens of its bits in ``ancestors`` [tokens] int64, its
    own among them and none behind it; else that is None. Strides are in elements."""
    b, head, tile, tiles = request_head_tile(batch, H)
    first = (tiles - 1 - tile) * M  # the longest first
    extend = tl.load(extend_lens + b).to(tl.int32)
    if first >= extend * G:
        return
    raw_type: tl.constexpr = q.dtype.element_ty
    dot_type: tl.constexpr = raw_type if ASM or raw_type == tl.float16 else tl.float32
    start = tl.load(starts + b)
    vector, query, live_row = query_rows(start, head, first, extend, M, H * G, G)
    DP: tl.constexpr = dot_padded(D)
    DVP: tl.constexpr = dot_padded(DV)
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    inside = live_row[:, None] & (d[None, :] < D)
    x = tl.load(q + vector[:, None] * D + d[None, :], mask=inside, other=0.0).to(dot_type)
    factor = sm_scale * LOG2E
    if TREE:
        bits = tl.load(ancestors + start + query, mask=live_row, other=0)
    m = tl.full([M], NEVER, tl.float32)
    norm = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DVP], tl.float32)
    begin_at = 0
    if SLIDES:
        begin_at = tl.maximum(first // G - attention_span + 1, 0) // N * N
    for begin in range(begin_at, tl.minimum((first + M - 1) // G + 1, extend), N):
        column = begin + tl.arange(0, N)
        live = column < extend
        token = (start + column).to(tl.int64)
        k_ptr = key + token[None, :] * key_stride + head * key_head + d[:, None]
        v_ptr = value + token[:, None] * value_stride + head * value_head + dv[None, :]
        k = tl.load(k_ptr, mask=live[None, :] & (d[:, None] < D), other=0.0).to(dot_type)
        v = tl.load(v_ptr, mask=live[:, None] & (dv[None, :] < DV), other=0.0).to(dot_type)
        s = tl.dot(x, k) * factor
        if HAS_CAP:
            s = (logit_cap * LOG2E) * (2.0 / (1.0 + tl.exp2(s * (-2.0 / logit_cap))) - 1.0)
        if TREE:
            seen = ((bits[:, None] >> column[None, :].to(tl.int64)) & 1) != 0
        else:
            seen = column[None, :] <= query[:, None]
        if SLIDES:
            seen = seen & (column[None, :] > (query - attention_span)[:, None])
        s = tl.where(seen, s, float("-inf"))
        top = tl.max(s, 1)
        if dot_type == tl.float16:
            top += weight_exponent(tl.full([M], 1.0, tl.float32))
        m_new = tl.maximum(m, top)
        prob = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        m = m_new
        norm = norm * alpha + tl.sum(prob, 1)
        acc = tl.dot(prob.to(dot_type), v, acc * alpha[:, None])
    tl.store(lse + vector, m + tl.log2(norm), mask=live_row)
    o = acc / norm[:, None]
    inside = live_row[:, None] & (dv[None, :] < DV)
    tl.store(out + vector[:, None] * DV + dv[None, :], o.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "parts"])
def merge_kernel(out, lse, parts_out, parts_lse, count, parts, DV: tl.constexpr, R: tl.constexpr):
    """Grid (ceil(count / R)): join [parts, count, DV] by base-2 lse [parts, count]; lse is left in base 2."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    d = tl.arange(0, padded(DV))
    live = r < count
    wide = r.to(tl.int64)
    inside = live[:, None] & (d[None, :] < DV)
    top = tl.full([R], NEVER, tl.float32)
    norm = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, padded(DV)], tl.float32)
    for part in range(parts):
        logit = tl.load(parts_lse + part * count + wide, mask=live, other=float("-inf"))
        x = tl.load(parts_out + (part * count + wide[:, None]) * DV + d[None, :], mask=inside, other=0.0)
        highest = tl.maximum(top, logit)
        weight, kept = tl.exp2(logit - highest), tl.exp2(top - highest)
        norm = norm * kept + weight
        acc = acc * kept[:, None] + weight[:, None] * x.to(tl.float32)
        top = highest
    acc = acc * tl.where(norm > 0, 1.0 / norm, 0.0)[:, None]
    tl.store(out + wide[:, None] * DV + d[None, :], acc.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + wide, top + tl.log2(norm), mask=live)
