"""Rows of requests on their way from one server to another: out of the pages of the server that has computed a prompt,
and into those of the server that generates.

A transfer engine moves blocks of host memory that both servers have set aside for it (``TransferRoom``). What it moves
is a row's object (``row_object.py``). Nothing here waits for the device, so each way has several steps, and ``advance``
goes on as far as the device is:

*Out* (``RowExport``). The row's table comes to the host; then its pages are copied to blocks, beside the passes; then a
thread takes the checksums and writes the head before them. The row must not change until then; giving it up ends the
export. *In* (``RowImport``). A thread looks at checksums and at each number. Then the row is made of pages of the ring,
in order with the passes.

Blocks of a transfer that failed may still be written to, or read, by the engine. They are set aside for some time
before others get them.

Each rank sends and gets a row of its own heads. What schedulers decide by is agreed on: how many blocks are free, what
a row takes on the rank where it takes most, and whether all have got theirs. Rows get blocks in the order in which they
began, so no two ranks wait for each other's.

Of a server with more ranks each rank here gets *parts*: objects of several ranks, each in blocks of its own. They are
checked one by one, and make one row.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.kernels.table import head_index, put_entries, table_column
from sglang_diffkv.layout.geometry import Geometry, Path, path_end, split_path
from sglang_diffkv.layout.page_format import EMPTY
from sglang_diffkv.layout.ranks import OtherRankError
from sglang_diffkv.layout.state import NO_LIMIT
from sglang_diffkv.layout.transfer import to_host
from sglang_diffkv.mem_pool.counts import PageCounts
from sglang_diffkv.mem_pool.device import Beside, PageDevice
from sglang_diffkv.mem_pool.high_rows import HighRows
from sglang_diffkv.mem_pool.host_pages import GIB, HostPages, Run, first_of
from sglang_diffkv.mem_pool.page_copies import copy_in, copy_out, staging_pages
from sglang_diffkv.mem_pool.row_object import (
    PARTED,
    PREFIX,
    RowHead,
    RowNumbers,
    check_head,
    decode_head,
    head_size,
    join,
    said_size,
)
from sglang_diffkv.mem_pool.row_windows import RowWindows
from sglang_diffkv.mem_pool.rows import RequestRows
from sglang_diffkv.mem_pool.segment_object import ObjectRefused, Origin, checksum
from sglang_diffkv.mem_pool.table_space import TableFull

BLOCK_BYTES = 64 << 10
"""A block is as many pages as fill this, one at least."""

USUAL_ROOM = 1 << 30
"""Bytes of host memory for rows on their way: at most, unless one longest row takes more."""

LESS_ROOM = "give --context-length or --max-total-tokens less, or this machine more memory that may be pinned"
"""What to do where there is less."""

SLOTS_AT_ONCE = 1 << 22
"""Slots of pages that the device looks at together, for what another server lacks."""

Table = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""As ``PageDevice.table_of`` has it."""

WRONG, LOOKED_AT, GOOD = range(3)
"""What a rank knows of a row that has come; the least of all ranks counts."""

SET_ASIDE_SECONDS = 30.0
"""For which blocks of a failed transfer are nobody's."""


class NoRoom(RuntimeError):
    """A row does not fit where it is to go. It says why."""


class Takes(NamedTuple):
    """What a row takes on the rank where it takes most: pages, and by tier entries of a head's table."""

    pages: int
    entries: tuple[int, ...]

    @classmethod
    def of(cls, numbers: RowNumbers) -> Takes:
        """Of one rank."""
        return cls(numbers.pages, tuple(numbers.entries.max(axis=0, initial=0).tolist()))


