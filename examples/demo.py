"""A SGLang server on a DiffKV cache, asked through the OpenAI API: ``make demo``.

The nano model works multiplications and cheapest paths step by step, finds a value hidden in a long text and
answers two questions over one long prefix. Each answer is shown with right or wrong and the prompt tokens
that came from the prefix cache; the last line has the bytes that the cache really took, as a ratio to
bfloat16.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from sglang_diffkv.evaluate import report
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.evaluate.tasks.generation import Example

NANO = Path(__file__).parent / "models" / "nano"
QUESTIONS = Path(__file__).parents[1] / "benchmarks" / "data" / "dev.jsonl.xz"
WORKED_STEPS = ("dev-mul-easy-0", "dev-mul-medium-0", "dev-mul-medium-1", "dev-dp-easy-0", "dev-dp-medium-0")
NEEDLE = "dev-needle-medium-30"
SHARED_PREFIX = ("dev-fewshot_shared-medium-1-0", "dev-fewshot_shared-medium-1-1")


@dataclass
class Answer:
    """What came back for one question."""

    item: Example
    text: str
    prompt_tokens: int
    reply_tokens: int
    cached_tokens: int

    @property
    def right(self) -> bool:
        """Whether the final answer is the right one."""
        return reference.grade(self.text, self.item.answers)


def ask(client: OpenAI, item: Example) -> Answer:
    """One question through ``/v1/chat/completions``, greedy."""
    reply = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": item.prompt}],
        temperature=0,
        max_tokens=2048,
    )
    usage = reply.usage
    assert usage is not None
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details else None
    text = reply.choices[0].message.content or ""
    return Answer(item, text, usage.prompt_tokens, usage.completion_tokens, cached or 0)


def shorten(text: str, width: int) -> str:
    """A text on one line, its middle left out if it is longer than ``width``."""
    line = " / ".join(text.split("\n"))
    half = (width - 5) // 2
    return line if len(line) <= width else f"{line[:half]} ... {line[-half:]}"


def show(console: Console, title: str, answers: Sequence[Answer]) -> None:
    """A table of questions and answers."""
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("question", max_width=44)
    table.add_column("reply", max_width=60)
    table.add_column("right?")
    for name in ("prompt tokens", "cached", "reply tokens"):
        table.add_column(name, justify="right", max_width=6)
    for answer in answers:
        mark = "[green]right[/]" if answer.right else f"[red]wrong[/], expected {answer.item.answers[0]}"
        counts = (answer.prompt_tokens, answer.cached_tokens, answer.reply_tokens)
        question, reply = shorten(answer.item.prompt, 120), shorten(answer.text, 160)
        table.add_row(question, reply, mark, *map(str, counts))
    console.print(table)


def cache_summary(server: Server) -> list[str] | None:
    """The bytes of all finished requests, the ratio in the last line; None without a DiffKV cache."""
    finished = report.totals(server.stats())
    figures = report.ratios(finished)
    if finished is None or figures is None:
        return None
    pages, full = (finished[name] / 2**20 for name in ("page_bytes", "bf16_bytes"))
    return [
        f"{finished['requests']:.0f} requests, {finished['tokens']:.0f} tokens: {pages:.2f} MiB of pages "
        f"held at their end, {full:.2f} MiB in bf16 (ratio without the pages' free slots "
        f"{figures['ratio_tokens']:.2f})",
        f"measured ratio {figures['ratio_pages']:.2f} of bf16 bytes ({report.shares_text(figures)})",
    ]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Ask a server with a DiffKV cache.")
    parser.add_argument("--model", default=str(NANO), help="default: the nano model of the repository")
    parser.add_argument("--backend", default="diffkv", help="attention backend (default: %(default)s)")
    parser.add_argument("--diffkv-config", type=json.loads, metavar="JSON", help="default: the plugin's")
    parser.add_argument("--server-args", type=shlex.split, default=[], help="more arguments, one string")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Start the server, ask, show; 1 if a DiffKV server measured no ratio."""
    args = parse_args(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    items = {item.id: item for item in reference.read(QUESTIONS)}
    console.print(f"starting SGLang with --attention-backend {args.backend}, model {args.model} ...")
    start = time.perf_counter()
    arguments = ["--enable-cache-report", *args.server_args]
    with Server(args.model, args.backend, arguments, diffkv_config=args.diffkv_config) as server:
        console.print(f"ready after {time.perf_counter() - start:.0f} s at {server.url}")
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with ThreadPoolExecutor() as pool:
            steps = list(pool.map(lambda name: ask(client, items[name]), WORKED_STEPS))
        show(console, "worked steps, all at once", steps)
        words = len(items[NEEDLE].prompt.split())
        show(console, f"a value hidden in a text of {words} words", [ask(client, items[NEEDLE])])
        shared = [ask(client, items[name]) for name in SHARED_PREFIX]
        show(console, "two questions over one long prefix", shared)
        summary = cache_summary(server)
    if summary is None:
        console.print("this server has no DiffKV cache and measures no ratio")
        return int(args.backend == "diffkv")
    console.print("\n".join(summary), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
