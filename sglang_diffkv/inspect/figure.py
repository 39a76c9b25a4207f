"""The heat map as an image."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sglang_diffkv.inspect.snapshot import QUANTITIES, Quantity, Snapshot


def draw(snapshot: Snapshot, quantity: Quantity, path: Path) -> None:
    """Write a PNG: layers down, KV heads across. Raises InspectError without figures by head."""
    values = snapshot.values(quantity)
    layers, heads = values.shape
    figure = Figure(figsize=(2.5 + 0.45 * max(heads, 6), 1.6 + 0.22 * max(layers, 8)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(values, aspect="auto", cmap="viridis", vmin=0)
    axes.set(xlabel="KV head", ylabel="layer", xticks=range(heads))
    axes.set_yticks(range(0, layers, max(1, layers // 16)))
    axes.set_title(
        f"{snapshot.tokens} live tokens, {snapshot.ratio_pages:.3f} of bf16 bytes\n"
        f"high {snapshot.share_high:.0%}, low {snapshot.share_low:.0%}, pruned {snapshot.share_pruned:.1%}"
        + (f", out of window {snapshot.share_out_of_window:.0%}" if snapshot.share_out_of_window else "")
        + (f"\n{snapshot.scope}" if snapshot.scope else ""),
        fontsize=9,
    )
    figure.colorbar(image, label=QUANTITIES[quantity])
    figure.savefig(path, format="png")
