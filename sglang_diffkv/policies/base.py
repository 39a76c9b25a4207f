"""What a method is made of: a policy states what it observes, how it decides at the end of a prompt, and what it wants
of each generation step. It never moves bytes, and no kernel knows a policy: kernels get tensors of cuts, which
``ops/decisions.py`` works out.

A method is one file of this folder: a policy (a frozen dataclass) and its options (``options.py``), which
``registry.py`` lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sglang_diffkv.layout.geometry import kv_slots_for
from sglang_diffkv.layout.page_format import PageFormat
from sglang_diffkv.layout.spans import kept_in_layers
from sglang_diffkv.policies.budget import Budget

HeadValues = tuple[tuple[float, ...], ...]
"""[layers][KV heads]."""
LayerValues = tuple[float, ...]
"""[layers]."""

NEVER = float(1 << 27)
"""No token receives so many times the mean attention: a mean over one token is 1, and a sequence has fewer tokens."""


SAMPLED = 512
"""Tokens of a prompt that observe beside the newest ones, at most, where they are sampled."""


@dataclass(frozen=True)
class Observation:
    """Whose attention makes a token's score, and what a KV head makes of its query heads.

    A score is the mean attention from the later tokens that observe. In the generation phase every new token does, and
    the prompt's mean then counts as that of all later prompt tokens.
    """

    queries: int = 0
    """Newest tokens of a prompt that all observe in the prompt phase; 0: all."""
    every: int = 0
    """Every Nth of the tokens before them observes, and counts N times; 0: none."""
    sparsest: int = 0
    """Of a prompt in which more than ``SAMPLED`` would observe so, every 2Nth does, or every 4Nth and so on, up to
    this."""
    reduce: Literal["max", "mean"] = "max"
    """Over the query heads of a KV head."""

    def since(self, ends: Sequence[int]) -> list[int] | None:
        """The position from which on all observe, of each prompt that ends at ``ends``; None where all do."""
        return [max(end - self.queries, 0) for end in ends] if self.queries else None

    def every_of(self, ends: Sequence[int]) -> list[int]:
        """Every how manieth token observes before those that all do, in each prompt that ends at ``ends``."""
        return [self._every(end) for end in ends]

    def _every(self, end: int) -> int:
        every = self.every
        while every and end > every * SAMPLED and 2 * every <= self.sparsest:
            every *= 2
        return every


@dataclass(frozen=True)
class Attention:
    """Scores are the attention that tokens receive, as the policy's ``observation`` says. Passes learn them, and pages
    keep them."""


@dataclass(frozen=True)
class KeyNorm:
    """Scores are 1 / (L2 norm of a token's stored key): ``kernels/key_norms``. They are computed when they are asked
    for."""


@dataclass(frozen=True)
class Random:
    """Scores are drawn by a hash of ``seed``, layer, KV head and position: ``kernels/random_scores``. ``first_head``:
    number in the model of a rank's first KV head."""

    seed: int
    first_head: int = 0


ScoreSource = Attention | KeyNorm | Random
"""Where the scores come from that a rule compares. All but attention are for rules that rank a head's tokens at the end
of a prompt (``TopCount``, ``Across``)."""


@dataclass(frozen=True)
class Pointwise:
    """Each token by itself: at or above ``high`` times the mean attention it stays in the high tier, at or above
    ``low`` times that it stays. With a single tier ``low`` alone decides. With more than two, ``between`` are the
    thresholds of the tiers from the second to the last but one, falling; those that are too many are not used. Each is
    one for all layers, or one for each: a layer in which a tier's threshold is the one before uses that tier for
    nothing.

    The mean attention of a prompt's token at 0-based position ``i`` is ``1 / (i + 1)``, that of a generation step
    ``1 / length``. There the candidate, which leaves the window, is scored, and if it stays the least significant token
    (DiffKV's Algorithm 1).
    """

    high: float | HeadValues
    low: float | HeadValues
    scale: HeadValues | None = field(default=None, repr=False)
    """Positive factors of all thresholds; None for 1 everywhere."""
    between: tuple[float | LayerValues, ...] = ()

    @property
    def prunes(self) -> bool:
        return max(_each(self.low)) > 0

    @property
    def layers(self) -> int | None:
        """How many layers ``between`` is for; None for any number."""
        return next((len(x) for x in self.between if isinstance(x, tuple)), None)

    def used_tiers(self, tiers: int, layer: int) -> tuple[int, ...]:
        """Of so many tiers, those in which ``layer`` may have tokens. Of thresholds that differ between heads: all."""
        between = [x[layer] if isinstance(x, tuple) else x for x in self.between[: max(tiers - 2, 0)]]
        if tiers <= 2 or isinstance(self.high, tuple) or isinstance(self.low, tuple) or len(between) < tiers - 2:
            return tuple(range(tiers))
        ends = [self.high, *between, self.low]
        return (0, *(tier for tier in range(1, tiers) if ends[tier] < ends[tier - 1]))

    def scored_tiers(self, tiers: int) -> int:
        """Of so many tiers, the first ones whose tokens' scores could change a decision. A token of a tier is compared
        with the thresholds from its own tier's on, and none of 0, which any score reaches, or beyond
        ``NEVER`` asks for the score. Nor does one whose tier has no tokens."""
        least = min(_each(self.scale or 1.0))

        def asks(threshold: float) -> bool:
            return 0 < threshold * least < NEVER

        if any(map(asks, _each(self.low))):
            return tiers
        if tiers == 1:
            return 0
        found = int(any(map(asks, _each(self.high))))
        for layer in range(self.layers or 1):
            used = self.used_tiers(tiers, layer)
            for tier, threshold in enumerate(self.between[: max(tiers - 2, 0)], 1):
                here = threshold[layer] if isinstance(threshold, tuple) else threshold
                if tier in used and asks(here):
                    found = max(found, tier + 1)
        return found


def _each(value: float | HeadValues) -> list[float]:
    """The values of all heads."""
    return [x for layer in value for x in layer] if isinstance(value, tuple) else [value]


@dataclass(frozen=True)
class _Ranked:
    """A whole head at once: tokens are ranked, those in front stay, of equals the first. Window and sinks stay in any
    case.

    ``quantity``: rank by the mean attention or by its sum over the later tokens. ``smooth`` (odd): a token counts with
    the largest value (``pooling`` "max") or the mean ("average") of so many neighbours, itself in the middle. Window,
    sinks and what lies beyond the ends count as 0.
    """

    quantity: Literal["mean", "sum"] = field(default="mean", kw_only=True)
    smooth: int = field(default=1, kw_only=True)
    pooling: Literal["max", "average"] = field(default="max", kw_only=True)

    @property
    def prunes(self) -> bool:
        return True

    def scored_tiers(self, tiers: int) -> int:
        """As of ``Pointwise``: all, since the tokens of a head are ranked together."""
        return tiers


@dataclass(frozen=True)
class Redundancy:
    """How far a token's key repeats others, which lowers its value: ``weight`` times a softmax, at ``temperature``,
    over the head's tokens of each one's mean cosine with the others; see ``kernels/redundancy``.

    ``block``: keys are compared within so many neighbouring tokens; 0: all with all.
    """

    weight: float
    temperature: float
    threshold: float = 0.5
    block: int = 256


@dataclass(frozen=True)
class TopCount(_Ranked):
    """The first ``budget`` tokens of a head stay, window and sinks among them; with two tiers the first ``high`` of
    them in the high one, all by default. ``redundancy`` is taken off the values after smoothing."""

    budget: Budget
    high: Budget | None = None
    redundancy: Redundancy | None = None


@dataclass(frozen=True)
class TopMass(_Ranked):
    """The fewest tokens stay whose values sum to ``share`` (0 to 1) of those of all tokens outside window and sinks.
    With two tiers, those that sum to ``high`` stay in the high one, all by default."""

    share: float
    high: float | None = None


@dataclass(frozen=True)
class LeastMass(_Ranked):
    """Of the tokens with the smallest values, the most go whose values sum to less than ``out`` (0 to 1) of those of
    all the sequence's tokens. With two tiers the most that sum to less than ``low`` leave the high one. Window and
    sinks count in the sum."""

    out: float
    low: float

    @property
    def prunes(self) -> bool:
        return self.out > 0


@dataclass(frozen=True)
class Across(_Ranked):
    """One budget for all heads of all layers: the sum of what ``budget`` gives to each, for the first tokens of all."""

    budget: Budget
    high: Budget | None = None


@dataclass(frozen=True)
class AcrossLayers(_Ranked):
    """One size for all layers: token after token goes to the layer whose next one adds most to the share of importance
    that is retained, of equals to the first. Each head keeps as many as its layer was given, its own first ones.

    A token's importance in a layer is the mean of its values over the layer's KV heads. Layers are given tokens until
    they have on average the share ``keep`` of those outside window and sinks, or, if it is given, until the mean over
    layers of the share of importance is ``retention``. With two tiers the first ``high`` (a share) of what a head keeps
    so stay in the high one, all by default.
    """

    keep: float = 1.0
    retention: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Share:
    """As ``Pointwise`` in a generation step, but with thresholds that are shares of the sum of the scores of all tokens
    that a head holds."""

    high: float
    low: float

    @property
    def prunes(self) -> bool:
        return self.low > 0

    def scored_tiers(self, tiers: int) -> int:
        """As of ``Pointwise``: all, since they are in the sum."""
        return tiers


@dataclass(frozen=True)
class Count:
    """A head that is at its budget drops its least significant token outside the window."""

    budget: Budget

    @property
    def prunes(self) -> bool:
        return True

    def scored_tiers(self, tiers: int) -> int:
        """As of ``Pointwise``: all."""
        return tiers


@dataclass(frozen=True)
class Running:
    """A running request never holds more than ``limit`` tokens a head for long: once it does, all of them are scored
    again, by its newest queries, and ``keep`` stay.

    A token's score is then the larger of its new one and ``decay`` times the one it had. ``queries``: newest queries
    that score, each by its attention to the tokens up to its own. The policy's prompt rule says which tokens stay; it
    smooths values the first time only. ``slots``: requests whose queries are kept at the same time, as a share of those
    that may run; the others wait, and hold more meanwhile. ``constrained``: no more run than have their queries kept.
    ``asynchronous``: a request is scored beside the next pass, and is in no decode step meanwhile.
    """

    limit: int
    keep: int
    queries: int
    decay: float
    slots: float = 1.0
    constrained: bool = False
    asynchronous: bool = False


WholeHead = TopCount | TopMass | LeastMass | Across | AcrossLayers
PromptRule = Pointwise | WholeHead
StepRule = Pointwise | Share | Count


class Policy:
    """A compression policy. Policies are frozen dataclasses; one instance serves all requests.

    Their fields have no defaults: those of a method stand in its configuration alone. So a field that is named as one
    of the attributes here says ``= field()``; otherwise a dataclass would take the attribute for its default.
    """

    window: int = 0
    """Newest tokens of a request that always stay in the high tier."""
    sinks: int = 0
    """First tokens of a sequence that always stay in the high tier."""
    horizon: int = 0
    """Later tokens after which a score forgets, see ``kernels/decode_attention``; 0: it is a mean over all."""
    generated_every: int = 1
    """Every Nth generated token observes those before it, and counts N times."""
    layer_stride: int | None = None
    """Layers that are scored and compacted at a time, by a rule that scores each head by itself; None: all."""

    @property
    def score_source(self) -> ScoreSource:
        """What tokens are scored by."""
        return Attention()

    @property
    def observation(self) -> Observation:
        """Whose attention it is, where tokens are scored by attention."""
        return Observation()

    @property
    def search_rule(self) -> dict[str, Any]:
        """How a generation step keeps scores and what it passes over, as its kernels are told."""
        rule = {"window": self.window, "sinks": self.sinks, "horizon": self.horizon, "every": self.generated_every}
        return {**rule, "reduce": self.observation.reduce}

    @property
    def prompt(self) -> PromptRule | None:
        """How a prompt's tokens are sorted into tiers at its end; None: they stay."""
        return None

    @property
    def generation(self) -> StepRule | None:
        """What happens in each generation step; None: nothing."""
        return None

    @property
    def under_pressure(self) -> Policy | None:
        """The rule by which running requests' own tokens are compressed once more before one of them is retracted; None
        for none."""
        return None

    @property
    def of_turns(self) -> Policy | None:
        """The rule by which the prefix cache compresses what it has of a conversation's earlier turns, once ``window``
        tokens have followed: its own window is how many of each turn's newest tokens stay. None: they stay as they
        were when their request ended."""
        return None

    @property
    def least_window(self) -> int | None:
        """The smallest window that a request may have for itself; None where all have the policy's."""
        return None

    def with_window(self, window: int) -> Policy:
        """The same for a request with a window of its own, of at least ``least_window`` tokens."""
        raise NotImplementedError(f"{type(self).__name__} has one window for all requests")

    @property
    def running(self) -> Running | None:
        """When a running request is scored again; None: never. Generation steps then keep no scores up."""
        return None

    def scored_tiers(self, tiers: int) -> int:
        """Of so many tiers, the first ones whose tokens' scores some decision reads, in prompts, copies or generation
        steps: 0 with a window alone. Tokens of the other tiers have no score, and what passes learn of it is not
        recorded. 0 where scores are no attention."""
        if not isinstance(self.score_source, Attention):
            return 0
        return max((rule.scored_tiers(tiers) for rule in (self.prompt, self.generation) if rule is not None), default=0)

    def used_tiers(self, tiers: int, layer: int) -> tuple[int, ...]:
        """Of so many tiers, those in which tokens of ``layer`` may be, in order."""
        rules = (self.prompt, self.generation)
        used = [rule.used_tiers(tiers, layer) for rule in rules if isinstance(rule, Pointwise)]
        if len(used) < sum(rule is not None for rule in rules) or not used:
            return tuple(range(tiers))
        return tuple(sorted(set().union(*used)))

    @property
    def searches_steps(self) -> bool:
        """Whether generation steps look for tokens to move, and keep scores up where there are any."""
        return self.compresses and self.running is None

    def step_tiers(self, tiers: int) -> int:
        """Of so many tiers, the first ones whose tokens' scores generation steps keep up."""
        if not self.searches_steps:
            return 0
        return min(self.scored_tiers(tiers), tiers if self.scores_low else 1)

    @property
    def compresses(self) -> bool:
        """False if the policy never moves a token, so that scores need not be kept."""
        return self.prompt is not None or self.generation is not None

    @property
    def scores_low(self) -> bool:
        """False if no decision of a generation step reads scores of lower tiers, which are then not kept up there."""
        return self.prunes or isinstance(self.generation, Share)

    @property
    def prunes(self) -> bool:
        """Whether tokens may be dropped where there is more than one tier."""
        return any(rule is not None and rule.prunes for rule in (self.prompt, self.generation))

    @property
    def kept_share(self) -> float | None:
        """Share of a long prompt's tokens that heads keep on average; None where that is not known before."""
        return None

    def of_rank(self, rank: int, ranks: int, heads: int) -> Policy:
        """For the ``heads`` KV heads that one of so many tensor-parallel ranks has."""
        return self


def kept_share(policy: Policy, longest: int) -> float | None:
    """``Policy.kept_share``; of the longest sequence where running requests hold a budget."""
    return policy.kept_share if policy.running is None else min(policy.running.keep / longest, 1.0)


def has_scores(policy: Policy) -> bool:
    """Whether the policy's rules compare scores that its source has."""
    if isinstance(policy.score_source, Attention):
        return True
    ranks = isinstance(policy.prompt, TopCount | Across) and policy.prompt.quantity == "mean"
    return ranks and policy.generation is None and policy.running is None


def prunes(policy: Policy, tiers: int) -> bool:
    """Whether a policy may drop tokens where there are so many tiers."""
    return policy.prunes or (policy.compresses and tiers == 1)


def kv_slots_of(
    policy: Policy,
    capacity: int,
    fmt: PageFormat,
    longest: int,
    attention_spans: Sequence[int] = (),
    *,
    owning: bool = False,
) -> int:
    """KV slots of a pool of ``capacity`` high-tier tokens whose longest sequence has ``longest``, for layers of these
    ``attention_spans`` (see ``Geometry``). ``owning``: as for ``kv_slots_for``."""
    dropped = prunes(policy, len(fmt.tiers))
    share = kept_share(policy, longest)
    layers = kept_in_layers(attention_spans, longest)
    return kv_slots_for(capacity, fmt, prunes=dropped, kept_share=share, in_layers=layers, owning=owning)
