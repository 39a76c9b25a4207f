"""Exact prefix fidelity: the tree keeps a prompt as it was computed, the request runs on a compressed copy of its own.

When a prompt's last chunk has run, its new pages become a *pending* segment, immutable, which the prefix cache
takes over when SGLang inserts the prompt. The row drops all references but those to the part of its prefix that it
shares with other running requests (the *kept* path), and the rest, from the tree's pages and the new ones, is copied
into pages of the row's own, compressed by the policy. All of it is launched behind the prompt's pass and before the
next token is written.

A copy is judged by its own request: while the prompt runs, the attention that shared tokens receive is folded into
scores of the row (``judged``), never into pages that others read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_diffkv.mem_pool.geometry import Path, Segment, path_end, rows_of
from sglang_diffkv.mem_pool.table_space import blocks_of
from sglang_diffkv.policies.diffkv import KEEP

if TYPE_CHECKING:
    from sglang_diffkv.mem_pool.page_manager import PageManager


@dataclass(frozen=True)
class CopyPlan:
    """What a row refers to when its prompt has run: ``kept`` stays shared, ``copied`` is copied with its new tokens."""

    kept: Path
    copied: Path
    publish: bool  # whether the new tokens' pages wait for the prefix cache
    segment_row: int
    pages: int  # at most
    blocks: int  # of the page table, at most


class PromptCopies:
    """Plans of copies, and segments that wait for the prefix cache."""

    def __init__(self, manager: PageManager):
        self.manager = manager
        self.plans: dict[int, CopyPlan] = {}  # row -> plan; carried out at the end of the pass that is planned
        self.pending: dict[int, Segment] = {}  # row -> its prompt's new pages
        self.untouched: set[int] = set()  # rows whose prompt stays as it is, for a request that ends with it
        self.judged: dict[int, torch.Tensor] = {}  # row -> [L, H, shared tokens] float32, NaN where not judged yet

    def judge(self, row: int) -> None:
        """From now on, the row's passes judge the shared tokens for its copy, if there is room for their scores.
        Otherwise the copy goes by what is known of them."""
        geometry, shared = self.manager.geometry, self.manager.shared[row]
        if sum(x.shape[2] for x in self.judged.values()) + shared > geometry.judged_tokens:
            return
        with self.manager.launching():
            self.judged[row] = torch.full(
                (geometry.num_layers, geometry.num_heads, shared), float("nan"), device=self.manager.state.device
            )

    def planned_pages(self) -> int:
        """Pages that the planned copies take, at most."""
        return sum(plan.pages for plan in self.plans.values())

    def planned_blocks(self) -> int:
        return sum(plan.blocks for plan in self.plans.values())

    def blocks_for(self, row: int, kept: Path, tokens: int) -> int:
        """Table blocks, at most, of a segment of the row's new pages and of the row with ``tokens`` copied."""
        return blocks_of(self.manager.space.bound(row)) + self.manager.space.blocks_for(kept, tokens)

    def plan(self, row: int, kept: Path, copied: Path, *, publish: bool) -> bool:
        """Copy at the end of the planned pass, which ends the row's prompt. The caller has made sure of the pages.

        Returns False, changing nothing, if no segment row or table block is left.
        """
        manager = self.manager
        start = path_end(kept)
        tokens = manager.lengths[row] - start
        blocks = self.blocks_for(row, kept, tokens)
        own = manager.lengths[row] - manager.shared.get(row, 0)
        segment_row = manager.segments.take_row(-(-own // manager.fmt.high.tokens), 0)
        if segment_row is None:
            return False
        self.plans[row] = CopyPlan(kept, copied, publish, segment_row, manager.geometry.most_pages(tokens), blocks)
        return True

    def carry_out(self, row: int) -> None:
        """Behind the pass: part with the prompt's pages and copy."""
        manager, state = self.manager, self.manager.state
        plan = self.plans.pop(row)
        length, shared = manager.lengths[row], manager.shared.get(row, 0)
        judged = self.judged.pop(row, None)
        with manager.launching():
            manager.ops.attach(state, plan.segment_row, row, shared, length, kept_only=True)
        pending = self.pending[row] = Segment(plan.segment_row, shared, length, exact=True, first=shared)
        manager.segment_counts.changed(pending)
        self._restart(row, plan.kept, length)
        with manager.launching():
            parts = rows_of([*plan.copied, (pending, shared, length)])
            manager.ops.copy_compact(state, row, parts, length, manager.policy, judged)
        manager.counts.record(-plan.pages)
        if not plan.publish:
            self.drop_pending(row)

    def copy_running(self, row: int, kept: Path, copied: Path) -> bool:
        """A row past its prompt copies the ``copied`` part of its prefix, compressed by the policy, and its own tokens
        as they are, to new pages behind ``kept``. Between steps; the caller has made sure of the pages.

        Returns False, changing nothing, if no segment row or table block is left.
        """
        manager, state = self.manager, self.manager.state
        length, shared = manager.lengths[row], manager.shared[row]
        old = manager.segments.take_row(*manager.space.bound(row))
        if old is None:
            return False
        with manager.launching():
            manager.ops.attach(state, old, row, shared, length, kept_only=True)
        self._restart(row, kept, length)
        with manager.launching():
            manager.ops.copy_compact(state, row, rows_of(copied), length, manager.policy, None)
            manager.ops.copy_compact(state, row, [(old, shared, length)], length, KEEP, None)
            manager.ops.release(state, old)
        manager.segments.return_row(old)
        manager.counts.record(-manager.geometry.most_pages(length - path_end(kept)))
        manager.counts.touch(row, decoded=True)
        manager.version += 1
        return True

    def _restart(self, row: int, kept: Path, length: int) -> None:
        """Let a row go of all but ``kept``, with room for the copies of the rest of its ``length`` tokens."""
        manager, state = self.manager, self.manager.state
        with manager.launching():
            fault = state.fault[row].clone()
            manager.ops.release(state, row)
            state.fault[row] = fault
        manager.space.release(row)
        for part in kept:
            manager.attach_part(row, *part)
        start = path_end(kept)
        manager.space.extend(row, *manager.packer.room(length - start))
        manager.shared.pop(row, None)
        if start:
            manager.shared[row] = start

    def take(self, row: int, lo: int, hi: int) -> Segment | None:
        """The pending segment of a row, limited to [lo, hi), for the prefix cache; None if it does not hold that."""
        pending = self.pending.get(row)
        if pending is None or not pending.lo <= lo < hi <= pending.hi:
            return None
        manager = self.manager
        if (lo, hi) != (pending.lo, pending.hi):
            narrow = manager.segments.take_row(*manager.space.bound(pending.row))
            if narrow is None:
                return None
            with manager.launching():
                manager.ops.attach(manager.state, narrow, pending.row, lo, hi)
            self._drop(pending)
            pending = Segment(narrow, lo, hi, exact=True, first=pending.first)
        del self.pending[row]
        manager.segments.add(pending)
        return pending

    def forget(self, row: int) -> None:
        """The row is released: give up what was not carried out or taken."""
        self.judged.pop(row, None)
        self.untouched.discard(row)
        if plan := self.plans.pop(row, None):
            self.manager.segments.return_row(plan.segment_row)
        self.drop_pending(row)

    def drop_pending(self, row: int) -> None:
        """The prefix cache does not want the row's pending segment, or not any more."""
        if pending := self.pending.pop(row, None):
            self._drop(pending)

    def _drop(self, pending: Segment) -> None:
        manager = self.manager
        with manager.launching():
            manager.ops.release(manager.state, pending.row)
        manager.segments.return_row(pending.row)
        manager.version += 1
