"""Objects in a key-value store that bounds and repairs nothing: what it does wrong costs hits alone."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from sglang_diffkv.errors import ConfigError
from sglang_diffkv.mem_pool import object_values
from sglang_diffkv.mem_pool.object_values import ENTRY_BYTES, SLOTS, Entry, ObjectValues
from sglang_diffkv.mem_pool.segment_object import ObjectRefused
from sglang_diffkv.srt.startup import storage_backend
from sglang_diffkv.srt.startup.storage_backend import connect
from sglang_diffkv.srt.tree.disk_tier import TIMEOUT, WAIT_COMPLETE, DiskTier, Prefetch
from tests.helpers import until
from tests.tree.test_bad_days import StoreMachine
from tests.tree.test_disk_tier import Server
from tests.tree.test_prefix_cache import machine_settings

KEY, NAME, OTHER = "1" * 32, "2" * 32, "3" * 32


class Memory:
    """A store that keeps the first value of a key, as SGLang's file store and Mooncake do, and takes so many at
    once."""

    def __init__(self, at_once: int = 1, *, forgets: bool = False) -> None:
        self.at_once, self.forgets = at_once, forgets
        self.values: dict[str, bytes] = {}
        self.calls = Counter[str]()
        self.answers = threading.Event()
        self.answers.set()

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> list[bool]:
        return [self.put_one(*pair) for pair in self._called("put", zip(keys, values, strict=True))]

    def fetch(self, keys: Sequence[str], targets: Sequence[memoryview]) -> list[bool]:
        return [self.fetch_one(*pair) for pair in self._called("fetch", zip(keys, targets, strict=True))]

    def has(self, keys: Sequence[str]) -> list[bool]:
        return [self.has_one(key) for key in self._called("has", keys)]

    def forget(self, key: str) -> None:
        if self.forgets:
            self.values.pop(key, None)

    def _called(self, name: str, given: Iterable[Any]) -> list[Any]:
        some = list(given)
        assert 0 < len(some) <= self.at_once
        self.calls[name] += 1
        return some

    def put_one(self, key: str, value: memoryview) -> bool:
        self.answers.wait(60)
        self.values.setdefault(key, bytes(value))
        return True

    def fetch_one(self, key: str, target: memoryview) -> bool:
        self.answers.wait(60)
        found = self.values.get(key)
        if found is None:
            return False
        target[: len(found)] = found[: len(target)]
        return True

    def has_one(self, key: str) -> bool:
        self.answers.wait(60)
        return key in self.values


class Faulty(Memory):
    """It fails at random, in the ways in which such stores do."""

    def __init__(self, seed: int) -> None:
        super().__init__(1 + seed % 3, forgets=bool(seed % 2))
        self.source, self.failed = random.Random(seed), Counter[str]()

    def _fails(self, *ways: str) -> str:
        if self.source.random() >= 0.05:
            return ""
        way = self.source.choice(ways)
        self.failed[way] += 1
        return way

    def put_one(self, key: str, value: memoryview) -> bool:
        way = self._fails("raises", "refuses", "loses", "half")
        if way == "raises":
            raise RuntimeError("no")
        if way in ("refuses", "loses"):
            return way == "loses"
        return super().put_one(key, value[: len(value) // 2] if way else value)

    def fetch_one(self, key: str, target: memoryview) -> bool:
        way = self._fails("raises", "evicted", "another's", "flips", "lies")
        if way == "raises":
            raise OSError(5, "no")
        if way == "evicted":
            self.values.pop(key, None)
        if way == "another's":
            key = self.source.choice([*self.values, key])
            target[:] = self.values.get(key, b"")[: len(target)].ljust(len(target), b"?")
            return True
        if way == "flips" and key in self.values:
            target[self.source.randrange(len(target))] ^= 1
            return True
        return way == "lies" or super().fetch_one(key, target)

    def has_one(self, key: str) -> bool:
        way = self._fails("raises", "denies", "claims")
        if way == "raises":
            raise ConnectionError("no")
        return way == "claims" or (not way and super().has_one(key))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_values, "BLOCK_BYTES", 1000)


def read(objects: ObjectValues, key: str) -> list[bytes]:
    found = []
    for name in objects.names(key):
        file, size = objects.open(key, name)
        with file:
            data = bytearray(size)
            view = memoryview(data)
            while view:
                view = view[file.readinto(view) :]  # type: ignore[attr-defined]
        found.append(bytes(data))
    return found


@pytest.mark.parametrize("at_once", [1, 3])
def test_what_is_written_is_found_by_others(at_once: int) -> None:
    values = Memory(at_once)
    one, two, data = ObjectValues(values), ObjectValues(values), random.Random(1).randbytes(3500)
    assert not one.has(KEY, NAME) and one.names(KEY) == []
    assert one.write(KEY, NAME, [data[:10], data[10:2500], memoryview(data)[2500:]], 3500)
    assert two.has(KEY, NAME) and not two.has(KEY, OTHER) and not two.has(OTHER, NAME)
    assert two.write(KEY, OTHER, [b"short"], 5) and read(two, KEY) == read(one, KEY) == [data, b"short"]
    assert sorted(map(len, values.values.values())) == sorted([1000, 1000, 1000, 500, 5, ENTRY_BYTES, ENTRY_BYTES])
    file, _ = one.open(KEY, one.names(KEY)[0])
    file.seek(1234)
    assert file.read(100) == data[1234:1334]
    values.calls.clear()
    assert read(one, KEY)[0] == data
    assert values.calls["fetch"] == (7 if at_once == 1 else 4), "more is fetched than what is read"


def test_what_is_gone_or_damaged_is_written_again_elsewhere() -> None:
    """A key's first value stays for ever in such a store."""
    values = Memory()
    objects, data = ObjectValues(values), random.Random(2).randbytes(2500)
    objects.write(KEY, NAME, [data], 2500)
    (name,) = objects.names(KEY)
    del values.values[f"diffkv-{name}-block-2"]
    with pytest.raises(ObjectRefused):
        read(objects, KEY)
    assert not objects.has(KEY, NAME) and objects.names(KEY) == [], "what is of no use is found again"
    assert objects.write(KEY, NAME, [data], 2500) and read(objects, KEY) == [data] and objects.has(KEY, NAME)
    for slot in range(SLOTS):
        values.values[f"diffkv-{OTHER}-{slot}"] = b"half an entry"
    assert not objects.write(OTHER, NAME, [data], 2500) and objects.names(OTHER) == []


