"""Rows that go from one server's pages to another's: they are the same bit for bit, and stay so while they generate.
What does not fit, is damaged or is of another request is refused, and no block is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.kernels.table import row_table
from sglang_diffkv.layout.geometry import Geometry, Path, path_end
from sglang_diffkv.mem_pool import host_pages, row_transfer
from sglang_diffkv.mem_pool.host_pages import Run
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.row_transfer import (
    NoRoom,
    RowExport,
    RowImport,
    RowTransfer,
    TransferRoom,
    blocks_for,
    most_row_pages,
    room_blocks,
)
from sglang_diffkv.mem_pool.segment_object import ObjectRefused, Origin
from sglang_diffkv.mem_pool.table_space import TableFull
from tests.dense import Session
from tests.helpers import PAIR, check, make_format, make_manager, seen_by, until
from tests.policies import diffkv_policy

WINDOW, ROOM = 9, "4000000000 5e"
FOUR = ("K8V8", "K8V4", "K4V4", "K4V2")


def server(
    tiers: tuple[str, ...] = PAIR,
    *,
    pages: int = 600,
    blocks: int = 60,
    kept_pages: int = 600,
    position_bytes: int = 2,
    **named: Any,
) -> Session:
    """A server's pages, which freezes prompts of 16 tokens or more up to their window."""
    between = (1.0, 0.8)[: max(len(tiers) - 2, 0)]
    policy = diffkv_policy(1.2, 0.3, WINDOW, sinks=2, alpha_between=between)
    fmt = make_format(tiers, page_tokens=4, position_bytes=position_bytes)
    manager = make_manager(fmt, policy=policy, pages=pages, **named)
    manager.prompts.share_min_tokens, manager.prompts.tail = 16, WINDOW
    parts = (manager.device, manager.rows, manager.counts, manager.high, manager.windows)
    manager.transfer = RowTransfer(*parts, blocks, kept_pages)
    manager.transfer.origin = Origin.of(manager.geometry, torch.bfloat16, "weights", "configuration", manager.ranks)
    return Session(manager, spread=2.0, seed=manager.ranks.rank)


def ways(session: Session) -> RowTransfer:
    assert session.manager.transfer is not None
    return session.manager.transfer


def exported(session: Session, row: int, most: int = 1000, has: int = 0) -> RowExport:
    """A row's object, whole."""
    found = ways(session).export(row, ROOM, most, has)
    until(lambda: ways(session).advance(found))
    return found


def numbers(runs: list[Run]) -> list[int]:
    return [block for start, count in runs for block in range(start, start + count)]


def carry(source: RowTransfer, sent: RowExport, target: RowTransfer, wanted: RowImport) -> None:
    """What a transfer engine does: the blocks that the row fills, in order."""
    assert source.room.block_bytes == target.room.block_bytes
    blocks = numbers(sent.blocks)
    for here, there in zip(blocks, numbers(wanted.blocks)[: len(blocks)], strict=True):
        target.room._blocks.pages[there] = source.room._blocks.pages[here]


def received(source: Session, row: int, target: Session, there: int, path: Path | None = None) -> RowExport:
    """Row ``there`` of the target is that of the source from now on, and its dense form too, behind as much of its own
    ``path`` as the source left out."""
    sent = exported(source, row, has=path_end(path or []))
    assert not sent.problem
    wanted = ways(target).expect(source.manager.rows.length(row))
    assert wanted is not None
    carry(ways(source), sent, ways(target), wanted)
    ways(source).finish(sent, well=True)
    ways(target).look(wanted, ROOM)
    until(lambda: wanted.looked)
    ways(target).restore(wanted, there, path)
    target.dense[there], target.own_from[there] = copy.deepcopy(source.dense[row]), source.own_from[row]
    return sent


def prefix_of_47(target: Session) -> Path:
    """That many tokens of a chat, in two segments that end within pages. No row refers to them."""
    target.extend({1: 90}, check=False)
    target.end_prompt(1)
    first = target.share(1, 0, 31)
    target.attach(2, [(first, 0, 26)])
    target.extend({2: 64}, check=False)
    target.end_prompt(2)
    second = target.share(2, 26, 70)
    target.release(1)
    target.release(2)
    return [(first, 0, 26), (second, 26, 47)]


