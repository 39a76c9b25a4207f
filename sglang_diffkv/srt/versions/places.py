"""Where something of SGLang's is, by the row of the installed release; and where it may be, if it has moved."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.releases import TESTED_VERSIONS
from sglang_diffkv.srt.versions.compat import installed, sglang_version

MOST_PLACES = 3
"""So many are named of a target that has moved."""


def is_there(target: str) -> bool:
    """Whether the installed SGLang has ``target``: a module, names in it, joined by dots."""
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return True


def sglang_class(name: str) -> Any:
    """A class of SGLang's that the plugin builds on, by its name in ``releases.CLASSES``. Raises UnsupportedError if it
    is not where the row of the installed release says."""
    target = installed().class_path(name)
    if not is_there(target):
        raise UnsupportedError(told({name: target}))
    return pkgutil.resolve_name(target)


def told_of_import(error: ImportError) -> str:
    """What to say of an import from SGLang that failed; the error's own words where it was another."""
    found = re.search(r"^cannot import name '(\w+)' from '(sglang[\w.]*)'", str(error))
    target = f"{found[2]}.{found[1]}" if found else error.name or ""
    return told({"an import": target}) if target.startswith("sglang.") else str(error)


def told(gone: dict[str, str]) -> str:
    """What to say of what the installed SGLang has not, and what to do. ``gone``: targets, by a name of ours."""
    lines = [
        f"SGLang {sglang_version()} has moved, renamed or dropped what the plugin builds on. Install one that it was "
        f"tested with: {', '.join(TESTED_VERSIONS)}."
    ]
    for name, target in sorted(gone.items()):
        found = places(target)
        lines.append(f"- {name}: no {target}; {'perhaps ' + ', or '.join(found) if found else 'its name is nowhere'}")
    lines.append("To support this version, name the new places in its row of sglang_diffkv/releases.py.")
    return "\n".join(lines)


def places(target: str) -> list[str]:
    """Where SGLang has something of the same name, the likeliest first: its class with that method, the class alone,
    the method in another class."""
    names = target.split(".")
    name, owner = names[-1], names[-2] if names[-2][:1].isupper() else ""
    found: list[tuple[int, str]] = []
    for path, inside in _definitions():
        last, _, _ = inside.rpartition(".")[::-1]
        if owner and inside == f"{owner}.{name}":
            found.append((0, f"{path}.{inside}"))
        elif owner and inside == owner:
            found.append((1, f"{path}.{inside}"))
        elif last == name and (owner or "." not in inside):
            found.append((2, f"{path}.{inside}"))
    best = min((rank for rank, _ in found), default=0)
    return [place for rank, place in sorted(found) if rank == best][:MOST_PLACES]


_DEFINITION = re.compile(r"^(class|def|async def|    def|    async def) (\w+)", re.MULTILINE)


def _definitions() -> Iterator[tuple[str, str]]:
    """Module and name of each class, function and method in SGLang's sources."""
    import sglang.srt

    for root in map(Path, sglang.srt.__path__):
        for file in sorted(root.rglob("*.py")):
            module = ".".join(("sglang.srt", *file.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
            owner = ""
            for kind, name in _DEFINITION.findall(file.read_text(encoding="utf-8", errors="replace")):
                owner = name if kind == "class" else owner if kind.startswith(" ") else ""
                yield module, f"{owner}.{name}" if kind.startswith(" ") and owner else name
