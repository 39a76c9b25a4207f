"""The serving benchmark's command line, loads, equal memory and log lines."""

import argparse
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.provenance import command, without_paths
from benchmarks.serving import cli as serving
from benchmarks.serving import client as serving_client
from benchmarks.serving.backends import common_args, parse_backend, parse_diffkv
from benchmarks.serving.geometries import PRESETS, write_model
from benchmarks.serving.loads import LOADS, parse_load
from benchmarks.serving.log import parse_log
from benchmarks.serving.memory import GIB, KVShape, check_bytes, diffkv_footprint, diffkv_tokens, stock_tokens
from benchmarks.serving.report import medians, of_bound, spread, with_ratios
from benchmarks.serving.session import OK, log_name
from sglang_diffkv.config import load_config

LLAMA = KVShape(32, 8, 128, 32768, 128256, 32)

LOG_17 = """\
[2026-01-05 10:00:00] Prefill batch, #new-seq: 8, #new-token: 8192, #cached-token: 0, token usage: 0.00, \
#running-req: 0, #queue-req: 120, #pending-token: 122880, cuda graph: False, input throughput (token/s): 21.50
[2026-01-05 10:00:03] Decode batch, #running-req: 33, #token: 52000, token usage: 0.79, cuda graph: True, \
gen throughput (token/s): 4310.11, #queue-req: 95
[2026-01-05 10:00:04] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 3410, \
#new_token_ratio: 0.5214 -> 0.9310
[2026-01-05 10:00:05] Decode batch, #running-req: 31, #token: 51000, token usage: 0.78, cuda graph: True, \
gen throughput (token/s): 4190.40, #queue-req: 97
[2026-01-05 10:00:41] Decode batch, #running-req: 5, #token: 9000, token usage: 0.14, cuda graph: True, \
gen throughput (token/s): 900.00, #queue-req: 0
"""
LOG_21 = """\
[2026-11-21 11:20:44] Prefill batch, #new-seq: 1, #new-token: 290, #cached-token: 64, token usage: 0.01, \
#running-req: 0, #queue-req: 0, #pending-token: 0, cpu graph: False, input throughput (token/s): 766.26
[2026-11-21 11:20:44] Decode batch, #running-req: 1, #token: 295, token usage: 0.01, kv ratio: 0.438 (high 100%, low \
0%, pruned 0.0%), cpu graph: False, gen throughput (token/s): 11.14, #queue-req: 0
[2026-11-21 11:20:44] INFO:     127.0.0.1:41766 - "GET /server_info HTTP/1.1" 200 OK
"""


def test_log_lines_of_0_5_17():
    found = parse_log(LOG_17)
    assert (found.decode_lines, found.running_mean, found.running_max) == (3, 23.0, 33)
    assert found.running_saturated == 32.0
    assert (found.retracted, found.retractions) == (2, 1)
    assert (found.new_tokens, found.cached_tokens) == (8192, 0)


def test_log_lines_of_0_5_21():
    found = parse_log(LOG_21)
    assert (found.running_mean, found.running_saturated, found.cached_tokens) == (1.0, None, 64)


def test_log_without_decode_lines_gives_no_mean():
    found = parse_log("")
    assert (found.running_mean, found.running_max, found.retracted) == (None, None, 0)


def test_stock_tokens_in_equal_bytes():
    assert stock_tokens(8 * GIB, LLAMA, "bf16") == 65536
    assert stock_tokens(8 * GIB, LLAMA, "fp8_e4m3") == 131072
    with pytest.raises(ValueError, match="do not hold one bf16 token"):
        stock_tokens(1000, LLAMA, "bf16")


