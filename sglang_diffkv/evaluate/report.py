"""Figures for benchmark tables: accuracy, paired tests, cache totals, versions and hardware."""

from __future__ import annotations

import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang_diffkv.access import without_keys

TOTALS = ("requests", "tokens", "page_bytes", "token_bytes", "bf16_bytes", "high", "low", "pruned", "out_of_window")
KEPT_CACHE = "its prefix cache was not emptied ({why}), so figures depend on what was asked before"
"""What tables say of a running server of which that is so."""
IN_TIER = "tier "
"""Before a tier's name: its tokens, among totals."""


def proportion(right: Sequence[bool]) -> tuple[float, float]:
    """Share of true values and its standard error."""
    if not right:
        return math.nan, math.nan
    share = sum(right) / len(right)
    return share, math.sqrt(share * (1 - share) / len(right))


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> tuple[int, int, float]:
    """Exact McNemar test of paired results: only first right, only second right, two-sided p-value."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} results are not pairs")
    lost = sum(a and not b for a, b in zip(first, second))
    won = sum(b and not a for a, b in zip(first, second))
    return lost, won, sign_test(lost, won)


def sign_test(lost: int, won: int) -> float:
    """Two-sided p-value of the exact sign test: how likely is a split at least as uneven of a fair coin's throws?"""
    thrown = lost + won
    tail = sum(math.comb(thrown, k) for k in range(min(lost, won) + 1))
    return min(1.0, 2 * tail / 2**thrown)


def paired_error(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Standard error of the difference between two paired shares."""
    lost, won, _ = mcnemar(first, second)
    n = len(first)
    return math.sqrt(lost + won - (won - lost) ** 2 / n) / n if n else math.nan


def with_error(mean: float, error: float, form: str, n: int | None = None) -> str:
    """A number and its standard error. Alone where that is not known, or ``n`` is 1: one sample has no spread."""
    if n == 1 or math.isnan(error):
        return f"{mean:{form}}"
    return f"{mean:{form}} ± {error:{form.removeprefix('+')}}"


def totals(stats: dict[str, Any] | None, key: str = "finished") -> dict[str, float] | None:
    """The cumulative totals over finished requests in a server's statistics, or None."""
    if not stats or key not in stats:
        return None
    by_tier = {IN_TIER + name: float(held) for name, held in stats[key].get("by_tier", {}).items()}
    return {**{name: float(stats[key].get(name, 0)) for name in TOTALS}, **by_tier}


def since(after: dict[str, float] | None, before: dict[str, float] | None) -> dict[str, float] | None:
    """What was added to the totals between two readings."""
    if after is None:
        return None
    return {name: value - (before or {}).get(name, 0.0) for name, value in after.items()}


def ratios(finished: dict[str, float] | None) -> dict[str, Any] | None:
    """Ratios to bfloat16 and token shares from totals; None without any finished request. ``share_by_tier`` is empty
    where the totals do not tell tiers apart."""
    if finished is None or not finished["bf16_bytes"]:
        return None
    shares = ("high", "low", "pruned", "out_of_window")
    seen = sum(finished.get(share, 0.0) for share in shares) or math.nan
    return {
        "ratio_pages": finished["page_bytes"] / finished["bf16_bytes"],
        "ratio_tokens": finished["token_bytes"] / finished["bf16_bytes"],
        **{f"share_{share}": finished.get(share, 0.0) / seen for share in shares},
        "share_by_tier": {
            name.removeprefix(IN_TIER): held / seen for name, held in finished.items() if name.startswith(IN_TIER)
        },
    }


def named_shares(figures: Mapping[str, Any]) -> list[tuple[str, float | None]]:
    """From figures as ``ratios`` gives them: the shares ``high``, ``low`` and ``pruned``, with more than two tiers
    each one's by its name in place of the first two. Last what layers with a sliding window dropped, if any."""
    by_tier = figures.get("share_by_tier") or {}
    held = by_tier.items() if len(by_tier) > 2 else [(tier, figures[f"share_{tier}"]) for tier in ("high", "low")]
    left = figures.get("share_out_of_window")
    return [*held, ("pruned", figures["share_pruned"]), *([("out of window", left)] if left else [])]


def shares_cell(figures: Mapping[str, Any], digits: int = 0) -> str:
    """The shares in percent as a cell of a column ``high / low / pruned %``; with more than two tiers with their names.
    ``digits`` behind the point, one at least for a small share."""
    shares = named_shares(figures)
    numbers = ["" if x is None else f"{100 * x:.{max(digits, int(0 < x < 0.1))}f}" for _, x in shares]
    if len(shares) > 3:
        numbers = [f"{name} {number}" for (name, _), number in zip(shares, numbers)]
    return " / ".join(numbers)


def shares_text(figures: Mapping[str, Any]) -> str:
    """The shares as ``high 61%, low 39%, pruned 0%``, with a decimal for a small share."""
    return ", ".join(f"{tier} {_percent(share)}" for tier, share in named_shares(figures) if share is not None)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if 0 < share < 0.1 else f"{100 * share:.0f}%"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _program() -> list[str]:
    """What follows ``python``: a module by its name, not by its path on this machine."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return sys.argv[:1] if spec is None else ["-m", spec.name.removesuffix(".__main__")]


def environment() -> dict[str, Any]:
    """Command line without keys, versions and hardware of this run."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": shlex.join([Path(sys.executable).name, *_program(), *without_keys(sys.argv[1:])]),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("sglang-diffkv", "sglang", "torch", "triton")},
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpus,
    }


def version(name: str) -> str | None:
    """An installed distribution's version."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
