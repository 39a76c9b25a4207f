"""Decode attention and page management on a GPU: milliseconds, GB/s and the ratios to others in the same run.

    python -m benchmarks.kernels [--quick] [--parts management prompts attention] [--out benchmarks/results]

Others are FlashInfer's paged decode on a bf16 and an fp8 cache and SGLang's Triton decode; without them their columns
stay empty, and the report says so. Every time is the median of CUDA-graph replays over inputs several times larger
than the L2 cache. Results are kept after every case: kernels.json, kernels.md and charts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.budget import Budget
from benchmarks.kernels.attention import BATCHES, HEADS, LENGTHS, Baselines, all_cases, attention_rows, quick_cases
from benchmarks.kernels.management import management_rows
from benchmarks.kernels.prompts import prompt_rows
from benchmarks.kernels.report import write_charts, write_tables
from benchmarks.kernels.timing import read_bandwidth
from benchmarks.provenance import provenance
from sglang_diffkv.drawing import drawn

GUESSES = {"attention": 20.0, "management": 30.0, "prompts": 30.0}
PARTS = ("management", "prompts", "attention")


def heads_pair(text: str) -> tuple[int, int]:
    """``QUERY/KV`` heads."""
    query, slash, kv = text.partition("/")
    try:
        pair = int(query), int(kv)
    except ValueError:
        pair = 0, 1
    if not slash or min(pair) < 1 or pair[0] % pair[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not QUERY/KV heads with whole groups, for example 32/8")
    return pair


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ``args.cases`` and ``args.step_batches`` are what to measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="batch 64, lengths 4k and 16k only")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--heads", nargs="+", type=heads_pair, default=HEADS, metavar="QUERY/KV")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument(
        "--step-batches", nargs="+", type=int, help="of the page management, steps and prompts (default: 1 to 256)"
    )
    parser.add_argument(
        "--step-length", type=int, default=1024, help="of its attention, and of the prompts (default: %(default)s)"
    )
    parser.add_argument("--budget-seconds", type=float, help="skip cases that would not end within this time")
    parser.add_argument("--out", "--output", type=Path, default=Path("benchmarks/results"), help="folder")
    args = parser.parse_args(argv)
    args.cases = quick_cases() if args.quick else all_cases(args.heads, args.lengths, args.batches)
    args.step_batches = args.step_batches or ([1, 16, 64] if args.quick else [1, 4, 16, 64, 128, 256])
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the results; 1 if nothing was measured. Page management comes first: it takes less time."""
    args = parse_args(argv)
    if not torch.cuda.is_available():
        print("a CUDA GPU is needed", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    budget = Budget(args.budget_seconds, GUESSES)
    baselines = Baselines()
    data: dict[str, Any] = {
        "kind": "kernels",
        "provenance": provenance("kernels", argv),
        "read_gb_s": read_bandwidth(),
        "step_length": args.step_length,
        "notes": [],
        "attention": [],
        "management": [],
        "prompts": [],
    }
    print(json.dumps({**data["provenance"], "read_gb_s": data["read_gb_s"]}), flush=True)

    def keep(table: str, row: dict[str, Any]) -> None:
        data[table].append(row)
        data["notes"] = list(baselines.notes)
        write_tables(data, args.out)

    if "management" in args.parts:
        management_rows(args.step_batches, args.step_length, budget, lambda row: keep("management", row))
    if "prompts" in args.parts:
        prompt_rows(args.step_batches, args.step_length, budget, lambda row: keep("prompts", row))
    if "attention" in args.parts:
        attention_rows(args.cases, data["read_gb_s"], budget, lambda row: keep("attention", row), baselines)
    drawn(lambda: write_charts(data, args.out), "python -m benchmarks.redraw kernels.json")
    measured = [row for table in PARTS for row in data[table] if "skipped" not in row]
    return int(not measured)


if __name__ == "__main__":
    sys.exit(main())
