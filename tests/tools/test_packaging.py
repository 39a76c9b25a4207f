"""What a wheel has, and that the top-level folder ``kernels`` hides nobody's package ``kernels``."""

from __future__ import annotations

import configparser
import subprocess
import sys
import zipfile
from pathlib import Path

from benchmarks.paths import REPOSITORY

FIND = "import importlib.util as u; found = u.find_spec('kernels'); print(found and found.origin)"


def test_another_package_kernels_wins_in_the_repository(tmp_path: Path) -> None:
    """Transformers imports Hugging Face's package of that name, also from a program started in the repository."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    program = f"import sys; sys.path.append({str(tmp_path)!r}); {FIND}"
    found = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(tmp_path / "kernels" / "__init__.py")


def test_the_wheel_has_the_package_and_nothing_beside_it(tmp_path: Path) -> None:
    """Modules, shipped thresholds and SGLang's entry point; kernels as ``sglang_diffkv.kernels`` only."""
    build = "from setuptools.build_meta import build_wheel; import sys; print(build_wheel(sys.argv[1]))"
    copy = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--", "pyproject.toml", "README.md", "LICENSE", "sglang_diffkv", "kernels"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, tracked):
        target, source = copy / name, REPOSITORY / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        else:
            target.write_bytes(source.read_bytes())
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=copy, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packaged = {name for name in archive.namelist() if ".dist-info/" not in name}
        (points,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        entry_points = archive.read(points).decode()
    expected = {name for name in tracked if name.startswith("sglang_diffkv/") and name.endswith((".py", ".json"))}
    assert any(name.endswith(".json") for name in expected)
    kernels = {f"sglang_diffkv/{name}" for name in tracked if name.startswith("kernels/") and name.endswith(".py")}
    assert len(kernels) > 30
    assert packaged == expected | kernels
    parser = configparser.ConfigParser()
    parser.read_string(entry_points)
    assert dict(parser["sglang.srt.plugins"]) == {"diffkv": "sglang_diffkv.srt.plugin:register"}
