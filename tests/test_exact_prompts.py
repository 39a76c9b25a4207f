"""Single lives of requests under exact fidelity: ends that come early, shortages, prompts that meet."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_diffkv import compat
from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.kernels.table import row_table
from sglang_diffkv.mem_pool.allocator import DiffKVAllocator
from sglang_diffkv.mem_pool.geometry import Geometry, Segment
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.ledger import PageLedger, pages_for
from sglang_diffkv.mem_pool.page_format import PageFormat, Tier
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.usage import UsageMeter
from sglang_diffkv.policies.diffkv import DiffKVPolicy
from tests.helpers import faults

pytestmark = pytest.mark.skipif(
    compat.release() != (0, 5, 21), reason="the stand-in for a request has the fields of SGLang 0.5.21"
)


class World:
    """A pool, a tree and a manager of one layer and one head; scores stay 0, so only the window of 8 stays high."""

    def __init__(
        self,
        capacity: int,
        *,
        longest: int = 300,
        alpha_high: float = 1.0,
        page_tokens: int = 8,
        exact: bool = True,
        eviction: str = "lru",
    ) -> None:
        fmt = PageFormat(64, 64, (Tier(8, 4), Tier(4, 2)), page_tokens)
        geometry = Geometry(fmt, 1, 1, pages_for(capacity, page_tokens, 1), 9, 40, longest)
        self.manager = PageManager(geometry, DiffKVPolicy(alpha_high, 0.0, 8))
        self.pool = ReqToTokenPool(8, longest, "cpu", False)
        ledger = PageLedger(self.manager, capacity)
        self.allocator = DiffKVAllocator(ledger, dtype=torch.bfloat16, device="cpu", kvcache=None, need_sort=False)
        self.tree: Any = compat.prefix_cache_class()(
            CacheInitParams(False, self.pool, self.allocator, 1, eviction_policy=eviction), 24, exact=exact
        )
        self.random = random.Random(1)

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(1000) for _ in range(count)]

    def start(self, tokens: list[int], priority: int = 0) -> Any:
        """A request whose prompt is to run in one pass."""
        prompt = array("q", tokens)
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(prompt[:-1], None)))
        prefix, node = len(match.device_indices), match.last_device_node
        self.tree.inc_lock_ref(node)
        row = self.pool.alloc_rows(1)[0]
        req = SimpleNamespace(
            rid=str(row), tokens=prompt, kv=SimpleNamespace(req_pool_idx=row, cache_protected_len=prefix),
            origin_input_ids=prompt[:], output_ids=array("q"), extra_key=None, cache_salt=None, priority=priority,
            last_node=node, prefix_indices=match.device_indices, extend_range=SimpleNamespace(end=len(prompt)),
            sampling_params=SimpleNamespace(max_new_tokens=100),
        )  # fmt: skip
        req.get_fill_ids = lambda: req.tokens[: req.extend_range.end]
        if prefix:
            self.manager.attach_prefix(row, self.tree.path(node))
            if self.tree.exact:
                self.tree.exact.attached(row, node)
        self.pool.write((row, slice(0, prefix)), match.device_indices.int())
        self.pool.write((row, slice(prefix, len(prompt))), self.allocator.alloc(len(prompt) - prefix).int())
        return req

    def plan(self, req: Any) -> None:
        row, prefix = req.kv.req_pool_idx, req.kv.cache_protected_len
        self.manager.plan_step([row], [len(req.tokens) - prefix], [prefix])
        if self.tree.exact:
            self.tree.exact.plan(row, req.last_node, brief=False)

    def launch(self, req: Any) -> None:
        row, prefix = req.kv.req_pool_idx, req.kv.cache_protected_len
        count = len(req.tokens) - prefix
        self.manager.launch_step()
        self.manager.ops.reserve(self.manager.state, torch.tensor([row]), torch.tensor([count]), count)
        self._write(row, prefix, count)
        self.manager.prompts.end(row)

    def _write(self, row: int, start: int, count: int) -> None:
        at = torch.arange(start, start + count)
        key = torch.ones(count, 1, 64)
        append(self.manager.state, 0, key, key, torch.full((count,), row), at - start, at)

    def decode(self, req: Any) -> None:
        """One step without compaction."""
        row, start = req.kv.req_pool_idx, len(req.tokens)
        req.output_ids.append(5)
        req.tokens.append(5)
        self.pool.write((row, start), self.allocator.alloc(1).int()[0])
        self.manager.begin_step([row], [1], [start])
        self._write(row, start, 1)

    def leave(self, req: Any, *, insert: bool = True) -> None:
        row = req.kv.req_pool_idx
        end = self.manager.lengths[row]
        if insert:
            self.tree.insert_req(req, up_to=end)
        self.allocator.free(self.pool.req_to_token[row, req.kv.cache_protected_len : end].long())
        self.tree.dec_lock_ref(req.last_node)
        self.manager.release(row)
        self.tree.pack_replies()
        if self.tree.exact:
            self.tree.exact.forget(row)
        self.pool.free_rows([row])
        self.check()

    def check(self) -> None:
        check_integrity(self.manager)
        self.tree.check_integrity()

    def leaf(self, tokens: list[int]) -> Any:
        """The leaf of a prompt that shares nothing."""
        return next(x for x in self.tree.evictable_leaves if x.key.token_ids[0] == tokens[0])

    def prompt(self, tokens: list[int]) -> Any:
        """A request whose prompt has run."""
        req = self.start(tokens)
        self.plan(req)
        self.launch(req)
        self.tree.cache_unfinished_req(req)
        return req

    def segments(self) -> list[Segment]:
        return sorted(self.manager.segments.cached, key=lambda segment: segment.lo)

    def low_tokens(self, segment: Segment) -> int:
        columns = (torch.tensor([x]) for x in (segment.row, segment.lo, segment.hi))
        return int(self.manager.ops.measure(self.manager.state, *columns)[..., 1].sum())


def test_a_request_that_ends_at_once_leaves_its_prompt_exact() -> None:
    """Its first token ends it, but under overlap scheduling the next step is launched already."""
    world = World(2000)
    req = world.start(world.tokens(100))
    world.plan(req)
    world.launch(req)
    world.decode(req)
    world.leave(req)
    assert [(x.lo, x.hi, x.exact) for x in world.segments()] == [(0, 100, True), (100, 101, False)]
    assert world.low_tokens(world.segments()[0]) == 0


def test_room_for_a_copy_is_judged_with_the_prompt_counted() -> None:
    """Eviction asks the device for its counts while the prompt is planned and not launched."""
    world = World(400, alpha_high=0.0)
    first = world.tokens(100)
    for tokens in (first, first[:60] + world.tokens(40), world.tokens(60)):
        world.leave(world.prompt(tokens), insert=False)
    world.manager.tracker.settle()
    world.leave(world.prompt(world.tokens(60)), insert=False)
    req = world.start(world.tokens(120))
    world.allocator.ledger.promise(req.rid, [], 120)
    world.tree.evict_uncovered()
    world.allocator.ledger.promise(req.rid, [], 0)
    world.plan(req)
    world.launch(req)
    assert not faults(world.manager, [req.kv.req_pool_idx])


@pytest.mark.parametrize("longest, shared, new", [(4096, 3000, 1000), (32768, 24000, 8000)])
def test_a_long_prompt_after_a_long_prefix_joins(longest: int, shared: int, new: int) -> None:
    world = World(3 * longest, longest=longest, page_tokens=8 if longest < 10000 else 32)
    prefix = world.tokens(shared)
    world.leave(world.prompt([*prefix, 1]), insert=False)
    world.manager.tracker.settle()
    req = world.prompt(prefix + world.tokens(new))
    assert sum(x.hi - x.lo for x in world.segments()) == shared + new + 1
    world.leave(req)


def test_of_two_equal_prompts_both_replies_join() -> None:
    world = World(2000)
    tokens = world.tokens(100)
    both = [world.start(tokens) for _ in range(2)]
    for req in both:
        world.plan(req)
        world.launch(req)
    for req in both:
        world.tree.cache_unfinished_req(req)
    assert [world.tree.exact.joins(req.kv.req_pool_idx) for req in both] == [True, True]
    for req in both:
        world.decode(req)
        world.leave(req)


def test_without_names_a_request_keeps_its_lock_and_nothing_is_evicted() -> None:
    world = World(4000)
    for _ in range(5):
        world.leave(world.prompt(world.tokens(100)), insert=False)
    req = world.start(world.tokens(100))
    world.plan(req)
    world.launch(req)
    world.allocator.free_pages = world.allocator.free_pages[:50]
    world.tree.cache_unfinished_req(req)
    assert len(world.tree.evictable_leaves) == 5
    assert req.kv.cache_protected_len == 100


def test_pages_by_owner_are_those_that_tables_list() -> None:
    world = World(2000)
    prefix = world.tokens(100)
    world.leave(world.prompt([*prefix, 1]))
    running = [world.start([*prefix[:70], *world.tokens(60)]) for _ in range(2)]
    for req in running:
        world.plan(req)
        world.launch(req)
        world.tree.cache_unfinished_req(req)
    manager, state = world.manager, world.manager.state

    def listed(rows: list[int]) -> set[int]:
        pages = set()
        for row in rows:
            for tier in range(2):
                count = int(state.entries[row, 0, 0, tier])
                page, _, _ = row_table(state, torch.tensor([row]), tier, max(count, 1))
                pages.update(page[0, 0, 0, :count].tolist())
        return pages

    requests, tree = listed([*manager.lengths]), listed([x.row for x in manager.segments.held])
    expected = {"private": len(requests - tree), "shared": len(requests & tree), "cached": len(tree - requests)}
    assert all(expected.values())
    assert UsageMeter(manager).owners() == {**expected, "free": manager.free_pages()}
    for req in running:
        world.leave(req)


def test_a_copy_s_scores_are_dropped_with_the_prompt() -> None:
    world = World(1000)
    prefix = world.tokens(100)
    world.leave(world.prompt([*prefix, 1]), insert=False)
    world.allocator.ledger.promise("other", [], 860)  # no room for a copy
    req = world.start(prefix + world.tokens(30))
    assert world.manager.copies.judged
    world.plan(req)
    world.launch(req)
    assert not world.manager.copies.judged
    assert world.tree.exact.outcomes["no room"] == 1
    assert not world.tree.exact.joins(req.kv.req_pool_idx)


def test_scores_of_a_long_prefix_are_not_kept() -> None:
    world = World(400)
    prefix = world.tokens(100)
    assert world.manager.geometry.judged_tokens < len(prefix)
    world.leave(world.prompt([*prefix, 1]), insert=False)
    req = world.start(prefix + world.tokens(30))
    assert not world.manager.copies.judged
    world.plan(req)
    world.launch(req)
    assert world.tree.exact.outcomes["copied"] == 2, "the copy goes by what is known of the prefix"


def test_a_reply_leaves_the_pages_of_its_prompt_s_copy() -> None:
    """Generated tokens lie between the copied prompt's; the tree has the prompt, so it keeps the reply densely."""
    world = World(2000)
    req = world.prompt(world.tokens(100))
    for _ in range(10):
        world.decode(req)
    row, state = req.kv.req_pool_idx, world.manager.state
    world.decode(req)
    free = world.manager.free_pages()
    private = int(state.entries[row].sum())
    world.leave(req)
    reply = world.segments()[1]
    assert (reply.lo, reply.hi) == (100, 111)
    world.manager.tracker.settle()
    assert reply.pages == 2, "11 tokens of 8 a page"
    assert world.manager.free_pages() == free + private - 2
    assert not world.manager.packer.spread


