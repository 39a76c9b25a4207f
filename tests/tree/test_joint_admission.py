"""Admission beside requests that hold a budget: what the tree holds for one alone, who fits, who is asked again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_diffkv.layout.page_format import Tier
from sglang_diffkv.srt.scheduling.joint_admission import STEPS, JointAdmission
from tests.policies import zipage_policy
from tests.tree.stand_in import Fields
from tests.tree.tree_world import World

KEEP, LIMIT, PAGE = 64, 96, 8


def world(capacity: int, **changes: Any) -> World:
    policy = zipage_policy(KEEP, LIMIT, window=4, slots=1.0, **changes)
    return World(capacity, policy=policy, tiers=(Tier(8, 4),), page_tokens=PAGE, exact=False, rows=12)


def running(this: World, prompt: int, reply: int = 250) -> Any:
    """A request whose prompt, which nobody else has, has run."""
    req = this.prompt(this.tokens(prompt))
    req.sampling_params.max_new_tokens = reply
    this.manager.counts.settle()
    return req


def asking(this: World, prompt: int, reply: int = 250) -> Any:
    """A request that waits: it has matched nothing."""
    tokens = this.tokens(prompt)
    sampling = SimpleNamespace(max_new_tokens=reply, ignore_eos=True)
    kv = SimpleNamespace(req_pool_idx=None)
    return Fields(
        kv=kv, req_pool_idx=None, sampling_params=sampling, output_ids=[], prefix_len=0, prefix_indices=[],
        full_untruncated_fill_ids=tokens, last_node=this.tree.root_node, finished=lambda: False,
    )  # fmt: skip


def test_what_the_tree_holds_for_one_request_alone() -> None:
    this = world(600)
    tokens = this.tokens(40)
    first = this.prompt(tokens)
    this.manager.counts.settle()
    (segment,) = this.segments()
    assert segment.pages == 5 == this.tree.pages_read_alone(first.last_node)
    second = this.start([*tokens, *this.tokens(40)])
    assert this.tree.pages_read_alone(first.last_node) == 0, "another holds it too"
    assert this.tree.pages_read_alone(this.tree.root_node) == 0
    this.plan(second)
    this.launch(second)
    this.leave(first)
    this.manager.counts.settle()
    assert this.tree.pages_read_alone(second.last_node) == segment.pages
    ledger = this.requests.ledger
    before = ledger.evictable_pages
    this.leave(second, insert=False)
    assert ledger.evictable_pages - before == segment.pages


def test_a_prompt_fits_beside_what_all_hold_together() -> None:
    this = world(400)
    joint = this.requests.admission_rule
    assert isinstance(joint, JointAdmission)
    first = running(this, 30)
    growth, fits = joint.check(asking(this, 60), 60, [], 1.0)
    assert fits and growth(60, 250) == LIMIT - 60, "alone, up to its limit"
    growth, fits = joint.check(asking(this, 60), 60, [first], 1.0)
    both = joint.share([first], 1.0) + growth(60, 250)
    assert fits and both <= (LIMIT - 30) + (LIMIT - 60) + KEEP + 3 * PAGE
    others = [first, *(running(this, 30) for _ in range(2))]
    assert joint.check(asking(this, 30, reply=8), 30, others, 1.0)[1], "one that ends soon"
    assert not joint.check(asking(this, 60), 60, others, 1.0)[1], "400 tokens are not four limits and a copy"


def test_a_refused_prompt_is_asked_again_when_there_is_room() -> None:
    this = world(400)
    joint = this.requests.admission_rule
    assert isinstance(joint, JointAdmission)
    others = [running(this, 30) for _ in range(3)]
    assert not joint.room_for_refused(others, 1.0), "nobody was refused"
    joint.refuse(asking(this, 60), 60)
    found = [joint.room_for_refused(others, ratio) for ratio in (1.0, 0.01, 0.01, 0.01, 0.01)]
    assert found == [False] * STEPS + [True], "SGLang expects all to end soon; it is looked at now and then"
    this.leave(others.pop())
    this.manager.counts.settle()
    assert joint.room_for_refused(others, 1.0), "another has left"
    this.requests._forget_refused()
    assert joint.refused is None


def test_one_that_was_let_in_too_early_is_not_asked_at_each_step() -> None:
    this = world(400)
    joint = this.requests.admission_rule
    assert isinstance(joint, JointAdmission)
    others = [running(this, 30)]
    found, waits = [], asking(this, 60)
    for _ in range(2 * STEPS):
        joint.refuse(waits, 60)  # SGLang's own sum says no
        found.append(joint.room_for_refused(others, 1.0))
    assert found == ([True] + [False] * (STEPS - 1)) * 2
    joint.refuse(asking(this, 60), 60)
    assert joint.room_for_refused(others, 1.0)


def test_checking_ends_where_it_began() -> None:
    """SGLang adds up what is free behind the check of a prompt, which looks at it too."""
    this = world(600)
    joint, ledger = this.requests.admission_rule, this.requests.ledger
    assert isinstance(joint, JointAdmission)
    others = [running(this, 30) for _ in range(3)]
    with ledger.checking():
        before = ledger.available()
        joint.check(asking(this, 60), 60, others, 1.0)
        assert ledger._checking and ledger.available() == before
    assert not ledger._checking


def test_no_more_run_than_have_query_slots_where_scheduling_is_constrained() -> None:
    this = world(1000, constrained=True)
    joint, budgets = this.requests.admission_rule, this.manager.running
    assert isinstance(joint, JointAdmission) and budgets is not None
    slots = budgets.cache.slots
    others = [running(this, 30, reply=2) for _ in range(3)]
    assert slots > 3 and joint.check(asking(this, 30, 2), 30, others, 1.0)[1]
    budgets.cache.queries = budgets.cache.queries[:3]
    assert not joint.check(asking(this, 30, 2), 30, others, 1.0)[1]
    joint.refuse(asking(this, 30, 2), 30)
    assert not joint.room_for_refused(others, 1.0) and joint.room_for_refused(others[:2], 1.0)


@pytest.mark.parametrize("prompt", [40, 120])
def test_parts_of_what_all_hold_add_up(prompt: int) -> None:
    this = world(900)
    joint = this.requests.admission_rule
    assert isinstance(joint, JointAdmission)
    others = [running(this, prompt) for _ in range(4)]
    alone = joint.share(others[:1], 1.0)
    assert alone + PAGE >= (LIMIT - min(prompt, KEEP)) and joint.share(others, 1.0) <= alone
    assert joint.share([], 1.0) == 0
