"""Zipage: what it is configured to, which tokens stay by the paper's formulas, references with Triton, and when running
requests are compressed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.running import query_slots
from sglang_diffkv.ops import ReferenceOps
from sglang_diffkv.ops.base import Scaling
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.base import Redundancy, kept_share
from sglang_diffkv.policies.zipage import ZipagePolicy, ZipagePolicyConfig
from tests.helpers import begin_step, tier_map
from tests.kernels.test_running import keys_of
from tests.kernels.test_whole_heads import gathered
from tests.kernels.triton_helpers import DEVICE, add_prompt, clone_state, make_format, make_manager, vectors
from tests.policies import zipage_policy

LENGTH, WINDOW, KEEP, GROUP = 61, 6, 30, 2
SCALING = Scaling(0.2)


def policy(**changes: object) -> ZipagePolicy:
    fields = {"keep": KEEP, "limit": 40, "window": WINDOW, "pool": 5, "redundancy": Redundancy(0.5, 0.1, 0.4, 16)}
    return zipage_policy(**{**fields, **changes})  # type: ignore[arg-type]


def test_blocks_are_tokens():
    chosen = ZipagePolicyConfig(max_blocks=9).build()
    assert (chosen.keep, chosen.limit, chosen.window) == (2048, 2304, 16)
    assert chosen.redundancy == Redundancy(0.2, 0.4, 0.5, 256) and chosen.running.decay == 0.8
    assert chosen.prunes and not chosen.searches_steps and chosen.observation.queries == 16
    assert ZipagePolicyConfig(max_blocks=3, redundancy=0).build().redundancy is None
    assert ZipagePolicyConfig(max_blocks=3, compare="all").build().redundancy.block == 0  # type: ignore[union-attr]
    one = DiffKVConfig.model_validate({"tiers": ["K8V4"], "policy": {"name": "zipage", "max_blocks": 4, "block": 64}})
    assert one.build_policy().keep == 192 and not one.lossless  # type: ignore[attr-defined]


def test_requests_are_as_many_as_query_slots_where_scheduling_is_constrained():
    hybrid, constrained = (ZipagePolicyConfig(max_blocks=8, scheduling=x).build() for x in ("hybrid", "constrained"))
    assert (hybrid.running.slots, hybrid.running.constrained) == (0.25, False)
    assert (constrained.running.slots, constrained.running.constrained) == (1.0, True)
    assert ZipagePolicyConfig(max_blocks=8, scheduling="constrained", query_slots=0.5).build().slots == 0.5
    geometry = Geometry(make_format("BF16", page_tokens=8), 2, 2, 4 * 75, num_rows=65, num_segments=8, max_tokens=400)
    assert query_slots(policy(slots=1.0).running, geometry) == 20
    assert query_slots(policy(slots=1.0, constrained=True).running, geometry) == 15, "each with its whole limit of 40"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_blocks": 1}, {}, {"max_blocks": 4, "pool": 4}, {"max_blocks": 4, "block": 16, "window": 17},
        {"max_blocks": 4, "query_slots": 0}, {"max_blocks": 4, "temperature": 0}, {"max_blocks": 4, "high": 3},
        {"max_blocks": 4, "scheduling": "parked"},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(fields):
    with pytest.raises(ValidationError):
        DiffKVConfig.model_validate({"tiers": ["K8V4"], "policy": {"name": "zipage", **fields}})


def test_three_tiers_are_refused():
    with pytest.raises(ValidationError, match="keeps tokens at two tiers, and tiers has 3"):
        DiffKVConfig.model_validate({"tiers": ["BF16", "K8V4", "K4V2"], "policy": {"name": "zipage", "max_blocks": 4}})


def test_query_slots_are_a_share_of_the_requests_that_fit():
    fmt = make_format("BF16", page_tokens=8)
    geometry = Geometry(fmt, 2, 2, 4 * 75, num_rows=65, num_segments=8, max_tokens=400)  # 600 tokens
    assert query_slots(policy(slots=0.25).running, geometry) == 5  # of 20
    assert query_slots(policy(slots=0.01).running, geometry) == 1
    assert query_slots(policy(slots=1.0, keep=4).running, geometry) == 64, "there are no more rows"


def filled(tiers: str, chosen: ZipagePolicy) -> tuple[PageManager, torch.Tensor]:
    """Row 1 with a prompt of random keys and scores, some of it low where there are two tiers; and its queries."""
    manager = make_manager(make_format(tiers, page_tokens=4), pages=500, policy=chosen)
    generator = torch.Generator().manual_seed(7)
    add_prompt(manager, 1, LENGTH, generator, compact=False)
    shape = (2, WINDOW, 2 * GROUP, 64)
    return manager, torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16)


def expected_scores(manager: PageManager, queries: torch.Tensor, decay: float) -> np.ndarray:
    """[L, H, LENGTH] by the paper's formulas, without pooling and redundancy."""
    old = gathered(manager, [(1, 0, LENGTH)], False, LENGTH)
    scores = np.full(old.shape, np.nan)
    for (layer, head), keys in keys_of(manager, 1).items():
        for p in keys:
            scores[layer, head, p] = 0.0
        for asked in range(LENGTH - WINDOW, LENGTH):
            best = np.zeros(LENGTH)
            for member in range(GROUP):
                q = queries[layer, asked % WINDOW, head * GROUP + member].double().numpy()
                weight = {p: math.exp(SCALING.scale * float(q @ k)) for p, k in keys.items() if p <= asked}
                for p, x in weight.items():
                    best[p] = max(best[p], x / sum(weight.values()))
            scores[layer, head] += best / WINDOW
    return np.fmax(decay * old, scores)


