"""SGLang's own server tests as a witness: what passes on stock SGLang passes with diffkv, or is named.

    python -m tests.sglang_suite                       # the kits of the installed SGLang (sglang.test.kits)
    python -m tests.sglang_suite --checkout SGLANG     # and test files of a checkout of the same version

Each variant (stock; the lossless tier; DiffKV's tiers with compressed and with exact prefixes) answers the same tests
on servers of its own. The table lists every test whose outcome differs from stock's. Exit status 1 if a test that
passes on stock fails with the lossless tier; what DiffKV's lossy tiers change is for the reader to judge.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paths import NANO, REPOSITORY
from benchmarks.provenance import provenance
from sglang_diffkv.evaluate.server import CPU_ARGS, CPU_ENV, OFFLINE_ENV, Server, has_gpu, stock_backend
from tests.sglang_suite.hosts import KITS

CONFIGS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "lossless": {"tiers": ["BF16"]},
    "compressed": {},
    "exact": {"prefix_fidelity": "exact"},
}
LEAK_CHECK = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
SERVERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "api": ([], {}),
    "cache": (["--load-format", "dummy", "--chunked-prefill-size", "512"], {}),
    "waiting": (["--max-running-requests", "1"], {"SGLANG_REQ_WAITING_TIMEOUT": "0.001"}),
    "running": ([], {"SGLANG_REQ_RUNNING_TIMEOUT": "4"}),
}
"""Group of kits -> arguments and environment of its server."""

REGISTERED = (
    "openai_server/basic/test_openai_server.py",
    "openai_server/features/test_json_mode.py",
    "openai_server/features/test_openai_server_ebnf.py",
    "openai_server/features/test_openai_server_hidden_states.py",
    "openai_server/validation/test_large_max_new_tokens.py",
    "openai_server/validation/test_matched_stop.py",
    "openai_server/validation/test_openai_server_ignore_eos.py",
    "openai_server/validation/test_request_length_validation.py",
    "core/test_srt_endpoint.py",
    "radix_cache/test_radix_attention.py",
    "scheduler/test_abort.py",
    "scheduler/test_chunked_prefill.py",
    "scheduler/test_no_overlap_scheduler.py",
    "scheduler/test_priority_scheduling.py",
    "scheduler/test_retract_decode.py",
    "sessions/test_session_control.py",
)
"""Test files of a checkout, below ``test/registered``; what the version lacks is left out."""

Outcomes = dict[str, str]
"""Name of a test -> passed, failed or skipped."""


def wide_model(folder: Path) -> Path:
    """The nano model's shape with a vocabulary that has the token ids of SGLang's kits, to be served with dummy
    weights."""
    folder.mkdir()
    for path in NANO.iterdir():
        if path.suffix == ".json" and path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((NANO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 32064}))
    return folder


def run_pytest(target: Path, env: Mapping[str, str], *more: str, timeout: float = 1800.0) -> Outcomes:
    """Outcomes of the tests of a file, run with the environment's pytest in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-pno:cacheprovider", "-pno:xdist", f"--rootdir={REPOSITORY}", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, *more, str(target)]
        try:
            run = subprocess.run(
                command, cwd=REPOSITORY, env={**os.environ, **env}, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return {f"{target.stem}: all": "failed"}
        if not report.exists():
            print(run.stdout[-2000:], run.stderr[-2000:], file=sys.stderr)
            return {f"{target.stem}: all": "failed"}
        return read_report(report)


def read_report(path: Path) -> Outcomes:
    """Outcomes in pytest's JUnit report; a failed set-up counts as a failure of the test."""
    outcomes: Outcomes = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{(case.get('classname') or '').rpartition('.')[2]}.{case.get('name')}"
        bad = case.find("failure") is not None or case.find("error") is not None
        outcomes[name] = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
    return outcomes


def run_kits(variant: str, groups: Sequence[str], model: Path, wide: Path) -> Outcomes:
    """Outcomes of SGLang's kits on servers of a variant."""
    outcomes: Outcomes = {}
    config = CONFIGS[variant]
    for group in groups:
        args, env = SERVERS[group]
        served = wide if group == "cache" else model
        backend = stock_backend() if config is None else "diffkv"
        with Server(served, backend, args, diffkv_config=config, env={**LEAK_CHECK, **env}, timeout=600.0) as server:
            here = {
                "SUITE_URL": server.url,
                "SUITE_PID": str(server.pid),
                "SUITE_MODEL": str(served),
                "SUITE_GROUP": group,
            }
            outcomes |= without_skipped(run_pytest(Path(__file__).with_name("hosts.py"), here))
    return outcomes


def without_skipped(outcomes: Outcomes) -> Outcomes:
    """The tests that ran."""
    return {name: outcome for name, outcome in outcomes.items() if outcome != "skipped"}


def run_checkout(variant: str, checkout: Path, model: Path) -> Outcomes:
    """Outcomes of a checkout's test files, whose servers are launched as a variant."""
    config = CONFIGS[variant]
    args = [*(() if has_gpu() else CPU_ARGS), "--attention-backend", stock_backend() if config is None else "diffkv"]
    if config is not None:
        args += ["--diffkv-config", json.dumps(config)]
    env = {
        # SGLang's tests start servers by the commands sglang and python3.
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "SUITE_MODEL": str(model),
        "SUITE_ARGS": json.dumps(args),
        "SUITE_ENV": json.dumps(LEAK_CHECK),
        **({} if has_gpu() else CPU_ENV),
        **OFFLINE_ENV,
    }
    outcomes: Outcomes = {}
    for name in REGISTERED:
        path = checkout / "test" / "registered" / name
        if path.exists():
            outcomes |= without_skipped(run_pytest(path, env, "-p", "tests.sglang_suite.launches"))
    return outcomes


def table(found: Mapping[str, Outcomes]) -> str:
    """Counts by variant, and the tests that differ from stock's, as Markdown."""
    variants = list(found)
    names = sorted(set().union(*found.values()))
    lines = [f"| | {' | '.join(variants)} |", "|---" * (len(variants) + 1) + "|"]
    for outcome in ("passed", "failed"):
        lines.append(f"| {outcome} | {' | '.join(str(list(x.values()).count(outcome)) for x in found.values())} |")
    for name in names:
        outcomes = [x.get(name, "not run") for x in found.values()]
        if len(set(outcomes)) > 1:
            lines.append(f"| `{name}` | {' | '.join(outcomes)} |")
    if "stock" in found and (bad := sorted(k for k, v in found["stock"].items() if v == "failed")):
        lines += ["", f"Failed on stock: {', '.join(f'`{x}`' for x in bad)}"]
    return "\n".join(lines)


def lost(found: Mapping[str, Outcomes], variant: str) -> list[str]:
    """Tests that pass on stock and do not with the variant."""
    return [k for k, v in found.get("stock", {}).items() if v == "passed" and found[variant].get(k) != "passed"]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=NANO, help="served in place of the models that tests name")
    parser.add_argument("--variants", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--groups", nargs="*", choices=KITS, default=list(KITS), help="of the installed SGLang's kits")
    parser.add_argument("--checkout", type=Path, help="of SGLang, of the installed version: its test files too")
    parser.add_argument("--output", type=Path, help="write outcomes to this JSON file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite on every variant; print the table."""
    args = parse_args(argv)
    found: dict[str, Outcomes] = {}
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        wide = wide_model(Path(folder) / "wide")
        for variant in args.variants:
            found[variant] = run_kits(variant, args.groups, args.model.resolve(), wide)
            if args.checkout is not None:
                found[variant] |= run_checkout(variant, args.checkout.resolve(), args.model.resolve())
            print(f"{variant}: {list(found[variant].values()).count('passed')} passed", flush=True)
            if args.output is not None:
                data = {"provenance": provenance("sglang_suite", argv, package="tests"), "outcomes": found}
                args.output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(table(found))
    return int(bool(lost(found, "lossless"))) if {"stock", "lossless"} <= set(found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
