"""Significance of prompt tokens: column sums of the attention matrix from q, k and lse, never materialised.

Each program owns some keys of one request and KV head. It walks over the queries, with one sum a key for one query head
at a time. The maximum over the group's heads, or their mean, is what counts.
"""

import triton
import triton.language as tl

from sglang_diffkv.kernels.decode_attention.triton_tiles import LOG2E, tile_page
from sglang_diffkv.kernels.extend_attention import reference
from sglang_diffkv.kernels.quantize.triton import chunks_of
from sglang_diffkv.kernels.triton_codec import load_words, meta_pair, parts_of, plane_codes
from sglang_diffkv.kernels.triton_table import (
    ceil_div,
    dot_padded,
    earlier_entries,
    load_positions,
    request_head_tile,
    table_index,
)

OBSERVED = tl.constexpr(reference.OBSERVED)


@triton.jit
def capped(s, logit_cap, HAS_CAP: tl.constexpr):
    if HAS_CAP:
        s = (logit_cap * LOG2E) * (2.0 / (1.0 + tl.exp2(s * (-2.0 / logit_cap))) - 1.0)
    return s


@triton.jit
def observers_before(position, since, every, SAMPLED: tl.constexpr):
    """``reference.Observers.before``: for how many the queries before positions of any shape count."""
    count = tl.maximum(position - since, 0)
    if SAMPLED:
        count += tl.minimum(position, since) // every * every
    return count


@triton.jit
def sampled(number, prefix, every):
    """Which new tokens the sampled positions are, by their numbers among all sampled ones of a sequence."""
    return number * every + (every - 1) - prefix


@triton.jit
def tile_of_queries(
    tile, sampled_tiles, first_sampled, last_sampled, prefix, every, begin, extend, m, M: tl.constexpr,
    SAMPLED: tl.constexpr,
):  # fmt: skip
    """New tokens [M] of a tile, by number, and which of them are asked. The first ``sampled_tiles`` have sampled ones,
    the others those from ``begin`` on."""
    query = begin + (tile - sampled_tiles) * M + m
    asked = query < extend
    if SAMPLED:
        number = first_sampled + tile * M + m
        query = tl.where(tile < sampled_tiles, sampled(number, prefix, every), query)
        asked = tl.where(tile < sampled_tiles, number < last_sampled, asked)
    return query, asked


@triton.jit
def logits_of(
    q, q_stride, q_head, k, token, asked, query_head, factor, logit_cap, D: tl.constexpr, HAS_CAP: tl.constexpr
):
    """[N, M], base 2: keys ``k`` [N, D] with those of one head's queries of tokens ``token`` [M] that are ``asked``."""
    d = tl.arange(0, dot_padded(D))
    inside = asked[None, :] & (d[:, None] < D)
    q_ptr = q + token * q_stride + query_head * q_head
    x = tl.load(q_ptr[None, :] + d[:, None], mask=inside, other=0.0).to(k.dtype)  # [D, M]
    return capped(tl.dot(k, x) * factor, logit_cap, HAS_CAP)


