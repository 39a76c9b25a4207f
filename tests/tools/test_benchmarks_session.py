"""The serving benchmark's runs on servers that are only played: records, checks, budget, tables and charts."""

import pytest

from benchmarks import redraw
from benchmarks.budget import Budget
from benchmarks.serving import cli as serving
from benchmarks.serving import client as serving_client
from benchmarks.serving import session as serving_session
from benchmarks.serving.backends import Backend, parse_backend, parse_diffkv
from benchmarks.serving.loads import LOADS, parse_load
from benchmarks.serving.memory import GIB, KVShape
from benchmarks.serving.report import HEADER, row, tables, with_ratios
from sglang_diffkv.evaluate.server import ServerError

LLAMA = KVShape(32, 8, 128, 32768, 128256, 32)
POINT = LOADS["batch"].points()[0]


def good_result(**changes):
    result = dict.fromkeys(serving_client.METRICS, 1.0)
    result |= {"completed": 2, "errors": ["", ""], "output_lens": [8, 8], "ttfts": [0.1, 0.1], **changes}
    return result


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"errors": ["", "reset by peer"]}, "1 of 2 requests failed: reset by peer"),
        ({"completed": 1}, "1 of 2 requests completed"),
        ({"output_lens": [8, 3]}, "1 answers do not have 8 tokens"),
        ({"ttfts": [0.1, 0.0]}, "no first token"),
        ({"median_itl_ms": None}, "median_itl_ms"),
    ],
)
def test_an_incomplete_result_is_an_error(changes, message):
    (point,) = parse_load('batch={"requests": 2, "output": 8}').points()
    serving_client.check_result(good_result(), point)
    with pytest.raises(serving_client.BenchmarkError, match=message):
        serving_client.check_result(good_result(**changes), point)


