"""Retracted requests whose pages go to the host: random lives, and what each of a few situations asks for."""

from __future__ import annotations

from array import array
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_diffkv.config import load_config
from sglang_diffkv.layout.page_format import Tier
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.mem_pool.growth import Expected
from sglang_diffkv.mem_pool.saved_rows import Needed
from sglang_diffkv.policies.uniform import UniformPolicy
from sglang_diffkv.srt.hooks.table import HOOKS
from sglang_diffkv.srt.scheduling.allocator import SERVED
from sglang_diffkv.srt.tree.retracted import Retracted, why_recomputed
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.versions.compat import tokens_wanted
from sglang_diffkv.srt.versions.selection import BACKEND
from tests.helpers import visible
from tests.tree.stand_in import Match, StandIn
from tests.tree.test_prefix_cache import HEADS, LAYERS, ROWS, TreeMachine, machine_settings
from tests.tree.tree_world import World


def retract(world: World, req: Any) -> None:
    """Retract a running request, whose last token is one that it was to compute next."""
    req.output_ids.append(7)
    req.tokens.append(7)
    retracted_of(world).keep(req)
    world.leave(req, insert=False)


def retracted_of(world: World) -> Retracted:
    assert isinstance(world.requests.retracted, Retracted)
    return world.requests.retracted


def readmit(world: World, req: Any) -> int:
    """Match a retracted request as SGLang does when it admits one, and run it if it need not wait. Tokens found."""
    retracted = retracted_of(world)
    with retracted.admitting(req):
        match = Match(world.tree, req.tokens, extra_key=req.extra_key)
    match.unlock(world.tree)
    world.tree.check_integrity()
    return len(match)


def run(world: World, req: Any) -> None:
    """The pass of a retracted request that was found a place."""
    with retracted_of(world).admitting(req):
        again = world.admit(list(req.tokens), extra_key=req.extra_key)
    req.__dict__ = {**again.__dict__, "rid": req.rid}
    if again.kv is again:
        req.kv = req
    world.attach(req)
    world.plan(req)
    world.launch(req)
    world.check()


@pytest.fixture(params=[False, True], ids=["compressed", "exact"])
def world(request: pytest.FixtureRequest) -> World:
    return World(300, exact=request.param, host_pages=200, rows=8)


def test_what_was_evicted_comes_back(world: World) -> None:
    """All of it, once SGLang is about to admit the request, and not when it only puts its queue in order."""
    req = world.prompt(world.tokens(60))
    for _ in range(9):
        world.decode(req)
    retract(world, req)
    retracted = retracted_of(world)
    assert retracted.report()["waiting"] == 1 and retracted.report()["host_bytes"] > 0
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert not world.manager.segments.cached
    look = Match(world.tree, req.tokens)
    assert len(look) == 0, "restored for a look at the queue"
    look.unlock(world.tree)
    assert readmit(world, req) == 69
    pages = world.manager.device.free_pages()
    assert readmit(world, req) == 69 and world.manager.device.free_pages() == pages, "restored twice"
    run(world, req)
    assert retracted.counts["restored"] == 1 and retracted.counts["tokens_restored"] == 69
    assert retracted.report()["host_bytes"] == 0
    assert world.manager.rows.length(req.kv.req_pool_idx) == 70
    world.decode(req)
    world.leave(req)
    other = Match(world.tree, array("q", [*req.tokens[:60], 1]))
    assert len(other) == (0 if world.requests.exact.keeps_prompts else 60)
    other.unlock(world.tree)


def test_only_what_the_tree_has_lost_is_restored() -> None:
    world = World(900, exact=False, host_pages=200)
    prompt = world.tokens(60)
    first = world.prompt([*prompt, *world.tokens(1 + world.manager.prompts.tail)])
    req = world.prompt([*prompt, *world.tokens(5)])
    for _ in range(20):
        world.decode(req)
    retract(world, req)
    assert retracted_of(world).of(req).saved.pages_from(0) > retracted_of(world).of(req).saved.pages_from(60)
    free = world.manager.device.free_pages()
    assert readmit(world, req) == 85
    assert [x.lo for x in world.segments()][-1] == 60
    assert free - world.manager.device.free_pages() == retracted_of(world).of(req).saved.pages_from(60)
    run(world, req)
    world.leave(req)
    world.leave(first)