@pytest.mark.parametrize("exact", [True, False])
def test_a_long_leaf_loses_only_its_end(exact: bool) -> None:
    """Eviction cuts it by what is missing and keeps the rest, whose place in the order stays."""
    world = World(800, exact=exact)
    first, second = world.tokens(203), world.tokens(90)
    for tokens in (first, second):
        world.leave(world.prompt(tokens), insert=False)
    world.manager.tracker.settle()
    used, before = world.leaf(first).last_access_time, world.allocator.ledger.available()
    evicted = world.tree.evict(EvictParams(num_tokens=20)).num_tokens_evicted
    assert world.allocator.ledger.available() == before + evicted
    assert 20 <= evicted < (28 if exact else 60)
    assert world.leaf(first).last_access_time == used
    kept = len(world.leaf(first).key)
    assert 100 < kept < 203 and (kept % 8 == 0 or not exact)
    world.check()
    world.tree.evict(EvictParams(num_tokens=20))
    assert len(world.leaf(first).key) < kept
    assert len(world.leaf(second).key) == 90
    world.tree.evict(EvictParams(num_tokens=400))
    world.check()
    world.manager.tracker.settle()
    assert world.allocator.ledger.available() >= 400
    req = world.prompt(first)
    world.leave(req)


def test_a_cut_leaf_is_not_cut_below_what_is_worth_keeping() -> None:
    world = World(800)
    world.leave(world.prompt(world.tokens(40)), insert=False)
    world.manager.tracker.settle()
    world.tree.evict(EvictParams(num_tokens=20))
    assert not world.segments()
    world.check()


