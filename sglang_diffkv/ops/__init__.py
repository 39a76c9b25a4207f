"""The ops of a step, behind one interface: plain PyTorch (any device) or Triton (a GPU)."""

from __future__ import annotations

from sglang_diffkv.ops.base import Ops, Scaling, Step
from sglang_diffkv.ops.reference import ReferenceOps

__all__ = ["Ops", "ReferenceOps", "Scaling", "Step"]
