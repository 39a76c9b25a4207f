"""What happens behind a pass that ends a prompt, or a chunk of one: compaction, copies, and freezes for the prefix
cache.

With exact prefix fidelity the tree keeps a prompt as it was computed, and the request runs on a compressed copy of its
own. When a prompt's last chunk has run, its new pages become a *pending* segment, immutable, which the prefix cache
takes over when SGLang inserts the prompt. The row drops all references but those to the part of its prefix that it
shares with other running requests (the *kept* path). The rest, from the tree's pages and the new ones, is copied into
pages of the row's own, compressed by the policy. All of it is launched behind the prompt's pass and before the next
token is written.

With compressed fidelity a prompt's pages are *frozen* at its end for the tree to take, all but those of its *tail*. The
tail has the newest tokens, which are in the high tier only because they are new. They stay the request's own and go
down as others follow, which they could not in the tree's pages. They join the tree with the reply. If the tree takes
multiples of some tokens only (``--page-size``), the tail has what is left over too.

A copy is scored by its own request: while the prompt runs, the attention that shared tokens receive is folded into
scores of the row (``shared_scores``), never into pages that others read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_diffkv.layout.geometry import Path, Segment, path_end, rows_of
from sglang_diffkv.mem_pool.counts import PageCounts
from sglang_diffkv.mem_pool.device import PageDevice
from sglang_diffkv.mem_pool.high_rows import KEEPS_ALL, HighRows
from sglang_diffkv.mem_pool.row_windows import RowWindows
from sglang_diffkv.mem_pool.rows import RequestRows
from sglang_diffkv.mem_pool.segments import SegmentStore
from sglang_diffkv.mem_pool.table_space import blocks_of
from sglang_diffkv.ops.decisions import untouched_tokens
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.diffkv import KEEP, STAY


@dataclass(frozen=True)
class CopyPlan:
    """What a row refers to when its prompt has run: ``kept`` stays shared, ``copied`` is copied with its new tokens."""

    kept: Path
    copied: Path
    publish: bool  # whether the new tokens' pages wait for the prefix cache
    segment_row: int
    pages: int  # at most
    blocks: int  # of the page table, at most


def lent_pages(device: PageDevice, *, tail: bool = False) -> int:
    """Pages that the compaction of a row borrows for the moment. ``tail``: its tail begins a page of its own."""
    return device.geometry.heads * (len(device.fmt.tiers) - 1 + tail)


def compact(
    device: PageDevice,
    counts: PageCounts,
    ends: Sequence[tuple[int, int]],
    policy: Policy,
    tails: Sequence[int] | None = None,
) -> None:
    """Sort what rows own in the high tier into tiers. ``ends``: rows, with the lengths of their sequences; there are
    certainly pages to lend to each. ``tails``: tokens at the end of each that begin a page of their own."""
    with device.launching():
        device.ops.compact_prompts(ends, policy, tails)
    if counts.low_grows or tails is not None:
        for _ in ends:
            counts.record(-lent_pages(device, tail=tails is not None))


class Prompts:
    """Prompts of running requests, from their last chunk on.

    Attributes:
        share_min_tokens: a prompt with this many own tokens is frozen at its end, ready for the prefix cache; None:
            never. tail: of these, the last that are not, where as many are left before them. page_size: of the prefix
            cache; what is frozen ends at a multiple.
        plans: row -> copy, carried out at the end of the pass that is planned. pending: row -> its prompt's new pages.
        untouched: rows whose prompt stays as it is, for a request that ends with it.
        shared_scores: row -> [L, H, shared tokens] float32, NaN where there is none yet.
        outcomes: prompts so far: compressed in place; left as they are, by the policy or as shorter than its window.
    """

    def __init__(
        self, device: PageDevice, rows: RequestRows, counts: PageCounts, segments: SegmentStore, high: HighRows,
        windows: RowWindows,
    ):  # fmt: skip
        self.device, self.rows, self.counts, self.segments = device, rows, counts, segments
        self.high, self.windows, self.policy = high, windows, windows.policy
        self.share_min_tokens: int | None = None
        self.tail, self.page_size = 0, 1
        self.plans: dict[int, CopyPlan] = {}
        self.pending: dict[int, Segment] = {}
        self.untouched: set[int] = set()
        self.shared_scores: dict[int, torch.Tensor] = {}
        self.outcomes = {"compressed": 0, "as computed": 0}

    def freeze_from(self, share_min_tokens: int, tail: int, page_size: int = 1) -> None:
        """Freeze prompts from now on: those with so many own tokens, but for a ``tail`` and up to a multiple of
        ``page_size``."""
        self.share_min_tokens, self.tail, self.page_size = share_min_tokens, tail, page_size

    def leave_as_computed(self, row: int) -> None:
        """The row's prompt stays as it is."""
        self.untouched.add(row)

    # Behind a pass

    def end_chunk(self, *rows: int) -> None:
        """Compaction of rows whose prompt is not through: tokens that its own attention so far finds unimportant go
        down for good."""
        for row in self._compact(rows):
            self.counts.touch(row)
            self.rows.compacted(row)

    def end(self, *rows: int) -> None:
        """Compaction of rows whose last chunk has run.

        With overlap scheduling the next step's token is written before the prefix cache asks for the prompt. So a
        prompt that is worth sharing is frozen here, and that token starts a page of its own.
        """
        left = [row for row in rows if row not in self.plans and row not in self.untouched]
        compressed = self._compact(left, tailed=True)
        self.outcomes["compressed"] += len(compressed)
        self.outcomes["as computed"] += len(left) - len(compressed)
        parted = [row for row in left if row not in compressed and self._over(row) and self._worth_sharing(row)]
        tails = compressed | self._compact_by(STAY, parted, tailed=True)
        for row in rows:
            if row in self.plans:
                self._carry_out(row)
        worth = [row for row in rows if self._worth_sharing(row) and not self._over(row, tails.get(row, 0))]
        if frozen := {row: tails.get(row, 0) for row in worth}:
            self.device.freeze(frozen)
        for row, tail in frozen.items():
            self.rows.freeze(row, tail)
        for row in rows:
            self.shared_scores.pop(row, None)
            self.counts.touch(row)
            self.rows.end_prompt(row)

    def _worth_sharing(self, row: int) -> bool:
        least = 1 if row in self.untouched else self.share_min_tokens
        return row not in self.pending and least is not None and self._own(row) >= least

    def _own(self, row: int) -> int:
        return self.rows.length(row) - self.rows.shared(row)

    def _over(self, row: int, tail: int = 0) -> int:
        """Tokens of the row's sequence, without a ``tail``, that are over a multiple of the page size."""
        return (self.rows.length(row) - tail) % self.page_size

    def _tail(self, row: int) -> int:
        """Tokens at the end of the prompt that stay the row's own when it is frozen."""
        least, tail = self.share_min_tokens, self.tail
        if tail and row in self.windows:
            tail = self.windows.window_of(row)
        if least is None or self._own(row) < least:
            return 0
        if self._own(row) < least + tail:
            tail = 0
        tail += self._over(row, tail)
        if not tail or self._own(row) <= tail:
            return 0
        page = (1, *(0 for _ in self.device.fmt.tiers[1:]))  # the one that the tail begins
        return tail if self.device.space.extended(row, page) else 0

    def _compact(self, rows: Sequence[int], *, tailed: bool = False) -> dict[int, int]:
        """Prompt-phase compaction of those rows, which are returned, where the policy has something to decide: so many
        at once as there are certainly pages to lend to each.

        Args:
            tailed: tails begin pages of their own, as far as there are pages and table blocks for that.

        Returns:
            Rows, each with its tail.
        """
        alike: dict[int, list[int]] = {}  # by window
        for row in rows:
            if row not in self.high:
                alike.setdefault(self.windows.window_of(row), []).append(row)
        groups = [(self.windows.policy_of(some[0]), some) for some in alike.values()]
        done: dict[int, int] = {}
        for policy, some in [(KEEPS_ALL, [row for row in rows if row in self.high]), *groups]:
            longest = untouched_tokens(self.device.state, policy)
            long = [row for row in some if self.rows.length(row) > longest]
            done.update(self._compact_by(policy, long, tailed=tailed))
        return done

    def _compact_by(self, policy: Policy, left: Sequence[int], *, tailed: bool) -> dict[int, int]:
        """The same of rows that go by one policy."""
        done: dict[int, int] = {}
        while left:
            lent = lent_pages(self.device, tail=tailed and (self.tail > 0 or self.page_size > 1))
            fitting = (self.counts.free() - self.counts.headroom()) // lent if lent else len(left)
            some, left = left[: max(fitting, 1)], left[max(fitting, 1) :]
            tails = [self._tail(row) if tailed and fitting > 0 else 0 for row in some]
            ends = [(row, self.rows.length(row)) for row in some]
            compact(self.device, self.counts, ends, policy, tails if any(tails) else None)
            done.update(zip(some, tails, strict=True))
        return done

    # Copies

    def score_shared(self, row: int) -> None:
        """From now on, the row's passes score the shared tokens for its copy, if there is room for their scores and
        they matter. Otherwise the copy goes by what is known of them."""
        geometry, shared = self.device.geometry, self.rows.shared(row)
        if not self.policy.scored_tiers(len(self.device.fmt.tiers)):
            return
        if sum(x.shape[2] for x in self.shared_scores.values()) + shared > geometry.scored_tokens:
            return
        with self.device.launching():
            self.shared_scores[row] = torch.full(
                (geometry.num_layers, geometry.num_heads, shared), float("nan"), device=self.device.state.device
            )

    def planned_pages(self) -> int:
        """Pages that the planned copies take, at most."""
        return sum(plan.pages for plan in self.plans.values())

    def planned_blocks(self) -> int:
        """Table blocks that they take, at most."""
        return sum(plan.blocks for plan in self.plans.values())

    def blocks_for(self, row: int, kept: Path, tokens: int) -> int:
        """Table blocks, at most, of a segment of the row's new pages and of the row with ``tokens`` copied."""
        space = self.device.space
        return blocks_of(space.bound(row)) + space.blocks_for(kept, tokens)

    def plan_copy(self, row: int, kept: Path, copied: Path, *, publish: bool) -> bool:
        """Copy at the end of the planned pass, which ends the row's prompt. The caller has made sure of the pages.

        Returns False, changing nothing, if no segment row or table block is left.
        """
        geometry, length = self.device.geometry, self.rows.length(row)
        tokens = length - path_end(kept)
        blocks = self.blocks_for(row, kept, tokens)
        own = length - self.rows.shared(row)
        lower = [0] * (len(geometry.fmt.tiers) - 1)
        segment_row = self.segments.take_row((-(-own // geometry.fmt.high.tokens), *lower))
        if segment_row is None:
            return False
        self.plans[row] = CopyPlan(kept, copied, publish, segment_row, geometry.most_pages(tokens), blocks)
        return True

    def _carry_out(self, row: int) -> None:
        """Behind the pass: part with the prompt's pages and copy."""
        plan, shared_scores = self.plans.pop(row), self.shared_scores.pop(row, None)
        length, shared = self.rows.length(row), self.rows.shared(row)
        self.device.share(plan.segment_row, row, shared, length, kept_only=True)
        pending = self.pending[row] = Segment(plan.segment_row, shared, length, as_computed=True, first=shared)
        self.segments.counts_of.changed(pending)
        self.restart(row, plan.kept, length)
        parts = rows_of([*plan.copied, (pending, shared, length)])
        self.device.copy(row, parts, length, self.windows.policy_of(row), shared_scores)
        self.counts.record(-plan.pages)
        if not plan.publish:
            self.drop_pending(row)

    def copy_running(self, row: int, kept: Path, copied: Path) -> bool:
        """A row past its prompt copies the ``copied`` part of its prefix, compressed by the policy, and its own tokens
        as they are, to new pages behind ``kept``. Between steps; the caller has made sure of the pages.

        Returns False, changing nothing, if no segment row or table block is left.
        """
        device, length, shared = self.device, self.rows.length(row), self.rows.shared(row)
        old = self.segments.take_row(device.space.bound(row))
        if old is None:
            return False
        device.share(old, row, shared, length, kept_only=True)
        self.restart(row, kept, length)
        device.copy(row, rows_of(copied), length, self.windows.policy_of(row))
        device.copy(row, [(old, shared, length)], length, KEEP)
        self.segments.return_row(old)
        self.counts.record(-device.geometry.most_pages(length - path_end(kept)))
        self.counts.touch(row, decoded=True)
        return True

    def restart(self, row: int, kept: Path, length: int, *, room: int | None = None) -> None:
        """Let a row go of all but ``kept``, with table blocks for the copies of the rest of its ``length`` tokens, or
        of ``room`` of them."""
        self.device.release(row, keep_fault=True)
        self.device.attach(row, kept)
        start = path_end(kept)
        space = self.device.space
        space.extend(row, space.dense_entries(length - start if room is None else room))
        self.rows.share(row, start)

    # For the prefix cache

    def publishable_to(self, row: int) -> int | None:
        """Position up to which a running row's tokens may join the prefix cache now."""
        pending = self.pending.get(row)
        return pending.hi if pending else self.rows.frozen(row)

    def can_publish(self, row: int) -> bool:
        """Whether a segment row and table blocks are left to make a segment of the row's own pages, or of a part of its
        pending one."""
        return self.segments.has_room([row, self.pending[row].row] if row in self.pending else [row])

    def publish(self, row: int, lo: int, hi: int) -> Segment | None:
        """A segment of the prefix cache for positions [lo, hi) of the row: its pending one, or one of its own pages.
        None, changing nothing, if no segment row or table block is left."""
        return self._take_pending(row, lo, hi) or self.segments.share(row, lo, hi, as_computed=row in self.untouched)

    def _take_pending(self, row: int, lo: int, hi: int) -> Segment | None:
        """The pending segment of a row, limited to [lo, hi), for the prefix cache; None if it does not hold that."""
        pending = self.pending.get(row)
        if pending is None or not pending.lo <= lo < hi <= pending.hi:
            return None
        if (lo, hi) != (pending.lo, pending.hi):
            narrow = self.segments.take_row(self.device.space.bound(pending.row))
            if narrow is None:
                return None
            self.device.share(narrow, pending.row, lo, hi)
            self._drop(pending)
            pending = Segment(narrow, lo, hi, as_computed=True, first=pending.first)
        del self.pending[row]
        self.segments.add(pending)
        return pending

    def drop_pending(self, row: int) -> None:
        """The prefix cache does not want the row's pending segment, or not any more."""
        if pending := self.pending.pop(row, None):
            self._drop(pending)

    def _drop(self, pending: Segment) -> None:
        self.segments.return_row(pending.row)
        self.counts.record(0)

    def forget(self, row: int) -> None:
        """The row is released: give up what was not carried out or taken."""
        self.shared_scores.pop(row, None)
        self.untouched.discard(row)
        if plan := self.plans.pop(row, None):
            self.segments.return_row(plan.segment_row)
        self.drop_pending(row)
