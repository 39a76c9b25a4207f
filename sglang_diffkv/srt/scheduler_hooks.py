"""The hooks on a running scheduler: rows, steps, results and reports. All are no-ops for other pools."""

from __future__ import annotations

import itertools
import os
from typing import Any

from sglang_diffkv.config import load_config
from sglang_diffkv.mem_pool.integrity import check_bounds, check_integrity, decision_digest
from sglang_diffkv.srt import compat, metrics
from sglang_diffkv.srt.admission import ADMISSION_HOOKS, SRT
from sglang_diffkv.srt.allocator import DiffKVAllocator
from sglang_diffkv.srt.metrics import prompt_outcomes
from sglang_diffkv.srt.refused_requests import (
    BatchRefused,
    refuse_in_decode,
    refusing_batch,
    tell_refused,
    undo_prefill,
)
from sglang_diffkv.srt.validation import BACKEND

CHECK_ENV = "SGLANG_DIFFKV_CHECK_INTEGRITY"
"""Set to k, a server checks ring, tables, counts and tree after every k-th step (slow; for tests and bug reports)."""


def free_row(original: Any, self: Any, req: Any) -> Any:
    """A request leaves its row: on finish, abort and retraction alike."""
    allocator = getattr(self, "diffkv_allocator", None)
    if allocator is not None:
        row, pool = compat.row_of(req), allocator.get_kvcache()
        allocator.ledger.forget(req.rid)
        if row in pool.manager.lengths:
            if req.finished() and not _aborted(req):
                pool.usage.finish(row)
            pool.manager.release(row)
            if allocator.tree_cache is not None:
                allocator.tree_cache.pack_replies()
        if allocator.exact is not None:
            allocator.exact.forget(row)
    return original(self, req)


def _aborted(req: Any) -> bool:
    return (req.finished_reason.to_json() or {}).get("type") == "abort"


