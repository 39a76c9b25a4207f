"""Reading task files."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_OPENERS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}


class TaskFileError(ValueError):
    """A task file cannot be used; the message names the file and what it lacks."""


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """A UTF-8 file, which ``.xz`` or ``.gz`` at the end of its name says is compressed. Raises TaskFileError where it
    cannot be read."""
    try:
        with _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            yield file
    except UnicodeDecodeError as error:
        raise TaskFileError(f"{path.name} is no text in UTF-8: {error}") from None
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise TaskFileError(f"{path.name} is damaged, or not compressed as its name says: {error}") from None
    except OSError as error:
        raise TaskFileError(f"{path} cannot be read: {error.strerror or error}") from None


def stem(path: Path) -> str:
    """A file's name up to its first dot."""
    return path.name.partition(".")[0]


def sha256(path: Path) -> str:
    """Hash of a file's bytes, or of all JSON, JSON Lines and CSV files of a folder with their names."""
    digest = hashlib.sha256()
    kinds = ("*.json", "*.jsonl", "*.jsonl.*", "*.csv")
    for file in sorted(x for kind in kinds for x in path.rglob(kind)) if path.is_dir() else [path]:
        if path.is_dir():
            digest.update(str(file.relative_to(path)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def json_files(folder: Path) -> list[Path]:
    """All ``.json`` files below a folder, in a fixed order."""
    return sorted(folder.rglob("*.json"))


def line_files(path: Path) -> list[Path]:
    """All JSON Lines files below a folder, compressed ones too, in a fixed order; a file itself.

    Raises TaskFileError for a folder without any.
    """
    if not path.is_dir():
        return [path]
    found = sorted([*path.rglob("*.jsonl"), *path.rglob("*.jsonl.*")])
    if not found:
        raise TaskFileError(f"{path.name}: no JSON Lines file")
    return found


def read_lines(
    path: Path, required: tuple[str, ...], texts: tuple[str, ...] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number, from 1, and object of each line of a JSON Lines file.

    Raises TaskFileError for a line that is no JSON object, lacks one of the ``required`` fields, or has something else
    in one of the ``texts``.
    """
    with open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise TaskFileError(f"{path.name}, line {number}: not valid JSON: {error}") from None
            check_fields(record, required, f"{path.name}, line {number}", texts)
            yield number, record


def read_records(path: Path, required: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each object of a file is, in words, and the object: of a JSON list, or of JSON Lines as ``read_lines``.
    Raises TaskFileError."""
    with open_text(path) as file:
        is_list = file.read(1) == "["
    if not is_list:
        yield from ((f"line {number}", record) for number, record in read_lines(path, required))
        return
    with open_text(path) as file:
        try:
            records = json.load(file)
        except ValueError as error:
            raise TaskFileError(f"{path.name}: not valid JSON: {error}") from None
    for number, record in enumerate(records, 1):
        check_fields(record, required, f"{path.name}, entry {number}")
        yield f"entry {number}", record


def check_fields(record: Any, required: tuple[str, ...], where: str, texts: tuple[str, ...] = ()) -> None:
    """Raise TaskFileError unless ``record`` is an object with all ``required`` fields, and text in ``texts``."""
    if not isinstance(record, dict):
        raise TaskFileError(f"{where}: expected an object, got {type(record).__name__}")
    missing = [name for name in required if name not in record]
    if missing:
        raise TaskFileError(f"{where}: no field {', '.join(map(repr, missing))}; there are {sorted(record)}")
    for name in texts:
        if not isinstance(record[name], str):
            raise TaskFileError(f"{where}: the field {name!r} is not text, but {json.dumps(record[name])[:40]}")
