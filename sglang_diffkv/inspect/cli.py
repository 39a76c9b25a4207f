"""Show the KV cache of a running server: tier shares, page occupancy, and a heat map by layer and KV head.

Figures are those of live tokens at the moment of asking, so ask while requests run or while the prefix cache holds
prompts. Example:

    python -m sglang_diffkv.inspect --url http://127.0.0.1:30000 --png cache.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from sglang_diffkv.arguments import output_file
from sglang_diffkv.extra import require
from sglang_diffkv.inspect import terminal
from sglang_diffkv.inspect.snapshot import QUANTITIES, InspectError, fetch


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_diffkv.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", required=True, help="of the server, for example http://127.0.0.1:30000")
    parser.add_argument("--what", choices=list(QUANTITIES), default="bytes", help="of the map (default: %(default)s)")
    parser.add_argument("--png", type=output_file, help="also write the map to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Show it; 1 with the reason if the server does not run diffkv."""
    args = parse_args(argv)
    if args.png:
        require("matplotlib")
    console = Console()
    try:
        snapshot = fetch(args.url)
        console.print(terminal.summary(snapshot))
        console.print(terminal.heat_map(snapshot, args.what))
        if args.png:
            from sglang_diffkv.inspect.figure import draw

            draw(snapshot, args.what, args.png)
            console.print(f"written to {args.png}")
    except (InspectError, OSError) as error:
        print(f"sglang_diffkv.inspect: {error}", file=sys.stderr)
        return 1
    return 0
