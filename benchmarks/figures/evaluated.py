"""Accuracy against memory of the configurations of an evaluation, from its ``results.json``, with the Pareto front."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.figures import pareto
from benchmarks.figures.cases import ALPHA_HIGH, FP8_CASE, STOCK_CASE, uniform
from benchmarks.figures.data import FigureData
from benchmarks.figures.session import point_of
from benchmarks.provenance import without_paths
from sglang_diffkv.evaluate.summary import Result

FIGURE = "evaluated"


def series(configuration: dict[str, Any]) -> str:
    """The line of a configuration, given by its fingerprint."""
    diffkv = configuration["diffkv"]
    if diffkv is None:
        return (STOCK_CASE if configuration["kv_cache_dtype"] == "auto" else FP8_CASE).series
    return uniform(diffkv["tiers"][0]).series if len(diffkv["tiers"]) == 1 else ALPHA_HIGH


def figure(results: dict[str, Any]) -> FigureData:
    """Points of all configurations whose bytes are known, on all tasks with right and wrong answers."""
    points, configurations = [], results["configurations"]
    for raw in results["results"]:
        result = Result.model_validate(raw)
        if result.metric == "accuracy" and result.cache is not None:
            name = result.configuration
            points.append(point_of(result, series(configurations[name]), name))
    if not points:
        raise ValueError("the evaluation has no accuracies with known bytes")
    about = {**results["environment"], "command": without_paths(results["environment"]["command"])}
    model = next(iter(configurations.values()))["model"]
    skipped = results.get("skipped", {})
    return FigureData(figure=FIGURE, model=model, ratio="pages", points=points, skipped=skipped, about=about)


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the chart as a PNG."""
    pareto.draw(figure(results), path)
