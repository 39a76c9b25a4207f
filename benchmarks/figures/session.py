"""Measuring: what several figures ask of servers, in one store of answers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.figures.cases import STOCK_CASE, Case
from benchmarks.figures.data import FigureData, Point, unique
from sglang_diffkv.calibration import model_name
from sglang_diffkv.evaluate import runner
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.jobs import Connect, evaluate_all
from sglang_diffkv.evaluate.runner import Suite
from sglang_diffkv.evaluate.store import Store
from sglang_diffkv.evaluate.summary import Result, summarise
from sglang_diffkv.evaluate.tasks import TaskFileError
from sglang_diffkv.evaluate.tasks.generation import GenerationTask


class Session:
    """The suites of a command line and the answers to them.

    ``args`` needs ``model``, ``server_args``, ``concurrency``, ``jobs`` and ``ratio``; ``skipped`` collects
    configurations that this machine cannot serve, ``notes`` other remarks; both start anew with each figure.
    """

    def __init__(self, args: Any, suites: Sequence[Suite], store: Store):
        self.args, self.suites, self.store = args, list(suites), store
        self.skipped: dict[str, str] = {}
        self.notes: list[str] = []
        for suite in suites:
            if suite.task.metric != "accuracy":
                raise TaskFileError(f"{suite.task.name}: only fig2 to fig5 take a file without right and wrong answers")
        runner.register(store, self.suites)
        store.add_configuration(STOCK_CASE.name, STOCK_CASE.configuration.fingerprint(args.model, args.server_args))
        if next(iter(store.configurations)) != STOCK_CASE.name:
            raise EvaluationError(f"{store.path} compares with another configuration: use a new --output folder")

    def begin(self) -> None:
        """Forget the remarks of the figure before."""
        self.skipped, self.notes = {}, []

    def measure(self, cases: Sequence[Case]) -> list[Point]:
        """Points of stock bf16, which all are compared with, and of the cases that can be served here."""
        return self.measure_alone([STOCK_CASE, *cases], self.suites)

    def measure_alone(self, cases: Sequence[Case], suites: Sequence[Suite]) -> list[Point]:
        """Points of the cases that can be served here, ``--jobs`` of them asked at once."""
        served = []
        for case in cases:
            if why := case.configuration.unsupported():
                self.skipped[case.name] = why
                print(f"{case.name}: skipped: {why}", file=sys.stderr)
            else:
                served.append(case)
        servers = {case.name: self._server(case) for case in served}
        evaluate_all(servers, suites, self.store, self.args.concurrency, self.args.jobs)
        results = summarise(self.store, suites)
        return [_point(case, x) for case in served for x in results if x.configuration == case.name]

    def _server(self, case: Case) -> Connect:
        args, configuration = self.args, case.configuration
        self.store.add_configuration(case.name, configuration.fingerprint(args.model, args.server_args))
        return partial(runner.start, configuration, args.model, args.server_args)

    def data(self, figure: str, points: Sequence[Point], about: dict[str, Any]) -> FigureData:
        """What is written and drawn."""
        return FigureData(
            figure=figure,
            model=model_name(self.args.model),
            ratio=self.args.ratio,
            points=list(points),
            skipped=self.skipped,
            notes=self.notes,
            about=about,
        )

    def suites_by_task(self) -> list[Suite]:
        """A suite for each task of a file: the server reports bytes and shares of a suite as a whole."""
        parts = [part for suite in self.suites for part in split(suite)]
        runner.register(self.store, parts)
        return parts


def split(suite: Suite) -> list[Suite]:
    """A suite for each of its tasks, named ``suite/task``; the suite itself if it has one task."""
    names = sorted(unique(question.task for question in suite.questions))
    if len(names) < 2:
        return [suite]
    assert isinstance(suite.task, GenerationTask)
    return [
        Suite(
            replace(suite.task, name=f"{suite.task.name}/{name}"), tuple(x for x in suite.questions if x.task == name)
        )
        for name in names
    ]


def point_of(result: Result, series: str, label: str, **place: Any) -> Point:
    """A result in its place in a figure; ``place`` are the other fields of ``Point`` that a case has."""
    change, cache = result.difference, result.cache
    names = ("ratio_pages", "ratio_tokens", "share_high", "share_low", "share_pruned")
    return Point(
        configuration=result.configuration,
        suite=result.suite,
        series=series,
        label=label,
        n=result.score.n,
        accuracy=result.score.mean,
        error=result.score.error,
        difference=change.mean if change else None,
        difference_error=change.error if change else None,
        p=change.p if change else None,
        failed=result.failed,
        **({} if cache is None else {name: getattr(cache, name) for name in names}),
        **place,
    )


def _point(case: Case, result: Result) -> Point:
    names = ("alpha_high", "alpha_low", "fraction", "matched_to")
    return point_of(result, case.series, case.label, **{name: getattr(case, name) for name in names})
