"""What a wheel has, that it serves, and that the folder ``kernels`` hides nobody's package of that name."""

from __future__ import annotations

import configparser
import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks.paths import NANO, REPOSITORY
from sglang_diffkv import __version__

FIND = "import importlib.util as u; found = u.find_spec('kernels'); print(found and found.origin)"


def test_another_package_kernels_wins_in_the_repository(tmp_path: Path) -> None:
    """Transformers imports Hugging Face's package of that name, also from a program started in the repository."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    program = f"import sys; sys.path.append({str(tmp_path)!r}); {FIND}"
    found = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(tmp_path / "kernels" / "__init__.py")


BUILD = "from setuptools.build_meta import {0}; import sys; print({0}(sys.argv[1]))"


def _build(what: str, source: Path, folder: Path) -> Path:
    """An sdist or a wheel of a source tree, by the project's build backend."""
    command = [sys.executable, "-c", BUILD.format(f"build_{what}"), str(folder)]
    printed = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True).stdout
    return folder / printed.split()[-1]


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    paths = ["pyproject.toml", "README.md", "LICENSE", "sglang_diffkv", "kernels"]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return [x for x in listed.stdout.split("\0") if x]


@pytest.fixture(scope="module")
def wheel(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as an installer that finds no wheel does."""
    folder = tmp_path_factory.mktemp("packages")
    copy = folder / "source"
    for name in tracked:
        target, source = copy / name, REPOSITORY / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        else:
            target.write_bytes(source.read_bytes())
    with tarfile.open(_build("sdist", copy, folder)) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return _build("wheel", unpacked, folder)


def test_the_wheel_has_the_package_and_nothing_beside_it(wheel: Path, tracked: list[str]) -> None:
    """Modules, shipped thresholds and SGLang's entry point; kernels as ``sglang_diffkv.kernels`` only."""
    with zipfile.ZipFile(wheel) as archive:
        packaged = {name for name in archive.namelist() if ".dist-info/" not in name}
        (points,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        entry_points, about = archive.read(points).decode(), email.message_from_bytes(archive.read(metadata))
    shipped = (".py", ".json", "/py.typed")
    expected = {name for name in tracked if name.startswith("sglang_diffkv/") and name.endswith(shipped)}
    assert any(name.endswith(".json") for name in expected) and "sglang_diffkv/py.typed" in expected
    kernels = {f"sglang_diffkv/{name}" for name in tracked if name.startswith("kernels/") and name.endswith(".py")}
    assert len(kernels) > 30
    assert packaged == expected | kernels
    parser = configparser.ConfigParser()
    parser.read_string(entry_points)
    assert dict(parser["sglang.srt.plugins"]) == {"diffkv": "sglang_diffkv.srt.plugin:register"}
    assert about["Version"] == __version__
    needs = {re.split(r"[^\w-]", x)[0] for x in about.get_all("Requires-Dist") if "extra ==" not in x}
    assert needs == {"numpy", "pydantic", "sglang", "transformers"}


SERVE = """
import sys

import sglang_diffkv
from sglang_diffkv.evaluate.server import Server

assert sglang_diffkv.__file__.startswith(sys.argv[1]), sglang_diffkv.__file__
with Server(sys.argv[2], "diffkv", ["--max-total-tokens", "4000"], timeout=600) as server:
    parameters = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    print(server.generate({"text": "1 2 3 4", "sampling_params": parameters})["meta_info"]["completion_tokens"])
    print("DiffKV plan" in server.log_text())
"""


@pytest.mark.server
@pytest.mark.full
def test_the_wheel_serves_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """A server that imports the installed wheel and nothing of the checkout, whose folder is not at hand."""
    site = tmp_path / "site"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, *install], check=True, capture_output=True)
    program = tmp_path / "serve.py"
    program.write_text(SERVE)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(x for x in (str(site), os.environ.get("PYTHONPATH")) if x)}
    command = [sys.executable, str(program), str(site), str(NANO)]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=800)
    assert run.stdout.split() == ["8", "True"], run.stderr[-3000:]
