"""Rows of servers with two ranks: each rank has heads of its own, and both give the same answers, so that no scheduler
parts from the other or waits for it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_diffkv.layout.ranks import OtherRankError, Ranks
from sglang_diffkv.mem_pool import row_transfer
from sglang_diffkv.mem_pool.integrity import decision_digest
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.mem_pool.row_transfer import KeptRow, NoRoom, RowExport, RowImport, most_row_pages
from sglang_diffkv.mem_pool.segment_object import ObjectRefused
from tests.dense import Session
from tests.helpers import check, until
from tests.pages.test_row_transfer import ROOM, carry, exported, same, server, ways
from tests.ranks import Pair

TOKENS = 131


def rank_of(session: Session) -> int:
    return session.manager.ranks.rank


def pair(**named: Any) -> Pair:
    """Two ranks of a server."""
    return Pair(lambda ranks: server(ranks=ranks, **named))


class Two:
    """Two servers of two ranks, and a prompt on its way: each rank's row goes to the same rank there."""

    def __init__(self, **there: Any) -> None:
        self.source, self.target = pair(), pair(**there)
        self.sent: list[RowExport] = self.source.each(self._sends)
        self.wanted: list[RowImport] = self.target.each(lambda x: ways(x).expect(TOKENS))
        for one, row, other, wanted in zip(
            self.source.members, self.sent, self.target.members, self.wanted, strict=True
        ):
            assert not row.problem
            carry(ways(one), row, ways(other), wanted)

    def _sends(self, session: Session) -> RowExport:
        session.extend({1: TOKENS}, check=False)
        session.end_prompt(1)
        return exported(session, 1)

    def look(self, room: str = ROOM) -> None:
        for session, wanted in zip(self.target.members, self.wanted, strict=True):
            ways(session).look(wanted, room)
            until(lambda wanted=wanted: wanted.looked)  # type: ignore[misc]

    def arrived(self) -> list[Exception | bool]:
        """What each rank takes it for."""
        return [x for (x,) in self.target.each(lambda x: ways(x).arrived([self.wanted[rank_of(x)]]))]


def digests(of: Pair) -> list[int]:
    """What the ranks decide on, once the device has counted; all is consistent."""

    def digest(session: Session) -> int:
        session.manager.counts.meet()
        session.manager.counts.settle()
        check(session.manager)
        return decision_digest(PageLedger(session.manager, 1000))

    return of.each(digest)


def test_each_rank_gets_its_heads_and_both_count_what_the_larger_one_takes() -> None:
    two = Two()
    assert two.sent[0].numbers is not None and two.sent[1].numbers is not None
    held = [x.numbers.pages for x in two.sent if x.numbers is not None]
    assert held[0] != held[1], "ranks hold as many pages"
    two.look()
    assert two.arrived() == [True, True]
    assert two.wanted[0].takes == two.wanted[1].takes and two.wanted[0].takes is not None
    assert two.wanted[0].takes.pages == max(held)

    def restored(session: Session) -> int:
        ways(session).restore(two.wanted[rank_of(session)], 5)
        return decision_digest(PageLedger(session.manager, 1000))

    before, after = two.target.each(restored), digests(two.target)
    assert before[0] == before[1] and after[0] == after[1], "ranks decide on different numbers"
    for one, other in zip(two.source.members, two.target.members, strict=True):
        same(one.manager, 1, other.manager, 5)
    assert [x.manager.counts.pages[5] for x in two.target.members] == [max(held)] * 2
    two.target.each(lambda x: x.manager.release(5))
    assert len({*digests(two.target)}) == 1
    assert [x.manager.device.free_pages() for x in two.target.members] == [600, 600]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_row_that_is_damaged_on_one_rank_is_refused_on_both(rank: int) -> None:
    two = Two()
    transfer = ways(two.target.members[rank])
    transfer.room.pages[transfer.room.pages_of(two.wanted[rank].blocks)[0][0], 40] ^= 1
    two.look()
    found = two.arrived()
    assert isinstance(found[rank], ObjectRefused) and isinstance(found[1 - rank], OtherRankError)
    assert "it failed on another tensor-parallel rank; that rank's log has the reason" in str(found[1 - rank])
    two.target.each(lambda x: ways(x).give_up(two.wanted[rank_of(x)]))
    assert len({*digests(two.target)}) == 1