def block_pages(geometry: Geometry) -> int:
    """Pages of a block: equal on servers with equal pages."""
    return max(BLOCK_BYTES // geometry.fmt.page_bytes, 1)


def most_row_pages(geometry: Geometry, tokens: int) -> int:
    """Pages that a prompt's row of so many tokens is given room for. Where it was frozen, and where parts of its prefix
    end, pages are part-filled: a quarter of them, and two of each head, are for that. No row has more than the pool."""
    return min(geometry.most_pages(tokens) * 5 // 4 + 2 * geometry.heads, geometry.num_pages)


def part_of(geometry: Geometry, parts: int) -> Geometry:
    """Of each of so many ranks that have these heads together, and the pages of this pool in equal shares. So a row's
    parts have room for one pool together. A rank with more than its share of a row that nearly fills it cannot send it.
    """
    assert geometry.num_heads % parts == 0, f"{geometry.num_heads} heads are not those of {parts} ranks"
    return replace(geometry, num_heads=geometry.num_heads // parts, num_pages=-(-geometry.num_pages // parts))


def blocks_for(geometry: Geometry, tokens: int, parts: int = 1) -> int:
    """Blocks for the object of a prompt's row of so many tokens, at most; or for those of its ``parts`` together, each
    of which has as many."""
    one = part_of(geometry, parts)
    pages = most_row_pages(one, tokens)
    pages += -(-head_size(one, pages) // geometry.fmt.page_bytes)
    return parts * -(-pages // block_pages(geometry))


def room_blocks(geometry: Geometry) -> int:
    """Blocks of a server's room: for four of its longest rows, in at most ``USUAL_ROOM``, but always for one, in
    however many parts it comes."""
    heads, longest = geometry.num_heads, geometry.max_tokens
    usual = USUAL_ROOM // (block_pages(geometry) * geometry.fmt.page_bytes)
    most = max(blocks_for(geometry, longest, parts) for parts in range(1, heads + 1) if heads % parts == 0)
    return max(most, min(4 * blocks_for(geometry, longest), usual))


def room_bytes(geometry: Geometry) -> int:
    """Bytes of host memory that these are."""
    return room_blocks(geometry) * block_pages(geometry) * geometry.fmt.page_bytes


class TransferRoom:
    """Blocks of host memory that a transfer engine reads and writes.

    Attributes:
        pages: [n, page_bytes] uint8, those of all blocks. per_block: pages of a block.
    """

    def __init__(self, geometry: Geometry, count: int, *, pinned: bool):
        page_bytes, self.per_block = geometry.fmt.page_bytes, block_pages(geometry)
        try:
            self._blocks = HostPages(count, self.per_block * page_bytes, pinned=pinned)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"diffkv: {count * self.per_block * page_bytes / GIB:.2f} GiB of host memory for rows between servers "
                f"cannot be had: {LESS_ROOM}"
            ) from error
        self.pages = self._blocks.pages.view(-1, page_bytes)
        self._second = torch.zeros(count, 8, dtype=torch.uint8)
        self._aside: deque[tuple[float, list[Run]]] = deque()

    @property
    def count(self) -> int:
        """Blocks in all."""
        return self._blocks.count

    @property
    def block_bytes(self) -> int:
        return int(self._blocks.pages.shape[1])

    @property
    def used(self) -> int:
        """Blocks that somebody has, or that are set aside."""
        return self._blocks.used

    def regions(self) -> tuple[list[int], list[int], list[int]]:
        """What a transfer engine registers: addresses, bytes, and bytes of an item. An item of the first region is a
        block; of the second it is nothing that anybody reads, as engines take two."""
        found = self._blocks.pages, self._second
        return [x.data_ptr() for x in found], [x.nbytes for x in found], [int(x.shape[1]) for x in found]

    def end_of_part(self, page: int) -> int:
        """As ``HostPages``: all of it is pinned together."""
        return len(self.pages)

    def free(self) -> int:
        """Blocks that nobody has."""
        self._take_back()
        return self._blocks.free

    def take(self, count: int) -> list[Run] | None:
        """Runs of ``count`` blocks together; None if there are not so many."""
        self._take_back()
        return self._blocks.take(count)

    def give(self, blocks: list[Run]) -> None:
        """Nobody reads or writes these any more."""
        self._blocks.give(blocks)

    def set_aside(self, blocks: list[Run]) -> None:
        """The engine may still read or write these for a while."""
        if blocks:
            self._aside.append((time.monotonic() + SET_ASIDE_SECONDS, blocks))

    def _take_back(self) -> None:
        while self._aside and self._aside[0][0] <= time.monotonic():
            self.give(self._aside.popleft()[1])

    def pages_of(self, blocks: list[Run]) -> list[Run]:
        """The pages of blocks, as runs."""
        return [(start * self.per_block, count * self.per_block) for start, count in blocks]

    def bytes_of(self, runs: list[Run]) -> list[memoryview]:
        """The bytes of runs of pages, in order."""
        views: list[Any] = [self.pages[start : start + count].numpy().reshape(-1) for start, count in runs]
        return [memoryview(view) for view in views]

    def check_integrity(self, held: list[list[Run]]) -> None:
        """Raise AssertionError unless every block is free, set aside, or in one of the ``held`` lists, once."""
        runs = [run for blocks in held for run in blocks]
        self._blocks.check_integrity([*runs, *(run for _, blocks in self._aside for run in blocks)])


def _without(runs: list[Run], count: int) -> list[Run]:
    """Runs of pages behind the first ``count`` of them."""
    found: list[Run] = []
    for start, length in runs:
        skipped = min(count, length)
        count -= skipped
        if length > skipped:
            found.append((start + skipped, length - skipped))
    return found


@dataclass(eq=False)
class RowExport:
    """A row on its way out.

    Attributes:
        row, most: the row, and blocks that the other server has for it. header: of its object, but for the checksum of
            its pages. left: pages that stay here, since the other server has what they hold. blocks: where the object
            is, once it is ``ready``. problem: why it cannot go.
    """

    row: int
    most: int
    header: dict[str, Any]
    listed: torch.Tensor
    event: Any
    pages: torch.Tensor
    blocks: list[Run] = field(default_factory=list)
    numbers: RowNumbers | None = None
    left: int = 0
    copying: Beside[None] | None = None
    sealing: Future[None] | None = None
    problem: str = ""

    @property
    def ready(self) -> bool:
        """Whether the object is whole."""
        return self.sealing is not None and self.sealing.done() and not self.problem


@dataclass(frozen=True, eq=False)
class KeptRow:
    """A row of a request that was retracted, in host memory of its own.

    Attributes:
        length: tokens that are kept. pages: [n, page_bytes] uint8. takes: on all ranks together.
    """

    length: int
    high: bool
    window: int
    numbers: RowNumbers
    pages: torch.Tensor
    takes: Takes

    def end_of_part(self, page: int) -> int:
        """As ``HostPages``."""
        return len(self.pages)


class Come(NamedTuple):
    """A row that was found whole.

    Attributes:
        head: of the row. runs: of the room's pages, those with its pages, part by part. place: [n] int64, for each of
            these where it is in the order of the head; None: in that order.
    """

    head: RowHead
    runs: list[Run]
    place: np.ndarray | None = None


@dataclass(eq=False)
class RowImport:
    """A row of so many ``tokens`` that is expected, in ``blocks``, of which each of its ``parts`` has as many, in
    order. ``reading``: what is found there once somebody has looked. ``takes``: on all ranks together, once they know.
    """

    tokens: int
    blocks: list[Run]
    parts: int = 1
    reading: Future[Come] | None = None
    takes: Takes | None = None

    @property
    def of_parts(self) -> list[list[Run]]:
        """The blocks of each part."""
        each = sum(count for _, count in self.blocks) // self.parts
        return [first_of(_without(self.blocks, part * each), each) for part in range(self.parts)]

    @property
    def looked(self) -> bool:
        """Whether it was looked at, all of it."""
        return self.reading is not None and self.reading.done()

    @property
    def come(self) -> Come:
        """What was found, once it was looked at. Raises what is wrong with it."""
        assert self.reading is not None and self.reading.done(), "nobody has looked at it"
        return self.reading.result()

    @property
    def head(self) -> RowHead:
        """Of what was found."""
        return self.come.head

    def result(self) -> Exception | bool:
        """True if it is good, False while that is not known, else what is wrong with it."""
        if not self.looked:
            return False
        try:
            return bool(self.head)
        except Exception as error:
            return error


class RowTransfer:
    """Exports and imports rows of a page manager's parts.

    Args:
        blocks: of host memory, for rows on their way. kept_pages: most pages of retracted requests in host memory.

    Attributes:
        origin: of what its rows are; it is set before the first one goes. sent, received, failed: rows so far.
        pages_sent, pages_left: of the rows that were sent, pages that went, and those that the other server had.
    """

    def __init__(
        self,
        device: PageDevice,
        rows: RequestRows,
        counts: PageCounts,
        high: HighRows,
        windows: RowWindows,
        blocks: int,
        kept_pages: int = 0,
    ):
        self.device, self.rows, self.counts, self.geometry = device, rows, counts, device.geometry
        self.high, self.windows, self.ranks = high, windows, counts.ranks.ranks
        on_gpu = device.state.pages.is_cuda
        self.room = TransferRoom(device.geometry, blocks, pinned=on_gpu)
        self.origin: Origin | None = None
        self.sent = self.received = self.failed = self.pages_sent = self.pages_left = 0
        self._exports: set[RowExport] = set()
        self._waiting: deque[RowExport] = deque()  # for blocks, in the order in which they began
        self._free = 0  # blocks that are free on all ranks, and perhaps more
        self._imports: set[RowImport] = set()
        self._leaving: deque[tuple[Any, list[Run]]] = deque()
        self.kept_pages = kept_pages
        self._kept: weakref.WeakSet[KeptRow] = weakref.WeakSet()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="diffkv-transfer")
        self._staging: torch.Tensor | None = None
        if on_gpu:
            size = (staging_pages(device.fmt, device.geometry.num_pages), device.fmt.page_bytes)
            self._staging = torch.empty(size, dtype=torch.uint8, device=device.state.device)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the device that pages pass through."""
        return 0 if self._staging is None else self._staging.nbytes

    # Out

    def sends(self, path: Path) -> bool:
        """Whether a prompt that reads ``path`` surely has no more pages than the other server sets aside for it. Many
        short parts, whose last pages are part-filled, have more."""
        geometry, pages = self.geometry, 0
        for segment, lo, hi in path:
            most = geometry.heads * sum(self.device.space.part_entries(segment, lo, hi))
            pages += min(most, segment.pages or most)
        own = geometry.most_pages(1) + geometry.heads  # each further page of its own has one more set aside
        return pages + own <= most_row_pages(geometry, path_end(path) + 1)

    def export(self, row: int, request: str, most: int, has: int = 0) -> RowExport:
        """Begin to send a row past its prompt. ``request``: what both servers call it. ``most``: blocks that the
        other one has for it. ``has``: tokens of the prompt, the first ones, that the other one has itself. Pages that
        hold nothing behind them stay here, but for those that the row may still write. Raises torch.OutOfMemoryError,
        changing nothing."""
        assert self.origin is not None and row in self.rows and not self.rows.in_prompt(row)
        state, frozen = self.device.state, self.rows.frozen(row)
        start = min(max(has, 0), self.rows.shared(row) if frozen is None else frozen)
        header = {
            **self.origin.fields(), "request": request, "length": self.rows.length(row), "from": start,
            "frozen": -1 if frozen is None else frozen, "high": row in self.high,
            "window": self.windows.window_of(row) if row in self.windows else 0,
        }  # fmt: skip
        with self.device.launching():
            tables = [self.device.table_of(row, tier, NO_LIMIT) for tier in range(self._tiers)]
            left = torch.zeros_like(state.entries[row])
            if start:
                tables = [self._behind(row, tier, table, start, left) for tier, table in enumerate(tables)]
            used = torch.cat([used for _, used, _ in tables]).int()
            ranges = torch.cat([known[1:] for _, _, known in tables], dim=1)
            counts = [state.entries[row] - left, state.own_entry[row] - left, state.own_tokens[row], state.hole[row]]
            single = [state.fault[row].view(1), left.sum(dtype=torch.int32).view(1)]
            listed = torch.cat([*(x.flatten() for x in counts), *single, used, ranges.flatten()])
            pages = torch.cat([page for page, _, _ in tables])
            listed, event = to_host(listed)
        export = RowExport(row, most, header, listed, event, pages)
        self._exports.add(export)
        self._waiting.append(export)
        return export

    def _behind(self, row: int, tier: int, table: Table, start: int, left: torch.Tensor) -> Table:
        """A tier's table of a row as ``table_of`` has it, without the entries that hold nothing from position ``start``
        on. What the row may write stays. ``left`` [L, H, T] int32 gets how many were taken out of each head."""
        (page, used, known), state = table, self.device.state
        width, view = len(page) // self.geometry.heads, state.tiers[tier]
        entry = torch.arange(width, device=state.device).repeat(self.geometry.heads)
        own = entry >= state.own_entry[row, :, :, tier].flatten().repeat_interleave(width)
        head, low, high = known
        low = torch.where(own, low, low.clamp(min=start))
        held = []
        for some in torch.arange(len(page), device=state.device).split(max(SLOTS_AT_ONCE // view.layout.tokens, 1)):
            position = view.positions[page[some]]
            held.append(((position >= low[some].unsqueeze(1)) & (position < high[some].unsqueeze(1))).any(1))
        kept = used & (own | torch.cat(held))
        left[..., tier] = (used & ~kept).view(*left.shape[:2], width).sum(2)
        return page, kept, torch.stack([head, low, high])

    @property
    def _tiers(self) -> int:
        return len(self.device.fmt.tiers)

    def advance(self, export: RowExport) -> bool:
        """Go on with an export. True once its object is whole, or it has a ``problem``."""
        if export.problem or export.ready:
            return True
        if export.sealing is not None:
            return self._sealed(export, export.sealing)
        if export.copying is not None:
            if export.copying.end is None or export.copying.end.query():
                export.sealing = self._thread.submit(self._seal, export)
            return False
        if export.numbers is None:
            if export.event is not None and not export.event.query():
                return False
            self._know(export)
        if not export.problem:
            self._copy(export)
        if export.problem and export in self._waiting:
            self._waiting.remove(export)
        return bool(export.problem)

    def _sealed(self, export: RowExport, sealing: Future[None]) -> bool:
        if not sealing.done():
            return False
        if (error := sealing.exception()) is not None:
            export.problem = f"its object cannot be written: {error!r}"
        return True

    def _know(self, export: RowExport) -> None:
        """The row's table is on the host."""
        heads, tiers, listed = self.geometry.heads, self._tiers, export.listed.numpy()
        by_tier, hole, (fault, export.left), rest = np.split(listed, np.cumsum([3 * heads * tiers, heads, 2]))
        used, low, high = rest.reshape(3, -1)
        chosen = used.astype(bool)
        counts, ranges = by_tier.reshape(3, heads, tiers), np.stack([low, high])[:, chosen]
        export.numbers = RowNumbers.of(counts, hole, ranges)
        needed = self._blocks_of(export.numbers.pages)
        if fault:
            export.problem = "the pool of pages was empty while it was computed"
        elif needed > export.most:
            export.problem = (
                f"its {export.numbers.pages} pages need {needed} blocks, and the decode server has set {export.most} "
                "aside for it"
            )
        elif needed > self.room.count:
            export.problem = (
                f"its {export.numbers.pages} pages need {needed} blocks, and this server has {self.room.count}"
            )
        else:
            try:
                with self.device.launching():
                    export.pages = export.pages[self.device.to_device(chosen.nonzero()[0])]
            except torch.OutOfMemoryError:
                export.problem = "the device has no memory to list its pages"

    def _head_pages(self, pages: int) -> int:
        """Pages before those of an object of so many."""
        return -(-head_size(self.geometry, pages) // self.device.fmt.page_bytes)

    def _blocks_of(self, pages: int) -> int:
        return -(-(self._head_pages(pages) + pages) // self.room.per_block)

    def _copy(self, export: RowExport) -> None:
        """Copy the row's pages to blocks, if there are so many by now and no other row has waited longer for them."""
        numbers = export.numbers
        assert numbers is not None
        taken = self.room.take(self._blocks_of(numbers.pages)) if self._waiting[0] is export else None
        if taken is None:
            return
        self._waiting.remove(export)
        export.blocks = taken
        runs = first_of(_without(self.room.pages_of(taken), self._head_pages(numbers.pages)), numbers.pages)
        source = self.device.state.pages
        try:
            export.copying = self.device.launch_beside(
                lambda: copy_out(source, export.pages, self.room, runs, self._staging)
            )
        except torch.OutOfMemoryError:
            self.room.set_aside(taken)
            export.blocks, export.problem = [], "the device has no memory to copy it"

    def _seal(self, export: RowExport) -> None:
        """Write what stands before the pages. Of the thread."""
        numbers, page_bytes = export.numbers, self.device.fmt.page_bytes
        assert numbers is not None
        runs, before = self.room.pages_of(export.blocks), self._head_pages(numbers.pages)
        header = {**export.header, "before": before}
        header["pages"] = self._checksum(first_of(_without(runs, before), numbers.pages))
        head = RowHead(header, numbers).encode()
        padded = head.ljust(before * page_bytes, b"\0")
        for view in self.room.bytes_of(first_of(runs, before)):
            view[:], padded = padded[: len(view)], padded[len(view) :]

    def _checksum(self, runs: list[Run]) -> str:
        running = checksum(b"")
        for view in self.room.bytes_of(runs):
            running.update(view)
        return str(running.hexdigest())

    def finish(self, export: RowExport, *, well: bool) -> None:
        """The object has gone, or is not wanted any more."""
        if export not in self._exports:
            return
        self._exports.remove(export)
        if export in self._waiting:
            self._waiting.remove(export)
        if export.copying is not None:
            self.device.join(export.copying)
        done = export.sealing is None or export.sealing.done()
        if well and done:
            self.room.give(export.blocks)
        else:
            self.room.set_aside(export.blocks)
        self.sent += well
        self.failed += not well
        if well and export.numbers is not None:
            self.pages_sent += export.numbers.pages
            self.pages_left += int(export.left)

    # In

    def can_expect(self, tokens: int, parts: int = 1) -> bool:
        """Whether there are blocks for the row of a prompt of so many tokens, in so many ``parts``, on all ranks. With
        several all have to call it: each takes blocks back in a time of its own."""
        needed = blocks_for(self.geometry, tokens, parts)
        if needed > self._free or self.ranks.alone:
            self.tend()
            self._free = int(self.ranks.least(np.array([self.room.free()], dtype=np.int64))[0])
        return needed <= self._free

    def expect(self, tokens: int, parts: int = 1) -> RowImport | None:
        """Blocks for the row of a prompt of so many tokens; None, changing nothing, if there are not so many. With
        several ranks all have to call it. ``parts``: of the other server's ranks, how many send each of these theirs.
        """
        if not self.can_expect(tokens, parts):
            return None
        blocks = self.room.take(blocks_for(self.geometry, tokens, parts))
        assert blocks is not None, "blocks were free, and nobody took them"
        self._free -= sum(count for _, count in blocks)
        found = RowImport(tokens, blocks, parts)
        for part in found.of_parts:
            for view in self.room.bytes_of(first_of(self.room.pages_of(part), 1)):
                view[: PREFIX.size] = bytes(PREFIX.size)  # an object that was here before is none of this request
        self._imports.add(found)
        return found

    def look(self, wanted: RowImport, request: str) -> None:
        """The engine says that the row has come: look at it, in the thread."""
        if wanted.reading is None:
            wanted.reading = self._thread.submit(self._read, wanted.of_parts, request)

    def arrived(self, wanted: Sequence[RowImport | None]) -> list[Exception | bool]:
        """Of rows that are looked at: True for one that is good on all ranks, False while that is not known, or what is
        wrong with it. With several ranks all have to call it, with the rows of the same requests. None: no row comes.
        """
        found = [True if x is None else x.result() for x in wanted]
        if self.ranks.alone or not wanted:
            return found
        tiers = len(self.device.fmt.tiers)
        mine = np.zeros((len(wanted), 4 + tiers), dtype=np.int64)
        for numbers, row, known in zip(mine, wanted, found, strict=True):
            numbers[0] = -(GOOD if known is True else LOOKED_AT if known is False else WRONG)
            if row is not None and known is True:
                facts = zlib.crc32(repr(row.head.facts).encode())
                takes = Takes.of(row.head.numbers)
                numbers[1:] = facts, -facts, takes.pages, *takes.entries
        worst = self.ranks.largest(mine.ravel()).reshape(mine.shape).tolist()
        for index, (row, (state, facts, others, pages, *entries)) in enumerate(zip(wanted, worst, strict=True)):
            if -state == GOOD and facts != -others:
                found[index] = ObjectRefused("header", PARTED)
            elif -state == GOOD:
                if row is not None:
                    row.takes = Takes(pages, tuple(entries))
            elif found[index] is True or found[index] is False:
                found[index] = OtherRankError() if -state == WRONG else False
        return found

    def _read(self, of_parts: list[list[Run]], request: str) -> Come:
        """What is in the blocks of each part. Of the thread. Raises ObjectRefused."""
        assert self.origin is not None
        parts = len(of_parts)
        if parts == 1:
            return self._read_one(of_parts[0], request, self.geometry, self.origin)
        geometry, heads, runs = part_of(self.geometry, parts), list[RowHead](), list[Run]()
        for number, blocks in enumerate(of_parts):
            origin = self.origin.of_part(number, parts)
            try:
                head, held, _ = self._read_one(blocks, request, geometry, origin)
            except ObjectRefused as error:
                raise ObjectRefused(error.reason, f"of rank {origin.rank} there: {error}") from error
            heads.append(head)
            runs += held
        head, place = join(heads, self.geometry.num_layers)
        return Come(head, runs, place)

    def _read_one(self, blocks: list[Run], request: str, geometry: Geometry, origin: Origin) -> Come:
        """An object of a rank with so many heads."""
        runs, page_bytes = self.room.pages_of(blocks), self.device.fmt.page_bytes
        whole = sum(count for _, count in runs)
        start = bytes(self._first_bytes(runs, PREFIX.size))
        size = said_size(start, whole * page_bytes, geometry)
        head = decode_head(self._first_bytes(runs, size), geometry)
        check_head(head, geometry, origin, request, high=self.high.allowed, windows=self.windows.known)
        before = int(head.header["before"])
        if not size <= before * page_bytes <= (whole - head.numbers.pages) * page_bytes:
            raise ObjectRefused("header", "its header does not say where its pages are")
        held = first_of(_without(runs, before), head.numbers.pages)
        if self._checksum(held) != head.header.get("pages"):
            raise ObjectRefused("checksum", "its pages are damaged")
        return Come(head, held)

    def _first_bytes(self, runs: list[Run], size: int) -> bytes:
        pages = -(-size // self.device.fmt.page_bytes)
        return b"".join(self.room.bytes_of(first_of(runs, pages)))[:size]

    def restore(self, wanted: RowImport, row: int, path: Path | None = None) -> None:
        """Make an empty row of what has come, behind as much of ``path`` as the other server left out. The caller has
        made sure of the pages, and with several ranks of that it is good on all (``arrived``). Nothing waits for the
        device.

        Raises ObjectRefused for what is no row, TableFull and NoRoom, leaving the row empty. After
        torch.OutOfMemoryError the row must be released.
        """
        head, runs, place = wanted.come
        takes = wanted.takes or Takes.of(head.numbers)
        if head.length != wanted.tokens:
            raise ObjectRefused("tokens", "it has another length than its prompt")
        before = split_path(path or [], head.start)[0]
        if path_end(before) != head.start:
            raise ObjectRefused("tokens", f"it lacks its first {head.start} tokens, and they are not all here")
        if takes.pages > most_row_pages(self.geometry, head.length):
            raise NoRoom("it has more pages than were set aside for it")
        if takes.pages > self.counts.free_bound() - self.counts.headroom_bound():
            raise NoRoom("it has more pages than are free")
        numbers, state = head.numbers, self.device.state
        self._make(row, head.length, head.frozen, takes, before)
        with self.device.launching():
            order = None if place is None else self.device.to_device(place)
            pages = self._fill(row, numbers)
            pages = pages if order is None else pages[order]
            copy_in(state.pages, self.room, runs, np.ones(numbers.pages, dtype=bool), pages, self._staging)
            event = None
            if state.pages.is_cuda:
                event = torch.cuda.Event()
                event.record()
        self._mark(row, head.header)
        self._imports.remove(wanted)
        self._leaving.append((event, wanted.blocks))
        self.received += 1
        self.tend()

    # Requests that are retracted

    def keep(self, row: int, length: int) -> KeptRow:
        """Copy the first ``length`` tokens of a row to host memory. Waits for the device. They come back as pages that
        the row may not write, since the device may have stored one token more. Whoever has the kept row has the memory.

        Raises NoRoom and torch.OutOfMemoryError, changing nothing. With several ranks all have to call it, and if one
        cannot, none does: then the others raise OtherRankError.
        """
        with self.device.launching():
            pages, numbers = self.ranks.together(lambda: self._listed(row, length))
            takes = Takes.of(numbers)
            most, *entries = self.ranks.largest(np.array([takes.pages, *takes.entries], dtype=np.int64)).tolist()
            takes = Takes(most, tuple(entries))
            kept = self.ranks.together(lambda: self._copied(row, length, pages, numbers, takes))
        self._kept.add(kept)
        return kept

    def _listed(self, row: int, length: int) -> tuple[torch.Tensor, RowNumbers]:
        """The pages with the first ``length`` tokens of a row, [n] int64, and what is known of them."""
        state, tables = self.device.state, []
        for tier in range(self._tiers):
            tables.append(self.device.table_of(row, tier, length))
        pages = torch.cat([page[used] for page, used, _ in tables])
        ranges = torch.cat([known[1:, used] for _, used, known in tables], dim=1).cpu().numpy()
        entries = state.entries[row].flatten(0, 1).cpu().numpy()
        counts = np.stack([entries, entries, np.zeros_like(entries)])
        return pages, RowNumbers.of(counts, np.full(len(entries), EMPTY), ranges)

    def _copied(self, row: int, length: int, pages: torch.Tensor, numbers: RowNumbers, takes: Takes) -> KeptRow:
        """These pages in host memory."""
        host = self._host_memory(len(pages), takes.pages)
        window = self.windows.window_of(row) if row in self.windows else 0
        kept = KeptRow(length, row in self.high, window, numbers, host, takes)
        copy_out(self.device.state.pages, pages, kept, [(0, len(pages))] if len(pages) else [], self._staging)
        return kept

    def _host_memory(self, pages: int, most: int) -> torch.Tensor:
        """For so many pages of a retracted request, [n, page_bytes] uint8. ``most``: on any rank. Raises NoRoom."""
        taken = sum(kept.takes.pages for kept in self._kept)
        if taken + most > self.kept_pages:
            raise NoRoom(f'host memory for retracted requests is full ({self.kept_pages} pages, "host_gib")')
        size = (pages, self.device.fmt.page_bytes)
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.state.pages.is_cuda)
        except RuntimeError as error:
            raise NoRoom(f"the system gives no host memory for a retracted request: {error}") from error

    def bring_back(self, kept: KeptRow, row: int) -> None:
        """Make an empty row of what was kept. The caller has made sure of the pages. Nothing waits for the device.

        Raises TableFull, leaving the row empty. After torch.OutOfMemoryError the row must be released.
        """
        count = kept.numbers.pages
        self._make(row, kept.length, kept.length, kept.takes, [])
        with self.device.launching():
            pages = self._fill(row, kept.numbers)
            runs = [(0, count)] if count else []
            copy_in(self.device.state.pages, kept, runs, np.ones(count, dtype=bool), pages, self._staging)
        self._mark(row, {"high": kept.high, "window": kept.window})

    def restore_nothing(self, row: int, tokens: int) -> None:
        """An empty row is of a prompt of so many tokens, none of which is stored: for requests of the server's own, by
        which it is warmed up."""
        self.rows.restore_nothing(row, tokens)
        self.counts.touch(row)

    def _make(self, row: int, length: int, frozen: int | None, takes: Takes, before: Path) -> None:
        """Table blocks for a row behind a path, to whose pages it refers from now on, and what the host knows of it.
        Its pages count as taken. Raises TableFull, leaving the row empty."""
        assert row not in self.rows, "the row is not empty"
        self.device.attach(row, before)
        try:
            self.device.space.extend(row, takes.entries)
        except TableFull:
            self.device.release(row)
            raise
        self.rows.restore(row, length, frozen, path_end(before))
        self.counts.record(-takes.pages)
        self.counts.touch(row)

    def _fill(self, row: int, numbers: RowNumbers) -> torch.Tensor:
        """Pages of the ring for a row behind what it refers to, [n] int64, with its table and counts on the device."""
        device, state = self.device, self.device.state
        tier, head, entry, low, high = device.to_device(np.stack([*numbers.places(), numbers.low, numbers.high]))
        counts = np.stack([numbers.entries, numbers.own_entry, numbers.own_tokens])
        shape = (3, state.num_layers, state.num_heads, self._tiers)
        entries, own_entry, own_tokens = device.to_device(counts).int().view(shape)
        hole = device.to_device(numbers.hole).int().view(shape[1:3])
        before = state.entries[row].clone()
        entry = entry + before.flatten(0, 1)[head, tier]
        column = entry
        for number in range(1, self._tiers):
            column = torch.where(tier == number, table_column(state, number, entry), column)
        place = (state.counters[0] + torch.arange(numbers.pages, device=state.device)) % state.num_pages
        pages = state.ring[place].long()
        where = head_index(state, row, head, column)
        entries, own_entry = entries + before, own_entry + before
        state.counters[0] += numbers.pages  # the first change: what may lack memory stands before it
        state.refcount.index_fill_(0, pages, 1)
        put_entries(state, where, pages, low, high)
        state.entries[row], state.own_entry[row], state.own_tokens[row] = entries, own_entry, own_tokens
        state.kept_entry[row] = before
        state.hole[row] = hole
        return pages

    def _mark(self, row: int, header: Mapping[str, Any]) -> None:
        """What the row's request asked for itself."""
        if header["high"]:
            self.high.keep(row)
        if header["window"]:
            self.windows.keep(row, int(header["window"]))

    def give_up(self, wanted: RowImport) -> None:
        """The row is not wanted any more, or does not come."""
        if wanted in self._imports:
            self._imports.remove(wanted)
            self.room.set_aside(wanted.blocks)
            self.failed += 1

    # The end

    def tend(self) -> None:
        """Take back the blocks of rows that are on the device by now."""
        while self._leaving and (self._leaving[0][0] is None or self._leaving[0][0].query()):
            self.room.give(self._leaving.popleft()[1])

    def forget(self, row: int) -> None:
        """The row is about to be released: what is being copied of it is copied before its pages are written again."""
        for export in [x for x in self._exports if x.row == row]:
            self.finish(export, well=False)

    def report(self) -> dict[str, int]:
        """For ``/server_info``."""
        self.tend()
        on_the_way = len(self._exports) + len(self._imports)
        return {
            "sent": self.sent, "received": self.received, "failed": self.failed, "on_the_way": on_the_way,
            "pages_sent": self.pages_sent, "pages_left": self.pages_left,
            "blocks": self.room.count, "blocks_used": self.room.used, "block_bytes": self.room.block_bytes,
        }  # fmt: skip

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is free or that of one row on its way."""
        held = [x.blocks for x in self._exports] + [x.blocks for x in self._imports]
        self.room.check_integrity(held + [blocks for _, blocks in self._leaving])
        for export in self._exports:
            assert export.row in self.rows, "a row that nobody has is being sent"
        for export in self._waiting:
            assert export in self._exports and not export.blocks, "a row that does not wait has its turn"
