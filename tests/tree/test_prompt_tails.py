"""What the prefix cache has of a running request's prompt, and of all of it when the request ends."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from sglang_diffkv.srt.compat import prefix_len, protected_len
from tests.tree.stand_in import Match, offer
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
    world.tree.evict_pages(world.manager.geometry.num_pages)
    assert not world.segments() and world.manager.device.free_pages() == world.manager.geometry.num_pages
    assert world.allocator.available_size() == world.allocator.ledger.capacity


@pytest.mark.parametrize("longer", [0, 1])
def test_two_of_one_prompt_at_once(longer: int) -> None:
    """The second computes the first one's tail for itself; whichever ends first, the tree has each token once."""
    world = World(900, exact=False)
    tokens = world.tokens(60)
    reqs = [world.prompt(tokens), world.prompt(tokens)]
    assert world.manager.rows.shared(reqs[1].kv.req_pool_idx) == 60 - WINDOW
    assert world.manager.rows.sealed(reqs[1].kv.req_pool_idx) is None, "too short to be shared by itself"
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
    world.tree.evict_pages(world.manager.geometry.num_pages)
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
