"""What an option of SGLang is to diffkv."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Predicate = Callable[[Any, Any], Any]
"""Of a field's value and all arguments."""


@dataclass(frozen=True)
class Works:
    """It touches the cache, its admission or its scheduling. ``shown``: the test that runs it, or why it works."""

    shown: str


@dataclass(frozen=True)
class Refused:
    """Values for which ``when`` is true end the start.

    Attributes:
        why: in the message, after "does not work with", and what to do. ``{value}`` is the value, ``{found}`` what
            ``when`` gave.
        otherwise: what shows that other values work; empty if they only switch the option off.
    """

    why: str
    when: Predicate = lambda value, args: value
    otherwise: str = ""


@dataclass(frozen=True)
class NoBearing:
    """The cache, its admission and its scheduling are the same with any value. ``what``: what the option is about."""

    what: str


@dataclass(frozen=True)
class OnlyWith:
    """Read only where ``what`` is in use, which is refused: an option by its field, or a kind of model."""

    what: str


Flag = Works | Refused | NoBearing | OnlyWith


def unlike(*values: Any) -> Predicate:
    """Other values than these."""
    return lambda value, args: value not in values
