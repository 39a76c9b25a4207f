"""MkDocs hook: files of the repository that are no pages are named instead of linked or shown."""

from __future__ import annotations

import re
from typing import Any

LINK = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#]*)(#[^)]*)?\)")


def _named(match: re.Match[str]) -> str:
    picture, text, path, _ = match.groups()
    if picture:
        return f"*{text}: `{path}` in the repository*"
    return f"{text} (`{path}`)" if text != path else f"`{path}`"


def on_page_markdown(markdown: str, **context: Any) -> str:
    """What MkDocs calls for each page."""
    return LINK.sub(_named, markdown)
