"""A server that computes prompts for others (SGLang's ``--disaggregation-mode prefill``): when a prompt has ended, its
row is sent as it is compressed, and not its tokens by KV slot.

What the decode server's prefix cache has of it stays here: the row there reads that server's bytes, as after any hit.
What lies behind was computed with this server's bytes. Those of a reply differ, and so may the row from one server's.

SGLang's queues, senders and polls stay. A prompt's sender waits for its input until the row's object is whole in the
blocks that the transfer engine reads (``mem_pool/row_transfer.py``). Then the blocks that it fills go to the first ones
that the decode server has named for this rank: all, or its part of them if that server has fewer ranks.

A prompt that does not come is told to the decode server at once, whoever gave it up and when.
"""

from __future__ import annotations

from typing import Any

from sglang_diffkv.srt.scheduling.allocator import requests_of
from sglang_diffkv.srt.scheduling.refused_requests import tell_refused
from sglang_diffkv.srt.scheduling.sending import WRITTEN_SECONDS, Rooms
from sglang_diffkv.srt.versions import compat, disaggregation


def send_kv_chunk(original: Any, self: Any, req: Any, last_chunk: bool = False, end_idx: int | None = None) -> None:
    """A prompt's chunk could be sent: only its end is, as nothing before is final. Requests of SGLang's own, by which a
    server is warmed up, send nothing."""
    requests = requests_of(self)
    if requests is None or requests.sending is None or disaggregation.is_own_request(req):
        return original(self, req, last_chunk=last_chunk, end_idx=end_idx)
    if last_chunk:
        self.disagg_metadata_buffers.set_buf(req)
        requests.sending.begin(req)
        disaggregation.nothing_pends(self, req)
    return None


def maybe_send_cached_prefix_chunk(original: Any, self: Any, req: Any, **kwargs: Any) -> None:
    """A cached prefix is sent with the row that reads it, not before."""
    if requests_of(self) is None:
        original(self, req, **kwargs)


def process_disagg_prefill_inflight_queue(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Before SGLang asks how far its senders are: give them what is whole."""
    requests = requests_of(self)
    if requests is not None and requests.sending is not None:
        requests.sending.advance()
        _rooms(self.disagg_prefill_bootstrap_queue.kv_manager).tell()
    return original(self, *args, **kwargs)


def get_next_disagg_prefill_batch_to_run(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``get_next_batch_to_run``, which a server that does all calls."""
    requests = requests_of(self)
    if requests is None:
        return original(self, *args, **kwargs)
    requests.ranks_meet()
    requests.scheduling_begins(self.waiting_queue)
    plan = original(self, *args, **kwargs)
    for req in requests.refused:
        if requests.sending is not None:
            requests.sending.tell_failed(req, compat.reason_of_end(req))
        disaggregation.release_waiting(self, req)
    tell_refused(self, requests)
    if plan is not None and plan.batch_to_run is None:
        requests.ranks_meet()
    return plan


# Prompts that do not come


def prefill_exceeds(original: Any, self: Any, req: Any) -> bool:
    """A request comes whose prompt another server waits for."""
    if original(self, req):
        return True
    requests, room = requests_of(self.scheduler), req.bootstrap_room
    if requests is None or disaggregation.is_own_request(req):
        return False
    if not (disaggregation.can_be_room(room) and _rooms(self.kv_manager).begins(room, requests.manager.ranks)):
        disaggregation.refuse_room(self.scheduler, req)
        return True
    return False


def abort_sender(original: Any, self: Any) -> None:
    """SGLang tells nobody of it."""
    if not disaggregation.speaks_of_rows(self.kv_mgr.kv_cache_dtype_str):
        original(self)
        return
    after = WRITTEN_SECONDS if disaggregation.is_being_written(self) else 0.0
    original(self)
    _rooms(self.kv_mgr).give_up(self.bootstrap_room, after)


def abort_request(original: Any, self: Any, recv_req: Any) -> None:
    """0.5.17 aborts a request that waits for its pass, and not its sender."""
    waiting = list(self.waiting_queue)
    original(self, recv_req)
    if requests_of(self) is None:
        return
    for req in {*waiting}.difference(self.waiting_queue):
        if (sender := getattr(req, "disagg_kv_sender", None)) is not None and not disaggregation.is_own_request(req):
            sender.abort()


def clear_sender(original: Any, self: Any) -> None:
    """SGLang forgets a request that has ended, and with it who waits for its prompt."""
    if not disaggregation.speaks_of_rows(self.kv_mgr.kv_cache_dtype_str):
        original(self)
        return
    failed = disaggregation.has_failed(self)
    named = self.kv_mgr.transfer_infos.pop(self.bootstrap_room, None)
    original(self)
    _rooms(self.kv_mgr).cleared(self.bootstrap_room, named, failed=failed)


def _rooms(manager: Any) -> Rooms:
    """Of SGLang's manager of the senders."""
    found: Rooms = manager.__dict__.setdefault("diffkv_rooms", Rooms(manager))
    return found


HOOKS = (
    prefill_exceeds,
    abort_sender,
    abort_request,
    clear_sender,
    send_kv_chunk,
    maybe_send_cached_prefix_chunk,
    process_disagg_prefill_inflight_queue,
    get_next_disagg_prefill_batch_to_run,
)
