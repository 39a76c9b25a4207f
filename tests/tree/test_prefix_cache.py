"""Random lives of requests through SGLang's radix tree over page segments, against a plain Python model.

Every token's key is a constant vector that names the token and all before it, which every tier stores
exactly, so a page that reached the wrong request shows in its contents and not only in its counts.
"""

from __future__ import annotations

import itertools
import random
from array import array
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang_diffkv.kernels.append.reference import append, read_tokens
from sglang_diffkv.kernels.decode_attention.reference import decode_attention
from sglang_diffkv.kernels.query_cache.reference import store_queries
from sglang_diffkv.kernels.table import max_entries, row_table
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.page_format import PageFormat, Tier, position_bytes_for
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.mem_pool.integrity import check_bounds, check_integrity, check_settled
from sglang_diffkv.mem_pool.ledger import PageLedger, pages_for
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.usage import UsageMeter
from sglang_diffkv.policies.base import Policy, prunes
from sglang_diffkv.policies.uniform import UniformPolicy
from sglang_diffkv.srt.scheduling.allocator import DiffKVAllocator
from sglang_diffkv.srt.startup.wiring import build_lifecycle, build_prefix_cache
from tests.helpers import begin_step, end_decode, faults, new_scores
from tests.pages.usage_oracle import check_reading
from tests.policies import diffkv_policy
from tests.tree.listener import Listener
from tests.tree.stand_in import Match, StandIn, give_row, leave, offer, take_row

CAPACITY, ROWS, LAYERS, HEADS, DIM, WINDOW, SHARE_MIN = 400, 8, 2, 2, 64, 8, 24


