"""A plan as a table for people, and as JSON for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from sglang_diffkv.calibration import model_name
from sglang_diffkv.capacity.estimate import Load, Row
from sglang_diffkv.capacity.gpus import Gpu
from sglang_diffkv.capacity.memory import GIB, Budget
from sglang_diffkv.capacity.model import Model

WIDTH = 118


def _range(pair: tuple[float, float] | None, scaled: bool) -> str:
    return "" if pair is None else f"{'~' * scaled}{_rounded(pair[0]):,}-{_rounded(pair[1]):,}"


def _rounded(value: float) -> int:
    """Two digits: no more is known."""
    whole = round(value)
    return round(whole, min(2 - len(str(whole)), 0))


def title_of(model: Model, gpu: Gpu | None, budget: Budget, load: Load) -> str:
    """What a plan is of, on one line."""
    where = f"{load.ranks} x {gpu.name}" if gpu is not None else f"{load.ranks} rank{'s' * (load.ranks > 1)}"
    return (
        f"{model_name(model.path.resolve().parent)} on {where}: {budget.cache / GIB:.1f} GiB for keys and values"
        f"{' of each' if load.ranks > 1 else ''}, requests of {load.prompt:,} + {load.reply:,} tokens"
    )


def table(rows: Sequence[Row]) -> str:
    """One line for each setting, aligned."""
    with_speed, with_hits = any(x.speed for x in rows), any(x.hits for x in rows)
    with_prompts = any(x.speed and x.speed.served for x in rows)
    with_host = any(x.hits and x.hits.host for x in rows)
    head = ["setting", "bytes a token", "of bf16", "tokens that fit", "at once", "staggered"]
    head += ["tokens/s, decoding"] * with_speed + ["with prompts"] * with_prompts
    head += ["found on GPU"] * with_hits + ["on host"] * with_host
    lines = [head]
    for x in rows:
        speed, hits = x.speed, x.hits
        cells = [x.setting.name, f"{x.token_bytes:,.0f}", f"{x.of_bf16:.3f}", f"{x.tokens:,}"]
        cells += [f"{x.running.together:,}", f"{x.running.mean:,.1f}"]
        cells += [_range(speed.decode, speed.scaled) if speed else ""] * with_speed
        cells += [_range(speed.served, speed.scaled) if speed else ""] * with_prompts
        cells += [f"{hits.gpu:.1%}" if hits else ""] * with_hits + [f"{hits.host:.1%}" if hits else ""] * with_host
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(f"{x:<{w}}" if at == 0 else f"{x:>{w}}" for at, (x, w) in enumerate(zip(line, widths))).rstrip()
        for line in lines
    )


def describe(title: str, rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The whole report as text."""
    said = [textwrap.fill(x, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False) for x in notes]
    return "\n".join([title, "", table(rows), "", *said])


def data(model: Model, gpu: Gpu | None, budget: Budget, load: Load, rows: Sequence[Row], notes: Sequence[str]) -> Any:
    """The whole report as JSON data. Bytes are those on one rank."""
    return {
        "model": {
            "path": str(model.path),
            "layers": model.layers,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "weight_bytes": model.weights.total,
        },
        "gpu": None if gpu is None else {"name": gpu.name, "measured": gpu.measured},
        "ranks": load.ranks,
        "cache_bytes": budget.cache,
        "prompt": load.prompt,
        "reply": load.reply,
        "settings": {x.setting.name: _row(x) for x in rows},
        "assumptions": list(notes),
    }


def _row(row: Row) -> dict[str, Any]:
    speed, hits, config = row.speed, row.hits, row.setting.config
    return {
        "token_bytes": row.token_bytes,
        "of_bf16": row.of_bf16,
        "max_total_num_tokens": row.capacity,
        "tokens": row.tokens,
        "max_running_requests": row.rows,
        "running_together": row.running.together,
        "running_staggered": row.running.mean,
        "tier_shares": None if config is None or row.shares is None else dict(zip(config.tiers, row.shares)),
        "tier_shares_assumed": row.assumed,
        "configuration": None if config is None else config.whole(),
        "decode_tokens_per_s": None if speed is None else list(speed.decode),
        "served_tokens_per_s": None if speed is None or speed.served is None else list(speed.served),
        "scaled_by_bandwidth": None if speed is None else speed.scaled,
        "hit_rate_gpu": None if hits is None else hits.gpu,
        "hit_rate_host": None if hits is None else hits.host,
    }
