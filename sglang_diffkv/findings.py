"""What ``python -m sglang_diffkv.doctor`` found: lines by section, and what would be refused."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

WIDTH = 110
REFUSED, WARNING = "REFUSED", "WARNING"


@dataclass(frozen=True)
class Finding:
    """A line. ``refused``: ``text`` is why a server would not start, and what to do. ``warned``: what may go wrong.
    ``value``: for programs."""

    section: str
    name: str
    text: str
    refused: bool = False
    value: Any = None
    warned: bool = False


@dataclass
class Findings:
    """All of them, in the order in which they were made."""

    items: list[Finding] = field(default_factory=list)
    section: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """For programs, by stable names: numbers and versions as they are, not as they are printed."""

    def add(self, name: str, text: str, value: Any = None, *, key: str = "") -> None:
        """A fact of the current section. ``key``: its place among ``facts``, parts of which are joined by dots."""
        self.items.append(Finding(self.section, name, text, value=value))
        if key:
            self.note(key, value)

    def note(self, key: str, value: Any) -> None:
        """A fact for programs alone."""
        *folders, name = key.split(".")
        at = self.facts
        for folder in folders:
            at = at.setdefault(folder, {})
        at[name] = value

    def warn(self, name: str, text: str) -> None:
        """Something that ends no start, but may go wrong."""
        self.items.append(Finding(self.section, name, text, warned=True))

    def refuse(self, name: str, text: str) -> None:
        """Something that ends a server's start."""
        self.items.append(Finding(self.section, name, text, refused=True))

    @property
    def refusals(self) -> list[str]:
        """Each reason once: what SGLang reports in two places is one thing to do."""
        return list(dict.fromkeys(x.text for x in self.items if x.refused))

    @property
    def warnings(self) -> list[str]:
        return [x.text for x in self.items if x.warned]

    def report(self) -> dict[str, Any]:
        """For ``--json``."""
        sections: dict[str, list[dict[str, Any]]] = {}
        for x in self.items:
            line = {"name": x.name, "text": x.text, "refused": x.refused}
            sections.setdefault(x.section, []).append(line | ({} if x.value is None else {"value": x.value}))
        said = {"ok": not self.refusals, "refusals": self.refusals, "warnings": self.warnings}
        return {**said, "facts": self.facts, "sections": sections}

    def describe(self) -> str:
        """An aligned list, for a terminal and for a bug report."""
        indent = max((len(x.name) for x in self.items), default=0) + 4
        lines: list[str] = []
        section = None
        for x in self.items:
            if x.section != section:
                lines += [""] * bool(lines) + [x.section]
                section = x.section
            text = f"{REFUSED}: {x.text}" if x.refused else f"{WARNING}: {x.text}" if x.warned else x.text
            first, *rest = textwrap.wrap(
                " ".join(text.split()), WIDTH - indent, break_long_words=False, break_on_hyphens=False
            )
            lines.append(f"  {x.name:<{indent - 2}}{first}")
            lines += [" " * indent + more for more in rest]
        count = len(self.refusals)
        reasons = f"{count} reason{'s' * (count != 1)}"
        found = f"A server would be refused, for {reasons}." if count else "Nothing found that would be refused."
        return "\n".join([*lines, "", found])
