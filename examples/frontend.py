"""A program in SGLang's frontend language on a DiffKV server: questions fork from one prompt, then one of them goes on.

Start a server, then name it::

    python -m sglang.launch_server --model-path examples/models/nano --attention-backend diffkv
    python examples/frontend.py --url http://127.0.0.1:30000

A server's key is read from SGLANG_API_KEY. Forks share the pages of the prompt that they fork from; the second turn
finds the first in the prefix cache.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import sglang as sgl
from rich.console import Console
from rich.table import Table

from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.evaluate.tasks.generation import Example

QUESTIONS = Path(__file__).parents[1] / "benchmarks" / "data" / "dev.jsonl.xz"
USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
"""The nano model's turns."""


@sgl.function
def ask_in_parallel(s, prefix: str, questions: list[str], follow_up: str):
    """Each question after the same prefix, all at once; then ``follow_up`` as the next turn of the first."""
    s += USER + prefix
    forks = s.fork(len(questions))
    for fork, question in zip(forks, questions, strict=True):
        fork += question + ASSISTANT
        fork += sgl.gen("reply", max_tokens=200, temperature=0, stop=END)
    forks.join()
    s["replies"] = [fork["reply"] for fork in forks]
    s += questions[0] + ASSISTANT + forks[0]["reply"] + END
    s += USER + follow_up + ASSISTANT
    s += sgl.gen("second", max_tokens=400, temperature=0, stop=END)


def questions_over_one_prefix(group: str, count: int) -> tuple[str, list[Example]]:
    """The first questions of a group of ``fewshot_shared`` and the prefix that they share."""
    items = [item for item in reference.read(QUESTIONS) if item.group == group][:count]
    prompts = [item.prompt for item in items]
    shared = next(i for i, letters in enumerate(zip(*prompts, strict=False)) if len(set(letters)) > 1)
    return prompts[0][:shared], items


def run(url: str, group: str, count: int) -> tuple[list[tuple[Example, str]], str]:
    """The program against a server: each question with its reply, and the reply of the second turn."""
    sgl.set_default_backend(sgl.RuntimeEndpoint(url, api_key=os.environ.get("SGLANG_API_KEY")))
    prefix, items = questions_over_one_prefix(group, count)
    follow_up = next(item for item in reference.read(QUESTIONS) if item.task == "mul" and item.level == "easy")
    state = ask_in_parallel.run(prefix, [item.prompt[len(prefix) :] for item in items], follow_up.prompt)
    return list(zip(items, state["replies"], strict=True)), state["second"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--group", default="medium-1", help="a group of the task fewshot_shared")
    parser.add_argument("--questions", type=int, default=4)
    args = parser.parse_args(argv)
    replies, second = run(args.url, args.group, args.questions)
    table = Table("question", "reply", "right")
    for item, reply in replies:
        table.add_row(
            item.prompt.splitlines()[-1], reply.strip(), "yes" if reference.grade(reply, item.answers) else "no"
        )
    console = Console()
    console.print(table)
    console.print("second turn:", second.strip())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
