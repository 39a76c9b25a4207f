"""StreamingLLM (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024): the first tokens,
on which models put much attention whatever they say, and the newest; nothing else.

What differs from the paper:

- tokens keep the positions at which they were computed, where the paper counts positions within the cache. So the
  model's context length limits a sequence, though not what it stores;
- a prompt attends to all of itself and is cut at its end, where the paper feeds it through the window;
- a prefix that comes from the prefix cache was cut when it was cached, and keeps what were its newest tokens then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from sglang_diffkv.bounds import Sinks, Window
from sglang_diffkv.policies.base import Pointwise, Policy
from sglang_diffkv.policies.options import PolicyOptions


@dataclass(frozen=True)
class StreamingPolicy(Policy):
    """The first ``sinks`` tokens and the newest ``window``."""

    window: int = field()
    sinks: int = field()

    @property
    def prompt(self) -> Pointwise:
        """No score is enough."""
        return Pointwise(math.inf, math.inf)

    @property
    def generation(self) -> Pointwise:
        """The token that leaves the window goes."""
        return self.prompt


class StreamingPolicyConfig(PolicyOptions):
    """Attention sinks and a window."""

    name: Literal["streaming"] = "streaming"
    window: Window = Field(default=1024, description="newest tokens that stay")
    sinks: Sinks = Field(default=4, description="first tokens that stay")

    def build(self) -> StreamingPolicy:
        return StreamingPolicy(self.window, self.sinks)
