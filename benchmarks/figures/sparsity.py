"""Figure 9: pruning per head by significance (DiffKV) against one budget for all heads, at equal pruning.

DiffKV prunes a single tier at several ``alpha_low``. For each, the static policies get the fraction of tokens to
keep that prunes the same share of the tokens of the same requests; what they did prune is measured like DiffKV's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.figures import style
from benchmarks.figures.cases import DYNAMIC, STATIC, STOCK_CASE, Case, Thresholds, diffkv, distinct, static
from benchmarks.figures.data import FigureData, Point, by_series
from benchmarks.figures.session import Session
from sglang_diffkv.evaluate.store import Store
from sglang_diffkv.policies.budget import Budget

ALPHAS = (0.02, 0.05, 0.1, 0.3, 1.0)
WINDOW = 64
LEAST = 0.001
"""Pruned share below which there is nothing to compare."""
STEPS = 1000
Lengths = Sequence[tuple[int, int]]


def collect(session: Session) -> list[Point]:
    """Stock bf16, DiffKV at each ``--prune-alpha``, and the static policies that prune as much."""
    tier = session.args.prune_tier
    dynamic = [diffkv(Thresholds((tier,), None, alpha, WINDOW, ""), DYNAMIC) for alpha in session.args.prune_alpha]
    points = session.measure(dynamic)
    matched = [case for source in dynamic for case in equal_pruning(session, source, tier)]
    return points + [x for x in session.measure(distinct(matched)) if x.series != STOCK_CASE.series]


def equal_pruning(session: Session, source: Case, tier: str) -> list[Case]:
    """Static policies that prune as much as ``source`` did; what cannot is noted."""
    lengths, share = request_lengths(session.store, source.name), pruned_share(session.store, source.name)
    if share < LEAST:
        session.notes.append(f"{source.name} pruned {share:.2%}: nothing to compare")
        return []
    found = []
    for series, name in STATIC.items():
        fraction, reached = matching_fraction(lengths, share, prompt_only=name == "snapkv")
        if abs(reached - share) > max(0.002, 0.1 * share):
            why = f"{name} prunes {reached:.1%} at most on these requests, {source.label} pruned {share:.1%}"
            session.skipped[f"{name} as {source.label}"] = why
        else:
            found.append(static(series, tier, fraction, WINDOW, source.name))
    return found


def request_lengths(store: Store, configuration: str) -> list[tuple[int, int]]:
    """Prompt tokens and all tokens of each answered request."""
    answers = (x for (name, _), held in store.answers.items() if name == configuration for x in held.values())
    outcomes = [x.outcome for x in answers if x.outcome.error is None]
    return [(x.prompt_tokens, x.prompt_tokens + x.completion_tokens) for x in outcomes]


def pruned_share(store: Store, configuration: str) -> float:
    """Measured share of (token, layer, KV head) triples that were pruned, over all task files."""
    held = [store.totals(name, suite).get("finished", {}) for name, suite in store.answers if name == configuration]
    pruned, kept = sum(x.get("pruned", 0) for x in held), sum(x.get("high", 0) + x.get("low", 0) for x in held)
    return pruned / (pruned + kept) if pruned + kept else 0.0


def predicted_share(lengths: Lengths, fraction: float, prompt_only: bool) -> float:
    """Share of tokens that a budget of ``fraction`` prunes, of the prompt or of the whole request."""
    prompts, totals = torch.tensor(lengths, dtype=torch.int64).unbind(1)
    scored = prompts if prompt_only else totals
    kept = Budget(fraction=fraction).kept(scored, WINDOW)
    return int((scored - kept).sum()) / int(totals.sum())


def matching_fraction(lengths: Lengths, share: float, prompt_only: bool) -> tuple[float, float]:
    """The fraction to keep, in thousandths, that prunes nearest to ``share``, and what it prunes."""
    low, high = 1, STEPS
    while low < high:
        middle = (low + high) // 2
        if predicted_share(lengths, middle / STEPS, prompt_only) > share:
            low = middle + 1
        else:
            high = middle
    near = [x / STEPS for x in (low - 1, low) if x >= 1]
    best = min(near, key=lambda x: abs(predicted_share(lengths, x, prompt_only) - share))
    return best, predicted_share(lengths, best, prompt_only)


def draw(data: FigureData, path: Path) -> None:
    """A panel for each task file: accuracy against the measured share of pruned tokens."""
    suites = data.suites()
    figure, axes = style.canvas(1, len(suites), (5.2, 4.0), sharey=True)
    for axis, suite in zip(axes[0], suites):
        points = data.of(suite)
        style.reference_line(axis, points)
        for series, line in by_series(points).items():
            if series == STOCK_CASE.series:
                continue
            line = sorted(line, key=lambda x: x.share_pruned or 0.0)
            style.error_bars(axis, line, [100 * (x.share_pruned or 0.0) for x in line], series, linestyle="-")
        axis.set(xlabel="tokens pruned, % (measured)", title=suite, xlim=(0, None))
        style.grid(axis)
    axes[0][0].set_ylabel("accuracy, %, ± standard error")
    axes[0][0].legend(fontsize=8)
    title = style.headline(data, "Pruning per head or with one budget for all heads")
    style.finish(figure, path, title, style.subject(data), data.remarks())
