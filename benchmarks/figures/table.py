"""A figure's numbers as a Markdown table."""

from __future__ import annotations

from benchmarks.figures.critical_tokens import CriticalTokens
from benchmarks.figures.data import FigureData
from sglang_diffkv.evaluate.report import markdown


def of_points(data: FigureData) -> str:
    """A row for each configuration and task file."""
    header = ["task file", "series", "configuration", "n", "accuracy %", "to bf16", "bytes, pages", "bytes, tokens"]
    header += ["high / low / pruned %"]
    rows = []
    for x in data.points:
        change = "" if x.difference is None else f"{100 * x.difference:+.1f} ± {100 * (x.difference_error or 0):.1f}"
        ratios = ["" if y is None else f"{y:.3f}" for y in (x.ratio_pages, x.ratio_tokens)]
        shares = [x.share_high, x.share_low, x.share_pruned]
        told = "" if None in shares else " / ".join(f"{100 * (y or 0):.1f}" for y in shares)
        score = f"{100 * x.accuracy:.1f} ± {100 * x.error:.1f}"
        rows.append([x.suite, x.series, x.configuration, str(x.n), score, change, *ratios, told])
    return "\n\n".join([markdown(header, rows), *(f"- {x}" for x in data.remarks())])


def of_layers(data: CriticalTokens) -> str:
    """Critical tokens by layer, as figure 4 shows them."""
    values = data.percent().mean(2)  # [requests, layers]
    rows = [[str(i), f"{x.mean():.1f}", f"{x.std():.1f}"] for i, x in enumerate(values.T)]
    return markdown(["layer", "critical tokens, % of the request", "deviation over requests"], rows)


def of_heads(data: CriticalTokens) -> str:
    """Critical tokens by KV head: a row for each layer."""
    values = data.percent()  # [requests, layers, heads]
    rows = [
        [str(i), *(f"{layer[:, head].mean():.1f} ± {layer[:, head].std():.1f}" for head in range(layer.shape[1]))]
        for i, layer in enumerate(values.transpose(1, 0, 2))
    ]
    return markdown(["layer", *(f"KV head {i}" for i in range(values.shape[2]))], rows)
