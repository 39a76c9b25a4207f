"""The list of SGLang versions is one: ``compat.TESTED_VERSIONS``. What else names versions says the same."""

from __future__ import annotations

import re

import tomllib
from packaging.requirements import Requirement

from benchmarks.paths import REPOSITORY
from sglang_diffkv import pins
from sglang_diffkv.srt.versions.compat import GPU_VERSIONS, TESTED_VERSIONS

RELEASED = [f"0.5.{patch}" for patch in range(17, 24)]
NEIGHBOURS = ["0.5.16", "0.5.18.post1", "0.5.19.post1", "0.5.20.post1", "0.5.23.post1", "0.5.24"]
"""Versions outside of the range, and releases that would fix one after it."""


def _read(path: str) -> str:
    return (REPOSITORY / path).read_text(encoding="utf-8")


def _in_the_environment() -> str:
    found = re.search(r"^sglang==(\S+)", _read("requirements/cpu.txt"), re.MULTILINE)
    assert found
    return found[1]


def test_pip_resolves_the_tested_versions_and_no_other():
    requirements = map(Requirement, tomllib.loads(_read("pyproject.toml"))["project"]["dependencies"])
    (sglang,) = (x for x in requirements if x.name == "sglang")
    assert tuple(x for x in RELEASED if x in sglang.specifier) == TESTED_VERSIONS
    assert [x for x in NEIGHBOURS if x in sglang.specifier] == []


def test_make_tests_all_of_them():
    found = re.search(r"^OTHER_SGLANG := (.*)$", _read("Makefile"), re.MULTILINE)
    assert found
    assert sorted([*found[1].split(), _in_the_environment()]) == sorted(TESTED_VERSIONS)


def test_those_of_a_gpu_are_among_them():
    assert set(GPU_VERSIONS) <= set(TESTED_VERSIONS)


def test_the_stacks_below_are_those_of_the_docs():
    """``docs/install.md`` begins with what ``pins.py`` has."""
    assert tuple(pins.ON_CPU) == TESTED_VERSIONS and tuple(pins.ON_GPU) == GPU_VERSIONS
    cells = ("SGLang", "on", "torch", "sglang-kernel", "FlashInfer", "triton")
    wanted = [cells]
    for version in TESTED_VERSIONS:
        for where, stacks in (("GPU", pins.ON_GPU), ("CPU", pins.ON_CPU)):
            if stack := stacks.get(version):
                below = (stack.torch, stack.sglang_kernel, stack.flashinfer, stack.triton)
                wanted.append((version, where, *(x or "none" for x in below)))
    lines = _read("docs/install.md").splitlines()
    rows = [tuple(x.strip() for x in line.strip("|").split("|")) for line in lines if line.startswith("|")]
    table = [row for row in rows[: len(wanted) + 1] if set(row[0]) != {"-"}]
    assert table == wanted
    assert lines.index("| " + " | ".join(cells) + " |") < 8, "the page begins with it"
    pinned = dict(re.findall(r"^(torch|triton)==(\S+)", _read("requirements/cpu.txt"), re.MULTILINE))
    assert pinned == {"torch": pins.ON_CPU["0.5.21"].torch, "triton": pins.ON_CPU["0.5.21"].triton}


def test_the_pages_that_list_versions_name_each():
    for page in ("docs/architecture.md", "docs/flags.md"):
        text = _read(page)
        assert [x for x in TESTED_VERSIONS if x not in text] == [], page