def test_a_compressed_prompt_is_for_its_request_alone() -> None:
    """With exact fidelity, before it runs, while it runs, and if it is aborted before."""
    world = World(400, exact=True, host_pages=200)
    req, prompt = world.prompt(world.tokens(80)), []
    prompt[:] = req.tokens
    retract(world, req)
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert readmit(world, req) == 80
    other = world.prompt([*prompt, 1])
    assert all(x.as_computed for x in world.manager.held_segments if x.hi == 81)
    world.leave(other)
    run(world, req)
    row = req.kv.req_pool_idx
    assert row in world.requests.exact.restored and retracted_of(world).places[row].private
    world.leave(req)
    assert all(x.key.extra_key is None for x in world.tree.root_node.children.values())
    again = world.prompt(world.tokens(80))
    retract(world, again)
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert readmit(world, again) == 80 and world.manager.segments.cached
    retracted_of(world).sweep([])
    assert not world.manager.segments.cached and not world.manager.saved.host.used
    world.check()


def test_no_event_tells_of_a_private_node() -> None:
    """A listener would believe in a prompt that only one request finds, and with that request forget the prompt that
    all find."""
    world = World(900, exact=True, host_pages=200)
    req = world.prompt(world.tokens(80))
    prompt = list(req.tokens)
    retract(world, req)
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert readmit(world, req) == 80
    world.listener.check()
    assert not world.listener.blocks
    world.leave(world.prompt([*prompt, 1]))
    world.listener.check()
    known = len(world.listener.blocks)
    run(world, req)
    world.leave(req)
    world.listener.check()
    assert len(world.listener.blocks) == known > 80


def names_of(space: Any, rid: str) -> list[str]:
    """What a client may think that the namespace of a retracted request is called."""
    return [f"None\0retracted {rid}", f"retracted {rid}", rid, str(space), repr(space)]


def test_no_client_can_name_a_private_namespace() -> None:
    """Tokens that a client put under any text are neither found nor in the way."""
    world = World(900, exact=True, host_pages=200)
    req = world.prompt(world.tokens(80), rid="mine")
    retract(world, req)
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    for name in names_of(retracted_of(world).of(req).space, "mine"):
        world.leave(world.prompt([*req.tokens[:60], *world.tokens(20)], extra_key=name))
    assert readmit(world, req) == 80
    for name in names_of(retracted_of(world).of(req).space, "mine"):
        other = Match(world.tree, req.tokens, extra_key=name)
        assert len(other) == 60
        other.unlock(world.tree)
    run(world, req)
    world.leave(req)
    assert retracted_of(world).counts["restored"] == 1


def test_requests_of_one_name_are_kept_apart(world: World) -> None:
    """A client may give two requests one ``rid`` and one ``extra_key``: an aborted request can be in the scheduler
    still."""
    both = [world.prompt(world.tokens(40), rid="one", extra_key="one") for _ in range(2)]
    for req in both:
        retract(world, req)
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert retracted_of(world).counts["kept"] == 2 and not retracted_of(world).counts["dropped"]
    for req in both:
        assert readmit(world, req) == 40
    for req in both:
        run(world, req)
    assert retracted_of(world).counts["restored"] == 2
    for req in both:
        world.leave(req)


def test_promises_of_one_name_are_kept_apart() -> None:
    world = World(900)
    ledger, both = world.requests.ledger, [world.admit(world.tokens(80), rid="one") for _ in range(2)]
    for req in both:
        world.requests.admit(req, world.requests.check(req, 80, []))
    assert ledger.promised_pages() == 2 * ledger.prompt_pages(80)
    ledger.forget(both[0])
    assert ledger.promised_pages() == ledger.prompt_pages(80)
    world.requests.admit(both[1], world.requests.check(both[1], 40, []), compacted=True)
    assert world.requests.next_chunk_fits(both[0], 80) and both[0] not in ledger.chunks


