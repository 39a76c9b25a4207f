"""What a server builds at its start: sizes, pool, allocator, attention backend and prefix cache."""

from __future__ import annotations

import json
import logging
import os
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig, MemoryPoolConfigurator

from sglang_diffkv import __version__
from sglang_diffkv.config import CHECK_ENV, load_config, read_config
from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.key_means import AUTO
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.mem_pool.footprint import MIB
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.plan import SLOTS_A_REQUEST, MemoryPlan
from sglang_diffkv.policies.base import AcrossLayers, Policy
from sglang_diffkv.policies.diffkv import DiffKVPolicy
from sglang_diffkv.srt.backend import DiffKVAttnBackend
from sglang_diffkv.srt.models.hybrids import check_paged_layers, describe_layers, has_states, paged_layers, state_bytes
from sglang_diffkv.srt.models.scaling import attention_layers, layer_scalings, layer_spans, sinks_of
from sglang_diffkv.srt.models.speculation import (
    check_drafts,
    draft_room,
    draft_slots,
    drafts_of,
    longest_path,
    longest_row,
)
from sglang_diffkv.srt.pool import DiffKVPool
from sglang_diffkv.srt.scheduling.allocator import SERVED, DiffKVAllocator
from sglang_diffkv.srt.startup import disaggregation, own_choice, own_means, own_shaping, tree_pages
from sglang_diffkv.srt.startup.draft_model import bytes_of_slot
from sglang_diffkv.srt.startup.kv_canary import register_canary
from sglang_diffkv.srt.startup.launch import take_choice
from sglang_diffkv.srt.startup.optional_parts import PARTS, host_room
from sglang_diffkv.srt.startup.validation import PAGE_DTYPES, check_layers, check_model, check_policy, check_server_args
from sglang_diffkv.srt.startup.wiring import build_lifecycle, build_prefix_cache
from sglang_diffkv.srt.tree.retracted import why_recomputed
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.versions.selection import BACKEND, is_selected
from sglang_diffkv.srt.versions.states import state_buffers

logger = logging.getLogger(__name__)

_budget: tuple[int, int] | None = None
"""Bytes that SGLang had for the last pool, and how many tokens fit."""


def choose_configuration(runner: Any) -> None:
    """With ``auto``, or without a configuration, let SGLang's model runner choose what to serve with: its weights are
    loaded, and pools are to come. All ranks have to call it. Raises UnsupportedError."""
    given = read_config()
    if given.chosen_at_start:
        check_layers(runner.model)
        take_choice(own_choice.choose(runner, given))


def keep_computed_dtype(runner: Any) -> None:
    """Let the cache of SGLang's model runner have the dtype in which the model computes K and V, whatever else its
    checkpoint (FP8 with scales) or ``--kv-cache-dtype`` asked for. The tiers say what is stored, and only a raw tier
    holds numbers of this dtype. ``check_model`` refuses one that pages cannot hold."""
    asked, computed = runner.kv_cache_dtype, runner.dtype
    if asked == computed:
        return
    runner.kv_cache_dtype, runner.kv_cache_dtype_str = computed, "auto"
    if computed in PAGE_DTYPES:
        logger.info(
            "DiffKV: the KV cache of this model was to be %s (its checkpoint or --kv-cache-dtype). Pages take keys and "
            "values in %s, as the model computes them, and store them in the tiers %s; scales of the checkpoint for "
            "its KV cache are not applied.", asked, computed, ", ".join(load_config().tiers),
        )  # fmt: skip


def memory_plan(configurator: Any) -> MemoryPlan:
    """For the loaded model of SGLang's KVCacheConfigurator."""
    config, layers = load_config(), paged_layers(configurator)
    attention_spans = layer_spans(configurator.model, layers)
    check_policy(config, attention_spans)
    tree_pages.check_spans(configurator.server_args, attention_spans)
    longest = longest_row(configurator.model_config.context_len, compat.resolved(configurator.server_args))
    draft_bytes = bytes_of_slot(configurator.server_args)
    plan = MemoryPlan.of(configurator, config, len(layers), longest, attention_spans, draft_bytes)
    mixed_chunks = bool(getattr(compat.resolved(configurator.server_args), "enable_mixed_chunk", False))
    retracted, room = not why_recomputed(configurator, config), host_room(configurator)
    slot_bytes = draft_bytes or state_bytes(configurator)
    plan = replace(plan, keeps_retracted=retracted, host_room=room, mixed_chunks=mixed_chunks, slot_bytes=slot_bytes)
    return replace(plan, transfers=disaggregation.mode_of(configurator.server_args) != disaggregation.OFF)


