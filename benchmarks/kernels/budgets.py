"""One compression of a running request (Zipage's): its time by part, for budgets, ways to compare keys and strides.

A compression is launched between two decode steps, so its time includes its launches. Examples, the second one Zipage's
Figure 10:

    python -m benchmarks.kernels.budgets --tokens 1024 2048 4096 --output budgets.json
    python -m benchmarks.kernels.budgets --tokens 2048 --redundancy lightning --layer-stride 1 2 4 8 16 32
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.cases import Case, build_state
from benchmarks.provenance import provenance
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.layout.page_format import EMPTY
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
    tier: str, tokens: int, way: str, repeats: int, layers: int = LAYERS, device: str = "cuda",
    clock: Clock = gpu_clock, layer_stride: int | None = None,
) -> dict[str, float]:  # fmt: skip
    """Milliseconds to score a row and to move what it keeps, ``layer_stride`` layers at a time, medians over
    ``repeats`` rows; of both, over as many rows more, between whose layers nobody waits; and bytes for scoring."""
    case = Case(2 * repeats, Q_HEADS, KV_HEADS, HEAD_DIM, tokens, tier, 1.0, longest=tokens * STRETCH)
    state = build_state(case, layers, device=device)
    positions = state.tiers[0].positions
    positions[:] = torch.where(positions[:] < 0, EMPTY, positions[:] * STRETCH)
    options: dict[str, Any] = {"max_blocks": tokens // BLOCK, "block": BLOCK, **WAYS[way]}
    policy = ZipagePolicyConfig(**options, layer_stride=layer_stride).build()
    length = tokens * STRETCH
    ops = TritonOps(state, policy, Q_HEADS, length)
    queries = torch.randn(layers, policy.window, Q_HEADS, HEAD_DIM, device=device).to(state.dtype)

    def compress(row: int, clock: Clock) -> tuple[float, float]:
        """Seconds to score and to move."""
        scored = moved = 0.0
        for at, some in state.groups(layer_stride):
            times = [clock()]
            scoring = ops.score_running(
                some, row, length, queries[at], Scaling(HEAD_DIM**-0.5), first=row % 2 == 0, most=tokens
            )
            times.append(clock())
            ops.compact_scored(some, row, length, scoring)
            times.append(clock())
            scored, moved = scored + times[1] - times[0], moved + times[2] - times[1]
        return scored, moved

    parts = [compress(row, clock) for row in range(1, repeats + 1)]
    together = []
    for row in range(repeats + 1, 2 * repeats + 1):
        began = clock()
        compress(row, lambda: 0.0)
        together.append(clock() - began)
    warm = 3 if repeats > 3 else 0
    return {
        "judge_ms": 1e3 * statistics.median(scored for scored, _ in parts[warm:]),
        "move_ms": 1e3 * statistics.median(moved for _, moved in parts[warm:]),
        "together_ms": 1e3 * statistics.median(together),
        "memory_bytes": ops.decisions.nbytes(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiers", nargs="+", default=["BF16", "K8V4"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096], help="budgets, whole blocks")
    parser.add_argument("--redundancy", nargs="+", choices=WAYS, default=[*WAYS], help="ways to compare keys")
    parser.add_argument("--layer-stride", type=int, nargs="+", default=[LAYERS], help=f"of {LAYERS} layers")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: Triton's interpreter")
    parser.add_argument("--output", type=Path, help="write everything to this JSON file")
    args = parser.parse_args(argv)
    clock = gpu_clock if args.device == "cuda" else time.perf_counter
    rows: list[dict[str, Any]] = []
    for tier, tokens, way, stride in product(args.tiers, args.tokens, args.redundancy, args.layer_stride):
        found = compressions(tier, tokens, way, args.repeats, LAYERS, args.device, clock, stride)
        rows.append({"tier": tier, "tokens": tokens, "redundancy": way, "layer_stride": stride, **found})
        print(json.dumps(rows[-1]), flush=True)
    names = ["tier", "budget", "redundancy", "layer stride", "score, ms", "move, ms", "together, ms", "memory, MB"]
    cells = [
        [
            x["tier"], str(x["tokens"]), x["redundancy"], str(x["layer_stride"]),
            *(f"{x[name]:.2f}" for name in ("judge_ms", "move_ms", "together_ms")), f"{x['memory_bytes'] / 1e6:.1f}",
        ]
        for x in rows
    ]  # fmt: skip
    print(markdown(names, cells))
    if args.output:
        args.output.write_text(json.dumps({"provenance": provenance("kernels.budgets", argv), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
