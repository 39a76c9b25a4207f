"""Verification of drafts over compressed pages, planned and run as in ``wrappers.py``, and their commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from sglang_diffkv.attention.wrappers import DecodeWrapper, Wrapper
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.layout.transfer import to_device
from sglang_diffkv.ops.base import Scaling, Step

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Of launches that read and write at fixed addresses, something that launches them again: a CUDA graph's replay."""


@dataclass
class ChainRoom:
    """What passes over chains of ``drafts`` tokens of up to ``requests`` requests leave for their commit, at addresses
    that CUDA graphs hold."""

    requests: int
    drafts: int
    rows: torch.Tensor  # [requests] int64
    stored: torch.Tensor  # [requests] int64, tokens before the chain
    accepted: torch.Tensor  # [requests] int64, tokens of the chain that are stored
    q: torch.Tensor  # [L, requests * drafts, Hq, head_dim], as it attends to what is stored; L is 0 without scores
    lse: torch.Tensor  # [L, requests * drafts, Hq] float32, base 2, of what each attended to; L as of q
    key: torch.Tensor  # [L, requests * drafts, H, head_dim]
    value: torch.Tensor  # [L, requests * drafts, H, v_head_dim]
    scalings: list[Scaling]  # of each layer
    commits: dict[int, Callable[[], None]] = field(default_factory=dict)  # by requests, where it was recorded

    @classmethod
    def create(cls, state: PageState, requests: int, drafts: int, q_heads: int, *, scored: bool) -> ChainRoom:
        """``scored``: whether decode steps keep scores, for which queries are needed."""
        layers, tokens, fmt = state.num_layers, requests * drafts, state.fmt
        queried = layers if scored else 0

        def numbers(count: int, heads: int, dim: int) -> torch.Tensor:
            return torch.zeros(count, tokens, heads, dim, dtype=state.dtype, device=state.device)

        def integers() -> torch.Tensor:
            return torch.zeros(requests, dtype=torch.int64, device=state.device)

        return cls(
            requests,
            drafts,
            integers(),
            integers(),
            integers(),
            numbers(queried, q_heads, fmt.head_dim),
            torch.zeros(queried, tokens, q_heads, device=state.device),
            numbers(layers, state.num_heads, fmt.head_dim),
            numbers(layers, state.num_heads, fmt.v_head_dim),
            [Scaling(1.0)] * layers,
        )


