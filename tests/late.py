"""A device that is busy: what is launched beside the forward passes runs as late as it may, and bytes come so late."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from sglang_diffkv.mem_pool import saved_rows
from sglang_diffkv.mem_pool.device import Arriving, Beside, PageDevice


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
    """From now on bytes of pages come back when what reads them is about to be launched, and not before: those of some
    layers before those of others, however few they are."""
    saved_rows.LEAST_BY_LAYER = 0
    changed: Any = device

    def bring(launches: Sequence[tuple[int, partial[Any]]], rows: Sequence[int] = (), *, unread: bool = False) -> None:
        with device.launching(reads_pages=False):
            for _, copy_in in launches:
                for _, _, places in copy_in.args[0]:
                    device.state.pages[places] = SPOILT
        ends: Any = [*launches]
        device._arriving.append(Arriving([], ends, frozenset(rows), unread))

    def reach(layer: int) -> None:
        for arriving in device._arriving:
            while arriving.ends and arriving.ends[0][0] <= layer:
                copy_in: Any = arriving.ends.pop(0)[1]
                copy_in()
        device._arriving = [arriving for arriving in device._arriving if arriving.ends]

    changed.bring, changed.reach = bring, reach
