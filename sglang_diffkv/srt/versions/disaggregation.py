"""SGLang's queues of prompts that are computed on one server and go on on another, as far as they differ or are named
by release. Only releases whose row says so have them with diffkv (``Release.disaggregation``)."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import defaultdict
from typing import Any

import numpy as np

from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.releases import seen_on_gpu
from sglang_diffkv.srt.versions.compat import installed, kv_of, row_of, sglang_version, untried_on_a_gpu

logger = logging.getLogger(__name__)


def is_own_request(req: Any) -> bool:
    """Whether SGLang made the request itself, to warm a server up: it meets no other server."""
    from sglang.srt.disaggregation import utils

    if req.bootstrap_host == utils.FAKE_BOOTSTRAP_HOST:
        return True
    return installed().transfer_reasons and bool(utils._is_fake_transfer(req))


def transfer_states() -> Any:
    """SGLang's states of a sender or a receiver, by name."""
    from sglang.srt.disaggregation.base import KVPoll

    return KVPoll


def prepare_abort(req: Any, message: str) -> None:
    """End a request that does not run yet with an error that its client sees."""
    from http import HTTPStatus

    from sglang.srt.disaggregation import utils

    utils.prepare_abort(req, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)


MOST_ROOM = (1 << 63) - 1
"""SGLang keeps a request's number as int64, and takes 0 for none."""


def can_be_room(room: Any) -> bool:
    """Whether SGLang's queues can tell a request by this number, which its client has chosen."""
    return type(room) is int and 0 < room <= MOST_ROOM


def refuse_room(scheduler: Any, req: Any) -> None:
    """End a request whose number is none, or that of another one."""
    from http import HTTPStatus

    from sglang.srt.disaggregation import utils

    message = (
        f"DiffKV: bootstrap_room {req.bootstrap_room} is another request's, or was, or is no number from 1 to "
        f"{MOST_ROOM}: give each request one of its own, and ask for one sample at a time (n)"
    )
    logger.warning("DiffKV: request %s is refused for its bootstrap_room", req.rid)
    utils.prepare_abort(req, message, status_code=HTTPStatus.BAD_REQUEST)
    scheduler.output_streamer.stream_output([req], req.return_logprob)


def waits_for(queue: Any, room: int) -> bool:
    """Whether a request of a decode server waits for the prompt of a room, or for the end of what was sent of it.
    ``queue``: SGLang's ``DecodePreallocQueue``."""
    coming = queue.transfer_queue
    ended = [entry[0] for entry in getattr(coming, "_deferred_releases", ())]
    return any(entry.req.bootstrap_room == room for entry in [*queue.queue, *coming.queue, *ended])


def _prompt_that_goes(req: Any) -> tuple[Any, ...]:
    """Token ids of a prompt that another server computes; after a pause for new weights generated ones too."""
    again = getattr(req, "pd_rebootstrap_in_progress", False)
    return (req.origin_input_ids, req.output_ids) if again else (req.origin_input_ids,)


def expected_tokens(req: Any) -> int:
    """Tokens of a prompt that another server computes."""
    return sum(map(len, _prompt_that_goes(req)))


def name_of(req: Any) -> str:
    """What both servers call a request: by its number, which its client has chosen and another request may have, and a
    digest of the tokens of the prompt that goes."""
    running = hashlib.blake2b(digest_size=16)
    for ids in _prompt_that_goes(req):
        running.update(np.asarray(ids, dtype="<i8").tobytes())
    return f"{req.bootstrap_room} {running.hexdigest()}"


def was_kept(req: Any) -> bool:
    """Whether something was left with a retracted request."""
    return kept_of(req) is not None


def kept_of(req: Any) -> Any:
    """What ``keep_for`` left with a retracted request; None if there is nothing."""
    if not installed().transfer_reasons:
        return getattr(req, "kv_cache_cpu", None)
    backup = kv_of(req).retraction_backup
    return None if backup is None else backup.cpu_tensors


def keep_for(req: Any, kept: Any) -> None:
    """Leave with a retracted request what it will be made of again; SGLang drops it if the request ends."""
    if not installed().transfer_reasons:
        req.kv_cache_cpu = kept
        return
    from sglang.srt.managers.schedule_batch import RetractionBackup

    kv_of(req).retraction_backup = RetractionBackup(cpu_tensors=kept, mamba_cpu=None)


def has_come_back(req: Any) -> None:
    """The retracted request runs again."""
    if not installed().transfer_reasons:
        req.kv_cache_cpu = None
    else:
        kv_of(req).retraction_backup = None


# What 0.5.17 has no function for


