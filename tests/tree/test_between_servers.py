"""What SGLang's queues of two servers ask of rows on their way: none of it ends a scheduler, and nobody waits for what
does not come."""

from __future__ import annotations

import inspect
import json
import threading
from array import array
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import requests
import torch

from sglang_diffkv.config import UNTRIED_ENV
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.mem_pool import row_transfer
from sglang_diffkv.mem_pool.counts import RankCounts
from sglang_diffkv.mem_pool.row_object import RowNumbers
from sglang_diffkv.mem_pool.row_transfer import KeptRow, RowTransfer, Takes, most_row_pages
from sglang_diffkv.mem_pool.segment_object import Origin
from sglang_diffkv.srt.scheduling import decode_side, prefill_side, sending
from sglang_diffkv.srt.scheduling.errors import FATAL
from sglang_diffkv.srt.scheduling.receiving import NEVER, Receiving
from sglang_diffkv.srt.scheduling.sending import Rooms, Sending, block_numbers
from sglang_diffkv.srt.startup.disaggregation import check_status, of_all_ranks
from sglang_diffkv.srt.versions import compat, disaggregation
from tests.helpers import check, until
from tests.ranks import Pair
from tests.tree.stand_in import Match
from tests.tree.tree_world import World

pytestmark = pytest.mark.skipif(not compat.installed().disaggregation, reason="this SGLang is refused with it")


def half(capacity: int = 2000, *, kept_pages: int = 1000, ranks: Ranks | None = None, **named: Any) -> World:
    """A world whose rows go to other servers, or come from them."""
    world = World(capacity, exact=False, **named)
    manager = world.manager
    if ranks is not None:
        manager.ranks, manager.counts.ranks = ranks, RankCounts(ranks)
    parts = (manager.device, manager.rows, manager.counts, manager.high, manager.windows)
    manager.transfer = RowTransfer(*parts, 40, kept_pages)
    manager.transfer.origin = Origin.of(manager.geometry, torch.bfloat16, "weights", "configuration")
    world.requests.receiving, world.requests.sending = Receiving(world.requests.ledger), Sending(manager)
    return world


