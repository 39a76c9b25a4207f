"""Files and JSON that somebody else wrote: regular files of a bounded size, text in UTF-8, JSON of a bounded depth.

Raised is ``ConfigError``, whose text goes on a sentence: the caller puts the name of the file before it. Texts quote
nothing of what a file holds, but for keys that a caller says may be named.
"""

from __future__ import annotations

import json
import math
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_diffkv.errors import ConfigError

MOST_BYTES = 1 << 20
"""Of a configuration, a calibration and a pattern of heads."""
MOST_DEPTH = 32
MOST_DIGITS = 40
MOST_FIELDS = 256
MOST_SHOWN, MOST_SHOWN_PATH = 60, 240
"""Characters of a text and of a path that a message repeats."""


def quoted(text: str, most: int = MOST_SHOWN) -> str:
    """A text as JSON has it, on one line, at most so many characters of it."""
    cut = text if len(text) <= most else text[: most // 2] + "..." + text[-(most // 2) :]
    return json.dumps(cut, ensure_ascii=not cut.isprintable())


def named(path: Any) -> str:
    """A path."""
    return quoted(str(path), MOST_SHOWN_PATH)


def shown(value: Any) -> str:
    """What was given, as JSON has it, on one line and not long."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value):,}" if value else "an empty list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
        return f"a whole number of more than {MOST_DIGITS} digits"
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    return f"a {type(value).__name__}"


def check_file(path: str | Path, most: int) -> None:
    """Raise ConfigError unless ``path`` is a regular file of at most so many bytes."""
    try:
        found = os.stat(path)
    except ValueError:  # a NUL, or half of a surrogate pair
        raise ConfigError("is no possible path") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    _check(found, most)


def _check(found: os.stat_result, most: int) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise ConfigError("is a folder, not a file")
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError("is not a regular file")
    if found.st_size > most:
        raise ConfigError(f"has {found.st_size:,} bytes; at most {most:,} are read")


def missing_model(model: str) -> str:
    """What is said of a model that is meant as a path and is not there; empty for a path that is, an id of Hugging Face
    and an address."""
    if "://" in model or not (model.startswith(("/", "./", "../")) or model.count("/") > 1):
        return ""
    try:
        there = os.path.lexists(model)
    except ValueError:  # a NUL, or half of a surrogate pair
        there = False
    return "" if there else f"{named(model)}: no config.json there. Name a folder that has one"


def private_folder(path: Path) -> Path:
    """A folder that its user alone may write to, made if it is not there. Raises ConfigError for any other: who writes
    to it may change what a server computes."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.stat(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{named(path)}: {getattr(error, 'strerror', None) or 'no possible path'}") from None
    if found.st_uid != os.geteuid() or found.st_mode & 0o022 or not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{named(path)} belongs to another user, or others may write to it")
    return path


def write_privately(path: Path, write: Callable[[Path], Any]) -> str:
    """Have ``write`` make a file that its user alone may read, whole or not at all; why that is not possible, empty if
    it is."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".partly")
        os.close(handle)
        try:
            write(Path(name))
            os.chmod(name, 0o600)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        return f"the file cannot be written: {error.strerror}"
    return ""


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """A regular file of at most so many bytes, in UTF-8. Nothing is waited for. Raises ConfigError."""
    check_file(path, most)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _check(os.fstat(file.fileno()), most)
            content = file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise ConfigError(f"has more than {most:,} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not text in UTF-8 (byte {error.start:,})") from None


def read_json(path: str | Path, most: int = MOST_BYTES, *, name_keys: bool = False) -> Any:
    """What a file of JSON holds. Raises ConfigError."""
    return parse_json(read_text(path, most), name_keys=name_keys)


def parse_json(text: str, *, name_keys: bool = True) -> Any:
    """What a text in JSON says: finite numbers, each key once. Raises ConfigError. ``name_keys``: whether it may name a
    key."""

    def fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) > MOST_FIELDS:
            raise ConfigError(f"has an object of {len(pairs):,} fields; at most {MOST_FIELDS} are read")
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ConfigError(f"has {shown(twice)} twice" if name_keys else "has a field twice")
        return found

    try:
        found = json.loads(
            text, object_pairs_hook=fields, parse_int=_whole, parse_float=_fraction, parse_constant=_constant
        )
    except json.JSONDecodeError as error:
        raise ConfigError(f"is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise ConfigError(f"is nested more than {MOST_DEPTH} deep") from None
    _check_depth(found)
    return found


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ConfigError(f"has a whole number of {len(text):,} digits; at most {MOST_DIGITS} are read")
    return int(text)


def _fraction(text: str) -> float:
    if len(text) > 10 * MOST_DIGITS or not math.isfinite(found := float(text)):
        raise ConfigError("has a number that is too large or too long")
    return found


def _constant(text: str) -> float:
    raise ConfigError(f"has {text}, which is no number of JSON")


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise ConfigError(f"is nested more than {MOST_DEPTH} deep")
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]


def inside(folder: Path, name: str) -> Path:
    """The file that a file in ``folder`` names. Raises ConfigError if it lies outside, links resolved."""
    try:
        if Path(name).is_absolute():
            raise ConfigError(
                "has an absolute path, but must lie in the folder of the file that names it: put a copy there"
            )
        path = folder / name
        check_inside(folder, path)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("is no possible path") from None
    return path


def check_inside(folder: Path, path: Path) -> None:
    """Raise ConfigError unless ``path`` lies in ``folder``, links resolved. A snapshot in the Hugging Face cache has
    links to the blobs of its repository, which count as in it."""
    try:
        found, root = path.resolve(), folder.resolve()
    except (OSError, RuntimeError):  # links in a circle
        raise ConfigError("cannot be read: too many links") from None
    roots = [root]
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        roots.append(root.parent.parent / "blobs")
    if not any(found.is_relative_to(x) for x in roots):
        raise ConfigError("lies outside of the folder that it must be in, links resolved: put a copy there")