def test_a_row_that_one_rank_still_looks_at_is_late_on_both() -> None:
    two = Two()
    two.look()
    done, late = two.wanted[1].reading, Future[Any]()
    two.wanted[1].reading = late
    assert two.arrived() == [False, False]
    two.wanted[1].reading = done
    assert two.arrived() == [True, True]
    two.wanted[0].reading = late
    late.set_exception(ValueError("odd"))
    assert [type(x) for x in two.arrived()] == [ValueError, OtherRankError]


def test_rows_that_say_other_things_are_refused() -> None:
    """Of a prefill server whose ranks parted: one has frozen its row, another not."""
    two = Two()
    two.look()
    come = two.wanted[1].come
    other: Future[Any] = Future()
    other.set_result(come._replace(head=replace(come.head, header={**come.head.header, "frozen": -1})))
    two.wanted[1].reading = other
    found = two.arrived()
    assert all(isinstance(x, ObjectRefused) and "different rows" in str(x) for x in found)


def test_rows_that_do_not_come_are_there_on_all_ranks() -> None:
    assert pair().each(lambda x: ways(x).arrived([None])) == [[True], [True]]


def test_another_rank_s_row_is_refused() -> None:
    two = Two()
    for session, number in zip(two.target.members, (1, 0), strict=True):
        carry(ways(two.source.members[number]), two.sent[number], ways(session), two.wanted[rank_of(session)])
    two.look()
    assert all("its rank is" in str(x) for x in two.arrived())


def test_a_row_has_room_if_it_has_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has set blocks aside for longer than the other, by its own clock."""
    now = [100.0]
    monkeypatch.setattr(row_transfer.time, "monotonic", lambda: now[0])
    ranks = pair(blocks=40)

    def gives_up(session: Session) -> RowImport | None:
        transfer = ways(session)
        blocks = transfer.room.take(40 - 1)
        assert blocks is not None
        if rank_of(session):
            transfer.room.set_aside(blocks)
        else:
            transfer.room.give(blocks)
        return transfer.expect(TOKENS)

    assert ranks.each(gives_up) == [None, None]
    now[0] += row_transfer.SET_ASIDE_SECONDS + 1
    first = ranks.each(lambda x: ways(x).expect(TOKENS))
    assert first[0].blocks == first[1].blocks
    assert ranks.each(lambda x: [ways(x).can_expect(TOKENS) for _ in range(3)]) == [[True] * 3] * 2


def test_rows_get_blocks_in_the_order_in_which_they_began() -> None:
    """Each rank has room for one. If one gave it to the second row and the other to the first, none would ever be sent
    by both."""
    session = server(blocks=8)
    transfer = ways(session)
    session.extend({1: 21, 2: 21}, check=False)
    session.manager.prompts.end(1, 2)
    taken = transfer.room.take(6)
    assert taken is not None
    first, second = transfer.export(1, ROOM, 1000), transfer.export(2, ROOM + "0", 1000)
    for _ in range(5):
        transfer.advance(second)
    assert second.numbers is not None and not second.blocks, "the first one, of which less is known, was overtaken"
    until(lambda: transfer.advance(first))
    transfer.finish(first, well=True)
    until(lambda: transfer.advance(second))
    transfer.finish(second, well=True)
    transfer.room.give(taken)
    check(session.manager)


def test_a_row_that_cannot_go_is_in_nobody_s_way() -> None:
    session = server(blocks=8)
    transfer = ways(session)
    session.extend({1: 41, 2: 21}, check=False)
    session.manager.prompts.end(1, 2)
    first, second = transfer.export(1, ROOM, 1), transfer.export(2, ROOM + "0", 1000)
    until(lambda: transfer.advance(first))
    assert first.problem
    until(lambda: transfer.advance(second))
    assert second.ready and not second.problem


def kept(ranks: Pair) -> list[Any]:
    def keep(session: Session) -> KeptRow | Exception:
        try:
            return ways(session).keep(1, TOKENS)
        except Exception as error:
            return error

    return ranks.each(keep)


def grown(**named: Any) -> Pair:
    """Two ranks with a row past its prompt."""
    ranks = pair(**named)

    def grow(session: Session) -> None:
        session.extend({1: TOKENS}, check=False)
        session.end_prompt(1)

    ranks.each(grow)
    return ranks


def test_retracted_rows_come_back_on_all_ranks_and_count_as_much() -> None:
    ranks = grown()
    rows = kept(ranks)
    assert rows[0].numbers.pages != rows[1].numbers.pages, "ranks hold as many pages"
    assert rows[0].takes == rows[1].takes and rows[0].takes.pages == max(x.numbers.pages for x in rows)
    ranks.each(lambda x: x.manager.release(1))
    ranks.each(lambda x: ways(x).bring_back(rows[rank_of(x)], 3))
    assert len({*digests(ranks)}) == 1


def test_what_one_rank_cannot_keep_none_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is full by the rank that holds most; the device of one has no memory to list, or to copy."""
    ranks = grown()
    most = max(x.numbers.pages for x in kept(ranks))
    for session in ranks.members:
        ways(session).kept_pages = most - 1
    assert [type(x) for x in kept(ranks)] == [NoRoom, NoRoom]
    for session in ranks.members:
        ways(session).kept_pages = most
    for name in ("_listed", "_copied"):
        with monkeypatch.context() as patch:
            patch.setattr(ways(ranks.members[1]), name, fails)
            assert [type(x) for x in kept(ranks)] == [OtherRankError, torch.OutOfMemoryError]
    assert [type(x) for x in kept(ranks)] == [KeptRow, KeptRow]
    assert len({*digests(ranks)}) == 1


