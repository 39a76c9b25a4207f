"""The page manager: the parts that own pages, and what concerns several of them.

Requests use row ``req_pool_idx``; tree segments take rows behind them. The parts stand on one another in this order,
and each writes its own fields only:

- ``PageDevice``: state, ops and table blocks; ``RequestRows``: what the host knows of each request's row;
- ``HighRows``: rows that keep all tokens in the high tier; ``RowWindows``: rows with a window of their own;
- ``PageCounts``: bounds of the device's page counts;
- ``SegmentStore``: segments of the prefix cache; ``Prompts``: what happens at the end of prompts;
- ``SavedRows``: rows of retracted requests in host memory; ``SavedSegments``: evicted prefixes there, with what other
  buffers hold for them in ``SlotStore``. None where they are not kept;
- ``RowTransfer``: rows on their way between servers; None where one server does all;
- ``RunningCompression``: where requests hold a budget while they run; None where the policy has none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from sglang_diffkv.kernels.count_rows.reference import DEMAND
from sglang_diffkv.layout.geometry import Geometry, Path, Segment
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.mem_pool.counts import PageCounts
from sglang_diffkv.mem_pool.device import OpsOf, PageDevice
from sglang_diffkv.mem_pool.high_rows import HighRows
from sglang_diffkv.mem_pool.pressure import Pressure
from sglang_diffkv.mem_pool.prompts import Prompts
from sglang_diffkv.mem_pool.row_transfer import RowTransfer
from sglang_diffkv.mem_pool.row_windows import RowWindows
from sglang_diffkv.mem_pool.rows import RequestRows
from sglang_diffkv.mem_pool.running import RunningCompression, query_cache
from sglang_diffkv.mem_pool.saved_rows import SavedRows
from sglang_diffkv.mem_pool.saved_segments import GUESTS, SavedSegments
from sglang_diffkv.mem_pool.saved_slots import SlotStore
from sglang_diffkv.mem_pool.segments import SegmentStore
from sglang_diffkv.mem_pool.steps import LaunchedStep, PlannedStep
from sglang_diffkv.mem_pool.table_space import TableSpace
from sglang_diffkv.ops import Ops, ReferenceOps
from sglang_diffkv.ops.base import usual_scaling
from sglang_diffkv.policies.base import Policy, has_scores


class PageManager:
    """Plans steps, gives rows their pages and takes them back.

    Args:
        make_ops: makes the ops for the state; by default the reference.
        q_heads: query heads, for a policy that scores running requests; by default as many as KV heads.
        drafts: tokens of a request that decode passes verify, the first of them sampled already; 0 without speculation.
            longest_path: of trees of drafts, those that a pass accepts at most; 0 for chains, of which it may be all.
        host_pages: pages of host memory for retracted requests and evicted prefixes. keeps_retracted: whether the
            former go there. write_policy: when the latter do (SGLang's name of it); empty if they do not. host_slots:
            states, or tokens of a draft model, that host memory has room for beside the pages (``keep_slots``).
        high_rows: whether requests may keep all tokens in the high tier. Not where they hold budgets. most_window: the
            largest window that a request may have for itself; 0: all have the policy's.
        transfer_blocks: blocks of host memory for rows that go to another server, or come from one; 0: none do.
            kept_pages: as of ``RowTransfer``.
    """

    def __init__(
        self,
        geometry: Geometry,
        policy: Policy,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        ranks: Ranks | None = None,
        make_ops: OpsOf | None = None,
        q_heads: int | None = None,
        drafts: int = 0,
        longest_path: int = 0,
        host_pages: int = 0,
        host_slots: int = 0,
        keeps_retracted: bool = True,
        write_policy: str = "",
        high_rows: bool = False,
        most_window: int = 0,
        transfer_blocks: int = 0,
        kept_pages: int = 0,
    ):
        self.geometry, self.fmt, self.policy = geometry, geometry.fmt, policy
        self.ranks = ranks or Ranks()
        assert has_scores(policy), f"{policy.score_source} has no scores for the policy's rules"
        assert self.fmt.scored >= policy.scored_tiers(len(self.fmt.tiers)), "pages lack scores that the policy reads"
        state = PageState.of(geometry, dtype=dtype, device=device)
        lossless = geometry.fmt.high.tier.is_raw and not policy.compresses
        self.device = PageDevice(
            geometry, state, make_ops(state) if make_ops else ReferenceOps(state, policy, lossless)
        )
        self.ops.decisions.use_ranks(self.ranks, state, policy, geometry.max_tokens)
        self.rows = RequestRows()
        self.high = HighRows(self.device, allowed=high_rows and policy.compresses and policy.running is None)
        self.windows = RowWindows(self.device, policy, most_window)
        low_grows = policy.compresses and len(geometry.fmt.tiers) > 1
        self.drafts, self.q_heads = drafts, q_heads or geometry.num_heads
        self.longest_path, self.most_accepted = longest_path, longest_path or drafts
        step_tokens = max(self.most_accepted, 1)
        self.counts = PageCounts(self.device, self.rows, self.ranks, low_grows=low_grows, step_tokens=step_tokens)
        slides = any(geometry.attention_spans)
        turns = None if slides or len(self.fmt.tiers) == 1 else policy.of_turns
        self.segments = SegmentStore(self.device, self.rows, self.counts, turns)
        self.prompts = Prompts(self.device, self.rows, self.counts, self.segments, self.high, self.windows)
        self.saved: SavedRows | None = None
        self.saved_segments: SavedSegments | None = None
        self.keeps_retracted, self.write_policy = keeps_retracted, write_policy
        if host_pages:
            parts = (self.device, self.rows, self.counts, self.segments)
            self.saved = SavedRows(*parts, host_pages, in_parts=bool(write_policy))
            self.saved_segments = SavedSegments(self.device, self.saved) if write_policy else None
        self.saved_slots: SlotStore | None = None
        self.slots_by_token = False
        self.host_slots = host_slots
        self.transfer: RowTransfer | None = None
        if transfer_blocks:
            known = (self.device, self.rows, self.counts, self.high, self.windows)
            self.transfer = RowTransfer(*known, transfer_blocks, kept_pages)
        self.running = self._running_budgets(self.q_heads)
        self._computed: LaunchedStep | None = None
        """A pass whose last layer is launched, until ``end_pass``."""
        self.pressure: Pressure | None = None
        if (rule := policy.under_pressure) is not None and len(self.fmt.tiers) > 1 and not drafts:
            self.pressure = Pressure(self.device, self.rows, self.counts, self.high, self.windows, rule)

    def keep_slots(self, buffers: Sequence[torch.Tensor], count: int, *, by_token: bool = False) -> None:
        """Host memory has room for ``count`` slots of ``buffers`` ([layers, slots, ...] each), which go there beside
        pages; as many on all ranks. ``by_token``: the slot of each token goes with its page."""
        assert self.saved is not None
        self.slots_by_token = by_token
        self.saved_slots = SlotStore(self.device, buffers, count, self.ranks, in_parts=bool(self.write_policy))
        if by_token and self.saved_segments is not None:
            self.saved_segments.drafts = self.saved_slots

    def _running_budgets(self, q_heads: int) -> RunningCompression | None:
        where = {"dtype": self.state.dtype, "device": self.state.device}
        cache = query_cache(self.policy, self.geometry, q_heads, **where)
        if cache is None:
            return None
        parts = (self.device, self.rows, self.counts, self.segments, self.prompts)
        return RunningCompression(*parts, self.policy, cache, usual_scaling(self.fmt.head_dim))

    @property
    def state(self) -> PageState:
        return self.device.state

    @property
    def ops(self) -> Ops:
        return self.device.ops

    @property
    def space(self) -> TableSpace:
        return self.device.space

    @property
    def staging_bytes(self) -> int:
        """Bytes of the device that pages pass through on their way to host memory and back."""
        parts = (self.saved, self.saved_segments, self.saved_slots, self.transfer)
        return sum(part.staging_bytes for part in parts if part is not None)

    @property
    def guests(self) -> str:
        """Whose pages lie in host memory beside those of retracted requests; empty if nobody's do."""
        return "" if self.saved_segments is None else GUESTS

    @property
    def held_segments(self) -> list[Segment]:
        """Segments of the prefix cache, and those that wait for it."""
        return [*self.segments.cached, *self.prompts.pending.values()]

    def launching(self) -> AbstractContextManager[None]:
        """As ``PageDevice.launching``."""
        return self.device.launching()

    def to_device(self, numbers: Any) -> torch.Tensor:
        """As ``PageDevice.to_device``."""
        return self.device.to_device(numbers)

    # A step

    def plan_step(
        self,
        rows: list[int],
        new_tokens: list[int],
        start: list[int],
        *,
        prompts: list[int] | None = None,
        ending: Collection[int] = (),
        compacting: Collection[int] = (),
    ) -> PlannedStep:
        """Room for ``new_tokens[i]`` tokens of row ``rows[i]`` at positions ``start[i]`` and on: table blocks on the
        host, and a snapshot of the counts before the step. The device takes the slots in ``Ops.begin``, in the step.

        Args:
            prompts: where the prompt of each row ends. ending: rows whose prompt ends with the step. compacting: rows
                that are compacted behind it all the same.

        Raises TableFull, before anything changes, if the page table cannot hold a row's next entries, and
        ValueError if a row does not end at ``start``.
        """
        self.end_pass()
        self._check_starts(rows, start)
        self.counts.take_snapshot(of_arriving=False)
        self.space.append_all(rows, new_tokens)
        pages = 0
        for row, count in zip(rows, new_tokens):
            prefills = count > 1 or row not in self.rows or self.rows.in_prompt(row)
            if prefills:
                self.counts.touch(row)
                pages += self.geometry.heads * -(-count // self.fmt.high.tokens)
            self.rows.grow(row, count, in_prompt=prefills)
        step = PlannedStep(
            self.counts.steps + 1,
            list(rows),
            list(new_tokens),
            list(start),
            pages,
            list(prompts or []),
            frozenset(ending),
            frozenset(compacting),
        )
        self.counts.plan(step)
        return step

    def _check_starts(self, rows: list[int], start: list[int]) -> None:
        for row, at in zip(rows, start, strict=True):
            if self.rows.length(row) != at:
                raise ValueError(f"row {row} holds {self.rows.length(row)} tokens, the step starts at {at}")

    def decode_beside_prompts(self, rows: list[int], start: list[int]) -> PlannedStep:
        """The planned pass over prompts computes the next token of each of ``rows`` too, behind ``start`` ones: table
        blocks for these. The snapshot that was taken for the pass covers them.

        Raises TableFull, before anything changes, and ValueError as ``plan_step`` does.
        """
        prompts = self.counts.upcoming
        assert prompts is not None and prompts.prompts and not prompts.decoding, "no pass over prompts is planned"
        self._check_starts(rows, start)
        ones = [1] * len(rows)
        self.space.append_all(rows, ones)
        for row in rows:
            self.rows.grow(row, 1, in_prompt=False)
        step = replace(
            prompts,
            rows=[*prompts.rows, *rows],
            new_tokens=[*prompts.new_tokens, *ones],
            start=[*prompts.start, *start],
            decoding=len(rows),
        )
        self.counts.joined(step)
        return step

    def plan_verification(self, rows: list[int]) -> PlannedStep:
        """The next pass verifies ``drafts`` tokens of each row, of which it stores those that it accepts: how many,
        ``RequestRows.accepted`` is told later. Room is made for ``most_accepted``.

        Raises TableFull, before anything changes.
        """
        self.end_pass()
        assert self.drafts and not any(self.rows.in_prompt(row) for row in rows)
        new_tokens = [self.most_accepted] * len(rows)
        self.counts.take_snapshot(of_arriving=False)
        self.space.append_all(rows, new_tokens)
        starts = [self.rows.length(row) for row in rows]
        for row in rows:
            self.rows.verify(row, self.most_accepted)
        step = PlannedStep(self.counts.steps + 1, list(rows), new_tokens, starts, 0)
        self.counts.plan(step)
        return step

    def know_committed(self, row: int, length: int) -> None:
        """Of a row past its prompt at least ``length`` tokens are accepted, by results that SGLang has seen. Nothing
        beside the passes reads the row any more."""
        if self.drafts and row in self.rows and not self.rows.in_prompt(row):
            self.rows.accepted(row, max(self.rows.length(row), length))

    def cancel_step(self) -> None:
        """The planned step, if there is one, is not going to run; its rows are released next."""
        if self.counts.upcoming is not None:
            self.counts.cancelled()

    def launch_step(self, *, by_layer: bool = False) -> LaunchedStep | None:
        """The kernels of the next pass come next on the current stream: make the table blocks known to them.

        Args:
            by_layer: as of ``PageDevice.flush``, of a pass over prompts alone.

        Returns the planned step, launched; None for a pass that nobody planned, over rows that hold nothing.
        """
        step = self.counts.upcoming
        self.device.flush(by_layer=by_layer)
        self.counts.launched()
        return None if step is None else step.launched()

    def computed(self, step: LaunchedStep) -> None:
        """The kernels of a step's last layer are launched. Its prompts are ended by ``end_pass``."""
        self._computed = step

    def end_pass(self) -> None:
        """End the prompts of the pass that was computed, unless that is done. Results that are on their way to the host
        do not wait for it. It is done before another pass is planned, whoever calls it."""
        step, self._computed = self._computed, None
        if step is None:
            return
        if step.ending or step.compacting:
            self.counts.watch_faults(step)
        self.end_prompts(step)

    def end_prompts(self, step: LaunchedStep) -> None:
        """Behind the kernels of a step's last layer: compact what it says."""
        ending = [row for row in step.rows if row in step.ending]
        self.prompts.end(*ending)
        if self.running is not None:
            for row in ending:
                self.running.began(row)
        self.prompts.end_chunk(*(row for row in step.rows if row in step.compacting and row not in step.ending))

    # Rows

    def attach_prefix(self, row: int, parts: Path) -> None:
        """Let an empty row refer to the pages of ``parts``, each (segment, lo, hi), consecutive from 0.

        Raises TableFull, and ValueError for parts that do not continue one another, leaving the row empty.
        """
        if self.rows.length(row):
            raise ValueError(f"row {row} is not empty")
        end = 0
        for segment, lo, hi in parts:
            if lo != end or not segment.lo <= lo < hi <= segment.hi:
                raise ValueError(f"[{lo}, {hi}) of a segment [{segment.lo}, {segment.hi}) does not continue")
            end = hi
        self.device.attach(row, parts)
        if parts:
            self.rows.attach(row, end, as_computed=all(part.as_computed for part, _, _ in parts))
            self.counts.touch(row)

    def release(self, row: int) -> None:
        """Drop all that a request's row refers to."""
        self.end_pass()
        if self.running is not None:
            self.running.forget(row)
        if self.pressure is not None:
            self.pressure.forget(row)
        if self.transfer is not None:
            self.transfer.forget(row)
        self.prompts.forget(row)
        self.device.release(row)
        self.counts.forget(row)
        self.rows.drop(row)
        self.high.forget(row)
        self.windows.forget(row)

    def clear(self) -> None:
        """Release everything."""
        self.end_pass()
        self.counts.clear()
        self.segments.release_all()
        for row in self.rows:
            self.release(row)
        self.high.forget_all()
        self.windows.forget_all()

    def headroom(self) -> int:
        """Most pages that the next decode step of all request rows can take. Waits for the device."""
        with self.launching():
            rows = self.to_device(list(self.rows))
            steps = self.counts.step_tokens
            counts = self.ops.count_rows(rows, steps=steps, low_grows=self.counts.low_grows)
            return int(counts[:-1, DEMAND].sum())
