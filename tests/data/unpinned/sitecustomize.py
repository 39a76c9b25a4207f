"""For a server on a machine without an accelerator: memory that SGLang asks to be pinned is plain. Its LoRA and the
token check of its canary ask for it on every device."""

from typing import Any

import torch


def _plain(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, "pin_memory": False} if "pin_memory" in kwargs else kwargs)

    return call


for _name in ("empty", "full", "ones", "tensor", "zeros", "zeros_like", "empty_like"):
    setattr(torch, _name, _plain(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
