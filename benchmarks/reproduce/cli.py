"""The figures and tables of the papers for a model, all from one command.

    python -m benchmarks.reproduce --list
    python -m benchmarks.reproduce --model MODEL --task gsm8k=test.jsonl --task longbench=longbench \\
        --calibration-task gsm8k=train.jsonl --text prose.txt --n 500 --output reproduced

makes every part that model, task files, text and machine allow, names the others with what they lack, and writes each
part's table, JSON and image and the page OUTPUT/README.md, which shows all of them in the papers' order. A part that
fails is reported and the others go on; the exit status is 1 if one failed, or if one that was named cannot be made.
Called again it goes on where it stopped: parts that are there, made from the same settings and files, are skipped, and
within a part answers are kept. Logs are in OUTPUT/parts.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.reproduce import index
from benchmarks.reproduce.given import CONFIGS, TEXTS, Given, kind_of
from benchmarks.reproduce.parts import ANY_POLICY, PARTS, Part
from benchmarks.reproduce.run import Maker, Record
from benchmarks.reproduce.served import refusals
from sglang_diffkv.evaluate.cli import add_question_arguments, add_selection_arguments
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.server import has_gpu, stop_servers_on_sigterm
from sglang_diffkv.evaluate.tasks import LOADERS

BY_NAME = {part.name: part for part in PARTS}
BROKEN_OFF = 130
"""Exit status after Ctrl-C or SIGTERM."""
RUNS_CODE = ("humaneval_plus", "mbpp_plus")


def part_name(text: str) -> str:
    """A part's name; ``fig4`` is ``figure4``. Raises ValueError, which argparse reports."""
    name = re.sub(r"^fig(?=\d)", "figure", text)
    if name not in BY_NAME:
        raise argparse.ArgumentTypeError(f"there is no part {text!r}, only {', '.join(BY_NAME)}")
    return name


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="in Hugging Face's format")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for everything")
    parser.add_argument("--list", action="store_true", help="say what there is, what it needs and how far it is")
    parser.add_argument("--parts", type=part_name, nargs="+", metavar="NAME", help="these only (default: all)")
    parser.add_argument("--again", action="store_true", help="make parts that are there once more")
    parser.add_argument(
        "--task", action="append", default=[], metavar="KIND=PATH", help=f"repeatable; KIND: {', '.join(LOADERS)}"
    )
    parser.add_argument(
        "--calibration-task", action="append", default=[], metavar="KIND=PATH", help="for what is fitted, not reported"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="plain text, for figures 2 to 5 and perplexity")
    parser.add_argument("--quick", action="store_true", help="a trial: the fewest settings of each part")
    parser.add_argument("--kv-gib", type=float, metavar="N", help="KV cache of each server that is timed")
    add_question_arguments(parser)
    args = parser.parse_args(argv)
    if args.list and not args.model:
        return args
    if not args.model or not args.output:
        parser.error("name --model and --output, or ask for the --list alone")
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model} is no model's folder: it has no config.json")
    for spec in (*args.task, *args.calibration_task):
        kind, _, path = spec.partition("=")
        if kind not in LOADERS:
            parser.error(f"{spec!r} is not KIND=PATH with a kind of {', '.join(LOADERS)}")
        if kind in TEXTS:
            parser.error(f"{spec!r}: give a text by --text FILE")
        if not Path(path).exists():
            parser.error(f"{kind}: there is no file {path}")
        if kind in RUNS_CODE and not args.run_generated_code:
            parser.error(f"{kind} runs code that the model writes: allow it by --run-generated-code")
    if args.text and not args.text.is_file():
        parser.error(f"--text: there is no file {args.text}")
    return args


def forwarded(args: argparse.Namespace, add: Any) -> tuple[str, ...]:
    """The arguments that ``add`` adds to a parser, as a command line of those that were given."""
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)
    found: list[str] = []
    for action in parser._actions:
        value, option = getattr(args, action.dest), action.option_strings[0]
        if value == action.default:
            continue
        if action.const is True:
            found.append(option)
        elif action.dest == "server_args":
            found += [f"{option}={shlex.join(value)}"]
        else:
            found += [option, *(map(str, value) if isinstance(value, list) else [str(value)])]
    return tuple(found)


