"""A device that is busy: what is launched beside the forward passes runs as late as it may, and bytes come so late."""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang_diffkv.mem_pool.device import Beside, PageDevice


def run_late(device: PageDevice, launched: list[str] | None = None) -> None:
    """From now on it runs when what comes behind it is about to be launched. ``launched`` gets a word each time."""

    def join(beside: Any) -> Any:
        if launched is not None:
            launched.append("judged")
        return beside.result()

    changed: Any = device
    changed.launch_beside = lambda launch: Beside(launch, None)
    changed.join = join


SPOILT = 0xAB
"""Each byte of a page whose bytes are on their way."""


def arrive_late(device: PageDevice) -> None:
    """From now on bytes of pages come back when what reads pages is about to be launched, and not before."""
    changed: Any = device
    flush, arriving = device.flush, list[partial[Any]]()

    def bring(copy_in: partial[Any]) -> None:
        with device.launching(reads_pages=False):
            device.state.pages[copy_in.args[-1]] = SPOILT
        arriving.append(copy_in)

    def arrive() -> None:
        while arriving:
            arriving.pop(0)()
        flush()

    changed.bring, changed.flush = bring, arrive
