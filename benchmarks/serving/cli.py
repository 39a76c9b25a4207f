"""Serving throughput and latency at equal KV memory: stock SGLang and DiffKV side by side in one run.

Each backend gets a server of its own with the same model, the same bytes of KV cache and the same flags; SGLang's
own serving benchmark sends the same load to each. Example:

    python -m benchmarks.serving --geometry llama3-8b --kv-gib 8 --load batch --load 'prefix={"groups": [1, 16]}' \\
        --diffkv 'default={}' --diffkv 'K8V4={"tiers": ["K8V4"]}'

Results are kept after every run: NAME.json, NAME.md and charts in the output folder. Exit code 1 if a server or a run
failed or nothing was measured; runs that the time budget leaves no room for are reported as skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.budget import Budget
from benchmarks.provenance import provenance, without_paths
from benchmarks.serving.backends import (
    common_args,
    default_backends,
    parse_backend,
    parse_diffkv,
    pinned_backends,
    server_flags,
)
from benchmarks.serving.charts import charts
from benchmarks.serving.geometries import PRESETS, write_model
from benchmarks.serving.loads import LOADS, parse_load
from benchmarks.serving.memory import GIB, KVShape
from benchmarks.serving.report import document, tables, with_ratios
from benchmarks.serving.session import FAILED, GUESSES, OK, Record, Setup, run_backend, run_together
from sglang_diffkv.drawing import drawn
from sglang_diffkv.evaluate.server import has_gpu


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What to serve and how; ``pin_shares`` has the same."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--geometry", choices=PRESETS, default="llama3-8b", help="with dummy weights (default: %(default)s)"
    )
    model.add_argument("--model", type=Path, help="the folder of a model to serve instead")
    parser.add_argument("--context", type=int, help="positions of --geometry, instead of its own")
    parser.add_argument("--dummy-weights", action="store_true", help="random weights for --model too")
    parser.add_argument(
        "--kv-gib",
        type=float,
        default=8.0,
        help="KV cache of every server, all its GPUs together (default: %(default)s)",
    )
    parser.add_argument("--tp-size", type=int, default=1, help="GPUs of a server, each of which holds its share of it")
    parser.add_argument("--max-running", type=int, default=128, help="running requests at most (default: %(default)s)")
    parser.add_argument("--extra-server-args", type=shlex.split, default=[], help="for all servers, one string")
    parser.add_argument("--budget-seconds", type=float, help="skip runs that would not end within this time")
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder (default: %(default)s)")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ``args.candidates`` are the backends in the table's order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument(
        "--backends",
        nargs="*",
        type=parse_backend,
        metavar="ATTENTION:DTYPE [FLAGS]",
        help="stock servers (default on a GPU: flashinfer:bf16 flashinfer:fp8_e4m3 triton:bf16)",
    )
    parser.add_argument("--diffkv", type=parse_diffkv, action="append", default=[], metavar="NAME [FLAGS]=JSON")
    parser.add_argument("--pinned", type=Path, help="also the configurations that pin_shares wrote to this file")
    parser.add_argument(
        "--load",
        type=parse_load,
        action="append",
        metavar="NAME[=JSON]",
        help=f"one of {', '.join(LOADS)}, with the fields to change as JSON (default: batch); repeatable",
    )
    parser.add_argument(
        "--start-together",
        action="store_true",
        help="start all servers at once (memory must suffice, see --mem-fraction-static) and ask one after the other",
    )
    parser.add_argument(
        "--repeat", type=int, default=1, help="runs of all loads on a server; the tables have medians (default: 1)"
    )
    parser.add_argument("--log-interval", type=int, default=40, help="decode steps a log line (default: %(default)s)")
    parser.add_argument("--point-timeout", type=float, default=math.inf, help="seconds for one run of the client")
    parser.add_argument("--name", help="of the result files (default: serving_MODEL)")
    args = parser.parse_args(argv)
    check_model(parser, args)
    args.loads = args.load or [parse_load("batch")]
    if args.repeat < 1:
        parser.error(f"--repeat {args.repeat}: at least 1")
    backends = default_backends() if args.backends is None else args.backends
    try:
        pinned = pinned_backends(args.pinned, model_name(args)) if args.pinned else []
    except ValueError as error:
        parser.error(str(error))
    args.candidates = [*backends, *args.diffkv, *pinned]
    check_names(parser, "backend", [x.name for x in args.candidates])
    check_names(parser, "load", [x.name for x in args.loads])
    return args


def check_names(parser: argparse.ArgumentParser, kind: str, names: Sequence[str]) -> None:
    """End the command if there is none, or one twice: results go by them."""
    if len(set(names)) < len(names) or not names:
        parser.error(f"name at least one {kind}, and each only once (given: {names})")


def check_model(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the command with the reason if --model names no model, or none that --tp-size ranks can share."""
    if args.model:
        try:
            KVShape.of(args.model).of_rank(args.tp_size)
        except (OSError, ValueError) as error:
            parser.error(f"--model: {error}")


