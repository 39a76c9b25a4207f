"""Where a result comes from: command, versions and hardware, without any absolute path."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from benchmarks.paths import REPOSITORY
from sglang_diffkv.access import without_keys
from sglang_diffkv.evaluate import report

PACKAGES = ("flashinfer-python", "transformers")


def without_paths(text: str) -> str:
    """The text with every absolute path cut down to its last part."""
    return re.sub(r"(?<![\w:/.~-])/(?:[^\s/'\",:]+/)+(?=[^\s/'\",:])", "", text)


def command(module: str, argv: Sequence[str] | None = None, package: str = "benchmarks") -> str:
    """The command line as a user would type it in the repository, without keys."""
    arguments = sys.argv[1:] if argv is None else argv
    return shlex.join(["python", "-m", f"{package}.{module}", *(without_paths(x) for x in without_keys(arguments))])


def commit() -> str | None:
    """The repository's commit, marked if files differ from it; None outside of a clone."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=REPOSITORY, capture_output=True, text=True
        )
    except OSError:
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def provenance(module: str, argv: Sequence[str] | None = None, package: str = "benchmarks") -> dict[str, Any]:
    """Command, commit, versions and hardware of this run."""
    import torch

    found = report.environment()
    for name in PACKAGES:
        try:
            found["versions"][name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found["versions"][name] = None
    found["versions"]["cuda"] = torch.version.cuda
    return {**found, "command": command(module, argv, package), "commit": commit()}


def headline(found: dict[str, Any]) -> str:
    """Hardware and versions as one line."""
    gpus = found["gpus"]
    hardware = f"{len(gpus)} x {gpus[0]}" if gpus else f"{found['cpu']}, {found['cores']} cores"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    return f"{hardware}; {versions}" + (f"; commit {found['commit']}" if found.get("commit") else "")
