"""``python -m sglang_diffkv.capacity``: what it reads, what it counts, and that it agrees with the doctor and with
what servers were measured to do."""

from __future__ import annotations

import csv
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.paths import NANO, REPOSITORY
from benchmarks.serving.geometries import PRESETS
from sglang_diffkv.capacity import cli, held
from sglang_diffkv.capacity.gpus import GPUS
from sglang_diffkv.capacity.held import CLIP, Holding, StockHolding, reached, running, tier_shares
from sglang_diffkv.capacity.memory import budget_of, capacity_of, plan_of, static_fraction
from sglang_diffkv.capacity.model import Model, read_model
from sglang_diffkv.capacity.speed import Kind, speed_of
from sglang_diffkv.capacity.trace import Request, Trace, found_tokens, hit_rates, read_trace
from sglang_diffkv.config import DiffKVConfig, load_config
from sglang_diffkv.layout.spans import retained_tokens
from sglang_diffkv.mem_pool.growth import GROWTH_MARGIN

WINDOW_188 = (
    '{"page_tokens": 16, "rotate": "both", '
    '"policy": {"name": "diffkv", "alpha_high": 1e9, "window": 188, "sinks": 4}}'
)  # fmt: skip
RESULTS = REPOSITORY / "benchmarks" / "results"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A folder with a ``config.json``: Llama-3-8B's with other fields, or those given alone."""

    def written(*, alone: bool = False, **fields: Any) -> Path:
        config = fields if alone else {**PRESETS["llama3-8b"].config(), **fields}
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return tmp_path

    return written


