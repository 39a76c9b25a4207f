"""Rows of prompts that another server has computed, on their way here, and rows of requests that were retracted.

With several ranks each has rows of its own heads. All give the same answers in the same order, or they would part.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from sglang_diffkv.layout.ranks import OtherRankError
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.mem_pool.row_transfer import KeptRow, NoRoom, RowImport, RowTransfer, most_row_pages
from sglang_diffkv.srt.scheduling.errors import FATAL
from sglang_diffkv.srt.tree.interface import NoTree, PrefixTree
from sglang_diffkv.srt.versions import compat, disaggregation

logger = logging.getLogger(__name__)

NEVER = 1 << 60
"""High-tier tokens that no server has."""


class Receiving:
    """Prompts whose rows are on their way here, by request, and rows of retracted requests.

    Attributes:
        tree: the prefix cache, of which prompts may have matched something that does not come then. counts: retracted
            requests that were kept and came back, and those that could not.
    """

    tree: PrefixTree

    def __init__(self, ledger: PageLedger):
        self.ledger, self.manager = ledger, ledger.manager
        self.tree = NoTree(ledger)
        self.imports: dict[Any, RowImport] = {}
        self._here: dict[Any, None] = {}  # requests that have pages, or are promised some
        self.counts = {"kept": 0, "restored": 0, "lost": 0}

    @property
    def transfer(self) -> RowTransfer:
        transfer = self.manager.transfer
        assert transfer is not None
        return transfer

    def has_room(self, req: Any, parts: int = 1) -> bool:
        """Whether pages, table blocks, KV slots and the engine's blocks are free for a prompt that is to come, or can
        be made free. As much as for all of it: the other server may have to send that. ``parts``: as of ``RowImport``.
        """
        tokens, ledger = disaggregation.expected_tokens(req), self.ledger
        if self._pages(tokens) + self._growth_of_one(req) > ledger.uncommitted_pages() + ledger.evictable_pages:
            return False
        if tokens > ledger.uncommitted_kv_slots() + self.tree.evictable_tokens():
            return False
        if not (disaggregation.is_own_request(req) or self.transfer.can_expect(tokens, parts)):
            return False
        return self.tree.make_table_blocks(self._table_blocks(req))  # last, since it evicts

    def _growth_of_one(self, req: Any) -> int:
        """Pages that one of the requests here, or this one beside them, may need until its end, if those that run
        beside it are retracted. Prompts on their way cannot be."""
        if not self._here:
            return 0
        rows, private, geometry = self.manager.rows, self.manager.counts.private, self.manager.geometry
        held = dict.fromkeys([*self._here, req], 0)
        for other in self._here:
            if (row := compat.row_of(other)) is not None and row in rows:
                held[other] = int(private[row])
        together = sum(held.values())
        needed = (geometry.most_pages(compat.most_left(x)) + geometry.heads + own for x, own in held.items())
        return max(max(needed) - together, 0)

    def matches_to(self, req: Any) -> int:
        """Tokens of a prompt that is to come, of which the tree is asked: all but one. None of the server's own
        requests, nor where what the tree has stood in the prompt's way."""
        if disaggregation.is_own_request(req) or getattr(req, "diffkv_alone", False):
            return 0
        return len(req.origin_input_ids) - 1

    def does_not_fit(self, req: Any) -> None:
        """The prompt has no room, and nothing else runs: the next time it locks nothing of the tree."""
        if self.ledger.idle:
            req.diffkv_alone = True

    def _pages(self, tokens: int) -> int:
        """Pages for a prompt, at most: all there are for one that needs about so many, or it would wait for ever."""
        geometry = self.manager.geometry
        return min(most_row_pages(geometry, tokens), geometry.num_pages)

    def _table_blocks(self, req: Any) -> int:
        """Table blocks for a prompt, at most: for what it has matched, and for all of it."""
        return self.ledger.blocks_for(self.tree.path(req.last_node), disaggregation.expected_tokens(req))

    def expect(self, req: Any, parts: int = 1) -> None:
        """SGLang has given a prompt that is to come its KV slots, and there is room for it. ``parts``: as above."""
        tokens, blocks = disaggregation.expected_tokens(req), self._table_blocks(req)
        self.tree.make_table_blocks(blocks)
        self.ledger.set_aside(req, self._pages(tokens), blocks)
        self._here[req] = None
        self.tree.make_pages(0, partly=True)
        if disaggregation.is_own_request(req):
            return
        wanted = self.transfer.expect(tokens, parts)
        assert wanted is not None, "blocks were free, and nobody took them"
        self.imports[req] = wanted

    def arrived(self, reqs: Sequence[Any]) -> list[Exception | bool]:
        """The engine says that the rows of requests have come. Of each: True once it was checked on all ranks, False
        while it is, or what is wrong with it."""
        every = [self.imports.get(req) for req in reqs]
        for req, wanted in zip(reqs, every, strict=True):
            if wanted is not None:
                self.transfer.look(wanted, disaggregation.name_of(req))
        return self.transfer.arrived(every)

    def begin(self, req: Any) -> None:
        """The request's row is made of what has come. Raises what is wrong with it, on any rank; the row must be
        released then. One that SGLang has ended here ends on all ranks."""
        ranks = self.manager.ranks
        if ranks.alone and req.finished():
            return
        if not ranks.alone:
            self.manager.counts.record(0)  # all settle their counts after this, also a rank that makes no row
        ranks.together(lambda: self._begin(req))

    def _begin(self, req: Any) -> None:
        if req.finished():
            raise RuntimeError("it has ended")
        row, wanted = compat.allocated_row_of(req), self.imports.get(req)
        self.ledger.forget(req)
        if wanted is None:
            self.transfer.restore_nothing(row, len(req.origin_input_ids))
            return
        self.transfer.restore(wanted, row, self.tree.path(req.last_node))
        del self.imports[req]

    def keep(self, req: Any) -> KeptRow | str:
        """The request is about to be retracted. If it is not kept: why."""
        row, tokens = compat.row_of(req), compat.tokens_of(req) - 1
        rows = self.manager.rows
        if row is None or tokens <= 0 or rows.length(row) < tokens or row in self.manager.counts.faulted:
            return "its pages were not complete when it was retracted"
        try:
            kept = self.transfer.keep(row, tokens)
        except FATAL:
            raise
        except Exception as error:
            logger.warning("DiffKV: retracted request %s is not kept, and will end: %s", req.rid, error)
            return str(error)
        self.counts["kept"] += 1
        return kept

    def comes_back(self, req: Any, kept: KeptRow | str) -> None:
        """A retracted request has got KV slots again. Its pages are set aside until ``bring_back``: before that SGLang
        looks whether the next one has room too."""
        if isinstance(kept, KeptRow):
            self.ledger.set_aside(req, kept.takes.pages, self.ledger.blocks_for([], compat.tokens_of(req) - 1))

    def bring_back(self, req: Any, kept: KeptRow | str) -> None:
        """A retracted request gets its pages. One that cannot come back ends with an error behind its next step."""
        row, tokens = compat.allocated_row_of(req), compat.tokens_of(req) - 1
        self._here[req] = None
        self.ledger.forget(req)
        try:
            if isinstance(kept, str):
                raise NoRoom(kept)
            self.tree.make_table_blocks(self.ledger.blocks_for([], tokens))  # if it can: fewer may be enough
            if not self.tree.make_pages(kept.takes.pages):
                raise NoRoom("it has more pages than are free")
            self.manager.ranks.together(lambda: self.transfer.bring_back(kept, row))
            self.counts["restored"] += 1
        except FATAL:
            raise
        except Exception as error:
            trace = not isinstance(error, NoRoom | OtherRankError)
            logger.warning("DiffKV: retracted request %s cannot come back: %s", req.rid, error, exc_info=trace)
            if row in self.manager.rows:
                self.manager.release(row)
            self.transfer.restore_nothing(row, tokens)
            self.counts["lost"] += 1
            compat.finish_with_error(req, f"DiffKV: a retracted request cannot go on: {error}. Retry it.")

    def tokens_back(self, req: Any) -> int | None:
        """High-tier tokens that a retracted request takes when it comes back; None for one that was not kept. ``NEVER``
        while KV slots for its tokens are short."""
        kept = disaggregation.kept_of(req)
        if not isinstance(kept, KeptRow):
            return None
        if compat.tokens_of(req) - 1 > self.ledger.uncommitted_kv_slots() + self.tree.evictable_tokens():
            return NEVER
        return math.ceil(kept.takes.pages * self.manager.fmt.high.tokens / self.manager.geometry.heads)

    def left(self, req: Any) -> None:
        """The request gives up its row."""
        self._here.pop(req, None)
        wanted = self.imports.pop(req, None)
        if wanted is not None:
            self.transfer.give_up(wanted)
