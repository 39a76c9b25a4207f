"""What the page manager and the attention backend ask of a set of kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch

from sglang_diffkv.kernels.attach.reference import seal
from sglang_diffkv.kernels.measure.reference import add_held, tally
from sglang_diffkv.kernels.parts import Part
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation
from sglang_diffkv.kernels.set_blocks.reference import set_blocks
from sglang_diffkv.layout.query_cache import QueryCache
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.layout.transfer import to_device
from sglang_diffkv.ops.decisions import Decisions, Scoring, used_by_heads
from sglang_diffkv.ops.launches import Launches
from sglang_diffkv.policies.base import Observation, Policy


class Scaling(NamedTuple):
    """From products of queries and keys to logits: times ``scale``, then, where there is a ``cap``, ``cap * tanh(logits
    / cap)``."""

    scale: float
    cap: float = 0.0


def usual_scaling(head_dim: int) -> Scaling:
    """Of models that do not say otherwise."""
    return Scaling(head_dim**-0.5)


@dataclass(frozen=True)
class WholeRequests:
    """All tokens of a pass's requests, one request after the other, those that are stored before the new ones.

    Attributes:
        into: [B] int64 on the device, place of each request's first token. lens: tokens of each, on the host; of a
            bounded step one number, of all places. heads: KV heads at a time, a divisor of all. room: their keys and
            values, [places, H, head_dim] and [places, H, v_head_dim]; None where each layer takes memory for them.
    """

    into: torch.Tensor
    lens: tuple[int, ...]
    heads: int
    room: tuple[torch.Tensor, torch.Tensor] | None = None


BEHIND = 256
"""Places behind the last request that a library may read with those of its last tokens: of its largest tile."""


@dataclass(frozen=True)
class BoundedPass:
    """What a pass over few new tokens is, at fixed addresses on the device, so that a CUDA graph can hold it.

    Attributes:
        given: [5, B] int64: rows, stored tokens, new tokens, and who observes (``Step.observe_from``,
            ``observe_every``). Requests past the last one have zeros.
        room: as of ``WholeRequests``, for ``stored`` and ``tokens`` together.
        tokens: new ones of the largest pass. stored: tokens that all requests together have stored at most.
    """

    given: torch.Tensor
    room: tuple[torch.Tensor, torch.Tensor]
    tokens: int
    stored: int


@dataclass
class Step:
    """One forward pass: ``B`` requests with ``extend_lens`` new tokens after ``prefix_lens`` stored ones.

    Tensors are on the state's device. A decode step has one new token a request; those past the first ``num_valid``
    are padding. ``found`` holds what decode attention finds for the policy, ``scratch`` what the ops keep for the
    step, in their own form, and ``launches`` what its layers' launches have in common.
    """

    rows: torch.Tensor  # [B] integers
    seq_lens: torch.Tensor  # [B] integers, new tokens included
    prefix_lens: torch.Tensor  # [B] int64
    extend_lens: torch.Tensor  # [B] int64
    token_rows: torch.Tensor  # [tokens] integers
    token_offset: torch.Tensor  # [tokens] int64
    token_position: torch.Tensor  # [tokens] int64
    num_valid: torch.Tensor  # [1] int32
    num_tokens: torch.Tensor  # [1] int32
    max_extend: int = 1
    max_prefix: int = 0
    counts: tuple[int, ...] = ()  # an extend step's new tokens of each request, on the host
    prefixes: tuple[int, ...] = ()  # and those stored before them
    as_computed: bool = False  # every head of an extend step's requests holds all of their stored tokens
    whole: WholeRequests | None = None  # where stored tokens are read back from pages, for attention to all at once
    found: Any = None
    scratch: Any = None
    launches: Launches = field(default_factory=Launches)
    shared_scores: dict[int, torch.Tensor] = field(default_factory=dict)
    """Request's number -> [L, H, n] float32: scores of the first n tokens, which the row shares, for a copy of its own;
    NaN where there is none yet."""
    unscored: tuple[int, ...] = ()
    """Of each request, its first tokens that get no scores from this pass, on the host: others hold them for it. Empty
    for none."""
    observe_from: torch.Tensor | None = None
    """[B] int64: from this position on all new tokens observe, see ``Observation``; None for 0."""
    observe_every: torch.Tensor | None = None
    """[B] int64: of those before, every Nth; None for what the policy says of short prompts."""
    ancestors: torch.Tensor | None = None
    """[tokens] int64, of trees of drafts: which of its request's drafts each one sees (``extend_attention``); None
    where each sees all before it."""
    ends: tuple[torch.Tensor, torch.Tensor] | None = None
    """[B + 2] int32 each, of a bounded step: 0, then where new tokens, and all tokens, of each request end, and last
    those of the padding."""

    @cached_property
    def starts(self) -> torch.Tensor:
        """[B] int64, a request's first place among the step's tokens."""
        return self.extend_lens.cumsum(0) - self.extend_lens

    def observers(self, observation: Observation) -> dict[str, Any]:
        """Of an extend step, who observes, as its kernels are told: the same kernels whether or not a window is in
        sight."""
        if observation.queries and self.observe_from is None:
            self.observe_from = torch.zeros_like(self.extend_lens)
        if observation.every and self.observe_every is None:
            self.observe_every = torch.full_like(self.extend_lens, observation.every)
        since = self.observe_from if observation.queries else None
        every = self.observe_every if observation.every else 0
        return {"observe_from": since, "observe_every": every, "reduce": observation.reduce}

    @classmethod
    def extend(
        cls, rows: torch.Tensor, prefix_lens: torch.Tensor, extend_lens: torch.Tensor, prefixes: list[int],
        counts: list[int], observe_from: list[int] | None = None, observe_every: list[int] | None = None,
    ) -> Step:  # fmt: skip
        """An extend step. rows, prefix_lens, extend_lens: [B] integers on the device; ``prefixes`` and ``counts`` are
        the latter two on the host, so that nothing waits for the device. ``observe_from``: of each request, the
        position from which on all queries observe; None where all do. ``observe_every``: of those before, every Nth."""
        rows, prefix_lens, extend_lens = rows.long(), prefix_lens.long(), extend_lens.long()
        total, device = sum(counts), rows.device
        if len(counts) == 1:  # a third of the launches, for a pass that takes little longer than they do
            owners, offset = rows.repeat(total), torch.arange(total, device=device)
            position = torch.arange(prefixes[0], prefixes[0] + total, device=device)
            starts = torch.zeros(1, dtype=torch.int64, device=device)
        else:
            owner = torch.arange(len(counts), device=device).repeat_interleave(extend_lens, output_size=total)
            starts = extend_lens.cumsum(0) - extend_lens
            owners, offset = rows[owner], torch.arange(total, device=device) - starts[owner]
            position = prefix_lens[owner] + offset
        since = every = None
        if observe_from and any(observe_from):
            since, *sampled = to_device([observe_from, *([observe_every] if observe_every else [])], device)
            every = sampled[0] if sampled else None
        step = cls(
            rows,
            prefix_lens + extend_lens,
            prefix_lens,
            extend_lens,
            owners,
            offset,
            position,
            torch.full((1,), len(counts), dtype=torch.int32, device=device),
            torch.full((1,), total, dtype=torch.int32, device=device),
            max(counts),
            max(prefixes),
            tuple(counts),
            tuple(prefixes),
            observe_from=since,
            observe_every=every,
        )
        step.starts = starts
        return step

    @classmethod
    def bounded(cls, known: BoundedPass, tokens: int, heads: int) -> Step:
        """An extend step of ``tokens`` new tokens, those that fill up a pass included. Numbers on the host are bounds.

        Launches kernels only, which read what ``known`` holds by then. Padding is a request of its own for attention
        alone, which gives it zeros: it attends to places behind all others, in which zeros are written. Nothing is
        stored for it, and no stored token gets a score. ``heads``: KV heads.
        """
        rows, prefix_lens, extend_lens, since, every = known.given.unbind()
        device = rows.device
        place = torch.arange(tokens, device=device)
        ends, seq_lens = extend_lens.cumsum(0), prefix_lens + extend_lens
        seq_ends = seq_lens.cumsum(0)
        starts = ends - extend_lens
        owner = torch.searchsorted(ends, place, right=True).clamp_(max=len(rows) - 1)
        offset = place - starts[owner]
        places = known.stored + known.tokens
        padding = tokens - ends[-1:]
        query_ends = torch.cat([ends[:1] * 0, ends, ends[-1:] + padding])
        key_ends = torch.cat([ends[:1] * 0, seq_ends, seq_ends[-1:] + padding])
        step = cls(
            rows,
            seq_lens,
            prefix_lens,
            extend_lens,
            rows[owner],
            offset,
            prefix_lens[owner] + offset,
            (extend_lens > 0).sum(0, keepdim=True).int(),
            ends[-1:].int(),
            max_extend=tokens,
            max_prefix=known.stored,
            counts=(tokens,),
            prefixes=(known.stored,),
            whole=WholeRequests(seq_ends - seq_lens, (places,), heads, known.room),
            unscored=(known.stored,),
            observe_from=since,
            observe_every=every,
            ends=(query_ends.int(), key_ends.int()),
        )
        step.starts = starts
        behind = seq_ends[-1:] + torch.arange(max(tokens, BEHIND), device=device)
        for x in known.room:  # places of requests are written by each layer, behind this
            x.index_fill_(0, behind.clamp_(max=len(x) - 1), 0)
        return step

    @classmethod
    def verification(
        cls, rows: torch.Tensor, seq_lens: torch.Tensor, drafts: int, ancestors: torch.Tensor | None = None
    ) -> Step:
        """``drafts`` tokens of each request, behind ``seq_lens`` stored ones, to be verified. rows, seq_lens: [B]
        integers on the device, whose values the host need not know. ``ancestors``: [B * drafts] int64, of trees; see
        the field. Offsets and positions are those of a chain, in a tree too."""
        rows, seq_lens, device = rows.long(), seq_lens.long(), rows.device
        batch = rows.shape[0]
        offset = torch.arange(drafts, device=device).expand(batch, drafts)
        return cls(
            rows,
            seq_lens + drafts,
            seq_lens,
            torch.full_like(rows, drafts),
            rows.unsqueeze(1).expand(batch, drafts).reshape(-1),
            offset.reshape(-1),
            (seq_lens.unsqueeze(1) + offset).reshape(-1),
            torch.full((1,), batch, dtype=torch.int32, device=device),
            torch.full((1,), batch * drafts, dtype=torch.int32, device=device),
            max_extend=drafts,
            max_prefix=1,
            counts=(drafts,) * batch,
            ancestors=ancestors,
        )


class RowKernels(NamedTuple):
    """Kernels over rows that all ops call in one way; each has the arguments of its reference."""

    attach: Callable[..., None]
    transfer_pages: Callable[..., None]
    freeze: Callable[..., None]
    keep: Callable[..., None]
    count_rows: Callable[..., torch.Tensor]
    measure: Callable[..., torch.Tensor]
    store_queries: Callable[..., None]


class Ops(ABC):
    """Kernels over a ``PageState``, for a policy. The references in ``kernels/<op>/reference.py`` are their
    specification, and have more on their arguments.

    Tensors are on the state's device. ``B`` requests have ``tokens`` new tokens, ``H`` KV heads, ``Hq`` query heads.
    q is [tokens, Hq, head_dim], key [tokens, H, head_dim], value [tokens, H, v_head_dim], what attention gives [tokens,
    Hq, v_head_dim]. ``sink_logits``: [Hq], see ``kernels/decode_attention``; None for a softmax without sinks.
    ``rotation``: what is rotated before it is stored. ``num_valid``: [1] int32, requests that are not padding; None for
    all.

    ``score_running``, ``compact_scored``, ``copy_scored`` and ``transfer_pages`` take a group of layers
    (``PageState.groups``), with the queries of these layers. One group's scoring is in the memory of the next one's.
    """

    pads: ClassVar[bool]
    """Whether rows 0 at the end of a decode step are padding, so that shapes need not follow values."""
    of_rows: ClassVar[RowKernels]

    decisions: Decisions
    reads_new_tokens: bool
    """Whether a prompt's new tokens are read from pages, like those before them."""

    def __init__(self, state: PageState, policy: Policy):
        self.state, self.policy = state, policy
        self.used = used_by_heads(state, policy)
        """[L, H, T] int32, 1 where a head may have tokens of a tier; None where all may."""

    @property
    def step_tiers(self) -> int:
        """The first tiers whose tokens' scores decode steps keep up."""
        return self.policy.step_tiers(len(self.state.fmt.tiers))

    @property
    def search_rule(self) -> dict[str, Any]:
        """How a generation step keeps scores and what it passes over, as its kernels are told."""
        return self.decisions.search_rule(self.state, self.policy)

    # Steps

    @abstractmethod
    def prepare_graphs(self, max_batch: int) -> None:
        """Static buffers for decode steps of up to ``max_batch`` requests that a CUDA graph will hold."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes on the device that the ops hold beside the state, by what they are for."""

    @abstractmethod
    def decode_step(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> Step:
        """A decode step over rows and seq_lens, [B] integers, whose values ``begin`` reads."""

    def rounds_prompts(self, prefixes: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether a pass over prompts with so many stored and new tokens attends in 8 bits."""
        return False

    @abstractmethod
    def begin(self, step: Step, decode: bool, *, attends: bool = True) -> None:
        """Slots and pages for the step's new tokens in all layers; for decode a graph may hold it. ``attends``: whether
        ``decode`` follows in its layers."""

    @abstractmethod
    def reserve(self, rows: torch.Tensor, new_tokens: torch.Tensor, most: int) -> None:
        """Slots and pages for new tokens of rows, ``most`` of one at most."""

    @abstractmethod
    def rotate(self, *tensors: torch.Tensor, launches: Launches | None = None) -> tuple[torch.Tensor, ...]:
        """One to three tensors [tokens, heads, dim], rotated alike; twice gives them back. ``launches``: of the step
        that they are of."""

    @abstractmethod
    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, step: Step, *, rotation: Rotation = NO_ROTATION,
        key_means: torch.Tensor | None = None, query: torch.Tensor | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        """Store the step's new tokens. Gives ``query``, like q, back as it attends to what is stored. ``key_means``:
        [H, head_dim] float32, taken off keys; they are rotated already."""

    @abstractmethod
    def new_found(self, batch: int) -> Any:
        """Room for what decode attention finds for the policy."""

    @abstractmethod
    def decode(
        self, layer: int, q: torch.Tensor, step: Step, scaling: Scaling, sink_logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of a decode step to what is stored."""

    @abstractmethod
    def extend(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step, scaling: Scaling,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of new tokens, in the form of stored ones, to themselves and to what is stored."""

    @abstractmethod
    def extend_unpacked(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step, scaling: Scaling, *,
        rotation: Rotation = NO_ROTATION, key_means: torch.Tensor | None = None,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        """As ``extend``, of new tokens as the model gives them: they attend to stored ones that are read back from
        pages (``kernels/read_back``). None, doing nothing, where this is not done in this layer of this step.
        ``key_means``: [H, head_dim] float32, what is taken off keys, not rotated."""

    @abstractmethod
    def verify(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step, scaling: Scaling,
        sink_logits: torch.Tensor | None = None, lse: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of drafts (``Step.verification``), which are not stored, to themselves and to what their rows hold.
        Nothing changes, scores neither. ``lse``: [tokens, Hq] float32, gets each query's log-sum-exp, base 2."""

    @abstractmethod
    def score_step(
        self, layers: range, q: torch.Tensor, lse: torch.Tensor, chosen: torch.Tensor, step: Step, scaling: Scaling
    ) -> None:
        """What ``decode`` does for the policy, in several layers at once, where the attention of the step's tokens is
        known. Of the tokens of ``q`` [L, tokens, Hq, head_dim] and ``lse`` [L, tokens, Hq] they are the ``chosen`` [B].
        Both are empty where no scores are kept."""

    def store_queries(self, cache: QueryCache, layer: int, q: torch.Tensor, step: Step) -> None:
        """Keep a decode step's queries of the requests that have a query slot."""
        self.of_rows.store_queries(cache, layer, q.contiguous(), step.rows, step.seq_lens)

    @abstractmethod
    def slide(self, rows: torch.Tensor, seq_lens: torch.Tensor, num_valid: torch.Tensor | None = None) -> None:
        """Behind a decode step: sliding layers drop what has left their window. Distinct rows but for padding."""

    @abstractmethod
    def compact_step(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, found: Any, num_valid: torch.Tensor | None = None
    ) -> None:
        """Behind a decode step: what the policy makes of what was ``found``."""

    # Compaction and copies

    @abstractmethod
    def compact_prompts(
        self, ends: Sequence[tuple[int, int]], policy: Policy, tails: Sequence[int] | None = None
    ) -> None:
        """Prompt-phase compaction of different rows, each with the length of its sequence and, if ``tails`` are given,
        of its tail. ``policy``: whose rule, this one's or another."""

    @abstractmethod
    def copy_compact(
        self, target: int, parts: Sequence[Part], seq_len: int, policy: Policy, shared_scores: torch.Tensor | None
    ) -> None:
        """Copy-on-compress of parts of rows into a row that has room for them. ``policy``: as above."""

    def score_running(
        self, layers: PageState, row: int, seq_len: int, queries: torch.Tensor, scaling: Scaling, *, first: bool,
        most: int, beside: int | None = None,
    ) -> Scoring:  # fmt: skip
        """As ``Decisions.of_running``; with ``beside`` in the memory for scorings beside forward passes, from this
        position on."""
        decisions = self.decisions if beside is None else self.decisions.beside(layers, beside)
        return decisions.of_running(layers, row, seq_len, self.policy, queries, scaling, first=first, most=most)

    @abstractmethod
    def compact_scored(self, layers: PageState, row: int, seq_len: int, scoring: Scoring) -> None:
        """Compaction of a row that has all its tokens to itself, in one tier, as it was scored."""

    @abstractmethod
    def copy_scored(
        self, layers: PageState, target: int, parts: Sequence[Part], seq_len: int, scoring: Scoring
    ) -> None:
        """Copy-on-compress of all that a row held, as it was scored."""

    # Rows

    def set_blocks(self, at: Sequence[int], blocks: Sequence[int]) -> None:
        """Table blocks of rows, at flat places of ``PageState.row_blocks``."""
        set_blocks(self.state.row_blocks, at, blocks)

    def attach(self, target: int, source: int, lo: int, hi: int, *, kept_only: bool = False) -> None:
        self.of_rows.attach(self.state, target, source, lo, hi, kept_only=kept_only)

    def attach_paths(self, paths: Sequence[tuple[int, Sequence[Part]]]) -> None:
        """``attach`` parts of rows to targets that differ, one part after the other: (target, parts) of each. No target
        is a source."""
        for target, parts in paths:
            for source, lo, hi in parts:
                self.attach(target, source, lo, hi)

    def transfer_pages(self, layers: PageState, row: int, target: int) -> None:
        self.of_rows.transfer_pages(layers, row, target)

    def freeze(self, rows: int | torch.Tensor, tails: torch.Tensor | None = None) -> None:
        self.of_rows.freeze(self.state, rows, tails)

    def keep(self, row: int) -> None:
        self.of_rows.keep(self.state, row)

    def seal(self, row: int) -> None:
        """Freeze a row, all of whose entries a segment holds."""
        seal(self.state, row)

    @abstractmethod
    def release(self, row: int) -> None: ...

    @abstractmethod
    def trim(self, row: int, end: int) -> None: ...

    def count_rows(self, rows: torch.Tensor, *, steps: int, low_grows: bool) -> torch.Tensor:
        return self.of_rows.count_rows(self.state, rows, steps=steps, low_grows=low_grows, used=self.used)

    def measure(self, rows: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
        return self.of_rows.measure(self.state, rows, lo, hi)

    def add_held(self, rows: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, out: torch.Tensor) -> None:
        """Tokens of each tier that ``rows`` ([n]) hold, over layers and heads, are added to ``out`` [n, T] int64."""
        add_held(self.state, rows, lo, hi, out)

    def tally(self, row: int, hi: int, out: torch.Tensor, number: int) -> None:
        """What a row holds below position ``hi``, into ``out[number]``."""
        tally(self.state, row, hi, out, number)

    @abstractmethod
    def list_pages(self, asked: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages of rows and what is known of each: ``kernels/list_pages``."""

    @abstractmethod
    def count_owners(self, rows: torch.Tensor) -> torch.Tensor:
        """Pages that ``rows`` of requests ([n] int64) alone refer to, they and the prefix cache, and it alone: [3]
        int64. Between two steps."""
