"""What SGLang's KV events tell of the prefix cache: the tokens that a request finds.

SGLang tells of each node when it comes and when it goes. Here not every node is found by every request:

- A private node is for one request. SGLang's hashes leave the namespace out, so a listener would take it for a prefix
  that everybody finds, and its end for the end of that.
- A match ends where sliding layers hold all that they see and, of a model with states, where one is kept. A node is
  found if a match may end in it or behind it.

A prompt that parts from others between two such ends finds less than a listener expects: blocks cannot say so.

What host memory keeps of evicted prefixes is told as SGLang tells of its own: as blocks of the medium ``CPU_PINNED``.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.utils import compute_node_hash_values, split_node_hash_value

from sglang_diffkv.layout.spans import served_end
from sglang_diffkv.srt.tree.host_index import HostNode, IndexListener
from sglang_diffkv.srt.tree.parts import NodeListener
from sglang_diffkv.srt.tree.prefix_cache import DiffKVPrefixCache
from sglang_diffkv.srt.tree.private_space import PrivateSpace, is_private


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


@dataclass(eq=False)
class Block:
    """What SGLang's recorder reads of a node: some tokens of the host's, behind those of ``parent``.

    Attributes:
        key: SGLang's RadixKey of the tokens. hash_value, event_hash_value: SGLang's hashes, one a block of tokens, each
            of all tokens up to its end.
    """

    parent: Block | None
    key: Any
    hash_value: list[str] | None = None
    event_hash_value: list[str] | None = None


class ToldHost(IndexListener):
    """What listeners know of host memory.

    Args:
        store, remove: SGLang's ways to record that a node has come to a medium, or gone from it.
    """

    def __init__(self, tree: DiffKVPrefixCache, store: Callable[..., None], remove: Callable[..., None]):
        self.tree, self._store, self._remove = tree, store, remove
        self.spans = tree.manager.geometry.attention_spans

    def came(self, node: HostNode) -> None:
        saved, space = node.saved, node.space
        assert saved is not None and isinstance(space, tuple)
        if isinstance(space[0], PrivateSpace):
            return
        whole = [(saved.segment(saved.start, saved.hi), saved.start, saved.hi)]
        if served_end(whole, self.spans) == saved.hi:  # else no match may end there: what sliding layers see is gone
            self._store(self._block(node), StorageMedium.CPU)
            node.told = True

    def gone(self, node: HostNode) -> None:
        if is_told(node):
            self._remove(node.block, StorageMedium.CPU)
            node.told = False

    def split(self, above: HostNode, node: HostNode) -> None:
        above.told = is_told(node)
        below, size = node.block, self.tree.page_size
        if below is None:
            return
        count = len(above.tokens)
        above.block = Block(below.parent, below.key[:count])
        for name in ("hash_value", "event_hash_value"):
            first, rest = split_node_hash_value(getattr(below, name), count, size)
            setattr(above.block, name, first)
            setattr(below, name, rest)
        below.parent, below.key = above.block, below.key[count:]

    def _block(self, node: HostNode) -> Block:
        """The node's block. A hash depends on those before it, so all nodes above get theirs first."""
        missing: list[HostNode] = []
        at: HostNode | None = node
        while at is not None and at.block is None:
            missing.append(at)
            at = at.parent
        block: Block | None = None if at is None else at.block
        for x in reversed(missing):
            x.block = block = Block(block, self._key(x))
            x.block.hash_value = compute_node_hash_values(x.block, self.tree.page_size) if x.parent else []
        assert block is not None
        return block

    def _key(self, node: HostNode) -> Any:
        """SGLang's RadixKey of the node's tokens alone."""
        key = copy.copy(self.tree.root_node.key)
        key.token_ids = array("q", node.tokens.tolist())
        space: Any = node.space  # see ``space_of`` of the host tier
        key.extra_key, salt = space
        if salt is not None:
            key.cache_salt = salt
        return key
