"""What SGLang retracts goes to host memory and comes back when it is admitted again, instead of being computed again.

A retracted request is like one that has ended, whose tokens joined the prefix cache and were evicted, but to the host.
When SGLang is about to admit it (``Req.init_next_round_input``), what the tree has lost of it meanwhile is restored as
a segment of a node of its own. So SGLang's match finds all but its last token, which it computes. With exact fidelity
the tree must not offer compressed prompts to others: there the node lies in a namespace that only its request looks
into, and holds all of it. Where there is no room for the pages or for a state the request waits, as long as others run.

Of a model with states a request goes on only from the state behind all tokens of its match. It goes to the host with
the row, and comes back to the node where the row ends. Under overlap scheduling a pass is on its way that takes the
state a token further than SGLang knows, so all that this pass stores is kept. Its result is looked at for the retracted
request too (``results_come``), unless it ends it. What a draft model stores of each token goes and comes with the row.

With ``--page-size`` N the tree takes multiples of N tokens. What is behind the last of these is computed again.

What old weights computed is not brought back under new ones: a change of weights, and a pause that retracts all
requests, drop all that is kept.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams

from sglang_diffkv.config import UNTRIED_ENV, DiffKVConfig
from sglang_diffkv.layout.ranks import OtherRankError
from sglang_diffkv.mem_pool.growth import Expected
from sglang_diffkv.mem_pool.saved_rows import Needed, SavedRow, SavedRows
from sglang_diffkv.mem_pool.saved_slots import SavedSlots, SlotStore
from sglang_diffkv.srt.models.speculation import algorithm_of
from sglang_diffkv.srt.tree.old_weights import OldWeights
from sglang_diffkv.srt.tree.parts import Restoring
from sglang_diffkv.srt.tree.prefix_cache import DiffKVPrefixCache
from sglang_diffkv.srt.tree.private_space import PrivateSpace, in_space
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.versions import states as compat_states

logger = logging.getLogger(__name__)

Found = TypeVar("Found")


def why_recomputed(configurator: Any, config: DiffKVConfig) -> str:
    """Why a server computes retracted requests again; empty if it keeps what they hold. ``configurator``: SGLang's
    KVCacheConfigurator."""
    args = compat.resolved(configurator.server_args)
    if config.host_gib == 0:
        return '"host_gib" is 0'
    if args.disable_radix_cache:
        return "they come back through the prefix cache, which is off"
    if envs.SGLANG_RADIX_FORCE_MISS.get():
        return "SGLANG_RADIX_FORCE_MISS keeps requests from finding anything in the prefix cache"
    hybrid = configurator.mambaish_config
    if hybrid is not None and algorithm_of(args):
        return "states behind accepted drafts are not kept with them"
    if getattr(hybrid, "short_conv_layer_ids", None):
        return "the model has short convolutions and n-grams beside its states, which would have to come back too"
    untried = {
        "with several ranks": args.tp_size > 1,
        "with states": hybrid is not None,
        "with drafts": bool(algorithm_of(args)),
    }
    for what in (what for what, is_so in untried.items() if is_so):
        if compat.untried_on_a_gpu(getattr(args, "device", None), "", ""):
            return f"{what} they were not seen to come back on a GPU; {UNTRIED_ENV}=1 lets you try"
    if getattr(args, "strip_thinking_cache", False):
        return "--strip-thinking-cache keeps what they have generated out of the prefix cache"
    if getattr(args, "kv_canary", "none") != "none":
        return "--kv-canary would have to know their tokens again"
    if config.build_policy().running is not None:
        return "the policy compresses running requests in pages of their own"
    return ""


COUNTS = ("kept", "no_host_memory", "restored", "tokens_restored", "recomputed", "dropped")
"""Of ``/server_info`` and the metrics, since the start: requests whose pages went to the host, and those for which it
had no room. Of the former: those that came back, tokens that they brought, those that were computed again all the same,
and those that were aborted or flushed meanwhile."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where restored pages are in the tree: what it has of ``key`` (SGLang's RadixKey) from position ``start`` on.

    Attributes:
        private: no other request finds them.
    """

    key: Any
    start: int
    private: bool


@dataclass(eq=False)
class Kept:
    """A retracted request and what is kept of it.

    Attributes:
        known: tokens behind which it goes on, of which ``saved`` has the first ones, as many as the tree takes. slots:
            its state, or what a draft model stores of each token that ``saved`` has.
        awaited: whether the last of them is known once the results of a pass are out.
        space: the namespace of its node in the tree, None for that of its prompt. place: where its pages are, once
            restored.
        restored: tokens that the last restoration brought back. wanted: high-tier tokens for which it waits; None if it
            was not refused. needed: what its tokens from a position on take, as far as somebody asked.
    """

    req: Any
    saved: SavedRow
    space: PrivateSpace | None
    known: int
    slots: SavedSlots | None = None
    awaited: bool = False
    place: Place | None = None
    restored: int = 0
    wanted: float | None = None
    needed: dict[int, Needed] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Whether it was restored where no other request finds it."""
        return self.place is not None and self.place.private


