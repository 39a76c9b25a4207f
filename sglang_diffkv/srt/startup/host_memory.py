"""Host memory for evicted prefixes: SGLang's options of its hierarchical cache, as the plugin's host tier takes them.

SGLang's own hierarchical cache stays off (``decline_hierarchical_cache``), so its scheduler does nothing for it.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.mem_pool.host_pages import GIB
from sglang_diffkv.mem_pool.saved_segments import GUESTS
from sglang_diffkv.srt.models.speculation import drafts_by_model
from sglang_diffkv.srt.startup import disk_store, host_options
from sglang_diffkv.srt.versions import compat

OPTION = "--enable-hierarchical-cache"
CGROUP_LIMIT, CGROUP_USED = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
MEMINFO = Path("/proc/meminfo")
GB = 10**9
"""SGLang's unit of ``--hicache-size``."""
USUAL_RATIO, USUAL_FRACTION = 2.0, 0.8


@dataclass(frozen=True)
class HostTierPlan:
    """Host memory for evicted prefixes, with which retracted requests share it.

    Attributes:
        write_policy: when prefixes are copied, as SGLang names it. ratio: of the pool's pages, if ``size`` is 0. size:
            bytes. most: bytes that a ratio may take at most.
    """

    write_policy: str
    ratio: float
    size: int = 0
    most: int | None = None
    guests: ClassVar[str] = GUESTS

    def bytes_for(self, pool: int) -> int:
        """Bytes beside a pool whose pages have so many."""
        asked = int(self.ratio * pool)
        return self.size or (asked if self.most is None else min(asked, self.most))

    def describe(self, pool: int) -> str:
        """For the log and the doctor. ``pool``: bytes of the pool's pages."""
        size, asked = self.bytes_for(pool), self.size or int(self.ratio * pool)
        less = f", as far as that is free (--hicache-ratio asks for {asked / GIB:.2f})" if size < asked else ""
        return f"kept in up to {size / GIB:.2f} GiB of the host's memory ({self.write_policy}){less}"


def host_memory() -> int:
    """Bytes of this machine's memory, or what of it a container may have."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, _number(CGROUP_LIMIT, machine))


def free_host_memory() -> int:
    """Bytes of it that are free, or can be."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = dict(line.split(":") for line in MEMINFO.read_text(encoding="ascii").splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        free = machine
    return min(free, max(_number(CGROUP_LIMIT, machine) - _number(CGROUP_USED, 0), 0))


def _number(path: Path, otherwise: int) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no limit, or no such file
        return otherwise


def problems(args: Any, config: DiffKVConfig) -> list[str]:
    """What does not work with the host tier that the user's arguments ask for, each with what to do."""
    if not host_options.asks_for_host_tier(args):
        return disk_store.problems_alone(args)
    view = compat.resolved(args)
    drop = f"drop {OPTION}"
    found = {
        f"{OPTION} with --disable-radix-cache: drop one of them": getattr(view, "disable_radix_cache", False),
        f"{OPTION} with --kv-canary, which would have to know what comes back: drop one of them": (
            getattr(view, "kv_canary", "none") != "none"
        ),
        f"{OPTION} with SGLANG_RADIX_FORCE_MISS, by which nothing is found again: unset it": _switched_on(
            "SGLANG_RADIX_FORCE_MISS"
        ),
        f"{OPTION} with a policy that compresses running requests in pages of their own: {drop}, or choose another": (
            config.build_policy().running is not None
        ),
        f'{OPTION} with "host_gib", whose place --hicache-size takes: leave "host_gib" out': bool(config.host_gib),
        "--hicache-ratio of 0 or less without --hicache-size: give one of them more": (
            getattr(view, "hicache_size", 0) <= 0 and _ratio(view) <= 0
        ),
        "--hicache-ratio that is no finite number: give another, or --hicache-size": not math.isfinite(_ratio(view)),
        "--hicache-size below 0: give 0 to use --hicache-ratio, or more": getattr(view, "hicache_size", 0) < 0,
        "--hicache-host-memory-fraction that is not above 0 and at most 1: give another": (
            not 0 < _fraction(view) <= 1
        ),
    }
    unseen = []
    if drafts_by_model(view):
        unseen = compat.untried_on_a_gpu(getattr(view, "device", None), f"{OPTION} with a draft model", drop)
    return [text for text, wrong in found.items() if wrong] + unseen + disk_store.problems(args)


def _switched_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "y")


def _ratio(view: Any) -> float:
    ratio = getattr(view, "hicache_ratio", None)
    return USUAL_RATIO if ratio is None else ratio


def _fraction(view: Any) -> float:
    fraction = getattr(view, "hicache_host_memory_fraction", None)
    return USUAL_FRACTION if fraction is None else fraction


def host_tier(configurator: Any) -> HostTierPlan | None:
    """The host memory that a user's arguments ask for; None if they ask for none. ``configurator``: SGLang's
    KVCacheConfigurator, or what is known of it before weights are loaded.

    Raises UnsupportedError for a model whose prefixes cannot come back, and for more memory than is free.
    """
    args = getattr(configurator, "arguments", None) or configurator.server_args
    if not host_options.asks_for_host_tier(args):
        return None
    if getattr(getattr(configurator, "mambaish_config", None), "short_conv_layer_ids", None):
        raise UnsupportedError(
            f"--attention-backend diffkv does not work with {OPTION} for a model with short convolutions and n-grams "
            f"beside its states, which would have to come back too: drop {OPTION}"
        )
    disk_store.check_model(args, configurator)
    view = compat.resolved(args)
    stated = getattr(configurator, "mambaish_config", None) is not None
    if stated and drafts_by_model(view):
        raise UnsupportedError(
            f"--attention-backend diffkv does not work with {OPTION} for a model with states beside a draft model: "
            "host memory has room for what one of them keeps of a prefix. Drop it, or use --speculative-algorithm NGRAM"
        )
    what = f"{OPTION} for a model with states"
    if stated and (unseen := compat.untried_on_a_gpu(getattr(view, "device", None), what, f"drop {OPTION}")):
        raise UnsupportedError(f"--attention-backend diffkv: {unseen[0]}")
    replicas = (getattr(view, "dp_size", 1) or 1) * ranks_here(view)
    free, size = free_host_memory() // replicas, int(max(getattr(view, "hicache_size", 0), 0) * GB)
    lent = disk_store.bytes_lent(args) // ranks_here(view)
    if lent > free:
        raise UnsupportedError(
            f"diffkv: the store's global_segment_size takes {lent / GIB:.1f} GiB of host memory for each rank, and "
            f"{free / GIB:.1f} GiB are free: give the store less"
        )
    free -= lent
    if size > free:
        each = f" for each of {replicas} ranks and replicas" if replicas > 1 else ""
        raise UnsupportedError(
            f"diffkv: --hicache-size asks for {size / GIB:.1f} GiB of host memory{each}, and {free / GIB:.1f} GiB "
            "are free: ask for less"
        )
    return HostTierPlan(view.hicache_write_policy, _ratio(view), size, int(_fraction(view) * free))


def ranks_here(view: Any) -> int:
    """Ranks of a server that share this machine's memory."""
    return max(getattr(view, "tp_size", 1) // (getattr(view, "nnodes", 1) or 1), 1)
