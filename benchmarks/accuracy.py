"""Accuracy and cache bytes of several cache configurations on the same questions.

One server is started for each ``--config``, one after the other. ``stock`` is SGLang without the plugin's
backend; ``NAME=JSON`` is ``--attention-backend diffkv --diffkv-config JSON``. The others are compared with
the first. Example:

    python benchmarks/accuracy.py --exclude chain vars --n 250 --config stock \\
        --config 'k8v4={"policy": "uniform"}' --output results.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_diffkv.testing import client, report, tasks
from sglang_diffkv.testing.paths import NANO
from sglang_diffkv.testing.server import Server, stock_backend

STOCK = "stock"
LONG = "finished_1k"


def parse_config(text: str) -> tuple[str, str | None]:
    """``NAME=JSON`` as name and JSON; a bare ``stock`` has no JSON."""
    name, equals, value = text.partition("=")
    if name == STOCK and not equals:
        return name, None
    try:
        if not isinstance(json.loads(value), dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {STOCK!r} or NAME=JSON, got {text!r}: {error}") from error
    return name, value


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=parse_config, action="append", required=True, metavar="NAME=JSON")
    parser.add_argument("--split", choices=tasks.SPLITS, default="calib")
    parser.add_argument("--levels", nargs="+", choices=tasks.LEVELS, default=["easy", "medium"])
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="only these (default: all)")
    parser.add_argument("--exclude", nargs="+", default=[], metavar="TASK")
    parser.add_argument("--n", type=int, default=250, help="number of questions (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the selection (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=4096, help="default: %(default)s")
    parser.add_argument("--context", type=int, default=8192, help="of the model (default: %(default)s)")
    parser.add_argument("--model", default=str(NANO), help="default: the nano model of the repository")
    parser.add_argument("--server-args", type=shlex.split, default=[], help="more arguments, one string")
    parser.add_argument("--min-tokens", action="store_true", help="a row for 1,000 tokens and more")
    parser.add_argument("--output", type=Path, help="write everything to this JSON file")
    args = parser.parse_args(argv)
    names = [name for name, _ in args.config]
    if len(set(names)) < len(names):
        parser.error("every --config needs a name of its own")
    return args


def measure(
    config: str | None, args: argparse.Namespace, items: Sequence[tasks.Item], prompts: Sequence[list[int]]
) -> dict[str, Any]:
    """Run all questions on a server of its own; the replies, the totals and the statistics."""
    backend = stock_backend() if config is None else "diffkv"
    limits = client.reply_limits(prompts, args.max_new_tokens, args.context)
    with Server(args.model, backend, args.server_args, diffkv_config=config) as server:
        before = server.stats()
        start = time.perf_counter()
        records = client.run(server.url, prompts, limits, concurrency=args.concurrency)
        seconds = time.perf_counter() - start
        after = server.stats()
    finished = {key: report.since(report.totals(after, key), report.totals(before, key)) for key in ("finished", LONG)}
    replies = [
        {
            "id": item.id,
            "right": tasks.is_right(record.text, item.answer),
            "answer": item.answer,
            **record.as_dict(),
        }
        for item, record in zip(items, records)
    ]
    return {
        "config": None if config is None else json.loads(config),
        "backend": backend,
        "seconds": seconds,
        "completion_tokens": sum(record.completion_tokens for record in records),
        "stats": after,
        **finished,
        "items": replies,
    }


def row(name: str, result: dict[str, Any], first: dict[str, Any], key: str = "finished") -> list[str]:
    """The table's line for one configuration, over all items or those of 1,000 tokens and more."""
    pairs = list(zip(result["items"], first["items"]))
    if key == LONG:
        pairs = [(mine, other) for mine, other in pairs if long(mine)]
    right = [mine["right"] for mine, _ in pairs]
    base = [other["right"] for _, other in pairs]
    share, error = report.proportion(right)
    difference = ""
    if result is not first and pairs:
        lost, won, p = report.mcnemar(base, right)
        change = 100 * (won - lost) / len(pairs)
        spread = 100 * report.paired_error(base, right)
        difference = f"{change:+.1f} ± {spread:.1f} (+{won} -{lost}, p = {p:.2g})"
    figures = report.ratios(result[key])
    ratio = [f"{figures[f'ratio_{unit}']:.3f}" for unit in ("pages", "tokens")] if figures else ["", ""]
    shares = report.shares_text(figures) if figures else ""
    return [name, str(len(right)), f"{100 * share:.1f} ± {100 * error:.1f}", difference, *ratio, shares]


def long(item: dict[str, Any]) -> bool:
    """Whether prompt and reply together have 1,000 tokens or more."""
    return item["prompt_tokens"] + item["completion_tokens"] >= 1000


def table(results: dict[str, dict[str, Any]], with_long: bool) -> str:
    """All configurations as a Markdown table."""
    first = next(iter(results.values()))
    rows = []
    for name, result in results.items():
        rows.append(row(name, result, first))
        if with_long:
            rows.append(row(f"{name}, 1,000 tokens and more", result, first, LONG))
    header = ["config", "n", "accuracy %", "to the first", "ratio (pages)", "ratio (tokens)", "shares"]
    return report.markdown(header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run every configuration and print the table."""
    args = parse_args(argv)
    items = tasks.select(
        tasks.load(args.split),
        tasks=args.tasks,
        levels=args.levels,
        exclude=args.exclude,
        n=args.n,
        seed=args.seed,
    )
    tokenizer = tasks.load_tokenizer(args.model)
    prompts = [tasks.chat_ids(tokenizer, item.prompt) for item in items]
    results: dict[str, dict[str, Any]] = {}
    for name, config in args.config:
        results[name] = measure(config, args, items, prompts)
        seconds, tokens = results[name]["seconds"], results[name]["completion_tokens"]
        print(f"{name}: {len(items)} questions, {tokens} tokens, {seconds:.0f} s", flush=True)
        if args.output:
            setup = {key: value for key, value in vars(args).items() if key not in ("config", "output")}
            data = {"environment": report.environment(), "setup": setup, "results": results}
            args.output.write_text(json.dumps(data, indent=1), encoding="utf-8")
    print(f"\n{table(results, args.min_tokens)}")


if __name__ == "__main__":
    main()
