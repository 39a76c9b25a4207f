"""A device that is busy: what is launched beside the forward passes runs as late as it may."""

from __future__ import annotations

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
