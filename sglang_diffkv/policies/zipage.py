"""Zipage ("Zipage: Maintain High Request Concurrency for LLM Reasoning through Compressed PagedAttention"): a request
holds a budget of blocks however long its reply, so that concurrency does not depend on length.

When a request holds ``max_blocks`` blocks of ``block`` tokens, all full, each head keeps its
``(max_blocks - 1) x block`` tokens of the largest scores and the rest go (4.1). A token's score is its attention from
the newest 16 queries, maximum over the query heads of its KV head, mean over queries (C.2). ``decay`` times the score
of the last time counts instead if it is larger (global score, C.3). The first time scores are max-pooled over
neighbours (C.4). ``redundancy`` times how much its key repeats others is subtracted (C.5, ``block`` neighbours at a
time: lightning, C.7). The queries' own tokens stay.

What differs from the paper:

- a prompt longer than what is kept is compressed at its end, by its own newest queries, not when its last block is
  full; its scores of then count as a first time;
- a request has a query slot (the paper's M, ``query_slots``) shortly before it reaches its limit only. One that finds
  none then does not wait, as under the paper's hybrid scheduling (4.3): it goes on, holds more meanwhile, and is
  compressed when the queries of another are no longer needed. So is one whose shared prefix finds no pages for the copy
  that its first compression makes. With ``scheduling`` "constrained" no more run than have a slot, so none waits;
- compression is launched between two steps, on their stream, and delays the next one. With ``asynchronous`` most of it,
  the scoring, runs beside the next pass; what stays is still moved between two steps. All layers at once, or
  ``layer_stride`` at a time in the memory of so many (C.1; the paper: 8, beside decoding);
- blocks are a unit of the budget only: memory is taken and given back in pages;
- with two tiers ``high_share`` of what is kept, the largest scores, stays in the high one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from sglang_diffkv.bounds import (
    Block,
    Blocks,
    Cosine,
    Fraction,
    Layers,
    Observers,
    Pool,
    SomeFraction,
    Switch,
    Temperature,
    Weight,
)
from sglang_diffkv.policies.base import Observation, Policy, Redundancy, Running, TopCount
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.options import PolicyOptions, odd

HYBRID_SLOTS = 0.25
"""Query slots of those requests that fit with their budget: each needs one in few of its steps only."""


@dataclass(frozen=True)
class ZipagePolicy(Policy):
    """``keep`` tokens a head after each compression, ``limit`` before it."""

    keep: int
    limit: int
    window: int = field()
    high: int | None
    pool: int
    decay: float
    redundancy: Redundancy | None
    slots: float
    constrained: bool
    asynchronous: bool
    layer_stride: int | None = field()

    @property
    def observation(self) -> Observation:
        return Observation(queries=self.window)

    @property
    def prompt(self) -> TopCount:
        high = None if self.high is None else Budget(self.high)
        return TopCount(Budget(self.keep), high, self.redundancy, smooth=self.pool)

    @property
    def running(self) -> Running:
        return Running(
            self.limit, self.keep, self.window, self.decay, self.slots, self.constrained, self.asynchronous
        )  # fmt: skip


class ZipagePolicyConfig(PolicyOptions):
    """A budget of blocks for each request, prompt and reply together."""

    most_tiers: ClassVar[int] = 2

    name: Literal["zipage"] = "zipage"
    max_blocks: Blocks = Field(description="blocks that a request holds at most; all but one of them are kept")
    block: Block = Field(default=256, description="tokens of a block")
    window: Observers = Field(default=16, description="newest queries, which score; their tokens stay")
    decay: Fraction = Field(default=0.8, description="of the scores of earlier times; 0: only the last counts")
    pool: Pool = Field(default=5, description="width of the max-pooling of the first time, odd")
    redundancy: Weight = Field(default=0.2, description="weight of how much a key repeats others; 0: none")
    temperature: Temperature = Field(
        default=0.4, description="of the redundancy's softmax; lower: the largest stand out"
    )
    threshold: Cosine = Field(default=0.5, description="cosine above which a key repeats a later one")
    compare: Literal["block", "all"] = Field(default="block", description="keys are compared within a block, or all")
    high_share: Fraction = Field(default=0.5, description="of two tiers, what of the kept stays in the high one")
    scheduling: Literal["hybrid", "constrained"] = Field(
        default="hybrid", description="constrained: no more requests run than have a query slot"
    )
    query_slots: SomeFraction | None = Field(
        default=None,
        description="requests whose queries are kept at once, of those that fit with their budget; null: a quarter, "
        "all where scheduling is constrained",
    )
    asynchronous: Switch = Field(
        default=False, description="requests are scored beside the next pass, and left out of it if it is a decode step"
    )
    layer_stride: Layers | None = Field(
        default=None, description="layers that are compressed at a time, in the memory of so many; null: all"
    )

    @field_validator("pool")
    @classmethod
    def _odd(cls, pool: int) -> int:
        return odd(pool)

    @model_validator(mode="after")
    def _sensible(self) -> ZipagePolicyConfig:
        if self.window > self.block:
            raise ValueError(f"window {self.window} must be within a block of {self.block}")
        if self.asynchronous and self.layer_stride is not None:
            raise ValueError("layer_stride is not for asynchronous: all layers are scored before any is moved")
        return self

    def build(self) -> ZipagePolicy:
        keep = (self.max_blocks - 1) * self.block
        within = self.block if self.compare == "block" else 0
        redundancy = Redundancy(self.redundancy, self.temperature, self.threshold, within) if self.redundancy else None
        high = max(round(self.high_share * keep), self.window)
        constrained = self.scheduling == "constrained"
        slots = self.query_slots or (1.0 if constrained else HYBRID_SLOTS)
        limit = self.max_blocks * self.block
        return ZipagePolicy(
            keep, limit, self.window, high, self.pool, self.decay, redundancy, slots, constrained, self.asynchronous,
            self.layer_stride,
        )  # fmt: skip
