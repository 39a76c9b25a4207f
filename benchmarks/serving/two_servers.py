"""One server computes prompts, another goes on with them: bytes on the wire, and the time from a prompt's end to the
second token, which the other server makes.

Each backend gets a pair of servers, on two GPUs if there are two. All pairs start at once and are asked one at a time,
for one prompt at a time. Mooncake carries the bytes by TCP, so its package has to be installed; to move a GPU's memory,
as stock does, it has to be the one for CUDA. Example:

    python -m benchmarks.serving.two_servers --geometry llama3-8b --kv-gib 4.5 --max-running 16 \\
        --backends fa3:fp8_e4m3 --diffkv 'default={}' --prompt 1000 8000 30000

NAME.json and NAME.md in the output folder. Exit code 1 if a pair failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import requests

from benchmarks.provenance import headline, provenance
from benchmarks.serving.agents import drawn
from benchmarks.serving.backends import Backend
from benchmarks.serving.cli import model_name, prepare
from benchmarks.serving.client import BenchmarkError
from benchmarks.serving.each_backend import add_arguments, parse
from benchmarks.serving.session import FAILED, OK, Record, Setup, log_name, short
from sglang_diffkv.evaluate.ports import Port
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.server import Server, ServerError

NOTED_ENGINE = Path(__file__).parent / "noted_engine"
NOTES_ENV = "TWO_SERVERS_NOTES"
REPLY = 8
"""Tokens of a reply."""
SETTLED = 0.5
"""Seconds in which both servers write down the last of what they note."""

Notes = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Asked:
    """A request: its name, when it was sent, when its second token came, and when all was over, in seconds."""

    name: str
    begin: float
    second: float
    end: float


def reckoned(asked: Asked, sent: Notes, received: Notes) -> dict[str, float]:
    """What became of a request between two servers, by what they noted: bytes on the wire; seconds that its prompt
    took, from there to the second token at the client, and to the results of the other server's first pass; what writes
    took together, and what lies before the first and behind the last one. Raises BenchmarkError if anything was not
    noted."""
    ends = [note["at"] for note in sent if note["what"] == "pass" and asked.name in note["requests"]]
    steps = [note["at"] for note in received if note["what"] == "pass" and asked.name in note["requests"]]
    writes = [note for note in sent if note["what"] == "write" and asked.begin <= note["begin"] <= asked.end]
    if not ends or not steps or not writes:
        raise BenchmarkError(f"{len(ends)} passes of a prompt, {len(writes)} writes and {len(steps)} steps were noted")
    if any(note["code"] for note in writes):
        raise BenchmarkError("a write failed")
    end, first = max(ends), min(steps)
    return {
        "bytes": sum(note["bytes"] for note in writes),
        "prompt_s": end - asked.begin,
        "second_token_s": asked.second - end,
        "first_step_s": first - end,
        "writes_s": sum(note["end"] - note["begin"] for note in writes),
        "before_writes_s": min(note["begin"] for note in writes) - end,
        "behind_writes_s": first - max(note["end"] for note in writes),
    }


class Pair:
    """A prefill server and a decode server of one backend.

    Args:
        notes: an empty folder, for what both note. gpus: those of the servers; none on a CPU.
    """

    rooms = itertools.count((os.getpid() << 32) + 1)

    def __init__(self, backend: Backend, setup: Setup, notes: Path, gpus: Sequence[int]):
        self.backend, self.setup, self.notes = backend, setup, notes
        self.bootstrap = Port()
        places = [*gpus, None, None] if len(gpus) != 1 else [gpus[0]] * 2
        self.prefill, self.decode = (
            self._server(mode, gpu) for mode, gpu in zip(("prefill", "decode"), places[:2], strict=True)
        )
        self._threads = ThreadPoolExecutor(4)

    def _server(self, mode: str, gpu: int | None) -> Server:
        backend, setup, notes = self.backend, self.setup, self.notes / mode
        notes.mkdir()
        paths = [str(NOTED_ENGINE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        env = {"PYTHONPATH": os.pathsep.join(paths), NOTES_ENV: str(notes)}
        env |= {"MC_FORCE_TCP": "1", "SGLANG_HOST_IP": "127.0.0.1"}
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = str(gpu)
        own = ["--disaggregation-mode", mode, "--disaggregation-transfer-backend", "mooncake"]
        own += ["--disaggregation-bootstrap-port", str(self.bootstrap.number)]
        tokens = backend.tokens(setup.kv_bytes, setup.shape, setup.max_running)
        return Server(
            setup.model,
            backend.attention,
            [*backend.server_args(tokens), *setup.server_args, *backend.flags, *own],
            diffkv_config=backend.config_json(),
            env=env,
            log_path=setup.logs / log_name(f"{backend.name} {mode}"),
            timeout=setup.start_timeout,
        )

    def __enter__(self) -> Pair:
        with ThreadPoolExecutor(2) as threads:
            starts: list[Future[None]] = [threads.submit(x.start) for x in (self.prefill, self.decode)]
        try:
            for start in starts:
                start.result()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.prefill.stop()
        self.decode.stop()

    def ask(self, prompt: Sequence[int], name: str) -> Asked:
        """Ask both servers, as a router does. Raises BenchmarkError if fewer tokens came than were wanted."""
        parameters = {"temperature": 0, "max_new_tokens": REPLY, "ignore_eos": True}
        body = {
            "input_ids": list(prompt), "rid": name, "sampling_params": parameters, "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap.number, "bootstrap_room": next(self.rooms),
        }  # fmt: skip
        begin, second, meta = time.time(), 0.0, {}
        other = self._threads.submit(requests.post, f"{self.prefill.url}/generate", json=body, timeout=600)
        with requests.post(
            f"{self.decode.url}/generate", json=body | {"stream": True}, stream=True, timeout=600
        ) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                chunk: dict[str, Any] = json.loads(line[6:])
                if "error" in chunk:
                    raise BenchmarkError(f"a request ended with {chunk['error']}")
                meta = chunk["meta_info"]
                if not second and meta["completion_tokens"] >= 2:
                    second = time.time()
        other.result().raise_for_status()
        if meta.get("completion_tokens") != REPLY:
            raise BenchmarkError(
                f"a request has {meta.get('completion_tokens')} of {REPLY} tokens: {meta.get('finish_reason')}"
            )
        return Asked(name, begin, second, time.time())

    def noted(self, mode: str) -> list[dict[str, Any]]:
        """What a server has noted so far."""
        return [json.loads(line) for path in (self.notes / mode).iterdir() for line in path.read_text().splitlines()]


def measure(pair: Pair, args: argparse.Namespace, draw: random.Random) -> Record:
    """Medians of each length on a pair; the first prompt of a length warms up."""
    found: Record = {"prompts": []}
    for length in args.prompt:
        asked = [
            pair.ask(drawn(draw, pair.setup.shape.vocab, length), f"{length} {number} {random.random()}")
            for number in range(args.repeat + 1)
        ]
        time.sleep(SETTLED)
        sent, received = pair.noted("prefill"), pair.noted("decode")
        runs = [reckoned(request, sent, received) for request in asked[1:]]
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        found["prompts"].append({"length": length, **medians, "runs": runs})
    return found


def table(records: Sequence[Record]) -> str:
    """A row for each length and pair, over the first pair that did not fail."""
    header = [
        "prompt",
        "servers",
        "MB on the wire",
        "ms to the second token",
        "writes, ms",
        "before",
        "behind",
        "prompt, ms",
    ]
    good = [record for record in records if record["status"] == OK]
    rows = [
        ["", record["servers"], record["error"], *("" for _ in header[3:])] for record in records if record not in good
    ]
    for number in range(len(good[0]["prompts"]) if good else 0):
        first = good[0]["prompts"][number]
        for record in good:
            x = record["prompts"][number]
            cells = [f"{1e3 * x[name]:,.0f}" for name in ("writes_s", "before_writes_s", "behind_writes_s", "prompt_s")]
            size = f"{x['bytes'] / 1e6:,.1f}, {x['bytes'] / first['bytes']:.2f}"
            seconds = f"{1e3 * x['second_token_s']:,.0f}, {x['second_token_s'] / first['second_token_s']:.2f}"
            rows.append([f"{x['length']:,}", record["servers"], size, seconds, *cells])
    return markdown(header, rows)


def gpus() -> list[int]:
    """Numbers of the first two GPUs; of one if there is one."""
    import torch

    return list(range(min(torch.cuda.device_count(), 2)))


def run(candidates: Iterable[Backend], setup: Setup, args: argparse.Namespace, notes: Path) -> list[Record]:
    """All pairs, started at once and asked one at a time."""
    pairs = []
    for number, backend in enumerate(candidates):
        (own := notes / str(number)).mkdir()
        pairs.append(Pair(backend, setup, own, gpus()))
    with ThreadPoolExecutor(len(pairs)) as threads:
        started = [threads.submit(pair.__enter__) for pair in pairs]
    records: list[Record] = []
    try:
        for pair, start in zip(pairs, started, strict=True):
            record: Record = {"servers": pair.backend.name, "status": OK}
            try:
                start.result()
                record |= measure(pair, args, random.Random(f"two servers {setup.seed}"))
            except (ServerError, BenchmarkError, requests.RequestException) as error:
                record |= {"status": FAILED, "error": short(error)}
            records.append(record)
    finally:
        for pair in pairs:
            pair.__exit__(None, None, None)
    return records


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--prompt", type=int, nargs="+", default=[1000, 8000, 30000], metavar="TOKENS")
    parser.add_argument("--repeat", type=int, default=3, help="prompts of each length, for the median")
    return parse(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all pairs, print the table and write the results."""
    args = parse_args(argv)
    name, source = f"two_servers_{model_name(args)}", provenance("serving.two_servers", args.argv)
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="two-servers-") as folder:
        (notes := Path(folder) / "notes").mkdir()
        records = run(args.candidates, prepare(args, Path(folder), 40), args, notes)
    data = {"kind": "two_servers", "name": name, "provenance": source, "records": records}
    (args.output / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    parts = [f"# Two servers, {model_name(args)}", headline(source), f"`{source['command']}`", table(records)]
    (args.output / f"{name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(table(records))
    return int(any(record["status"] == FAILED for record in records))


if __name__ == "__main__":
    sys.exit(main())
