"""Rows of prompts that another server goes on with, on their way out."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.mem_pool.host_pages import Run
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.row_transfer import RowExport
from sglang_diffkv.srt.scheduling.errors import FATAL
from sglang_diffkv.srt.versions import compat, disaggregation

logger = logging.getLogger(__name__)

GIVEN_UP_SECONDS = 3600.0
MOST_GIVEN_UP = 10_000
"""For how long, and of how many requests, a prefill server knows that it has given them up."""

DROPPED_SECONDS = 5.0
"""After which nobody reads who had asked."""

WRITTEN_SECONDS = 5.0
"""After which the engine writes nothing any more of a prompt that was aborted while it did."""


def block_numbers(blocks: list[Run]) -> np.ndarray:
    """Blocks of runs, in order, [n] int32, as SGLang's senders and receivers take indices of pages."""
    return np.concatenate([np.arange(start, start + count) for start, count in blocks]).astype(np.int32)


class Rooms:
    """Requests of a prefill server by their rooms (SGLang's number of a request on both servers), and prompts that do
    not come. SGLang's sender that is aborted, or has waited too long, ends without a word: the decode server would wait
    for some minutes. It may ask for a prompt that was given up before, so those are kept for a while.

    Of the scheduler's thread. Another one writes down who asks (``transfer_infos``), and reads what it has written, so
    it is told at once and dropped later.

    Args:
        manager: SGLang's of the senders.

    Attributes:
        taken: rooms of requests that are here. given_up: prompts that do not come, the oldest first.
    """

    def __init__(self, manager: Any):
        self.manager = manager
        self.taken: set[int] = set()
        self.given_up: dict[int, GivenUp] = {}

    def begins(self, room: int, ranks: Ranks) -> bool:
        """A request of this room comes. False if another one has it, or had it when it was given up: their prompts, and
        what SGLang says of them, would be taken for each other's. Each of several ranks forgets in a time of its own,
        so all of them answer together."""
        if ranks.largest(np.array([room in self.taken or room in self.given_up], dtype=np.int64))[0]:
            return False
        self.taken.add(room)
        return True

    def give_up(self, room: int, after: float = 0.0) -> None:
        """The prompt of this room does not come. Who has asked for it hears it now, or ``after`` so many seconds."""
        known, now = self.given_up, time.monotonic()
        self.taken.discard(room)
        known[room] = known.pop(room, GivenUp(tell_at=now + after))
        known[room].since = now
        while len(known) > MOST_GIVEN_UP or known[next(iter(known))].since < now - GIVEN_UP_SECONDS:
            oldest = next(iter(known))
            disaggregation.forget_room(self.manager, oldest)
            del known[oldest]
        self.tell()

    def tell(self) -> None:
        """Who has asked for a prompt that was given up hears that it does not come."""
        if not self.given_up:
            return
        now = time.monotonic()
        for room, named in list(self.manager.transfer_infos.items()):
            if (found := self.given_up.get(room)) is None or not named or now < found.tell_at:
                continue
            asked = list(named.values())
            if not found.knows(asked):
                found.told, found.told_at = asked, now
                disaggregation.tell_failed(self.manager, room, asked)
            elif now > found.told_at + DROPPED_SECONDS:
                disaggregation.forget_room(self.manager, room)
                found.told = []

    def cleared(self, room: int, named: Any, *, failed: bool) -> None:
        """The request of this room has ended, and SGLang has dropped what it knew of it. ``named``: who had asked for
        its prompt, by session; None for nobody."""
        self.taken.discard(room)
        asked, found, now = list((named or {}).values()), self.given_up.get(room), time.monotonic()
        if found is not None and asked and now < found.tell_at:
            self.manager.transfer_infos[room] = named  # until they hear it
        elif found is not None:
            if asked and not found.knows(asked):
                disaggregation.tell_failed(self.manager, room, asked)
            found.told = []
        elif failed:
            self.give_up(room)


