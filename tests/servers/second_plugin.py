"""A second plugin of SGLang's beside this one, of a test, for the processes of its servers."""

from __future__ import annotations

import os
from pathlib import Path


def install(folder: Path, name: str, source: str) -> dict[str, str]:
    """Write a plugin into a folder: a module ``name`` of this source, whose ``register`` SGLang calls. Returns the
    environment in which a server finds it."""
    (folder / f"{name}.py").write_text(source)
    package = folder / f"{name}-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: 0\n")
    (package / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    return {"PYTHONPATH": os.pathsep.join(x for x in (str(folder), os.environ.get("PYTHONPATH")) if x)}
