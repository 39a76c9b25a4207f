"""What becomes of requests that a batch cannot be prepared for: they end with an error, by name, and the others go on.

Admission makes sure of pages, table blocks and names, so none of this should ever happen; if it does nevertheless, it
must not end the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_diffkv.mem_pool.table_space import TableFull
from sglang_diffkv.srt import compat
from sglang_diffkv.srt.allocator import DiffKVAllocator

logger = logging.getLogger(__name__)

FATAL: tuple[type[Exception], ...] = tuple(
    x for x in (getattr(torch, "AcceleratorError", None), getattr(torch.cuda, "CudaError", None)) if x is not None
)
"""Errors after which the device is of no more use."""


class BatchRefused(RuntimeError):
    """A prefill batch cannot be prepared because of some of its requests."""

    def __init__(self, batch: Any, causes: list[Any], reason: str):
        super().__init__(reason)
        self.batch, self.causes, self.reason = batch, causes, reason


@contextmanager
def refusing_batch(batch: Any, req: Any = None) -> Iterator[None]:
    """An error inside becomes BatchRefused: because of ``req``, of the request whose row has no table blocks, or, where
    neither is known, of all. With several ranks only an error that all of them meet may, or they would part."""
    alone = batch.token_to_kv_pool_allocator.ledger.manager.ranks.alone
    try:
        yield
    except FATAL:
        raise
    except Exception as error:
        if not alone and isinstance(error, torch.OutOfMemoryError):
            raise
        logger.exception("DiffKV: a prefill batch cannot be prepared")
        causes = [req] if req is not None else list(batch.reqs)
        if req is None and isinstance(error, TableFull):
            causes = [x for x in batch.reqs if compat.row_of(x) == error.row] or causes
        raise BatchRefused(batch, causes, str(error)) from error


def undo_prefill(scheduler: Any, refused: BatchRefused) -> None:
    """Release all requests of the batch, none of which has run in it; those that are no cause are first in the queue
    again."""
    batch = refused.batch
    ledger = scheduler.token_to_kv_pool_allocator.ledger
    ledger.manager.cancel_step()
    if scheduler.chunked_req in batch.reqs:
        scheduler.chunked_req = None
    again = []
    for index, req in enumerate(batch.reqs):
        ledger.forget(req.rid)
        if req in refused.causes:
            _refuse(batch, index, refused.reason)
        else:
            compat.release_request(batch, index)
            again.append(req)
    scheduler.waiting_queue = [*again, *scheduler.waiting_queue]


def refuse_in_decode(batch: Any) -> None:
    """Take the requests out of a batch whose next token has no table block or no name."""
    allocator = batch.token_to_kv_pool_allocator
    rows = {compat.allocated_row_of(req): index for index, req in enumerate(batch.reqs)}
    found = allocator.ledger.manager.space.refused(list(rows), 1)
    short = len(rows) - len(found) - allocator.names_free()
    if short > 0:
        if allocator.tree_cache is not None:
            allocator.tree_cache.evict_names(len(rows) - len(found))
        short = len(rows) - len(found) - allocator.names_free()
        found.update(dict.fromkeys([row for row in rows if row not in found][-short:], "no name is free"))
    if not found:
        return
    for row, reason in found.items():
        _refuse(batch, rows[row], reason)
    batch.filter_batch(keep_indices=[index for row, index in rows.items() if row not in found])


def _refuse(batch: Any, index: int, reason: str) -> None:
    req = batch.reqs[index]
    message = f"DiffKV: request {req.rid} has no room in its batch: {reason}. Retry it, or give the server more memory."
    logger.error("%s", message)
    compat.release_request(batch, index)
    compat.finish_with_error(req, message)
    batch.token_to_kv_pool_allocator.refused.append(req)


def tell_refused(scheduler: Any, allocator: DiffKVAllocator) -> None:
    """The clients of requests that were taken out of a batch hear of it."""
    while allocator.refused:
        compat.send_abort(scheduler, allocator.refused.pop())
