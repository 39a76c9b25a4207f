"""Task files by kind, ``LOADERS``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sglang_diffkv.evaluate.task import Task
from sglang_diffkv.evaluate.tasks import (
    aime,
    choices,
    code,
    forced,
    gsm8k,
    longbench,
    made,
    math_problems,
    mrcr,
    needle,
    reference,
    ruler,
    wikitext,
)
from sglang_diffkv.evaluate.tasks.files import TaskFileError
from sglang_diffkv.evaluate.tasks.generation import Options

LOADERS: dict[str, Callable[[Path, Options], Task]] = {
    "reference": reference.load,
    "shared": reference.load_shared,
    "gsm8k": gsm8k.load,
    "math": math_problems.load,
    "aime": aime.load,
    "mmlu": choices.load_mmlu,
    "mmlu_pro": choices.load_mmlu_pro,
    "gpqa": choices.load_gpqa,
    "longbench_v2": choices.load_longbench_v2,
    "humaneval_plus": code.load_humaneval_plus,
    "mbpp_plus": code.load_mbpp_plus,
    "longbench": longbench.load,
    "ruler": ruler.load,
    "mrcr": mrcr.load,
    "needle": needle.load,
    "wikitext": wikitext.load,
    "continuation": forced.load_continuation,
    "replies": forced.load_replies,
}
"""Of files and folders, by ``KIND`` in ``KIND=PATH``."""
MADE = "made"
"""Of questions without a file: ``made=TOKENS``."""


def load_task(spec: str, options: Options) -> Task:
    """The task that ``KIND=PATH`` names, or ``made=TOKENS``. Raises TaskFileError."""
    kind, equals, path = spec.partition("=")
    if kind == MADE:
        return made.load(path, options)
    if kind not in LOADERS or not equals:
        raise TaskFileError(f"expected {MADE}=TOKENS, or KIND=PATH with a kind of {', '.join(LOADERS)}; got {spec!r}")
    if not Path(path).exists():
        raise TaskFileError(f"{kind}: there is no file {path}")
    if not (Path(path).is_file() or Path(path).is_dir()):
        raise TaskFileError(f"{kind}: {path} is no regular file, and no folder")
    return LOADERS[kind](Path(path), options)
