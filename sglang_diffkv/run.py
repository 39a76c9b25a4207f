"""Run a program of SGLang's that loads no plugins, with this one loaded: ``--attention-backend diffkv`` is then known.

    python -m sglang_diffkv.run sglang.benchmark.one_batch --model-path DIR --attention-backend diffkv --batch-size 8

``sglang.launch_server`` and ``sglang.Engine`` load plugins by themselves. Programs that start processes for several
ranks by themselves are refused with more than one: those processes would have no plugin.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from sglang_diffkv.extra import INSTALL_ALL, SERVED, require

NAME = "sglang_diffkv.run"
ONE_RANK = ("one_batch", "bench_one_batch")
"""Programs that start their ranks without SGLang's scheduler, which would load plugins in each."""
RANKS = ("--tp", "--tp-size", "--tensor-parallel-size")


def main(argv: Sequence[str] | None = None) -> None:
    """Load SGLang's plugins and run the module that the first argument names, with the others as its own."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog=f"python -m {NAME}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("module", help="the program, as sglang.benchmark.one_batch or sglang.bench_one_batch")
    module = parser.parse_args(given[:1]).module
    if module.partition(".")[0] != "sglang" or not _found(module):
        parser.exit(2, f"{NAME}: SGLang has no module {module[:80]!r}\n")
    if module.rpartition(".")[2] in ONE_RANK and _ranks(given[1:]) != "1":
        parser.exit(2, f"{NAME}: {module} runs on one rank here: drop --tp-size, or measure a server\n")
    from sglang_diffkv.srt.plugin import load_plugins

    load_plugins()
    sys.argv = given
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _ranks(args: Sequence[str]) -> str:
    """What the arguments say of ranks, 1 if nothing."""
    found = "1"
    for arg, after in zip(args, [*args[1:], ""], strict=True):
        name, equals, value = arg.partition("=")
        if name in RANKS:
            found = value if equals else after
    return found


if __name__ == "__main__":
    require(*SERVED, "sglang", install=INSTALL_ALL)
    main()
