"""The page manager: rows, segments and the order of operations on the device state.

All calls are made by one thread and take effect in call order: they launch on one stream, and none waits for it
except where its docstring says so. Requests use row ``req_pool_idx``; tree segments take rows behind them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sglang_diffkv.kernels.attach.reference import seal
from sglang_diffkv.mem_pool.count_tracker import CountTracker
from sglang_diffkv.mem_pool.geometry import Geometry, Path, Segment
from sglang_diffkv.mem_pool.prompt_copies import PromptCopies
from sglang_diffkv.mem_pool.ranks import Ranks
from sglang_diffkv.mem_pool.segment_packing import SegmentPacker
from sglang_diffkv.mem_pool.state import TABLE_BLOCK, PageState
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


def _take(marked: set[int], rows: list[int]) -> list[int]:
    """Those of ``rows`` that are marked, and no longer are."""
    taken = [row for row in rows if row in marked]
    marked.difference_update(taken)
    return taken


class PageManager:
    """Owns the device state and every row of it."""

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
        self.segments: set[Segment] = set()
        self._segment_rows = list(range(geometry.num_rows + geometry.num_segments - 1, geometry.num_rows - 1, -1))
        self.sealed: dict[int, int] = {}  # row of a request -> tokens in pages that it may not write
        self.share_min_tokens: int | None = None
        """A prompt with this many own tokens is sealed at its end, ready for the prefix cache; None: never."""
        self.finishing: set[int] = set()  # rows whose prompt ends with their next extend pass
        self.chunking: set[int] = set()  # rows that are compacted after their next extend pass, which is not the last
        self.prompting: set[int] = set()  # rows whose prompt may still be compacted
        self.version = 0
        """Grows with every change of page ownership."""
        self.stream: torch.cuda.Stream | None = None
        """Where forward passes run; None for the current stream."""
        self.planned: PlannedStep | None = None
        self.launched = True
        """Whether the planned step's kernels follow all launched so far."""
        self.step = 0  # planned so far
        self.on_counted: Callable[[Segment], None] = lambda segment: None
        """Called when the pages of a segment become known."""
        self.tracker = CountTracker(self)
        self.counts = self.tracker.host
        self.copies = PromptCopies(self)
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
            if count > 1 or row not in self.lengths or row in self.prompting:
                self.prompting.add(row)
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

    def launch_step(self) -> None:
        """The planned step's kernels come next on the current stream: make the table blocks known to them."""
        self.space.flush()
        self.launched = True

    def take_finishing(self, rows: list[int]) -> list[int]:
        """Those of ``rows`` marked as ending their prompt now; the marks are cleared."""
        return _take(self.finishing, rows)

    def take_chunking(self, rows: list[int]) -> list[int]:
        """Those of ``rows`` marked for a compaction after this chunk; the marks are cleared."""
        return _take(self.chunking, rows)

    def end_chunk(self, row: int) -> None:
        """Compaction of a row whose prompt is not through: tokens that its own attention so far finds unimportant go
        down for good."""
        if self._compact_prompt(row):
            self.counts.touch(row)
            self.version += 1

    def _compact_prompt(self, row: int) -> bool:
        """Prompt-phase compaction where the policy has something to decide."""
        length = self.lengths[row]
        if not self.policy.compresses or length <= self.policy.window:
            return False
        with self.launching():
            self.ops.compact_prompt(self.state, row, length, self.policy)
        if self.tracker.low_grows:
            self.counts.record(-self.geometry.heads)
        return True

    def end_prompt(self, row: int) -> None:
        """Prompt-phase compaction of a row whose last chunk has run.

        With overlap scheduling the next step's token is written before the prefix cache asks for the prompt,
        so a prompt that is worth sharing is sealed here and that token starts a page of its own.
        """
        length = self.lengths[row]
        if row in self.copies.plans:
            self.copies.carry_out(row)
        elif row not in self.copies.untouched:
            self._compact_prompt(row)
        own = length - self.shared.get(row, 0)
        least = 1 if row in self.copies.untouched else self.share_min_tokens
        if row not in self.copies.pending and least is not None and own >= least:
            self._seal(row)
        self.copies.judged.pop(row, None)
        self.counts.touch(row)
        self.prompting.discard(row)
        self.version += 1

    def _seal(self, row: int) -> None:
        """The row's next token starts a page of its own."""
        with self.launching():
            seal(self.state, row)
        self.space.seal(row)
        self.sealed[row] = self.lengths[row]

    def end_decode(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, scores: Any, num_rows: torch.Tensor | None = None
    ) -> None:
        """Generation-phase compaction after a decode step; rows and seq_lens are [B] integers, those past the first
        ``num_rows`` [1] int32 padding."""
        if scores is not None:
            self.ops.compact_step(self.state, rows, seq_lens, scores, self.policy, num_rows)

    def new_scores(self, batch: int) -> Any:
        """Buffers for a decode step's searches; None if the policy never asks."""
        return self.ops.new_found(self.state, batch, self.policy) if self.policy.compresses else None

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
                self.prompting.add(row)
                self.counts.touch(row)
        except (TableFull, ValueError):
            self.release(row)
            raise
        self.version += 1

    def attach_part(self, row: int, segment: Segment, lo: int, hi: int) -> None:
        """Append references to a segment's pages to a row's table. Raises TableFull, changing nothing."""
        self.space.extend(row, *self.path_entries([(segment, lo, hi)]))
        with self.launching():
            self.ops.attach(self.state, row, segment.row, lo, hi)

    def path_entries(self, parts: Path) -> list[int]:
        """Upper bound of the entries, of each tier, that attaching ``parts`` takes: a page holds a token at least."""
        bounds = [[min(n, hi - lo) for n in self.space.bound(segment.row)] for segment, lo, hi in parts]
        return [sum(column) for column in zip(*bounds, strict=True)] if bounds else [0, 0]

    def table_blocks(self, parts: Path, new_tokens: int) -> int:
        """Upper bound of the table blocks of a row with ``parts`` attached and ``new_tokens`` of its own."""
        layouts = self.fmt.layouts
        own = [-(-new_tokens // layouts[0].tokens), -(-new_tokens // layouts[-1].tokens)]
        return sum(-(-(n + m) // TABLE_BLOCK) for n, m in zip(self.path_entries(parts), own, strict=True))

    def fitting_path(self, parts: Path) -> Path:
        """The longest start of ``parts`` that leaves an empty row room for its longest sequence."""
        count = len(parts)
        while count and self.table_blocks(parts[:count], self.geometry.max_tokens) > self.space.max_blocks:
            count -= 1
        return parts[:count]

    def can_share(self, row: int) -> bool:
        """Whether a segment row and table blocks are left to make a segment of the row's own pages, or of a part of its
        pending one."""
        rows = [row, self.copies.pending[row].row] if row in self.copies.pending else [row]
        needed = max(sum(-(-n // TABLE_BLOCK) for n in self.space.bound(x)) for x in rows)
        return bool(self._segment_rows) and needed <= len(self.space.free_blocks)

    def take_segment_row(self, high: int, low: int) -> int | None:
        """A free row for a segment, with room for ``high`` and ``low`` entries; None, changing nothing, if no row or no
        table block is left."""
        if not self._segment_rows:
            return None
        try:
            self.space.extend(self._segment_rows[-1], high, low)
        except TableFull:
            return None
        return self._segment_rows.pop()

    def return_segment_row(self, row: int) -> None:
        """The segment row holds nothing any more."""
        self.space.release(row)
        self._segment_rows.append(row)

    def share(self, row: int, lo: int, hi: int) -> Segment | None:
        """Make the pages that no segment holds yet a segment for positions [lo, hi), immutable from now on.

        A running row is shared up to where it was sealed; a row that ends, up to any position.
        Returns None, changing nothing, if no segment row or table block is left.
        """
        segment_row = self.take_segment_row(*self.space.bound(row))
        if segment_row is None:
            return None
        with self.launching():
            self.ops.attach(self.state, segment_row, row, lo, hi, kept_only=True)
        ends = self.sealed.get(row) != hi
        exact = row in self.copies.untouched and not ends
        first = self.shared.get(row, 0)
        if ends:
            self._seal(row)
        with self.launching():
            self.state.kept_entry[row] = self.state.own_entry[row]
        self.shared[row] = hi
        self.counts.touch(row, decoded=True)
        segment = Segment(segment_row, lo, hi, exact=exact, first=first)
        self.segments.add(segment)
        self.tracker.count_later(segment)
        if ends and lo > first:  # its pages hold tokens below lo too
            self.packer.spread.append(segment)
        self.version += 1
        return segment

    def release(self, row: int) -> None:
        """Drop all that a request's row refers to."""
        self.copies.forget(row)
        with self.launching():
            self.ops.release(self.state, row)
        self.space.release(row)
        self.counts.forget(row)
        self.lengths.pop(row, None)
        self.shared.pop(row, None)
        self.sealed.pop(row, None)
        self.finishing.discard(row)
        self.chunking.discard(row)
        self.prompting.discard(row)
        self.version += 1

    @property
    def held_segments(self) -> list[Segment]:
        """Segments of the prefix cache, and those that wait for it."""
        return [*self.segments, *self.copies.pending.values()]

    def release_segment(self, segment: Segment, *, exclusive: bool = False) -> None:
        """Drop a segment. Rows that refer to its pages keep them.

        Its pages count as free at once if ``exclusive``: if no row refers to them.
        """
        self.segments.remove(segment)
        self.tracker.dropped(segment)
        self.counts.private[segment.row] = segment.pages if exclusive else 0
        self.release(segment.row)
        self.return_segment_row(segment.row)
        segment.pages = 0

    def release_segments(self) -> None:
        """Drop all segments of the prefix cache, in an order that is the same on all ranks."""
        for segment in sorted(self.segments, key=lambda segment: segment.row):
            self.release_segment(segment)

    def trim_segment(self, segment: Segment, hi: int) -> None:
        """Forget positions from ``hi`` on and return the pages that held nothing else. Waits for the device, unless
        the segment is exact."""
        with self.launching():
            self.ops.trim(self.state, segment.row, hi)
        segment.hi = hi
        self.version += 1
        if segment.exact:
            held, segment.pages = segment.pages, self.exact_pages(segment)
            self.counts.record(held - segment.pages)
            self.on_counted(segment)
        else:
            self.tracker.count_later(segment)
            self.tracker.settle()

    def exact_pages(self, segment: Segment) -> int:
        """Pages of an exact segment."""
        tokens = self.fmt.high.tokens
        first, end = (segment.lo - segment.first) // tokens, -(-(segment.hi - segment.first) // tokens)
        return self.geometry.heads * (end - first)

    def tokens_for(self, segment: Segment, pages: float) -> float:
        """Tokens to trim from a segment's end so that about ``pages`` return; infinity where that is not known."""
        heads, tokens = self.geometry.heads, self.fmt.high.tokens
        if math.isinf(pages) or not segment.pages:
            return math.inf
        if segment.exact:
            end = -(-(segment.hi - segment.first) // tokens) - -(-pages // heads)
            return segment.hi - segment.first - end * tokens
        return math.ceil((pages + heads) * (segment.hi - segment.lo) / segment.pages)

    def clear(self) -> None:
        """Release everything."""
        self.tracker.clear()
        self.release_segments()
        for row in list(self.lengths):
            self.release(row)

    # Counts

    def meet(self) -> None:
        """Take over what the device has counted, exactly if nothing runs.

        One rank alone does so whenever it reads a bound. Several exchange their counts, so reading a bound must not,
        and all of them call this before a step is scheduled.
        """
        if not self.lengths:
            self.tracker.settle()
        self.tracker.refresh()

    def free_bound(self) -> int:
        """Pages in the ring, at least; decode steps not counted yet take from them up to ``headroom_bound``."""
        if self.ranks.alone:
            self.meet()
        return self.counts.free()

    def headroom_bound(self) -> int:
        """Pages, at most, that launched decode steps took since ``free_bound`` was counted and the next will take."""
        if self.ranks.alone:
            self.tracker.refresh()
        return self.counts.headroom()

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

    def table_starved(self, promised_blocks: int = 0) -> bool:
        """Whether the page table might not hold the next step of all request rows and ``promised_blocks``."""
        needed = 2 * len(self.lengths) + promised_blocks
        return needed > len(self.space.free_blocks)

    def faulted(self, rows: list[int]) -> list[int]:
        """Those of ``rows`` that are known to have found the ring empty and lost tokens."""
        return [row for row in rows if row in self.counts.faulted]

    def faults(self, rows: list[int]) -> list[int]:
        """Those of ``rows`` that found the ring empty and lost tokens. Waits for the device."""
        with self.launching():
            flags = self.state.fault[self.to_device(rows)].tolist()
        return [row for row, flag in zip(rows, flags, strict=True) if flag]
