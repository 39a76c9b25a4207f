"""What SGLang's KV events tell of the prefix cache: the tokens that a request finds.

SGLang tells of each node when it comes and when it goes. Here not every node is found by every request:

- A private node is for one request. SGLang's hashes leave the namespace out, so a listener would take it for a prefix
  that everybody finds, and its end for the end of that.
- A match ends where sliding layers hold all that they see and, of a model with states, where one is kept. A node is
  found if a match may end in it or behind it.

A prompt that parts from others between two such ends finds less than a listener expects: blocks cannot say so.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.utils import get_hash_str

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.srt.tree.parts import NodeListener
from sglang_diffkv.srt.tree.prefix_cache import DiffKVPrefixCache
from sglang_diffkv.srt.tree.private_space import is_private

HASH_TRIES, HASH_PAUSE = 4, 2.0
"""Times that SGLang's hash is built, and seconds between them."""


def build_hash() -> None:
    """SGLang builds its hash of tokens where the first one is asked for: a request would wait for the compiler, and an
    error would end the scheduler. So it is asked for here. Servers that start at once build it in one folder, and one
    may remove what the other holds, which tries again then. Raises UnsupportedError."""
    for left in reversed(range(HASH_TRIES)):
        try:
            get_hash_str(array("q", [0]))
            return
        except RuntimeError as error:
            if not left:
                raise UnsupportedError(
                    f"--kv-events-config: SGLang cannot build its hash of tokens ({error.__cause__ or error}). It "
                    "needs a C++ compiler and the headers of OpenSSL. Install them, or leave KV events out."
                ) from error
        time.sleep(HASH_PAUSE)


class ToldNodes(NodeListener):
    """Nodes of a prefix cache that listeners know of.

    Args:
        store, remove: SGLang's ways to record that a node has come or gone.
    """

    def __init__(self, tree: DiffKVPrefixCache, store: Callable[[Any], None], remove: Callable[[Any], None]):
        self.tree, self._store, self._remove = tree, store, remove

    def end_came(self, node: Any) -> None:
        """A node was inserted, or got a state. If a match may end there, tell of the path to it."""
        if is_private(node) or not self.tree.may_end_match(node):
            return
        untold = []
        while node is not self.tree.root_node and not is_told(node):
            untold.append(node)
            node = node.parent
        for found in reversed(untold):
            self._store(found)
            found.told = True

    def end_went(self, node: Any) -> None:
        """A node lost its state or a child. Tell of the end of what is not found any more."""
        while node is not self.tree.root_node and is_told(node) and not self._found(node):
            self.gone(node)
            node = node.parent

    def ends_changed(self, node: Any) -> None:
        """Of the node and those behind it, other ones than before may be found: none more, perhaps fewer."""
        below, stack = [], [node]
        while stack:
            below.append(stack.pop())
            stack.extend(below[-1].children.values())
        for found in reversed(below):
            if not self._found(found):
                self.gone(found)
        self.end_went(node.parent)

    def gone(self, node: Any) -> None:
        """A node has left the tree, or is not found any more."""
        if is_told(node):
            self._remove(node)
            node.told = False

    def split(self, parent: Any, child: Any) -> None:
        parent.told = is_told(child)

    def _found(self, node: Any) -> bool:
        return self.tree.may_end_match(node) or any(map(is_told, node.children.values()))


def is_told(node: Any) -> bool:
    """Whether listeners know of the node."""
    return getattr(node, "told", False)
