"""The list of SGLang versions is one: ``releases.RELEASES``. What else names versions says the same."""

from __future__ import annotations

import re
import subprocess

from packaging.requirements import Requirement

from benchmarks.paths import REPOSITORY
from sglang_diffkv.releases import GPU_VERSIONS, RELEASES, TARGETS, TESTED_VERSIONS, requirement

FIRST, LAST = (int(name.split(".")[2]) for name in (TESTED_VERSIONS[0], TESTED_VERSIONS[-1]))
RELEASED = [f"0.5.{patch}" for patch in range(FIRST, LAST + 1)]
NEIGHBOURS = [f"0.5.{FIRST - 1}", f"0.5.{LAST}.post1", f"0.5.{LAST + 1}"]
NEIGHBOURS += [f"{name}.post1" for name in RELEASED if name not in TESTED_VERSIONS]
"""Versions outside of the range, and releases that would fix one after it."""


def _read(path: str) -> str:
    return (REPOSITORY / path).read_text(encoding="utf-8")


def _in_the_environment() -> str:
    found = re.search(r"^sglang==(\S+)", _read("requirements/cpu.txt"), re.MULTILINE)
    assert found
    return found[1]


def test_pip_resolves_the_tested_versions_and_no_other():
    sglang = Requirement(requirement())
    assert tuple(x for x in RELEASED if x in sglang.specifier) == TESTED_VERSIONS
    assert [x for x in NEIGHBOURS if x in sglang.specifier] == []


def test_make_tests_all_of_them():
    command = ["make", "--dry-run", "--always-make", "test-versions"]
    said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"for version in ([\d. ]+); do", said)
    assert sorted([*found.split(), _in_the_environment()]) == sorted(TESTED_VERSIONS)


def test_a_release_says_only_what_differs():
    """A row names hooks that there are, and no target that is the usual one."""
    for release in RELEASES.values():
        assert release.targets.keys() <= TARGETS.keys()
        assert [name for name, target in release.targets.items() if target == TARGETS[name]] == []


def test_those_of_a_gpu_are_among_them():
    assert set(GPU_VERSIONS) <= set(TESTED_VERSIONS)


def test_the_stacks_below_are_those_of_the_docs():
    """``docs/install.md`` begins with what ``releases.py`` has of GPUs. A CPU's are the pins of ``make venv``."""
    cells = ("SGLang", "torch", "sglang-kernel", "FlashInfer", "triton")
    wanted = [cells]
    for version, release in RELEASES.items():
        if stack := release.on_gpu:
            below = (stack.torch, stack.sglang_kernel, stack.flashinfer, stack.triton)
            wanted.append((version, *(x or "none" for x in below)))
    lines = _read("docs/install.md").splitlines()
    rows = [tuple(x.strip() for x in line.strip("|").split("|")) for line in lines if line.startswith("|")]
    table = [row for row in rows[: len(wanted) + 1] if set(row[0]) != {"-"}]
    assert table == wanted
    assert lines.index("| " + " | ".join(cells) + " |") < 8, "the page begins with it"
    pinned = dict(re.findall(r"^(torch|triton)==(\S+)", _read("requirements/cpu.txt"), re.MULTILINE))
    below = RELEASES[_in_the_environment()].on_cpu
    assert below and pinned == {"torch": below.torch, "triton": below.triton}
