"""A launch of a Triton kernel that is repeated: once for each layer of a pass.

Triton looks at every argument of a launch to find the variant of the kernel that serves it, which takes the host longer
than the launch itself. Layers differ in a few tensors of the same form, so the variant of one is that of all.

Of a tensor Triton's launcher asks for its address, and then the driver whether it is one. It takes an address as it is,
so repeated launches pass addresses, which takes a third of their time off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def address(x: Any) -> Any:
    """Where a tensor of the GPU begins, as a kernel gets it; anything else as it is."""
    return x.data_ptr() if isinstance(x, torch.Tensor) and x.is_cuda else x


class Launch:
    """A launch of a Triton kernel, to be repeated.

    Args:
        kernel: a function of ``triton.jit``. grid: one to three numbers of programs.
        args: all arguments that are not constants, in order; None for those that ``changed`` names each time, by the
            kernel's own names. Of these, tensors keep their form (``form_of``), and numbers are not specialised.
        constants: the other parameters, and options of the launch.
    """

    def __init__(self, kernel: Any, grid: Sequence[int], args: Sequence[Any], constants: Mapping[str, Any]):
        self._kernel, self._constants = kernel, constants
        self._grid = (*grid, 1, 1)[:3]
        self._args = [*args]
        self._number = {name: number for number, name in enumerate(kernel.arg_names[: len(args)])}
        self._variant: Any = None
        self._run: Any = None
        self._values: tuple[Any, ...] = ()
        self._addressed: tuple[Any, ...] = ()  # what stands in ``_args`` as addresses, which has to stay

    def __call__(self, **changed: Any) -> None:
        args, number = self._args, self._number
        if self._run is not None:
            for name, x in changed.items():
                args[number[name]] = address(x)
            self._run(*args, *self._values)
            return
        for name, x in changed.items():
            args[number[name]] = x
        variant = self._kernel[self._grid](*args, **self._constants)
        for name in changed:  # a layer's tensors do not outlive it
            args[number[name]] = None
        if variant is not None:  # interpreted kernels have none
            self._variant = variant
            self._run = variant[self._grid]
            self._values = tuple(self._constants[name] for name in self._kernel.arg_names[len(args) :])
            self._addressed, self._args = tuple(args), [address(x) for x in args]

    def resize(self, *grid: int) -> None:
        """So many programs from now on."""
        self._grid = (*grid, 1, 1)[:3]
        if self._variant is not None:
            self._run = self._variant[self._grid]
