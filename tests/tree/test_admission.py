"""Admission by the growth estimate."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from sglang.srt.managers import scheduler
from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_diffkv.config import CHECK_ENV
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.spans import retained_tokens
from sglang_diffkv.mem_pool.growth import ESTIMATE_TOKENS, GROWTH_MARGIN, Expected
from sglang_diffkv.mem_pool.ledger import PROMPT_MARGIN, PageLedger, Promise
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.policies.uniform import UniformPolicy
from sglang_diffkv.srt.hooks import table as hooks
from sglang_diffkv.srt.scheduling import admission
from sglang_diffkv.srt.scheduling.allocator import DiffKVAllocator
from sglang_diffkv.srt.scheduling.joint_admission import AdmissionRule
from sglang_diffkv.srt.scheduling.lifecycle import RequestLifecycle
from sglang_diffkv.srt.versions import compat
from tests.dense import Session
from tests.helpers import make_format, make_manager
from tests.policies import diffkv_policy
from tests.tree.stand_in import Fields
from tests.tree.tree_world import World


def session_of(policy: object, tiers: tuple[str, ...] = ("K8V4", "K4V2")) -> tuple[Session, PageLedger]:
    manager = make_manager(make_format(tiers), policy=policy, pages=1200)
    return Session(manager), PageLedger(manager, 2000)


def test_the_estimate_is_what_running_requests_hold() -> None:
    session, ledger = session_of(diffkv_policy(50.0, 0.0, window=8))
    manager = session.manager
    assert ledger.growth_estimate() == 1.0
    session.extend({1: 300, 2: 300})
    assert ledger.growth_estimate() == 1.0, "a prompt that is not compacted yet says nothing"
    for row in (1, 2):
        session.end_prompt(row)
    session.step([1, 2])
    manager.counts.settle()
    held = sum(manager.device.pages_of(row) for row in (1, 2)) * manager.fmt.high.tokens / manager.geometry.heads
    held -= 2 * manager.fmt.high.tokens  # on average two pages of a request are half full
    assert ledger.growth_estimate() == pytest.approx(GROWTH_MARGIN * (held - 2 * 8) / (602 - 2 * 8)), "but windows"
    assert ledger.growth_estimate() < 0.75
    before = ledger.growth_estimate()
    session.release(1)
    assert ESTIMATE_TOKENS > 302 and ledger.growth_estimate() == before, "too few tokens: the last value stands"


def test_a_request_s_own_growth_measures_that_of_others_too() -> None:
    """The last value stands where requests are few, and is the same whoever asked before."""
    session, ledger = session_of(diffkv_policy(50.0, 0.0, window=8))
    session.extend({1: 600})
    session.end_prompt(1)
    session.step([1])
    session.manager.counts.settle()
    assert ledger.growth_of(1, 40) < 40
    assert ledger.last_estimate < 0.75
    session.release(1)
    assert ledger.growth_of(None, 40) == pytest.approx(40 * ledger.last_estimate)


def test_what_all_take_is_what_each_takes() -> None:
    """Rows that tell by themselves, short ones, one in its prompt, one that is not counted yet, and no row."""
    session, ledger = session_of(diffkv_policy(50.0, 0.0, window=8))
    session.extend({1: 300, 2: 280, 3: 40, 4: 400, 5: 350})
    for row in (1, 2, 3):
        session.end_prompt(row)
    session.step([1, 2, 3])
    session.manager.counts.settle()
    session.end_prompt(5)
    parts = [(1, 60.0), (2, 0.0), (3, 7.0), (None, 11.5), (4, 20.0), (5, 9.0)]
    expected = [Expected(*part) for part in parts]
    found = ledger.growth_of_all(expected)
    assert found == pytest.approx(sum(ledger.growth_of(*x) for x in expected))
    assert 0 < found < sum(x.tokens for x in expected) and ledger.growth_of_all([]) == 0


@pytest.mark.parametrize("prompt", [40, 400])
def test_growth_is_what_tokens_behind_the_window_take(prompt: int) -> None:
    """A request keeps its window whatever its length, so it grows by what leaves it, and until the window is full by
    whole tokens. By the mean over all its tokens it would be an eighth more."""
    session, ledger = session_of(diffkv_policy(1e9, 0.0, window=96))
    manager, more = session.manager, 160
    session.extend({1: prompt, 2: 700}, check=False)
    for row in (1, 2):
        session.end_prompt(row)
    session.step([1, 2], check=False)
    manager.counts.settle()
    taken = lambda: manager.device.pages_of(1) * manager.fmt.high.tokens / manager.geometry.heads  # noqa: E731
    before, expected = taken(), ledger.growth_of(1, more)
    assert (
        expected
        == pytest.approx(ledger.growth_of_all([Expected(1, more)]))
        == pytest.approx(ledger.growth(prompt + 1, more), rel=0.1)
    )
    for _ in range(more):
        session.step([1, 2], check=False)
    page = manager.fmt.high.tokens
    assert taken() - before - page <= expected <= GROWTH_MARGIN * (taken() - before) + page
    by_mean = GROWTH_MARGIN * more * before / (prompt + 1)
    assert prompt == 40 or by_mean > 1.1 * expected


def test_no_token_takes_less_than_one_of_the_smallest_tier() -> None:
    """A window that lies in a prefix which is compressed already takes less than its size says."""
    session, ledger = session_of(diffkv_policy(1e9, 0.0, window=96))
    manager = session.manager
    session.extend({1: 700}, check=False)
    session.end_prompt(1)
    session.step([1], check=False)
    manager.counts.settle()
    high, low = manager.fmt.layouts
    manager.counts.pages[1] = manager.geometry.heads * (700 // low.tokens)
    assert ledger.growth_estimate() == pytest.approx(GROWTH_MARGIN * high.tokens / low.tokens)
    assert (
        ledger.growth_of(1, 40)
        == pytest.approx(40 * ledger.growth_estimate())
        == ledger.growth_of_all([Expected(1, 40)])
    )


def test_where_tokens_are_dropped_all_of_them_tell() -> None:
    session, ledger = session_of(diffkv_policy(50.0, 40.0, window=8))
    session.extend({1: 600}, check=False)
    session.end_prompt(1)
    session.step([1], check=False)
    session.manager.counts.settle()
    page = session.manager.fmt.high.tokens
    held = session.manager.device.pages_of(1) * page / session.manager.geometry.heads
    assert ledger.growth_estimate() == pytest.approx(min(GROWTH_MARGIN * (held - page) / 601, 1.0))


def test_the_estimate_of_a_single_tier_is_one() -> None:
    session, ledger = session_of(UniformPolicy(), ("K8V4",))
    session.extend({1: 300, 2: 299}, scores=False)
    for row in (1, 2):
        session.end_prompt(row)
    session.manager.counts.settle()
    assert ledger.growth_estimate() == 1.0


def request(limit: int, made: int) -> SimpleNamespace:
    sampling = SimpleNamespace(max_new_tokens=limit, ignore_eos=False)
    return SimpleNamespace(sampling_params=sampling, output_ids=[0] * made, full_untruncated_fill_ids=[0] * 40)


def half(length: int, more: int) -> float:
    assert length == 40, "the prompt and what is generated"
    return more / 2


def test_a_request_is_expected_to_grow_less_for_admission_only() -> None:
    req = request(100, 30)
    with compat.estimated(req, half):
        assert req.sampling_params.max_new_tokens == 30 + 35
    assert req.sampling_params.max_new_tokens == 100
    with pytest.raises(KeyError), compat.estimated(req, half):
        raise KeyError
    assert req.sampling_params.max_new_tokens == 100


def test_a_request_with_a_budget_is_expected_to_grow_up_to_it() -> None:
    req = request(100, 30)
    req.sampling_params.ignore_eos = True
    with compat.estimated(req, half):
        assert req.sampling_params.ignore_eos
    with compat.estimated(req, lambda length, more: min(more, 60 - length) / 2, budget=True):
        assert req.sampling_params.max_new_tokens == 30 + 10 and not req.sampling_params.ignore_eos
    assert req.sampling_params.max_new_tokens == 100 and req.sampling_params.ignore_eos


def test_a_refused_request_waits_for_room() -> None:
    session, ledger = session_of(diffkv_policy(50.0, 0.0, window=8))
    assert not ledger.room_for_refused([]), "nobody was refused"
    ledger.refused = ledger.available() - 100
    assert ledger.room_for_refused([Expected(3, 60.0), Expected(4, 39.0)])
    assert not ledger.room_for_refused([Expected(3, 60.0), Expected(4, 40.0)])
    session.extend({1: 160})
    assert not ledger.room_for_refused([])
    session.release(1)
    session.manager.counts.settle()
    assert ledger.room_for_refused([Expected(None, 99.0)])


def test_a_long_request_has_an_estimate_of_its_own() -> None:
    session, ledger = session_of(diffkv_policy(50.0, 0.0, window=8))
    manager = session.manager
    session.extend({1: 300, 2: 300, 3: 20})
    assert ledger.growth_of(1, 1) == ledger.growth_estimate() == 1.0, "prompts say nothing"
    manager.prompts.untouched.add(2)
    for row in (1, 2, 3):
        session.end_prompt(row)
    session.step([1, 2, 3])
    manager.counts.settle()
    page = manager.fmt.high.tokens
    held = manager.device.pages_of(1) * page / manager.geometry.heads - page
    assert ledger.growth_of(1, 40) == pytest.approx(40 * GROWTH_MARGIN * (held - 8) / (301 - 8))
    assert ledger.growth_of(1, 40) < ledger.growth(300, 40) == pytest.approx(40 * ledger.growth_estimate())
    assert ledger.growth_of(2, 40) == 40, "all of it stayed in the high tier"
    assert ledger.growth_of(3, 40) == ledger.growth_of(None, 40) == ledger.growth(9, 40)


def test_what_grows_in_layers_with_a_window_ends_with_it() -> None:
    """One of two layers sees 40 tokens back, so a long request grows in the other only, and a short one in both: what
    running requests hold says how much of their windows' tokens, not of all, a generated token takes."""
    sizes = {"num_rows": 8, "num_segments": 8, "max_tokens": 1000}
    manager = PageManager(
        Geometry(make_format(("K8V4",)), 2, 2, 1200, **sizes, attention_spans=(0, 40)), UniformPolicy()
    )
    window = retained_tokens(40)
    session, ledger = Session(manager), PageLedger(manager, 2000)
    session.extend({1: 500, 2: 20}, scores=False, check=False)
    for row in (1, 2):
        session.end_prompt(row)
    manager.counts.settle()
    assert ledger.growth_estimate() == pytest.approx(1.0, abs=0.01), "it was a half by all tokens"
    price = ledger.growth_estimate()
    assert ledger.growth_of(1, 100) == pytest.approx(50 * price) and ledger.growth(500, 100) == pytest.approx(
        50 * price
    )
    assert ledger.growth_of(2, 30) == ledger.growth(20, 30) == pytest.approx(30 * price), "within both windows"
    assert ledger.growth(20, 400) == pytest.approx((400 + window - 20) / 2 * price)


