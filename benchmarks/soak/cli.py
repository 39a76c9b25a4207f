"""A soak at overload: for minutes a server gets more than its pool holds, with aborts, mixed lengths and prefix hits.

Reference questions with known answers are asked one by one on the idle server, then all the time among the load, and
once more afterwards. The soak fails, with exit status 1 and the reasons, unless every request was answered, refused
with an error that it deserved, or aborted by the client; all pages are free whenever the server is idle; SGLang's leak
checks, run at every step, and the log are silent; no process grows; and answers under load are as right as before:

    python -m benchmarks.soak --minutes 20 --concurrency 48 --max-total-tokens 8000 --output soak.json

With ``--store`` evicted prefixes go to host memory and a folder, whose files are damaged all the time.

Every second of ``--rounds`` ends with an abort of all requests. The chart is put beside the JSON file, and the server's
log too if the soak fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import requests

from benchmarks import splits
from benchmarks.paths import NANO
from benchmarks.provenance import provenance, without_paths
from benchmarks.serving.log import parse_log
from benchmarks.soak.chart import draw
from benchmarks.soak.load import Limits, Load, choose
from benchmarks.soak.report import accuracy, problems
from benchmarks.soak.run import Plan, Soak
from benchmarks.soak.running import RunningServer
from benchmarks.soak.spoiler import Spoiler
from benchmarks.soak.watch import growth, wrong_lines
from sglang_diffkv.access import OPEN, access_of, add_access_arguments, server_url, without_keys
from sglang_diffkv.drawing import drawn
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server, has_gpu, stock_backend
from sglang_diffkv.evaluate.tasks.generation import Example

BOUNDED = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
"""On a CPU PyTorch keeps a kernel for every shape it has seen, 1024 of a kind, which looks like a leak for an hour."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(NANO), help="a model that knows the reference questions")
    parser.add_argument(
        "--url",
        type=server_url,
        help="soak this running server of the model, which nobody else may use: all its requests are aborted",
    )
    add_access_arguments(parser, admin=True)
    parser.add_argument("--minutes", type=float, default=20.0, help="of load, questions before and after not counted")
    parser.add_argument("--concurrency", type=int, default=48, help="requests at a time (default: %(default)s)")
    parser.add_argument("--max-total-tokens", type=int, default=8000, help="of the pool (default: %(default)s)")
    parser.add_argument("--max-queued", type=int, help="requests that may wait; more are refused (default: no limit)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--diffkv-config", default="{}", metavar="JSON", help='e.g. {"tiers": ["BF16"]}')
    parser.add_argument("--stock", action="store_true", help="SGLang without the plugin's backend, for comparison")
    parser.add_argument("--split", choices=splits.SPLITS, default="calib", help="of the reference questions")
    parser.add_argument("--references", type=int, default=40, help="reference questions (default: %(default)s)")
    parser.add_argument("--abort-share", type=float, default=0.2, help="of the requests that may be aborted")
    parser.add_argument("--longest-reply", type=int, default=768, help="tokens of a filler's reply at most")
    parser.add_argument("--rounds", type=int, default=4, help="parts of the load with a check after each")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds until a request counts as lost")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two samples")
    parser.add_argument(
        "--store",
        type=Path,
        metavar="FOLDER",
        help="an empty folder, in which the server stores prefixes; it is spoiled",
    )
    parser.add_argument("--check-integrity", action="store_true", help="check all structures at every step (slow)")
    parser.add_argument("--max-growth", type=float, default=4.0, help="MiB a minute that a process may grow by")
    parser.add_argument("--extra-server-args", type=shlex.split, default=[], help="one string")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="JSON file; the chart is put beside it")
    args = parser.parse_args(argv)
    if not args.url and (args.api_key or args.admin_api_key or args.cacert):
        parser.error("--api-key, --admin-api-key and --cacert go with --url; put a server's own in --extra-server-args")
    if args.store is not None and (args.url or args.stock):
        parser.error("--store goes with a server of this soak's own and the plugin: drop --url and --stock")
    args.access = access_of(parser, args) if args.url else OPEN
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif args.device == "cuda" and not has_gpu():
        parser.error("--device cuda: torch sees no GPU")
    return args


