"""Accuracy when prefixes are shared, against the same requests that share nothing.

Two loads: the task ``fewshot_shared`` (16 questions over one prompt; more with ``--few-shot``), and chats of several
questions, in which each turn's prompt is all that was said before, the model's own replies included. Every
configuration is served twice, with the prefix cache and without it (``NAME, alone``). Example:

    python -m benchmarks.quality.sharing --config stock --config 'compressed={}' \\
        --config 'exact={"prefix_fidelity": "exact"}' --split dev --chats 100 --output sharing.json
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks import splits
from benchmarks.paths import NANO
from benchmarks.provenance import provenance
from benchmarks.quality.fewshot import enlarge
from sglang_diffkv.evaluate import client, report
from sglang_diffkv.evaluate.configuration import Configuration, parse_configuration
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.evaluate.tasks.generation import Example


@dataclass
class Answer:
    """One question of a load: which, whether it was answered right, and what of its prompt was cached."""

    load: str
    question: str
    right: bool
    prompt_tokens: int
    cached_tokens: int


def ask(url: str, load: str, item: Example, ids: Sequence[int], longest: int) -> tuple[Answer, list[int]]:
    """The answer, and the ids of the reply."""
    record = client.ask(url, ids, longest)
    right = reference.grade(record.text, item.answers)
    return Answer(load, item.id, right, record.prompt_tokens, record.cached_tokens), record.output_ids


def few_shot(url: str, tokenizer: Any, split: str, per_group: int, longest: int) -> list[Callable[[], list[Answer]]]:
    """One call a question, group by group; ``per_group`` 0 asks those of the file."""
    groups = reference.groups(splits.load(split))
    if per_group:
        groups = {name: enlarge(items, per_group) for name, items in groups.items()}

    def call(item: Example) -> list[Answer]:
        return [ask(url, "few-shot", item, chat_ids(tokenizer, item.prompt), longest)[0]]

    return [partial(call, item) for items in groups.values() for item in items]


def chats(
    url: str, tokenizer: Any, split: str, count: int, turns: int, longest: int
) -> list[Callable[[], list[Answer]]]:
    """One call a chat of ``turns`` easy questions."""
    items = reference.select(
        splits.load(split), levels=["easy"], exclude=["chain", "vars", "fewshot_shared"], n=count * turns, seed=1
    )

    def call(number: int) -> list[Answer]:
        ids: list[int] = []
        answers = []
        for turn, item in enumerate(items[number * turns : (number + 1) * turns]):
            said = chat_ids(tokenizer, item.prompt)
            ids += said[1:] if ids and said[0] == tokenizer.bos_token_id else said
            answer, reply = ask(url, f"chat, turn {turn + 1}", item, ids, longest)
            answers.append(answer)
            ids += reply
        return answers

    return [partial(call, number) for number in range(len(items) // turns)]


def serve(configuration: Configuration, alone: bool, args: argparse.Namespace) -> dict[str, Any]:
    """All answers of one server, and what it reports of its cache."""
    server = configuration.server(args.model, [*args.server_args, *(["--disable-radix-cache"] if alone else [])])
    tokenizer = load_tokenizer(args.model)
    with server:
        calls = few_shot(server.url, tokenizer, args.split, args.few_shot, args.longest)
        calls += chats(server.url, tokenizer, args.split, args.chats, args.turns, args.longest)
        name = configuration.name + (", alone" if alone else "")
        with ThreadPoolExecutor(args.concurrency) as threads:
            futures = [threads.submit(call) for call in calls]
            answers = [x for future in tqdm(futures, desc=name) for x in future.result()]
        return {"name": name, "answers": [asdict(x) for x in answers], "cache": _cache(server)}


def _cache(server: Server) -> dict[str, Any]:
    stats = server.stats() or {}
    return {key: stats[key] for key in ("prompts", "finished", "page_bytes", "config") if key in stats}


def summary(run: dict[str, Any]) -> list[list[str]]:
    """A row for each load: name, load, n, right in percent with its standard error, cached share of the prompts."""
    rows = []
    for load in dict.fromkeys(x["load"] for x in run["answers"]):
        chosen = [x for x in run["answers"] if x["load"] == load]
        share, error = report.proportion([x["right"] for x in chosen])
        cached = sum(x["cached_tokens"] for x in chosen) / sum(x["prompt_tokens"] for x in chosen)
        rows.append(
            [run["name"], load, str(len(chosen)), f"{100 * share:.1f} ± {100 * error:.1f}", f"{100 * cached:.0f}%"]
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Serve every configuration, print the table, write the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", required=True, metavar="NAME=JSON", help="or stock, or fp8")
    parser.add_argument("--model", default=str(NANO))
    parser.add_argument("--split", choices=splits.SPLITS, default="calib")
    parser.add_argument("--few-shot", type=int, default=0, metavar="N", help="questions a group, new ones added")
    parser.add_argument("--chats", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a reply")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--server-args", type=shlex.split, default=[], help="more server arguments, one string")
    parser.add_argument("--shared-only", action="store_true", help="leave out the servers without a prefix cache")
    parser.add_argument("--output", type=Path, help="JSON with every answer")
    args = parser.parse_args(argv)
    configurations = [parse_configuration(text) for text in args.config]
    about = provenance("sharing", argv)
    runs: list[dict[str, Any]] = []
    for configuration in configurations:
        for alone in (False,) if args.shared_only else (False, True):
            runs.append(serve(configuration, alone, args))
            if args.output:
                args.output.write_text(json.dumps({"provenance": about, "runs": runs}))
    table = Table("configuration", "load", "n", "right %", "cached")
    for run in runs:
        for row in summary(run):
            table.add_row(*row)
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
