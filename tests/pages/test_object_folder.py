"""The folder of a store: whole objects or nothing, a bound that several servers keep, and nobody else's files."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_diffkv.errors import ConfigError
from sglang_diffkv.mem_pool import object_folder
from sglang_diffkv.mem_pool.object_folder import BLOCK, FOLDER, PARTLY, ObjectFolder


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


KEY = digest("key")


def put(folder: ObjectFolder, name: str, size: int = 100, key: str = KEY) -> bool:
    return folder.write(key, digest(name), [name.encode().ljust(size, b".")], size)


def content(folder: ObjectFolder, name: str, key: str = KEY) -> bytes:
    file, size = folder.open(key, digest(name))
    with file:
        found = file.read()
    assert len(found) == size
    return found


def files(root: Path) -> list[Path]:
    return sorted(x for x in root.rglob("*") if x.is_file())


def used_at(root: Path, name: str, at: int) -> None:
    (path,) = root.rglob(f"{digest(name)}.segment")
    os.utime(path, (at, at))


def test_an_object_is_found_by_who_knows_its_key(tmp_path: Path) -> None:
    folder, other = ObjectFolder(tmp_path / "new" / "folder"), ObjectFolder(tmp_path / "new" / "folder")
    assert folder.names(KEY) == [] and put(folder, "a") and put(folder, "b") and put(folder, "c", key=digest("other"))
    assert sorted(other.names(KEY)) == sorted([digest("a"), digest("b")]) and other.has(KEY, digest("a"))
    assert content(other, "b") == b"b".ljust(100, b".")
    assert not other.has(KEY, digest("c"))
    for path in files(tmp_path):
        assert path.stat().st_mode & 0o777 == 0o600
    for path in (tmp_path / "new" / "folder", *(x for x in (tmp_path / "new" / "folder").rglob("*") if x.is_dir())):
        assert path.stat().st_mode & 0o777 == 0o700
    other.remove(KEY, digest("a"))
    other.remove(KEY, digest("a"))
    assert folder.names(KEY) == [digest("b")]
    with pytest.raises(FileNotFoundError):
        folder.open(KEY, digest("a"))


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path)

    def pieces() -> Iterator[bytes]:
        yield b"begin"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        folder.write(KEY, digest("a"), pieces(), 100)
    assert files(tmp_path) == [] and not folder.names(KEY)
    assert put(folder, "a")


def test_what_was_used_last_stays_within_the_bound(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path, 10 * BLOCK)
    for index in range(10):
        assert put(folder, str(index))
        used_at(tmp_path, str(index), 1000 + index)
    content(folder, "0")
    folder.used(KEY, digest("0"))
    assert put(folder, "10") and folder.evicted == 2
    assert not {digest("1"), digest("2")} & set(folder.names(KEY)) and folder.has(KEY, digest("0"))
    assert len(files(tmp_path)) == 9 and folder.held <= folder.most
    assert not put(folder, "large", 11 * BLOCK) and len(files(tmp_path)) == 9, "evicted in vain"
    again = ObjectFolder(tmp_path, 5 * BLOCK)
    assert again.held == 9 * BLOCK and put(again, "11") and len(files(tmp_path)) <= 5


def test_two_servers_keep_one_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_folder, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(object_folder, "LOOK_SHARE", 0)
    one, two = ObjectFolder(tmp_path, 10 * BLOCK), ObjectFolder(tmp_path, 10 * BLOCK)
    for index in range(40):
        assert put((one, two)[index % 2], str(index), key=digest(f"key {index % 7}"))
        assert len(files(tmp_path)) <= 10
    assert one.evicted + two.evicted >= 30


def test_writers_and_readers_at_once_see_whole_objects(tmp_path: Path) -> None:
    """And one removes the folders that are empty while another puts an object there."""
    errors: list[BaseException] = []
    until = time.monotonic() + 1.0

    def write(seed: int) -> None:
        folder = ObjectFolder(tmp_path, 6 * BLOCK)
        try:
            index = 0
            while time.monotonic() < until:
                index += 1
                put(folder, f"{index % 5}", 3000, digest(f"{index % 3}"))
                for key in map(digest, "012"):
                    for name in folder.names(key):
                        try:
                            file, size = folder.open(key, name)
                        except FileNotFoundError:
                            continue
                        with file:
                            assert size == len(file.read()) == 3000
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and list((tmp_path / FOLDER / PARTLY).iterdir()) == []


@pytest.mark.parametrize("times", [5, object_folder.MOST_TRIES])
def test_a_folder_that_goes_before_its_object_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Others remove an empty folder each time that it has just been made."""
    folder, replace, left = ObjectFolder(tmp_path), os.replace, times

    def late(source: Path, target: str) -> None:
        nonlocal left
        if left:
            left -= 1
            os.rmdir(os.path.dirname(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", late)
    if times < object_folder.MOST_TRIES:
        assert put(folder, "a") and content(folder, "a").startswith(b"a")
    else:
        with pytest.raises(FileNotFoundError):
            put(folder, "a")
        assert put(folder, "a")
    assert list((tmp_path / FOLDER / PARTLY).iterdir()) == []


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path, 3 * BLOCK)
    assert put(folder, "a")
    (key,) = (tmp_path / FOLDER).glob(f"*/{KEY}")
    others = [tmp_path / "model_0_1.bin", tmp_path / FOLDER / "notes", key / "a.txt", key / "b.segment"]
    for path in others:
        path.write_bytes(bytes(9000))
    (key / f"{digest('folder')}.segment").mkdir()
    (key / f"{digest('link')}.segment").symlink_to(others[0])
    for name in "bcdef":
        assert put(folder, name)
    assert all(path.exists() for path in others) and digest("b") in {*map(digest, "bcdef")}
    for name in ("folder", "link"):
        with pytest.raises(OSError):
            content(folder, name)


def test_what_is_no_file_is_no_object_and_costs_no_descriptor(tmp_path: Path) -> None:
    """A link to an endless file in an object's place, or a directory."""
    folder = ObjectFolder(tmp_path, 50 * BLOCK)
    for name in ("link", "directory"):
        put(folder, name)
    link, directory = (Path(folder._file(KEY, digest(name))) for name in ("link", "directory"))
    link.unlink()
    link.symlink_to("/dev/zero")
    directory.unlink()
    directory.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for name in ("link", "directory"):
        assert not folder.has(KEY, digest(name))
        with pytest.raises(OSError, match=r"no file|symbolic links"):
            folder.open(KEY, digest(name))
    assert len(os.listdir("/proc/self/fd")) == before
    assert put(folder, "link") and content(folder, "link").startswith(b"link")
    with pytest.raises(OSError, match="directory"):
        put(folder, "directory")


def test_what_was_never_finished_goes_in_time(tmp_path: Path) -> None:
    ObjectFolder(tmp_path)
    old, new = (tmp_path / FOLDER / PARTLY / name for name in ("1-1-aa", "1-2-bb"))
    for path in (old, new):
        path.write_bytes(b"part")
    os.utime(old, (1000, 1000))
    ObjectFolder(tmp_path)
    assert not old.exists() and new.exists()


def test_a_folder_that_others_may_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for root in (tmp_path / "file", "/proc/none", "a\0b"):
        with pytest.raises(ConfigError, match="cannot be used"):
            ObjectFolder(root)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER).chmod(0o777)
    with pytest.raises(ConfigError, match="others may write to it"):
        ObjectFolder(tmp_path)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / FOLDER).symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="belongs to another user"):
        ObjectFolder(tmp_path / "link")
