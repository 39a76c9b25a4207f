"""Reports as one HTML file: no script, nothing from elsewhere, in light and dark, at any width.

Whatever is not ``Html`` is escaped. So a text of a server or of a user is shown, and never obeyed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

LEVELS = 10
"""Shades of a map's cells."""
MOST_ROWS, MOST_TEXT, MOST_DEPTH = 200, 400, 6
"""Of what is shown without being known: rows of a table, characters of a text, and how deep it is nested."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
"""Content security policy of a page that is served."""

LONG_TEXT = 24
"""Characters up to which a cell stays on one line."""

_LIGHT = ["f3f7fc", "dfeaf6", "c7dbef", "a9c8e6", "86b1da", "6399cb", "447fb8", "2c65a0", "184c86", "0a3468"]
_DARK = ["16202c", "1a2d42", "1e3b5a", "234a74", "2a5b90", "356eab", "4a85c2", "6b9fd4", "94bbe3", "c2daf2"]
_BRIGHT_TEXT = (range(7, LEVELS), range(0, 6))
"""Levels whose cells have bright text, in light and in dark."""


def _shades(colours: Sequence[str], bright: range) -> str:
    inks = ("#0b0f14", "#ffffff")
    return "".join(
        f".l{level}{{background:#{colour};color:{inks[level in bright]}}}" for level, colour in enumerate(colours)
    )


STYLE = (
    """
:root{color-scheme:light dark;--paper:#ffffff;--ink:#17202b;--soft:#55606e;--line:#d5dbe3;--card:#f5f7fa;--fill:#2c65a0;
--link:#0b57a4;--wrong:#b3261e}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:1rem/1.5 system-ui,sans-serif}
main,header,footer{max-width:72rem;margin:0 auto;padding:0 1rem}
h1{font-size:1.5rem;line-height:1.25;margin:1.25rem 0 .25rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2rem 0 .5rem;padding-top:.75rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.25rem 0 .25rem}
p{margin:.35rem 0;max-width:70ch;overflow-wrap:anywhere}
a{color:var(--link)}
.soft{color:var(--soft);font-size:.9rem}
.wrong{color:var(--wrong);font-weight:600}
.skip,.unseen{position:absolute;left:-99rem}
.skip:focus{left:1rem;top:.5rem;background:var(--paper);padding:.25rem .5rem}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1rem;list-style:none;margin:.75rem 0;padding:0;font-size:.9rem}
button{font:inherit;color:inherit;background:var(--card);border:1px solid var(--line);border-radius:.4rem;
padding:.3rem .9rem;cursor:pointer}
button:hover{border-color:var(--fill)}
:focus-visible{outline:2px solid var(--link);outline-offset:2px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(10rem,1fr));gap:.6rem;margin:.75rem 0;padding:0}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.5rem .75rem}
.tiles dt{color:var(--soft);font-size:.85rem}
.tiles dd{margin:0;font-size:1.3rem;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tiles dd.note{font-size:.8rem;color:var(--soft)}
.scroll{overflow:auto;max-height:34rem;margin:.25rem 0 .75rem;border:1px solid var(--line);border-radius:.4rem;
width:fit-content;max-width:100%}
table{min-width:13rem;border-collapse:separate;border-spacing:0;font-size:.88rem;font-variant-numeric:tabular-nums}
caption{caption-side:top;text-align:left;color:var(--soft);font-size:.85rem;padding:.4rem .6rem;
border-bottom:1px solid var(--line)}
th,td{padding:.25rem .6rem;text-align:left;vertical-align:top}
td{overflow-wrap:break-word;max-width:40rem}
.t{overflow-wrap:anywhere;min-width:9rem}
tbody tr+tr>*{border-top:1px solid var(--line)}
thead th{position:sticky;top:0;background:var(--card);font-weight:600;border-bottom:1px solid var(--line);z-index:1}
thead th:first-child{left:0;z-index:2}
tbody th{font-weight:600;position:sticky;left:0;background:var(--paper);max-width:18rem;
overflow-wrap:break-word}
.n{text-align:right;white-space:nowrap}
thead th{vertical-align:bottom}
thead .n{white-space:normal}
.map{font-size:.78rem}
.map th,.map td{padding:.12rem .4rem;text-align:right;white-space:nowrap;min-width:0}
.map tbody tr>*{border-top:0}
.bar{display:block;width:7rem;max-width:16vw;height:.7rem;margin-top:.4rem;background:var(--line);border-radius:.2rem;
overflow:hidden}
.bar i{display:block;height:100%;background:var(--fill)}
.beside{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,24rem),1fr));gap:0 2rem}
.beside section{min-width:0}
.flow{display:flex;flex-wrap:wrap;gap:0 1rem;align-items:flex-start}
details>summary{cursor:pointer;font-weight:600;margin:.5rem 0}
footer{margin:2.5rem auto 2rem;color:var(--soft);font-size:.85rem}
@media (max-width:30rem){th,td{padding:.25rem .4rem}.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}
tbody th{max-width:13rem}.t{min-width:7rem}.bar{max-width:8vw}}
"""
    + _shades(_LIGHT, _BRIGHT_TEXT[0])
    + """
