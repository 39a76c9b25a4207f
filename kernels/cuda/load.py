"""Kernels in CUDA C++, compiled for where they run."""

from __future__ import annotations

from functools import cache

from sglang_diffkv.kernels.cuda.source import CudaKernel, CudaSource


@cache
def load(source: CudaSource, host: bool) -> CudaKernel:
    """Compile a kernel, once a process. Raises RuntimeError with what the compiler said."""
    if host:
        from sglang_diffkv.kernels.cuda.host import HostKernel

        return HostKernel(source)
    from sglang_diffkv.kernels.cuda.nvrtc import NvrtcKernel

    return NvrtcKernel(source)
