"""Arguments from JSON in the Python types that a task's assertions show.

JSON has no tuples, sets or complex numbers: MBPP+ stores them as lists and strings. Each of its tasks comes with a call
in Python, ``assert f((1, 2), [3]) == ...``, from which the types of the others are taken.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Any


def examples_of(assertions: str | Sequence[str], name: str) -> list[list[Any]]:
    """The arguments of all calls of function ``name`` in lines that begin with ``assert``, as far as they are
    literals."""
    text = assertions if isinstance(assertions, str) else "\n".join(assertions)
    found = []
    for line in text.splitlines():
        if not line.strip().startswith("assert"):
            continue
        try:
            tree = ast.parse(line.strip())
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                try:
                    found.append([ast.literal_eval(x) for x in node.args])
                except ValueError:
                    continue
    return found


def like(examples: Iterable[list[Any]], call: list[Any]) -> list[Any]:
    """The arguments of ``call`` in the types of those in the example calls at the same places."""
    calls = list(examples)
    return [_like([x[at] for x in calls if at < len(x)], value, list) for at, value in enumerate(call)]


def _like(examples: list[Any], value: Any, around: type) -> Any:
    """``value`` as the examples have it; a list that no example tells of takes the type of the one ``around`` it."""
    if isinstance(value, str):
        numbers = any(isinstance(x, (int, float, complex)) for x in examples)
        if not numbers or any(isinstance(x, str) for x in examples):
            return value
        try:
            return complex(value) if "j" in value else float(value)
        except ValueError:
            return value
    if isinstance(value, dict):
        values = [y for x in examples if isinstance(x, dict) for y in x.values()]
        return {key: _like(values, x, list) for key, x in value.items()}
    if not isinstance(value, list):
        return value
    held = [x for x in examples if isinstance(x, (list, tuple, set, dict))]
    if held and all(isinstance(x, (set, dict)) for x in held):
        sets = any(isinstance(x, set) for x in held)
        return set(value) if value or (sets and not any(isinstance(x, dict) for x in held)) else {}
    sequences = [x for x in held if isinstance(x, (list, tuple))]
    kind: type = type(sequences[0]) if sequences else around
    inner = [y for x in sequences for y in x]
    return kind(_like(inner, x, kind) for x in value)
