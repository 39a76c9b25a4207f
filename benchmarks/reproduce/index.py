"""The page ``README.md`` of an output folder: all that was made, in the papers' order, and what was not, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.provenance import headline
from benchmarks.reproduce.given import Given
from benchmarks.reproduce.parts import Part
from benchmarks.reproduce.run import FOLDER, IMAGE, Record
from sglang_diffkv.evaluate.report import markdown

NAME = "README.md"


def state_of(record: Record | None, lacking: list[str]) -> str:
    """Of a part, in a few words."""
    if record is not None and record.status == "done":
        return f"made {record.finished[:10]}, {record.seconds:.0f} s"
    if lacking:
        return "not possible here"
    return "failed" if record is not None else "not made yet"


def page(
    given: Given, about: dict[str, Any], parts: Mapping[Part, Record | None], lacking: Mapping[Part, list[str]]
) -> str:
    """The whole page. ``lacking``: of each part, why it cannot be made from what was given last."""
    files = [*given.tasks, *(f"{x} (calibration)" for x in given.calibration)]
    files += [f"text {given.text.name}"] if given.text else []
    named = re.sub(r"[^\s,=]*/", "", ", ".join(files)) or "no task file"
    count = f"All of {named}" if given.n is None else f"n = {given.n} of each of {named}"
    quick = ". **A trial: the fewest settings of each**" if given.quick else ""
    rows = [
        [f"[{x.name}](#{x.name})" if record else x.name, x.paper, x.shows, state_of(record, lacking[x])]
        for x, record in parts.items()
    ]
    out = [
        f"# Figures and tables of {given.model.name}",
        f"{count}{quick}. Last run: {headline(about)}",
        f"```\n{about['command']}\n```",
        markdown(["part", "paper", "what it shows", ""], rows),
    ]
    for part, record in parts.items():
        if record is not None:
            out += _section(given, part, record)
    if missing := [(x, why) for x, why in lacking.items() if why and parts[x] is None]:
        out += ["## Not possible with what was given", "\n".join(f"- {x.name}: {'; '.join(why)}" for x, why in missing)]
    return "\n\n".join(out) + "\n"


def _section(given: Given, part: Part, record: Record) -> list[str]:
    out = [f'<a id="{part.name}"></a>', f"## {part.paper}, {part.name}: {part.shows}"]
    commands = "\n".join(record.commands)
    if record.status == "failed":
        return [*out, f"**Failed**: {record.reason} ([log]({FOLDER}/{part.name}.log))", f"```\n{commands}\n```"]
    files = [x for x in part.written(given) if x.name not in record.no_chart]
    images = [x for x in files if x.suffix == IMAGE]
    out += [f"![{part.shows}]({x.as_posix()})" for x in images]
    out += [] if images else [_inlined(given.output / x) for x in files if x.suffix == ".md"]
    links = ", ".join(f"[{x.name}]({x.as_posix()})" for x in files if x.suffix != ".png")
    if record.no_chart:
        out.append(f"No chart could be drawn of it ([log]({FOLDER}/{part.name}.log)).")
    return [*out, f"{links}; {record.about}", f"```\n{commands}\n```"]


def _inlined(path: Path) -> str:
    """A table's page as part of this one: its headings two steps down, without command and versions at its end."""
    text = path.read_text(encoding="utf-8")
    tables = [x for x in text.split("\n\n") if "|" in x or x.startswith("#")]
    return re.sub(r"^#", "###", "\n\n".join(tables), flags=re.M)


def write(
    given: Given, about: dict[str, Any], parts: Mapping[Part, Record | None], lacking: Mapping[Part, list[str]]
) -> Path:
    """Write the page."""
    given.output.mkdir(parents=True, exist_ok=True)
    path = given.output / NAME
    path.write_text(page(given, about, parts, lacking), encoding="utf-8")
    return path