class PoolConfigurator(MemoryPoolConfigurator):
    """As many tokens as fit with all else that the plugin puts on the device. ``configurator`` is SGLang's
    KVCacheConfigurator."""

    def __init__(self, configurator: Any):
        check_model(configurator)
        self.configurator = configurator

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        global _budget
        configurator = self.configurator
        plan = memory_plan(configurator)
        context = (
            configurator.model_config.context_len
            + compat.CONTEXT_SLACK
            + draft_room(compat.resolved(configurator.server_args))
        )
        capacity = plan.capacity_in(available_bytes, lambda tokens: compat.request_rows(configurator, tokens), context)
        _budget = available_bytes, capacity
        return self.calculate_pool_sizes_from_max_tokens(capacity, page_size)

    def calculate_pool_sizes_from_max_tokens(self, max_total_num_tokens: int, page_size: int) -> MemoryPoolConfig:
        return MemoryPoolConfig(max_total_num_tokens=max_total_num_tokens // page_size * page_size)


def build_pool(configurator: Any, sizes: Any) -> DiffKVPool:
    """SGLang's pool, which gets its memory with the allocator. ``sizes``: the arguments of SGLang's builder."""
    check_server_args(configurator.server_args, load_config())
    check_model(configurator)
    register_canary()
    layers = configurator.layer_info
    return DiffKVPool(
        sizes["max_total_num_tokens"],
        configurator.kv_cache_dtype,
        paged_layers(configurator),
        configurator.device,
        False,
        layers.start_layer,
        layers.end_layer,
    )


def build_allocator(configurator: Any, pool: DiffKVPool, rows: Any) -> DiffKVAllocator:
    """The page manager with its ops, and the allocator over it. ``rows``: SGLang's table of requests."""
    plan = memory_plan(configurator)
    args = compat.resolved(configurator.server_args)
    if drafts := drafts_of(args):
        check_drafts(plan.config, plan.attention_spans, by_model=plan.draft_bytes > 0)
    geometry = plan.geometry(
        pool.size,
        rows.req_to_token.shape[0],
        rows.max_context_len + draft_room(args),
    )
    ranks = compat.tensor_parallel_ranks()
    sizes = (pool.size, geometry.num_pages, geometry.heads, geometry.num_rows, geometry.num_blocks)
    ranks.require_equal("the plugin's version, --diffkv-config or SGLANG_DIFFKV_CHECK_INTEGRITY", [_settings_digest()])
    ranks.require_equal("capacity, pages, heads, rows or table blocks (set --max-total-tokens)", sizes)
    policy = plan.policy(ranks.rank, ranks.size)
    slots = rows.mamba_pool.size if has_states(rows) else 0
    if plan.host_room is None:  # of a running request pages and one state go to the host
        slots = -(-slots // SLOTS_A_REQUEST)
    if plan.draft_bytes:
        slots = plan.kv_slots(policy, geometry, pool.size)
    if isinstance(policy.prompt, AcrossLayers):
        ranks.add(torch.zeros(1, device=configurator.device))  # opens connections now, not while a request waits
    host_pages, host_slots = ranks.least(np.array([plan.host_pages(geometry, slots), plan.host_slots(geometry, slots)]))
    manager = PageManager(
        geometry,
        policy,
        dtype=configurator.kv_cache_dtype,
        device=configurator.device,
        ranks=ranks,
        make_ops=lambda state: plan.ops(state, geometry, policy),
        q_heads=plan.q_heads,
        drafts=drafts,
        longest_path=longest_path(args),
        host_pages=int(host_pages),
        host_slots=int(host_slots),
        high_rows=plan.config.high_requests > 0,
        most_window=plan.config.request_window,
        keeps_retracted=plan.keeps_retracted,
        write_policy="" if plan.host_room is None else plan.host_room.write_policy,
        transfer_blocks=disaggregation.transfer_blocks(configurator.server_args, geometry),
        kept_pages=plan.retracted_pages(geometry),
    )
    if has_states(rows) and manager.saved is not None:
        manager.keep_slots(state_buffers(rows), manager.host_slots)
    if manager.running is not None and pool.size < manager.running.least_capacity:
        raise UnsupportedError(
            f"diffkv: policy {plan.config.policy.name if plan.config.policy else ''} holds up to "
            f"{manager.running.rule.limit} tokens a request and keeps {manager.running.rule.keep} of them in a copy: "
            f"the pool has {pool.size} tokens, it needs {manager.running.least_capacity}. Choose fewer max_blocks or a "
            "smaller block, or give the server more memory (--max-total-tokens, --mem-fraction-static)."
        )
    ledger = PageLedger(manager, pool.size, owning=plan.draft_bytes > 0, draft_slots=draft_slots(args))
    pool.bind(manager, ledger.kv_slots, plan.footprint(geometry, pool.size), plan.draft_bytes)
    allocator = rows.diffkv_allocator = DiffKVAllocator(
        build_lifecycle(ledger, pool.usage, plan.config),
        dtype=configurator.kv_cache_dtype,
        device=configurator.device,
        kvcache=pool,
        need_sort=False,
    )
    SERVED[BACKEND] = allocator
    _tell_plan(configurator, plan, policy, geometry, pool, slots)
    return allocator


def _tell_plan(
    configurator: Any, plan: MemoryPlan, policy: Policy, geometry: Geometry, pool: DiffKVPool, slots: int
) -> None:
    """What is served, for the log. ``slots``: those of states or of drafts beside the pages."""
    logger.info("DiffKV plan: %s", plan.describe(geometry, pool.size))
    logger.info("DiffKV: %s", _retraction(plan, geometry, why_recomputed(configurator, plan.config)))
    if plan.host_room is not None:
        pool_bytes = geometry.num_pages * plan.fmt.page_bytes + slots * plan.slot_bytes
        logger.info("DiffKV: %s are %s.", plan.host_room.guests, plan.host_room.describe(pool_bytes))
    if isinstance(policy, DiffKVPolicy) and (
        hint := policy.window_hint(len(geometry.fmt.tiers), geometry.fmt.page_tokens)
    ):
        logger.info("DiffKV: %s", hint)
    if configurator.mambaish_config is not None:
        logger.info("DiffKV: %s", describe_layers(configurator, configurator.mambaish_config.mamba2_cache_params))
    if any(geometry.attention_spans):
        found = "wherever another branches off" if plan.config.prefix_fidelity == "exact" else "at their ends only"
        logger.info(
            "DiffKV: layers with a sliding window hold it in pages like all others; SGLang's pools for them are off. "
            "With prefix fidelity %s prompts are found in the prefix cache %s.", plan.config.prefix_fidelity, found,
        )  # fmt: skip
        if str(pool.device) != "cpu":
            logger.warning(
                "DiffKV: layers with a sliding window have not been run on a GPU yet, only compiled for one: compare "
                "this model's replies with stock SGLang's first"
            )


def _retraction(plan: MemoryPlan, geometry: Geometry, obstacle: str) -> str:
    """What becomes of retracted requests, for the log."""
    if obstacle:
        return f"retracted requests are computed again: {obstacle}."
    size = plan.host_pages(geometry) * plan.fmt.page_bytes / MIB
    return f"what retracted requests hold goes to up to {size:.0f} MiB of host memory and comes back with them."


def _settings_digest() -> int:
    """A number of all that a user sets for the plugin by process. Each host's ranks have it from their own command
    line and environment."""
    settings = [__version__, load_config().model_dump_json(), os.environ.get(CHECK_ENV, "")]
    return zlib.crc32(json.dumps(settings).encode())


def refuse_pool(configurator: Any, pool: Any) -> None:
    """Raise UnsupportedError if diffkv is selected but SGLang built a pool that the plugin does not replace."""
    if is_selected(configurator.server_args):
        raise UnsupportedError(
            f"--attention-backend diffkv: SGLang built a {type(pool).__name__} for this model, which the "
            "plugin does not replace. Use another --attention-backend for it."
        )


def create_backend(runner: Any) -> DiffKVAttnBackend:
    """The attention backend of SGLang's model runner."""
    check_layers(runner.model)
    pool, exact = runner.token_to_kv_pool, load_config().prefix_fidelity == "exact"
    if has_states(runner.req_to_token_pool):
        found = {layer.layer_id for layer in attention_layers(runner.model)}
        check_paged_layers(type(runner.model).__name__, found, pool.layers)
    scalings, sinks = layer_scalings(runner.model), sinks_of(runner.model)
    means = own_means.find(runner, scalings, sinks) if load_config().key_means == AUTO else None
    shaping = own_shaping.find(runner, sinks) if load_config().noise_shaping is not None else None
    backend = DiffKVAttnBackend(runner, scalings, sinks, own_means=means, own_shaping=shaping)
    budget = _budget[0] if _budget is not None and _budget[1] == pool.size else None
    logger.info("%s", pool.footprint(exact=exact).describe(budget))
    return backend


def create_prefix_cache(ctx: Any) -> Any:
    """The prefix cache for SGLang's context of building one. It is registered with SGLang, but its name cannot be put
    into arguments that a launch has resolved (0.5.17), so a hook on the factory chooses it."""
    config = load_config()
    exact = config.prefix_fidelity == "exact"
    opened = [part.opened(ctx.server_args, ctx.model_config, config) for part in PARTS]
    page_size = 1 if ctx.disable_radix_cache else compat.tree_page_size(ctx.server_args)
    params = replace(ctx.params, page_size=page_size)
    keeps = config.keep_seconds > 0
    return build_prefix_cache(params, config.share_min_tokens, exact=exact, opened=opened, keeps=keeps)
