"""What ends a pass's prompts comes behind its results: compaction, and faults that results need not wait for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.steps import LaunchedStep
from sglang_diffkv.ops.base import Step
from tests.helpers import make_manager, seen_by
from tests.kernels.triton_helpers import make_format, vectors
from tests.policies import diffkv_policy

LENGTH = 40


def manager_of(pages: int = 400) -> PageManager:
    policy = diffkv_policy(1.0, 0.0, window=6)
    return make_manager(make_format("K8V4 K4V2", page_tokens=4), layers=1, pages=pages, policy=policy)


def compute(manager: PageManager, row: int) -> LaunchedStep:
    """A prompt of ``LENGTH`` tokens in one pass, whose layers are launched."""
    manager.plan_step([row], [LENGTH], [0], prompts=[LENGTH], ending=[row])
    step = manager.launch_step()
    assert step is not None
    numbers = [torch.tensor([x]) for x in (row, 0, LENGTH)]
    pass_ = Step.extend(*numbers, [0], [LENGTH])
    manager.ops.begin(pass_, decode=False)
    generator = torch.Generator().manual_seed(row)
    for layer in range(manager.geometry.num_layers):
        manager.ops.append(layer, *vectors(manager.state, LENGTH, generator), pass_)
    return step


def plan_another(manager: PageManager) -> None:
    manager.plan_step([2], [3], [0], prompts=[3], ending=[2])


def release_another(manager: PageManager) -> None:
    manager.release(3)


@pytest.mark.parametrize("then", [PageManager.end_pass, plan_another, release_another])
def test_a_computed_pass_is_ended_once_by_whatever_comes_next(then: Any) -> None:
    """As if its prompts were ended at once."""
    found = []
    for late in (False, True):
        manager = manager_of()
        step = compute(manager, 1)
        if late:
            manager.computed(step)
            assert manager.prompts.outcomes["compressed"] == 0 and manager.rows.in_prompt(1)
            then(manager)
            manager.end_pass()
        else:
            manager.end_prompts(step)
        assert manager.prompts.outcomes["compressed"] == 1 and not manager.rows.in_prompt(1)
        manager.cancel_step()
        manager.counts.settle()
        check_integrity(manager)
        found.append(seen_by(manager, 1))
    assert found[0] == found[1]


def test_results_wait_for_the_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its faults are known, and no count of what follows it was waited for."""
    manager = manager_of(pages=24)  # a prompt takes 10 pages of each of two heads, and the second one finds too few
    counts = manager.counts
    for row in (1, 2):
        manager.computed(compute(manager, row))
        manager.end_pass()
        monkeypatch.setattr(counts, "refresh", lambda: pytest.fail("results wait for more than their pass"))
        counts.report()
        monkeypatch.undo()
        assert counts.faulted == ({2} if row == 2 else set())
    counts.settle()
    assert counts.faulted == {2} and counts.faults == 1
    check_integrity(manager)


def test_a_row_s_next_request_has_no_part_in_a_fault() -> None:
    manager = manager_of(pages=24)
    for row in (1, 2):
        manager.computed(compute(manager, row))
        manager.end_pass()
    manager.release(2)
    manager.plan_step([2], [1], [0], prompts=[1], ending=[2])
    for _ in (1, 2):
        manager.counts.report()
    assert not manager.counts.faulted
