"""Row counts and measured positions: Triton and reference against plain loops and what the manager counts itself."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.kernels.compact_step.reference import StepMoves, compact_step
from sglang_diffkv.kernels.count_owners import triton as count_owners_triton
from sglang_diffkv.kernels.count_owners.reference import count_owners as count_owners_reference
from sglang_diffkv.kernels.count_rows import triton as count_rows_triton
from sglang_diffkv.kernels.count_rows.reference import count_rows as count_rows_reference
from sglang_diffkv.kernels.measure import reference as measure_module
from sglang_diffkv.kernels.measure import triton as measure_triton
from sglang_diffkv.kernels.measure.reference import measure as measure_reference
from sglang_diffkv.kernels.sum_scores import triton as sum_scores_triton
from sglang_diffkv.kernels.sum_scores.reference import sum_scores as sum_scores_reference
from sglang_diffkv.kernels.table import max_entries, row_table
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.page_manager import PageManager
from tests.helpers import begin_step, table_of
from tests.kernels.triton_helpers import DEVICE, add_prompt, clone_state, make_format, make_manager, vectors
from tests.pages.usage_oracle import page_owners

FORMATS = ["K8V4 K4V2", "BF16 K8V4", "K8V4", "BF16", "K8V8 K8V4 K4V4 K4V2"]
FORMATS += [pytest.param("BF16 K8V4 K4V2", marks=pytest.mark.full)]

HORIZONS = [
    (0, True, torch.int64),
    (1, True, torch.int32),
    (1, False, torch.int64),
    (2, True, torch.int64),
    (7, True, torch.int64),
    (40, False, torch.int32),
]
"""Steps, whether the low tier grows, type of the row numbers."""


def decode_step(manager: PageManager, rows: list[int], generator: torch.Generator) -> None:
    """A token for each row, then a random token of most heads is demoted or dropped, which leaves a hole."""
    state, start = manager.state, [manager.rows.length(row) for row in rows]
    begin_step(manager, rows, [1] * len(rows), start)
    index, position = torch.tensor(rows, device=DEVICE), torch.tensor(start, device=DEVICE)
    for layer in range(state.num_layers):
        append(state, layer, *vectors(state, len(rows), generator), index, torch.zeros_like(index), position)
    used = state.own_tokens[index, :, :, 0]  # [B, L, H]
    slot = (torch.rand(used.shape, generator=generator).to(DEVICE) * used).long()
    choice = torch.rand(used.shape, generator=generator).to(DEVICE)
    choice[(used < 2) | (slot == state.write_slot[index])] = 1.0
    demoted = 0.5 if len(state.tiers) > 1 else 0.0
    demote = torch.where(choice < demoted, slot, -1)
    drop = torch.where((choice >= demoted) & (choice < 0.7), slot, -1)
    tier = 1 + slot % max(len(state.tiers) - 1, 1)
    compact_step(state, index, StepMoves(demote, drop, torch.full_like(slot, -1), tier))


def busy_manager(tiers: str) -> PageManager:
    """Rows of every kind: shared, with one and two attached parts, frozen, with holes, of one token, empty."""
    manager = make_manager(make_format(tiers, 96, 64, page_tokens=4), pages=700, layers=3, heads=3, window=4)
    generator = torch.Generator().manual_seed(7)
    manager.state.counters += 611  # the ring wraps
    add_prompt(manager, 1, 83, generator)
    add_prompt(manager, 2, 21, generator)
    add_prompt(manager, 4, 1, generator)
    segment = manager.segments.share(1, 0, 83)
    assert segment is not None
    manager.attach_prefix(3, [(segment, 0, 37)])
    manager.attach_prefix(6, [(segment, 0, 18), (segment, 18, 59)])
    manager.ops.trim(segment.row, 61)
    segment.hi = 61
    add_prompt(manager, 3, 19, generator)
    manager.prompts.share_min_tokens = 30
    add_prompt(manager, 5, 33, generator)
    add_prompt(manager, 7, 31, generator)
    for _ in range(3):
        decode_step(manager, [5, 2, 3], generator)
    check_integrity(manager)
    assert (manager.state.hole[2] >= 0).any() and (manager.state.hole[2] < 0).any()
    assert manager.rows.frozen(7) == 31 and not manager.state.own_tokens[7].any()
    return manager


def starved_manager() -> PageManager:
    """Two rows for which the ring was empty, so that entries point at the scratch page, which looks used."""
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=4), pages=41, layers=3, heads=2)
    begin_step(manager, [1, 2], [9, 3], [0, 0])
    begin_step(manager, [1, 2], [30, 1], [9, 3])
    state = manager.state
    for view in state.tiers:
        view.positions[state.scratch_page] = 1
    assert state.fault[1] == 1
    return manager


def on_cpu(state: PageState) -> PageState:
    """A copy whose tensors NumPy reads."""
    twin = copy.copy(clone_state(state))
    for name, value in vars(twin).items():
        if isinstance(value, torch.Tensor):
            setattr(twin, name, value.cpu())
    return twin


def pages_taken(own: int, used: int, hole: bool, tokens: int, steps: int) -> int:
    """Pages that ``steps`` single tokens take, one after the other."""
    taken = 0
    for _ in range(steps):
        if hole:
            hole = False
            continue
        if used == (own + taken) * tokens:
            taken += 1
        used += 1
    return taken


def full_heads(state: PageState, row: int, low_grows: bool) -> int:
    """Pages that the row's next decode step can take: one for each head whose own high slots are all in use, and one
    where those of a lower tier are."""
    own = state.entries[row] - state.own_entry[row]  # [L, H, T]
    full = state.own_tokens[row] >= own * torch.tensor([x.tokens for x in state.fmt.layouts], device=state.device)
    full[..., 0] &= state.hole[row] < 0
    return int(full[..., 0].sum() + (full[..., 1:].any(-1).sum() if low_grows else 0))


def expected_counts(
    state: PageState, rows: list[int], steps: int, low_grows: bool, used: torch.Tensor | None = None
) -> list[list[int]]:
    """What ``count_rows`` gives, head by head."""
    into = torch.ones(state.num_layers, state.num_heads, len(state.tiers), dtype=torch.int32) if used is None else used
    of_heads = into.flatten(0, 1).tolist()
    out = []
    for row in rows:
        tiers = [(t, x.tokens) for t, x in enumerate(state.fmt.layouts)]
        entries = state.entries[row].flatten(0, 1).tolist()  # [L * H][T]
        own, used, kept = (x[row].flatten(0, 1).tolist() for x in (state.own_entry, state.own_tokens, state.kept_entry))
        hole = state.hole[row].flatten().tolist()
        demand = 0
        for i in range(len(entries)):
            high, *lower = (
                pages_taken(entries[i][t] - own[i][t], used[i][t], t == 0 and hole[i] >= 0, tokens, steps)
                for t, tokens in tiers
            )
            lower = [pages * here for pages, here in zip(lower, of_heads[i][1:], strict=True)]
            demand += high + low_grows * min(sum(lower), steps)  # a step moves one token
        most = [max(column) for column in zip(*entries)]
        total = sum(map(sum, entries))
        private = total - sum(map(sum, kept))
        out.append([demand, total, private, int(state.fault[row]), *most, *([0] * len(most))])
    return [*out, [*state.counters.tolist(), 0, 0, *([0] * 2 * len(state.tiers))]]


def expected_measure(state: PageState, row: int, lo: int, hi: int) -> np.ndarray:
    """What ``measure`` gives for one row of a state in CPU memory, entry by entry."""
    tiers = len(state.tiers)
    out = np.zeros((state.num_layers, state.num_heads, tiers + 1), dtype=np.int32)
    for tier, view in enumerate(state.tiers):
        page, first, end = table_of(state, row, tier)
        for layer, head in np.ndindex(*out.shape[:2]):
            for entry in range(int(state.entries[row, layer, head, tier])):
                position = view.positions[int(page[layer, head, entry])].numpy()
                least, limit = max(first[layer, head, entry], lo), min(end[layer, head, entry], hi)
                held = int(((position >= least) & (position < limit)).sum())
                out[layer, head, tier] += held
                out[layer, head, tiers] += held > 0
    return out


def row_usage(state: PageState, row: int, start: int, end: int) -> list[int]:
    """Tokens of each tier and pages of a whole row at positions [start, end)."""
    rows, counts, pages = torch.tensor([row], device=DEVICE), [], 0
    for tier, view in enumerate(state.tiers):
        page, lo, hi = row_table(state, rows, tier, max_entries(state, rows, tier))  # [1, L, H, E]
        position = view.positions[page]  # [1, L, H, E, tokens]
        held = (position >= lo.clamp(min=start).unsqueeze(4)) & (position < hi.clamp(max=end).unsqueeze(4))
        counts.append(int(held.sum()))
        pages += int(held.any(4).sum())
    return [*counts, pages]


def check_counts(state: PageState, rows: list[int]) -> None:
    """Both ops against the plain loop, for several horizons, where all heads use all tiers and where they do not."""
    twin, draw = on_cpu(state), torch.Generator().manual_seed(5)
    used = torch.randint(0, 2, (state.num_layers, state.num_heads, len(state.tiers)), generator=draw)
    used[..., 0] = 1
    used = used.int().to(DEVICE)
    for steps, low_grows, dtype in HORIZONS:
        index = torch.tensor(rows, dtype=dtype, device=DEVICE)
        for into in (None, used):
            expected = expected_counts(twin, rows, steps, low_grows, None if into is None else into.cpu())
            reference = count_rows_reference(state, index, steps=steps, low_grows=low_grows, used=into)
            got = count_rows_triton.count_rows(state, index, steps=steps, low_grows=low_grows, used=into)
            assert reference.dtype == got.dtype == torch.int64
            assert reference.tolist() == expected
            assert got.tolist() == expected


def check_measure(state: PageState, rows: list[int], ranges: list[tuple[int, int]]) -> None:
    """Both ops against the plain loop."""
    index = torch.tensor(rows, device=DEVICE)
    lo, hi = torch.tensor(ranges, device=DEVICE).unbind(1)
    lo, hi = lo.contiguous(), hi.contiguous()
    twin = on_cpu(state)
    expected = torch.from_numpy(np.stack([expected_measure(twin, r, *x) for r, x in zip(rows, ranges, strict=True)]))
    reference, got = measure_reference(state, index, lo, hi), measure_triton.measure(state, index, lo, hi)
    assert reference.dtype == got.dtype == torch.int32
    assert torch.equal(reference.cpu(), expected)
    assert torch.equal(got.cpu(), expected)


@pytest.mark.cover(1)
@pytest.mark.parametrize("block", [0, 4])
@pytest.mark.parametrize("tiers", FORMATS)
def test_counts_and_positions(tiers, block, monkeypatch):
    if block:  # several iterations
        monkeypatch.setattr(count_rows_triton, "HEADS", block)
        monkeypatch.setattr(measure_triton, "ENTRIES", block)
    manager = busy_manager(tiers)
    rows = [5, 1, 0, 2, 3, 15, 4, 7, 6]
    check_counts(manager.state, rows)
    check_counts(manager.state, [3])
    lengths = [61 if row == 15 else manager.rows.length(row) for row in rows]
    check_measure(manager.state, rows, [(0, n) for n in lengths])
    check_measure(
        manager.state, rows, [(5, 29), (0, 2**40), (0, 9), (9, 9), (37, 50), (18, 60), (0, 1), (30, 7), (2**33, 2**34)]
    )


@pytest.mark.parametrize("spans", [(), (0, 9, 0)])
@pytest.mark.parametrize("tiers", FORMATS)
def test_tallies_are_sums_of_what_is_measured(tiers: str, spans: tuple[int, ...]) -> None:
    manager = busy_manager(tiers)
    state = replace(manager.state, attention_spans=spans) if spans else manager.state
    rows, columns = [5, 1, 15, 4], len(state.fmt.tiers) + 2
    found = [torch.zeros(len(rows) + 1, columns, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    again = measure_triton.prepare_tally(state)
    for number, row in enumerate(rows):
        hi = 61 if row == 15 else manager.rows.length(row)
        again(row, hi, found[0], number)
        measure_module.tally(state, row, hi, found[1], number)
        counts = expected_measure(on_cpu(state), row, 0, hi)
        assert found[0][number, :-1].tolist() == counts.sum((0, 1)).tolist()
        assert int(found[0][number, -1]) == (counts[1, :, :-1].sum() if spans else 0)
    assert torch.equal(found[0], found[1]) and found[0][:-1, 0].any() and not found[0][-1].any()


@pytest.mark.cover(1)
@pytest.mark.parametrize("tiers", FORMATS)
def test_what_is_added_are_sums_of_what_is_measured(tiers: str) -> None:
    """Into columns of a larger tensor, of any alignment, whatever stands there."""
    state = busy_manager(tiers).state
    again, count, twin = measure_triton.prepare_add_held(state), len(state.tiers), on_cpu(state)
    for parts in ([(5, 0, 33), (1, 7, 50), (15, 30, 61)], [(3, 0, 56)], [(4, 0, 2**40), (2, 3, 9)], []):
        numbers = torch.tensor([0, *(x for column in zip(*parts, strict=True) for x in column)], device=DEVICE)[1:]
        columns = numbers.view(3, len(parts)).unbind(0)
        found = [torch.full((len(parts) + 2, 3 + count), 5, dtype=torch.int64, device=DEVICE) for _ in range(2)]
        again(*columns, found[0][1:-1, 3:])
        measure_module.add_held(state, *columns, found[1][1:-1, 3:])
        expected = np.full(found[0].shape, 5)
        for number, part in enumerate(parts):
            expected[1 + number, 3:] += expected_measure(twin, *part)[..., :-1].sum((0, 1))
        assert found[0].tolist() == found[1].tolist() == expected.tolist()


def test_what_may_be_added_to_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stood in the memory of what is counted."""
    state = busy_manager("K8V4 K4V2").state
    rows = torch.tensor([1, 5, 3], device=DEVICE)
    expected = count_rows_reference(state, rows, steps=1, low_grows=True).tolist()
    monkeypatch.setattr(torch, "empty", lambda *shape, **named: torch.full(shape, -9, **named))
    assert count_rows_triton.count_rows(state, rows, steps=1, low_grows=True).tolist() == expected
    assert {x for row in expected for x in row[-2:]} == {0}


