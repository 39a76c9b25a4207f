"""Generation-phase decisions and how many low-tier pages they need, for all heads in one launch."""

import triton
import triton.language as tl

from sglang_diffkv.kernels.decode_attention.triton_finish import NOTHING
from sglang_diffkv.kernels.triton_ring import record_demand


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
    found, parts, rows, seq_lens, num_valid, batch, first_rule, second_rule, sums, demote_out,
    leave_out, target_out,
    entries, own_entry, own_tokens, demand_out, totals,
    TOKENS: tl.constexpr, TIERS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, R: tl.constexpr, BUDGET: tl.constexpr,
    OF_SUM: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(batch * L * H / R)): ``R`` heads, numbered (request, layer, head). ``parts`` programs searched each
    head.

    Writes [batch, L, H] int32 own slots, -1 for none: the high slot to requantise, the high slot that falls
    free, and the low slot that takes the token. ``TOKENS`` is the low tier's.
    The rule [L, H] is ``StepCuts``' high and low, with ``BUDGET`` ``StepBudget``'s tokens and fraction. ``sums``
    [batch, L, H] is read with ``OF_SUM``.
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
        low = tl.load(second_rule + flat % (L * H))
        high = tl.load(first_rule + flat % (L * H)) if TIERS == 2 else low
        if OF_SUM:
            whole = tl.load(sums + flat, mask=live, other=0.0)
            low, high = low * whole, high * whole
        else:
            length = length.to(tl.float32)
            low, high = tl.div_rn(low, length), tl.div_rn(high, length)
        candidate, candidate_score = best_found(found, first, live, parts)
        present = candidate >= 0
        stays = present & (candidate_score >= high)
        goes_low = present & (candidate_score < high) & (candidate_score >= low)
        goes_out = present & (candidate_score < high) & (candidate_score < low)
        victim = stays & (least >= 0) & (least_score < high)
        demote = tl.where(goes_low, candidate, tl.where(victim & (least_score >= low), least, -1))
        drop = tl.where(goes_out, candidate, tl.where(victim & (least_score < low), least, -1))
    if TIERS == 2 and not BUDGET:
        worst, worst_score = best_found(found, first + 2 * parts, live, parts)
        replace = goes_low & (worst >= 0) & (worst_score < low)
        used = tl.load(own_tokens + at * TIERS + 1, mask=live, other=0)
        appended = live & (demote >= 0) & (replace == 0)
        start = tl.load(entries + at * TIERS + 1, mask=live, other=0)
        have = start - tl.load(own_entry + at * TIERS + 1, mask=live, other=0)
        demand = (appended & (used >= have * TOKENS)).to(tl.int32)
        tl.store(own_tokens + at * TIERS + 1, used + 1, mask=appended)
        target = tl.where(replace, worst, used)
        record_demand(demand, flat, inside, tl.program_id(0), demand_out, totals)
    tl.store(demote_out + flat, tl.where(live, demote, -1), mask=inside)
    tl.store(leave_out + flat, tl.where(live, tl.maximum(demote, drop), -1), mask=inside)
    tl.store(target_out + flat, target, mask=inside)
