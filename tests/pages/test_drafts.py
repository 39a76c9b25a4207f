"""Chains and trees of drafts at random: bounds are never optimistic, whenever the host hears of what was accepted."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch

from sglang_diffkv.attention.draft_trees import TreeLinks
from sglang_diffkv.attention.verification import VerifyWrapper
from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.page_format import PageFormat, Tier
from sglang_diffkv.mem_pool.integrity import check_bounds, check_integrity, check_settled
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.ops import Scaling
from tests.helpers import begin_step
from tests.policies import diffkv_policy

ROWS = 6


def prompt(manager: PageManager, row: int, length: int, generator: torch.Generator) -> None:
    """Tokens of a prompt with random keys, compacted."""
    state = manager.state
    begin_step(manager, [row], [length], [0])
    index = torch.arange(length)
    for layer in range(state.num_layers):
        key, value = torch.randn(2, length, state.num_heads, 64, generator=generator).bfloat16()
        append(state, layer, key, value, torch.full((length,), row), index, index)
    manager.prompts.end(row)


def chains_of(nodes: int, longest: int) -> torch.Tensor:
    """Links [2, 1, nodes] of a tree whose root has chains of ``longest - 1`` drafts behind it."""
    first, sibling = torch.arange(1, nodes + 1), torch.full((nodes,), -1)
    heads = torch.arange(1, nodes, longest - 1)
    first[heads[1:] - 1] = first[-1] = -1
    sibling[heads[:-1]] = heads[1:]
    return torch.stack([first, sibling]).unsqueeze(1)


@pytest.mark.parametrize("late", [0, 1], ids=["in order", "a pass late"])
@pytest.mark.parametrize(("drafts", "nodes"), [(2, 0), (7, 0), (3, 9)])
def test_random_drafts(drafts: int, nodes: int, late: int) -> None:
    """Chains of ``drafts``, or trees of ``nodes`` of which a path has up to as many."""
    fmt = PageFormat(64, 64, (Tier(8, 4), Tier(4, 2)), 4)
    geometry = Geometry(
        fmt,
        2,
        2,
        num_pages={2: 130, 3: 100, 7: 180}[drafts],
        num_rows=ROWS + 1,
        num_segments=4,
        max_tokens=200 + 2 * drafts,
    )
    form = {"drafts": nodes, "longest_path": drafts} if nodes else {"drafts": drafts}
    manager = PageManager(geometry, diffkv_policy(1.0, 0.05, 8), **form, high_rows=True)
    verify = VerifyWrapper(manager.ops, q_heads=2, longest_path=manager.longest_path)
    links = TreeLinks(*chains_of(nodes, drafts)) if nodes else None
    draw, generator = random.Random(drafts + late), torch.Generator().manual_seed(1)
    unheard: deque[dict[int, int]] = deque()  # accepted by the device, and not known to the host
    true: dict[int, int] = {}
    passes = retracted = 0

    def leave(row: int) -> None:
        manager.release(row)
        del true[row]
        for heard in unheard:
            heard.pop(row, None)

    while passes < 40:
        for row in draw.sample(range(1, ROWS + 1), 2):
            if (
                row not in true
                and manager.counts.free_bound() - manager.counts.headroom_bound() > 48 + manager.counts.unknown
            ):
                if drafts == 7 and row % 3 == 0:  # no token of its chains goes down, as the check of structures knows
                    manager.high.keep(row)
                prompt(manager, row, length := draw.randrange(3, 40), generator)
                true[row] = length
        while manager.counts.free_bound() < manager.counts.headroom_bound():
            leave(draw.choice(list(true)))
            retracted += 1
        rows = [row for row in true if draw.random() < 0.8]
        if not rows:
            continue
        passes += 1
        manager.plan_verification(rows)
        manager.launch_step()
        ids = torch.tensor(rows)
        trees = None if links is None else TreeLinks(*(x.expand(len(rows), nodes) for x in links))
        verify.plan(ids, torch.tensor([true[row] for row in rows]), manager.drafts, trees)
        verify.begin()
        for layer in range(2):
            q, key, value = torch.randn(3, len(rows) * manager.drafts, 2, 64, generator=generator).bfloat16()
            verify.run(layer, q, key, value, Scaling(0.2))
        accepted = [draw.randint(1, drafts) for _ in rows]
        path = None
        if nodes:
            branch = torch.tensor([draw.randrange(0, nodes - drafts + 1, drafts - 1) for _ in rows]).unsqueeze(1)
            path = (torch.arange(drafts) + branch).where(torch.arange(drafts) > 0, 0)
            path += nodes * torch.arange(len(rows)).unsqueeze(1)
        verify.commit(torch.tensor(accepted), path=path)
        for row, count in zip(rows, accepted, strict=True):
            true[row] += count
        unheard.append(dict(zip(rows, accepted, strict=True)))
        check_bounds(manager)
        check_integrity(manager)
        while len(unheard) > late:
            manager.counts.report()
            for row, count in unheard.popleft().items():
                if row in manager.rows:
                    manager.rows.accepted(row, manager.rows.length(row) + count, drafts)
        if not unheard:
            assert manager.rows.lengths() == true
        for row in [row for row in true if true[row] > 140 or draw.random() < 0.03]:
            leave(row)
        check_bounds(manager)
        assert not manager.counts.faulted, "the ring was empty"
    for row in list(true):
        manager.release(row)
    check_settled(manager)
    assert retracted, "the pool is too small for all"
    assert manager.device.free_pages() == geometry.num_pages
    assert len(manager.space.free_blocks) == manager.space.num_blocks