def test_what_the_tree_has_gained_meanwhile_is_computed_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a request's tokens are found beside ends the scheduler: what does not fit is not restored."""
    req = world.prompt(world.tokens(60))
    retract(world, req)
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    retracted, stock = retracted_of(world), Retracted._make_room

    def filled(self: Retracted, tokens: int, needed: Needed) -> bool:
        """While room is made the tree gets what is to be restored."""
        (kept,) = self.kept.values()
        room, at = stock(self, tokens, needed), kept.saved.hi - tokens
        segment, kv_slots = self.saved.restore(kept.saved, at), world.allocator.alloc(tokens).long()
        key = RadixKey(req.tokens[:-1], kept.space)
        with world.tree.restoring(segment):
            world.tree.insert(InsertParams(key=key, value=kv_slots))
        return room

    monkeypatch.setattr(Retracted, "_make_room", filled)
    assert readmit(world, req) == (0 if world.requests.exact.keeps_prompts else 60)
    assert retracted.of(req) is None and retracted.counts["recomputed"] == 1
    assert not world.manager.saved.host.used
    world.check()


def generating(world: World, count: int) -> list[Any]:
    """Requests that have generated 9 tokens behind 40 and may generate few more; the tree has lost their prompts where
    nobody reads them."""
    reqs = [world.prompt(world.tokens(40)) for _ in range(count)]
    for req in reqs:
        req.sampling_params.max_new_tokens = 20
        for _ in range(9):
            world.decode(req)
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    return reqs


def most_found(world: World, reqs: list[Any]) -> int:
    """Tokens of a request that the tree or the host has, at most."""
    return max(readmit(world, req) for req in reqs)


def test_nothing_that_is_kept_outlives_a_pause(world: World) -> None:
    """SGLang promises that all is computed again: of a request that waits for its turn, of one that was restored and
    has not run yet, and of one that has. Of all three the tree has no more than stock's, the prompts."""
    reqs = generating(world, 3)
    for req in reqs:
        retract(world, req)
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    _, restored, runs = reqs
    assert readmit(world, runs) == 49
    run(world, runs)
    assert readmit(world, restored) == 49
    retracted, before = retracted_of(world), dict(retracted_of(world).counts)
    with retracted.retracting_all():
        world.leave(runs, insert=False)
    assert not retracted.kept and not world.manager.saved.host.used
    assert most_found(world, reqs) == 0, "what was kept outlives the pause"
    assert retracted.counts["dropped"] - before["dropped"] == 2
    retract(world, world.prompt(world.tokens(40)))
    assert retracted.counts["kept"] - before["kept"] == 1, "requests of after the pause are kept again"


def test_nothing_that_other_weights_computed_is_kept(world: World) -> None:
    """A request that goes on over a change of weights has keys and values of both: retracted later it is computed
    again, and so are those that may have begun on a prefix that stayed in the tree."""
    first, second = reqs = generating(world, 2)
    retract(world, first)
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert readmit(world, first) == 49
    run(world, first)
    retracted = retracted_of(world)
    retract(world, second)
    retracted.weights_change()
    assert not retracted.kept and not world.manager.saved.host.used
    retract(world, first)
    assert most_found(world, reqs) <= 40, "what other weights generated is found"
    retract(world, world.prompt(world.tokens(40)))
    assert not retracted.kept and retracted.counts["kept"] == 2
    world.tree.reset()
    retract(world, world.prompt(world.tokens(40)))
    assert retracted.counts["kept"] == 3
    world.tree.reset()
    retracted.weights_change()
    retract(world, world.prompt(world.tokens(40)))
    assert retracted.counts["kept"] == 4, "nothing was computed by other weights"


def test_every_way_to_change_weights_is_hooked() -> None:
    """A method of SGLang's that is in neither list is new: does it change weights?"""
    module, manager = compat.installed().target("change_weights")[0].rsplit(".", 2)[:2]
    known = {
        "flush_cache_after_weight_update", "init_weights_update_group", "destroy_weights_update_group",
        "get_weights_by_name", "record_weight_version_after_update",
    }  # fmt: skip
    found = {name for name in dir(getattr(import_module(module), manager)) if "weight" in name and name[0] != "_"}
    hooked = {name.rsplit(".", 1)[1] for name in compat.installed().target("change_weights")}
    assert hooked <= found <= hooked | known
    assert set(compat.installed().target("change_weights")) <= HOOKS.keys()


