"""The Triton decode attention against its reference: outputs, scores and searches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.kernels.decode_attention.reference import decode_attention as reference
from sglang_diffkv.kernels.decode_attention.triton import (
    FoundTokens,
    batches_of_each_variant,
    decode_attention,
    join_plan,
)
from sglang_diffkv.kernels.decode_attention.triton_ranges import LEAST_TILES, MOST_RANGES
from sglang_diffkv.kernels.decode_attention.triton_workspace import (
    DecodeConfig,
    DecodeScratch,
    DecodeWorkspace,
    score_programs,
    tile_constants,
)
from sglang_diffkv.ops import Scaling
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.uniform import UniformPolicy
from tests.kernels.triton_helpers import (
    BF16,
    DEVICE,
    FOUR,
    THREE,
    add_prompt,
    clone_state,
    close,
    held_pages,
    make_format,
    make_manager,
    with_between,
)
from tests.policies import diffkv_policy

WINDOW = 8
CASES = [
    # tiers, head_dim, v_head_dim, query heads of a KV head, programs, tile
    pytest.param("K8V4 K4V2", 64, 64, 4, 8, 32, marks=pytest.mark.full),
    (FOUR, 64, 96, 3, 23, 32),
    pytest.param(THREE, 64, 64, 2, 13, 32, marks=pytest.mark.full),
    pytest.param(THREE, 128, 64, 1, 3, 64, marks=pytest.mark.full),
    pytest.param(FOUR, 96, 64, 7, 3, 16, marks=pytest.mark.full),
    pytest.param(FOUR, 64, 64, 2, 93, 16, marks=pytest.mark.full),
    ("K8V4 K4V2", 96, 96, 1, 13, 64),
    ("K8V4 K4V2", 128, 64, 7, 3, 32),
    ("K8V4 K4V2", 256, 256, 8, 8, 32),
    pytest.param("K8V8 K4V4", 64, 64, 2, 8, 32, marks=pytest.mark.full),
    ("K8V2 K4V1", 64, 64, 3, 8, 32),
    ("BF16 K8V4", 64, 64, 5, 8, 32),
    ("K6V3 K3V2", 128, 64, 2, 8, 64),
    pytest.param("K6V3 K3V2", 64, 256, 4, 8, 32, marks=pytest.mark.full),
    pytest.param("K7V6 K5V7 K3V5", 256, 128, 2, 8, 16, marks=pytest.mark.full),
    pytest.param("K8V4", 64, 64, 4, 8, 32, marks=pytest.mark.full),
    pytest.param("BF16", 128, 128, 2, 13, 32, marks=pytest.mark.full),
]


def run_both(
    manager, tiers, group, programs, tile, *, cap=0.0, lengths=(61, 0, 9), dtype=BF16, scores=True, score_low=True,
    score_tokens=32, cuda=False, **rule,
):  # fmt: skip
    generator = torch.Generator().manual_seed(len(tiers) + group)
    state = manager.state
    rows = torch.tensor([2, 5, 3], device=DEVICE)
    for row, count in zip(rows.tolist(), lengths):
        add_prompt(manager, row, count, generator)
    seq_lens = torch.tensor(lengths, device=DEVICE)
    q = torch.randn(len(lengths), state.num_heads * group, state.fmt.head_dim, generator=generator)
    q = (q * torch.tensor([0.01, 1.0, 30.0]).view(3, 1, 1)).to(DEVICE, dtype)
    twin, scale = clone_state(state), 0.3 / state.fmt.head_dim**0.5
    config = DecodeConfig(
        tile=tile, programs=programs, ahead=4, score_parts=2, score_tokens=score_tokens, cuda=cuda
    )  # fmt: skip
    workspace = DecodeWorkspace.create(state, 4, q.shape[1], max_tokens=400 if scores else 0, config=config)
    for scratch in (workspace.partial_out, workspace.logits, workspace.tile_max):
        scratch.fill_(float("nan"))
    found = FoundTokens.create(state, 4, config, score_low=score_low) if scores else None
    expected_scores = StepScores.create(state, 3, score_low) if scores else None
    valid = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    results = []
    workspace.plan(state, rows, valid, score_low=score_low)
    for layer in range(state.num_layers):
        got = decode_attention(
            state, layer, q, rows, seq_lens, scale, workspace, valid, found=found, window=WINDOW, logit_cap=cap, **rule
        )
        expected = reference(
            twin, layer, q, rows, seq_lens, scale, scores=expected_scores, window=WINDOW, logit_cap=cap, **rule
        )
        results.append((got, expected))
    return results, state, twin, found, expected_scores


@pytest.mark.parametrize(("tiers", "dim", "v_dim", "group", "programs", "tile"), CASES)
def test_matches_reference(tiers, dim, v_dim, group, programs, tile):
    manager = make_manager(make_format(tiers, dim, v_dim, page_tokens=8), window=WINDOW)
    results, state, twin, found, expected = run_both(manager, tiers, group, programs, tile)
    check_against_reference(results, state, twin, found, expected)


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param({"sinks": 2}, marks=pytest.mark.full),
        {"sinks": 53},
        pytest.param({"horizon": 1}, marks=pytest.mark.full),
        {"sinks": 2, "horizon": 5},
        {"reduce": "mean"},
        {"every": 61},
        {"every": 3, "horizon": 5},
    ],
)
def test_rules_of_the_search_are_the_reference_s(rule):
    """The second request's candidate, and with 53 sinks also the first's, is a sink. The newest token of 61 observes
    alone with ``every`` 61, that of 9 with 3."""
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=8), window=WINDOW)
    results = run_both(manager, "rule", 4, 8, 32, **rule)
    check_against_reference(*results)
    slots = results[-1].candidate_slot
    assert ((slots[2] == -1).all() == ("sinks" in rule)) and ((slots[0] >= 0).any() == (rule.get("sinks") != 53))


@pytest.mark.parametrize(
    ("tiers", "dim", "windows", "rule"),
    [
        ("K8V4 K4V2", 64, (21, 4, 3), {}),
        ("BF16 K8V4", 96, (57, -1, -1), {"sinks": 2, "horizon": 5}),
        pytest.param("K6V3 K3V2", 128, (1, -1, 8), {"every": 3}, marks=pytest.mark.full),
        pytest.param(FOUR, 64, (-1, -1, 7), {"reduce": "mean"}, marks=pytest.mark.full),
    ],
)
def test_rows_have_windows_of_their_own(tiers, dim, windows, rule):
    """Larger and smaller ones than the usual, which -1 is. What is found of a row is what a step of it alone finds, if
    that is the usual window. Prompts were sorted but for a window of 1."""
    policy = with_between(diffkv_policy(1.0, 0.2, 1), len(tiers.split()))
    manager = make_manager(make_format(tiers, dim, page_tokens=8), policy=policy)
    own, rows = manager.state.row_window, torch.tensor([2, 5, 3], device=DEVICE)
    own[rows] = torch.tensor(windows, dtype=torch.int32, device=DEVICE)
    results = run_both(manager, tiers, 3, 8, 32, row_windows=own, **rule)
    check_against_reference(*results)
    twin, expected = results[2], results[4]
    q = torch.zeros(1, twin.num_heads * 3, dim, device=DEVICE)
    for number, window, length in ((0, windows[0], 61), (2, windows[2], 9)):
        row = rows[number]
        alone = StepScores.create(twin, 1)
        for layer in range(twin.num_layers):
            one = {**rule, "window": WINDOW if window < 0 else window, "every": 1 << 20}  # scores stay as they are
            reference(twin, layer, q, row.view(1), torch.tensor([length], device=DEVICE), 1.0, scores=alone, **one)
        assert torch.equal(alone.candidate_slot[0], expected.candidate_slot[number])
        assert torch.equal(alone.least_slot[0], expected.least_slot[number])


@pytest.mark.parametrize("scored", [True, False])
def test_what_stands_on_the_scratch_page_is_not_found(scored):
    """Rows whose heads found no page write to one that all share: what others wrote there is none of their tokens, also
    in a step whose newest token does not observe, or where no scores are kept."""
    policy = diffkv_policy(1.0 if scored else 1e9, 0.0, WINDOW)
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=8), pages=40, policy=policy)
    state, generator = manager.state, torch.Generator().manual_seed(9)
    for row, count in ((2, 30), (3, 61)):
        add_prompt(manager, row, count, generator, compact=False)
    assert state.fault[3], "the ring has pages for both"
    view, leaving = state.tiers[0], 61 - 1 - WINDOW
    view.positions[state.scratch_page] = torch.arange(leaving - 3, leaving + 5, device=DEVICE)
    if scored:
        view.scores[state.scratch_page] = 0.0
    rows, seq_lens = torch.tensor([3], device=DEVICE), torch.tensor([61], device=DEVICE)
    q = torch.randn(1, 4, 64, generator=generator).to(DEVICE, BF16)
    workspace = DecodeWorkspace.create(state, 1, 4, max_tokens=400 if scored else 0)
    found = FoundTokens.create(state, 1, score_low=False, scored=scored)
    expected = StepScores.create(clone_state(state), 1, False, scored)
    valid = torch.ones(1, dtype=torch.int32, device=DEVICE)
    workspace.plan(state, rows, valid, score_low=False)
    for layer in range(state.num_layers):
        twin = clone_state(state)
        reference(twin, layer, q, rows, seq_lens, 0.1, scores=expected, window=WINDOW, every=7)
        decode_attention(
            state, layer, q, rows, seq_lens, 0.1, workspace, valid, found=found, window=WINDOW, every=7
        )  # fmt: skip
    got = found.unpack()
    assert torch.equal(got.candidate_slot, expected.candidate_slot)
    if scored:
        assert torch.equal(got.least_slot[..., 0], expected.least_slot[..., 0])


def check_against_reference(results, state, twin, found, expected):
    """What both gave for the first request, of 61 tokens, and the third, of 9; the second has none."""
    for (out, lse), (ref_out, ref_lse) in results:
        assert out[1].abs().max() == 0 and torch.isneginf(lse[1]).all(), "an empty row has no attention"
        for b in (0, 2):
            assert close(out[b], ref_out[b]) < 6e-3
            assert (lse[b] - ref_lse[b]).abs().max() < 5e-3
    rows = torch.tensor([2, 3], device=DEVICE)
    for tier, (view, ref) in enumerate(zip(state.tiers, twin.tiers)):
        held = torch.zeros_like(ref.positions[:], dtype=torch.bool)
        held[held_pages(twin, rows, tier)] = True
        held &= ref.positions[:] >= 0
        assert torch.equal(view.positions[held], ref.positions[held])
        assert close(view.scores[held], ref.scores[held]) < 2e-2
        torch.testing.assert_close(view.scores[held], ref.scores[held], rtol=5e-2, atol=1e-4)
    got = found.unpack()
    assert torch.equal(got.candidate_slot[:3], expected.candidate_slot)
    present = expected.candidate_slot >= 0
    assert close(got.candidate_score[:3][present], expected.candidate_score[present]) < 2e-2
    present = expected.least_slot >= 0
    assert torch.equal(got.least_slot[:3] >= 0, present)
    torch.testing.assert_close(got.least_score[:3][present], expected.least_score[present], rtol=5e-2, atol=1e-5)


def test_programs_may_join_and_score(monkeypatch):
    """In a large batch no program joins alone: the first of a head's two does both."""
    monkeypatch.setattr("sglang_diffkv.kernels.decode_attention.triton.score_programs", lambda *args: (2, 0))
    test_matches_reference("K8V4 K4V2", 64, 64, 4, 13, 32)


