"""Prefixes on a disk behind host memory: another server finds them, and a disk that fails costs hits alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_diffkv.mem_pool import piece_reader, segment_object, stored_segments
from sglang_diffkv.mem_pool.object_folder import ObjectFolder
from sglang_diffkv.mem_pool.segment_object import Origin
from sglang_diffkv.mem_pool.stored_segments import StoredSegments
from sglang_diffkv.srt.tree.disk_tier import BEST_EFFORT, TIMEOUT, WAIT_COMPLETE, DiskTier, Prefetch, _namespace
from sglang_diffkv.srt.tree.host_tier import WRITE_BACK, WRITE_THROUGH
from sglang_diffkv.srt.tree.private_space import HighSpace, PrivateSpace, WindowSpace
from tests.helpers import until
from tests.tree.test_host_tier import admitted, asking, evict_all, host_of, seen_by, served
from tests.tree.tree_world import World

PATIENT = Prefetch(WAIT_COMPLETE, threshold=8)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects have many parts, which several threads read."""
    monkeypatch.setattr(segment_object, "PART_BYTES", 1500)


class Server:
    """A tree with host memory and a folder behind it."""

    def __init__(self, folder: Path, *, prefetch: Prefetch = PATIENT, model: str = "m", **options: Any):
        options = {"exact": True, "host_pages": 400, "write_policy": WRITE_THROUGH, **options}
        self.world = World(900, **options)
        self.host = host_of(self.world)
        manager = self.world.manager
        assert manager.saved_segments is not None
        origin = Origin.of(manager.geometry, manager.state.dtype, model, "c")
        self.stored = StoredSegments(manager.saved_segments, ObjectFolder(folder), origin)
        self.host.store_in(self.stored, prefetch)

    @property
    def disk(self) -> DiskTier:
        assert isinstance(self.host.disk, DiskTier)
        return self.host.disk

    def serve(self, tokens: list[int], **named: str) -> None:
        """A request has come and gone, and what it left was written."""
        served(self.world, tokens, **named)
        self.settle()

    def settle(self) -> None:
        self.world.requests.scheduling_begins([])
        self.world.requests.scheduling_begins([])
        until(lambda: not self.report()["waiting"])

    def find(self, tokens: list[int], req: Any = None, extra_key: str | None = None) -> int:
        """Tokens that a request finds that waits for the disk as long as the policy says."""
        req = req or asking(tokens)
        for _ in range(5000):
            self.world.requests.scheduling_begins([req])
            found = admitted(self.world, tokens, req, extra_key)
            if not self.host.waits_for(req):
                self.host.prefill_begins([req])
                return found
        raise AssertionError("it waits for ever")

    def report(self) -> dict[str, int]:
        return self.host.report_of_store()


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.segment"))


def test_namespaces_of_a_tier_and_a_window_have_names_that_no_client_can_choose() -> None:
    spaces = [
        HighSpace(None),
        HighSpace("a"),
        WindowSpace(None, 4),
        WindowSpace("a", 4),
        WindowSpace("a", 5),
        None,
        "a",
    ]
    spaces += ["high", '["high",null]', '["high","a"]', "HighSpace('a')", ""]
    names = [_namespace((space, None)) for space in spaces]
    assert None not in names and len(set(names)) == len(names)
    assert _namespace((HighSpace("a"), None)) == names[1] and _namespace((PrivateSpace(), None)) is None
    assert _namespace((None, PrivateSpace())) is None


@pytest.mark.parametrize("options", [{"exact": False}, {"exact": True}, {"write_policy": WRITE_BACK}], ids=str)
def test_another_server_finds_what_one_wrote(options: dict[str, Any], tmp_path: Path) -> None:
    one, two = Server(tmp_path, **options), Server(tmp_path, **options)
    tokens = one.world.tokens(100)
    served(one.world, tokens)
    segments = one.world.segments()
    seen = [seen_by(one.world.manager, x.row, x.lo) for x in segments]
    evict_all(one.world)
    one.settle()
    assert one.report()["written"] == len(files(tmp_path)) == len(segments)
    assert one.report()["tokens_written"] == segments[-1].hi == 100
    assert two.find([*tokens, 1, 2]) == 100
    back = two.world.segments()
    assert [seen_by(two.world.manager, x.row, x.lo) for x in back] == seen, "other bytes came back"
    known = [[(x.lo, x.hi, x.end, x.as_computed) for x in found] for found in (segments, back)]
    assert known[0] == known[1]
    report = two.report()
    assert (report["hits"], report["tokens_read"], report["read"]) == (1, 100, len(back))
    assert report["bytes_read"] == one.report()["bytes_written"] == sum(x.stat().st_size for x in files(tmp_path))
    two.serve([*tokens, 3])
    assert two.report()["there_already"] + two.report()["written"] <= 2