def table(manager: PageManager, row: int) -> list[np.ndarray]:
    """All of a row but the numbers of its pages: counts, ranges, and the bytes of its pages, by head and entry."""
    state, found = manager.state, []
    for x in (state.entries, state.own_entry, state.own_tokens, state.hole):
        found.append(x[row].numpy())
    for tier in range(len(state.tiers)):
        width = int(state.entries[row, ..., tier].max())
        page, low, high = (x[0].numpy() for x in row_table(state, torch.tensor([row]), tier, width))
        used = np.arange(width) < state.entries[row, ..., tier].numpy()[..., None]
        found += [low[used], high[used], state.pages.numpy()[page[used]]]
    return found


def same(one: PageManager, row: int, other: PageManager, there: int) -> None:
    for left, right in zip(table(one, row), table(other, there), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(("tiers", "position_bytes"), [(PAIR, 2), (("BF16",), 2), (FOUR, 2), (("K8V4",), 4)], ids=str)
@pytest.mark.parametrize("tokens", [1, 11, 45])
def test_a_row_is_the_same_and_generates_the_same(tiers: tuple[str, ...], position_bytes: int, tokens: int) -> None:
    """Shorter than the window, too short to be frozen, and frozen up to its tail. Other requests have shuffled the
    target's ring."""
    source, target = (server(tiers, position_bytes=position_bytes) for _ in range(2))
    target.extend({1: 37}, check=False)
    target.extend({2: 5}, check=False)
    target.release(1)
    source.extend({3: tokens}, check=False)
    source.end_prompt(3)
    received(source, 3, target, 5)
    same(source.manager, 3, target.manager, 5)
    assert target.manager.rows.length(5) == tokens
    assert target.manager.rows.frozen(5) == source.manager.rows.frozen(3)
    assert bool(source.manager.rows.frozen(3)) == (tokens >= 16)
    target.random.set_state(source.random.get_state())
    for _ in range(20):
        source.step([3], check=False)
        target.step([5], check=False)
    same(source.manager, 3, target.manager, 5)
    for session in (source, target):
        check(session.manager)
        assert ways(session).room.used == 0
    target.release(5)
    target.release(2)
    check(target.manager)
    assert target.manager.device.free_pages() == target.state.num_pages


def test_a_shared_prefix_goes_along_and_is_the_row_s_own() -> None:
    """Parts of two segments that end within pages, of which the tree evicts one meanwhile."""
    source, target = server(), server()
    source.extend({1: 29}, check=False)
    source.end_prompt(1)
    first = source.share(1, 0, 20)
    source.release(1)
    source.attach(2, [(first, 0, 17)])
    source.extend({2: 27}, check=False)
    source.end_prompt(2)
    second = source.share(2, 17, 35)
    assert second is not None
    source.attach(3, [(first, 0, 17), (second, 17, 30)])
    source.extend({3: 8}, check=False)
    source.end_prompt(3)
    sent = ways(source).export(3, ROOM, 1000)
    source.release(2)
    source.manager.segments.release(second)
    until(lambda: ways(source).advance(sent))
    ways(source).finish(sent, well=True)
    received(source, 3, target, 1)
    same(source.manager, 3, target.manager, 1)
    assert seen_by(source.manager, 3) == seen_by(target.manager, 1)
    assert target.manager.rows.shared(1) == 0 and not target.state.kept_entry[1].any()
    target.random.set_state(source.random.get_state())
    for _ in range(12):
        source.step([3], check=False)
        target.step([1], check=False)
    assert seen_by(source.manager, 3) == seen_by(target.manager, 1)
    check(source.manager)
    check(target.manager)


@pytest.mark.parametrize(("tiers", "position_bytes"), [(PAIR, 2), (FOUR, 4)], ids=str)
@pytest.mark.parametrize(
    ("known", "tokens"),
    [(0, 70), (29, 40), (29, 18), (0, 15), (29, 13), (53, 25)],
    ids=["no hit", "a hit", "within the tail", "all may be written", "a short prompt", "more there"],
)
def test_what_the_other_server_has_stays_here(
    tiers: tuple[str, ...], position_bytes: int, known: int, tokens: int
) -> None:
    """The target has 47 tokens of the chat, in two segments that end within pages, and other bytes of them. Of the row
    it gets what lies behind, and from where the row may be written. It goes on as one that was computed here, and joins
    the tree."""
    source, target = (server(tiers, position_bytes=position_bytes) for _ in range(2))
    path = prefix_of_47(target)
    if known:
        source.extend({3: known + WINDOW}, check=False)
        source.end_prompt(3)
        segment = source.share(3, 0, known)
        source.release(3)
        source.attach(4, [(segment, 0, known)])
    source.extend({4: tokens}, check=False)
    source.end_prompt(4)
    free = target.manager.device.free_pages()
    whole = int(source.state.entries[4].sum())
    sent = received(source, 4, target, 5, path)
    length, frozen = known + tokens, source.manager.rows.frozen(4)
    assert sent.header["from"] == min(47, known if frozen is None else frozen)
    start = sent.header["from"]
    assert sent.numbers is not None
    assert free - target.manager.device.free_pages() == sent.numbers.pages
    assert sent.numbers.pages < whole or not start
    rows = target.manager.rows
    assert (rows.length(5), rows.shared(5), rows.frozen(5)) == (length, start, frozen)
    assert seen_by(target.manager, 5, start) == seen_by(source.manager, 4, start)
    target.attach(6, path)
    before = {place: held for place, held in seen_by(target.manager, 6).items() if place[3] < start}
    assert {place: held for place, held in seen_by(target.manager, 5).items() if place[3] < start} == before
    check(target.manager)
    for _ in range(20):
        target.step([5], check=False)
    check(target.manager)
    held = seen_by(target.manager, 5)
    joined = target.share(5, max(start, 47), length + 20)
    target.attach(7, [*path, (joined, 47, length + 20)] if length + 20 > 47 else path)
    assert {place: x[1] for place, x in seen_by(target.manager, 7).items() if place[3] >= 47}.keys() == {
        place for place in held if place[3] >= 47
    }
    for row in (5, 6, 7):
        target.release(row)
    check(target.manager)


def test_a_row_whose_beginning_nobody_has_is_refused() -> None:
    source, target = server(), server()
    source.extend({1: 60}, check=False)
    source.end_prompt(1)
    sent, wanted = exported(source, 1, has=20), ways(target).expect(60)
    assert wanted is not None and sent.header["from"] == 20
    carry(ways(source), sent, ways(target), wanted)
    assert refused(target, wanted) == "tokens"


@pytest.mark.parametrize("kind", ["high", "window"])
def test_what_a_request_asked_for_itself_goes_along(kind: str) -> None:
    named: dict[str, Any] = {"high_rows": True, "most_window": 64}
    source, target = server(**named), server(**named)
    for row, session in ((2, source), (4, target)):
        if kind == "high":
            source.manager.high.keep(2)
        else:
            source.manager.windows.keep(2, 21)
        assert session.manager.rows.length(row) == 0
    source.extend({2: 45}, check=False)
    source.end_prompt(2)
    received(source, 2, target, 4)
    if kind == "high":
        assert 4 in target.manager.high
    else:
        assert target.manager.windows.window_of(4) == 21
    target.random.set_state(source.random.get_state())
    for _ in range(20):
        source.step([2], check=False)
        target.step([4], check=False)
    same(source.manager, 2, target.manager, 4)
    check(target.manager)


# Refused


@pytest.fixture
def waiting() -> tuple[Session, Session, RowExport, RowImport]:
    """A row's object that has not been carried yet."""
    source, target = server(), server()
    source.extend({1: 41}, check=False)
    source.end_prompt(1)
    wanted = ways(target).expect(41)
    assert wanted is not None
    return source, target, exported(source, 1), wanted


def refused(target: Session, wanted: RowImport, room: str = ROOM) -> str:
    """The reason why what has come is refused; the row stays empty, and the blocks are set aside."""
    ways(target).look(wanted, room)
    until(lambda: wanted.looked)
    with pytest.raises(ObjectRefused) as error:
        ways(target).restore(wanted, 3)
    assert 3 not in target.manager.rows
    before = ways(target).room.used
    ways(target).give_up(wanted)
    assert ways(target).room.used == before and ways(target).report()["failed"] == 1
    check(target.manager)
    return error.value.reason


def test_nothing_came(waiting: Any) -> None:
    _, target, _, wanted = waiting
    assert refused(target, wanted) == "format"


def test_what_was_there_before_is_not_taken_for_it(waiting: Any) -> None:
    """The engine says that all is there, and the blocks are as an earlier request of this length left them."""
    source, target, sent, wanted = waiting
    carry(ways(source), sent, ways(target), wanted)
    ways(target).look(wanted, ROOM)
    until(lambda: wanted.looked)
    ways(target).restore(wanted, 3)
    again = ways(target).expect(41)
    assert again is not None and again.blocks == wanted.blocks
    ways(target).look(again, ROOM)
    until(lambda: again.looked)
    with pytest.raises(ObjectRefused, match="begin"):
        ways(target).restore(again, 4)


@pytest.mark.parametrize("place", ["head", "pages", "last page"])
def test_damage_is_found(waiting: Any, place: str) -> None:
    source, target, sent, wanted = waiting
    carry(ways(source), sent, ways(target), wanted)
    pages, head = ways(target).room.pages, sent.header
    first = ways(target).room.pages_of(wanted.blocks)[0][0]
    before = ways(source)._head_pages(sent.numbers.pages)
    at = {"head": (first, 40), "pages": (first + before, 3), "last page": (first + before + sent.numbers.pages - 1, 9)}
    pages[at[place]] ^= 1
    assert head and refused(target, wanted) == "checksum"


def test_another_request_s_object_is_refused(waiting: Any) -> None:
    source, target, sent, wanted = waiting
    carry(ways(source), sent, ways(target), wanted)
    assert refused(target, wanted, room=ROOM + "0") == "tokens"


def test_another_server_s_pages_are_refused_with_both_values(waiting: Any) -> None:
    source, target, sent, wanted = waiting
    assert ways(target).origin is not None
    ways(target).origin = replace(ways(target).origin, configuration="another")
    carry(ways(source), sent, ways(target), wanted)
    ways(target).look(wanted, ROOM)
    until(lambda: wanted.looked)
    with pytest.raises(ObjectRefused, match="its configuration is configuration, and this server's is another"):
        ways(target).restore(wanted, 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, header: x.entries.__setitem__((0, 0), x.entries[0, 0] + 1), "table"),
        (lambda x, header: x.own_tokens.__setitem__((1, 0), x.own_tokens[1, 0] + 40), "table"),
        (lambda x, header: x.hole.__setitem__(0, 1000), "table"),
        (lambda x, header: x.low.__setitem__(0, -7), "table"),
        (lambda x, header: header.__setitem__("length", 10**6), "header"),
        (lambda x, header: header.__setitem__("frozen", "no"), "header"),
    ],
    ids=["entries", "own tokens", "hole", "range", "length", "no number"],
)
def test_numbers_that_no_row_has_are_refused(change: Callable[..., None], reason: str) -> None:
    """A sender that is wrong: its checksums are right, and the row would not be one."""
    source, target = server(), server()
    source.extend({1: 41}, check=False)
    source.end_prompt(1)
    sent = ways(source).export(1, ROOM, 1000)
    sent.listed = sent.listed.clone()
    ways(source)._know(sent)
    assert sent.numbers is not None
    sent.numbers = replace(sent.numbers, **{name: x.copy() for name, x in vars(sent.numbers).items()})
    change(sent.numbers, sent.header)
    until(lambda: ways(source).advance(sent))
    wanted = ways(target).expect(41)
    assert wanted is not None
    carry(ways(source), sent, ways(target), wanted)
    assert refused(target, wanted) == reason


