"""References of sessions to what the prefix cache holds: random lives, and what each rule is for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_diffkv.srt.tree.session_refs import SessionRefs
from tests.tree.test_prefix_cache import TreeMachine, machine_settings
from tests.tree.tree_world import World


class SessionMachine(TreeMachine):
    """Requests of a few sessions, which are closed and opened again while they run."""

    sessions = True

    def admit_matched(self, req: Any, match: Any) -> bool:
        req.session_id = self.random.choice(["a", "b", "c", None])
        if req.session_id is not None:
            req.session_generation = self.tree.ensure_session_generation(req.session_id)
        return super().admit_matched(req, match)

    @rule(session=st.sampled_from("abc"), again=st.booleans())
    def close(self, session: str, again: bool) -> None:
        self.tree.release_radix_session(session)
        assert session not in refs_of(self.tree)._ends
        if again:
            self.tree.open_radix_session(session)


SessionMachine.TestCase.settings = machine_settings(60)
TestSessions = SessionMachine.TestCase


def refs_of(tree: Any) -> SessionRefs:
    assert isinstance(tree.sessions, SessionRefs)
    return tree.sessions


def told(world: World, tokens: list[int], session: str | None = None, generation: int | None = None) -> list[int]:
    """A request of a session that has ended."""
    req = world.prompt(list(tokens))
    if session is not None:
        req.session_id = session
        req.session_generation = generation or world.tree.ensure_session_generation(session)
    world.leave(req)
    return tokens


def left(world: World) -> set[int]:
    """First tokens of the prompts of which something is left."""
    return {node.key.token_ids[0] for node in world.tree.root_node.children.values()}


def make_room(world: World, tokens: int) -> None:
    world.manager.counts.settle()
    world.tree.evict(EvictParams(num_tokens=tokens))
    world.check()


@pytest.fixture
def world() -> World:
    return World(2000, sessions=True)


def test_what_no_session_refers_to_goes_first(world: World) -> None:
    chat = told(world, world.tokens(100), "chat")
    other = told(world, world.tokens(100))
    make_room(world, 80)
    assert left(world) == {chat[0], other[0]} and len(world.leaf(chat).key) == 100 > len(world.leaf(other).key)
    make_room(world, 50)
    assert left(world) == {chat[0]} and len(world.leaf(chat).key) < 100, "a reference is no lock"
    newer = told(world, world.tokens(100), "other")
    world.tree.release_radix_session("chat")
    make_room(world, 50)
    assert newer[0] in left(world) and len(world.leaf(newer).key) == 100, "a closed session keeps its place"


def test_a_session_refers_to_each_branch_and_to_what_is_left_of_it(world: World) -> None:
    start = told(world, world.tokens(100), "chat")
    refs, tree = refs_of(world.tree), world.tree
    for _ in range(2):
        told(world, [*start, *world.tokens(40)], "chat")
    assert refs.digest() == 2 and tree.root_node.children[start[0]].session_refs == 2
    make_room(world, 30)
    assert refs.digest() == 2, "a branch that is cut is referred to where it ends now"
    make_room(world, 60)
    assert refs.digest() == 1 and tree.root_node.children[start[0]].session_refs == 1
    make_room(world, 200)
    assert refs.digest() == 0 and not left(world)


def test_a_request_of_a_session_that_was_closed_meanwhile_refers_to_nothing(world: World) -> None:
    refs, first = refs_of(world.tree), world.tree.open_radix_session("chat")
    world.tree.release_radix_session("chat")
    told(world, world.tokens(60), "chat", first)
    assert refs.digest() == 0
    assert world.tree.open_radix_session("chat") > first
    told(world, world.tokens(60), "chat", first)
    assert refs.digest() == 0, "an earlier session of this name"
    told(world, world.tokens(60), "chat")
    assert refs.digest() == 1
    world.tree.release_radix_session("chat")
    world.tree.release_radix_session("chat")
    assert refs.digest() == 0
    told(world, world.tokens(60), "chat")
    world.tree.reset()
    assert refs.digest() == 0 and not refs._generations


def test_without_the_option_nothing_refers_to_anything() -> None:
    world = World(2000)
    told(world, world.tokens(100), "chat")
    assert not isinstance(world.tree.sessions, SessionRefs) and not world.tree.enable_session_radix_cache
    assert not hasattr(world.tree.root_node, "session_refs")