@pytest.mark.parametrize("tiers", ["K8V4 K4V2", "BF16 K8V4", pytest.param(FOUR, marks=pytest.mark.full)])
def test_a_program_may_join_alone_and_others_score_in_many_iterations(monkeypatch, tiers):
    """As in batches of tens of requests; page ids are read two iterations ahead, positions and scores one."""
    monkeypatch.setattr("sglang_diffkv.kernels.decode_attention.triton.score_programs", lambda *args: (2, 1))
    manager = make_manager(make_format(tiers, 64, page_tokens=8), window=WINDOW)
    results = run_both(manager, tiers, 4, 13, 16, lengths=(121, 0, 9), score_tokens=16)
    own = results[1].entries - results[1].own_entry
    assert own[2, :, :, 0].max() >= 8, "four iterations of a page for each of two programs"
    check_against_reference(*results)


@pytest.mark.parametrize("tiers", ["K8V4 K4V2", pytest.param("BF16 K8V4 K4V2", marks=pytest.mark.full)])
def test_uneven_requests_share_the_programs(monkeypatch, tiers):
    """The long request's heads are cut where the short ones' are not, and so are their scores."""
    module = "sglang_diffkv.kernels.decode_attention.triton_workspace"
    monkeypatch.setattr(f"{module}.processors_of", lambda device: 1)  # 12 programs for 8 heads, 16 to score
    manager = make_manager(make_format(tiers, 64, page_tokens=8), window=WINDOW, pages=400)
    generator, state = torch.Generator().manual_seed(3), manager.state
    lengths = (17, 300, 16, 15)
    for row, count in enumerate(lengths, 1):
        add_prompt(manager, row, count, generator)
    rows, seq_lens = torch.arange(1, 5, device=DEVICE), torch.tensor(lengths, device=DEVICE)
    q = torch.randn(4, 4, 64, generator=generator).to(DEVICE, BF16)
    config = DecodeConfig(tile=16, score_tokens=16)
    workspace = DecodeWorkspace.create(state, 4, 4, max_tokens=400, config=config)
    workspace.partial_out.fill_(float("nan"))
    workspace.partial_lse.fill_(float("nan"))
    valid = torch.tensor([4], dtype=torch.int32, device=DEVICE)
    workspace.plan(state, rows, valid)
    assert (workspace.programs, score_programs(state, 4, config)[0]) == (12, 6)
    first_heads = workspace.begun[..., 0] // len(state.fmt.tiers)  # [L, programs]
    ranges = -(-workspace.ranges[:, 1] // workspace.ranges[:, 0])  # [L]
    for layer in range(state.num_layers):
        held = first_heads[layer, : ranges[layer]].bincount(minlength=8)  # 2 heads of each request
        assert (held[2:4] >= 3).all() and (held[[0, 1, 4, 5, 6, 7]] <= 1).all()
    assert (workspace.parts_of[..., 1] >= 4).all() and (workspace.parts_of[..., [0, 2, 3]] <= 2).all()
    twin, found, expected = clone_state(state), FoundTokens.create(state, 4, config), StepScores.create(state, 4)
    for layer in range(state.num_layers):
        out, lse = decode_attention(state, layer, q, rows, seq_lens, 0.1, workspace, valid, found=found, window=WINDOW)
        ref_out, ref_lse = reference(twin, layer, q, rows, seq_lens, 0.1, scores=expected, window=WINDOW)
        assert close(out, ref_out) < 6e-3 and (lse - ref_lse).abs().max() < 5e-3
    got = found.unpack()
    assert torch.equal(got.candidate_slot, expected.candidate_slot) and (got.candidate_slot >= 0).any()
    assert torch.equal(got.least_slot >= 0, expected.least_slot >= 0)
    for tier in range(len(state.tiers)):
        held = held_pages(twin, rows, tier)
        there = twin.tiers[tier].positions[held] >= 0
        got_scores, scores = (x.tiers[tier].scores[held][there] for x in (state, twin))
        torch.testing.assert_close(got_scores, scores, rtol=5e-2, atol=1e-4)


@pytest.mark.parametrize(
    ("joiners", "dim", "group"), [(1, 64, 4), (8, 256, 8), pytest.param(0, 64, 2, marks=pytest.mark.full)]
)
def test_more_results_than_are_joined_at_once(monkeypatch, joiners, dim, group):
    """A long request's head is cut into some twenty ranges, whose normalisers and results take several iterations."""
    for module in ("triton", "triton_workspace"):
        monkeypatch.setattr(
            f"sglang_diffkv.kernels.decode_attention.{module}.score_programs", lambda *args: (1, joiners)
        )
    manager = make_manager(make_format("K8V4 K4V2", dim, page_tokens=8), layers=1, heads=1, pages=300)
    generator, state = torch.Generator().manual_seed(1), manager.state
    for row, count in ((1, 390), (2, 33)):
        add_prompt(manager, row, count, generator, compact=row == 2)
    rows, lengths = torch.tensor([1, 2], device=DEVICE), torch.tensor([390, 33], device=DEVICE)
    config = DecodeConfig(tile=16, programs=400)
    workspace = DecodeWorkspace.create(state, 2, group, config=config)
    workspace.partial_out.fill_(float("nan"))
    workspace.partial_lse.fill_(float("nan"))
    q = torch.randn(2, group, dim, generator=generator).to(DEVICE, BF16)
    valid = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    workspace.plan(state, rows, valid)
    at_once = join_plan(state, 2, group, config, searched=False)[1]
    assert workspace.ranges[0, 1] // workspace.ranges[0, 0] > (16 if joiners <= 1 else at_once["AT_ONCE"])
    out, lse = decode_attention(state, 0, q, rows, lengths, 0.1, workspace, valid)
    expected, expected_lse = reference(state, 0, q, rows, lengths, 0.1)
    assert close(out, expected) < 6e-3 and (lse - expected_lse).abs().max() < 5e-3


def test_one_scratch_for_steps_that_grow_and_shrink():
    """What a larger step left behind is not read; the last request of each is padding."""
    manager = make_manager(make_format("K8V4 K4V2", 64, page_tokens=8), window=WINDOW)
    generator, state = torch.Generator().manual_seed(4), manager.state
    lengths = {1: 70, 2: 9, 3: 33, 4: 1}
    for row, count in lengths.items():
        add_prompt(manager, row, count, generator)
    scratch = DecodeScratch.create(state, 5, 4, config=DecodeConfig(tile=16, programs=9))
    for chosen in ([1, 2, 3, 4], [2], [4, 3], [], [3, 1]):
        batch = len(chosen) + 1
        rows = torch.tensor([*chosen, 0], device=DEVICE)
        seq_lens = torch.tensor([*(lengths[x] for x in chosen), 1], device=DEVICE)
        workspace = scratch.workspace(state, batch)
        workspace.partial_out.fill_(float("nan"))
        workspace.partial_lse.fill_(float("nan"))
        q = torch.randn(batch, 4, 64, generator=generator).to(DEVICE, BF16)
        valid = torch.tensor([len(chosen)], dtype=torch.int32, device=DEVICE)
        with pytest.raises(AssertionError, match="plan comes first"):
            decode_attention(state, 1, q, rows, seq_lens, 0.1, workspace, valid)
        workspace.plan(state, rows, valid)
        out, lse = decode_attention(state, 1, q, rows, seq_lens, 0.1, workspace, valid)
        assert not out[-1].any() and torch.isneginf(lse[-1]).all()
        if chosen:
            expected, expected_lse = reference(state, 1, q[:-1], rows[:-1], seq_lens[:-1], 0.1)
            assert close(out[:-1], expected) < 6e-3 and (lse[:-1] - expected_lse).abs().max() < 5e-3


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(diffkv_policy(1.0, 0.0, WINDOW), id="low", marks=pytest.mark.full),
        pytest.param(diffkv_policy(1.0, 0.3, WINDOW), id="out"),
        pytest.param(UniformPolicy(), id="none"),
    ],
)
def test_a_step_in_slices_is_the_step(policy):
    """Seven requests, two or three of them padding, in slices of three and at once; twice, since searches share
    memory with nothing that is read later."""
    manager = make_manager(make_format("K8V4 K4V2", 64, page_tokens=8), heads=1, policy=policy)
    generator, state = torch.Generator().manual_seed(5), manager.state
    lengths = {1: 40, 2: 9, 3: 33, 4: 1, 5: 27}
    for row, count in lengths.items():
        add_prompt(manager, row, count, generator)
    twin = clone_state(state)
    for chosen in ([1, 2, 3, 4, 5], [5, 3, 1, 2]):
        begin = {row: lengths[row] for row in chosen}
        for row in chosen:
            manager.space.append(row, 1)
            lengths[row] += 1
        manager.space.flush()
        twin.row_blocks.copy_(state.row_blocks)
        rows = torch.tensor(chosen + [0] * (7 - len(chosen)), device=DEVICE)
        seq_lens = torch.tensor([lengths[row] for row in begin] + [1] * (7 - len(chosen)), device=DEVICE)
        q, key, value = (torch.randn(7, n, 64, generator=generator).to(DEVICE, BF16) for n in (2, 1, 1))
        outs = []
        for one, requests in ((state, 3), (twin, 512)):
            ops = TritonOps(one, policy, 2, 400, config=DecodeConfig(tile=16, programs=9, requests=requests))
            ops.prepare_graphs(7)
            ops.buffers[0].scratch.memory.fill_(255)  # what FlashInfer leaves there
            step = ops.decode_step(rows, seq_lens)
            assert len(step.scratch[1]) == -(-7 // requests)
            ops.begin(step, decode=True)
            for layer in range(one.num_layers):
                ops.append(layer, key, value, step)
                outs.append(ops.decode(layer, q, step, Scaling(0.1)))
            if step.found is not None:
                ops.compact_step(rows, seq_lens, step.found, step.num_valid)
        layers = state.num_layers
        for got, expected in zip(outs[:layers], outs[layers:], strict=True):
            assert close(got, expected) < 2e-3 and not got[len(chosen) :].any()
        for name in ("entries", "own_tokens", "hole", "counters", "ring"):
            assert torch.equal(getattr(state, name), getattr(twin, name)), name


def line_of(entries: list[list[int]], costs: list[int], turn: int) -> tuple[list[int], int]:
    """Where each unit's work begins and where all ends, of pages [heads][T]."""
    starts, at = [], 0
    for head in entries:
        for pages, cost in zip(head, costs, strict=True):
            starts.append(at)
            at += pages * cost + turn * (pages > 0)
    return starts, at


@pytest.mark.parametrize(
    ("most_pages", "programs", "iteration"),
    [(40, 37, 4), (3, 5, 1024), (0, 9, 8), pytest.param(400, 512, 2, marks=pytest.mark.full), (900, 2000, 1024)],
)
@pytest.mark.parametrize("tiers", ["K8V4 K4V2", pytest.param("K8V4", marks=pytest.mark.full)])
def test_ranges_are_equal_and_cover_the_line(monkeypatch, tiers, most_pages, programs, iteration):
    """Of random pages, some heads with none, one head with most; the last request is padding."""
    module = "sglang_diffkv.kernels.decode_attention.triton_workspace"
    monkeypatch.setattr(f"{module}.RANGE_HEADS", iteration)
    state = make_manager(make_format(tiers, 64, page_tokens=8)).state
    generator, batch = torch.Generator().manual_seed(most_pages), 4
    count = len(state.fmt.tiers)
    shape = (batch + 1, state.num_layers, state.num_heads, count)
    pages = torch.randint(0, most_pages + 1, shape, generator=generator)
    pages *= torch.rand(shape, generator=generator) > 0.3
    pages[2, :, 1] += most_pages * 2
    state.entries[: batch + 1] = pages.to(state.entries)
    rows = torch.tensor([2, 1, 4, 0], device=DEVICE)
    workspace = DecodeWorkspace.create(state, batch, 4, config=DecodeConfig(tile=16, programs=programs))
    workspace.plan(state, rows, torch.tensor([3], dtype=torch.int32, device=DEVICE))
    constants = tile_constants(state.fmt, workspace.config)
    weights, tiles, turn = constants["WEIGHTS"], constants["TILES"], constants["TURN"]
    chunks = [-(-x.tokens // n) for x, n in zip(state.fmt.layouts, tiles, strict=True)]
    costs = [n * w for n, w in zip(chunks, weights, strict=True)]
    for layer in range(state.num_layers):
        held = pages[rows[:3].cpu(), layer].flatten(0, 1).tolist()  # [heads][T]
        starts, end = line_of(held, costs, turn)
        each, total = workspace.ranges[layer].tolist()
        head_work = [sum(n * c + turn * (n > 0) for n, c in zip(head, costs, strict=True)) for head in held]
        least = LEAST_TILES * max(weights)
        assert total == end and each == max(-(-end // programs), least, -(-max(head_work) // MOST_RANGES))
        assert workspace.starts[layer, : len(starts)].tolist() == starts
        used: set[int] = set()
        programs_of: dict[int, list[int]] = {}  # of a head, those with tiles of it
        done = []
        for program in range(-(-end // each)):
            unit, start, row, _ = workspace.begun[layer, program].tolist()
            assert start == starts[unit] and row == rows[unit // (count * state.num_heads)]
            begin, stop = program * each, min((program + 1) * each, end)
            assert starts[unit] <= begin < (starts + [end])[unit + 1]
            while unit < len(starts) and starts[unit] < stop:
                head, tier = divmod(unit, count)
                there = [starts[unit] + turn + i * weights[tier] for i in range(held[head][tier] * chunks[tier])]
                mine = [(unit, at) for at in there if begin <= at < stop]
                assert not mine or program + unit not in used
                used |= {program + unit} if mine else set()
                if mine and program not in programs_of.setdefault(head, []):
                    programs_of[head].append(program)
                done += mine
                unit += 1
        slots = [program + head for head, some in programs_of.items() for program in some]
        assert len(slots) == len(set(slots)) and all(x[-1] - x[0] == len(x) - 1 for x in programs_of.values())
        assert len(done) == sum(n * c for head in held for n, c in zip(head, chunks, strict=True)) == len(set(done))


def test_programs_fill_the_gpu(monkeypatch):
    state = make_manager(make_format("K8V4 K4V2", 64, page_tokens=8)).state  # 2 heads
    module = "sglang_diffkv.kernels.decode_attention.triton_workspace"
    monkeypatch.setattr(f"{module}.processors_of", lambda device: 132)  # 2,112 programs at once
    counts = {batch: score_programs(state, batch, DecodeConfig()) for batch in (1, 150, 512, 1000, 10000)}
    assert counts == {1: (8, 8), 150: (8, 1), 512: (6, 0), 1000: (4, 0), 10000: (1, 0)}
    assert score_programs(state, 1, DecodeConfig(score_parts=3)) == (3, 8)
    monkeypatch.setattr(f"{module}.shared_memory_of", lambda device: 228 << 10)
    assert DecodeWorkspace.create(state, 1, 4).programs == 132 * 12
    raw = make_manager(make_format("BF16", 128, page_tokens=32)).state  # whose tiles take 16 KiB
    assert DecodeWorkspace.create(raw, 1, 4).programs == 132 * 11


def test_tiers_are_weighed_as_they_were_timed():
    constants = tile_constants(make_format("K8V4 K4V2", 128, page_tokens=32), DecodeConfig())
    high, low = constants["WEIGHTS"]
    assert constants["TILES"] == (32, 64) and abs(high / low - 2.49 / 2.83) < 0.02
    many = make_format("K8V8 K8V4 K4V4 K4V2", 128, page_tokens=32)
    sizes = zip(many.layouts, tile_constants(many, DecodeConfig())["TILES"], strict=True)
    pages = [w * -(-x.tokens // n) for (x, n), w in zip(sizes, tile_constants(many, DecodeConfig())["WEIGHTS"])]
    assert max(pages) < 1.4 * min(pages)  # a page is a page, whatever its tier


@pytest.mark.parametrize("searched", [True, False])
def test_a_few_batches_need_every_kernel(monkeypatch, searched):
    """The first batch of each variant of the second pass: warm-up runs these and no others."""
    state = make_manager(make_format("K8V4 K4V2", 64, page_tokens=8)).state
    monkeypatch.setattr("sglang_diffkv.kernels.decode_attention.triton_workspace.processors_of", lambda device: 132)
    config = DecodeConfig()

    def variant(batch: int) -> tuple[int, ...]:
        return tuple(join_plan(state, batch, 4, config, searched=searched)[1].values())

    chosen = batches_of_each_variant(state, 2000, 4, config, searched=searched)
    assert chosen[0] == 1 and {variant(b) for b in chosen} == {variant(b) for b in range(1, 2001)}
    assert 1 < len(chosen) == len({variant(b) for b in chosen}) < 5


def test_the_low_tier_is_not_judged_where_nothing_asks():
    manager = make_manager(make_format("K8V4 K4V2", 64, page_tokens=8), window=WINDOW)
    results, state, twin, found, expected = run_both(manager, "low", 4, 13, 32, score_low=False)
    for (out, _), (ref_out, _) in results:
        assert close(out[0], ref_out[0]) < 6e-3
    rows, got = torch.tensor([2, 3], device=DEVICE), found.unpack()
    assert (got.least_slot[:3, ..., 1] == -1).all() and (expected.least_slot[..., 1] == -1).all()
    assert torch.equal(got.least_slot[:3, ..., 0] >= 0, expected.least_slot[..., 0] >= 0)
    kept = held_pages(twin, rows, 1)
    bits = [x.tiers[1].scores[kept].view(torch.int32) for x in (state, twin)]
    assert kept.numel() and torch.equal(*bits), "a score of the low tier was written"
    high = held_pages(twin, rows, 0)
    held = twin.tiers[0].positions[high] >= 0
    torch.testing.assert_close(
        state.tiers[0].scores[high][held], twin.tiers[0].scores[high][held], rtol=5e-2, atol=1e-4
    )


def test_logit_cap_and_no_scores():
    manager = make_manager(make_format("K8V4 K4V2", 64, page_tokens=8), window=WINDOW)
    results, *_ = run_both(manager, "cap", 4, 8, 32, cap=2.0, scores=False)
    for (out, lse), (ref_out, ref_lse) in results:
        assert close(out[0], ref_out[0]) < 6e-3 and close(lse[0], ref_lse[0]) < 1e-3


def test_padded_requests_get_zeros():
    manager = make_manager(make_format("K8V4 K4V2", 64, page_tokens=8), window=WINDOW)
    add_prompt(manager, 1, 20, torch.Generator().manual_seed(0))
    state = manager.state
    rows = torch.tensor([1, 0, 0], device=DEVICE)
    q = torch.randn(3, 4, 64, device=DEVICE).to(BF16)
    workspace = DecodeWorkspace.create(state, 3, 4, max_tokens=400, config=DecodeConfig(32, programs=5))
    found = FoundTokens.create(state, 3, workspace.config)
    found.packed.zero_()
    out = torch.full((3, 4, 64), float("nan"), dtype=BF16, device=DEVICE)
    before = state.pages.clone()
    valid = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    seq_lens = torch.tensor([20, 1, 1], device=DEVICE)
    workspace.plan(state, rows, valid)
    decode_attention(state, 0, q, rows, seq_lens, 0.1, workspace, valid, out=out, found=found, window=WINDOW)
    assert out[0].isfinite().all() and not out[1:].any()
    assert (found.unpack().candidate_slot[1:, 0] == -1).all()
    assert torch.equal(before[-1], state.pages[-1])


def test_requests_share_the_room_for_logits():
    """Room for the first request's pages only: the second is attended to, and keeps its scores."""
    manager = make_manager(make_format("K8V4 K4V2", 64, page_tokens=8), window=WINDOW)
    generator, state = torch.Generator().manual_seed(7), manager.state
    for row in (1, 2):
        add_prompt(manager, row, 40, generator)
    rows, seq_lens = torch.tensor([1, 2], device=DEVICE), torch.tensor([40, 40], device=DEVICE)
    q = torch.randn(2, 4, 64, generator=generator).to(DEVICE, BF16)
    workspace = DecodeWorkspace.create(state, 2, 4, max_tokens=100, config=DecodeConfig(32, programs=7))
    found = FoundTokens.create(state, 2, workspace.config)
    valid = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    workspace.plan(state, rows, valid)
    taken = int(workspace.offsets[:, :, 1].min())
    assert 0 < taken < workspace.room and not workspace.offsets[:, :, 0].any()
    small = replace(
        workspace, room=16, logits=workspace.logits[:, :16].clone(),
        tile_max=workspace.tile_max[:, :1].clone(),
    )  # fmt: skip
    before = [held_pages(state, rows[1:], tier) for tier in range(2)]
    scores = [state.tiers[tier].scores[page].clone().view(torch.int32) for tier, page in enumerate(before)]
    twin = clone_state(state)
    for layer in range(state.num_layers):
        out, _ = decode_attention(state, layer, q, rows, seq_lens, 0.1, small, valid, found=found, window=WINDOW)
        expected, _ = reference(twin, layer, q, rows, seq_lens, 0.1, window=WINDOW)
        assert close(out, expected) < 6e-3
    for tier, page in enumerate(before):
        assert torch.equal(state.tiers[tier].scores[page].view(torch.int32), scores[tier])


@pytest.mark.parametrize("score_low", [True, False])
def test_shared_pages_take_no_room(score_low):
    """Only own pages' logits are kept; after a shared prefix a request scores its own tokens as the reference does."""
    manager = make_manager(make_format("K8V4 K4V2", 64, page_tokens=8), window=WINDOW)
    generator, state = torch.Generator().manual_seed(8), manager.state
    add_prompt(manager, 1, 60, generator)
    segment = manager.segments.share(1, 0, 60)
    assert segment is not None
    for row in (2, 3):
        manager.attach_prefix(row, [(segment, 0, 50)])
        add_prompt(manager, row, 30, generator)
    rows, seq_lens = torch.tensor([2, 3], device=DEVICE), torch.tensor([80, 80], device=DEVICE)
    q = torch.randn(2, 4, 64, generator=generator).to(DEVICE, BF16)
    config = DecodeConfig(tile=16, programs=11, score_parts=2, score_tokens=32)
    workspace = DecodeWorkspace.create(state, 2, 4, max_tokens=100, config=config)
    found = FoundTokens.create(state, 2, config, score_low=score_low)
    expected = StepScores.create(state, 2, score_low)
    valid = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    workspace.plan(state, rows, valid, score_low=score_low)
    own = (state.entries - state.own_entry)[2]
    assert (own < state.entries[2]).any() and own.any()
    twin = clone_state(state)
    for layer in range(state.num_layers):
        out, _ = decode_attention(state, layer, q, rows, seq_lens, 0.1, workspace, valid, found=found, window=WINDOW)
        want, _ = reference(twin, layer, q, rows, seq_lens, 0.1, scores=expected, window=WINDOW)
        assert close(out, want) < 6e-3
    got = found.unpack()
    assert torch.equal(got.candidate_slot, expected.candidate_slot)
    assert torch.equal(got.least_slot >= 0, expected.least_slot >= 0)
    for tier, (view, ref) in enumerate(zip(state.tiers, twin.tiers, strict=True)):
        pages = held_pages(twin, rows, tier)
        held = (ref.positions[pages] >= 0) & (ref.positions[pages] < 80)
        torch.testing.assert_close(view.scores[pages][held], ref.scores[pages][held], rtol=5e-2, atol=1e-4)
