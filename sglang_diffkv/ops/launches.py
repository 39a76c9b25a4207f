"""What the launches of a pass have in common, prepared for its first layer and kept for the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch


def form_of(x: torch.Tensor | None) -> Hashable:
    """All that a kernel's variant, and the checks of its wrapper, depend on of a tensor beside its device."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16)


class Launches:
    """Of one pass, whose own tensors, and those of the state, are taken for the same in every layer.

    A decode step may be launched several times before a graph records it, so what is prepared for it holds no memory of
    its own that a kernel writes to.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Hashable, Any]] = {}

    def prepared(self, what: Hashable, prepare: Callable[[], Any], *tensors: torch.Tensor | None) -> Any:
        """What ``prepare`` makes for tensors of a form: called again where they are of another one."""
        form = tuple(map(form_of, tensors))
        kept = self._kept.get(what)
        if kept is None or kept[0] != form:
            kept = self._kept[what] = (form, prepare())
        return kept[1]
