"""The optional parts that declare themselves (``ServerPart``). Start, options, metrics and doctor ask all of them."""

from __future__ import annotations

from typing import Any

from sglang_diffkv.plan import HostRoom
from sglang_diffkv.srt.startup.host_part import HostPart
from sglang_diffkv.srt.startup.server_part import ServerPart

PARTS: tuple[ServerPart, ...] = (HostPart(),)


def host_room(configurator: Any) -> HostRoom | None:
    """The host memory that a part needs; None if none does. As of ``ServerPart.host_room``."""
    found = [room for part in PARTS if (room := part.host_room(configurator)) is not None]
    assert len(found) < 2, "two parts share no host memory yet"
    return found[0] if found else None