def test_scratch_page_does_not_count():
    manager = starved_manager()
    check_counts(manager.state, [2, 1])
    check_measure(manager.state, [2, 1], [(0, 4), (0, 2**31)])
    rows, zero = torch.tensor([1], device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert not measure_triton.measure(manager.state, rows, zero, zero + 39).any()


@pytest.mark.parametrize("tiers", ["K8V4 K4V2", "K8V4"])
def test_no_rows(tiers):
    state = busy_manager(tiers).state
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    for op in (count_rows_reference, count_rows_triton.count_rows):
        assert op(state, none, steps=1, low_grows=True).tolist() == [
            [*state.counters.tolist(), 0, 0, *([0] * 2 * len(state.tiers))]
        ]
    for op in (measure_reference, measure_triton.measure):
        assert op(state, none, none, none).shape == (0, 3, 3, len(state.tiers) + 1)


@pytest.mark.cover(1)
@pytest.mark.parametrize("scratch", [1000, 700, 64, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("tiers", FORMATS)
def test_owners(tiers, scratch, monkeypatch):
    """With room for all pages at once, and in parts."""
    if scratch == 700:  # several iterations
        monkeypatch.setattr(count_owners_triton, "ENTRIES", 4)
        monkeypatch.setattr(count_owners_triton, "PAGES", 128)
    manager = busy_manager(tiers)
    manager.release(1)
    expected = list(page_owners(manager).values())[:3]
    assert all(expected)
    for rows in (list(manager.rows), [0, *manager.rows]):
        index = torch.tensor(rows, device=DEVICE)
        memory = torch.full((scratch,), 7, dtype=torch.int32, device=DEVICE)
        assert count_owners_reference(manager.state, index).tolist() == expected
        assert count_owners_triton.count_owners(manager.state, index, memory).tolist() == expected


def test_owners_without_requests_and_on_the_scratch_page():
    manager = busy_manager("K8V4 K4V2")
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    memory = torch.empty(1000, dtype=torch.int32, device=DEVICE)
    cached = int((manager.state.refcount[:-1] > 0).sum())
    assert count_owners_reference(manager.state, none).tolist() == [0, 0, cached]
    assert count_owners_triton.count_owners(manager.state, none, memory).tolist() == [0, 0, cached]
    manager = starved_manager()
    rows = torch.tensor([1, 2], device=DEVICE)
    assert count_owners_reference(manager.state, rows).tolist() == [41, 0, 0]
    assert count_owners_triton.count_owners(manager.state, rows, memory).tolist() == [41, 0, 0]


@pytest.mark.parametrize("low_grows", [True, False])
@pytest.mark.parametrize("tiers", FORMATS)
def test_counts_are_full_heads_and_entries(tiers, low_grows):
    manager = busy_manager(tiers)
    rows = list(manager.rows)
    out = torch.full((len(rows) + 1, 4 + 2 * len(manager.state.tiers)), -9, device=DEVICE)
    index = torch.tensor(rows, device=DEVICE)
    assert count_rows_reference(manager.state, index, steps=1, low_grows=low_grows, out=out) is out
    counts = out.tolist()
    for row, values in zip(rows, counts[:-1], strict=True):
        assert values[0] == full_heads(manager.state, row, low_grows)
        assert values[1] == manager.device.pages_of(row)
    assert any(values[0] for values in counts[:-1])
    assert counts[-1][1] - counts[-1][0] == manager.device.free_pages()


@pytest.mark.parametrize("tiers", FORMATS)
def test_demand_is_what_steps_take(tiers):
    manager = busy_manager(tiers)
    rows = [2, 7, 3, 6]
    counts = count_rows_reference(manager.state, torch.tensor(rows, device=DEVICE), steps=11, low_grows=False)
    for row, demand in zip(rows, counts[:-1, 0].tolist(), strict=True):
        before = manager.device.free_pages()
        for _ in range(11):
            begin_step(manager, [row], [1], [manager.rows.length(row)])
        assert before - manager.device.free_pages() == demand > 0


@pytest.mark.parametrize("make", [busy_manager, lambda _: starved_manager()])
@pytest.mark.parametrize("tiers", FORMATS)
def test_measure_is_a_rows_usage(tiers, make):
    manager = make(tiers)
    ranges = {row: (manager.rows.shared(row), length) for row, length in manager.rows.lengths().items()}
    ranges.update({segment.row: (segment.lo, segment.hi) for segment in manager.segments.cached})
    rows = torch.tensor(list(ranges), device=DEVICE)
    lo, hi = (torch.tensor(x, device=DEVICE) for x in zip(*ranges.values(), strict=True))
    sums = measure_reference(manager.state, rows, lo, hi).sum((1, 2)).tolist()  # [n][T + 1]
    for (row, span), values in zip(ranges.items(), sums, strict=True):
        assert values == row_usage(manager.state, row, *span)


@pytest.mark.parametrize("tiers", FORMATS)
def test_scores_are_summed_over_all_tokens_that_a_head_holds(tiers: str) -> None:
    """Of both tiers, shared pages and pages in part; what lies in empty slots and on other pages does not matter."""
    manager = busy_manager(tiers)
    state = manager.state
    random = torch.Generator().manual_seed(2)
    for view in state.tiers:
        drawn = torch.rand(view.scores.shape, generator=random).to(DEVICE)
        drawn[view.positions[:] < 0] = float("nan")
        view.scores.copy_(drawn)
    rows = torch.arange(8, device=DEVICE)
    valid = torch.tensor([7], dtype=torch.int32, device=DEVICE)
    out = torch.full((9, 3, 3), -1.0, device=DEVICE)
    sum_scores_triton.sum_scores(state, rows, valid, out)
    expected = torch.zeros(8, 3, 3, device=DEVICE)
    for row, layer, head in np.ndindex(8, 3, 3):
        for tier, view in enumerate(state.tiers):
            page, lo, hi = (x[0, layer, head] for x in row_table(state, rows[row : row + 1], tier, 40))
            for one, first, end in zip(page.tolist(), lo.tolist(), hi.tolist(), strict=True):
                position = view.positions[one]
                expected[row, layer, head] += view.scores[one][(position >= first) & (position < end)].sum()
    torch.testing.assert_close(sum_scores_reference(state, rows), expected)
    torch.testing.assert_close(out[:7], expected[:7])
    assert (out[7:] == -1).all(), "padding is left alone"
    assert (expected[1:7] > 0).all() and not expected[0].any()
