"""A short ladder of configurations, and which of its rungs a server takes for a model that it does not know
(``--diffkv-config auto``, or no configuration). It is the first one that loses no more than stock SGLang's FP8 cache
does, as the model itself measures it, with a tenth of that and three standard errors to spare.

A few layers make most of the loss. So where a rung loses too much and the next one does not, some models take the next
one's low tier in those layers alone. The layers that make most of the loss take it in any case, since other texts may
lose more than the one that is read, and mostly there.

``attention/emulated.py`` works out the losses, ``srt/startup/own_choice.py`` has the served model read for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import groupby
from math import inf, isfinite
from typing import Any

import torch

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.key_means import AUTO

FORMAT = 7
"""Raised where a choice of an older package is not to be used."""
JUDGING = "judging.txt"
"""The text on which rungs are judged: one long account whose names and numbers return. Of a text in parts that know
nothing of each other every rung loses too little, since nothing far away is looked for. It is not the text of the key
means."""
TOKENS, LEAST_TOKENS = 2560, 1024
"""Of the text: read at most, and needed at least. A CPU, which takes a minute for more, reads no more than needed."""
SHARE, ERRORS = 0.9, 3.0
"""Of FP8's loss, which a rung loses at most on the text, and standard errors that are added to what it loses there. Of
some models few tokens make most of the loss: then the errors are large, and on other texts it may be much larger."""
SCORED = 512
"""Queries of a prompt, and of a reply, whose next-token distributions are compared, at most."""


ALPHA_HIGH = 20.0
"""Few tokens in the high tier are enough: it loses what 10 loses, in fewer bytes."""


def pair(low: str, high: str, alpha_high: float = ALPHA_HIGH) -> dict[str, Any]:
    """Fields of a configuration with two tiers and a small window."""
    policy = {"name": "diffkv", "alpha_high": alpha_high, "window": 64}
    return {"tiers": [high, low], "rotate": "both", "key_means": AUTO, "policy": policy}


RUNGS: Mapping[str, Mapping[str, Any]] = {
    "K8V4 and K4V2": pair("K4V2", "K8V4", 3.0),
    "K8V6 and K4V3": pair("K4V3", "K8V6"),
    "K8V6 and K5V3": pair("K5V3", "K8V6"),
    "K8V6 and K5V4": pair("K5V4", "K8V6"),
    "K8V6 and K6V4": pair("K6V4", "K8V6"),
    "K8V5": {"tiers": ["K8V5"], "rotate": "both", "key_means": AUTO},
    "K8V8": {"tiers": ["K8V8"], "rotate": "both", "key_means": AUTO},
    "lossless": {"tiers": ["BF16"]},
}
"""Name -> fields, the fewest bytes first. The last loses nothing, so there is always one.

