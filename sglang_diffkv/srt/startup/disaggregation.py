"""Servers that compute prompts for others, or go on with them: what is refused at start, the memory that it takes, and
what two servers tell each other of themselves before the first row goes."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from sglang_diffkv.config import DiffKVConfig, load_config
from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.mem_pool.host_pages import GIB
from sglang_diffkv.mem_pool.row_object import VERSION
from sglang_diffkv.mem_pool.row_transfer import LESS_ROOM, room_blocks, room_bytes
from sglang_diffkv.mem_pool.segment_object import Origin
from sglang_diffkv.plan import MemoryPlan
from sglang_diffkv.releases import RELEASES, seen_on_gpu
from sglang_diffkv.srt.models.speculation import algorithm_of
from sglang_diffkv.srt.scheduling.allocator import requests_of
from sglang_diffkv.srt.startup import host_options, own_means, own_shaping
from sglang_diffkv.srt.startup.host_memory import free_host_memory, ranks_here
from sglang_diffkv.srt.startup.model_identity import model_digest, row_facts
from sglang_diffkv.srt.versions import compat, disaggregation

OPTION = "--disaggregation-mode"
OFF, PREFILL, DECODE = "null", "prefill", "decode"
TRANSFER = "mooncake"
"""SGLang's transfer backend that moves host memory as the room's blocks are."""

PREFIXES = "--disaggregation-decode-enable-radix-cache"
STAGING = "SGLANG_DISAGG_STAGING_BUFFER"
PAIRS_GPU_VERSIONS = seen_on_gpu("two servers")
"""Versions of SGLang with which a request went from one server to another on a GPU."""


def mode_of(args: Any) -> str:
    """What the server does: ``OFF`` if all, else ``PREFILL`` or ``DECODE``."""
    return str(getattr(compat.resolved(args), "disaggregation_mode", OFF) or OFF)


def problems(args: Any, config: DiffKVConfig) -> list[str]:
    """What does not work of the user's arguments where a server does one half, each with what to do."""
    mode, view = mode_of(args), compat.resolved(args)
    if mode == OFF:
        return []
    served = [version for version, release in RELEASES.items() if release.disaggregation]
    if not compat.installed().disaggregation:
        return [
            f"{OPTION} with SGLang {compat.sglang_version()}, where it was not tested: install SGLang "
            f"{', '.join(served)}, or drop {OPTION}"
        ]

    def given(name: str, off: Any = None) -> Any:
        return getattr(view, name, off)

    def changed(name: str) -> bool:
        """Whether an option has another value than this SGLang's default, which is not the same in all releases."""
        return hasattr(view, name) and given(name) != compat.default_of(name)

    drop = f"drop it, or {OPTION}"
    backend = given("disaggregation_transfer_backend")
    found = {
        f"--disaggregation-transfer-backend {backend}: use {TRANSFER}, which moves host memory": backend != TRANSFER,
        f"--nnodes {given('nnodes')} with {OPTION}: keep each server on one host": (given("nnodes") or 1) > 1,
        f"--dp-size {given('dp_size')} with {OPTION}: start as many servers": (given("dp_size") or 1) > 1,
        f"--page-size {given('page_size')} with {OPTION}: {drop}": (given("page_size") or 1) > 1,
        f"speculative decoding with {OPTION}: drop one of them": bool(algorithm_of(view)),
        f"LoRA with {OPTION}: drop one of them": bool(given("enable_lora") or given("lora_paths")),
        f"--enable-hierarchical-cache with {OPTION}: drop one of them": host_options.asks_for_host_tier(args),
        f"--kv-canary with {OPTION}: drop one of them": given("kv_canary", "none") != "none",
        f"--enable-mixed-chunk with {OPTION}: drop one of them": given("enable_mixed_chunk"),
        f"{PREFIXES} with SGLang {compat.sglang_version()}, whose paused requests would unlock what they did not lock: "
        f"{drop}": given("disaggregation_decode_enable_radix_cache") and not compat.installed().transfer_reasons,
        f"--disaggregation-decode-host-receive-threshold: {drop}": (
            changed("disaggregation_decode_host_receive_threshold")
        ),
        f"--disaggregation-decode-retraction-backup host_pool: {drop}": (
            given("disaggregation_decode_retraction_backup") == "host_pool"
        ),
        f"--disaggregation-decode-allocation-policy {given('disaggregation_decode_allocation_policy')}: {drop}": (
            changed("disaggregation_decode_allocation_policy")
        ),
        f"--disaggregation-enable-kv-checksum: {drop}; rows have checksums": given("disaggregation_enable_kv_checksum"),
        f"--optimistic-prefill-attempts with {OPTION}: {drop}": (given("optimistic_prefill_attempts") or 0) > 0,
        f'"prefix_fidelity": "exact" with {OPTION}: leave it out': config.prefix_fidelity == "exact",
        f"a policy that compresses running requests in pages of their own, with {OPTION}: choose another": (
            config.build_policy().running is not None
        ),
        f"{STAGING} with {OPTION}: unset it": os.environ.get(STAGING, "").lower() in ("1", "true", "yes", "y"),
    }
    unseen = [] if compat.sglang_version() in PAIRS_GPU_VERSIONS else [OPTION]
    ranks_seen = compat.sglang_version() in disaggregation.RANKS_GPU_VERSIONS
    unseen += [f"--tp-size {given('tp_size')} with {OPTION}"] if (given("tp_size") or 1) > 1 and not ranks_seen else []
    unseen += [PREFIXES] if given("disaggregation_decode_enable_radix_cache") else []
    untried = [text for what in unseen for text in compat.untried_on_a_gpu(given("device"), what, "drop it")]
    return untried + [text for text, wrong in found.items() if wrong]


