"""Earlier turns of a conversation are compressed once they lie behind its window (``turn_window``)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_diffkv.config import load_config
from sglang_diffkv.errors import ConfigError, UnsupportedError
from sglang_diffkv.kernels.parts import Held, held_tokens
from sglang_diffkv.layout.geometry import Segment
from sglang_diffkv.srt.startup.validation import check_policy
from sglang_diffkv.srt.tree import path_joining
from sglang_diffkv.srt.tree.host_tier import WRITE_BACK, WRITE_THROUGH
from sglang_diffkv.srt.tree.private_space import HighSpace, WindowSpace
from tests.policies import diffkv_policy
from tests.tree.test_host_tier import admitted, evict_all, host_of
from tests.tree.test_short_turns import end, turn
from tests.tree.tree_world import World

WINDOW, LEFT = 8, 2
RULE = diffkv_policy(1.0, 0.0, WINDOW, turn_window=LEFT)


def make_world(capacity: int = 600, policy: Any = RULE, **named: Any) -> World:
    return World(capacity, longest=300, exact=named.pop("exact", False), share_min=4, policy=policy, **named)


@pytest.fixture
def world() -> Iterator[World]:
    yield make_world()


def talk(world: World, turns: int, new: int = 5, reply: int = 4, **named: Any) -> list[int]:
    history: list[int] = []
    for _ in range(turns):
        end(world, turn(world, history, new, reply, **named))
    return history


def low_of(world: World, lo: int, hi: int) -> int:
    """Tokens of [lo, hi) that segments hold in the low tier."""
    parts = [(x.row, max(x.lo, lo), min(x.hi, hi)) for x in world.segments() if x.lo < hi and lo < x.hi]
    measured = world.manager.ops.measure(*(torch.tensor(column) for column in zip(*parts, strict=True)))
    return int(measured[..., 1].sum())


def test_what_lies_behind_the_window_goes_down(world: World) -> None:
    history = talk(world, 6)
    behind = len(history) - WINDOW
    low = low_of(world, 0, behind)
    assert low >= behind - 2 * 6 * LEFT - 9, "of each turn and reply the newest two stay, and of the last one all"
    assert low_of(world, behind, len(history)) == 0
    assert world.tree.report()["settled"] >= 4
    world.check()


def test_without_the_rule_they_stay() -> None:
    world = make_world(policy=diffkv_policy(1.0, 0.0, WINDOW))
    history = talk(world, 6)
    assert low_of(world, 0, len(history)) == 0 and world.tree.report()["settled"] == 0


def test_a_turn_is_compressed_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often its conversation goes on, or is looked at."""
    settled: list[tuple[int, int]] = []
    copy = world.manager.device.copy

    def noting(row: int, parts: Any, seq_len: int, policy: Any, *rest: Any) -> None:
        settled.extend((lo, hi) for _, lo, hi in parts if policy.window == LEFT)
        copy(row, parts, seq_len, policy, *rest)

    monkeypatch.setattr(world.manager.device, "copy", noting)
    talk(world, 10)
    taken = [position for lo, hi in settled for position in range(lo, hi)]
    assert taken and len(taken) == len(set(taken))


def test_the_next_prompt_compresses_what_is_behind_its_window(world: World) -> None:
    """Before anything reads it: where the next turn comes before the scheduler has looked at the last one."""
    history = talk(world, 1, new=12, reply=10)
    assert low_of(world, 0, 12 - WINDOW) and not low_of(world, 12 - WINDOW, len(history))
    req = world.admit([*history, *world.tokens(9)])
    assert world.tree.joiner.settled == 2 and low_of(world, 12 - WINDOW, len(history)) > 9
    world.attach(req)
    world.plan(req)
    world.launch(req)
    world.leave(req)


def test_what_others_read_waits_until_they_end(world: World) -> None:
    history = talk(world, 2, new=6, reply=6)
    before, settled = {x.row for x in world.segments()}, world.tree.joiner.settled
    reader = world.prompt([*history[:-2], 7])
    one = turn(world, history, 12, 4)
    end(world, one)
    assert before <= {x.row for x in world.segments()} and world.tree.joiner.settled == settled
    world.leave(reader, insert=False)
    end(world, turn(world, history))
    assert world.tree.joiner.settled > settled


