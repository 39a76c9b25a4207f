"""What a soak's outcomes add up to, and what is wrong with them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak.client import ABORTED, ANSWERED, ENDS, LOST, REFUSED, Outcome

QUEUE_FULL = "The request queue is full"
EXHAUSTED = ("pool of pages was empty", "Out of memory")
"""Parts of the messages of requests that ended for want of memory while they ran."""


@dataclass(frozen=True)
class Answer:
    """One answer to a reference question: right or not, the reply's text, what share of the prompt was cached."""

    right: bool
    text: str
    cached: float


@dataclass
class Question:
    """A reference question: answers on the idle server before the load, to a cold prompt and ``again`` to the same, now
    cached; answers under load; and on the idle server ``after`` it."""

    name: str
    alone: Answer
    again: Answer
    loaded: list[Answer] = field(default_factory=list)
    after: Answer | None = None

    def row(self) -> dict[str, Any]:
        """JSON data without texts."""
        return {
            "question": self.name,
            "alone": self.alone.right,
            "again": self.again.right,
            "after": self.after and self.after.right,
            "same_after": self.after and self.after.text == self.like(self.after).text,
            "loaded": len(self.loaded),
            "loaded_right": sum(x.right for x in self.loaded),
            "loaded_cached": sum(x.cached >= 0.5 for x in self.loaded),
            "loaded_same": sum(x.text == self.like(x).text for x in self.loaded),
        }

    def like(self, answer: Answer) -> Answer:
        """The idle server's answer to a prompt cached as that of ``answer``."""
        return self.again if answer.cached >= 0.5 else self.alone


def accuracy(questions: Sequence[Question]) -> dict[str, Any]:
    """Accuracy in percent, idle and under load, and the mean of the questions' differences with its standard error.

    An answer under load to a prompt that was cached at least by half is compared with the idle server's answer to the
    cached prompt, others with that to the cold prompt.
    """
    asked = [q for q in questions if q.loaded]
    answers = [x for q in asked for x in q.loaded]
    differences = [statistics.fmean(x.right - q.like(x).right for x in q.loaded) for q in asked]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return {
        "questions": len(questions),
        "questions_loaded": len(asked),
        "answers_loaded": len(answers),
        "alone": _percent([q.alone.right for q in questions]),
        "again": _percent([q.again.right for q in questions]),
        "loaded": _percent([x.right for x in answers]),
        "loaded_cold": _percent([x.right for x in answers if x.cached < 0.5]),
        "loaded_cached": _percent([x.right for x in answers if x.cached >= 0.5]),
        "loaded_same_text": _percent([x.text == q.like(x).text for q in asked for x in q.loaded]),
        "difference": 100 * statistics.fmean(differences) if differences else None,
        "standard_error": 100 * error,
        "after": _percent([q.after.right for q in questions if q.after]),
        "after_changed": sum(q.after.text != q.like(q.after).text for q in questions if q.after),
    }


def _percent(values: Sequence[bool]) -> float | None:
    return 100 * sum(values) / len(values) if values else None


class Tally:
    """Counts outcomes as they come."""

    def __init__(self) -> None:
        self.ends: dict[str, Counter[str]] = {}
        self.reasons: Counter[str] = Counter()
        self.unexpected: list[dict[str, Any]] = []
        self.sums: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.last = ""

    def add(self, outcome: Outcome, at: float) -> None:
        """Count an outcome that came ``at`` seconds after the start."""
        order, end = outcome.order, outcome.end
        self.last = end
        self.ends.setdefault(order.kind, Counter())[end] += 1
        if end == REFUSED:
            self.reasons[f"refused: {why_refused(outcome)}"] += 1
        elif end == ABORTED:
            self.reasons[f"aborted: {abort_phase(outcome)}"] += 1
        elif end == ANSWERED:
            self.seconds.append(outcome.seconds)
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "num_retractions"):
            self.sums[name] += outcome.total(name)
        self.sums["streamed"] += order.stream
        if not expected(outcome):
            row = {"time": round(at, 1), "kind": order.kind, "end": end, "detail": outcome.detail[:300]}
            self.unexpected.append({**row, "prompt": len(order.ids), "tokens": order.new_tokens})

    def count(self, end: str) -> int:
        """Requests that ended so."""
        return sum(x[end] for x in self.ends.values())

    def summary(self) -> dict[str, Any]:
        """JSON data."""
        waits = sorted(self.seconds) or [0.0]
        return {
            "requests": {end: self.count(end) for end in ENDS},
            "by_kind": {kind: {end: found[end] for end in ENDS} for kind, found in sorted(self.ends.items())},
            "reasons": dict(sorted(self.reasons.items())),
            **self.sums,
            "seconds_median": waits[len(waits) // 2],
            "seconds_longest": waits[-1],
            "unexpected": self.unexpected,
        }


def invalid(outcome: Outcome) -> bool:
    """Whether the request had to be refused."""
    return outcome.order.kind == "invalid"


def expected(outcome: Outcome) -> bool:
    """Whether a sound server may end the request so: invalid ones refused, others answered, aborted by us, or refused
    because the queue was full."""
    if outcome.end == REFUSED:
        return invalid(outcome) or QUEUE_FULL in outcome.detail
    return outcome.end != LOST and not (outcome.end == ANSWERED and invalid(outcome))


def why_refused(outcome: Outcome) -> str:
    """The kind of an error."""
    if QUEUE_FULL in outcome.detail:
        return "queue full"
    if any(part in outcome.detail for part in EXHAUSTED):
        return "memory exhausted"
    return "invalid" if invalid(outcome) else "other"


def abort_phase(outcome: Outcome) -> str:
    """Where in its life a request was aborted, as far as the client can tell."""
    if outcome.detail == "Abort in waiting queue":
        return "in the queue"
    if outcome.tokens:
        return "while decoding"
    return "before the first token" if outcome.order.stream else "not streamed, phase unknown"


def problems(result: dict[str, Any], max_growth: float) -> list[str]:
    """Why the soak failed; empty if it did not. ``max_growth`` in MiB a minute."""
    found = [str(x) for x in result["failures"]]
    load, score = result["load"], result["accuracy"]
    for row in load["unexpected"][:10]:
        found.append(f"{row['kind']} request {row['end']} at {row['time']} s: {row['detail']}")
    if len(load["unexpected"]) > 10:
        found.append(f"... {len(load['unexpected'])} such requests in all")
    if not load["requests"][ANSWERED]:
        found.append("no request was answered")
    if (lost := score["difference"]) is not None and lost < -2 * score["standard_error"]:
        found.append(f"accuracy under load {lost:+.1f} ± {score['standard_error']:.1f} points against the idle server")
    if score["after"] is not None and score["after"] < score["alone"]:
        found.append(f"accuracy after the load {score['after']:.1f}%, before {score['alone']:.1f}%")
    if result["device"] == "cpu" and score["after_changed"]:
        found.append(f"{score['after_changed']} replies of the idle server differ from those before the load")
    for role, rate in result["rss_growth"].items():
        if rate > max_growth:
            found.append(f"the {role} process grew by {rate:.1f} MiB a minute")
    if result.get("spoiled") is not None:
        store = {"hits": 0, "refused": 0, **result["store"]}
        if not store["hits"] + store["refused"]:
            found.append("the store was not tried: no request found anything there, good or bad")
    found += [f"log: {line}" for line in result["log"]["wrong"]]
    return found