def model_name(args: argparse.Namespace) -> str:
    """What the results call the model."""
    return args.model.resolve().name if args.model else args.geometry


def prepare(args: argparse.Namespace, folder: Path, log_interval: int) -> Setup:
    """The model's folder and what all servers share; shape and bytes are of a rank. Raises ValueError for an unusable
    model."""
    preset = PRESETS[args.geometry]
    preset = replace(preset, context=args.context) if args.context else preset
    model = args.model.resolve() if args.model else write_model(folder / args.geometry, preset)
    logs = args.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    dummy = args.dummy_weights or not args.model
    common = common_args(args.max_running, log_interval, dummy=dummy, gpu=has_gpu(), known=server_flags())
    ranks = () if args.tp_size == 1 else ("--tp-size", str(args.tp_size))
    return Setup(
        model=str(model),
        shape=replace(KVShape.of(model).of_rank(args.tp_size), drafting=int("NEXTN" in args.extra_server_args)),
        kv_bytes=round(args.kv_gib * GIB / args.tp_size),
        max_running=args.max_running,
        server_args=(*common, *ranks, *args.extra_server_args),
        logs=logs,
        seed=args.seed,
        point_timeout=getattr(args, "point_timeout", math.inf),
        start_timeout=args.start_timeout,
    )


def describe(args: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    """The report without its records."""
    return {
        "kind": "serving",
        "name": args.name or f"serving_{model_name(args)}",
        "provenance": provenance("serving", args.argv),
        "setup": {
            "model": model_name(args),
            "dummy": args.dummy_weights or not args.model,
            "kv_gib": args.kv_gib,
            "tp_size": args.tp_size,
            "max_running": setup.max_running,
            "server_args": [without_paths(x) for x in setup.server_args],
            "seed": setup.seed,
            "configs": {x.name: json.loads(x.config_json() or "null") for x in args.candidates},
        },
        "loads": {x.name: {"title": x.title, "x_label": x.x_label} for x in args.loads},
        "records": [],
    }


def write(data: dict[str, Any], folder: Path) -> None:
    """JSON and Markdown of what is known so far."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{data['name']}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (folder / f"{data['name']}.md").write_text(document(data), encoding="utf-8")


def status(records: Sequence[Record]) -> int:
    """Exit code: 1 if a run failed or none succeeded."""
    failed = any(x["status"] == FAILED for x in records)
    return int(failed or not any(x["status"] == OK for x in records))


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything, print the tables and write the results."""
    args = parse_args(argv)
    args.argv = argv
    budget = Budget(args.budget_seconds, GUESSES)
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        setup = prepare(args, Path(folder), args.log_interval)
        data = describe(args, setup)
        records: list[Record] = []

        def keep(record: Record) -> None:
            records.append(record)
            data["records"] = with_ratios(records)
            write(data, args.output)
            said = f"{record['output_throughput']:.1f} tok/s" if record["status"] == OK else record["error"]
            place = f"{record['load']} {record['label']}".strip()
            print(f"{budget.elapsed():5.0f} s  {record['backend']}, {place}: {record['status']}, {said}", flush=True)

        points = [replace(point, run=run) for run in range(args.repeat) for x in args.loads for point in x.points()]
        if args.start_together:
            run_together(args.candidates, points, setup, budget, keep)
        else:
            for backend in args.candidates:
                run_backend(backend, points, setup, budget, keep)
    print(f"\n{tables(data)}", flush=True)
    drawn(lambda: charts(data, args.output, data["name"]), f"python -m benchmarks.redraw {data['name']}.json")
    return status(records)


if __name__ == "__main__":
    sys.exit(main())
