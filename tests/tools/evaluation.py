"""What the tests of ``sglang_diffkv.evaluate`` share: the sample questions, and the command on a stand-in."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paths import NANO
from sglang_diffkv.evaluate import cli
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from tests.tools.fake_server import FakeServer

DATA = Path(__file__).parents[1] / "data" / "evaluate"
REFERENCE = f"reference={DATA / 'reference.jsonl'}"


@functools.cache
def tokenizer() -> Any:
    """The nano model's. Loading it for every command would take most of the time of these tests."""
    return load_tokenizer(NANO)


def tokenizer_of(path: str) -> Any:
    """In place of ``load_tokenizer``."""
    assert path == str(NANO)
    return tokenizer()


@functools.cache
def answers() -> dict[tuple[int, ...], tuple[str, str]]:
    """Prompt ids of the reference questions to their ids and answers."""
    with (DATA / "reference.jsonl").open(encoding="utf-8") as lines:
        items = [json.loads(line) for line in lines]
    return {tuple(chat_ids(tokenizer(), x["prompt"])): (x["id"], x["answer"]) for x in items}


def replies(wrong: Sequence[str] = (), aborted: Sequence[str] = ()) -> Callable[[Sequence[int]], str]:
    """A reply function that answers all but some questions right."""

    def reply(ids: Sequence[int]) -> str:
        name, answer = answers()[tuple(ids)]
        if name in aborted:
            raise ValueError("out of pages")
        return f"Answer: {'?' if name in wrong else answer}"

    return reply


def run(fake: FakeServer, folder: Path, name: str, *args: str) -> int:
    """The command on a stand-in, by default with all reference questions."""
    base = ["--url", fake.url, "--name", name, "--tokenizer", str(NANO), "--output", str(folder)]
    return cli.main([*base, *(args or ["--task", REFERENCE])])


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """What the command wrote, by configuration."""
    data = json.loads((folder / "results.json").read_text())
    return {result["configuration"]: result for result in data["results"]}
