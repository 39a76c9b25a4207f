"""Decode attention over requests of uneven lengths: programs shared out by length against equally many for each.

Both ways attend to the same pages in the same run. Lengths: equal, even steps from a
16th of the longest up, and one long request among short ones. Example:

    python -m benchmarks.kernels.uneven --output uneven.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.attention import HEAD_DIM, TIERS, WINDOW
from benchmarks.kernels.cases import Case, build_state
from benchmarks.kernels.timing import Timer, median_ms
from benchmarks.provenance import provenance
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.kernels.decode_attention.triton import FoundTokens, decode_attention
from sglang_diffkv.kernels.decode_attention.triton_workspace import DecodeConfig, DecodeWorkspace
from sglang_diffkv.mem_pool.state import PageState

Q_HEADS, KV_HEADS, LONGEST = 32, 8, 5120
BATCHES = (8, 32, 64, 96, 128, 192)
SHAPES = ("equal", "steps", "one long")


def lengths_of(shape: str, batch: int) -> list[float]:
    """Lengths, in those of the longest request."""
    if shape == "equal":
        return [0.5] * batch
    if shape == "steps":
        return [1 / 16 + 15 / 16 * i / max(batch - 1, 1) for i in range(batch)]
    return [1.0] + [1 / 8] * (batch - 1)


def shorten(state: PageState, shares: Sequence[float]) -> None:
    """Row ``b + 1`` keeps so much of its pages of each tier, but one at least where it has any."""
    for row, share in enumerate(shares, 1):
        state.entries[row] = (state.entries[row] * share).ceil().int()
        state.own_tokens[row] = (state.own_tokens[row] * share).int()


def times(shape: str, batch: int, high: float, timer: Timer = median_ms, device: str = "cuda") -> dict[str, float]:
    """Microseconds of a layer, with scores."""
    case = Case(batch, Q_HEADS, KV_HEADS, HEAD_DIM, LONGEST, TIERS, high)
    layers = case.layers()
    state = build_state(case, layers, device=device)
    shorten(state, lengths_of(shape, batch))
    q = torch.randn(layers, batch, Q_HEADS, HEAD_DIM, device=device).bfloat16()
    rows = torch.arange(1, batch + 1, device=device)
    seq_lens = torch.tensor([round(LONGEST * x) for x in lengths_of(shape, batch)], device=device)
    valid = torch.tensor([batch], dtype=torch.int32, device=device)
    searches = FoundTokens.create(state, batch, judge_low=False)

    def attend(workspace: DecodeWorkspace) -> None:
        for layer in range(layers):
            decode_attention(
                state, layer, q[layer], rows, seq_lens, HEAD_DIM**-0.5, workspace, valid, found=searches, window=WINDOW
            )

    found = {}
    for name, config in {"evenly": DecodeConfig(), "by length": DecodeConfig(by_length=True)}.items():
        workspace = DecodeWorkspace.create(state, batch, Q_HEADS, max_tokens=LONGEST, config=config)
        workspace.plan(state, rows, valid, judge_low=False)
        found[name] = 1000 * timer(partial(attend, workspace), layers)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--high", nargs="+", type=float, default=[1.0, 0.3], help="share of the high tier")
    parser.add_argument("--output", type=Path, help="write everything to this JSON file")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for high in args.high:
        for shape in SHAPES:
            for batch in args.batches:
                row = {"lengths": shape, "batch": batch, "high": high, **times(shape, batch, high)}
                rows.append(row)
                print(json.dumps(row), flush=True)
    cells = [
        [x["lengths"], str(x["batch"]), f"{x['high']:.0%}", *(f"{x[k]:.0f}" for k in ("evenly", "by length"))]
        for x in rows
    ]
    print(markdown(["lengths", "batch", "high", "evenly, us", "by length, us"], cells))
    if args.output:
        args.output.write_text(json.dumps({"provenance": provenance("kernels.uneven", argv), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
