"""The circular free page list on the GPU: count, prefix sum, then take or return, each a launch of its own.

Programs first say how many pages they take or return. The prefix sum (``kernels/prefix_sum``) gives each its span of
the ring and advances the ring's counter. Then each takes the pages of its span or puts pages there. So which pages a
head gets follows from the numbers, never from the order in which programs run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_diffkv.layout.state import PageState

EMPTY = tl.constexpr(-1)
NO_LIMIT = tl.constexpr(2**31 - 1)
HEADS = 128
"""Heads of a program that asks for pages or takes them."""


@dataclass
class Spans:
    """What programs tell one another between the launches of one operation: static addresses for graph capture.

    Operations follow one another on one stream, so any of them may use the same.
    """

    requests: int  # at most
    demand: torch.Tensor  # [max(requests * (T - 1 or 1), T) * L * H] int32: pages of each head, of each tier
    totals: torch.Tensor  # [programs] int32: pages of each program's heads together
    places: torch.Tensor  # [programs + 1] int64: where in the ring a program's span begins, and the end of all

    @classmethod
    def create(cls, state: PageState, requests: int) -> Spans:
        """For ``requests`` requests' heads, in each lower tier if there are more than two, or all tiers of one row."""
        heads, tiers = state.num_layers * state.num_heads, len(state.fmt.tiers)
        lower = max(tiers - 1, 1)
        programs = max(lower * triton.cdiv(requests * heads, HEADS), tiers * heads)  # a row's pages return by head
        return cls(
            requests,
            torch.zeros(max(requests * lower, tiers) * heads, dtype=torch.int32, device=state.device),
            torch.zeros(programs, dtype=torch.int32, device=state.device),
            torch.zeros(programs + 1, dtype=torch.int64, device=state.device),
        )


@triton.jit
def record_demand(wanted, flat, live, program, demand, totals):
    """Say that the heads ``flat`` [R] of a program want ``wanted`` [R] pages each, 0 where they are not ``live``."""
    tl.store(demand + flat, wanted, mask=live)
    tl.store(totals + program, tl.sum(wanted, 0))


@triton.jit
def drop_references(page, mask, refcount):
    """Drop one reference of each of [R] pages where ``mask``; returns which of them nobody refers to now."""
    before = tl.atomic_add(refcount + tl.where(mask, page, 0), -1, mask=mask)
    return mask & (before == 1)


@triton.jit
def place_pages(page, freed, place, ring, num_pages):
    """Put those of [R] pages that are ``freed`` into the ring from ``place`` on; returns the place behind them."""
    count = freed.to(tl.int32)
    at = place + (tl.cumsum(count, 0) - count).to(tl.int64)
    tl.store(ring + at % num_pages, page, mask=freed)
    return place + tl.sum(count, 0)
