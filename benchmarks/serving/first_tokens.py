"""Times to the first token of one prompt at a time, of servers that are asked in turns.

A machine's other work, and the core that a server was given, change such times by half: a turn that adds few tokens to
a cached prompt waits for the host. So all servers run beside each other, and each prompt is asked of one after the
other, a round at a time, each round beginning with another server. Example:

    python -m benchmarks.serving.first_tokens --geometry llama3-8b --kv-gib 8 --prompts 8192 13000:12000 8064:8000 \\
        --backends fa3:bf16 fa3:fp8_e4m3 --diffkv 'default={}' --extra-server-args '--mem-fraction-static 0.95'

Servers that have just started are slow; ``--settle`` waits before it asks. All start together, whatever the options of
other benchmarks say. NAME.json and NAME.md in the output folder. Exit code 1 if a server failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import requests

from benchmarks.budget import Budget
from benchmarks.provenance import headline, provenance
from benchmarks.serving.agents import drawn
from benchmarks.serving.cli import model_name, prepare
from benchmarks.serving.client import BenchmarkError, warm_up
from benchmarks.serving.each_backend import add_arguments, parse
from benchmarks.serving.session import GUESSES, Record, Setup, all_running, short
from benchmarks.serving.step_profile import parse_prompt
from benchmarks.serving.streams import Client
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.server import Server, ServerError

REPLY = 8
"""Tokens of each reply: a chat reads the first one while others come."""
PAUSE = 0.02
"""Seconds between two prompts: what ends a request is not measured with the next."""
WARM_UPS = 8
"""Requests that a server answers first."""
FOUND = 0.9
"""Of the tokens that should be cached, at least, that have to be."""


def title(tokens: int, cached: int) -> str:
    """Of a prompt, in the table."""
    return f"{tokens}, {cached} cached" if cached else f"{tokens}"


async def asked_in_turns(
    servers: Mapping[str, Server], prompts: Sequence[tuple[int, int]], repeat: int, vocab: int, seed: int,
    found: dict[str, list[Record]],
) -> None:  # fmt: skip
    """Add to ``found``, by server, milliseconds to the first token: a record of each prompt, once it is measured.
    Raises BenchmarkError, which names the server.

    Args:
        prompts: tokens of each, and how many of them are cached.
    """
    draw, names = random.Random(f"first tokens {seed}"), [*servers]
    async with AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(Client(server.url)) for name, server in servers.items()}

        async def ask(name: str, prompt: Sequence[int], cached: int) -> float:
            try:
                answer = await clients[name].answered(prompt, REPLY)
            except BenchmarkError as error:
                raise BenchmarkError(f"{name}: {error}") from error
            if answer.cached < FOUND * cached:
                raise BenchmarkError(f"{name}: {answer.cached} of {cached} tokens were cached")
            await asyncio.sleep(PAUSE)
            return 1e3 * answer.first

        for tokens, cached in prompts:
            start = drawn(draw, vocab, cached)
            for name, server in servers.items():
                server.flush_cache()
                if start:
                    await ask(name, start, 0)
            times: dict[str, list[float]] = {name: [] for name in names}
            for number in range(repeat):
                prompt = start + drawn(draw, vocab, tokens - cached)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    times[name].append(await ask(name, prompt, cached))
            for name, taken in times.items():
                median, of = statistics.median(taken), title(tokens, cached)
                record = {"prompt": of, "ttft_ms": median, "least_ms": min(taken), "all_ms": taken}
                found.setdefault(name, []).append(record)
                print(f"{name}: {of}: {median:.1f} ms", flush=True)


def table(found: Mapping[str, Sequence[Record]], failed: Mapping[str, str]) -> str:
    """A row for each prompt: the median, and the least in brackets."""
    rows = [
        [records[0]["prompt"], *(f"{x['ttft_ms']:.1f} ({x['least_ms']:.1f})" for x in records)]
        for records in zip(*found.values(), strict=True)
    ]
    shown = [markdown(["prompt, ms to the first token: median (least)", *found], rows)] if rows else []
    return "\n\n".join([*shown, *(f"{name} failed: {error}" for name, error in failed.items())])


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    usual = [(1000, 0), (8000, 0), (8064, 8000), (13000, 12000)]
    parser.add_argument(
        "--prompts", type=parse_prompt, nargs="+", default=usual, metavar="LENGTH[:CACHED]", help="prompts to ask"
    )
    parser.add_argument("--repeat", type=int, default=9, help="times each, for the median (default: %(default)s)")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds of rest (default: %(default)s)")
    parser.add_argument("--name", help="of the result files (default: first_tokens_MODEL)")
    args = parse(parser, argv)
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    if not 0 <= args.settle < math.inf:
        parser.error("--settle must be a number of seconds from 0")
    return args


def measure(
    args: argparse.Namespace, setup: Setup, budget: Budget
) -> tuple[dict[str, list[Record]], dict[str, str], dict[str, Record]]:
    """Times by server, why others failed, and what each says of itself."""
    servers: dict[str, Server] = {}
    failed: dict[str, str] = {}
    facts: dict[str, Record] = {}
    with all_running(args.candidates, setup, budget) as started:
        for backend, start in zip(args.candidates, started, strict=True):
            try:
                servers[backend.name], facts[backend.name] = start.result()
                warm_up(servers[backend.name], setup.shape.vocab, 1024, WARM_UPS, setup.seed)
            except (ServerError, BenchmarkError, ValueError, requests.RequestException) as error:
                servers.pop(backend.name, None)
                failed[backend.name] = short(error)
        found: dict[str, list[Record]] = {}
        if servers:
            time.sleep(args.settle)
            try:
                vocab, seed = setup.shape.vocab, setup.seed
                asyncio.run(asked_in_turns(servers, args.prompts, args.repeat, vocab, seed, found))
            except (BenchmarkError, ValueError, requests.RequestException) as error:
                failed["asking"] = short(error)
        return found, failed, facts


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    source = provenance("serving.first_tokens", argv)
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        setup = prepare(args, Path(folder), 40)
        found, failed, facts = measure(args, setup, Budget(args.budget_seconds, GUESSES))
    shown = table(found, failed)
    name = args.name or f"first_tokens_{model_name(args)}"
    data = {
        "kind": "first_tokens",
        "name": name,
        "provenance": source,
        "found": found,
        "failed": failed,
        "facts": facts,
    }
    (args.output / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    parts = ["# Times to the first token, servers asked in turns", headline(source), f"`{source['command']}`", shown]
    (args.output / f"{name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(shown)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
