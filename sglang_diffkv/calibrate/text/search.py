"""Settings measured on a text against stock, and which one is chosen."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product

from sglang_diffkv.calibrate.search import DEFAULT, HORIZON, Setting, grid_starts
from sglang_diffkv.calibration import TextBudget, TextPoint, policy_fields
from sglang_diffkv.config import DiffKVConfig, load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate import runner
from sglang_diffkv.evaluate.configuration import STOCK, Configuration
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.jobs import evaluate_all
from sglang_diffkv.evaluate.store import Store
from sglang_diffkv.evaluate.summary import Result, summarise

SEARCHED = {"tiers", "policy", "rotate"}


def settings(
    tiers: Sequence[tuple[str, ...]],
    highs: Sequence[float],
    windows: Sequence[int],
    rotations: Sequence[str],
    sinks: Sequence[int],
) -> list[Setting]:
    """What a plain server runs, the high tiers alone, then all choices of ``alpha_high``, window, rotation and sinks;
    nothing is pruned."""
    alone = [Setting((high,), None, 0.0, rotate=x) for high, x in product({x[0]: None for x in tiers}, rotations)]
    starts = grid_starts([x for x in tiers if len(x) > 1], highs, windows, rotations, sinks)
    return list(dict.fromkeys([DEFAULT, *alone, *starts]))


def loss(point: TextPoint, budget: TextBudget) -> tuple[float, float]:
    """What the budget is compared with, and its standard error."""
    if budget.measure == "kl":
        return point.divergence, point.divergence_error
    return point.perplexity_change, point.perplexity_change_error


def within(point: TextPoint, budget: TextBudget, margin: float) -> bool:
    """Whether a setting keeps the budget by ``margin`` standard errors."""
    value, error = loss(point, budget)
    return value + margin * error <= budget.limit


def outdone(point: TextPoint, points: Iterable[TextPoint], budget: TextBudget) -> bool:
    """Whether another setting loses less at as few bytes, or as little at fewer."""
    here = (point.ratio_tokens, loss(point, budget)[0])
    others = ((x.ratio_tokens, loss(x, budget)[0]) for x in points)
    return any(x != here and x[0] <= here[0] and x[1] <= here[1] for x in others)


def best(points: Mapping[Setting, TextPoint], budget: TextBudget, margin: float) -> Setting | None:
    """Within the budget, the setting that takes the fewest bytes a token, none that is ``outdone``; None if there is
    none."""
    fit = [x for x, point in points.items() if within(point, budget, margin)]
    fit = [x for x in fit if not outdone(points[x], points.values(), budget)]
    return min(fit, key=lambda setting: points[setting].ratio_tokens, default=None)


class Measurements:
    """Answers of stock and of settings, kept in a store, and the figures that follow from them."""

    def __init__(self, args: argparse.Namespace, store: Store, suites: Sequence[runner.Suite]):
        self.args, self.store = args, store
        runner.register(store, suites)
        self._add(Configuration(STOCK))
        if next(iter(store.configurations)) != STOCK:
            raise EvaluationError(f"{store.path} compares with another configuration than {STOCK}: use a new --work")

    def _add(self, configuration: Configuration) -> None:
        args = self.args
        self.store.add_configuration(configuration.name, configuration.fingerprint(args.model, args.server_args))

    def config(self, setting: Setting) -> DiffKVConfig:
        """The DiffKV configuration of a setting. Raises ConfigError."""
        base = load_config(self.args.base).model_dump(exclude_unset=True)
        if searched := base.keys() & SEARCHED:
            raise ConfigError(f"--base sets {' and '.join(sorted(searched))}, which are what is searched for")
        policy = policy_fields(setting.alpha_high, setting.alpha_low, setting.window, setting.sinks, HORIZON)
        fields = {"tiers": setting.tiers, "policy": policy, "rotate": setting.rotate}
        return load_config(json.dumps({**base, **fields}))

    def ask(self, chosen: Sequence[Setting], suites: Sequence[runner.Suite], stock: bool = False) -> None:
        """Have settings, and stock, answer what the store lacks of the suites; ``--jobs`` of them at once."""
        args = self.args
        wanted = [Configuration(setting.name, self.config(setting)) for setting in chosen]
        for configuration in wanted:
            self._add(configuration)
        server_args = runner.server_args(args.server_args, [suite.task for suite in suites])
        servers = {
            x.name: partial(runner.start, x, args.model, server_args)
            for x in [*([Configuration(STOCK)] if stock else []), *wanted]
        }
        evaluate_all(servers, suites, self.store, args.concurrency, args.jobs)

    def result(self, name: str, suite: runner.Suite) -> Result:
        """A configuration's figures on a part."""
        return next(x for x in summarise(self.store, [suite]) if x.configuration == name)

    def point(self, setting: Setting, suite: runner.Suite) -> TextPoint:
        """A setting's figures against stock on a part."""
        result = self.result(setting.name, suite)
        change, close, cache = result.difference, result.closeness, result.cache
        if change is None or close is None or cache is None:
            raise EvaluationError(f"{setting.name}: the server told no likeliest tokens or no figures of its cache")
        rule = {name: value for name, value in asdict(setting).items() if name in TextPoint.model_fields}
        return TextPoint(
            **rule,
            n=change.n,
            divergence=close.divergence.mean,
            divergence_error=close.divergence.error,
            agreement=close.agreement.mean,
            agreement_error=close.agreement.error,
            covered=close.covered,
            perplexity_change=math.exp(change.mean) - 1,
            perplexity_change_error=math.exp(change.mean) * change.error,
            ratio_pages=cache.ratio_pages,
            ratio_tokens=cache.ratio_tokens,
            share_high=cache.share_high,
            share_low=cache.share_low,
        )
