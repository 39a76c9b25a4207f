"""What becomes of requests that a batch cannot be prepared for: they end with an error, by name, and the others go on.

Admission makes sure of pages, table blocks and KV slots, so none of this should ever happen; if it does nevertheless,
it must not end the scheduler. Where SGLang raises an error, nobody says for which of a batch's requests. All of them
wait again, and each is prepared in a batch of its own: the one that raises the error there ends with it.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_diffkv.mem_pool.table_space import TableFull
from sglang_diffkv.srt.scheduling.lifecycle import BatchRefused, RequestLifecycle
from sglang_diffkv.srt.versions import compat, disaggregation

logger = logging.getLogger(__name__)


def undo_prefill(scheduler: Any, refused: BatchRefused) -> None:
    """Release all requests of the batch, none of which has run in it; those that are not the cause are first in the
    queue again."""
    batch, requests = refused.batch, scheduler.token_to_kv_pool_allocator.requests
    requests.manager.cancel_step()
    chunked = scheduler.chunked_req
    if chunked in batch.reqs:
        scheduler.chunked_req = None
    again = []
    for index, req in enumerate(batch.reqs):
        requests.ledger.forget(req)
        chunks = req.inflight_middle_chunks - (req is chunked)
        if req is refused.cause:
            _end(batch, index, requests, _why(req, refused.error), of_input=_is_of_input(refused.error))
        else:
            compat.put_back(batch, index)
            req.diffkv_apart = refused.cause is None
            again.append(req)
        disaggregation.await_chunks(scheduler, req, chunks)
    scheduler.waiting_queue = [*again, *scheduler.waiting_queue]


def _why(req: Any, error: Exception) -> str:
    if isinstance(error, TableFull):
        return _no_room(req, str(error))
    return f"DiffKV: request {req.rid} cannot be prepared: {type(error).__name__}: {error}"


def _no_room(req: Any, reason: str) -> str:
    return f"DiffKV: request {req.rid} has no room in its batch: {reason}. Retry it, or give the server more memory."


def _is_of_input(error: Exception) -> bool:
    """Whether an error is about what a client has sent. SGLang computes with it as it is, and Python raises these where
    a value or its type does not do."""
    return isinstance(error, ValueError | TypeError)


def refuse_in_decode(batch: Any, requests: RequestLifecycle) -> None:
    """Take the requests out of a batch whose next token has no table block or no KV slot."""
    found = requests.without_room(batch.reqs)
    if not found:
        return
    kept = [index for index in range(len(batch.reqs)) if index not in found]
    for index, reason in found.items():
        _end(batch, index, requests, _no_room(batch.reqs[index], reason))
    batch.filter_batch(keep_indices=kept)


def _end(batch: Any, index: int, requests: RequestLifecycle, message: str, *, of_input: bool = False) -> None:
    req = batch.reqs[index]
    logger.error("%s", message)
    compat.release_request(batch, index)
    compat.finish_with_error(req, message, of_input=of_input)
    requests.refused.append(req)


def tell_refused(scheduler: Any, requests: RequestLifecycle) -> None:
    """The clients of requests that were taken out of a batch hear of it."""
    while requests.refused:
        compat.send_abort(scheduler, requests.refused.pop())
