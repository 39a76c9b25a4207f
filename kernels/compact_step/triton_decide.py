"""Generation-phase decisions and how many low-tier pages they need, for all heads in one launch."""

import triton
import triton.language as tl

from sglang_diffkv.kernels.decode_attention.triton_finish import NOTHING
from sglang_diffkv.kernels.triton_ring import record_demand
from sglang_diffkv.kernels.triton_table import I_TOKENS


@triton.jit
def best_found(found, at, live, parts):
    """Least of a search's packed results: own slot [R] int32 (-1 for none) and score [R] float32."""
    best = tl.full(at.shape, NOTHING, tl.int64)
    for part in range(parts):
        best = tl.minimum(best, tl.load(found + at + part, mask=live, other=NOTHING))
    slot = tl.where(best == NOTHING, -1, (best & 0xFFFFFFFF).to(tl.int32))
    return slot, (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def budget_of(length, tokens, fraction):
    """``StepBudget.kept`` of [R] lengths."""
    share = tl.ceil(length.to(tl.float64) * fraction).to(tl.int64)
    return tl.minimum(length.to(tl.int64), tl.maximum(share, tokens.to(tl.int64)))


@triton.jit(do_not_specialize=["batch", "parts"], do_not_specialize_on_alignment=["rows", "seq_lens"])
def decide_kernel(
    found, parts, rows, seq_lens, num_valid, batch, first_rule, between, second_rule, sums, demote_out,
    leave_out, target_out, tier_out,
    entries, own_entry, own_tokens, demand_out, totals,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, R: tl.constexpr, BUDGET: tl.constexpr,
    OF_SUM: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(batch * L * H / R)): ``R`` heads, numbered (request, layer, head). ``parts`` programs searched each
    head.

    Writes [batch, L, H] int32 own slots, -1 for none: the high slot to requantise, the high slot that falls free, and
    the slot of a lower tier that takes the token. With more than two tiers it also writes which tier. The demand of
    each lower tier comes behind that of the one before, and so do ``totals``. The rule [L, H] is ``StepCuts``' high and
    low, with ``BUDGET`` ``StepBudget``'s tokens and fraction; ``between`` [TIERS - 2, L, H], None with two tiers.
    ``sums`` [batch, L, H] is read with ``OF_SUM``.
    """
    flat = tl.program_id(0) * R + tl.arange(0, R)
    b = flat // (L * H)
    layer = flat // H % L
    head = flat % H
    inside = b < batch
    live = inside & (b < tl.load(num_valid))
    row = tl.load(rows + b, mask=live, other=0).to(tl.int64)
    length = tl.load(seq_lens + b, mask=live, other=1)
    at = (row * L + layer) * H + head
    first = flat.to(tl.int64) * (TIERS + 1) * parts
    least, least_score = best_found(found, first + parts, live, parts)
    target = tl.full([R], -1, tl.int32)
    demote = target
    if BUDGET:
        tokens, fraction = tl.load(first_rule + flat % (L * H)), tl.load(second_rule + flat % (L * H))
        drop = tl.where(budget_of(length, tokens, fraction) == budget_of(length - 1, tokens, fraction), least, -1)
    else:
        if OF_SUM:
            whole = tl.load(sums + flat, mask=live, other=0.0)
            low = tl.load(second_rule + flat % (L * H)) * whole
            high = tl.load(first_rule + flat % (L * H)) * whole if TIERS > 1 else low
        else:
            length = length.to(tl.float32)
            low = tl.div_rn(tl.load(second_rule + flat % (L * H)), length)
            high = tl.div_rn(tl.load(first_rule + flat % (L * H)), length) if TIERS > 1 else low
        candidate, candidate_score = best_found(found, first, live, parts)
        present = candidate >= 0
        stays = present & (candidate_score >= high)
        goes_low = present & (candidate_score < high) & (candidate_score >= low)
        goes_out = present & (candidate_score < high) & (candidate_score < low)
        victim = stays & (least >= 0) & (least_score < high)
        demote = tl.where(goes_low, candidate, tl.where(victim & (least_score >= low), least, -1))
        drop = tl.where(goes_out, candidate, tl.where(victim & (least_score < low), least, -1))
    if TIERS > 1 and not BUDGET:
        named = tl.full([R], TIERS - 1, tl.int32)
        if TIERS > 2:
            moved = tl.where(goes_low, candidate_score, least_score)
            for step in tl.static_range(1, TIERS - 1):
                lower = TIERS - 1 - step  # from the lowest threshold between up
                cut = tl.div_rn(tl.load(between + (lower - 1) * L * H + flat % (L * H)), length)
                named = tl.where(moved >= cut, lower, named)
            tl.store(tier_out + flat, named, mask=inside)
        for tier in tl.static_range(1, TIERS):
            worst, worst_score = best_found(found, first + (1 + tier) * parts, live, parts)
            replace = goes_low & (worst >= 0) & (worst_score < low)
            used = tl.load(own_tokens + at * TIERS + tier, mask=live, other=0)
            moves = live & (demote >= 0)
            if TIERS > 2:
                moves = moves & (named == tier)
            appended = moves & (replace == 0)
            start = tl.load(entries + at * TIERS + tier, mask=live, other=0)
            have = start - tl.load(own_entry + at * TIERS + tier, mask=live, other=0)
            demand = (appended & (used >= have * LAYOUTS[tier][I_TOKENS])).to(tl.int32)
            tl.store(own_tokens + at * TIERS + tier, used + 1, mask=appended)
            if TIERS > 2:
                target = tl.where(moves, tl.where(replace, worst, used), target)
            else:
                target = tl.where(replace, worst, used)
            program = (tier - 1) * tl.num_programs(0) + tl.program_id(0)
            record_demand(demand, flat, inside, program, demand_out + (tier - 1) * batch * (L * H), totals)
    tl.store(demote_out + flat, tl.where(live, demote, -1), mask=inside)
    tl.store(leave_out + flat, tl.where(live, tl.maximum(demote, drop), -1), mask=inside)
    tl.store(target_out + flat, target, mask=inside)
