"""Host memory for pages, reserved once: who has which of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator

import torch

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.mem_pool.pinning import Pinning

Run = tuple[int, int]
"""First host page and count."""

GIB = 1 << 30

PART_BYTES = 64 << 20
"""Of memory that is pinned in parts, about so much at once: it takes some hundredths of a second."""

ALIGNED = 4096
"""Bytes: parts that are pinned apart share no page of the operating system."""

HUGE = 2 << 20
"""Bytes of a large page of the operating system. Memory that has them is pinned in less time."""

logger = logging.getLogger(__name__)


class HostPages:
    """Pages in host memory, handed out in runs. With a GPU the memory is pinned, so that copies wait for nobody.

    Args:
        pinned: all of it from the start, unless ``in_parts``: then by a thread that is ahead of what is taken.

    Attributes:
        pages: [count, page_bytes] uint8 on the host.
        part: pages that are pinned together. No copy may reach over the end of a part.
    """

    def __init__(self, count: int, page_bytes: int, *, pinned: bool, in_parts: bool = False):
        self.part = max(count, 1)
        self._pinning: Pinning | None = None
        if in_parts:
            step = ALIGNED // math.gcd(page_bytes, ALIGNED)
            self.part = -(-max(PART_BYTES // page_bytes, 1) // step) * step
        if pinned and in_parts:
            self.pages = _aligned(count, page_bytes)
            self._pinning = Pinning(self.pages, self.part, lambda memory: _register(memory))
        else:
            self.pages = torch.empty(count, page_bytes, dtype=torch.uint8)
            if pinned and count:
                _pin(self.pages)
        self._count = count
        self._free: list[Run] = [(0, count)] if count else []  # in order; neighbours do not touch
        self._left = count

    @property
    def count(self) -> int:
        """Pages in all; fewer than at the start if the system did not let some be pinned."""
        return self._count

    @property
    def free(self) -> int:
        """Pages that nobody has."""
        return self._left

    @property
    def used(self) -> int:
        """Pages that somebody has."""
        return self.count - self.free

    def take(self, count: int) -> list[Run] | None:
        """Runs of ``count`` pages together: one if the free pages have one so long, else as few as the first ones that
        are free give. None, giving out nothing, if there are not so many."""
        if count > self.free:
            return None
        taken = self._take(count)
        self._left -= count
        end = max((first + length for first, length in taken), default=0)
        if not self._pin_to(end):
            assert self._pinning is not None
            self.give(taken)
            self._shrink(self._pinning.ready)
            return self.take(count)
        return taken

    def _take(self, count: int) -> list[Run]:
        """As ``take``, of pages that are free."""
        for index, (start, length) in enumerate(self._free):
            if length >= count > 0:
                self._free[index : index + 1] = [(start + count, length - count)] if length > count else []
                return [(start, count)]
        taken: list[Run] = []
        while count:
            start, length = self._free.pop(0)
            part = min(length, count)
            taken.append((start, part))
            if part < length:
                self._free.insert(0, (start + part, length - part))
            count -= part
        return taken

    def give(self, runs: Iterable[Run]) -> None:
        """Take back runs that were handed out."""
        merged: list[Run] = []
        for start, count in sorted([*self._free, *runs]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + count)
            else:
                merged.append((start, count))
        self._free = merged
        self._left = sum(count for _, count in merged)

    def pin_now(self, least: Callable[[int], int]) -> None:
        """Pin all parts now. ``least`` gives the least of a number that each rank has: ranks hand out the same pages,
        so none may find later that the system lets it have fewer."""
        self._pin_to(self._count)
        self._shrink(least(self._count if self._pinning is None else self._pinning.ready))

    def idle(self, idle: bool) -> None:
        """Whether the server has nothing to do, so that pinning ahead holds nobody up."""
        if self._pinning is not None:
            self._pinning.idle(idle)

    def end_of_part(self, page: int) -> int:
        """The page after the last one of a page's part."""
        return (page // self.part + 1) * self.part

    def _pin_to(self, end: int) -> bool:
        """Wait until the pages before ``end`` are pinned; False if the system does not let them be."""
        if self._pinning is None or self._pinning.want(end):
            return True
        logger.warning(
            "DiffKV: %d pages of host memory are pinned, and the system lets no more be (CUDA error %d): the server "
            "goes on with these.", self._pinning.ready, self._pinning.error,
        )  # fmt: skip
        return False

    def _shrink(self, count: int) -> None:
        """There are no more than the first ``count`` pages. Nobody holds any of the others."""
        self._count = min(self._count, count)
        self._free = [(start, min(length, self._count - start)) for start, length in self._free if start < self._count]
        self._left = sum(length for _, length in self._free)

    def check_integrity(self, held: Iterable[Run]) -> None:
        """Raise AssertionError unless every page is free or in one of the ``held`` runs, once."""
        at = 0
        for start, count in sorted([*self._free, *held]):
            assert count > 0 and start == at, f"host page {min(at, start)} is lost or held twice"
            at = start + count
        assert at == self.count, "host pages are lost"
        assert self._left == sum(count for _, count in self._free), "free host pages are miscounted"
        ends = [start + count for start, count in self._free]
        assert not set(ends) & {start for start, _ in self._free}, "neighbouring free runs are apart"


def first_of(runs: Iterable[Run], count: int) -> list[Run]:
    """The first ``count`` pages of runs that have at least so many."""
    return list(part_of(runs, 0, count))


def part_of(runs: Iterable[Run], start: int, count: int) -> Iterator[Run]:
    """Of runs ``count`` pages from number ``start`` on."""
    for first, length in runs:
        skipped = min(start, length)
        taken = min(length - skipped, count)
        if taken:
            yield first + skipped, taken
        start, count = start - skipped, count - taken
    assert not count, "runs have fewer pages"


def _aligned(count: int, page_bytes: int) -> torch.Tensor:
    """[count, page_bytes] uint8 from a large page of the operating system on. It is not touched."""
    memory = torch.empty(count * page_bytes + HUGE, dtype=torch.uint8)
    first = -memory.data_ptr() % HUGE
    return memory[first : first + count * page_bytes].view(count, page_bytes)


def _register(memory: torch.Tensor) -> int:
    """Pin just these bytes: PyTorch's own allocator would take the next power of two. CUDA's error, 0 for none."""
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def _pin(memory: torch.Tensor) -> None:
    """``_register`` at a server's start. Raises UnsupportedError."""
    if error := _register(memory):
        raise UnsupportedError(
            f"diffkv: {memory.nbytes / GIB:.2f} GiB of host memory for retracted requests cannot be pinned (CUDA error "
            f'{error}): set "host_gib" in --diffkv-config to less, or to 0'
        )