@pytest.mark.parametrize(
    ("there", "here", "reason"),
    [
        ({"high_rows": True}, {}, "keeps all in the high tier"),
        ({"most_window": 64}, {}, "its window is 21"),
        ({"most_window": 64}, {"most_window": 16}, "its window is 21"),
    ],
    ids=["high", "no window", "window too large"],
)
def test_what_this_server_allows_no_request_is_refused(there: Any, here: Any, reason: str) -> None:
    source, target = server(**there), server(**here)
    if "high_rows" in there:
        source.manager.high.keep(2)
    else:
        source.manager.windows.keep(2, 21)
    source.extend({2: 45}, check=False)
    source.end_prompt(2)
    sent, wanted = exported(source, 2), ways(target).expect(45)
    assert wanted is not None
    carry(ways(source), sent, ways(target), wanted)
    ways(target).look(wanted, ROOM)
    until(lambda: wanted.looked)
    with pytest.raises(ObjectRefused, match=reason):
        ways(target).restore(wanted, 3)
    assert 3 not in target.manager.rows
    ways(target).give_up(wanted)
    check(target.manager)


def test_without_memory_on_the_device_the_row_can_be_released(monkeypatch: pytest.MonkeyPatch, waiting: Any) -> None:
    source, target, sent, wanted = waiting
    carry(ways(source), sent, ways(target), wanted)
    ways(target).look(wanted, ROOM)
    until(lambda: wanted.looked)

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("none")

    monkeypatch.setattr(target.manager.device, "to_device", fails)
    with pytest.raises(torch.OutOfMemoryError):
        ways(target).restore(wanted, 3)
    monkeypatch.undo()
    target.manager.release(3)
    ways(target).give_up(wanted)
    check(target.manager)
    assert target.manager.device.free_pages() == target.state.num_pages


