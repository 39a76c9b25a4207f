"""Running requests, retractions and prefix hits from a server's log (the lines are the same from 0.5.17 to 0.5.23)."""

from __future__ import annotations

import re
from dataclasses import dataclass

DECODE = re.compile(r"Decode batch\b.*?#running-req: (\d+),.*?#queue-req: (\d+)")
PREFILL = re.compile(r"Prefill batch\b.*?#new-token: (\d+), #cached-token: (\d+),")
RETRACT = re.compile(r"Retract requests\. #retracted_reqs: (\d+),")


@dataclass(frozen=True)
class LogFigures:
    """Running requests are read from the decode lines, one for each ``--decode-log-interval`` steps.

    Attributes:
        decode_lines: how many there were.
        running_mean: None where there is no line.
        running_saturated: mean over the lines with requests waiting in the queue; None where none ever waited.
        retracted: requests that lost their memory and started again.
        new_tokens, cached_tokens: prompt tokens computed and taken from the prefix cache, retracted ones again.
    """

    decode_lines: int
    running_mean: float | None
    running_max: int | None
    running_saturated: float | None
    retracted: int
    retractions: int
    new_tokens: int
    cached_tokens: int


def mean(values: list[int]) -> float | None:
    """Arithmetic mean, None of nothing."""
    return sum(values) / len(values) if values else None


def parse_log(text: str) -> LogFigures:
    """Figures of the part of a server's log that one benchmark wrote."""
    decode = [(int(running), int(queue)) for running, queue in DECODE.findall(text)]
    prefill = [(int(new), int(cached)) for new, cached in PREFILL.findall(text)]
    retracted = [int(count) for count in RETRACT.findall(text)]
    running = [count for count, _ in decode]
    return LogFigures(
        decode_lines=len(decode),
        running_mean=mean(running),
        running_max=max(running, default=None),
        running_saturated=mean([count for count, queue in decode if queue]),
        retracted=sum(retracted),
        retractions=len(retracted),
        new_tokens=sum(new for new, _ in prefill),
        cached_tokens=sum(cached for _, cached in prefill),
    )
