"""Show the KV cache of a running server: tier shares, page occupancy, and a heat map by layer and KV head.

Figures are those of live tokens at the moment of asking, so ask while requests run or while the prefix cache holds
prompts. The page of --html also has requests, the prefix tree and all else that the server tells.

A file is one that a server wrote with --hicache-storage-backend: what it is of, its pages, and whether it is damaged.
Examples:

    python -m sglang_diffkv.inspect --url http://127.0.0.1:30000 --html cache.html
    python -m sglang_diffkv.inspect --url https://HOST --serve 8080
    python -m sglang_diffkv.inspect FOLDER/sglang_diffkv/ab/ab.../cd....segment
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from sglang_diffkv import bounds
from sglang_diffkv.access import access_of, add_access_arguments, server_url
from sglang_diffkv.arguments import number, output_file
from sglang_diffkv.extra import require
from sglang_diffkv.files import named
from sglang_diffkv.inspect import segment_file, terminal
from sglang_diffkv.inspect.page import render
from sglang_diffkv.inspect.serve import PageServer
from sglang_diffkv.inspect.snapshot import QUANTITIES, InspectError, Report, read
from sglang_diffkv.mem_pool.segment_object import ObjectRefused

STDOUT = "-"


def _json_file(text: str) -> Path | str:
    return text if text == STDOUT else output_file(text)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_diffkv.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--url", type=server_url, help="of the server, for example http://127.0.0.1:30000")
    asked.add_argument("file", nargs="?", type=Path, help="that a server wrote: a segment of its prefix cache")
    add_access_arguments(parser)
    parser.add_argument("--what", choices=list(QUANTITIES), default="bytes", help="of the map (default: %(default)s)")
    parser.add_argument("--png", type=output_file, metavar="FILE", help="also write the map to this file")
    parser.add_argument("--html", type=output_file, metavar="FILE", help="also write all figures as a page")
    parser.add_argument(
        "--json", type=_json_file, metavar="FILE", help="also write them as JSON; - prints that and nothing else"
    )
    parser.add_argument(
        "--serve",
        type=number(bounds.Port),
        metavar="PORT",
        help="serve the page on this machine alone until Ctrl-C, read anew at each visit, and /json (0: any port)",
    )
    args = parser.parse_args(argv)
    if args.file is not None and (args.png or args.html or args.json or args.serve is not None):
        parser.error("a file is shown here only: --png, --html, --json and --serve are of a server")
    if args.serve is not None and (args.png or args.html or args.json):
        parser.error("--serve goes without --png, --html and --json, which write files once")
    args.access = access_of(parser, args)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Show it; 1 with the reason if the server does not run diffkv, or the file is no segment or damaged."""
    args = parse_args(argv)
    if args.png:
        require("matplotlib")
    if args.file is not None:
        return _show_file(args.file)
    try:
        ask = partial(read, args.url, access=args.access)
        if args.serve is not None:
            ask()
            return _serve(args.serve, ask)
        _write(args, ask())
    except (InspectError, OSError) as error:
        print(f"sglang_diffkv.inspect: {error}", file=sys.stderr)
        return 1
    return 0


def _show_file(path: Path) -> int:
    try:
        Console().print(segment_file.describe(segment_file.read(path)))
    except ObjectRefused as error:
        print(f"sglang_diffkv.inspect: {named(path)} is no whole file of a prefix store: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"sglang_diffkv.inspect: {named(path)} cannot be read: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def _write(args: argparse.Namespace, report: Report) -> None:
    """What the command line asks for, once."""
    if args.json == STDOUT:
        print(json.dumps(report.as_json()))
    console = Console(quiet=args.json == STDOUT)
    if args.html:
        args.html.write_text(render(report), encoding="utf-8")
        console.print(f"written to {args.html}")
    if args.json and args.json != STDOUT:
        args.json.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
        console.print(f"written to {args.json}")
    console.print(terminal.summary(report.snapshot))
    if args.json != STDOUT or args.png:
        console.print(terminal.heat_map(report.snapshot, args.what))
    if args.png:
        from sglang_diffkv.inspect.figure import draw

        draw(report.snapshot, args.what, args.png)
        console.print(f"written to {args.png}")


def _serve(port: int, ask: Callable[[], Report]) -> int:
    """Until Ctrl-C."""
    try:
        server = PageServer(port, ask)
    except OSError as error:
        why = error.strerror or error
        print(f"sglang_diffkv.inspect: --serve {port}: {why}; name another port, or 0 for any", file=sys.stderr)
        return 1
    with server:
        print(server.url, flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0
