"""CUDA kernels on a CPU, as Triton's interpreter runs Triton's: for tests, with any C++ compiler that knows fp16."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from sglang_diffkv.kernels.cuda.source import HERE, CudaSource

POISON = 0xFF
"""Bytes of shared memory that nothing was written to: NaN in any format."""

RUNNER = """
static Arguments given;
static void body() {{ {name}(given); }}
extern "C" void run(const Arguments* arguments, int programs, int shared, int poison) {{
    given = *arguments;
    warp::run(programs, body, shared, poison);
}}
"""


def compiler() -> str | None:
    """The C++ compiler that is there: ``$CXX``, g++ or clang++."""
    return next(
        (found for name in (os.environ.get("CXX"), "g++", "clang++") if name and (found := shutil.which(name))), None
    )


class HostKernel:
    """Lanes of a warp as coroutines (``warp_host.hpp``), programs one after the other."""

    def __init__(self, source: CudaSource):
        found = compiler()
        if found is None:
            raise RuntimeError("no C++ compiler is there to run CUDA kernels on a CPU: install g++ 12 or set CXX")
        with tempfile.TemporaryDirectory() as folder:
            text, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
            text.write_text(source.text(host=True) + RUNNER.format(name=source.name))
            flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w", f"-I{HERE}"]
            done = subprocess.run([found, *flags, str(text), "-o", str(library)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{source.path.name} does not compile on a CPU:\n{done.stderr}")
            self._run = ctypes.CDLL(str(library)).run

    def prepare(self, programs: int, shared_bytes: int, early: bool) -> Callable[[ctypes.Structure], None]:
        assert shared_bytes <= 228 << 10

        def launch(arguments: ctypes.Structure) -> None:
            self._run(ctypes.byref(arguments), programs, shared_bytes, POISON)

        return launch
