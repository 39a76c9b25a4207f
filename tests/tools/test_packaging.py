"""What sdist and wheel have, that the wheel serves, and that the folder ``kernels`` hides no other package."""

from __future__ import annotations

import configparser
import email
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import tomllib
import yaml

from benchmarks.paths import NANO, REPOSITORY
from sglang_diffkv import __version__, extra
from sglang_diffkv.ops.ragged import RaggedPrefill

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
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return [x for x in listed.split("\0") if x]


@pytest.fixture(scope="module")
def packaged(tracked: list[str]) -> set[str]:
    """What a package has to hold: modules, shipped thresholds, a text, the mark that types are there, and kernels."""
    shipped = (".py", ".json", ".txt", ".cu", ".cuh", ".hpp", "/py.typed")
    expected = {name for name in tracked if name.startswith("sglang_diffkv/") and name.endswith(shipped)}
    assert any(name.endswith(".json") for name in expected) and "sglang_diffkv/py.typed" in expected
    assert any(name.startswith("sglang_diffkv/texts/") for name in expected)
    kernels = {f"sglang_diffkv/{name}" for name in tracked if name.startswith("kernels/") and name.endswith(shipped)}
    assert len(kernels) > 30 and any(name.endswith(".cu") for name in kernels)
    return expected | kernels


@pytest.fixture(scope="module")
def sdist(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the whole repository, so that whatever setuptools takes beside the package would be in it."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = folder / "source"
    for name in tracked:
        target, source = copy / name, REPOSITORY / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    return _build("sdist", copy, folder)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as an installer that finds no wheel does."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return _build("wheel", unpacked, folder)


def test_the_sdist_has_the_package_and_nothing_beside_it(sdist: Path, packaged: set[str]) -> None:
    with tarfile.open(sdist) as archive:
        members = [x for x in archive.getmembers() if not x.isdir()]
    assert all(x.isfile() for x in members), "a link would lead out of the archive"
    names = {x.name.partition("/")[2] for x in members}
    about_it = {name for name in names if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    sources = {name.removeprefix("sglang_diffkv/") if "/kernels/" in name else name for name in packaged}
    assert names - about_it == sources | {"pyproject.toml", "setup.py", "README.md", "LICENSE"}


def test_the_wheel_has_the_package_and_nothing_beside_it(wheel: Path, packaged: set[str]) -> None:
    """Modules, shipped thresholds and SGLang's entry point; kernels as ``sglang_diffkv.kernels`` only."""
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        (points,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        entry_points, about = archive.read(points).decode(), email.message_from_bytes(archive.read(metadata))
    assert found == packaged
    parser = configparser.ConfigParser()
    parser.read_string(entry_points)
    assert dict(parser["sglang.srt.plugins"]) == {"diffkv": "sglang_diffkv.srt.plugin:register"}
    assert about["Version"] == __version__
    needs = {re.split(r"[^\w-]", x)[0] for x in about.get_all("Requires-Dist") if "extra ==" not in x}
    assert needs == {"numpy", "pydantic", "sglang", "transformers", "xxhash"}


def test_both_are_small(sdist: Path, wheel: Path) -> None:
    """Measurements and models stay in the repository."""
    assert max(sdist.stat().st_size, wheel.stat().st_size) < 2_000_000


def test_a_package_page_can_show_both(sdist: Path, wheel: Path) -> None:
    """Their metadata is valid, and the README can be rendered."""
    pytest.importorskip("twine")
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", str(sdist), str(wheel)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_tag_deploys_the_documentation() -> None:
    """What ``make docs`` builds."""
    flow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "docs.yml").read_text())
    assert flow[True]["push"] == {"tags": ["v*"]}  # YAML reads "on" so
    steps = flow["jobs"]["build"]["steps"]
    site = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["site_dir"]
    assert {"run": "make docs"} in steps and [x["with"]["path"] for x in steps if "path" in x.get("with", {})] == [site]
    assert flow["jobs"]["deploy"]["needs"] == "build" and flow["permissions"]["pages"] == "write"


def test_no_link_of_the_readme_needs_the_repository() -> None:
    """A package page has the README alone: a relative link or picture leads nowhere there."""
    targets = re.findall(r"\]\(([^)\s]*)", (REPOSITORY / "README.md").read_text())
    assert targets and all(x.startswith(("https://", "#")) for x in targets), targets


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
    # Another SGLang may be on the path (make test-versions), but no checkout of this package.
    others = [x for x in os.environ.get("PYTHONPATH", "").split(os.pathsep) if x]
    others = [x for x in others if not (Path(x) / "sglang_diffkv").exists()]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *others])}
    command = [sys.executable, str(program), str(site), str(NANO)]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=800)
    assert run.stdout.split() == ["8", "True"], run.stderr[-3000:]


INTERNAL = "evaluate/code_child.py"
"""Run by ``evaluate``, and by nobody else."""


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and no other package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return folder / "bin" / "python"


def _run_bare(python: Path, module: str, *args: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-m", module, *args]
    return subprocess.run(command, cwd=python.parent, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_command_without_its_packages_says_how_to_install_them(bare: Path, packaged: set[str]) -> None:
    """Each module of the wheel that is a command."""
    commands = {
        name
        for name in packaged
        if name.endswith(".py") and '__name__ == "__main__"' in _source(name) and not name.endswith(INTERNAL)
    }
    modules = {x.removesuffix(".py").removesuffix("/__main__").replace("/", ".") for x in commands}
    tools = (
        "evaluate",
        "evaluate.replies",
        "calibrate",
        "calibrate.heads",
        "calibrate.means",
        "inspect",
        "capacity",
        "shadow",
    )
    assert {f"sglang_diffkv.{x}" for x in (*tools, "doctor")} <= modules
    for module in sorted(modules - {"sglang_diffkv.doctor"}):
        done = _run_bare(bare, module, "--help")
        (line,) = done.stderr.splitlines()
        assert done.returncode == 1 and not done.stdout, module
        served = ("sglang_diffkv.capacity", "sglang_diffkv.run")
        install = f"{'sglang-diffkv' if module in served else repr('sglang-diffkv[quality]')} sglang==0.5.17"
        missing, _, rest = line.removeprefix(f"{module}: ").partition(" not installed: ")
        assert {"numpy", "pydantic", "torch"} <= {*missing.split(", ")} and rest == f"pip install {install}", line
    done = _run_bare(bare, "sglang_diffkv.doctor")
    assert done.returncode == 1 and "REFUSED: SGLang is not installed" in done.stdout and not done.stderr


def _source(name: str) -> str:
    inside = name.removeprefix("sglang_diffkv/") if name.startswith("sglang_diffkv/kernels/") else name
    return (REPOSITORY / inside).read_text(encoding="utf-8")


def test_programs_that_import_a_tool_get_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r"no_such_package not installed: pip install 'sglang-diffkv\[quality"
    ):
        extra.require("sys", "no_such_package")
    extra.require("sys")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "-m", "sglang_diffkv.evaluate"])
    with pytest.raises(SystemExit, match=r"sglang_diffkv\.evaluate: no_such_package"):
        extra.require("no_such_package")


def test_the_extras_have_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"matplotlib", "requests", "rich", "tqdm"} <= {*extras["quality"]} and "flashinfer-python" in extras["gpu"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'sglang-diffkv[gpu]'" in RaggedPrefill.obstacle(128, 128, ())
