"""Namespaces of the prefix cache that a client cannot name."""

from __future__ import annotations

import copy
from typing import Any


class PrivateSpace:
    """Stands where SGLang's RadixKey has a client's ``extra_key``, and equals nothing but itself.

    Text cannot name it, whatever a client chooses as ``extra_key``, ``cache_salt`` or ``rid``. SGLang compares and
    hashes it like any key. It is not to be written anywhere: a node in it is in no KV event.
    """

    __slots__ = ()

    def fields(self) -> list[Any] | None:
        """What another server would know it by, as JSON has it; None if it is of one request. No text equals it."""
        return None


class HighSpace(PrivateSpace):
    """The namespace of requests that keep all tokens in the high tier, within what the client chose. Equal to another
    of the same ``within``, and to no text."""

    __slots__ = ("within",)

    def __init__(self, within: str | None):
        self.within = within

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HighSpace) and self.within == other.within

    def __hash__(self) -> int:
        return hash((HighSpace, self.within))

    def __repr__(self) -> str:
        return f"HighSpace({self.within!r})"

    def fields(self) -> list[Any]:
        return ["high", self.within]


class WindowSpace(PrivateSpace):
    """The namespace of requests that have one ``window`` of their own, within what the client chose. Equal to another
    of the same ``within`` and ``window``, and to no text."""

    __slots__ = ("window", "within")

    def __init__(self, within: str | None, window: int):
        self.within, self.window = within, window

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WindowSpace) and (self.within, self.window) == (other.within, other.window)

    def __hash__(self) -> int:
        return hash((WindowSpace, self.within, self.window))

    def __repr__(self) -> str:
        return f"WindowSpace({self.within!r}, {self.window})"

    def fields(self) -> list[Any]:
        return ["window", self.window, self.within]


def in_space(key: Any, space: PrivateSpace) -> Any:
    """A copy of SGLang's RadixKey in a private namespace."""
    found = copy.copy(key)
    found.extra_key = space
    return found


def is_private(node: Any) -> bool:
    """Whether a node of the prefix cache lies in a private namespace."""
    return isinstance(node.key.extra_key, PrivateSpace)


def is_of_one(node: Any) -> bool:
    """Whether it lies in a namespace into which one request alone looks."""
    space = node.key.extra_key
    return isinstance(space, PrivateSpace) and space.fields() is None