@pytest.mark.parametrize("space", [HighSpace(None), WindowSpace(None, 12)])
def test_requests_that_chose_keep_what_they_chose(space: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_joining, "ROOM", 2)  # no pool has room
    world = make_world(high_rows=True, most_window=64)
    history: list[int] = []
    for _ in range(5):
        history += world.tokens(5)
        req = world.prompt(list(history), extra_key=space)
        for _ in range(4):
            world.decode(req)
        history += [5] * 4
        end(world, req)
    assert world.tree.joiner.settled == 0 and low_of(world, 0, len(history)) == 0
    assert world.tree.report()["pages_over_needed"] <= 1.5, "short turns are joined all the same"


def test_exact_prefixes_and_sliding_layers_stay_as_they_are() -> None:
    exact, sliding = make_world(exact=True), make_world(attention_spans=(20,))
    for world in (exact, sliding):
        talk(world, 6)
        assert world.tree.joiner.settled == 0


def test_scores_decide_and_the_newest_tokens_of_each_turn_stay(world: World) -> None:
    """A score at the threshold keeps a token, wherever it lies in its turn."""
    history = talk(world, 1, new=12, reply=10)
    chosen = 14
    found = high_of(world, chosen)
    (at,) = (found.position == chosen).nonzero()
    scores = world.manager.state.tiers[0].scores
    assert scores is not None
    scores[found.page[at[0], at[1], at[2]], at[3]] = 5.0
    world.admit([*history, *world.tokens(9)])
    found = high_of(world, chosen)
    assert sorted(found.position[found.held].tolist()) == [chosen, *range(len(history) - LEFT, len(history))]


def high_of(world: World, position: int) -> Held:
    """The high tier of the segment that has a position."""
    (segment,) = [x for x in world.segments() if x.lo <= position < x.hi]
    found = held_tokens(world.manager.state, (segment.row, segment.lo, segment.hi), 0)
    assert found is not None
    return found


def test_no_more_is_evicted_than_it_returns() -> None:
    world = make_world(300)
    others = [world.tokens(40) for _ in range(5)]
    for tokens in others:
        end(world, world.prompt(list(tokens)))
    history: list[int] = []
    for _ in range(12):
        end(world, turn(world, history, 5, 4))
        world.manager.counts.settle()
        before = world.allocator.ledger.available()
        world.requests.scheduling_begins([])
        world.manager.counts.settle()
        assert world.allocator.ledger.available() >= before