@media (prefers-color-scheme:dark){:root{--paper:#10151b;--ink:#e4e9ef;--soft:#a3afbd;--line:#2d3743;--card:#18202a;
--fill:#6b9fd4;--link:#8fc0f5;--wrong:#ff9d94}"""
    + _shades(_DARK, _BRIGHT_TEXT[1])
    + "}\n@media print{.scroll{max-height:none;overflow:visible}nav,form{display:none}}\n"
)


class Html(str):
    """A text that is HTML already."""


def html(content: Any) -> Html:
    """``content`` escaped, unless it is HTML; of a list all its parts."""
    if isinstance(content, Html):
        return content
    if isinstance(content, (list, tuple)):
        return Html("".join(html(part) for part in content))
    return Html(escape(str(content).encode("utf-8", "replace").decode("utf-8")))


def tag(name: str, *content: Any, **attributes: Any) -> Html:
    """An element. ``class_`` is ``class``, and ``aria_label`` is ``aria-label``; None leaves an attribute out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    shown = "".join(f' {key}="{html(value)}"' for key, value in given.items())
    return Html(f"<{name}{shown}>{html(content)}</{name}>")


@dataclass(frozen=True)
class Part:
    """A section of a page: the name of its anchor, its heading and what it shows. ``small``: it may stand beside
    others."""

    anchor: str
    heading: str
    content: Html
    small: bool = False


def number(value: float, digits: int = 3) -> str:
    """A number with commas; a whole one without a point."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def size(count: float) -> str:
    """Bytes in the unit that fits."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while abs(count) >= 1024 and power < len(units) - 1:
        count, power = count / 1024, power + 1
    return f"{count:,.{1 if power else 0}f} {units[power]}"


def percent(share: float) -> str:
    """A share of 1."""
    return f"{100 * share:.1f}%"


def bar(share: float) -> Html:
    """A share as a bar. Its number has to stand beside it: readers of a screen do not see the bar."""
    width = 100 * min(max(share, 0.0), 1.0)
    return tag("span", tag("i", style=f"width:{width:.1f}%"), class_="bar", aria_hidden="true")


BAR = tag("span", "as a bar", class_="unseen")
"""The head of a column of bars, for readers of a screen."""


def is_number(text: Any) -> bool:
    """Whether a cell reads as a number, which stands to the right."""
    shown = str(text).replace(",", "")
    return isinstance(text, str) and shown[:1] in "+-.0123456789" and shown[-1:] in ".%0123456789B" and shown != ""


def table(caption: str, header: Sequence[Any], rows: Iterable[Sequence[Any]], class_: str | None = None) -> Html:
    """A table with a caption. The first cell of a row is its head. One that is too wide or too long scrolls."""
    head = tag("tr", *(tag("th", cell, scope="col", class_="n" if i else None) for i, cell in enumerate(header)))
    lines = [tag("tr", tag("th", row[0], scope="row", class_=_kind(row[0])), *map(_cell, row[1:])) for row in rows]
    if not lines:
        lines = [tag("tr", tag("td", "none", colspan=len(header)))]
    whole = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *lines), class_=class_)
    return scrolling(whole, caption)


def scrolling(content: Html, label: str) -> Html:
    """A region that a keyboard can scroll."""
    return tag("div", content, class_="scroll", role="region", tabindex=0, aria_label=label)


def _cell(content: Any) -> Html:
    if isinstance(content, Html) and content.startswith("<td"):
        return content
    return tag("td", content, class_=_kind(content))


def _kind(content: Any) -> str | None:
    """The class of a cell: of a number, of a text that may break anywhere, or none."""
    if is_number(content):
        return "n"
    return "t" if not isinstance(content, Html) and len(str(content)) > LONG_TEXT else None


def heat_map(caption: str, corner: str, values: Sequence[Sequence[float]], columns: Sequence[str]) -> Html:
    """A table of numbers whose cells are shaded from the smallest to the largest. A row is named by its number."""
    flat = [value for line in values for value in line]
    low, high = (min(flat), max(flat)) if flat else (0.0, 0.0)
    span = high - low

    def cell(value: float) -> Html:
        level = int((value - low) / span * (LEVELS - 1) + 0.5) if span > 0 else 0
        return tag("td", f"{value:,.1f}", class_=f"l{level}")

    rows = ((str(i), *(cell(value) for value in line)) for i, line in enumerate(values))
    return table(f"{caption}; {low:,.1f} to {high:,.1f}", (corner, *columns), rows, class_="map")


def tiles(figures: Iterable[tuple[str, str, str]]) -> Html:
    """Some figures in large: name, value, and a note that may be empty."""
    parts = [
        tag("div", tag("dt", name), tag("dd", value), *([tag("dd", note, class_="note")] if note else []))
        for name, value, note in figures
    ]
    return tag("dl", *parts, class_="tiles")


def flow(content: Html) -> Html:
    """Small tables side by side, as many as there is room for."""
    return tag("div", content, class_="flow")


def anything(name: str, value: Any, *, unit: str = "", depth: int = 0) -> Html:
    """Data of whatever form: an object as a table of its fields, a list of objects as a table with a column each.
    ``unit``: ``bytes`` if whole numbers are."""
    if depth >= MOST_DEPTH:
        return tag("p", "nested too deep to be shown")
    if isinstance(value, Mapping):
        plain = {key: found for key, found in value.items() if not _nested(found)}
        parts = [_fields(name, plain, unit)] if plain or not value else []
        nested = ((key, found) for key, found in value.items() if _nested(found))
        more = (anything(f"{name}: {key}", found, unit=unit, depth=depth + 1) for key, found in nested)
        return html([*parts, *more])
    if isinstance(value, (list, tuple)) and value and all(isinstance(x, Mapping) for x in value):
        return _records(name, value)
    return _fields(name, {"value": value}, unit)


def _nested(value: Any) -> bool:
    objects = isinstance(value, (list, tuple)) and any(isinstance(x, (Mapping, list, tuple)) for x in value)
    return (isinstance(value, Mapping) and bool(value)) or objects


def _fields(name: str, fields: Mapping[Any, Any], unit: str) -> Html:
    rows = [
        (shown(str(key)), _to_the_right(figure(str(key), value, unit))) for key, value in [*fields.items()][:MOST_ROWS]
    ]
    return table(_left_out(name, len(fields)), ("name", "value"), rows)


def _to_the_right(text: str) -> Html:
    """A cell below ``value``: numbers and words at the right, but for long texts."""
    return tag("td", text, class_="n" if len(text) <= LONG_TEXT else "t")


def _records(name: str, records: Sequence[Mapping[Any, Any]]) -> Html:
    columns = [*dict.fromkeys(str(key) for record in records[:MOST_ROWS] for key in record)][:MOST_ROWS]
    rows = [[figure(key, record.get(key, "")) for key in columns] for record in records[:MOST_ROWS]]
    return table(_left_out(name, len(records)), [shown(key) for key in columns], rows)


def _left_out(name: str, count: int) -> str:
    return shown(name) + (f" (the first {MOST_ROWS} of {count:,})" if count > MOST_ROWS else "")


def shown(value: Any) -> str:
    """A value as a text that is not long."""
    text = str(value)
    return text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + "..."


def figure(name: str, value: Any, unit: str = "") -> str:
    """A value of a field, with the unit that the field's name tells, or else ``unit``."""
    if value is None:
        return "not set"
    if isinstance(value, (list, tuple, Mapping)):
        if isinstance(value, Mapping):
            value = [f"{key} {figure(str(key), found)}" for key, found in value.items()]
        return shown(", ".join(shown(x) for x in value)) if value else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return shown(value)
    if value != value or abs(value) == float("inf"):
        return str(value)
    words = name.split("_")
    if "bytes" in words or (unit == "bytes" and isinstance(value, int)):
        return size(value)
    return percent(value) if "share" in words and isinstance(value, float) else number(value)


def document(title: str, lead: Sequence[Any], parts: Sequence[Part], *, refresh: bool = False, end: str = "") -> str:
    """A whole page.

    Args:
        title: its heading, and that of its window. lead: paragraphs below it. end: a line at the foot.
        refresh: it is served, so that a button asks for it anew.
    """
    links = tag("ul", *(tag("li", tag("a", part.heading, href=f"#{part.anchor}")) for part in parts))
    button = tag("form", tag("button", "Refresh", type="submit"), method="get") if refresh else Html("")
    sections: list[Html] = []
    for small, group in groupby(parts, key=lambda part: part.small):
        shown_parts = [tag("section", tag("h2", part.heading), part.content, id=part.anchor) for part in group]
        sections.append(tag("div", shown_parts, class_="beside") if small else html(shown_parts))
    head = tag("header", tag("h1", title), *(tag("p", line, class_="soft") for line in lead), button)
    nav = tag("nav", links, aria_label="Sections") if len(parts) > 1 else Html("")
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#content", class_="skip"),
        head,
        tag("main", nav, *sections, id="content"),
        tag("footer", tag("p", end)) if end else Html(""),
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="referrer" content="no-referrer">{tag("title", title)}<style>{STYLE}</style></head>{body}</html>\n'
    )
