"""The page manager: rows of requests, and the order of operations on the device state.

All calls are made by one thread and take effect in call order: they launch on one stream, and none waits for it
except where its docstring says so. Requests use row ``req_pool_idx``; tree segments take rows behind them.

The manager owns the state and what is known of each row; its parts say what happens to prompts (``PromptPhase``,
``PromptCopies``), to segments (``SegmentStore``, ``SegmentPacker``), what these hold (``SegmentCounts``), and what the
host knows of the device's counts (``CountTracker``) and of table blocks (``TableSpace``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sglang_diffkv.kernels.attach.reference import seal
from sglang_diffkv.mem_pool.count_tracker import CountTracker
from sglang_diffkv.mem_pool.geometry import Geometry, Path, Segment
from sglang_diffkv.mem_pool.prompt_copies import PromptCopies
from sglang_diffkv.mem_pool.prompt_phase import PromptPhase
from sglang_diffkv.mem_pool.ranks import Ranks
from sglang_diffkv.mem_pool.segment_counts import SegmentCounts
from sglang_diffkv.mem_pool.segment_packing import SegmentPacker
from sglang_diffkv.mem_pool.segment_store import SegmentStore
from sglang_diffkv.mem_pool.state import PageState
from sglang_diffkv.mem_pool.table_space import TableFull, TableSpace
from sglang_diffkv.mem_pool.transfer import to_device
from sglang_diffkv.ops import Ops, ReferenceOps
from sglang_diffkv.policies.base import Policy


@dataclass(frozen=True)
class PlannedStep:
    """The rows of the forward pass that runs next, as the host knows them."""

    rows: list[int]
    new_tokens: list[int]
    start: list[int]
    pages: int  # that its prompts take at most


class PageManager:
    """Owns the device state and every row of it; plans steps and gives rows their pages."""

    def __init__(
        self,
        geometry: Geometry,
        policy: Policy,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        ranks: Ranks | None = None,
    ):
        self.geometry = geometry
        self.ranks = ranks or Ranks()
        self.fmt = geometry.fmt
        self.policy = policy
        self.state = PageState.of(geometry, dtype=dtype, device=device)
        exact = geometry.fmt.high.tier.is_raw and not policy.compresses
        self.ops: Ops = ReferenceOps(exact)
        self.space = TableSpace(self.state)
        self.lengths: dict[int, int] = {}  # row of a request -> tokens of its sequence stored or pruned
        self.shared: dict[int, int] = {}  # row of a request -> tokens that segments hold for it
        self.sealed: dict[int, int] = {}  # row of a request -> tokens in pages that it may not write
        self.version = 0
        """Grows with every change of page ownership."""
        self.stream: torch.cuda.Stream | None = None
        """Where forward passes run; None for the current stream."""
        self.planned: PlannedStep | None = None
        self.launched = True
        """Whether the planned step's kernels follow all launched so far."""
        self.step = 0  # planned so far
        self.tracker = CountTracker(self)
        self.counts = self.tracker.host
        self.prompts = PromptPhase(self)
        self.copies = PromptCopies(self)
        self.segment_counts = SegmentCounts(self)
        self.segments = SegmentStore(self)
        self.packer = SegmentPacker(self)

    def to_device(self, numbers: Any) -> torch.Tensor:
        """[n] int64 on the device, without waiting for it."""
        return to_device(numbers, self.state.device)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Kernels launched inside run in order with the forward passes and see the host's table blocks."""
        with torch.cuda.stream(self.stream):
            self.space.flush()
            yield

    # A step

    def plan_step(self, rows: list[int], new_tokens: list[int], start: list[int]) -> None:
        """Room for ``new_tokens[i]`` tokens of row ``rows[i]`` at positions ``start[i]`` and on: table blocks on the
        host, and a snapshot of the counts before the step. The device takes the slots in ``Ops.begin``, in the step.

        Raises TableFull, before anything changes, if the page table cannot hold a row's next entries, and
        ValueError if a row does not end at ``start``.
        """
        for row, at in zip(rows, start, strict=True):
            if self.lengths.get(row, 0) != at:
                raise ValueError(f"row {row} holds {self.lengths.get(row, 0)} tokens, the step starts at {at}")
        self.tracker.take_snapshot()
        for i, (row, count) in enumerate(zip(rows, new_tokens, strict=True)):
            try:
                self.space.append(row, count)
            except TableFull:
                for done, taken in zip(rows[:i], new_tokens[:i]):
                    self.space.withdraw(done, taken)
                raise
        pages = 0
        for row, count in zip(rows, new_tokens):
            if count > 1 or row not in self.lengths or row in self.prompts.unfinished:
                self.prompts.unfinished.add(row)
                self.counts.touch(row)
                pages += self.geometry.heads * -(-count // self.fmt.high.tokens)
            self.lengths[row] = self.lengths.get(row, 0) + count
        self.counts.record(-pages)
        self.version += 1
        self.step += 1
        self.tracker.planned(self.step)
        self.planned = PlannedStep(list(rows), list(new_tokens), list(start), pages)
        self.launched = False

    def begin_step(self, rows: list[int], new_tokens: list[int], start: list[int]) -> None:
        """``plan_step``, and the slots taken at once."""
        self.plan_step(rows, new_tokens, start)
        self.launch_step()
        with self.launching():
            self.ops.reserve(self.state, self.to_device(rows), self.to_device(new_tokens), max(new_tokens, default=0))

    def cancel_step(self) -> None:
        """The planned step is not going to run; its rows are released next."""
        if not self.launched:
            self.planned, self.launched = None, True
            self.tracker.cancelled()

    def launch_step(self) -> None:
        """The planned step's kernels come next on the current stream: make the table blocks known to them."""
        self.space.flush()
        self.launched = True

    def end_decode(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, scores: Any, num_rows: torch.Tensor | None = None
    ) -> None:
        """Generation-phase compaction after a decode step; rows and seq_lens are [B] integers, those past the first
        ``num_rows`` [1] int32 padding."""
        if scores is not None:
            self.ops.compact_step(self.state, rows, seq_lens, scores, self.policy, num_rows)

    # Ownership

    def attach_prefix(self, row: int, parts: Path) -> None:
        """Let an empty row refer to the pages of ``parts``, each (segment, lo, hi), consecutive from 0.

        Raises TableFull, and ValueError for parts that do not continue one another, leaving the row empty.
        """
        if self.lengths.get(row):
            raise ValueError(f"row {row} is not empty")
        try:
            for segment, lo, hi in parts:
                if self.lengths.get(row, 0) != lo or not segment.lo <= lo < hi <= segment.hi:
                    raise ValueError(f"[{lo}, {hi}) of a segment [{segment.lo}, {segment.hi}) does not continue")
                self.attach_part(row, segment, lo, hi)
                self.lengths[row] = self.shared[row] = hi
                self.prompts.unfinished.add(row)
                self.counts.touch(row)
        except (TableFull, ValueError):
            self.release(row)
            raise
        self.version += 1

    def attach_part(self, row: int, segment: Segment, lo: int, hi: int) -> None:
        """Append references to a segment's pages to a row's table. Raises TableFull, changing nothing."""
        self.space.extend(row, *self.space.path_entries([(segment, lo, hi)]))
        with self.launching():
            self.ops.attach(self.state, row, segment.row, lo, hi)

    def seal(self, row: int) -> None:
        """The row's next token starts a page of its own."""
        with self.launching():
            seal(self.state, row)
        self.space.seal(row)
        self.sealed[row] = self.lengths[row]

    def release(self, row: int) -> None:
        """Drop all that a row refers to."""
        self.copies.forget(row)
        with self.launching():
            self.ops.release(self.state, row)
        self.space.release(row)
        self.counts.forget(row)
        self.lengths.pop(row, None)
        self.shared.pop(row, None)
        self.sealed.pop(row, None)
        self.prompts.forget(row)
        self.version += 1

    def clear(self) -> None:
        """Release everything."""
        self.tracker.clear()
        self.segments.release_all()
        for row in list(self.lengths):
            self.release(row)

    # Counts that the device has now; what the host knows without waiting is the tracker's

    def free_pages(self) -> int:
        """Pages in the ring. Waits for the device."""
        with self.launching():
            taken, put = self.state.counters.tolist()
        return put - taken

    def headroom(self) -> int:
        """Most pages that the next decode step of all request rows can take. Waits for the device."""
        with self.launching():
            rows = self.to_device(list(self.lengths))
            counts = self.ops.count_rows(self.state, rows, steps=1, low_grows=self.tracker.low_grows)
            return int(counts[:-1, 0].sum())

    def pages_of(self, row: int) -> int:
        """Table entries of a row. Waits for the device."""
        with self.launching():
            return int(self.state.entries[row].sum())
