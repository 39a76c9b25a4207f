"""Figures from stored answers: scores with standard errors, paired tests, cache bytes and shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from sglang_diffkv.evaluate import report
from sglang_diffkv.evaluate.configuration import ELEMENT_RATIO
from sglang_diffkv.evaluate.distribution import compare
from sglang_diffkv.evaluate.endpoint import LONG
from sglang_diffkv.evaluate.runner import Suite
from sglang_diffkv.evaluate.store import Answer, Store
from sglang_diffkv.evaluate.task import Metric

LONG_TOKENS = 1000
LENGTHS = (0, 256, *(1 << n for n in range(9, 21)))
"""Bounds of the groups of positions by the tokens before them."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null")


class Estimate(_Frozen):
    """A mean over ``n`` questions and its standard error: a share of right answers, a score, or nats a token."""

    n: int
    mean: float
    error: float


class Difference(_Frozen):
    """To the first configuration, over the ``n`` questions that both answered.

    Attributes:
        mean, error: this one's mean minus the first one's, and the standard error of the pairs.
        won, lost: questions on which this one did better, worse.
        p: two-sided, of the exact sign test (McNemar's test for right and wrong).
    """

    n: int
    mean: float
    error: float
    won: int
    lost: int
    p: float


class CacheFigures(_Frozen):
    """Bytes against a bf16 cache of the same tokens, over finished requests.

    ``pages`` counts whole pages, ``tokens`` without their free slots; ``long`` only requests of 1,000 tokens and
    more. ``measured`` is False for a stock cache, whose ratio is that of its element sizes. ``requests`` of the
    ``asked`` ones are in the figures, without those that the server ended. ``share_low`` is that of all lower tiers,
    ``share_by_tier`` is by their names.
    """

    measured: bool
    ratio_pages: float
    ratio_tokens: float
    long_ratio_pages: float | None = None
    long_ratio_tokens: float | None = None
    bytes_per_token: float | None = None
    share_high: float | None = None
    share_low: float | None = None
    share_pruned: float | None = None
    share_out_of_window: float | None = None
    share_by_tier: dict[str, float] = {}
    requests: int | None = None
    asked: int | None = None


class LengthGroup(_Frozen):
    """Closeness at the ``positions`` with ``above`` to ``below`` tokens before them (the latter not included)."""

    above: int
    below: int
    positions: int
    divergence: Estimate
    agreement: Estimate


class Closeness(_Frozen):
    """Next-token distributions against the first configuration's at the same positions, see ``evaluate/distribution``.

    Attributes:
        divergence: nats a token, a lower bound; its sample are the ``n`` windows, as for agreement.
        agreement: share of the positions whose likeliest token is the same.
        covered: the first one's probability that is told token by token; the bound does not see changes in the rest.
        by_length: the same by the tokens before a position, where windows or replies are of several lengths.
    """

    divergence: Estimate
    agreement: Estimate
    covered: float
    by_length: tuple[LengthGroup, ...] = ()


class Result(_Frozen):
    """One configuration on one task file. ``long`` covers the questions that took the first configuration 1,000
    tokens and more, ``cached`` is the share of prompt tokens that came from the prefix cache."""

    configuration: str
    suite: str
    metric: Metric
    score: Estimate
    by_task: dict[str, Estimate]
    long: Estimate | None
    difference: Difference | None
    closeness: Closeness | None = None
    cache: CacheFigures | None
    cached: float
    failed: int
    completion_tokens: int
    kept_cache: str = ""
    """Why the server's prefix cache was not emptied first; empty if it was."""


def accuracy(answers: Sequence[Answer]) -> Estimate:
    """Share of right answers."""
    share, error = report.proportion([bool(x.outcome.right) for x in answers])
    return Estimate(n=len(answers), mean=share, error=error)