@pytest.mark.parametrize(("action", "drops"), [(None, True), ("reset_tensors", True), ("checksum", False)])
def test_a_change_of_weights_drops_what_is_kept(
    action: str | None, drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(300, exact=False, host_pages=200)
    monkeypatch.setitem(SERVED, BACKEND, world.allocator)
    retract(world, world.prompt(world.tokens(60)))
    asked = SimpleNamespace(**({} if action is None else {"action": action}))
    answer = HOOKS[compat.installed().target("change_weights")[0]](lambda self, request: request, None, asked)
    assert answer is asked and bool(retracted_of(world).kept) != drops


def test_it_waits_for_room_while_others_run(world: World) -> None:
    req = world.prompt(world.tokens(90))
    retract(world, req)
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    others = [world.prompt(world.tokens(100)) for _ in range(2)]
    retracted, ledger = retracted_of(world), world.requests.ledger
    retracted.expect(lambda: [Expected(x.kv.req_pool_idx, 60.0) for x in others])
    assert readmit(world, req) == 0
    assert world.requests.waits_to_be_restored(req) and ledger.refused is not None and ledger.waited == 1
    assert retracted.of(req) is not None
    for other in others:
        world.leave(other, insert=False)
    retracted.expect(lambda: [])
    assert readmit(world, req) == 90 and not world.requests.waits_to_be_restored(req)
    run(world, req)
    world.leave(req)


def test_it_waits_for_room_for_what_the_tree_has_lost() -> None:
    """Not for what others hold of its prompt as well."""
    world = World(216, exact=False, host_pages=200)
    prompt = world.tokens(120)
    first = world.prompt([*prompt, *world.tokens(1 + world.manager.prompts.tail)])
    req = world.prompt([*prompt, *world.tokens(5)])
    for _ in range(20):
        world.decode(req)
    req.sampling_params.max_new_tokens = len(req.output_ids) + 4
    retract(world, req)
    retracted, ledger = retracted_of(world), world.requests.ledger
    retracted.expect(lambda: [Expected(first.kv.req_pool_idx, 400.0)])
    assert readmit(world, req) == 120 and world.requests.waits_to_be_restored(req)
    retracted.expect(lambda: [])
    assert ledger.room_for_refused([]), "it would not be asked again while the other runs"
    assert readmit(world, req) == 145 and not world.requests.waits_to_be_restored(req)
    run(world, req)
    world.leave(req)
    world.leave(first)


def test_one_that_does_not_fit_as_it_was_is_computed_again() -> None:
    """What is restored of a request upon a prefix in many part-filled pages may take more than its tokens computed
    again. With nothing running it would be restored and refused for ever."""
    world = World(300, exact=False, host_pages=200, policy=UniformPolicy(), tiers=(Tier(8, 4),))
    prompt: list[int] = []
    for _ in range(5):
        prompt += world.tokens(25)
        world.leave(world.prompt(list(prompt)))
    req = world.prompt([*prompt, *world.tokens(25)])
    retract(world, req)
    retracted, ledger = retracted_of(world), world.requests.ledger
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    req.sampling_params.max_new_tokens = 298 - len(req.tokens)
    for found in (150, 0):
        with retracted.admitting(req):
            match = Match(world.tree, req.tokens)
        assert len(match) == found
        req.last_node, req.prefix_len, req.prefix_indices = match.node, found, match.kv_slots.long()
        req.kv.cache_protected_len = found
        admission = world.requests.check(req, 1 << 30, [])
        room = ledger.available() + ledger.evictable() - tokens_wanted(req, admission.growth)
        match.unlock(world.tree)
        if found:
            assert room < 0 and world.requests.turn_away(req, admission), "it is not asked again"
            assert retracted.of(req) is None and not world.manager.saved.host.used
    assert room > 0 and admission.fits
    assert retracted.counts["recomputed"] == 1
    world.check()


def test_the_host_s_memory_may_be_full(caplog: pytest.LogCaptureFixture) -> None:
    world = World(300, exact=False, host_pages=14)
    for number in range(3):
        req = world.prompt(world.tokens(110))
        req.rid = f"request {number}"
        retract(world, req)
    counts = retracted_of(world).counts
    assert (counts["kept"], counts["no_host_memory"]) == (1, 2)
    assert caplog.text.count("host memory for retracted requests is full") == 1
    assert readmit(world, req) == 110  # the tree still has its prompt


@pytest.mark.parametrize(
    ("config", "changes", "states", "why"),
    [
        ("{}", {}, None, ""),
        ('{"host_gib": 0}', {}, None, "host_gib"),
        ("{}", {"disable_radix_cache": True}, None, "prefix cache, which is off"),
        ("{}", {"tp_size": 2}, None, ""),
        ("{}", {"tp_size": 2, "device": "cuda"}, None, "several ranks"),
        ("{}", {"speculative_algorithm": "NGRAM"}, None, ""),
        ("{}", {"speculative_algorithm": "NGRAM", "device": "cuda"}, None, "with drafts"),
        ("{}", {"speculative_algorithm": "EAGLE"}, None, ""),
        ("{}", {"speculative_algorithm": "EAGLE", "device": "cuda"}, None, "with drafts"),
        ("{}", {"SGLANG_RADIX_FORCE_MISS": "1"}, None, "SGLANG_RADIX_FORCE_MISS"),
        ("{}", {}, "mamba", ""),
        ("{}", {"device": "cuda"}, "mamba", "with states"),
        ("{}", {"device": "cuda", "SGLANG_DIFFKV_UNTRIED": "1"}, "mamba", ""),
        ("{}", {"speculative_algorithm": "NEXTN"}, "mamba", "states behind accepted drafts"),
        ("{}", {}, SimpleNamespace(short_conv_layer_ids=[1]), "short convolutions"),
        ("{}", {"page_size": 16}, None, ""),
        ("{}", {"page_size": 16, "device": "cuda"}, None, ""),
        ("{}", {"strip_thinking_cache": True}, None, "--strip-thinking-cache"),
        ("{}", {"kv_canary": "log"}, None, "--kv-canary"),
        ('{"tiers": ["K8V4"], "policy": {"name": "zipage", "max_blocks": 8}}', {}, None, "the policy"),
    ],
)
def test_why_a_server_computes_them_again(
    config: str, changes: dict[str, Any], states: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in changes if name.isupper()]:
        monkeypatch.setenv(name, changes[name])
    args = {"disable_radix_cache": False, "tp_size": 1, "speculative_algorithm": None, "kv_canary": "none", **changes}
    configurator = SimpleNamespace(server_args=SimpleNamespace(**args), mambaish_config=states)
    found = why_recomputed(configurator, load_config(config))
    assert why in found and bool(found) == bool(why)


NAMES = ("", "one", "None\0retracted one")


class RetractedMachine(TreeMachine):
    """A prefix cache's life with requests that are retracted, wait, come back, or are aborted while they wait. Their
    clients give several the same ``rid``, and namespaces that look like the plugin's."""

    host_pages = 300

    def __init__(self, ranks: Ranks | None = None) -> None:
        super().__init__(ranks)
        self.waiting: list[Any] = []
        self.names: tuple[str | None, ...] = (None,)

    @initialize(named=st.booleans())
    def choose_names(self, named: bool) -> None:
        """SGLang's events leave ``extra_key`` out, so where clients choose some a listener is wrong on stock, too."""
        self.names = (None, None, None, *NAMES) if named else (None,)

    @invariant()
    def a_listener_knows_what_is_found(self) -> None:
        if self.names == (None,):
            self.listener.check()

    @property
    def retracted(self) -> Retracted:
        assert isinstance(self.requests.retracted, Retracted)
        return self.requests.retracted

    def named(self) -> tuple[str, str | None]:
        return self.random.choice(("one", "another")), self.random.choice(self.names)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 7), overlap=st.booleans())
    def retract(self, which: int, overlap: bool) -> None:
        """With overlap scheduling the row has its last token already, else that is the one to be computed next."""
        req = self.running[which % len(self.running)]
        if not overlap and not req.prefilling:
            req.output_ids.append(self.random.randrange(3))
            req.tokens.append(req.output_ids[-1])
        before = self.retracted.of(req)
        self.retracted.keep(req)
        kept = self.retracted.of(req)
        assert kept is None or kept.saved.hi == self.kept_length(req)
        assert kept is before or not req.prefilling, "a part of a prompt is kept"
        self._leave(req, insert=False)
        self.waiting.append(req)
        self.results(req)

    def kept_length(self, req: Any) -> int:
        """Tokens that are kept of a request which is retracted now."""
        return len(req.tokens) - 1

    def results(self, req: Any) -> None:
        """Of the pass that was on its way when the request was retracted."""

    @precondition(lambda self: self.waiting and len(self.running) < ROWS)
    @rule(which=st.integers(0, 7))
    def readmit(self, which: int) -> None:
        req = self.waiting[which % len(self.waiting)]
        before, kept = dict(self.retracted.counts), self.retracted.of(req)
        with self.retracted.admitting(req):
            match = Match(self.tree, req.tokens, extra_key=req.extra_key)
        if self.requests.waits_to_be_restored(req):
            assert self.running, "a request waits with nothing running"
            match.unlock(self.tree)
            return
        StandIn.__init__(req, req.tokens, None, match, len(match), rid=req.rid)
        if not self.admit_matched(req, match):
            return
        self.waiting.remove(req)
        self.extend(1 if len(match) == len(req.tokens) - 1 else 49)
        if kept is not None and not any(r.prefilling for r in self.running):
            assert self.retracted.of(req) is None, "what is kept of a running request takes host memory"
            found = "restored" if len(match) == kept.saved.hi else "recomputed"
            assert self.retracted.counts[found] == before[found] + 1

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 7), insert=st.booleans())
    def leave(self, which: int, insert: bool) -> None:
        """One that was admitted again may be aborted before its pass."""
        super().leave(which=which, insert=insert)
        self.retracted.sweep([*self.waiting, *self.running])

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 7))
    def abort(self, which: int) -> None:
        """Of a request that waits."""
        self.waiting.pop(which % len(self.waiting))
        self.retracted.sweep(self.waiting)

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        super().flush()
        assert not self.retracted.kept and not self.manager.saved.host.used

    @invariant()
    def what_is_kept_is_known(self) -> None:
        self.retracted.check_integrity()
        assert {id(x.req) for x in self.retracted.kept.values()} <= {id(req) for req in [*self.waiting, *self.running]}
        assert set(self.retracted.places) <= {req.kv.req_pool_idx for req in self.running}
        spaces = {x.key.extra_key for x in self.tree.root_node.children.values()} - {None}
        places = [*(x.place for x in self.retracted.kept.values() if x.place), *self.retracted.places.values()]
        alone = {place.key.extra_key for place in places if place.private}
        assert spaces - set(NAMES) <= alone, "a node that nobody can find is left"
        if not self.exact:
            assert not spaces - set(NAMES)