def next_expected(queue: Any) -> Any:
    """The request that gets KV slots next, of ``queue``, SGLang's ``DecodePreallocQueue``; None if none waits.

    SGLang may ask before it sorts the queue by priority.
    """
    scheduler, waiting = queue.scheduler, queue.queue
    if scheduler.enable_priority_scheduling:
        sign = 1 if scheduler.schedule_low_priority_values_first else -1
        waiting = sorted(waiting, key=lambda decode_req: decode_req.req.priority * sign)
    for decode_req in waiting:
        req = decode_req.req
        if decode_req.waiting_for_input and row_of(req) is None and not req.finished():
            return req
    return None


def expects_blocks(queue: Any, imports: Any) -> None:
    """Tell SGLang's manager where rows are to go, for ``expected_blocks``. ``imports``: of ``Receiving``."""
    if not installed().transfer_reasons:
        queue.kv_manager.diffkv_imports = imports


def expected_blocks(receiver: Any) -> Any:
    """Where the row of a ``receiver`` is to go, of the request that was expected last; None if it gets none."""
    imports, room = getattr(receiver.kv_mgr, "diffkv_imports", {}), receiver.bootstrap_room
    return next((wanted.blocks for req, wanted in reversed(imports.items()) if req.bootstrap_room == room), None)


def nothing_pends(scheduler: Any, req: Any) -> None:
    """No chunk of the request's prompt waits to be sent."""
    if installed().transfer_reasons:
        scheduler.disagg_prefill_pending_chunk_rids.discard(req.rid)


def await_chunks(scheduler: Any, req: Any, chunks: int) -> None:
    """A request was released while the results of so many of its prompt's ``chunks`` are on their way. A prefill server
    takes the results of a request that awaits none for those of its whole prompt."""
    if scheduler.disaggregation_mode.value == "prefill":
        req.inflight_middle_chunks = chunks


def conclude_failure(sender: Any, reason: str) -> None:
    """Both servers end the request of a ``sender``. 0.5.17 cannot tell the decode server why."""
    manager, room = sender.kv_mgr, sender.bootstrap_room
    if installed().transfer_reasons:
        manager.conclude_failure(bootstrap_room=room, failure_reason=reason)
        return
    manager.record_failure(room, reason)
    manager.update_status(room, transfer_states().Failed)
    tell_failed(manager, room, list((manager.transfer_infos.get(room) or {}).values()))


def tell_failed(manager: Any, room: int, wanted: list[Any]) -> None:
    """Decode servers hear that the prompt of a room does not come. ``wanted``: what they have said of it."""
    failed = transfer_states().Failed
    if installed().transfer_reasons:
        targets = list({(x.endpoint, x.dst_port): None for x in wanted})
        manager.send_kv_status_message(targets=targets, bootstrap_room=room, status=failed, failure_reason=GIVEN_UP)
        return
    rank = manager.attn_tp_rank * manager.pp_size * manager.attn_cp_size
    rank += manager.pp_rank * manager.attn_cp_size + manager.attn_cp_rank
    for where_to in wanted:
        try:
            manager.sync_status_to_decode_endpoint(where_to.endpoint, where_to.dst_port, room, failed, rank)
        except Exception as error:  # an address that no socket takes, as a decode server gave it
            where = f"{where_to.endpoint}:{where_to.dst_port}"
            logger.warning("DiffKV: the decode server at %s is not told of a failure: %s", where, error)


GIVEN_UP = "the prefill server has given the request up"


def ranks_of(manager: Any, wanted: list[Any]) -> list[int]:
    """How many ranks decode servers have. ``wanted``: what they have said of a prompt. ``manager``: SGLang's of the
    senders."""
    table = getattr(manager, "decode_kv_args_table", {})
    known = [table.get(getattr(x, "mooncake_session_id", None)) for x in wanted]
    return [int(x.dst_attn_tp_size) for x in known if x is not None]


def parts_of(queue: Any, req: Any) -> int:
    """How many ranks of the prefill server send each rank here their part of a request's row; 1 while it has met none.
    ``queue``: SGLang's ``DecodePreallocQueue``. All ranks find the same: a request waits for room once all have met
    the server."""
    table = getattr(getattr(queue, "kv_manager", None), "required_prefill_response_num_table", {})
    return int(table.get(req.bootstrap_room) or 1)


def send_whole_blocks(manager: Any) -> None:
    """To a server with fewer ranks a prefill server's ``manager`` would send heads, cut out of each block. Blocks of
    rows are of one rank's heads, and go as they are. Its module is not one to hook: it imports what SGLang imports once
    it knows where metrics go."""
    if not hasattr(manager, "transfer_infos"):
        return

    def send_kvcache_slice(
        mooncake_session_id: str,
        prefill_kv_indices: Any,
        dst_kv_ptrs: Any,
        dst_kv_indices: Any,
        dst_tp_rank: int,
        dst_attn_tp_size: int,
        dst_kv_item_len: int,
        executor: Any,
        dst_layer_ids: Any = None,
    ) -> Any:
        layers = manager.decode_kv_args_table[mooncake_session_id].dst_kv_layer_ids  # 0.5.17 does not give them
        return manager.send_kvcache(
            mooncake_session_id, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, executor, dst_layer_ids=layers
        )

    manager.send_kvcache_slice = send_kvcache_slice


