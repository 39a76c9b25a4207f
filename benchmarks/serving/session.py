"""Runs all loads on one server after the other; each run becomes a record that says how it went."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests

from benchmarks.budget import Budget
from benchmarks.provenance import without_paths
from benchmarks.serving.backends import Backend, gib
from benchmarks.serving.client import BenchmarkError, run_point, warm_up
from benchmarks.serving.loads import Point
from benchmarks.serving.log import parse_log
from benchmarks.serving.memory import KVShape, check_bytes
from sglang_diffkv.evaluate import report
from sglang_diffkv.evaluate.server import Server, ServerError, stop_servers_on_sigterm

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
START = "server start"
STOP = "server stop"
GUESSES = {START: 90.0, STOP: 20.0}
LONGEST_NAME = 120
"""Characters of a log's name, before what tells it from others that begin alike."""
CACHE_ROUNDING = 0.002
"""GiB: servers round the size of their cache to three decimals."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What all servers of a run have in common."""

    model: str
    shape: KVShape
    kv_bytes: int
    max_running: int
    server_args: tuple[str, ...]
    logs: Path
    seed: int = 0
    point_timeout: float = math.inf
    start_timeout: float = 600.0


def new_record(backend: Backend, point: Point, status: str, **more: Any) -> Record:
    """A record of one backend and point."""
    place = {key: value for key, value in asdict(point).items() if key != "args"}
    return {"backend": backend.name, "dtype": backend.dtype, "status": status, **place, **more}


def short(error: BaseException) -> str:
    """The last line of an error, without paths: a ServerError ends with the server's own words."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    first = f"{lines[0]} ... " if isinstance(error, ServerError) and len(lines) > 1 else ""
    said = [line for line in lines if "Error" in line or "sglang_diffkv:" in line]
    last = said[-1] if isinstance(error, ServerError) and said else lines[-1]
    return without_paths(first + last[:240])


def run_backend(
    backend: Backend, points: Sequence[Point], setup: Setup, budget: Budget, add: Callable[[Record], None]
) -> None:
    """Start the backend's server, run the points and hand a record of each to ``add``."""
    if _no_time([backend], points, budget, add):
        return
    with _failures(backend, points, add) as left, running(backend, setup, budget) as (server, facts):
        _run_points(server, backend, left, setup, budget, facts, add)


def run_together(
    backends: Sequence[Backend], points: Sequence[Point], setup: Setup, budget: Budget, add: Callable[[Record], None]
) -> None:
    """As ``run_backend`` for all backends, whose servers start at once and share the GPU's memory.

    Only one of them is asked at a time; the others are idle.
    """
    if _no_time(backends, points, budget, add):
        return
    with all_running(backends, setup, budget) as started:
        for backend, start in zip(backends, started, strict=True):
            with _failures(backend, points, add) as left:
                server, facts = start.result()
                _run_points(server, backend, left, setup, budget, facts, add)


@contextmanager
def all_running(
    backends: Sequence[Backend], setup: Setup, budget: Budget
) -> Iterator[list[Future[tuple[Server, Record]]]]:
    """``running`` for all backends, started at once: what each would yield or raise."""
    stop_servers_on_sigterm()
    with ExitStack() as stack:

        def start(backend: Backend) -> tuple[Server, Record]:
            return stack.enter_context(running(backend, setup, budget))

        with ThreadPoolExecutor(len(backends)) as pool:  # what interrupts it stops those that have started
            started = [pool.submit(start, backend) for backend in backends]
        yield started


def _no_time(
    backends: Sequence[Backend], points: Sequence[Point], budget: Budget, add: Callable[[Record], None]
) -> bool:
    """Whether a start and a first point do not fit into the budget; all points are then recorded as skipped."""
    reason = budget.refusal(START, points[0].key, STOP)
    for backend in backends if reason else ():
        for point in points:
            add(new_record(backend, point, SKIPPED, error=reason))
    return reason is not None


@contextmanager
def _failures(backend: Backend, points: Sequence[Point], add: Callable[[Record], None]) -> Iterator[list[Point]]:
    """Yields the points, to be taken from; what is left of them when a server fails is recorded as failed."""
    left = list(points)
    try:
        yield left
    except (ServerError, BenchmarkError, ValueError, requests.RequestException) as error:
        for point in left:
            add(new_record(backend, point, FAILED, error=short(error)))


def _run_points(
    server: Server,
    backend: Backend,
    left: list[Point],
    setup: Setup,
    budget: Budget,
    facts: Record,
    add: Callable[[Record], None],
) -> None:
    """Take and run the points that are left."""
    while left:
        record = _record(server, backend, left.pop(0), setup, budget, facts)
        add(record)
        if record["status"] == FAILED and left:
            _recover(server)


