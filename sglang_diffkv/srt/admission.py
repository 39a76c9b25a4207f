"""The hooks on SGLang's admission: which prompts run, in which chunks. All are no-ops for other pools."""

from __future__ import annotations

import math
from typing import Any

from sglang_diffkv.mem_pool.geometry import Path, path_end
from sglang_diffkv.srt import compat
from sglang_diffkv.srt.allocator import DiffKVAllocator

SRT = "sglang.srt."


def add_one_req(original: Any, self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Admit a prompt only if its pages fit, whatever SGLang's token arithmetic says; one that fits only if it is
    compacted between chunks is."""
    allocator = self.token_to_kv_pool_allocator
    if not isinstance(allocator, DiffKVAllocator):
        return original(self, req, *args, **kwargs)
    from sglang.srt.managers.schedule_policy import AddReqResult
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    ledger, tree = allocator.ledger, allocator.tree_cache
    path = tree.path(req.last_node) if tree is not None else []
    needed = compat.prompt_len(req) - compat.prefix_len(req)
    chunk = _whole_chunk(self)
    with compat.node_locked(self, req.last_node):
        if tree is not None:
            tree.evict_table_blocks(path, needed)
            tree.evict_names(needed)
        admitted = ledger.admits(path, needed)
        compacts = chunk < needed and _may_compact(allocator, path, needed, self)
        fits = compacts and ledger.admits_compacting(needed, chunk)
    idle = not ledger.manager.lengths and not ledger.promised
    saved = needed - ledger.compacting_tokens(needed, chunk) if compacts else 0
    result = AddReqResult.NO_TOKEN
    with compat.priced(req, ledger.growth_price()):
        if admitted:
            result = original(self, req, *args, **kwargs)
        if fits and result == AddReqResult.NO_TOKEN and not _added(self, req):
            with ledger.credited(saved):
                result = original(self, req, *args, **kwargs)
            if _added(self, req):
                ledger.chunks[req.rid] = chunk
                ledger.compacted += 1
    ledger.refused = None
    if _added(self, req):
        ledger.promise(req.rid, path, needed)
        if tree is not None:
            tree.evict_uncovered()
    elif result == AddReqResult.NO_TOKEN:
        ledger.refused = compat.tokens_wanted(req, ledger.growth_price()) - saved
        if not getattr(req, "diffkv_waited", False):
            req.diffkv_waited = True
            ledger.waited += 1
        if path and idle:
            # Nothing runs, so nothing will make room but the segments that the request's own prefix locks as a whole.
            wanted = math.ceil(ledger.refused) + compat.prefix_len(req) + ledger.manager.fmt.high.tokens
            tree.evict(EvictParams(num_tokens=max(wanted - ledger.available(), 0)))
            tree.evict_pages(ledger.prompt_pages(compat.prompt_len(req)))
            tree.evict_table_blocks([], compat.prompt_len(req))
            tree.evict_names(compat.prompt_len(req))
            return AddReqResult.OTHER
    return result


def _added(adder: Any, req: Any) -> bool:
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req


def _whole_chunk(adder: Any) -> int:
    """Tokens of a chunk that a pass has to itself."""
    if not hasattr(adder, "diffkv_chunk"):
        adder.diffkv_chunk = adder.rem_chunk_tokens or 1 << 62
    return adder.diffkv_chunk


def _may_compact(allocator: DiffKVAllocator, path: Path, needed: int, adder: Any) -> bool:
    """Whether the prompt may be compacted between chunks. Not where its exact form is wanted, nor where tokens would be
    pruned for good before all of the prompt has seen them."""
    ledger, tree = allocator.ledger, allocator.tree_cache
    policy = ledger.manager.policy
    if not policy.compresses or policy.judges_low or allocator.exact is not None:
        return False
    most, running = 0, [] if adder.running_batch is None else adder.running_batch.reqs
    for req in [*running, *adder.can_run_list]:
        if req.finished():
            continue  # its place in the tree may be gone
        held = tree.path(req.last_node) if tree is not None else []
        most = max(most, ledger.most_pages(held, compat.longest_len(req) - path_end(held)))
    return ledger.may_compact(path, needed, most)


def add_chunked_req(original: Any, self: Any, req: Any) -> Any:
    """A prompt's next chunk is as long as the pass allows: its pages are promised. One that is compacted between chunks
    waits where its next chunk does not fit, and running requests are retracted for it."""
    allocator = self.token_to_kv_pool_allocator
    if not isinstance(allocator, DiffKVAllocator):
        return original(self, req)
    ledger, tree, chunk = allocator.ledger, allocator.tree_cache, _whole_chunk(self)
    if req.rid in ledger.chunks:
        ledger.chunks[req.rid] = max(ledger.chunks[req.rid], chunk)
        ledger.promise(req.rid, [], compat.prompt_len(req) - compat.prefix_len(req))
        if ledger.uncommitted_pages() < 0:
            ledger.manager.tracker.settle()  # the last chunk's compaction may have made room
            if tree is not None:
                tree.evict_uncovered()
        if ledger.uncommitted_pages() < 0 and self.running_batch is not None and self.running_batch.reqs:
            return req
    with ledger.credited(1 << 40):
        return original(self, req)


def running_request_offset(original: Any, self: Any, req: Any) -> Any:
    """What a running request is expected to take yet, at the measured price of its tokens."""
    offset = original(self, req)
    allocator = self.token_to_kv_pool_allocator
    return offset * allocator.ledger.price_of(compat.row_of(req)) if isinstance(allocator, DiffKVAllocator) else offset


ADDER = SRT + "managers.schedule_policy.PrefillAdder."

ADMISSION_HOOKS = {
    ADDER + "add_one_req": add_one_req,
    ADDER + "add_chunked_req": add_chunked_req,
    ADDER + "_get_running_request_total_token_offset": running_request_offset,
}
"""Target in SGLang -> AROUND hook."""
