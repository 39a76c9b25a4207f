"""Rows of prompts that another server goes on with, on their way out."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from sglang_diffkv.mem_pool.host_pages import Run
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.row_transfer import RowExport
from sglang_diffkv.srt.scheduling.errors import FATAL
from sglang_diffkv.srt.versions import compat, disaggregation

logger = logging.getLogger(__name__)


def block_numbers(blocks: list[Run]) -> np.ndarray:
    """Blocks of runs, in order, [n] int32, as SGLang's senders and receivers take indices of pages."""
    return np.concatenate([np.arange(start, start + count) for start, count in blocks]).astype(np.int32)


class Sending:
    """Prompts whose rows are on their way out, by request."""

    def __init__(self, manager: PageManager):
        self.manager = manager
        self.exports: dict[Any, RowExport] = {}
        self._sent: set[Any] = set()  # of these requests, those whose rows SGLang's senders have

    def begin(self, req: Any) -> None:
        """The request's prompt has ended. Where the decode server has let go of it meanwhile SGLang's sender knows."""
        transfer, sender = self.manager.transfer, req.disagg_kv_sender
        assert transfer is not None
        named = sender.kv_mgr.transfer_infos.get(sender.bootstrap_room)
        if not named:
            return
        # Another thread writes there.
        wanted = [x for x in list(named.values()) if not x.is_dummy]
        most = min((len(x.dst_kv_indices) for x in wanted), default=0)
        has = min((int(x.decode_prefix_len or 0) for x in wanted), default=0)
        try:
            self.exports[req] = transfer.export(compat.allocated_row_of(req), sender.bootstrap_room, most, has)
        except FATAL:
            raise
        except Exception as error:
            logger.exception("DiffKV: the prompt of request %s cannot be sent", req.rid)
            self._fail(req, str(error))

    def advance(self) -> None:
        """Send the rows that are whole by now."""
        transfer = self.manager.transfer
        assert transfer is not None
        for req, export in list(self.exports.items()):
            if req in self._sent:
                continue
            try:
                if transfer.advance(export) and not export.problem:
                    self._send(req, export)
            except FATAL:
                raise
            except Exception as error:
                logger.exception("DiffKV: the prompt of request %s cannot be sent", req.rid)
                export.problem = str(error)
            if export.problem:
                self._fail(req, export.problem)

    def _send(self, req: Any, export: RowExport) -> None:
        """The request's row is whole."""
        sender, blocks = req.disagg_kv_sender, block_numbers(export.blocks)
        sender.num_kv_indices = len(blocks)  # of those that the decode server has named, the first ones
        sender.send(blocks, None, num_kv_tokens=self.manager.rows.length(export.row))
        self._sent.add(req)

    def _fail(self, req: Any, problem: str) -> None:
        """The request's row cannot go: both servers end it."""
        self.tell_failed(req, f"DiffKV cannot send the prompt of request {req.rid}: {problem}")
        self.left(req)

    def tell_failed(self, req: Any, reason: str) -> None:
        """The decode server hears that the request's prompt does not come. SGLang's sender would end without a word."""
        sender = getattr(req, "disagg_kv_sender", None)
        if sender is not None and not disaggregation.is_own_request(req):
            disaggregation.conclude_failure(sender, reason)

    def left(self, req: Any) -> None:
        """The request gives up its row: SGLang's sender has concluded."""
        export = self.exports.pop(req, None)
        if export is not None and self.manager.transfer is not None:
            well = req in self._sent and compat.has_finished_well(req)
            self.manager.transfer.finish(export, well=well)
        self._sent.discard(req)
