"""SGLang's table of requests with state slots, and what SGLang does to states before and in a pass."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

from sglang_diffkv.srt.versions import states as compat_states
from tests.tree.test_prefix_cache import name_of


def make_pool(rows: int, longest: int, slots: int) -> HybridReqToTokenPool:
    """SGLang's table of requests with state slots of one layer."""
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=4, n_groups=1, num_heads=2, head_dim=2, state_size=2, conv_kernel=2
    )
    dtype = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    params = Mamba2CacheParams(shape=shape, dtype=dtype, layers=[0])
    return HybridReqToTokenPool(
        size=rows,
        mamba_size=slots,
        mamba_spec_state_size=rows,
        max_context_len=longest,
        device="cpu",
        enable_memory_saver=False,
        cache_params=params,
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=False,
    )


class States:
    """What SGLang does to states before and in a pass. The state behind some tokens is their name, so a request that
    went on from another's state would show."""

    def __init__(self, pool: HybridReqToTokenPool) -> None:
        self.pool = pool

    def begin(self, req: Any) -> None:
        """A request that has a row gets its slot, if it has none yet, cleared or with the copy that it was promised."""
        kv = req.kv
        if compat_states.state_slot(req) is None:
            kv.mamba_pool_idx = self.pool.mamba_allocator.alloc(1)[0]
            self.pool.mamba_pool.clear_slots(kv.mamba_pool_idx.reshape(1))
        else:
            self.pool.mamba_pool.copy_from(kv.mamba_cow_src_index, kv.mamba_pool_idx.reshape(1))
        self.pool.req_index_to_mamba_index_mapping[kv.req_pool_idx] = kv.mamba_pool_idx.int()

    def of(self, slot: torch.Tensor) -> float:
        found = self.pool.mamba_pool.mamba_cache.temporal[0, slot].unique()
        assert len(found) == 1
        return float(found)

    def compute(self, req: Any, start: int, end: int) -> None:
        """A pass over tokens [start, end)."""
        slot = compat_states.state_slot(req)
        before = name_of(req.tokens[:start]) if start else 0.0
        assert self.of(slot) == before, "a request goes on from a state of other tokens"
        self.pool.mamba_pool.mamba_cache.temporal[0, slot] = name_of(req.tokens[:end])
