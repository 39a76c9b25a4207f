"""What a command line gives the parts to work with, and what a part may need of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.quality.tables import LONGBENCH, TABLE_1, kind
from sglang_diffkv.calibrate.arguments import REPORTING
from sglang_diffkv.evaluate.tasks.files import stem

SCORED = (LONGBENCH, "ruler")
TEXTS = ("wikitext", "continuation", "replies")
"""Kinds of task files that have no right and wrong answers, only scores or text to predict."""
DEFAULT = "{}"
HEAVY = '{"tiers": ["BF16"], "policy": {"name": "h2o", "fraction": 0.5}}'
SNAPKV = '{"tiers": ["BF16"], "policy": {"name": "snapkv", "fraction": 0.5}}'
LEANKV = '{"policy": {"name": "leankv"}}'
XKV = '{"tiers": ["BF16"], "policy": {"name": "xkv", "keep": 0.5}}'
CONFIGS = (DEFAULT, HEAVY, SNAPKV, LEANKV, XKV)
"""One configuration for each method that parts serve."""


def kind_of(spec: str) -> str:
    """Of ``KIND=PATH``."""
    return kind(spec.replace("=", "/", 1))


@dataclass(frozen=True)
class Given:
    """A command line.

    Attributes:
        tasks, calibration: task files as KIND=PATH; the latter are for what is fitted, the tasks where there are none.
        selection, asking: arguments that choose questions, and those that say how they are asked; servers among both.
        refused: of the configurations in ``CONFIGS``, why a server would not start with them, "" where it would.
        context: tokens that the model takes.
    """

    model: Path
    output: Path
    tasks: tuple[str, ...]
    calibration: tuple[str, ...]
    text: Path | None
    gpu: bool
    quick: bool
    n: int | None = None
    kv_gib: float | None = None
    server_args: tuple[str, ...] = ()
    selection: tuple[str, ...] = ()
    asking: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def graded(self) -> list[str]:
        """Task files with right and wrong answers."""
        return [x for x in self.tasks if kind_of(x) not in (*SCORED, *TEXTS)]

    @property
    def answered(self) -> list[str]:
        """Task files with answers or scores."""
        return [x for x in self.tasks if kind_of(x) not in TEXTS]

    @property
    def sampled(self) -> list[str]:
        """Task files for what is fitted: not those that are for reporting."""
        return [x for x in self.calibration or self.tasks if stem(Path(x.partition("=")[2])) != REPORTING]

    @property
    def fitted(self) -> list[str]:
        """Those of them with right and wrong answers."""
        return [x for x in self.sampled if kind_of(x) not in (*SCORED, *TEXTS)]

    @property
    def read(self) -> list[str]:
        """What is read by a forward pass: the text, else the prompts of the tasks."""
        return [f"wikitext={self.text}"] if self.text else list(self.tasks)

    def of(self, kinds: Sequence[str]) -> list[str]:
        """Task files of some kinds, in the kinds' order."""
        return [x for name in kinds for x in self.tasks if kind_of(x) == name]

    @property
    def context(self) -> int:
        """Tokens of the longest sequence, as the model's ``config.json`` says."""
        try:
            config: dict[str, Any] = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 4096
        for held in (config, config.get("text_config") or {}):
            if most := held.get("max_position_embeddings"):
                return int(most)
        return 4096


@dataclass(frozen=True)
class Need:
    """Something that a part needs: in words, and whether it is given, as the reason why not ("" if it is)."""

    words: str
    lacking: Callable[[Given], str]


def _tasks(words: str, option: str, found: Callable[[Given], Sequence[str]]) -> Need:
    return Need(words, lambda given: "" if found(given) else f"needs {words}: {option}")


def served(config: str, method: str) -> Need:
    """A server with a configuration of ``CONFIGS``."""
    return Need(f"a model that can be served with {method}", lambda given: given.refused.get(config, ""))


GPU = Need("a CUDA GPU", lambda given: "" if given.gpu else "needs a CUDA GPU")
KV_GIB = Need("--kv-gib", lambda given: "" if given.kv_gib else "needs --kv-gib N: how much KV cache each server gets")
PROMPTS = _tasks("a text or task files", "--text FILE or --task KIND=PATH", lambda given: given.read)
TEXT = _tasks("a text", "--text FILE", lambda given: [str(given.text)] if given.text else [])
GRADED = _tasks("task files with right and wrong answers", "--task KIND=PATH", lambda given: given.graded)
FITTED = _tasks(
    f"task files with right and wrong answers that are not for reporting ({REPORTING})",
    "--calibration-task or --task KIND=PATH",
    lambda given: given.fitted,
)
SAMPLE = _tasks(
    f"a text or task files that are not for reporting ({REPORTING})",
    "--text FILE, --calibration-task or --task KIND=PATH",
    lambda given: given.sampled or [str(x) for x in [given.text] if x],
)
ANSWERED = _tasks("task files with answers or scores", "--task KIND=PATH", lambda given: given.answered)
BENCHMARKS = _tasks(f"a task file of {', '.join(TABLE_1)}", "--task KIND=PATH", lambda given: given.of(TABLE_1))
LONG = _tasks("LongBench's files", "--task longbench=PATH", lambda given: given.of((LONGBENCH,)))
THINKING = _tasks(
    "GPQA's or AIME's questions", "--task gpqa=PATH or aime=PATH", lambda given: given.of(("gpqa", "aime"))
)
OTHERS = _tasks(
    "task files of other kinds than tables 1 to 3 have",
    "--task KIND=PATH",
    lambda given: [x for x in given.answered if kind_of(x) not in (*TABLE_1, LONGBENCH, "gpqa", "aime")],
)