def test_a_store_that_forgets_has_places_again() -> None:
    """One that evicts blocks and keeps entries would have none left some day."""
    values = Memory(8, forgets=True)
    objects, data = ObjectValues(values), random.Random(3).randbytes(2500)
    for _ in range(2 * SLOTS):
        assert objects.write(KEY, NAME, [data], 2500) and read(objects, KEY) == [data]
        (name,) = objects.names(KEY)
        del values.values[f"diffkv-{name}-block-1"]
        with pytest.raises(ObjectRefused):
            read(objects, KEY)
        objects.remove(KEY, name)
    assert not [key for key in values.values if key.startswith(f"diffkv-{KEY}")], "an entry is left"
    objects.write(KEY, NAME, [data], 2500)
    (name,) = objects.names(KEY)
    values.values.clear()
    other = ObjectValues(values)
    assert other.write(KEY, OTHER, [b"short"], 5)
    objects.remove(KEY, name)
    assert read(other, KEY) == [b"short"], "somebody else's entry is forgotten"


def test_who_comes_second_to_a_place_takes_the_next() -> None:
    values = Memory()
    other, objects = ObjectValues(values), ObjectValues(values)

    def pieces() -> Any:
        yield b"mine"
        other.write(KEY, OTHER, [b"theirs"], 6)

    assert objects.write(KEY, NAME, pieces(), 4) and read(objects, KEY) == [b"theirs", b"mine"]


def test_a_writer_that_stops_leaves_nothing_that_is_found() -> None:
    objects = ObjectValues(Memory())

    def pieces() -> Any:
        yield bytes(1500)
        raise RuntimeError("its memory was wanted")

    with pytest.raises(RuntimeError):
        objects.write(KEY, NAME, pieces(), 3000)
    assert objects.names(KEY) == [] and not objects.has(KEY, NAME)
    entry = Entry(7, NAME, OTHER)
    assert Entry.decode(entry.encode()) == entry and Entry.decode(bytes(ENTRY_BYTES)) is None
    assert all(Entry.decode(entry.encode()[:at] + b"!" + entry.encode()[at + 1 :]) is None for at in range(68))


