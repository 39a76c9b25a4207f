"""Branches in a cached prompt: a row takes what its path's pages need, however often the tree was split, and the prefix
cache finds what stock SGLang's finds."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from tests.tree.stand_in import offer
from tests.tree.tree_world import World

FIDELITIES = pytest.mark.parametrize("exact", [False, True], ids=["compressed", "exact"])


def run(world: World, requests: list[list[int]], replies: int = 0) -> list[int]:
    """A batch from match to end; tokens that each request found in the cache."""
    batch = [world.admit(tokens) for tokens in requests]
    found = [req.kv.cache_protected_len for req in batch]
    for req in batch:
        world.attach(req)
    for req in batch:
        world.plan(req)
        world.launch(req)
        offer(world.tree, req)
    for req in batch:
        for _ in range(replies):
            world.decode(req)
        world.leave(req)
    return found


@FIDELITIES
@pytest.mark.parametrize("alpha_high", [1.0, 0.0], ids=["some low", "all high"])
def test_a_batch_of_branches_fits(exact, alpha_high):
    world = World(12_000, longest=1024, exact=exact, alpha_high=alpha_high, page_tokens=4, rows=16, segments=200)
    prompt = world.tokens(1000)
    run(world, [prompt])
    places = [13 + 80 * i for i in range(12)]
    found = run(world, [prompt + world.tokens(10), *(prompt[:at] + world.tokens(12) for at in places)], replies=3)
    assert found == [1000, *places]


@FIDELITIES
def test_a_prompt_is_found_after_any_number_of_branches(exact):
    world = World(12_000, longest=1024, exact=exact, page_tokens=4, segments=400)
    prompt = world.tokens(1000)
    run(world, [prompt])
    for branch in range(1, 60):
        run(world, [prompt[: branch * 16] + world.tokens(5)])
        if branch in (5, 15, 59):
            assert run(world, [prompt + world.tokens(3)]) == [1000]


@FIDELITIES
def test_branches_of_branches(exact):
    """Every second request reads a little of a long segment: bounds of table entries are far above what is there."""
    world = World(40_000, longest=1024, exact=exact, page_tokens=4, segments=200)
    stem: list[int] = []
    for depth in range(30):
        request = stem + world.tokens(1000 - len(stem))
        assert run(world, [request]) == [len(stem)]
        stem = request[: 30 * (depth + 1)]
    assert run(world, [stem + world.tokens(2)]) == [len(stem)]
    assert world.tree.joiner.joined == 0, "counted entries are enough"


@FIDELITIES
def test_a_chat_of_tiny_turns_is_joined(exact):
    world = World(20_000, longest=280, exact=exact, page_tokens=8, segments=400, share_min=1)
    chat = world.tokens(5)
    for _ in range(76):
        known = len(chat)
        chat = chat + world.tokens(2)
        found = run(world, [chat])
        assert found == [known if known > 5 else 0]
    assert world.tree.joiner.joined
    match = world.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", chat), None)))
    assert len(world.tree.path(match.last_device_node)) < 70


def test_a_join_keeps_the_tokens_of_running_requests():
    """A request that holds a path's old pages ends, and another branches off what was joined."""
    world = World(20_000, longest=400, exact=False, page_tokens=8, segments=300, share_min=1)
    chat = world.tokens(5)
    for _ in range(20):
        chat = chat + world.tokens(3)
        run(world, [chat])
    reader = world.prompt(chat[:40] + world.tokens(30))
    before = world.manager.device.free_pages()
    node = world.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", chat), None))).last_device_node
    assert world.tree.joiner.join(node, evict=True)
    world.check()
    assert len(world.tree.path(node)) == 1
    assert world.manager.device.free_pages() < before
    again = world.start(chat[:50] + world.tokens(20))
    assert again.kv.cache_protected_len == 50
    world.plan(again)
    world.launch(again)
    offer(world.tree, again)
    for _ in range(4):
        world.decode(reader)
    world.leave(reader)
    world.leave(again)
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert world.manager.device.free_pages() == world.manager.geometry.num_pages, "a page is lost"