def two_readers(world: World, prefix: list[int], own: int) -> list[Any]:
    """Two requests whose prompts have run: ``own`` tokens each behind a prefix that is in the tree."""
    both = [world.start(prefix + world.tokens(own)) for _ in range(2)]
    for req in both:
        world.plan(req)
        world.launch(req)
        world.tree.cache_unfinished_req(req)
    return both


def test_the_last_reader_copies_what_it_shared() -> None:
    """Two requests read one prompt at the high tier; when one leaves, the other runs on a compressed copy, further
    tokens go down in place, and the tree's prompt may be evicted."""
    world = World(2000)
    prefix = world.tokens(104)
    world.leave(world.prompt([*prefix, 1]))
    stays, goes = two_readers(world, prefix, 40)
    row, evictable = stays.kv.req_pool_idx, world.allocator.ledger.evictable_pages
    assert world.manager.shared[row] == 104
    for _ in range(5):
        world.decode(stays)
    world.tree.exact.copy_alone([stays])
    assert world.tree.exact.outcomes["copied later"] == 0
    world.leave(goes)
    world.tree.exact.copy_alone([stays])
    assert world.tree.exact.outcomes["copied later"] == 1
    assert row not in world.manager.shared and stays.kv.cache_protected_len == 0
    world.manager.tracker.settle()
    assert world.allocator.ledger.protected() == 0
    assert world.allocator.ledger.evictable_pages > evictable
    held = world.manager.ops.measure(world.manager.state, *(torch.tensor([x]) for x in (row, 0, 149)))[0, 0, 0]
    assert held[:2].tolist() == [8 + 5 + 0, 136], "the window and what was generated since the prompt stay high"
    world.check()
    world.decode(stays)
    world.leave(stays)
    assert not faults(world.manager, [row])


