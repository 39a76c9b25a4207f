"""Where the package's modules lie. ``kernels/``, beside the package, is installed as ``sglang_diffkv.kernels``."""

from setuptools import find_namespace_packages, find_packages, setup

KERNELS = ["kernels", *(f"kernels.{name}" for name in find_namespace_packages("kernels"))]

setup(
    packages=[*find_packages(include=["sglang_diffkv", "sglang_diffkv.*"]), *(f"sglang_diffkv.{x}" for x in KERNELS)],
    package_dir={"sglang_diffkv.kernels": "kernels"},
)
