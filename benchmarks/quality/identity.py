"""Token identity: does a cache configuration give the same greedy tokens as stock SGLang?

The reference is stock SGLang, one request at a time, without any prefix hit. Against it stand the same stock
server and a DiffKV server (by default one bfloat16 tier, which loses nothing) at several batch sizes, with
prefix hits and with chunked prefill; stock's own differences, and those of stock on other attention backends
(``--controls``), show how far the hardware's rounding goes.
For each reply that differs the table gives the first differing position and, at that position, the gap
between the reference's two best log-probabilities: a rounding tie has a gap of about the rounding of the
logits. With ``--draft-args`` the server under test drafts, and so does a further stock server on a GPU (on a CPU
stock's PyTorch attention cannot verify); the tokens accepted a pass are told of both. Examples:

    python -m benchmarks.quality.identity --n 60 --output identity.json
    python -m benchmarks.quality.identity --draft-args "--speculative-algorithm STANDALONE ..."
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import splits
from benchmarks.paths import NANO
from sglang_diffkv.evaluate import client, report
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server, has_gpu, stock_backend
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.evaluate.tasks.generation import Example

LOSSLESS = '{"tiers": ["BF16"]}'


@dataclass
class Difference:
    """The first token in which a reply leaves the reference."""

    server: str
    variant: str
    id: str
    position: int
    length: int
    reference_gap: float
    gap: float
    tie: bool


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--diffkv-config", default=LOSSLESS, help="default: %(default)s")
    parser.add_argument("--backend", default="diffkv", help="of the server under test")
    parser.add_argument("--stock", default=stock_backend(), help="of the reference (default: %(default)s)")
    parser.add_argument(
        "--controls",
        nargs="*",
        default=[],
        metavar="BACKEND",
        help="stock SGLang on other attention backends too: what other kernels' rounding alone does to the tokens",
    )
    parser.add_argument("--split", choices=splits.SPLITS, default="dev")
    parser.add_argument("--levels", nargs="+", choices=reference.LEVELS, default=["easy", "medium"])
    parser.add_argument("--n", type=int, default=60, help="number of questions (default: %(default)s)")
    parser.add_argument("--shared", type=int, default=8, help="of them over one shared prefix")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--chunk", type=int, default=64, help="chunked prefill size (default: %(default)s)")
    parser.add_argument("--tie", type=float, default=0.125, help="largest gap of a rounding tie (default: %(default)s)")
    parser.add_argument("--model", default=str(NANO), help="default: the nano model of the repository")
    parser.add_argument("--server-args", type=shlex.split, default=[], help="more arguments, one string")
    parser.add_argument("--draft-args", type=shlex.split, default=[], help="arguments of speculative decoding")
    parser.add_argument("--output", type=Path, help="write everything to this JSON file")
    return parser.parse_args(argv)


def choose(args: argparse.Namespace) -> list[Example]:
    """A random sample, with ``--shared`` questions of one group so that prefixes repeat."""
    items = splits.load(args.split)
    candidates = reference.groups(item for item in items if item.level in args.levels)
    shared = next(iter(candidates.values()))[: args.shared]
    n = args.n - len(shared)
    return shared + reference.select(items, levels=args.levels, exclude=["fewshot_shared"], n=n, seed=args.seed)


def collect(
    args: argparse.Namespace,
    backend: str,
    config: str | None,
    prompts: Sequence[Sequence[int]],
    drafts: Sequence[str] = (),
) -> dict[str, list[client.Record]]:
    """The replies of one kind of server in every variant. ``drafts``: its arguments of speculative decoding."""
    replies: dict[str, list[client.Record]] = {}
    for chunk in (None, args.chunk):
        extra = [*drafts] if chunk is None else [*drafts, "--chunked-prefill-size", str(chunk)]
        with Server(args.model, backend, [*args.server_args, *extra], diffkv_config=config) as server:
            prefix = "" if chunk is None else f"chunk {chunk}, "
            for size in args.batch_sizes if chunk is None else args.batch_sizes[-1:]:
                server.flush_cache()
                replies[f"{prefix}batch {size}"] = ask(server, args, prompts, size)
            replies[f"{prefix}batch {size}, prefix hits"] = ask(server, args, prompts, size)
            if drafts:
                accepted = server.server_info()["internal_states"][0].get("avg_spec_accept_length")
                print(f"{backend} {' '.join(extra)}: {accepted} tokens accepted a verification", flush=True)
    return replies


def ask(
    server: Server,
    args: argparse.Namespace,
    prompts: Sequence[Sequence[int]],
    size: int,
    fields: Sequence[Mapping[str, Any]] | None = None,
) -> list[client.Record]:
    """All prompts at one concurrency; at concurrency 1 the prefix cache is emptied before each. ``fields``: more of
    each one's request."""
    if size > 1:
        return client.run(server.url, prompts, args.max_new_tokens, concurrency=size, top_logprobs=2, fields=fields)
    replies = []
    for number, ids in enumerate(prompts):
        server.flush_cache()
        own = fields[number] if fields else None
        replies.append(client.ask(server.url, ids, args.max_new_tokens, top_logprobs=2, fields=own))
    return replies


