"""The soak: how it draws requests and finds out how each ended; and a short one on a real server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections import Counter

import aiohttp
import pytest

from benchmarks import splits
from benchmarks.soak import cli as soak
from benchmarks.soak.client import ABORTED, ANSWERED, LOST, REFUSED, Client, Reply, grade
from benchmarks.soak.load import ASK, DISCONNECT, WEIGHTS, Abort, Limits, Load, choose
from benchmarks.soak.spoiler import Spoiler
from sglang_diffkv.mem_pool.object_folder import ObjectFolder
from tests.tools.fake_server import FakeServer, HangUp, Refusal
from tests.tools.soak import order, reply

LIMITS = Limits.of(context=8192, room=4000)


def make_load(seed=0, limits=LIMITS, **options):
    return Load(seed, limits, [[1, 2, 3], [4, 5]], [[6, 7]], range(300), **options)


def aborted(message, **more):
    return reply(finish_reason={"type": "abort", "message": message, **more})


def test_the_load_is_drawn_from_its_seed_and_within_the_limits():
    first, second = ([load.next() for _ in range(3000)] for load in (make_load(), make_load()))
    assert first == second
    kinds = Counter(x.kind for x in first)
    assert set(kinds) == set(WEIGHTS)
    for x in first:
        if x.kind == "invalid":
            assert x.wrong or len(x.ids) > LIMITS.room or len(x.ids) + x.new_tokens > LIMITS.context
            continue
        assert len(x.ids) > 0 and len(x.ids) + x.new_tokens < LIMITS.room * 2 // 3
        assert x.abort is None or x.kind != "reference"
        assert x.samples == 1 or x.abort is None or x.abort.how == DISCONNECT, "SGLang gives samples ids of their own"
    assert {x.abort.how for x in first if x.abort} == {DISCONNECT, ASK}
    assert {x.stream for x in first} == {True, False}
    assert 0.15 < sum(x.abort is not None for x in first) / (len(first) * 0.7) < 0.25


def test_references_come_in_turn_and_again_if_not_answered():
    load = make_load()
    asked = [x for x in (load.next() for _ in range(400)) if x.kind == "reference"]
    counts = Counter(x.question for x in asked)
    assert abs(counts[0] - counts[1]) <= 1
    load.give_back(asked[0], None)
    assert next(x for x in iter(load.next, None) if x.kind == "reference").question == asked[0].question


def test_a_chat_repeats_what_was_said():
    load = make_load()
    said = {}
    for x in (load.next() for _ in range(2000)):
        if x.chat is None:
            continue
        before = said.get(id(x.chat), [])
        if x.short:
            assert x.ids[: len(before)] == before and len(x.ids) - len(before) <= 8 and x.new_tokens <= 6
        else:
            assert x.ids == [*before, 6, 7]
        load.give_back(x, [8, 9])
        said[id(x.chat)] = [*x.ids, 8, 9]
        assert x.chat.ids == said[id(x.chat)]
    assert max(map(len, said.values())) > 12, "no chat went on"


def test_names_look_like_those_of_other_requests():
    load = make_load()
    orders = [load.next() for _ in range(2000)]
    ids = [x.rid for x in orders if x.rid]
    assert len(ids) == len(set(ids)) > 1000
    named = [x.extra_key for x in orders if x.extra_key is not None]
    assert any(key.endswith(f"retracted {rid}") for key in named for rid in ids[-20:])
    assert orders[0].payload("r")["rid"] == "r"
    assert next(x for x in orders if x.extra_key).payload("r")["extra_key"] in named


def test_chosen_questions_are_single_ones_and_a_group():
    chosen = choose(splits.load("calib"), 40, 0)
    assert len(chosen) == len({x.id for x in chosen}) == 40
    assert Counter(x.group for x in chosen if x.group).most_common(1)[0][1] == 8


@pytest.mark.parametrize(
    ("asked", "found", "aborting", "end"),
    [
        (order(), reply(), False, ANSWERED),
        (order(), reply(completion_tokens=4), False, LOST),
        (order(exact=False), reply("stop", completion_tokens=4), False, ANSWERED),
        (order(), reply(prompt_tokens=2), False, LOST),
        (order(), reply(finish_reason=None), False, LOST),
        (order(samples=2), reply(), False, LOST),
        (order(), Reply(), False, LOST),
        (order(), Reply(error="400: no"), True, REFUSED),
        (order(), Reply(error="499: Request 1 was aborted"), True, ABORTED),
        (order(), Reply(error="499: Request 1 was aborted"), False, REFUSED),
        (order(), aborted("Aborted"), True, ABORTED),
        (order(), aborted("Abort in waiting queue"), True, ABORTED),
        (order(), aborted("Aborted"), False, REFUSED),
        (order(), aborted("DiffKV: the pool of pages was empty", status_code=500), True, REFUSED),
    ],
)
def test_how_a_request_ended(asked, found, aborting, end):
    assert grade(asked, found, aborting)[0] == end


def send(server, *orders, deadline=20.0):
    async def run():
        async with aiohttp.ClientSession() as session:
            client = Client(server.url, session, deadline)
            return await asyncio.gather(*(client.send(x) for x in orders))

    return asyncio.run(run())


def ends(outcomes):
    return [x.end for x in outcomes]


@pytest.mark.parametrize("stream", [False, True])
def test_answers(stream):
    with FakeServer(lambda ids: "x" * 9) as server:
        outcomes = send(server, order(stream=stream), order(stream=stream, samples=3))
        assert ends(outcomes) == [ANSWERED, ANSWERED]
        assert [x.total("completion_tokens") for x in outcomes] == [5, 15]
        assert all((x.first is not None) == stream for x in outcomes)


def test_refusals_and_losses():
    def answer(ids):
        if ids[0] == 1:
            raise Refusal("too long")
        if ids[0] == 2:
            raise HangUp
        time.sleep(6)
        return "x" * 9

    with FakeServer(answer) as server:
        outcomes = send(server, *(order(ids=[i, 0, 0]) for i in (1, 2, 3)), deadline=4.0)
    assert ends(outcomes) == [REFUSED, LOST, LOST]
    assert "too long" in outcomes[0].detail and "Disconnected" in outcomes[1].detail
    assert outcomes[2].detail == "no end within 4 s"
    with FakeServer(lambda ids: "x" * 9, cut_streams=True) as server:
        assert ends(send(server, order(stream=True))) == [LOST]


def test_aborts():
    with FakeServer() as server:

        def answer(ids):
            deadline = time.monotonic() + 10
            while not server.aborted and time.monotonic() < deadline:
                time.sleep(0.02)
            raise ValueError("Aborted")

        server.reply = answer
        outcomes = send(server, order(abort=Abort(ASK, seconds=0.2)), order(abort=Abort(DISCONNECT, seconds=0.1)))
        assert ends(outcomes) == [ABORTED, ABORTED]
        assert len(server.aborted) == 1
    with FakeServer(lambda ids: "x" * 9) as server:
        assert ends(send(server, order(stream=True, abort=Abort(DISCONNECT, seconds=9.0)))) == [ANSWERED]


def test_a_store_is_spoiled_in_every_way(tmp_path):
    """And nothing outside of it."""
    folder, spoiler = ObjectFolder(tmp_path, 1 << 20), Spoiler(tmp_path, 1)
    spoiler.spoil()
    assert not spoiler.done
    for seed in range(300):
        key = hashlib.blake2b(bytes([seed % 251]), digest_size=16).hexdigest()
        with contextlib.suppress(OSError):
            folder.write(key, key, [b"x" * 100], 100)
        spoiler.spoil()
    assert len(spoiler.done) == 9, spoiler.done
    with spoiler:
        time.sleep(1.5)
    assert not [x for x in tmp_path.iterdir() if x != folder.path], "it reached out of the store"


@pytest.mark.full
@pytest.mark.server
def test_a_short_soak_on_a_server(tmp_path):
    """With exact prompts, short turns, and names that look like others'; over a store whose files are damaged."""
    output = tmp_path / "soak.json"
    arguments = ["--minutes", "0.7", "--rounds", "2", "--references", "3", "--concurrency", "32", "--max-queued", "16"]
    arguments += ["--max-total-tokens", "3000", "--longest-reply", "120", "--check-integrity", "--max-growth", "1000"]
    arguments += ["--diffkv-config", '{"prefix_fidelity": "exact"}', "--store", str(tmp_path / "store")]
    status = soak.main([*arguments, "--output", str(output)])
    result = json.loads(output.read_text())
    assert (status, result["problems"]) == (0, [])
    assert result["load"]["requests"]["lost"] == 0 and not output.with_suffix(".log").exists()
    assert all(result["load"]["requests"][end] for end in (ANSWERED, REFUSED, ABORTED))
    assert result["accuracy"]["answers_loaded"] and result["load"]["cached_tokens"]
    assert all(x["pages_used"] == 0 and x["faults"] == 0 for x in result["rounds"]) and len(result["rounds"]) == 2
    assert output.with_suffix(".png").stat().st_size
    assert len(result["spoiled"]) > 4 and result["store"]["written"]