# Behind host memory


PATIENT = Prefetch(WAIT_COMPLETE, 8)


def over(values: object_values.Values, folder: Path, prefetch: Prefetch = PATIENT) -> Server:
    """A server over a store."""
    server = Server(folder, prefetch=prefetch)
    server.stored.folder = ObjectValues(values)
    return server


def test_another_server_finds_what_one_wrote(tmp_path: Path) -> None:
    values, tokens = Memory(), []
    one = over(values, tmp_path)
    tokens = [one.world.tokens(60) for _ in range(3)]
    for prompt in tokens:
        one.serve(prompt)
    two = over(values, tmp_path)
    assert [two.find(prompt) for prompt in tokens] == [59, 59, 59] and two.report()["hits"] == 3
    for key in [key for key in values.values if key.endswith("block-0")][:2]:
        data = bytearray(values.values[key])
        data[-1] ^= 1
        values.values[key] = bytes(data)
    three = over(values, tmp_path)
    found = [three.find(prompt) for prompt in tokens]
    assert sum(length == 59 for length in found) < 3 and three.report()["refused_checksum"] > 0
    for prompt in tokens:
        three.serve(prompt)
    four = over(values, tmp_path)
    assert sum(four.find(prompt) == 59 for prompt in tokens) >= sum(length == 59 for length in found)


def test_a_store_that_answers_nobody_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = Memory()
    server = over(values, tmp_path)
    tokens = server.world.tokens(60)
    server.serve(tokens)
    other = over(values, tmp_path, Prefetch(TIMEOUT, 8, 0.2, 0.0))
    values.answers.clear()
    monkeypatch.setattr(object_values, "HANGING_SECONDS", 0.1)
    assert other.find(tokens) == 0 and other.report()["late"] == 1
    until(lambda: other.stored.folder.hangs)
    began, errors = time.monotonic(), other.report()["errors"]
    assert other.find([*tokens, 1]) == 0 and time.monotonic() - began < 5
    assert other.report()["late"] == 1 and other.report()["errors"] > errors, "it was waited for again"
    values.answers.set()
    until(lambda: not other.stored.folder.hangs)
    until(lambda: other.find([*tokens, 2]) == 60)  # a busy machine may take longer than that for an answer


def test_a_store_that_is_known_to_hang_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long requests would wait for it, and for a while behind its answer: Mooncake's comes after 30 s."""
    values = Memory()
    server = over(values, tmp_path)
    tokens = server.world.tokens(60)
    server.serve(tokens)
    monkeypatch.setattr(object_values, "HANGING_SECONDS", 1.0)
    other, began = over(values, tmp_path), time.monotonic()
    values.answers.clear()
    assert other.find(tokens) == 0 and other.report()["late"] == 1 and time.monotonic() - began < 10
    values.answers.set()
    until(lambda: not other.stored.folder._calls)
    assert other.stored.folder.hangs, "the next one waits for it again"
    until(lambda: not other.stored.folder.hangs)
    until(lambda: other.find([*tokens, 2]) == 60)


def test_a_store_that_takes_long_to_fail_is_not_asked_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Mooncake's whose master is gone. One that fails at once holds nobody up, and is asked again."""
    monkeypatch.setattr(object_values, "FAILING_SECONDS", 1.0)
    monkeypatch.setattr(object_values, "HANGING_SECONDS", 3.0)
    values, delays = Memory(), [0.0, 1.2]
    server = over(values, tmp_path)
    tokens = server.world.tokens(60)
    server.serve(tokens)
    other = over(values, tmp_path)

    def refused(keys: Sequence[str]) -> list[bool]:
        asked.append(keys)
        time.sleep(delays[len(asked) - 1])
        raise ConnectionError("refused")

    asked: list[Sequence[str]] = []
    with monkeypatch.context() as patch:
        patch.setattr(values, "has", refused)
        assert other.find(tokens) == 0 and not other.stored.folder.hangs, "one that fails at once is passed over"
        assert other.find([*tokens, 1]) == 0 and other.stored.folder.hangs
        assert other.find([*tokens, 2]) == 0 and len(asked) == 2, "the next one waits for it again"
    assert other.report()["errors"] == 3
    until(lambda: not other.stored.folder.hangs)
    assert other.find([*tokens, 3]) == 60