def fails(*_: object) -> None:
    raise torch.OutOfMemoryError("none")


def test_a_row_that_one_rank_has_no_memory_to_make_can_be_released_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the next count both take its pages for used."""
    two = Two()
    two.look()
    assert two.arrived() == [True, True]
    monkeypatch.setattr(ways(two.target.members[1]), "_fill", fails)

    def restored(session: Session) -> tuple[str, int]:
        try:
            session.manager.ranks.together(lambda: ways(session).restore(two.wanted[rank_of(session)], 5))
        except Exception as error:
            problem = type(error).__name__
        digest = decision_digest(PageLedger(session.manager, 1000))
        session.manager.release(5)
        return problem, digest

    (first, one), (second, other) = two.target.each(restored)
    assert (first, second) == ("OtherRankError", "OutOfMemoryError") and one == other
    two.target.each(lambda x: ways(x).give_up(two.wanted[rank_of(x)]))
    assert len({*digests(two.target)}) == 1
    assert [x.manager.counts.free() for x in two.target.members] == [600, 600]


def test_a_row_of_one_rank_with_more_pages_than_were_set_aside_is_refused_on_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = Two()
    two.look()
    assert two.arrived() == [True, True]
    takes = two.wanted[0].takes
    assert takes is not None
    for wanted in two.wanted:
        wanted.takes = takes._replace(pages=most_row_pages(two.target.members[0].manager.geometry, TOKENS) + 1)

    def restored(session: Session) -> str:
        with pytest.raises(NoRoom) as error:
            ways(session).restore(two.wanted[rank_of(session)], 5)
        return str(error.value)

    assert {*two.target.each(restored)} == {"it has more pages than were set aside for it"}


def test_an_error_of_one_rank_is_one_of_all() -> None:
    ranks = Pair(lambda ranks: ranks, size=3)

    def tries(of: Ranks) -> str:
        def act() -> int:
            return 1 // of.rank  # of the first rank alone it is none

        try:
            return str(of.together(act))
        except Exception as error:
            return type(error).__name__

    assert ranks.each(tries) == ["ZeroDivisionError", "OtherRankError", "OtherRankError"]
    assert ranks.each(lambda of: of.together(lambda: of.rank)) == [0, 1, 2]
    assert ranks.each(lambda of: of.each(7 * of.rank - 3)) == [[-3, 4, 11]] * 3
    assert Ranks().together(lambda: 5) == 5 and Ranks().each(4) == [4]
