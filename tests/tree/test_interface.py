"""What scheduling knows of a prefix cache and of optional parts: an order of events, and a tree by its interface."""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_diffkv.srt.hooks.table import process_batch_result, run_batch
from sglang_diffkv.srt.scheduling.joint_admission import AdmissionRule
from sglang_diffkv.srt.tree.events import RequestListener
from sglang_diffkv.srt.tree.interface import NoTree, PrefixTree
from sglang_diffkv.srt.tree.parts import ExactRule, NodeStates, Parts, PathRule, Restoring
from tests.tree.stand_in import offer
from tests.tree.tree_world import World

BASES: dict[str, type[RequestListener]] = {
    "compression": RequestListener,
    "states": NodeStates,
    "exact": ExactRule,
    "joiner": PathRule,
    "retracted": Restoring,
}
"""Optional parts, in the order in which they hear of events."""

EVENTS = [name for name in vars(RequestListener) if not name.startswith("_")]


def recording(name: str, log: list[tuple[str, str]]) -> Any:
    """A part that does nothing and writes down what it hears."""

    def heard(event: str) -> Any:
        return lambda self, *args, **kwargs: log.append((event, name))

    return type(name, (BASES[name],), {event: heard(event) for event in EVENTS})()


def test_parts_hear_events_in_order() -> None:
    world, log = World(400, exact=False), []
    parts = Parts(**{name: recording(name, log) for name in BASES})
    world.tree.connect(parts)
    world.requests.connect(world.tree, parts, AdmissionRule(world.requests.ledger))
    world.requests.scheduling_begins([])
    tokens = world.tokens(40)
    world.leave(world.prompt(tokens))
    world.requests.retracting(world.prompt(tokens))
    world.requests.after_step([])
    world.tree.reset()
    heard = [(event, [name for _, name in told]) for event, told in groupby(log, key=lambda entry: entry[0])]
    assert all(names == list(BASES) for _, names in heard)
    assert [event for event, _ in heard] == [
        "queue_seen", "scheduling_begins",
        "chunk_planned", "published", "prompt_published", "letting_go", "published",
        "letting_go", "row_released", "left",
        "prompt_begun", "chunk_planned", "prompt_published", "retracting",
        "results_out", "runs_on", "reset",
    ]  # fmt: skip


def test_a_server_without_a_tree() -> None:
    """It answers whether there is room, and makes none."""
    world = World(400, exact=False)
    ledger = world.requests.ledger
    tree: PrefixTree = NoTree(ledger)
    world.requests.connect(tree, Parts(), AdmissionRule(ledger))
    pages, slots = ledger.uncommitted_pages(), ledger.uncommitted_kv_slots()
    assert tree.make_pages(pages) and not tree.make_pages(pages + 1)
    assert tree.make_kv_slots(slots) and not tree.make_kv_slots(slots + 1)
    rows, blocks = world.manager.segments.rows_free, len(world.manager.space.free_blocks)
    assert tree.make_segment_rows(rows) and not tree.make_segment_rows(rows + 1)
    assert tree.make_table_blocks(blocks) and not tree.make_table_blocks(blocks + 1)
    assert world.requests.path(world.prompt(world.tokens(30))) == [] and tree.report() == {}


class OtherTree(NoTree):
    """A tree of another make, which holds one page that nobody reads."""

    def __init__(self, world: World) -> None:
        super().__init__(world.requests.ledger)
        self.asked: list[str] = []
        self.ledger.hold(1, locked=False)

    def make_pages(self, pages: int, *, partly: bool = False) -> bool:
        self.asked.append("pages")
        return super().make_pages(pages, partly=partly)

    def make_table_blocks(self, blocks: int) -> bool:
        self.asked.append("table blocks")
        return super().make_table_blocks(blocks)

    def make_kv_slots(self, count: int) -> bool:
        self.asked.append("KV slots")
        return super().make_kv_slots(count)


def test_prompts_are_admitted_over_another_tree() -> None:
    world = World(400, exact=False)
    requests = world.requests
    tree = OtherTree(world)
    requests.connect(tree, Parts(), AdmissionRule(requests.ledger))
    req = world.admit(world.tokens(40))
    admission = requests.check(req, 1 << 30, [])
    assert admission.fits and admission.needed == 40 and admission.path == []
    requests.admit(req, admission)
    assert tree.asked == ["table blocks", "KV slots", "pages"]


@pytest.mark.parametrize("locked", [False, True])
def test_the_ledger_counts_what_a_tree_holds(locked: bool) -> None:
    ledger = World(400, exact=False).requests.ledger
    ledger.hold(5, locked=locked)
    assert (ledger.tree_pages, ledger.evictable_pages) == (5, 0 if locked else 5)
    (ledger.unlock if locked else ledger.lock)(5)
    assert (ledger.tree_pages, ledger.evictable_pages) == (5, 5 if locked else 0)
    ledger.release(5, locked=not locked)
    assert (ledger.tree_pages, ledger.evictable_pages) == (0, 0)


def test_insertions_wait_until_results_are_out() -> None:
    """Inside, and not outside."""
    world = World(2000, exact=False)
    first, second = (world.start(world.tokens(60)) for _ in range(2))
    for req in (first, second):
        world.plan(req)
        world.launch(req)
    with world.tree.inserting_later():
        offer(world.tree, first)
        assert not world.manager.segments.cached
    assert len(world.manager.segments.cached) == 1 and world.manager.rows.shared(first.kv.req_pool_idx) > 0
    offer(world.tree, second)
    assert len(world.manager.segments.cached) == 2
    world.tree.check_integrity()


def test_results_come_before_what_follows_their_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's scheduler calls: a pass and the copy of its results, then the results are sent."""
    world, order = World(2000, exact=False), list[str]()
    req = world.start(world.tokens(60))
    world.plan(req)
    step = world.manager.launch_step()
    assert step is not None
    for part, name in ((world.manager, "end_prompts"), (world.tree, "publish")):
        called = getattr(part, name)
        monkeypatch.setattr(
            part, name, lambda *x, name=name, called=called, **y: order.append(name) or called(*x, **y)
        )  # fmt: skip
    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: False)
    batch = SimpleNamespace(reqs=[req], forward_mode=mode)
    nothing_runs = SimpleNamespace(reqs=[], batch_is_full=False)
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=world.allocator, running_batch=nothing_runs)

    def passes(*_: Any) -> None:
        world.manager.ops.reserve(torch.tensor([step.rows[0]]), torch.tensor([60]), 60)
        world.manager.computed(step)
        order.append("results on their way")

    def sends(*_: Any) -> None:
        offer(world.tree, req)
        order.append("results sent")

    run_batch(passes, scheduler, batch)
    process_batch_result(sends, scheduler, batch, None)
    assert order == ["results on their way", "end_prompts", "results sent", "publish"]
