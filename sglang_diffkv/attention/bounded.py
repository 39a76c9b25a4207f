"""Passes over few new tokens whose shapes follow bounds, so that CUDA graphs can hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_diffkv.attention.wrappers import ExtendWrapper
from sglang_diffkv.layout.transfer import FixedNumbers
from sglang_diffkv.ops.base import BoundedPass, Scaling, Step

GIVEN = 5
"""Numbers of a request: see ``BoundedPass``."""


class BoundedWrapper(ExtendWrapper):
    """Prompts, whole or the last part of each, behind stored tokens that get no scores from the pass.

    ``begin`` and ``run`` launch kernels only, after ``bound``. Replays of a graph that holds them compute the pass that
    ``give`` was last told of. Attention reads all stored tokens back from pages (``kernels/read_back``), so every head
    of a request has to hold all of them.

    Args:
        requests: of a pass, at most. tokens: new ones. stored: tokens that all its requests together have stored.

    Attributes:
        tokens: of the pass or graph that comes next. scores: whether tokens get scores from passes. before_layer: is
            called before a layer reads pages.
    """

    def __init__(self, *args: Any, requests: int, tokens: int, stored: int, **form: Any):
        super().__init__(*args, **form)
        state = self.state
        self.requests = requests
        self._given = FixedNumbers(GIVEN, requests, device=state.device)
        dims = (state.fmt.head_dim, state.fmt.v_head_dim)
        keys, values = (
            torch.zeros(stored + tokens, state.num_heads, dim, dtype=state.dtype, device=state.device) for dim in dims
        )
        self.known = BoundedPass(self._given.there, (keys, values), tokens, stored)
        self.tokens = tokens
        self.before_layer: Callable[[int], None] = lambda layer: None
        self.scores = self.policy.scored_tiers(len(state.fmt.tiers)) > 0

    def bound(self, tokens: int) -> None:
        """The next pass, or the graph that is captured next, has so many tokens, those that fill it up included."""
        assert 0 < tokens <= self.known.tokens
        self.tokens = tokens

    def begin(self) -> None:
        self.step = Step.bounded(self.known, self.tokens, self.state.num_heads)
        super().begin()

    def run(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: Scaling,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        self.before_layer(layer)
        return super().run(layer, q, key, value, scaling, sink_logits)

    def fits(self, prefixes: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether requests with so many stored and new tokens make a pass that it may be told of."""
        held = len(counts) <= self.requests and sum(prefixes) <= self.known.stored and sum(counts) <= self.known.tokens
        return held and not self.ops.rounds_prompts(prefixes, counts)

    def give(
        self, rows: Sequence[int], prefixes: Sequence[int], counts: Sequence[int], prompts: Sequence[int] | None = None
    ) -> None:
        """What the pass is that is launched next: rows, their stored and new tokens; ``prompts`` as of ``plan``."""
        assert self.fits(prefixes, counts)
        since, every = self._observed(prefixes, counts, prompts)
        self._given.set([rows, prefixes, counts, since or (), every])