def test_a_join_makes_no_other_prefix_dearer():
    """A request is admitted, then the match of another one of its batch joins what both read."""
    world = World(60_000, longest=1024, exact=False, page_tokens=8, segments=300, share_min=1)
    fork = world.tokens(200)
    branch = long = fork
    run(world, [fork])
    for _ in range(50):
        branch = branch + world.tokens(5)
        run(world, [branch])
    for _ in range(40):
        long = long + world.tokens(20)
        run(world, [long])
    first = world.admit(branch + world.tokens(3))
    before = world.manager.space.path_entries(world.tree.path(first.last_node))
    second = world.admit(long[:-1] + world.tokens(3))
    assert world.tree.joiner.join(second.last_node, evict=True)
    after = world.manager.space.path_entries(world.tree.path(first.last_node))
    assert all(n <= m for n, m in zip(after, before, strict=True))


def test_without_pages_for_a_copy_a_path_is_found_in_part(monkeypatch):
    world = World(20_000, longest=200, exact=False, page_tokens=16, segments=600, share_min=1)
    monkeypatch.setattr(type(world.tree), "make_pages", lambda self, pages, **how: False)
    monkeypatch.setattr(world.tree.joiner, "_known_free", lambda pages: False)
    chat = world.tokens(5)
    for _ in range(150):
        chat = chat + world.tokens(1)
        (found,) = run(world, [chat])
        if 0 < found < len(chat) - 1:
            break
    else:
        pytest.fail("all of the path is found")
    assert not world.tree.joiner.joined


def test_a_reply_that_cannot_be_packed_is_counted():
    """The last segment row is the reply's, so there is none for its copy; then nothing runs."""
    world = World(4000, segments=3, rows=4, share_min=8)
    for _ in range(2):
        req = world.prompt(world.tokens(60))
        for _ in range(30):
            world.decode(req)
        world.leave(req)
    assert world.manager.segments.rows_free == 0
    ledger = world.allocator.ledger
    assert ledger.available() + ledger.evictable() + ledger.protected() == ledger.capacity


class Fuzz:
    """Random batches over a shared trunk, with stock SGLang's radix cache beside ours."""

    def __init__(self, seed: int, exact: bool) -> None:
        self.random = random.Random(seed)
        self.longest = self.random.choice([96, 256, 640])
        self.world = World(
            240_000, longest=self.longest, exact=exact, page_tokens=self.random.choice([4, 8]), rows=12, segments=4000,
            share_min=self.random.choice([1, 8, 24]), alpha_high=self.random.choice([0.0, 1.0]),
        )  # fmt: skip
        params = CacheInitParams(False, self.world.pool, self.world.allocator, 1)
        self.stock: Any = RadixCache(params)
        self.known: list[list[int]] = []

    def request(self) -> list[int]:
        stem: list[int] = []
        if self.known and self.random.random() < 0.9:
            stem = self.random.choice(self.known)[: self.random.randrange(self.longest)]
        room = self.longest - 20 - len(stem)
        if room < 1:
            stem, room = stem[: self.longest - 30], 10
        return stem + self.world.tokens(self.random.choice([1, 2, 7, room // 2 + 1, room]))

    def batch(self) -> None:
        requests = [self.request() for _ in range(self.random.choice([1, 1, 2, 5, 12]))]
        expected = []
        for tokens in requests:
            match = self.stock.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens[:-1]), None)))
            expected.append(len(match.device_indices))
        replies = self.random.choice([0, 0, 1, 9])
        assert run(self.world, requests, replies) == expected
        for tokens in requests:
            whole = tokens + [5] * replies
            key = RadixKey(array("q", whole), None)
            self.stock.insert(InsertParams(key=key, value=self.world.pool.req_to_token[0, : len(whole)].clone().long()))
            self.known.append(whole)
        self.known = self.known[-40:]


@FIDELITIES
@pytest.mark.parametrize(
    ("seed", "batches"), [(0, 10), *(pytest.param(seed, 150, marks=pytest.mark.full) for seed in range(1, 9))]
)
def test_the_cache_finds_what_stock_finds(seed, batches, exact):
    """A batch is 4 requests on average."""
    fuzz = Fuzz(seed, exact)
    for _ in range(batches):
        fuzz.batch()