def prepare_for_extend(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Attach the matched prefixes, note whose prompt ends with the pass, and plan it."""
    allocator = self.token_to_kv_pool_allocator
    if not isinstance(allocator, DiffKVAllocator):
        return original(self, *args, **kwargs)
    ledger = allocator.ledger
    with refusing_batch(self), ledger.prefilling():
        result = original(self, *args, **kwargs)
    manager, exact = ledger.manager, allocator.exact
    rows, starts, counts, ending = [], [], [], []
    for req in self.reqs:
        row, start, end = compat.allocated_row_of(req), compat.prefix_len(req), compat.extend_end(req)
        if start and not manager.lengths.get(row):
            with refusing_batch(self, req):
                manager.attach_prefix(row, self.tree_cache.path(req.last_node))
                if exact is not None:
                    exact.attached(row, req.last_node)
        if end == compat.prompt_len(req):
            manager.prompts.finishing.add(row)
            ending.append((row, req))
        elif req.rid in ledger.chunks:
            manager.prompts.chunking.add(row)
        ledger.promise(req.rid, [], compat.prompt_len(req) - end)
        rows.append(row)
        starts.append(start)
        counts.append(end - start)
    with refusing_batch(self):
        manager.plan_step(rows, counts, starts)
    if exact is not None:
        for row, req in ending:
            insertable, brief = not getattr(req, "skip_radix_cache_insert", False), brief_reply(req)
            with refusing_batch(self, req):
                exact.plan(row, req.last_node, brief=brief, insertable=insertable)
    return result


def brief_reply(req: Any) -> bool:
    """Whether the request ends with its first token."""
    return req.sampling_params.max_new_tokens <= 1


def prepare_for_decode(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Plan the decode step, without the requests that have no room in it."""
    allocator = self.token_to_kv_pool_allocator
    if not isinstance(allocator, DiffKVAllocator):
        return original(self, *args, **kwargs)
    refuse_in_decode(self)
    if self.is_empty():
        return None
    result = original(self, *args, **kwargs)
    rows = [compat.allocated_row_of(req) for req in self.reqs]
    starts = [length - 1 for length in self.seq_lens_cpu.tolist()]
    allocator.ledger.manager.plan_step(rows, [1] * len(rows), starts)
    return result


def get_new_batch_prefill(original: Any, self: Any, running_batch: Any) -> Any:
    """A batch that cannot be prepared ends the requests that are the cause; the others wait again."""
    try:
        return original(self, running_batch)
    except BatchRefused as refused:
        undo_prefill(self, refused)
        running_batch.batch_is_full = False
        return compat.no_prefill(running_batch)


def get_next_batch_to_run(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Before anything is scheduled, ranks exchange what their devices have counted. Where nothing runs the batch is not
    full, though SGLang marked it so for a request that was refused beside one that was about to end: nothing else would
    make it look at its queue again."""
    allocator = self.token_to_kv_pool_allocator
    if isinstance(allocator, DiffKVAllocator):
        manager = allocator.ledger.manager
        if not manager.ranks.alone:
            manager.tracker.meet()
        running = kwargs.get("running_batch", self.running_batch)
        if not manager.lengths and running.is_empty():
            running.batch_is_full = False
        plan = original(self, *args, **kwargs)
        tell_refused(self, allocator)
        return plan
    return original(self, *args, **kwargs)


def process_batch_result(original: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Before results go out, end the requests that lost tokens to an empty ring; check all structures if asked. Behind
    them, see what the requests that left make possible."""
    allocator = self.token_to_kv_pool_allocator
    if not isinstance(allocator, DiffKVAllocator):
        return original(self, batch, *args, **kwargs)
    ledger = allocator.ledger
    if not batch.forward_mode.is_idle():
        ledger.manager.tracker.report()
        for req in batch.reqs:
            if compat.row_of(req) in ledger.manager.counts.faulted:
                compat.finish_with_error(
                    req,
                    "DiffKV: the pool of pages was empty while this request was running, so its cache is incomplete. "
                    "Retry it, or give the server more memory.",
                )
        _check_sometimes(allocator)
    result = original(self, batch, *args, **kwargs)
    if allocator.exact is not None:
        allocator.exact.copy_alone([req for req in batch.reqs if not req.finished()])
    # SGLang by itself looks at its queue again only when a request ends.
    if self.running_batch.batch_is_full and ledger.room_for_refused(compat.expected_tokens(self)):
        self.running_batch.batch_is_full = False
    return result


_STEPS = itertools.count(1)
"""Steps with results, which are the same on all ranks."""


def _check_sometimes(allocator: DiffKVAllocator) -> None:
    every = os.environ.get(CHECK_ENV, "")
    if not every.isdecimal() or not int(every) or next(_STEPS) % int(every):
        return
    manager = allocator.ledger.manager
    check_bounds(manager)
    check_integrity(manager)
    manager.ranks.require_equal("what they decide on", [decision_digest(allocator)])
    if allocator.tree_cache is not None:
        allocator.tree_cache.check_integrity()


def get_total_uncached_sizes(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    allocator = self.token_to_kv_pool_allocator
    if not isinstance(allocator, DiffKVAllocator):
        return original(self, *args, **kwargs)
    return allocator.ledger.uncached(), 0


def get_internal_state(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    allocator = self.token_to_kv_pool_allocator
    if isinstance(allocator, DiffKVAllocator):
        config, pool = load_config(), allocator.get_kvcache()
        report = pool.usage.report()
        report["config"] = config.model_dump(mode="json", exclude_none=True)
        report["memory"] = pool.footprint(exact=config.prefix_fidelity == "exact").report()
        report["admission"] = allocator.ledger.report()
        report["prompts"] = prompt_outcomes(allocator)
        result.internal_state["diffkv"] = report
    return result


SERVED: dict[str, DiffKVAllocator] = {}
"""The allocator of this process, for what SGLang calls without one: the decode log line and the metrics."""


def get_decode_usage_msg_parts(original: Any, self: Any) -> Any:
    parts = original(self)
    if BACKEND in SERVED:
        s = SERVED[BACKEND].get_kvcache().usage.latest().live.summary()
        parts.append(
            f"kv ratio: {s['ratio_pages']:.3f} (high {s['share_high']:.0%}, low {s['share_low']:.0%}, "
            f"pruned {s['share_pruned']:.1%})"
        )
    return parts


def log_stats(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The plugin's metrics follow SGLang's."""
    result = original(self, *args, **kwargs)
    if BACKEND in SERVED:
        metrics.update(self, SERVED[BACKEND])
    return result


def validate_beams(original: Any, self: Any, req: Any, recv_req: Any) -> Any:
    """What is wrong with a request for beam search, which needs no option of the server."""
    if isinstance(self.token_to_kv_pool_allocator, DiffKVAllocator):
        return (
            "Beam search is not supported with --attention-backend diffkv: beams share KV by slot, and pages have one "
            "writer. Drop beam_width."
        )
    return original(self, req, recv_req)


SCHEDULER_HOOKS = {
    SRT + "mem_cache.memory_pool.ReqToTokenPool.free": free_row,
    SRT + "managers.schedule_batch.ScheduleBatch.prepare_for_extend": prepare_for_extend,
    SRT + "managers.schedule_batch.ScheduleBatch.prepare_for_decode": prepare_for_decode,
    **ADMISSION_HOOKS,
    SRT + "managers.scheduler.Scheduler.get_new_batch_prefill": get_new_batch_prefill,
    SRT + "managers.scheduler.Scheduler.get_next_batch_to_run": get_next_batch_to_run,
    SRT + "managers.scheduler.Scheduler.process_batch_result": process_batch_result,
    SRT + "managers.scheduler.Scheduler.get_internal_state": get_internal_state,
    SRT + "managers.scheduler_components.invariant_checker.SchedulerInvariantChecker._get_total_uncached_sizes": (
        get_total_uncached_sizes
    ),
    SRT + "observability.metrics_collector.SchedulerMetricsCollector.log_stats": log_stats,
    SRT + "managers.scheduler_components.pool_stats_observer.PoolStats.get_decode_usage_msg_parts": (
        get_decode_usage_msg_parts
    ),
}
"""Target in SGLang -> AROUND hook."""

if compat.BEAM_SEARCH:
    SCHEDULER_HOOKS[SRT + "beam_search.coordinator.BeamCoordinator.validate_and_init"] = validate_beams
