"""How methods lose as a reply grows: divergence from the uncompressed cache by the position in a reply, at equal bytes.

Windows of a text are continued as the text goes on, each token forced, so that all configurations are compared on
the same reply (``evaluate/tasks/forced``). Methods that choose only at the end of a prompt keep all of a reply. They
drop so much more of the prompt that the bytes at a request's end are about those of the others, at any lengths.
``random`` and ``knorm`` are the controls: what is chosen by a draw, and by norms of keys. The last column compares
with the draw on the same replies. Example:

    python -m benchmarks.quality.long_replies --text wikitext2_valid.txt.xz --n 8 --output long_replies
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paths import NANO
from sglang_diffkv.evaluate import cli
from sglang_diffkv.evaluate.distribution import compare
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.store import Store

PROMPT, REPLY, PARTS = 1024, 2048, 4
REFERENCE = "stock"
CONTROL = "random"
KEPT = 0.75
"""Of prompt and reply together, by methods that drop tokens: in K8V4 about the default's bytes at a reply's end."""
BLOCK = 128
"""Tokens of a block of ``zipage``: small, so that blocks can make up a budget of any length."""
METHODS = ("K8V4", "diffkv", "leankv", "zipage", "xkv", "snapkv", "knorm", "random")


def configurations(prompt: int, reply: int) -> dict[str, dict[str, Any]]:
    """Each method's, for a prompt and a reply of so many tokens. Those that keep all of the reply take from the prompt
    what makes ``KEPT`` of both. ValueError if the reply alone is more, or a budget is less than two blocks."""
    kept = KEPT * (prompt + reply)
    share, blocks = round((kept - reply) / max(prompt, 1), 3), round(kept / BLOCK)
    if share <= 0 or blocks < 2:
        raise ValueError(
            f"{KEPT:.0%} of {prompt + reply:,} tokens have to be more than the reply, and two blocks of {BLOCK}: "
            "give --prefix-tokens more, or --window-tokens less"
        )

    def dropping(name: str, **options: float) -> dict[str, Any]:
        return {"tiers": ["K8V4"], "policy": {"name": name, **options}}

    found: dict[str, dict[str, Any]] = {
        "K8V4": {"tiers": ["K8V4"]},
        "diffkv": {},
        "leankv": {"rotate": "both", "policy": {"name": "leankv", "mass_high": 0.1}},
        "zipage": dropping("zipage", max_blocks=blocks, block=BLOCK),
        "xkv": dropping("xkv", keep=share),
    }
    return found | {name: dropping(name, fraction=share) for name in ("snapkv", "knorm", "random")}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(NANO), help="default: the nano model of the repository")
    parser.add_argument("--text", required=True, help="plain text, perhaps .xz or .gz")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS], help="default: all")
    parser.add_argument("--output", type=Path, required=True, help="folder for answers and results; long_replies.md")
    cli.add_question_arguments(parser)
    cli.add_window_arguments(parser)
    parser.set_defaults(n=8, prefix_tokens=PROMPT, window_tokens=REPLY)
    args = parser.parse_args(argv)
    if args.window_tokens <= PARTS or not args.top_logprobs:
        parser.error(f"--window-tokens must be above {PARTS}, and --top-logprobs above 0")
    try:
        args.configurations = configurations(args.prefix_tokens, args.window_tokens)
    except ValueError as error:
        parser.error(str(error))
    return args


def by_part(first: Mapping[str, str], other: Mapping[str, str]) -> np.ndarray:
    """[replies, PARTS]: mean divergence in nats of each part of each reply; arguments are packed distributions by
    question."""
    divergences = [compare(first[name], other[name]).divergence for name in sorted(first.keys() & other.keys())]
    return np.array([[part.mean() for part in np.array_split(x, PARTS)] for x in divergences])


def errors(found: np.ndarray) -> np.ndarray:
    """Standard errors of the means over the first axis."""
    return found.std(0, ddof=1) / len(found) ** 0.5 if len(found) > 1 else np.full(found.shape[1:], np.nan)


def to_control(found: np.ndarray, control: np.ndarray) -> str:
    """Difference to the control over whole replies, paired, and of how many replies the divergence is lower."""
    difference = found.mean(1) - control.mean(1)
    return f"{difference.mean():+.1f} ± {errors(difference):.1f}; {(difference < 0).sum()} of {len(difference)}"


def table(tops: Mapping[str, Mapping[str, str]], ratios: Mapping[str, float], reply: int) -> str:
    """A row for each method: bytes, and divergence by part of the reply with its standard error, in millinats. Where
    the control was asked, the difference to it too."""
    edges = [reply * part // PARTS for part in range(PARTS + 1)]
    header = ["method", "bytes of bf16", *(f"tokens {low + 1:,} to {high:,}" for low, high in pairwise(edges))]
    parts = {name: 1e3 * by_part(tops[REFERENCE], mine) for name, mine in tops.items() if name != REFERENCE}
    if CONTROL in parts:
        header.append(f"to {CONTROL}, all tokens; lower in")
    rows = []
    for name, found in parts.items():
        cells = [f"{mean:.1f} ± {error:.1f}" for mean, error in zip(found.mean(0), errors(found), strict=True)]
        if CONTROL in parts:
            cells.append("" if name == CONTROL else to_control(found, parts[CONTROL]))
        rows.append([name, f"{ratios[name]:.3f}", *cells])
    return markdown(header, rows)


def collected(folder: Path) -> tuple[dict[str, dict[str, str]], dict[str, float]]:
    """Packed distributions by configuration and question, and each configuration's bytes over bf16's."""
    tops: dict[str, dict[str, str]] = {}
    with Store(folder) as store:
        for (configuration, _), answers in store.answers.items():
            tops.setdefault(configuration, {}).update(
                {x.id: x.outcome.tops for x in answers.values() if x.outcome.tops}
            )
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))["results"]
    return tops, {x["configuration"]: x["cache"]["ratio_pages"] for x in results if x["cache"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Ask all configurations and print the table; the exit status of the evaluation."""
    args = parse_args(argv)
    args.url = args.name = None
    args.config = [REFERENCE, *(f"{name}={json.dumps(args.configurations[name])}" for name in args.methods)]
    args.task = [f"continuation={args.text}"]
    if status := cli.run(args):
        return status
    tops, ratios = collected(args.output)
    text = table(tops, ratios, args.window_tokens)
    (args.output / "long_replies.md").write_text(text + "\n", encoding="utf-8")
    print(f"\nKL to {REFERENCE}, 0.001 nats a token, n = {len(tops[REFERENCE])}\n\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
