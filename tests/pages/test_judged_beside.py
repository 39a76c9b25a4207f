"""Running requests that are judged beside the next pass: what stays is what stays where they are judged between two
steps, however late the judgement runs; what they hold is nobody else's before it has."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.mem_pool.counts import LOOKAHEAD
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.running import RunningCompression
from sglang_diffkv.ops import ReferenceOps
from sglang_diffkv.ops.decisions import ALIGNED
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.base import Redundancy
from sglang_diffkv.policies.zipage import ZipagePolicy, ZipagePolicyConfig
from tests.helpers import begin_step, page_bytes, tier_map, visible
from tests.kernels.triton_helpers import DEVICE, add_prompt, make_format, make_manager, vectors
from tests.late import run_late
from tests.policies import zipage_policy

LIMIT, KEEP, WINDOW, PROMPT = 24, 16, 4, 12
TIERS_SCORED, OTHER, NEW = (1, 2), 3, 4


def policy(**changes: Any) -> ZipagePolicy:
    """Of small budgets."""
    redundancy = Redundancy(0.5, 0.1, 2.0, 8)
    return replace(zipage_policy(KEEP, LIMIT, WINDOW, pool=3, redundancy=redundancy, asynchronous=True), **changes)


def manager_of(tiers: str, chosen: ZipagePolicy, kernels: str = "reference") -> PageManager:
    """With rows 1 to 3 past their prompts, 1 and 2 one step before their limit."""
    triton = partial(TritonOps, policy=chosen, q_heads=2, max_tokens=400)
    make_ops = triton if kernels == "triton" else lambda state: ReferenceOps(state, chosen)
    manager = make_manager(make_format(tiers, page_tokens=4), pages=600, policy=chosen, make_ops=make_ops)
    running = running_of(manager)
    generator = torch.Generator().manual_seed(1)
    running.cache.queries.copy_(torch.randn(running.cache.queries.shape[1:], generator=generator))
    for row in (*TIERS_SCORED, OTHER):
        add_prompt(manager, row, PROMPT - 3 * (row == OTHER), torch.Generator().manual_seed(row))
        running.began(row)
    while manager.rows.length(1) < LIMIT - 1:
        decode(manager, [*TIERS_SCORED, OTHER])
        assert not any(running.follow(row) for row in (*TIERS_SCORED, OTHER))
    return manager


def running_of(manager: PageManager) -> RunningCompression:
    assert manager.running is not None
    return manager.running


def decode(manager: PageManager, rows: list[int]) -> None:
    """A token each, the same in any batch."""
    lengths = [manager.rows.length(row) for row in rows]
    begin_step(manager, rows, [1] * len(rows), lengths)
    for row, length in zip(rows, lengths, strict=True):
        generator, at = torch.Generator().manual_seed(1000 * row + length), torch.tensor([length], device=DEVICE)
        for layer in range(manager.state.num_layers):
            new = vectors(manager.state, 1, generator)
            append(manager.state, layer, *new, torch.full_like(at, row), torch.zeros_like(at), at)
    manager.counts.settle()


def others_go_on(manager: PageManager) -> None:
    """A step of another request, one that ends, and a prompt that is compacted, in pages that were others' before."""
    decode(manager, [OTHER])
    manager.release(OTHER)
    add_prompt(manager, NEW, 3 * LIMIT, torch.Generator().manual_seed(NEW))
    running_of(manager).began(NEW)


def held(manager: PageManager, row: int) -> tuple[np.ndarray, list[tuple[Any, ...]]]:
    """What a row holds, wherever it lies."""
    seen = visible(manager.state, row)
    columns = (seen.tier, seen.layer, seen.head, seen.position, seen.own_slot, seen.score)
    return tier_map(manager.state, row, manager.rows.length(row)), sorted(zip(*(x.tolist() for x in columns)))


@pytest.mark.parametrize(
    ("tiers", "kernels", "late", "first"),
    [
        *((tiers, "reference", *x) for tiers in ("BF16", "K8V4 K4V2") for x in product((False, True), (True, False))),
        ("K8V4 K4V2", "triton", True, True),
        pytest.param("BF16", "triton", True, True, marks=pytest.mark.full),  # quick: requests that leave meanwhile
        *(
            pytest.param(tiers, "triton", *x, marks=pytest.mark.full)
            for tiers in ("BF16", "K8V4 K4V2")
            for x in ((False, True), (True, False), (False, False))
        ),
    ],
)
def test_what_stays_is_what_stays_between_two_steps(tiers, kernels, late, first):
    """Two requests at once, and a prompt that is judged while they are; the first and the second compression."""
    chosen = policy(high=8 if "K4V2" in tiers else None)
    found = []
    for beside in (False, True):
        manager = manager_of(tiers, chosen, kernels)
        running = running_of(manager)
        if beside and late:
            run_late(manager.device)
        for round_ in range(1 if first else 2):
            due = []
            while not due:
                decode(manager, [*TIERS_SCORED])
                due = [row for row in TIERS_SCORED if running.follow(row)]
            assert due == [*TIERS_SCORED]
            assert all(running.score_beside(row) if beside else running.compress(row, []) for row in due)
            running.check_integrity()
            if not round_:
                others_go_on(manager)
            check_integrity(manager)
            if beside:
                assert all(running.compress(row, []) for row in due)
            running.check_integrity()
            manager.counts.settle()
            check_integrity(manager)
        assert running.compressions == len(TIERS_SCORED) * (1 if first else 2) == running.beside or not beside
        found.append([held(manager, row) for row in TIERS_SCORED])
    for (expected, tokens), (got, theirs) in zip(*found, strict=True):
        assert (got == expected).all() and theirs == tokens
    assert (found[0][0][0] < len(tiers.split())).sum(2).min() == KEEP