def model_problems(configurator: Any) -> list[str]:
    """What is wrong with a model for servers that do one half. ``configurator``: SGLang's KVCacheConfigurator."""
    args = getattr(configurator, "server_args", None)
    if args is None or mode_of(args) == OFF:
        return []
    found = {
        f"states of layers that do not attend, with {OPTION}: drop it": (
            getattr(configurator, "mambaish_config", None) is not None
        ),
        f"images, with {OPTION}: drop it": getattr(configurator.model_config, "is_multimodal", False),
    }
    return [text for text, wrong in found.items() if wrong]


def transfer_blocks(args: Any, geometry: Geometry) -> int:
    """Blocks of host memory for rows on their way; 0 where one server does all."""
    return 0 if mode_of(args) == OFF else room_blocks(geometry)


def check_room(args: Any, plan: MemoryPlan, longest: int) -> None:
    """Raise UnsupportedError if this machine has no free memory for rows on their way. ``longest``: tokens of a row.

    Before weights load only ``--max-total-tokens`` tells the size of the pool, which bounds a row.
    """
    if mode_of(args) == OFF:
        return
    pool = getattr(compat.resolved(args), "max_total_tokens", None) or 2 * longest
    ranks = ranks_here(compat.resolved(args))
    size, free = ranks * room_bytes(plan.geometry(pool, 1, longest)), free_host_memory()
    if size > free:
        each = f" of {ranks} ranks" if ranks > 1 else ""
        raise UnsupportedError(
            f"diffkv: {OPTION} takes {size / GIB:.2f} GiB of host memory for rows between servers{each}, of which one "
            f"has up to {longest} tokens, and {free / GIB:.2f} GiB are free: {LESS_ROOM}"
        )


def init_kv_manager(original: Any, self: Any) -> Any:
    """SGLang is about to register the memory that its transfer engine reads or writes, and to tell other servers of
    itself. What it tells is what rows are here: it refuses a server that tells otherwise."""
    requests = requests_of(self.scheduler)
    transfer = None if requests is None else requests.manager.transfer
    if requests is None or transfer is None:
        return original(self)
    scheduler, config = self.scheduler, load_config()
    manager, runner = requests.manager, scheduler.tp_worker.model_runner
    ranks = manager.ranks
    facts = row_facts(config, of_all_ranks(own_means.digest(), ranks), of_all_ranks(own_shaping.digest(), ranks))
    model = of_all_ranks(model_digest(scheduler.server_args, scheduler.model_config), ranks)
    origin = Origin.of(manager.geometry, manager.state.dtype, model, str(facts["digest"]), ranks)
    transfer.origin = origin
    told = {"rows": VERSION, **facts, "model": origin.model, "dtype": origin.dtype, **dict(origin.shape)}
    told["kv_heads"] = int(scheduler.model_config.get_total_num_kv_heads())
    usual, runner.kv_cache_dtype_str = runner.kv_cache_dtype_str, disaggregation.told_of_rows(told)
    try:
        found = original(self)
    finally:
        runner.kv_cache_dtype_str = usual
    disaggregation.keep_device(found, manager.state.device)
    disaggregation.keep_rooms_apart(found)
    disaggregation.send_whole_blocks(found)
    return found


def of_all_ranks(digest: str, ranks: Ranks) -> str:
    """One name, in hex, for what each rank has named: the same on all of them, and each rank's own if these are equal,
    as of one rank. Empty if each is. All ranks have to call it."""
    if ranks.alone:
        return digest
    every = ranks.each(int(digest[:15] or "0", 16))
    if len({*every}) == 1:
        return digest
    return hashlib.blake2b(repr(every).encode(), digest_size=16).hexdigest() if any(every) else ""


def check_status(original: Any, self: Any, bootstrap_room: int) -> Any:
    """A room that SGLang has dropped, while a request still asks for it, has failed."""
    try:
        return original(self, bootstrap_room)
    except KeyError:
        if not disaggregation.speaks_of_rows(self.kv_cache_dtype_str):
            raise
        return disaggregation.transfer_states().Failed


HOOKS = (init_kv_manager, check_status)
