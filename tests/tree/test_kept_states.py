"""States that the prefix cache keeps: random lives of requests that go on from them, and each rule by itself."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.versions import states as compat_states
from tests.tree.stand_in import Match, give_row, leave, offer
from tests.tree.state_pool import States, make_pool
from tests.tree.test_prefix_cache import ROWS, TreeMachine, machine_settings, name_of
from tests.tree.tree_world import World

SLOTS = 18
"""State slots, little more than two for each row."""


def kept(tree: Any) -> dict[tuple[int, ...], torch.Tensor]:
    """Slots of kept states, by the tokens that made them."""
    found = {}
    for node, slot in tree.states.of_nodes.items():
        key = [token for x in tree.nodes(node) for token in x.key.token_ids]
        found[tuple(key)] = slot
    return found


class StatesMachine(TreeMachine):
    """Requests of a model with states."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        super().__init__(*([] if ranks is None else [ranks]))
        self.told: list[array] = []

    def make_pool(self) -> HybridReqToTokenPool:
        pool = make_pool(ROWS, 300, SLOTS)
        self.states = States(pool)
        return pool

    def admit_tokens(self, tokens: array) -> None:
        places = [len(x) for x in kept(self.tree) if len(x) < len(tokens) and x == tuple(tokens[: len(x)])]
        running = len(self.running)
        super().admit_tokens(tokens)
        if len(self.running) > running:
            assert self.running[-1].extend_range.end == max(places, default=0), "a match does not end at the last state"

    def take_row(self, req: Any) -> int:
        self.requests.begin_states([req])
        row = super().take_row(req)
        self.states.begin(req)
        return row

    def longest_chunk(self, req: Any, chunk: int) -> int:
        return min(chunk, self.requests.tokens_to_branch(req) or chunk)

    def launched(self, req: Any, start: int, end: int) -> None:
        self.states.compute(req, start, end)
        self.requests.pass_launched()

    def _leave(self, req: Any, *, insert: bool) -> None:
        self.told = [*self.told[-7:], req.tokens[:]]
        super()._leave(req, insert=insert)

    @precondition(lambda self: self.told)
    @rule(which=st.integers(0, 7), cut=st.integers(0, 2), more=st.integers(0, 40), tail=st.integers(0, 2))
    def go_on(self, which: int, cut: int, more: int, tail: int) -> None:
        """The next turn of a chat, a prompt asked again, or one that leaves another's way near its end."""
        told = self.told[which % len(self.told)]
        self.admit_tokens((told[: len(told) - cut] + array("q", [tail] * more))[:150] + array("q", [9]))

    @precondition(lambda self: any(r.prefilling for r in self.running))
    @rule()
    def lose_a_pass(self) -> None:
        """A pass is planned and undone, with its request."""
        req = next(r for r in self.running if r.prefilling)
        start, row = req.extend_range.end, req.kv.req_pool_idx
        end = min(start + 30, len(req.tokens))
        self.pool.write((row, slice(start, end)), self.allocator.alloc(end - start).int())
        req.extend_range.end = end
        self.requests.plan_prefill([req])
        self.manager.cancel_step()
        self._leave(req, insert=False)

    @rule(count=st.integers(1, SLOTS))
    def make_room(self, count: int) -> None:
        """Slots are wanted for running requests."""
        states = self.tree.states
        states._read = set()
        assert states._make_room(count, snapshots=True) == (count <= SLOTS - len(self.running))

    @invariant()
    def kept_states_are_those_of_their_tokens(self) -> None:
        for tokens, slot in kept(self.tree).items():
            assert self.states.of(slot) == name_of(array("q", tokens)), "a node has the state of other tokens"
        for row, taken in self.tree.states.snapshots.items():
            req = next(r for r in self.running if r.kv.req_pool_idx == row)
            for snapshot in taken:
                assert self.states.of(snapshot.slot) == name_of(req.tokens[: snapshot.position])

    @invariant()
    def slots_are_counted(self) -> None:
        report = self.tree.states.report()
        assert report["running"] == len(self.running)
        assert report["kept"] == self.tree.mamba_evictable_size()


StatesMachine.TestCase.settings = machine_settings(60)
TestStates = StatesMachine.TestCase