@pytest.mark.parametrize("late", [False, True])
def test_a_request_that_leaves_while_it_is_judged(late):
    """Its pages and its query slot are another's only behind the judgement, which nobody uses."""
    manager = manager_of("BF16", policy(), "triton")
    running, state = running_of(manager), manager.state
    launched: list[str] = []
    if late:
        run_late(manager.device, launched)
    decode(manager, [*TIERS_SCORED])
    assert all(running.follow(row) and running.score_beside(row) for row in TIERS_SCORED)
    release = manager.device.release
    manager.device.release = lambda row, **more: (launched.append(f"released {row}"), release(row, **more))  # type: ignore[method-assign,assignment]
    free = manager.device.free_pages()
    manager.release(1)
    assert launched == ["judged"] * late + ["released 1"]
    assert manager.device.free_pages() > free and int(running.cache.slot_of[1]) < 0
    running.check_integrity()
    others = page_bytes(state, sorted(set(visible(state, 2).page.tolist()))) if DEVICE == "cpu" else b""
    others_go_on(manager)
    if DEVICE == "cpu":
        assert page_bytes(state, sorted(set(visible(state, 2).page.tolist()))) == others
    assert running.compress(2, []) and running.compressions == running.beside == 1
    assert running.drop_scoring(1) is None
    running.check_integrity()
    check_integrity(manager)


def test_a_dropped_judgement_changes_nothing():
    """A row that finds no pages for it goes on and is judged again."""
    manager = manager_of("BF16", policy())
    running = running_of(manager)
    decode(manager, [*TIERS_SCORED])
    assert running.follow(1) and running.score_beside(1)
    before = held(manager, 1)[1]
    running.drop_scoring(1)
    running.check_integrity()
    assert held(manager, 1)[1] == before
    decode(manager, [1])
    assert running.follow(1) and running.score_beside(1) and running.compress(1, [])
    assert running.held(1) == KEEP


def test_judgements_share_a_memory_of_the_longest_sequence():
    """Where it is full nothing is judged; with the last of them it is free again."""
    manager = manager_of("BF16", policy())
    running = running_of(manager)
    longest = manager.geometry.max_tokens
    decode(manager, [*TIERS_SCORED])
    assert all(running.follow(row) for row in TIERS_SCORED)
    assert running.score_beside(1)
    running._positions = longest - LIMIT + 1
    assert not running.score_beside(2), "there is no room"
    running._positions = (longest - LIMIT) // ALIGNED * ALIGNED
    assert running.score_beside(2)
    assert running.compress(1, []) and running._positions and running.compress(2, []) and not running._positions


def test_memory_for_judgements_is_there_from_the_start():
    for asynchronous in (False, True):
        manager = manager_of("BF16", policy(asynchronous=asynchronous), "triton")
        decisions = manager.ops.decisions
        assert decisions.memory is not None and len(decisions.memory) == 3
        twice = decisions.second is not None and decisions.second.shape == decisions.memory.shape
        assert twice == asynchronous
        assert manager.ops.memory()["decisions"] >= decisions.memory.nbytes * (1 + asynchronous)
    empty = make_manager(make_format("BF16", page_tokens=4), policy=policy(redundancy=None))
    before = empty.state.pages.clone()
    running_of(empty).take_memory()
    assert torch.equal(empty.state.pages.view(torch.int16), before.view(torch.int16)), "nothing changes"


def test_what_is_configured():
    assert not ZipagePolicyConfig(max_blocks=4).build().running.asynchronous
    fields = {"name": "zipage", "max_blocks": 4, "asynchronous": True}
    chosen = DiffKVConfig.model_validate({"tiers": ["BF16"], "policy": fields}).build_policy()
    assert chosen.running is not None and chosen.running.asynchronous
    late, usual = (running_of(make_manager(make_format("BF16"), policy=policy(asynchronous=x))).saw for x in (1, 0))
    assert (late.missed, usual.missed) == (1, 0), "the step beside which a request is judged, each time"
    assert late.late == usual.late >= LOOKAHEAD
