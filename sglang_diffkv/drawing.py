"""Charts are made of numbers that are kept already: where one cannot be drawn, that is said in a line, and no more."""

from __future__ import annotations

import sys
from collections.abc import Callable


def drawn(draw: Callable[[], object], again: str = "") -> bool:
    """Whether ``draw`` drew. Whatever it raises is said in one line, with the command that draws it ``again``."""
    try:
        draw()
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:200]
        where = f"; where charts can be drawn: {again}" if again else ""
        print(f"no chart: {type(error).__name__}: {first}{where}", file=sys.stderr, flush=True)
        return False
    return True