def compare(
    server: str,
    variant: str,
    items: Sequence[Example],
    reference: Sequence[client.Record],
    replies: Sequence[client.Record],
    tie: float,
) -> list[Difference]:
    """The replies that are not the reference's, token by token."""
    differences = []
    for item, expected, got in zip(items, reference, replies):
        if expected.output_ids == got.output_ids:
            continue
        pairs = zip(expected.output_ids, got.output_ids)
        shorter = min(len(expected.output_ids), len(got.output_ids))
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        # A stop token belongs to a reply, so none that ends by itself is the head of another.
        parted = position < shorter
        gaps = [top_gap(record, position) if parted else math.nan for record in (expected, got)]
        likely = {token for _, token in expected.top_logprobs[position]} if parted else set()
        differences.append(
            Difference(
                server=server,
                variant=variant,
                id=item.id,
                position=position,
                length=len(expected.output_ids),
                reference_gap=gaps[0],
                gap=gaps[1],
                tie=parted and gaps[0] <= tie and got.output_ids[position] in likely,
            )
        )
    return differences


def top_gap(record: client.Record, position: int) -> float:
    """Log-probability of the best token less that of the second best."""
    best, second = record.top_logprobs[position][:2]
    return best[0] - second[0]


def largest_shift(reference: Sequence[client.Record], replies: Sequence[client.Record]) -> float:
    """The largest change of a chosen token's log-probability before the replies part."""
    shift = 0.0
    for expected, got in zip(reference, replies):
        for a, b, p, q in zip(expected.output_ids, got.output_ids, expected.logprobs, got.logprobs):
            if a != b:
                break
            shift = max(shift, abs(p - q))
    return shift


CELLS = ("identical", "rounding ties", "other", "cached tokens", "largest shift")
HEADER = ("server", "variant", *CELLS)


def cells(
    found: Sequence[Difference], reference: Sequence[client.Record], replies: Sequence[client.Record]
) -> list[str]:
    """What the table says of replies that differ from the reference's as ``found``, in the order of ``CELLS``."""
    ties = sum(difference.tie for difference in found)
    counts = (len(replies) - len(found), ties, len(found) - ties, sum(record.cached_tokens for record in replies))
    return [*map(str, counts), f"{largest_shift(reference, replies):.3f}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and the differences; 1 if any of the tested server's is no rounding tie."""
    args = parse_args(argv)
    items = choose(args)
    tokenizer = load_tokenizer(args.model)
    prompts = [chat_ids(tokenizer, item.prompt) for item in items]
    config = args.diffkv_config if args.backend == "diffkv" else None
    stock = collect(args, args.stock, None, prompts)
    reference = stock.get("batch 1") or next(iter(stock.values()))
    rows: list[list[str]] = []
    differences: list[Difference] = []

    def take(name: str, variants: dict[str, list[client.Record]]) -> None:
        for variant, replies in variants.items():
            found = compare(name, variant, items, reference, replies, args.tie)
            differences.extend(found)
            rows.append([name, variant, *cells(found, reference, replies)])
        _keep(args, rows, differences)

    try:
        take("stock", stock)
        for name in args.controls:
            take(f"stock, {name}", collect(args, name, None, prompts))
        take(args.backend, collect(args, args.backend, config, prompts, args.draft_args))
        if args.draft_args and has_gpu():
            take("stock, drafts", collect(args, stock_backend(), None, prompts, args.draft_args))
    finally:
        print(f"{len(items)} questions, at most {args.max_new_tokens} new tokens each\n")
        print(report.markdown(HEADER, rows))
        print_differences(differences)
    return int(any(d.server == args.backend and not d.tie for d in differences))


def _keep(args: argparse.Namespace, rows: Sequence[Sequence[str]], differences: Sequence[Difference]) -> None:
    """What is known so far, into ``--output``."""
    if args.output:
        setup = {key: value for key, value in vars(args).items() if key != "output"}
        data: dict[str, Any] = {
            "environment": report.environment(),
            "setup": setup,
            "table": [dict(zip(HEADER, row)) for row in rows],
            "differences": [asdict(difference) for difference in differences],
        }
        args.output.write_text(json.dumps(data, indent=1), encoding="utf-8")


def print_differences(differences: Sequence[Difference]) -> None:
    """One line for each reply that differs."""
    if not differences:
        return
    rows = [
        [
            d.server,
            d.variant,
            d.id,
            f"{d.position} of {d.length}",
            f"{d.reference_gap:.4f}",
            f"{d.gap:.4f}",
            "tie" if d.tie else "no tie",
        ]
        for d in differences
    ]
    header = ["server", "variant", "item", "position", "gap in the reference", "gap in the reply", "kind"]
    print(f"\n{report.markdown(header, rows)}")


if __name__ == "__main__":
    raise SystemExit(main())