# Room


@pytest.fixture
def crowded() -> tuple[Session, RowExport, RowExport, list[Run]]:
    """A long row waits for blocks that others have, and a short one, which would find enough, comes behind it."""
    session = server(pages=3000, blocks=20)
    transfer = ways(session)
    session.extend({1: 290, 2: 5}, check=False)
    session.manager.prompts.end(1, 2)
    long, short = transfer.export(1, ROOM, 1000), transfer.export(2, ROOM + "0", 1000)
    taken = transfer.room.take(18)
    assert taken is not None
    assert not any(transfer.advance(x) for _ in range(5) for x in (long, short))
    assert long.numbers is not None and short.numbers is not None
    assert transfer._blocks_of(long.numbers.pages) > 2 >= transfer._blocks_of(short.numbers.pages)
    assert short.copying is None
    return session, long, short, taken


def test_a_row_that_waits_for_blocks_is_not_overtaken(crowded: Any) -> None:
    session, long, short, taken = crowded
    transfer = ways(session)
    transfer.room.give(taken)
    until(lambda: transfer.advance(long))
    transfer.finish(long, well=True)
    until(lambda: transfer.advance(short))
    transfer.finish(short, well=True)
    assert transfer.room.used == 0
    check(session.manager)


def test_one_that_is_given_up_while_it_waits_lets_others_go_on(crowded: Any) -> None:
    session, _, short, _ = crowded
    session.release(1)
    until(lambda: ways(session).advance(short))
    assert short.ready


