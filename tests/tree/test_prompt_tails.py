"""What the prefix cache has of a running request's prompt, and of all of it when the request ends."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch

from sglang_diffkv.srt.versions.compat import prefix_len, protected_len
from tests.helpers import faults
from tests.policies import diffkv_policy
from tests.tree.stand_in import Match, StandIn, offer, take_row
from tests.tree.tree_world import World

WINDOW = 8  # the world's


def found(world: World, tokens: Sequence[int]) -> int:
    """How many of ``tokens`` the tree has for a request that goes on from there."""
    match = Match(world.tree, array("q", [*tokens, 1000]))
    match.unlock(world.tree)
    return len(match)


def test_a_running_prompt_is_shared_up_to_its_tail() -> None:
    """All else of the request is as if the prompt had joined whole: its slots are one list, and its end gives the tree
    the rest."""
    world = World(800, exact=False)
    tokens = world.tokens(60)
    first = world.prompt(tokens)
    assert found(world, tokens) == 60 - WINDOW == protected_len(first)
    assert prefix_len(first) == 60
    for _ in range(12):
        world.decode(first)
        world.check()
    world.leave(first)
    assert found(world, first.tokens) == 72
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert not world.segments() and world.manager.device.free_pages() == world.manager.geometry.num_pages
    assert world.allocator.available_size() == world.allocator.ledger.capacity


@pytest.mark.parametrize("longer", [0, 1])
def test_two_of_one_prompt_at_once(longer: int) -> None:
    """The second computes the first one's tail for itself; whichever ends first, the tree has each token once."""
    world = World(900, exact=False)
    tokens = world.tokens(60)
    reqs = [world.prompt(tokens), world.prompt(tokens)]
    assert world.manager.rows.shared(reqs[1].kv.req_pool_idx) == 60 - WINDOW
    assert world.manager.rows.frozen(reqs[1].kv.req_pool_idx) is None, "too short to be shared by itself"
    for step in range(10):
        world.decode(reqs[longer])
        if step < 5:
            world.decode(reqs[1 - longer])
    world.leave(reqs[0])
    assert found(world, reqs[0].tokens) == len(reqs[0].tokens)
    world.leave(reqs[1])
    assert found(world, reqs[longer].tokens) == 70
    ends = sorted(segment.hi for segment in world.segments())
    assert ends[-1] == 70 and sum(s.hi - s.lo for s in world.segments()) == 70
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert world.allocator.available_size() == world.allocator.ledger.capacity


def test_what_is_aborted_leaves_the_sealed_part() -> None:
    world = World(800, exact=False)
    tokens = world.tokens(60)
    req = world.prompt(tokens)
    world.decode(req)
    world.leave(req, insert=False)
    assert found(world, tokens) == 60 - WINDOW
    longer = world.prompt([*tokens, *world.tokens(40)])
    assert protected_len(longer) == 100 - WINDOW
    world.leave(longer)


def test_one_that_has_run_on_before_it_is_offered() -> None:
    """With overlap scheduling the next token is stored before the tree takes the prompt."""
    world = World(800, exact=False)
    tokens = world.tokens(60)
    req = world.start(tokens)
    world.plan(req)
    world.launch(req)
    world.decode(req)
    token = req.tokens.pop()  # SGLang has not seen it yet
    offer(world.tree, req)
    req.tokens.append(token)
    assert found(world, tokens) == 60 - WINDOW
    for _ in range(9):
        world.decode(req)
        world.check()
    world.leave(req)
    assert found(world, req.tokens) == 70


@pytest.mark.parametrize("tail", [0, 9])
@pytest.mark.parametrize("count", [2, 6])
def test_a_tail_takes_no_promised_page(count: int, tail: int) -> None:
    """``count`` prompts end beside a chunk of a longer one, whose next chunk has to find the pages promised to it.
    Their 25 sinks, 9 tokens of the window and 6 that go down fill 5 pages; with a tail they hold 7."""
    pool = 316 + (count - 2) * 48 + 8 * (count + 1) * (tail > 0)  # what is promised to them, hardly more
    world = World(pool, exact=False, policy=diffkv_policy(1.0, 0.0, 9, sinks=25), rows=20, longest=600, segments=60)
    world.manager.prompts.tail = tail
    ledger, reqs, lengths = world.requests.ledger, [], [40] * count + [233]
    for number, length in enumerate(lengths):
        prompt = array("q", [number, *world.tokens(length - 1)])
        req = StandIn(prompt, None, Match(world.tree, prompt), 0, rid=str(number))
        admission = world.requests.check(req, 10**6, reqs)
        assert admission.fits
        world.requests.admit(req, admission)
        assert ledger.uncommitted_pages() >= 0
        req.kv.req_pool_idx = take_row(world.pool)
        reqs.append(req)

    def run(some: list[StandIn], ends: list[int]) -> list[int]:
        """One pass, SGLang's way; rows that found the ring empty."""
        starts, rows = [req.extend_end for req in some], [req.kv.req_pool_idx for req in some]
        for req, row, start, end in zip(some, rows, starts, ends, strict=True):
            req.extend_range.end, req.prefix_len = end, start
            req.prefix_indices = world.pool.req_to_token[row, :start].long()
            with ledger.prefilling():
                world.pool.write((row, slice(start, end)), world.allocator.alloc(end - start).int())
        world.requests.plan_prefill(some)
        step, new = world.manager.launch_step(), [end - start for start, end in zip(starts, ends, strict=True)]
        world.manager.ops.reserve(torch.tensor(rows), torch.tensor(new), max(new))
        for row, start, many in zip(rows, starts, new, strict=True):
            world._write(row, start, many)
        lost = faults(world.manager, rows)
        world.manager.end_prompts(step)
        for req, end in zip(some, ends, strict=True):
            offer(world.tree, req, chunked=end < len(req.tokens))
        return lost

    assert not run(reqs, [*[40] * count, 9])
    world.check()
    held = [world.manager.device.pages_of(req.kv.req_pool_idx) for req in reqs[:-1]]
    assert max(held) <= ledger.prompt_pages(40)
    assert not run(reqs[-1:], [233]), "a promised page was gone"
