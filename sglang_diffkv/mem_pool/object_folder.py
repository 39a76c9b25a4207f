"""A folder of objects, bounded in bytes, which several servers of one user may share.

SGLang's own file store (``HiCacheFile``) is not used, only its options. It never overwrites a file, so one that was
half written is a miss for ever. Two servers with a bound each fill a folder to the sum of both. And its names say
neither what wrote a file nor that it is whole. Here:

- a file has its name only once it is whole, by renaming; another server sees all of it or nothing;
- the bound holds for all that the folder has, whoever wrote it. Files that were not used for longest go first;
- what is found damaged is removed, so that it can be written again;
- files and folders are for their owner alone. Names are digests, and no other file is touched.

An object lies at ``sglang_diffkv/<first two digits of its key>/<key>/<name>.segment``: those under one key are found by
listing it. Nothing is flushed to the disk. What a crash of the machine loses is damaged, and so a miss.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import named

FOLDER, PARTLY, SUFFIX = "sglang_diffkv", "partly", ".segment"
DIGEST, OBJECT = re.compile("[0-9a-f]{32}"), re.compile(r"[0-9a-f]{32}\.segment")
UNFINISHED = re.compile("[0-9]+-[0-9]+-[0-9a-f]+")
BLOCK = 4096
"""Bytes of which a file takes a whole number, as it is counted."""

KEPT_SHARE = 0.9
"""Of the bound, what is left once it has been reached."""

LOOK_SHARE, LEAST_SECONDS = 20, 1.0
"""What others wrote is looked for at most so often: each look may take a 20th of the time, and not within a second."""

STALE_SECONDS = 3600
"""After which a file that was never finished is removed."""

MOST_TRIES = 100
"""To put an object under a key whose folder others remove each time, since it is empty. Then it is not written."""

MOST_LISTED = 32
"""Objects of one key that are looked at; the newest of more."""


def prepare(root: str | Path) -> None:
    """Make the user's folder ready for objects. Raises ConfigError if it cannot be used."""
    path = Path(root) / FOLDER
    try:
        if not Path(root).is_dir():
            os.makedirs(root, mode=0o700, exist_ok=True)
        for part in (path, path / PARTLY):
            _make(part)
        found = os.lstat(path)
        writable = os.access(path / PARTLY, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the folder {named(root)} cannot be used: {error}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022 or not writable:
        raise ConfigError(
            f"the folder {named(path)} belongs to another user, or others may write to it, and who writes to it may "
            "change replies: name another folder"
        )


class ObjectFolder:
    """Writes, finds and removes objects under keys. Any thread may read; one writes.

    Args:
        root: the user's folder, made if it is not there. most: bytes; None: half of what the file system has free at
            the start, with what is here already.

    Raises ConfigError if the folder cannot be used.
    """

    def __init__(self, root: str | Path, most: int | None = None):
        self.path = Path(root) / FOLDER
        self._partly, self._numbers = self.path / PARTLY, itertools.count()
        prepare(root)
        self._held, self._looked, self._took = 0, float("-inf"), 0.0
        self.evicted = 0
        """Objects that were removed to keep to the bound."""
        self._look()
        self.most = most if most is not None else self._held + shutil.disk_usage(self.path).free // 2

    hangs = False
    """Whether it answers nobody: a file system is waited for."""

    @property
    def held(self) -> int:
        """Bytes that the folder has, as far as was seen."""
        return self._held

    # Reading

    def names(self, key: str) -> list[str]:
        """Of the objects under a key."""
        try:
            with os.scandir(self._folder(key)) as entries:
                found = [(x, x.name[: -len(SUFFIX)]) for x in entries if x.name.endswith(SUFFIX)]
                found = [(x, name) for x, name in found if DIGEST.fullmatch(name)]
                if len(found) > MOST_LISTED:
                    found.sort(key=lambda x: -x[0].stat(follow_symlinks=False).st_mtime_ns)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [name for _, name in found[:MOST_LISTED]]

    def open(self, key: str, name: str) -> tuple[BinaryIO, int]:
        """An object's file, and its bytes. It counts as used now. Raises OSError."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        number = os.open(self._file(key, name), flags)
        try:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(f"{name} is no file")
        except OSError:
            os.close(number)
            raise
        return open(number, "rb", buffering=0), found.st_size

    def used(self, key: str, name: str) -> None:
        """An object was of use just now."""
        try:
            os.utime(self._file(key, name))
        except OSError:
            return  # it was removed meanwhile, or the file system is read-only

    def remove(self, key: str, name: str) -> None:
        """It is damaged."""
        self._unlink(self._file(key, name))

    # Writing

    def has(self, key: str, name: str) -> bool:
        """Whether an object is there. A link is none, and is replaced when the object is written."""
        try:
            return stat.S_ISREG(os.lstat(self._file(key, name)).st_mode)
        except FileNotFoundError:
            return False

    def write(self, key: str, name: str, pieces: Iterable[bytes | memoryview], size: int) -> bool:
        """Write an object of ``size`` bytes. False if it is larger than the folder may be. Raises OSError, and whatever
        ``pieces`` raises, leaving nothing."""
        if not self._make_room(_blocks(size)):
            return False
        for path in (self.path, self._partly):
            _make(path)  # somebody may have emptied the folder
        partly = self._partly / f"{os.getpid()}-{next(self._numbers)}-{secrets.token_hex(8)}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(partly, flags, 0o600), "wb", buffering=0) as file:
                for piece in pieces:
                    _write_all(file, piece)
            self._place(partly, key, name)
        finally:
            partly.unlink(missing_ok=True)
        self._held += _blocks(size)
        return True

    def _place(self, partly: Path, key: str, name: str) -> None:
        for left in reversed(range(MOST_TRIES)):
            try:
                for path in (os.path.dirname(self._folder(key)), self._folder(key)):
                    _make(path)
                os.replace(partly, self._file(key, name))
                return
            except FileNotFoundError:  # another server has just removed the empty folder
                if not left or not partly.exists():
                    raise

    def _make_room(self, size: int) -> bool:
        if size > self.most:
            return False
        if self._held + size > self.most or time.monotonic() - self._looked > max(
            LEAST_SECONDS, LOOK_SHARE * self._took
        ):
            self._trim(self._look(), size)
        return True

    def _trim(self, files: list[tuple[int, int, str]], size: int) -> None:
        """Remove the files that were not used for longest until one of ``size`` bytes fits."""
        if self._held + size <= self.most:
            return
        for _, held, path in sorted(files):
            if self._held + size <= self.most * KEPT_SHARE:
                return
            if self._unlink(path):
                self.evicted += 1
            self._held -= held

    def _look(self) -> list[tuple[int, int, str]]:
        """What is there: when each file was last used, its bytes, its path. Unfinished files of long ago go."""
        began = time.monotonic()
        files = [x for key in self._keys() for x in _files(key, OBJECT)]
        unfinished = list(_files(str(self._partly), UNFINISHED))
        for at, _, path in unfinished:
            if abs(time.time() - at / 1e9) > STALE_SECONDS:
                Path(path).unlink(missing_ok=True)
        self._held = sum(held for _, held, _ in (*files, *unfinished))
        self._looked = time.monotonic()
        self._took = self._looked - began
        return files

    def _keys(self) -> Iterator[str]:
        for first in _folders(str(self.path), re.compile("[0-9a-f]{2}")):
            yield from _folders(first, DIGEST)

    def _unlink(self, path: str | Path) -> bool:
        """Whether it was there; the folder of a key goes with its last object."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        try:
            os.rmdir(os.path.dirname(path))
        except OSError:
            return True  # others lie there
        return True

    def _folder(self, key: str) -> str:
        assert DIGEST.fullmatch(key), "a key is a digest"
        return os.path.join(self.path, key[:2], key)

    def _file(self, key: str, name: str) -> str:
        assert DIGEST.fullmatch(name), "a name is a digest"
        return os.path.join(self._folder(key), name + SUFFIX)


def _write_all(file: BinaryIO, piece: bytes | memoryview) -> None:
    left = memoryview(piece)
    while left:
        left = left[file.write(left) :]


def _make(path: str | Path) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return


def _blocks(size: int) -> int:
    """Bytes that a file of ``size`` takes, as they are counted."""
    return -(-size // BLOCK) * BLOCK


def _folders(path: str, pattern: re.Pattern[str]) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [x.path for x in entries if pattern.fullmatch(x.name) and x.is_dir(follow_symlinks=False)]
    except OSError:  # it has gone, or is not ours
        return []


def _files(path: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, int, str]]:
    try:
        with os.scandir(path) as entries:
            for x in entries:
                if pattern.fullmatch(x.name) and x.is_file(follow_symlinks=False):
                    found = x.stat(follow_symlinks=False)
                    yield found.st_mtime_ns, _blocks(found.st_size), x.path
    except OSError:
        return
