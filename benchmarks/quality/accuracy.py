"""Accuracy and cache bytes of several cache configurations on a split of ``benchmarks/data``.

A short way to call ``python -m sglang_diffkv.evaluate``, which reads other task files as well. One server is started
for each ``--config``: ``stock``, ``fp8`` or ``NAME=JSON``. The others are compared with the first. Example:

    python -m benchmarks.quality.accuracy --exclude chain vars --n 250 --config stock \\
        --config 'k8v4={"tiers": ["K8V4"]}' --output results.json
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import splits
from benchmarks.paths import DATA, NANO
from sglang_diffkv.evaluate import cli


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", required=True, metavar="NAME=JSON")
    parser.add_argument("--split", choices=splits.SPLITS, default="calib")
    cli.add_question_arguments(parser)
    parser.set_defaults(n=250, levels=["easy", "medium"])
    parser.add_argument("--model", default=str(NANO), help="default: the nano model of the repository")
    parser.add_argument("--min-tokens", action="store_true", help="no effect: long requests are always shown")
    parser.add_argument("--output", type=Path, help="write all figures to this file, answers to the folder FILE.d")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run every configuration and print the tables."""
    args = parse_args(argv)
    args.url, args.name = None, None
    args.task = [f"reference={DATA / args.split}.jsonl.xz"]
    output = args.output
    with tempfile.TemporaryDirectory() as scratch:
        args.output = Path(f"{output}.d") if output else Path(scratch)
        status = cli.run(args)
        if output and status == 0:
            output.write_bytes((args.output / "results.json").read_bytes())
    return status


if __name__ == "__main__":
    raise SystemExit(main())