def expected_values(manager: PageManager, scores: np.ndarray, chosen: ZipagePolicy, first: bool) -> np.ndarray:
    """Pooled, less redundancy; the newest tokens' are not to be read."""
    values = scores.copy()
    for (layer, head), keys in keys_of(manager, 1).items():
        line = scores[layer, head].copy()
        line[LENGTH - WINDOW :] = 0.0
        half = chosen.pool // 2 if first else 0
        pooled = [line[max(p - half, 0) : p + half + 1].max() for p in range(LENGTH)]
        values[layer, head] = pooled
        rule = chosen.redundancy
        if rule is None:
            continue
        unit = np.stack([keys[p] / np.linalg.norm(keys[p]) for p in range(LENGTH)])
        sums = np.zeros(LENGTH)
        for start in range(0, LENGTH, rule.block or LENGTH):
            part = slice(start, start + (rule.block or LENGTH))
            cosine = unit[part] @ unit[part].T
            np.fill_diagonal(cosine, 0.0)
            for column in range(len(cosine)):
                over = np.flatnonzero(cosine[:, column] > rule.threshold)
                if len(over):
                    cosine[over[-1], column] = 0.0
            sums[part] = cosine.sum(1)
        weight = np.exp(sums / LENGTH / rule.temperature)
        values[layer, head] -= rule.weight * weight / weight.sum()
    return values


@pytest.mark.skipif(DEVICE != "cpu", reason="the scan of pages reads the CPU's memory")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("redundancy", [None, Redundancy(0.5, 0.1, 0.4, 16), Redundancy(2.0, 0.02, 0.3, 0)])
def test_what_stays_is_the_papers_choice(redundancy, first):
    chosen = policy(redundancy=redundancy)
    manager, queries = filled("BF16", chosen)
    scores = expected_scores(manager, queries, 0.0 if first else chosen.decay)
    values = expected_values(manager, scores, chosen, first)
    ops = ReferenceOps(manager.state, chosen)
    scoring = ops.score_running(manager.state, 1, LENGTH, queries, SCALING, first=first, most=LENGTH)
    np.testing.assert_allclose(scoring.scores.numpy(), scores, rtol=1e-4, atol=1e-7)
    ops.compact_scored(manager.state, 1, LENGTH, scoring)
    check_integrity(manager)
    stays = tier_map(manager.state, 1, LENGTH) == 0
    assert (stays.sum(2) == KEEP).all() and stays[..., LENGTH - WINDOW :].all()
    for layer in range(2):
        for head in range(2):
            kept = stays[layer, head, : LENGTH - WINDOW]
            line = values[layer, head, : LENGTH - WINDOW]
            assert line[kept].min() >= line[~kept].max() - 1e-6
    kept_scores = gathered(manager, [(1, 0, LENGTH)], True, LENGTH)
    np.testing.assert_allclose(kept_scores[stays], scores[stays], rtol=1e-4, atol=1e-7)


