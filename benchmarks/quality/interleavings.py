"""No interleaving of shared prefixes, forks, samples, aborts, eviction and retraction changes a token.

A server of the lossless tier without a prefix cache and with room for all answers every question alone. Then the same
questions go to one with a prefix cache and a pool far too small for them, several at a time, in a random order drawn
anew for each run: groups with a common prefix, chats that continue from a reply or from the middle of it, several
samples of one prompt, requests that are aborted. Every reply must be the reference's; where it is not, the table says
whether the reference was undecided there (see ``identity.py``), as rounding differs between batch sizes.
Example:

    python -m benchmarks.quality.interleavings --runs 3 --seed 1

Exit code 1 if a reply differs by more than rounding, a page is lost, or the load did not share, evict and retract.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import splits
from benchmarks.paths import NANO
from benchmarks.provenance import provenance
from benchmarks.quality.identity import LOSSLESS, Difference, compare, print_differences
from benchmarks.serving.log import parse_log
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.evaluate.tasks.generation import Example

CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_DIFFKV_CHECK_INTEGRITY": "1"}
ROOM = 40_000
"""Tokens of the pool of the server that gives the references: more than all questions take, not a whole GPU."""


@dataclass(frozen=True)
class Question:
    """A prompt with the reply that it has alone."""

    item: Example
    ids: list[int]
    reference: client.Record


@dataclass(frozen=True)
class Order:
    """One request of a run: so many samples, sent after so many seconds, or aborted that long after it was sent."""

    question: Question
    samples: int
    pause: float
    abort_after: float | None


def ask_alone(args: argparse.Namespace) -> list[Question]:
    """All questions: groups over a prefix, such with long replies, and chats over replies or parts of them."""
    draw, tokenizer = random.Random(args.seed), load_tokenizer(args.model)
    items = splits.load("dev")
    groups = list(reference.groups(items).values())
    chosen = [x for group in draw.sample(groups, 2) for x in draw.sample(group, args.questions // 6)]
    chosen += reference.select(
        items, levels=["hard"], exclude=["fewshot_shared"], n=args.questions // 3, seed=args.seed
    )
    prompts = [(x, chat_ids(tokenizer, x.prompt)) for x in chosen]
    longest = args.pool - 8 - args.max_new_tokens
    prompts = [(x, ids) for x, ids in prompts if len(ids) < longest]
    prompts += [(x, ids[:-8] + ids[-4:]) for x, ids in draw.sample(prompts, min(len(prompts), args.questions // 6))]
    room = ["--max-total-tokens", str(ROOM), "--disable-radix-cache", *args.server_args]
    with Server(args.model, "diffkv", room, diffkv_config=LOSSLESS) as server:

        def ask(item: Example, ids: list[int]) -> Question:
            return Question(item, ids, client.ask(server.url, ids, args.max_new_tokens, top_logprobs=2))

        questions = [ask(*x) for x in prompts]
        easy = reference.select(
            items, levels=["easy"], exclude=["fewshot_shared"], n=args.questions // 6, seed=args.seed
        )
        for item in easy:
            before = draw.choice(questions)
            reply = before.reference.output_ids
            said = before.ids + reply[: draw.choice((len(reply), draw.randrange(1, len(reply) + 1)))]
            ids = said + chat_ids(tokenizer, item.prompt)
            if len(ids) < longest:
                questions.append(ask(replace(item, id=f"{before.item.id}+{item.id}"), ids))
    return questions


def draw_orders(questions: Sequence[Question], args: argparse.Namespace, seed: str) -> list[Order]:
    """Every question once or twice, some with several samples, and a few that are aborted, in random order."""
    draw = random.Random(seed)
    orders = []
    for question in questions:
        for _ in range(draw.choice((1, 1, 2))):
            orders.append(Order(question, draw.choice((1, 1, 1, 2, 3)), draw.uniform(0, args.pause), None))
    for question in draw.sample(list(questions), len(questions) // 4):
        orders.append(Order(question, 1, draw.uniform(0, args.pause), draw.uniform(0, 20 * args.pause)))
    draw.shuffle(orders)
    return orders


def send(server: Server, order: Order, name: str, args: argparse.Namespace) -> list[client.Record]:
    """The replies; none of an aborted order. SGLang aborts all requests whose id begins with ``name``."""
    time.sleep(order.pause)
    parameters = {"temperature": 0, "max_new_tokens": args.max_new_tokens, "n": order.samples}
    payload = {"input_ids": order.question.ids, "sampling_params": parameters, "rid": name}
    if order.abort_after is not None:
        with ThreadPoolExecutor(1) as thread:
            reply = thread.submit(server.post, "/generate", payload)
            time.sleep(order.abort_after)
            server.post("/abort_request", {"rid": name})
            reply.result()
        return []
    if order.samples > 1:
        del payload["rid"]
    replies = server.generate({**payload, "return_logprob": True, "top_logprobs_num": 2})
    return [client.record(x) for x in (replies if isinstance(replies, list) else [replies])]


def run(server: Server, questions: Sequence[Question], args: argparse.Namespace, number: int) -> dict[str, Any]:
    """One interleaving: how many replies differ, and what the load did to the server."""
    begin, orders = len(server.log_text()), draw_orders(questions, args, f"{args.seed} {number}")
    with ThreadPoolExecutor(args.concurrency) as threads:
        replies = list(threads.map(lambda x: send(server, x[1], f"{number}-{x[0]:05d}", args), enumerate(orders)))
    differences: list[Difference] = []
    for order, records in zip(orders, replies, strict=True):
        question = order.question
        expected, items = [question.reference] * len(records), [question.item] * len(records)
        differences += compare("interleaved", f"run {number}", items, expected, records, args.tie)
    server.flush_cache()
    stats, log = server.stats() or {}, parse_log(server.log_text()[begin:])
    return {
        "run": number,
        "orders": len(orders),
        "aborted": sum(x.abort_after is not None for x in orders),
        "replies": sum(map(len, replies)),
        "differences": [asdict(x) for x in differences],
        "ties": sum(x.tie for x in differences),
        "cached_tokens": sum(x.cached_tokens for records in replies for x in records),
        "retracted": log.retracted,
        "pages_lost": stats["pages_used"],
        "faults": stats["faults"],
    }


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(NANO), help="default: the nano model of the repository")
    parser.add_argument("--questions", type=int, default=24, help="about so many (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="interleavings (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=120, help="default: %(default)s")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds before a request, at most")
    parser.add_argument("--pool", type=int, default=1200, help="tokens of the small pool (default: %(default)s)")
    parser.add_argument("--tie", type=float, default=0.25, help="largest gap of a rounding tie (default: %(default)s)")
    parser.add_argument("--check-integrity", action="store_true", help="all structures at every step (slow)")
    parser.add_argument("--server-args", type=shlex.split, default=[], help="more arguments, one string")
    parser.add_argument("--output", type=Path, help="write everything to this JSON file")
    return parser.parse_args(argv)


def faults_of(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Why the runs show a fault, or nothing at all."""
    found = [f"run {x['run']}: {x['pages_lost']} pages are lost" for x in runs if x["pages_lost"]]
    found += [f"run {x['run']}: {x['faults']} requests found the pool empty" for x in runs if x["faults"]]
    if other := sum(len(x["differences"]) - x["ties"] for x in runs):
        found.append(f"{other} replies differ where the reference was decided")
    for key in ("cached_tokens", "retracted"):
        if not any(x[key] for x in runs):
            found.append(f"no run had {key.replace('_', ' ')}: the load is too small for the pool")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Ask alone, run the interleavings, print the table and the differences."""
    args = parse_args(argv)
    about = provenance("interleavings", argv)
    questions = ask_alone(args)
    pool = ["--max-total-tokens", str(args.pool), "--schedule-conservativeness", "0.1", *args.server_args]
    env = CHECKS if args.check_integrity else {}
    with Server(args.model, "diffkv", pool, diffkv_config=LOSSLESS, env=env) as server:
        runs = [run(server, questions, args, number) for number in range(args.runs)]
    header = [
        "run",
        "orders",
        "aborted",
        "replies",
        "identical",
        "rounding ties",
        "other",
        "cached tokens",
        "retracted",
    ]
    rows = []
    for x in runs:
        differ = len(x["differences"])
        counts = (x["replies"] - differ, x["ties"], differ - x["ties"], x["cached_tokens"], x["retracted"])
        rows.append([str(x[key]) for key in ("run", "orders", "aborted", "replies")] + [str(n) for n in counts])
    print(markdown(header, rows))
    print_differences([Difference(**y) for x in runs for y in x["differences"]])
    if args.output:
        args.output.write_text(json.dumps({"provenance": about, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    found = faults_of(runs)
    for text in found:
        print(text, file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