@triton.jit
def received_from(
    q, q_stride, q_head, lse, lse_stride, lse_head, lse_unit, k, start, column, query, asked, query_head, factor,
    logit_cap, D: tl.constexpr, CAUSAL: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """What [N] keys ``k`` [N, D] receive from those of queries ``query`` [M] of one head that are ``asked``;
    ``CAUSAL``: from later ones."""
    token = (start + query).to(tl.int64)
    norm = tl.load(lse + token * lse_stride + query_head * lse_head, mask=asked, other=float("inf")) * lse_unit
    s = logits_of(q, q_stride, q_head, k, token, asked, query_head, factor, logit_cap, D, HAS_CAP) - norm[None, :]
    if CAUSAL:
        s = tl.where(query[None, :] > column[:, None], s, float("-inf"))
    return tl.sum(tl.exp2(s), 1)


@triton.jit(
    do_not_specialize=["batch", "layer", "lse_stride", "lse_head"],
    do_not_specialize_on_alignment=["lse", "starts", "extend_lens", "prefix_lens", "since", "every", "rows"],
)
def new_scores_kernel(
    q, q_stride, q_head, key, key_stride, key_head, lse, lse_stride, lse_head, lse_unit, starts, extend_lens,
    prefix_lens, since, every, rows, batch, write_slot, own_entry, pages, page_table, row_blocks, layer, sm_scale,
    logit_cap,
    TIERS: tl.constexpr, TOKENS: tl.constexpr, SCORES: tl.constexpr, D: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    HAS_CAP: tl.constexpr, ASM: tl.constexpr, MEAN: tl.constexpr, WINDOWED: tl.constexpr, SAMPLED: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid (B * H * SPLIT * ceil(longest extend / N)): scores of ``N`` new tokens, a token's own query left out.

    ``SPLIT`` programs share a group's query heads; the largest of their scores stays, beside the 0 that was appended.

    ``WINDOWED``: of the queries before position ``since`` [B] none counts or, if ``SAMPLED``, each ``every`` [B]-th,
    as so many.

    Strides are in elements. ``lse`` [tokens, Hq], times ``lse_unit``, is base 2. ``M`` divides ``N``; keys with many
    later queries come first.
    """
    b, share, tile, _ = request_head_tile(batch, H * SPLIT)
    head = share // SPLIT
    first_query_head = head * G + share % SPLIT * (G // SPLIT)
    first = tile * N
    extend = tl.load(extend_lens + b).to(tl.int32)
    if first >= extend:
        return
    dot_type: tl.constexpr = key.dtype.element_ty if ASM else tl.float32
    start = tl.load(starts + b)
    d = tl.arange(0, dot_padded(D))
    column = first + tl.arange(0, N)
    live = column < extend
    token = (start + column).to(tl.int64)
    k_ptr = key + token[:, None] * key_stride + head * key_head + d[None, :]
    k = tl.load(k_ptr, mask=live[:, None] & (d[None, :] < D), other=0.0).to(dot_type)  # [N, D]
    factor = sm_scale * LOG2E
    received = tl.zeros([N], tl.float32)
    silent = 0  # new tokens before those that all count
    own_first = first
    later_first = first + N
    prefix = 0
    all_from = 0
    step = 1
    if WINDOWED:
        prefix = tl.load(prefix_lens + b).to(tl.int32)
        all_from = tl.load(since + b).to(tl.int32)
        if SAMPLED:
            step = tl.load(every + b).to(tl.int32)
        silent = tl.minimum(tl.maximum(all_from - prefix, 0), extend)
        own_first += tl.maximum(silent - own_first, 0) // M * M
        later_first += tl.maximum(silent - later_first, 0) // M * M
    m = tl.arange(0, M)
    for at in range(first_query_head, first_query_head + G // SPLIT):
        total = tl.zeros([N], tl.float32)
        if SAMPLED:
            for some in range((prefix + first) // step, (prefix + silent) // step, M):
                asked = some + m < (prefix + silent) // step
                query = sampled(some + m, prefix, step)
                total += received_from(
                    q, q_stride, q_head, lse, lse_stride, lse_head, lse_unit, k, start, column, query, asked, at,
                    factor, logit_cap, D, True, HAS_CAP,
                )  # fmt: skip
            total *= step
        for begin in range(own_first, tl.minimum(first + N, extend), M):
            asked = (begin + m < extend) & (begin + m >= silent)
            total += received_from(
                q, q_stride, q_head, lse, lse_stride, lse_head, lse_unit, k, start, column, begin + m, asked, at,
                factor, logit_cap, D, True, HAS_CAP,
            )  # fmt: skip
        for begin in range(later_first, extend, M):
            asked = (begin + m < extend) & (begin + m >= silent)
            total += received_from(
                q, q_stride, q_head, lse, lse_stride, lse_head, lse_unit, k, start, column, begin + m, asked, at,
                factor, logit_cap, D, False, HAS_CAP,
            )  # fmt: skip
        received = received + total if MEAN else tl.maximum(received, total)
    if MEAN:
        received = received / G
    later = observers_before(prefix + extend, all_from, step, SAMPLED)
    later -= observers_before(prefix + column + 1, all_from, step, SAMPLED)
    score = received / tl.maximum(later, 1).to(tl.float32)
    row = tl.load(rows + b).to(tl.int64)
    head_at = (row * L + layer) * H + head
    slot = tl.load(write_slot + head_at) + column
    entry = tl.load(own_entry + head_at * TIERS) + slot // TOKENS
    index = table_index(row_blocks, row, layer, head, entry, live, MAX_BLOCKS, L, H)
    page = tl.load(page_table + index, mask=live, other=0)
    target = (pages + page.to(tl.int64) * PAGE_BYTES + SCORES).to(tl.pointer_type(tl.float32))
    if SPLIT > 1:  # no score is negative, so they are ordered as integers are
        tl.atomic_max(
            (target + slot % TOKENS).to(tl.pointer_type(tl.int32)), score.to(tl.int32, bitcast=True), mask=live
        )
    else:
        tl.store(target + slot % TOKENS, score, mask=live)


@triton.jit(
    do_not_specialize=["batch", "heads", "first_head", "total", "lse_stride", "lse_head"],
    do_not_specialize_on_alignment=[
        "lse",
        "starts",
        "extend_lens",
        "prefix_lens",
        "since",
        "every",
        "first_scored",
        "into",
    ],
)
def stored_sums_kernel(
    q, q_stride, q_head, keys, lse, lse_stride, lse_head, lse_unit, starts, extend_lens, prefix_lens, since, every,
    first_scored, into, batch, heads, first_head, total, sums, sm_scale, logit_cap,
    D: tl.constexpr, G: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    HAS_CAP: tl.constexpr, ASM: tl.constexpr, MEAN: tl.constexpr, WINDOWED: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Grid (B * heads * ceil(most tokens / N)): what ``N`` stored tokens receive from new ones, joined over query
    heads. Those before ``first_scored`` [B] do not count.

    ``keys`` [total, heads, D] are of the KV heads from ``first_head`` on, as the model gives them; a request's begin at
    ``into`` [B]. ``sums`` [all KV heads, total]. ``q``, ``lse`` [tokens, Hq] and who observes: as in
    ``new_scores_kernel``.
    """
    b, column_head, tile, _ = request_head_tile(batch, heads)
    first = tl.load(first_scored + b).to(tl.int32) + tile * N
    prefix = tl.load(prefix_lens + b).to(tl.int32)
    if first >= prefix:
        return
    dot_type: tl.constexpr = keys.dtype.element_ty if ASM else tl.float32
    start = tl.load(starts + b)
    extend = tl.load(extend_lens + b).to(tl.int32)
    d = tl.arange(0, dot_padded(D))
    column = first + tl.arange(0, N)
    live = column < prefix
    place = tl.load(into + b).to(tl.int64) + column
    k_ptr = keys + (place * heads + column_head)[:, None] * D + d[None, :]
    k = tl.load(k_ptr, mask=live[:, None] & (d[None, :] < D), other=0.0).to(dot_type)  # [N, D]
    silent = 0  # new tokens before those that all count
    step = 1
    if WINDOWED:
        silent = tl.minimum(tl.maximum(tl.load(since + b).to(tl.int32) - prefix, 0), extend)
        if SAMPLED:
            step = tl.load(every + b).to(tl.int32)
    sampled_tiles = 0
    first_sampled = 0
    last_sampled = 0
    if SAMPLED:
        first_sampled = prefix // step
        last_sampled = (prefix + silent) // step
        sampled_tiles = tl.cdiv(last_sampled - first_sampled, M)
    tiles = sampled_tiles + tl.cdiv(extend - silent, M)
    received = tl.zeros([N], tl.float32)
    of_head = tl.zeros([N], tl.float32)
    m = tl.arange(0, M)
    factor = sm_scale * LOG2E
    head = first_head + column_head
    query, asked = tile_of_queries(
        0, sampled_tiles, first_sampled, last_sampled, prefix, step, silent, extend, m, M, SAMPLED
    )
    token = (start + query).to(tl.int64)
    norm = tl.load(lse + token * lse_stride + head * G * lse_head, mask=asked, other=float("inf"))
    for number in range(tiles * G):  # one loop for all heads of a group: a short one for each would begin anew
        g = number // tiles
        at = number - g * tiles
        query, asked = tile_of_queries(
            at, sampled_tiles, first_sampled, last_sampled, prefix, step, silent, extend, m, M, SAMPLED
        )
        s = logits_of(
            q, q_stride, q_head, k, (start + query).to(tl.int64), asked, head * G + g, factor, logit_cap, D, HAS_CAP
        )
        next_g = (number + 1) // tiles
        query, asked = tile_of_queries(
            number + 1 - next_g * tiles, sampled_tiles, first_sampled, last_sampled, prefix, step, silent, extend, m, M,
            SAMPLED,
        )  # fmt: skip
        token = (start + query).to(tl.int64)
        next_norm = tl.load(
            lse + token * lse_stride + (head * G + next_g) * lse_head, mask=asked & (next_g < G), other=float("inf")
        )
        weight = tl.where(at < sampled_tiles, step, 1).to(tl.float32)
        of_head += tl.sum(tl.exp2(s - (norm * lse_unit)[None, :]), 1) * weight
        norm = next_norm
        ends = at == tiles - 1
        joined = received + of_head if MEAN else tl.maximum(received, of_head)
        received = tl.where(ends, joined, received)
        of_head = tl.where(ends, 0.0, of_head)
    if MEAN:
        received = received / G
    tl.store(sums + head.to(tl.int64) * total + place, received, mask=live)


@triton.jit
def page_received(
    q, lse, k_parts, start, query, asked, query_head, factor, logit_cap,
    KPARTS: tl.constexpr, BYTES: tl.constexpr, KW: tl.constexpr, N: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    HQ: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """What [N] packed keys, ``k_parts`` [N, padded KW] each, receive from those of queries ``query`` [M] of one head
    that are ``asked``."""
    kcol = tl.arange(0, dot_padded(KW))
    vector = (start + query).to(tl.int64) * HQ + query_head
    norm = tl.load(lse + vector, mask=asked, other=float("inf"))
    inside = asked[None, :] & (kcol[:, None] < KW)
    s = tl.zeros([N, M], tl.float32)
    for part in tl.static_range(KPARTS):
        at = kcol * BYTES + part // BYTES * (KW * BYTES) + part % BYTES
        x = tl.load(q + vector[None, :] * D + at[:, None], mask=inside, other=0.0)
        s = tl.dot(k_parts[part], x.to(k_parts[part].dtype), s)
    s = capped(s * factor, logit_cap, HAS_CAP) - norm[None, :]
    return tl.sum(tl.exp2(s), 1)


@triton.jit
def fold_scores(
    received, numbers, position, in_view, shared_scores, shared_len, prefix, extend, all_from, step, layer, head,
    SCORES: tl.constexpr, H: tl.constexpr, SHARED: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Take what tokens [N] of a page ``received`` from ``extend`` new ones into the means of those before. ``numbers``:
    the page's slots as int32."""
    before = observers_before(prefix, all_from, step, SAMPLED)
    after = observers_before(prefix + extend, all_from, step, SAMPLED)
    score_ptr = (numbers + SCORES // 4).to(tl.pointer_type(tl.float32))
    score = tl.load(score_ptr, mask=in_view, other=0.0)
    if SHARED:
        scored_at = (layer * H + head).to(tl.int64) * shared_len + tl.where(in_view, position, 0)
        score_ptr = shared_scores + scored_at
        so_far = tl.load(score_ptr, mask=in_view, other=0.0)
        score = tl.where(so_far == so_far, so_far, score)
        shared = observers_before(shared_len, all_from, step, SAMPLED)
        queries = tl.maximum(shared - observers_before(position + 1, all_from, step, SAMPLED), 0)
        queries = tl.minimum(queries, OBSERVED) + before - shared
    else:
        queries = tl.maximum(before - observers_before(position + 1, all_from, step, SAMPLED), 0)
    seen = queries.to(tl.float32) * score + received
    tl.store(score_ptr, seen / tl.maximum((queries + after - before).to(tl.float32), 1.0), mask=in_view)


@triton.jit
def observers_of(since, every, b, WINDOWED: tl.constexpr, SAMPLED: tl.constexpr):
    """From which position on all queries of request ``b`` count, and the step between those before that count."""
    all_from = 0
    step = 1
    if WINDOWED:
        all_from = tl.load(since + b).to(tl.int32)
        if SAMPLED:
            step = tl.load(every + b).to(tl.int32)
    return all_from, step


@triton.jit
def earlier_tiles(
    entries, own_entry, write_slot, row, layer, head, prefix, extend, shared_len,
    TIER: tl.constexpr, TIERS: tl.constexpr, TOKENS: tl.constexpr, CHUNKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Tiles of a row's own tokens of earlier steps, or with ``SHARED`` of those that it shares, ``CHUNKS`` a page: the
    first and the end. Then the entries of its table, and the first position that is not among the tokens."""
    head_at = (row * L + layer) * H + head
    count = earlier_entries(entries, own_entry, write_slot, head_at, extend, TIER, TIERS, TOKENS)
    begin = tl.load(own_entry + head_at * TIERS + TIER) * CHUNKS
    end = count * CHUNKS
    most = prefix
    if SHARED:
        end = begin
        begin = 0
        most = shared_len
    return begin, end, count, most


@triton.jit
def earlier_tokens(
    tile, count, most, row, layer, head, pages, page_table, range_lo, range_hi, row_blocks,
    TIER: tl.constexpr, TOKENS: tl.constexpr, CHUNKS: tl.constexpr, N: tl.constexpr, POSITIONS: tl.constexpr,
    PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """``N`` slots of a tile of ``earlier_tiles``: their page's first byte, their numbers, which exist, pointers to them
    as int32, positions, and which hold tokens before ``most``."""
    page, lo, hi = tile_page(
        tile, count, row_blocks, page_table, range_lo, range_hi, row, layer, head, TIER, CHUNKS, MAX_BLOCKS, L, H
    )
    slot = (tile % CHUNKS) * N + tl.arange(0, N)
    live = slot < TOKENS
    page_at = page.to(tl.int64) * PAGE_BYTES
    numbers = (pages + page_at).to(tl.pointer_type(tl.int32)) + slot
    position = load_positions(pages + page_at, POSITIONS, slot, live)
    in_view = live & (position >= lo) & (position < tl.minimum(hi, most))
    return page_at, slot, live, numbers, position, in_view


@triton.jit(
    do_not_specialize=["layer", "request", "shared_len"],
    do_not_specialize_on_alignment=[
        "lse",
        "starts",
        "extend_lens",
        "prefix_lens",
        "since",
        "every",
        "rows",
        "shared_scores",
    ],
)
def page_scores_kernel(
    q, lse, starts, extend_lens, prefix_lens, since, every, rows, pages, page_table, range_lo, range_hi, row_blocks,
    entries, own_entry, write_slot, shared_scores, shared_len, request, layer, sm_scale, logit_cap,
    TIER: tl.constexpr, TIERS: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr,
    TOKENS: tl.constexpr, KEYS: tl.constexpr, KMETA: tl.constexpr, VALUES: tl.constexpr, VMETA: tl.constexpr,
    SCORES: tl.constexpr, POSITIONS: tl.constexpr,
    D: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HAS_CAP: tl.constexpr, ASM: tl.constexpr,
    SHARED: tl.constexpr, MEAN: tl.constexpr, WINDOWED: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Grid (B, H, programs): own tokens of earlier steps, which share the tiles round robin.

    With ``SHARED`` grid (1, H, programs): the first ``shared_len`` tokens of ``request``, which it shares; their scores
    go to ``shared_scores`` [L, H, shared_len], NaN where there is none yet, and not into the pages.
    ``WINDOWED`` and ``SAMPLED``: as in ``new_scores_kernel``, in earlier steps too.
    """
    b = tl.program_id(0)
    if SHARED:
        b = request
    head = tl.program_id(1)
    RAW: tl.constexpr = KB == 16
    KPARTS: tl.constexpr = parts_of(KB)
    BYTES: tl.constexpr = 1 if RAW else 2
    KW: tl.constexpr = D // KPARTS
    KWP: tl.constexpr = dot_padded(KW)
    CHUNKS: tl.constexpr = ceil_div(TOKENS, N)
    raw_type: tl.constexpr = q.dtype.element_ty
    dot_type: tl.constexpr = raw_type if ASM else tl.float32
    row = tl.load(rows + b).to(tl.int64)
    start = tl.load(starts + b)
    prefix = tl.load(prefix_lens + b).to(tl.int32)
    extend = tl.load(extend_lens + b).to(tl.int32)
    all_from, step = observers_of(since, every, b, WINDOWED, SAMPLED)
    silent = 0  # new tokens before those that all count
    if WINDOWED:
        silent = tl.minimum(tl.maximum(all_from - prefix, 0), extend)
    m = tl.arange(0, M)
    kcol = tl.arange(0, KWP)
    begin_tile, end_tile, count, most = earlier_tiles(
        entries, own_entry, write_slot, row, layer, head, prefix, extend, shared_len,
        TIER, TIERS, TOKENS, CHUNKS, L, H, SHARED,
    )  # fmt: skip
    for tile in range(begin_tile + tl.program_id(2), end_tile, tl.num_programs(2)):
        page_at, slot, live, numbers, position, in_view = earlier_tokens(
            tile, count, most, row, layer, head, pages, page_table, range_lo, range_hi, row_blocks,
            TIER, TOKENS, CHUNKS, N, POSITIONS, PAGE_BYTES, MAX_BLOCKS, L, H,
        )  # fmt: skip
        words = pages.to(tl.pointer_type(raw_type if RAW else tl.int16)) + page_at // 2
        kmask = live[:, None] & (kcol[None, :] < KW)
        kptr = words + KEYS // 2 + slot[:, None] * (KW * chunks_of(KB)) + kcol[None, :]
        k = load_words(kptr, kmask, KW, KB)  # [N, KWP] each
        if not RAW:
            kscale, kzero = meta_pair(tl.load(numbers + KMETA // 4, mask=live, other=0))
        k_parts = ()
        for part in tl.static_range(KPARTS):
            if RAW:
                keys = k[0].to(dot_type)
            else:
                code = plane_codes(k, KB, part // BYTES, part % BYTES, ASM)
                keys = (code * kscale[:, None] + kzero[:, None]).to(dot_type)
            k_parts = k_parts + (keys,)  # type: ignore[assignment]
        received = tl.zeros([N], tl.float32)
        for g in range(G):
            sums = tl.zeros([N], tl.float32)
            if SAMPLED:
                for some in range(prefix // step, (prefix + silent) // step, M):
                    asked = some + m < (prefix + silent) // step
                    query = sampled(some + m, prefix, step)
                    sums += page_received(
                        q, lse, k_parts, start, query, asked, head * G + g, sm_scale * LOG2E, logit_cap,
                        KPARTS, BYTES, KW, N, M, D, H * G, HAS_CAP,
                    )  # fmt: skip
                sums *= step
            for begin in range(silent, extend, M):
                sums += page_received(
                    q, lse, k_parts, start, begin + m, begin + m < extend, head * G + g, sm_scale * LOG2E, logit_cap,
                    KPARTS, BYTES, KW, N, M, D, H * G, HAS_CAP,
                )  # fmt: skip
            received = received + sums if MEAN else tl.maximum(received, sums)
        if MEAN:
            received = received / G
        fold_scores(
            received, numbers, position, in_view, shared_scores, shared_len, prefix, extend, all_from, step, layer,
            head, SCORES, H, SHARED, SAMPLED,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["layer", "request", "shared_len", "total"],
    do_not_specialize_on_alignment=[
        "sums", "into", "extend_lens", "prefix_lens", "since", "every", "rows", "shared_scores",
    ],
)  # fmt: skip
def fold_sums_kernel(
    sums, total, into, extend_lens, prefix_lens, since, every, rows, pages, page_table, range_lo, range_hi, row_blocks,
    entries, own_entry, write_slot, shared_scores, shared_len, request, layer,
    TIER: tl.constexpr, TIERS: tl.constexpr, TOKENS: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr,
    PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
    SHARED: tl.constexpr, WINDOWED: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """``page_scores_kernel`` where it is known what tokens received: ``sums`` [H, total] of ``stored_sums_kernel``."""
    b = tl.program_id(0)
    if SHARED:
        b = request
    head = tl.program_id(1)
    CHUNKS: tl.constexpr = ceil_div(TOKENS, N)
    row = tl.load(rows + b).to(tl.int64)
    prefix = tl.load(prefix_lens + b).to(tl.int32)
    extend = tl.load(extend_lens + b).to(tl.int32)
    all_from, step = observers_of(since, every, b, WINDOWED, SAMPLED)
    sums_of = sums + head.to(tl.int64) * total + tl.load(into + b)
    begin_tile, end_tile, count, most = earlier_tiles(
        entries, own_entry, write_slot, row, layer, head, prefix, extend, shared_len,
        TIER, TIERS, TOKENS, CHUNKS, L, H, SHARED,
    )  # fmt: skip
    for tile in range(begin_tile + tl.program_id(2), end_tile, tl.num_programs(2)):
        _, _, _, numbers, position, in_view = earlier_tokens(
            tile, count, most, row, layer, head, pages, page_table, range_lo, range_hi, row_blocks,
            TIER, TOKENS, CHUNKS, N, POSITIONS, PAGE_BYTES, MAX_BLOCKS, L, H,
        )  # fmt: skip
        received = tl.load(sums_of + tl.where(in_view, position, 0), mask=in_view, other=0.0)
        fold_scores(
            received, numbers, position, in_view, shared_scores, shared_len, prefix, extend, all_from, step, layer,
            head, SCORES, H, SHARED, SAMPLED,
        )  # fmt: skip
