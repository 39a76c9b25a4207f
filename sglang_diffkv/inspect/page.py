"""The cache as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sglang_diffkv.inspect.snapshot import QUANTITIES, InspectError, Quantity, Report, Snapshot
from sglang_diffkv.page import (
    BAR,
    Html,
    Part,
    anything,
    bar,
    document,
    figure,
    flow,
    heat_map,
    html,
    number,
    percent,
    shown,
    size,
    table,
    tag,
    tiles,
)

MOST_CELLS = 8192
"""Of a map; of more layers and heads than that, layers alone are shown."""
OWNERS = {
    "private": "of running requests alone",
    "shared": "of running requests and the prefix cache",
    "cached": "of the prefix cache alone; they can be evicted",
    "free": "of nobody",
}
HEADINGS = {
    "prefix_cache": "Prefix cache",
    "retracted": "Retracted requests",
    "admission": "Admission",
    "prompts": "Prompts by outcome",
    "memory": "Memory",
    "mixed_chunks": "Mixed chunks",
    "states": "States",
    "finished": "Finished requests",
    "finished_1k": "Finished requests of 1,000 tokens and more",
    "configuration": "Configuration",
}
"""Of entries of ``/server_info``, in the order in which they are shown. Entries without one come behind them."""
WIDE = ("prefix_cache", "configuration")
"""Entries that take the width of the page."""
SHOWN_ABOVE = {*Snapshot.model_fields, "running", "kv_heads", "segments"}
MEANS = ("ratio_pages", "ratio_tokens")


def render(report: Report, *, refresh: bool = False) -> str:
    """The page as HTML. ``refresh``: it is served, and has a button that asks the server anew."""
    snapshot, about = report.snapshot, report.about
    model = about.get("served_model_name") or about.get("model_path") or "a model"
    known = (("version", "SGLang"), ("device", "on"))
    kind = ", ".join(f"{label} {shown(about[name])}" for name, label in known if name in about)
    lead = [f"{report.url}{'; ' if kind else ''}{kind}. Read at {report.at:%Y-%m-%d %H:%M:%S} UTC."]
    if report.scope:
        lead.append(f"Figures are those of {report.scope}.")
    if not snapshot.tokens:
        lead.append("Nothing is held: no request runs, and the prefix cache is empty.")
    parts = [
        Part("overview", "Overview", _overview(report)),
        Part("tiers", "Tokens by tier", _tiers(snapshot)),
        Part("owners", "Pages by owner", _owners(snapshot)),
        Part("heads", "Layers and heads", _maps(snapshot)),
        Part("running", "Running requests", _running(report)),
    ]
    for name in [x for x in HEADINGS if x in report.stats] + [x for x in report.stats if x not in HEADINGS]:
        if name not in SHOWN_ABOVE and not name.startswith(("ratio_", "share_")):
            heading = HEADINGS.get(name) or shown(name.replace("_", " ").capitalize())
            parts.append(
                Part(f"part-{len(parts)}", heading, _entry(name, heading, report.stats[name]), name not in WIDE)
            )
    parts.append(Part("server", "Server", flow(anything("What the server was started with", about)), True))
    end = "Ratios are to bf16 bytes of the same tokens. docs/operate.md explains each name."
    return document(f"KV cache of {shown(model)}", lead, parts, refresh=refresh, end=end)


def _overview(report: Report) -> Html:
    x = report.snapshot
    used = x.pages_used / x.pages if x.pages else 0.0
    whole = f"{size(x.pages_used * x.page_bytes)} of {size(x.pages * x.page_bytes)}"
    figures = [
        ("tokens held", number(x.tokens), "by running requests and the prefix cache"),
        ("of bf16 bytes", number(x.ratio_pages), f"{number(x.ratio_tokens)} without free slots"),
        ("pages in use", percent(used), whole),
        ("running requests", "unknown" if x.requests is None else number(x.requests), ""),
    ]
    figures += _host_memory(report.stats)
    figures.append(("faults", number(x.faults), "requests that found no page" if x.faults else ""))
    return tiles(figures)


def _host_memory(stats: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The tile of what retracted requests and evicted prefixes hold; none if the server tells neither."""
    users = {"retracted": "retracted requests", "host_prefixes": "evicted prefixes"}
    parts = {words: stats[name] for name, words in users.items() if isinstance(stats.get(name), Mapping)}
    held = {words: found["host_bytes"] for words, found in parts.items() if isinstance(found.get("host_bytes"), int)}
    if not held:
        return []
    most = figure("bytes", max(found.get("host_bytes_most") or 0 for found in parts.values()) or None)
    shares = [words if len(held) == 1 else f"{words} ({size(count)})" for words, count in held.items()]
    return [("host memory", size(sum(held.values())), f"of {most}, for {' and '.join(shares)}")]


