"""SGLang's slot allocator over names: slots are cheap names for tokens, bytes are pages."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.srt.requests import Requests


class DiffKVAllocator(TokenToKVPoolAllocator):
    """Hands out names; ``available_size()`` is what the free pages can hold in high-tier tokens, and no more than
    there are names for while requests run. It is what SGLang's scheduler, batches and prefix cache share, so it carries
    the ``requests``."""

    def __init__(self, requests: Requests, *, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool):
        self.requests = requests
        super().__init__(requests.ledger.names, dtype, device, kvcache, need_sort)
        requests.ledger.names_free = self.names_free

    @property
    def ledger(self) -> PageLedger:
        return self.requests.ledger

    @property
    def size_full(self) -> int:
        return self.ledger.capacity

    def clear(self) -> None:
        """Forget all names and release all pages. SGLang calls this for flush_cache, with nothing running."""
        super().clear()
        self.ledger.manager.clear()
        self.ledger.reset()

    def names_free(self) -> int:
        return len(self.free_pages) + len(self.release_pages)

    def available_size(self) -> int:
        return self.ledger.available()

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if need_size > self.names_free() and self.requests.tree is not None:
            self.requests.tree.evict_names(need_size)
        return super().alloc(need_size)
