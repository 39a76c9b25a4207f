"""The top-level folder ``kernels`` is packaged as ``sglang_diffkv.kernels`` and hides nobody's package ``kernels``."""

from __future__ import annotations

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


def test_the_wheel_has_every_kernel(tmp_path: Path) -> None:
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
    packaged = set(zipfile.ZipFile(wheel).namelist())
    kernels = {f"sglang_diffkv/{name}" for name in tracked if name.startswith("kernels/") and name.endswith(".py")}
    assert len(kernels) > 30 and kernels <= packaged
    assert not any(name.startswith("kernels/") for name in packaged)
