"""What a prefix that comes back saves: time to the first token of a prompt that is computed, that the GPU still has,
that comes back from host memory, and that comes back from a store; and what that costs requests that decode meanwhile.
``--added``: also with so many new tokens behind a prompt that the GPU has, as a chat's next turn has.

Nothing else may run on the machine, other servers' starts least of all: such passes wait for the host.

Each backend gets a server of its own with the same bytes of KV cache, and needs SGLang's options for host memory. Other
prompts push a prompt out of the GPU. With a store, emptying the caches pushes it out of host memory too; it then lies
in the page cache of the operating system. Example:

    HOST="--enable-hierarchical-cache --hicache-size 24 --hicache-write-policy write_through"
    STORE="--hicache-storage-backend file --hicache-storage-prefetch-policy wait_complete"
    export SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=$(mktemp -d)
    python -m benchmarks.serving.restored --geometry llama3-8b --kv-gib 2 --max-running 24 --prompt 8000 \\
        --backends "fa3:fp8_e4m3 $HOST $STORE" --diffkv "default $HOST $STORE={}"

NAME.json and NAME.md in the output folder. Exit code 1 if a server failed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import requests

from benchmarks.serving.agents import drawn
from benchmarks.serving.cli import model_name
from benchmarks.serving.client import BenchmarkError, warm_up
from benchmarks.serving.each_backend import add_arguments, failed_row, measure_each, parse
from benchmarks.serving.first_tokens import PAUSE
from benchmarks.serving.session import OK, Record, Setup
from benchmarks.serving.streams import token_times
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.server import Server

COMPUTED, DEVICE, HOST, STORE = "computed", "device", "host", "storage"
"""Where a prefix was found, as ``cached_tokens_details`` of a reply has it."""
FOUND = 0.9
"""Of a prompt's tokens, at least, that have to be found where they are looked for."""
MOST_FILLERS = 256
"""Other prompts that are asked at once, at most, to push one out of the GPU."""


@dataclass(frozen=True)
class Asked:
    """A reply of one token: seconds to it, and where the prompt was found, in tokens."""

    seconds: float
    found: dict[str, int]

    def of(self, place: str, prompt: int) -> bool:
        """Whether most of a prompt of so many tokens was found at this place, or nowhere."""
        if place == COMPUTED:
            return sum(self.found.values()) < (1 - FOUND) * prompt
        return self.found.get(place, 0) >= FOUND * prompt


def ask(url: str, prompt: Sequence[int]) -> Asked:
    """Ask for one token."""
    body = {"input_ids": list(prompt), "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}}
    begin = time.perf_counter()
    answer = requests.post(f"{url}/generate", json=body, timeout=600)
    seconds = time.perf_counter() - begin
    answer.raise_for_status()
    meta: dict[str, Any] = answer.json()["meta_info"]
    details = meta.get("cached_tokens_details") or {DEVICE: meta["cached_tokens"]}
    return Asked(seconds, {name: int(x) for name, x in details.items() if isinstance(x, int)})


class Prefixes:
    """Prompts of one server, asked until they lie where they are wanted.

    Args:
        draw: gives a prompt that nobody has asked.
    """

    def __init__(self, server: Server, draw: Callable[[], list[int]]):
        self.server, self.draw = server, draw

    def push_out(self, prompts: Sequence[Sequence[int]], at_once: int = 8) -> None:
        """Ask other prompts until none of these is on the GPU: the last one tells, since those before it go first."""
        fillers = at_once
        while fillers <= MOST_FILLERS:
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(lambda _: ask(self.server.url, self.draw()), range(fillers)))
            fillers *= 2  # what was asked for last stays longest
            probe = ask(self.server.url, prompts[-1])
            if probe.of(HOST, len(prompts[-1])):
                return
        raise BenchmarkError("the GPU still has a prompt after many others")

    def times(self, prompts: Sequence[Sequence[int]], place: str, added: int = 0) -> list[float]:
        """Milliseconds to the first token of each, which has to be found at ``place``; behind so many new tokens. A
        pause comes before each, so that what ends a request is not measured with the next."""
        found: list[Asked] = []
        for prompt in prompts:
            whole = [*prompt, *(self.draw()[:added] if added else ())]
            time.sleep(PAUSE)
            found.append(ask(self.server.url, whole))
        for asked, prompt in zip(found, prompts, strict=True):
            if not asked.of(place, len(prompt)):
                raise BenchmarkError(f"a prompt of {len(prompt)} tokens was found {asked.found}, not {place}")
        return [1e3 * asked.seconds for asked in found]


def decode_beside(url: str, running: Sequence[Sequence[int]], tokens: int, ask_one: Callable[[], None]) -> float:
    """Tokens a second of requests that decode, while ``ask_one`` is called again and again from when all have their
    first token until one has its last."""
    began: list[float] = []
    lock, all_run, over = threading.Lock(), threading.Event(), threading.Event()
    counted: list[float] = []

    def stream(prompt: Sequence[int]) -> None:
        first = True
        for now in token_times(url, prompt, tokens):
            with lock:
                if first:
                    began.append(now)
                    if len(began) == len(running):
                        all_run.set()
                    first = False
                elif all_run.is_set() and not over.is_set():
                    counted.append(now)
        over.set()

    with ThreadPoolExecutor(len(running) + 1) as pool:
        streams = [pool.submit(stream, prompt) for prompt in running]
        if not all_run.wait(600):
            raise BenchmarkError("some requests never began")
        while not over.is_set():
            ask_one()
        for done in streams:
            done.result()
    begin, end = max(began), counted[-1] if counted else 0.0
    if end <= begin:
        raise BenchmarkError("no tokens came while all requests ran")
    return len(counted) / (end - begin)


