"""The text that people read, and the sentences in it: of Markdown pages, docstrings and ``--help``."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

MOST_WORDS = 35
"""Of a sentence."""

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1[^\n]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)")
_CODE = re.compile(r"(`+)(?!`).+?\1", re.DOTALL)
_HTML = re.compile(r"<!--.*?-->|</?[A-Za-z][^>]*>|https?://\S+", re.DOTALL)
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")
_ENTRY = re.compile(r"^\s*[\w`*., ()]{1,60}: ")
_SECTION = re.compile(r"^\s*(Args|Attributes|Returns|Raises|Yields):\s*$")
_END = re.compile(r"[.!?][)\"'*_]*\s+(?=[\"'(*_\[]*[A-Z`\d]|[a-z_]+: )")
"""What ends a sentence; a name with a colon begins one, as in docstrings that describe arguments in a line."""
_HELP = ("help", "description", "epilog")


def words(text: str) -> int:
    """Words of a text. A sign alone is none."""
    return sum(any(c.isalnum() for c in x) for x in text.split())


def sentences(block: str) -> list[str]:
    """Of a block of prose. Code within a line counts as one word, and the address of a link as none."""
    text = _HTML.sub("", _LINK.sub(r"\1", _CODE.sub("`code`", block)))
    return [x for x in _END.split(" ".join(text.split())) if x]


def long_sentences(blocks: Iterator[str]) -> list[str]:
    """Those with more than ``MOST_WORDS`` words."""
    return [x for block in blocks for x in sentences(block) if words(x) > MOST_WORDS]


def _cells(row: str) -> list[str]:
    return re.split(r"(?<!\\)\|", _CODE.sub("`code`", row))


def blocks_of_page(text: str) -> Iterator[str]:
    """Paragraphs, list items and the cells of tables; headings and blocks of code are left out."""
    lines: list[str] = []
    for line in [*_FENCE.sub("\n", text).splitlines(), ""]:
        stripped = line.strip()
        ends = not stripped or stripped.startswith(("|", "#", ">")) or _ITEM.match(line)
        if ends and lines:
            yield "\n".join(lines)
            lines = []
        if stripped.startswith("|"):
            yield from _cells(stripped)
        elif stripped and not stripped.startswith("#"):
            lines.append(_ITEM.sub("", line))


def blocks_of_docstring(text: str) -> Iterator[str]:
    """Paragraphs, list items and what is said of each argument."""
    lines: list[str] = []
    in_section, depth = False, 0
    for line in [*inspect.cleandoc(text).splitlines(), ""]:
        indent = len(line) - len(line.lstrip())
        begins = not line.strip() or _ITEM.match(line) or (lines and indent < depth)
        if _SECTION.match(line):
            begins, in_section = True, True
        cells = line.strip().startswith("|")
        if (begins or cells or (in_section and _ENTRY.match(line))) and lines:
            yield "\n".join(lines)
            lines = []
        if cells:
            yield from _cells(line)
        elif line.strip():
            depth = indent
            lines.append(_ITEM.sub("", line))


def _text_of(node: ast.expr) -> str:
    """A string's text, with ``x`` for what is put into it; empty for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(x) or "x" for x in node.values)
    if isinstance(node, ast.BinOp):
        return _text_of(node.left) + _text_of(node.right)
    return ""


def blocks_of_code(path: Path) -> Iterator[str]:
    """Of a Python file: its docstrings, those of attributes among them, and the texts of ``--help``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from blocks_of_docstring(node.value.value)
        elif isinstance(node, ast.keyword) and node.arg in _HELP:
            yield from blocks_of_docstring(_text_of(node.value))