def name_of(tokens: array) -> float:
    """A number below 1000 for a token and all before it."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 997
    return float(value)


class TreeMachine(RuleBasedStateMachine):
    """Admit, extend in chunks, decode, finish, abort or retract, evict, flush."""

    exact = False
    tiers: tuple[Tier, ...] = (Tier(8, 4), Tier(4, 2))
    policy: Policy = diffkv_policy(1.0, 0.0, WINDOW)
    attention_spans: tuple[int, ...] = ()
    host_pages = 0
    write_policy = ""
    keeps_retracted = True
    page_tokens = 8
    page_size = 1
    sessions = keeps = False

    def __init__(self, ranks: Ranks | None = None) -> None:
        super().__init__()
        scored, of_page = self.policy.scored_tiers(len(self.tiers)), self.page_tokens
        fmt = PageFormat(DIM, DIM, self.tiers, of_page, scored, position_bytes_for(300))
        pages = pages_for(CAPACITY, of_page, LAYERS * HEADS)
        geometry = Geometry(fmt, LAYERS, HEADS, pages, ROWS + 1, 40, 300, self.attention_spans)
        self.manager = PageManager(
            geometry, self.policy, ranks=ranks, q_heads=2 * HEADS, host_pages=self.host_pages,
            write_policy=self.write_policy, keeps_retracted=self.keeps_retracted,
        )  # fmt: skip
        self.pool = self.make_pool()
        self.requests = build_lifecycle(PageLedger(self.manager, CAPACITY))
        self.allocator = DiffKVAllocator(
            self.requests, dtype=torch.bfloat16, device="cpu", kvcache=None, need_sort=False
        )
        params = CacheInitParams(False, self.pool, self.allocator, self.page_size, enable_kv_cache_events=True)
        params.enable_session_radix_cache = self.sessions
        self.tree = build_prefix_cache(params, SHARE_MIN, exact=self.exact, keeps=self.keeps)
        self.listener = Listener(self.tree)
        self.running: list[Any] = []
        self.random = random.Random(0)
        self.scores = torch.Generator().manual_seed(self.manager.ranks.rank)
        self.ids = itertools.count()
        self.meter = UsageMeter(self.manager)

    def make_pool(self) -> ReqToTokenPool:
        """SGLang's table of requests."""
        return ReqToTokenPool(ROWS, 300, "cpu", False)

    def _write(self, req: Any, start: int, end: int) -> None:
        rows = torch.full((end - start,), req.kv.req_pool_idx)
        at = torch.arange(start, end)
        names = torch.tensor([name_of(req.tokens[: i + 1]) for i in range(start, end)])
        key = names.view(-1, 1, 1).expand(-1, HEADS, DIM)
        for layer in range(LAYERS):
            append(self.manager.state, layer, key, key, rows, at - start, at)

    def _score(self, row: int) -> None:
        """Random significance for the tokens that the row may still move."""
        state, rows = self.manager.state, torch.tensor([row])
        width = max_entries(state, rows, 0)
        page = row_table(state, rows, 0, width)[0][0]
        entry = torch.arange(width).expand(page.shape)
        own = (entry >= state.own_entry[row, :, :, 0].unsqueeze(2)) & (entry < state.entries[row, :, :, 0].unsqueeze(2))
        scores = state.tiers[0].scores
        if scores is None:
            return
        scores[page[own]] = torch.rand(int(own.sum()), scores.shape[1], generator=self.scores) * 0.05

    @rule(seed=st.integers(0, 5), length=st.integers(1, 70), tail=st.integers(0, 3))
    def admit(self, seed: int, length: int, tail: int) -> None:
        """A new request; equal seeds share a prefix."""
        source = random.Random(seed)
        self.admit_tokens(array("q", [source.randrange(3) for _ in range(length)] + [tail] * tail + [9]))

    def admit_tokens(self, tokens: array) -> None:
        """A new request of this prompt, if there is room."""
        rid, extra_key = self.named()
        if len(self.running) == ROWS:
            return
        match = Match(self.tree, tokens, extra_key=extra_key)
        self.admit_matched(StandIn(tokens, None, match, len(match), rid=rid), match)

    def named(self) -> tuple[str, str | None]:
        """``rid`` and ``extra_key`` of a new request."""
        return str(next(self.ids)), None

    def admit_matched(self, req: Any, match: Match) -> bool:
        """Whether there is room for a request that has matched and locked a prefix. If not it gives it up."""
        ledger = self.allocator.ledger
        admission = self.requests.check(req, len(req.tokens), self.running)
        if not admission.fits:
            match.unlock(self.tree)
            return False
        self.requests.admit(req, admission)
        assert ledger.uncommitted_pages() >= 0, "pages promised to an admitted prompt cannot be freed"
        row = self.take_row(req)
        if len(match):
            self.requests.begin_prompt(req)
        self.pool.write((row, slice(0, len(match))), match.kv_slots)
        self.running.append(req)
        return True

    def take_row(self, req: Any) -> int:
        """A row for a new request."""
        req.kv.req_pool_idx = take_row(self.pool)
        return int(req.kv.req_pool_idx)

    @rule(seed=st.integers(0, 2), length=st.integers(20, 70), tail=st.integers(0, 3))
    def read(self, seed: int, length: int, tail: int) -> None:
        """A new request whose whole prompt runs."""
        self.admit(seed, length, tail)
        while any(r.prefilling for r in self.running):
            self.extend(49)

    @precondition(lambda self: any(r.prefilling for r in self.running))
    @rule(chunk=st.integers(1, 50))
    def extend(self, chunk: int) -> None:
        req = next(r for r in self.running if r.prefilling)
        start, row = req.extend_range.end, req.kv.req_pool_idx
        end = min(start + self.longest_chunk(req, chunk), len(req.tokens))
        self.pool.write((row, slice(start, end)), self.allocator.alloc(end - start).int())
        last = end == len(req.tokens)
        req.extend_range.end = end
        if chunk % 5 == 0:
            req.sampling_params.max_new_tokens = 1  # nothing is gained by compressing its prompt
        self.requests.plan_prefill([req])
        req.sampling_params.max_new_tokens = 250
        step = self.manager.launch_step(by_layer=chunk % 3 > 0)
        self.manager.ops.reserve(torch.tensor([row]), torch.tensor([end - start]), end - start)
        self._write(req, start, end)
        self.launched(req, start, end)
        self._score(row)
        if row in self.manager.prompts.shared_scores:
            self.manager.prompts.shared_scores[row].uniform_(0, 0.05, generator=self.scores)
        self.manager.end_prompts(step)
        if last:
            assert not faults(self.manager, [row]), "a prompt or its copy found the ring empty"
            req.prefilling = False
        offer(self.tree, req, chunked=not last)

    @precondition(lambda self: any(not r.prefilling for r in self.running))
    @rule(steps=st.integers(1, 12))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.manager.counts.meet()
            batch = self.decoding()
            ledger = self.allocator.ledger
            while batch and ledger.available() < len(batch):
                self.tree.evict(EvictParams(num_tokens=len(batch) - ledger.available()))
                if ledger.available() < len(batch):
                    self._leave(batch.pop(), insert=False)
            if not batch:
                return
            rows = [r.kv.req_pool_idx for r in batch]
            starts = [len(r.tokens) for r in batch]
            kv_slots = self.allocator.alloc(len(batch)).int()
            for req, kv_slot in zip(batch, kv_slots, strict=True):
                self.pool.write((req.kv.req_pool_idx, len(req.tokens)), kv_slot)
                req.output_ids.append(self.random.randrange(3))
                req.tokens.append(req.output_ids[-1])
            begin_step(self.manager, rows, [1] * len(rows), starts)
            for req, start in zip(batch, starts, strict=True):
                self._write(req, start, start + 1)
                self.launched(req, start, start + 1)
            index, lens = torch.tensor(rows), torch.tensor(starts) + 1
            scores = new_scores(self.manager, len(rows))
            for layer in range(LAYERS):
                q = torch.randn(len(rows), 2 * HEADS, DIM, generator=self.scores) * 0.01
                if self.manager.running is not None:
                    store_queries(self.manager.running.cache, layer, q, index, lens)
                if not self.manager.state.attention_span(layer):
                    decode_attention(self.manager.state, layer, q, index, lens, 1.0, scores=scores, window=WINDOW)
            end_decode(self.manager, index, lens, scores)
            self.manager.ops.slide(index, lens)
            self.requests.after_step(batch)
            assert not faults(self.manager, rows), "the ledger let the ring run empty"
            self.check_step(batch)

    def decoding(self) -> list[Any]:
        """Requests of the next decode step."""
        return [r for r in self.running if not r.prefilling and len(r.tokens) < 250]

    def longest_chunk(self, req: Any, chunk: int) -> int:
        """Tokens that a request's chunk has at most, where ``chunk`` would fit."""
        return chunk

    def launched(self, req: Any, start: int, end: int) -> None:
        """A pass has computed tokens [start, end) of a request."""

    def check_step(self, batch: list[Any]) -> None:
        """Behind a decode step of ``batch``."""

    def _leave(self, req: Any, *, insert: bool) -> None:
        row, end = req.kv.req_pool_idx, self.manager.rows.length(req.kv.req_pool_idx)
        leave(self.tree, req, end, insert=insert)
        self.requests.leave(req, row, counted=False)
        give_row(self.pool, row)
        self.running.remove(req)
        self.requests.after_step([r for r in self.running if not r.prefilling])
        assert not any(faults(self.manager, [r.kv.req_pool_idx]) for r in self.running), "a late copy lost tokens"

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 7), insert=st.booleans())
    def leave(self, which: int, insert: bool) -> None:
        """Finish (its tokens join the tree), or abort / retract (they do not)."""
        req = self.running[which % len(self.running)]
        self._leave(req, insert=insert and not req.prefilling)

    @rule(tokens=st.integers(1, 120))
    def evict(self, tokens: int) -> None:
        ledger = self.allocator.ledger
        settled = tokens % 2 == 0
        if settled:
            self.manager.counts.settle()
        available, obtainable = ledger.available(), ledger.uncommitted_pages() + ledger.evictable_pages
        counted = self.manager.counts.counted_step
        gained = self.tree.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted
        # In a shortage, or for a segment not counted yet, the host asks the device, whose counts cover one step more
        # than what is left of older ones.
        if settled or (gained >= tokens and self.manager.counts.counted_step == counted):
            assert ledger.uncommitted_pages() + ledger.evictable_pages >= obtainable, "an evicted page is not free"
        assert ledger.available() == available + gained
        assert gained >= tokens or not self.tree.evictable_leaves

    def empty(self) -> None:
        """What SGLang does for a flush."""
        self.tree.reset()
        self.pool.clear()
        self.allocator.clear()

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        self.empty()
        check_settled(self.manager)
        assert self.manager.device.free_pages() == self.manager.geometry.num_pages
        assert self.allocator.available_size() == CAPACITY

    @rule()
    def settle(self) -> None:
        """The host waits for the device."""
        check_settled(self.manager)

    @rule()
    def measure(self) -> None:
        """What segments hold is kept up from one reading to the next."""
        check_reading(self.manager, self.meter.read())

    @invariant()
    def structures_are_consistent(self) -> None:
        check_bounds(self.manager)
        check_integrity(self.manager)
        self.tree.check_integrity()
        ledger = self.allocator.ledger
        segments = self.manager.held_segments
        assert self.manager.segments.counts_of.tokens == sum(segment.hi - segment.lo for segment in segments)
        sizes = (ledger.available(), ledger.evictable(), ledger.protected(), ledger.uncached())
        assert sum(sizes) == CAPACITY
        assert min(sizes) >= 0
        if not self.running:
            assert ledger.uncached() == 0, "pages leaked"

    @invariant()
    def a_listener_knows_what_is_found(self) -> None:
        self.listener.check()

    @invariant()
    def every_row_reads_its_own_tokens(self) -> None:
        state = self.manager.state
        with self.manager.launching():  # behind bytes that are on their way
            pass
        for req in self.running:
            length = self.manager.rows.length(req.kv.req_pool_idx)
            expected = torch.tensor([name_of(req.tokens[: i + 1]) for i in range(length)])
            seen = torch.zeros(LAYERS, HEADS, max(length, 1), dtype=torch.int64)
            rows = torch.tensor([req.kv.req_pool_idx])
            for tier, view in enumerate(state.tiers):
                page, lo, hi = (x[0] for x in row_table(state, rows, tier, max_entries(state, rows, tier)))
                position = view.positions[page]
                valid = (position >= lo.unsqueeze(3)) & (position < hi.unsqueeze(3))
                layer, head, entry, slot = valid.nonzero(as_tuple=True)
                at = position[layer, head, entry, slot].long()
                keys, _ = read_tokens(view, page[layer, head, entry], slot)
                assert torch.equal(keys[:, 0], expected[at]), "a row reads another sequence's token"
                seen.index_put_((layer, head, at), torch.ones_like(at), accumulate=True)
            self.check_stored(req, seen[..., :length])

    def check_stored(self, req: Any, times: torch.Tensor) -> None:
        """``times`` that each token of a running request is stored, [layers, heads, length].

        A sliding layer's span counts the query itself, so the next query needs one stored token less."""
        assert (times <= 1).all(), "a token is stored twice"
        for layer, attention_span in enumerate(self.attention_spans or [0] * LAYERS):
            needed = max(times.shape[2] - attention_span + 1, 0) if attention_span else 0
            assert (times[layer, :, needed:] == 1).all(), "a token that the next query may see is missing"

    @invariant()
    def segments_hold_every_token(self) -> None:
        """Each in every head, where none is dropped."""
        segments = self.manager.held_segments
        if not segments or prunes(self.policy, len(self.tiers)) or self.policy.running or any(self.attention_spans):
            return
        columns = zip(*[(s.row, s.lo, s.hi) for s in segments], strict=True)
        held = self.manager.ops.measure(*map(torch.tensor, columns))[..., : len(self.tiers)].sum(-1)
        wanted = torch.tensor([s.hi - s.lo for s in segments]).view(-1, 1, 1)
        assert (held == wanted).all(), "a segment stands for tokens that it does not hold"

    @invariant()
    def exact_segments_hold_every_token_high(self) -> None:
        segments = [s for s in self.manager.held_segments if s.as_computed]
        if segments:
            columns = zip(*[(s.row, s.lo, s.hi) for s in segments], strict=True)
            held = self.manager.ops.measure(*map(torch.tensor, columns))
            for segment, counts in zip(segments, held, strict=True):
                assert (counts[..., 0] == segment.hi - segment.lo).all()
                assert not counts[..., 1 : len(self.tiers)].any()


