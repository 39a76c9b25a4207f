"""What SGLang's KV events tell of prefixes in host memory, as SGLang tells of its own: blocks of the medium
``CPU_PINNED``.
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
from sglang_diffkv.srt.tree.kv_events import is_told
from sglang_diffkv.srt.tree.prefix_cache import DiffKVPrefixCache
from sglang_diffkv.srt.tree.private_space import PrivateSpace


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
