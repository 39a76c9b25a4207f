"""The questions under ``benchmarks/data``."""

from __future__ import annotations

from benchmarks.paths import DATA
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.evaluate.tasks.generation import Example

SPLITS = ("calib", "dev")


def load(split: str) -> list[Example]:
    """All questions of a split (``calib`` to fit on, ``dev`` to report on), in file order."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}, expected one of {', '.join(SPLITS)}")
    return reference.read(DATA / f"{split}.jsonl.xz")
