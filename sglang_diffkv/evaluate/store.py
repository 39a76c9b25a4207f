"""Answers as they come, in an append-only JSON Lines file, so that an evaluation can stop and go on."""

from __future__ import annotations

import fcntl
import json
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.task import Metric, Outcome


class ConfigurationRecord(BaseModel):
    """A configuration, written before its first answer."""

    kind: Literal["configuration"] = "configuration"
    name: str
    fingerprint: dict[str, Any]


class SuiteRecord(BaseModel):
    """A task file, written before its first answer."""

    kind: Literal["suite"] = "suite"
    name: str
    metric: Metric
    fingerprint: dict[str, Any]


class Answer(BaseModel):
    """One question's outcome."""

    kind: Literal["answer"] = "answer"
    configuration: str
    suite: str
    id: str
    task: str
    outcome: Outcome


class UsageRecord(BaseModel):
    """What a run added to the server's figures so far; the last one of a ``run`` counts."""

    kind: Literal["usage"] = "usage"
    configuration: str
    suite: str
    run: str
    totals: dict[str, dict[str, float]]


class KeptCache(BaseModel):
    """A server's prefix cache was not emptied before it was asked, and why."""

    kind: Literal["kept_cache"] = "kept_cache"
    configuration: str
    suite: str
    why: str


Record = Annotated[ConfigurationRecord | SuiteRecord | Answer | UsageRecord | KeptCache, Field(discriminator="kind")]
_RECORD: TypeAdapter[Any] = TypeAdapter(Record)


class Store:
    """The file ``answers.jsonl`` of a folder, held by one process at a time.

    The methods are safe from several threads; whoever walks through the dictionaries while others add answers holds
    ``lock``.

    Raises EvaluationError if another process holds it or a line is not a record. A last line that was cut off in
    writing is dropped.
    """

    def __init__(self, folder: Path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EvaluationError(f"{folder} cannot be a folder for the results: {error.strerror}") from None
        self.path = folder / "answers.jsonl"
        self.configurations: dict[str, dict[str, Any]] = {}
        self.suites: dict[str, SuiteRecord] = {}
        self.answers: dict[tuple[str, str], dict[str, Answer]] = {}
        self.usage: dict[tuple[str, str], dict[str, UsageRecord]] = {}
        self.kept_caches: dict[tuple[str, str], str] = {}
        self.lock = threading.RLock()
        self._file: IO[str] = self.path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise EvaluationError(f"another process is writing {self.path}") from None
        self._load()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _load(self) -> None:
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind("\n") + 1]
        if len(whole) < len(text):
            self._file.truncate(len(whole.encode()))
        # By "\n" alone: replies may have other characters that end a line.
        for number, line in enumerate(whole.split("\n")[:-1], 1):
            try:
                self._take(_RECORD.validate_json(line))
            except ValidationError as error:
                raise EvaluationError(f"{self.path}, line {number} is not a record: {error}") from None

    def _take(self, record: Any) -> None:
        match record:
            case ConfigurationRecord():
                self.configurations[record.name] = record.fingerprint
            case SuiteRecord():
                self.suites[record.name] = record
            case Answer():
                self.answers.setdefault((record.configuration, record.suite), {})[record.id] = record
            case UsageRecord():
                self.usage.setdefault((record.configuration, record.suite), {})[record.run] = record
            case KeptCache():
                self.kept_caches[record.configuration, record.suite] = record.why

    def add(self, record: BaseModel) -> None:
        """Append a record."""
        with self.lock:
            self._take(record)
            self._file.write(record.model_dump_json() + "\n")
            self._file.flush()

    def add_configuration(self, name: str, fingerprint: dict[str, Any]) -> None:
        """Note a configuration. Raises EvaluationError if the file has answers of another one by this name."""
        with self.lock:
            if name in self.configurations:
                self._require_same(f"configuration {name!r}", self.configurations[name], fingerprint)
            else:
                self.add(ConfigurationRecord(name=name, fingerprint=fingerprint))

    def add_suite(self, name: str, metric: Metric, fingerprint: dict[str, Any]) -> None:
        """Note a task file. Raises EvaluationError if the file has answers to another one by this name."""
        with self.lock:
            if name in self.suites:
                self._require_same(f"task {name!r}", self.suites[name].fingerprint, fingerprint)
            else:
                self.add(SuiteRecord(name=name, metric=metric, fingerprint=fingerprint))

    def _require_same(self, what: str, old: dict[str, Any], new: dict[str, Any]) -> None:
        new = json.loads(json.dumps(new))
        fields = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
        if fields:
            changes = "; ".join(f"{name} was {old.get(name)!r}, is {new.get(name)!r}" for name in fields)
            raise EvaluationError(
                f"{self.path} holds answers of another {what}: {changes}. Use another name or another --output folder."
            )

    def answered(self, configuration: str, suite: str) -> set[str]:
        """Ids that have an answer; one that failed is to be asked again."""
        with self.lock:
            found = self.answers.get((configuration, suite), {})
            return {name for name, answer in found.items() if answer.outcome.error is None}

    def totals(self, configuration: str, suite: str) -> dict[str, dict[str, float]]:
        """The server's figures over all runs, empty if it reported none."""
        added: dict[str, dict[str, float]] = {}
        with self.lock:
            records = list(self.usage.get((configuration, suite), {}).values())
        for record in records:
            for key, totals in record.totals.items():
                line = added.setdefault(key, {})
                for name, value in totals.items():
                    line[name] = line.get(name, 0.0) + value
        return added