class ValuesMachine(StoreMachine):
    """The random lives of a tree over three tiers, the last of which is such a store."""

    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.disk, DiskTier)
        self.store = Faulty(StoreMachine.seeds)  # type: ignore[assignment]
        self.disk.stored.folder = ObjectValues(self.store)


ValuesMachine.TestCase.settings = machine_settings(40)
TestValues = ValuesMachine.TestCase


# SGLang's backends


def dynamic(class_name: str, module: str = __name__, **more: Any) -> dict[str, Any]:
    return {"backend_name": "mine", "module_path": module, "class_name": class_name, **more}


def test_sglang_s_file_store_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "store"))
    extra = dynamic("HiCacheFile", "sglang.srt.mem_cache.hicache_storage")
    one, two = (over(connect(extra, rank=0, ranks=1), tmp_path) for _ in range(2))
    tokens = one.world.tokens(60)
    one.serve(tokens)
    assert two.find(tokens) == 59 and two.report()["hits"] == 1 and two.report()["errors"] == 0


class Backend(HiCacheStorage):
    """A backend of the user's, in memory."""

    def __init__(self, config: Any, options: Any):
        self.values: dict[str, bytes] = {}

    def exists(self, key: str) -> bool:
        return key in self.values

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        self.values.setdefault(key, value.numpy().tobytes())
        return True

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """A tensor of its own."""
        return torch.frombuffer(bytearray(self.values[key]), dtype=torch.uint8) if key in self.values else None

    batch_get = batch_set = None  # type: ignore[assignment]


class Addresses(Backend):
    """One that takes no tensors, as Mooncake's."""

    def __init__(self, config: Any, options: Any):
        super().__init__(config, options)
        self.known: list[int] = []

    def register_buffer(self, tensor: torch.Tensor) -> None:
        if tensor.data_ptr() in self.known:
            raise RuntimeError("what was there is still pinned")
        self.known.append(tensor.data_ptr())

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        assert target_location in self.known and target_sizes
        self.values.setdefault(key, ctypes.string_at(target_location, target_sizes))
        return True

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        assert target_location in self.known and target_sizes
        found = self.values.get(key, b"")
        ctypes.memmove(target_location, found, min(len(found), target_sizes))
        return key in self.values


class Forgets(Backend):
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return target_location


class Absent(Backend):
    def __init__(self, config: Any, options: Any):
        raise ConnectionError(f"nobody at {config.extra_config['server']}")


class Hangs(Backend):
    def exists(self, key: str) -> bool:
        threading.Event().wait()
        return False


@pytest.mark.parametrize("kind", [Backend, Addresses])
def test_a_class_of_the_user_s_serves(kind: type, tmp_path: Path) -> None:
    values = connect(dynamic(kind.__name__), rank=0, ranks=1)
    assert values.by_address == (kind is Addresses)
    one, two = over(values, tmp_path), over(values, tmp_path)
    tokens = one.world.tokens(60)
    one.serve(tokens)
    assert two.find(tokens) == 59 and two.report()["errors"] == 0


def test_memory_that_a_backend_knows_outlives_its_thread() -> None:
    """Else the next thread's could come to lie there, of which the backend would read what was there before."""
    values = connect(dynamic("Addresses"), rank=0, ranks=1)
    for number in range(20):
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(values.put, [f"key{number}"], [memoryview(bytearray(b"value"))]).result()
    assert len(values.backend.known) == len(set(values.backend.known)) == 21


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ({"backend_name": "mine"}, "give all of them"),
        (dynamic("Backend", "no.such.module"), "cannot be used"),
        (dynamic("Machine"), "not found in module"),
        (dynamic("Memory"), "must inherit from HiCacheStorage"),
        (dynamic("Forgets"), "does not give back"),
        (dynamic("Absent", server="there"), "nobody at there"),
        (dynamic("Hangs"), "does not answer"),
    ],
    ids=str,
)
def test_a_backend_that_does_not_serve_is_refused(
    extra: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_backend, "STARTING_SECONDS", 0.5)
    with pytest.raises(ConfigError, match=what):
        connect(extra, rank=0, ranks=1)
