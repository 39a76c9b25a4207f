"""Types of command line options: numbers in a range, and files that can be written."""

from __future__ import annotations

import argparse
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_diffkv.files import named, quoted
from sglang_diffkv.refusals import Kind


def number(kind: Any) -> Callable[[str], Any]:
    """Of a type of ``bounds``."""
    known = Kind.of(kind)
    of = known.choices[0]

    def read(text: str) -> Any:
        try:
            value = of(text)
        except ValueError:
            value = math.nan
        low, above, high = (known.limits.get(x, None) for x in ("ge", "gt", "le"))
        if not ((low is None or value >= low) and (above is None or value > above) and value <= high):
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not {known.describe()}")
        return value

    return read


def output_file(text: str) -> Path:
    """A file to write, whose folder is there: that is asked before hours of work, not behind them."""
    path = Path(text)
    if problem := _unwritable(path):
        raise argparse.ArgumentTypeError(problem)
    return path


def input_file(text: str) -> Path:
    """A file to read, or a pipe. Nothing of it is read here."""
    path, why = Path(text), ""
    try:
        why = "is a folder, not a file" if stat.S_ISDIR(path.stat().st_mode) else ""
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except ValueError:  # a NUL, or half of a surrogate pair
        why = "is no possible path"
    if not why and not os.access(path, os.R_OK):
        why = "cannot be read: Permission denied"
    if why:
        raise argparse.ArgumentTypeError(f"{named(path)} {why}")
    return path


def check_output(parser: argparse.ArgumentParser, path: Path, work: Path) -> None:
    """The same of a file that may lie where the folder ``work`` will be made."""
    if (path.is_dir() or path.parent not in (work, *work.parents)) and (problem := _unwritable(path)):
        parser.error(f"argument --output: {problem}")


def _unwritable(path: Path) -> str:
    if path.is_dir():
        return f"{named(path)} is a folder: name a file in it"
    if not path.parent.is_dir():
        return f"{named(path)}: there is no folder {named(path.parent)}: make it first"
    return ""