def given_of(args: argparse.Namespace, refused: dict[str, str]) -> Given:
    """With absolute paths, since commands run in the repository's folder."""

    def absolute(specs: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"{kind_of(x)}={Path(x.partition('=')[2]).resolve()}" for x in specs)

    if args.tokenizer:
        args.tokenizer = str(Path(args.tokenizer).resolve())
    return Given(
        model=args.model.resolve(),
        output=args.output.resolve() if args.output else Path(),
        tasks=absolute(args.task),
        calibration=absolute(args.calibration_task),
        text=args.text.resolve() if args.text else None,
        gpu=has_gpu(),
        quick=args.quick,
        n=args.n,
        kv_gib=args.kv_gib,
        server_args=tuple(args.server_args),
        selection=forwarded(args, add_selection_arguments),
        asking=forwarded(args, add_question_arguments),
        refused=refused,
    )


def listed(parts: Sequence[Part], maker: Maker | None, lacking: dict[Part, list[str]]) -> str:
    """The parts as a table; how far they are where a model is named."""
    rows = []
    for part in parts:
        wants = ", ".join(x.words for x in part.needs if x is not ANY_POLICY) or "nothing else"
        row = [part.name, part.paper, part.shows, wants]
        if maker is not None:
            state = "; ".join(lacking[part]) or "can be made"
            row.append("is there" if maker.there(part) else state)
        rows.append(row)
    return markdown(["part", "paper", "what it shows", "needs", *([""] if maker else [])], rows)


def wanted(args: argparse.Namespace) -> list[Part]:
    """The parts asked for, in the papers' order."""
    return [x for x in PARTS if not args.parts or x.name in args.parts]


def look(args: argparse.Namespace, argv: Sequence[str] | None) -> tuple[Maker, dict[str, Any], dict[Part, list[str]]]:
    """What can be made from what is given, and why the rest cannot. Raises RuntimeError."""
    given = given_of(args, refusals(str(args.model.resolve()), args.server_args, CONFIGS))
    about = provenance("reproduce", argv)
    return Maker(given, about), about, {x: x.lacking(given) for x in PARTS}


def reproduce(maker: Maker, about: dict[str, Any], lacking: dict[Part, list[str]], args: argparse.Namespace) -> int:
    """Make what is wanted; the exit status."""
    records: dict[Part, Record | None] = {x: maker.record(x) for x in PARTS}
    parts, bad = wanted(args), 0
    for number, part in enumerate(parts, 1):
        place = f"{number} of {len(parts)}, {part.name}"
        if lacking[part]:
            _say(f"{place}: left out: {'; '.join(lacking[part])}")
            bad += bool(args.parts)
        elif maker.there(part) and not args.again:
            _say(f"{place}: is there")
        else:
            _say(f"{place}: {part.shows} ...")
            records[part] = record = maker.make(part)
            how = f"made without {', '.join(record.no_chart)}" if record.no_chart else "made"
            _say(f"{place}: {'FAILED: ' + record.reason if record.reason else how}, {record.seconds:.0f} s")
            bad += record.status == "failed"
        index.write(maker.given, about, records, lacking)
    made = sum(x is not None and x.status == "done" for x in records.values())
    _say(f"{made} parts are there, of {len(parts)} asked for {bad} failed: {maker.given.output / index.NAME}")
    return int(bad > 0 or made == 0)


def _say(line: str) -> None:
    print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """List the parts, or make them."""
    args = parse_args(argv)
    if args.list and not args.model:
        print(listed(wanted(args), None, {}))
        return 0
    stop_servers_on_sigterm()
    try:
        maker, about, lacking = look(args, argv)
    except RuntimeError as error:
        print(f"benchmarks.reproduce: {error}", file=sys.stderr)
        return 1
    if args.list:
        print(listed(wanted(args), maker, lacking))
        return 0
    try:
        return reproduce(maker, about, lacking, args)
    except KeyboardInterrupt:
        print("broken off; the same command goes on from here", file=sys.stderr)
        return BROKEN_OFF
