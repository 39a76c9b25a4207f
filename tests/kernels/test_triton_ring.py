"""Who gets which page: the same in every order of a launch's programs, and what the references say."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from triton.runtime import interpreter

from sglang_diffkv.kernels import triton_ring
from sglang_diffkv.kernels.allocate import triton as allocate
from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.kernels.attach.reference import freeze
from sglang_diffkv.kernels.compact_step import triton as compact_step
from sglang_diffkv.kernels.copy_compact import triton as copy_compact
from sglang_diffkv.kernels.decode_attention.triton import FoundTokens
from sglang_diffkv.kernels.prefix_sum.reference import exclusive_prefix_sum as reference
from sglang_diffkv.kernels.prefix_sum.triton import exclusive_prefix_sum, return_spans, take_spans
from sglang_diffkv.kernels.table import max_entries, row_table
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.ops import ReferenceOps
from sglang_diffkv.ops.triton import TritonOps
from tests.kernels.test_triton_compact_step import pack, searches
from tests.kernels.triton_helpers import (
    DEVICE,
    FOUR,
    THREE,
    clone_state,
    make_format,
    make_manager,
    vectors,
    with_between,
)
from tests.policies import diffkv_policy

PAGES, LENGTH, WINDOW = 32, 60, 4
"""Pages of the ring, for all of which there is use; tokens of a row at most; tokens that stay in the high tier."""
ROWS, SEGMENTS = range(1, 8), range(8, 12)

Order = Callable[[int], list[int]]


def ascending(count: int) -> list[int]:
    return list(range(count))


def descending(count: int) -> list[int]:
    return list(range(count))[::-1]


def shuffled(count: int) -> list[int]:
    order = list(range(count))
    random.Random(count).shuffle(order)
    return order


@contextmanager
def programs(order: Order) -> Iterator[None]:
    """Launches run their programs in this order. A GPU runs them as it likes."""
    if DEVICE != "cpu":
        yield
        return
    builder = interpreter.interpreter_builder
    usual = builder.set_grid_idx

    def reordered(*index: int) -> None:
        usual(*(order(count)[at] for at, count in zip(index, builder.grid_dim, strict=True)))

    builder.set_grid_idx = reordered
    try:
        yield
    finally:
        builder.set_grid_idx = usual


@pytest.mark.parametrize("count", [1, 127, 128, 1024, 1025, 5000])
def test_prefix_sum(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    demand = torch.randint(0, 4, (count,), dtype=torch.int32, generator=generator).to(DEVICE)
    demand[count // 2] = 2**31 - 1  # sums do not fit in 32 bits
    out = torch.full((count + 3,), -7, device=DEVICE)
    exclusive_prefix_sum(demand, out)
    offset, total = reference(demand)
    assert torch.equal(out[:count], offset) and int(out[count]) == int(total)
    assert out[count + 1 :].tolist() == [-7, -7]


@pytest.mark.parametrize(("wanted", "taken"), [([2, 0, 3, 1], 6), ([4, 4, 0, 1], 7), ([0, 0, 0], 0), ([], 0)])
def test_spans_of_the_ring(wanted: list[int], taken: int) -> None:
    """Seven pages are free."""
    demand = torch.tensor(wanted, dtype=torch.int32, device=DEVICE)
    offset, total = reference(demand)
    counters = torch.tensor([5, 12], device=DEVICE)
    out = torch.zeros(len(wanted) + 1, dtype=torch.int64, device=DEVICE)
    take_spans(counters, demand, out)
    assert counters.tolist() == [5 + taken, 12] and out.tolist() == [*(offset + 5).tolist(), 5 + int(total)]
    return_spans(counters, demand, out)
    assert counters.tolist() == [5 + taken, 12 + int(total)]
    assert out.tolist() == [*(offset + 12).tolist(), 12 + int(total)]


def free_pages(state: PageState) -> torch.Tensor:
    """Page ids in the ring, in the order in which they will be taken."""
    taken, put = state.counters.tolist()
    return state.ring[torch.arange(taken, put, device=DEVICE) % state.num_pages]


def assert_same_pages(state: PageState, twin: PageState) -> None:
    """Equal page for page: tables, references and the ring's order."""
    for name in ("counters", "entries", "kept_entry", "own_entry", "own_tokens", "hole", "fault", "refcount"):
        assert torch.equal(getattr(state, name), getattr(twin, name)), name
    rows = torch.arange(state.entries.shape[0], device=DEVICE)
    for tier in range(len(state.tiers)):
        width = max_entries(state, rows, tier)
        for got, expected in zip(row_table(state, rows, tier, width), row_table(twin, rows, tier, width), strict=True):
            assert torch.equal(got, expected)
    free = free_pages(state)
    assert torch.equal(free, free_pages(twin))
    assert torch.equal(free.sort().values, (state.refcount[: state.num_pages] == 0).nonzero().flatten().int())