def test_a_path_of_several_objects_is_followed(tmp_path: Path) -> None:
    """From one end to the next beginning, through objects that the tree or host memory has, and into one's middle."""
    one, two = Server(tmp_path), Server(tmp_path)
    turns = [one.world.tokens(60), one.world.tokens(50), one.world.tokens(70)]
    chat: list[int] = []
    for turn in turns:
        chat += turn
        one.serve(chat)
    assert len(files(tmp_path)) == 3
    branch = [*chat[:140], *one.world.tokens(40)]
    assert two.find(branch) == 140, "it does not end inside of the third object"
    one.serve(branch)
    assert two.find([*branch, 1]) == 180, "what lies behind the tree's is not found"
    assert two.find([*chat, 1]) == 180
    three = Server(tmp_path)
    assert three.find([*branch, 1]) == 180 and three.report()["refused_tokens"] == 0


def test_short_turns_do_not_break_a_path(tmp_path: Path) -> None:
    one, two = Server(tmp_path), Server(tmp_path)
    first, short, last = one.world.tokens(60), one.world.tokens(5), one.world.tokens(60)
    for end in range(1, 4):
        one.serve([x for part in (first, short, last)[:end] for x in part])
    assert two.find([*first, *short, *last, 1]) == 125


def test_other_prompts_tenants_and_weights_find_nothing(tmp_path: Path) -> None:
    one = Server(tmp_path)
    tokens = one.world.tokens(100)
    one.serve(tokens, extra_key="tenant")
    two, other = Server(tmp_path), Server(tmp_path, model="m2")
    assert two.find(tokens) == two.find(tokens, extra_key="tenant-2") == two.find(one.world.tokens(100)) == 0
    assert other.find(tokens, extra_key="tenant") == 0 and other.report()["fetching"] == 0
    assert two.find(tokens, extra_key="tenant") == 99
    assert not any(count for server in (two, other) for name, count in server.report().items() if "refused" in name)


@pytest.mark.parametrize("damage", ["page", "head", "cut", "empty", "longer", "text"])
def test_a_damaged_file_is_a_miss_and_is_written_again(damage: str, tmp_path: Path) -> None:
    one, two = Server(tmp_path), Server(tmp_path)
    tokens = one.world.tokens(100)
    one.serve(tokens)
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[{"page": -300, "head": 70}.get(damage, 0)] ^= damage in ("page", "head")
    changed = {"cut": data[:-50], "empty": b"", "longer": data + b"\0", "text": b"hello " * 500}.get(damage, data)
    path.write_bytes(changed)
    assert two.find(tokens) == 0 and not files(tmp_path)
    report = two.report()
    assert sum(count for name, count in report.items() if "refused" in name) == 1 and not report["hits"]
    two.serve(tokens)
    assert Server(tmp_path).find(tokens) == 99


def test_a_full_disk_costs_hits_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = Server(tmp_path)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sglang_diffkv.mem_pool.object_folder._write_all", full)
    prompts = [one.world.tokens(80) for _ in range(3)]
    for tokens in prompts:
        one.serve(tokens)
    assert one.report()["errors"] == 3 and not files(tmp_path)
    assert caplog.text.count("No space left on device") == 1, "each error is logged"
    evict_all(one.world)
    assert one.find(prompts[0]) == 79, "host memory has it all the same"


