"""Rows of a server with several ranks that go to one with fewer: each rank there has the heads of several here. What is
made of the parts is the row that all heads together would have sent, bit for bit. One part that is wrong ends it."""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_diffkv.layout.geometry import Path
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.mem_pool import row_transfer
from sglang_diffkv.mem_pool.row_object import RowHead, RowNumbers, head_size, join
from sglang_diffkv.mem_pool.row_transfer import (
    NoRoom,
    RowExport,
    RowImport,
    RowTransfer,
    block_pages,
    blocks_for,
    most_row_pages,
    room_blocks,
)
from sglang_diffkv.mem_pool.segment_object import ObjectRefused
from tests.dense import Dense, Session, stored
from tests.helpers import PAIR, check, seen_by, until
from tests.pages.test_row_transfer import FOUR, ROOM, exported, numbers, prefix_of_47, refused, same, server, ways
from tests.pages.test_rows_of_ranks import digests
from tests.ranks import Pair

TOKENS = 131


class Rank(Session):
    """A rank of a prefill server: of the keys, values and queries that a session with all heads draws, its heads'."""

    def __init__(self, number: int, parts: int, heads: int, **named: Any):
        found = server(heads=heads // parts, ranks=Ranks(parts, number), **named)
        super().__init__(found.manager, spread=found.spread)
        self.number, self.parts = number, parts

    def _own(self, drawn: torch.Tensor, heads: int) -> torch.Tensor:
        return drawn.narrow(-2, self.number * heads, heads)

    def _new(self, count: int) -> Dense:
        def rand(dim: int) -> torch.Tensor:
            heads = self.state.num_heads
            shape = (count, self.state.num_layers, heads * self.parts, dim)
            return self._own(torch.randn(shape, generator=self.random), heads).contiguous().bfloat16().float()

        key, value = rand(self.fmt.head_dim), rand(self.fmt.v_head_dim)
        keys = [key, *stored(key, self.fmt.tiers, "k_bits", self.state.dtype, turned=self.fmt.turned[0])]
        values = [value, *stored(value, self.fmt.tiers, "v_bits", self.state.dtype, turned=self.fmt.turned[1])]
        return Dense(keys, values, torch.zeros(key.shape[:3]))

    def query(self, count: int) -> torch.Tensor:
        heads = self.state.num_heads * self.group
        shape = (count, heads * self.parts, self.fmt.head_dim)
        return self._own(torch.randn(shape, generator=self.random), heads).contiguous() * self.spread


def ranks(parts: int, heads: int, **named: Any) -> list[Session]:
    """A prefill server with so many heads; of one rank for one part."""
    return [Rank(number, parts, heads, **named) for number in range(parts)]


def computed(sessions: list[Session], tokens: int, row: int = 1) -> None:
    """A prompt."""
    for session in sessions:
        session.extend({row: tokens}, check=False)
        session.end_prompt(row)


def carry_part(source: RowTransfer, sent: RowExport, target: RowTransfer, blocks: list[Any]) -> None:
    """What a transfer engine does with one rank's object: to the first of these blocks."""
    filled = numbers(sent.blocks)
    for here, there in zip(filled, numbers(blocks)[: len(filled)], strict=True):
        target.room._blocks.pages[there] = source.room._blocks.pages[here]


def sent_by(sessions: list[Session], target: Session, has: int = 0, row: int = 1) -> tuple[list[RowExport], RowImport]:
    """The objects of all ranks, which are where the target expects them."""
    length = sessions[0].manager.rows.length(row)
    wanted = ways(target).expect(length, len(sessions))
    assert wanted is not None
    rows = []
    for session, blocks in zip(sessions, wanted.of_parts, strict=True):
        rows.append(exported(session, row, sum(count for _, count in blocks), has))
        assert not rows[-1].problem
        carry_part(ways(session), rows[-1], ways(target), blocks)
    return rows, wanted


def looked(target: Session, wanted: RowImport) -> RowImport:
    ways(target).look(wanted, ROOM)
    until(lambda: wanted.looked)
    return wanted


def receive(sessions: list[Session], target: Session, there: int, path: Path | None = None, has: int = 0) -> RowImport:
    """Row ``there`` of the target is that of all ranks from now on."""
    rows, wanted = sent_by(sessions, target, has)
    for session, sent in zip(sessions, rows, strict=True):
        ways(session).finish(sent, well=True)
        assert ways(session).room.used == 0
    ways(target).restore(looked(target, wanted), there, path)
    return wanted


def goes_on(target: Session, row: int, steps: int, length: int, own_from: int) -> None:
    """The row generates. What is stored of its prompt matters, and not its dense form."""
    target.random.manual_seed(11)
    target.dense[row], target.own_from[row] = target._new(length), own_from
    for _ in range(steps):
        target.step([row], check=False)


@pytest.mark.parametrize(
    ("parts", "heads", "tiers"), [(2, 2, PAIR), (3, 3, FOUR), (2, 6, FOUR), (3, 6, PAIR), (2, 2, ("BF16",))], ids=str
)
@pytest.mark.parametrize("tokens", [1, 13, TOKENS])
def test_parts_are_the_row_of_all_heads(parts: int, heads: int, tiers: tuple[str, ...], tokens: int) -> None:
    """Shorter than the window, too short to be frozen, and frozen. It generates as that one does, and nothing of it is
    left."""
    source, whole = ranks(parts, heads, tiers=tiers), ranks(1, heads, tiers=tiers)
    one, other = (server(tiers, heads=heads) for _ in range(2))
    other.extend({2: 37}, check=False)  # its ring is not in order
    other.extend({3: 5}, check=False)
    other.release(2)
    computed(source, tokens)
    computed(whole, tokens)
    receive(whole, one, 5)
    receive(source, other, 5)
    same(whole[0].manager, 1, one.manager, 5)
    same(one.manager, 5, other.manager, 5)
    for name in ("length", "frozen", "shared"):
        assert getattr(one.manager.rows, name)(5) == getattr(other.manager.rows, name)(5)
    frozen = one.manager.rows.frozen(5) or 0
    for target in (one, other):
        goes_on(target, 5, 12, tokens, frozen)
        check(target.manager)
        assert ways(target).room.used == 0
    same(one.manager, 5, other.manager, 5)
    for row in (5, 3):
        other.release(row)
    check(other.manager)
    assert other.manager.device.free_pages() == other.state.num_pages


def test_ranks_hold_other_pages() -> None:
    """Or the tests above would not see it if one rank's were taken for another's."""
    source = ranks(3, 3)
    computed(source, TOKENS)
    held = {session.state.entries[1].numpy().tobytes() for session in source}
    assert len(held) == 3


@pytest.mark.parametrize("tiers", [PAIR, FOUR], ids=str)
@pytest.mark.parametrize("tokens", [25, TOKENS])
def test_what_the_decode_server_has_is_in_no_part(tiers: tuple[str, ...], tokens: int) -> None:
    """It has 47 tokens of the prompt, in two segments that end within pages."""
    parts, heads, rows = 3, 3, []
    for count in (1, parts):
        source, target = ranks(count, heads, tiers=tiers), server(tiers, heads=heads)
        path = prefix_of_47(target)
        computed(source, tokens)
        free = target.manager.device.free_pages()
        wanted = receive(source, target, 5, path, has=47)
        start = wanted.head.start
        assert start == min(47, source[0].manager.rows.frozen(1) or 0) > 0
        assert free - target.manager.device.free_pages() == wanted.head.numbers.pages
        assert wanted.head.numbers.pages < sum(int(x.state.entries[1].sum()) for x in source)
        goes_on(target, 5, 10, tokens, start)
        check(target.manager)
        rows.append((target, start, seen_by(target.manager, 5)))
    (one, start, before), (other, there, after) = rows
    assert start == there and before == after
    same(one.manager, 5, other.manager, 5)


def test_two_ranks_get_the_heads_of_four() -> None:
    """Each those of the next two. Both count what the larger one takes."""
    source, whole = ranks(4, 4), ranks(1, 4)
    computed(source, TOKENS)
    computed(whole, TOKENS)
    target = Pair(lambda ranks: server(ranks=ranks, heads=2))
    wanted: list[RowImport] = target.each(lambda x: ways(x).expect(TOKENS, 2))
    for number, session in enumerate(source):
        there = number // 2
        sent = exported(session, 1)
        carry_part(ways(session), sent, ways(target.members[there]), wanted[there].of_parts[number % 2])
    for session, row in zip(target.members, wanted, strict=True):
        looked(session, row)
    assert target.each(lambda x: ways(x).arrived([wanted[x.manager.ranks.rank]])) == [[True], [True]]
    takes = [row.takes for row in wanted]
    assert takes[0] == takes[1] and takes[0] is not None
    counts = [row.head.numbers.entries for row in wanted]
    assert takes[0].entries == tuple(np.concatenate(counts).max(axis=0)) != tuple(counts[1].max(axis=0))
    target.each(lambda x: ways(x).restore(wanted[x.manager.ranks.rank], 5))
    assert len({*digests(target)}) == 1
    state = whole[0].state
    for rank, session in enumerate(target.members):
        for name in ("entries", "own_entry", "own_tokens", "hole"):
            expected = getattr(state, name)[1][:, 2 * rank : 2 * rank + 2]
            assert torch.equal(getattr(session.state, name)[5], expected)
    seen = [seen_by(session.manager, 5) for session in target.members]
    together = {(t, layer, head + 2 * rank, at): x for rank in (0, 1) for (t, layer, head, at), x in seen[rank].items()}
    assert together == seen_by(whole[0].manager, 1)
    target.each(lambda x: x.manager.release(5))
    assert len({*digests(target)}) == 1


@pytest.mark.parametrize("seed", range(12))
def test_parts_of_numbers_are_joined(seed: int) -> None:
    """Of any row, with heads and tiers that hold nothing, and parts without a page."""
    draw = np.random.default_rng(seed)
    layers, parts, own, tiers = (int(draw.integers(1, 4)) for _ in range(4))
    heads = layers * parts * own
    entries = draw.integers(0, 4, (heads, tiers)).astype(np.int32) * draw.integers(0, 2, (heads, 1), dtype=np.int32)
    counts = np.stack([entries, draw.integers(0, 99, entries.shape), draw.integers(0, 99, entries.shape)]).astype("i4")
    if seed % 3 == 0:  # one part has nothing
        counts.reshape(3, layers, parts, own, tiers)[:, :, parts - 1] = 0
    pages = int(counts[0].sum())
    ranges = np.stack([np.arange(pages), np.arange(pages) + 1000]).astype(np.int32)
    whole = RowNumbers.of(counts, draw.integers(-1, 9, heads).astype(np.int32), ranges)
    _, head, _ = whole.places()
    found, kept = [], []
    for part in range(parts):
        mine = (head // own) % parts == part
        kept.append(np.flatnonzero(mine))
        cut = counts.reshape(3, layers, parts, own, tiers)[:, :, part].reshape(3, -1, tiers)
        hole = whole.hole.reshape(layers, parts, own)[:, part].ravel()
        header = {"length": 5, "rank": part, "before": part, "pages": "x" * part}
        found.append(RowHead(header, RowNumbers.of(cut, hole, ranges[:, mine])))
    joined, place = join(found, layers)
    for name in ("entries", "own_entry", "own_tokens", "hole", "low", "high"):
        np.testing.assert_array_equal(getattr(joined.numbers, name), getattr(whole, name))
    np.testing.assert_array_equal(place, np.concatenate(kept))
    assert joined.length == 5


# Refused


@pytest.fixture
def coming() -> tuple[list[Session], Session, list[RowExport], RowImport]:
    """A row of two ranks, both of whose parts are there."""
    source, target = ranks(2, 2), server(heads=2)
    computed(source, TOKENS)
    return source, target, *sent_by(source, target)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("place", ["head", "pages"])
def test_a_damaged_part_is_refused_by_its_rank(part: int, place: str, coming: Any) -> None:
    source, target, sent, wanted = coming
    first = ways(target).room.pages_of(wanted.of_parts[part])[0][0]
    before = 0 if place == "head" else ways(source[part])._head_pages(sent[part].numbers.pages)
    ways(target).room.pages[first + before, 40] ^= 1
    looked(target, wanted)
    assert f"of rank {part} there: " in str(wanted.result()) and "damaged" in str(wanted.result())
    assert refused(target, wanted) == "checksum"


@pytest.mark.parametrize("part", [0, 1])
def test_a_part_that_did_not_come_is_missed(part: int, coming: Any) -> None:
    """What another request left in its blocks is not taken for it, and the other part is no row."""
    source, target, sent, wanted = coming
    ways(target).restore(looked(target, wanted), 3)
    target.release(3)
    again = ways(target).expect(TOKENS, 2)
    assert again is not None and again.blocks == wanted.blocks
    carry_part(ways(source[1 - part]), sent[1 - part], ways(target), again.of_parts[1 - part])
    assert refused(target, again) == "format"


def test_parts_that_took_each_other_s_place_are_refused(coming: Any) -> None:
    source, target, sent, wanted = coming
    for number, session in enumerate(source):
        carry_part(ways(session), sent[number], ways(target), wanted.of_parts[1 - number])
    looked(target, wanted)
    assert "its rank is 1" in str(wanted.result())
    assert refused(target, wanted) == "origin"


@pytest.mark.parametrize(("name", "value"), [("frozen", -1), ("window", 0), ("from", 3), ("length", TOKENS - 1)])
def test_parts_that_say_other_things_of_their_row_are_refused(name: str, value: Any) -> None:
    """Ranks of the prefill server have parted."""
    source, target = ranks(2, 2, most_window=64), server(heads=2, most_window=64)
    for session in source:
        session.manager.windows.keep(1, 21)
    computed(source, TOKENS)
    wanted = ways(target).expect(TOKENS, 2)
    assert wanted is not None
    for number, session in enumerate(source):
        sent = ways(session).export(1, ROOM, 1000)
        if number:
            sent.header[name] = value
        until(lambda sent=sent, session=session: ways(session).advance(sent))  # type: ignore[misc]
        carry_part(ways(session), sent, ways(target), wanted.of_parts[number])
    looked(target, wanted)
    assert f"have sent different rows: {name} is" in str(wanted.result())
    assert refused(target, wanted) == "header"


@pytest.mark.parametrize("there", [(1, 2), (2, 1), (4, 2)], ids=str)
def test_parts_of_other_numbers_of_ranks_are_refused(there: tuple[int, int]) -> None:
    """A server that was started anew with other ranks: what it sends has other heads."""
    sends, expects = there
    source, target = ranks(sends, 4), server(heads=4)
    computed(source, TOKENS)
    wanted = ways(target).expect(TOKENS, expects)
    assert wanted is not None
    for session, blocks in zip(source, wanted.of_parts, strict=False):
        carry_part(ways(session), exported(session, 1), ways(target), blocks)
    looked(target, wanted)
    assert isinstance(wanted.result(), ObjectRefused)
    assert refused(target, wanted) in ("size", "origin", "format")


def test_parts_with_more_pages_than_were_set_aside_are_refused(coming: Any) -> None:
    _, target, _, wanted = coming
    come = looked(target, wanted).come
    most = most_row_pages(target.manager.geometry, TOKENS)
    numbers_of_more = replace(come.head.numbers, low=np.zeros(most + 1, np.int32))
    wanted.reading = Future()
    wanted.reading.set_result(come._replace(head=replace(come.head, numbers=numbers_of_more)))
    with pytest.raises(NoRoom, match="than were set aside"):
        ways(target).restore(wanted, 3)
    assert 3 not in target.manager.rows
    ways(target).give_up(wanted)
    check(target.manager)


# Room


def test_each_part_has_as_many_blocks_and_all_come_back() -> None:
    target = server(heads=6, blocks=200)
    for parts in (1, 2, 3, 6):
        wanted = ways(target).expect(TOKENS, parts)
        assert wanted is not None
        counts = [sum(count for _, count in part) for part in wanted.of_parts]
        assert len(counts) == parts and len({*counts}) == 1
        assert sum(counts) == blocks_for(target.manager.geometry, TOKENS, parts)
        together = [block for part in wanted.of_parts for block in numbers(part)]
        assert together == numbers(wanted.blocks) and len({*together}) == len(together)
        ways(target)._imports.remove(wanted)
        ways(target).room.give(wanted.blocks)
    check(target.manager)
    assert ways(target).room.used == 0


def test_parts_wait_for_as_many_blocks_as_they_need() -> None:
    geometry = server(heads=6).manager.geometry
    one, six = (blocks_for(geometry, TOKENS, parts) for parts in (1, 6))
    assert one < six
    target = server(heads=6, blocks=six - 1)
    assert ways(target).can_expect(TOKENS) and not ways(target).can_expect(TOKENS, 6)
    assert ways(target).expect(TOKENS, 6) is None and ways(target).room.used == 0


def test_a_server_has_room_for_its_longest_row_in_any_parts() -> None:
    geometry = server(heads=6).manager.geometry
    long = replace(geometry, num_heads=12, num_layers=40, num_pages=10_000_000, max_tokens=600)
    for parts in (1, 2, 3, 4, 6, 12):
        assert room_blocks(long) >= blocks_for(long, long.max_tokens, parts)


def test_parts_have_room_for_one_pool_together() -> None:
    """Where a row may fill it: not each part for all of it."""
    geometry = server(heads=6).manager.geometry
    full = replace(geometry, num_heads=8, num_layers=40, num_pages=2_500_000, max_tokens=60_000)
    assert most_row_pages(full, full.max_tokens) == full.num_pages
    pages = full.num_pages + head_size(full, full.num_pages) // full.fmt.page_bytes
    for parts in (1, 2, 4, 8):
        blocks = blocks_for(full, full.max_tokens, parts)
        assert pages <= blocks * block_pages(full) <= 1.001 * pages
    assert room_blocks(full) * block_pages(full) <= 1.001 * pages


def test_a_rank_with_more_than_its_part_of_a_full_pool_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row would fit the pool, but not the blocks of equal parts. The next request goes."""
    monkeypatch.setattr(row_transfer, "BLOCK_BYTES", 1)  # a block is a page
    source, target = ranks(2, 2, blocks=1000), server(heads=2, pages=156, blocks=1000)
    source[0].spread = 8.0
    computed(source, 250)
    wanted = ways(target).expect(250, 2)
    assert wanted is not None
    sent = [exported(x, 1, sum(n for _, n in part)) for x, part in zip(source, wanted.of_parts, strict=True)]
    less, more = (x.numbers.pages for x in sent if x.numbers)
    assert less < 156 // 2 < more and less + more < 156
    assert sent[0].ready and not sent[0].problem and not sent[1].ready
    asked = sum(count for _, count in wanted.of_parts[1])
    assert re.fullmatch(rf"its {more} pages need \d+ blocks, and the decode server has set {asked} .*", sent[1].problem)
    for session, export in zip(source, sent, strict=True):
        ways(session).finish(export, well=False)
        session.release(1)
        check(session.manager)
    ways(target).give_up(wanted)
    check(target.manager)
    computed(source, 13)
    ways(target).restore(looked(target, sent_by(source, target)[1]), 5)
    assert target.manager.rows.length(5) == 13
    check(target.manager)


def test_a_rank_s_row_fits_the_blocks_of_its_part() -> None:
    """Also where the rank holds nearly all that a part may."""
    source, target = ranks(2, 4), server(heads=4)
    computed(source, 400)
    rows, wanted = sent_by(source, target)
    assert max(x.numbers.pages for x in rows if x.numbers) <= most_row_pages(source[0].manager.geometry, 400)
    ways(target).restore(looked(target, wanted), 5)
    check(target.manager)
