"""Show the KV cache of a running server: tier shares, page occupancy, and a heat map by layer and KV head.

Figures are those of live tokens at the moment of asking, so ask while requests run or while the prefix cache holds
prompts. Or show a file that a server wrote with --hicache-storage-backend: what it is of, its pages, and whether it is
damaged. Examples:

    python -m sglang_diffkv.inspect --url http://127.0.0.1:30000 --png cache.png
    python -m sglang_diffkv.inspect FOLDER/sglang_diffkv/ab/ab.../cd....segment
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sglang_diffkv.arguments import output_file
from sglang_diffkv.extra import require
from sglang_diffkv.inspect import segment_file, terminal
from sglang_diffkv.inspect.snapshot import QUANTITIES, InspectError, fetch
from sglang_diffkv.mem_pool.segment_object import ObjectRefused


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_diffkv.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--url", help="of the server, for example http://127.0.0.1:30000")
    asked.add_argument("file", nargs="?", type=Path, help="that a server wrote: a segment of its prefix cache")
    parser.add_argument("--what", choices=list(QUANTITIES), default="bytes", help="of the map (default: %(default)s)")
    parser.add_argument("--png", type=output_file, help="also write the map to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Show it; 1 with the reason if the server does not run diffkv, or the file is no segment or damaged."""
    args = parse_args(argv)
    if args.png:
        require("matplotlib")
    console = Console()
    try:
        if args.file is not None:
            console.print(segment_file.describe(segment_file.read(args.file)))
            return 0
        snapshot = fetch(args.url)
        console.print(terminal.summary(snapshot))
        console.print(terminal.heat_map(snapshot, args.what))
        if args.png:
            from sglang_diffkv.inspect.figure import draw

            draw(snapshot, args.what, args.png)
            console.print(f"written to {args.png}")
    except (InspectError, ObjectRefused, OSError) as error:
        print(f"sglang_diffkv.inspect: {error}", file=sys.stderr)
        return 1
    return 0
