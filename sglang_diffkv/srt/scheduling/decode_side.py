"""A server that generates from prompts which others have computed (SGLang's ``--disaggregation-mode decode``): it takes
a prompt's row, as it was compressed there, and goes on with it.

SGLang's queues, receivers and polls stay. When SGLang sets KV slots aside for a prompt, pages are promised, and the
transfer engine gets blocks of host memory for the row's object. When the engine says that all has come, a thread checks
it. Only then SGLang hears of it, and the row is made behind what is launched.

Of several ranks each gets its heads from the same rank of the other server, or from as many ranks as have them there.
SGLang reduces its polls over ranks; what is found here is agreed on behind them.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_diffkv.layout.ranks import OtherRankError
from sglang_diffkv.srt.scheduling.allocator import requests_of
from sglang_diffkv.srt.scheduling.errors import FATAL
from sglang_diffkv.srt.scheduling.receiving import NEVER, Receiving
from sglang_diffkv.srt.scheduling.refused_requests import tell_refused
from sglang_diffkv.srt.scheduling.sending import block_numbers
from sglang_diffkv.srt.versions import disaggregation

logger = logging.getLogger(__name__)

# Room


def required_admission_tokens(original: Any, self: Any, req: Any, *args: Any, **kwargs: Any) -> int:
    """What a prompt needs of the pool before SGLang sets KV slots aside for it: more than there is while pages, table
    blocks or the engine's blocks are short."""
    requests, found = requests_of(self), original(self, req, *args, **kwargs)
    receiving = None if requests is None else requests.receiving
    if receiving is None or receiving.has_room(req, disaggregation.parts_of(self, req)):
        return int(found)
    return NEVER


def allocatable_token_budgets(original: Any, self: Any, *args: Any, **kwargs: Any) -> int:
    """``required_admission_tokens`` of 0.5.17: SGLang asks how many tokens are free before each request, and none are
    while the next one has no room. It also asks so for retracted requests, which it does not count then."""
    requests, found = requests_of(self), int(original(self, *args, **kwargs))
    if requests is None or requests.receiving is None or not kwargs.get("count_retracted", True):
        return found
    req = disaggregation.next_expected(self)
    room = req is None or requests.receiving.has_room(req, disaggregation.parts_of(self, req))
    return found if room else -NEVER


def match_prefix_and_lock(original: Any, self: Any, req: Any) -> Any:
    """What the prefix cache has of a prompt, if there is one: it stays here, and does not come again."""
    requests = requests_of(self)
    if requests is None or requests.receiving is None:
        return original(self, req)
    req.diffkv_match_to = requests.receiving.matches_to(req)
    try:
        return original(self, req)
    finally:
        req.diffkv_match_to = None


