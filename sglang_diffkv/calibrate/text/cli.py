"""Find the thresholds that save most of a model's KV cache within a loss on plain text.

Any text will do that is like what the server will read; no task files are needed. It is cut in two. On the first part
each setting is compared with stock SGLang in bf16, token by token behind a compressed prefix. It does so as evaluate's
wikitext=, or as its continuation= with --phase generation. The cheapest setting is chosen that keeps the budget:
--max-kl, of the KL divergence of the next-token distribution, or --max-perplexity, in per cent. The second part, which
no choice has seen, then says what the chosen setting loses. The first setting is what a plain server runs; what is not
searched is as there. Nothing is pruned. Confirm with evaluate on tasks if you have any. Answers are kept in the work
folder, so a search that was broken off goes on with the same command. Copy the result into the model's folder as
diffkv_calibration.json. Example:

    python -m sglang_diffkv.calibrate --text prose.txt --model MODEL --max-kl 0.01 \\
        --work calibration --output diffkv_calibration.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import requests

from sglang_diffkv import bounds
from sglang_diffkv.access import cause
from sglang_diffkv.arguments import check_output, number
from sglang_diffkv.calibrate.arguments import add_rotate_argument, add_sinks_argument, tier_names
from sglang_diffkv.calibrate.search import DEFAULT, Setting
from sglang_diffkv.calibrate.text.parts import parts
from sglang_diffkv.calibrate.text.search import Measurements, best, loss, outdone, settings, within
from sglang_diffkv.calibration import (
    CalibratedThresholds,
    CalibrationFile,
    ModelGeometry,
    TextBudget,
    TextPoint,
    TextProvenance,
    model_name,
)
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate import report
from sglang_diffkv.evaluate.cli import add_server_arguments, add_window_arguments, positive
from sglang_diffkv.evaluate.client import RequestError
from sglang_diffkv.evaluate.configuration import device_name
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.server import ServerError
from sglang_diffkv.evaluate.store import Store
from sglang_diffkv.evaluate.tasks import TaskFileError, forced, wikitext
from sglang_diffkv.evaluate.tasks.forced import ForcedTask
from sglang_diffkv.evaluate.tasks.generation import Options
from sglang_diffkv.evaluate.tasks.wikitext import PerplexityTask

HIGHS = (1.0, 3.0, 10.0, 1e9)
"""The last one: no token is high behind the window."""
WINDOWS = (60, 124, 252)
"""Each fills its pages but for three places."""


def wanted(argv: Sequence[str]) -> bool:
    """Whether a command line of the calibration is about a text."""
    return any(argument == "--text" or argument.startswith("--text=") for argument in argv)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_diffkv.calibrate --text FILE",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8, perhaps .xz or .gz")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument(
        "--max-kl", type=number(bounds.Budget), metavar="NATS", help="KL divergence to bf16, nats a token"
    )
    budget.add_argument(
        "--max-perplexity", type=number(bounds.Budget), metavar="PERCENT", help="rise of the perplexity"
    )
    parser.add_argument(
        "--phase",
        choices=("prompt", "generation"),
        default="prompt",
        help="prompt: the text behind the prefix is scored in one prefill pass, which is quick; generation: it is "
        "decoded token by token, so that what happens to generated tokens counts too (default: %(default)s)",
    )
    parser.add_argument(
        "--margin",
        type=number(bounds.Budget),
        default=1.0,
        help="standard errors by which a loss has to stay within the budget (default: %(default)s)",
    )
    parser.add_argument(
        "--held-out",
        type=number(bounds.SomeFraction),
        default=0.5,
        metavar="SHARE",
        help="of the text, its end (default: %(default)s)",
    )
    choices = parser.add_argument_group("what is searched")
    choices.add_argument(
        "--tiers",
        type=tier_names,
        action="append",
        metavar="HIGH,LOW",
        help="repeat it for several choices (default: K8V4,K4V2); the high tier alone is tried too",
    )
    choices.add_argument(
        "--alpha-high", type=number(bounds.Alpha), nargs="+", default=HIGHS, help="default: 1 3 10 1e9"
    )
    choices.add_argument(
        "--window",
        type=number(bounds.Window),
        nargs="+",
        default=WINDOWS,
        help=f"default: {' '.join(map(str, WINDOWS))}",
    )
    add_rotate_argument(choices)
    add_sinks_argument(choices)
    parser.add_argument("--base", default="{}", metavar="JSON", help="DiffKV configuration for everything else")
    parser.add_argument("--n", type=positive, default=200, help="windows of each part (default: %(default)s)")
    parser.add_argument("--seed", type=number(bounds.Whole), default=0, help="of their sample (default: %(default)s)")
    parser.add_argument("--tokenizer", help="its folder (default: the model's)")
    add_window_arguments(parser)
    add_server_arguments(parser)
    parser.add_argument("--work", type=Path, required=True, help="folder for the answers")
    parser.add_argument("--output", type=Path, required=True, help="calibration file to write")
    args = parser.parse_args(argv)
    check_output(parser, args.output, args.work)
    args.tiers = args.tiers or [DEFAULT.tiers]
    if not 0 < args.held_out < 1:
        parser.error("--held-out is a share between 0 and 1")
    if args.top_logprobs < 1:
        parser.error("--top-logprobs is a number of tokens from 1 on")
    return args


def budget_of(args: argparse.Namespace) -> TextBudget:
    """The budget given."""
    if args.max_kl is not None:
        return TextBudget(measure="kl", limit=args.max_kl)
    return TextBudget(measure="perplexity", limit=args.max_perplexity / 100)


def table(points: Mapping[Setting, TextPoint], chosen: Setting | None, budget: TextBudget, margin: float) -> str:
    """The settings tried, as Markdown."""
    header = ["setting", "KL to bf16, nats", "same likeliest token %", "perplexity %", "ratio, tokens", "ratio, pages"]
    rows = []
    for setting, x in points.items():
        if setting == chosen:
            verdict = "chosen"
        elif not within(x, budget, margin):
            verdict = "too lossy"
        else:
            verdict = "another loses less at fewer bytes" if outdone(x, points.values(), budget) else ""
        default = "the default" if setting == DEFAULT else ""
        rows.append([setting.name, *figures(x), f"{x.ratio_tokens:.3f}", f"{x.ratio_pages:.3f}", default, verdict])
    return report.markdown([*header, "", ""], rows)


def figures(x: TextPoint) -> list[str]:
    """The three losses with their standard errors."""
    return [
        report.with_error(x.divergence, x.divergence_error, ".5f"),
        report.with_error(100 * x.agreement, 100 * x.agreement_error, ".1f"),
        report.with_error(100 * x.perplexity_change, 100 * x.perplexity_change_error, "+.2f"),
    ]


def entry(
    args: argparse.Namespace, budget: TextBudget, chosen: Setting, points: Mapping[Setting, TextPoint], held: TextPoint
) -> CalibratedThresholds:
    """What is written for a chosen setting."""
    rule = {name: getattr(chosen, name) for name in ("tiers", "alpha_high", "alpha_low", "window", "rotate", "sinks")}
    text = whole_text(args).fingerprint()
    return CalibratedThresholds(
        models=(model_name(args.model),),
        geometry=ModelGeometry.of(args.model),
        **rule,
        source="measured",
        chosen=points[chosen],
        provenance=TextProvenance(
            date=datetime.now(timezone.utc).date().isoformat(),
            budget=budget,
            phase=args.phase,
            margin=args.margin,
            text_file=text["file"],
            text_sha256=text["sha256"],
            prefix_tokens=args.prefix_tokens,
            window_tokens=args.window_tokens,
            top_logprobs=args.top_logprobs,
            seed=args.seed,
            held_out_share=args.held_out,
            held_out=held,
            versions=report.environment()["versions"],
            device=device_name(),
            grid=tuple(points.values()),
        ),
    )


def options_of(args: argparse.Namespace) -> Options:
    """How the text is cut into windows, all of them."""
    return Options(
        seed=args.seed,
        prefix_tokens=args.prefix_tokens,
        window_tokens=args.window_tokens,
        top_logprobs=args.top_logprobs,
    )


def whole_text(args: argparse.Namespace) -> PerplexityTask | ForcedTask:
    """The text as a task of the phase that counts. Raises TaskFileError."""
    load = forced.load_continuation if args.phase == "generation" else wikitext.load
    return load(args.text, options_of(args))


def run(args: argparse.Namespace, store: Store) -> int:
    """Measure, choose, grade the choice on the held-out part, write it; 1 if nothing keeps the budget."""
    budget, tokenizer = budget_of(args), load_tokenizer(args.tokenizer or args.model)
    choosing, held_out = parts(whole_text(args), args.held_out, args.n, tokenizer)
    measured = Measurements(args, store, [choosing, held_out])
    tried = settings(args.tiers, args.alpha_high, args.window, args.rotate, args.sinks)
    for setting in tried:
        measured.config(setting)  # one that is refused is refused before anything is asked
    measured.ask([], [choosing, held_out], stock=True)
    measured.ask(tried, [choosing])
    points = {setting: measured.point(setting, choosing) for setting in tried}
    chosen = best(points, budget, args.margin)
    print(f"{len(choosing.questions)} windows of {choosing.task.name}\n\n{table(points, chosen, budget, args.margin)}")
    limit = f"a KL of {budget.limit:g} nats" if budget.measure == "kl" else f"{100 * budget.limit:g}% of perplexity"
    if chosen is None:
        by = f" by {args.margin:g} standard errors" if args.margin else ""
        found = any(within(x, budget, args.margin) for x in points.values())
        but = ", or another one loses less at fewer bytes: ask more windows (--n)" if found else ""
        print(f"\nno setting is within {limit}{by}{but}", file=sys.stderr)
        return 1
    measured.ask([chosen], [held_out])
    held = measured.point(chosen, held_out)
    print(f"\n{chosen.name} saves most within {limit}. On {held.n} windows that it was not chosen on:\n")
    header = ["", "KL to bf16, nats", "same likeliest token %", "perplexity %", "ratio, tokens"]
    print(report.markdown(header, [["held out", *figures(held), f"{held.ratio_tokens:.3f}"]]))
    if loss(held, budget)[0] > budget.limit:
        print("\nThat is beyond the budget: take a smaller one, or more windows (--n).")
    content = CalibrationFile(entries=(entry(args, budget, chosen, points, held),))
    args.output.write_text(content.model_dump_json(indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {args.output}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    args = parse_args(argv)
    try:
        if not args.text.is_file():
            raise TaskFileError(f"there is no file {args.text}")
        with Store(args.work) as store:
            return run(args, store)
    except (ConfigError, TaskFileError, EvaluationError, RequestError, ServerError, requests.RequestException) as error:
        print(f"sglang_diffkv.calibrate: {cause(error)}", file=sys.stderr)
        return 1