class StateWorld(World):
    """A small pool with so many state slots."""

    def __init__(self, slots: int, **more: Any) -> None:
        pool = make_pool(8, 300, slots)
        self.states = States(pool)
        super().__init__(2_000, exact=False, pool=pool, **more)

    def admit(self, tokens: list[int], priority: int = 0) -> Any:
        req = super().admit(tokens, priority)
        self.requests.begin_states([req])
        self.states.begin(req)
        return req

    def launch(self, req: Any) -> None:
        super().launch(req)
        self.states.compute(req, compat.prefix_len(req), req.extend_end)
        self.requests.pass_launched()

    def decode(self, req: Any) -> None:
        super().decode(req)
        self.states.compute(req, len(req.tokens) - 1, len(req.tokens))

    def told(self, tokens: list[int], steps: int = 0) -> Any:
        """A request that has ended."""
        req = self.prompt(tokens)
        for _ in range(steps):
            self.decode(req)
        self.leave(req)
        return req

    def found(self, tokens: list[int]) -> int:
        """Tokens of a prompt that a request finds."""
        match = Match(self.tree, array("q", tokens))
        match.unlock(self.tree)
        return len(match)

    def places(self) -> list[int]:
        """Where states are kept."""
        return sorted(len(tokens) for tokens in kept(self.tree))


def test_a_match_ends_where_a_state_is() -> None:
    world = StateWorld(10)
    prompt = world.tokens(60)
    req = world.told(prompt, steps=9)
    assert world.places() == [60, 69]
    assert [world.found(prompt + [1]), world.found(prompt[:50] + [1]), world.found(prompt)] == [60, 0, 0]
    assert world.found([*req.tokens, 1]) == 69
    assert world.found([*req.tokens[:65], 1, 2]) == 60


def test_where_prompts_part_a_state_is_left_once() -> None:
    """The first that shares enough of another's tokens and finds no state there ends a chunk at that place."""
    world = StateWorld(10)
    prompt = world.tokens(60)
    world.told(prompt)
    for aborted in (True, False):
        req = world.admit(prompt[:40] + world.tokens(30))
        assert (compat.prefix_len(req), world.requests.tokens_to_branch(req)) == (0, 40)
        req.extend_range.end = 40
        world.plan(req)
        world.launch(req)
        offer(world.tree, req, chunked=True)
        assert world.requests.tokens_to_branch(req) is None
        if aborted:
            world.leave(req, insert=False)
            assert world.places() == [60], "a chunk joins with its prompt"
    req.extend_range.end = 70
    world.plan(req)
    world.launch(req)
    offer(world.tree, req)
    assert world.places() == [40, 60, 70]
    match = Match(world.tree, array("q", prompt[:40] + world.tokens(30)))
    assert (len(match), match.diffkv_branch) == (40, 0)
    match.unlock(world.tree)
    world.leave(req)


def test_a_prompt_that_is_only_read_is_found_whole_by_the_next() -> None:
    """SGLang reads a prompt of which it samples several replies so, before it samples any."""
    world = StateWorld(10)
    prompt = world.tokens(60)
    assert Match(world.tree, array("q", prompt), new_tokens=0).diffkv_branch == 59
    assert Match(world.tree, array("q", prompt), new_tokens=1).diffkv_branch == 0
    assert Match(world.tree, array("q", prompt[:20]), new_tokens=0).diffkv_branch == 0, "too short to be worth it"


def test_states_between_chunks_stand_farther_apart_the_longer_a_prompt_is() -> None:
    world = StateWorld(20, share_min=10)
    req = world.start(world.tokens(280))
    for end in range(10, 281, 10):
        req.extend_range.end = end
        world.plan(req)
        world.launch(req)
        offer(world.tree, req, chunked=end < 280)
    assert world.places() == [10, 20, 30, 40, 60, 80, 110, 150, 200, 270, 280]
    world.leave(req)


def test_branches_too_near_are_not_worth_a_chunk() -> None:
    world = StateWorld(10, share_min=24)
    prompt = world.tokens(60)
    world.told(prompt)
    match = Match(world.tree, array("q", prompt[:20] + world.tokens(30)))
    assert match.diffkv_branch == 0


def test_a_split_leaves_the_state_at_the_lower_end() -> None:
    world = StateWorld(10)
    prompt = world.tokens(60)
    world.told(prompt)
    world.told(prompt[:30] + world.tokens(40))
    assert world.places() == [60, 70], "the upper half has none"
    assert world.found(prompt + [1]) == 60


def test_the_least_recently_used_state_goes_first() -> None:
    world = StateWorld(3)
    prompts = [world.tokens(30) for _ in range(4)]
    for prompt in prompts[:2]:
        world.told(prompt)
    assert world.found(prompts[0] + [1]) == 30
    world.told(prompts[2])  # takes the third slot for itself and one for a copy
    assert [world.found(x + [1]) for x in prompts] == [30, 0, 30, 0]


