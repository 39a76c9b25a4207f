"""Writes the kernel benchmark's results as JSON, Markdown and, where matplotlib is installed, a chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import triton

COLUMNS = {
    "case": "case",
    "batch": "batch",
    "heads": "heads",
    "length": "length",
    "ms": "ms",
    "ms_scores": "ms with scores",
    "gb_s": "GB/s",
    "fraction": "of read bandwidth",
    "flashinfer_bf16_ms": "FlashInfer bf16 ms",
    "flashinfer_fp8_ms": "FlashInfer fp8 ms",
    "vs_bf16": "vs bf16",
    "vs_bf16_scores": "vs bf16, with scores",
    "vs_fp8": "vs fp8",
}


def versions() -> dict[str, str]:
    """Hardware and software of the run."""
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    try:
        import flashinfer

        found["flashinfer"] = flashinfer.__version__
    except ImportError:
        pass
    return found


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(rows: list[dict[str, Any]], columns: dict[str, str]) -> list[str]:
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(_cell(row.get(key)) for key in columns) + " |" for row in rows]


def write_report(report: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernels.json").write_text(json.dumps(report, indent=1) + "\n")
    system = ", ".join(f"{k} {v}" for k, v in report["system"].items())
    lines = ["# Kernels", "", f"{system}; measured read bandwidth {report['read_gb_s']:.0f} GB/s.", ""]
    lines += ["Decode attention of one layer, medians of graph replays:", ""]
    lines += _table(report["attention"], COLUMNS)
    management = report["management"]
    lines += ["", "Page management of one step, 32 layers x 8 heads, milliseconds:", ""]
    lines += _table(management, {key: key for key in management[0]})
    (folder / "kernels.md").write_text("\n".join(lines) + "\n")
    _chart(report, folder / "kernels.png")


def _chart(report: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return
    rows = [r for r in report["attention"] if r["batch"] == 64 and r["length"] in (4096, 16384)]
    figure, axis = plt.subplots(figsize=(9, 4))
    names = [f"{r['case']}\n{r['length']}" for r in rows]
    place = range(len(rows))
    bars = (("ms", "DiffKV"), ("ms_scores", "DiffKV with scores"), ("flashinfer_bf16_ms", "FlashInfer bf16"),
            ("flashinfer_fp8_ms", "FlashInfer fp8"))  # fmt: skip
    for i, (key, label) in enumerate(bars):
        axis.bar([x + (i - 1.5) * 0.2 for x in place], [r[key] or 0 for r in rows], 0.2, label=label)
    axis.set_xticks(list(place), names, fontsize=7)
    axis.set_ylabel("ms a layer")
    axis.set_title(f"Decode attention, batch 64, {report['system']['gpu']}")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
