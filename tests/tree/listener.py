"""What a listener to SGLang's KV events, as a router is, believes to be in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium

from sglang_diffkv.layout.spans import served_end
from sglang_diffkv.srt.tree.host_tier import HostTier

Tokens = tuple[int, ...]


class Listener:
    """Follows the events of a prefix cache, whose blocks have as many tokens as its pages.

    Attributes:
        blocks: tokens from the root to the end of a block, by its hash. on_host: the same of host memory.
        heard: the same of all blocks that ever were in either.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.blocks: dict[int, Tokens] = {}
        self.on_host: dict[int, Tokens] = {}
        self.heard: dict[int, Tokens] = {}

    def hear(self) -> None:
        """Take over all events so far."""
        for event in self.tree.take_events():
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                self.on_host.clear()
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    found = self._of(event).pop(block, None)
                    assert found is not None, "a block is removed that nobody was told of"
            else:
                assert isinstance(event, BlockStored) and event.block_size == self.tree.page_size
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        before, blocks = (), self._of(event)  # type: Tokens, dict[int, Tokens]
        if event.parent_block_hash is not None:
            known = self.blocks if blocks is self.blocks else self.heard  # the host may lack what the GPU has, or had
            assert event.parent_block_hash in known, "a block is stored behind one that nobody was told of"
            before = known[event.parent_block_hash]
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        for at, block in enumerate(event.block_hashes):
            before = (*before, *event.token_ids[at * size : (at + 1) * size])
            assert block not in blocks, "a block is stored twice"
            assert self.heard.setdefault(block, before) == before, "tokens have the hash of others"
            blocks[block] = before

    def _of(self, event: BlockStored | BlockRemoved) -> dict[int, Tokens]:
        assert event.medium in (StorageMedium.GPU, StorageMedium.CPU)
        return self.on_host if event.medium == StorageMedium.CPU else self.blocks

    def check(self) -> None:
        """Raise AssertionError unless all that the listener knows is found, and all that is found is known."""
        self.hear()
        known, found = set(self.blocks.values()), set(self._public(self.tree.root_node, ()))
        assert known >= found, "the listener does not know of tokens that are found"
        assert known <= found, "the listener believes in tokens that are not found"
        self._check_host()

    def _check_host(self) -> None:
        """What it knows of the host is what that has, of prompts without a namespace. Where layers slide that may be
        more: a match may end in it nowhere."""
        host = host_tier_of(self.tree)
        kept = set() if host is None else set(_kept(host))
        known = set(self.on_host.values())
        assert known <= kept, "the listener believes that the host has what it has not"
        assert known == kept or any(self.tree.manager.geometry.attention_spans), "the host has what nobody knows of"

    def _public(self, node: Any, before: Tokens) -> Iterator[Tokens]:
        """Prefixes that a request without a namespace finds behind ``node``, where ``before`` ends: up to the last node
        in which a match may end."""
        for child in node.children.values():
            if child.key.extra_key is not None:
                continue
            tokens = (*before, *child.key.token_ids)
            behind = list(self._public(child, tokens))
            if behind or self._ends_match(child, len(tokens)):
                size = self.tree.page_size
                yield from (tokens[:end] for end in range(len(before) + size, len(tokens) + 1, size))
                yield from behind

    def _ends_match(self, node: Any, length: int) -> bool:
        """As ``match`` of the tree, which may join segments, and counts a look as a use."""
        tree = self.tree
        stated = tree.states.may_end(node)
        return stated and served_end(tree.path(node), tree.manager.geometry.attention_spans) == length


def host_tier_of(tree: Any) -> HostTier | None:
    """What keeps evicted prefixes in host memory; None if nothing does."""
    return next((source for source in tree.sources if isinstance(source, HostTier)), None)


def _kept(host: HostTier) -> Iterator[Tokens]:
    """Prefixes without a namespace of whose last token the host has something."""
    for node in host.index.nodes():
        if node.saved is None or node.space != (None, None):
            continue
        tokens, above = tuple(node.tokens.tolist()), node.parent
        while above is not None:
            tokens, above = (*above.tokens.tolist(), *tokens), above.parent
        size = host.index.page_size
        yield from (tokens[:end] for end in range(node.start + size, node.end + 1, size))
