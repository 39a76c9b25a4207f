"""Bytes of pages between the device and host memory, whole pages at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from sglang_diffkv.layout.page_format import PageFormat
from sglang_diffkv.mem_pool.host_pages import Run

STAGING_BYTES = 16 << 20
"""Of the device, at most, that pages pass through on their way."""


def staging_pages(fmt: PageFormat, num_pages: int) -> int:
    """Pages of the staging buffer on a GPU: a 64th of a small pool."""
    return max(min(STAGING_BYTES // fmt.page_bytes, num_pages // 64), 1)


class HostMemory(Protocol):
    """Pages on the host, [count, page_bytes] uint8. No copy may reach over ``end_of_part`` of its first page."""

    @property
    def pages(self) -> torch.Tensor: ...

    def end_of_part(self, page: int) -> int: ...


def copy_out(
    source: torch.Tensor, pages: torch.Tensor, host: HostMemory, runs: Sequence[Run], staging: torch.Tensor | None
) -> None:
    """The bytes of ``pages`` ([n] int64) of the device's ``source`` go to the host pages of ``runs``.

    Args:
        staging: [m, page_bytes] uint8 of the device that they pass through, if there is one. A copy from there to
            pinned memory waits for nobody.
    """
    words = _words(source)
    for first, part in _parts(host, runs, staging):
        chosen, there = pages[first : first + len(part)], _words(part)
        if staging is None:
            torch.index_select(words, 0, chosen, out=there)
        else:
            staged = _words(staging)[: len(part)]
            torch.index_select(words, 0, chosen, out=staged)
            there.copy_(staged, non_blocking=True)


def copy_in(
    target: torch.Tensor,
    host: HostMemory,
    runs: Sequence[Run],
    chosen: np.ndarray,
    places: torch.Tensor,
    staging: torch.Tensor | None,
) -> None:
    """The bytes of host pages go to ``places`` ([n] int64) of the device's ``target``.

    Args:
        chosen: [n] bool, host pages of ``runs`` that matter. Of a part that is copied at once all go along if any does.
        staging: as above.
    """
    words = _words(target)
    for first, part in _parts(host, runs, staging):
        if not chosen[first : first + len(part)].any():
            continue
        here = _words(part)
        if staging is not None:
            here = _words(staging)[: len(part)].copy_(here, non_blocking=True)
        words.index_copy_(0, places[first : first + len(part)], here)


def parts_of(host: HostMemory, runs: Iterable[Run], most: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Host pages of runs, at most ``most`` at once, as copies may take them; and where they begin among all of them."""
    first = 0
    for start, count in runs:
        at, end = start, start + count
        while at < end:
            part = host.pages[at : min(at + most, end, host.end_of_part(at))]
            yield first, part
            first, at = first + len(part), at + len(part)


def _parts(host: HostMemory, runs: Sequence[Run], staging: torch.Tensor | None) -> Iterator[tuple[int, torch.Tensor]]:
    """As many at once as can be staged."""
    return parts_of(host, runs, host.pages.shape[0] if staging is None else len(staging))


def _words(pages: torch.Tensor) -> torch.Tensor:
    return pages.view(torch.int64)