@pytest.mark.cover(1)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("tiers", "high"), [("BF16", None), ("K8V4", None), ("K8V4 K4V2", 18)])
def test_triton_keeps_what_the_reference_does(tiers, high, first):
    """In the row's own pages, or in new ones, with tokens of two tiers the second time."""
    chosen = policy(high=high, redundancy=Redundancy(0.5, 0.1, 2.0, 16))  # no cosine is near its threshold
    manager, queries = filled(tiers, chosen)
    state = manager.state
    twin = clone_state(state)
    manager.space.extend(5, (30,) * len(manager.fmt.tiers))
    manager.space.flush()
    twin.row_blocks.copy_(state.row_blocks)
    results = []
    for ops, here in ((ReferenceOps(twin, chosen), twin), (TritonOps(state, chosen, 2 * GROUP, 400), state)):
        scoring = ops.score_running(here, 1, LENGTH, queries, SCALING, first=first, most=LENGTH)
        scores = scoring.scores.clone()
        ops.copy_scored(here, 5, [(1, 0, LENGTH)], LENGTH, scoring)
        maps = [tier_map(here, 5, LENGTH)]
        if len(state.fmt.tiers) == 1:
            ops.compact_scored(here, 1, LENGTH, scoring)
            maps.append(tier_map(here, 1, LENGTH))
        results.append((scores, maps))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-3 if DEVICE == "cpu" else 0.02, atol=1e-6)
    for got, expected in zip(results[1][1], results[0][1], strict=True):
        assert DEVICE != "cpu" or (got == expected).all()
        assert ((got < len(state.fmt.tiers)).sum(2) == KEEP).all()
        assert high is None or ((got == 0).sum(2) == high).all()


def test_a_row_is_compressed_each_time_it_is_full():
    chosen = policy(keep=16, limit=24, window=4, redundancy=None, slots=0.001)
    manager = make_manager(make_format("BF16", page_tokens=4), pages=500, policy=chosen)
    running, generator = manager.running, torch.Generator().manual_seed(1)
    assert running is not None and running.cache.slots == 1
    add_prompt(manager, 1, 10, generator)
    add_prompt(manager, 2, 10, generator)
    for row in (1, 2):
        running.began(row)
    compressed: dict[int, list[int]] = {1: [], 2: []}
    rows = torch.tensor([1, 2], device=DEVICE)
    for length in range(10, 60):
        begin_step(manager, [1, 2], [1, 1], [length, length])
        for layer in range(manager.state.num_layers):
            position = torch.full((2,), length, device=DEVICE)
            append(manager.state, layer, *vectors(manager.state, 2, generator), rows, torch.zeros_like(rows), position)
        for row in (1, 2):
            if running.follow(row) and running.compress(row, []):
                compressed[row].append(length + 1)
                held = int(manager.state.own_tokens[row, :, :, 0].max())
                assert held == 16 == running.held(row)
            assert int(manager.state.own_tokens[row, :, :, 0].max()) <= manager.space.most_tokens(row)
        manager.counts.settle()
        manager.running.check_integrity()
        check_integrity(manager)
    first, second = compressed[1], compressed[2]
    assert first[0] == 24 and 24 < second[0] <= 24 + 8, "the second waits for the first one's query slot"
    assert len(first) > 3 and len(second) > 3 and running.waited > 0
    assert running.compressions == len(first) + len(second)
    assert manager.space.most_tokens(1) <= 24 + 4, "what judging and packing set aside follows what is held"
    manager.release(1)
    assert running.held(1) == 0
    running.check_integrity()


