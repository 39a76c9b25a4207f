"""For benchmarks that measure one thing on a server of each backend: options, the run, and the files it leaves."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import requests

from benchmarks.budget import Budget
from benchmarks.provenance import headline, provenance
from benchmarks.serving.backends import Backend, default_backends, parse_backend, parse_diffkv
from benchmarks.serving.cli import add_model_arguments, check_model, check_names, prepare
from benchmarks.serving.client import BenchmarkError
from benchmarks.serving.session import FAILED, GUESSES, OK, Record, Setup, all_running, running, short
from sglang_diffkv.evaluate.server import Server, ServerError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and the backends."""
    add_model_arguments(parser)
    parser.add_argument(
        "--backends", nargs="*", type=parse_backend, metavar="ATTENTION:DTYPE [FLAGS]", help="stock servers"
    )
    parser.add_argument("--diffkv", type=parse_diffkv, action="append", default=[], metavar="NAME [FLAGS]=JSON")
    parser.add_argument("--start-together", action="store_true", help="start all servers at once, ask one at a time")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line of a parser with ``add_arguments``; ``candidates`` are the backends in the table's order."""
    args = parser.parse_args(argv)
    args.argv = argv
    args.candidates = [*(default_backends() if args.backends is None else args.backends), *args.diffkv]
    check_names(parser, "backend", [x.name for x in args.candidates])
    check_model(parser, args)
    return args


def failed_row(record: Record, columns: int) -> list[str]:
    """In a table, that of a server which failed: its error, and nothing in the other columns."""
    return [record["backend"], record["error"], *[""] * (columns - 2)]


def measure_each(
    args: argparse.Namespace,
    data: dict[str, Any],
    title: str,
    measure: Callable[[Server, Setup], Record],
    table: Callable[[Sequence[Record]], str],
) -> int:
    """``measure`` on every backend of ``args.candidates``; NAME.json and NAME.md are written after each.

    Args:
        data: the report so far, with its ``kind`` (the benchmark's module in this folder) and ``name``.

    Returns:
        exit status, 1 if a server failed.
    """
    source = provenance(f"serving.{data['kind']}", args.argv)
    records: list[Record] = []
    data |= {"provenance": source, "records": records}
    budget = Budget(args.budget_seconds, GUESSES)

    def take(backend: Backend, start: Callable[[], tuple[Server, Record]]) -> None:
        record: Record = {"backend": backend.name, "status": OK}
        try:
            server, facts = start()
            record |= {**measure(server, setup), **facts}
        except (ServerError, BenchmarkError, ValueError, requests.RequestException) as error:
            record |= {"status": FAILED, "error": short(error)}
        records.append(record)
        path = args.output / data["name"]
        path.with_name(f"{path.name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        parts = [f"# {title}", headline(source), f"`{source['command']}`", table(records)]
        path.with_name(f"{path.name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")

    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        setup = prepare(args, Path(folder), 40)
        if args.start_together:
            with all_running(args.candidates, setup, budget) as started:
                for backend, start in zip(args.candidates, started, strict=True):
                    take(backend, start.result)
        else:
            for backend in args.candidates:
                with ExitStack() as stack:
                    take(backend, partial(stack.enter_context, running(backend, setup, budget)))
    print(table(records))
    return int(any(record["status"] == FAILED for record in records))
