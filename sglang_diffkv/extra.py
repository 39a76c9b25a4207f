"""Packages that a command of this package needs and does not find: said in one line, with how they are installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from itertools import pairwise

from sglang_diffkv.releases import GPU_VERSIONS

INSTALL = "pip install 'sglang-diffkv[quality]'"
"""Brings what the tools need and a server does not."""
INSTALL_ALL = "pip install sglang-diffkv"
"""Brings what a server needs, SGLang among it."""
SERVED = ("numpy", "pydantic", "torch")
"""Of what a server needs, packages without which no command of this package but the doctor starts."""
SGLANG = f"sglang=={GPU_VERSIONS[0]}"
"""The release that brings the GPU packages it was tested with; pip would take the newest."""


def require(*names: str, install: str = INSTALL) -> None:
    """Say in one line which packages are missing and that ``install`` brings them. It ends a command of this package,
    and is an ImportError for who imports the tools."""
    missing = [name for name in names if find_spec(name) is None]
    if not missing:
        return
    arguments = sys.orig_argv
    command = next((b for a, b in pairwise(arguments) if a == "-m"), "")
    ours = command.partition(".")[0] == "sglang_diffkv"
    if find_spec("sglang") is None:
        install = f"{install} {SGLANG}"
    text = f"{command if ours else 'sglang_diffkv'}: {', '.join(missing)} not installed: {install}"
    raise SystemExit(text) if ours else ModuleNotFoundError(text)
