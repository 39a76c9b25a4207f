"""What a request's row sees, kept in host memory while the request has no row, and brought back as a segment.
Others may share that memory (``share_memory``).

A page is opaque here: whole pages are gathered to a staging buffer and copied out behind all that is launched. They
come back through it beside what is launched next, which waits for them on the device. What a row knows of a page beside
its bytes, its place and its position range, stays on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from sglang_diffkv.kernels.table import head_index, put_entries, table_column
from sglang_diffkv.layout.geometry import Segment
from sglang_diffkv.layout.page_format import EMPTY
from sglang_diffkv.mem_pool.counts import PageCounts
from sglang_diffkv.mem_pool.device import PageDevice, layer_groups
from sglang_diffkv.mem_pool.host_pages import HostPages, Run, first_of, part_of
from sglang_diffkv.mem_pool.page_copies import copy_in, copy_out, staging_pages
from sglang_diffkv.mem_pool.rows import RequestRows
from sglang_diffkv.mem_pool.segments import SegmentStore
from sglang_diffkv.mem_pool.table_space import Entries, blocks_of

MEASURED_SLOTS = 1 << 20
"""Slots whose positions are looked at together."""

LEAST_BY_LAYER = 1 << 25
"""Bytes from which on those of some layers come back behind those of others, so that a pass need not wait for all."""


@dataclass(frozen=True)
class Needed:
    """What a segment of saved tokens takes of the device, on the rank where it takes most.

    Attributes:
        entries: of each tier, of the head that has most.
    """

    pages: int
    entries: Entries

    @property
    def blocks(self) -> int:
        """Table blocks."""
        return blocks_of(self.entries)


@dataclass(eq=False)
class SavedRow:
    """Pages of a row in host memory, as they were when it was saved.

    Attributes:
        hi: tokens of the sequence that are kept. end: those that the device had, as of ``Segment``.
        runs: where the pages are, in the order of the arrays, which are [n]. Behind them are as many as another rank
            has more. tier, head: whose table has the page; heads count over layers. lo, upper: its position range.
            least, last: the first and the last position that it holds in there; where it holds none the last one is
            EMPTY.
    """

    hi: int
    end: int
    runs: list[Run]
    tier: np.ndarray
    head: np.ndarray
    lo: np.ndarray
    upper: np.ndarray
    least: np.ndarray
    last: np.ndarray

    def holds(self, lo: int, hi: int | None = None) -> np.ndarray:
        """[n] bool: which pages hold a token at a position in [lo, hi); without ``hi`` at ``lo`` or behind."""
        found: np.ndarray = self.last >= lo
        return found if hi is None else found & (self.least < hi)

    @property
    def host_pages(self) -> int:
        """Host pages that it has."""
        return sum(count for _, count in self.runs)

    def pages_from(self, lo: int, hi: int | None = None) -> int:
        """Pages of this rank that hold a token in there."""
        return int(self.holds(lo, hi).sum())

    def check_integrity(self) -> None:
        """Raise AssertionError unless all is known of each host page."""
        sizes = {len(x) for x in (self.tier, self.head, self.lo, self.upper, self.least, self.last)}
        assert len(sizes) == 1 and max(sizes) <= self.host_pages, "a saved row and its pages disagree"


@dataclass(frozen=True)
class Chosen:
    """The pages of a saved row that hold tokens at positions [lo, hi).

    Attributes:
        pages: [n] bool, of all that it has. runs: where all are.
    """

    saved: SavedRow
    lo: int
    hi: int
    pages: np.ndarray
    runs: list[Run]

    @classmethod
    def of(cls, saved: SavedRow, lo: int, hi: int) -> Chosen:
        pages = saved.holds(lo, hi)
        return cls(saved, lo, hi, pages, first_of(saved.runs, len(pages)))

    def columns(self) -> tuple[np.ndarray, ...]:
        """[n] each, of the chosen ones: tier, head, and the position range as far as it counts. It begins with a token,
        unless some of the page's lie before ``lo``."""
        saved = self.saved
        found = [saved.tier, saved.head, saved.least, saved.upper]
        if not self.pages.all():
            found = [column[self.pages] for column in found]
        tier, head, least, high = found
        return tier, head, np.maximum(least, self.lo), np.minimum(high, self.hi)

    @property
    def begins(self) -> bool:
        """Whether the position range of each chosen page begins with a token."""
        return self.lo == 0 or not bool((self.saved.least[self.pages] < self.lo).any())

    def by_layer(self, layers: Sequence[int], heads: int) -> list[list[tuple[int, int]]]:
        """Which of all pages are those of groups of layers, the first layer of each of which is given: for each group,
        the first one and the one behind the last, of each tier. Pages are in order of tiers, and of heads in there.

        Args:
            heads: of a layer.
        """
        tiers = int(self.saved.tier[-1]) + 1 if len(self.saved.tier) else 0
        of_all = 1 + int(self.saved.head.max(initial=0))
        place = self.saved.tier.astype(np.int64) * of_all + self.saved.head
        firsts = [tier * of_all + min(layer * heads, of_all) for tier in range(tiers) for layer in layers]
        edges = [*np.searchsorted(place, firsts).tolist(), len(place)]
        ranges = [*pairwise(edges)]
        return [[x for x in ranges[number :: len(layers)] if x[0] < x[1]] for number in range(len(layers))]


