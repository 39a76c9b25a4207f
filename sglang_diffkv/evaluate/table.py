"""Results as tables, in Markdown and as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_diffkv import page
from sglang_diffkv.evaluate.report import KEPT_CACHE, markdown, shares_cell, with_error
from sglang_diffkv.evaluate.summary import CacheFigures, Closeness, Difference, Estimate, Result

CLOSENESS_HEADER = ("KL to the first, nats", "same likeliest token %")
CACHE_HEADER = ("ratio, pages", "ratio, tokens", "1,000+: pages", "1,000+: tokens", "high / low / pruned %")


@dataclass(frozen=True)
class Section:
    """A table with its title, and notes below it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        notes = "\n".join(self.notes)
        return f"### {self.title}\n\n{markdown(self.header, self.rows)}" + (f"\n\n{notes}" if notes else "")

    def part(self, number: int) -> page.Part:
        """As the section ``number`` of a page."""
        notes = [page.tag("p", note, class_="soft") for note in self.notes]
        return page.Part(
            f"table-{number}", self.title, page.html([page.table(self.title, self.header, self.rows), *notes])
        )


def tables(results: Sequence[Result], skipped: Mapping[str, str]) -> str:
    """``sections`` as Markdown."""
    return "\n\n".join(section.markdown() for section in sections(results, skipped))


def report_page(results: Sequence[Result], skipped: Mapping[str, str], data: Mapping[str, Any]) -> str:
    """``sections`` as a page, with the ``environment`` and the ``configurations`` of ``data`` below them."""
    parts = [section.part(number) for number, section in enumerate(sections(results, skipped), 1)]
    for name in ("configurations", "environment"):
        parts.append(page.Part(name, name.capitalize(), page.flow(page.anything(name.capitalize(), data[name]))))
    names = list(dict.fromkeys(result.configuration for result in results))
    lead = [f"Compared with the first one: {', '.join(names)}." if len(names) > 1 else "One configuration."]
    return page.document("Quality of cache configurations", lead, parts, end="docs/quality.md explains each column.")


def sections(results: Sequence[Result], skipped: Mapping[str, str]) -> list[Section]:
    """All tables: one a task file, the mean over several files, and the accuracy by task."""
    suites = list(dict.fromkeys(result.suite for result in results))
    accurate = [name for name in suites if any(r.suite == name and r.metric != "perplexity" for r in results)]
    parts: list[Section | None] = [
        _suite_table(name, [r for r in results if r.suite == name], skipped) for name in suites
    ]
    if len(accurate) > 1:
        parts.append(_mean_table(accurate, results))
    parts += [_length_table(name, [r for r in results if r.suite == name]) for name in suites]
    parts += [
        _task_table(name, [r for r in results if r.suite == name])
        for name in accurate
        if any(len(r.by_task) > 1 for r in results if r.suite == name)
    ]
    return [part for part in parts if part is not None]


def _suite_table(name: str, results: Sequence[Result], skipped: Mapping[str, str]) -> Section:
    accurate = results[0].metric != "perplexity"
    scores = (f"{results[0].metric} %", "of 1,000+ tokens") if accurate else ("perplexity", "bits a token")
    told = any(r.closeness for r in results)
    close = CLOSENESS_HEADER if told else ()
    header = ["configuration", "n", *scores, "to the first", *close, *CACHE_HEADER, "cached %"]
    rows = []
    for result in results:
        cells = _accuracy_cells(result) if accurate else _perplexity_cells(result)
        cells += closeness_cells(result.closeness) if told else []
        row = [result.configuration, str(result.score.n), *cells, *_cache_cells(result.cache)]
        rows.append([*row, f"{100 * result.cached:.0f}"])
    rows += [[label, f"skipped: {why}", *[""] * (len(header) - 2)] for label, why in skipped.items()]
    return Section(name, header, rows, _notes(results))


def _notes(results: Sequence[Result]) -> list[str]:
    notes = []
    if any(r.cache and not r.cache.measured for r in results):
        notes.append("Ratios of stock caches are those of their element sizes; the others are measured.")
    if covered := [r.closeness.covered for r in results if r.closeness]:
        told = f"{100 * min(covered):.0f}"
        notes.append(
            f"KL is a lower bound: over the tokens that are likeliest in both, which have at least {told}% of the "
            "first one's probability, and one bucket for the rest."
        )
    for r in results:
        if r.kept_cache:
            notes.append(f"{r.configuration}: {KEPT_CACHE.format(why=r.kept_cache)}.")
        if r.failed:
            notes.append(f"{r.configuration}: the server ended {r.failed} requests, counted as wrong.")
        if r.cache and r.cache.requests != r.cache.asked:
            notes.append(f"{r.configuration}: bytes of {r.cache.requests} requests, {r.cache.asked} were asked.")
    return notes


