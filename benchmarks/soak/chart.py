"""The soak's chart over time: requests by state, rates, pages by owner, and memory of the server's processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.figures.page_owners import COLOURS, OWNERS
from benchmarks.provenance import headline
from benchmarks.soak.client import ENDS


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the chart as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    samples = [x for x in result["samples"] if "running" in x]
    loaded = [x for x in samples if "answered" in x]
    if not loaded:
        return
    minutes = [x["time"] / 60 for x in samples]
    figure, axes = pyplot.subplots(4, 1, figsize=(9, 11), sharex=True, layout="constrained")
    queue, rates, owners, memory = axes
    for name in ("in_flight", "waiting", "running"):
        queue.plot(minutes, [x[name] for x in samples], label=name.replace("_", " "))
    queue.set(ylabel="requests")
    _rates(rates, loaded)
    if all("free" in x for x in samples):
        stacked = [[x[name] for x in samples] for name in OWNERS]
        owners.stackplot(minutes, stacked, labels=OWNERS, colors=COLOURS, step="post")
        owners.margins(y=0)
    owners.set(ylabel="pages")
    for role in samples[0]["rss"]:
        memory.plot(minutes, [x["rss"].get(role, float("nan")) for x in samples], label=role)
    memory.set(ylabel="resident MiB", xlabel="minutes", ylim=(0, None))
    for axis in axes:
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    figure.suptitle(headline(result["provenance"]), fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _rates(axis: Any, samples: list[dict[str, Any]], span: float = 30.0) -> None:
    """Ended requests a minute and output tokens a second, each over the last ``span`` seconds at least."""
    points: dict[str, list[float]] = {name: [] for name in ("time", *ENDS, "tokens_out")}
    last = samples[0]
    for sample in samples[1:]:
        passed = sample["time"] - last["time"]
        if passed < span:
            continue
        points["time"].append(sample["time"] / 60)
        for name in ENDS:
            points[name].append(60 * (sample[name] - last[name]) / passed)
        points["tokens_out"].append((sample["tokens_out"] - last["tokens_out"]) / passed)
        last = sample
    for name in ENDS:
        axis.plot(points["time"], points[name], label=f"{name} a minute")
    axis.plot(points["time"], points["tokens_out"], "k:", label="output tokens a second")
    axis.set(ylabel="rates", ylim=(0, None))
