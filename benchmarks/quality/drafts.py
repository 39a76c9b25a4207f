"""Drafting servers against stock, from the plainest way to run them to SGLang's own: eagerly, in CUDA graphs, and with
overlap scheduling beside. Each stage compares greedy tokens as ``identity.py`` does and ends with the tokens accepted a
verification, of DiffKV and of stock with the same drafts. Where a stage fails the later ones are run all the same.

    python -m benchmarks.quality.drafts
    python -m benchmarks.quality.drafts --stages eager graphs --drafts STANDALONE --n 12
    python -m benchmarks.quality.drafts --steps 5 --branches 4
    python -m benchmarks.quality.drafts --model LLAMA --drafts EAGLE3 --draft-model HEAD
"""

from __future__ import annotations

import argparse
import shlex
import time
import traceback
from collections.abc import Sequence

from benchmarks.paths import NANO
from benchmarks.quality import identity
from benchmarks.quality.random_drafts import model_drafts
from sglang_diffkv.srt.models.speculation import CHAIN, OF_A_MODEL

STAGES = {
    "eager": "--disable-cuda-graph --disable-overlap-schedule",
    "graphs": "--disable-overlap-schedule",
    "overlap": "",
}
"""Arguments of servers."""
OFTEN = "--decode-log-interval 4"
"""SGLang counts what was accepted when it logs."""


def draft_args(algorithm: str, draft_model: str, steps: int, branches: int = 1) -> str:
    """Arguments of speculative decoding with chains of ``steps`` drafts, or with trees in which so many steps go on
    with ``branches`` drafts each; half of these are verified."""
    drafts = steps + 1 if branches == 1 else steps * branches // 2 + 1
    if algorithm == "NGRAM":
        breadth = CHAIN if branches == 1 else f"--speculative-ngram-max-bfs-breadth {branches}"
        return f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {drafts} {breadth}"
    return shlex.join(model_drafts(algorithm, draft_model, steps, branches=branches, drafts=drafts))


def main(argv: Sequence[str] | None = None) -> int:
    """Print each stage's table; the number of stages that failed or found more than rounding ties."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--drafts", nargs="+", choices=["NGRAM", *OF_A_MODEL], default=["STANDALONE", "NGRAM"])
    parser.add_argument("--draft-model", default=str(NANO), help="default: nano, which drafts for itself")
    parser.add_argument("--model", default=str(NANO), help="default: the nano model of the repository")
    parser.add_argument("--steps", type=int, default=3, help="drafts of a chain (default: %(default)s)")
    parser.add_argument("--branches", type=int, default=1, help="drafts behind one in trees (default: 1, chains)")
    parser.add_argument("--n", type=int, default=24, help="number of questions (default: %(default)s)")
    parser.add_argument("--diffkv-config", default=identity.LOSSLESS, help="default: %(default)s")
    args = parser.parse_args(argv)
    failed = 0
    for stage in args.stages:
        for algorithm in args.drafts:
            began = time.monotonic()
            print(f"\n## {algorithm}, {stage}\n", flush=True)
            given = ["--n", str(args.n), "--model", args.model, "--batch-sizes", "1", "8", "--max-new-tokens", "96"]
            given += ["--diffkv-config", args.diffkv_config, f"--server-args={STAGES[stage]} {OFTEN}"]
            given += [f"--draft-args={draft_args(algorithm, args.draft_model, args.steps, args.branches)}"]
            try:
                failed += identity.main(given)
            except Exception:
                traceback.print_exc()
                failed += 1
            print(f"\n{time.monotonic() - began:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
