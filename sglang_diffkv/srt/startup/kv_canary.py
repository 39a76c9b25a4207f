"""SGLang's ``--kv-canary`` over KV slots: a fingerprint of each token in a line of its own beside the pages.

A line holds a token's id, its position and a hash of the lines before it. SGLang writes the lines of a pass's new
tokens and checks those of all that its requests read, at every pass, and of the whole prefix cache with
``--kv-canary-sweep-interval``. Lines are addressed by KV slot, as the prefix cache and SGLang's table of requests
address tokens. So the canary sees a wrong KV slot, one given twice, or another one's prefix. It does not see pages,
whose bytes change as tokens move between tiers: ``mem_pool/integrity.py`` checks them.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_diffkv.srt.pool import DiffKVPool
from sglang_diffkv.srt.scheduling.allocator import SERVED
from sglang_diffkv.srt.tree.prefix_cache import DiffKVPrefixCache
from sglang_diffkv.srt.versions.selection import BACKEND


def register_canary() -> None:
    """Make the pool known to the canary."""
    from sglang.srt.kv_canary.pool_patcher.api import register_pool_attacher

    register_pool_attacher(DiffKVPool, attach)


def attach(
    *, pool: DiffKVPool, device: torch.device, read_bytes: int, kv_token_id_vs_position_offset: int
) -> tuple[Any, ...]:
    """Lines for all KV slots, in SGLang's buffer group. ``read_bytes`` is 0: K and V have no bytes by KV slot."""
    from sglang.srt.kv_canary.buffer_group import CanaryBufferGroup, PoolKind
    from sglang.srt.kv_canary.pool_patcher.buffer_alloc import alloc_canary_buf

    assert read_bytes == 0, "--kv-canary-real-data is refused at start"
    head, tail = (alloc_canary_buf(num_slots=pool.kv_slots + 1, device=device) for _ in range(2))
    pool.canary_lines = (head, tail)
    group = CanaryBufferGroup(
        kind=PoolKind.FULL,
        k_head=head,
        k_tail=tail,
        v_head=None,
        v_tail=None,
        real_kv_sources_k=(),
        real_kv_sources_v=(),
        swa_index_lut=None,
        kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
    )
    return (group,)


def launch_capacities(original: Any, cls: Any, **sizes: Any) -> Any:
    """Room for what compressed requests hold together: more tokens than the pool's nominal capacity."""
    if BACKEND in SERVED:
        sizes["pool_slot_count"] = SERVED[BACKEND].ledger.kv_slots
    return original(cls, **sizes)


def walk_prefix_cache(original: Any, *, radix_cache: Any, unlocked_only: bool = False, **flags: Any) -> Any:
    """KV slot, position and the KV slot before it of every token in the tree, as int64 tensors."""
    if not isinstance(radix_cache, DiffKVPrefixCache):
        return original(radix_cache=radix_cache, unlocked_only=unlocked_only, **flags)
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import RadixCacheWalkResult

    empty = torch.empty(0, dtype=torch.int64)
    kv_slots, positions, before = [empty], [empty], [empty]
    stack = [(child, 0, torch.tensor([-1])) for child in radix_cache.root_node.children.values()]
    while stack:
        node, start, last = stack.pop()
        value = node.value.to("cpu", torch.int64)
        if not unlocked_only or node.lock_ref == 0:
            kv_slots.append(value)
            positions.append(torch.arange(start, start + len(value)))
            before.append(torch.cat([last, value[:-1]]))
        stack.extend((child, start + len(value), value[-1:]) for child in node.children.values())
    return RadixCacheWalkResult(
        slot_indices=torch.cat(kv_slots), positions=torch.cat(positions), prev_slot_indices=torch.cat(before)
    )


def create_device_stream(original: Any, device: Any) -> Any:
    """On a CPU there is one stream."""
    return original(device) if torch.device(device).type != "cpu" else torch.cpu.current_stream()


def device_to_host(original: Any, cls: Any, xs_device: Any, *, d2h_stream: Any) -> Any:
    """On a CPU the counters that SGLang reports a step later are copied at once, to memory that is not pinned."""
    from sglang.srt.kv_canary.runner.future_tensor import _DUMMY_DICT_KEY

    named = xs_device if isinstance(xs_device, dict) else {_DUMMY_DICT_KEY: xs_device}
    if any(x.device.type != "cpu" for x in named.values() if isinstance(x, torch.Tensor)):
        return original(cls, xs_device, d2h_stream=d2h_stream)
    copies = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in named.items()}
    return cls(_data=copies, _event=torch.cpu.Event())


HOOKS = (launch_capacities, walk_prefix_cache, create_device_stream, device_to_host)
