"""What a listener to SGLang's KV events, as a router is, believes to be in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from sglang_diffkv.layout.spans import served_end

Tokens = tuple[int, ...]


class Listener:
    """Follows the events of a prefix cache of one token a block.

    Attributes:
        blocks: tokens from the root to the end of a block, by its hash.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.blocks: dict[int, Tokens] = {}

    def hear(self) -> None:
        """Take over all events so far."""
        for event in self.tree.take_events():
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    assert self.blocks.pop(block, None) is not None, "a block is removed that nobody was told of"
            else:
                assert isinstance(event, BlockStored) and event.block_size == 1
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        before: Tokens = ()
        if event.parent_block_hash is not None:
            assert event.parent_block_hash in self.blocks, "a block is stored behind one that nobody was told of"
            before = self.blocks[event.parent_block_hash]
        for block, token in zip(event.block_hashes, event.token_ids, strict=True):
            before = (*before, token)
            assert block not in self.blocks, "a block is stored twice"
            self.blocks[block] = before

    def check(self) -> None:
        """Raise AssertionError unless all that the listener knows is found, and all that is found is known."""
        self.hear()
        known, found = set(self.blocks.values()), set(self._public(self.tree.root_node, ()))
        assert known >= found, "the listener does not know of tokens that are found"
        assert known <= found, "the listener believes in tokens that are not found"

    def _public(self, node: Any, before: Tokens) -> Iterator[Tokens]:
        """Prefixes that a request without a namespace finds behind ``node``, where ``before`` ends: up to the last node
        in which a match may end."""
        for child in node.children.values():
            if child.key.extra_key is not None:
                continue
            tokens = (*before, *child.key.token_ids)
            behind = list(self._public(child, tokens))
            if behind or self._ends_match(child, len(tokens)):
                yield from (tokens[:end] for end in range(len(before) + 1, len(tokens) + 1))
                yield from behind

    def _ends_match(self, node: Any, length: int) -> bool:
        """As ``match`` of the tree, which may join segments, and counts a look as a use."""
        tree = self.tree
        stated = tree.states.may_end(node)
        return stated and served_end(tree.path(node), tree.manager.geometry.attention_spans) == length
