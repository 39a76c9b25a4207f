"""Admission where running requests hold a budget. A prompt fits if all that run, and it, never hold more together than
there is room for, by their lengths and by what they may generate yet (``mem_pool/joint_growth.py``).

SGLang's admission adds up what each request is expected to take. So each running request gives a part of what all take
together, and a prompt what that grows by with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from sglang_diffkv.mem_pool.joint_growth import Outlook, peak_growth
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.mem_pool.running import RunningCompression
from sglang_diffkv.srt.tree.interface import PrefixTree
from sglang_diffkv.srt.versions import compat

STEPS = 4
"""Steps after which a request that waits for room is looked at again."""


class AdmissionRule:
    """Admission by what each request is expected to take by itself.

    Attributes:
        budget: whether requests hold one. refused: prompt tokens and outlook of the last refused request, while it
            waits for room; None where the ledger knows what it needs.
    """

    budget = False
    refused: tuple[int, Outlook] | None = None

    def __init__(self, ledger: PageLedger):
        self.ledger = ledger

    def taken_by(self, req: Any, tokens: float, adder: Any) -> float:
        """High-tier tokens that a running request is expected to take, if SGLang expects so many ``tokens`` of it.
        ``adder``: SGLang's, of this pass."""
        row = compat.row_of(req)
        if row is None and compat.grows_whole(req):
            return self.ledger.whole_growth(0, tokens)
        return self.ledger.growth_of(row, tokens, compat.reply_is_certain(req))

    def check(self, req: Any, needed: int, others: Sequence[Any], ratio: float) -> tuple[compat.Growth, bool]:
        """What a request's generated tokens take beside those of ``others``, which run or are admitted, and whether
        there is room for it. Its prompt computes ``needed`` tokens."""
        return compat.growth_of(req, self.ledger, compat.prefix_len(req)), True

    def refuse(self, req: Any, needed: int) -> None:
        """The request waits for room; its prompt computes ``needed`` tokens."""

    def forget_refused(self) -> None:
        """The last refused request waits no longer, or is looked at again."""

    def has_room(self, scheduler: Any) -> bool:
        """Whether the last refused request would fit by now beside what SGLang's ``scheduler`` runs."""
        return self.ledger.room_for_refused(compat.expected_tokens(scheduler))


class JointAdmission(AdmissionRule):
    """Admission by the growth that requests with a budget have together."""

    budget = True

    def __init__(self, ledger: PageLedger, tree: PrefixTree, budgets: RunningCompression):
        super().__init__(ledger)
        self.tree, self.manager, self.budgets = tree, ledger.manager, budgets
        self._asked = self._running = 0
        self._waits: weakref.ref[Any] | None = None  # the last refused request

    def taken_by(self, req: Any, tokens: float, adder: Any) -> float:
        """A part of what all take together."""
        if not hasattr(adder, "diffkv_share"):
            adder.diffkv_share = self.share(adder.running_batch.reqs, adder.new_token_ratio)
        return adder.diffkv_share

    def share(self, running: Sequence[Any], ratio: float) -> float:
        """High-tier tokens that running requests take together, by request. ``ratio``: of the tokens that a request may
        still generate, those that SGLang expects; all, where its end is ignored."""
        return self._tokens(self._outlooks(running, ratio)) / max(len(running), 1)

    def check(self, req: Any, needed: int, others: Sequence[Any], ratio: float) -> tuple[compat.Growth, bool]:
        """Where there are no others SGLang decides alone."""
        found = self._outlooks(others, ratio)
        if not found:
            return self.ledger.growth, True
        if self._constrained(found):
            return self.ledger.growth, False
        together = self._tokens([*found, self._of_prompt(req)])
        growth = max(together - self._tokens(found), 0.0)
        return lambda length, more: growth, self._room_beyond(needed) > together

    def refuse(self, req: Any, needed: int) -> None:
        self.refused = needed, self._of_prompt(req)
        if self._waits is None or self._waits() is not req:
            self._waits, self._asked, self._running = weakref.ref(req), 0, 0
        # else it was let in too early, and is looked at as seldom as before

    def forget_refused(self) -> None:
        self.refused = None

    def has_room(self, scheduler: Any) -> bool:
        return self.room_for_refused(scheduler.running_batch.reqs, compat.expected_ratio(scheduler))

    def room_for_refused(self, running: Sequence[Any], ratio: float) -> bool:
        """Whether the last refused request would fit beside what runs by now; looked at when others run than before,
        and each ``STEPS``-th time. Ask once a step."""
        if self.refused is None:
            return False
        asked, before = self._asked, self._running
        self._asked, self._running = asked + 1, len(running)
        if asked % STEPS and len(running) == before:
            return False
        needed, outlook = self.refused
        room = self._room_beyond(needed)
        if room <= 0:
            return False
        found = self._outlooks(running, ratio)
        return not self._constrained(found) and room > self._tokens([*found, outlook])

    def _constrained(self, running: Sequence[Outlook]) -> bool:
        """Whether as many run as may, where each is to have a query slot."""
        return self.budgets.rule.constrained and len(running) >= self.budgets.cache.slots

    def _room_beyond(self, needed: int) -> int:
        """High-tier tokens that a prompt of ``needed`` tokens and the one behind it leave."""
        ledger = self.ledger
        with ledger.checking():
            return ledger.available() + ledger.evictable() - needed - 1

    def _tokens(self, outlooks: Sequence[Outlook]) -> float:
        return float(peak_growth(self.budgets.saw, outlooks) * self.manager.fmt.high.tokens)

    def _outlooks(self, reqs: Sequence[Any], ratio: float) -> list[Outlook]:
        found = []
        for req in reqs:
            if req.finished():
                continue
            row, left = compat.row_of(req), compat.reply_left(req)
            shared = 0 if row is None else self.manager.rows.shared(row)
            known = None
            if row is not None:
                expected = compat.reply_expected(req, ratio)
                known = self.budgets.outlook(row, left, expected, self._pages_alone(req) if shared else 0)
            found.append(self._of_prompt(req) if known is None else known)
        return found

    def _of_prompt(self, req: Any) -> Outlook:
        row = compat.row_of(req)
        rows, left = self.manager.rows, compat.reply_left(req)
        shared = rows.shared(row) if row is not None and row in rows else compat.prefix_len(req)
        own = compat.prompt_len(req) - shared
        return self.budgets.outlook_of_prompt(own, shared, left, left, self._pages_alone(req) if shared else 0)

    def _pages_alone(self, req: Any) -> int:
        """Pages of each head that the prefix cache holds for this request alone."""
        return self.tree.pages_read_alone(req.last_node) // self.manager.geometry.heads