class Adder(SimpleNamespace):
    """What the hook on chunks sees of SGLang's ``PrefillAdder``."""


def chunked(ledger: PageLedger, running: int) -> tuple[Adder, Fields]:
    allocator = DiffKVAllocator.__new__(DiffKVAllocator)
    allocator.requests = RequestLifecycle(ledger)
    adder = Adder(
        token_to_kv_pool_allocator=allocator,
        rem_chunk_tokens=100,
        running_batch=SimpleNamespace(reqs=[None] * running),
        can_run_list=[],
    )
    req = Fields(full_untruncated_fill_ids=[0] * 1000, prefix_indices=[0] * 300)
    return adder, req


@pytest.mark.skipif(compat.installed().request_extents, reason="the stand-in is a request of SGLang 0.5.21")
def test_a_chunk_that_does_not_fit_waits_for_running_requests() -> None:
    session, ledger = session_of(diffkv_policy(50.0, 0.0, window=8))
    taken: list[int] = []

    def original(adder: Adder, req: Fields) -> None:
        taken.append(ledger.available())

    adder, req = chunked(ledger, running=1)
    admission.add_chunked_req(original, adder, req)
    assert taken.pop() > 10**9, "a chunk whose pages are promised is not cut short"
    ledger.chunks[req] = 50
    admission.add_chunked_req(original, adder, req)
    assert taken and ledger.chunks[req] == 100 and ledger.promised[req].pages == ledger.prompt_pages(100)
    taken.clear()
    ledger.promised["other"] = Promise(session.manager.geometry.num_pages - ledger.prompt_pages(60), 0, 0)
    assert admission.add_chunked_req(original, adder, req) is req and not taken
    assert ledger.uncommitted_pages() < 0, "so the next decode step retracts"
    adder, _ = chunked(ledger, running=0)
    admission.add_chunked_req(original, adder, req)
    assert taken, "nobody would make room"