What a model pays much attention to needs values of 6 bits, or some models lose more than with FP8 whatever the low tier
is. The low tier's keys need 5 bits
at least where heads are large and few, its values 4. ``benchmarks/results/emulated_cpu.md`` and ``judging_cpu.md`` have
the figures."""
BY_LAYER = (("K8V6 and K5V4", "K8V6 and K6V4"),)
"""Rungs, each with the next one, whose low tier may be taken in some layers alone. Others lose too much on other texts
than the one on which layers are found."""
COARSE = "K3V2"
"""Low tier by which layers are told apart: with few bits a layer's loss is far above what a model's own rounding
makes of any change."""
MOST_GROUPS, CPU_GROUPS = 40, 6
"""Groups of layers whose losses are looked at, at most; on a CPU, where the model takes seconds to read the text."""
MOST_RAISED = 0.75
"""Of the layers: the next rung itself takes hardly more bytes."""
IN_ANY_CASE, MOST_IN_ANY_CASE = 0.75, 1 / 3
"""Layers that make this share of the loss are raised in any case, if they are no more than so many of all."""
NOTHING_LOST = "lossless"
DECIDED = frozenset().union(*RUNGS.values())
"""Fields that rungs set."""


@dataclass(frozen=True)
class Loss:
    """Mean KL divergence from the model without a compressed cache, in nats a token, less what rounding alone makes.

    Attributes:
        prompt: of a new prompt behind a cached one. reply: of the reply.
        prompt_error, reply_error: standard errors of the mean differences from ``SHARE`` of FP8's, position by
            position.
    """

    prompt: float
    reply: float
    prompt_error: float = 0.0
    reply_error: float = 0.0

    @classmethod
    def of(cls, lost: torch.Tensor, fp8: torch.Tensor, prompt: int, rounding: torch.Tensor | float = 0.0) -> Loss:
        """From divergences [M] of positions, of which the first ``prompt`` are of the prompt. Neither part has fewer
        than two.

        Args:
            fp8: the same of FP8. rounding: of ``RoundedAgain``, which is taken off.
        """
        means, errors = [], []
        more, allowed = lost - rounding, SHARE * (fp8 - rounding)
        for part in (slice(None, prompt), slice(prompt, None)):
            mine = more[part]
            error = float((mine - allowed[part]).std()) / len(mine) ** 0.5
            mean = float(mine.mean())
            means.append(max(mean, 0.0) if isfinite(mean) else inf)
            errors.append(error if isfinite(error) else inf)
        return cls(*means, *errors)

    def within(self, limit: Loss) -> bool:
        """Whether it is at most ``SHARE`` of ``limit`` in both, with ``ERRORS`` standard errors to spare. It is not
        where it loses all, whatever ``limit`` loses."""
        prompt, reply = self.prompt + ERRORS * self.prompt_error, self.reply + ERRORS * self.reply_error
        known = isfinite(prompt) and isfinite(reply)
        return known and prompt <= SHARE * limit.prompt and reply <= SHARE * limit.reply

    def report(self) -> dict[str, float]:
        """Means in millinats, as JSON data."""
        return {"prompt": round(1e3 * self.prompt, 3), "reply": round(1e3 * self.reply, 3)}


Raised = tuple[int, ...]
"""Layers, in order, that take the low tier of the next rung; counted among those that have pages."""


@dataclass(frozen=True)
class ByLayer:
    """Which layers take the low tier of the rung above.

    Attributes:
        layers: that the model has. alone: of each group of layers what it loses with ``COARSE`` while all others are
            as computed. judged: the losses of what was tried, in order. raised: what is taken; None if the rung above
            is.
    """

    layers: int
    alone: Mapping[Raised, Loss]
    judged: Mapping[Raised, Loss]
    raised: Raised | None


@dataclass(frozen=True)
class Choice:
    """The rung that is taken, what FP8 loses, and the losses of the rungs that were judged, in their order.
    ``by_layer``: where layers were told apart. ``rounding``: what was taken off all losses."""

    rung: str
    fp8: Loss
    judged: Mapping[str, Loss]
    by_layer: ByLayer | None = None
    rounding: Loss | None = None

    @property
    def raised(self) -> Raised | None:
        """Layers that take the rung's low tier, others that of the rung before; None if all do."""
        return None if self.by_layer is None else self.by_layer.raised

    @property
    def name(self) -> str:
        """What is taken, in words."""
        return self.rung if self.by_layer is None else name_of(self.rung, self.by_layer.raised)

    def config(self, given: DiffKVConfig) -> DiffKVConfig:
        """What is taken, with the fields that the user gave beside ``auto``."""
        return config_of(given, self.rung, self.raised, 0 if self.by_layer is None else self.by_layer.layers)

    @property
    def loss(self) -> Loss | None:
        """Of what is taken; None where nothing is lost."""
        if self.by_layer is not None and self.by_layer.raised is not None:
            return self.by_layer.judged[self.by_layer.raised]
        return self.judged.get(self.rung)


def name_of(rung: str, raised: Raised | None) -> str:
    """What a choice is called."""
    if raised is None:
        return rung
    listed = f"layer {raised[0]}" if len(raised) == 1 else f"layers {', '.join(map(str, raised))}"
    return f"{before(rung)}, but {RUNGS[rung]['tiers'][-1]} in {listed}"


def before(rung: str) -> str:
    """The rung before one."""
    names = list(RUNGS)
    return names[names.index(rung) - 1]


def upper_of(rung: str) -> str:
    """The rung whose low tier some layers may take; the rung itself if there is none."""
    return next((upper for lower, upper in BY_LAYER if lower == rung), rung)


def rungs(given: DiffKVConfig) -> dict[str, DiffKVConfig]:
    """Each rung as a configuration, with the fields that the user gave beside ``auto``."""
    return {name: beside(given, fields) for name, fields in RUNGS.items()}


def config_of(given: DiffKVConfig, rung: str, raised: Raised | None, layers: int) -> DiffKVConfig:
    """A choice as a configuration, with the fields that the user gave beside ``auto``, for a model of so many
    ``layers``."""
    if raised is None:
        return beside(given, RUNGS[rung])
    between = [0.0 if layer in raised else RUNGS[rung]["policy"]["alpha_high"] for layer in range(layers)]
    return beside(given, _mixed(RUNGS[before(rung)], RUNGS[rung], between))


def mixed_rungs(given: DiffKVConfig) -> list[DiffKVConfig]:
    """What choices by layer have in common, whatever the layers are: for checks before a model is loaded."""
    return [beside(given, _mixed(RUNGS[lower], RUNGS[upper], 0.0)) for lower, upper in BY_LAYER]


def _mixed(lower: Mapping[str, Any], upper: Mapping[str, Any], between: list[float] | float) -> dict[str, Any]:
    """Fields of ``lower``, with the low tier of ``upper`` between."""
    (high, low), better = lower["tiers"], upper["tiers"][-1]
    return {**lower, "tiers": [high, better, low], "policy": {**lower["policy"], "alpha_between": [between]}}