class PagedTreeMachine(TreeMachine):
    """The same of a prefix cache that takes multiples of a few tokens only."""

    page_size = 5
    keeps_retracted = False

    @invariant()
    def nodes_end_with_a_page(self) -> None:
        stack = list(self.tree.root_node.children.values())
        while stack:
            node = stack.pop()
            assert len(node.key) % self.page_size == 0
            stack.extend(node.children.values())
        for req in self.running:
            shared = self.manager.rows.shared(req.kv.req_pool_idx)
            assert shared % self.page_size == 0 and req.kv.cache_protected_len % self.page_size == 0


class PagedLosslessTreeMachine(PagedTreeMachine):
    """One tier and a policy that moves nothing: only what is over a multiple makes a prompt's tail."""

    tiers = (Tier(8, 4),)
    policy = UniformPolicy()


class ExactTreeMachine(TreeMachine):
    """The same with exact fidelity: prompts join the tree as computed, requests run on copies."""

    exact = True


def machine_settings(steps: int) -> settings:
    """Of a state machine: fewer and longer examples, which are not shrunk. Quick ones have two thirds of the steps."""
    examples = settings.default.max_examples // 4
    return settings(
        max_examples=examples,
        stateful_step_count=steps if examples >= 25 else steps * 2 // 3,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )


TreeMachine.TestCase.settings = ExactTreeMachine.TestCase.settings = machine_settings(60)
PagedTreeMachine.TestCase.settings = PagedLosslessTreeMachine.TestCase.settings = machine_settings(30)
TestTree = TreeMachine.TestCase
TestExactTree = ExactTreeMachine.TestCase
TestPagedTree = PagedTreeMachine.TestCase
TestPagedLosslessTree = pytest.mark.full(PagedLosslessTreeMachine.TestCase)
