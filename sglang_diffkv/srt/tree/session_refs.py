"""References of sessions to what the prefix cache holds, with SGLang's ``--enable-session-radix-cache``.

What a session's requests have left in the tree is evicted after what no session refers to. Closing a session gives up
its references and nothing else. A session refers to the nodes in which its requests' tokens end, one for each branch,
and so to the paths to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

from sglang_diffkv.srt.tree.parts import SessionRule
from sglang_diffkv.srt.tree.prefix_cache import DiffKVPrefixCache


class SessionRefs(SessionRule):
    """Who refers to which node, over a prefix cache.

    A session that is opened again is another *generation*: requests of the one before refer to nothing when they end.
    """

    def __init__(self, tree: DiffKVPrefixCache):
        self.tree = tree
        self._ends: dict[Hashable, set[Any]] = {}
        self._generations: dict[str, int] = {}
        self._opened = 0

    # Of sessions

    def open(self, session: str) -> int:
        self._opened += 1
        self._generations[session] = self._opened
        return self._opened

    def generation(self, session: str) -> int:
        found = self._generations.get(session)
        return self.open(session) if found is None else found

    def close(self, session: Hashable) -> None:
        self._generations.pop(session, None)  # type: ignore[call-overload]
        for node in self._ends.pop(session, ()):
            node.sessions.remove(session)
            self._count(node, self.tree.root_node, -1)

    # Of requests

    def published(self, req: Any, row: int, leaf: Any, length: int, *, ended: bool) -> None:
        """Of a request that has ended: its session refers to the path to ``leaf`` from now on."""
        if not self.tree.enable_session_radix_cache:
            return
        session: str | None = getattr(req, "session_id", None)
        if session is None:
            session = getattr(getattr(req, "session", None), "session_id", None)
        if session is None or not ended or not length:
            return
        if req.session_generation is None or req.session_generation != self._generations.get(session):
            return
        self.refer(session, leaf)

    def refer(self, session: Hashable, leaf: Any) -> None:
        """A session, or something else that no client names, refers to the path to ``leaf`` from now on."""
        ends = self._ends.setdefault(session, set())
        if leaf in ends:
            return
        above = leaf.parent
        while above is not self.tree.root_node and above not in ends:
            above = above.parent
        self._count(leaf, above, 1)
        self._refer(session, leaf)
        if above in ends:
            ends.remove(above)
            above.sessions.remove(session)

    def names(self) -> Iterable[Hashable]:
        """Who refers to something."""
        return self._ends.keys()

    def refers(self, session: Hashable) -> bool:
        """Whether something of what it refers to is left."""
        return session in self._ends

    def _refer(self, session: Hashable, node: Any) -> None:
        self._ends[session].add(node)
        node.sessions = getattr(node, "sessions", set()) | {session}

    def _count(self, node: Any, above: Any, change: int) -> None:
        """So many references more to the path from below ``above`` to ``node``."""
        while node is not above:
            node.session_refs = getattr(node, "session_refs", 0) + change
            node = node.parent

    # Of nodes

    def referenced(self, node: Any) -> bool:
        return getattr(node, "session_refs", 0) > 0

    def split(self, parent: Any, child: Any) -> None:
        parent.session_refs = getattr(child, "session_refs", 0)

    def gone(self, node: Any) -> None:
        """A leaf leaves the tree: sessions refer to the path before it."""
        above = node.parent
        for session in getattr(node, "sessions", ()):
            ends = self._ends[session]
            ends.remove(node)
            if above is not self.tree.root_node and above not in ends:
                self._refer(session, above)
            else:
                self._count(above, self.tree.root_node, -1)
            if not ends:
                del self._ends[session]

    def reset(self) -> None:
        self._ends.clear()
        self._generations.clear()

    # Checks

    def check_nodes(self, nodes: set[Any]) -> None:
        """Raise AssertionError unless each node of the tree's ``nodes`` counts the references to it and behind it."""
        refs: Counter[Any] = Counter()
        for session, ends in self._ends.items():
            assert ends and ends <= nodes, "a session refers to nothing, or to what the tree does not have"
            for end in ends:
                assert session in end.sessions, "a node does not know who refers to it"
                refs.update(self.tree.nodes(end))
        for node in nodes:
            assert getattr(node, "session_refs", 0) == refs[node], "a node miscounts the references to it"
            assert all(node in self._ends.get(session, ()) for session in getattr(node, "sessions", ()))

    def digest(self) -> int:
        """References that there are."""
        return sum(map(len, self._ends.values()))