class ExactRetractedMachine(RetractedMachine):
    exact = True


class SlidingRetractedMachine(RetractedMachine):
    attention_spans = (12, 0)
    tiers = (Tier(8, 4), Tier(4, 2))


def test_the_shortest_match_that_sliding_layers_serve_has_all_that_the_next_query_sees() -> None:
    """Of a prompt of 48 tokens a layer of span 12 holds positions from 5 on. The query behind a match of 16 tokens sees
    positions 5 to 16, its own included. The query behind a match of 15 would see position 4."""
    for shared, found in ((15, 0), (16, 16)):
        machine = SlidingRetractedMachine()
        machine.read(seed=0, length=46, tail=1)
        machine.admit(seed=0, length=shared, tail=3)
        req = machine.running[-1]
        assert req.prefix_len == found
        machine.every_row_reads_its_own_tokens()
    seen = visible(machine.manager.state, req.kv.req_pool_idx)
    assert all(sorted(seen.at(0, head).position) == list(range(5, 16)) for head in range(HEADS))
    times = torch.ones(LAYERS, HEADS, found, dtype=torch.int64)
    times[0, :, :6] = 0
    with pytest.raises(AssertionError, match="the next query may see"):
        machine.check_stored(req, times)


class FullHostMachine(RetractedMachine):
    """Host memory for a request or two."""

    host_pages = 40


RetractedMachine.TestCase.settings = ExactRetractedMachine.TestCase.settings = machine_settings(50)
SlidingRetractedMachine.TestCase.settings = FullHostMachine.TestCase.settings = machine_settings(40)
TestRetracted = RetractedMachine.TestCase
TestExactRetracted = ExactRetractedMachine.TestCase
TestSlidingRetracted = SlidingRetractedMachine.TestCase
TestFullHost = FullHostMachine.TestCase
