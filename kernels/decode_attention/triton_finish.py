"""Second pass of decode attention: join each head's partial results, update the scores and search for the policy.

The first pass cannot know a head's final normaliser. This one reads it, turns the stored logits into attention, and
folds that into each own token's running mean. It finds the token that leaves the window and the least significant token
of each tier. Only logits, scores and positions are read again. A token found is named by its own slot: ``TOKENS`` of
each page.

Where no decision asks for scores, positions alone find the token that leaves the window, and the first
pass keeps no logits.
"""

import triton
import triton.language as tl

from sglang_diffkv.kernels.decode_attention.triton_ranges import head_slots, is_result
from sglang_diffkv.kernels.decode_attention.triton_tiles import LOG2E, NEVER, head_tiles, kept_slots, observes
from sglang_diffkv.kernels.triton_table import (
    I_POSITIONS,
    I_SCORES,
    I_TOKENS,
    NO_SCORES,
    ceil_div,
    load_positions,
    padded,
    table_column,
    table_index,
)

NOTHING = tl.constexpr(2**63 - 1)
"""Search result of a program that found no token; above every (score bits, slot) pair."""
MOST_TILES = tl.constexpr(1 << 30)
"""More than any head has of a tier."""


@triton.jit
def own_pages(
    tiles, live, row_blocks, page_table, row, layer, head, own_first,
    TIER: tl.constexpr, CHUNKS: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Page ids, int64, of tiles [T] counted from a tier's first own page."""
    entry = own_first + tiles // CHUNKS
    column = table_column(entry, TIER, MAX_BLOCKS)
    index = table_index(row_blocks, row, layer, head, column, live, MAX_BLOCKS, L, H)
    return tl.load(page_table + index, mask=live, other=0).to(tl.int64)


@triton.jit
def attention_received(
    logits_ptr, tile_max_ptr, lse, tiles, live, N: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, MEAN: tl.constexpr
):  # fmt: skip
    """[T, N]: log2 of the largest attention that each token of ``tiles`` gets from the group's query heads, -inf for
    slots without a token. With ``MEAN`` also the sum of what it gets, else the former again.

    ``lse`` [GP]. A token's logits are read as one or more words.
    """
    WORD: tl.constexpr = 4 if G % 4 == 0 else (2 if G % 2 == 0 else 1)  # logits of a word
    word_type: tl.constexpr = tl.int64 if WORD == 4 else (tl.int32 if WORD == 2 else tl.int16)
    g = tl.arange(0, GP)
    word_ptr = logits_ptr.to(tl.pointer_type(word_type))
    token = tiles[:, None] * N + tl.arange(0, N)[None, :]
    best = tl.full([tiles.shape[0], N], float("-inf"), tl.float32)
    total = best
    if MEAN:
        total = tl.zeros([tiles.shape[0], N], tl.float32)
    for first in tl.static_range(0, G, WORD):
        at = token * (G // WORD) + first // WORD
        word = tl.load(word_ptr + at, mask=live[:, None], other=0, eviction_policy="evict_first")
        for k in tl.static_range(WORD):
            own_lse = tl.sum(tl.where(g == first + k, lse, 0.0), 0)
            top_ptr = tile_max_ptr + tiles * G + first + k
            top = tl.load(top_ptr, mask=live, other=0.0, eviction_policy="evict_first") - own_lse
            x = (word >> (16 * k)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            best = tl.maximum(best, x + top[:, None])
            if MEAN:
                total += tl.exp2(x + top[:, None])
    return best, total


@triton.jit
def page_numbers(
    page, tiles, stop, pages,
    TOKENS: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr, N: tl.constexpr, PAGE_BYTES: tl.constexpr,
):  # fmt: skip
    """Positions, -1 where there is no token, and scores, [T, N], of ``tiles`` [T] before ``stop`` on ``page`` [T].
    Without scores these are 0."""
    slot = (tiles % ceil_div(TOKENS, N))[:, None] * N + tl.arange(0, N)[None, :]
    inside = (tiles < stop)[:, None] & (slot < TOKENS)
    source = (pages + page * PAGE_BYTES)[:, None]
    score = tl.zeros([tiles.shape[0], N], tl.float32)
    if SCORES != NO_SCORES:
        score = tl.load((source + SCORES).to(tl.pointer_type(tl.float32)) + slot, mask=inside, other=0.0)
    return load_positions(source, POSITIONS, slot, inside), score


@triton.jit
def first_tokens(
    part, parts, room, pages, page_table, row_blocks, row, layer, head, count, own_first,
    TIER: tl.constexpr, TOKENS: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr,
    N: tl.constexpr, SIZE: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """A program's tiles [start, stop) of a tier, of which ``room`` have logits, and what of its first iterations does
    not depend on the first pass: page ids of two, positions and scores of one. Of the high tier they are read while the
    first pass ends."""
    T: tl.constexpr = max(SIZE // N, 1)
    CHUNKS: tl.constexpr = ceil_div(TOKENS, N)
    total = tl.minimum((count - own_first) * CHUNKS, room)
    share = tl.cdiv(tl.cdiv(tl.maximum(total, 0), parts), T) * T
    start = part * share
    stop = tl.minimum(total, start + share)
    tiles = start + tl.arange(0, T)
    page = own_pages(
        tiles, tiles < stop, row_blocks, page_table, row, layer, head, own_first, TIER, CHUNKS, MAX_BLOCKS, L, H
    )
    ahead = tiles + T
    page_ahead = own_pages(
        ahead, ahead < stop, row_blocks, page_table, row, layer, head, own_first, TIER, CHUNKS, MAX_BLOCKS, L, H
    )
    position, old = page_numbers(page, tiles, stop, pages, TOKENS, SCORES, POSITIONS, N, PAGE_BYTES)
    return start, stop, page, page_ahead, position, old


@triton.jit
def rescored(old, received, position, newest, horizon, every):
    """Scores with the attention ``received`` from the ``newest`` token, one of ``every``, taken in: the mean over later
    tokens, past a ``horizon`` an exponential one."""
    age = tl.minimum(tl.maximum(newest - position, 1), horizon).to(tl.float32)
    observed = (position < newest) & observes(newest, every)
    return tl.where(observed, old + (received - old) / tl.maximum(age / every, 1.0), old)


@triton.jit
def window_of(row_windows, row, window):
    """A row's own window, or the usual ``window``; ``row_windows`` is None where no row has one."""
    if row_windows is not None:
        own = tl.load(row_windows + row)
        window = tl.where(own < 0, window, own)
    return window


@triton.jit
def packed_score(score, number):
    """int64 that are ordered by score and then by own slot, ``number`` int64."""
    bits = score.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return (bits.to(tl.int64) << 32) | number


@triton.jit
def score_tier(
    start, stop, page, page_ahead, position, old, lse, newest, window, sinks, horizon, every, scratch, logits_ptr,
    tile_max_ptr, pages, page_table, row_blocks, row, layer, head, own_first,
    TIER: tl.constexpr, TOKENS: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr,
    N: tl.constexpr, SIZE: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """A program's share of one tier, from :func:`first_tokens`; returns the packed candidate and least significant
    token, int64 each.

    ``lse`` [GP] is the head's base-2 normaliser, ``scratch`` the page that rows without one share, of which nothing is
    theirs. Page ids are read two iterations ahead, positions and scores one. With ``SCORES`` ``NO_SCORES`` nothing is
    scored: only a candidate is found, and its score is 0. Where the newest token does not observe, there are no logits
    to read, and scores stay as they are.
    """
    CHUNKS: tl.constexpr = ceil_div(TOKENS, N)
    T: tl.constexpr = max(SIZE // N, 1)
    observed = observes(newest, every)
    candidate = tl.full([T, N], NOTHING, tl.int64)
    least = tl.full([T, N], NOTHING, tl.int64)
    for base in range(start, stop, T):
        tiles = base + tl.arange(0, T)
        if SCORES != NO_SCORES:
            kept = (tiles < stop) & observed
            power, total = attention_received(logits_ptr, tile_max_ptr, lse, tiles, kept, N, G, GP, MEAN)
        next_position, next_old = page_numbers(
            page_ahead, tiles + T, stop, pages, TOKENS, SCORES, POSITIONS, N, PAGE_BYTES
        )
        ahead = tiles + 2 * T
        page_after = own_pages(
            ahead, ahead < stop, row_blocks, page_table, row, layer, head, own_first, TIER, CHUNKS, MAX_BLOCKS, L, H
        )
        slot = (tiles % CHUNKS)[:, None] * N + tl.arange(0, N)[None, :]
        number = (tiles // CHUNKS * TOKENS)[:, None] + slot
        packed = number.to(tl.int64)
        own = ((tiles < stop) & (page != scratch))[:, None] & (slot < TOKENS) & (position >= 0)
        if SCORES != NO_SCORES:
            own = own & ((power > float("-inf")) | (not observed))
            received = total / G if MEAN else tl.exp2(power)
            new = rescored(old, received, position, newest, horizon, every)
            words = (pages + page * PAGE_BYTES).to(tl.pointer_type(tl.float32))[:, None] + slot
            tl.store(words + SCORES // 4, new, mask=own & observed)
            packed = packed_score(new, packed)
            outside = own & (position <= newest - window) & (position >= sinks)
            least = tl.minimum(least, tl.where(outside, packed, NOTHING))
        if TIER == 0:
            leaving = own & (position == newest - window) & (position >= sinks)
            candidate = tl.minimum(candidate, tl.where(leaving, packed, NOTHING))
        page, page_ahead = page_ahead, page_after
        position, old = next_position, next_old
    return tl.min(tl.min(candidate, 1), 0), tl.min(tl.min(least, 1), 0)


@triton.jit
def store_found(found_ptr, value, part, parts, max_parts):
    """A program's search result; the first program clears the places of programs that this launch does not have."""
    tl.store(found_ptr + part, value)
    if part == 0:
        for other in range(parts, max_parts):
            tl.store(found_ptr + other, tl.full([], NOTHING, tl.int64))


@triton.jit
def joined_lse(
    partial_lse, first, used, firsts, ends,
    LSE_AT_ONCE: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, TIERS: tl.constexpr,
):  # fmt: skip
    """[GP] of a head's ``used`` slots from ``first`` on, some an iteration: the base-2 normaliser relative to a largest
    one, and that."""
    g = tl.arange(0, GP)
    top = tl.full([GP], NEVER, tl.float32)
    norm = tl.zeros([GP], tl.float32)
    for some in range(0, used, LSE_AT_ONCE):
        slot = first + some + tl.arange(0, LSE_AT_ONCE)
        known = is_result(slot, firsts, ends, TIERS)[:, None] & (g[None, :] < G)
        at = slot.to(tl.int64)[:, None] * G + g[None, :]
        each = tl.load(partial_lse + at, mask=known, other=float("-inf"))  # [LSE_AT_ONCE, GP]
        higher = tl.maximum(top, tl.max(each, 0))
        norm = norm * tl.exp2(top - higher) + tl.sum(tl.exp2(each - higher[None, :]), 0)
        top = higher
    return norm, top


@triton.jit
def with_sink(norm, top, sink):
    """``joined_lse`` with one term more, the logits ``sink`` [GP]."""
    sink = sink.to(tl.float32) * LOG2E
    higher = tl.maximum(top, sink)
    return norm * tl.exp2(top - higher) + tl.exp2(sink - higher), higher


@triton.jit(
    do_not_specialize=["layer", "window", "sinks", "horizon", "every", "scratch", "max_parts"],
    do_not_specialize_on_alignment=["rows", "seq_lens", "sink_logits"],
)
def finish_kernel(
    out, lse_out, found, max_parts, partial_out, partial_lse, logits, tile_max, offsets, parts_of, starts, ranges,
    pages, page_table, row_blocks, entries, own_entry, rows, seq_lens, num_valid, layer, window, sinks, horizon, every,
    scratch, room, sink_logits, row_windows,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, DV: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
    TILES: tl.constexpr, WEIGHTS: tl.constexpr, SIZE: tl.constexpr,
    SCORED: tl.constexpr, SCORE_LOW: tl.constexpr, ROOM_FOR: tl.constexpr, UNITS: tl.constexpr, TURN: tl.constexpr,
    EARLY: tl.constexpr, JOINERS: tl.constexpr, AT_ONCE: tl.constexpr, LSE_AT_ONCE: tl.constexpr, MEAN: tl.constexpr,
    HAS_SINK: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Grid (B * H, JOINERS + parts): the first ``JOINERS`` programs of a head join a slice each of its partial results.
    Several joiners take ``AT_ONCE`` an iteration; a single one has few and takes them one by one. The others share the
    scores of its tokens, as many of them as ``parts_of`` says. With 0, the first of the latter joins before. ``found``
    has room for ``max_parts``. Without ``SCORED`` there are no logits, and the programs of a head share its tokens
    evenly. ``row_windows`` [R]: see ``window_of``. ``EARLY``: the launch may begin while the first pass ends, and waits
    for it here. With ``HAS_SINK`` ``sink_logits`` [Hq] join the softmax."""
    bh = tl.program_id(0)
    part, parts = tl.program_id(1) - JOINERS, tl.num_programs(1) - JOINERS
    joins = tl.program_id(1) < max(JOINERS, 1)
    b, head = bh // H, bh % H
    GP: tl.constexpr = padded(G)
    DP: tl.constexpr = padded(DV) // max(JOINERS, 1)
    bh64 = bh.to(tl.int64)
    g = tl.arange(0, GP)
    d = tl.program_id(1) * DP * joins + tl.arange(0, DP)
    inside = (g[:, None] < G) & (d[None, :] < DV)
    out_ptr = out + bh64 * G * DV + g[:, None] * DV + d[None, :]
    found_ptr = found + ((b.to(tl.int64) * L + layer) * H + head) * (TIERS + 1) * max_parts
    if b >= tl.load(num_valid):
        if joins:
            tl.store(out_ptr, tl.zeros([GP, DP], out.dtype.element_ty), mask=inside)
            none = tl.full([GP], float("-inf"), tl.float32)
            tl.store(lse_out + bh64 * G + g, none, mask=(g < G) & (tl.program_id(1) == 0))
        if part >= 0:
            for k in tl.static_range(TIERS + 1):
                store_found(found_ptr + k * max_parts, tl.full([], NOTHING, tl.int64), part, parts, max_parts)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        return

    row = tl.load(rows + b).to(tl.int64)
    newest = tl.load(seq_lens + b).to(tl.int32) - 1
    window = window_of(row_windows, row, window)
    counts = ((row * L + layer) * H + head) * TIERS
    scoring = tl.maximum(parts, 1)
    if SCORED:
        scoring = tl.minimum(tl.load(parts_of + (layer * H + head) * ROOM_FOR + b), scoring)
    if part >= scoring and not joins:
        for k in tl.static_range(TIERS + 1):
            store_found(found_ptr + k * max_parts, tl.full([], NOTHING, tl.int64), part, parts, max_parts)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        return
    tier_entries, tiles = head_tiles(entries + counts, LAYOUTS, TILES, TIERS)
    firsts, ends = head_slots(
        starts, tl.load(ranges + layer * 2), layer, bh, tiles, WEIGHTS, TURN, TIERS, UNITS, MERGED
    )
    used = ends[TIERS - 1] - firsts[0]
    own_high = tl.load(own_entry + counts)
    tiles_before = (tier_entries[0] - own_high) * ceil_div(LAYOUTS[0][I_TOKENS], TILES[0])  # of the tiers so far
    tokens_before = tiles_before * TILES[0]
    kept_from = 0
    room_high = MOST_TILES
    if SCORED:
        kept_from = kept_slots(offsets, b, layer, head, room, H, ROOM_FOR)
        room_high = (room - kept_from) // TILES[0]
    SCORES: tl.constexpr = LAYOUTS[0][I_SCORES] if SCORED else NO_SCORES
    start, stop, page, page_ahead, position, old = first_tokens(
        tl.maximum(part, 0), scoring, tl.where(part >= 0, room_high, 0), pages, page_table, row_blocks,
        row, layer, head, tier_entries[0], own_high, 0, LAYOUTS[0][I_TOKENS], SCORES, LAYOUTS[0][I_POSITIONS],
        TILES[0], SIZE, PAGE_BYTES, MAX_BLOCKS, L, H,
    )  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
    norm, top = joined_lse(partial_lse, firsts[0], used, firsts, ends, LSE_AT_ONCE, G, GP, TIERS)
    if HAS_SINK:
        norm, top = with_sink(norm, top, tl.load(sink_logits + head * G + g, mask=g < G, other=float("-inf")))
    lse = top + tl.log2(norm)

    if joins:
        acc = tl.zeros([GP, DP], tl.float32)
        if JOINERS <= 1:
            for some in range(used):
                slot = firsts[0] + some
                known = is_result(slot, firsts, ends, TIERS)
                at = slot.to(tl.int64)
                weight = tl.exp2(tl.load(partial_lse + at * G + g, mask=known & (g < G), other=float("-inf")) - top)
                x_ptr = partial_out + at * G * DV + g[:, None] * DV + d[None, :]
                acc += weight[:, None] * tl.load(x_ptr, mask=known & inside, other=0.0)
        else:
            for some in range(0, used, AT_ONCE):
                slot = firsts[0] + some + tl.arange(0, AT_ONCE)
                held = is_result(slot, firsts, ends, TIERS)[:, None] & (g[None, :] < G)
                at = slot.to(tl.int64)[:, None] * G + g[None, :]  # [AT_ONCE, GP]
                weight = tl.exp2(tl.load(partial_lse + at, mask=held, other=float("-inf")) - top[None, :])
                x_ptr = partial_out + at[:, :, None] * DV + d[None, None, :]
                x = tl.load(x_ptr, mask=held[:, :, None] & (d[None, None, :] < DV), other=0.0)
                acc += tl.sum(weight[:, :, None] * x, 0)
        acc = acc * tl.where(norm > 0, 1.0 / norm, 0.0)[:, None]
        tl.store(out_ptr, acc.to(out.dtype.element_ty), mask=inside)
        tl.store(lse_out + bh64 * G + g, lse / LOG2E, mask=(g < G) & (tl.program_id(1) == 0))
    if part < 0:
        return

    lse = tl.where(norm > 0, lse, 0.0)
    logits_ptr = logits + (head.to(tl.int64) * room + kept_from) * G
    tile_max_ptr = tile_max + (head.to(tl.int64) * room + kept_from) // 16 * G
    candidate, least = score_tier(
        start, stop, page, page_ahead, position, old, lse, newest, window, sinks, horizon, every, scratch, logits_ptr,
        tile_max_ptr, pages, page_table, row_blocks, row, layer, head, own_high, 0, LAYOUTS[0][I_TOKENS], SCORES,
        LAYOUTS[0][I_POSITIONS], TILES[0], SIZE, PAGE_BYTES, MAX_BLOCKS, L, H, G, GP, MEAN,
    )  # fmt: skip
    store_found(found_ptr, candidate, part, parts, max_parts)
    store_found(found_ptr + max_parts, least, part, parts, max_parts)
    for tier in tl.static_range(1, TIERS):
        least = tl.full([], NOTHING, tl.int64)
        if SCORE_LOW:
            own_first = tl.load(own_entry + counts + tier)
            fitting = tl.maximum(room - kept_from - tokens_before, 0) // TILES[tier]
            start, stop, page, page_ahead, position, old = first_tokens(
                part, scoring, fitting, pages, page_table, row_blocks, row, layer, head, tier_entries[tier], own_first,
                tier, LAYOUTS[tier][I_TOKENS], LAYOUTS[tier][I_SCORES], LAYOUTS[tier][I_POSITIONS], TILES[tier], SIZE,
                PAGE_BYTES, MAX_BLOCKS, L, H,
            )  # fmt: skip
            _, least = score_tier(
                start, stop, page, page_ahead, position, old, lse, newest, window, sinks, horizon, every, scratch,
                logits_ptr + tokens_before * G, tile_max_ptr + tiles_before * G, pages, page_table,
                row_blocks, row, layer, head, own_first, tier, LAYOUTS[tier][I_TOKENS], LAYOUTS[tier][I_SCORES],
                LAYOUTS[tier][I_POSITIONS], TILES[tier], SIZE, PAGE_BYTES, MAX_BLOCKS, L, H, G, GP, MEAN,
            )  # fmt: skip
            kept = (tier_entries[tier] - own_first) * ceil_div(LAYOUTS[tier][I_TOKENS], TILES[tier])
            tiles_before += kept
            tokens_before += kept * TILES[tier]
        store_found(found_ptr + (1 + tier) * max_parts, least, part, parts, max_parts)