def score(answers: Sequence[Answer]) -> Estimate:
    """Mean of scores; the questions are the sample."""
    values, n = [_score(x) for x in answers], len(answers)
    mean = sum(values) / n if n else math.nan
    return Estimate(n=n, mean=mean, error=_spread([x - mean for x in values], n))


def _score(answer: Answer) -> float:
    assert answer.outcome.score is not None
    return answer.outcome.score


def nats(answers: Sequence[Answer]) -> Estimate:
    """Negative log-likelihood a token, weighted by tokens; the windows are the sample."""
    n, tokens = len(answers), sum(x.outcome.scored_tokens for x in answers)
    if not tokens:
        return Estimate(n=n, mean=math.nan, error=math.nan)
    mean = sum(_nll(x) for x in answers) / tokens
    return Estimate(n=n, mean=mean, error=_spread([_nll(x) - mean * x.outcome.scored_tokens for x in answers], tokens))


def _nll(answer: Answer) -> float:
    assert answer.outcome.nll is not None
    return answer.outcome.nll


def _spread(residuals: Sequence[float], tokens: int) -> float:
    """Standard error of a ratio of sums over a sample of windows, from each window's residual."""
    n = len(residuals)
    return math.sqrt(sum(x * x for x in residuals) * n / (n - 1)) / tokens if n > 1 else math.nan


def difference(metric: Metric, first: Sequence[Answer], other: Sequence[Answer]) -> Difference:
    """``other`` against ``first``, two answers to each question, in one order."""
    n = len(first)
    if metric == "accuracy":
        old, new = ([bool(x.outcome.right) for x in answers] for answers in (first, other))
        lost, won, p = report.mcnemar(old, new)
        return Difference(n=n, mean=(won - lost) / n, error=report.paired_error(old, new), won=won, lost=lost, p=p)
    if metric == "score":
        gains = [_score(b) - _score(a) for a, b in zip(first, other)]
        mean, won, lost = sum(gains) / n, sum(x > 0 for x in gains), sum(x < 0 for x in gains)
        error = _spread([x - mean for x in gains], n)
        return Difference(n=n, mean=mean, error=error, won=won, lost=lost, p=report.sign_test(lost, won))
    tokens = sum(x.outcome.scored_tokens for x in first)
    changes = [_nll(b) - _nll(a) for a, b in zip(first, other)]
    mean = sum(changes) / tokens
    error = _spread([x - mean * a.outcome.scored_tokens for x, a in zip(changes, first)], tokens)
    won, lost = sum(x < 0 for x in changes), sum(x > 0 for x in changes)
    return Difference(n=n, mean=mean, error=error, won=won, lost=lost, p=report.sign_test(lost, won))


def closeness(first: Sequence[Answer], other: Sequence[Answer]) -> Closeness | None:
    """``other`` against ``first``, the same windows in one order; None unless all tell their likeliest tokens."""
    if not first or not all(x.outcome.tops for x in (*first, *other)):
        return None
    pairs = [compare(a.outcome.tops, b.outcome.tops) for a, b in zip(first, other)]
    before = [x.outcome.scored_after + np.arange(len(pair.divergence)) for x, pair in zip(first, pairs)]
    groups = []
    known = all(x.outcome.scored_after for x in first)
    for above, below in pairwise(LENGTHS) if known else ():
        there = [(above <= x) & (x < below) for x in before]
        if positions := sum(int(x.sum()) for x in there):
            groups.append(
                LengthGroup(
                    above=above,
                    below=below,
                    positions=positions,
                    divergence=_over_positions([pair.divergence[at] for pair, at in zip(pairs, there)]),
                    agreement=_over_positions([pair.agreeing[at] for pair, at in zip(pairs, there)]),
                )
            )
    return Closeness(
        divergence=_over_positions([pair.divergence for pair in pairs]),
        agreement=_over_positions([pair.agreeing for pair in pairs]),
        covered=_over_positions([pair.covered for pair in pairs]).mean,
        by_length=tuple(groups) if len(groups) > 1 else (),
    )


