"""The page manager: rows, segments and the order of operations on the device state.

All calls are made by one thread and take effect in call order. Requests use row ``req_pool_idx``; tree
segments take rows behind them.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_diffkv.kernels.attach.reference import seal
from sglang_diffkv.mem_pool.geometry import Geometry, Path, Segment
from sglang_diffkv.mem_pool.state import TABLE_BLOCK, PageState
from sglang_diffkv.mem_pool.table_space import TableFull, TableSpace
from sglang_diffkv.ops import Ops, ReferenceOps
from sglang_diffkv.policies.base import Policy


class PageManager:
    """Owns the device state and every row of it."""

    def __init__(
        self,
        geometry: Geometry,
        policy: Policy,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ):
        self.geometry = geometry
        self.fmt = geometry.fmt
        self.policy = policy
        self.state = PageState.create(
            geometry.fmt,
            num_pages=geometry.num_pages,
            num_rows=geometry.num_rows + geometry.num_segments,
            num_layers=geometry.num_layers,
            num_heads=geometry.num_heads,
            max_blocks=geometry.max_blocks,
            num_blocks=geometry.num_blocks,
            dtype=dtype,
            device=device,
        )
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
        self.reads_device = True
        """Whether host bounds are refreshed from device counts. Always so with the reference ops."""
        self.version = 0
        """Grows with every change of page ownership, so that derived counts can be cached."""

    def _rows(self, rows: list[int]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self.state.device)

    # A step

    def begin_step(self, rows: list[int], new_tokens: list[int], start: list[int]) -> None:
        """Reserve slots for ``new_tokens[i]`` tokens of row ``rows[i]`` at positions ``start[i]`` and on.

        Raises TableFull, before anything changes, if the page table cannot hold a row's next entries, and
        ValueError if a row does not end at ``start``.
        """
        for row, at in zip(rows, start, strict=True):
            if self.lengths.get(row, 0) != at:
                raise ValueError(f"row {row} holds {self.lengths.get(row, 0)} tokens, the step starts at {at}")
        for i, (row, count) in enumerate(zip(rows, new_tokens, strict=True)):
            try:
                self.space.append(row, count)
            except TableFull:
                for done, taken in zip(rows[:i], new_tokens[:i]):
                    self.space.withdraw(done, taken)
                raise
        for row, count in zip(rows, new_tokens):
            self.lengths[row] = self.lengths.get(row, 0) + count
        self.version += 1
        self.ops.reserve(self.state, self._rows(rows), self._rows(new_tokens), max(new_tokens, default=0))

    def take_finishing(self, rows: list[int]) -> list[int]:
        """Those of ``rows`` marked as ending their prompt now; the marks are cleared."""
        ending = [row for row in rows if row in self.finishing]
        self.finishing.difference_update(ending)
        return ending

    def end_prompt(self, row: int) -> None:
        """Prompt-phase compaction of a row whose last chunk has run.

        With overlap scheduling the next step's token is written before the prefix cache asks for the prompt,
        so a prompt that is worth sharing is sealed here and that token starts a page of its own.
        """
        length = self.lengths[row]
        if self.policy.compresses and length > self.policy.window:
            self.ops.compact_prompt(self.state, row, length, self.policy)
            self.version += 1
        own = length - self.shared.get(row, 0)
        if self.share_min_tokens is not None and own >= self.share_min_tokens:
            seal(self.state, row)
            self.space.seal(row)
            self.sealed[row] = length
        self._tighten(row)

    def end_decode(self, rows: torch.Tensor, seq_lens: torch.Tensor, scores: Any) -> None:
        """Generation-phase compaction after a decode step; rows and seq_lens are [B] int64."""
        if scores is None:
            return
        self.ops.compact_step(self.state, rows, seq_lens, scores, self.policy)
        self.version += 1

    def new_scores(self, batch: int) -> Any:
        """Buffers for a decode step's searches; None if the policy never asks."""
        return self.ops.new_found(self.state, batch) if self.policy.compresses else None

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
                high, low = self.path_entries([(segment, lo, hi)])
                self.space.extend(row, high, low)
                self.ops.attach(self.state, row, segment.row, lo, hi)
                self.lengths[row] = self.shared[row] = hi
                self._tighten(row)
        except (TableFull, ValueError):
            self.release(row)
            raise
        self.version += 1

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
        """Whether a segment row and table blocks are left to make a segment of the row's own pages."""
        needed = sum(-(-n // TABLE_BLOCK) for n in self.space.bound(row))
        return bool(self._segment_rows) and needed <= len(self.space.free_blocks)

    def share(self, row: int, lo: int, hi: int) -> Segment | None:
        """Make the pages that no segment holds yet a segment for positions [lo, hi), immutable from now on.

        A running row is shared up to where it was sealed; a row that ends, up to any position.
        Returns None, changing nothing, if no segment row or table block is left.
        """
        if not self._segment_rows:
            return None
        segment_row = self._segment_rows[-1]
        try:
            self.space.extend(segment_row, *self.space.bound(row))
        except TableFull:
            self.space.release(segment_row)
            return None
        self._segment_rows.pop()
        self.ops.attach(self.state, segment_row, row, lo, hi, kept_only=True)
        if self.sealed.get(row) != hi:
            seal(self.state, row)
            self.space.seal(row)
            self.sealed[row] = self.lengths[row]
        self.state.kept_entry[row] = self.state.own_entry[row]
        self.shared[row] = hi
        self._tighten(row)
        self._tighten(segment_row)
        segment = Segment(segment_row, lo, hi, self.pages_of(segment_row))
        self.segments.add(segment)
        self.version += 1
        return segment

    def release(self, row: int) -> None:
        """Drop all that a request's row refers to."""
        self.ops.release(self.state, row)
        self.space.release(row)
        self.lengths.pop(row, None)
        self.shared.pop(row, None)
        self.sealed.pop(row, None)
        self.finishing.discard(row)
        self.version += 1

    def release_segment(self, segment: Segment) -> None:
        """Drop a segment. Rows that refer to its pages keep them."""
        self.segments.remove(segment)
        self.release(segment.row)
        self._segment_rows.append(segment.row)
        segment.pages = 0

    def trim_segment(self, segment: Segment, hi: int) -> None:
        """Forget positions from ``hi`` on and return the pages that held nothing else."""
        self.ops.trim(self.state, segment.row, hi)
        segment.hi = hi
        segment.pages = self.pages_of(segment.row)
        self._tighten(segment.row)
        self.version += 1

    def clear(self) -> None:
        """Release everything."""
        for segment in list(self.segments):
            self.release_segment(segment)
        for row in list(self.lengths):
            self.release(row)

    def _tighten(self, row: int) -> None:
        """Replace the row's entry bounds by its counts (reads the device)."""
        if self.reads_device:
            counts = self.state.entries[row].flatten(0, 1).amax(0).tolist()
            self.space.tighten(row, counts[0], counts[1] if len(counts) > 1 else 0)

    # Counts

    def free_pages(self) -> int:
        """Pages in the ring."""
        taken, put = self.state.counters.tolist()
        return put - taken

    def pages_of(self, row: int) -> int:
        """Table entries of a row."""
        return int(self.state.entries[row].sum())

    def headroom(self) -> int:
        """Most pages that the next decode step of all request rows can take."""
        if not self.lengths:
            return 0
        state, rows = self.state, self._rows(list(self.lengths))
        own = state.entries[rows] - state.own_entry[rows]  # [B, L, H, T]
        tokens = torch.tensor([x.tokens for x in self.fmt.layouts], device=state.device)
        full = state.own_tokens[rows] >= own * tokens
        full[..., 0] &= state.hole[rows] < 0
        if not self.policy.compresses:
            full[..., 1:] = False
        return int(full.sum())

    def table_starved(self, promised_blocks: int = 0) -> bool:
        """Whether the page table might not hold the next step of all request rows and ``promised_blocks``."""
        needed = 2 * len(self.lengths) + promised_blocks
        return needed > len(self.space.free_blocks)

    def faults(self, rows: list[int]) -> list[int]:
        """Those of ``rows`` that found the ring empty and lost tokens."""
        flags = self.state.fault[self._rows(rows)].tolist()
        return [row for row, flag in zip(rows, flags, strict=True) if flag]
