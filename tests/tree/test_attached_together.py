"""Rows of a pass refer to their prefixes by one launch, before anything else is launched."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_diffkv.srt.scheduling.admission import add_one_req
from sglang_diffkv.srt.scheduling.lifecycle import BatchRefused
from tests.tree.stand_in import Match, StandIn, take_row
from tests.tree.tree_world import World


def world_of(prefixes: int, length: int = 40) -> tuple[World, list[list[int]]]:
    """A tree of so many prompts, each of ``length`` tokens."""
    world = World(2000, exact=False, share_min=8)
    prompts = [[number, *world.tokens(length - 1)] for number in range(prefixes)]
    for tokens in prompts:
        world.leave(world.prompt([*tokens, 1]))
    world.manager.counts.settle()
    return world, prompts


def admitted(world: World, tokens: list[int]) -> Any:
    """A request that has matched and locked its prefix, and has KV slots and a row."""
    return world.admit([*tokens, *world.tokens(20)])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[World], list[tuple[str, Any]]]:
    """What is launched from now on, of some operations."""

    def watched(world: World) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        ops = world.manager.ops

        def watch(name: str) -> None:
            original = getattr(ops, name)

            def call(*args: Any, **named: Any) -> Any:
                found.append((name, args[0]))
                return original(*args, **named)

            monkeypatch.setattr(ops, name, call)

        for name in ("attach_paths", "count_rows", "release"):
            watch(name)
        return found

    return watched


def test_a_pass_attaches_all_rows_at_once(calls: Callable[[World], list[tuple[str, Any]]]) -> None:
    world, prompts = world_of(3)
    reqs = [admitted(world, tokens) for tokens in (prompts[0], world.tokens(30), prompts[1], prompts[2])]
    found = calls(world)
    world.requests.plan_prefill(reqs)
    assert [name for name, _ in found] == ["attach_paths", "count_rows"]
    rows = [req.kv.req_pool_idx for req in reqs if req.kv.cache_protected_len]
    assert len(rows) == 3 and [row for row, _ in found[0][1]] == rows
    for row in rows:
        assert world.manager.device.pages_of(row)
    world.manager.cancel_step()
    for req in reqs:
        world.leave(req, insert=False)


def test_one_pass_leaves_nothing_for_the_next(calls: Callable[[World], list[tuple[str, Any]]]) -> None:
    """What is attached behind a pass, and not in one, is launched at once."""
    world, prompts = world_of(2)
    first, second = (admitted(world, tokens) for tokens in prompts)
    found = calls(world)
    with world.manager.device.attaching_together():
        world.requests.begin_prompt(first)
        assert not found
    assert [name for name, _ in found] == ["attach_paths"]
    world.requests.begin_prompt(second)
    assert [name for name, _ in found] == ["attach_paths"] * 2 and len(found[1][1]) == 1
    for req in (first, second):
        world.leave(req, insert=False)


def test_a_pass_that_is_launched_sees_what_is_attached(calls: Callable[[World], list[tuple[str, Any]]]) -> None:
    """Also one that nobody planned."""
    world, prompts = world_of(1)
    req = admitted(world, prompts[0])
    found = calls(world)
    with world.manager.device.attaching_together():
        world.requests.begin_prompt(req)
        world.manager.launch_step()
        assert [name for name, _ in found] == ["attach_paths"]
    assert len(found) == 1
    world.leave(req, insert=False)


def test_a_prefix_that_is_given_up_in_between_is_attached_before(
    calls: Callable[[World], list[tuple[str, Any]]],
) -> None:
    world, prompts = world_of(1)
    req = admitted(world, prompts[0])
    row, found = req.kv.req_pool_idx, calls(world)
    segment = world.tree.path(req.last_node)[0][0]
    with world.manager.device.attaching_together():
        world.manager.attach_prefix(row, world.tree.path(req.last_node))
        world.manager.device.release(segment.row)
    assert [name for name, _ in found] == ["attach_paths", "release"]
    assert world.manager.device.pages_of(row)


def test_a_pass_that_is_refused_half_way_gives_all_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    world, prompts = world_of(3)
    reqs = [admitted(world, tokens) for tokens in prompts]
    begin = world.requests.begin_prompt

    def fails(req: Any) -> None:
        begin(req)
        if req is reqs[1]:
            raise KeyError("odd")

    monkeypatch.setattr(world.requests, "begin_prompt", fails)
    with pytest.raises(BatchRefused) as refused:
        world.requests.plan_prefill(reqs)
    assert refused.value.cause is reqs[1]
    world.manager.cancel_step()
    for req in reqs:
        world.requests.leave(req, req.kv.req_pool_idx, counted=False)
        world.tree.dec_lock_ref(req.last_node)
    world.check()
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    world.manager.counts.settle()
    assert world.manager.counts.free() == world.manager.geometry.num_pages


# Admission


def asks(world: World, tokens: list[int]) -> Any:
    prompt = array("q", tokens)
    return StandIn(prompt, None, Match(world.tree, prompt), 0, rid="asks")


def test_a_prompt_that_has_room_is_admitted_as_if_all_might_be_evicted() -> None:
    world, prompts = world_of(2, 250)
    req = asks(world, [*prompts[0], *world.tokens(20)])
    world.requests.ledger.refused = 7.0
    spare = world.requests.check_spare(req, 10**6, [])
    assert world.requests.ledger.refused is None, "the last refused request may be asked again"
    whole = world.requests.check(req, 10**6, [])
    assert spare is not None and spare.fits and not spare.fits_compacted
    assert (spare.path, spare.needed, spare.blocks, spare.saved) == (whole.path, whole.needed, whole.blocks, 0)
    assert spare.blocks == world.requests.ledger.blocks_for(spare.path, spare.needed)
    assert spare.blocks > world.requests.ledger.blocks_for([], spare.needed), "its path takes some"
    world.requests.admit(req, spare)
    assert world.requests.ledger.promised[req].blocks == spare.blocks
    world.requests.ledger.forget(req)


@pytest.mark.parametrize("short", ["pages", "KV slots", "table blocks", "chunk", "budget"])
def test_whatever_may_have_to_be_evicted_is_looked_at_with_its_path_locked(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, prompts = world_of(2)
    ledger, req = world.requests.ledger, asks(world, [*prompts[0], *world.tokens(20)])
    needed = len(req.tokens) - 40
    assert world.requests.check_spare(req, needed, []) is not None
    if short == "pages":
        spare = ledger.uncommitted_pages() - ledger.prompt_pages(needed)
        ledger.set_aside("other", spare, 0)
        assert world.requests.check_spare(req, needed, []) is not None
        ledger.set_aside("other", spare + 1, 0)
    elif short == "KV slots":
        monkeypatch.setattr(ledger, "kv_slots_free", lambda: needed)
        assert world.requests.check_spare(req, needed, []) is not None
        monkeypatch.setattr(ledger, "kv_slots_free", lambda: needed - 1)
    elif short == "table blocks":
        blocks = len(world.manager.space.free_blocks) - ledger.blocks_for(world.tree.path(req.last_node), needed)
        ledger.set_aside("other", 0, blocks)
        assert world.requests.check_spare(req, needed, []) is not None
        ledger.set_aside("other", 0, blocks + 1)
    elif short == "budget":
        monkeypatch.setattr(world.requests.admission_rule, "budget", True)
    chunk = needed - 1 if short == "chunk" else needed
    refused = ledger.refused = 7.0
    assert world.requests.check_spare(req, chunk, []) is None
    assert ledger.refused == refused, "nobody has looked at the request yet"
    assert take_row(world.pool) is not None


def test_a_path_stays_while_others_are_evicted_for_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    world, prompts = world_of(2)
    req = asks(world, [*prompts[0], *world.tokens(20)])
    world.tree.dec_lock_ref(req.last_node)  # as a request that waits
    world.requests.ledger.set_aside("other", 0, len(world.manager.space.free_blocks))

    @contextmanager
    def locked(node: Any) -> Iterator[None]:
        world.tree.inc_lock_ref(node)
        yield
        world.tree.dec_lock_ref(node)

    adder = SimpleNamespace(
        token_to_kv_pool_allocator=world.allocator, tree_cache=world.tree, can_run_list=[], new_token_ratio=1.0,
        running_batch=SimpleNamespace(reqs=[]), new_chunked_req=None, rem_chunk_tokens=10**6, _lock_node=locked,
    )  # fmt: skip
    monkeypatch.setattr(world.requests, "turn_away", lambda *_: False)
    add_one_req(lambda *_: AddReqResult.NO_TOKEN, adder, req)
    assert [len(Match(world.tree, array("q", tokens))) for tokens in prompts] == [39, 0]


def test_what_is_admitted_in_a_pass_is_subtracted_once() -> None:
    """SGLang subtracts the tokens of prompts that it has admitted, whose pages are promised by then."""
    world = World(2000, exact=False, share_min=8)
    ledger, page, seen = world.requests.ledger, world.manager.fmt.high.tokens, list[int]()
    adder = SimpleNamespace(
        token_to_kv_pool_allocator=world.allocator, tree_cache=world.tree, can_run_list=[], new_token_ratio=1.0,
        running_batch=SimpleNamespace(reqs=[]), new_chunked_req=None, rem_chunk_tokens=10**6,
    )  # fmt: skip

    def original(adder: Any, req: Any) -> AddReqResult:
        seen.append(world.allocator.available_size())
        adder.can_run_list.append(req)
        return AddReqResult.CONTINUE

    ledger.set_aside("other", 30 * world.manager.geometry.heads, 0)
    outside = [ledger.available()]
    for tokens in (2 * page + 1, 5 * page, 60):
        req = asks(world, world.tokens(100))
        req.extend_range.end = tokens
        add_one_req(original, adder, req)
        outside.append(ledger.available())
    assert outside[0] - outside[1] >= 100, "its pages are promised"
    assert seen == [outside[0], outside[1] + 2 * page, outside[2] + 7 * page], "whole pages of what is subtracted"


def test_no_more_than_is_promised_counts_as_subtracted() -> None:
    """A prompt that is compacted between chunks is promised less than SGLang subtracts for it."""
    ledger = World(2000, exact=False, share_min=8).requests.ledger
    page, heads = ledger.manager.fmt.high.tokens, ledger.manager.geometry.heads
    ledger.set_aside("other", 30 * heads, 0)
    usual = ledger.available()
    ledger.set_aside("less", 3 * heads, 0)
    with ledger.charging([("less", 10 * page), ("nothing", 10 * page)]):
        assert ledger.available() == usual
    assert ledger.available() == usual - 3 * page


@pytest.mark.parametrize(
    "obstacle", ["", "two passes", "all of it stays", "own window", "exact", "budget", "nothing is compacted"]
)
def test_what_a_prompt_gives_back_in_its_pass_is_not_reserved_beside_its_reply(
    obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the pass has run it needs its pages, which is looked at apart."""
    world = World(2000, exact=obstacle == "exact", share_min=8)
    ledger, req = world.requests.ledger, asks(world, world.tokens(300))
    monkeypatch.setattr(ledger, "growth_estimate", lambda: 0.5)
    usual, _ = world.requests.admission_rule.check(req, 300, [], 1.0)
    if obstacle == "all of it stays":
        req.diffkv_keeps_high = True
    elif obstacle == "own window":
        req.diffkv_window = 4
    elif obstacle == "budget":
        monkeypatch.setattr(world.requests.admission_rule, "budget", True)
    elif obstacle == "nothing is compacted":
        monkeypatch.setattr("sglang_diffkv.srt.scheduling.lifecycle.compacts", lambda *_: False)
    left = 299 if obstacle == "two passes" else 300
    given_back = 0 if obstacle else ledger.given_back(300)
    found = world.requests.check(req, 10**6, [], left=left)
    assert found.growth(300, 900) == pytest.approx((growth := usual(300, 900)) - given_back)
    assert found.growth(300, 1) == (usual(300, 1) if obstacle else 0), "not more than is reserved for the reply"
    assert 100 < ledger.given_back(300) < 150 and growth > 400