class SavedRows:
    """Saves rows and restores them.

    Args:
        count: host pages. in_parts: they are pinned as they are taken, and not at the start.

    Attributes:
        held: what is saved. host: its memory. shared: whether somebody else holds pages of it.
    """

    def __init__(
        self,
        device: PageDevice,
        rows: RequestRows,
        counts: PageCounts,
        segments: SegmentStore,
        count: int,
        *,
        in_parts: bool = False,
    ):
        self.device, self.rows, self.counts, self.segments = device, rows, counts, segments
        on_gpu, fmt = device.state.pages.is_cuda, device.fmt
        self.ranks = counts.ranks.ranks
        self.host = HostPages(count, fmt.page_bytes, pinned=on_gpu, in_parts=in_parts)
        if on_gpu and in_parts and not self.ranks.alone:
            self.host.pin_now(lambda pages: int(self.ranks.least(np.array([pages]))[0]))
        self.held: set[SavedRow] = set()
        self._make_room: Callable[[int], None] | None = None
        self._elsewhere: Callable[[], list[Run]] = lambda: []
        self._staging: torch.Tensor | None = None
        if on_gpu and count:
            size = (staging_pages(fmt, device.geometry.num_pages), fmt.page_bytes)
            self._staging = torch.empty(size, dtype=torch.uint8, device=device.state.device)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the device that pages pass through."""
        return 0 if self._staging is None else self._staging.nbytes

    def share_memory(self, make_room: Callable[[int], None], held: Callable[[], list[Run]]) -> None:
        """Somebody else holds host pages too, from now on.

        Args:
            make_room: has that one give back pages until so many are free, as far as possible. held: what it holds.
        """
        self._make_room, self._elsewhere = make_room, held

    @property
    def shared(self) -> bool:
        return self._make_room is not None

    @property
    def pages_held(self) -> int:
        """Host pages of saved rows."""
        return sum(saved.host_pages for saved in self.held)

    def _take(self, count: int) -> list[Run] | None:
        if self._make_room is not None and self.host.free < count <= self.host.count - self.pages_held:
            self._make_room(count)
        return self.host.take(count)

    # Saving

    def save(self, row: int, hi: int) -> SavedRow | None:
        """Copy the pages with the first ``hi`` tokens of a row to the host. Waits for the device's counts, not for the
        copies. None, changing nothing, if there is no host memory for them, if the row has lost tokens, or if the
        device has no memory to look at its entries: on any rank. With several all have to call it, and each takes as
        much host memory as the one with most pages.
        """
        if not self.host.free and self._make_room is None:
            return None
        with self.device.launching():
            found = self._listed_row(row, hi)
            lost, count = self.ranks.largest(np.array([found is None, 0 if found is None else len(found[0])])).tolist()
            runs = None if lost else self._take(count)
            if runs is None:
                return None
            assert found is not None
            pages, known = found
            try:
                self.copy_out(pages, first_of(runs, len(pages)), self._staging)
                failed = False
            except torch.OutOfMemoryError:
                failed = True
            if self.ranks.largest(np.array([int(failed)]))[0]:
                self.host.give(runs)
                return None
        saved = SavedRow(hi, max(hi, self.rows.most(row)), runs, *known)
        self.held.add(saved)
        return saved

    def _listed_row(self, row: int, hi: int) -> tuple[torch.Tensor, np.ndarray] | None:
        """The pages with the first ``hi`` tokens of a row, [n] int64, and what is known of each, [6, n] int32 as the
        arrays of ``SavedRow``. None if the row has lost tokens, or if the device has no memory to list them."""
        device = self.device
        try:
            parts = [self._entries(row, tier, hi) for tier in range(len(device.fmt.tiers))]
            known = torch.cat([entries for _, entries in parts], dim=1)
            fault = device.state.fault[row].expand(1, known.shape[1])
            numbers = torch.cat([known, fault]).cpu().numpy()  # [6, n]
            if numbers[5].any():
                return None
            tier, kept = np.repeat(range(len(parts)), [len(ids) for ids, _ in parts]), numbers[4] >= 0
            pages = torch.cat([ids for ids, _ in parts])[device.to_device(kept.nonzero()[0])]
        except torch.OutOfMemoryError:
            return None
        return pages, np.stack([tier[kept].astype(np.int32), *numbers[:5, kept]])

    def _entries(self, row: int, tier: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages [n] int64 of a row's entries of a tier, by head and in order, and [5, n] int32: head, position range
        below ``hi``, and the first and last position in it. Where there is none the last one is EMPTY."""
        page, used, known = self.device.table_of(row, tier, hi)
        place = used.nonzero()[:, 0]
        page, known = page[place], known[:, place]
        return page, torch.cat([known, self.extremes(tier, page, known)])

    def extremes(self, tier: int, page: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """[2, n] int32: the first and last position of each page [n] of a tier that lies in its range, of [3, n] as
        above. Where there is none the last one is EMPTY."""
        state = self.device.state
        positions, at_once = state.tiers[tier].positions, max(MEASURED_SLOTS // state.fmt.layouts[tier].tokens, 1)
        found = [torch.empty(2, 0, dtype=torch.int32, device=state.device)]
        for some, low, high in zip(*(x.split(at_once) for x in (page, known[1], known[2])), strict=True):
            if some.numel():
                at = positions[some].int()  # [at_once, tokens]
                inside = (at >= low.unsqueeze(1)) & (at < high.unsqueeze(1))
                least = torch.where(inside, at, torch.iinfo(torch.int32).max).amin(1)
                found.append(torch.stack([least, torch.where(inside, at, EMPTY).amax(1)]))
        return torch.cat(found, dim=1)

    def copy_out(self, pages: torch.Tensor, runs: list[Run], staging: torch.Tensor | None) -> None:
        """The bytes of ``pages`` ([n] int64) go to the host pages of ``runs``, through a ``staging`` buffer of the
        device if there is one."""
        copy_out(self.device.state.pages, pages, self.host, runs, staging)

    # Restoring

    def needed(self, parts: Sequence[tuple[SavedRow, int, int | None]]) -> list[Needed]:
        """What a segment of each part takes: of the tokens at positions [lo, hi), without ``hi`` of all from ``lo`` on.
        With several ranks all have to call it."""
        mine = [
            [saved.pages_from(lo, hi), *self._counts(saved, saved.holds(lo, hi)).max(axis=0)] for saved, lo, hi in parts
        ]
        worst = self.ranks.largest(np.array(mine, dtype=np.int64).ravel()).reshape(len(parts), -1).tolist()
        return [Needed(pages, tuple(entries)) for pages, *entries in worst]

    def _counts(self, saved: SavedRow, chosen: np.ndarray) -> np.ndarray:
        """[heads, T] int64: entries of the ``chosen`` pages."""
        heads, tiers = self.device.geometry.heads, len(self.device.fmt.tiers)
        which = saved.head[chosen].astype(np.int64) * tiers + saved.tier[chosen]
        return np.bincount(which, minlength=heads * tiers).reshape(heads, tiers)

    def restore(self, saved: SavedRow, lo: int, needed: Needed | None = None) -> Segment | None:
        """As ``restore_all``, from position ``lo`` to the last token that is saved. ``needed``: if it is known."""
        takes = self.needed([(saved, lo, None)]) if needed is None else [needed]
        segments = self.restore_all([(saved, Segment(0, lo, saved.hi, first=lo, end=saved.end))], takes)
        return None if segments is None else segments[0]

    def restore_all(self, wanted: Sequence[tuple[SavedRow, Segment]], needed: Sequence[Needed]) -> list[Segment] | None:
        """Segments for the prefix cache, in pages of the ring, of saved tokens at the positions of the ``wanted``
        segments, and with all else that these say. The caller has made sure of the pages. Nothing waits for the device,
        and one part takes about as many launches as many do.

        Args:
            needed: what ``needed`` says of the wanted positions.

        Returns None, changing nothing, if no segment row or table block is left, or on any rank no memory of the device
        to list the pages. With several ranks all have to call it.
        """
        device, state = self.device, self.device.state
        rows = self._take_rows(needed)
        if rows is None:
            return None
        parts = [Chosen.of(saved, part.lo, part.hi) for saved, part in wanted]
        counts = np.stack([self._counts(part.saved, part.pages) for part in parts])  # [parts, heads, T]
        failed = False
        with device.launching(reads_pages=False):
            try:
                chosen = np.concatenate([part.pages for part in parts])
                pages = self._next_pages(int(chosen.sum()))
                places = self._places(chosen, pages)
                copies = self._copies(parts, chosen, places)
                device.bring(copies, rows, unread=all(x.begins for x in parts))  # while the rest is worked out
                flat, low, high = self._listed(rows, parts, counts)
                entries = device.to_device(counts).int().view(len(rows), state.num_layers, state.num_heads, -1)
                at = device.to_device(rows)
            except torch.OutOfMemoryError:
                failed = True
            if self.ranks.largest(np.array([int(failed)]))[0]:
                for row in rows:
                    self.segments.return_row(row)
                return None
            state.counters[0] += len(pages)
            state.refcount.index_fill_(0, pages, 1)
            put_entries(state, flat, pages, low, high)
            state.entries[at] = state.kept_entry[at] = state.own_entry[at] = entries
            state.own_tokens.index_fill_(0, at, 0)
            state.hole.index_fill_(0, at, EMPTY)
        self.counts.record(-sum(x.pages for x in needed), exactly=True)
        segments = [replace(part, row=row) for (_, part), row in zip(wanted, rows, strict=True)]
        for segment in segments:
            self.segments.add(segment)
        return segments

    def _take_rows(self, needed: Sequence[Needed]) -> list[int] | None:
        """A segment row for each, with its table blocks; None, changing nothing, if there are not so many."""
        rows: list[int] = []
        for x in needed:
            row = self.segments.take_row(x.entries)
            if row is None:
                for taken in rows:
                    self.segments.return_row(taken)
                return None
            rows.append(row)
        return rows

    def _next_pages(self, count: int) -> torch.Tensor:
        """[count] int64 pages that the ring, which has so many, gives next."""
        state = self.device.state
        place = (state.counters[0] + torch.arange(count, device=state.device)) % state.num_pages
        return state.ring[place].long()

    def _copies(
        self, parts: Sequence[Chosen], chosen: np.ndarray, places: torch.Tensor
    ) -> list[tuple[int, Callable[[], Any]]]:
        """What brings the bytes of host pages to their ``places``, by the first layer of each group of layers, as of
        ``PageDevice.bring``."""
        state = self.device.state
        several = len(chosen) * self.device.fmt.page_bytes >= LEAST_BY_LAYER
        layers = layer_groups(state.num_layers) if several else [0]
        copies: list[list[tuple[list[Run], np.ndarray, torch.Tensor]]] = [[] for _ in layers]
        at = 0
        for part in parts:
            count = len(part.pages)
            groups = part.by_layer(layers, state.num_heads) if several else [[(0, count)]]
            for some, ranges in zip(copies, groups, strict=True):
                for first, end in ranges:
                    here = slice(at + first, at + end)
                    some.append(([*part_of(part.runs, first, end - first)], chosen[here], places[here]))
            at += count
        return [(layer, partial(self._copy_in, some)) for layer, some in zip(layers, copies, strict=True)]

    def _copy_in(self, copies: Sequence[tuple[list[Run], np.ndarray, torch.Tensor]]) -> list[torch.Tensor]:
        """The bytes of host pages of runs go to their places, those that are chosen; the places."""
        for runs, chosen, places in copies:
            copy_in(self.device.state.pages, self.host, runs, chosen, places, self._staging)
        return [places for _, _, places in copies]

    def _places(self, chosen: np.ndarray, pages: torch.Tensor) -> torch.Tensor:
        """[n] int64, where the bytes of saved pages go: those of the ``chosen``, in order, to ``pages``, others to the
        scratch page, which nobody reads."""
        state = self.device.state
        places = torch.full((len(chosen),), state.scratch_page, dtype=torch.int64, device=state.device)
        places[self.device.to_device(chosen.nonzero()[0])] = pages
        return places

    def _listed(
        self, rows: list[int], parts: Sequence[Chosen], counts: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[n] each, of the chosen pages of all parts in order: where their entries stand in the tables of ``rows``,
        which have blocks for them, and their position ranges.

        Args:
            counts: [parts, heads, T] entries.
        """
        state, tiers = self.device.state, counts.shape[-1]
        part = np.repeat(np.arange(len(parts)), [int(x.pages.sum()) for x in parts])
        of_pages = [np.concatenate(column) for column in zip(*(x.columns() for x in parts), strict=True)]
        tier, head, low, high = of_pages
        column = np.empty(len(tier), dtype=np.int64)
        for number in range(tiers):  # pages of a tier are in order of parts, and of heads in there
            here, entries = tier == number, counts[..., number].ravel()
            first = np.repeat(entries.cumsum() - entries, entries)
            column[here] = table_column(state, number, np.arange(len(first)) - first)
        numbers = self.device.to_device(np.stack([np.array(rows)[part], head, column, low, high]))
        row_at, head_at, column_at, low_at, high_at = numbers.unbind(0)
        return head_index(state, row_at, head_at, column_at), low_at, high_at

    # The end

    def drop(self, saved: SavedRow) -> None:
        """Nobody wants it any more. What is being copied is copied before its memory is written again."""
        self.held.remove(saved)
        self.host.give(saved.runs)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the host's pages are free, or those of one saved row or prefix each."""
        self.host.check_integrity([*(run for saved in self.held for run in saved.runs), *self._elsewhere()])
        for saved in self.held:
            saved.check_integrity()