class Clock:
    """Time that tests set."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_budget():
    clock = Clock()
    budget = Budget(100, {"start": 30}, clock)
    assert budget.refusal("start", "unknown") is None
    with budget.step("start"):
        clock.now = 60
    assert budget.refusal("unknown") is None
    assert budget.refusal("start") == "40 s of 100 s left, about 60 s needed"
    with pytest.raises(ValueError, match="x"), budget.step("unknown"):
        clock.now = 99
        raise ValueError("x")
    assert budget.expected("unknown") == 0
    clock.now = 101
    assert "0 s of 100 s left" in budget.refusal("unknown")
    assert Budget(None).refusal("anything") is None


class FakeServer:
    """Stands for a server: ``fails`` to start, or has room for ``room`` tokens."""

    fails = False
    room = 65536
    held = 8.0
    stopped = 0

    def __init__(self, *args, **kwargs):
        pass

    def start(self):
        if self.fails:
            raise ServerError(
                "the server ended with status 1\n$ python -m x\nRuntimeError: no memory in /a/b/c.py\nbye"
            )

    def stop(self):
        type(self).stopped += 1

    def server_info(self):
        return {"max_total_num_tokens": self.room, "internal_states": [{"memory_usage": {"kvcache": self.held}}]}

    def stats(self):
        return None

    def log_text(self):
        return "Decode batch, #running-req: 7, #token: 1, #queue-req: 0\n"

    def flush_cache(self):
        pass

    def post(self, path, payload):
        raise serving_session.requests.ConnectionError("refused")

    def alive(self):
        return False


@pytest.fixture
def setup(tmp_path, monkeypatch):
    monkeypatch.setattr(serving_session, "Server", type("Fake", (FakeServer,), {}))
    monkeypatch.setattr(serving_session, "warm_up", lambda *args: None)
    metrics = dict.fromkeys(serving_client.METRICS, 2.0)
    monkeypatch.setattr(serving_session, "run_point", lambda *args: metrics)
    return serving_session.Setup("model", LLAMA, 8 * GIB, 128, (), tmp_path)


def records_of(setup, points=(POINT, POINT), budget=None, backend="triton:bf16"):
    records = []
    serving_session.run_backend(parse_backend(backend), points, setup, budget or Budget(None), records.append)
    return records


def test_records_of_a_good_run(setup):
    first, _ = records_of(setup)
    assert first["status"] == "ok" and first["output_throughput"] == 2.0
    assert (first["capacity_tokens"], first["cache_gib"], first["kv_bytes_per_token"]) == (65536, 8.0, 131072)
    assert serving_session.Server.stopped == 1


def test_servers_that_start_together(setup, monkeypatch):
    """One cannot start: the others are asked, and stopped once each."""

    def init(self, model, attention, *args, **kwargs):
        self.fails = attention == "flashinfer"

    monkeypatch.setattr(serving_session.Server, "__init__", init)
    backends = [parse_backend(f"{name}:bf16") for name in ("triton", "flashinfer", "fa3")]
    records = []
    serving_session.run_together(backends, (POINT, POINT), setup, Budget(None), records.append)
    assert [x["status"] for x in records] == ["ok", "ok", "failed", "failed", "ok", "ok"]
    assert [x["backend"] for x in records[::2]] == [x.name for x in backends]
    assert serving_session.Server.stopped == 2


def test_servers_that_start_together_are_stopped_when_that_is_interrupted(setup, monkeypatch):
    class Pool(serving_session.ThreadPoolExecutor):
        def __exit__(self, *args):
            super().__exit__(*args)
            raise KeyboardInterrupt

    monkeypatch.setattr(serving_session, "ThreadPoolExecutor", Pool)
    backends = [parse_backend(f"{name}:bf16") for name in ("triton", "fa3")]
    with pytest.raises(KeyboardInterrupt) as held:
        serving_session.run_together(backends, (POINT,), setup, Budget(None), [].append)
    assert serving_session.Server.stopped == 2 and held


def test_a_path_in_a_backend_s_flags_is_no_path_of_its_log(setup, monkeypatch):
    def init(self, *args, log_path, **kwargs):
        log_path.write_text("begun")

    monkeypatch.setattr(serving_session.Server, "__init__", init)
    records = records_of(setup, backend="triton:bf16 --speculative-draft-model-path some/draft")
    assert [x["status"] for x in records] == ["ok", "ok"]
    assert [x.name for x in setup.logs.glob("*.log")] == ["triton_bf16_--speculative-draft-model-path_some_draft.log"]


def test_a_server_that_does_not_start(setup):
    serving_session.Server.fails = True
    records = records_of(setup)
    assert [x["status"] for x in records] == ["failed", "failed"]
    assert records[0]["error"] == "the server ended with status 1 ... RuntimeError: no memory in c.py"
    assert serving.status(records) == 1


@pytest.mark.parametrize(("name", "value"), [("room", 60000), ("held", 7.5)])
def test_a_server_with_another_cache(setup, name, value):
    setattr(serving_session.Server, name, value)
    records = records_of(setup)
    assert [x["status"] for x in records] == ["failed", "failed"] and "were" in records[0]["error"]
    assert serving_session.Server.stopped == 1


def test_a_failed_run_and_a_dead_server(setup, monkeypatch):
    def fail(*args):
        raise serving_client.BenchmarkError("1 of 2 requests failed")

    monkeypatch.setattr(serving_session, "run_point", fail)
    records = records_of(setup)
    assert [x["error"] for x in records] == ["1 of 2 requests failed", "after a failed run the server has ended"]


def test_runs_beyond_the_budget_are_skipped(setup):
    clock = Clock()
    budget = Budget(100, {"server start": 90, "server stop": 20}, clock)
    records = records_of(setup, budget=budget)
    assert [x["status"] for x in records] == ["skipped", "skipped"]
    assert records[0]["error"] == "100 s of 100 s left, about 110 s needed"
    assert serving.status(records) == 1
    together = []
    backends = [parse_backend("triton:bf16"), parse_backend("flashinfer:bf16")]
    serving_session.run_together(backends, (POINT,), setup, budget, together.append)
    assert [x["status"] for x in together] == ["skipped", "skipped"] and serving_session.Server.stopped == 0


def test_a_later_run_beyond_the_budget_is_skipped(setup, monkeypatch):
    clock = Clock()

    def run(*args):
        clock.now += 50
        return dict.fromkeys(serving_client.METRICS, 2.0)

    monkeypatch.setattr(serving_session, "run_point", run)
    records = records_of(setup, budget=Budget(100, clock=clock))
    assert [x["status"] for x in records] == ["ok", "skipped"]
    assert serving.status(records) == 0


def test_diffkv_figures_are_of_the_run():
    backend = parse_diffkv("a={}")
    (point,) = parse_load('batch={"requests": 2}').points()
    totals = {"requests": 1, "tokens": 10, "page_bytes": 50, "token_bytes": 40, "bf16_bytes": 200, "high": 6, "low": 4}
    after = {"finished": {name: 3 * value for name, value in totals.items()}}
    found = serving_session.cache_figures(backend, point, LLAMA, {"finished": totals}, after)
    assert (found["kv_bytes_per_token"], found["ratio_pages"], found["share_high"]) == (5.0, 0.25, 0.6)
    with pytest.raises(serving_client.BenchmarkError, match="finished 1 of 2"):
        serving_session.cache_figures(backend, point, LLAMA, {"finished": totals}, {
            "finished": {name: 2 * value for name, value in totals.items()}
        })  # fmt: skip
    with pytest.raises(serving_client.BenchmarkError, match="no DiffKV figures"):
        serving_session.cache_figures(backend, point, LLAMA, None, None)


def sample(setup):
    """Records of three stock backends and a failed one, as a report has them."""
    found = []
    for name, factor in (("flashinfer:bf16", 1.0), ("flashinfer:fp8_e4m3", 1.5), ("triton:bf16", 0.5)):
        serving_session.Server.room = 131072 if "fp8" in name else 65536
        for record in records_of(setup, [POINT], backend=name):
            found.append({**record, "output_throughput": 1000 * factor})
    found.append(serving_session.new_record(Backend("x", "x", "bf16"), POINT, "failed", error="a | b"))
    return with_ratios(found)


def test_table_rows_and_ratios(setup):
    bf16, fp8, triton, failed = records = sample(setup)
    assert (bf16["to_bf16"], fp8["to_bf16"], triton["to_fp8"]) == (1.0, 1.5, 0.5 / 1.5)
    assert failed["to_bf16"] is None
    assert row(fp8, records)[:4] == ["flashinfer fp8_e4m3", "1,500", "1.50", "1.00"]
    assert row(failed, records)[1] == "failed: a \\| b"
    assert {len(row(x, records)) for x in records} == {len(HEADER)}


def test_report_files(setup, tmp_path):
    load = LOADS["batch"]
    args = serving.parse_args(["--backends", "triton:bf16", "--output", str(tmp_path)])
    args.argv = []
    data = serving.describe(args, setup)
    data |= {"records": sample(setup), "loads": {"batch": {"title": load.title, "x_label": load.x_label}}}
    serving.write(data, tmp_path)
    path = tmp_path / "serving_llama3-8b.json"
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert "| flashinfer bf16 | 1,000 | 1.00 | 0.67 |" in text and "## batch: 128 requests" in text
    redraw.main([str(path)])
    assert path.with_suffix(".md").read_text(encoding="utf-8") == text
    assert (tmp_path / "serving_llama3-8b_batch.png").stat().st_size


def test_series_table_and_chart(setup, tmp_path):
    load = parse_load('arrivals={"rates": [1, 2]}')
    records = with_ratios(records_of(setup, load.points()))
    loads = {"arrivals": {"title": load.title, "x_label": load.x_label}}
    data = {"loads": loads, "records": records, "setup": {"model": "m", "kv_gib": 8.0}}
    lines = tables(data).splitlines()
    assert lines[2].startswith("| requests a second | backend |") and lines[5].startswith("| 2 | triton bf16 |")
    (path,) = serving.charts(data, tmp_path, "name")
    assert path.name == "name_arrivals.png" and path.is_file()
