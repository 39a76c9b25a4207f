"""Replies of one configuration, in bf16 if it is the default ``stock``, to be forced on others token by token.

    python -m sglang_diffkv.evaluate.replies --model MODEL --task gsm8k=test.jsonl --n 100 --output replies.jsonl
    python -m sglang_diffkv.evaluate --model MODEL --config stock --config 'default={}' \\
        --task replies=replies.jsonl --output generation

The second command measures how far the others' next-token distributions are from the first one's while the same reply
is decoded (``evaluate/tasks/forced``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import requests
from tqdm import tqdm

from sglang_diffkv.access import cause
from sglang_diffkv.arguments import output_file
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate import runner
from sglang_diffkv.evaluate.cli import add_question_arguments, question_options
from sglang_diffkv.evaluate.client import RequestError
from sglang_diffkv.evaluate.configuration import STOCK, parse_configuration
from sglang_diffkv.evaluate.endpoint import Endpoint, EvaluationError
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.server import ServerError
from sglang_diffkv.evaluate.task import Question
from sglang_diffkv.evaluate.tasks import TaskFileError, load_task


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_diffkv.evaluate.replies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="start a server for it")
    parser.add_argument("--config", default=STOCK, metavar="NAME=JSON", help="which replies (default: %(default)s)")
    parser.add_argument("--task", action="append", required=True, metavar="KIND=PATH", help="questions, as of evaluate")
    add_question_arguments(parser)
    parser.add_argument("--output", type=output_file, required=True, help="JSON Lines file, written anew")
    return parser.parse_args(argv)


def write(args: argparse.Namespace) -> int:
    """Ask all questions and write the replies in the order of asking; returns how many."""
    configuration = parse_configuration(args.config, args.model)
    tasks = [load_task(spec, question_options(args)) for spec in args.task]
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    questions = [(task.name, question) for task in tasks for question in task.questions(tokenizer)]
    if any(task.metric == "perplexity" for task in tasks):
        raise TaskFileError("replies are to questions; a plain text needs none: --task continuation=FILE of evaluate")

    with (
        runner.start(configuration, args.model, args.server_args) as endpoint,
        ThreadPoolExecutor(args.concurrency) as pool,
        args.output.open("w", encoding="utf-8") as file,
    ):
        asked = pool.map(lambda x: _reply(endpoint, x[1], args.max_new_tokens), questions)
        for (name, question), reply in tqdm(zip(questions, asked), total=len(questions), unit="reply"):
            line = {"id": f"{name}/{question.id}", "task": question.task, "prompt_ids": question.prompt_ids}
            file.write(json.dumps({**line, "reply_ids": reply}) + "\n")
    return len(questions)


def _reply(endpoint: Endpoint, question: Question, max_new_tokens: int) -> list[int]:
    return endpoint.generate(question.prompt_ids, question.limit(max_new_tokens)).output_ids


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    args = parse_args(argv)
    try:
        count = write(args)
    except (ConfigError, TaskFileError, EvaluationError, RequestError, ServerError, requests.RequestException) as error:
        print(f"sglang_diffkv.evaluate.replies: {cause(error)}", file=sys.stderr)
        return 1
    print(f"{count} replies in {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