def _length_table(name: str, results: Sequence[Result]) -> Section | None:
    """KL by the tokens before a position, where there is more than one group of lengths."""
    told = [(r, {(x.above, x.below): x for x in r.closeness.by_length}) for r in results if r.closeness]
    groups = sorted({key for _, found in told for key in found})
    if not groups:
        return None
    rows = []
    for key in groups:
        there = [found.get(key) for _, found in told]
        positions = max(x.positions for x in there if x)
        cells = [_nats(x.divergence) if x else "" for x in there]
        rows.append([f"{key[0]:,} to {key[1] - 1:,}", f"{positions:,}", *cells])
    header = ["tokens before", "positions", *(r.configuration for r, _ in told)]
    return Section(f"{name}: KL to the first by length, nats", header, rows)


def percent(estimate: Estimate | None) -> str:
    """A share in per cent with its standard error."""
    return with_error(100 * estimate.mean, 100 * estimate.error, ".1f", estimate.n) if estimate else ""


def _nats(estimate: Estimate) -> str:
    return with_error(estimate.mean, estimate.error, ".5f", estimate.n)


def _accuracy_cells(result: Result) -> list[str]:
    long = f"{percent(result.long)} (n = {result.long.n})" if result.long else ""
    return [percent(result.score), long, points(result.difference)]


def points(change: Difference | None) -> str:
    """A difference of shares in points, with its standard error and test."""
    if change is None:
        return ""
    mean = with_error(100 * change.mean, 100 * change.error, "+.1f", change.n)
    return f"{mean} (+{change.won} -{change.lost}, p = {change.p:.2g})"


def closeness_cells(found: Closeness | None) -> list[str]:
    """Divergence and agreement with their standard errors."""
    if found is None:
        return [""] * len(CLOSENESS_HEADER)
    return [_nats(found.divergence), percent(found.agreement)]


def _perplexity_cells(result: Result) -> list[str]:
    score, change = result.score, result.difference
    perplexity = math.exp(score.mean)
    text = ""
    if change is not None:
        ratio = math.exp(change.mean)
        text = with_error(100 * (ratio - 1), 100 * ratio * change.error, "+.2f", change.n)
        text += f" % (+{change.won} -{change.lost}, p = {change.p:.2g})"
    bits = with_error(score.mean / math.log(2), score.error / math.log(2), ".4f", score.n)
    return [with_error(perplexity, perplexity * score.error, ".3f", score.n), bits, text]


def _cache_cells(cache: CacheFigures | None) -> list[str]:
    if cache is None:
        return [""] * len(CACHE_HEADER)
    if not cache.measured:
        return [f"{cache.ratio_pages:g}", f"{cache.ratio_tokens:g}", "", "", ""]
    ratios = (cache.ratio_pages, cache.ratio_tokens, cache.long_ratio_pages, cache.long_ratio_tokens)
    return [*("" if x is None else f"{x:.3f}" for x in ratios), shares_cell(cache.model_dump())]


def _mean_table(suites: Sequence[str], results: Sequence[Result]) -> Section:
    """Mean of the files' accuracies and scores, each file counting the same; the files' errors are independent."""
    title = " or ".join(sorted({r.metric for r in results if r.suite in suites})).capitalize()
    rows = []
    for configuration in dict.fromkeys(result.configuration for result in results):
        mine = {r.suite: r.score for r in results if r.configuration == configuration and r.suite in suites}
        cells = [percent(mine.get(name)) for name in suites]
        if len(mine) == len(suites):
            scores = list(mine.values())
            mean = sum(x.mean for x in scores) / len(scores)
            known = all(x.n > 1 for x in scores)
            error = math.sqrt(sum(x.error**2 for x in scores)) / len(scores) if known else math.nan
            cells.append(percent(Estimate(n=sum(x.n for x in scores), mean=mean, error=error)))
        rows.append([configuration, *cells, *[""] * (len(suites) + 1 - len(cells))])
    return Section(f"{title} %, mean over task files", ["configuration", *suites, "mean"], rows)


def _task_table(name: str, results: Sequence[Result]) -> Section:
    """Accuracy or score by task: the tasks are the rows, since there may be many."""
    tasks = sorted({task for result in results for task in result.by_task})
    rows = []
    for task in tasks:
        n = max(r.by_task[task].n for r in results if task in r.by_task)
        rows.append([task, str(n), *(percent(r.by_task.get(task)) for r in results)])
    rows.append(["all", str(max(r.score.n for r in results)), *(percent(r.score) for r in results)])
    header = ["task", "n", *(r.configuration for r in results)]
    return Section(f"{name}: {results[0].metric} % by task", header, rows)
