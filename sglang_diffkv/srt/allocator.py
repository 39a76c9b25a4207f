"""SGLang's slot allocator over names: slots are cheap names for tokens, bytes are pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from sglang_diffkv.mem_pool.ledger import PageLedger

if TYPE_CHECKING:
    from sglang_diffkv.srt.exact_prompts import ExactPrompts


class DiffKVAllocator(TokenToKVPoolAllocator):
    """Hands out names; ``available_size()`` is what the free pages can hold in high-tier tokens, and no more than
    there are names for while requests run."""

    def __init__(self, ledger: PageLedger, *, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool):
        self.ledger = ledger
        self.tree_cache: Any = None
        self.refused: list[Any] = []
        """Requests that were taken out of a batch; the scheduler has yet to tell their clients."""
        super().__init__(ledger.names, dtype, device, kvcache, need_sort)
        ledger.names_free = self.names_free

    @property
    def size_full(self) -> int:
        return self.ledger.capacity

    @property
    def exact(self) -> ExactPrompts | None:
        """Who decides on prompts that the prefix cache keeps exactly; None if it keeps none so."""
        return None if self.tree_cache is None else self.tree_cache.exact

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
        if need_size > self.names_free() and self.tree_cache is not None:
            self.tree_cache.evict_names(need_size)
        return super().alloc(need_size)