def plan_json(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert cli.main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# What is given


@pytest.mark.parametrize(
    ("text", "tokens"), [("1", 1), ("4096", 4096), ("32k", 32768), ("1.5K", 1536), ("1m", 1 << 20)]
)
def test_lengths(text: str, tokens: int) -> None:
    assert cli.length(text) == tokens


GOOD = ["--model", str(NANO), "--gpu", "h100-80gb", "--context", "1k", "--reply", "1k"]
BAD = {
    "no number": (["--context", "32q"], '"32q" is no number of tokens from 1 to'),
    "negative": (["--context=-5"], '"-5" is no number of tokens'),
    "nan": (["--reply", "nan"], '"nan" is no number of tokens'),
    "part of a token": (["--reply", "0.5"], '"0.5" is no number of tokens'),
    "nan gib": (["--kv-gib", "nan"], '--kv-gib: "nan" is not a number from 0.001'),
    "ranks": (["--tp", "0"], '"0" is not a whole number from 1 to 1,024'),
    "share": (["--high-share", "1.5"], '"1.5" is not a number from 0 to 1'),
    "unknown gpu": (["--gpu", "h101-80gb"], "did you mean h100-80gb? Known are h100-80gb, h200-141gb, a100-40gb"),
    "two gpus": (["--gpu", "a100"], '"a100" is several: name its memory too. Known are'),
    "no model": (["--model", "/no/such"], "no config.json there"),
    "no trace": (["--trace", "/no/such"], '--trace "/no/such" cannot be read: No such file or directory'),
    "chart": (["--chart", "plan.gif"], '"plan.gif" ends in neither .png nor .svg'),
    "too long": (["--context", "8k"], "more than the 8,192 tokens of the model"),
    "impossible tiers": (["--config", 'mine={"tiers": ["K9V4"]}'], "impossible tier K9V4"),
    "no preset": (
        ["--config", "saff"],
        '--config "saff" is no preset (auto, lossless, careful, safe, balanced, small), JSON or file; did you mean "',
    ),
    "no preset behind a name": (["--config", "x=saff"], '--config "x": "saff" is no preset (auto, lossless, '),
    "a name of ours": (["--config", "default={}"], '"default" is taken'),
    "two lines": (["--config", "a\nb={}"], '"a\\nb": a NAME has letters'),
    "states": (["--state-mib", "1e6"], "states of 1,000,000.00 MiB a request leave room for none in"),
    "unknown to a plan": (["--config", '{"tiers":["K8V4"],"policy":{"name":"h2o","budget":96}}'], "h2o: what it"),
    "cannot be shared": (["--tp", "3"], "4 query and 2 KV heads, which so many ranks cannot share"),
    "host without trace": (["--host-gib", "5"], "--host-gib is for hit rates: give a --trace"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "said"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: Any = cli.main([*GOOD, *args])
    except SystemExit as end:
        status = end.code
    found = capsys.readouterr()
    assert status == 2 and not found.out
    (line,) = found.err.splitlines()
    assert line.startswith("sglang_diffkv.capacity: ") and said in line


def test_a_reader_that_has_seen_enough() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as pipe:
        command = [sys.executable, "-m", "sglang_diffkv.capacity", *GOOD]
        found = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False, cwd=REPOSITORY)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("missing", ["--gpu", "--context"])
def test_what_is_needed(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    at = GOOD.index(missing)
    with pytest.raises(SystemExit) as end:
        cli.main([*GOOD[:at], *GOOD[at + 2 :]])
    assert end.value.code == 2 and f"give {missing}" in capsys.readouterr().err


GDN = {"model_type": "qwen3_next", "linear_num_value_heads": 8, "linear_value_head_dim": 128,
       "linear_num_key_heads": 8, "linear_key_head_dim": 128}  # fmt: skip
MODELS = {
    "heads": ({"num_attention_heads": None}, "num_attention_heads is missing"),
    "no number": ({"num_hidden_layers": "12"}, "num_hidden_layers is no such number"),
    "mla": ({"kv_lora_rank": 512}, "multi-head latent attention (MLA)"),
    "head size": ({"head_dim": 80}, "head_dim 80 is not one of"),
    "bits": ({"quantization_config": {"quant_method": "new"}}, 'the bits of quantization "new" are not known'),
    "states": ({"model_type": "x", "layer_types": ["mamba"] * 31 + ["full_attention"]}, "give the MiB", ),
    "states alone": ({"layer_types": ["mamba"] * 32}, "no layer with keys and values"),
    "layers": ({"num_hidden_layers": 1 << 24}, "num_hidden_layers is no such number"),
    "vocabulary": ({"vocab_size": 10**400}, "vocab_size is more than"),
    "experts": ({"num_experts": 8, "moe_intermediate_size": 10**400}, "moe_intermediate_size is more than"),
    "state as text": ({**GDN, "linear_key_head_dim": "128"}, "qwen3_next, linear_key_head_dim. Give --state-mib"),
    "state beyond any": ({**GDN, "linear_conv_kernel_dim": 10**400}, "qwen3_next, linear_conv_kernel_dim. Give"),
    "state of a part": ({**GDN, "linear_value_head_dim": 1.5}, "qwen3_next, linear_value_head_dim. Give"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "said"), MODELS.values(), ids=MODELS.keys())
def test_a_model_that_cannot_be_planned(
    fields: dict[str, Any], said: str, write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--model", str(write(**fields)), "--gpu", "h200", "--context", "1k", "--reply", "1k"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said.lower() in line.lower()


ODD = {
    "a window beyond any": {"model_type": "gemma3_text", "sliding_window": 10**400},
    "no numbers of layers": {"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [{}, "x"]},
    "code beside it": {"text_config": PRESETS["llama3-8b"].config(), "auto_map": {"AutoConfig": "mine.Mine"}},
}


@pytest.mark.parametrize("fields", ODD.values(), ids=ODD.keys())
def test_an_odd_file_that_can_be_planned(
    fields: dict[str, Any],
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append("input") or "y")
    folder = write(**{"model_type": "mine", **fields})
    (folder / "mine.py").write_text("raise SystemExit('run')\n")
    plan_json(capsys, "--model", str(folder), "--gpu", "h200", "--context", "1k", "--reply", "1k")
    assert not asked, "somebody is asked whether to run a model's code"


@pytest.mark.parametrize("stated", ["1" + "0" * 400, "1e999", "NaN", "-5", '"5"'])
def test_an_index_without_a_size(stated: str, write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = write()
    (folder / "model.safetensors.index.json").write_text(f'{{"metadata": {{"total_size": {stated}}}}}')
    plan = plan_json(capsys, "--model", str(folder), "--gpu", "h200", "--context", "1k", "--reply", "1k")
    assert "counted from config.json" in json.dumps(plan)


@pytest.mark.parametrize("content", ["[1]", "{", '{"a": 1, "a": 2}', "\x00"])
def test_a_file_that_is_no_configuration(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(content)
    assert cli.main([*GOOD, "--model", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_text_model_within_another_leaves_out_what_is_usual(write: Callable[..., Path]) -> None:
    """As Gemma 3's file does: heads are transformers' defaults."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    more = {"text_config": {**text, "sliding_window": 1024}, "time_step_limit": [0.0, float("inf")]}
    folder = write(alone=True, model_type="gemma3", vision_config={"hidden_size": 1152}, **more)
    model = read_model(str(folder))
    assert (model.query_heads, model.kv_heads, model.head_dim, model.layers) == (8, 4, 256, 34)
    assert sum(map(bool, model.spans)) == 29 and "without the vision model's" in model.weights.source
    assert model.weights.total / 1e9 == pytest.approx(2 * 3.88, rel=0.02)


def test_an_index_says_how_large_weights_are(write: Callable[..., Path]) -> None:
    folder = write()
    index = {"metadata": {"total_size": 12345}, "weight_map": {f"layer.{x}": "file" for x in range(1000)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_model(str(folder)).weights.total == 12345


# Weights

MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "vocab_size": 151936, "num_experts": 128, "head_dim": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "tie_word_embeddings": False,
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
GROUPS = {"group_0": {"weights": {"num_bits": 8, "group_size": None}}}


@pytest.mark.parametrize(
    ("fields", "billions"),
    [
        ({**PRESETS["llama3-8b"].config()}, 16.06),
        ({**PRESETS["qwen2.5-32b"].config()}, 65.5),
        (MIXTRAL, 93.4),
        (QWEN3_MOE, 61.1),
        ({**PRESETS["llama3-8b"].config(), "tie_word_embeddings": True}, 16.06 - 1.05),
        ({**PRESETS["llama3-8b"].config(), "quantization_config": {"quant_method": "fp8"}}, 9.08),
        ({**PRESETS["llama3-8b"].config(), "quantization_config": AWQ}, 5.7),
        (
            {
                **PRESETS["llama3-8b"].config(),
                "quantization_config": {"quant_method": "compressed-tensors", "config_groups": GROUPS},
            },
            9.08,
        ),
    ],
)
def test_weights_counted_from_the_configuration(
    fields: dict[str, Any], billions: float, write: Callable[..., Path]
) -> None:
    """Within a per cent of the sizes that are published with these models: norms and biases are left out."""
    assert read_model(str(write(alone=True, **fields))).weights.total / 1e9 == pytest.approx(billions, rel=0.01)


def test_experts_that_steps_read(write: Callable[..., Path]) -> None:
    """One request reads those of its token, many read all."""
    weights = read_model(str(write(alone=True, **QWEN3_MOE))).weights
    tables = 2 * QWEN3_MOE["vocab_size"] * QWEN3_MOE["hidden_size"]  # type: ignore[operator]
    assert weights.products + tables == pytest.approx(3.35e9, rel=0.02), "3.3B active parameters are published"
    assert weights.read_by(1) == pytest.approx(weights.active)
    assert weights.active < weights.read_by(8) < weights.read
    assert weights.read_by(1000) == pytest.approx(weights.read)


def test_files_beside_the_configuration_say_how_large_weights_are() -> None:
    model = read_model(str(NANO))
    assert model.weights.total == (NANO / "model.safetensors").stat().st_size
    assert "files" in model.weights.source


def test_quantisation_beside_the_configuration(write: Callable[..., Path]) -> None:
    """As ModelOpt writes it."""
    folder = write()
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert read_model(str(folder)).weights.total == pytest.approx(9.08e9, rel=0.01)


# Memory


def test_what_sglang_leaves() -> None:
    """Its estimate for these GPUs: 512 MiB, 1.5 MiB a token of a chunk, graphs, ranks."""
    assert static_fraction(GPUS["h100-80gb"], 1) == 0.83 and static_fraction(GPUS["h200-141gb"], 1) == 0.903
    assert static_fraction(GPUS["a100-40gb"], 1) == 0.821 and static_fraction(GPUS["l4-24gb"], 1) == 0.817


@pytest.fixture
def llama(write: Callable[..., Path]) -> Model:
    return read_model(str(write()))


def test_more_requests_than_graphs_is_told(llama: Model, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", str(llama.path.parent), "--gpu", "h100", "--reply", "1k"]
    for context, told in (("1k", True), ("30k", False)):
        said = " ".join(plan_json(capsys, *args, "--context", context)["assumptions"])
        assert ("Beyond 256 requests SGLang decodes without CUDA graphs" in said) == told


def test_the_end_of_sglang_s_table_of_requests_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Where it is what bounds those that run, and not memory, nor what was asked for."""
    args = ["--model", str(NANO), "--reply", "32", "--context", "64"]
    for more, told in ((["--kv-gib", "40"], True), (["--kv-gib", ".02"], False)):
        found = plan_json(capsys, *args, *more)
        said = " ".join(found["assumptions"])
        assert ("SGLang's table of requests ends at 4,096 (bf16, fp8_e4m3, default" in said) == told
        assert (found["settings"]["default"]["running_together"] == 4096) == told
    found = plan_json(capsys, *args, "--kv-gib", "40", "--max-running-requests", "9000")
    assert found["settings"]["default"]["running_together"] == 9000
    assert "table of requests" not in " ".join(found["assumptions"])


def test_budgets(llama: Model) -> None:
    gpu = GPUS["h100-80gb"]
    one, two = (budget_of(llama, gpu, ranks).cache for ranks in (1, 2))
    assert two - one == pytest.approx(llama.weights.total / 2, rel=0.05)
    given = budget_of(llama, gpu, 1, fraction=0.9).cache - one
    assert given == pytest.approx(0.07 * gpu.mib * 2**20, rel=0.02)
    assert budget_of(llama, None, 1, kv_gib=8).cache == 8 << 30


def test_weights_that_leave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*GOOD, "--weights-gb", "200"]) == 2
    assert "nothing is left for keys and values" in capsys.readouterr().err


def test_ranks_share_heads(llama: Model, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has half of the heads, so twice as many tokens fit in the same bytes of each."""
    args = ["--model", str(llama.path.parent), "--kv-gib", "8", "--context", "4k", "--reply", "1k"]
    one, two = (plan_json(capsys, *args, "--tp", str(x))["settings"] for x in (1, 2))
    for name in one:
        assert two[name]["tokens"] == pytest.approx(2 * one[name]["tokens"], rel=0.02)


def test_sliding_layers_hold_their_window(write: Callable[..., Path]) -> None:
    """Of gpt-oss's kind, every second layer."""
    kinds = ["sliding_attention", "full_attention"] * 16
    model = read_model(str(write(model_type="gpt_oss", sliding_window=128, layer_types=kinds)))
    assert model.spans == (128, 0) * 16
    plan = plan_of(model, load_config('{"tiers": ["K8V4"]}'), 1)
    full = Holding(replace(plan, attention_spans=()), 10**6).tokens(8192, 1024)
    found = Holding(plan, 10**6).tokens(8192, 1024)
    assert full / 2 < found < (full + retained_tokens(128) + 64) / 2
    assert StockHolding(10**6, 1, model.spans).tokens(8192, 1024) == (128 + 9216) / 2


@pytest.mark.parametrize(
    ("fields", "sliding"),
    [
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 6}, 27),
        ({"model_type": "gemma2", "sliding_window": 4096}, 16),
        ({"model_type": "mistral", "sliding_window": 4096}, 0),
        ({"model_type": "qwen2", "sliding_window": 4096, "layer_types": ["sliding_attention"] * 32}, 0),
    ],
)
def test_windows_that_sglang_reads(fields: dict[str, Any], sliding: int, write: Callable[..., Path]) -> None:
    assert sum(map(bool, read_model(str(write(**fields))).spans)) == sliding


def test_states_are_set_aside(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """By SGLang's rule: nine parts of nineteen, three slots a request, one more for padding."""
    folder = write(
        model_type="qwen3_next", full_attention_interval=4, linear_num_value_heads=32, linear_num_key_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    )  # fmt: skip
    model = read_model(str(folder))
    assert (model.layers, model.stateful) == (8, 24)
    size = model.state_bytes(1)
    assert size == 24 * (2 * 3 * (4096 + 2 * 2048) + 4 * 32 * 128 * 128)
    args = ["--model", str(folder), "--kv-gib", "19", "--context", "4k", "--reply", "1k"]
    found = plan_json(capsys, *args)
    assert found["cache_bytes"] == pytest.approx(10 << 30, rel=0.01)
    slots = int((9 << 30) / size) - 1
    assert found["settings"]["default"]["max_running_requests"] == pytest.approx(slots // 3, abs=1)


# What requests hold


def test_the_shares_of_thresholds() -> None:
    assert [reached(x) for x in (0.0, 1.0, 3.0, 5.0, 1e9)] == [1.0, 0.67, 0.38, 0.24, 0.0]
    assert 0.38 < reached(2.0) < 0.67 and reached(0.5) == 0.67


def thresholds(*tiers: str, between: object = (), high: float = 20.0, **fields: Any) -> DiffKVConfig:
    policy = {"name": "diffkv", "alpha_high": high, "alpha_between": between, "window": 64, **fields}
    return load_config(json.dumps({"tiers": tiers, "rotate": "both", "policy": policy}))


LISTS: dict[str, tuple[object, float, float | None, tuple[float, ...], bool]] = {
    "measured": ([[20.0] * 11 + [0.0]], 20.0, None, (0.24, 0.76 / 12, 0.76 * 11 / 12), True),
    "half is high": ([[20.0] * 11 + [0.0]], 20.0, 0.5, (0.5, 0.5 / 12, 0.5 * 11 / 12), True),
    "hardly any is high": ([[20.0] * 11 + [0.0]], 20.0, 0.005, (0.005, 0.995 / 12, 0.995 * 11 / 12), True),
    "none is high": ([[20.0] * 11 + [0.0]], 20.0, 0.0, (0.0, 1 / 12, 11 / 12), False),
    "certain": ([[1e9, 0.0, 0.0]], 1e9, None, (0.0, 2 / 3, 1 / 3), False),
    "certain, whatever is given": ([[1e9, 0.0, 0.0]], 1e9, 0.5, (0.0, 2 / 3, 1 / 3), False),
    "all is high": ([[0.0, 0.0]], 0.0, 0.5, (1.0, 0.0, 0.0), False),
    "both low tiers in a layer": ([[3.0, 1.0]], 3.0, None, (0.38, 0.29 / 2, 0.62 / 2 + 0.33 / 2), True),
    "more high than would reach the second": ([[3.0, 1.0]], 3.0, 0.8, (0.8, 0.0, 0.2), True),
    "one for all layers": ([20.0], 20.0, 0.005, (0.005, 0.0, 0.995), True),
    "four tiers": ([[20.0, 0.0], [0.0, 0.0]], 20.0, 0.5, (0.5, 0.25, 0.25, 0.0), True),
}
"""``alpha_between``, ``alpha_high``, ``--high-share``; the shares, and whether they were measured."""


@pytest.mark.parametrize(("between", "high", "given", "shares", "measured"), LISTS.values(), ids=LISTS.keys())
def test_the_shares_of_thresholds_by_layer(
    between: object, high: float, given: float | None, shares: tuple[float, ...], measured: bool
) -> None:
    tiers = ("K8V6", "K6V4", "K5V4", "K4V2")[: len(shares)]
    found, by_chance = tier_shares(thresholds(*tiers, between=between, high=high), given)
    assert found == pytest.approx(shares) and by_chance == measured


@pytest.mark.parametrize("given", [None, 0.0, 0.005, 0.05, 0.5, 1.0])
@pytest.mark.parametrize(("prompt", "reply"), [(512, 128), (1024, 256), (4096, 512)])
def test_layers_hold_what_they_would_hold_of_two_tiers(
    prompt: int, reply: int, given: float | None, llama: Model
) -> None:
    """A layer that uses one low tier holds what it would without the other, also beside layers with a window."""
    lower, upper = thresholds("K8V6", "K5V4"), thresholds("K8V6", "K6V4")
    mixed = thresholds("K8V6", "K6V4", "K5V4", between=[[20.0] * 24 + [0.0] * 8])

    def held(config: DiffKVConfig, spans: tuple[int, ...]) -> float:
        plan = replace(plan_of(llama, config, 1), attention_spans=spans)
        return Holding(plan, 10**6, given).tokens(prompt, reply)

    low, high = held(lower, ()), held(upper, ())
    assert held(mixed, ()) == held(mixed, (0,) * 32) == pytest.approx((3 * low + high) / 4)
    slides = held(lower, (256,) * 32)
    assert held(mixed, (0,) * 16 + (256,) * 16) == pytest.approx((low + slides) / 2)
    assert held(mixed, (256,) * 16 + (0,) * 16) == pytest.approx((2 * slides + low + high) / 4)


@pytest.mark.parametrize(("text", "bytes_a_token"), [(WINDOW_188, 30704), ('{"page_tokens": 16}', 32554)])
def test_bytes_that_servers_held_on_gpus(text: str, bytes_a_token: int, llama: Model) -> None:
    """1,024 + 1,024 tokens, as ``serving.csv`` has them; weights there were dummies, which let no token but the newest
    and the sinks stay high."""
    with (RESULTS / "serving.csv").open() as file:
        measured = {
            int(x["KV B/token"])
            for x in csv.DictReader(file)
            if x["KV B/token"] and x["load"].startswith("batch") and "1024 + 1024" in x["load"]
        }
    assert bytes_a_token in measured
    plan = plan_of(llama, load_config(text), 1)
    assert Holding(plan, 10**6, 0.0).bytes_of(1024, 1024) / 2048 == pytest.approx(bytes_a_token, rel=0.002)


SETTINGS: dict[str, tuple[Kind, str]] = {
    "fa3 bf16": ("bf16", ""),
    "fa3 fp8_e4m3": ("fp8", ""),
    "window 188 alone, nothing dropped": ("diffkv", WINDOW_188),
    "default": ("diffkv", "{}"),
}
"""Of servers that never dropped a token: the cache, and the configuration."""


def _stationary() -> Iterator[tuple[Kind, str, dict[str, str]]]:
    """Their rows, with others always waiting, as their pages are now."""
    with (RESULTS / "stationary.csv").open() as file:
        for row in csv.DictReader(file):
            if row["backend"] in SETTINGS and row["status"] == "ok":
                yield *SETTINGS[row["backend"]], row


def test_servers_that_were_measured_on_gpus(llama: Model) -> None:
    """Requests that run: within 10%, with the share of high tokens that a plan takes by itself. Tokens a second:
    within the range."""
    rows = list(_stationary())
    assert {config for _, config, _ in rows} == {"", WINDOW_188, "{}"} and len(rows) >= 9
    for kind, config, row in rows:
        capacity, prompt, reply = (int(row[x]) for x in ("capacity_tokens", "prompt", "output_tokens"))
        size = {"bf16": 131072, "fp8": 65536}.get(kind, 0)
        plan = plan_of(llama, load_config(config), 1) if config else None
        holding = Holding(plan, capacity) if plan else StockHolding(capacity, size)
        assert running(holding, prompt, reply, None).mean == pytest.approx(float(row["running_mean"]), rel=0.1)
        gpu = GPUS["h100-80gb" if "H100" in row["hardware"] else "h200-141gb"]
        found = speed_of(llama, gpu, 1, kind, holding, float(row["running_mean"]), prompt, reply)
        assert found.decode[0] <= float(row["tokens_per_s"]) <= found.decode[1]


def test_a_request_that_does_not_fit_does_not_run(llama: Model) -> None:
    assert running(StockHolding(1000, 1), 900, 200, None) == running(StockHolding(1000, 1), 2000, 1, None)
    assert running(StockHolding(1000, 1), 900, 200, None).together == 0
    assert running(StockHolding(10**6, 1), 900, 100, 7).together == 7, "SGLang's limit holds"
    plan = plan_of(llama, load_config("{}"), 1)
    assert running(Holding(plan, 4096), 8192, 100, None).together == 0, "a prompt has to fit before it is compressed"


# Traces

HAND_MADE = [
    {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 1, "input_length": 1024, "output_length": 5, "hash_ids": [1, 3]},
    {"timestamp": 2, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 3, "input_length": 1024, "output_length": 5, "hash_ids": [9, 2]},
]
"""Blocks of 512: with room for all, request 2 finds its first block, request 3 both (700 tokens), request 4 none: block
2 is behind another prefix there."""


@pytest.mark.parametrize(
    ("capacity", "found"),
    [
        (1 << 20, 512 + 700),
        # Of [1, 2] then [1, 3] the oldest leaf goes: 2. So request 3 finds block 1 alone.
        (1024, 512 + 512),
        # One block: a request's first, which the next one begins with too.
        (512, 512 + 512),
        (0, 0),
    ],
)
def test_what_a_cache_finds(capacity: int, found: int) -> None:
    requests = tuple(Request(x["input_length"], 5, tuple(x["hash_ids"])) for x in HAND_MADE)  # type: ignore[arg-type]
    assert found_tokens(Trace(requests), capacity) == found


def test_a_host_tier_finds_the_rest() -> None:
    requests = tuple(Request(512, 5, (x,)) for x in (1, 2, 3, 1, 3))
    rates = hit_rates(Trace(requests), 1024, 512)
    assert (rates.gpu, rates.host) == (1 / 5, 1 / 5)


def test_a_trace_decides_lengths_and_hit_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl.xz"
    path.write_bytes(lzma.compress("\n".join(map(json.dumps, HAND_MADE)).encode()))
    assert read_trace(path).mean_prompt == 943
    found = plan_json(capsys, "--model", str(NANO), "--gpu", "h100", "--trace", str(path), "--host-gib", "1")
    assert (found["prompt"], found["reply"]) == (943, 5)
    every = sum(int(str(x["input_length"])) for x in HAND_MADE)
    assert {x["hit_rate_gpu"] for x in found["settings"].values()} == {(512 + 700) / every}
    assert {x["hit_rate_host"] for x in found["settings"].values()} == {0.0}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is no JSON"),
        ('{"input_length": ' + "9" * 5000 + "}", "line 2 is no JSON"),
        ("[1]", "line 2 is no object"),
        ('{"input_length": -1, "output_length": 1, "hash_ids": []}', "line 2: input_length"),
        ('{"input_length": 1, "output_length": NaN, "hash_ids": []}', "line 2: input_length"),
        ('{"input_length": 1, "output_length": 1, "hash_ids": ["a"]}', "line 2: hash_ids"),
        ('{"input_length": 512, "output_length": 1, "hash_ids": [1, 2]}', "line 2: 2 hash_ids for 512 tokens"),
    ],
)
def test_a_broken_line_of_a_trace_is_named(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(HAND_MADE[0]) + "\n" + line + "\n")
    assert cli.main([*GOOD, "--trace", str(path)]) == 2
    (text,) = capsys.readouterr().err.splitlines()
    assert said in text


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe"])
def test_a_trace_without_requests(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    assert cli.main([*GOOD, "--trace", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# What is printed


def test_the_table_and_the_chart(llama: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", str(llama.path.parent), "--context", "8k", "--reply", "1k", "--config", "mine=" + WINDOW_188]
    for name, head in (("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml")):
        assert cli.main([*args, "--gpu", "h100-80gb", "--chart", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(head)
    out = capsys.readouterr().out
    lines = {x.split("  ")[0]: x for x in out.splitlines()}
    assert {"bf16", "fp8_e4m3", "default", "K8V4", "window 64", "mine"} <= set(lines)
    assert "with prompts" in out and "~" not in out and "1,008 questions" in " ".join(out.split())
    assert cli.main([*args, "--gpu", "b200"]) == 0
    other = " ".join(capsys.readouterr().out.split())
    assert "~" in other and "nothing was measured there" in other and "with prompts" not in other.split("setting")[1]


def test_the_table_of_the_page(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Is what its command prints."""
    folder = write(max_position_embeddings=131072)
    page = (REPOSITORY / "docs" / "capacity.md").read_text()
    (command,) = (x.split() for x in page.splitlines() if x.startswith("python -m sglang_diffkv.capacity"))
    assert cli.main([str(folder) if x == "DIR" else x for x in command[3:]]) == 0
    printed = {x.split()[0]: x.split() for x in capsys.readouterr().out.splitlines() if x and x[0] != "-"}
    shown = [x.strip("| ").split(" | ") for x in page.splitlines() if x.startswith(("| fp8", "| default"))]
    assert len(shown) == 2
    for name, share, tokens, together, mean, speed in shown:
        assert [printed[name][x] for x in (2, 3, 4, 5, 6)] == [share, tokens, together, mean, speed]


def test_presets_side_by_side_as_on_the_page_of_settings(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(max_position_embeddings=131072)
    page = (REPOSITORY / "docs" / "choose.md").read_text()
    (command,) = (x.split() for x in page.splitlines() if x.startswith("python -m sglang_diffkv.capacity"))
    assert cli.main([str(folder) if x == "DIR" else x for x in command[3:]]) == 0
    printed = {x.split()[0]: x.split() for x in capsys.readouterr().out.splitlines() if x and x[0] != "-"}
    safe, fits, small = (int(printed[name][4]) for name in ("safe", "default", "small"))
    assert printed["safe"][1:] == printed["K8V4"][1:] and safe < fits < small


def test_configurations_as_a_server_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON and files. What the environment has does not matter."""
    monkeypatch.setenv("SGLANG_DIFFKV_CONFIG", '{"tiers": ["BF16"]}')
    (tmp_path / "mine.json").write_text('{"tiers": ["K8V8"]}')
    given = ["--config", str(tmp_path / "mine.json"), "--config", 'four={"tiers": ["K4V4"]}']
    found = plan_json(capsys, *GOOD, *given)["settings"]
    tiers = {name: x["configuration"]["tiers"] for name, x in found.items() if x["configuration"]}
    (of_file,) = set(tiers) - {"default", "K8V4", "window 64", "four"}
    assert tiers[of_file] == ["K8V8"] and tiers["four"] == ["K4V4"] and tiers["default"] == ["K8V4", "K4V2"]


def test_small_models_have_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, *GOOD)
    assert {x["decode_tokens_per_s"] for x in found["settings"].values()} == {None}
    assert any("No tokens/s" in x for x in found["assumptions"])


def test_a_high_share_that_is_given(llama: Model, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", str(llama.path.parent), "--kv-gib", "8", "--context", "8k", "--reply", "1k"]
    usual, low, high = (plan_json(capsys, *args, *x) for x in ([], ["--high-share", "0"], ["--high-share", "1"]))
    of = [x["settings"]["default"]["tokens"] for x in (high, usual, low)]
    assert of == sorted(of) and usual["settings"]["default"]["tier_shares"] == {"K8V4": 0.38, "K4V2": 0.62}
    for name in ("bf16", "K8V4", "window 64"):
        assert high["settings"][name] == low["settings"][name]


def test_it_needs_no_sglang_and_no_weights(write: Callable[..., Path]) -> None:
    program = (
        "import sys\nfrom sglang_diffkv.capacity.cli import main\nassert main(sys.argv[1:]) == 0\n"
        "assert not {'sglang', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    args = ["--model", str(write()), "--gpu", "h100", "--context", "4k", "--reply", "1k"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", program, *args], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_plan_is_that_of_the_memory_plan(llama: Model) -> None:
    """The footprint of the tokens that are said to fit stays within the bytes, and one page more does not."""
    plan = plan_of(llama, load_config("{}"), 1)
    budget = budget_of(llama, None, 1, kv_gib=8)
    tokens = capacity_of(plan, llama, budget, 64)
    page = plan.fmt.high.tokens
    totals = [
        plan.footprint(plan.geometry(x, 65, llama.context + 4), x).total for x in (tokens, tokens + 2 * page)
    ]  # fmt: skip
    assert totals[0] <= budget.cache < totals[1]


@pytest.mark.parametrize(("prompt", "reply", "full"), [(100, 1000, 156), (100, 50, 50), (999, 999, 0), (8, 9000, 248)])
def test_what_admission_reserves_of_a_reply(prompt: int, reply: int, full: int) -> None:
    """Whole tokens until the window is full, then those behind it, with the margin; no more than SGLang looks at."""
    holding = SimpleNamespace(window=256, part_filled=32.0)
    behind, more = max(prompt + reply - 256, 0), min(reply, CLIP)
    half = held._reserved(holding, prompt, reply, min(prompt + reply, 256) + 32 + behind / 2)  # type: ignore[arg-type]
    assert half == pytest.approx(full + (more - full) * GROWTH_MARGIN / 2)
    assert held._reserved(holding, prompt, reply, 32 + prompt + reply) == more  # type: ignore[arg-type]