def assert_same_bits(state: PageState, twin: PageState) -> None:
    """Equal but for the scratch page, where tokens land that no page was left for."""
    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor) and name != "pages":
            assert torch.equal(value, getattr(twin, name)), name
    assert torch.equal(state.pages[:-1], twin.pages[:-1])


class Twins:
    """Two states that go through the same random operations, each by its ops."""

    def __init__(self, manager: PageManager, seed: int):
        self.manager, self.state, self.twin = manager, manager.state, clone_state(manager.state)
        self.policy = manager.policy
        self.chance, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        shape = (manager.state.num_layers, manager.state.num_heads, LENGTH)
        self.scores = torch.rand(shape, generator=self.generator).to(DEVICE) ** 2 / (LENGTH / 4)
        self.lengths: dict[int, int] = {}
        self.prompts: set[int] = set()  # rows that decode has not seen yet
        self.segments: dict[int, int] = {}  # row and the end of its tokens
        self.done: dict[str, int] = {}
        self.faults = 0

    def both(self, run: Callable[[ReferenceOps | TritonOps, PageState], None], name: str) -> None:
        """Carry out one operation on both states and compare them."""
        raise NotImplementedError

    def flush(self) -> None:
        self.manager.space.flush()
        self.twin.row_blocks.copy_(self.state.row_blocks)

    def step(self, rows: list[int], counts: list[int]) -> list[int]:
        """Slots and pages for new tokens, then the tokens; returns the rows that got their pages."""
        for row, count in zip(rows, counts, strict=True):
            self.manager.space.append(row, count)
        self.flush()
        index, new = torch.tensor(rows, device=DEVICE), torch.tensor(counts, device=DEVICE)
        self.both(lambda ops, state: ops.reserve(index, new, max(counts)), "reserve")
        start = torch.tensor([self.lengths.get(row, 0) for row in rows], device=DEVICE)
        owner = torch.arange(len(rows), device=DEVICE).repeat_interleave(new)
        offset = torch.arange(sum(counts), device=DEVICE) - (new.cumsum(0) - new)[owner]
        for layer in range(self.state.num_layers):
            new_tokens = vectors(self.state, sum(counts), self.generator)
            for state in (self.state, self.twin):
                append(state, layer, *new_tokens, index[owner], offset, start[owner] + offset)
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] = self.lengths.get(row, 0) + count
        return self.without_faults(rows)

    def without_faults(self, rows: list[int]) -> list[int]:
        """Release the rows for which the ring was empty."""
        lost = [row for row in rows if self.state.fault[row]]
        self.faults += len(lost)
        for row in lost:
            self.release(row)
        return [row for row in rows if row not in lost]

    def score(self, state: PageState, row: int) -> None:
        """Scores that depend on head and position alone."""
        rows, view = torch.tensor([row], device=DEVICE), state.tiers[0]
        page, _, _ = (x[0] for x in row_table(state, rows, 0, max_entries(state, rows, 0)))  # [L, H, E]
        position = view.positions[page].clamp(0, LENGTH - 1).long()  # [L, H, E, tokens]
        view.scores[page] = self.scores.gather(2, position.flatten(2)).view(position.shape)

    def prompt(self) -> None:
        """A prompt's next chunk for a few rows, new or not, then compaction of some."""
        fresh = [row for row in ROWS if row not in self.lengths]
        rows = [*fresh, *(row for row in sorted(self.prompts) if self.lengths[row] < LENGTH - 20)]
        rows = self.chance.sample(rows, min(len(rows), self.chance.randint(1, 3)))
        if not rows:
            return
        counts = [self.chance.randint(2, 19) for _ in rows]
        self.prompts.update(rows)
        for row in self.step(rows, counts):
            self.score(self.state, row)
            self.score(self.twin, row)
            if self.lengths[row] > WINDOW and self.chance.random() < 0.7:
                self.compact(row, self.lengths[row])

    def compact(self, row: int, length: int) -> None:
        self.both(lambda ops, state: ops.compact_prompts([(row, length)], self.policy), "compact_prompt")

    def decode(self) -> None:
        rows = [row for row in self.lengths if self.lengths[row] < LENGTH - 1]
        self.chance.shuffle(rows)
        rows = self.step(rows, [1] * len(rows)) if rows else []
        if not rows:
            return
        self.prompts.difference_update(rows)
        index = torch.tensor(rows, device=DEVICE)
        lengths = torch.tensor([self.lengths[row] for row in rows], device=DEVICE)
        scores = searches(self.state, index, int(lengths.max()), WINDOW, self.generator)
        packed = FoundTokens.create(self.state, len(rows))
        packed.packed.fill_(2**63 - 1)
        pack(scores, packed)

        def compact(ops: ReferenceOps | TritonOps, state: PageState) -> None:
            found = packed if isinstance(ops, TritonOps) else scores
            ops.compact_step(index, lengths, found)

        self.both(compact, "compact_step")
        self.without_faults(rows)

    def share(self) -> None:
        """A segment takes references to a row's pages, which the row does not write any more; another row may too."""
        rows = [row for row in self.lengths if row not in self.prompts]
        free = [row for row in SEGMENTS if row not in self.segments]
        if not rows or not free:
            return
        row, segment = self.chance.choice(rows), free[0]
        self.segments[segment] = self.lengths[row]
        self.attach(segment, row, self.lengths[row])
        freeze(self.state, row)
        freeze(self.twin, row)
        self.manager.space.freeze(row)
        fresh = [row for row in ROWS if row not in self.lengths]
        if fresh:
            self.lengths[fresh[0]] = self.chance.randint(1, self.segments[segment])
            self.attach(fresh[0], segment, self.lengths[fresh[0]])
            self.prompts.add(fresh[0])

    def attach(self, target: int, source: int, end: int) -> None:
        self.manager.space.extend(target, self.manager.space.bound(source))
        self.flush()
        self.both(lambda ops, state: ops.attach(target, source, 0, end), "attach")

    def copy(self) -> None:
        """A row of its own with the tokens of a segment, in two parts."""
        fresh = [row for row in ROWS if row not in self.lengths]
        if not fresh or not self.segments:
            return
        row, (segment, end) = fresh[0], self.chance.choice(sorted(self.segments.items()))
        cut = self.chance.randint(0, end)
        parts = [(segment, lo, hi) for lo, hi in ((0, cut), (cut, end)) if lo < hi]
        if not parts:
            return
        self.manager.space.extend(row, (LENGTH // 8 + 2,) * len(self.manager.fmt.tiers))
        self.flush()
        self.lengths[row] = end
        self.both(lambda ops, state: ops.copy_compact(row, parts, end, self.policy, None), "copy_compact")
        self.without_faults([row])

    def trim(self) -> None:
        if self.segments:
            row = self.chance.choice(sorted(self.segments))
            self.segments[row] = end = self.chance.randint(0, self.segments[row])
            self.both(lambda ops, state: ops.trim(row, end), "trim")

    def end(self) -> None:
        """Of a row or a segment."""
        rows = sorted([*self.lengths, *self.segments])
        if rows:
            self.release(self.chance.choice(rows))

    def release(self, row: int) -> None:
        self.both(lambda ops, state: ops.release(row), "release")
        self.manager.space.release(row)
        self.flush()
        self.lengths.pop(row, None)
        self.segments.pop(row, None)
        self.prompts.discard(row)

    def live(self, operations: int) -> None:
        """Operations of each kind, then random ones, then the end of all rows."""
        kinds = [self.prompt, self.decode, self.share, self.copy, self.trim, self.end]
        for kind in [*kinds, *self.chance.choices(kinds, [5, 4, 2, 2, 2, 3], k=operations)]:
            kind()
        for row in [*self.lengths, *self.segments]:
            self.release(row)
        assert not self.state.refcount.any()


class Reordered(Twins):
    """The same kernels, whose programs run in another order on the twin."""

    def __init__(self, manager: PageManager, seed: int, order: Order):
        super().__init__(manager, seed)
        self.order = order
        self.ops = [TritonOps(state, self.policy, 2, LENGTH) for state in (self.state, self.twin)]

    def both(self, run: Callable[[ReferenceOps | TritonOps, PageState], None], name: str) -> None:
        self.done[name] = self.done.get(name, 0) + 1
        for ops, state, order in zip(self.ops, (self.state, self.twin), (ascending, self.order), strict=True):
            with programs(order):
                run(ops, state)
        assert_same_bits(self.state, self.twin)


class Specified(Twins):
    """The kernels, and on the twin the references."""

    def __init__(self, manager: PageManager, seed: int):
        super().__init__(manager, seed)
        self.kernels, self.reference = (
            TritonOps(self.state, self.policy, 2, LENGTH),
            ReferenceOps(self.twin, self.policy),
        )

    def both(self, run: Callable[[ReferenceOps | TritonOps, PageState], None], name: str) -> None:
        """Compaction of a prompt fills the row's own pages while it reads them, and not pages of the ring as the
        reference does: the number of pages is the reference's, and the twin goes on with the kernel's."""
        self.done[name] = self.done.get(name, 0) + 1
        run(self.kernels, self.state)
        run(self.reference, self.twin)
        if name == "compact_prompt" and not self.twin.fault.any():
            assert torch.equal(self.state.entries, self.twin.entries)
            assert int(self.state.counters.diff()) == int(self.twin.counters.diff())
        if name == "compact_prompt":
            for tensor, value in vars(clone_state(self.state)).items():
                if isinstance(value, torch.Tensor):
                    getattr(self.twin, tensor).copy_(value)
        assert_same_pages(self.state, self.twin)


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a few requests takes several programs."""
    for module in (triton_ring, allocate, compact_step, copy_compact):
        monkeypatch.setattr(module, "HEADS", 2)


def small_ring(tiers: str) -> PageManager:
    manager = make_manager(make_format(tiers, page_tokens=8), pages=PAGES, layers=1, heads=3, window=WINDOW)
    manager.policy = with_between(diffkv_policy(1.5, 0.3, WINDOW), len(manager.fmt.tiers))
    manager.state.counters += PAGES - 20  # the ring wraps
    return manager


EVERY = {"reserve", "compact_step", "compact_prompt", "copy_compact", "attach", "release", "trim"}


@pytest.mark.cover(1)
@pytest.mark.parametrize("tiers", ["K8V4 K4V2", "K8V4", pytest.param(FOUR, marks=pytest.mark.full)])
@pytest.mark.parametrize("order", [descending, shuffled])
@pytest.mark.usefixtures("small_programs")
def test_pages_do_not_depend_on_the_order_of_programs(tiers: str, order: Order) -> None:
    twins = Reordered(small_ring(tiers), 5, order)
    twins.live(20)
    assert set(twins.done) == EVERY
    assert twins.faults > 0 and int(twins.state.counters[1]) > 3 * PAGES


@pytest.mark.parametrize("tiers", ["K8V4 K4V2", "K8V4", FOUR, pytest.param(THREE, marks=pytest.mark.full)])
@pytest.mark.usefixtures("small_programs")
def test_pages_are_the_reference_s(tiers: str) -> None:
    twins = Specified(small_ring(tiers), 7)
    twins.live(20)
    assert set(twins.done) == EVERY
    assert twins.faults > 0 and int(twins.state.counters[1]) > 3 * PAGES
