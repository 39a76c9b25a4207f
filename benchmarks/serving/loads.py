"""Loads of the serving benchmark, as arguments of SGLang's own benchmark client."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol


@dataclass(frozen=True)
class Point:
    """One call of the client: ``requests`` requests of ``input`` and ``output`` tokens, or of at least ``shortest`` of
    either, drawn evenly."""

    load: str
    label: str
    x: float
    requests: int
    input: int
    output: int
    concurrency: int | None
    args: tuple[str, ...]
    shortest: float = 1.0
    run: int = 0

    @property
    def shortest_output(self) -> int:
        return _shortest(self.shortest, self.output)

    @property
    def key(self) -> str:
        """Load and label, for progress lines and time estimates."""
        return f"{self.load} {self.label}".strip()


class Load(Protocol):
    """A series of points and the words that describe it."""

    @property
    def title(self) -> str: ...

    @property
    def x_label(self) -> str: ...

    def points(self) -> list[Point]: ...


def _random(requests: int, tokens_in: int, tokens_out: int, *more: object, shortest: float = 1.0) -> tuple[str, ...]:
    lengths = ("--random-input-len", tokens_in, "--random-output-len", tokens_out, "--random-range-ratio", shortest)
    text = ("--dataset-name", "random-ids", "--tokenize-prompt", "--num-prompts", requests, *lengths, *more)
    return tuple(str(x) for x in text)


@dataclass(frozen=True)
class Batch:
    """Many requests at once, at a fixed concurrency. ``shortest``: least share of ``input`` and of ``output`` that a
    request's lengths, drawn evenly, may have."""

    name: str
    requests: int = 128
    input: int = 1024
    output: int = 1024
    concurrency: int = 128
    shortest: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.shortest <= 1:
            raise ValueError(f"shortest {self.shortest} must be above 0 and at most 1")

    @property
    def title(self) -> str:
        lengths = f"{self.input} + {self.output} tokens"
        if self.shortest < 1:
            lengths = f"{_drawn(self.shortest, self.input)} + {_drawn(self.shortest, self.output)} tokens"
        return f"{self.requests} requests of {lengths}, concurrency {self.concurrency}"

    @property
    def x_label(self) -> str:
        return ""

    def points(self) -> list[Point]:
        sizes = (self.requests, self.input, self.output)
        args = _random(*sizes, "--max-concurrency", self.concurrency, shortest=self.shortest)
        return [Point(self.name, "", 0.0, *sizes, self.concurrency, args, self.shortest)]


def _shortest(share: float, tokens: int) -> int:
    """As SGLang's client draws lengths."""
    return max(int(share * tokens), 1)


def _drawn(share: float, tokens: int) -> str:
    return f"{_shortest(share, tokens)} to {tokens}"


@dataclass(frozen=True)
class Prefix:
    """Requests that share a system prompt with the others of their group."""

    name: str
    groups: tuple[int, ...] = (16,)
    requests: int = 128
    system: int = 2048
    question: int = 128
    output: int = 256
    concurrency: int = 128

    def __post_init__(self) -> None:
        if uneven := [n for n in self.groups if n < 1 or self.requests % n]:
            raise ValueError(f"{self.requests} requests cannot be shared out evenly among {uneven} groups")

    @property
    def title(self) -> str:
        return (
            f"{self.requests} requests of {self.question} + {self.output} tokens after a system prompt of "
            f"{self.system} that a group shares, concurrency {self.concurrency}"
        )

    @property
    def x_label(self) -> str:
        return "groups"

    def points(self) -> list[Point]:
        return [self._point(groups) for groups in self.groups]

    def _point(self, groups: int) -> Point:
        sizes: dict[str, int] = {
            "--gsp-num-groups": groups,
            "--gsp-prompts-per-group": self.requests // groups,
            "--gsp-system-prompt-len": self.system,
            "--gsp-question-len": self.question,
            "--gsp-output-len": self.output,
            "--num-prompts": self.requests,
            "--max-concurrency": self.concurrency,
        }
        args = ["--dataset-name", "generated-shared-prefix"]
        for flag, size in sizes.items():
            args += [flag, str(size)]
        tokens_in = self.system + self.question
        label = f"{groups} groups"
        return Point(
            self.name, label, groups, self.requests, tokens_in, self.output, self.concurrency, tuple(args)
        )  # fmt: skip


@dataclass(frozen=True)
class Arrivals:
    """Poisson arrivals at rising rates, each for about ``seconds``."""

    name: str
    rates: tuple[float, ...] = (1, 2, 4, 8, 16)
    seconds: float = 30.0
    input: int = 1024
    output: int = 256

    def __post_init__(self) -> None:
        if list(self.rates) != sorted(set(self.rates)) or min(self.rates, default=0) <= 0:
            raise ValueError(f"rates {list(self.rates)} must be positive and rise")

    @property
    def title(self) -> str:
        return f"Poisson arrivals of {self.input} + {self.output} tokens, {self.seconds:g} s at each rate"

    @property
    def x_label(self) -> str:
        return "requests a second"

    def points(self) -> list[Point]:
        result = []
        for rate in self.rates:
            requests = max(1, round(rate * self.seconds))
            args = _random(requests, self.input, self.output, "--request-rate", rate)
            label = f"{rate:g} requests/s"
            result.append(Point(self.name, label, rate, requests, self.input, self.output, None, args))
        return result


LOADS: dict[str, Batch | Prefix | Arrivals] = {
    "batch": Batch("batch"),
    "mixed": Batch("mixed", requests=320, input=4096, concurrency=160, shortest=1 / 4096),
    "steady": Batch("steady", requests=512, concurrency=256),
    "reasoning": Batch("reasoning", requests=64, input=512, output=8192, concurrency=64),
    "prefix": Prefix("prefix"),
    "arrivals": Arrivals("arrivals"),
}


def parse_load(text: str) -> Batch | Prefix | Arrivals:
    """``NAME`` or ``NAME={"field": value, ...}`` with the fields that differ from the load's defaults."""
    name, _, value = text.partition("=")
    if name not in LOADS:
        raise argparse.ArgumentTypeError(f"unknown load {name!r}: one of {', '.join(LOADS)}")
    try:
        return _changed(LOADS[name], json.loads(value) if value else {})
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _changed(load: Batch | Prefix | Arrivals, changes: Any) -> Batch | Prefix | Arrivals:
    if not isinstance(changes, dict):
        raise ValueError("expected a JSON object")
    known = {field.name for field in fields(load)} - {"name"}
    if unknown := sorted(set(changes) - known):
        raise ValueError(f"unknown fields {unknown}: {load.name} has {sorted(known)}")
    for key, value in changes.items():
        numbers = value if isinstance(getattr(load, key), tuple) and isinstance(value, list) else [value]
        if not all(isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0 for x in numbers):
            raise ValueError(f"{key} takes positive numbers, not {value!r}")
        if isinstance(getattr(load, key), tuple):
            changes = {**changes, key: tuple(numbers)}
        elif isinstance(getattr(load, key), int) and not isinstance(value, int):
            raise ValueError(f"{key} takes a whole number, not {value!r}")
    return replace(load, **changes)
