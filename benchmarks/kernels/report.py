"""Writes the kernel benchmark's results as JSON and Markdown."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.kernels import charts as kernel_charts
from benchmarks.provenance import headline
from sglang_diffkv.evaluate.report import markdown

ATTENTION = {
    "case": "case",
    "batch": "batch",
    "heads": "heads",
    "length": "length",
    "by": "by",
    "ms": "ms",
    "gb_s": "GB/s",
    "fraction": "of read bandwidth",
    "flashinfer_bf16_ms": "FlashInfer bf16 ms",
    "flashinfer_fp8_ms": "FlashInfer fp8 ms",
    "sglang_triton_ms": "SGLang Triton ms",
    "to_flashinfer_bf16": "to bf16",
    "to_flashinfer_fp8": "to fp8",
    "to_sglang_triton": "to Triton",
    "ms_scores": "ms with policy",
    "ms_sampled": "ms, each 4th observing",
    "to_flashinfer_bf16_sampled": "each 4th to bf16",
    "to_flashinfer_bf16_scores": "with policy to bf16",
    "to_flashinfer_fp8_scores": "with policy to fp8",
    "to_sglang_triton_scores": "with policy to Triton",
}
MANAGEMENT = {
    "batch": "batch",
    "reserve_ms": "reserve ms",
    "management_ms": "reserve, plan and compact ms",
    "attention_ms": "attention ms",
    "share": "share of both",
    "cpu_reserve_ms": "CPU: reserve ms",
    "cpu_management_ms": "CPU: all ms",
    "cpu_ratio": "CPU to GPU",
    "cpu_threads": "CPU threads",
}
PROMPTS = {
    "batch": "prompts",
    "reserve_ms": "reserve ms",
    "compact_ms": "compact ms",
    "management_ms": "both ms",
    "cpu_management_ms": "CPU: both ms",
    "cpu_ratio": "CPU to GPU",
    "cpu_threads": "CPU threads",
}


def cell(value: Any) -> str:
    """A figure with four digits, or nothing."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """The rows that were measured."""
    measured = [[cell(row.get(key)) for key in columns] for row in rows if "skipped" not in row]
    return markdown(list(columns.values()), measured)


def skipped(data: dict[str, Any]) -> list[str]:
    """What was not measured, and why."""
    lines = [f"- {note}" for note in data["notes"]]
    rows = [row for row in data["attention"] if "skipped" in row]
    for (heads, why), group in groupby(rows, key=lambda row: (row["heads"], row["skipped"])):
        places = [f"{row['case']}, batch {row['batch']}, length {row['length']}" for row in group]
        many = f" to {places[-1]} ({len(places)} cases)" if len(places) > 1 else ""
        lines.append(f"- attention, heads {heads}, {places[0]}{many}: {why}")
    for name in ("management", "prompts"):
        rows = data.get(name, [])
        lines += [f"- {name}, batch {row['batch']}: {row['skipped']}" for row in rows if "skipped" in row]
    return lines


def document(data: dict[str, Any]) -> str:
    """The whole report."""
    parts = [
        f"# Kernels\n\n{headline(data['provenance'])}; measured read bandwidth {data['read_gb_s']:.0f} GB/s.",
        f"`{data['provenance']['command']}`",
        "Decode attention of one layer, medians of CUDA-graph replays over inputs larger than the L2 cache; the ratios "
        "say how many times faster DiffKV is. With policy: score update and the search for tokens to move; also where "
        "each fourth generated token observes (generated_every 4).",
        table(data["attention"], ATTENTION),
        f"Page management of one decode step, 32 layers x 8 KV heads, every head moving one token, against the "
        f"attention of that step at length {data['step_length']} with the policy on, and against the plain PyTorch "
        f"ops on the CPU ({data['provenance']['cpu']}), with one thread or all, whichever is faster:",
        table(data["management"], MANAGEMENT),
    ]
    if data.get("prompts"):
        parts += [
            f"Page management of prompts of {data['step_length']} tokens, half of which go to the low tier at the end, "
            "launches included, against the plain PyTorch ops on the CPU, which take one prompt after the other:",
            table(data["prompts"], PROMPTS),
        ]
    if lines := skipped(data):
        parts += ["Not measured:", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def write_tables(data: dict[str, Any], folder: Path) -> None:
    """JSON and Markdown of what is known so far."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernels.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (folder / "kernels.md").write_text(document(data), encoding="utf-8")


def write_charts(data: dict[str, Any], folder: Path) -> None:
    """A chart of each table."""
    gpu = data["provenance"]["gpus"][0]
    rows = [row for row in data["attention"] if "skipped" not in row]
    kernel_charts.bars(rows, gpu, folder / "kernels.png")
    kernel_charts.curves(rows, gpu, folder / "kernels_grid.png")
    managed = [row for row in data["management"] if "skipped" not in row]
    prompts = [row for row in data.get("prompts", []) if "skipped" not in row]
    kernel_charts.management(managed, prompts, gpu, data["step_length"], folder / "kernels_management.png")
