"""Whether a server would take a model with each of several configurations: the doctor, asked in one process.

python -m benchmarks.reproduce.served MODEL --server-args '...' CONFIG...

prints a JSON object: each configuration to why it would be refused, "" where it would not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import warnings
from collections.abc import Sequence

from benchmarks.paths import REPOSITORY
from sglang_diffkv.evaluate.server import has_gpu
from sglang_diffkv.findings import Findings

KV_GIB = 1.0


def refusals(model: str, server_args: Sequence[str], configs: Sequence[str]) -> dict[str, str]:
    """``main`` in a process of its own, so that SGLang is not imported here. Raises RuntimeError with what it said."""
    module = "benchmarks.reproduce.served"
    command = [sys.executable, "-m", module, model, f"--server-args={shlex.join(server_args)}", *configs]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError(f"the model could not be looked at:\n{found.stderr[-2000:]}")
    return dict(json.loads(found.stdout.splitlines()[-1]))


def main(argv: Sequence[str] | None = None) -> int:
    """Ask the doctor about each configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--server-args", type=shlex.split, default=[])
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    gpu, reasons = has_gpu(), {}
    with contextlib.redirect_stdout(sys.stderr):
        from sglang_diffkv.srt import doctor

        for config in args.configs:
            findings = Findings()
            doctor.check(findings, args.model, config, KV_GIB, args.server_args, gpu=gpu, found=True)
            reasons[config] = "; ".join(findings.refusals)
    print(json.dumps(reasons))
    return 0


if __name__ == "__main__":
    sys.exit(main())
