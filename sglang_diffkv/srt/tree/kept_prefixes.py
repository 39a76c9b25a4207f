"""Prefixes that requests ask to keep for a while: ``custom_params.diffkv.keep``, in seconds.

What such a request leaves in the tree is evicted after all else until its time is over, as what sessions refer to
(``SessionRefs``). It is still evicted before a running request would have to wait. A server bounds the time
(``keep_seconds``), and all that is kept together has ``KEPT_SHARE`` of the pool at most. A request beyond that is
served, and counted; what it leaves is as that of others. A later request of the same sequence takes the place of an
earlier one, unless that asked for longer.

Ranks have clocks of their own, so they agree on whose time is over.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sglang_diffkv.srt.tree.parts import KeepRule
from sglang_diffkv.srt.tree.session_refs import SessionRefs
from sglang_diffkv.srt.versions import compat

KEPT_SHARE = 0.5
"""Of the pool's tokens, those that are kept together at most."""

COUNTS = ("granted", "no_room", "over")
"""Since the start: prefixes that were kept, those for which others had the share, and those whose time is over."""


@dataclass(frozen=True, eq=False)
class Keep:
    """A kept prefix, which no name of a client equals. ``until``: a reading of ``time.monotonic``. ``tokens``: of the
    sequence. ``seconds``: that were asked for."""

    until: float
    tokens: int
    seconds: int


class KeptPrefixes(KeepRule):
    """Which paths requests have asked to keep, over references to the nodes of a tree.

    Attributes:
        kept: in the order in which they were granted. counts: by ``COUNTS``.
    """

    def __init__(self, refs: SessionRefs):
        self.refs, self.tree, self.ledger = refs, refs.tree, refs.tree.ledger
        self.ranks = self.tree.manager.ranks
        self.kept: dict[Keep, None] = {}
        self.counts = dict.fromkeys(COUNTS, 0)

    @property
    def tokens(self) -> int:
        """Of all that is kept; what several share counts for each."""
        return sum(keep.tokens for keep in self.kept)

    @property
    def most_tokens(self) -> int:
        return int(KEPT_SHARE * self.ledger.capacity)

    def published(self, req: Any, row: int, leaf: Any, length: int, *, ended: bool) -> None:
        """A request has ended. The path to ``leaf`` is what it leaves."""
        seconds = compat.keep_seconds(req)
        if not seconds or not ended or not length:
            return
        above = [x for node in self.tree.nodes(leaf) for x in getattr(node, "sessions", ()) if isinstance(x, Keep)]
        replaced = [x for x in above if x.seconds <= seconds]  # and came before: ranks agree without their clocks
        if self.tokens - sum(x.tokens for x in replaced) + length > self.most_tokens:
            self.counts["no_room"] += 1
            return
        for x in replaced:
            self._release(x)
        keep = Keep(time.monotonic() + seconds, length, seconds)
        self.kept[keep] = None
        self.counts["granted"] += 1
        self.refs.refer(keep, leaf)

    def scheduling_begins(self) -> None:
        """Time passes."""
        if not self.kept:
            return
        now = time.monotonic()
        (over,) = self.ranks.largest_of([keep.until <= now for keep in self.kept])
        for keep, past in zip(list(self.kept), over, strict=True):
            if past or not self.refs.refers(keep):  # or all of it was evicted
                self.counts["over"] += 1
                self._release(keep)

    def _release(self, keep: Keep) -> None:
        del self.kept[keep]
        self.refs.close(keep)

    def reset(self) -> None:
        self.kept.clear()

    def report(self) -> dict[str, object]:
        held = {"prefixes": len(self.kept), "tokens": self.tokens, "tokens_most": self.most_tokens}
        return {"kept": {**self.counts, **held}}

    def check_integrity(self) -> None:
        """Raise AssertionError unless just what is kept has references, within its share."""
        named = {x for x in self.refs.names() if isinstance(x, Keep)}
        assert named <= set(self.kept), "a prefix is kept for ever"
        assert self.tokens <= self.most_tokens, "more is kept than may be"

    def digest(self) -> Any:
        return [*self.counts.values(), self.tokens]
