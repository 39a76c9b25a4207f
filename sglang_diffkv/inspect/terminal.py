"""The cache in a terminal."""

from __future__ import annotations

from rich.color import Color
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.style import Style
from rich.table import Table
from rich.text import Text

from sglang_diffkv.inspect.snapshot import QUANTITIES, Quantity, Snapshot

COLD, HOT = (20, 30, 60), (255, 200, 60)
"""Red, green and blue of the smallest and the largest cell."""


def summary(snapshot: Snapshot) -> RenderableType:
    """Tier shares and page occupancy."""
    table = Table.grid(padding=(0, 2))
    rows = [
        ("pages", snapshot.pages_used / snapshot.pages if snapshot.pages else 0.0, _pages(snapshot)),
        ("high tier", snapshot.share_high, f"{snapshot.share_high:.1%} of all heads' tokens"),
        ("low tier", snapshot.share_low, f"{snapshot.share_low:.1%}"),
        ("pruned", snapshot.share_pruned, f"{snapshot.share_pruned:.1%}"),
    ]
    if snapshot.share_out_of_window:
        rows.append(("out of window", snapshot.share_out_of_window, f"{snapshot.share_out_of_window:.1%}"))
    if len(snapshot.share_by_tier) > 2:
        rows[2:3] = [(name, share, f"{share:.1%}") for name, share in [*snapshot.share_by_tier.items()][1:]]
    for name, share, text in rows:
        table.add_row(name, ProgressBar(total=1.0, completed=share, width=24), text)
    line = (
        f"{snapshot.tokens} live tokens; {snapshot.ratio_pages:.3f} of their bf16 bytes, "
        f"{snapshot.ratio_tokens:.3f} without the pages' free slots"
    )
    return Group(Text(f"{line}; {snapshot.scope}" if snapshot.scope else line), table)


def _pages(snapshot: Snapshot) -> str:
    share = snapshot.pages_used / snapshot.pages if snapshot.pages else 0.0
    held, whole = (x * snapshot.page_bytes / 2**20 for x in (snapshot.pages_used, snapshot.pages))
    return f"{share:.1%}, {snapshot.pages_used} of {snapshot.pages}, {held:.1f} of {whole:.1f} MiB"


def heat_map(snapshot: Snapshot, quantity: Quantity) -> RenderableType:
    """A cell for each layer (down) and KV head (across). Raises InspectError without figures by head."""
    values = snapshot.values(quantity)
    low, high = float(values.min()), float(values.max())
    table = Table(box=None, padding=0)
    table.add_column("layer", justify="right")
    for head in range(values.shape[1]):
        table.add_column(f"{head} ", justify="right", min_width=7)
    for layer, line in enumerate(values):
        cells = [Text(f"{x:.1f} ", style=_style((x - low) / (high - low) if high > low else 0.0)) for x in line]
        table.add_row(f"{layer} ", *cells)
    return Group(Text(f"{QUANTITIES[quantity]} by layer and KV head"), table)


def _style(heat: float) -> Style:
    shade = [round(cold + heat * (hot - cold)) for cold, hot in zip(COLD, HOT)]
    return Style(color="black" if heat > 0.5 else "white", bgcolor=Color.from_rgb(*shade))