class Request(SimpleNamespace):
    """Of SGLang, as far as it is asked: two of them are never equal."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def request(row: int | None, tokens: int, kept: Any = None) -> Any:
    """A request of SGLang past its prompt, with a reply of one token."""
    backup = None if kept is None else SimpleNamespace(cpu_tensors=kept)
    of_older = {"req_pool_idx": row, "kv_cache_cpu": kept}
    return Request(
        rid="one", kv=SimpleNamespace(req_pool_idx=row, retraction_backup=backup), origin_input_ids=[5] * tokens,
        output_ids=[1], to_finish=None, finished_reason=None, last_node=None,
        sampling_params=SimpleNamespace(max_new_tokens=50), **of_older,
    )  # fmt: skip


def with_row(world: World, tokens: int) -> int:
    row = 1
    world.manager.transfer.restore_nothing(row, tokens)  # type: ignore[union-attr]
    return row


# Room for what comes back


def test_a_retracted_request_waits_for_the_kv_slots_of_its_tokens() -> None:
    """Its pages are few, and it has more tokens than slots are free: SGLang would end the server."""
    world = half(longest=3000)
    world.allocator.alloc(world.allocator.kv_slots_free() - 1191)
    zeros = np.zeros((1, 2), dtype=np.int64)
    numbers = RowNumbers(zeros, zeros, zeros, zeros[:, 0], np.zeros(20), np.zeros(20))
    kept = KeptRow(1195, False, 0, numbers, torch.empty(20, 8), Takes(20, (20, 0)))
    queue: Any = SimpleNamespace(token_to_kv_pool_allocator=world.allocator, num_reserved_decode_tokens=64)

    def asked(tokens: int) -> int:
        found = decode_side.prealloc_required_tokens(
            lambda self, req: (tokens + 64, 0), queue, request(None, tokens, kept)
        )
        return int(found[0])

    assert asked(1195) >= NEVER and asked(1191) == 20 * 8 + 64


def test_a_prompt_is_asked_for_the_table_blocks_that_it_is_promised() -> None:
    """It has matched a prefix, and may be sent whole all the same. With one block less it waits."""
    world = half(longest=1200)
    receiving, ledger, free = world.requests.receiving, world.requests.ledger, world.manager.space.free_blocks
    assert receiving is not None
    receiving.tree = world.tree
    tokens = world.tokens(240)
    world.leave(world.prompt(tokens[:200]))
    match = Match(world.tree, array("q", tokens))
    world.tree.make_pages(1 << 30, partly=True)  # all but that
    req = expected(None, 240).req
    req.last_node = match.node
    needed = ledger.blocks_for(receiving.tree.path(match.node), 240)
    assert needed > ledger.blocks_for([], 240), "what it has matched takes none"
    taken = [free.pop() for _ in range(len(free) - needed + 1)]
    assert not receiving.has_room(req)
    free.append(taken.pop())
    assert receiving.has_room(req)
    receiving.expect(req)
    assert ledger.promised[req].blocks == needed == len(free) and not ledger.table_starved()
    receiving.left(req)
    ledger.forget(req)
    free.extend(taken)
    match.unlock(world.tree)
    check(world.manager)


def test_a_prompt_leaves_room_for_the_reply_of_one_that_comes_or_runs() -> None:
    """What is on its way cannot be retracted, so a request that runs beside it alone would end for want of pages."""
    world = half()
    receiving, ledger, geometry = world.requests.receiving, world.requests.ledger, world.manager.geometry
    assert receiving is not None
    first, second, third = (expected(None, 100).req for _ in range(3))
    assert receiving.has_room(first), "nothing else is here"
    receiving.expect(first)
    prompt_, growth = most_row_pages(geometry, 100), geometry.most_pages(49) + geometry.heads
    free = ledger.uncommitted_pages()
    ledger.set_aside("others", free - prompt_ - growth + 1, 0)
    assert not receiving.has_room(second)
    ledger.set_aside("others", free - prompt_ - growth, 0)
    assert receiving.has_room(second)
    receiving.expect(second)
    receiving.left(first)
    ledger.forget(first)
    ledger.forget("others")
    first.req_pool_idx = first.kv.req_pool_idx = 1
    world.manager.transfer.restore_nothing(1, 100)  # type: ignore[union-attr]
    receiving._here[first] = None
    world.manager.counts.private[1] = growth + 3  # it can be retracted for the other, and this for it cannot
    assert receiving._growth_of_one(third) == growth
    receiving.left(first)
    assert receiving._growth_of_one(third) == growth
    receiving.left(second)
    assert receiving._growth_of_one(third) == 0
    world.manager.release(1)
    ledger.forget(second)
    check(world.manager)


# Arrival


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none"), AssertionError("odd"), KeyError("odd")])
def test_a_row_that_cannot_be_made_ends_its_request_alone(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    world, ended = half(), []
    req = request(1, 40)
    req.finished = lambda: False
    queue: Any = SimpleNamespace(scheduler=SimpleNamespace(token_to_kv_pool_allocator=world.allocator))
    monkeypatch.setattr(disaggregation, "prepare_abort", lambda req, message: ended.append(message))

    def fails(req: Any) -> None:
        raise error

    monkeypatch.setattr(world.requests.receiving, "begin", fails)
    decode_side.commit_transfer_to_req(lambda self, decode_req: None, queue, SimpleNamespace(req=req))
    assert ended == [f"DiffKV: the request cannot begin: {error}"]


@pytest.mark.skipif(not FATAL, reason="this PyTorch names no error of a device")
def test_a_device_that_is_of_no_more_use_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    world = half()
    req = request(1, 40)
    req.finished = lambda: False
    queue: Any = SimpleNamespace(scheduler=SimpleNamespace(token_to_kv_pool_allocator=world.allocator))

    def fails(req: Any) -> None:
        raise FATAL[0]("illegal memory access")

    monkeypatch.setattr(world.requests.receiving, "begin", fails)
    with pytest.raises(FATAL):
        decode_side.commit_transfer_to_req(lambda self, decode_req: None, queue, SimpleNamespace(req=req))


# Retraction


def test_what_has_no_room_in_host_memory_ends_when_it_would_come_back() -> None:
    world = half(kept_pages=0)
    row = with_row(world, 40)
    world.manager.transfer.keep = lambda row, tokens: world.manager.transfer._host_memory(7, 7)  # type: ignore
    receiving, req = world.requests.receiving, request(row, 40)
    assert receiving is not None
    kept = receiving.keep(req)
    assert isinstance(kept, str) and '"host_gib"' in kept and not receiving.counts["kept"]
    world.manager.release(row)
    receiving.bring_back(req, kept)
    assert "a retracted request cannot go on: host memory" in req.to_finish.message and receiving.counts["lost"] == 1
    check(world.manager)


def test_two_retracted_requests_do_not_come_back_to_the_room_of_one() -> None:
    """SGLang looks for room for the next one when the first has its KV slots, and gives it its pages behind that."""
    world = half(400)
    receiving, ledger, reqs = world.requests.receiving, world.requests.ledger, list[Any]()
    assert receiving is not None
    for _ in range(2):
        row = compat.allocated_row_of(world.prompt(world.tokens(150)))
        req = request(row, 150)
        disaggregation.keep_for(req, receiving.keep(req))
        world.manager.release(row)
        reqs.append(req)
    first, second = reqs
    wanted = receiving.tokens_back(second)
    world.prompt(world.tokens(150))
    world.manager.counts.settle()
    assert wanted is not None and wanted <= ledger.available() < 2 * wanted, "one of them fits"
    queue: Any = SimpleNamespace(token_to_kv_pool_allocator=world.allocator)
    decode_side.pre_alloc(lambda self, req: None, queue, first)
    assert receiving.tokens_back(second) > ledger.available(), "so the other one waits"
    receiving.bring_back(first, disaggregation.kept_of(first))
    assert receiving.counts == {"kept": 2, "restored": 1, "lost": 0} and not ledger.promised
    assert receiving.tokens_back(second) > ledger.available()
    check(world.manager)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none"), RuntimeError("odd"), AssertionError("odd")])
def test_no_error_of_a_retracted_request_ends_the_scheduler(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    world = half()
    row = with_row(world, 40)
    receiving, req = world.requests.receiving, request(row, 40)
    assert receiving is not None

    def fails(*_: object) -> None:
        raise error

    kept = receiving.keep(req)
    assert isinstance(kept, KeptRow)
    monkeypatch.setattr(world.manager.device, "to_device", fails)
    assert isinstance(receiving.keep(req), str)
    world.manager.release(row)
    receiving.bring_back(req, kept)
    monkeypatch.undo()
    assert str(error) in req.to_finish.message and world.manager.rows.length(row) == 40
    check(world.manager)


# The beginning of a prompt


def test_a_prompt_of_many_short_parts_has_room_on_the_other_server() -> None:
    """Its turns came one by one, and each ends within a page. So they are joined, or computed again."""
    world = half(share_min=4, segments=60, page_tokens=16)
    tokens = world.tokens(17 * 14 + 3)
    for end in range(17, len(tokens), 17):
        world.leave(world.prompt(tokens[:end]))
    req = world.prompt(tokens)
    held = world.manager.device.pages_of(compat.allocated_row_of(req))
    assert held <= most_row_pages(world.manager.geometry, len(tokens))
    assert world.requests.path(req), "nothing of it was found again"
    world.leave(req)


# The end of a prompt


class Manager:
    """Of SGLang's senders: what the decode server was told, and who was told that something failed."""

    attn_tp_rank, pp_size, attn_cp_size, pp_rank, attn_cp_rank = 2, 1, 1, 0, 0

    def __init__(self, named: Any = None):
        self.transfer_infos = {7: named}
        self.told: list[str] = []
        self.states: list[Any] = []
        self.synced: list[tuple[Any, ...]] = []

    def conclude_failure(self, *, bootstrap_room: int, failure_reason: str) -> None:
        self.record_failure(bootstrap_room, failure_reason)

    def record_failure(self, room: int, reason: str) -> None:
        assert room == 7
        self.told.append(reason)

    def update_status(self, room: int, state: Any) -> None:
        self.states.append((room, state))

    def sync_status_to_decode_endpoint(self, *told: Any) -> None:
        self.synced.append(told)


def named(**fields: Any) -> Any:
    """What a decode server has named for a prompt."""
    return SimpleNamespace(endpoint="there", dst_port=5, **fields)


def sender_of(manager: Manager, **named: Any) -> Any:
    return SimpleNamespace(kv_mgr=manager, bootstrap_room=7, **named)


def prompt(manager: Manager, row: int, **named: Any) -> Any:
    req = request(row, 40)
    req.disagg_kv_sender, req.bootstrap_host, req.bootstrap_room = sender_of(manager, **named), "127.0.0.1", 7
    return req


