"""Plan capacity before there is a server: tokens that fit, requests at once, tokens a second, side by side.

It reads a model's config.json. It loads no weights and needs no GPU. Lengths may end in k (1,024) or m. Example:

    python -m sglang_diffkv.capacity --model DIR --gpu h100-80gb --context 32k --reply 1k

The exit status is 2 if something given cannot be used.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import Field

from sglang_diffkv.arguments import number, output_file
from sglang_diffkv.bounds import MOST_TOKENS, Fraction, HostGib, SomeFraction, SomeTokens
from sglang_diffkv.capacity import report
from sglang_diffkv.capacity.estimate import Load, assumptions, plan_rows
from sglang_diffkv.capacity.gpus import gpu_of
from sglang_diffkv.capacity.memory import budget_of
from sglang_diffkv.capacity.model import read_model
from sglang_diffkv.capacity.settings import settings_of
from sglang_diffkv.capacity.trace import Trace, read_trace
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.extra import require
from sglang_diffkv.files import quoted

NAME = "sglang_diffkv.capacity"
CHARTS = (".png", ".svg")
FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20}
Gib = Annotated[float, Field(strict=True, ge=1e-3, le=1e6)]
Ranks = Annotated[int, Field(strict=True, ge=1, le=1024)]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{NAME}: {message}\n")


def length(text: str) -> int:
    """Tokens: a whole number, or one that ends in k or m."""
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([km]?)", text.strip().lower())
    value = float(found[1]) * FACTORS[found[2]] if found else 0.0
    if not found or not value.is_integer() or not 1 <= value <= MOST_TOKENS:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is no number of tokens from 1 to {MOST_TOKENS:,}, as 4096, 32k or 1m"
        )
    return int(value)


def chart_file(text: str) -> Path:
    """A PNG or SVG that can be written."""
    path = output_file(text)
    if path.suffix.lower() not in CHARTS:
        raise argparse.ArgumentTypeError(f"{quoted(text)} ends in neither .png nor .svg")
    return path


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = _Parser(
        prog=f"python -m {NAME}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", "--model-path", required=True, metavar="DIR", help="a folder with config.json, or the file")
    add("--gpu", metavar="NAME", help="for example h100-80gb; a wrong name lists those known")
    add("--context", type=length, metavar="N", help="tokens of a prompt (default: the trace's mean)")
    add("--reply", type=length, metavar="N", help="tokens of a reply (default: the trace's mean)")
    add("--tp", "--tp-size", type=number(Ranks), default=1, metavar="N", help="GPUs of a server (default: 1)")
    add("--config", action="append", default=[], metavar="[NAME=]JSON", help="another setting, as --diffkv-config")
    add("--trace", type=Path, metavar="FILE", help="requests in Mooncake's format, for hit rates; may end in .xz")
    add("--host-gib", type=number(HostGib), default=0.0, metavar="N", help="of a host tier, for the trace")
    add("--high-share", type=number(Fraction), metavar="X", help="of tokens outside the window, in the high tier")
    add("--kv-gib", type=number(Gib), metavar="N", help="of each GPU, for keys and values, instead of an estimate")
    add("--mem-fraction-static", type=number(SomeFraction), metavar="X", help="as for a server")
    add("--weights-gb", type=number(Gib), metavar="N", help="of all GPUs together, in 10^9 bytes")
    add("--state-mib", type=number(Gib), metavar="N", help="of a request's states on each GPU")
    add("--max-running-requests", type=number(SomeTokens), metavar="N", help="as for a server")
    add("--json", action="store_true", help="print JSON")
    add("--chart", type=chart_file, metavar="FILE", help="also draw a .png or .svg")
    args = parser.parse_args(argv)
    if args.gpu is None and args.kv_gib is None:
        parser.error("give --gpu NAME, or the GiB for the cache: --kv-gib N")
    if args.trace is None and (args.context is None or args.reply is None):
        parser.error("give --context and --reply, in tokens, or a --trace to take the means of")
    if args.host_gib and args.trace is None:
        parser.error("--host-gib is for hit rates: give a --trace")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; 2 with the reason for input that cannot be used."""
    args = parse_args(argv)
    if args.chart:
        require("matplotlib")
    try:
        _plan(args)
        sys.stdout.flush()
    except ConfigError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # its reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _plan(args: argparse.Namespace) -> None:
    gpu = None if args.gpu is None else gpu_of(args.gpu)
    model = read_model(args.model)
    if args.weights_gb is not None:
        model = replace(model, weights=model.weights.scaled_to(args.weights_gb * 1e9, "as given"))
    trace = None if args.trace is None else read_trace(args.trace)
    load = _load(args, trace)
    if load.prompt + load.reply > model.context:
        raise ConfigError(
            f"--context {load.prompt:,} and --reply {load.reply:,} are more than the {model.context:,} tokens of the "
            "model (max_position_embeddings)"
        )
    budget = budget_of(
        model, gpu, args.tp, kv_gib=args.kv_gib, fraction=args.mem_fraction_static, state_mib=args.state_mib
    )  # fmt: skip
    rows = plan_rows(settings_of(args.config, model.path), model, gpu, budget, load, trace)
    notes = [*budget.notes, *assumptions(rows, model, gpu, load, trace)]
    title = report.title_of(model, gpu, budget, load)
    if args.json:
        print(json.dumps(report.data(model, gpu, budget, load, rows, notes), indent=2))
    else:
        print(report.describe(title, rows, notes))
    if args.chart:
        from sglang_diffkv.capacity.chart import draw

        draw(title, rows, args.chart)
        print(f"written to {args.chart}", file=sys.stderr)


def _load(args: argparse.Namespace, trace: Trace | None) -> Load:
    prompt, reply = args.context, args.reply
    if trace is not None:
        prompt = prompt or max(trace.mean_prompt, 1)
        reply = reply or max(round(sum(x.reply for x in trace.requests) / len(trace.requests)), 1)
    return Load(prompt, reply, args.tp, args.max_running_requests, args.high_share, args.host_gib)