def test_kv_slots_follow_the_longest_reply_and_growth_is_at_full_price():
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=4), pages=500, policy=policy(keep=16, limit=24))
    assert kept_share(manager.policy, 64) == 0.25 and kept_share(manager.policy, 8) == 1.0
    ledger = PageLedger(manager, 100)
    longest = manager.geometry.max_tokens
    assert ledger.kv_slots >= 100 * longest / 16, "a pool of budgets, each of the longest reply"
    add_prompt(manager, 1, 40, torch.Generator().manual_seed(1))
    assert manager.running is not None
    manager.running.began(1)
    manager.rows.end_prompt(1)
    manager.counts.settle()
    assert ledger.growth_of(1, 1) == ledger.growth_estimate() == 1.0, "new tokens are high until the next compression"


@pytest.mark.parametrize(
    ("length", "more", "expected"), [(10, 5, 5), (10, 100, 30), (40, 9, 0), (41, 100, 10), (900, 4, 4), (900, 100, 10)]
)
def test_what_a_request_may_still_grow_by(length, more, expected):
    manager = make_manager(make_format("BF16"), policy=policy())
    assert manager.running is not None and manager.running.growing(length, more) == expected


def test_a_copy_has_the_table_blocks_that_it_asks_for():
    """A row of high tokens alone takes blocks of both tiers for its copy: where only those that ``copy_blocks`` names
    are free, the copy succeeds."""
    chosen = zipage_policy(keep=320, limit=330, window=4, high=160)
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=4), pages=2000, policy=chosen)
    running, space = manager.running, manager.space
    assert running is not None
    add_prompt(manager, 1, 20, torch.Generator().manual_seed(1), compact=False)
    running.began(1)
    manager.rows.end_prompt(1)
    length = 20
    while not running.follow(1):
        begin_step(manager, [1], [1], [length])
        length += 1
        manager.counts.settle()
    needed = running.copy_blocks(1)
    assert needed < len(space.free_blocks)
    del space.free_blocks[needed:]
    assert running.compress(1, [])
    assert running.held(1) == 320 and int(manager.state.fault[1]) == 0


def test_a_rows_outlook_follows_it():
    """Pages, the tokens that the last of them takes yet, and the next compression, as the device has them."""
    chosen = policy(keep=16, limit=24, window=4, redundancy=None)
    manager = make_manager(make_format("BF16", page_tokens=4), pages=500, policy=chosen)
    running, heads = manager.running, manager.geometry.heads
    assert running is not None and running.outlook(1, 50, 9, 0) is None
    generator, rows = torch.Generator().manual_seed(1), torch.tensor([1], device=DEVICE)
    add_prompt(manager, 1, 10, generator)
    running.began(1)
    manager.rows.end_prompt(1)
    dues = []
    for length in range(10, 60):
        found = running.outlook(1, 50, 70, 2)
        assert found is not None and found.expected == found.left == 50 and found.copy == 0
        assert found.pages == found.prompt == manager.device.pages_of(1) / heads + 2
        held = int(manager.state.own_tokens[1].max())
        assert found.free == -held % 4 and found.due == 24 - held and found.kept == 4
        dues.append(found.due)
        begin_step(manager, [1], [1], [length])
        for layer in range(manager.state.num_layers):
            position = torch.full((1,), length, device=DEVICE)
            append(manager.state, layer, *vectors(manager.state, 1, generator), rows, torch.zeros_like(rows), position)
        if running.follow(1):
            assert running.outlook(1, 50, 70, 0).due == 0 and not running.near_copy_pages  # type: ignore[union-attr]
            assert running.compress(1, [])
    assert dues[0] == 14 and max(dues[14:]) == 8
    assert running.outlook_of_prompt(30, 0, 50, 9, 0)[:6] == (8, 4, 0, 4, 8, 50)
    assert running.outlook_of_prompt(9, 6, 50, 9, 1) == (4, 4, 0, 4, 9, 50, 9, 0)
    manager.prompts.share_min_tokens = 9
    assert running.outlook_of_prompt(9, 6, 50, 9, 1).copy == 1, "9 tokens take 3 pages, and what stays takes 4"