@pytest.mark.parametrize("place", ["begin", "advance", "send"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none"), ValueError("odd")])
def test_a_row_that_cannot_be_sent_ends_its_request(
    place: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both servers. Where one alone knew it, the other one would wait for minutes."""
    world = half()
    row, sending = with_row(world, 40), world.requests.sending
    assert sending is not None

    def fails(*_: object, **__: object) -> None:
        raise error

    manager = Manager({"x": named(dst_kv_indices=range(40), is_dummy=False, decode_prefix_len=0)})
    req = prompt(manager, row, send=fails)
    if place == "begin":
        monkeypatch.setattr(world.manager.device, "table_of", fails)
    sending.begin(req)
    if place == "advance":
        monkeypatch.setattr(world.manager.device, "to_device", fails)

    def ended() -> bool:
        sending.advance()
        return bool(manager.told)

    until(ended)
    monkeypatch.undo()
    assert len(manager.told) == 1 and "cannot send the prompt of request one" in manager.told[0]
    assert not sending.exports
    sending.advance()
    world.manager.release(row)
    check(world.manager)


def test_nobody_has_set_blocks_aside() -> None:
    """All that the decode server has named are dummies, or it has just let go of them."""
    world = half()
    row, sending, manager = with_row(world, 40), world.requests.sending, Manager()
    assert sending is not None
    manager.transfer_infos[7] = {"x": named(dst_kv_indices=range(40), is_dummy=True)}
    sending.begin(prompt(manager, row))
    sending.advance()
    assert "has set 0 aside" in manager.told[0]


def test_a_prompt_that_is_refused_in_its_batch_ends_on_both_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    world, manager, order = half(), Manager(), []
    req = prompt(manager, 1)
    req.to_finish = SimpleNamespace(message="no room")
    world.requests.refused.append(req)
    monkeypatch.setattr(prefill_side, "tell_refused", lambda scheduler, requests: requests.refused.clear())
    monkeypatch.setattr(disaggregation, "release_waiting", lambda scheduler, req: order.append(list(manager.told)))
    scheduler: Any = SimpleNamespace(token_to_kv_pool_allocator=world.allocator, waiting_queue=[])
    prefill_side.get_next_disagg_prefill_batch_to_run(lambda self: None, scheduler)
    assert order == [["no room"]]


# Prompts that do not come


class Senders:
    """Of SGLang's manager of a prefill server, what it knows of rooms, and which decode servers heard of a failure."""

    attn_tp_rank, pp_size, attn_cp_size, pp_rank, attn_cp_rank = 0, 1, 1, 0, 0

    def __init__(self) -> None:
        self.kv_cache_dtype_str = OURS
        self.transfer_infos: dict[int, Any] = {}
        self.request_status: dict[int, Any] = {}
        self.failure_records: dict[int, str] = {}
        self.req_to_decode_prefix_len: dict[int, int] = {}
        self.told: list[int] = []

    def asks(self, room: int) -> None:
        """A decode server does."""
        self.transfer_infos[room] = {"x": named(is_dummy=False)}
        self.request_status.setdefault(room, disaggregation.transfer_states().WaitingForInput)

    def send_kv_status_message(self, *, targets: Any, bootstrap_room: int, status: Any, failure_reason: str) -> None:
        assert status == disaggregation.transfer_states().Failed and targets in ([], [("there", 5)])
        self.told += [bootstrap_room] * len(targets)

    def sync_status_to_decode_endpoint(self, endpoint: str, port: int, room: int, *_: object) -> None:
        self.send_kv_status_message(targets=[(endpoint, port)], bootstrap_room=room, status=_[0], failure_reason="none")


class Prefill:
    """A prefill server, as far as its rooms go."""

    def __init__(self) -> None:
        self.senders, self.refused = Senders(), list[int]()
        self.queue: Any = SimpleNamespace(scheduler=SimpleNamespace(token_to_kv_pool_allocator=half().allocator))
        self.queue.kv_manager = self.senders

    def comes(self, room: int) -> Any:
        """A request does; its sender, or None if it was refused."""
        req = expected(None, 40).req
        req.bootstrap_room = room
        if prefill_side.prefill_exceeds(lambda self, req: False, self.queue, req):
            return None
        self.senders.request_status.setdefault(room, disaggregation.transfer_states().Bootstrapping)
        return SimpleNamespace(kv_mgr=self.senders, bootstrap_room=room, conclude_state=None)

    def aborts(self, sender: Any) -> None:
        def original(self: Any) -> None:
            self.kv_mgr.request_status[self.bootstrap_room] = disaggregation.transfer_states().Failed

        prefill_side.abort_sender(original, sender)

    def clears(self, sender: Any) -> None:
        def original(self: Any) -> None:
            self.kv_mgr.request_status.pop(self.bootstrap_room, None)
            self.kv_mgr.transfer_infos.pop(self.bootstrap_room, None)

        prefill_side.clear_sender(original, sender)

    def passes(self) -> None:
        """A turn of its scheduler's loop."""
        scheduler = SimpleNamespace(
            token_to_kv_pool_allocator=self.queue.scheduler.token_to_kv_pool_allocator,
            disagg_prefill_bootstrap_queue=self.queue,
        )
        prefill_side.process_disagg_prefill_inflight_queue(lambda self: None, scheduler)


@pytest.fixture(params=["newer", "older"])
def prefill(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Prefill:
    row = replace(compat.installed(), transfer_reasons=request.param == "newer")
    monkeypatch.setattr(disaggregation, "installed", lambda: row)
    monkeypatch.setattr(disaggregation, "is_own_request", lambda req: False)
    monkeypatch.setattr(disaggregation, "refuse_room", lambda scheduler, req: None)
    return Prefill()


@pytest.mark.parametrize("asked", ["before", "between", "after"])
def test_whoever_asks_for_a_prompt_that_was_aborted_hears_that_it_does_not_come(
    asked: str, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is aborted, before SGLang drops it, or later."""
    senders, sender = prefill.senders, prefill.comes(7)
    if asked == "before":
        senders.asks(7)
    prefill.aborts(sender)
    if asked == "between":
        senders.asks(7)
    prefill.clears(sender)
    if asked == "after":
        senders.asks(7)
        assert not senders.told
        prefill.passes()
    prefill.passes()
    assert senders.told == [7]
    senders.asks(7)  # once more
    prefill.passes()
    prefill.passes()
    assert senders.told == [7, 7]
    monkeypatch.setattr(sending, "DROPPED_SECONDS", -1.0)
    prefill.passes()
    assert senders.told == [7, 7] and not senders.transfer_infos and not senders.request_status


def test_who_is_about_to_ask_is_not_told_yet(prefill: Prefill) -> None:
    """SGLang's thread has made a place for it, in which nobody stands."""
    senders, sender = prefill.senders, prefill.comes(7)
    prefill.aborts(sender)
    prefill.clears(sender)
    senders.transfer_infos[7] = {}
    prefill.passes()
    assert senders.transfer_infos == {7: {}} and not senders.told
    senders.asks(7)
    prefill.passes()
    assert senders.told == [7]


def test_whoever_asks_too_late_hears_it(prefill: Prefill) -> None:
    """SGLang's sender has waited as long as it does, and has failed."""
    senders, sender = prefill.senders, prefill.comes(7)
    senders.request_status[7] = disaggregation.transfer_states().Failed
    prefill.clears(sender)
    senders.asks(7)
    prefill.passes()
    assert senders.told == [7]


def test_nobody_hears_a_failure_of_a_prompt_that_came_or_may_come(prefill: Prefill) -> None:
    senders, sender = prefill.senders, prefill.comes(7)
    prefill.aborts(prefill.comes(8))
    senders.asks(7)
    prefill.passes()
    senders.request_status[7] = sender.conclude_state = disaggregation.transfer_states().Success
    prefill.clears(sender)
    assert not senders.told
    assert prefill.comes(8) is None, (
        "its number was given up: who asks for it may ask for the prompt that does not come"
    )
    assert prefill.comes(7) is not None, "the one that came is over"


def test_two_prompts_have_no_number_in_common(prefill: Prefill) -> None:
    """The second is refused as long as the first is here. What was given up is over when SGLang's thread and engine say
    so, and nobody hears that."""
    sender = prefill.comes(7)
    assert sender is not None and prefill.comes(7) is None
    prefill.clears(sender)
    sender = prefill.comes(7)
    assert sender is not None
    prefill.aborts(sender)
    assert prefill.comes(7) is None
    prefill.clears(sender)
    assert prefill.comes(7) is None


@pytest.mark.parametrize("room", [0, -1, 1 << 63, (1 << 64) - 1, None, "7", 7.0, True])
def test_a_number_that_sglang_cannot_keep_is_refused(room: Any, prefill: Prefill) -> None:
    assert prefill.comes(room) is None and not prefill.senders.request_status
    assert prefill.comes((1 << 63) - 1) is not None


def test_what_is_known_of_a_prompt_that_does_not_come_goes(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's engine and thread write it down behind SGLang's back, and nobody else would drop it."""
    senders, sender = prefill.senders, prefill.comes(7)
    prefill.aborts(sender)
    prefill.clears(sender)
    senders.asks(7)
    senders.failure_records[7], senders.req_to_decode_prefix_len[7] = "aborted", 0
    prefill.passes()
    assert senders.told == [7]
    monkeypatch.setattr(sending, "DROPPED_SECONDS", -1.0)
    prefill.passes()
    for known in (senders.transfer_infos, senders.request_status, senders.failure_records):
        assert not known
    assert not senders.req_to_decode_prefix_len
    senders.request_status[7] = disaggregation.transfer_states().Success  # of an engine that was just writing
    monkeypatch.setattr(sending, "MOST_GIVEN_UP", 1)
    prefill.aborts(prefill.comes(9))
    assert not senders.request_status.keys() - {9} and prefill.comes(7) is not None


def test_nobody_hears_of_an_abort_while_the_engine_writes(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a release whose engine goes on: the decode server would give the places to others."""
    now, older = [0.0], not disaggregation.installed().transfer_reasons
    monkeypatch.setattr(sending.time, "monotonic", lambda: now[0])
    senders, sender = prefill.senders, prefill.comes(7)
    senders.asks(7)
    senders.request_status[7] = disaggregation.transfer_states().Transferring
    prefill.aborts(sender)
    prefill.clears(sender)
    prefill.passes()
    assert senders.told == ([] if older else [7])
    now[0] = sending.WRITTEN_SECONDS + 0.1
    prefill.passes()
    assert senders.told == [7]
    now[0] += sending.DROPPED_SECONDS + 0.1
    prefill.passes()
    assert senders.told == [7] and not senders.transfer_infos


def test_two_requests_of_one_number_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt of one is not taken for that of the other, as long as theirs are not the same."""
    one, two = expected(None, 40).req, expected(None, 40).req
    one.bootstrap_room = two.bootstrap_room = 7
    one.output_ids = two.output_ids = []
    two.origin_input_ids = list(one.origin_input_ids)
    assert disaggregation.name_of(one) == disaggregation.name_of(two)
    two.origin_input_ids[3] += 1
    assert disaggregation.name_of(one) != disaggregation.name_of(two)
    one.output_ids = [5]
    name = disaggregation.name_of(one)
    one.pd_rebootstrap_in_progress = True
    assert disaggregation.name_of(one) != name, "what was generated is sent again too"
    whole = SimpleNamespace(bootstrap_room=7, origin_input_ids=[*one.origin_input_ids, 5], output_ids=[])
    assert disaggregation.name_of(one) == disaggregation.name_of(whole)


def test_a_prompt_that_is_aborted_while_it_waits_takes_its_sender_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang 0.5.17 leaves it. Others, and requests of a decode server, which have none, stay as they are."""
    monkeypatch.setattr(disaggregation, "is_own_request", lambda req: False)
    aborted, waiting = list[str](), [expected(None, 9).req for _ in range(3)]
    for req, name in zip(waiting, "ab", strict=False):
        req.disagg_kv_sender = SimpleNamespace(abort=lambda name=name: aborted.append(name))
    waiting[2].disagg_kv_sender = None
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=half().allocator, waiting_queue=[*waiting])

    def original(self: Any, asked: Any) -> None:
        self.waiting_queue = waiting[1:2]

    prefill_side.abort_request(original, scheduler, None)
    assert aborted == ["a"]


def test_few_prompts_are_known_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms, now = Rooms(Senders()), [0.0]
    monkeypatch.setattr(sending.time, "monotonic", lambda: now[0])
    for room in range(sending.MOST_GIVEN_UP + 5):
        rooms.give_up(room)
    assert len(rooms.given_up) == sending.MOST_GIVEN_UP and 4 not in rooms.given_up and 5 in rooms.given_up
    now[0] = sending.GIVEN_UP_SECONDS + 1
    rooms.give_up(3)
    assert list(rooms.given_up) == [3]


@pytest.mark.parametrize("where", ["queue", "coming", "ended", "nowhere", "retracted"])
def test_a_decode_server_waits_for_one_prompt_of_a_number(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the engine may still write what was sent of it. A retracted request waits for none."""
    world, refused, entry = half(), list[Any](), expected(None, 40)
    ended = [(entry, 0.0, 1, 1)] if where == "ended" else []
    queue = prealloc_queue(world, *([entry] if where in ("queue", "retracted") else []))
    queue.transfer_queue = SimpleNamespace(queue=[entry] if where == "coming" else [], _deferred_releases=ended)
    monkeypatch.setattr(disaggregation, "refuse_room", lambda scheduler, req: refused.append(req))
    monkeypatch.setattr(disaggregation, "is_own_request", lambda req: False)
    req = expected(None, 40).req
    req.output_ids = [1] if where == "retracted" else []
    found = decode_side.decode_exceeds(lambda self, req: False, queue, req)
    assert found == (where not in ("nowhere", "retracted")) and refused == [req] * found


def test_a_number_that_sglang_has_dropped_has_failed() -> None:
    """Whoever asks for it all the same would end the server."""
    known, asked = disaggregation.transfer_states(), {7: disaggregation.transfer_states().Success}
    ours, stock = SimpleNamespace(kv_cache_dtype_str=OURS), SimpleNamespace(kv_cache_dtype_str="bfloat16")
    assert check_status(lambda self, room: asked[room], ours, 7) == known.Success
    assert check_status(lambda self, room: asked[room], ours, 8) == known.Failed
    with pytest.raises(KeyError):
        check_status(lambda self, room: asked[room], stock, 8)


@pytest.mark.parametrize(
    ("status", "port", "lost"),
    [(200, 5, False), (200, 6, True), (503, 5, True), (404, 5, True), (500, 6, False), (None, 6, False)],
)
def test_a_prefill_server_that_was_started_anew_is_lost(
    status: int | None, port: int, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers, but it is another one, or its ranks are not there yet. One that does not answer is asked again."""

    class Manager:
        kv_cache_dtype_str = OURS
        connection_lock = nullcontext()

        def __init__(self) -> None:
            there = {"rank_ip": "127.0.0.1", "rank_port": 5, "pp_rank": 0}
            self.connection_pool = {"a:12_0_0_0": [{**there, "rank_port": 9}], "a:1_0_0_0": [there], "a:2_0_0_0": []}
            self.gone: list[str] = []

        def _handle_node_failure(self, address: str) -> None:
            self.gone.append(address)

    def get(url: str, **_: object) -> Any:
        assert url == "http://a:1/route"
        if status is None:
            raise requests.ConnectionError("refused")
        reply = requests.Response()
        reply.status_code, reply._content = status, json.dumps({"rank_ip": "127.0.0.1", "rank_port": port}).encode()
        return reply

    monkeypatch.setattr(requests, "get", get)
    manager, asked = Manager(), list[str]()
    decode_side.on_heartbeat_success(lambda self, address: asked.append(address), manager, "a:1")
    assert asked == ["a:1"] and manager.gone == ["a:1"] * lost
    manager.kv_cache_dtype_str = "bfloat16"
    decode_side.on_heartbeat_success(lambda self, address: asked.append(address), manager, "a:1")
    assert manager.gone == ["a:1"] * lost, "a server without diffkv does as SGLang"


# SGLang 0.5.17


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang has fewer functions for two servers."""
    row = replace(compat.installed(), transfer_reasons=False)
    monkeypatch.setattr(disaggregation, "installed", lambda: row)


def test_all_decode_servers_hear_that_a_prompt_does_not_come(older: None) -> None:
    known = disaggregation.transfer_states()
    manager = Manager({"x": named(is_dummy=False), "y": named(is_dummy=True)})
    disaggregation.conclude_failure(sender_of(manager), "no room")
    assert manager.told == ["no room"] and manager.states == [(7, known.Failed)]
    assert manager.synced == [("there", 5, 7, known.Failed, 2)] * 2
    let_go = Manager()
    disaggregation.conclude_failure(sender_of(let_go), "no room")
    assert let_go.told == ["no room"] and not let_go.synced


def expected(row: int | None, tokens: int, *, waits: bool = True) -> Any:
    """A request that SGLang's queue of a decode server has."""
    req = request(row, tokens)
    req.finished, req.bootstrap_host, req.bootstrap_room = lambda: False, "127.0.0.1", 7
    return SimpleNamespace(req=req, waiting_for_input=waits)


def prealloc_queue(world: World, *entries: Any, **scheduler: Any) -> Any:
    """SGLang's queue of a decode server, by priority if ``scheduler`` says so."""
    named: dict[str, Any] = {"enable_priority_scheduling": False, "schedule_low_priority_values_first": False}
    return SimpleNamespace(
        token_to_kv_pool_allocator=world.allocator, queue=[*entries], scheduler=SimpleNamespace(**named | scheduler)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("full", "row", "waits", "retracted", "free"),
    [
        (False, None, True, False, True),  # there is room
        (True, None, True, False, False),  # there is none
        (True, None, False, False, True),  # it does not wait for room
        (True, 1, True, False, True),  # it has got its slots
        (True, None, True, True, True),  # retracted requests are asked for
    ],
)
def test_no_tokens_are_free_while_the_next_prompt_has_no_room(
    full: bool, row: int | None, waits: bool, retracted: bool, free: bool, older: None
) -> None:
    world = half()
    transfer, entry = world.manager.transfer, expected(row, 40, waits=waits)
    queue = prealloc_queue(world, expected(3, 9), entry)
    assert transfer is not None and world.requests.receiving is not None
    if full:
        assert transfer.room.take(transfer.room.count) is not None
    assert world.requests.receiving.has_room(entry.req) == (not full)
    found = decode_side.allocatable_token_budgets(lambda self, **_: 5000, queue, count_retracted=not retracted)
    assert found == 5000 if free else found < 0


@pytest.mark.parametrize("low_first", [False, True])
def test_the_next_prompt_is_the_first_by_priority(low_first: bool, older: None) -> None:
    """SGLang asks, and then sorts its queue: a prompt without room would be given what is not there."""
    world, small, large = half(), expected(None, 40), expected(None, 4000)
    small.req.priority, large.req.priority = (2, 1) if low_first else (1, 2)
    receiving = world.requests.receiving
    assert receiving is not None and receiving.has_room(small.req)
    receiving.has_room = lambda req, parts=1: req is small.req  # type: ignore[method-assign]
    queue = prealloc_queue(
        world, small, large, enable_priority_scheduling=True, schedule_low_priority_values_first=low_first
    )
    assert decode_side.allocatable_token_budgets(lambda self, **_: 5000, queue, count_retracted=True) < 0
    assert queue.queue == [small, large]
    large.req.priority = small.req.priority  # the first of its like
    assert decode_side.allocatable_token_budgets(lambda self, **_: 5000, queue, count_retracted=True) == 5000


def test_a_decode_server_that_cannot_be_told_ends_nothing(older: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no such address")

    manager = Manager({"x": named(is_dummy=False)})
    monkeypatch.setattr(manager, "sync_status_to_decode_endpoint", fails)
    disaggregation.conclude_failure(sender_of(manager), "no room")
    assert manager.told == ["no room"] and manager.states == [(7, disaggregation.transfer_states().Failed)]


def test_a_waiting_prompt_gives_up_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the installed SGLang's own functions."""
    from sglang.srt.disaggregation import prefill

    done: list[Any] = []
    if compat.installed().transfer_reasons:
        monkeypatch.setattr(prefill, "release_kv_cache", lambda req, tree, **_: done.append("row"))
    else:
        monkeypatch.setattr("sglang.srt.mem_cache.common.release_kv_cache", lambda req, tree, **_: done.append("row"))
    req = request(1, 40)
    req.metadata_buffer_index, req.pending_bootstrap = 4, True
    req.kv.holds_kv = True
    req.disagg_kv_sender = SimpleNamespace(abort=lambda: done.append("sender"))
    mixin = prefill.SchedulerDisaggregationPrefillMixin
    scheduler: Any = SimpleNamespace(
        req_to_metadata_buffer_idx_allocator=SimpleNamespace(free=done.append), tree_cache=None,
        clear_pending_chunk_send=lambda req: None,
    )  # fmt: skip
    if compat.installed().transfer_reasons:
        scheduler.release_aborted_prefill_waiting_req = mixin.release_aborted_prefill_waiting_req.__get__(scheduler)
    disaggregation.release_waiting(scheduler, req)
    assert done == ["sender", 4, "row"] and req.metadata_buffer_index == -1 and not req.pending_bootstrap


def test_a_prompt_goes_to_blocks_while_it_is_expected(older: None) -> None:
    world, went = half(), []
    receiving, entry = world.requests.receiving, expected(None, 40)
    assert receiving is not None
    queue: Any = SimpleNamespace(
        token_to_kv_pool_allocator=world.allocator, kv_manager=SimpleNamespace(), queue=[entry]
    )
    decode_side.pre_alloc(lambda self, req: None, queue, entry.req)
    receiver = SimpleNamespace(kv_mgr=queue.kv_manager, bootstrap_room=7)
    blocks = list(block_numbers(receiving.imports[entry.req].blocks))
    decode_side.send_metadata(lambda self, indices, aux: went.append(indices), receiver, np.array([3, 4]), 0)
    receiving.left(entry.req)
    decode_side.send_metadata(lambda self, indices, aux: went.append(indices), receiver, np.array([3, 4]), 0)
    assert [list(x) for x in went] == [blocks, [3, 4]]


# The handshake


def met(original: Any, told: Any, ours: str) -> tuple[bool, dict[str, str], dict[str, Any]]:
    """What SGLang's manager finds, which servers it refuses and which it knows."""
    manager: Any = SimpleNamespace(kv_cache_dtype_str=ours, prefill_info_table={})

    def meets(self: Any, address: str) -> bool:
        self.prefill_info_table[address] = SimpleNamespace(kv_cache_dtype=told)
        return bool(original(self, address))

    found = decode_side.try_ensure_parallel_info(meets, manager, "there")
    return found, manager.diffkv_refused, manager.prefill_info_table


OURS = disaggregation.told_of_rows({"rows": 1, "page_tokens": 16})


def differs(told: str) -> Any:
    def original(self: Any, address: str) -> bool:
        raise RuntimeError(
            f"KV cache dtype mismatch: prefill server has kv_cache_dtype={told}, but decode server has "
            f"kv_cache_dtype={OURS}. Both servers must use the same --kv-cache-dtype value."
        )

    return original


@pytest.mark.parametrize(
    "told",
    [
        "[" * 30_000, "[" * 10_000_000, "auto", "{}", json.dumps({"diffkv": None}), json.dumps({"diffkv": [1]}),
        json.dumps({"diffkv": {"rows": "[" * 60_000}}), '{"diffkv":{"rows":' + "[" * 900 + "]" * 900 + "}}",
        "null", "1",
    ],
    ids=["deep", "long", "stock", "empty", "null", "list", "long value", "deep value", "none", "number"],
)  # fmt: skip
def test_whatever_a_prefill_server_tells_of_itself_ends_its_own_requests_alone(told: str) -> None:
    found, refused, known = met(differs(told), told, OURS)
    assert not found and not known and 0 < len(refused["there"]) < 6000


def test_a_prefill_server_that_tells_nothing_is_refused() -> None:
    """SGLang compares nothing then."""
    found, refused, known = met(lambda self, address: True, None, OURS)
    assert not found and not known and "does not tell what it stores" in refused["there"]
    assert met(lambda self, address: True, OURS, OURS)[:2] == (True, {})
    with pytest.raises(RuntimeError):  # another backend serves
        met(differs("other"), "other", "auto")


@pytest.mark.parametrize("name", ["own_means", "own_shaping", "page_tokens"])
def test_what_servers_measure_themselves_differs_with_their_ranks(name: str) -> None:
    """And "start both servers alike" would not help."""
    ours, theirs = (disaggregation.told_of_rows({"rows": 1, name: value}) for value in ("12", "34"))
    said = disaggregation.how_servers_differ(
        f"prefill server has kv_cache_dtype={theirs}, but decode server has kv_cache_dtype={ours}", ours
    )
    assert said.startswith(f"{name} is 34 there and 12 here. Start both servers alike")
    assert ("give key_means a file" in said) == (name != "page_tokens")


@pytest.mark.parametrize("error", [AssertionError(("Decode cp size",)), ZeroDivisionError(), KeyError("x")])
def test_ranks_that_cannot_be_mapped_end_requests_and_no_server(error: Exception) -> None:
    def original(self: Any, address: str) -> bool:
        raise error

    found, refused, known = met(original, OURS, OURS)
    assert not found and not known and refused["there"]


# Several ranks


def asked_by(ranks: int) -> Any:
    """What SGLang's manager knows of a prompt that a decode server of so many ranks waits for."""
    manager = Manager()
    manager.decode_kv_args_table = {"s": SimpleNamespace(dst_attn_tp_size=ranks)}  # type: ignore[attr-defined]
    wanted = named(dst_kv_indices=range(40), is_dummy=False, decode_prefix_len=0, mooncake_session_id="s")
    manager.transfer_infos[7] = {"x": wanted}
    return manager


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 3), (4, 3), (2, 0), (1, -1)])
def test_a_decode_server_of_other_ranks_gets_nothing(here: int, there: int) -> None:
    """Both numbers are told. It should have refused this server itself."""
    world, manager = half(ranks=Ranks(here)), asked_by(there)
    row, sending = with_row(world, 40), world.requests.sending
    assert sending is not None
    sending.begin(prompt(manager, row))
    assert f"the decode server has --tp-size {there} and this one {here}: start both with as" in manager.told[0]
    assert not sending.exports and not world.manager.transfer._exports  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("here", "there", "rank", "first", "most"),
    [(2, 2, 1, 0, 40), (2, 1, 0, 0, 20), (2, 1, 1, 20, 20), (4, 2, 2, 0, 20), (4, 2, 3, 20, 20), (3, 1, 2, 26, 13)],
)
def test_each_rank_sends_to_its_part_of_the_blocks(here: int, there: int, rank: int, first: int, most: int) -> None:
    """As SGLang's sender counts them: the engine takes those of the decode server from there on."""
    world, manager, sent = half(ranks=Ranks(here, rank)), asked_by(there), list[Any]()
    row, sending = with_row(world, 40), world.requests.sending
    assert sending is not None
    req = prompt(manager, row, send=lambda blocks, states, num_kv_tokens: sent.append(blocks))
    sending.begin(req)
    assert sending.exports[req].most == most and req.disagg_kv_sender.curr_idx == first

    def goes() -> bool:
        sending.advance()
        return bool(sent)

    until(goes)
    assert req.disagg_kv_sender.num_kv_indices == first + len(sent[0]) and not manager.told
    world.manager.transfer.finish(sending.exports[req], well=True)  # type: ignore[union-attr]
    world.manager.release(row)


@pytest.mark.parametrize(
    ("there", "here", "heads", "why"),
    [
        (1, 1, 8, ""), (2, 1, 8, ""), (8, 2, 8, ""), (6, 2, 6, ""), (8, 8, 2, ""),
        (1, 2, 8, "--tp-size is 1 there and 2 here: start both with as many ranks, or the prefill server with a mul"),
        (3, 2, 6, "--tp-size is 3 there and 2 here"), (0, 2, 8, "--tp-size is 0 there"),
        (4, 2, 2, "--tp-size is 4 there and 2 here, and each of 2 KV heads is on several ranks there: start both with"),
        (4, 1, 6, "--tp-size is 4 there and 1 here, and each of 6"),
    ],
)  # fmt: skip
def test_servers_of_other_ranks_go_together_or_are_told_both_numbers(
    there: int, here: int, heads: int, why: str
) -> None:
    ours, mapped = disaggregation.told_of_rows({"kv_heads": heads}), list[Any]()
    info = SimpleNamespace(attn_tp_size=there)
    manager: Any = SimpleNamespace(
        kv_cache_dtype_str=ours, prefill_info_table={}, attn_tp_size=here, diffkv_device=torch.device("cpu")
    )

    def meets(self: Any, address: str) -> bool:
        decode_side.resolve_rank_mapping(lambda self, info: mapped.append(info), self, info)
        self.prefill_info_table[address] = SimpleNamespace(kv_cache_dtype=ours)
        return True

    assert decode_side.try_ensure_parallel_info(meets, manager, "there") == (not why)
    assert manager.diffkv_refused.get("there", "").startswith(why) and mapped == [info] * (not why)
    manager.kv_cache_dtype_str = "bfloat16"
    decode_side.resolve_rank_mapping(lambda self, info: mapped.append(info), manager, info)
    assert mapped[-1] is info, "another backend's servers"


def test_other_ranks_were_not_tried_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode server of one rank does not know before it meets the other that it takes parts."""
    monkeypatch.delenv(UNTRIED_ENV, raising=False)
    monkeypatch.setattr(disaggregation, "RANKS_GPU_VERSIONS", ())
    manager: Any = SimpleNamespace(
        kv_cache_dtype_str=disaggregation.told_of_rows({"kv_heads": 8}), attn_tp_size=1,
        diffkv_device=torch.device("cuda", 0),
    )  # fmt: skip
    mapped = list[Any]()

    def meet(ranks: int) -> None:
        info = SimpleNamespace(attn_tp_size=ranks)
        decode_side.resolve_rank_mapping(lambda self, info: mapped.append(info), manager, info)

    meet(1)
    why = rf"--tp-size is 2 there and 1 here on a GPU, .*: start both with as many ranks, or set {UNTRIED_ENV}=1"
    with pytest.raises(RuntimeError, match=why):
        meet(2)
    assert len(mapped) == 1
    monkeypatch.setenv(UNTRIED_ENV, "1")
    meet(2)
    monkeypatch.delenv(UNTRIED_ENV)
    monkeypatch.setattr(disaggregation, "RANKS_GPU_VERSIONS", (compat.sglang_version(),))
    meet(2)
    assert len(mapped) == 3


def test_a_prompt_gets_blocks_for_each_rank_that_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """And waits until there are so many."""
    monkeypatch.setattr(row_transfer, "part_of", lambda geometry, parts: geometry)  # the world has one head
    world, entry, own = half(), expected(None, 40), expected(None, 40)
    receiving, transfer = world.requests.receiving, world.manager.transfer
    assert receiving is not None and transfer is not None
    queue: Any = SimpleNamespace(
        token_to_kv_pool_allocator=world.allocator, queue=[entry],
        kv_manager=SimpleNamespace(required_prefill_response_num_table={7: 2}),
    )  # fmt: skip
    taken = transfer.room.take(transfer.room.count - row_transfer.blocks_for(transfer.geometry, 40))
    assert taken is not None
    assert decode_side.required_admission_tokens(lambda self, req: 3, queue, entry.req) == NEVER
    transfer.room.give(taken)
    assert decode_side.required_admission_tokens(lambda self, req: 3, queue, entry.req) == 3
    decode_side.pre_alloc(lambda self, req: None, queue, entry.req)
    wanted = receiving.imports[entry.req]
    assert wanted.parts == 2 and len(wanted.of_parts[0]) >= 1
    receiving.left(entry.req)
    own.req.bootstrap_room = 8  # nobody was met
    decode_side.pre_alloc(lambda self, req: None, queue, own.req)
    assert receiving.imports[own.req].parts == 1
    receiving.left(own.req)
    for req in (entry.req, own.req):
        world.requests.ledger.forget(req)
    check(world.manager)


def test_blocks_go_whole_to_fewer_ranks() -> None:
    """SGLang's function for that cuts heads out; it is given as much, and another one sends."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    went: list[Any] = []

    def send_kvcache(*args: Any, **named: Any) -> int:
        inspect.signature(MooncakeKVManager.send_kvcache).bind(None, *args, **named)
        went.append((args, named))
        return 3

    table = {"session": SimpleNamespace(dst_kv_layer_ids=[5, 6])}
    manager: Any = SimpleNamespace(decode_kv_args_table=table, send_kvcache=send_kvcache)
    disaggregation.send_whole_blocks(manager)
    assert not hasattr(manager, "send_kvcache_slice"), "of a decode server, which sends nothing"
    manager.transfer_infos = {}
    disaggregation.send_whole_blocks(manager)
    original = inspect.signature(MooncakeKVManager.send_kvcache_slice).parameters
    given = [f"{name} given" for name in original if name != "self"]
    given[0] = "session"
    assert manager.send_kvcache_slice(*given) == 3
    ours, pointers, theirs = (f"{name} given" for name in ("prefill_kv_indices", "dst_kv_ptrs", "dst_kv_indices"))
    assert went == [(("session", ours, pointers, theirs, "executor given"), {"dst_layer_ids": [5, 6]})]


def test_servers_of_other_ranks_have_one_name_for_what_is_equal_on_all() -> None:
    digest = "a" * 32
    assert Pair(lambda ranks: ranks).each(lambda ranks: of_all_ranks(digest, ranks)) == [digest] * 2
    assert Pair(lambda ranks: ranks).each(lambda ranks: of_all_ranks("", ranks)) == ["", ""]


def test_a_number_is_one_name_on_all_ranks() -> None:
    digests = [["a" * 32, ""], ["b" * 32, ""]]
    found = Pair(lambda ranks: ranks).each(lambda ranks: [of_all_ranks(x, ranks) for x in digests[ranks.rank]])
    assert found[0] == found[1] and len(found[0][0]) == 32 and not found[0][1]
    digests.reverse()
    assert Pair(lambda ranks: ranks).each(lambda ranks: of_all_ranks(digests[ranks.rank][0], ranks))[0] != found[0][0]
    assert of_all_ranks("a" * 32, Ranks()) == "a" * 32


def test_a_number_that_one_rank_knows_is_refused_on_all() -> None:
    """Each forgets by a clock of its own what was given up."""
    pair = Pair(lambda ranks: (ranks, Rooms(Senders())))
    assert pair.each(lambda one: one[1].begins(7, one[0])) == [True, True]
    pair.members[1][1].given_up[8] = sending.GivenUp()
    assert pair.each(lambda one: one[1].begins(8, one[0])) == [False, False]
    assert [rooms.taken for _, rooms in pair.members] == [{7}, {7}]


def decoding(ranks: Ranks) -> World:
    return half(ranks=ranks)


def queue_of(world: World, *entries: Any, **more: Any) -> Any:
    """Of SGLang, the queue of prompts on their way."""
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=world.allocator)
    return SimpleNamespace(scheduler=scheduler, queue=list(entries), **more)


@pytest.mark.parametrize("how", ["cannot", "has ended"])
def test_a_request_that_cannot_begin_on_one_rank_begins_on_none(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One has no memory, or SGLang has found the first token to be another request's. Nobody waits for anybody, also
    when both are idle again: one has made a row, and the other has nothing of its own to count."""
    ended: list[tuple[int, str]] = []
    pair = Pair(decoding)
    pair.exchange.barrier = threading.Barrier(2, timeout=10)
    pair.each(lambda world: world.requests.ranks_meet())
    monkeypatch.setattr(disaggregation, "prepare_abort", lambda req, message: ended.append((req.rank, message)))

    def commits(world: World) -> bool:
        rank, receiving, req = world.manager.ranks.rank, world.requests.receiving, request(1, 40)
        assert receiving is not None
        req.rank, req.finished = rank, lambda: bool(rank) and how == "has ended"
        if rank and how == "cannot":
            world.manager.transfer.restore_nothing = fails  # type: ignore
        decode_side.commit_transfer_to_req(lambda self, entry: None, queue_of(world), SimpleNamespace(req=req))
        began = 1 in world.manager.rows
        world.requests.leave(req, 1, counted=False)
        return began

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("none")

    assert pair.each(commits) == [True, False]
    other = [(1, "DiffKV: the request cannot begin: none")] if how == "cannot" else []
    assert sorted(ended)[1:] == other
    reason = "the request cannot begin: it failed on another tensor-parallel rank; that rank's log has the reason"
    assert sorted(ended)[0][1].endswith(reason)
    traces = [bool(record.exc_info) for record in caplog.records if "cannot begin" in record.message]
    assert sorted(traces) == ([False, True] if how == "cannot" else [False]), "a rank that did nothing wrong traces it"
    pair.each(lambda world: world.requests.ranks_meet())
    for world in pair.members:
        assert not world.manager.rows and world.manager.counts.settled
        check(world.manager)


class Receiver(SimpleNamespace):
    """Of SGLang: what waits for a prompt."""

    def ensure_abort_notified(self, *, force_arm: bool) -> None:
        if self.bootstrap_infos is not None:
            self.abort_notified = force_arm


def failed(rank: int, tells: bool, now: float = 0.0) -> Any:
    """A request that has failed; whether this ``rank`` ``tells`` the prefill server."""
    acks: set[int] = set()
    manager = SimpleNamespace(
        enable_deferred_decode_kv_release=True, is_abort_release_safe=lambda room, count: len(acks) >= count
    )
    infos = [None] if tells else None
    receiver = Receiver(kv_mgr=manager, abort_notified=False, bootstrap_infos=infos, acks=acks)
    return SimpleNamespace(kv_receiver=receiver, req=SimpleNamespace(bootstrap_room=7), rank=rank)


@pytest.mark.skipif(not compat.installed().target("resolve_deferred_releases"), reason="this SGLang needs no help")
@pytest.mark.parametrize("tells", [(True, True), (True, False), (False, False)])
def test_what_a_failed_request_holds_is_given_up_on_all_ranks_at_once(tells: tuple[bool, bool]) -> None:
    """SGLang waits on each rank until its own prefill rank writes nothing any more, or for half a minute by its own
    clock. A rank that could tell nobody has nothing to wait for, and waits for the other."""
    pair = Pair(lambda ranks: (ranks, failed(ranks.rank, tells[ranks.rank]), queue_of(half(ranks=ranks))))
    pair.each(lambda one: disaggregation.drain_on_all_ranks([one[1]], one[0]))
    receivers = [entry.kv_receiver for _, entry, _ in pair.members]
    assert [x.abort_notified for x in receivers] == [any(tells)] * 2
    if not any(tells):
        return
    released: list[int] = []

    def original(queue: Any) -> None:
        released.extend(entry.rank for entry, deadline, _, _ in queue._deferred_releases if deadline < 1e12)
        queue._deferred_releases = []

    for _, entry, queue in pair.members:
        queue._deferred_releases = [(entry, 1e12, 3, len(entry.kv_receiver.bootstrap_infos))]

    def resolve() -> list[int]:
        pair.each(lambda one: decode_side.resolve_deferred_releases(original, one[2]))
        return [len(queue._deferred_releases) for _, _, queue in pair.members]

    assert resolve() == [1, 1] and not released
    receivers[1].acks.add(0)
    assert resolve() == [1, 1] and not released, "one rank gave up what the other still has"
    receivers[0].acks.add(0)
    assert resolve() == [0, 0] and sorted(released) == [0, 1]


@pytest.mark.parametrize("found", [True, False, ValueError("odd")], ids=str)
def test_polls_say_what_all_ranks_have_found(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has written on both. What one rank finds counts on both; other entries stay what they were."""
    known = disaggregation.transfer_states()
    reasons: list[str] = []
    manager = SimpleNamespace(
        record_failure=lambda room, reason: reasons.append(reason), enable_deferred_decode_kv_release=False
    )

    def polls(ranks: Ranks) -> list[Any]:
        world = half(ranks=ranks)
        receiver = Receiver(kv_mgr=manager, bootstrap_room=7, abort_notified=False)
        entries = [SimpleNamespace(req=request(None, 40), kv_receiver=receiver) for _ in range(3)]
        receiving = world.requests.receiving
        assert receiving is not None
        wanted = receiving.transfer.expect(40)
        assert wanted is not None
        receiving.imports[entries[1].req] = wanted
        head = SimpleNamespace(facts=[40], numbers=RowNumbers(*[np.zeros((1, 2), dtype=np.int64)] * 6))
        good: Any = SimpleNamespace(done=lambda: True, result=lambda: SimpleNamespace(head=head))
        odd: Any = SimpleNamespace(done=lambda: found is not False, result=lambda: (_ for _ in ()).throw(found))
        wanted.reading = odd if ranks.rank and found is not True else good
        before = [known.Transferring, known.Success, known.Failed]
        return decode_side.poll_with_metadata_gate(lambda self: before, queue_of(world, *entries))

    monkeypatch.setattr(disaggregation, "name_of", lambda req: "one")
    state = {True: known.Success, False: known.Transferring}.get(found, known.Failed)
    assert Pair(lambda ranks: ranks).each(polls) == [[known.Transferring, state, known.Failed]] * 2
    assert len(reasons) == (2 if state == known.Failed else 0)