def drain_on_all_ranks(failed: list[Any], ranks: Ranks) -> None:
    """Of requests that have ``failed`` on a decode server SGLang keeps what they hold until the prefill server writes
    nothing any more, where that was told of it. Ranks keep it or not together. All of them have to call it. 0.5.17
    keeps nothing, and ranks of 0.5.23 agree by themselves."""
    if ranks.alone or not failed or not installed().target("resolve_deferred_releases"):
        return
    receivers = [decode_req.kv_receiver for decode_req in failed]
    for receiver in receivers:
        if receiver.kv_mgr.enable_deferred_decode_kv_release:
            receiver.ensure_abort_notified(force_arm=True)
    told = ranks.largest(np.array([receiver.abort_notified for receiver in receivers], dtype=np.int64))
    for receiver, anywhere in zip(receivers, told.tolist(), strict=True):
        if anywhere and not receiver.abort_notified:  # nobody writes for this rank
            receiver.abort_notified, receiver.bootstrap_infos = True, []


def resolve_on_all_ranks(original: Any, queue: Any, ranks: Ranks) -> None:
    """What failed requests hold is given up where that may be, on all ranks. ``original``: SGLang's function, by which
    each rank gives it up in a time of its own."""
    entries, now = queue._deferred_releases, time.monotonic()
    if not entries:
        return
    safe = []
    for req, *_, deadline, _, acks in entries:
        drained = req.kv_receiver.kv_mgr.is_abort_release_safe(req.req.bootstrap_room, acks)
        safe.append(drained or now >= deadline)
    agreed = ranks.least(np.array(safe, dtype=np.int64)).tolist()
    queue._deferred_releases = [(*x[:-3], now, *x[-2:]) for ok, x in zip(agreed, entries, strict=True) if ok]
    original(queue)
    queue._deferred_releases += [entry for ok, entry in zip(agreed, entries, strict=True) if not ok]


def has_failed(sender: Any) -> bool:
    """Whether the ``sender`` has ended without sending."""
    failed = transfer_states().Failed
    return failed in (sender.conclude_state, sender.kv_mgr.request_status.get(sender.bootstrap_room))


def forget_room(manager: Any, room: int) -> None:
    """Drop what a prefill server knows of a room that no sender has any more, and what decode servers have said of it
    since: SGLang would take that for a new request."""
    for known in ("request_status", "transfer_infos", "failure_records", "req_to_decode_prefix_len"):
        getattr(manager, known).pop(room, None)


def is_being_written(sender: Any) -> bool:
    """Whether the engine may write for the ``sender``, on a release whose engine does not look whether it was aborted
    meanwhile."""
    status = sender.kv_mgr.request_status.get(sender.bootstrap_room)
    return not installed().transfer_reasons and status == transfer_states().Transferring


def keep_rooms_apart(manager: Any) -> None:
    """A prefill server's thread writes down who asks for a room in two steps. In between the scheduler may drop it."""
    if hasattr(manager, "transfer_infos"):
        manager.transfer_infos = defaultdict(dict, manager.transfer_infos)


def keep_device(manager: Any, device: Any) -> None:
    """SGLang's ``manager`` knows where rows are, for ``how_ranks_differ``."""
    manager.diffkv_device = device


def release_waiting(scheduler: Any, req: Any) -> None:
    """A prefill server gives up a request that waits: its row, its place in SGLang's metadata, its sender."""
    if installed().transfer_reasons:
        scheduler.release_aborted_prefill_waiting_req(req)
        return
    from sglang.srt.disaggregation.prefill import maybe_release_metadata_buffer
    from sglang.srt.mem_cache.common import release_kv_cache

    sender = getattr(req, "disagg_kv_sender", None)
    if sender is not None and hasattr(sender, "abort"):
        sender.abort()
    maybe_release_metadata_buffer(req, scheduler.req_to_metadata_buffer_idx_allocator)
    if row_of(req) is not None:
        release_kv_cache(req, scheduler.tree_cache, is_insert=False)
    req.pending_bootstrap = False


def bootstrap_address(req: Any) -> str:
    """Where the request's prefill server tells of itself."""
    from sglang.srt.disaggregation.decode import _bootstrap_addr

    return str(_bootstrap_addr(req))


