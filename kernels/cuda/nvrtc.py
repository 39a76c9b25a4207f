"""CUDA kernels on a GPU: compiled by NVRTC, which comes with PyTorch, so no toolkit has to be installed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from sglang_diffkv.kernels.cuda.source import CudaSource


def checked(result: Any, doing: str) -> Any:
    """What a call of ``cuda.bindings`` returned beside its status. Raises RuntimeError for a status that is none of
    success."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"{doing} failed: {status!r}")
    return values[0] if len(values) == 1 else values


def compile_cubin(source: CudaSource, arch: str) -> bytes:
    """Machine code for ``arch``, for example ``sm_90a``."""
    from cuda.bindings import nvrtc

    text = source.text(host=False).encode()
    program = checked(nvrtc.nvrtcCreateProgram(text, source.path.name.encode(), 0, [], []), "creating a program")
    options = [
        f"--gpu-architecture={arch}".encode(),
        b"--std=c++17",
        b"-default-device",
        b"--extra-device-vectorization",
    ]
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    if int(status) != 0:
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program), "asking for the log")
        checked(nvrtc.nvrtcGetProgramLog(program, log), "asking for the log")
        raise RuntimeError(f"{source.path.name} does not compile for {arch}:\n{log.decode()}")
    cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program), "asking for the machine code")
    checked(nvrtc.nvrtcGetCUBIN(program, cubin), "asking for the machine code")
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


class NvrtcKernel:
    """Compiled for the current device."""

    def __init__(self, source: CudaSource):
        from cuda.bindings import driver

        major, minor = torch.cuda.get_device_capability()
        torch.cuda.current_stream()  # there is a context from here on
        self._driver = driver
        self._module = checked(
            driver.cuModuleLoadData(compile_cubin(source, f"sm_{major}{minor}a")), "loading a kernel"
        )
        self._function = checked(driver.cuModuleGetFunction(self._module, source.name.encode()), "finding a kernel")
        self._shared = 0

    def prepare(self, programs: int, shared_bytes: int, early: bool) -> Callable[[ctypes.Structure], None]:
        driver, function = self._driver, self._function
        if shared_bytes > self._shared:
            name = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, name, shared_bytes), "asking for shared memory")
            self._shared = shared_bytes
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = programs, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
        config.sharedMemBytes = shared_bytes
        if early:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1

        def launch(arguments: ctypes.Structure) -> None:
            config.hStream = torch.cuda.current_stream().cuda_stream
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
            checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0), "starting a kernel")

        return launch
