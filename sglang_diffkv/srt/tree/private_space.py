"""A namespace of the prefix cache that a client cannot name."""

from __future__ import annotations

import copy
from typing import Any


class PrivateSpace:
    """Stands where SGLang's RadixKey has a client's ``extra_key``, and equals nothing but itself.

    Text cannot name it, whatever a client chooses as ``extra_key``, ``cache_salt`` or ``rid``. SGLang compares and
    hashes it like any key. It is not to be written anywhere: a node in it is in no KV event.
    """

    __slots__ = ()


def in_space(key: Any, space: PrivateSpace) -> Any:
    """A copy of SGLang's RadixKey in a private namespace."""
    found = copy.copy(key)
    found.extra_key = space
    return found


def is_private(node: Any) -> bool:
    """Whether a node of the prefix cache lies in a private namespace."""
    return isinstance(node.key.extra_key, PrivateSpace)
