"""What ``pyproject.toml`` cannot say: where the package's modules lie, and the SGLang releases that it serves.

``kernels/``, beside the package, is installed as ``sglang_diffkv.kernels``.
"""

import runpy
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

KERNELS = ["kernels", *(f"kernels.{name}" for name in find_namespace_packages("kernels"))]
SGLANG = runpy.run_path(str(Path(__file__).parent / "sglang_diffkv" / "releases.py"))["requirement"]()

setup(
    packages=[*find_packages(include=["sglang_diffkv", "sglang_diffkv.*"]), *(f"sglang_diffkv.{x}" for x in KERNELS)],
    package_dir={"sglang_diffkv.kernels": "kernels"},
    install_requires=["numpy", "pydantic>=2.10", SGLANG, "transformers", "xxhash"],
)
