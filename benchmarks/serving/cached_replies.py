"""Whether a greedy reply depends on its prompt being cached: each question asked twice of one server.

The first time its prompt is computed, directly afterwards all of it but its last token comes from the prefix cache, in
the form that the cache keeps. Example:

    python -m benchmarks.serving.cached_replies --config stock --config 'lossless={"tiers": ["BF16"]}' \\
        --config 'compressed={}' --config 'exact={"prefix_fidelity": "exact"}' --split dev --n 200 --output replies.json
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks import splits
from benchmarks.paths import NANO
from benchmarks.provenance import provenance
from sglang_diffkv.evaluate import client, report
from sglang_diffkv.evaluate.configuration import Configuration, parse_configuration
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.evaluate.tasks.generation import Example

PASSES = ("computed", "cached")


def serve(configuration: Configuration, items: Sequence[Example], args: argparse.Namespace) -> dict[str, Any]:
    """Both replies to every question."""
    tokenizer = load_tokenizer(args.model)
    context = json.loads((Path(args.model) / "config.json").read_text())["max_position_embeddings"]

    def twice(item: Example) -> dict[str, Any]:
        ids = chat_ids(tokenizer, item.prompt)
        found: dict[str, Any] = {"question": item.id, "prompt_tokens": len(ids)}
        replies: list[list[int]] = []
        for name in PASSES:
            record = client.ask(server.url, ids, min(args.longest, context - len(ids) - 1))
            right = reference.grade(record.text, item.answers)
            found[name] = {"tokens": len(record.output_ids), "right": right, "cached_tokens": record.cached_tokens}
            replies.append(record.output_ids)
        found["first_difference"] = first_difference(*replies)
        return found

    with (
        configuration.server(args.model, args.server_args) as server,
        ThreadPoolExecutor(args.concurrency) as threads,
    ):
        questions = list(tqdm(threads.map(twice, items), total=len(items), desc=configuration.name))
    return {"name": configuration.name, "questions": questions}


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The place of the first token that differs; None where the replies are the same."""
    if list(left) == list(right):
        return None
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def summary(run: dict[str, Any]) -> list[str]:
    """Name, n, cached share of the prompts the second time, same replies, right either time and their difference."""
    questions = run["questions"]
    places = [x["first_difference"] for x in questions]
    cached = sum(x["cached"]["cached_tokens"] for x in questions) / sum(x["prompt_tokens"] for x in questions)
    right = [report.proportion([x[name]["right"] for x in questions]) for name in PASSES]
    gained = sum(x["cached"]["right"] and not x["computed"]["right"] for x in questions)
    lost = sum(x["computed"]["right"] and not x["cached"]["right"] for x in questions)
    shares = [f"{100 * share:.1f} ± {100 * error:.1f}" for share, error in right]
    same = f"{places.count(None)} of {len(places)}"
    return [run["name"], str(len(questions)), f"{100 * cached:.0f}%", same, *shares, f"+{gained} -{lost}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve every configuration, print the table, write the replies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", required=True, metavar="NAME=JSON", help="or stock, or fp8")
    parser.add_argument("--model", default=str(NANO))
    parser.add_argument("--split", choices=splits.SPLITS, default="calib")
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--longest", type=int, default=512, help="tokens of a reply")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--server-args", type=shlex.split, default=[], help="more server arguments, one string")
    parser.add_argument("--output", type=Path, help="JSON with every reply")
    args = parser.parse_args(argv)
    items = reference.select(splits.load(args.split), exclude=["fewshot_shared"], n=args.n, seed=1)
    about, runs = provenance("serving.cached_replies", argv), []
    table = Table("configuration", "n", "cached", "same reply", "right % computed", "cached", "changed verdicts")
    for text in args.config:
        runs.append(serve(parse_configuration(text), items, args))
        table.add_row(*summary(runs[-1]))
        if args.output:
            args.output.write_text(json.dumps({"provenance": about, "runs": runs}))
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
