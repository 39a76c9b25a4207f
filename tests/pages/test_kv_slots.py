"""KV slots count as room: where they run out before pages do, the prefix cache gives some back or SGLang
retracts, and no allocation fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_diffkv.layout.geometry import kv_slots_for
from sglang_diffkv.mem_pool.ledger import Promise, Promises
from sglang_diffkv.policies.budget import Budget, PyramidBudget
from sglang_diffkv.policies.knorm import KnormPolicy
from sglang_diffkv.srt.scheduling.joint_admission import AdmissionRule
from sglang_diffkv.srt.scheduling.lifecycle import RequestLifecycle
from sglang_diffkv.srt.tree.parts import Parts
from tests.helpers import make_format
from tests.policies import h2o_policy, pyramidkv_policy, snapkv_policy, xkv_policy
from tests.tree.tree_world import World


@pytest.mark.parametrize("tiers", [("K8V4", "K4V2"), ("BF16", "K1V1"), ("K8V8", "K1V1"), ("K8V4",)])
@pytest.mark.parametrize("page_tokens", [8, 32])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_there_are_twice_the_kv_slots_that_unpruned_tokens_need(tiers, page_tokens, head_dim):
    fmt = make_format(tiers, head_dim, head_dim, page_tokens)
    kv_slots = kv_slots_for(1000, fmt, prunes=False)
    assert kv_slots >= 2 * 1000 * fmt.low.tokens / fmt.high.tokens
    assert kv_slots_for(1000, fmt, prunes=True) >= max(kv_slots, 16_000)
    beside_a_draft_model = kv_slots_for(1000, fmt, prunes=True, owning=True)
    assert 1000 * fmt.low.tokens / fmt.high.tokens <= beside_a_draft_model <= kv_slots / 2


@pytest.mark.parametrize(
    ("policy", "times"),
    [
        (snapkv_policy(Budget(512)), 16),
        (snapkv_policy(Budget(0, 0.5)), 16),
        (h2o_policy(Budget(0, 0.02)), 50),
        (pyramidkv_policy(PyramidBudget(0, 0.02)), 50),
        (KnormPolicy(Budget(0, 0.02), 64, 4), 50),
        (xkv_policy(keep=0.012), 84),
        (xkv_policy(keep=0.0001), 256),
        (xkv_policy(min_retention=0.1), 16),
        (xkv_policy(layer_fractions=(0.01, 0.03)), 50),
    ],
)
def test_there_are_as_many_as_a_method_that_keeps_little_needs(policy, times):
    assert kv_slots_for(1000, make_format(("BF16",)), prunes=True, kept_share=policy.kept_share) == 1000 * times


def test_a_step_without_kv_slots_evicts_or_retracts():
    world = World(400, exact=False)
    allocator, ledger = world.allocator, world.allocator.ledger
    cached = world.prompt(world.tokens(100))
    world.leave(cached)
    running = world.prompt(world.tokens(20))
    held = allocator.alloc(allocator.kv_slots_free() - 3)
    assert allocator.check_decode_capacity(num_tokens=3, tree_cache=world.tree)
    assert ledger.uncommitted_kv_slots() == 3, "KV slots were given back without need"
    assert allocator.check_decode_capacity(num_tokens=6, tree_cache=world.tree)
    assert ledger.available() >= 6, "the cached prompt gave KV slots back"
    world.tree.make_kv_slots(100)
    more = allocator.alloc(allocator.kv_slots_free() - 3)
    assert ledger.available() == 3
    assert not allocator.check_decode_capacity(num_tokens=6, tree_cache=world.tree), "SGLang would not retract"
    allocator.free(held)
    assert allocator.check_decode_capacity(num_tokens=6, tree_cache=world.tree)
    allocator.free(more)
    world.leave(running)


def test_kv_slots_of_admitted_prompts_are_set_aside():
    world = World(400, exact=False)
    allocator, ledger = world.allocator, world.allocator.ledger
    running = world.prompt(world.tokens(20))
    held = allocator.alloc(allocator.kv_slots_free() - 60)
    assert ledger.admits(50, ledger.blocks_for([], 50))
    ledger.promise("chunked", 50)
    assert ledger.available() == 10
    assert not ledger.admits(11, ledger.blocks_for([], 11))
    with ledger.prefilling():
        assert ledger.available() == 60, "the prompt's own allocation finds its KV slots"
    ledger.forget("chunked")
    allocator.free(held)
    world.leave(running)


def requests_of(drafts: int, free: int, tree: Any) -> RequestLifecycle:
    """A manager's stub, in whose table everybody has room, with ``free`` KV slots."""
    space = SimpleNamespace(refused=lambda rows, step_tokens: {})
    counts = SimpleNamespace(step_tokens=drafts or 1)
    manager = SimpleNamespace(space=space, counts=counts, running=None, transfer=None)
    ledger = SimpleNamespace(
        manager=manager, draft_slots=drafts, kv_slots_free=lambda: free, uncommitted_kv_slots=lambda: free
    )
    requests = RequestLifecycle(ledger)  # type: ignore[arg-type]
    if tree is not None:
        requests.connect(tree, Parts(), AdmissionRule(requests.ledger))
    return requests


def drafting(row: int, stored: int, allocated: int) -> SimpleNamespace:
    kv = SimpleNamespace(req_pool_idx=row, kv_committed_len=stored, kv_allocated_len=allocated)
    return SimpleNamespace(**vars(kv), kv=kv)


def test_drafts_take_the_kv_slots_that_a_request_lacks() -> None:
    """Each holds those of its last pass, of which it accepted two of four tokens: two more each, not eight."""
    reqs = [drafting(row, 102, 108) for row in range(1, 33)]
    assert requests_of(4, 64, None).without_room(reqs) == {}
    assert requests_of(4, 61, None).without_room(reqs) == {30: "no KV slot is free", 31: "no KV slot is free"}
    assert requests_of(0, 31, None).without_room(reqs) == {31: "no KV slot is free"}


def test_the_tree_gives_what_it_has_before_requests_end() -> None:
    asked: list[int] = []
    tree = SimpleNamespace(evictable_tokens=lambda: 20, make_kv_slots=asked.append)
    reqs = [drafting(row, 102, 108) for row in range(1, 33)]
    assert requests_of(4, 44, tree).without_room(reqs) == {} and asked == [64]
    assert requests_of(4, 40, tree).without_room(reqs) == dict.fromkeys([30, 31], "no KV slot is free")
    assert asked == [64, 60], "for those that go on"


def test_the_sum_of_all_promises_follows_them() -> None:
    promises = Promises()
    for request, promise in [("a", Promise(3, 2, 40)), ("b", Promise(5, 1, 7)), ("a", Promise(1, 4, 9))]:
        promises[request] = promise
        promises.check_integrity()
    assert promises.total == Promise(6, 5, 16)
    for request in ("a", "a", "never"):
        promises.drop(request)
        assert promises.total == promises["b"] == Promise(5, 1, 7)
    promises.clear()
    promises.check_integrity()
    assert not promises and promises.total == Promise(0, 0, 0)
