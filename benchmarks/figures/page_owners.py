"""Who holds the pages over time: free, cached in the tree alone, shared by the tree and requests, private to requests.

Chats of several turns run while the server is asked for its state; with several ``--config`` one panel each. Example:

    python -m benchmarks.figures.page_owners --config 'compressed={}' --config 'exact={"prefix_fidelity": "exact"}' \\
        --pool 8000 --chats 24 --output benchmarks/results/page_owners.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks import splits
from benchmarks.paths import NANO
from benchmarks.provenance import headline, provenance
from benchmarks.quality.sharing import chats
from sglang_diffkv.drawing import drawn
from sglang_diffkv.evaluate.configuration import Configuration, parse_configuration
from sglang_diffkv.evaluate.prompts import load_tokenizer

OWNERS = ("private", "shared", "cached", "free")
COLOURS = ("#0072B2", "#009E73", "#E69F00", "#DDDDDD")


def record(configuration: Configuration, args: argparse.Namespace) -> dict[str, Any]:
    """The pages of each owner every ``args.interval`` seconds while the chats run."""
    server = configuration.server(args.model, ["--max-total-tokens", str(args.pool)])
    tokenizer = load_tokenizer(args.model)
    samples: list[dict[str, float]] = []
    stats: dict[str, Any] | None = None
    with server, ThreadPoolExecutor(args.concurrency) as threads:
        calls = chats(server.url, tokenizer, args.split, args.chats, args.turns, args.longest)
        start = time.monotonic()
        pending = {threads.submit(call) for call in calls}
        futures = list(pending)
        while pending:
            _, pending = wait(pending, timeout=args.interval)
            stats = server.stats()
            assert stats is not None, f"{configuration.name}: the server does not run on diffkv"
            samples.append({"time": time.monotonic() - start, "tokens": stats["tokens"], **stats["owners"]})
        assert stats is not None
        answers = [x for future in futures for x in future.result()]
        return {
            "name": configuration.name,
            "samples": samples,
            "right": sum(x.right for x in answers),
            "n": len(answers),
            "cached_share": sum(x.cached_tokens for x in answers) / sum(x.prompt_tokens for x in answers),
            "prompts": stats.get("prompts"),
        }


def draw(result: dict[str, Any], path: Path) -> None:
    """Stacked areas over time, one panel a configuration, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = result["runs"]
    figure, axes = pyplot.subplots(len(runs), 1, figsize=(9, 3.2 * len(runs)), squeeze=False, layout="constrained")
    for axis, run in zip(axes[:, 0], runs, strict=True):
        samples = run["samples"]
        seconds = [x["time"] for x in samples]
        pages = [[x[name] for x in samples] for name in OWNERS]
        axis.stackplot(seconds, pages, labels=OWNERS, colors=COLOURS, step="post")
        axis.set(title=run["name"], xlabel="seconds", ylabel="pages", xlim=(seconds[0], seconds[-1]))
        axis.margins(y=0)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(OWNERS))
    figure.suptitle(headline(result["provenance"]), fontsize=7)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Record every configuration, write JSON and PNG."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", required=True, metavar="NAME=JSON")
    parser.add_argument("--model", default=str(NANO))
    parser.add_argument("--split", choices=splits.SPLITS, default="calib")
    parser.add_argument("--pool", type=int, default=8000, help="tokens of the pool at the high tier")
    parser.add_argument("--chats", type=int, default=24)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--longest", type=int, default=400, help="tokens of a reply")
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--interval", type=float, default=0.3, help="seconds between two looks")
    parser.add_argument("--output", type=Path, required=True, help="JSON file; the chart is put beside it")
    args = parser.parse_args(argv)
    runs = [record(parse_configuration(text), args) for text in args.config]
    result = {"provenance": provenance("page_owners", argv), "runs": runs}
    args.output.write_text(json.dumps(result))
    drawn(lambda: draw(result, args.output.with_suffix(".png")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