class Retracted(Restoring):
    """Retracted requests whose pages are in host memory, over a prefix cache.

    Requests are keys here, and not their ids: clients choose ids, so two requests may have the same.

    Args:
        alone: whether a request is restored where no other finds it. slots: where states are kept, or what a draft
            model stores; None if there is neither. by_token: whether it is the latter.

    Attributes:
        expected: row and tokens that each running request is expected to generate yet.
        places: of running requests that were restored, by row.
        counts: by ``COUNTS``.
    """

    def __init__(
        self,
        tree: DiffKVPrefixCache,
        saved: SavedRows,
        *,
        alone: bool,
        slots: SlotStore | None = None,
        by_token: bool = False,
    ):
        self.tree, self.saved, self.alone, self.slots = tree, saved, alone, slots
        self.by_token, self.states = by_token, slots is not None and not by_token
        self.manager, self.ledger = tree.manager, tree.ledger
        self.expected: Callable[[], Iterable[Expected]] = lambda: ()
        self.kept: dict[Any, Kept] = {}
        self.places: dict[int, Place] = {}
        self.old_weights = OldWeights(self.manager, "retracted requests are computed again")
        self.counts = dict.fromkeys(COUNTS, 0)
        self._admitting: Kept | None = None
        self._left: list[Place] | None = None

    def of(self, req: Any) -> Kept | None:
        """What is kept of a request."""
        return self.kept.get(req)

    def expect(self, tokens: Callable[[], Iterable[Expected]]) -> None:
        self.expected = tokens

    # Retraction

    def retracting(self, req: Any) -> None:
        """As ``keep``."""
        self.keep(req)

    def keep(self, req: Any) -> None:
        """The request is about to be retracted. One in the middle of its prompt is computed again, and so is one whose
        tokens the prefix cache could not find, or that other weights may have computed."""
        row, known = compat.row_of(req), compat.tokens_of(req) - 1
        if row is None or known <= 0 or self.old_weights.left or not compat.findable(req):
            return
        rows = self.manager.rows
        if self.manager.drafts:  # of its last verifications the results are out
            self.manager.know_committed(row, compat.committed_len(req))
        if row not in rows or rows.in_prompt(row) or rows.length(row) < known or row in self.manager.counts.faulted:
            return
        self.forget(req)
        length = rows.length(row)
        awaited = self.states and length > known
        if awaited and (length != known + 1 or not compat_states.takes_result(req)):
            return
        known += awaited
        hi = known // self.tree.page_size * self.tree.page_size
        if not hi:
            return
        slots = None
        if self.slots is not None:
            slots = self.slots.take(hi if self.by_token else 1)
            if slots is None:
                what = "tokens of a draft model" if self.by_token else "states"
                return self._not_kept(f'is full ({self.slots.host.count} {what}, "host_gib" in --diffkv-config)')
        saved, copied = self.saved.save(row, hi), True
        if saved is not None and slots is not None:
            copied = self._launched(lambda: self._copy_out(slots, req, row, hi)) is not None
        if saved is not None and copied:
            self.kept[req] = Kept(req, saved, PrivateSpace() if self.alone else None, known, slots, awaited)
            self.counts["kept"] += 1
            return
        if slots is not None:
            assert self.slots is not None
            self.slots.drop(slots)
        if saved is None:
            self._not_kept(f'is full ({self.saved.host.count} pages, "host_gib" in --diffkv-config)')
        else:
            self.saved.drop(saved)
            self._not_kept("gets no copy: the GPU has no memory for it")

    def _not_kept(self, why: str) -> None:
        """A request is computed again. ``why``: what is wrong with host memory."""
        if not self.counts["no_host_memory"]:
            logger.warning("DiffKV: host memory for retracted requests %s; further ones are computed again.", why)
        self.counts["no_host_memory"] += 1

    def _copy_out(self, slots: SavedSlots, req: Any, row: int, hi: int) -> SavedSlots:
        """Copy the state of a request to the host, or what a draft model stores of its first ``hi`` tokens."""
        assert self.slots is not None
        if self.states:
            return self.slots.copy_now(slots, compat_states.state_slot(req).reshape(1).long())
        return self.slots.copy_now(slots, self.tree.req_to_token_pool.req_to_token[row, :hi].long())

    def _launched(self, launch: Callable[[], Found]) -> Found | None:
        """What ``launch`` gives, which copies slots; None if on any rank the device has no memory for that. With
        several ranks all have to call it."""
        try:
            return self.manager.ranks.together(launch)
        except (torch.OutOfMemoryError, OtherRankError):
            return None

    @contextmanager
    def results_come(self, reqs: Sequence[Any], tokens: Callable[[], Sequence[int]] | None) -> Iterator[None]:
        """Inside, SGLang looks at the results of a pass of ``reqs``. It counts a retracted one whose state is that
        behind the pass among those that run, so the token is known that comes next. One that ends with it is computed
        again. ``tokens``: tells what was sampled for each of them; None behind a pass over prompts.
        """
        awaited = [index for index, req in enumerate(reqs) if (kept := self.of(req)) is not None and kept.awaited]
        sampled = tokens() if awaited and tokens is not None else ()
        counted = []
        for index in awaited:
            req = reqs[index]
            self.kept[req].awaited = False
            if not sampled or compat.ends_with(req, sampled[index]):
                self.give_up(req)
            else:
                counted.append(req)
                req.is_retracted = False
        try:
            yield
        finally:
            for req in counted:
                req.is_retracted = True

    # Admission

    @contextmanager
    def admitting(self, req: Any) -> Iterator[None]:
        """Inside, SGLang matches the request that it admits next, if there is room."""
        self._admitting = self.of(req)
        try:
            with nullcontext() if self._admitting is None else compat.looked_for(req):
                yield
        finally:
            self._admitting = None

    def match(self, params: Any) -> Any:
        kept, self._admitting = self._admitting, None
        if kept is None or len(params.key) != kept.known:
            return None
        kept.wanted = None
        apart = kept.space
        found = self._restored(kept, params) if apart is None else self._restored_apart(kept, params, apart)
        if self.ledger.idle:
            kept.wanted = None
        return found or self.tree.match(params)

    def _restored(self, kept: Kept, params: Any) -> Any:
        """The match with all that was lost restored; None if there is no room for it."""
        node = self.tree.find(params).last_device_node
        at = self.tree.depth(node)
        stated = not self.states or node in self.tree.states.of_nodes
        if (at < kept.saved.hi or not stated) and not self._restore(kept, params.key, node, at):
            return None
        return self.tree.match(params)

    def _restored_apart(self, kept: Kept, params: Any, space: PrivateSpace) -> Any:
        """The same where others must not find it, unless the tree's prompt, of which it takes a copy again, leaves
        little to compute."""
        apart = dataclasses.replace(params, key=in_space(params.key, space))
        if self.tree.depth(self.tree.find(apart).last_device_node) < kept.saved.hi:
            self._evict(kept.place)  # what eviction left of it
            kept.place, usual = None, self.tree.match(params)
            lost = kept.known + 1 - self.tree.depth(usual.last_device_node)
            if self._needed(kept, 0).pages > self.ledger.prompt_pages(lost):
                return usual
            if not self._restore(kept, apart.key, self.tree.root_node, 0):
                return None
        return self.tree.match(apart)

    def _restore(self, kept: Kept, key: Any, node: Any, at: int) -> bool:
        """Restore what follows the path to ``node``, which ends at ``at``; False, changing nothing in the tree but by
        eviction, if there is no room: also while others that run have all slots for states. Should the tree have
        another part of ``key`` by then, or no slot though nothing runs, the request is computed again."""
        tree, needed = self.tree, self._needed(kept, at)
        tree.inc_lock_ref(node)
        try:
            room = self._expected_to_fit(kept, needed.pages) and self._make_room(kept.saved.hi - at, needed)
            if room and tree.depth(tree.find(MatchPrefixParams(key=key)).last_device_node) != at:
                self.give_up(kept.req)
                return False
            slot = tree.states.take_slot() if self.states and room else None
            if self.states and slot is None:
                if room and self.ledger.idle:
                    self.give_up(kept.req)
                    return False
                room = False
            ready = room and (slot is None or self._launched(lambda: self._copy_back(kept, slot)) is not None)
            end = self._insert(kept, key, node, at, needed) if ready else None
            if end is None:
                if slot is not None:
                    tree.states.give_slot(slot)
                kept.wanted = self._wanted(kept, needed.pages)
                return False
            if slot is not None:
                tree.states.came_back(end, slot)
                kept.restored = kept.restored or kept.saved.hi
            return True
        finally:
            tree.dec_lock_ref(node)

    def _insert(self, kept: Kept, key: Any, node: Any, at: int, needed: Needed) -> Any:
        """The last node of what is kept, from ``at`` on restored behind ``node``, which ends there and is locked. None,
        changing nothing, if there is no room."""
        tree, tokens, upto = self.tree, kept.saved.hi - at, key[: kept.saved.hi]
        if not tokens:
            return node
        kv_slots = tree.token_to_kv_pool_allocator.alloc(tokens)
        if kv_slots is None:
            return None
        value = self._launched(lambda: self._at(kept, kv_slots, at))
        segment = None if value is None else self.saved.restore(kept.saved, at, needed)
        if segment is None:
            tree.token_to_kv_pool_allocator.free(kv_slots)
            return None
        with tree.restoring(segment):
            tree.insert(InsertParams(key=upto, value=value, priority=getattr(kept.req, "priority", None) or 0))
        kept.restored = tokens
        start = at if kept.place is None else min(at, kept.place.start)
        kept.place = Place(upto, start, private=kept.space is not None)
        return tree.find(MatchPrefixParams(key=upto)).last_device_node

    def _at(self, kept: Kept, kv_slots: torch.Tensor, at: int) -> torch.Tensor:
        """KV slots (int64 [saved.hi]) for the tree, which has those before position ``at``. What a draft model stores
        goes to the others."""
        slots = kv_slots.long()
        if self.by_token:
            self._copy_back(kept, slots, at)
        return torch.cat([torch.zeros(at, dtype=torch.int64, device=slots.device), slots])

    def _copy_back(self, kept: Kept, slots: torch.Tensor, start: int = 0) -> torch.Tensor:
        assert self.slots is not None and kept.slots is not None
        self.slots.restore(kept.slots, slots, start)
        return slots

    def _wanted(self, kept: Kept, pages: int) -> float:
        """High-tier tokens that a request takes with so many pages of it restored: also its last token, and what it is
        expected to generate."""
        geometry = self.manager.geometry
        restored = pages * geometry.fmt.high.tokens / geometry.heads
        return restored + compat.tokens_to_grow(kept.req, compat.growth_of(kept.req, self.ledger)) + 2

    def _expected_to_fit(self, kept: Kept, pages: int) -> bool:
        """Whether the request would be admitted once so many pages of it are restored."""
        if self.ledger.idle:
            return True
        growth = self.ledger.growth_of_all(self.expected())
        return self.ledger.available() + self.ledger.evictable() - growth >= self._wanted(kept, pages)

    def _needed(self, kept: Kept, at: int) -> Needed:
        """What the tokens from a position on take, on the rank where they take most. A request that waits asks again
        and again, so it is remembered: on all ranks alike, which ask alike."""
        if at not in kept.needed:
            (kept.needed[at],) = self.saved.needed([(kept.saved, at, None)])
        return kept.needed[at]

    def _make_room(self, tokens: int, needed: Needed) -> bool:
        return self.tree.make_room_to_restore(tokens, needed.pages, needed.blocks)

    def waits_for_room(self, req: Any) -> float | None:
        kept = self.of(req)
        return None if kept is None else kept.wanted

    def does_not_fit_alone(self, req: Any) -> None:
        """As ``give_up``."""
        self.give_up(req)

    def give_up(self, req: Any) -> None:
        """What is kept of the request is of no use: it is computed again. So it is where it does not fit with what was
        restored of it though nothing runs: it would be restored and refused for ever."""
        if (kept := self.of(req)) is not None:
            self.counts["recomputed"] += 1
            self._drop(kept)

    def reads_alone(self, req: Any) -> bool:
        """Whether the request has matched a restored prefix that no other finds."""
        kept = self.of(req)
        return kept is not None and kept.alone and compat.prefix_len(req) == kept.saved.hi

    def chunk_planned(self, req: Any, row: int, end: int, *, ends: bool, alone: bool) -> None:
        """The host's copy is not needed any more."""
        kept = self.of(req)
        if kept is None:
            return
        found = compat.prefix_len(req) >= kept.saved.hi
        self.counts["restored" if found else "recomputed"] += 1
        self.counts["tokens_restored"] += kept.restored if found else 0
        if kept.place is not None:
            self.places[row], kept.place = kept.place, None
        self._drop(kept)

    # The end

    def left(self, req: Any, row: int) -> None:
        """It has given up its lock on the tree, too: nobody else can find what was restored for it alone.
        What was restored of other weights' computing goes too, as far as nobody reads it."""
        place = self.places.pop(row, None)
        if place is None:
            return
        if self._left is not None:
            self._left.append(place)
        elif place.private or self.old_weights.left:
            self._evict(place)

    @contextmanager
    def retracting_all(self) -> Iterator[None]:
        """Inside, SGLang retracts all requests for a pause, with the promise that they are computed again when it ends,
        by other weights perhaps. Nothing that is kept outlives it, on the host or restored to the tree."""
        self._left = []
        try:
            yield
        finally:
            self.drop_all()
            left, self._left = self._left, None
            for place in left:
                self._evict(place)

    def weights_change(self) -> None:
        """The weights are about to change. All that is kept is dropped. Unless nothing is left that these weights
        computed, nothing is kept from now on until the tree is reset: requests that go on, and prefixes that stay in
        the tree, are of both."""
        self.drop_all()
        self.old_weights.change()

    def drop_all(self) -> None:
        """Drop what is kept of all requests, also what was restored of those that do not run yet."""
        for kept in list(self.kept.values()):
            place = kept.place
            self.forget(kept.req)
            self._evict(place)

    def forget(self, req: Any) -> None:
        """Drop what is kept of a request."""
        if (kept := self.of(req)) is not None:
            self.counts["dropped"] += 1
            self._drop(kept)

    def queue_seen(self, waiting: Iterable[Any]) -> None:
        """As ``sweep``."""
        self.sweep(waiting)

    def sweep(self, waiting: Iterable[Any]) -> None:
        """Drop what is kept of requests that do not wait any more: they were aborted."""
        if self.kept:
            present = {id(req) for req in waiting}
            for kept in list(self.kept.values()):
                if id(kept.req) not in present:
                    self.forget(kept.req)

    def reset(self) -> None:
        """Weights may have changed, and nothing computed so far counts."""
        for kept in list(self.kept.values()):
            kept.place = None
            self.forget(kept.req)
        self.places.clear()
        self.old_weights.reset()

    def _drop(self, kept: Kept) -> None:
        del self.kept[kept.req]
        self.saved.drop(kept.saved)
        if kept.slots is not None:
            assert self.slots is not None
            self.slots.drop(kept.slots)
        if kept.alone:
            self._evict(kept.place)

    def _evict(self, place: Place | None) -> None:
        if place is not None:
            self.tree.evict_path(place.key, place.start)

    def report(self) -> dict[str, int]:
        """For ``/server_info``."""
        host, size, slots = self.saved.host, self.manager.fmt.page_bytes, self.slots
        held = {
            "host_bytes": self.saved.pages_held * size + (slots.bytes_held if slots else 0),
            "host_bytes_most": host.count * size + (slots.bytes_most if slots else 0),
        }
        return {**self.counts, "waiting": len(self.kept), **held}

    def reports(self) -> dict[str, dict[str, int]]:
        return {"retracted": self.report()}

    def digest(self) -> Any:
        held = [(kept.saved.hi, kept.saved.host_pages, kept.restored, kept.alone) for kept in self.kept.values()]
        return held, self.saved.host.free, self.slots and self.slots.host.free, *self.counts.values()

    def check_integrity(self) -> None:
        """Raise AssertionError unless each saved row is that of one request."""
        saved = [kept.saved for kept in self.kept.values()]
        assert len(saved) == len(self.saved.held), "a saved row has no request"
        assert set(saved) == self.saved.held, "a request's saved row is gone"
        if self.slots is not None:
            slots = {kept.slots for kept in self.kept.values()}
            assert slots == self.slots.held, "a saved row lacks its state, or what a draft model stores of it"
        for kept in self.kept.values():
            wanted = 0 if self.slots is None else kept.saved.hi if self.by_token else 1
            held = 0 if kept.slots is None else kept.slots.count
            assert held == wanted, "a saved row has other slots than it takes"
            assert kept.known - self.tree.page_size < kept.saved.hi <= kept.known, "a saved row ends at a wrong place"
