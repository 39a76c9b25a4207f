"""Pages, tables and rows on the device: whatever changes them goes through here, in launch order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from sglang_diffkv.kernels.copy_compact.reference import Part
from sglang_diffkv.kernels.parts import FROM_START
from sglang_diffkv.kernels.table import row_table
from sglang_diffkv.layout.geometry import Geometry, Path
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.layout.transfer import to_device
from sglang_diffkv.mem_pool.table_space import TableSpace
from sglang_diffkv.ops.base import Ops
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.diffkv import KEEP

Result = TypeVar("Result")

LAYER_GROUPS = 4
"""Groups of layers whose bytes come one behind the other. The host launches copies, and graphs, for each."""


def layer_groups(layers: int) -> list[int]:
    """The first layer of each group, of a model with so many."""
    return sorted({layers * number // LAYER_GROUPS for number in range(LAYER_GROUPS)})


@dataclass(frozen=True)
class Beside(Generic[Result]):
    """What was launched beside the forward passes, and its result.

    Attributes:
        end: marks the end of its kernels; None where they have ended.
    """

    result: Result
    end: torch.cuda.Event | None


@dataclass
class Arriving:
    """Bytes of pages on their way, some layers' behind others'.

    Attributes:
        kept: what has to stay until they are there. ends: by the first layer of each part, what marks its end; None
            where it is there. rows: segments' rows that have these pages, and no others. unread: whether each of their
            position ranges begins with a token, so that rows may attach to them before the bytes are there.
    """

    kept: list[Any]
    ends: list[tuple[int, torch.cuda.Event | None]]
    rows: frozenset[int] = frozenset()
    unread: bool = False


class Launching:
    """A ``with`` statement of ``PageDevice.launching``. Each pass enters some of them for each of its requests. So it
    asks PyTorch for the current stream once, and sets a stream only where that is another.

    Args:
        stream: where kernels are launched; None: the current stream. allocates: whether they need memory beside the
            state's. flush: brings the host's table blocks up to date.
    """

    __slots__ = ("_allocates", "_flush", "_previous", "_stream")

    def __init__(self, stream: torch.cuda.Stream | None, allocates: bool, flush: Callable[[], None]):
        self._stream, self._allocates, self._flush = stream, allocates, flush
        self._previous: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        stream = self._stream
        if stream is not None:
            current = torch.cuda.current_stream(stream.device_index)
            if current != stream:
                if self._allocates:
                    stream.wait_stream(current)
                torch.cuda.set_stream(stream)
                self._previous = current
        try:
            self._flush()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *error: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._previous is not None:
            torch.cuda.set_stream(self._previous)


class PageDevice:
    """The device state of a server, the ops that change it, and the host's side of the page table.

    All calls are made by one thread and take effect in call order: they launch on one stream, and none waits for it
    except where its docstring says so. ``launch_beside`` and ``bring`` alone take others.

    Attributes:
        space: table blocks of every row. stream: where forward passes run; None for the current stream.
    """

    def __init__(self, geometry: Geometry, state: PageState, ops: Ops):
        self.geometry, self.fmt, self.state, self.ops = geometry, geometry.fmt, state, ops
        self.space = TableSpace(state, ops.set_blocks)
        self.stream: torch.cuda.Stream | None = None
        self._gathers = False
        self._attaching: list[tuple[int, Sequence[Part]]] = []  # rows, and what they are about to refer to
        self._beside: dict[str, torch.cuda.Stream] = {}
        self._attaches_read = False  # whether these look for tokens in pages whose bytes are on their way
        self._arriving: list[Arriving] = []  # until a launch has come behind all of it

    def to_device(self, numbers: Any) -> torch.Tensor:
        """[n] int64 on the device, without waiting for it."""
        return to_device(numbers, self.state.device)

    def works(self) -> bool:
        """Whether forward passes with a stream of their own still run."""
        return self.stream is not None and not self.stream.query()

    def launching(self, *, allocates: bool = True, reads_pages: bool = True) -> Launching:
        """Kernels launched inside run in order with the forward passes and see the host's table blocks.

        What they need may come from memory that a forward pass has left and that the scheduler's stream still reads
        (the accepted drafts of a batch that it sorts anew). SGLang itself lets no forward pass begin before that.

        Args:
            allocates: whether they need memory beside the state's. If not, they wait for no other stream. reads_pages:
                if not, they do not wait for bytes of pages that are on their way (``bring``), unless rows are to attach
                first that have to look for tokens in these.
        """
        allocates = allocates or self.space.flush_allocates or len(self._attaching) > 1
        return Launching(self.stream, allocates, self.flush if reads_pages else self._flush_tables)

    def flush(self, *, by_layer: bool = False) -> None:
        """Bring the device up to what the host has decided, on the current stream, without waiting: bytes of pages that
        are on their way, table blocks of rows, and what rows refer to.

        Args:
            by_layer: what is launched next calls ``reach`` before it reads pages of a layer, and comes behind the bytes
                of that layer.
        """
        self.reach(0 if by_layer else self.geometry.num_layers)
        self._flush_tables()

    def reach(self, layer: int) -> None:
        """What is launched next on the current stream reads pages of a layer, and of those before it."""
        if not self._arriving:
            return
        for arriving in self._arriving:
            while arriving.ends and arriving.ends[0][0] <= layer:
                _, end = arriving.ends.pop(0)
                if end is not None:
                    torch.cuda.current_stream().wait_event(end)
        self._arriving = [arriving for arriving in self._arriving if arriving.ends]

    def _flush_tables(self) -> None:
        self.space.flush()
        if self._attaching:
            if self._attaches_read:
                self.reach(self.geometry.num_layers)
            self.ops.attach_paths(self._attaching)
            self._attaching, self._attaches_read = [], False

    @contextmanager
    def attaching_together(self) -> Iterator[None]:
        """Inside, rows are attached to by one launch for all: before whatever is launched next, or at the end."""
        self._gathers = True
        try:
            yield
        finally:
            self._gathers = False
            self._attach_gathered()

    def _attach_gathered(self) -> None:
        if self._attaching and not self._gathers:
            with self.launching(allocates=False, reads_pages=False):
                pass

    def launch_beside(self, launch: Callable[[], Result]) -> Beside[Result]:
        """Launch kernels on a stream of their own: behind all that is launched so far, and beside what comes next,
        which must not write what they read until ``join``. On a CPU they run at once.

        What PyTorch allocates for them is used again by the next ones only, and these come behind all that was launched
        before them, what read the result of the last ones included. Should ``launch`` raise, what is launched from then
        on comes behind all that it has launched.
        """
        return self._launch_on("out", launch)

    def _launch_on(self, name: str, launch: Callable[[], Result], *, reads_pages: bool = True) -> Beside[Result]:
        with self.launching(reads_pages=reads_pages):
            if not self.state.pages.is_cuda:
                return Beside(launch(), None)
            forward = torch.cuda.current_stream()
        if name not in self._beside:
            self._beside[name] = torch.cuda.Stream(self.state.device)
        stream = self._beside[name]
        stream.wait_stream(forward)
        with torch.cuda.stream(stream):
            try:
                result = launch()
            except BaseException:
                forward.wait_stream(stream)
                raise
        return Beside(result, stream.record_event())

    def bring(
        self, launches: Sequence[tuple[int, Callable[[], Any]]], rows: Sequence[int] = (), *, unread: bool = False
    ) -> None:
        """``launch_beside``, on another stream, of copies to pages that nobody reads yet. What is launched from now on
        comes behind them, but for what reads no page: so counts do not wait for bytes, nor for those that were brought
        before.

        Args:
            launches: in order, each with the first layer whose pages it fills, from 0 on. What it returns is kept until
                all have ended. rows, unread: as of ``Arriving``.
        """
        arriving = Arriving([], [], frozenset(rows), unread)
        for layer, launch in launches:
            copied = self._launch_on("in", launch, reads_pages=False)
            arriving.kept.append(copied.result)
            arriving.ends.append((layer, copied.end))
        self._arriving.append(arriving)

    def arrives(self, row: int) -> bool:
        """Whether bytes of a segment's pages are on their way."""
        return any(row in arriving.rows for arriving in self._arriving)

    def join(self, beside: Beside[Result]) -> Result:
        """What is launched from now on comes behind ``beside``. The host does not wait."""
        if beside.end is not None:
            with self.launching():
                torch.cuda.current_stream().wait_event(beside.end)
        return beside.result

    def attach(self, row: int, path: Path) -> None:
        """Append references to segments' pages to a row's table. Raises TableFull, changing nothing."""
        if path:
            self.space.extend(row, self.space.path_entries(path))
            self._attaching.append((row, self._parts_of(path)))
            self._attach_gathered()

    def _parts_of(self, path: Path) -> list[Part]:
        """What ``Ops.attach_paths`` takes of a path. Pages whose bytes are on their way are not read for it, if that
        can be."""
        found: list[Part] = []
        for segment, lo, hi in path:
            first = lo
            for arriving in self._arriving:
                if segment.row in arriving.rows:
                    unread = arriving.unread and lo == segment.lo
                    first, self._attaches_read = FROM_START if unread else lo, self._attaches_read or not unread
            found.append((segment.row, first, hi))
        return found

    def share(self, target: int, source: int, lo: int, hi: int, *, kept_only: bool = False) -> None:
        """References to the pages of a row for another one, which has room for them: ``kernels/attach``."""
        with self.launching(allocates=False):
            self.ops.attach(target, source, lo, hi, kept_only=kept_only)

    def transfer_pages(self, layers: PageState, row: int, target: int) -> None:
        """In a group of layers the pages that a row may not write go to another one, which has room for them:
        ``kernels/transfer_pages``."""
        with self.launching():
            self.ops.transfer_pages(layers, row, target)

    def copy(
        self,
        target: int,
        parts: Sequence[Part],
        seq_len: int,
        policy: Policy,
        shared_scores: torch.Tensor | None = None,
    ) -> None:
        """Copy-on-compress into a row that has room for it: ``kernels/copy_compact``."""
        with self.launching(allocates=policy is not KEEP or shared_scores is not None):
            self.ops.copy_compact(target, parts, seq_len, policy, shared_scores)

    def freeze(self, rows: Mapping[int, int]) -> None:
        """The next token of each row starts a page of its own: after its tail, so many of its last tokens, which are in
        pages of their own and stay writable (``kernels/attach``)."""
        alone = len(rows) == 1 and not any(rows.values())
        with self.launching(allocates=not alone):
            if any(rows.values()):
                at, tails = self.to_device([[*rows], [*rows.values()]])
                self.ops.freeze(at, tails)
            else:
                self.ops.freeze(next(iter(rows)) if alone else self.to_device([*rows]))
        for row in rows:
            self.space.freeze(row)

    def keep(self, row: int) -> None:
        """A segment holds all of a row's entries before those that it may write."""
        with self.launching(allocates=False):
            self.ops.keep(row)

    def seal(self, row: int) -> None:
        """A segment holds all of a row's entries, and its next token starts a page of its own."""
        with self.launching(allocates=False):
            self.ops.seal(row)
        self.space.freeze(row)

    def release(self, row: int, *, keep_fault: bool = False) -> None:
        """Drop all pages and blocks of a row."""
        with self.launching(allocates=keep_fault):
            fault = self.state.fault[row].clone() if keep_fault else None
            self.ops.release(row)
            if fault is not None:
                self.state.fault[row] = fault
        self.space.release(row)

    def trim(self, row: int, end: int) -> None:
        """Return the pages of a segment's row that hold nothing before position ``end``."""
        with self.launching(allocates=False):
            self.ops.trim(row, end)

    def measure(self, parts: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Tokens of each tier and pages, [n, L, H, T + 1] int32, of (row, first position, position after the last)."""
        with self.launching():
            return self.ops.measure(*self.to_device([*zip(*parts, strict=True)] or torch.empty(3, 0)))

    def tally(self, row: int, hi: int, out: torch.Tensor, number: int) -> None:
        """What a row holds below position ``hi``, into ``out[number]``: ``kernels/measure``."""
        with self.launching(allocates=False):
            self.ops.tally(row, hi, out, number)

    def table_of(self, row: int, tier: int, hi: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A tier's table of a row, each head with as many columns as any may use. Pages [n] int64, whether an entry is
        used [n] bool, and [3, n] int32: head, position range below ``hi``."""
        state, width = self.state, max(self.space.bound(row)[tier], 1)
        page, lo, upper = (x.flatten() for x in row_table(state, self.to_device([row]), tier, width))
        entry = torch.arange(width, device=state.device)
        used = entry < state.entries[row, :, :, tier].unsqueeze(2)
        head = torch.arange(page.shape[0], device=state.device) // width
        return page, used.flatten(), torch.stack([head.int(), lo, upper.clamp(max=hi)])

    def free_pages(self) -> int:
        """Pages in the ring. Waits for the device."""
        with self.launching():
            taken, put = self.state.counters.tolist()
        return put - taken

    def pages_of(self, row: int) -> int:
        """Table entries of a row. Waits for the device."""
        with self.launching():
            return int(self.state.entries[row].sum())


OpsOf = Callable[[PageState], Ops]
"""Makes the ops for a state."""
