"""SGLang's slot allocator: a KV slot names a token and owns no memory, bytes are pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.srt.scheduling.lifecycle import RequestLifecycle


class DiffKVAllocator(TokenToKVPoolAllocator):
    """Hands out KV slots, of which there are more than ``size``, the capacity in high-tier tokens. ``available_size()``
    is what the free pages can hold in high-tier tokens, and no more than there are KV slots for while requests run. It
    is what SGLang's scheduler, batches and prefix cache share, so it carries the ``requests``."""

    def __init__(self, requests: RequestLifecycle, *, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool):
        self.requests = requests
        super().__init__(requests.ledger.capacity, dtype, device, kvcache, need_sort)
        requests.ledger.ask_for_kv_slots(self.kv_slots_free)
        self._handed_out: list[torch.Tensor] | None = None

    @property
    def ledger(self) -> PageLedger:
        return self.requests.ledger

    def clear(self) -> None:
        """Forget all KV slots and release all pages. SGLang calls this for flush_cache, with nothing running."""
        super().clear()
        self.free_pages = torch.arange(1, self.ledger.kv_slots + 1, dtype=torch.int64, device=self.device)
        self.ledger.manager.clear()
        self.ledger.reset()

    def kv_slots_free(self) -> int:
        return len(self.free_pages) + len(self.release_pages)

    def available_size(self) -> int:
        return self.ledger.available()

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if need_size > self.kv_slots_free():
            self.requests.tree.make_kv_slots(need_size)
        slots: torch.Tensor | None = super().alloc(need_size)
        if slots is not None and self._handed_out is not None:
            self._handed_out.append(slots)
        return slots

    @contextmanager
    def handing_out(self, taken: Callable[[], bool]) -> Iterator[None]:
        """Inside, a batch gets KV slots. If that fails before its requests have ``taken`` them, they are free again."""
        self._handed_out = []
        try:
            yield
        except Exception:
            slots, self._handed_out = self._handed_out, None
            if not taken():
                for lost in slots:
                    self.free(lost)
            raise
        finally:
            self._handed_out = None


SERVED: dict[str, DiffKVAllocator] = {}
"""The allocator of this process by its backend's name, once a server has built it, for what SGLang calls without one:
the decode log line, metrics and the canary."""


def requests_of(owner: Any) -> RequestLifecycle | None:
    """The requests of SGLang's scheduler, batch or admission; None if another backend serves."""
    allocator = owner.token_to_kv_pool_allocator
    return allocator.requests if isinstance(allocator, DiffKVAllocator) else None


def requests_of_tree(tree: Any) -> RequestLifecycle | None:
    """The same of SGLang's prefix cache, where there is one. A stand-in for it may have no allocator."""
    return requests_of(tree) if hasattr(tree, "token_to_kv_pool_allocator") else None