class VerifyWrapper(Wrapper):
    """Verification of drafts: a chain of tokens of each request attends, and those that are accepted are stored.

    A draft touches no page before it is accepted, so there is nothing to roll back. ``commit`` then takes the accepted
    tokens as the decode steps that they stand for, one after the other: slots, searches and compaction are those of
    decode without drafts. Scores count the attention that the verification gave, in which the chain's own tokens were
    not quantised yet; so they need no values, and all layers take one launch. Where the policy looks for nothing in
    decode steps, only keys and values are stored.

    ``begin`` and ``run`` launch kernels only, so that a CUDA graph can hold them after ``prepare_graphs``. Replays read
    the tensors that were given to ``plan`` when it was captured. ``replayed`` says that there was one. ``record`` makes
    a graph of the commit.

    Args:
        q_heads: query heads.
    """

    decodes = False

    def __init__(self, *args: Any, q_heads: int, **more: Any):
        super().__init__(*args, **more)
        assert self.queries is None, "a policy that scores running requests is refused with drafts"
        self.q_heads = q_heads
        self._decode = DecodeWrapper(self.ops)
        self._rooms: list[ChainRoom] = []  # a graph may hold any of them
        self._room: ChainRoom | None = None  # of the pass that ran last, or runs
        self._rows = self._seq_lens = torch.empty(0)
        self._requests = self._ran = 0

    def prepare_graphs(self, requests: int, drafts: int) -> None:
        """Room for passes of up to so many requests."""
        if self._room_for(requests, drafts) is None:
            sizes = (requests, drafts, self.q_heads)
            scored = self.policy.step_tiers(len(self.state.fmt.tiers)) > 0
            self._rooms.append(ChainRoom.create(self.state, *sizes, scored=scored))

    def _room_for(self, requests: int, drafts: int) -> ChainRoom | None:
        """The same for the same numbers, once there is one."""
        found = (x for x in self._rooms if x.drafts == drafts and x.requests >= requests)
        return next(found, None)

    def plan(self, rows: torch.Tensor, seq_lens: torch.Tensor, drafts: int) -> None:
        """rows: [B] integers on the device, 0 for padding. seq_lens: [B], tokens stored before. drafts: tokens of each
        request."""
        self._rows, self._seq_lens, self._requests = rows, seq_lens, rows.shape[0]
        if self._room_for(self._requests, drafts) is None:
            self.prepare_graphs(1 << (self._requests - 1).bit_length(), drafts)
        self._room = self._room_for(self._requests, drafts)

    def begin(self) -> None:
        room, requests = self._room, self._requests
        assert room is not None, "plan comes first"
        room.rows[:requests].copy_(self._rows)
        room.stored[:requests].copy_(self._seq_lens)
        self.step = Step.chains(room.rows[:requests], room.stored[:requests], room.drafts)
        self._ran = 0

    def run(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: Scaling,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        step = self._planned(q, scaling, sink_logits)
        q, key, value = self.fitted.turn(layer, q, key, value)
        room, tokens = self._room, q.shape[0]
        assert room is not None and layer == self._ran, "layers come in order"
        form = self._as_stored(step, layer, q, key, value)
        room.key[layer, :tokens].copy_(key)
        room.value[layer, :tokens].copy_(value)
        lse = None
        if len(room.q):
            room.q[layer, :tokens].copy_(form[0])
            lse = room.lse[layer, :tokens]
        room.scalings[layer] = scaling
        self._ran += 1
        return self._turned_back(step, layer, self.ops.verify(layer, *form, step, scaling, sink_logits, lse))

    def replayed(self, requests: int, drafts: int) -> None:
        """A graph holds the pass that is to be committed, of so many requests with padding."""
        self._room, self._requests, self._ran = self._room_for(requests, drafts), requests, self.state.num_layers

    def commit(self, accepted: torch.Tensor, left: Sequence[int] = ()) -> None:
        """Store the first ``accepted`` ([B] integers, on the device) tokens of each chain; requests past these are
        padding. Of requests that ``left`` (their places in the batch) after the pass was planned nothing is stored."""
        room, requests, given = self._room, self._requests, accepted.shape[0]
        assert room is not None and given <= requests, "plan comes first"
        assert self._ran == self.state.num_layers, "every layer has run"
        room.accepted[:given].copy_(accepted)
        room.accepted[given:requests].zero_()
        if left:
            room.accepted[to_device(left, room.accepted.device)] = 0
        recorded = room.commits.get(requests)
        if recorded is None:
            self._store(room, requests)
        else:
            recorded()
        self._ran = 0

    def record(self, requests: int, drafts: int, recorder: Recorder) -> None:
        """Let commits of so many requests, padding among them, be replays. After a pass of that size has run."""
        room = self._room_for(requests, drafts)
        assert room is not None, "no pass of that size has run"
        for numbers in (room.rows, room.stored, room.accepted):
            numbers.zero_()  # nothing is stored meanwhile
        room.commits[requests] = recorder(lambda: self._store(room, requests))

    def _store(self, room: ChainRoom, requests: int) -> None:
        """The decode steps of the accepted tokens. Launches kernels only, where the ops pad."""
        order = room.accepted[:requests].argsort(descending=True, stable=True)  # so that padding is last
        accepted, rows, stored = (x[:requests][order] for x in (room.accepted, room.rows, room.stored))
        for number in range(room.drafts):
            goes_on = accepted > number
            lengths, chosen = stored + number + 1, order * room.drafts + number
            if self.ops.pads:
                self._decode_one(room, torch.where(goes_on, rows, 0), torch.where(goes_on, lengths, 1), chosen)
            elif goes_on.any():
                self._decode_one(room, rows[goes_on], lengths[goes_on], chosen[goes_on])

    def _decode_one(self, room: ChainRoom, rows: torch.Tensor, seq_lens: torch.Tensor, chosen: torch.Tensor) -> None:
        """A decode step of the chains' tokens ``chosen``, whose attention is known: [B] of each."""
        decode = self._decode
        decode.plan(rows, seq_lens)
        step = decode.step
        assert step is not None
        self.ops.begin(step, True, attends=False)
        keys, values = (x.index_select(1, chosen) for x in (room.key, room.value))
        for layer in range(self.state.num_layers):
            means = self._means_of[layer]
            self.ops.append(layer, keys[layer], values[layer], step, rotation=self.rotation, key_means=means)
        if step.found is not None:
            for layers, scaling in self._searched(room):
                self.ops.score_step(layers, room.q, room.lse, chosen, step, scaling)
        decode.end()

    def _searched(self, room: ChainRoom) -> Iterator[tuple[range, Scaling]]:
        """Layers that follow one another, see all tokens and have the same scaling."""
        state = self.state
        for (slides, scaling), layers in groupby(
            range(state.num_layers), lambda layer: (state.attention_span(layer) > 0, room.scalings[layer])
        ):
            found = list(layers)
            if not slides:
                yield range(found[0], found[-1] + 1), scaling
