"""How far a server's replies are from a lossless server's, on the server's own traffic.

Clients ask this proxy instead of the server. Requests and answers pass through as they come, streams too. Of some
requests the server is asked once more, greedily. The reference then says how likely each token of that reply is to it:
so they agree, or part, on text as it is served. Nobody waits for that, and no prompt is stored.

The reference serves the same model and stores what it computes: stock SGLang, or --diffkv-config lossless. Figures are
a page at --report-port, with /json and /metrics for Prometheus. Examples:

    python -m sglang_diffkv.shadow --url http://127.0.0.1:30000 --reference http://HOST:30000
    python -m sglang_diffkv.shadow --url http://127.0.0.1:30000 --reference http://HOST:30000 --file requests.jsonl

A file has a request in each line: its body, or an object with url and body as in OpenAI's batches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_diffkv import bounds
from sglang_diffkv.access import KEY_OPTION, access_of, add_access_arguments, key_of, same_server, server_url
from sglang_diffkv.arguments import input_file, number, output_file
from sglang_diffkv.files import named
from sglang_diffkv.shadow.exchange import MOST_BYTES, Exchange, LeftOut, exchange_of_line
from sglang_diffkv.shadow.judge import Judge
from sglang_diffkv.shadow.proxy import Figures, Proxy, serve
from sglang_diffkv.shadow.report import lines, render
from sglang_diffkv.shadow.sampler import Sampler
from sglang_diffkv.shadow.tally import Tally

REFERENCE_KEY, REFERENCE_ENV = "--reference-api-key", "SGLANG_REFERENCE_API_KEY"
THREADS = 4
"""Requests of a file that are judged at once."""
ANSWERS_WITHIN = 5.0
"""Seconds for a server to say that it is there, before clients are served without it."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_diffkv.shadow",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", type=server_url, required=True, help="of the server whose replies are judged")
    parser.add_argument("--reference", type=server_url, required=True, help="of the server that judges")
    parser.add_argument(
        "--share", type=number(bounds.SomeFraction), default=0.01, help="of requests that are judged (%(default)s)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where clients ask (default: %(default)s)")
    parser.add_argument("--port", type=number(bounds.Port), default=30001, help="(default: %(default)s; 0: any)")
    parser.add_argument(
        "--report-host",
        default="127.0.0.1",
        help="where the figures are asked for, without a key (default: %(default)s)",
    )
    parser.add_argument("--report-port", type=number(bounds.Port), default=30002, help="(default: %(default)s; 0: any)")
    parser.add_argument(
        "--reply-tokens", type=number(bounds.Some), default=64, help="judged of a request (default: %(default)s)"
    )
    parser.add_argument(
        "--top-logprobs", type=number(bounds.Some), default=20, help="tokens told at each place (default: %(default)s)"
    )
    parser.add_argument(
        "--queue", type=number(bounds.Some), default=32, help="requests that wait at most (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=number(bounds.Patience), default=120.0, help="seconds for an answer (default: %(default)s)"
    )
    parser.add_argument(
        "--file", type=input_file, metavar="FILE", help="judge the requests of this file, and no traffic"
    )
    parser.add_argument("--html", type=output_file, metavar="FILE", help="with --file: also write the page")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="with --file: also write the figures as JSON")
    add_access_arguments(parser)
    parser.add_argument(
        REFERENCE_KEY,
        type=lambda text: key_of(text, REFERENCE_KEY),
        metavar="KEY",
        help=f"of the reference (default: {REFERENCE_ENV}, else {KEY_OPTION})",
    )
    args = parser.parse_args(argv)
    if same_server(args.url, args.reference):
        parser.error("--url and --reference are one server, which agrees with itself: name another --reference")
    if args.file is None and (args.html or args.json):
        parser.error("--html and --json are of a --file: the proxy serves its figures at --report-port")
    args.access = access_of(parser, args)
    try:
        given = args.reference_api_key
        own = key_of(os.environ.get(REFERENCE_ENV, ""), REFERENCE_ENV) if given is None else given
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    args.reference_access = replace(args.access, api_key=own or args.access.api_key, admin_api_key=None)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 1 if nothing could be judged or served."""
    args = parse_args(argv)
    tally = Tally()
    judge = Judge(
        args.url, args.reference, access=args.access, reference_access=args.reference_access,
        reply_tokens=args.reply_tokens, top_logprobs=args.top_logprobs, timeout=args.timeout,
    )  # fmt: skip
    try:
        if args.file is not None:
            return _judge_file(args, judge, tally)
        for server in (judge.server, judge.reference):
            if why := server.access.silence(server.url, min(args.timeout, ANSWERS_WITHIN)):
                print(f"sglang_diffkv.shadow: {why}. Until it does, no request is judged", file=sys.stderr)
        sampler = Sampler(judge, tally, most=args.queue)
        return asyncio.run(_serve(args, sampler))
    except OSError as error:
        print(f"sglang_diffkv.shadow: {error}", file=sys.stderr)
        return 1


def about(args: argparse.Namespace, share: float | None) -> dict[str, Any]:
    """What the figures are of."""
    return {"url": args.url, "reference": args.reference, "share": share}


async def _serve(args: argparse.Namespace, sampler: Sampler) -> int:
    """Until Ctrl-C or SIGTERM."""
    until, loop = asyncio.Event(), asyncio.get_running_loop()
    for number_of in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number_of, until.set)

    def ready(address: str, report: str) -> None:
        print(f"{address} answers for {args.url}; figures: {report}/", flush=True)

    proxy = Proxy(args.url, sampler, args.share, args.access)
    figures = Figures(sampler, about(args, args.share), args.report_host)
    try:
        await serve(proxy, figures, (args.host, args.port), (args.report_host, args.report_port), ready, until)
    except OSError as error:
        listens = "--host, --port, --report-host or --report-port"
        print(f"sglang_diffkv.shadow: {error.strerror or error}; name another {listens}", file=sys.stderr)
        return 1
    return 0


def _judge_file(args: argparse.Namespace, judge: Judge, tally: Tally) -> int:
    for server in (judge.server, judge.reference):
        if why := server.access.silence(server.url, args.timeout):
            print(f"sglang_diffkv.shadow: {why}", file=sys.stderr)
            return 1
    with suppress(LeftOut):
        judge.check_reference()
    if judge.problem:
        print(f"sglang_diffkv.shadow: {judge.problem}", file=sys.stderr)
        return 1
    sampler = Sampler(judge, tally, most=args.queue, threads=THREADS)
    for exchange in _exchanges(args.file, tally):
        sampler.put(exchange)
    sampler.finish()
    told, of = tally.as_json(), {**about(args, None), "problem": judge.problem}
    table = Table(show_header=False)
    for name, value in lines(told):
        table.add_row(name, value)
    Console().print(table)
    if args.html:
        args.html.write_text(render(told, of), encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps({**told, "about": of}, indent=1) + "\n", encoding="utf-8")
    if judge.problem:  # what serves there became unfit meanwhile
        print(f"sglang_diffkv.shadow: {judge.problem}", file=sys.stderr)
    elif not told["requests"]["judged"]:
        print(f"sglang_diffkv.shadow: no request of {named(args.file)} was judged", file=sys.stderr)
    return 0 if told["requests"]["judged"] else 1


def _exchanges(path: Path, tally: Tally) -> Iterator[Exchange]:
    """Of a file's lines; one that is no request is left out. Raises OSError."""
    with path.open("rb") as file:
        while line := file.readline(MOST_BYTES + 1):
            too_large = len(line) > MOST_BYTES
            while too_large and line and not line.endswith(b"\n"):
                line = file.readline(MOST_BYTES)
            if not line.strip():
                continue
            tally.sample()
            try:
                if too_large:
                    raise LeftOut("too_large")
                decoded = json.loads(line)
                if not isinstance(decoded, dict):
                    raise LeftOut("unreadable")
                yield exchange_of_line(decoded)
            except (ValueError, RecursionError):
                tally.leave_out("unreadable")
            except LeftOut as error:
                tally.leave_out(error.reason)
