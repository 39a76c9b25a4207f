"""The token-to-KV pool that SGLang sees. K and V live in pages of the manager, not in per-layer buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_diffkv.mem_pool.footprint import Footprint
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.usage import UsageMeter
from sglang_diffkv.srt.versions.places import sglang_class

GIB = 1 << 30

KVCache: Any = sglang_class("KVCache")


class DiffKVPool(KVCache):
    """Carries the page manager to the attention backend.

    ``size`` is the capacity in high-tier tokens; ``layers`` are the ids of the model's layers that have pages, in
    order: where one stands there is its layer in the page manager. Asking for a layer's K or V buffer raises: no such
    buffer exists, and code that needs one cannot work with compressed pages.
    """

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        layers: Sequence[int],
        device: str,
        enable_memory_saver: bool,
        start_layer: int | None,
        end_layer: int | None,
    ):
        super().__init__(size, 1, dtype, len(layers), device, enable_memory_saver, start_layer, end_layer)
        self.layers = tuple(layers)
        self.manager: PageManager | None = None
        self.kv_slots = self.draft_bytes = 0
        self.usage: UsageMeter | None = None
        self.canary_lines: tuple[torch.Tensor, ...] = ()
        self.head_num = 1  # SGLang's transfer managers ask for it; rows go whole

    def kv_slots_changed(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Tokens of a request got other KV slots: what is kept by KV slot goes along. int tensors of one length."""
        for lines in self.canary_lines:
            lines[new.long()] = lines[old.long()]

    def bind(
        self, manager: PageManager, kv_slots: int = 0, planned: Footprint | None = None, draft_bytes: int = 0
    ) -> None:
        """Give the pool its memory, once the number of request rows is known.

        Args:
            kv_slots: tokens that SGLang may hold at once. planned: all there will be. draft_bytes: that a draft model's
                cache, a pool of SGLang's own, takes for each KV slot.
        """
        self.manager, self.kv_slots, self.draft_bytes = manager, kv_slots, draft_bytes
        self.usage = UsageMeter(manager)
        self.mem_usage = (planned or self.footprint(exact=False)).total / GIB

    def footprint(self, *, exact: bool) -> Footprint:
        """What is held on the device now; ``exact``: whether the prefix cache keeps exact prompts."""
        assert self.manager is not None
        state, geometry, ops = self.manager.state, self.manager.geometry, self.manager.ops
        running = self.manager.running
        queries, saved = None if running is None else running.cache, self.manager.saved
        host, slots = 0 if saved is None else saved.host.pages.nbytes, self.manager.saved_slots
        host += 0 if slots is None else slots.bytes_most
        transfer = self.manager.transfer
        return Footprint.of(
            state, geometry, ops, kv_slots=self.kv_slots, exact=exact, queries=queries, draft_bytes=self.draft_bytes,
            staging_bytes=self.manager.staging_bytes, host_bytes=host, guests=self.manager.guests,
            transfer_bytes=0 if transfer is None else transfer.room.pages.nbytes,
        )  # fmt: skip

    def get_kv_size_bytes(self) -> int:
        return int(self.mem_usage * GIB) if self.manager else 0

    def move_kv_cache(self, *_: Any, **__: Any) -> None:
        """What SGLang calls to gather the accepted drafts of a tree: ``VerifyWrapper.commit`` stores them in order."""

    def _no_buffer(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            "the DiffKV pool stores K and V in compressed pages; there is no buffer to read or write by KV slot. "
            "Switch off the feature that asked for it, or use another --attention-backend."
        )

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """What SGLang's transfer engine moves, in the place of one layer's K and V: addresses, bytes, and bytes of an
        item. K is the blocks of the host's room for rows on their way, and V is nothing that anybody reads."""
        transfer = None if self.manager is None else self.manager.transfer
        if transfer is None:
            return self._no_buffer()
        return transfer.room.regions()

    get_key_buffer = _no_buffer
    get_value_buffer = _no_buffer
    get_kv_buffer = _no_buffer
    set_kv_buffer = _no_buffer
    get_cpu_copy = _no_buffer
    load_cpu_copy = _no_buffer