def test_a_state_that_a_waiting_request_will_go_on_from_counts_as_used() -> None:
    world = StateWorld(4)
    prompts = [world.tokens(30) for _ in range(2)]
    for prompt in prompts:
        world.told(prompt)
    world.tree.touch_prefix(RadixKey(array("q", [*prompts[0], 1])))
    world.tree.touch_prefix(RadixKey(array("q", [])))
    assert world.tree.states._make_room(3)
    assert [world.found(x + [1]) for x in prompts] == [30, 0]


def test_a_batch_does_not_give_away_what_it_goes_on_from() -> None:
    world = StateWorld(4)
    prompts = [world.tokens(30) for _ in range(3)]
    for prompt in prompts:
        world.told(prompt)
    states = world.tree.states
    for other in (1, 2):
        states.of_nodes.move_to_end(next(x for x in states.of_nodes if x.key.token_ids[0] == prompts[other][0]))
    batch = [World.admit(world, x) for x in (prompts[0] + [1], world.tokens(20), world.tokens(20))]
    world.requests.begin_states(batch)
    for req in batch:
        world.states.begin(req)
        world.attach(req)
    assert world.places() == [30], "two of three states made room, and not the one that was read"
    for req in batch:
        world.plan(req)
        world.launch(req)
        world.leave(req)


def test_without_room_nothing_is_copied() -> None:
    """Running requests have all slots: their prompts join the tree without a state, their replies with one."""
    world = StateWorld(2)
    first, second = (world.prompt(world.tokens(40)) for _ in range(2))
    assert world.tree.states.report() == {"slots": 2, "free": 0, "kept": 0, "snapshots": 0, "running": 2}
    world.decode(first)
    world.leave(first)
    assert world.places() == [41]
    world.leave(second, insert=False)
    assert world.tree.states.report()["free"] == 1


def test_more_requests_than_slots_is_an_error() -> None:
    world = StateWorld(1)
    world.prompt(world.tokens(40))
    with pytest.raises(RuntimeError, match="no state slot is free"):
        world.admit(world.tokens(40))


def test_a_request_takes_a_snapshot_when_nothing_else_is_left() -> None:
    world = StateWorld(3, share_min=24)
    req = world.start(world.tokens(40))
    world.plan(req)
    world.launch(req)
    assert world.tree.states.report()["snapshots"] == 1
    others = [world.start(world.tokens(10)) for _ in range(2)]
    assert world.tree.states.report() == {"slots": 3, "free": 0, "kept": 0, "snapshots": 0, "running": 3}
    offer(world.tree, req)
    assert world.places() == [] and len(others) == 2


def test_a_pass_that_does_not_run_leaves_no_copy() -> None:
    world = StateWorld(6)
    req = world.start(world.tokens(40))
    world.plan(req)
    assert len(world.tree.states.due) == 1
    world.tree.states.begin([])
    assert world.tree.states.due == [] and world.tree.states.report()["snapshots"] == 0
    assert not world.tree.states._make_room(6, snapshots=True), "there is no copy to give up"
    world.check()


def test_ranks_compare_what_has_states() -> None:
    digests = []
    for other in (False, True):
        world = StateWorld(6)
        prompts = [world.tokens(40), world.tokens(48)]
        world.told(prompts[other])
        digests.append(world.tree.states.digest())
    assert digests[0][0] == digests[1][0] and digests[0] != digests[1], "as many, of other prompts"


def test_a_state_behind_tokens_that_are_not_kept_goes_back() -> None:
    """SGLang keeps less of a reply than was computed, such as no thoughts, and nothing behind a stop."""
    world = StateWorld(6)
    req = world.prompt(world.tokens(40))
    for _ in range(5):
        world.decode(req)
    row = req.kv.req_pool_idx
    leave(world.tree, req, 43, insert=True)
    world.requests.leave(req, row, counted=False)
    assert world.places() == [40]
    assert world.tree.states.report()["free"] == 5


DRAFTS = 4


def drafting(world: StateWorld) -> Any:
    """A request whose prompt of 40 tokens has run."""
    req = world.prompt(world.tokens(40))
    req.kv.kv_committed_len, req.grammar, req.finished_len = 40, None, None
    return req


def verify(world: StateWorld, req: Any, accepted: int) -> None:
    """A pass is launched that accepts so many drafts of the request."""
    row, start = req.kv.req_pool_idx, len(req.tokens)
    world.requests.plan_verification([req])
    world.manager.launch_step()
    world.pool.write((row, slice(start, start + accepted)), world.allocator.alloc(accepted).int())
    for at in range(start, start + accepted):
        world.manager.ops.reserve(torch.tensor([row]), torch.tensor([1]), 1)
        world._write(row, at, 1)
    req.tokens.extend(range(accepted))
    world.states.compute(req, start, start + accepted)