def make_server(args: argparse.Namespace) -> Server | RunningServer:
    """The server, not started, with a pool to fill, prompts in several chunks, and optimistic admission; or the one
    that runs at ``--url``."""
    if args.url:
        return RunningServer(args.url, args.access)
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
    if not has_gpu():
        env |= BOUNDED
    if args.check_integrity:
        env["SGLANG_DIFFKV_CHECK_INTEGRITY"] = "1"
    flags = ["--max-total-tokens", str(args.max_total_tokens), "--chunked-prefill-size", "512"]
    flags += ["--schedule-conservativeness", "0.1"]
    if args.max_queued is not None:
        flags += ["--max-queued-requests", str(args.max_queued)]
    if args.store is not None:
        extra = {"file_storage_path": str(args.store), "max_size": "2G", "prefetch_threshold": 32}
        flags += ["--enable-hierarchical-cache", "--hicache-ratio", "0.2", "--hicache-storage-backend", "file"]
        flags += ["--hicache-storage-prefetch-policy", "timeout"]
        flags += ["--hicache-storage-backend-extra-config", json.dumps(extra)]
    flags += args.extra_server_args
    log = args.output.with_suffix(".log")
    if args.stock:
        return Server(args.model, stock_backend(), flags, env=env, log_path=log)
    return Server(args.model, "diffkv", flags, diffkv_config=args.diffkv_config, env=env, log_path=log)


def make_load(args: argparse.Namespace, server: Server | RunningServer) -> tuple[Load, list[Example]]:
    """The load for a running server, and its reference questions."""
    tokenizer = load_tokenizer(args.model)
    everything = splits.load(args.split)
    items = choose(everything, args.references, args.seed)
    info = server.server_info()
    args.served_on = info["device"]
    pool = int(info["max_total_num_tokens"])
    models = server.get("/v1/models").json()["data"]
    limits = Limits.of(int(models[0]["max_model_len"]), pool, args.longest_reply)
    openings = [x for x in everything if x.level == "easy" and x.group is None and len(x.prompt) < 400]
    load = Load(
        args.seed,
        limits,
        [chat_ids(tokenizer, x.prompt) for x in items],
        [chat_ids(tokenizer, x.prompt) for x in openings],
        [token for x in everything[::4] for token in tokenizer.encode(x.prompt, add_special_tokens=False)],
        abort_share=args.abort_share,
    )
    return load, items


def shown_arguments(args: argparse.Namespace) -> dict[str, str]:
    """The arguments without keys and paths."""
    hidden = {"output", "store", "access", "api_key", "admin_api_key", "served_on"}
    shown = {**vars(args), "extra_server_args": without_keys(args.extra_server_args)}
    return {name: without_paths(str(value)) for name, value in shown.items() if name not in hidden}


def describe(
    args: argparse.Namespace, soak: Soak, argv: Sequence[str] | None, spoiled: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The result as JSON data, its verdict included. ``spoiled``: damages of the store, by their kind."""
    log = soak.server.log_text()
    figures = parse_log(log)
    seconds = 60 * args.minutes
    result = {
        "provenance": provenance("soak", argv),
        "arguments": shown_arguments(args),
        "device": args.served_on,
        "load": soak.tally.summary(),
        "requests_per_second": sum(map(sum, (x.values() for x in soak.tally.ends.values()))) / seconds,
        "output_tokens_per_second": soak.tally.sums["completion_tokens"] / seconds,
        "accuracy": accuracy(soak.questions),
        "rss_growth": growth([x for x in soak.samples if "answered" in x]),
        "log": {
            "wrong": wrong_lines(log),
            "running_max": figures.running_max,
            "running_while_queued": figures.running_saturated,
            "retracted": figures.retracted,
        },
        "rounds": soak.rounds,
        "store": soak.store,
        "spoiled": spoiled,
        "failures": soak.failures,
        "questions": [x.row() for x in soak.questions],
        "samples": soak.samples,
    }
    result["problems"] = problems(result, args.max_growth)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak, write JSON and chart, print the verdict; its exit status."""
    args = parse_args(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    plan = Plan(60 * args.minutes, args.rounds, args.concurrency, args.deadline, args.interval)
    with make_server(args) as server:
        try:
            load, items = make_load(args, server)
        except requests.RequestException as error:
            print(f"benchmarks.soak: no server to soak: {error}", file=sys.stderr)
            return 1
        soak = Soak(server, plan, load, items)
        spoiler = None if args.store is None else Spoiler(args.store, args.seed)
        with spoiler or nullcontext():
            asyncio.run(soak.run())
        if not server.alive():
            soak.failures.append("the server died")
    result = describe(args, soak, argv, None if spoiler is None else dict(spoiler.done))
    args.output.write_text(json.dumps(result) + "\n", encoding="utf-8")
    drawn(lambda: draw(result, args.output.with_suffix(".png")))
    shown = ("load", "accuracy", "rss_growth", "log", "requests_per_second", "output_tokens_per_second")
    print(json.dumps({name: result[name] for name in shown}, indent=1))
    for problem in result["problems"]:
        print(f"FAILED: {problem}")
    if not result["problems"] and server.log_path is not None:
        server.log_path.unlink(missing_ok=True)
    return int(bool(result["problems"]))


if __name__ == "__main__":
    sys.exit(main())
