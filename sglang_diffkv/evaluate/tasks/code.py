"""Functions to write: HumanEval+ and MBPP+ (Liu et al., 2023), in the forms in which EvalPlus publishes them.

| kind | file |
|---|---|
| ``humaneval_plus`` | ``HumanEvalPlus.jsonl`` (``task_id``, ``prompt``, ``canonical_solution``, ``entry_point``, ``base_input``, ``plus_input``, ``atol``), or the data set ``evalplus/humanevalplus`` as JSON Lines, whose field ``test`` is run |
| ``mbpp_plus`` | ``MbppPlus.jsonl`` (the same fields, and ``assertion``), or ``evalplus/mbppplus`` as JSON Lines (``task_id``, ``code``, ``prompt``, ``test_list``, ``test_imports``, ``test``) |

A reply is right if its function gives what the file's own solution gives for all inputs, base and plus, or if it passes
``test``. **The code that the model wrote is run to find out** (``evaluate/code_runner``), so these kinds are refused
without ``--run-generated-code``. The code of a reply is its last fenced block that defines the function. Questions are
put as instructions in words of our own, so published figures are not reproduced to the digit.
"""  # noqa: E501

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_diffkv.evaluate import code_child
from sglang_diffkv.evaluate.code_runner import Check, verdict
from sglang_diffkv.evaluate.tasks.arguments import examples_of, like
from sglang_diffkv.evaluate.tasks.files import TaskFileError, check_fields, read_lines
from sglang_diffkv.evaluate.tasks.generation import Example, GenerationTask, Options, build, sample

FLAG = "--run-generated-code"
COMPLETE = "Complete this Python function. Reply with the whole function, imports included, in one ```python block."
WRITE = "Write the Python function that this text asks for. Reply with all of its code in one ```python block."
EVALPLUS = ("task_id", "prompt", "canonical_solution", "entry_point", "base_input", "plus_input")
_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_BEGIN = re.compile(r"(?:def|async|class|import|from)\b|@")


def _defines(code: str, name: str) -> bool:
    return re.search(rf"^(?:def|async def) +{re.escape(name)}\b|^{re.escape(name)} *=", code, re.MULTILINE) is not None


def _parsable(code: str) -> str:
    """The longest beginning of some lines that is Python; empty if there is none."""
    lines = code.splitlines()
    while lines:
        try:
            ast.parse("\n".join(lines))
        except (SyntaxError, ValueError):
            lines.pop()
        else:
            return "\n".join(lines)
    return ""


def parts(text: str, prompt: str, entry_point: str) -> list[str]:
    """The pieces of code to run of a reply ``text``; ``prompt`` is code that goes before it."""
    blocks = [block for block in _FENCE.findall(text) if _defines(block, entry_point)]
    if blocks:
        return [prompt, blocks[-1]]
    lines = text.splitlines(keepends=True)
    first = next((line for line in lines if line.strip()), "")
    if first[:1].isspace():
        return [_parsable(prompt.rstrip() + "\n" + text.lstrip("\n"))]
    start = next((at for at, line in enumerate(lines) if _BEGIN.match(line)), len(lines))
    return [prompt, _parsable("".join(lines[start:]))]


@dataclass(frozen=True)
class CodeGrader:
    """Judges replies by running their code; ``checks`` has each question's code before the reply and its check."""

    checks: Mapping[str, tuple[str, Check]]

    def __call__(self, text: str, answers: tuple[str, ...]) -> bool:
        prompt, check = self.checks[answers[0]]
        code = parts(text, prompt, check.entry_point)
        return verdict(answers[0], code, check) == code_child.RIGHT


Parsed = tuple[Example, str, Check]
"""A question, the code before its reply, and the check."""


def _example(name: str, kind: str, instruction: str, task: str, solution: str) -> Example:
    prompt = f"{instruction}\n\n```python\n{task.strip()}\n```"
    return Example(name, kind, prompt, (name,), reply=f"```python\n{solution.strip()}\n```")


def _evalplus(record: dict[str, Any], kind: str, where: str) -> Parsed:
    check_fields(record, EVALPLUS, where)
    name, prompt, entry_point = str(record["task_id"]), record["prompt"], record["entry_point"]
    calls = [*record["base_input"], *record["plus_input"]]
    if not calls or not all(isinstance(x, list) for x in calls):
        raise TaskFileError(f"{where}: 'base_input' and 'plus_input' must be lists of lists of arguments")
    solution = record["canonical_solution"]
    if kind == "mbpp_plus":
        given = record.get("assertion") or prompt
        shown = examples_of(given, entry_point)
        calls = [like(shown, call) for call in calls]
        reference = solution
    else:
        reference = prompt + solution
    try:
        ast.parse(reference)
    except (SyntaxError, ValueError) as error:
        raise TaskFileError(f"{where}: the solution is not Python: {error}") from None
    check = Check(entry_point, reference=(reference,), inputs=tuple(calls), atol=float(record.get("atol") or 0.0))
    return _example(name, kind, COMPLETE if kind == "humaneval_plus" else WRITE, prompt, reference), prompt, check


def _humaneval(path: Path) -> Iterator[Parsed]:
    for line, record in read_lines(path, ("task_id", "prompt", "entry_point")):
        where = f"{path.name}, line {line}"
        if "test" not in record or "base_input" in record:
            yield _evalplus(record, "humaneval_plus", where)
            continue
        check_fields(record, ("canonical_solution",), where)
        name, prompt = str(record["task_id"]), record["prompt"]
        check = Check(record["entry_point"], tests=(record["test"],), calls_check=True)
        solution = prompt + record["canonical_solution"]
        yield _example(name, "humaneval_plus", COMPLETE, prompt, solution), prompt, check


def _mbpp(path: Path) -> Iterator[Parsed]:
    for line, record in read_lines(path, ("task_id", "prompt")):
        where = f"{path.name}, line {line}"
        if "test" not in record or "base_input" in record:
            yield _evalplus(record, "mbpp_plus", where)
            continue
        check_fields(record, ("code", "test_list"), where)
        shown = record["test_list"][0] if record["test_list"] else ""
        called = re.findall(r"^(?:async )?def +(\w+)", record["code"], re.MULTILINE)
        used = [x for x in called if re.search(rf"\b{x}\(", shown)]
        if not used:
            raise TaskFileError(f"{where}: the first of 'test_list' calls no function of 'code'")
        name, imports = str(record["task_id"]), "\n".join(record.get("test_imports") or ())
        check = Check(used[0], tests=(imports, record["test"]))
        yield (
            _example(name, "mbpp_plus", WRITE, f'"""\n{record["prompt"].strip()}\n{shown}\n"""', record["code"]),
            "",
            check,
        )


def _load(kind: str, path: Path, parsed: Iterator[Parsed], options: Options) -> GenerationTask:
    if not options.run_generated_code:
        raise TaskFileError(
            f"{kind}: grading runs the code that the model writes, on this machine and with your rights. Where that is "
            f"acceptable, a container for example, give {FLAG}"
        )
    found = list(parsed)
    grade = CodeGrader({example.id: (prompt, check) for example, prompt, check in found})
    return sample(build(kind, path, [example for example, _, _ in found], grade, options), options)


def load_humaneval_plus(path: Path, options: Options) -> GenerationTask:
    """A fixed random sample. Raises TaskFileError, also without leave to run generated code."""
    return _load("humaneval_plus", path, _humaneval(path), options)


def load_mbpp_plus(path: Path, options: Options) -> GenerationTask:
    """A fixed random sample. Raises TaskFileError, also without leave to run generated code."""
    return _load("mbpp_plus", path, _mbpp(path), options)