def _tiers(x: Snapshot) -> Html:
    rows = [(name, share) for name, share in x.share_by_tier.items()]
    rows = rows or [("high", x.share_high), ("low", x.share_low)]
    rows.append(("pruned", x.share_pruned))
    if x.share_out_of_window:
        rows.append(("out of window", x.share_out_of_window))
    lines = [(shown(name), percent(share), bar(share)) for name, share in rows]
    return table("Shares of the tokens held, over layers and KV heads", ("tier", "share", BAR), lines)


def _owners(x: Snapshot) -> Html:
    if not x.owners:
        return tag("p", "This server does not tell pages by owner.")
    whole, lines = sum(x.owners.values()) or 1, []
    for name, count in x.owners.items():
        share = count / whole
        lines.append((shown(name), number(count), size(count * x.page_bytes), percent(share), bar(share)))
    caption = f"Pages of {size(x.page_bytes)} each, by who refers to them"
    explained = "; ".join(f"{name}: {which}" for name, which in OWNERS.items() if name in x.owners)
    held = table(caption, ("owner", "pages", "size", "share", BAR), lines)
    return html([held, tag("p", f"{explained}.", class_="soft")]) if explained else held


def _maps(snapshot: Snapshot) -> Html:
    try:
        values = {name: snapshot.values(name) for name in QUANTITIES}
    except InspectError as error:
        return tag("p", error)
    values = {name: found for name, found in values.items() if name in ("bytes", "high") or found.any()}
    return html([_map(name, found, opened=name == "bytes") for name, found in values.items()])


def _map(name: Quantity, values: np.ndarray, *, opened: bool) -> Html:
    caption = QUANTITIES[name]
    if name == "bytes" and values.max(initial=0.0) >= 1024:
        values, caption = values / 1024, caption.replace("KiB", "MiB")
    layers, heads = values.shape
    columns = [str(head) for head in range(heads)]
    if layers * heads > MOST_CELLS:
        of_layer = values.sum if name == "bytes" else values.mean
        values, columns = of_layer(1, keepdims=True), ["all heads"]
    shaded = heat_map(f"{caption} by layer and KV head", "layer", values.tolist(), columns)
    return tag("details", tag("summary", f"{caption[0].upper()}{caption[1:]}"), shaded, open="" if opened else None)


def _running(report: Report) -> Html:
    running, held = report.stats.get("running"), report.snapshot.page_bytes
    if not isinstance(running, list) or not all(isinstance(x, Mapping) for x in running):
        return tag("p", "This server does not tell running requests one by one.")
    names = ("tokens", "prefix_tokens", "pages", *MEANS)
    lines = []
    for index, found in enumerate(running, 1):
        cells = [figure(name, found.get(name, "")) for name in names]
        pages = found.get("pages")
        cells.insert(3, size(pages * held) if isinstance(pages, (int, float)) else "")
        lines.append((str(index), *cells))
    count = report.snapshot.requests or 0
    caption = "Longest first" if count <= len(lines) else f"The {len(lines)} longest of {number(count)}"
    header = ("no.", "tokens", "of a shared prefix", "pages", "size", "of bf16 bytes", "without free slots")
    return table(caption, header, lines)


def _entry(name: str, heading: str, value: Any) -> Html:
    if name == "memory":
        return flow(anything(heading, value, unit="bytes"))
    if name != "prefix_cache" or not isinstance(value, Mapping):
        return flow(anything(heading, value))
    trees = {"by_depth": "Tree by depth", "by_tenant": "Tree by tenant"}
    parts = [anything(heading, {key: found for key, found in value.items() if key not in trees})]
    parts += [anything(caption, value[key]) for key, caption in trees.items() if key in value]
    told = "Depth: nodes that begin between a position and the next one shown, and tokens that lie there. "
    told += "Tenant: the first digits of the SHA-256 of an extra_key; not set where requests have none."
    return html([flow(html(parts)), tag("p", told, class_="soft")])
