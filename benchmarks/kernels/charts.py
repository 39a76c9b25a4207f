"""Charts of the kernel benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Row = dict[str, Any]
BARS = {
    "ms": "DiffKV",
    "ms_scores": "DiffKV with policy",
    "flashinfer_bf16_ms": "FlashInfer bf16",
    "flashinfer_fp8_ms": "FlashInfer fp8",
    "sglang_triton_ms": "SGLang Triton bf16",
}


def bars(rows: list[Row], gpu: str, path: Path) -> None:
    """Times at batch 64, where such rows exist."""
    rows = [row for row in rows if (row["batch"], row["heads"]) == (64, "32/8") and "+" in row["case"]]
    chosen = [row for row in rows if row["length"] in (4096, 16384)]
    if not chosen:
        return
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(10, 4))
    width = 0.8 / len(BARS)
    for i, (key, label) in enumerate(BARS.items()):
        at = [x + (i - len(BARS) / 2 + 0.5) * width for x in range(len(chosen))]
        axis.bar(at, [row.get(key) or 0 for row in chosen], width, label=label)
    axis.set_xticks(range(len(chosen)), [f"{row['case']}\n{row['length']}" for row in chosen], fontsize=7)
    axis.set_ylabel("ms a layer")
    axis.set_title(f"Decode attention, batch 64, 32/8 heads of 128, {gpu}")
    axis.legend(fontsize=8)
    _save(figure, path)


def curves(rows: list[Row], gpu: str, path: Path) -> None:
    """Speed-up over FlashInfer against length, a panel for heads and mix, a line for each batch size."""
    rows = [row for row in rows if "+" in row["case"] and row.get("to_flashinfer_bf16_scores")]
    heads = list(dict.fromkeys(row["heads"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    colours = {batch: f"C{i}" for i, batch in enumerate(sorted({row["batch"] for row in rows}))}
    if not rows:
        return
    plt = _pyplot()
    size = (4 * len(cases), 3 * len(heads))
    figure, axes = plt.subplots(len(heads), len(cases), figsize=size, squeeze=False, sharex=True, sharey=True)
    for line, head in zip(axes, heads):
        for axis, case in zip(line, cases):
            _panel(axis, [row for row in rows if (row["heads"], row["case"]) == (head, case)], colours)
            axis.set_title(f"{case}, heads {head}", fontsize=9)
    axes[0][0].legend(fontsize=7)
    figure.supxlabel("length")
    figure.supylabel("times faster than FlashInfer bf16 (dotted: fp8), policy on")
    figure.suptitle(f"Decode attention of one layer, {gpu}", fontsize=10)
    _save(figure, path)


def _panel(axis: Any, rows: list[Row], colours: dict[int, str]) -> None:
    for batch in sorted({row["batch"] for row in rows}):
        colour = colours[batch]
        line = sorted((row for row in rows if row["batch"] == batch), key=lambda row: row["length"])
        lengths = [row["length"] for row in line]
        axis.plot(
            lengths, [row["to_flashinfer_bf16_scores"] for row in line], "o-", color=colour, label=f"batch {batch}"
        )
        fp8 = [row["to_flashinfer_fp8_scores"] or float("nan") for row in line]
        axis.plot(lengths, fp8, ":", color=colour)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.grid(alpha=0.3)


def management(steps: list[Row], prompts: list[Row], gpu: str, length: int, path: Path) -> None:
    """Page management on GPU and CPU against the batch size: a panel for a decode step, with its attention, and one for
    prompts, as far as they were measured."""
    lines = {"cpu_management_ms": "page management, CPU", "management_ms": "page management, GPU"}
    attention = {"attention_ms": f"attention at length {length}"}
    panels = [
        (steps, {**lines, **attention}, "ms a decode step", "batch"),
        (prompts, lines, "ms in all", f"prompts of {length} tokens"),
    ]
    panels = [x for x in panels if x[0]]
    if not panels:
        return
    plt = _pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4), squeeze=False)
    for axis, (rows, shown, y, x) in zip(axes[0], panels):
        for key, label in shown.items():
            axis.plot([row["batch"] for row in rows], [row[key] for row in rows], "o-", label=label)
        axis.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(f"32 layers x 8 KV heads, {gpu}", fontsize=10)
    _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    _pyplot().close(figure)
