"""The process in which generated code runs: a script of its own that imports nothing of the package.

It reads a pickled job (``evaluate/code_runner``) from standard input. To standard output it writes the job's token when
it comes to the reply, and then the token and a verdict: ``right`` or what was wrong. Whatever ends the process in
between is wrong as well. Code that works against its grader is not kept from winning; the limits are against accidents.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import resource
import sys
from collections.abc import Callable
from typing import Any

RIGHT = "right"
BROKEN = "reference: "
"""Begins a verdict on the file rather than on the reply: the file's own solution failed."""
RELATIVE = 1e-7
FLOATS = 1e-6
"""Tolerance of floating-point results where the file names none, as EvalPlus has it."""
AS_SETS = {
    "similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly", "larg_nnum",
    "intersection_array", "find_dissimilar", "Diff",
}  # fmt: skip
"""MBPP+ functions whose results have no order."""
FOUND = {"check_str", "text_match_three", "text_starta_endb"}
"""MBPP+ functions of which it only counts whether they find something."""
UNDEFINED = "are_equivalent"
"""MBPP+'s function whose text does not say what it gives: EvalPlus takes anything."""
ROOT = "find_zero"
"""HumanEval+'s polynomial: any root will do."""


def _lower(kind: int, value: int) -> None:
    """Set a soft limit, no higher than the hard one that this process was given."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def limit(seconds: float, megabytes: int) -> None:
    """Bound this process: CPU time, address space, size of a file; no core file."""
    _lower(resource.RLIMIT_CPU, math.ceil(seconds))
    _lower(resource.RLIMIT_AS, megabytes << 20)
    _lower(resource.RLIMIT_FSIZE, 16 << 20)
    _lower(resource.RLIMIT_CORE, 0)


def used() -> float:
    """CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def close(given: Any, wanted: Any, tolerance: float) -> bool:
    """Whether numbers, or sequences of them, differ by no more than the tolerance."""
    if isinstance(wanted, (list, tuple)):
        same = type(given) is type(wanted) and len(given) == len(wanted)
        return same and all(close(a, b, tolerance) for a, b in zip(given, wanted))
    try:
        both_nan = given != given and wanted != wanted
        return both_nan or given == wanted or abs(given - wanted) <= tolerance + RELATIVE * abs(wanted)
    except TypeError:
        return False


def floats(value: Any) -> bool:
    """Whether a value is a float or a sequence of floats alone."""
    return isinstance(value, float) or (isinstance(value, (list, tuple)) and all(isinstance(x, float) for x in value))


def agrees(name: str, inputs: Any, given: Any, wanted: Any, tolerance: float) -> bool:
    """Whether function ``name`` may give ``given`` where the reference gives ``wanted``."""
    if name == ROOT:
        value = sum(factor * given**power for power, factor in enumerate(inputs[0]))
        return abs(value) <= (tolerance or FLOATS) or close(given, wanted, tolerance or FLOATS)
    if name in AS_SETS:
        return set(given) == set(wanted)
    if name in FOUND and not isinstance(given, bool):
        return (given is not None) == (wanted if isinstance(wanted, bool) else wanted is not None)
    if bool(given == wanted):
        return True
    return close(given, wanted, tolerance or FLOATS) if tolerance or floats(wanted) else False


def other_reading(name: str, inputs: Any) -> Any:
    """What three MBPP+ functions may give as well, since their text is read in two ways; None for the others."""
    if name == "sum_div":
        return 0
    if name == "digit_distance_nums":
        first, second = map(str, inputs)
        width = max(len(first), len(second))
        return sum(abs(int(a) - int(b)) for a, b in zip(first.zfill(width), second.zfill(width)))
    if name == "surface_Area":
        edge, height = inputs
        return round(edge**2 + 2 * edge * math.hypot(edge / 2, height))
    return None


def define(parts: list[str]) -> dict[str, Any]:
    """The names that pieces of code define, one after the other."""
    names: dict[str, Any] = {"__name__": "solution"}
    for part in parts:
        exec(compile(part, "<solution>", "exec"), names)
    return names


def compare(job: dict[str, Any]) -> str:
    """The verdict of a job with inputs: the reply's function beside the reference's."""
    name, calls = job["entry_point"], job["inputs"]
    try:
        reference = define(job["reference"])[name]
        wanted = [reference(*copy.deepcopy(x)) for x in calls]
    except BaseException as error:
        return f"{BROKEN}{type(error).__name__}: {error}"
    job["begin"]()
    limit(used() + job["seconds"] + 4 * used(), job["megabytes"])
    function = define(job["parts"])[name]
    given = [function(*copy.deepcopy(x)) for x in calls]
    if name == UNDEFINED:
        return RIGHT
    for at, (inputs, got, expected) in enumerate(zip(calls, given, wanted)):
        also = other_reading(name, inputs)
        if (also is None or got != also) and not agrees(name, inputs, got, expected, job["atol"]):
            return f"another result for input {at}"
    return RIGHT


def check(job: dict[str, Any]) -> str:
    """The verdict of a job with a runnable test: it runs through, and so does its ``check`` where it defines one."""
    job["begin"]()
    names = define([*job["parts"], *job["tests"]])
    checker: Callable[[Any], Any] | None = names.get("check")
    if job["calls_check"] and checker is not None:
        checker(names[job["entry_point"]])
    return RIGHT


def main() -> None:
    """Read a job, run it, write the verdict."""
    job = pickle.load(sys.stdin.buffer)
    verdicts = os.dup(1)
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    token = job.pop("token")
    job["begin"] = lambda: os.write(verdicts, f"{token}\n".encode())
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    limit(job["reference_seconds"] if "inputs" in job else used() + job["seconds"], job["megabytes"])
    try:
        verdict = compare(job) if "inputs" in job else check(job)
    except BaseException as error:
        verdict = f"{type(error).__name__}: {str(error)[:200]}"
    os.write(verdicts, f"{token} {verdict}".encode(errors="replace"))


if __name__ == "__main__":
    main()
