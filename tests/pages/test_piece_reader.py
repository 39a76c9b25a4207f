"""Files that several threads read: every byte in its place, and nobody writes once the reading has ended."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from sglang_diffkv.mem_pool import piece_reader
from sglang_diffkv.mem_pool.piece_reader import EndsEarly, PieceReader, fill, pieces_of

PIECE = 4096


def file_of(tmp_path: Path, data: bytes) -> int:
    (tmp_path / "file").write_bytes(data)
    return os.open(tmp_path / "file", os.O_RDONLY)


def views_of(memory: bytearray, sizes: list[int]) -> list[memoryview]:
    assert sum(sizes) == len(memory)
    at, found = 0, []
    for size in sizes:
        found.append(memoryview(memory)[at : at + size])
        at += size
    return found


@pytest.mark.parametrize(
    "sizes",
    [[1], [PIECE], [PIECE + 1], [3 * PIECE - 1, 5, PIECE], [7] * 3001, [2 * PIECE] * 30, [1, PIECE, 1, PIECE - 1, 2]],
)
def test_bytes_are_in_their_places(tmp_path: Path, sizes: list[int]) -> None:
    data, memory = random.Random(3).randbytes(sum(sizes) + 40), bytearray(sum(sizes))
    number = file_of(tmp_path, data)
    seen = b""
    for found in PieceReader().read(number, 13, views_of(memory, sizes), PIECE, b"".join):
        seen += found  # what is made of a piece is made once it is full, and comes in order
    assert bytes(memory) == data[13 : 13 + len(memory)] == seen
    os.close(number)


def test_nothing_is_read_of_nothing(tmp_path: Path) -> None:
    assert list(PieceReader().read(file_of(tmp_path, b"abc"), 0, [], PIECE, len)) == []


@pytest.mark.parametrize("sizes", [[1], [10], [3] * 25, [25, 0, 7, 10, 1], [9, 1, 10, 100]])
def test_pieces_are_of_equal_size(sizes: list[int]) -> None:
    """Whatever the places are: each has a checksum of its own."""
    pieces = [sum(map(len, piece)) for piece in pieces_of([memoryview(bytes(size)) for size in sizes], 10)]
    assert sum(pieces) == sum(sizes) and all(size == 10 for size in pieces[:-1]) and 0 < pieces[-1] <= 10


@pytest.mark.parametrize("lacking", [1, PIECE, 3 * PIECE, 5 * PIECE])
def test_a_file_that_ends_early_says_so(tmp_path: Path, lacking: int) -> None:
    memory = bytearray(5 * PIECE)
    number = file_of(tmp_path, bytes(len(memory) - lacking))
    with pytest.raises(EndsEarly):
        list(PieceReader().read(number, 0, views_of(memory, [PIECE] * 5), PIECE, len))
    os.close(number)


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    number = os.open(tmp_path / "written", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="Bad file descriptor"):
        list(PieceReader().read(number, 0, [memoryview(bytearray(10))], PIECE, len))
    os.close(number)


@pytest.mark.parametrize("fails", [False, True])
def test_nobody_writes_once_a_reading_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Its places are somebody else's then. What nobody has begun to read is not read."""
    count, writing, began = 40, threading.Semaphore(0), []

    def slow(number: int, piece: list[memoryview], at: int) -> None:
        began.append(at)
        if at:
            writing.acquire(timeout=10)
        elif fails:
            raise OSError(5, "Input/output error")
        fill(number, piece, at)

    monkeypatch.setattr(piece_reader, "fill", slow)
    memory = bytearray(count * PIECE)
    number = file_of(tmp_path, b"x" * len(memory))
    reading = PieceReader().read(number, 0, views_of(memory, [PIECE] * count), PIECE, len)
    waits, release = piece_reader.wait, threading.Timer(0.2, lambda: writing.release(count))
    monkeypatch.setattr(piece_reader, "wait", lambda begun: release.start() or waits(begun))
    if fails:
        with pytest.raises(OSError, match="Input/output"):
            next(reading)
    else:
        assert next(reading)
        reading.close()
    memory[:] = bytes(len(memory))
    threading.Event().wait(0.3)
    assert not any(memory) and len(began) < count
    os.close(number)


def test_several_readings_at_once(tmp_path: Path) -> None:
    reader, data = PieceReader(), random.Random(5).randbytes(60 * PIECE + 11)
    number, memories = file_of(tmp_path, data), [bytearray(50 * PIECE) for _ in range(5)]

    def read(index: int) -> None:
        for _ in reader.read(number, index, [memoryview(memories[index])], PIECE, len):
            pass

    threads = [threading.Thread(target=read, args=(index,)) for index in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(bytes(memory) == data[index : index + 50 * PIECE] for index, memory in enumerate(memories))
    os.close(number)
