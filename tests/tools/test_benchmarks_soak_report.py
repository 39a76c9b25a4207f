"""What the soak makes of what it saw: tally, accuracy, memory, verdict; and whole soaks on a fake server."""

from __future__ import annotations

import asyncio
import os

import pytest

from benchmarks import splits
from benchmarks.soak.client import ABORTED, ANSWERED, LOST, REFUSED
from benchmarks.soak.load import Limits, Load
from benchmarks.soak.report import Answer, Question, Tally, accuracy, problems
from benchmarks.soak.run import Plan, Soak
from benchmarks.soak.running import RunningServer
from benchmarks.soak.watch import growth, resident, slope, wrong_lines
from sglang_diffkv.access import OPEN, Access
from tests.tools.certificates import make_certificate
from tests.tools.fake_server import FakeServer, Refusal
from tests.tools.soak import outcome

OWNERS = {"private": 0, "shared": 0, "cached": 0, "free": 10}
IDLE = {"pages_used": 0, "segments": 0, "tokens": 0, "faults": 0, "owners": OWNERS}


def test_tally_names_what_was_not_to_be_expected():
    tally = Tally()
    fine = [outcome(ANSWERED), outcome(ABORTED, "cut"), outcome(REFUSED, "400: bad", kind="invalid")]
    fine.append(outcome(REFUSED, "503: The request queue is full."))
    bad = [outcome(LOST, "a"), outcome(REFUSED, "Out of memory, b"), outcome(ANSWERED, "c", kind="invalid")]
    for x in fine + bad:
        tally.add(x, 1.0)
    summary = tally.summary()
    assert [x["detail"] for x in summary["unexpected"]] == ["a", "Out of memory, b", "c"]
    assert summary["requests"] == {"answered": 2, "refused": 3, "aborted": 1, "lost": 1}
    assert summary["reasons"]["refused: memory exhausted"] == summary["reasons"]["refused: queue full"] == 1
    assert summary["completion_tokens"] == 10


def test_accuracy_is_paired_by_question_and_by_what_was_cached():
    right, wrong = Answer(True, "a", 0.0), Answer(False, "b", 0.0)
    cached = Answer(False, "b", 0.9)
    questions = [
        Question("1", right, wrong, [right, cached, cached], right),
        Question("2", right, right, [wrong, wrong], wrong),
        Question("3", wrong, wrong, [], wrong),
    ]
    found = accuracy(questions)
    assert (found["alone"], found["loaded"]) == (pytest.approx(200 / 3), 20.0)
    assert (found["difference"], found["standard_error"]) == (-50.0, pytest.approx(50.0))
    assert (found["after_changed"], found["loaded_same_text"]) == (1, 60.0)
    assert accuracy([])["difference"] is None


def fine_result():
    questions = [Question(str(i), *[Answer(True, "a", 0.0)] * 2, [Answer(True, "a", 0.0)] * 2) for i in range(4)]
    tally = Tally()
    tally.add(outcome(ANSWERED), 1.0)
    result = {"failures": [], "load": tally.summary(), "accuracy": accuracy(questions), "device": "cpu"}
    return {**result, "rss_growth": {"scheduler": 0.5}, "log": {"wrong": []}}


def test_problems():
    assert problems(fine_result(), 1.0) == []
    for key, value, said in (
        ("failures", ["round 1: x"], "round 1: x"),
        ("rss_growth", {"scheduler": 2.0}, "grew by 2.0 MiB a minute"),
        ("log", {"wrong": ["Traceback"]}, "log: Traceback"),
        ("accuracy", {**fine_result()["accuracy"], "difference": -3.0, "standard_error": 1.0}, "-3.0 ± 1.0 points"),
        ("accuracy", {**fine_result()["accuracy"], "after": 99.0, "after_changed": 1}, "after the load 99.0%"),
        ("load", {**fine_result()["load"], "requests": {"answered": 0}}, "no request was answered"),
    ):
        assert said in problems({**fine_result(), key: value}, 1.0)[0]


def test_a_store_that_nothing_was_asked_of_was_not_tried():
    for store, tried in (({}, False), ({"hits": 0, "refused": 0}, False), ({"hits": 1, "refused": 0}, True)):
        found = problems({**fine_result(), "spoiled": {"cut": 3}, "store": store}, 1.0)
        assert (found == []) == tried and (tried or "the store was not tried" in found[0])


def test_memory_and_log():
    assert slope([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]) == pytest.approx(2.0) and slope([1.0], [1.0]) == 0.0
    samples = [{"time": 60.0 * i, "rss": {"scheduler": 100.0 + 3 * max(i, 10)}} for i in range(20)]
    assert growth(samples) == {"scheduler": pytest.approx(3.0)} and growth([]) == {}
    assert resident(os.getpid())["http"] > 1
    log = "watchdog_timeout=300\nTraceback (most recent call last):\nPool Mem Leak Detected!\nfine"
    assert len(wrong_lines(log)) == 2


class Stand:
    """A fake server as the soak knows servers."""

    access = OPEN

    def __init__(self, fake):
        self.fake, self.url, self.pid, self.up = fake, fake.url, os.getpid(), True

    def alive(self):
        return self.up

    def flush_cache(self):
        self.fake.cached.clear()


def soak_on(fake, minutes=0.05, server=None):
    items = splits.load("calib")[:2]
    limits = Limits.of(context=512, room=512)
    load = Load(0, limits, [[1, 2, 3], [4, 5, 6]], [[6, 7]], range(300), abort_share=0.0)
    found = Soak(server or Stand(fake), Plan(60 * minutes, 2, 4, 5.0, 0.1), load, items)
    asyncio.run(found.run())
    return found


def test_a_server_that_runs_elsewhere_is_soaked_with_its_keys(tmp_path):
    """Over https; aborts and an empty prefix cache take another key. Its memory and its log are not seen."""
    certificate, key = make_certificate(tmp_path)
    admin = ("/flush_cache", "/abort_request")
    keys = {"keys": lambda path: "admins" if path in admin else "users", "certificate": (certificate, key)}
    with FakeServer(lambda ids: "x" * 700, stats=IDLE, context=512, **keys) as fake:
        access = Access("users", "admins", certificate)
        found = soak_on(fake, 0.03, RunningServer(fake.url, access))
        assert found.failures == [] and found.tally.count("answered") and fake.flushes > 2 and fake.aborted
        assert all(x["rss"] == {} for x in found.samples) and growth(found.samples) == {}
        refused = soak_on(fake, 0.02, RunningServer(fake.url, Access("users", "users", certificate)))
    assert "stopped: AccessError" in refused.failures[0] and "running elsewhere" in refused.failures[0]


def test_a_whole_soak_on_a_fake_server():
    def answer(ids):
        if len(ids) > 512:
            raise Refusal("too long")
        return "x" * 700

    with FakeServer(answer, stats=IDLE, context=512) as fake:
        found = soak_on(fake)
    assert found.failures == [] and len(found.rounds) == 2 and found.tally.count(ANSWERED) > 10
    assert found.tally.count(LOST) == 0
    assert all(x.loaded and x.after for x in found.questions)
    assert "all" in fake.aborted and {"answered", "free", "rss"} <= set(found.samples[0])


def test_pages_left_and_a_lost_server_fail_the_soak():
    with FakeServer(lambda ids: "x" * 700, stats={**IDLE, "pages_used": 3, "faults": 1}) as fake:
        found = soak_on(fake)
    assert "left on the idle server: {'pages_used': 3}" in found.failures[0] and "pool empty" in found.failures[1]
    found = soak_on(fake)
    assert "stopped: " in found.failures[0]
