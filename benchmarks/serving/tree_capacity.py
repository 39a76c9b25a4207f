"""How many tokens the prefix cache holds in the same bytes: stock bf16 against both prefix fidelities.

Every server is given distinct prompts until its tree has long been full. Then all of them are
asked for again, newest first, until one is not there: what was cached of them is what the tree held. A DiffKV
server counts it too, and says how many bytes a stored token takes (``ratio_tokens``), which gives the bound: the
tokens that would fit without part-filled pages. Example:

    python -m benchmarks.serving.tree_capacity --geometry llama3-8b --kv-gib 8

Results are kept after every server: NAME.json and NAME.md in the output folder. Exit code 1 if a server failed.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

from benchmarks.serving.backends import parse_backend, parse_diffkv
from benchmarks.serving.cli import model_name
from benchmarks.serving.client import BenchmarkError
from benchmarks.serving.each_backend import add_arguments, failed_row, measure_each
from benchmarks.serving.memory import stock_tokens
from benchmarks.serving.session import OK, Record, Setup
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.server import Server, stock_backend

FIDELITIES = ('exact={"prefix_fidelity": "exact"}', "compressed={}")


def distinct_prompts(tokens: int, vocab: int, seed: int) -> Iterator[list[int]]:
    """Prompts that share nothing, not even their first token while the vocabulary lasts."""
    draw = random.Random(f"tree {seed}")
    first = list(range(vocab // 2, vocab))
    draw.shuffle(first)
    for number in count():
        yield [first[number % len(first)], *(draw.randrange(vocab // 2, vocab) for _ in range(tokens - 1))]


def ask(server: Server, ids: Sequence[int], new_tokens: int) -> list[int]:
    """The ids of a greedy reply of exactly ``new_tokens``."""
    parameters = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    reply = server.generate({"input_ids": list(ids), "sampling_params": parameters})
    if len(reply["output_ids"]) != new_tokens:
        raise BenchmarkError(f"a reply has {len(reply['output_ids'])} tokens, {new_tokens} were asked for")
    return list(reply["output_ids"])


class Filler:
    """Fills a server's tree with distinct prompts and their replies; ``stored`` is what it was given, oldest first."""

    def __init__(self, server: Server, prompts: Iterator[list[int]], reply: int, concurrency: int):
        self.server, self.prompts, self.reply, self.concurrency = server, prompts, reply, concurrency
        self.stored: list[list[int]] = []

    def _one(self, ids: list[int]) -> list[int]:
        return ids + ask(self.server, ids, self.reply)[:-1]  # nothing is computed on the last token

    def _several(self, number: int, concurrency: int) -> None:
        with ThreadPoolExecutor(concurrency) as threads:
            self.stored += threads.map(self._one, [next(self.prompts) for _ in range(number)])

    def fill(self, capacity: int, turnover: float) -> None:
        """Ask until the tree evicts, then for ``turnover`` times as many again, the last of them one at a time.

        A stock tree evicts when ``capacity`` tokens were asked for, DiffKV's when it holds fewer than were asked for.
        """
        while not self._full(capacity):
            self._several(self.concurrency, self.concurrency)
        rest = max(1, round(turnover * len(self.stored)))
        self._several(max(rest - self.concurrency, 0), self.concurrency)
        self._several(self.concurrency, 1)

    def _full(self, capacity: int) -> bool:
        stats = self.server.stats() if self.stored else None
        return sum(map(len, self.stored)) > (capacity if stats is None else stats["tokens"])


def cached(server: Server, stored: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Tokens that the tree has of the sequences, newest first until one is missing, and sequences that it has whole.

    SGLang computes a prompt's last token in any case, so a sequence whose other tokens are there counts as whole.
    """
    tokens = whole = 0
    for sequence in reversed(stored):
        parameters = {"temperature": 0, "max_new_tokens": 0}
        reply = server.generate({"input_ids": list(sequence), "sampling_params": parameters})
        found = reply["meta_info"]["cached_tokens"]
        if found < len(sequence) - 1:
            return tokens + found, whole
        tokens += len(sequence)
        whole += 1
    return tokens, whole


def measure(server: Server, setup: Setup, args: argparse.Namespace) -> Record:
    """Fill one server's tree and count it in both ways."""
    capacity = stock_tokens(setup.kv_bytes, setup.shape, "bf16")
    prompts = distinct_prompts(args.input, setup.shape.vocab, setup.seed)
    filler = Filler(server, prompts, args.reply, args.concurrency)
    filler.fill(capacity, args.turnover)
    stats = server.stats()
    tokens, whole = cached(server, filler.stored)
    record: Record = {"asked": len(filler.stored), "cached_tokens": tokens, "whole": whole, "bf16_tokens": capacity}
    if stats is None:
        return {**record, "held_tokens": None, "bound_tokens": capacity}
    if stats["faults"]:
        raise BenchmarkError(f"{stats['faults']} requests found the pool empty")
    kept = ("ratio_tokens", "ratio_pages", "share_high", "share_low", "share_pruned", "segments", "owners", "pages")
    bound = round(capacity / stats["ratio_tokens"])
    return {**record, "held_tokens": stats["tokens"], "bound_tokens": bound, **{key: stats[key] for key in kept}}


def table(records: Sequence[Record]) -> str:
    """One line a server: tokens, times the first server's, share of the bound, what a stored token takes."""
    rows = []
    first = next((x["cached_tokens"] for x in records if x["status"] == OK), None)
    for x in records:
        if x["status"] != OK:
            rows.append(failed_row(x, 8))
            continue
        held = x["cached_tokens"] if x["held_tokens"] is None else x["held_tokens"]
        ratios = [f"{x[key]:.3f}" if key in x else "1" for key in ("ratio_tokens", "ratio_pages")]
        share = f"{x['share_high']:.0%}" if "share_high" in x else ""
        rows.append(
            [x["backend"], f"{x['cached_tokens']:,}", f"{held:,}", f"{x['cached_tokens'] / first:.2f}"]
            + [f"{held / x['bf16_tokens']:.2f}", f"{held / x['bound_tokens']:.1%}", " / ".join(ratios), share]
        )
    header = [
        "prefix cache",
        "tokens found again",
        "tokens held",
        "found, times the first",
        "held, times bf16 capacity",
    ]
    return markdown([*header, "held, of the bound", "bytes of bf16: tokens / pages", "high"], rows)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ``args.candidates`` are the backends in the table's order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(max_running=16)
    parser.add_argument("--input", type=int, default=512, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--reply", type=int, default=32, help="new tokens (default: %(default)s)")
    parser.add_argument(
        "--turnover", type=float, default=0.3, help="of a full tree, that is replaced (default: %(default)s)"
    )
    parser.add_argument("--concurrency", type=int, default=4, help="requests at a time (default: %(default)s)")
    args = parser.parse_args(argv)
    args.argv = argv
    stock = [parse_backend(f"{stock_backend()}:bf16")] if args.backends is None else args.backends
    args.candidates = [*stock, *(args.diffkv or [parse_diffkv(text) for text in FIDELITIES])]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Serve every candidate, print the table and write the results."""
    args = parse_args(argv)
    sizes = {key: getattr(args, key) for key in ("kv_gib", "max_running", "input", "reply", "concurrency", "turnover")}
    model = model_name(args)
    data = {"kind": "tree_capacity", "name": f"tree_capacity_{model}", "setup": sizes}
    title = f"Tokens in the prefix cache of {args.kv_gib:g} GiB, {model}"
    return measure_each(args, data, title, partial(measure, args=args), table)


if __name__ == "__main__":
    sys.exit(main())
