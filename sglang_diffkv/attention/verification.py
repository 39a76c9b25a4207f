"""Verification of drafts over compressed pages, planned and run as in ``wrappers.py``, and their commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from sglang_diffkv.attention.draft_trees import TreeLinks, ancestors_of
from sglang_diffkv.attention.wrappers import DecodeWrapper, Wrapper
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.layout.transfer import to_device
from sglang_diffkv.ops.base import Scaling, Step

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Of launches that read and write at fixed addresses, something that launches them again: a CUDA graph's replay."""


@dataclass
class DraftRoom:
    """What passes over ``drafts`` tokens of each of up to ``requests`` requests read, and what they leave for their
    commit, at addresses that CUDA graphs hold."""

    requests: int
    drafts: int
    rows: torch.Tensor  # [requests] int64
    stored: torch.Tensor  # [requests] int64, tokens before the drafts
    accepted: torch.Tensor  # [requests] int64, drafts that are stored
    links: TreeLinks | None  # [requests, drafts] int64 of each; None for chains
    path: torch.Tensor | None  # [requests, longest path] int64, places of the accepted drafts; None for chains
    q: torch.Tensor  # [L, requests * drafts, Hq, head_dim], as it attends to what is stored; L is 0 without scores
    lse: torch.Tensor  # [L, requests * drafts, Hq] float32, base 2, of what each attended to; L as of q
    key: torch.Tensor  # [L, requests * drafts, H, head_dim]
    value: torch.Tensor  # [L, requests * drafts, H, v_head_dim]
    scalings: list[Scaling]  # of each layer
    commits: dict[int, Callable[[], None]] = field(default_factory=dict)  # by requests, where it was recorded

    @classmethod
    def create(
        cls, state: PageState, requests: int, drafts: int, q_heads: int, *, scored: bool, longest_path: int = 0
    ) -> DraftRoom:
        """``scored``: whether decode steps keep scores, for which queries are needed. ``longest_path``: as for
        ``VerifyWrapper``."""
        layers, tokens, fmt = state.num_layers, requests * drafts, state.fmt
        queried = layers if scored else 0

        def numbers(count: int, heads: int, dim: int) -> torch.Tensor:
            return torch.zeros(count, tokens, heads, dim, dtype=state.dtype, device=state.device)

        def integers(*more: int, value: int = 0) -> torch.Tensor:
            return torch.full((requests, *more), value, dtype=torch.int64, device=state.device)

        return cls(
            requests,
            drafts,
            integers(),
            integers(),
            integers(),
            TreeLinks(integers(drafts, value=-1), integers(drafts, value=-1)) if longest_path else None,
            integers(longest_path) if longest_path else None,
            numbers(queried, q_heads, fmt.head_dim),
            torch.zeros(queried, tokens, q_heads, device=state.device),
            numbers(layers, state.num_heads, fmt.head_dim),
            numbers(layers, state.num_heads, fmt.v_head_dim),
            [Scaling(1.0)] * layers,
        )

    def take_links(self, links: TreeLinks) -> None:
        """Of the trees of the pass that comes next: [B, drafts] integers each."""
        assert self.links is not None, "the drafts are chains"
        for mine, given in zip(self.links, links, strict=True):
            mine[: given.shape[0]].copy_(given)