def test_ranks_share_heads_and_bytes():
    half = LLAMA.of_rank(2)
    assert (half.kv_heads, half.q_heads, half.layers) == (LLAMA.kv_heads // 2, LLAMA.q_heads // 2, LLAMA.layers)
    assert stock_tokens(4 * GIB, half, "bf16") == 65536
    with pytest.raises(ValueError, match="cannot be shared by 3"):
        LLAMA.of_rank(3)


@pytest.mark.parametrize("config", ["{}", '{"tiers": ["K8V4"]}', '{"tiers": ["BF16"]}'])
def test_diffkv_tokens_use_the_bytes_up(config):
    config = load_config(config)
    tokens = diffkv_tokens(8 * GIB, LLAMA, config, 128)
    held = [diffkv_footprint(count, LLAMA, config, 128).total for count in (tokens, tokens + 1)]
    assert held[0] <= 8 * GIB < held[1]
    check_bytes(held[0] / GIB, 8.0, 0.0)


def test_diffkv_tokens_refuse_too_few_bytes():
    with pytest.raises(ValueError, match="smallest pool"):
        diffkv_tokens(1000, LLAMA, load_config("{}"), 128)


def test_unequal_bytes_are_refused():
    check_bytes(8.1, 8.0, 0.002)
    with pytest.raises(ValueError, match=r"8\.300 GiB where 8\.000"):
        check_bytes(8.3, 8.0, 0.002)


def test_geometry_folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = write_model(tmp_path / "llama", PRESETS["llama3-8b"])
    assert KVShape.of(model) == LLAMA
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = [5, 128255, 2, 2, 70000]
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids
    with pytest.raises(ValueError, match=r"no config\.json"):
        KVShape.of(tmp_path)


def test_layers_that_have_states_hold_no_keys(tmp_path):
    pytest.importorskip("tokenizers")
    preset = replace(PRESETS["qwen3.5-9b"], vocab=100)
    assert KVShape.of(write_model(tmp_path, preset)) == KVShape(8, 4, 256, 32768, 100, 16, stateful=24)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["layer_types"][:5] == [*["linear_attention"] * 3, "full_attention", "linear_attention"]


def test_loads_become_client_arguments():
    (point,) = parse_load('batch={"requests": 4, "input": 64, "output": 32, "concurrency": 2}').points()
    assert "--num-prompts 4 --random-input-len 64 --random-output-len 32" in " ".join(point.args)
    assert point.args[-2:] == ("--max-concurrency", "2")
    assert (point.shortest_output, point.args[point.args.index("--random-range-ratio") + 1]) == (32, "1.0")
    (mixed,) = parse_load("mixed").points()
    ratio = float(mixed.args[mixed.args.index("--random-range-ratio") + 1])
    assert (int(ratio * mixed.input), mixed.shortest_output, mixed.output) == (1, 1, 1024)
    assert "1 to 4096 + 1 to 1024 tokens" in LOADS["mixed"].title
    prefix = parse_load('prefix={"groups": [1, 8], "requests": 16}').points()
    assert [p.x for p in prefix] == [1, 8] and [p.key for p in prefix] == ["prefix 1 groups", "prefix 8 groups"]
    assert prefix[1].args[prefix[1].args.index("--gsp-prompts-per-group") + 1] == "2"
    rates = parse_load('arrivals={"rates": [0.5, 4], "seconds": 10}').points()
    assert [p.requests for p in rates] == [5, 40] and rates[0].args[-2:] == ("--request-rate", "0.5")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nosuch", "unknown load"),
        ('batch={"length": 1}', "unknown fields"),
        ('batch={"requests": 0}', "positive"),
        ('batch={"requests": 1.5}', "whole number"),
        ("batch=[1]", "object"),
        ("batch={", "batch="),
        ('prefix={"groups": [3]}', "evenly"),
        ('arrivals={"rates": [4, 2]}', "rise"),
    ],
)
def test_impossible_loads_are_refused(text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse_load(text)


@pytest.mark.parametrize(
    ("load", "lengths", "good"),
    [
        ('batch={"requests": 2, "output": 8}', [8, 8], True),
        ('batch={"requests": 2, "output": 8}', [8, 7], False),
        ('mixed={"requests": 2, "output": 8}', [8, 1], True),
        ('mixed={"requests": 2, "output": 8}', [9, 1], False),
        ('mixed={"requests": 2, "output": 8}', [8, 0], False),
    ],
)
def test_answers_have_the_lengths_that_were_asked(load, lengths, good):
    (point,) = parse_load(load).points()
    metrics = dict.fromkeys(serving_client.METRICS, 1.0)
    result = {**metrics, "errors": [""], "output_lens": lengths, "completed": 2, "ttfts": [0.1, 0.1]}
    if good:
        serving_client.check_result(result, point)
        return
    with pytest.raises(serving_client.BenchmarkError, match="do not have"):
        serving_client.check_result(result, point)


def test_client_knows_the_arguments():
    source = Path(importlib.util.find_spec(serving_client.benchmark_module()).origin).read_text(encoding="utf-8")
    for load in LOADS.values():
        args = serving_client.client_args(1, "model", load.points()[0], 0, Path("out"))
        assert not [flag for flag in args if flag.startswith("--") and f'"{flag}"' not in source]


def test_logs_of_servers_with_many_flags_have_names_of_their_own():
    flags = " --cuda-graph-bs-prefill " + " ".join(map(str, range(256, 8193, 256)))
    names = [log_name(x) for x in ("fa3 bf16", "a/b", "w188" + flags, "w188" + flags + " 9000")]
    assert names[:2] == ["fa3_bf16.log", "a_b.log"]
    assert len(set(names)) == 4 and max(map(len, names)) < 140


def test_common_arguments():
    args = common_args(64, 40, dummy=True, gpu=True, known=frozenset(["--disable-prefill-cuda-graph"]))
    assert args[-1] == "--disable-prefill-cuda-graph" and "dummy" in args
    assert "--disable-prefill-cuda-graph" not in common_args(64, 40, dummy=True, gpu=True, known=frozenset())
    assert "--mem-fraction-static" not in common_args(64, 40, dummy=False, gpu=False, known=frozenset())


def test_backends():
    fp8 = parse_backend("flashinfer:fp8_e4m3")
    assert fp8.server_args(100) == ["--max-total-tokens", "100", "--kv-cache-dtype", "fp8_e4m3"]
    assert parse_backend("triton").dtype == "bf16"
    mixed = parse_diffkv('a3={"policy": {"name": "diffkv", "alpha_high": 3.0}}')
    assert json.loads(mixed.config_json())["policy"]["alpha_high"] == 3.0
    assert mixed.server_args(100) == ["--max-total-tokens", "100"]
    for parse, text in ((parse_backend, "triton:int3"), (parse_backend, "diffkv:bf16"), (parse_diffkv, "a=1")):
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)
    with pytest.raises(argparse.ArgumentTypeError, match="nosuch"):
        parse_diffkv('a={"nosuch": 1}')