def test_what_a_compacted_prompt_is_expected_to_take() -> None:
    session, ledger = session_of(diffkv_policy(50.0, 0.0, window=8))
    assert ledger.compacting_tokens(1000, 100) == 1000, "nothing is known yet"
    ledger._estimate, ledger._estimated_at = 0.55, (session.manager.counts.tick, session.manager.counts.counted_step)
    behind = 892 * 0.55 * PROMPT_MARGIN / GROWTH_MARGIN
    assert ledger.compacting_tokens(1000, 100) == 108 + math.ceil(behind + session.manager.fmt.high.tokens)
    assert ledger.compacting_tokens(80, 100) == 80
    pages, heads = session.manager.geometry.num_pages, session.manager.geometry.heads
    tokens = (pages // heads - 40) * session.manager.fmt.high.tokens
    assert ledger.may_compact([], 100, 0) and not ledger.may_compact([], tokens, ledger.most_pages([], 400))


def allocator_of(ledger: PageLedger) -> DiffKVAllocator:
    return DiffKVAllocator(RequestLifecycle(ledger), dtype=torch.bfloat16, device="cpu", kvcache=None, need_sort=False)


def test_where_nothing_runs_the_batch_is_not_full() -> None:
    """SGLang marks it so when a request is refused beside one that is about to end, and then looks at no other."""
    session, ledger = session_of(diffkv_policy(50.0, 0.0, window=8))
    allocator = allocator_of(ledger)
    running = SimpleNamespace(batch_is_full=True, reqs=[], is_empty=lambda: not running.reqs)
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=allocator, running_batch=running, waiting_queue=[])
    session.extend({1: 16})
    hooks.get_next_batch_to_run(lambda self: None, scheduler)
    assert running.batch_is_full, "the row of a request that ended is still held"
    session.release(1)
    hooks.get_next_batch_to_run(lambda self, running_batch: None, scheduler, running_batch=running)
    assert not running.batch_is_full
    running.reqs, running.batch_is_full = [request(1, 0)], True
    hooks.get_next_batch_to_run(lambda self: None, scheduler)
    assert running.batch_is_full


