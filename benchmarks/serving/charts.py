"""Charts of the serving benchmarks: throughput of each backend, latency or throughput along a load's series, running
requests over time, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.report import medians
from benchmarks.serving.session import OK, Record


def charts(data: dict[str, Any], folder: Path, name: str) -> list[Path]:
    """Write a chart of each load that has a successful record. Raises what matplotlib does."""
    written = []
    for load, about in data["loads"].items():
        records = [x for x in medians(data["records"]) if x["load"] == load and x["status"] == OK]
        if not records:
            continue
        path = folder / f"{name}_{load}.png"
        title = f"{data['setup']['model']}, {data['setup']['kv_gib']:g} GiB of KV cache\n{about['title']}"
        if about["x_label"]:
            _series(records, about["x_label"], title, path)
        else:
            _bars(records, title, path)
        written.append(path)
    return written


def _bars(records: list[Record], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 * len(records) + 3, 4))
    axis = figure.subplots()
    bars = axis.bar([x["backend"] for x in records], [x["output_throughput"] for x in records], width=0.6)
    notes = [f"{x['output_throughput']:,.0f}\n{x['running_max'] or 0} running" for x in records]
    axis.bar_label(bars, notes, padding=2, fontsize=8)
    axis.margins(y=0.2)
    axis.set_ylabel("output tokens a second")
    axis.set_title(title, fontsize=10)
    _save(figure, path)


def _series(records: list[Record], x_label: str, title: str, path: Path) -> None:
    """Output throughput, latency a token (DiffKV's normalised latency) and time to first token along the series."""
    from matplotlib.figure import Figure

    panels = (
        ("output tokens a second", lambda x: x["output_throughput"]),
        ("mean latency, ms an output token", lambda x: x["mean_e2e_latency_ms"] / x["output"]),
        ("time to first token p99, ms", lambda x: x["p99_ttft_ms"]),
    )
    figure = Figure(figsize=(13, 4))
    axes = figure.subplots(1, len(panels))
    for axis, (label, value) in zip(axes, panels):
        for backend in dict.fromkeys(x["backend"] for x in records):
            line = sorted((x["x"], value(x)) for x in records if x["backend"] == backend)
            axis.plot(*zip(*line), marker="o", label=backend)
        axis.set_xlabel(x_label)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def breakdown(data: dict[str, Any], path: Path) -> None:
    """A step profile: of each backend, the share of the kernels' time by part (DiffKV's figure 14). Raises what
    matplotlib does. Passes that were recorded apart have tables only."""
    from matplotlib.figure import Figure

    records = [x for x in data["records"] if x["status"] == OK and "parts_ms" in x]
    if not records:
        return
    parts = list(dict.fromkeys(name for x in records for name in x["parts_ms"]))
    figure = Figure(figsize=(10, 1.6 + 0.5 * len(records)))
    axis = figure.subplots()
    names = [f"{x['backend']}\n{x['span_ms']:.2f} ms" for x in records]
    left = [0.0] * len(records)
    for number, part in enumerate(parts):
        width = [100 * x["parts_ms"].get(part, 0.0) / x["busy_ms"] for x in records]
        label = f"{part}: {', '.join(f'{x:.1f}%' for x in width)}"
        axis.barh(names, width, left=left, color=f"C{number}", label=label)
        left = [a + b for a, b in zip(left, width)]
    axis.invert_yaxis()
    axis.set(xlim=(0, 100), xlabel="time in kernels, %")
    what = "a pass over a prompt" if data["name"].startswith("prompt") else "a decode step"
    axis.set_title(f"Where the time of {what} goes, {data['name'].partition('_')[2]}", fontsize=10)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    _save(figure, path)


def running(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Results of ``stationary`` in one chart: the running requests of each backend over time, from its first request
    to the end of counting; their mean while tokens were counted is in the legend. Raises what matplotlib does."""
    from matplotlib.figure import Figure

    records = [x for data in results for x in data["records"] if x["status"] == OK]
    if not records:
        return
    figure = Figure(figsize=(9, 4.5))
    axis = figure.subplots()
    for number, record in enumerate(records):
        seconds, requests = zip(*record["running"], strict=True)
        style = ("-", "--", ":")[number // 10 % 3]
        axis.plot(seconds, requests, style, label=f"{record['backend']}: {record['running_mean']:.1f}")
    load = results[0]["load"]
    title = (
        f"{load['output_tokens']:,} tokens of reply to {load['prompt']:,} of prompt, {load['waiting']} always waiting"
    )
    axis.set_title(f"{results[0]['name'].partition('_')[2]}, {title}", fontsize=10)
    axis.set(xlabel="seconds", ylabel="running requests")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), title="mean")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
