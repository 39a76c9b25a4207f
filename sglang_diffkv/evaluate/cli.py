"""Quality of cache configurations on task files, against a running server or on servers of its own.

Every configuration answers the same questions, greedily; the others are compared with the first by a paired test.
Servers are started one after the other, or --jobs of them at once.
Answers are kept in the output folder as they come, so a run that was broken off goes on with the same command, and
configurations can be added later. Example:

    python -m sglang_diffkv.evaluate --model MODEL --config stock --config fp8 \\
        --config 'K8V4={"tiers":["K8V4"]}' --config 'default={}' \\
        --task gsm8k=test.jsonl --n 200 --output quality
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import requests

from sglang_diffkv import bounds
from sglang_diffkv.access import Access, AccessError, access_of, add_access_arguments, cause, server_url
from sglang_diffkv.arguments import number
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate import report, runner
from sglang_diffkv.evaluate.client import RequestError
from sglang_diffkv.evaluate.configuration import Configuration, fingerprint_of, parse_configuration, tokenizer_path
from sglang_diffkv.evaluate.endpoint import Endpoint, EvaluationError
from sglang_diffkv.evaluate.jobs import Connect, evaluate_all
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.server import ServerError
from sglang_diffkv.evaluate.store import Store
from sglang_diffkv.evaluate.summary import summarise
from sglang_diffkv.evaluate.table import report_page, tables
from sglang_diffkv.evaluate.tasks import LOADERS, Options, TaskFileError, load_task
from sglang_diffkv.evaluate.tasks.reference import LEVELS
from sglang_diffkv.files import missing_model

KIND_ARGUMENTS = ("max_prompt_tokens", "run_generated_code")
WINDOW_ARGUMENTS = ("prefix_tokens", "window_tokens", "turn_tokens", "top_logprobs")
DEFAULT_CONFIGS = ("stock", "fp8", "diffkv={}")


positive = number(bounds.SomeCount)


def add_selection_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that choose questions; ``question_options`` reads them."""
    parser.add_argument("--n", type=positive, help="questions of each task file, a fixed random sample (default: all)")
    parser.add_argument("--seed", type=number(bounds.Whole), default=0, help="of the sample (default: %(default)s)")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, help="of reference questions (default: all)")
    parser.add_argument("--only", nargs="+", metavar="TASK", help="these tasks of a reference file, or kinds of made=")
    parser.add_argument("--exclude", nargs="+", default=[], metavar="TASK", help="not these tasks of it")
    parser.add_argument("--tokenizer", help="its folder (default: the model's)")
    parser.add_argument(
        "--max-prompt-tokens",
        type=positive,
        metavar="N",
        help="longbench and longbench_v2: a longer prompt loses its middle",
    )
    parser.add_argument(
        "--run-generated-code",
        action="store_true",
        help="let humaneval_plus and mbpp_plus run the code that the model writes, here and with your rights",
    )


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that choose questions and how they are asked; ``question_options`` reads them."""
    add_selection_arguments(parser)
    parser.add_argument("--max-new-tokens", type=positive, default=4096, help="of a reply (default: %(default)s)")
    add_server_arguments(parser)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the servers that are asked."""
    parser.add_argument("--concurrency", type=positive, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument(
        "--jobs",
        type=positive,
        default=1,
        metavar="N",
        help="configurations, each with a server of its own, at once (default: %(default)s); on one GPU divide its "
        "memory between them with --server-args",
    )
    parser.add_argument("--server-args", type=shlex.split, default=[], help="more server arguments, one string")


def add_window_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of perplexity; ``question_options`` reads them."""
    parser.add_argument(
        "--prefix-tokens", type=number(bounds.Tokens), default=1024, help="of a wikitext window (default: %(default)s)"
    )
    parser.add_argument("--window-tokens", type=positive, default=128, help="scored after them (default: %(default)s)")
    parser.add_argument(
        "--turn-tokens",
        type=number(bounds.Tokens),
        default=0,
        help="wikitext: the prefix comes in turns of so many tokens, as those of a chat (default: in one prompt)",
    )
    parser.add_argument(
        "--top-logprobs",
        type=number(bounds.Tokens),
        default=32,
        metavar="K",
        help="likeliest tokens by which distributions are compared (default: %(default)s; 0: perplexity alone)",
    )


def question_options(args: argparse.Namespace) -> Options:
    """What ``add_question_arguments`` added, with a perplexity's windows where they were asked for."""
    names = ("n", "seed", "max_new_tokens", "levels", "only", "exclude", *KIND_ARGUMENTS, *WINDOW_ARGUMENTS)
    return Options(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_diffkv.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", help="start a server for this model and each --config")
    where.add_argument(
        "--url", type=server_url, help="ask this running server; its prefix cache is emptied before each task file"
    )
    add_access_arguments(parser, admin=True)
    parser.add_argument(
        "--keep-cache",
        action="store_true",
        help="leave the running server's prefix cache as it is: figures then depend on what was asked before",
    )
    parser.add_argument("--name", help="of the running server in the tables (default: its attention backend)")
    parser.add_argument(
        "--config",
        action="append",
        metavar="NAME=JSON",
        help="stock, fp8, a preset, or a DiffKV configuration, inline or a file "
        f"(default: {', '.join(DEFAULT_CONFIGS)})",
    )
    kinds = f"KIND: {', '.join(LOADERS)}; or made=TOKENS, questions about texts of so many tokens that need no file"
    parser.add_argument("--task", action="append", required=True, metavar="KIND=PATH", help=kinds)
    add_question_arguments(parser)
    add_window_arguments(parser)
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for answers, results.json, results.md, report.html"
    )
    args = parser.parse_args(argv)
    if args.url and args.config:
        parser.error("--config starts servers and goes with --model; a running server has its configuration")
    if args.url and args.jobs > 1:
        parser.error("--jobs starts several servers and goes with --model")
    if (args.name or args.keep_cache) and not args.url:
        parser.error("--name and --keep-cache go with --url")
    if not args.url and (args.api_key or args.admin_api_key or args.cacert):
        parser.error("--api-key, --admin-api-key and --cacert go with --url; a server's own are in --server-args")
    args.access = access_of(parser, args) if args.url else Access()
    return args


def write(folder: Path, store: Store, suites: Sequence[runner.Suite], skipped: dict[str, str]) -> str:
    """Write ``results.json``, ``results.md`` and ``report.html``; returns the tables."""
    results = summarise(store, suites)
    data = {
        "environment": report.environment(),
        "configurations": store.configurations,
        "tasks": {name: suite.fingerprint for name, suite in store.suites.items()},
        "skipped": skipped,
        "results": [result.model_dump(mode="json") for result in results],
    }
    (folder / "results.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    text = tables(results, skipped)
    (folder / "results.md").write_text(text + "\n", encoding="utf-8")
    (folder / "report.html").write_text(report_page(results, skipped, data), encoding="utf-8")
    return text


def evaluate_url(args: argparse.Namespace, tasks: Sequence[Any], store: Store) -> str:
    """One running server on all tasks."""
    endpoint = Endpoint.connect(args.url, access=args.access)
    tokenizer = load_tokenizer(args.tokenizer or tokenizer_path(endpoint))
    suites = [runner.Suite.of(task, tokenizer) for task in tasks]
    fingerprint = fingerprint_of(endpoint)
    name = args.name or str(fingerprint["backend"])
    store.add_configuration(name, fingerprint)
    runner.register(store, suites)
    print(runner.cost(store, [name], suites, args.max_new_tokens), file=sys.stderr)

    def connect() -> nullcontext[Endpoint]:
        return nullcontext(endpoint)

    runner.evaluate(name, connect, suites, store, args.concurrency, keep_cache=args.keep_cache)
    return write(args.output, store, suites, {})


def evaluate_model(
    args: argparse.Namespace, configurations: Sequence[Configuration], tasks: Sequence[Any], store: Store
) -> str:
    """A server for each configuration on all tasks."""
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    suites = [runner.Suite.of(task, tokenizer) for task in tasks]
    runner.register(store, suites)
    skipped: dict[str, str] = {}
    servers: dict[str, Connect] = {}
    server_args = runner.server_args(args.server_args, tasks)
    for configuration in configurations:
        if why := configuration.unsupported():
            skipped[configuration.name] = why
            print(f"{configuration.name}: skipped: {why}", file=sys.stderr)
            continue
        if configuration.origin:
            print(f"{configuration.name}: thresholds: {configuration.origin}", file=sys.stderr)
        store.add_configuration(configuration.name, configuration.fingerprint(args.model, args.server_args))
        servers[configuration.name] = partial(runner.start, configuration, args.model, server_args)

    def save(name: str) -> None:
        write(args.output, store, suites, skipped)

    print(runner.cost(store, servers, suites, args.max_new_tokens), file=sys.stderr)
    evaluate_all(servers, suites, store, args.concurrency, args.jobs, save)
    return write(args.output, store, suites, skipped)


def run(args: argparse.Namespace) -> int:
    """Ask what is left to ask and print the tables; 1 with the reason if that is not possible."""
    try:
        if missing := missing_model(args.model or ""):
            raise ConfigError(f"--model {missing}")
        configurations = [parse_configuration(spec, args.model) for spec in args.config or DEFAULT_CONFIGS]
        names = [configuration.name for configuration in configurations]
        if len(set(names)) < len(names):
            raise ConfigError("every --config needs a name of its own")
        tasks = [load_task(spec, question_options(args)) for spec in args.task]
        if len({task.name for task in tasks}) < len(tasks):
            raise TaskFileError("two task files of one kind have the same name; rename one")
        with Store(args.output) as store:
            if args.url:
                text = evaluate_url(args, tasks, store)
            else:
                text = evaluate_model(args, configurations, tasks, store)
    except (ConfigError, TaskFileError, EvaluationError, RequestError, ServerError) as error:
        print(f"sglang_diffkv.evaluate: {error}", file=sys.stderr)
        return 1
    except AccessError as error:
        print(f"sglang_diffkv.evaluate: {error}", file=sys.stderr)
        return 1
    except requests.RequestException as error:
        print(f"sglang_diffkv.evaluate: the server stopped answering: {cause(error)}", file=sys.stderr)
        return 1
    print(text)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    return run(parse_args(argv))