class VerifyWrapper(Wrapper):
    """Verification of drafts: a chain or a tree of tokens of each request attends, and those that are accepted are
    stored. In a tree a draft sees its ancestors alone, and what is accepted is a path from the root.

    A draft touches no page before it is accepted, so there is nothing to roll back. ``commit`` then takes the accepted
    tokens as the decode steps that they stand for, one after the other: slots, searches and compaction are those of
    decode without drafts. Scores count the attention that the verification gave, in which the drafts were
    not quantised yet; so they need no values, and all layers take one launch. Where the policy looks for nothing in
    decode steps, only keys and values are stored.

    ``begin`` and ``run`` launch kernels only, so that a CUDA graph can hold them after ``prepare_graphs``. Replays read
    the tensors that were given to ``plan`` when it was captured. ``replayed`` says that there was one. ``record`` makes
    a graph of the commit.

    Args:
        q_heads: query heads. longest_path: of trees, the most drafts that are accepted in one pass; 0 for chains.
    """

    decodes = False

    def __init__(self, *args: Any, q_heads: int, longest_path: int = 0, **more: Any):
        super().__init__(*args, **more)
        assert self.queries is None, "a policy that scores running requests is refused with drafts"
        self.q_heads, self.longest_path = q_heads, longest_path
        self._decode = DecodeWrapper(self.ops)
        self._rooms: list[DraftRoom] = []  # a graph may hold any of them
        self._room: DraftRoom | None = None  # of the pass that ran last, or runs
        self._rows = self._seq_lens = torch.empty(0)
        self._requests = self._ran = 0

    def prepare_graphs(self, requests: int, drafts: int) -> None:
        """Room for passes of up to so many requests."""
        if self._room_for(requests, drafts) is None:
            sizes = (requests, drafts, self.q_heads)
            scored = self.policy.step_tiers(len(self.state.fmt.tiers)) > 0
            form: dict[str, Any] = {"scored": scored, "longest_path": self.longest_path}
            self._rooms.append(DraftRoom.create(self.state, *sizes, **form))

    def _room_for(self, requests: int, drafts: int) -> DraftRoom | None:
        """The same for the same numbers, once there is one."""
        found = (x for x in self._rooms if x.drafts == drafts and x.requests >= requests)
        return next(found, None)

    def plan(self, rows: torch.Tensor, seq_lens: torch.Tensor, drafts: int, links: TreeLinks | None = None) -> None:
        """rows: [B] integers on the device, 0 for padding. seq_lens: [B], tokens stored before. drafts: tokens of each
        request. links: of their trees; None where a graph is captured, which reads those of its replay."""
        self._rows, self._seq_lens, self._requests = rows, seq_lens, rows.shape[0]
        if self._room_for(self._requests, drafts) is None:
            self.prepare_graphs(1 << (self._requests - 1).bit_length(), drafts)
        self._room = self._room_for(self._requests, drafts)
        if links is not None and self._room is not None:
            self._room.take_links(links)

    def begin(self) -> None:
        room, requests = self._room, self._requests
        assert room is not None, "plan comes first"
        room.rows[:requests].copy_(self._rows)
        room.stored[:requests].copy_(self._seq_lens)
        ancestors = None
        if room.links is not None:
            ancestors = ancestors_of(TreeLinks(*(x[:requests] for x in room.links))).flatten()
        self.step = Step.verification(room.rows[:requests], room.stored[:requests], room.drafts, ancestors)
        self._ran = 0

    def run(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: Scaling,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        step = self._planned(q, scaling, sink_logits)
        q, key, value = self._fitted(layer, q, key, value)
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

    def replayed(self, requests: int, drafts: int, links: TreeLinks | None = None) -> None:
        """A graph holds the pass that is to be committed, of so many requests with padding. It is launched behind this.
        links: of the trees of those that are none."""
        self._room, self._requests, self._ran = self._room_for(requests, drafts), requests, self.state.num_layers
        if links is not None and self._room is not None:
            self._room.take_links(links)

    def commit(self, accepted: torch.Tensor, left: Sequence[int] = (), path: torch.Tensor | None = None) -> None:
        """Store the first ``accepted`` ([B] integers, on the device) tokens of each chain or path; requests past these
        are padding. Of requests that ``left`` (their places in the batch) after the pass was planned nothing is stored.

        path: [B, longest path] integers, of trees: places of the accepted drafts among the pass's tokens, in order.
        Past the accepted ones any number stands, as -1.
        """
        room, requests, given = self._room, self._requests, accepted.shape[0]
        assert room is not None and given <= requests, "plan comes first"
        assert self._ran == self.state.num_layers, "every layer has run"
        room.accepted[:given].copy_(accepted)
        room.accepted[given:requests].zero_()
        if left:
            room.accepted[to_device(left, room.accepted.device)] = 0
        assert (path is None) == (room.path is None), "trees have paths, chains have none"
        if path is not None and room.path is not None:
            room.path[:given].copy_(path.clamp(min=0))
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
        for numbers in (room.rows, room.stored, room.accepted, room.path):
            if numbers is not None:
                numbers.zero_()  # nothing is stored meanwhile
        room.commits[requests] = recorder(lambda: self._store(room, requests))

    def _store(self, room: DraftRoom, requests: int) -> None:
        """The decode steps of the accepted tokens. Launches kernels only, where the ops pad."""
        order = room.accepted[:requests].argsort(descending=True, stable=True)  # so that padding is last
        accepted, rows, stored = (x[:requests][order] for x in (room.accepted, room.rows, room.stored))
        path = None if room.path is None else room.path[:requests][order].T.contiguous()
        for number in range(room.drafts if path is None else len(path)):
            goes_on, lengths = accepted > number, stored + number + 1
            chosen = order * room.drafts + number if path is None else path[number]
            if self.ops.pads:
                self._decode_one(room, torch.where(goes_on, rows, 0), torch.where(goes_on, lengths, 1), chosen)
            elif goes_on.any():
                self._decode_one(room, rows[goes_on], lengths[goes_on], chosen[goes_on])

    def _decode_one(self, room: DraftRoom, rows: torch.Tensor, seq_lens: torch.Tensor, chosen: torch.Tensor) -> None:
        """A decode step of the drafts ``chosen``, whose attention is known: [B] of each."""
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

    def _searched(self, room: DraftRoom) -> Iterator[tuple[range, Scaling]]:
        """Layers that follow one another, see all tokens and have the same scaling."""
        state = self.state
        for (slides, scaling), layers in groupby(
            range(state.num_layers), lambda layer: (state.attention_span(layer) > 0, room.scalings[layer])
        ):
            found = list(layers)
            if not slides:
                yield range(found[0], found[-1] + 1), scaling