def test_a_row_that_no_room_here_is_large_enough_for_fails() -> None:
    session = server(blocks=1)
    session.extend({1: 90}, check=False)
    session.end_prompt(1)
    assert "and this server has 1" in exported(session, 1).problem


def test_an_export_waits_for_blocks() -> None:
    session = server(blocks=8)
    session.extend({1: 21, 2: 21}, check=False)
    session.manager.prompts.end(1, 2)
    taken = ways(session).room.take(8)
    assert taken is not None
    sent = ways(session).export(1, ROOM, 1000)
    assert not any(ways(session).advance(sent) for _ in range(5))
    ways(session).room.give(taken)
    until(lambda: ways(session).advance(sent))
    assert sent.ready
    ways(session).finish(sent, well=True)
    assert ways(session).room.used == 0


def test_a_row_larger_than_its_room_there_is_refused() -> None:
    session = server()
    session.extend({1: 41}, check=False)
    session.end_prompt(1)
    sent = exported(session, 1, most=1)
    assert "the decode server has set 1 aside" in sent.problem and not sent.ready
    ways(session).finish(sent, well=False)
    check(session.manager)


def test_giving_up_a_row_ends_its_export() -> None:
    session = server()
    session.extend({1: 41}, check=False)
    session.end_prompt(1)
    sent = exported(session, 1)
    session.release(1)
    assert ways(session).report()["on_the_way"] == 0 and ways(session).report()["failed"] == 1
    ways(session).finish(sent, well=True)  # SGLang's sender concludes later
    check(session.manager)
    assert ways(session).report()["sent"] == 0


def test_blocks_of_a_failed_transfer_are_nobody_s_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    session, now = server(), [100.0]
    monkeypatch.setattr(row_transfer.time, "monotonic", lambda: now[0])
    wanted = ways(session).expect(30)
    assert wanted is not None
    ways(session).give_up(wanted)
    used, count = ways(session).room.used, ways(session).room.count
    assert used == blocks_for(session.manager.geometry, 30) and ways(session).room.free() == count - used
    now[0] += row_transfer.SET_ASIDE_SECONDS + 1
    assert ways(session).room.free() == count and ways(session).room.used == 0


