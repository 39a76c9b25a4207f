"""Passes over prompts in which other requests decode: what SGLang calls mixed chunks."""

from __future__ import annotations

import torch

from sglang_diffkv.attention.wrappers import DecodeWrapper, ExtendWrapper
from sglang_diffkv.ops.base import Scaling


class MixedWrapper:
    """A pass over prompts and a decode step at once, each planned by its own wrapper, in plan/run form as these.

    The prompts' tokens come first. What is computed for the two differs (a decode step reads pages of all tiers and
    searches them for tokens to move), so each layer attends twice; everything around attention sees one batch.
    """

    def __init__(self, extend: ExtendWrapper, decode: DecodeWrapper):
        self.extend, self.decode = extend, decode

    def begin(self) -> None:
        """Slots and pages for the new tokens of all layers; both are planned."""
        self.extend.begin()
        self.decode.begin()

    def run(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: Scaling,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """As ``Wrapper.run``: tokens of the prompts, then one of each request that decodes."""
        step = self.extend.step
        assert step is not None, "plan comes first"
        prompts = sum(step.counts)
        parts = ((self.extend, slice(prompts)), (self.decode, slice(prompts, None)))
        out = [wrapper.run(layer, q[at], key[at], value[at], scaling, sink_logits) for wrapper, at in parts]
        return torch.cat(out)

    def end(self) -> None:
        """Compaction behind the decode step. Prompts that end are compacted as behind any pass."""
        self.extend.end()
        self.decode.end()