def log_name(backend: str) -> str:
    """Of the file for a server's log; a name with many flags is cut, and told apart by a number of all of it."""
    plain = backend.replace(" ", "_").replace("/", "_")
    if len(plain) > LONGEST_NAME:
        plain = f"{plain[:LONGEST_NAME]}_{zlib.crc32(plain.encode()):08x}"
    return f"{plain}.log"


@contextmanager
def running(backend: Backend, setup: Setup, budget: Budget) -> Iterator[tuple[Server, Record]]:
    """A running server and what it says of itself.

    Raises ServerError if it does not start and BenchmarkError if its cache is not the one asked for.
    """
    tokens = backend.tokens(setup.kv_bytes, setup.shape, setup.max_running)
    server = Server(
        setup.model,
        backend.attention,
        [*backend.server_args(tokens), *setup.server_args, *backend.flags],
        diffkv_config=backend.config_json(),
        log_path=setup.logs / log_name(backend.name),
        timeout=max(1.0, min(setup.start_timeout, budget.remaining())),
    )
    begin = time.perf_counter()
    with budget.step(START):
        server.start()
    facts: Record = {"start_s": time.perf_counter() - begin, "capacity_tokens": tokens}
    try:
        facts["cache_gib"] = cache_gib(
            server.server_info(), tokens, setup.kv_bytes, backend.untold(tokens, setup.shape)
        )
        yield server, facts
    finally:
        with budget.step(STOP):
            server.stop()


def cache_gib(info: dict[str, Any], tokens: int, kv_bytes: int, untold: int = 0) -> float:
    """The size of the server's cache by its own account. ``untold``: bytes of a draft model's, which some servers leave
    out. Raises BenchmarkError if it is not the one asked for."""
    if (found := info.get("max_total_num_tokens")) != tokens:
        raise BenchmarkError(f"the server has room for {found} tokens, {tokens} were asked for")
    held = float(info["internal_states"][0]["memory_usage"]["kvcache"])
    if held < gib(kv_bytes - untold / 2):
        held += gib(untold)
    try:
        check_bytes(held, gib(kv_bytes), CACHE_ROUNDING)
    except ValueError as error:
        raise BenchmarkError(str(error)) from error
    return held


def _record(server: Server, backend: Backend, point: Point, setup: Setup, budget: Budget, facts: Record) -> Record:
    """The record of one point, however it went."""
    if reason := budget.refusal(point.key, STOP):
        return new_record(backend, point, SKIPPED, error=reason, **facts)
    try:
        with budget.step(point.key):
            figures = measure(server, backend, point, setup, budget)
    except (BenchmarkError, requests.RequestException) as error:
        return new_record(backend, point, FAILED, error=short(error), **facts)
    return new_record(backend, point, OK, **facts, **figures)


def measure(server: Server, backend: Backend, point: Point, setup: Setup, budget: Budget) -> Record:
    """Warm up, run the point and collect what client, log and server say of it."""
    warm_up(server, setup.shape.vocab, point.input, point.requests, setup.seed)
    before, begin = server.stats(), len(server.log_text())
    left = min(setup.point_timeout, max(1.0, budget.remaining() - budget.expected(STOP)))
    metrics = run_point(server, setup.model, point, setup.seed, None if math.isinf(left) else left)
    log = parse_log(server.log_text()[begin:])
    asked = time.perf_counter()
    server.server_info()
    info_s = time.perf_counter() - asked
    server.flush_cache()
    return {
        **metrics,
        **asdict(log),
        **cache_figures(backend, point, setup.shape, before, server.stats()),
        "server_info_s": info_s,
    }


def cache_figures(
    backend: Backend, point: Point, shape: KVShape, before: dict[str, Any] | None, after: dict[str, Any] | None
) -> Record:
    """Bytes a token and, of DiffKV, the ratio to bf16 and the shares over the point's finished requests."""
    if backend.config is None:
        size = shape.token_bytes(backend.dtype)
        return {"kv_bytes_per_token": size, "ratio_pages": size / shape.token_bytes("bf16")}
    finished = report.since(report.totals(after), report.totals(before))
    figures = report.ratios(finished)
    if finished is None or figures is None:
        raise BenchmarkError("the server reports no DiffKV figures")
    if finished["requests"] != point.requests:
        raise BenchmarkError(f"the server finished {finished['requests']:.0f} of {point.requests} requests")
    return {"kv_bytes_per_token": finished["page_bytes"] / finished["tokens"], **figures}


def _recover(server: Server) -> None:
    """End what a failed run left behind. Raises ServerError if the server cannot go on."""
    try:
        server.post("/abort_request", {"abort_all": True}).raise_for_status()
        server.flush_cache()
    except requests.RequestException as error:
        state = "does not become idle" if server.alive() else "has ended"
        tail = [line for line in server.log_text().splitlines() if "Error" in line or "exception" in line][-1:]
        raise ServerError(f"after a failed run the server {state}\n{' '.join(tail)}") from error
