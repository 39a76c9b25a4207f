"""Rows of prompts that another server goes on with, on their way out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_diffkv.mem_pool.host_pages import Run
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.row_transfer import RowExport
from sglang_diffkv.srt.versions import compat


def block_numbers(blocks: list[Run]) -> np.ndarray:
    """Blocks of runs, in order, [n] int32, as SGLang's senders and receivers take indices of pages."""
    return np.concatenate([np.arange(start, start + count) for start, count in blocks]).astype(np.int32)


class Sending:
    """Prompts whose rows are on their way out, by request."""

    def __init__(self, manager: PageManager):
        self.manager = manager
        self.exports: dict[Any, RowExport] = {}

    def begin(self, req: Any) -> None:
        """The request's prompt has ended. Where the decode server has let go of it meanwhile SGLang's sender knows."""
        transfer, sender = self.manager.transfer, req.disagg_kv_sender
        assert transfer is not None
        named = sender.kv_mgr.transfer_infos.get(sender.bootstrap_room)
        if not named:
            return
        most = min(len(x.dst_kv_indices) for x in named.values() if not x.is_dummy)
        try:
            self.exports[req] = transfer.export(compat.allocated_row_of(req), sender.bootstrap_room, most)
        except torch.OutOfMemoryError:
            self._fail(req, "the device has no memory to list its pages")

    def advance(self) -> None:
        """Send the rows that are whole by now."""
        transfer = self.manager.transfer
        assert transfer is not None
        for req, export in list(self.exports.items()):
            if getattr(req, "diffkv_sent", None) is export or not transfer.advance(export):
                continue
            if export.problem:
                self._fail(req, export.problem)
                continue
            sender, blocks = req.disagg_kv_sender, block_numbers(export.blocks)
            sender.num_kv_indices = len(blocks)  # of those that the decode server has named, the first ones
            sender.send(blocks, None, num_kv_tokens=self.manager.rows.length(export.row))
            req.diffkv_sent = export

    def _fail(self, req: Any, problem: str) -> None:
        """The request's row cannot go: both servers end it."""
        sender, text = req.disagg_kv_sender, f"DiffKV cannot send the prompt of request {req.rid}: {problem}"
        sender.kv_mgr.conclude_failure(bootstrap_room=sender.bootstrap_room, failure_reason=text)
        self.left(req)

    def left(self, req: Any) -> None:
        """The request gives up its row: SGLang's sender has concluded."""
        export = self.exports.pop(req, None)
        if export is not None and self.manager.transfer is not None:
            well = getattr(req, "diffkv_sent", None) is export and compat.has_finished_well(req)
            self.manager.transfer.finish(export, well=well)
