"""Packages of the extra ``quality``: the tools need them, a server does not."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from itertools import pairwise

INSTALL = "pip install 'sglang-diffkv[quality]'"


def require(*names: str) -> None:
    """Say in one line which packages are missing and how they are installed. It ends a command of this package, and is
    an ImportError for who imports the tools."""
    missing = [name for name in names if find_spec(name) is None]
    if not missing:
        return
    arguments = sys.orig_argv
    command = next((b for a, b in pairwise(arguments) if a == "-m"), "")
    ours = command.partition(".")[0] == "sglang_diffkv"
    text = f"{command if ours else 'sglang_diffkv'}: {', '.join(missing)} not installed: {INSTALL}"
    raise SystemExit(text) if ours else ModuleNotFoundError(text)