def test_flags_in_a_backend_s_name_are_for_its_server_alone():
    stock = parse_backend("fa3:fp8_e4m3 --chunked-prefill-size 2048 --enable-mixed-chunk")
    assert (stock.name, stock.dtype) == ("fa3 fp8_e4m3 --chunked-prefill-size 2048 --enable-mixed-chunk", "fp8_e4m3")
    assert stock.flags == ("--chunked-prefill-size", "2048", "--enable-mixed-chunk")
    ours = parse_diffkv("small chunks --chunked-prefill-size 2048={}")
    assert ours.flags == ("--chunked-prefill-size", "2048") and ours.name != parse_diffkv("small chunks={}").name
    assert parse_diffkv('one --mem-fraction-static=0.9={"page_tokens": 16}').flags == ("--mem-fraction-static=0.9",)
    assert parse_backend("fa3:bf16").flags == parse_diffkv("a - b={}").flags == ()


def test_command_line():
    args = serving.parse_args(["--backends", "triton:bf16", "--diffkv", "a={}", "--load", "batch", "--load", "prefix"])
    assert [x.name for x in args.candidates] == ["triton bf16", "a"]
    assert [x.name for x in args.loads] == ["batch", "prefix"]
    assert [x.name for x in serving.parse_args(["--backends", "--diffkv", "a={}"]).candidates] == ["a"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--backends"],
        ["--diffkv", "a={}", "--diffkv", "a={}"],
        ["--load", "batch", "--load", 'batch={"requests": 1}'],
        ["--pinned", "nosuch.json"],
        ["--geometry", "llama3-8b", "--model", "x"],
    ],
)
def test_command_line_refuses(argv, capsys):
    with pytest.raises(SystemExit):
        serving.parse_args(argv)
    assert capsys.readouterr().err


def test_paths_are_cut():
    assert without_paths("--model /data/models/nano --output results/x") == "--model nano --output results/x"
    assert without_paths("http://127.0.0.1:1/x a/b 1/2 ~/x") == "http://127.0.0.1:1/x a/b 1/2 ~/x"
    assert command("serving", ["--model", "/a/b/nano"]) == "python -m benchmarks.serving --model nano"


def test_running_requests_against_what_bytes_allow():
    point = {"status": OK, "load": "batch", "label": ""}
    stock = {**point, "dtype": "bf16", "running_saturated": 33.0, "ratio_pages": 1.0}
    mine = {**point, "dtype": "diffkv", "running_saturated": 99.0, "ratio_pages": 0.3}
    assert of_bound([stock, mine], stock) == 1.0
    assert of_bound([stock, mine], mine) == pytest.approx(0.9)
    assert of_bound([mine], mine) is None
    assert of_bound([stock, mine], {**mine, "running_saturated": None}) is None
    assert of_bound([stock, mine], {**mine, "label": "16"}) is None, "another point of the load"


def test_runs_of_a_load_become_their_medians():
    """Ratios are those of the medians; a run that failed does not count, and where all did its reason stands."""

    def record(backend: str, dtype: str, run: int, throughput: float, status: str = OK) -> dict[str, object]:
        figures = {"output_throughput": throughput, "running_max": 10 + run, "median_itl_ms": None if run else 3.0}
        place = {"backend": backend, "dtype": dtype, "load": "batch", "label": "", "run": run, "status": status}
        return {**place, "error": f"run {run}", **(figures if status == OK else {})}

    records = [record("stock", "bf16", run, x) for run, x in enumerate((100.0, 90.0, 140.0))]
    records += [record("ours", "diffkv", run, x) for run, x in enumerate((300.0, 200.0))]
    records += [record("ours", "diffkv", 2, 0.0, "failed"), record("lost", "diffkv", 0, 0.0, "failed")]
    stock, ours, lost = medians(with_ratios(records))
    assert (stock["output_throughput"], stock["least"], stock["most"], stock["runs"]) == (100.0, 90.0, 140.0, 3)
    assert stock["running_max"] == 11 and stock["median_itl_ms"] == 3.0
    assert ours["output_throughput"] == 250.0 and ours["to_bf16"] == 2.5 and ours["runs"] == 2
    assert lost["status"] == "failed" and "runs" not in lost
    assert medians(with_ratios(records[:1])) == with_ratios(records[:1])
    assert spread(ours) == " (200 to 300, n 2)" and spread(lost) == ""
