"""Host memory for pages, allocated once: who has which of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sglang_diffkv.errors import UnsupportedError

Run = tuple[int, int]
"""First host page and count."""

GIB = 1 << 30


class HostPages:
    """Pages in host memory, handed out in runs. With a GPU the memory is pinned, so that copies wait for nobody.

    Attributes:
        pages: [count, page_bytes] uint8 on the host.
    """

    def __init__(self, count: int, page_bytes: int, *, pinned: bool):
        self.pages = torch.empty(count, page_bytes, dtype=torch.uint8)
        if pinned and count:
            _pin(self.pages)
        self._free: list[Run] = [(0, count)] if count else []  # in order; neighbours do not touch

    @property
    def count(self) -> int:
        """Pages in all."""
        return self.pages.shape[0]

    @property
    def free(self) -> int:
        """Pages that nobody has."""
        return sum(count for _, count in self._free)

    @property
    def used(self) -> int:
        """Pages that somebody has."""
        return self.count - self.free

    def take(self, count: int) -> list[Run] | None:
        """Runs of ``count`` pages together, as few as the first ones that are free give; None, changing nothing, if
        there are not so many."""
        if count > self.free:
            return None
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

    def check_integrity(self, held: Iterable[Run]) -> None:
        """Raise AssertionError unless every page is free or in one of the ``held`` runs, once."""
        at = 0
        for start, count in sorted([*self._free, *held]):
            assert count > 0 and start == at, f"host page {min(at, start)} is lost or held twice"
            at = start + count
        assert at == self.count, "host pages are lost"
        ends = [start + count for start, count in self._free]
        assert not set(ends) & {start for start, _ in self._free}, "neighbouring free runs are apart"


def _pin(memory: torch.Tensor) -> None:
    """Pin just these bytes: PyTorch's own allocator would take the next power of two. Raises UnsupportedError."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error):
        raise UnsupportedError(
            f"diffkv: {memory.nbytes / GIB:.2f} GiB of host memory for retracted requests cannot be pinned (CUDA error "
            f'{int(error)}): set "host_gib" in --diffkv-config to less, or to 0'
        )
