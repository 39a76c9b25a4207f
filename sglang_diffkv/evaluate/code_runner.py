"""Runs generated code against a task's tests, in a process of its own for each reply.

The process gets an empty temporary folder, hardly any environment, ``python -I``, and limits of time and memory
(``evaluate/code_child``). That keeps a faulty reply from stopping the evaluation. **It is no sandbox**: the code runs
with this user's rights, files and network. Run it in a container or on a machine that may be lost.
"""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_diffkv.evaluate import code_child
from sglang_diffkv.evaluate.endpoint import EvaluationError

WALL_SECONDS = 180.0
"""After these a process is killed, however little it has computed."""


@dataclass(frozen=True)
class Limits:
    """CPU ``seconds`` of a reply, beside four times what the reference takes; ``reference_seconds`` of that; address
    space in MiB; ``wall`` seconds of the whole process."""

    seconds: float = 15.0
    reference_seconds: float = 60.0
    megabytes: int = 4096
    wall: float = WALL_SECONDS


@dataclass(frozen=True)
class Check:
    """How code is graded: by ``tests`` that must run through, or by the results of ``reference`` on ``inputs``.

    Attributes:
        entry_point: the function asked for.
        tests: pieces of code that raise if it is wrong; a function ``check`` that they define is called with it, if
            ``calls_check``.
        reference: pieces of code that define a right function.
        inputs: arguments of calls.
        atol: absolute tolerance of numbers, 0 for equal ones.
    """

    entry_point: str
    tests: tuple[str, ...] = ()
    calls_check: bool = False
    reference: tuple[str, ...] = ()
    inputs: tuple[Any, ...] = ()
    atol: float = 0.0


def verdict(name: str, parts: list[str], check: Check, limits: Limits = Limits()) -> str:
    """``right``, or what is wrong with the code of ``parts``, whose pieces run one after the other.

    ``name`` is the question's. Raises EvaluationError if the file's own solution fails, which no reply is to blame for.
    """
    job: dict[str, Any] = {"token": secrets.token_hex(16), "parts": parts, **asdict(limits)}
    job["entry_point"] = check.entry_point
    if check.tests:
        job |= {"tests": check.tests, "calls_check": check.calls_check}
    else:
        job |= {"reference": check.reference, "inputs": check.inputs, "atol": check.atol}
    found, token = _run(pickle.dumps(job), limits.wall), job["token"]
    if found.startswith(f"{token} {code_child.BROKEN}"):
        why = found.removeprefix(f"{token} {code_child.BROKEN}")
        raise EvaluationError(f"{name}: the file's own solution fails here: {why}")
    if not found.startswith(f"{token}\n"):
        raise EvaluationError(f"{name}: the file's own solution crashed or did not end within {limits}")
    end, _, text = found.removeprefix(f"{token}\n").partition(" ")
    return text if end == token else "the process ended without a result: a limit, a crash or an exit"


def _run(job: bytes, wall: float) -> str:
    with tempfile.TemporaryDirectory(prefix="generated-code-", ignore_cleanup_errors=True) as folder:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        process = subprocess.Popen(
            [sys.executable, "-I", str(Path(code_child.__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, **threads},
            start_new_session=True,
        )
        try:
            written, _ = process.communicate(job, timeout=wall)
        except subprocess.TimeoutExpired as error:
            written = error.output or b""
        finally:
            _kill_group(process.pid)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
    return written.decode(errors="replace")


def _kill_group(group: int) -> None:
    """End the process and all that it started and that stayed in its session."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
