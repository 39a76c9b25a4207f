"""Kernels in CUDA C++: a source, what it is compiled for, and what it is started with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

HERE = Path(__file__).parent


@dataclass(frozen=True)
class CudaSource:
    """A kernel of one warp a block, which takes one structure ``Arguments`` by value.

    ``defines``: names and what they stand for, in order; ``path``: the source behind them."""

    path: Path
    name: str
    defines: tuple[tuple[str, str], ...]

    def text(self, host: bool) -> str:
        """The whole translation unit, for a GPU or for a ``host`` compiler."""
        prelude = (HERE / ("warp_host.hpp" if host else "warp.cuh")).read_text().replace("#pragma once\n", "")
        defines = "".join(f"#define {name} {value}\n" for name, value in self.defines)
        return f"{prelude}\n{defines}\n{self.path.read_text()}"


def defined(values: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """``defines`` of a :class:`CudaSource`: booleans and numbers as C++ has them, the rest as it is."""
    return tuple((name, str(int(x)) if isinstance(x, bool) else str(x)) for name, x in values.items())


class CudaKernel(Protocol):
    """A compiled kernel."""

    def prepare(self, programs: int, shared_bytes: int, early: bool) -> Callable[[ctypes.Structure], None]:
        """What starts ``programs`` blocks on the current stream with the arguments that it is given, which are copied.
        They have so much shared memory each. ``early``: as soon as the kernel before it says so (programmatic dependent
        launch)."""