def coarse(given: DiffKVConfig, rung: str) -> DiffKVConfig:
    """A rung with the low tier by which layers are told apart."""
    return beside(given, {**RUNGS[rung], "tiers": [RUNGS[rung]["tiers"][0], COARSE]})


def beside(given: DiffKVConfig, fields: Mapping[str, Any]) -> DiffKVConfig:
    """``fields`` as a configuration, with the fields that the user gave beside what asks for a choice."""
    kept = {x: getattr(given, x) for x in given.model_fields_set - {"thresholds"}}
    return DiffKVConfig.model_validate({**kept, **fields})


def climb(names: Sequence[str], fp8: Loss, judge: Callable[[str], Loss]) -> Choice:
    """The first of ``names`` that loses at most ``fp8``: among pairs of tiers first, behind them among single tiers, of
    which each loses less than the ones before it. So each part is looked through by halves, and few are judged. A
    single tier of values of 5 bits may lose more than a pair in fewer bytes. What is taken was judged, or loses
    nothing."""
    judged: dict[str, Loss] = {}

    def holds(name: str) -> bool:
        if name == NOTHING_LOST:
            return True
        judged[name] = judge(name)
        return judged[name].within(fp8)

    for _, found in groupby(names, key=lambda name: len(RUNGS[name]["tiers"])):
        part = list(found)
        first = bisect_left(part, True, key=holds)
        if first < len(part):
            return Choice(part[first], fp8, judged)
    return Choice(names[-1], fp8, judged)


def most_groups(device: torch.device | str) -> int:
    """Groups of layers that are told apart on a device, at most."""
    return CPU_GROUPS if torch.device(device).type == "cpu" else MOST_GROUPS


def groups_of(layers: int, most: int) -> list[Raised]:
    """All layers in at most so many groups of neighbours, of one size but the last."""
    size = -(-layers // most)
    return [tuple(range(first, min(first + size, layers))) for first in range(0, layers, size)]


def raise_layers(
    choice: Choice, groups: Sequence[Raised], alone: Callable[[Raised], Loss], judge: Callable[[Raised], Loss]
) -> Choice:
    """The fewest groups of layers, those that lose most first, that have to take the upper rung's low tier for FP8's
    loss, and at least those that make ``IN_ANY_CASE`` of what is lost. They are looked for by halves. Without such a
    pair of rungs, or if nearly all layers would have to, ``choice`` is what it was.

    Args:
        alone: what a group loses with ``COARSE``, others as computed. judge: what all lose where these layers are
            raised.
    """
    fp8, layers = choice.fp8, sum(map(len, groups))
    if choice.rung not in {x for pair in BY_LAYER for x in pair} or not fp8.prompt or not fp8.reply:
        return choice
    losses = {group: alone(group) for group in groups}
    weights = {group: x.prompt / fp8.prompt + x.reply / fp8.reply for group, x in losses.items()}
    order = sorted(groups, key=lambda group: weights[group] / len(group), reverse=True)
    sets = [tuple(sorted(x for group in order[:count] for x in group)) for count in range(1, len(order))]
    sets = [x for x in sets if len(x) <= MOST_RAISED * layers]
    in_any_case = 0
    for count, raised in enumerate(sets, 1):
        if len(raised) > MOST_IN_ANY_CASE * layers:
            break
        in_any_case = count
        if sum(weights[group] for group in order[:count]) >= IN_ANY_CASE * sum(weights.values()):
            break
    upper, judged = upper_of(choice.rung), dict[Raised, Loss]()

    def holds(raised: Raised) -> bool:
        judged[raised] = judge(raised)
        return judged[raised].within(fp8)

    first, last = max(in_any_case - 1, 0), len(sets)
    if choice.rung != upper:  # no more is needed
        last = first + bool(in_any_case)
    place = bisect_left(sets, True, first, last, key=holds)
    taken = sets[place] if place < len(sets) and sets[place] in judged else None
    if choice.rung != upper and taken is None:
        return choice
    return replace(choice, rung=upper, by_layer=ByLayer(layers, losses, judged, taken))


def text_of(name: str) -> str:
    """A text that comes with the package."""
    return (resources.files("sglang_diffkv") / "texts" / name).read_text(encoding="utf-8")


def parts_of(tokens: int) -> tuple[int, int]:
    """Of a text that is judged on, where its cached prompt ends, and where its new prompt does. The rest is the
    reply."""
    return tokens * 3 // 8, tokens * 5 // 8


def scored_positions(tokens: int) -> tuple[list[int], list[int]]:
    """Positions, evenly spread, whose next-token distributions are compared: of the new prompt, and of the reply, which
    ends with the text's last token."""
    cached, prompt = parts_of(tokens)

    def spread(first: int, end: int) -> list[int]:
        step = max(-(-(end - first) // SCORED), 1)
        return list(range(end - 1, first - 1, -step))[::-1]

    return spread(cached, prompt), spread(prompt, tokens)