def is_another_server(manager: Any, address: str) -> bool:
    """Whether the prefill server at an address is not the one that SGLang's ``manager`` has met there. Raises what
    stands in the way of asking it."""
    import requests

    with manager.connection_lock:
        known = [(key, infos[0]) for key, infos in manager.connection_pool.items() if infos]
    for key, info in known:
        server, dp_rank, cp_rank, tp_rank = key.rsplit("_", 3)
        if server != address:
            continue
        ranks = {"prefill_dp_rank": dp_rank, "prefill_cp_rank": cp_rank, "target_tp_rank": tp_rank}
        ranks["target_pp_rank"] = str(info.get("pp_rank", 0))
        found = requests.get(f"http://{address}/route", params=ranks, timeout=ASKED_SECONDS)
        if found.status_code in (404, 503):  # not all of its ranks are there yet
            return True
        found.raise_for_status()
        there = found.json()
        return any(there[name] != info[name] for name in ("rank_ip", "rank_port"))
    return False


ASKED_SECONDS = 3.0
"""For which a prefill server is waited for."""


# The handshake: SGLang compares a text of both servers, its name of the dtype of the KV cache

MARK = "diffkv"
MOST_TOLD = 64 << 10
"""Characters of such a text, at most: it comes from whoever answers."""


def told_of_rows(facts: dict[str, Any]) -> str:
    """The text of a server whose rows these are the facts of."""
    return json.dumps({MARK: facts}, sort_keys=True, separators=(",", ":"))


def speaks_of_rows(text: str) -> bool:
    """Whether a text is one of those."""
    return _facts(text) is not None


def how_ranks_differ(manager: Any, info: Any, ours: str) -> str:
    """Why the ranks of a prefill server, of which ``info`` is told, cannot send to those of this one; empty if they
    can. ``manager``: SGLang's of the receivers, which ``keep_device`` was told of. ``ours``: this server's text."""
    there, here, heads = int(info.attn_tp_size), int(manager.attn_tp_size), (_facts(ours) or {}).get("kv_heads", 0)
    if there == here:
        return ""
    differ = f"--tp-size is {there} there and {here} here"
    if there < 1 or there % here:
        return f"{differ}: {ALIKE}"
    if not heads or heads % there:
        return f"{differ}, and each of {heads} KV heads is on several ranks there: {AS_MANY}"
    if sglang_version() in RANKS_GPU_VERSIONS:
        return ""
    return "; ".join(untried_on_a_gpu(manager.diffkv_device, differ, AS_MANY))


RANKS_GPU_VERSIONS = seen_on_gpu("two servers of several ranks")
"""Versions of SGLang with which requests went from two ranks to as many, and to one, on GPUs."""
AS_MANY = "start both with as many ranks"
ALIKE = f"{AS_MANY}, or the prefill server with a multiple of the decode server's"


def tells_nothing(manager: Any, address: str) -> bool:
    """Whether the prefill server at an address told no such text, by which SGLang compares nothing. ``manager``:
    SGLang's, which has met it."""
    return getattr(manager.prefill_info_table[address], "kv_cache_dtype", None) is None


def forget_server(manager: Any, address: str) -> None:
    """SGLang's ``manager`` has not met the prefill server at an address."""
    manager.prefill_info_table.pop(address, None)


def _facts(text: Any) -> dict[str, Any] | None:
    if not isinstance(text, str) or len(text) > MOST_TOLD:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found[MARK] if isinstance(found, dict) and isinstance(found.get(MARK), dict) else None


def how_servers_differ(error: str, ours: str) -> str:
    """What SGLang's error, which has both servers' texts, is about, in words: by name, with both values. ``ours``: this
    server's text."""
    theirs = error.partition("kv_cache_dtype=")[2].partition(", but decode server has")[0]
    if not theirs:
        return error[:MOST_SHOWN]
    there, here = _facts(theirs), _facts(ours)
    if there is None or here is None:
        return f"it stores its KV cache otherwise ({theirs[:80]}): start it with --attention-backend diffkv"
    names = sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
    differ = "; ".join(
        f"{_short(name)} is {_short(there.get(name))} there and {_short(here.get(name))} here" for name in names
    )
    own = any(name in names for name in OF_THEIR_OWN)
    return f"{differ[:MOST_SHOWN]}. Start both servers alike{MEASURED if own else ''}"


OF_THEIR_OWN = ("own_means", "own_shaping")
MEASURED = (
    ". Servers of other ranks or on other devices measure other means and matrices: give key_means a file, and leave "
    "noise_shaping out"
)
"""What to do if these differ."""


MOST_SHOWN = 4096
"""Characters of what another server told, in an error."""


def _short(value: Any) -> str:
    try:
        return str(value)[:200]
    except RecursionError:
        return "nested too deep"
