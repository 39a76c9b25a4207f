"""One compression of a running request (Zipage's): its time by part, for budgets and ways to compare keys.

A compression is launched between two decode steps, so its time includes its launches. Example:

    python -m benchmarks.kernels.budgets --tokens 1024 2048 4096 --output budgets.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.cases import Case, build_state
from benchmarks.provenance import provenance
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.mem_pool.page_format import EMPTY
from sglang_diffkv.ops.base import Scaling
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.zipage import ZipagePolicyConfig

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 32, 8, 128, 256
STRETCH = 4
"""Tokens of the request for each that it holds."""
WAYS: dict[str, dict[str, Any]] = {
    "no redundancy": {"redundancy": 0},
    "lightning": {"compare": "block"},
    "flash": {"compare": "all"},
}

Clock = Callable[[], float]


def gpu_clock() -> float:
    """Seconds, when all that was launched has run."""
    torch.cuda.synchronize()
    return time.perf_counter()


def compressions(
    tier: str, tokens: int, way: str, repeats: int, layers: int = LAYERS, device: str = "cuda", clock: Clock = gpu_clock
) -> dict[str, float]:
    """Milliseconds to judge a row and to move what it keeps, medians over ``repeats`` rows."""
    case = Case(repeats, Q_HEADS, KV_HEADS, HEAD_DIM, tokens, tier, 1.0, longest=tokens * STRETCH)
    state = build_state(case, layers, device=device)
    positions = state.tiers[0].positions
    positions[:] = torch.where(positions[:] < 0, EMPTY, positions[:] * STRETCH)
    options: dict[str, Any] = {"max_blocks": tokens // BLOCK, "block": BLOCK, **WAYS[way]}
    policy = ZipagePolicyConfig(**options).build()
    length = tokens * STRETCH
    ops = TritonOps(state, policy, Q_HEADS, length)
    queries = torch.randn(layers, policy.window, Q_HEADS, HEAD_DIM, device=device).to(state.dtype)
    judged, moved = [], []
    for row in range(1, repeats + 1):
        times = [clock()]
        judgement = ops.judge_running(
            state, row, length, policy, queries, Scaling(HEAD_DIM**-0.5), first=row % 2 == 0, most=tokens
        )
        times.append(clock())
        ops.compact_judged(state, row, length, judgement)
        times.append(clock())
        judged.append(times[1] - times[0])
        moved.append(times[2] - times[1])
    warm = 3 if repeats > 3 else 0
    return {
        "judge_ms": 1e3 * statistics.median(judged[warm:]),
        "move_ms": 1e3 * statistics.median(moved[warm:]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiers", nargs="+", default=["BF16", "K8V4"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096], help="budgets, whole blocks")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--output", type=Path, help="write everything to this JSON file")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for tier in args.tiers:
        for tokens in args.tokens:
            for way in WAYS:
                row = {
                    "tier": tier,
                    "tokens": tokens,
                    "redundancy": way,
                    **compressions(tier, tokens, way, args.repeats),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
    cells = [
        [x["tier"], str(x["tokens"]), x["redundancy"], f"{x['judge_ms']:.2f}", f"{x['move_ms']:.2f}"] for x in rows
    ]
    print(markdown(["tier", "budget", "redundancy", "judge, ms", "move, ms"], cells))
    if args.output:
        args.output.write_text(json.dumps({"provenance": provenance("kernels.budgets", argv), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
