"""Spoils a server's store while it is in use, as disks, crashes and other programs do."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from sglang_diffkv.mem_pool.object_folder import FOLDER, SUFFIX

SECONDS = 1.0
"""Between two damages."""

SHARE_OF_ALL = 0.01
"""Of the damages, those that remove all that the store has."""


class Spoiler:
    """Damages files of a folder at random, from a thread, while it is entered.

    Args:
        root: the folder that a server's store has.

    Attributes:
        done: damages so far, by their kind.
    """

    def __init__(self, root: Path, seed: int):
        self.path, self.source = root / FOLDER, random.Random(seed)
        self.done: Counter[str] = Counter()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spoiler", daemon=True)

    def __enter__(self) -> Spoiler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(SECONDS):
            self.spoil()

    def spoil(self) -> None:
        """Damage one file, or remove all; nothing if there is none."""
        ways: list[Callable[[Path], None]] = [
            self.removed, self.emptied, self.cut, self.flipped, self.longer, self.misplaced, self.directory, self.link
        ]  # fmt: skip
        found = self._objects()
        if not found:
            return
        if self.source.random() < SHARE_OF_ALL:
            shutil.rmtree(self.path, ignore_errors=True)
            self.done["all removed"] += 1
            return
        way = self.source.choice(ways)
        try:
            way(self.source.choice(found))
        except OSError:
            return  # the server has removed it meanwhile
        self.done[way.__name__] += 1

    def _objects(self) -> list[Path]:
        """Files that are still some."""
        return sorted(x for x in self.path.rglob("*" + SUFFIX) if x.is_file() and not x.is_symlink())

    def removed(self, path: Path) -> None:
        path.unlink()

    def emptied(self, path: Path) -> None:
        os.truncate(path, 0)

    def cut(self, path: Path) -> None:
        os.truncate(path, self.source.randrange(path.stat().st_size + 1))

    def flipped(self, path: Path) -> None:
        with open(path, "r+b") as file:
            at = self.source.randrange(os.fstat(file.fileno()).st_size + 1)
            file.seek(at)
            byte = file.read(1) or b"\0"
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << self.source.randrange(8)]))

    def longer(self, path: Path) -> None:
        with open(path, "ab") as file:
            file.write(self.source.randbytes(100))

    def misplaced(self, path: Path) -> None:
        """Another object has its name."""
        path.write_bytes(self.source.choice(self._objects()).read_bytes())

    def directory(self, path: Path) -> None:
        path.unlink()
        path.mkdir()

    def link(self, path: Path) -> None:
        path.unlink()
        path.symlink_to("/dev/zero")