def test_a_file_that_cannot_be_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Server(tmp_path), Server(tmp_path)
    tokens = one.world.tokens(100)
    one.serve(tokens)

    def broken(*args: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(two.stored.folder, "open", broken)
    assert two.find(tokens) == 0 and two.report()["errors"] == 1
    monkeypatch.setattr(two.stored.folder, "names", broken)
    assert two.find(tokens) == 0 and two.report()["errors"] == 2
    assert files(tmp_path), "it may be good"


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that answers nobody until the event."""
    go, open_ = threading.Event(), ObjectFolder.open

    def slow(self: ObjectFolder, key: str, name: str) -> Any:
        go.wait(20)
        return open_(self, key, name)

    monkeypatch.setattr(ObjectFolder, "open", slow)
    yield go
    go.set()


def test_a_disk_that_hangs_holds_up_no_other_and_not_for_ever(tmp_path: Path, hanging: threading.Event) -> None:
    one, two = Server(tmp_path), Server(tmp_path, prefetch=Prefetch(TIMEOUT, 8, 0.2, 0.0))
    tokens, others = one.world.tokens(100), one.world.tokens(50)
    one.serve(tokens)
    req = asking(tokens)
    assert admitted(two.world, tokens, req) == 0 and two.host.waits_for(req)
    free = asking(others)
    admitted(two.world, others, free)
    two.host.queue_seen([req, free])
    began = time.monotonic()
    assert two.find(tokens, req) == 0 and time.monotonic() - began < 5 and two.report()["late"] >= 1
    hanging.set()
    until(lambda: two.world.requests.scheduling_begins([]) or not two.report()["fetching"])
    assert two.find(tokens) == 99, "what came late is lost"


def test_best_effort_waits_for_nothing(tmp_path: Path) -> None:
    one, two = Server(tmp_path), Server(tmp_path, prefetch=Prefetch(BEST_EFFORT, 8))
    tokens = one.world.tokens(100)
    one.serve(tokens)
    req = asking(tokens)
    assert admitted(two.world, tokens, req) == 0 and not two.host.waits_for(req)
    two.host.prefill_begins([req])
    until(lambda: two.world.requests.scheduling_begins([]) or not two.report()["fetching"])
    assert two.find(tokens) == 99


def test_a_request_that_is_aborted_leaves_nothing(tmp_path: Path, hanging: threading.Event) -> None:
    one, two = Server(tmp_path), Server(tmp_path)
    tokens = one.world.tokens(100)
    one.serve(tokens)
    req = asking(tokens)
    admitted(two.world, tokens, req)
    assert two.host.waits_for(req) and two.report()["fetching"] == 1
    two.world.requests.scheduling_begins([])
    assert two.report()["fetching"] == 0
    hanging.set()
    assert two.find(tokens) == 99
    two.host.reset()
    until(lambda: not two.world.requests.scheduling_begins([]) and not two.world.manager.saved.host.used)  # type: ignore[union-attr]


@pytest.mark.parametrize("at", ["the first", "some part"])
def test_a_flush_while_pages_are_read_gives_them_back(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Server(tmp_path), Server(tmp_path)
    tokens = one.world.tokens(100)
    one.serve(tokens)
    go = threading.Event()
    where, name = (StoredSegments, "_fill") if at == "the first" else (piece_reader, "fill")
    fill = getattr(where, name)

    def slow(*args: Any) -> Any:
        go.wait(20)
        return fill(*args)

    monkeypatch.setattr(where, name, slow)
    req, host = asking(tokens), two.world.manager.saved.host  # type: ignore[union-attr]
    until(lambda: bool(admitted(two.world, tokens, req)) or host.used > 0)
    two.host.reset()
    two.world.requests.check_integrity()
    two.world.check()
    assert host.used, "they are given to somebody else while they are written to"
    go.set()
    until(lambda: not two.world.requests.scheduling_begins([]) and not host.used)
    two.world.check()
    assert two.find(tokens) == 99, "the flush emptied the disk"


def test_new_weights_find_nothing_and_write_under_another_name(tmp_path: Path) -> None:
    one = Server(tmp_path)
    tokens, more = one.world.tokens(100), one.world.tokens(80)
    one.serve(tokens)
    evict_all(one.world)
    one.world.requests.weights_change()
    assert one.find(tokens) == 0 and len(files(tmp_path)) == 1
    one.serve(more)
    assert len(files(tmp_path)) == 2
    two = Server(tmp_path)
    assert two.find(more) == 0 and two.find(tokens) == 99


def test_a_full_queue_drops_and_memory_that_is_wanted_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_segments, "MOST_QUEUED", 2)
    one = Server(tmp_path)
    begun, go, has = threading.Event(), threading.Event(), ObjectFolder.has

    def slow(*args: Any) -> bool:
        begun.set()
        return go.wait(60) and has(*args)

    monkeypatch.setattr(ObjectFolder, "has", slow)
    for _ in range(5):
        served(one.world, one.world.tokens(60))
        one.world.requests.scheduling_begins([])
        one.world.requests.scheduling_begins([])
        until(begun.is_set)  # else the first may still be in the queue when others come
    until(lambda: one.report()["dropped"] == 2)
    one.host.reset()
    assert one.report()["dropped"] == 4, "two waited, and their memory went"
    go.set()
    until(lambda: not one.report()["waiting"])
    assert not files(tmp_path) and one.report()["dropped"] == 5
    one.world.check()


def test_two_requests_of_one_prefix_read_it_once(tmp_path: Path, hanging: threading.Event) -> None:
    one, two = Server(tmp_path), Server(tmp_path)
    tokens = one.world.tokens(100)
    one.serve(tokens)
    reqs = [asking(tokens), asking(tokens)]
    for req in reqs:
        admitted(two.world, tokens, req)
        assert two.host.waits_for(req)
    hanging.set()
    until(lambda: two.world.requests.scheduling_begins(reqs) or not two.report()["fetching"])
    assert two.report()["read"] == 1 and two.report()["hits"] == 2
    assert [two.find(tokens, req) for req in reqs] == [99, 99]