@dataclass(eq=False)
class GivenUp:
    """A prompt that does not come.

    Attributes:
        since, tell_at: when it was given up, and from when on others may hear it. told: who has heard it, as SGLang has
            them, while it does; told_at: when they did.
    """

    since: float = 0.0
    tell_at: float = 0.0
    told: list[Any] = field(default_factory=list)
    told_at: float = 0.0

    def knows(self, asked: list[Any]) -> bool:
        """Whether just those have heard it who have ``asked``."""
        return {*map(id, asked)} == {*map(id, self.told)}


class Sending:
    """Prompts whose rows are on their way out, by request."""

    def __init__(self, manager: PageManager):
        self.manager = manager
        self.exports: dict[Any, RowExport] = {}
        self._sent: set[Any] = set()  # of these requests, those whose rows SGLang's senders have

    def begin(self, req: Any) -> None:
        """The request's prompt has ended. Where the decode server has let go of it meanwhile SGLang's sender knows."""
        transfer, sender = self.manager.transfer, req.disagg_kv_sender
        assert transfer is not None
        named = sender.kv_mgr.transfer_infos.get(sender.bootstrap_room)
        if not named:
            return
        # Another thread writes there.
        wanted, ranks = [x for x in list(named.values()) if not x.is_dummy], self.manager.ranks
        there = {*disaggregation.ranks_of(sender.kv_mgr, wanted)} or {ranks.size}
        if other := [x for x in there if x < 1 or ranks.size % x]:
            both = f"the decode server has --tp-size {other[0]} and this one {ranks.size}"
            self._fail(req, f"{both}: {disaggregation.ALIKE}")
            return
        parts = ranks.size // there.pop()
        most = min((len(x.dst_kv_indices) for x in wanted), default=0) // parts
        sender.curr_idx = most * (ranks.rank % parts)  # of the blocks there, this rank's begin here
        has = min((int(x.decode_prefix_len or 0) for x in wanted), default=0)
        try:
            self.exports[req] = transfer.export(compat.allocated_row_of(req), disaggregation.name_of(req), most, has)
        except FATAL:
            raise
        except Exception as error:
            logger.exception("DiffKV: the prompt of request %s cannot be sent", req.rid)
            self._fail(req, str(error))

    def advance(self) -> None:
        """Send the rows that are whole by now."""
        transfer = self.manager.transfer
        assert transfer is not None
        for req, export in list(self.exports.items()):
            if req in self._sent:
                continue
            try:
                if transfer.advance(export) and not export.problem:
                    self._send(req, export)
            except FATAL:
                raise
            except Exception as error:
                logger.exception("DiffKV: the prompt of request %s cannot be sent", req.rid)
                export.problem = str(error)
            if export.problem:
                self._fail(req, export.problem)

    def _send(self, req: Any, export: RowExport) -> None:
        """The request's row is whole."""
        sender, blocks = req.disagg_kv_sender, block_numbers(export.blocks)
        sender.num_kv_indices = sender.curr_idx + len(blocks)  # of this rank's, the first ones
        sender.send(blocks, None, num_kv_tokens=self.manager.rows.length(export.row))
        self._sent.add(req)

    def _fail(self, req: Any, problem: str) -> None:
        """The request's row cannot go: both servers end it."""
        self.tell_failed(req, f"DiffKV cannot send the prompt of request {req.rid}: {problem}")
        self.left(req)

    def tell_failed(self, req: Any, reason: str) -> None:
        """The decode server hears that the request's prompt does not come. SGLang's sender would end without a word."""
        sender = getattr(req, "disagg_kv_sender", None)
        if sender is not None and not disaggregation.is_own_request(req):
            disaggregation.conclude_failure(sender, reason)

    def left(self, req: Any) -> None:
        """The request gives up its row: SGLang's sender has concluded."""
        export = self.exports.pop(req, None)
        if export is not None and self.manager.transfer is not None:
            well = req in self._sent and compat.has_finished_well(req)
            self.manager.transfer.finish(export, well=well)
        self._sent.discard(req)
