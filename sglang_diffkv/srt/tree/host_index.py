"""An index of what the host keeps of evicted prefixes: a radix tree of its own, beside SGLang's.

A node stands for some tokens behind those of the nodes above it. What the host has of them is a part of a saved
segment, or nothing: the prefix cache may hold these tokens itself. So a path can have gaps, and a match ends at one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any

import numpy as np

from sglang_diffkv.layout.geometry import Segment
from sglang_diffkv.mem_pool.saved_segments import SavedSegment
from sglang_diffkv.mem_pool.saved_slots import SavedSlots

Part = tuple[SavedSegment, int, int]
"""A part of a saved segment: first position, and position after the last."""


class HostNode:
    """Some tokens of prefixes, behind those of its parent.

    Attributes:
        number: of its own; nodes that were made earlier have lower ones. space: the namespace. tokens: [n] int64.
        start: position of the first. saved: what the host has of them, if anything. state: of layers that do not
            attend, behind the last token, if the host has it.
        last_access_time, creation_time, hit_count, priority: what SGLang's eviction policies choose by.
        block: what SGLang's KV events have of the tokens, if they were told of any. told: whether listeners know of
            them (``IndexListener``).
    """

    _numbers = itertools.count()
    block: Any = None
    told = False

    def __init__(self, parent: HostNode | None, tokens: np.ndarray, start: int, space: Hashable):
        self.number = next(self._numbers)
        self.parent, self.tokens, self.start, self.space = parent, tokens, start, space
        self.children: dict[bytes, HostNode] = {}
        self.saved: SavedSegment | None = None
        self.state: SavedSlots | None = None
        self.last_access_time = self.creation_time = time.monotonic()
        self.hit_count, self.priority = 1, 0

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + len(self.tokens)


def is_within(saved: SavedSegment, lo: int, hi: int) -> bool:
    """Whether what was saved lies within positions [lo, hi)."""
    return lo <= saved.start and saved.hi <= hi


class IndexListener:
    """Who is told of what the host has; here nobody is."""

    def came(self, node: HostNode) -> None:
        """The host has something of the node's tokens from now on."""

    def gone(self, node: HostNode) -> None:
        """It has nothing of them any more."""

    def split(self, above: HostNode, node: HostNode) -> None:
        """The first tokens of ``node`` are a node of their own, ``above``, from now on."""