def end(world: StateWorld, req: Any, accepted: int) -> list[int]:
    """The request ends with a pass whose results say how many drafts it accepted, 0 for its prompt's. Where states are
    kept."""
    row, committed = req.kv.req_pool_idx, req.kv.kv_committed_len
    req.output_ids.extend(req.tokens[committed : committed + accepted])
    req.kv.kv_committed_len += accepted
    with world.manager.rows.looking_at(DRAFTS if accepted else 0):
        leave(world.tree, req, req.kv.kv_committed_len, insert=True)
    world.requests.leave(req, row, counted=False)
    give_row(world.pool, row)
    world.check()
    report = world.tree.states.report()
    assert report["running"] == 0 and report["kept"] + report["free"] == report["slots"]
    return world.places()


def test_a_state_behind_accepted_drafts_stays_where_no_pass_took_it_further() -> None:
    world = StateWorld(8, drafts=DRAFTS)
    req = drafting(world)
    verify(world, req, 3)
    assert end(world, req, 3) == [40, 43], "the pass whose results say that it ends was the last"
    req = drafting(world)
    assert end(world, req, 0) == [40, 40, 43], "it ended with its prompt"


def test_a_state_that_a_pass_took_further_goes_back() -> None:
    """As under overlap scheduling, where another pass is launched before the results of one are seen."""
    for accepted in (3, 0):
        world = StateWorld(8, drafts=DRAFTS)
        req = drafting(world)
        if accepted:
            verify(world, req, accepted)
        verify(world, req, 1)
        assert end(world, req, accepted) == [40], "the prompt's own"


@pytest.mark.parametrize("why", ["grammar", "stop"])
def test_a_state_behind_drafts_that_do_not_count_goes_back(why: str) -> None:
    """A grammar keeps less than the pass has accepted. Behind a stop nobody asks for tokens."""
    world = StateWorld(8, drafts=DRAFTS)
    req = drafting(world)
    verify(world, req, 3)
    if why == "grammar":
        req.grammar = object()
        assert end(world, req, 2) == [40]
    else:
        req.finished_len = 2
        assert end(world, req, 3) == [40]


def test_leaves_without_a_state_are_evicted_first_and_others_whole() -> None:
    world = StateWorld(10)
    prompts = [world.tokens(200) for _ in range(3)]
    for prompt in prompts:
        world.told(prompt)
    world.tree.states.drop(world.leaf(prompts[2]))
    world.tree.evict(EvictParams(num_tokens=4))
    assert [world.found(x + [1]) for x in prompts[:2]] == [200, 200], "the newest leaf was of no use"
    left = 2
    while left == 2:
        world.manager.counts.settle()  # of segments that are not counted leaves go whole anyway
        world.tree.evict(EvictParams(num_tokens=4))
        world.check()
        keys = {x.key.token_ids[0]: len(x.key) for x in world.tree.evictable_leaves}
        others = {token: length for token, length in keys.items() if token != prompts[2][0]}
        assert set(others.values()) == {200}, "of a leaf with a state a part was left, which no match can end in"
        left = len(others)
    assert keys == {prompts[1][0]: 200}, "the least recently used goes next"


def test_flush_gives_all_slots_back() -> None:
    world = StateWorld(6)
    world.told(world.tokens(40), steps=3)
    assert world.tree.states.report()["kept"] == 2
    world.tree.reset()
    assert world.tree.states.report() == {"slots": 6, "free": 6, "kept": 0, "snapshots": 0, "running": 0}
    assert world.tree.all_mamba_values_flatten().tolist() == []


def test_sglang_counts_kept_states_as_evictable() -> None:
    world = StateWorld(6)
    world.told(world.tokens(40), steps=3)
    assert (world.tree.supports_mamba(), world.tree.mamba_evictable_size(), world.tree.mamba_protected_size()) == (
        True, 2, 0,
    )  # fmt: skip
    assert sorted(world.tree.all_mamba_values_flatten().tolist()) == sorted(
        int(slot) for slot in world.tree.states.of_nodes.values()
    )
    assert len(world.tree.all_values_flatten()) == 43
    world.tree.reset()
    assert world.tree.all_values_flatten().tolist() == [], "SGLang's report of a leak would end with another error"
    assert compat_states.state_slot(world.start(world.tokens(5))) is not None
