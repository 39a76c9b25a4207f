"""A folder of objects that fails at random, as disks and those who share them do."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from sglang_diffkv.mem_pool.object_folder import ObjectFolder

SHARE = 0.1
"""Of all calls, those that fail."""


class FaultyFolder(ObjectFolder):
    """Raises, forgets, cuts, flips bits, gives other objects' bytes, and answers nobody while ``answers`` is not set.

    Attributes:
        failed: calls, by how they failed.
    """

    def __init__(self, root: str | Path, seed: int):
        self.source, self.answers, self.failed = random.Random(seed), threading.Event(), Counter[str]()
        self.answers.set()
        super().__init__(root)
        self._damaged = Path(root) / "damaged"

    def _fails(self, *ways: str) -> str:
        """One of the ways, or none."""
        self.answers.wait(60)
        if self.source.random() >= SHARE:
            return ""
        way = self.source.choice(ways)
        self.failed[way] += 1
        return way

    def names(self, key: str) -> list[str]:
        way = self._fails("cannot list", "lists nothing", "lists what is not there")
        if way == "cannot list":
            raise OSError(5, "Input/output error")
        if way == "lists nothing":
            return []
        return super().names(key) + (["0" * 32] if way else [])

    def open(self, key: str, name: str) -> tuple[BinaryIO, int]:
        way = self._fails("cannot open", "gone", "cut", "flipped", "another's", "empty")
        if way == "cannot open":
            raise OSError(13, "Permission denied")
        if way == "gone":
            self.remove(key, name)
        file, size = super().open(key, name)
        if way not in ("cut", "flipped", "another's", "empty"):
            return file, size
        with file:
            data = bytearray(file.read())
        if way == "cut":
            del data[self.source.randrange(len(data)) :]
        elif way == "flipped":
            data[self.source.randrange(len(data))] ^= 1 << self.source.randrange(8)
        elif way == "another's":
            data = bytearray(self.source.choice(self._others() or [data]))
        else:
            data.clear()
        self._damaged.write_bytes(data)
        return open(self._damaged, "rb", buffering=0), len(data)

    def has(self, key: str, name: str) -> bool:
        way = self._fails("cannot look", "denies")
        if way == "cannot look":
            raise OSError(116, "Stale file handle")
        return not way and super().has(key, name)

    def write(self, key: str, name: str, pieces: Iterable[bytes | memoryview], size: int) -> bool:
        way = self._fails("full", "lost", "half written", "misplaced")
        if way == "full":
            raise OSError(28, "No space left on device")
        if way == "lost":
            return sum(len(piece) for piece in pieces) == size
        done = super().write(key, name, pieces, size)
        if way and done:
            path = Path(self._file(key, name))
            others = self._others() if way == "misplaced" else []
            path.write_bytes(self.source.choice(others) if others else path.read_bytes()[: size // 2])
        return done

    def _others(self) -> list[bytes]:
        """All objects."""
        return [path.read_bytes() for path in sorted(self.path.rglob("*.segment"))]
