"""Decode attention over requests and heads of uneven sizes, against an even batch of as many bytes.

Lengths: equal; even steps from a 16th of the longest up; lognormal; one long request among short ones; and equal
lengths of which heads keep uneven shares. Bytes that must be read per second, and their share of the
even batch's. Example:

    python -m benchmarks.kernels.uneven --output uneven.json
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.attention import HEAD_DIM, TIERS, WINDOW
from benchmarks.kernels.cases import Case, build_state
from benchmarks.kernels.timing import Timer, median_ms
from benchmarks.provenance import provenance
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.kernels.decode_attention.triton import FoundTokens, decode_attention
from sglang_diffkv.kernels.decode_attention.triton_workspace import DecodeWorkspace
from sglang_diffkv.layout.state import PageState

Q_HEADS, KV_HEADS, TOKENS = 32, 8, 160_000
BATCHES = (8, 40, 64, 128)
SHAPES = ("equal", "steps", "lognormal", "one long", "heads")
WAYS = {"without scores": False, "with scores": True}


def sizes_of(shape: str, batch: int) -> list[list[float]]:
    """Sizes [batch][KV heads] with a mean of 1."""
    draw = random.Random(f"uneven {shape} {batch}")
    sizes = [[1.0] * KV_HEADS for _ in range(batch)]
    for number, row in enumerate(sizes):
        size = {
            "steps": 1 / 16 + 15 / 16 * number / max(batch - 1, 1),
            "lognormal": draw.lognormvariate(0, 0.8),
            "one long": 1.0 if number else batch / 4,
        }.get(shape, 1.0)
        row[:] = [size * (draw.lognormvariate(0, 0.5) if shape == "heads" else 1.0) for _ in row]
    mean = sum(map(sum, sizes)) / (batch * KV_HEADS)
    return [[x / mean for x in row] for row in sizes]


def shorten(state: PageState, shares: Sequence[Sequence[float]]) -> None:
    """Of row ``b + 1`` each head keeps so much of its pages of each tier, but one at least where it has any."""
    for row, of_heads in enumerate(shares, 1):
        share = torch.tensor(of_heads, device=state.device)[None, :, None]  # [1, H, 1]
        state.entries[row] = (state.entries[row] * share).ceil().int()
        state.own_tokens[row] = (state.own_tokens[row] * share).int()


def held_bytes(state: PageState, batch: int) -> int:
    """Bytes of the pages that the rows hold, of a layer."""
    return int(state.entries[1 : batch + 1, 0].sum()) * state.fmt.page_bytes


def rate(shape: str, batch: int, high: float, *, scores: bool, timer: Timer = median_ms, device: str = "cuda") -> float:
    """GB of pages a second in a layer's decode attention."""
    sizes = sizes_of(shape, batch)
    most = max(map(max, sizes))
    length = TOKENS // batch
    case = Case(batch, Q_HEADS, KV_HEADS, HEAD_DIM, round(length * most), TIERS, high)
    layers = Case(batch, Q_HEADS, KV_HEADS, HEAD_DIM, length, TIERS, high).layers()
    state = build_state(case, layers, device=device)
    shorten(state, [[x / most for x in row] for row in sizes])
    q = torch.randn(layers, batch, Q_HEADS, HEAD_DIM, device=device).bfloat16()
    rows = torch.arange(1, batch + 1, device=device)
    seq_lens = torch.tensor([round(length * max(row)) for row in sizes], device=device)
    valid = torch.tensor([batch], dtype=torch.int32, device=device)
    searches = FoundTokens.create(state, batch, score_low=False) if scores else None
    workspace = DecodeWorkspace.create(state, batch, Q_HEADS, max_tokens=case.length if scores else 0)
    workspace.plan(state, rows, valid, score_low=False)

    def attend() -> None:
        for layer in range(layers):
            decode_attention(
                state, layer, q[layer], rows, seq_lens, HEAD_DIM**-0.5, workspace, valid, found=searches, window=WINDOW
            )

    return held_bytes(state, batch) / timer(attend, layers) / 1e6


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--high", nargs="+", type=float, default=[1.0, 0.5, 0.0], help="share of the high tier")
    parser.add_argument("--output", type=Path, help="write everything to this JSON file")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for high in args.high:
        for batch in args.batches:
            for shape in args.shapes:
                speeds = {name: rate(shape, batch, high, scores=scores) for name, scores in WAYS.items()}
                rows.append({"lengths": shape, "batch": batch, "high": high, **speeds})
                print(json.dumps(rows[-1]), flush=True)
    even = {(x["batch"], x["high"]): x for x in rows if x["lengths"] == "equal"}
    cells = [
        [
            x["lengths"],
            str(x["batch"]),
            f"{x['high']:.0%}",
            *(_cell(x, even.get((x["batch"], x["high"])), k) for k in WAYS),
        ]
        for x in rows
    ]
    print(markdown(["sizes", "batch", "high", *(f"{way}, GB/s" for way in WAYS)], cells))
    if args.output:
        args.output.write_text(json.dumps({"provenance": provenance("kernels.uneven", argv), "rows": rows}, indent=1))
    return 0


def _cell(row: dict[str, Any], even: dict[str, Any] | None, way: str) -> str:
    share = f" ({row[way] / even[way]:.0%})" if even else ""
    return f"{row[way]:.0f}{share}"


if __name__ == "__main__":
    raise SystemExit(main())