def test_pages_for_a_copy_are_set_aside_while_one_is_near():
    manager = make_manager(
        make_format("K8V4 K4V2", page_tokens=4), pages=500, policy=policy(keep=16, limit=24, window=2)
    )
    ledger, running = PageLedger(manager, 100), manager.running
    assert running is not None
    for row in (1, 2):
        add_prompt(manager, row, 10, torch.Generator().manual_seed(1), compact=False)
        running.began(row)
        manager.rows.end_prompt(row)
    manager.counts.settle()
    before = ledger.uncommitted_pages()
    for length in range(10, 24):
        begin_step(manager, [1], [1], [length])
        running.follow(1)
        manager.counts.settle()
        near = length + 1 >= 24 - 2 - 2
        taken = before - ledger.uncommitted_pages()
        with ledger.checking():
            assert ledger.uncommitted_pages() - (before - taken) == near * running.copy_pages, "admission counts copies"
        with ledger.prefilling():
            assert ledger.uncommitted_pages() - (before - taken) == near * running.copy_pages
    manager.release(2)
    manager.counts.settle()
    free = ledger.uncommitted_pages()
    with ledger.checking():
        assert ledger.uncommitted_pages() == free, "a request that runs alone would be retracted for its own sake"


@pytest.mark.cover(1)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_others_hold_for_a_row_joins_its_own_pages(frozen):
    """One tier: what stays is what a copy of all would have, in as many pages; on the way no more are taken than said.
    Triton does what the reference does."""
    chosen = policy(redundancy=None)
    manager, queries = filled("BF16", chosen)  # row 1 of 61 tokens
    state, generator, own = manager.state, torch.Generator().manual_seed(3), 20
    for row in (2, 5, 6):
        manager.space.extend(row, (40,))
    manager.space.flush()
    manager.ops.attach(2, 1, 0, LENGTH - own)
    manager.rows.grow(2, LENGTH - own, in_prompt=False)
    add_prompt(manager, 2, own, generator, compact=False)
    if frozen:
        manager.device.freeze({2: 0})
    whole, twin = clone_state(state), clone_state(state)
    results = []
    for ops, here in ((ReferenceOps(twin, chosen), twin), (TritonOps(state, chosen, 2 * GROUP, 400), state)):
        scoring = ops.score_running(here, 2, LENGTH, queries, SCALING, first=False, most=LENGTH)
        before, free = here.entries[2].clone(), int(here.counters[1] - here.counters[0])
        writable = before - here.own_entry[2]
        ops.compact_scored(here, 2, LENGTH, scoring)
        ops.transfer_pages(here, 2, 5)
        assert torch.equal(here.entries[5], before - writable)
        ops.copy_scored(here, 2, [(5, 0, LENGTH)], LENGTH, scoring)
        held = here.entries[2, :, :, 0]
        assert (held == -(-KEEP // 4)).all() and (here.own_tokens[2, :, :, 0] == KEEP).all()
        taken = free - int(here.counters[1] - here.counters[0])
        assert taken == int((held - writable[..., 0]).sum()) and not here.own_entry[2].any()
        ops.release(5)
        results.append(tier_map(here, 2, LENGTH))
    assert DEVICE != "cpu" or (results[0] == results[1]).all()
    reference = ReferenceOps(whole, chosen)
    scoring = reference.score_running(whole, 2, LENGTH, queries, SCALING, first=False, most=LENGTH)
    reference.copy_scored(whole, 6, [(2, 0, LENGTH)], LENGTH, scoring)
    assert (tier_map(whole, 6, LENGTH) == results[0]).all()