def test_the_pages_that_copies_take_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set aside for a copy that is not counted yet is what it takes at least."""
    segments, bounds = world.manager.segments, []
    join = segments.join

    def checked(parts: Any, settling: Any) -> Segment:
        most = segments.dense_pages(parts, [x for x, _, _ in parts if x in settling])
        free = world.manager.device.free_pages()
        joined = join(parts, settling)
        bounds.append((free - world.manager.device.free_pages(), most))
        return joined

    monkeypatch.setattr(segments, "join", checked)
    for new, reply in ((5, 4), (17, 9), (1, 30), (33, 2)):
        talk(world, 4, new, reply)
    assert len(bounds) > 4 and all(taken <= most for taken, most in bounds), bounds


@pytest.mark.parametrize("policy", [WRITE_THROUGH, WRITE_BACK])
def test_host_memory_has_them_as_small_as_they_are(policy: str) -> None:
    """What it has of a turn from before is replaced, and comes back compressed."""
    taken = []
    for rule in (diffkv_policy(1.0, 0.0, WINDOW), RULE):
        world = make_world(900, rule, host_pages=600, write_policy=policy)
        history = talk(world, 1, 24, 24)
        evict_all(world)
        for _ in range(3):
            assert admitted(world, [*history, 1]) == len(history)
            end(world, turn(world, history, 24, 24))
            world.requests.scheduling_begins([])
            evict_all(world)
            world.requests.scheduling_begins([])  # what was copied has arrived
        host = host_of(world)
        host.check_integrity()
        assert host.index.tokens == len(history)
        taken.append(sum(saved.host_pages for saved in host.saved.held))
        assert admitted(world, [*history, 1]) == len(history)
        low = low_of(world, 0, len(history) - 24 - 24 - WINDOW)
        assert (low > 100) == (rule is RULE), "as it was before it settled"
    assert taken[1] <= 0.8 * taken[0], taken


def test_what_came_back_settled_is_not_compressed_again() -> None:
    world = make_world(900, host_pages=600, write_policy=WRITE_THROUGH)
    history = talk(world, 4, 24, 24)
    evict_all(world)
    before = world.tree.joiner.settled
    assert admitted(world, [*history, *world.tokens(30)]) == len(history)
    assert world.tree.joiner.settled - before <= 2, "the last turn alone"


@pytest.mark.parametrize(("new", "reply", "stub"), [(3, 4, 1), (9, 8, 1), (20, 20, 3)])
def test_replies_whose_ends_are_not_repeated_hold_nothing_up(new: int, reply: int, stub: int) -> None:
    """As a stop string, which the next prompt does not have: no more pages than without the rule, and fewer in the
    end."""
    pages = []
    for rule in (diffkv_policy(1.0, 0.0, WINDOW), RULE):
        world, history = make_world(900, rule), []
        for _ in range(8):
            said = list(history)
            end(world, turn(world, said, new, reply))
            history = said[:-stub]
            world.requests.scheduling_begins([])
        world.manager.counts.settle()
        pages.append(world.tree.report()["pages"])
    assert pages[1] <= pages[0] and (new < 9 or pages[1] < 0.8 * pages[0]), pages


def test_turns_that_were_joined_before_they_settle_settle_each_by_itself(world: World) -> None:
    """The newest tokens of each stay all the same."""
    history = talk(world, 1, 6, 5)
    last = turn(world, history, 5, 5)
    world.leave(last)
    world.manager.counts.settle()
    leaf = max(world.tree.evictable_leaves, key=world.tree.depth)
    assert world.tree.joiner.join(leaf, evict=True)
    (joined,) = world.segments()
    assert joined.unsettled and len(joined.unsettled) > 1
    stay = [position for _, hi in joined.unsettled for position in range(hi - LEFT, hi)]
    smaller = world.manager.segments.join([(joined, joined.lo, joined.hi)], [joined])
    found = held_tokens(world.manager.state, (smaller.row, smaller.lo, smaller.hi), 0)
    assert found is not None and sorted(found.position[found.held].tolist()) == stay and smaller.settled
    world.manager.segments.release(smaller)
    world.check()


def test_a_store_does_not_have_turns_compressed_twice() -> None:
    from sglang_diffkv.mem_pool.saved_segments import SavedSegment

    saved = SavedSegment.of(Segment(1, 0, 40, unsettled=((8, 40),)), [])
    assert saved.segment(0, 40).unsettled == ((8, 40),) and not saved.settled


def test_what_host_memory_has_is_there_until_the_smaller_copy_is(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(900, host_pages=600, write_policy=WRITE_THROUGH)
    history = talk(world, 1, 24, 24)
    evict_all(world)
    assert admitted(world, [*history, 1]) == len(history)
    host = host_of(world)
    ready = host.saved.ready
    monkeypatch.setattr(host.saved, "finish", list)
    monkeypatch.setattr(host.saved, "ready", lambda saved: not saved.settled and ready(saved))
    end(world, turn(world, history, 24, 24))
    world.requests.scheduling_begins([])
    assert host._replacing, "no copy is on its way"
    evict_all(world)
    assert admitted(world, [*history, 1]) >= 48, "the copy that it had is gone"


@pytest.mark.parametrize("more", [
    {"turn_window": 256}, {"turn_window": 8, "alpha_high": 0.0}, {"turn_window": 64, "alpha_low": 0.1},
])  # fmt: skip
def test_a_rule_that_does_nothing_is_refused(more: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="turn_window"):
        load_config(json.dumps({"policy": {"name": "diffkv", **more}}))


@pytest.mark.parametrize("beside", [{"prefix_fidelity": "exact"}, {"tiers": ["K8V4"]}])
def test_a_rule_beside_what_it_does_nothing_for_is_refused(beside: dict[str, object]) -> None:
    policy = {"name": "diffkv", "turn_window": 64}
    with pytest.raises(ConfigError, match=r"policy\.turn_window does nothing"):
        load_config(json.dumps({"policy": policy, **beside}))
    with pytest.raises(UnsupportedError, match="sliding window"):
        check_policy(load_config(json.dumps({"policy": policy})), (0, 512))
