"""Say what a server would run on, and what it would refuse, before anything is loaded.

Without a model it checks the installation; with one also whether the model can be served, with which thresholds and
tiers, and how many tokens fit. Options that it does not know are a server's, and are checked too. Example:

    python -m sglang_diffkv.doctor --model-path DIR --kv-gib 20 --tp-size 2

The exit status is 0 if nothing would be refused, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import sglang_diffkv
from sglang_diffkv import releases
from sglang_diffkv.extra import SGLANG
from sglang_diffkv.findings import Findings

GROUP, NAME = "sglang.srt.plugins", "diffkv"
"""The plugin's entry point."""
GIB = 1 << 30
LEAST_GIB, MOST_GIB = 1e-3, 1e6


def _gib(text: str) -> float:
    """Of memory. It needs no package, as the doctor may have none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not LEAST_GIB <= value <= MOST_GIB:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from {LEAST_GIB:g} to {MOST_GIB:g}")
    return value


def parse_args(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and what of it is for a server."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_diffkv.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model-path", "--model", metavar="DIR", help="the model's folder")
    parser.add_argument("--diffkv-config", metavar="CONFIG", help="as for a server")
    parser.add_argument(
        "--kv-gib", type=_gib, default=1.0, metavar="N", help="of a GPU, for the cache (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_known_args(argv)


def version_of(distribution: str) -> str | None:
    """The installed version, None if there is none in this Python."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Look, and print what was found."""
    args, server_args = parse_args(argv)
    findings = Findings()
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):  # what SGLang and its packages print is not the report
        gpu = _look_at_machine(findings)
        if not any(x.refused for x in findings.items):
            found = _look_at_plugin(findings)
            from sglang_diffkv.srt import doctor

            what = (args.model_path, args.diffkv_config, args.kv_gib, server_args)
            doctor.check(findings, *what, gpu=gpu, found=found)
    print(json.dumps(findings.report(), indent=2) if args.json else findings.describe())
    return 1 if findings.refusals else 0


def _look_at_machine(findings: Findings) -> bool:
    """Versions and the GPU; whether there is one that torch can use."""
    findings.section = "Versions"
    here = Path(sglang_diffkv.__file__).parent
    version, python = sglang_diffkv.__version__, platform.python_version()
    findings.add("sglang_diffkv", f"{version} ({here})", version, key="versions.sglang_diffkv")
    findings.add("Python", f"{python} ({sys.executable})", python, key="versions.python")
    stack: dict[str, str | None] = {}
    for name, distributions in releases.DISTRIBUTIONS.items():
        found = stack[name] = next(filter(None, map(version_of, distributions)), None)
        findings.add(releases.TITLES[name], found or "not installed", found, key=f"versions.{name}")
    sglang = version_of("sglang")
    findings.note("versions.sglang", sglang)
    if sglang is None:
        findings.refuse(
            "SGLang",
            f"SGLang is not installed in this Python. Install it, {sys.executable} -m pip install {SGLANG}, or run "
            "the Python that starts the server",
        )
    else:
        findings.add("SGLang", sglang, sglang)
    findings.section = "GPU"
    try:
        import torch
    except ImportError as error:
        findings.refuse("torch", f"torch cannot be imported: {error}. Install SGLang's requirements")
        return False
    gpu = torch.cuda.is_available()
    differs = releases.untested(sglang, stack, gpu=gpu)
    for name, text in differs.items():
        findings.warn(releases.TITLES[name], f"{text} (docs/install.md)")
    tested = releases.tested_stack(sglang, gpu=gpu) is not None and not differs
    said = "these packages were tested together" if tested else "NOT one that was tested"
    findings.add("stack", f"{said} with SGLang {sglang} on a {'GPU' if gpu else 'CPU'}", tested)
    findings.note("gpus", [])
    if not gpu:
        text = "none that torch can use; what follows is for a server on the CPU (--device cpu)"
        findings.add("GPU", f"{text}; its environment needs SGLANG_USE_CPU_ENGINE=1")
        return False
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        text = f"{device.name}, capability {device.major}.{device.minor}, {device.total_memory / GIB:.0f} GiB"
        findings.add(f"cuda:{index}", text, device.total_memory)
        about = {"name": device.name, "capability": [device.major, device.minor], "bytes": device.total_memory}
        findings.facts["gpus"].append(about)
    return True


def _look_at_plugin(findings: Findings) -> bool:
    """Whether SGLang finds it."""
    findings.section = "Plugin"
    points = [x for x in importlib.metadata.entry_points(group=GROUP) if x.name == NAME]
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if not points:
        findings.refuse(
            "entry point",
            f"SGLang does not know of the plugin: in this Python no package has the entry point {NAME!r} of the group "
            f"{GROUP}. Install it there, in a checkout: {sys.executable} -m pip install .",
        )
        return False
    if allowed and NAME not in [x.strip() for x in allowed.split(",")]:
        findings.refuse("entry point", f"SGLANG_PLUGINS={allowed} leaves the plugin out: add {NAME}, or unset it")
        return False
    owner = points[0].dist
    findings.add("entry point", f"found, of {owner.name} {owner.version}" if owner else "found")
    return True


if __name__ == "__main__":
    sys.exit(main())