def pop_preallocated(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Prompts get room, in their order. One that finds none in a server that does nothing else would wait for ever."""
    found, requests = original(self, *args, **kwargs), requests_of(self)
    if requests is None or requests.receiving is None:
        return found
    if (req := disaggregation.next_expected(self)) is not None:
        requests.receiving.does_not_fit(req)
    return found


def prealloc_required_tokens(original: Any, self: Any, req: Any) -> tuple[int, int]:
    """What a retracted request needs to come back: what its pages take, and not what its tokens do. More than there is
    while KV slots for its tokens are short."""
    requests, (tokens, of_windows) = requests_of(self), original(self, req)
    back = None if requests is None or requests.receiving is None else requests.receiving.tokens_back(req)
    return tokens if back is None else max(back + self.num_reserved_decode_tokens, 1), of_windows


def pre_alloc(original: Any, self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """A prompt gets its KV slots, and with them what its row will need. So does a retracted request."""
    found, requests = original(self, req, *args, **kwargs), requests_of(self)
    if requests is None or requests.receiving is None:
        return found
    if disaggregation.was_kept(req):
        requests.receiving.comes_back(req, disaggregation.kept_of(req))
    else:
        requests.receiving.expect(req, disaggregation.parts_of(self, req))
        disaggregation.expects_blocks(self, requests.receiving.imports)
    return found


def transfer_page_indices(original: Any, self: Any, decode_req: Any, *args: Any, **kwargs: Any) -> Any:
    """Where the prefill server is to send a prompt: to blocks, and not to KV slots."""
    requests = requests_of(self)
    wanted = None if requests is None or requests.receiving is None else requests.receiving.imports.get(decode_req.req)
    return original(self, decode_req, *args, **kwargs) if wanted is None else block_numbers(wanted.blocks)


def send_metadata(original: Any, self: Any, kv_indices: Any, *args: Any, **kwargs: Any) -> Any:
    """``transfer_page_indices`` of 0.5.17."""
    blocks = disaggregation.expected_blocks(self)
    return original(self, kv_indices if blocks is None else block_numbers(blocks), *args, **kwargs)


def decode_exceeds(original: Any, self: Any, req: Any) -> bool:
    """A request comes. It may be one that was retracted, which waits for nobody."""
    if original(self, req):
        return True
    again = req.output_ids or getattr(req, "pd_rebootstrap_in_progress", False)
    if requests_of(self) is None or again or disaggregation.is_own_request(req):
        return False
    room = req.bootstrap_room
    if not disaggregation.can_be_room(room) or disaggregation.waits_for(self, room):
        disaggregation.refuse_room(self.scheduler, req)
        return True
    return False


# Arrival


def poll_with_metadata_gate(original: Any, self: Any) -> list[int]:
    """What has come counts as still on its way until it was checked. What is refused has failed."""
    polls, requests = list(original(self)), requests_of(self.scheduler)
    if requests is None or requests.receiving is None:
        return polls
    known = disaggregation.transfer_states()
    come = [index for index in range(len(polls)) if polls[index] == known.Success]
    found = requests.receiving.arrived([self.queue[index].req for index in come])
    for index, checked in zip(come, found, strict=True):
        polls[index] = known.Success if checked is True else known.Transferring
        if isinstance(checked, Exception):
            receiver = self.queue[index].kv_receiver
            receiver.kv_mgr.record_failure(receiver.bootstrap_room, f"DiffKV refuses what has come: {checked}")
            polls[index] = known.Failed
    failed = [self.queue[index] for index in range(len(polls)) if polls[index] == known.Failed]
    disaggregation.drain_on_all_ranks(failed, requests.manager.ranks)
    return polls


def resolve_deferred_releases(original: Any, self: Any) -> None:
    """Requests that failed give up what they hold once no prefill rank writes to it any more, or has had its time: on
    all ranks at once."""
    requests = requests_of(self.scheduler)
    if requests is None or requests.manager.ranks.alone:
        original(self)
    else:
        disaggregation.resolve_on_all_ranks(original, self, requests.manager.ranks)


def commit_transfer_to_req(original: Any, self: Any, decode_req: Any) -> None:
    """A prompt has come, and SGLang has taken its first token: its row is made."""
    original(self, decode_req)
    req, requests = decode_req.req, requests_of(self.scheduler)
    if requests is None or requests.receiving is None:
        return
    try:
        requests.receiving.begin(req)
    except FATAL:
        raise
    except Exception as error:
        if req.finished():
            return
        trace = not isinstance(error, OtherRankError)
        logger.error("DiffKV: request %s cannot begin: %s", req.rid, error, exc_info=trace)
        disaggregation.prepare_abort(req, f"DiffKV: the request cannot begin: {error}")


def get_next_disagg_decode_batch_to_run(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``get_next_batch_to_run``, which a server that does all calls."""
    requests = requests_of(self)
    if requests is None:
        return original(self, *args, **kwargs)
    requests.ranks_meet()
    requests.scheduling_begins(self.waiting_queue)
    plan = original(self, *args, **kwargs)
    tell_refused(self, requests)
    if plan.batch_to_run is None:
        requests.ranks_meet()
    return plan


# Retraction


def offload_kv_cache(original: Any, self: Any, req_to_token_pool: Any, token_to_kv_pool_allocator: Any) -> None:
    """A retracted request's row goes to host memory."""
    receiving = _receiving(token_to_kv_pool_allocator)
    if receiving is None:
        original(self, req_to_token_pool, token_to_kv_pool_allocator)
    else:
        disaggregation.keep_for(self, receiving.keep(self))


def load_kv_cache(original: Any, self: Any, req_to_token_pool: Any, token_to_kv_pool_allocator: Any) -> None:
    """It comes back."""
    receiving = _receiving(token_to_kv_pool_allocator)
    if receiving is None:
        original(self, req_to_token_pool, token_to_kv_pool_allocator)
    else:
        receiving.bring_back(self, disaggregation.kept_of(self))
        disaggregation.has_come_back(self)


def _receiving(allocator: Any) -> Receiving | None:
    requests = getattr(allocator, "requests", None)
    return None if requests is None else requests.receiving


# The handshake


def try_ensure_parallel_info(original: Any, self: Any, bootstrap_addr: str) -> bool:
    """SGLang compares servers when they first meet, and would end this one where they differ: the requests of that
    prefill server end instead, and say in what."""
    told: dict[str, str] = self.__dict__.setdefault("diffkv_refused", {})
    speaks = disaggregation.speaks_of_rows(self.kv_cache_dtype_str)
    try:
        found = bool(original(self, bootstrap_addr))
        if found and speaks and disaggregation.tells_nothing(self, bootstrap_addr):
            raise RuntimeError("it does not tell what it stores: start it with --attention-backend diffkv")
        told.pop(bootstrap_addr, None)
        return found
    except Exception as error:
        if not speaks:
            raise
        disaggregation.forget_server(self, bootstrap_addr)
        text = str(error) or type(error).__name__
        told[bootstrap_addr] = disaggregation.how_servers_differ(text, self.kv_cache_dtype_str)
        logger.error("DiffKV: the prefill server at %s is refused: %s", bootstrap_addr, told[bootstrap_addr])
        return False


def resolve_rank_mapping(original: Any, self: Any, info: Any) -> None:
    """Who sends to whom, of ranks of two servers. SGLang would cut pages where a rank has other heads."""
    ours = self.kv_cache_dtype_str
    if disaggregation.speaks_of_rows(ours) and (why := disaggregation.how_ranks_differ(self, info, ours)):
        raise RuntimeError(why)
    original(self, info)


def ensure_prefill_info(original: Any, self: Any, addr_to_reqs: Any) -> Any:
    """Requests of a prefill server that was refused end at once."""
    ready, remaining = original(self, addr_to_reqs)
    told: dict[str, str] = getattr(self.kv_manager, "diffkv_refused", {})
    waiting = []
    for decode_req in remaining:
        reason, receiver = told.get(disaggregation.bootstrap_address(decode_req.req)), decode_req.kv_receiver
        if reason is None:
            waiting.append(decode_req)
        elif receiver is not None:
            receiver.abort()
            receiver.kv_mgr.record_failure(receiver.bootstrap_room, f"DiffKV refuses the prefill server: {reason}")
    return ready, waiting


def on_heartbeat_success(original: Any, self: Any, bootstrap_addr: str) -> None:
    """A prefill server is there. One that has died and is back, sooner than SGLang counts it as lost, knows nothing of
    what was asked before, and has other ports. Of the thread that looks after prefill servers."""
    original(self, bootstrap_addr)
    if not disaggregation.speaks_of_rows(self.kv_cache_dtype_str):
        return
    try:
        if disaggregation.is_another_server(self, bootstrap_addr):
            logger.warning("DiffKV: the prefill server at %s has started anew", bootstrap_addr)
            self._handle_node_failure(bootstrap_addr)
    except Exception as error:  # it is asked again
        logger.warning("DiffKV: the prefill server at %s does not say who it is: %s", bootstrap_addr, error)


HOOKS = (
    decode_exceeds,
    on_heartbeat_success,
    required_admission_tokens,
    allocatable_token_budgets,
    send_metadata,
    match_prefix_and_lock,
    pop_preallocated,
    prealloc_required_tokens,
    pre_alloc,
    transfer_page_indices,
    poll_with_metadata_gate,
    resolve_deferred_releases,
    commit_transfer_to_req,
    get_next_disagg_decode_batch_to_run,
    offload_kv_cache,
    load_kv_cache,
    try_ensure_parallel_info,
    resolve_rank_mapping,
    ensure_prefill_info,
)