def _over_positions(values: Sequence[np.ndarray[Any, Any]]) -> Estimate:
    """Mean over all positions; the windows that have any are the sample."""
    sums = [(float(x.sum()), len(x)) for x in values if len(x)]
    positions = sum(size for _, size in sums)
    mean = sum(total for total, _ in sums) / positions
    error = _spread([total - mean * size for total, size in sums], positions)
    return Estimate(n=len(sums), mean=mean, error=error)


def cache_figures(store: Store, configuration: str, suite: str) -> CacheFigures | None:
    """The configuration's bytes; None if they are not known."""
    setup = store.configurations[configuration]
    totals = store.totals(configuration, suite)
    answers = store.answers.get((configuration, suite), {}).values()
    asked = sum(x.outcome.requests for x in answers if x.outcome.error is None)
    every, long = (report.ratios(totals.get(key)) for key in ("finished", LONG))
    if every is None:
        ratio = None if setup["backend"] == "diffkv" else ELEMENT_RATIO.get(str(setup["kv_cache_dtype"]))
        return None if ratio is None else CacheFigures(measured=False, ratio_pages=ratio, ratio_tokens=ratio)
    finished = totals["finished"]
    return CacheFigures(
        measured=True,
        **every,
        long_ratio_pages=long["ratio_pages"] if long else None,
        long_ratio_tokens=long["ratio_tokens"] if long else None,
        bytes_per_token=finished["page_bytes"] / finished["tokens"],
        requests=int(finished["requests"]),
        asked=asked,
    )


def summarise(store: Store, suites: Sequence[Suite]) -> list[Result]:
    """Every stored configuration on every task, over the suites' questions, compared with the first one stored."""
    with store.lock:
        return _summarise(store, suites)


def _summarise(store: Store, suites: Sequence[Suite]) -> list[Result]:
    results = []
    for suite in suites:
        name, ids = suite.task.name, [question.id for question in suite.questions]
        known = [x for x in store.configurations if store.answers.get((x, name))]
        first = store.answers[known[0], name] if known else {}
        for configuration in known:
            held = store.answers[configuration, name]
            if any(x in held for x in ids):
                results.append(_result(store, configuration, suite, ids, first))
    return results


def _result(store: Store, configuration: str, suite: Suite, ids: Sequence[str], first: dict[str, Answer]) -> Result:
    name, metric = suite.task.name, suite.task.metric
    held = store.answers[configuration, name]
    answers = [held[x] for x in ids if x in held]
    estimate = {"accuracy": accuracy, "score": score, "perplexity": nats}[metric]
    by_task: dict[str, list[Answer]] = {}
    for answer in answers:
        by_task.setdefault(answer.task, []).append(answer)
    both = [x for x in ids if x in held and x in first]
    long = [held[x] for x in both if _tokens(first[x]) >= LONG_TOKENS]
    prompts = sum(x.outcome.prompt_tokens for x in answers)
    return Result(
        configuration=configuration,
        suite=name,
        metric=metric,
        score=estimate(answers),
        by_task={task: estimate(by_task[task]) for task in sorted(by_task)},
        long=estimate(long) if long else None,
        difference=difference(metric, [first[x] for x in both], [held[x] for x in both])
        if held is not first and both
        else None,
        closeness=closeness([first[x] for x in both], [held[x] for x in both])
        if held is not first and metric == "perplexity"
        else None,
        cache=cache_figures(store, configuration, name),
        cached=sum(x.outcome.cached_tokens for x in answers) / prompts if prompts else 0.0,
        failed=sum(x.outcome.error is not None for x in answers),
        completion_tokens=sum(x.outcome.completion_tokens for x in answers),
        kept_cache=store.kept_caches.get((configuration, name), ""),
    )


def _tokens(answer: Answer) -> int:
    return answer.outcome.prompt_tokens + answer.outcome.completion_tokens
