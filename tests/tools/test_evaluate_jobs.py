"""Several configurations at once: the same results, errors that lose no answers, breaking off."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from threading import Barrier, Event, Thread, Timer

import pytest

from benchmarks.paths import NANO
from sglang_diffkv.evaluate import cli, runner
from sglang_diffkv.evaluate.endpoint import Endpoint
from sglang_diffkv.evaluate.report import TOTALS
from sglang_diffkv.evaluate.server import ServerError
from sglang_diffkv.evaluate.store import Answer, Store, UsageRecord
from sglang_diffkv.evaluate.summary import summarise
from sglang_diffkv.evaluate.task import Outcome
from sglang_diffkv.evaluate.tasks import Options, load_task
from tests.tools.evaluation import REFERENCE, replies, results, tokenizer, tokenizer_of
from tests.tools.fake_server import FakeServer

WRONG = {"stock": (), "a": ("t-add-easy-0",), "b": ("t-add-easy-0", "t-add-hard-0"), "c": ("t-sort-easy-0",)}


class Servers:
    """Stand-ins in place of ``runner.start``; ``before`` is called with a name when its first question comes."""

    def __init__(self, before=lambda name: None):
        self.before = before
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.broken: set[str] = set()

    @contextmanager
    def start(self, configuration, model, args):
        name, asked = configuration.name, []
        self.started.append(name)

        def reply(ids):
            asked.append(ids)
            if len(asked) == 1:
                self.before(name)
            return replies(WRONG[name])(ids)

        with FakeServer(reply, share=configuration.diffkv and 0.4) as fake:
            if name in self.broken:
                raise ServerError(f"no memory for {name}")
            try:
                yield Endpoint.connect(fake.url, owned=True)
            finally:
                self.stopped.append(name)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The command with the configurations of WRONG on stand-ins."""

    def call(servers, *args, folder=tmp_path):
        monkeypatch.setattr(runner, "start", servers.start)
        configs = [x for name in WRONG for x in ("--config", name if name == "stock" else f"{name}={{}}")]
        base = ["--model", str(NANO), "--task", REFERENCE, "--concurrency", "1", "--output", str(folder)]
        return cli.main([*base, *configs, *args])

    monkeypatch.setattr(cli, "load_tokenizer", tokenizer_of)
    return call


def test_results_are_those_of_one_after_the_other(run, tmp_path, capsys):
    together = Barrier(4)
    assert run(Servers(lambda name: together.wait(20)), "--jobs", "4", folder=tmp_path / "four") == 0
    out, err = capsys.readouterr()
    assert "configuration 2 of 4: a\n" in err and "4 at once: 100%" in err
    assert run(Servers(), folder=tmp_path / "one") == 0
    assert capsys.readouterr().out == out
    assert list(results(tmp_path / "four")) == list(WRONG)
    assert results(tmp_path / "four") == results(tmp_path / "one")


def test_no_more_than_the_jobs_run(run):
    servers, most = Servers(), []
    servers.before = lambda name: most.append(len(servers.started) - len(servers.stopped))
    assert run(servers, "--jobs", "2") == 0
    assert max(most) <= 2 and sorted(servers.started) == sorted(WRONG)


def test_one_that_fails_loses_no_answer_of_the_others(run, tmp_path, capsys):
    failing = Event()
    servers = Servers(lambda name: failing.wait(20))
    servers.broken = {"a"}
    monitor = servers.start

    @contextmanager
    def start(configuration, model, args):
        try:
            with monitor(configuration, model, args) as endpoint:
                yield endpoint
        except ServerError:
            failing.set()
            raise

    servers.start = start
    assert run(servers, "--jobs", "2") == 1
    err = capsys.readouterr().err
    assert "a: failed; what has begun is finished" in err and err.endswith("evaluate: no memory for a\n")
    assert servers.started == ["stock", "a"] and servers.stopped == ["stock"]
    assert results(tmp_path)["stock"]["score"]["n"] == 8
    again = Servers()
    assert run(again, "--jobs", "2") == 0
    assert sorted(again.started) == ["a", "b", "c"], "stock's answers were kept"


def test_every_error_is_said(run, capsys):
    both = Barrier(2)
    servers = Servers()
    monitor = servers.start

    @contextmanager
    def start(configuration, model, args):
        both.wait(20)
        with monitor(configuration, model, args) as endpoint:
            yield endpoint

    servers.start, servers.broken = start, {"stock", "a"}
    assert run(servers, "--jobs", "2") == 1
    err = capsys.readouterr().err
    assert "no memory for stock" in err and "no memory for a" in err
    assert sorted(servers.started) == ["a", "stock"]


def test_an_interrupt_stops_all_servers_after_their_next_answer(run, tmp_path, monkeypatch):
    interrupted = Event()
    servers = Servers(lambda name: name == "stock" or interrupted.wait(20))

    def interrupt(*args):
        Timer(0.2, interrupted.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(servers, "--jobs", "2")
    assert "a" in servers.stopped and len(servers.started) == len(servers.stopped) < 4
    with Store(tmp_path) as store:
        assert 1 <= len(store.answered("a", "reference/reference")) < 8


def test_summaries_while_answers_come(tmp_path):
    suite = runner.Suite.of(load_task(REFERENCE, Options()), tokenizer())
    outcome = Outcome(right=True, prompt_tokens=5, completion_tokens=5)
    with Store(tmp_path) as store:
        runner.register(store, [suite])
        for name in WRONG:
            store.add_configuration(name, {"backend": "diffkv", "kv_cache_dtype": "auto"})

        def add(name):
            for number in range(400):
                known = suite.questions[number % 8].id
                for id_ in (known, f"more-{number}"):
                    store.add(Answer(configuration=name, suite=suite.task.name, id=id_, task="t", outcome=outcome))
                totals = {"finished": dict.fromkeys(TOTALS, 1.0)}
                store.add(UsageRecord(configuration=name, suite=suite.task.name, run=str(number), totals=totals))

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        threads = [Thread(target=add, args=(name,)) for name in WRONG]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                for name in WRONG:
                    store.answered(name, suite.task.name)
                    store.totals(name, suite.task.name)
                assert all(x.score.mean == 1 for x in summarise(store, [suite]))
        finally:
            sys.setswitchinterval(interval)
            for thread in threads:
                thread.join()
        assert store.totals("a", suite.task.name) == {"finished": dict.fromkeys(TOTALS, 400.0)}


@pytest.mark.parametrize("args", [["--model", "m", "--jobs", "0"], ["--url", "http://x", "--jobs", "2"]])
def test_unusable_counts(tmp_path, args):
    with pytest.raises(SystemExit):
        cli.parse_args([*args, "--task", REFERENCE, "--output", str(tmp_path)])
