"""Asking a configuration all the questions that it has not answered yet."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import requests
from tqdm import tqdm

from sglang_diffkv.access import cause
from sglang_diffkv.evaluate.configuration import Configuration
from sglang_diffkv.evaluate.endpoint import Endpoint, EvaluationError, Meter
from sglang_diffkv.evaluate.report import KEPT_CACHE
from sglang_diffkv.evaluate.store import Answer, KeptCache, Store, UsageRecord
from sglang_diffkv.evaluate.task import Question, Task

SNAPSHOT_SECONDS = 60.0
"""How often the server's figures are noted while questions run, so that a broken run keeps most of them."""


@dataclass(frozen=True)
class Suite:
    """A task with its questions for one tokenizer."""

    task: Task
    questions: tuple[Question, ...]

    @classmethod
    def of(cls, task: Task, tokenizer: Any) -> Suite:
        return cls(task, tuple(task.questions(tokenizer)))


def server_args(given: Sequence[str], tasks: Sequence[Task]) -> list[str]:
    """``given`` and what the tasks need beside it."""
    needed = dict.fromkeys(arg for task in tasks for arg in task.server_args)
    return [*given, *(arg for arg in needed if arg not in given)]


@contextmanager
def start(configuration: Configuration, model: str, args: Sequence[str] = ()) -> Iterator[Endpoint]:
    """A server for the time of the ``with`` block. EvaluationError with the end of its log if it stops answering."""
    with configuration.server(model, args) as server:
        try:
            yield Endpoint.connect(server.url, owned=True, access=server.access)
        except requests.RequestException as error:
            tail = "\n".join(server.log_text().splitlines()[-40:])
            raise EvaluationError(
                f"{configuration.name}: the server stopped answering: {cause(error)}\n{tail}"
            ) from error


def register(store: Store, suites: Sequence[Suite]) -> None:
    """Note the tasks, or refuse answers to others by the same names. Raises EvaluationError."""
    for suite in suites:
        store.add_suite(suite.task.name, suite.task.metric, suite.task.fingerprint())


def missing(store: Store, name: str, suite: Suite) -> list[Question]:
    """Questions that configuration ``name`` has not answered."""
    done = store.answered(name, suite.task.name)
    return [question for question in suite.questions if question.id not in done]


def cost(store: Store, names: Iterable[str], suites: Sequence[Suite], max_new_tokens: int) -> str:
    """What is left to ask of all configurations, in words: questions, and tokens of prompts and at most of replies."""
    left = [x for name in names for suite in suites for x in missing(store, name, suite)]
    prompts = sum(len(x.prompt_ids) for x in left)
    replies = sum(len(x.reply_ids) or (0 if x.cached_tokens else x.limit(max_new_tokens)) for x in left)
    return (
        f"to ask: {len(left):,} questions, with {prompts:,} tokens of prompts and at most {replies:,} of replies; "
        "progress says how long it takes"
    )


def evaluate(
    name: str,
    connect: Callable[[], AbstractContextManager[Endpoint]],
    suites: Sequence[Suite],
    store: Store,
    concurrency: int = 8,
    advance: Callable[[], object] | None = None,
    keep_cache: bool = False,
) -> None:
    """Ask configuration ``name`` what it has not answered yet; without such questions no server is started.

    ``advance`` is called after each answer; without it every task file gets a progress bar. ``keep_cache``: the
    server's prefix cache is not emptied before each task file.
    """
    if not any(missing(store, name, suite) for suite in suites):
        return
    with connect() as endpoint:
        for suite in suites:
            _ask_all(name, endpoint, suite, store, concurrency, advance, keep_cache)


@contextmanager
def _bar(title: str, total: int, done: int) -> Iterator[Callable[[], object]]:
    with tqdm(total=total, initial=done, desc=title, unit="question") as bar:
        yield bar.update


def _ask_all(
    name: str,
    endpoint: Endpoint,
    suite: Suite,
    store: Store,
    concurrency: int,
    advance: Callable[[], object] | None,
    keep_cache: bool,
) -> None:
    questions, task = missing(store, name, suite), suite.task
    if not questions:
        return
    if why := "--keep-cache" if keep_cache else endpoint.forget_prefixes():
        store.add(KeptCache(configuration=name, suite=task.name, why=why))
        print(f"{name}: {task.name}: {KEPT_CACHE.format(why=why)}", file=sys.stderr)
    meter, run, asked = Meter(endpoint), uuid.uuid4().hex[:12], 0
    total, done = len(suite.questions), len(suite.questions) - len(questions)

    def note(totals: dict[str, dict[str, float]]) -> None:
        if totals:
            store.add(UsageRecord(configuration=name, suite=task.name, run=run, totals=totals))

    pool = ThreadPoolExecutor(concurrency)
    noted = time.monotonic()
    try:
        futures = {pool.submit(task.ask, question, endpoint): question for question in questions}
        with nullcontext(advance) if advance else _bar(f"{name}: {task.name}", total, done) as answered:
            for future in as_completed(futures):
                question, outcome = futures[future], future.result()
                answer = Answer(
                    configuration=name, suite=task.name, id=question.id, task=question.task, outcome=outcome
                )
                store.add(answer)
                asked += outcome.requests if outcome.error is None else 0
                answered()
                if meter.measures and time.monotonic() - noted > SNAPSHOT_SECONDS:
                    note(meter.read())
                    noted = time.monotonic()
        note(meter.settle(asked))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
