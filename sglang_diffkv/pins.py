"""Versions of the packages below SGLang with which the plugin was tested, by SGLang's version.

``docs/install.md`` has the same table, and ``tests/tools/test_versions.py`` compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Stack:
    """Versions; None where the package has no part in what was tested."""

    torch: str
    triton: str
    flashinfer: str | None = None
    sglang_kernel: str | None = None


DISTRIBUTIONS = {
    "torch": ("torch",),
    "triton": ("triton",),
    "flashinfer": ("flashinfer-python",),
    "sglang_kernel": ("sglang-kernel", "sgl-kernel"),
}
"""Names of the packages of a stack, the newest name first."""
TITLES = {"torch": "torch", "triton": "triton", "flashinfer": "FlashInfer", "sglang_kernel": "sglang-kernel"}

_HOPPER = Stack("2.11.0", "3.6.0", "0.6.15.post1", "0.4.5")
_CPU = Stack("2.13.0", "3.7.1")
ON_GPU = {"0.5.17": _HOPPER, "0.5.23": _HOPPER}
ON_CPU = dict.fromkeys(("0.5.17", "0.5.21", "0.5.22", "0.5.23"), _CPU)


def untested(sglang: str | None, found: Mapping[str, str | None], *, gpu: bool) -> dict[str, str]:
    """What to warn of, by package, if this stack is not the one that was tested with this SGLang.

    Args:
        found: installed versions, None for none. gpu: whether servers run on one.

    Without entry for SGLang's version there is nothing to compare with: that is refused elsewhere.
    """
    stack = (ON_GPU if gpu else ON_CPU).get(sglang or "")
    if stack is None:
        return {}
    tested = {name: version for name, version in asdict(stack).items() if version is not None}
    where = f"SGLang {sglang} on a {'GPU' if gpu else 'CPU'}"
    return {
        name: f"{TITLES[name]} {found.get(name) or 'is not installed'}: with {where} {version} was tested"
        for name, version in tested.items()
        if (found.get(name) or "").partition("+")[0] != version
    }