def test_without_table_blocks_the_row_stays_empty(monkeypatch: pytest.MonkeyPatch, waiting: Any) -> None:
    source, target, sent, wanted = waiting
    carry(ways(source), sent, ways(target), wanted)
    ways(target).look(wanted, ROOM)
    until(lambda: wanted.looked)

    def full(row: int, attached: object) -> None:
        raise TableFull(row, "no block is left")

    monkeypatch.setattr(target.manager.space, "extend", full)
    with pytest.raises(TableFull):
        ways(target).restore(wanted, 3)
    monkeypatch.undo()
    assert 3 not in target.manager.rows
    ways(target).give_up(wanted)
    check(target.manager)


def test_a_lost_block_is_found() -> None:
    session = server()
    assert ways(session).room.take(1) is not None
    with pytest.raises(AssertionError, match="lost or held twice"):
        check_integrity(session.manager)


def test_a_server_has_room_for_one_longest_row_at_least() -> None:
    geometry = server().manager.geometry
    assert room_blocks(geometry) == 4 * blocks_for(geometry, geometry.max_tokens)
    long = Geometry(geometry.fmt, 40, 8, 10_000_000, 4, 4, 60_000)
    assert room_blocks(long) == blocks_for(long, 60_000, 8) > blocks_for(long, 60_000)
    small = Geometry(geometry.fmt, 40, 8, 5000, 4, 4, 60_000)
    assert most_row_pages(small, 60_000) == 5000 and room_blocks(small) < room_blocks(long)


def test_memory_that_cannot_be_pinned_is_named_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "_register", lambda memory: 2)
    with pytest.raises(
        UnsupportedError, match="for rows between servers cannot be had: give --context-length"
    ) as error:
        TransferRoom(server().manager.geometry, 8, pinned=True)
    assert "host_gib" not in str(error.value)


def test_a_row_of_nothing_generates() -> None:
    """Requests by which a server warms itself up."""
    session = server()
    ways(session).restore_nothing(2, 13)
    empty = session._new(13)
    session.dense[2], session.own_from[2] = empty, 13
    for _ in range(12):
        session.step([2])
    check(session.manager)
    session.release(2)
    check(session.manager)


# Retracted requests of a server without a prefix cache


@pytest.mark.parametrize("tiers", [PAIR, ("BF16",), FOUR], ids=str)
def test_a_retracted_row_comes_back_without_the_token_that_came_too_late(tiers: tuple[str, ...]) -> None:
    """Its pages are others' meanwhile. What was known of it is there again, in pages that it may not write."""
    session = server(tiers)
    session.extend({2: 45}, check=False)
    session.end_prompt(2)
    for _ in range(14):
        session.step([2], check=False)
    before = {at: seen for at, seen in seen_by(session.manager, 2).items() if at[3] < 58}
    kept = ways(session).keep(2, 58)
    dense = session.dense[2].cut(0, 58)
    session.release(2)
    session.extend({1: 70}, check=False)
    assert kept.numbers.pages <= session.manager.device.free_pages()
    ways(session).bring_back(kept, 5)
    session.dense[5], session.own_from[5] = dense, 58
    after = seen_by(session.manager, 5)
    assert after.keys() == before.keys() and len(after) > 60
    assert all(after[at][0] == before[at][0] and after[at][1] == before[at][1] for at in before)
    assert session.manager.rows.length(5) == session.manager.rows.frozen(5) == 58
    for _ in range(12):
        session.step([5], check=False)
    check(session.manager)
    session.release(5)
    session.release(1)
    check(session.manager)
    assert session.manager.device.free_pages() == session.state.num_pages


def test_kept_rows_have_a_bound_and_are_free_once_nobody_has_them() -> None:
    session = server(kept_pages=40)
    for row in (1, 2):
        session.extend({row: 33}, check=False)
        session.end_prompt(row)
    kept = ways(session).keep(1, 33)
    assert 20 < kept.numbers.pages <= 40
    with pytest.raises(NoRoom, match="host_gib"):
        ways(session).keep(2, 33)
    del kept
    assert ways(session).keep(2, 33).numbers.pages <= 40


def test_what_a_retracted_request_asked_for_itself_comes_back() -> None:
    session = server(high_rows=True, most_window=64)
    session.manager.high.keep(1)
    session.manager.windows.keep(2, 21)
    for row in (1, 2):
        session.extend({row: 33}, check=False)
        session.end_prompt(row)
    kept = [ways(session).keep(row, 33) for row in (1, 2)]
    for row in (1, 2):
        session.release(row)
    for saved, row in zip(kept, (4, 5), strict=True):
        ways(session).bring_back(saved, row)
    assert 4 in session.manager.high and session.manager.windows.window_of(5) == 21
    check(session.manager)