class Comes:
    """Prompts that are asked one by one, with pauses, and have to be found at ``place``; ``missed`` were not."""

    def __init__(self, url: str, place: str, prompts: Sequence[Sequence[int]], pause: float):
        self.url, self.place, self.pause = url, place, pause
        self.missed = 0
        self._prompts = iter(prompts)

    def one(self) -> None:
        """The next one, if there is one left, after a pause."""
        time.sleep(self.pause)
        prompt = next(self._prompts, None)
        if prompt is not None:
            self.missed += not ask(self.url, prompt).of(self.place, len(prompt))


def behind_device(added: int) -> str:
    """The name of so many new tokens behind what the GPU has."""
    return f"{DEVICE}_{added}"


def measure(server: Server, setup: Setup, args: argparse.Namespace) -> Record:
    """Times of each kind on one server."""
    vocab, draw = setup.shape.vocab, random.Random(f"restored {setup.seed}")
    warm_up(server, vocab, 1024, 8, setup.seed)
    record: Record = {"prompts": []}
    for length in args.prompt:
        prefixes = Prefixes(server, partial(drawn, draw, vocab, length))
        server.flush_cache()
        prompts = [prefixes.draw() for _ in range(args.repeat)]
        ask(server.url, prefixes.draw())  # what the first prompt of a length compiles
        found = {COMPUTED: prefixes.times(prompts, COMPUTED)}
        prefixes.push_out(prompts)
        found[HOST] = prefixes.times(prompts[:-1], HOST)
        again = prompts[-2:-1] * len(prompts[:-1])
        found[DEVICE] = prefixes.times(again, DEVICE)
        for added in args.added:
            found[behind_device(added)] = prefixes.times(again, DEVICE, added)
        if any("storage-backend" in arg for arg in server.command):
            time.sleep(args.settle)
            server.flush_cache()
            found[STORE] = prefixes.times(prompts[:-1], STORE)
        medians = {f"{place}_ms": statistics.median(times) for place, times in found.items()}
        record["prompts"].append({"length": length, **medians, "all_ms": found})
    if args.beside:
        record |= beside(server, vocab, draw, args)
    return record


def beside(server: Server, vocab: int, draw: random.Random, args: argparse.Namespace) -> Record:
    """Tokens a second of requests that decode beside prompts that the GPU has, and beside prompts that come back."""
    length = args.prompt[0]
    rates: dict[str, list[float]] = {DEVICE: [], HOST: []}
    for _ in range(args.rounds):
        for place, found in rates.items():
            server.flush_cache()
            prefixes = Prefixes(server, partial(drawn, draw, vocab, length))
            prompts = [prefixes.draw() for _ in range(args.prompts)]
            for prompt in prompts:
                ask(server.url, prompt)
            if place == HOST:
                prefixes.push_out(prompts)
            running = [drawn(draw, vocab, 64) for _ in range(args.beside)]
            asked = prompts[:-1] if place == HOST else prompts[-1:] * (len(prompts) - 1)  # as many of both
            comes = Comes(server.url, place, asked, args.pause)
            found.append(decode_beside(server.url, running, args.tokens, comes.one))
            if comes.missed:
                raise BenchmarkError(f"{comes.missed} prompts beside others were not found: {place}")
    return {"beside": {place: statistics.median(found) for place, found in rates.items()}, "all_beside": rates}


def table(records: Sequence[Record], args: argparse.Namespace) -> str:
    """A row for each backend and length."""
    header = [
        "backend", "prompt", "computed ms", "on the GPU", *(f"and {added} more" for added in args.added),
        "from host memory", "from the store", "decode beside",
    ]  # fmt: skip
    places = [DEVICE, *map(behind_device, args.added), HOST, STORE]
    rows = []
    for record in records:
        if record["status"] != OK:
            rows.append(failed_row(record, len(header)))
            continue
        for number, found in enumerate(record["prompts"]):
            computed = found[f"{COMPUTED}_ms"]
            cells = [f"{computed:.1f}"]
            for place in places:
                ms = found.get(f"{place}_ms")
                cells.append("" if ms is None else f"{ms:.1f}, {ms / computed:.2f}")
            rates = record.get("beside") if number == 0 else None
            cells.append("" if rates is None else f"{rates[HOST]:,.0f} tok/s, {rates[HOST] / rates[DEVICE]:.3f}")
            rows.append([record["backend"], str(found["length"]), *cells])
    return markdown(header, rows)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--prompt", type=int, nargs="+", default=[8000], metavar="TOKENS", help="of a prompt")
    parser.add_argument("--repeat", type=int, default=5, help="prompts of each length, for the median")
    parser.add_argument("--added", type=int, nargs="*", default=[], metavar="TOKENS", help="behind what the GPU has")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds in which the store takes what it is given")
    parser.add_argument("--beside", type=int, default=0, metavar="REQUESTS", help="that decode while prompts come back")
    parser.add_argument("--rounds", type=int, default=2, help="of these, for the median")
    parser.add_argument("--tokens", type=int, default=256, help="of each of these")
    parser.add_argument("--prompts", type=int, default=16, help="that come back beside them")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between these")
    args = parse(parser, argv)
    if args.repeat < 2 or args.prompts < 2:
        parser.error("--repeat and --prompts are at least 2: the last prompt shows whether others are still on the GPU")
    if any(not 0 < added <= min(args.prompt) for added in args.added):
        parser.error("--added is from 1 to the length of the shortest prompt")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all backends, print the table and write the results."""
    args = parse_args(argv)
    model = model_name(args)
    data = {"kind": "restored", "name": f"restored_{model}"}
    return measure_each(
        args, data, f"Prefixes that come back, {model}", partial(measure, args=args), partial(table, args=args)
    )


if __name__ == "__main__":
    sys.exit(main())