def test_a_last_reader_without_room_reads_on() -> None:
    world = World(300)
    prefix = world.tokens(104)
    world.leave(world.prompt([*prefix, 1]), insert=False)
    stays, goes = two_readers(world, prefix, 30)
    world.leave(goes, insert=False)
    world.allocator.ledger.promise("other", [], 150)
    world.tree.exact.copy_alone([stays])
    assert world.tree.exact.outcomes["copied later"] == 0
    assert world.manager.shared[stays.kv.req_pool_idx] == 104
    world.allocator.ledger.promise("other", [], 0)
    world.leave(stays)


@pytest.mark.parametrize(
    "eviction, first",
    [("lru", "b"), ("lfu", "b"), ("fifo", "a"), ("mru", "a"), ("filo", "c"), ("priority", "b"), ("slru", "b")],
)
@pytest.mark.parametrize("exact", [True, False])
def test_every_eviction_policy_chooses_by_its_rule(eviction: str, first: str, exact: bool) -> None:
    """Of three prompts in order a, b, c the first is asked twice more at the end and has a priority; what is left of a
    leaf that was cut keeps its place."""
    world = World(2000, exact=exact, eviction=eviction)
    prompts = {name: world.tokens(100) for name in "abc"}
    for name in "abcaa":
        req = world.start(prompts[name], priority=3 if name == "a" else 0)
        world.plan(req)
        world.launch(req)
        world.tree.cache_unfinished_req(req)
        world.leave(req, insert=False)
    world.manager.tracker.settle()

    def left() -> dict[str, int]:
        found = dict.fromkeys("abc", 0)
        for node in world.tree.root_node.children.values():
            name = next(x for x in "abc" if prompts[x][0] == node.key.token_ids[0])
            found[name] = sum(len(x.key) for x in (node, *node.children.values()))
        return found

    assert left() == dict.fromkeys("abc", 100)
    for _ in range(2):
        before = left()
        world.tree.evict(EvictParams(num_tokens=20))
        after = left()
        assert [name for name in "abc" if after[name] < before[name]] == [first]
        world.check()
