"""What prefixes that come back are told to save, on a server that is only played."""

from __future__ import annotations

import itertools
import json
import shlex
from collections import OrderedDict
from types import SimpleNamespace

import pytest

from benchmarks.paths import NANO
from benchmarks.serving import restored
from benchmarks.serving.client import BenchmarkError
from benchmarks.serving.restored import COMPUTED, DEVICE, HOST, STORE, Asked, Prefixes

TIMES = {COMPUTED: 0.4, DEVICE: 0.01, HOST: 0.03, STORE: 0.1}


class Played:
    """Keeps the newest ``size`` prompts on the GPU, all others in host memory, and after a flush in a store."""

    def __init__(self, size: int, *, keeps: bool = True, store: bool = True):
        self.size, self.keeps = size, keeps
        self.command = ["--hicache-storage-backend"] if store else []
        self.url = "played"
        self.device: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self.host: set[tuple[int, ...]] = set()
        self.stored: set[tuple[int, ...]] = set()

    def ask(self, url: str, prompt: list[int]) -> Asked:
        key = tuple(prompt)
        found = (
            (x, known)
            for x, held in ((DEVICE, self.device), (HOST, self.host), (STORE, self.stored))
            for known in tuple(held)
            if known == key[: len(known)]
        )
        place, known = next(found, ("", ()))
        self.device.pop(key, None)
        self.device[key] = None
        if self.keeps:
            self.host.add(key)
            self.stored.add(key)
        while len(self.device) > self.size:
            self.device.popitem(last=False)
        seconds = TIMES[place or COMPUTED] + 1e-3 * (len(prompt) - len(known) if place else 0)
        return Asked(seconds, {place: min(len(known), len(prompt) - 1)} if place else {})

    def flush_cache(self) -> None:
        self.device.clear()
        self.host.clear()


@pytest.fixture
def draw():
    numbers = itertools.count()
    return lambda: [next(numbers)] * 50


def play(monkeypatch: pytest.MonkeyPatch, server: Played) -> Played:
    monkeypatch.setattr(restored, "ask", server.ask)
    monkeypatch.setattr(restored, "warm_up", lambda *args: None)
    monkeypatch.setattr(restored.time, "sleep", lambda seconds: None)
    return server


def test_others_push_a_prompt_out(draw, monkeypatch):
    server = play(monkeypatch, Played(20))
    prefixes = Prefixes(server, draw)
    prompts = [draw() for _ in range(3)]
    assert prefixes.times(prompts, COMPUTED) == [400.0] * 3
    prefixes.push_out(prompts)
    assert prefixes.times(prompts[:-1], HOST) == [30.0] * 2
    with pytest.raises(BenchmarkError, match=r"of 50 tokens was found \{'device': 49\}, not computed"):
        prefixes.times(prompts, COMPUTED)


def test_what_ends_a_request_is_not_measured_with_the_next(draw, monkeypatch):
    """New tokens are drawn before the pause, too."""
    server, seen = play(monkeypatch, Played(20)), []
    monkeypatch.setattr(restored, "ask", lambda *args: (seen.append("ask"), server.ask(*args))[1])
    monkeypatch.setattr(restored.time, "sleep", lambda seconds: seen.append("pause"))
    prefixes = Prefixes(server, lambda: (seen.append("draw"), draw())[1])
    prompt = draw()
    prefixes.times([prompt], COMPUTED)
    prefixes.times([prompt] * 2, DEVICE, 3)
    assert seen == ["pause", "ask", *["draw", "pause", "ask"] * 2]


@pytest.mark.parametrize("server", [Played(1000), Played(2, keeps=False)], ids=["it holds all", "none is kept"])
def test_a_prompt_that_does_not_come_back_is_an_error(server, draw, monkeypatch):
    prefixes = Prefixes(play(monkeypatch, server), draw)
    prompts = [draw() for _ in range(2)]
    prefixes.times(prompts, COMPUTED)
    with pytest.raises(BenchmarkError, match="the GPU still has a prompt"):
        prefixes.push_out(prompts)


@pytest.mark.parametrize("store", [False, True])
def test_every_place_has_its_times(store, monkeypatch):
    server = play(monkeypatch, Played(12, store=store))
    args = restored.parse_args(
        ["--model", str(NANO), "--kv-gib", "1", "--prompt", "60", "--repeat", "4", "--diffkv", "d={}"]
    )
    record = restored.measure(server, SimpleNamespace(shape=SimpleNamespace(vocab=9000), seed=0), args)
    (found,) = record["prompts"]
    places = [COMPUTED, HOST, DEVICE, *([STORE] if store else [])]
    assert {name: found[f"{name}_ms"] for name in places} == pytest.approx({x: 1e3 * TIMES[x] for x in places})
    assert set(found["all_ms"]) == set(places) and len(found["all_ms"][HOST]) == 3
    json.dumps(record)
    text = restored.table(
        [{"backend": "x", "status": "ok", **record}, {"backend": "y", "status": "failed", "error": "e"}], args
    )
    assert "400.0 | 10.0, 0.03 | 30.0, 0.07 |" in text and "| y | e |" in text
    assert ("100.0, 0.25" in text) == store


def test_new_tokens_behind_a_prompt_have_times_of_their_own(monkeypatch):
    server = play(monkeypatch, Played(20, store=False))
    flags = shlex.split(f"--model {NANO} --kv-gib 1 --prompt 60 --repeat 4 --diffkv d={{}} --added 1 6")
    args = restored.parse_args(flags)
    record = restored.measure(server, SimpleNamespace(shape=SimpleNamespace(vocab=9000), seed=0), args)
    (found,) = record["prompts"]
    assert (found["device_ms"], found["device_1_ms"], found["device_6_ms"]) == pytest.approx((10, 11, 16))
    header, _, row = restored.table([{"backend": "x", "status": "ok", **record}], args).splitlines()
    assert "| on the GPU | and 1 more | and 6 more | from host memory |" in header
    assert "| 10.0, 0.03 | 11.0, 0.03 | 16.0, 0.04 | 30.0, 0.07 |" in row


def test_more_new_tokens_than_that_are_refused(capsys):
    with pytest.raises(SystemExit):
        restored.parse_args(
            ["--model", str(NANO), "--kv-gib", "1", "--prompt", "60", "--diffkv", "d={}", "--added", "61"]
        )
    assert "--added is from 1 to the length of the shortest prompt" in capsys.readouterr().err


def test_few_prompts_are_refused(capsys):
    with pytest.raises(SystemExit):
        restored.parse_args(["--model", str(NANO), "--kv-gib", "1", "--repeat", "1", "--diffkv", "d={}"])
    assert "at least 2" in capsys.readouterr().err
