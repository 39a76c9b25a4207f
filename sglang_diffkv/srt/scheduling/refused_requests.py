"""What becomes of requests that a batch cannot be prepared for: they end with an error, by name, and the others go on.

Admission makes sure of pages, table blocks and KV slots, so none of this should ever happen; if it does nevertheless,
it must not end the scheduler.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_diffkv.srt.scheduling.lifecycle import BatchRefused, RequestLifecycle
from sglang_diffkv.srt.versions import compat

logger = logging.getLogger(__name__)


def undo_prefill(scheduler: Any, refused: BatchRefused) -> None:
    """Release all requests of the batch, none of which has run in it; those that are no cause are first in the queue
    again."""
    batch, requests = refused.batch, scheduler.token_to_kv_pool_allocator.requests
    requests.manager.cancel_step()
    if scheduler.chunked_req in batch.reqs:
        scheduler.chunked_req = None
    again = []
    for index, req in enumerate(batch.reqs):
        requests.ledger.forget(req)
        if req in refused.causes:
            _refuse(batch, index, requests, refused.reason)
        else:
            compat.release_request(batch, index)
            again.append(req)
    scheduler.waiting_queue = [*again, *scheduler.waiting_queue]


def refuse_in_decode(batch: Any, requests: RequestLifecycle) -> None:
    """Take the requests out of a batch whose next token has no table block or no KV slot."""
    found = requests.without_room(batch.reqs)
    if not found:
        return
    kept = [index for index in range(len(batch.reqs)) if index not in found]
    for index, reason in found.items():
        _refuse(batch, index, requests, reason)
    batch.filter_batch(keep_indices=kept)


def _refuse(batch: Any, index: int, requests: RequestLifecycle, reason: str) -> None:
    req = batch.reqs[index]
    message = f"DiffKV: request {req.rid} has no room in its batch: {reason}. Retry it, or give the server more memory."
    logger.error("%s", message)
    compat.release_request(batch, index)
    compat.finish_with_error(req, message)
    requests.refused.append(req)


def tell_refused(scheduler: Any, requests: RequestLifecycle) -> None:
    """The clients of requests that were taken out of a batch hear of it."""
    while requests.refused:
        compat.send_abort(scheduler, requests.refused.pop())