@pytest.mark.parametrize("batch", [None, "a batch"])
def test_ranks_count_what_idle_ones_have_changed(batch: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are joined before a batch is chosen. Without one SGLang adds up all pages, which several ranks count
    together."""
    session, ledger = session_of(diffkv_policy(50.0, 0.0, window=8))
    allocator, counts = allocator_of(ledger), session.manager.counts
    running = SimpleNamespace(batch_is_full=False, is_empty=lambda: True)
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=allocator, running_batch=running, waiting_queue=[])
    monkeypatch.setattr(type(session.manager.ranks), "alone", False)
    monkeypatch.setattr(allocator.requests, "scheduling_begins", lambda waiting: counts.record(-3))
    hooks.get_next_batch_to_run(lambda self: SimpleNamespace(batch_to_run=batch), scheduler)
    assert counts.free() == session.manager.geometry.num_pages - (3 if batch else 0), "what the device says is known"


@pytest.mark.parametrize(("every", "checks"), [("1", 6), ("3", 2), ("0", 0), ("", 0), ("no", 0)])
def test_structures_are_checked_after_every_kth_step(monkeypatch: pytest.MonkeyPatch, every: str, checks: int) -> None:
    session, ledger = session_of(diffkv_policy(50.0, 0.0, window=8))
    allocator = allocator_of(ledger)
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=allocator, running_batch=SimpleNamespace(batch_is_full=False, reqs=[])
    )
    batch = SimpleNamespace(reqs=[], forward_mode=SimpleNamespace(is_idle=lambda: False, is_decode=lambda: False))
    monkeypatch.setenv(CHECK_ENV, every)
    session.extend({1: 16})
    hooks.process_batch_result(lambda self, batch, result: None, scheduler, batch, None)
    session.state.refcount[3] += 1
    failed = 0
    for _ in range(6):
        try:
            hooks.process_batch_result(lambda self, batch, result: None, scheduler, batch, None)
        except AssertionError:
            failed += 1
    assert failed == checks


class AdmitsNobody:
    """In place of SGLang's PrefillAdder: what runs makes room for an urgent request, and then nobody is admitted."""

    def __init__(self, page_size: int, tree: Any, allocator: Any, running: Any, *args: Any, **kwargs: Any):
        self.token_to_kv_pool_allocator, self.running_batch = allocator, running
        self.can_run_list: list[Any] = []
        self.preempt_list: list[Any] = []

    def budget_state(self) -> AddReqResult:
        return AddReqResult.CONTINUE

    def _preempt(self, *args: Any) -> bool:
        self.preempt_list.append(self.running_batch.reqs.pop())
        return True

    def preempt_to_schedule(self, *args: Any) -> Any:
        return admission.preempt_to_schedule(AdmitsNobody._preempt, self, *args)

    def add_one_req(self, *args: Any, **kwargs: Any) -> AddReqResult:
        return AddReqResult.NO_TOKEN


class Off(SimpleNamespace):
    """All that is not set is off."""

    def __getattr__(self, name: str) -> Any:
        return None


@pytest.mark.parametrize("queue_full", [False, True])
def test_who_made_room_waits_again_if_nobody_is_admitted(queue_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own pass over its queue. What made room is queued once, or its client told that the queue is full."""
    monkeypatch.setattr(scheduler, "PrefillAdder", AdmitsNobody)
    for name in ("get_schedule", "get_memory"):
        monkeypatch.setattr(scheduler, name, Off, raising=False)
    _, ledger = session_of(UniformPolicy(), ("K8V4",))
    allocator = allocator_of(ledger)
    made_room = SimpleNamespace(rid="made room", priority=0)
    urgent = Off(rid="urgent", priority=9, kv=Off(), init_next_round_input=lambda *_: None)
    running = SimpleNamespace(reqs=[made_room], batch_is_full=False, is_empty=lambda: not running.reqs)
    told = []

    def queue(req: Any) -> None:
        (told if queue_full else state.waiting_queue).append(req)

    state = Off(
        enable_priority_preemption=True, waiting_queue=[urgent], token_to_kv_pool_allocator=allocator, max_prefill_bs=0,
        tree_cache=Off(), req_to_token_pool=Off(), grammar_manager=SimpleNamespace(has_waiting_grammars=lambda: False),
        policy=SimpleNamespace(calc_priority=lambda *_, **__: None), get_num_allocatable_reqs=lambda *_, **__: 0,
        new_token_ratio_tracker=SimpleNamespace(current=0.5),
        tp_worker=SimpleNamespace(model_runner=Off(attn_backend=0)),
        _add_request_to_queue=queue, get_prefill_adder_class=lambda: AdmitsNobody,
    )  # fmt: skip
    state._get_new_batch_prefill_raw = functools.partial(scheduler.Scheduler._get_new_batch_prefill_raw, state)
    plan = hooks.get_new_batch_prefill(scheduler.Scheduler.get_new_batch_prefill, state, running)
    assert plan.batch_to_run is None and not plan.running_batch.reqs
    assert [*state.waiting_queue, *told] == [urgent, made_room]
    hooks.get_new_batch_prefill(lambda *_: compat.no_prefill(running), state, running)
    assert [*state.waiting_queue, *told] == [urgent, made_room], "of a pass before"


def test_reports_behind_a_pass_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While requests run SGLang's log and load are by what the host knows. An idle server's are exact."""
    world = World(400, exact=False)
    counts, available = world.manager.counts, world.allocator.available_size
    monkeypatch.setitem(hooks.SERVED, hooks.BACKEND, world.allocator)
    req = world.prompt(world.tokens(60))
    world.decode(req)
    with monkeypatch.context() as here:
        for name in ("meet", "refresh", "settle"):
            here.setattr(counts, name, Mock(side_effect=AssertionError("waited")))
        bound = hooks.report_load(lambda _: available(), None)
        with pytest.raises(AssertionError, match="waited"):
            available()
    assert 0 < bound <= available()
    world.leave(req)
    assert hooks.report_load(lambda _: available(), None) == available() == world.requests.ledger.available()
    assert counts.waits


@pytest.mark.parametrize("whole", [False, True])
def test_what_sglang_reserves_whole_is_certain(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """Of a request that runs, and of one that waits; not where it has a window of its own."""
    monkeypatch.setattr(compat, "installed", lambda: SimpleNamespace(whole_replies=whole))
    session, ledger = session_of(diffkv_policy(1e9, 0.0, window=96, pressure_window=8))
    session.extend({1: 300, 2: 700}, check=False)
    for row in (1, 2):
        session.end_prompt(row)
    session.manager.counts.settle()
    sampling = {eos: SimpleNamespace(max_new_tokens=200, ignore_eos=not eos) for eos in (True, False)}
    reqs = {eos: SimpleNamespace(sampling_params=x, output_ids=[]) for eos, x in sampling.items()}
    monkeypatch.setattr(compat, "row_of", lambda req: 1)
    served: Any = SimpleNamespace(
        new_token_ratio_tracker=SimpleNamespace(current=0.5), running_batch=SimpleNamespace(reqs=list(reqs.values()))
    )
    assert list(compat.expected_tokens(served)) == [
        Expected(1, 100.0, False), Expected(1, 200.0 if whole else 100.0, whole),
    ]  # fmt: skip
    rule, usual = AdmissionRule(ledger), ledger.growth(300, 200)
    for eos, req in reqs.items():
        certain = whole and not eos
        assert rule.taken_by(req, 200, None) == ledger.growth_of(1, 200, certain)
        assert bool(compat.growth_of(req, ledger)(300, 200) < usual) == certain
        req.diffkv_window = 40
        assert compat.growth_of(req, ledger)(300, 200) == usual