class HostIndex:
    """Finds saved segments by namespace and tokens.

    Args:
        dropped: called with a saved segment that no node names any more. page_size: nodes begin and end at multiples of
            so many tokens, and prefixes that differ within them have nothing in common there. state_dropped: as
            ``dropped``, with a state.

    Attributes:
        tokens: those of which the host has something. told: who is told of them.
    """

    def __init__(
        self,
        dropped: Callable[[SavedSegment], None],
        page_size: int = 1,
        state_dropped: Callable[[SavedSlots], None] = lambda state: None,
    ):
        self._dropped, self._state_dropped, self.page_size = dropped, state_dropped, page_size
        self.told = IndexListener()
        self._roots: dict[Hashable, HostNode] = {}
        self.tokens = 0

    def nodes(self) -> Iterator[HostNode]:
        """All nodes but the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _first(self, tokens: np.ndarray) -> bytes:
        """What children of a node are told apart by: of ``tokens``, the first page."""
        return tokens[: self.page_size].tobytes()

    def _common(self, mine: np.ndarray, others: np.ndarray) -> int:
        """Tokens of whole pages that both begin with."""
        length = min(len(mine), len(others))
        differ = np.flatnonzero(mine[:length] != others[:length])
        common = int(differ[0]) if len(differ) else length
        return common - common % self.page_size

    # Finding

    def _walk(self, space: Hashable, tokens: np.ndarray) -> Iterator[tuple[HostNode, int]]:
        """The nodes of the longest path that ``tokens`` have in common with one, and up to which position each has."""
        node, at = self._roots.get(space), 0
        while node is not None and at < len(tokens):
            node = node.children.get(self._first(tokens[at:]))
            if node is not None:
                at += self._common(node.tokens, tokens[at:])
                yield node, at
                if at < node.end:
                    return

    def parts(self, space: Hashable, tokens: np.ndarray, start: int) -> list[Part]:
        """What the host has of a prefix from position ``start`` on without a gap, at most to its end."""
        found: list[Part] = []
        for node, end in self._walk(space, tokens):
            if end <= start:
                continue
            if node.saved is None:
                break
            if found and found[-1][0] is node.saved:
                found[-1] = (node.saved, found[-1][1], end)
            else:
                found.append((node.saved, max(node.start, start), end))
        return found

    def states(self, space: Hashable, tokens: np.ndarray) -> list[tuple[int, HostNode]]:
        """Where the host has a state of a prefix: positions behind which it stands, in order, and their nodes."""
        return [(end, node) for node, end in self._walk(space, tokens) if node.state is not None and end == node.end]

    def lacks_state(self, space: Hashable, tokens: np.ndarray) -> bool:
        """Whether the host has no state behind ``tokens``."""
        return not any(end == len(tokens) for end, _ in self.states(space, tokens))

    def lacks(self, space: Hashable, tokens: np.ndarray, start: int) -> bool:
        """Whether there is a token at position ``start`` or behind of which the host has nothing."""
        at = start
        for node, end in self._walk(space, tokens):
            if end > start and node.saved is None:
                return True
            at = max(at, end)
        return at < len(tokens)

    def has_larger(self, space: Hashable, tokens: np.ndarray, segment: Segment) -> bool:
        """Whether a segment at the end of ``tokens`` has settled, and the host has some of it as it was before."""
        if not segment.settled:
            return False
        before = (x.saved for x, _ in self._walk(space, tokens) if x.saved is not None and not x.saved.settled)
        return any(is_within(saved, segment.lo, segment.hi) for saved in before)

    def touch(self, space: Hashable, tokens: np.ndarray, used: float, *, hit: bool = False) -> None:
        """A prefix was last used at ``used``, a reading of ``time.monotonic``."""
        for node, _ in self._walk(space, tokens):
            node.last_access_time = max(node.last_access_time, used)
            node.hit_count += hit

    # Changing

    def insert(
        self,
        space: Hashable,
        tokens: np.ndarray,
        saved: SavedSegment,
        *,
        used: float,
        priority: int,
        late: bool = False,
    ) -> None:
        """The host has saved the end of a prefix from ``saved.start`` on. Where it had it already, that stays; if it
        had all of it, ``saved`` is dropped, unless it is to replace that ``late``r."""
        for node in self._along(space, tokens, saved.start, used, priority):
            if node.start >= saved.start and node.saved is None:
                node.saved = saved
                saved.nodes += 1
                self.tokens += len(node.tokens)
                self.told.came(node)
        if not saved.nodes and not late:
            self._dropped(saved)

    def replace(self, space: Hashable, tokens: np.ndarray, saved: SavedSegment) -> None:
        """What has settled takes the place of the parts of a prefix that became it, as far as these are still there. It
        is dropped if none is."""
        for node, end in list(self._walk(space, tokens)):
            old = node.saved
            if old is None or old is saved or end < node.end or not is_within(old, saved.start, saved.hi):
                continue
            node.saved = saved
            saved.nodes += 1
            old.nodes -= 1
            if not old.nodes:
                self._dropped(old)
        if not saved.nodes:
            self._dropped(saved)

    def keep_state(self, space: Hashable, tokens: np.ndarray, state: SavedSlots, *, used: float, priority: int) -> None:
        """The host has saved the state behind ``tokens``, of which it may have nothing else. If it had it already,
        ``state`` is dropped."""
        node = list(self._along(space, tokens, len(tokens), used, priority))[-1]
        if node.state is None:
            node.state = state
        else:
            self._state_dropped(state)

    def _along(self, space: Hashable, tokens: np.ndarray, cut: int, used: float, priority: int) -> Iterator[HostNode]:
        """The nodes of just ``tokens``, those made that are not there yet; none goes over position ``cut``."""
        node, at = self._roots.setdefault(space, HostNode(None, tokens[:0], 0, space)), 0
        while at < len(tokens):
            first = self._first(tokens[at:])
            child = node.children.get(first)
            if child is None:
                child = node.children[first] = HostNode(node, tokens[at:].copy(), at, space)
            elif (common := self._common(child.tokens, tokens[at:])) < len(child.tokens):
                child = self._split(child, common)
            if child.start < cut < child.end:
                child = self._split(child, cut - child.start)
            child.last_access_time = max(child.last_access_time, used)
            child.priority = max(child.priority, priority)
            yield child
            node, at = child, child.end

    def _split(self, node: HostNode, count: int) -> HostNode:
        """The first ``count`` tokens of a node are one of their own from now on; this one."""
        assert node.parent is not None
        above = HostNode(node.parent, node.tokens[:count], node.start, node.space)
        for name in ("last_access_time", "creation_time", "hit_count", "priority", "saved"):
            setattr(above, name, getattr(node, name))
        if above.saved is not None:
            above.saved.nodes += 1
        node.parent.children[self._first(above.tokens)] = above
        node.parent, node.tokens, node.start = above, node.tokens[count:], node.start + count
        above.children[self._first(node.tokens)] = node
        self.told.split(above, node)
        return above

    def end_of(self, leaf: HostNode) -> list[HostNode]:
        """A leaf and the nodes above it that name the same saved segment, if no other prefix goes on behind one of
        them: forgetting these frees host memory. Else nothing. Of a state alone it is the leaf."""
        nodes = [leaf]
        if leaf.saved is None:
            return nodes if leaf.state is not None else []
        while (above := nodes[-1].parent) is not None and above.saved is leaf.saved and len(above.children) == 1:
            nodes.append(above)
        return nodes if len(nodes) == leaf.saved.nodes else []

    def remove(self, nodes: list[HostNode]) -> HostNode | None:
        """Forget nodes of ``end_of``, with their states, and gaps that are left above them. The node above, if it is a
        leaf now."""
        saved = nodes[0].saved
        for node in nodes:
            self._forget_state(node)
            if saved is not None:
                self.told.gone(node)
                node.saved = None
                self.tokens -= len(node.tokens)
        if saved is not None:
            saved.nodes = 0
            self._dropped(saved)
        return self._prune(nodes[0])

    def drop_state(self, node: HostNode) -> None:
        """Forget the state behind a node."""
        self._forget_state(node)
        self._prune(node)

    def _forget_state(self, node: HostNode) -> None:
        if node.state is not None:
            self._state_dropped(node.state)
            node.state = None

    def _prune(self, node: HostNode) -> HostNode | None:
        """Forget a node, and those above it, that nothing is left of. The first that stays, if it is a leaf."""
        while node.parent is not None and node.saved is None and node.state is None and not node.children:
            del node.parent.children[self._first(node.tokens)]
            node = node.parent
        if node.parent is None and not node.children:
            self._roots = {space: root for space, root in self._roots.items() if root is not node}
        return node if node.parent is not None and not node.children else None

    def clear(self) -> None:
        """Forget everything, of which nothing is saved any more."""
        for node in self.nodes():
            if node.saved is not None:
                self.told.gone(node)
        self._roots.clear()
        self.tokens = 0

    # Checks

    def check_integrity(self, held: set[SavedSegment], states: Collection[SavedSlots] = ()) -> None:
        """Raise AssertionError unless the index names just the saved segments that are ``held``, each by nodes that it
        covers, and each of the ``states`` by one node."""
        named: dict[SavedSegment, int] = {}
        stated: list[SavedSlots] = []
        tokens = 0
        for node in self.nodes():
            parent: Any = node.parent
            assert parent.children[self._first(node.tokens)] is node and node.start == parent.end, (
                "an index lost a node"
            )
            assert node.end % self.page_size == 0, "a node ends within a page"
            assert node.children or node.saved is not None or node.state is not None, (
                "an index keeps a node for nothing"
            )
            if node.state is not None:
                stated.append(node.state)
            if node.saved is not None:
                named[node.saved] = named.get(node.saved, 0) + 1
                tokens += len(node.tokens)
                assert node.saved.start <= node.start and node.end <= node.saved.hi, "a node names more than was saved"
        assert named.keys() == held, "the host holds something that nobody finds"
        assert len(stated) == len(states) and set(stated) == set(states), "a state is lost, or of two prefixes"
        assert all(saved.nodes == count for saved, count in named.items()), "a saved segment miscounts its nodes"
        assert tokens == self.tokens, "the index miscounts its tokens"
        assert all(root.children for root in self._roots.values()), "the index keeps an empty namespace"
