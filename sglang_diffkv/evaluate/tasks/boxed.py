r"""The last ``\boxed{...}`` of a text."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def last_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{}`` or ``\fbox{}`` whose braces close; None without one."""
    for match in reversed(list(_BOX.finditer(text))):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[match.end() : end]
    return None
