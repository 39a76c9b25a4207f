"""``python -m sglang_diffkv.doctor``: of good and bad installations, options, configurations and models."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.paths import NANO, REPOSITORY
from benchmarks.quality.random_hybrids import make_lfm2
from sglang_diffkv import doctor, releases
from sglang_diffkv.capacity import cli as capacity
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.evaluate.server import CPU_ENV, OFFLINE_ENV
from sglang_diffkv.files import missing_model
from sglang_diffkv.findings import Findings
from sglang_diffkv.plan import planned_request_rows
from sglang_diffkv.srt import doctor as srt_doctor
from sglang_diffkv.srt.versions import compat
from tests.helpers import make_format
from tests.servers.shared import completed

MLA = REPOSITORY / "tests" / "data" / "mla"
UNKNOWN = """
import importlib.metadata as metadata
known = metadata.entry_points
metadata.entry_points = lambda **which: () if which.get("group") == "sglang.srt.plugins" else known(**which)
"""
"""A Python in which no package has the plugin's entry point: another than the one it was installed into."""

long = pytest.mark.server
"""It imports all of SGLang, as a server does."""


def _run(*args: str, first: Path | None = None, bare: bool = False) -> subprocess.CompletedProcess[str]:
    """The doctor of its own process, forked where servers are. ``first``: a folder that Python finds before all others.
    ``bare``: in a Python without any other package."""
    env = {**os.environ, **CPU_ENV, **OFFLINE_ENV}
    for name in ("TRITON_INTERPRET", "SGLANG_DIFFKV_CONFIG", "SGLANG_PLUGINS"):
        env.pop(name, None)
    command = [sys.executable, *(["-S"] if bare else []), "-m", "sglang_diffkv.doctor", *args]
    if first or bare:
        path = [str(first)] if first else []
        path += [str(REPOSITORY)] if bare else [str(REPOSITORY), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(path)
    return completed(command, env)


def _lines(report: dict[str, Any], section: str) -> dict[str, dict[str, Any]]:
    return {x["name"]: x for x in report["sections"][section]}


@long
def test_a_good_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And ``python -m sglang_diffkv.capacity`` says the same of its memory."""
    store = {"file_storage_path": str(tmp_path), "max_size": "1Gi"}
    options = ("--diffkv-config", '{"tiers": ["K8V4", "K4V2"]}', "--enable-hierarchical-cache", "--hicache-size", "1")
    options += ("--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", json.dumps(store))
    done = _run("--model-path", str(NANO), "--kv-gib", "2", "--json", *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["ok"], report["refusals"]) == (True, [])
    assert _lines(report, "Versions")["SGLang"]["value"] == compat.sglang_version()
    assert "fit this SGLang" in _lines(report, "Plugin")["hooks"]["text"]
    model = _lines(report, "Model")
    assert "can be served" in model["model"]["text"]
    assert "those of the configuration given" in model["thresholds"]["text"]
    stock, high, low = (model[x]["value"] for x in ("bytes a token", "  K8V4", "  K4V2"))
    # Codes, scales and zero points, the high tier's score, a position of 16 bits.
    assert (stock, high, low) == (6 * 2 * 2 * 64 * 2, 6 * 2 * (64 + 32 + 8 + 4 + 2), 6 * 2 * (32 + 16 + 8 + 2))
    assert 0.9 < model["tokens in 2 GiB"]["value"] * high / (2 << 30) < 1
    facts = report["facts"]
    assert set(facts) == {"versions", "gpus", "configuration", "server", "model", "memory"}
    packages = {"sglang_diffkv", "python", "torch", "triton", "flashinfer", "sglang_kernel", "sglang"}
    assert set(facts["versions"]) == packages and facts["versions"]["sglang"] == compat.sglang_version()
    about = {"layers": 6, "query_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
    assert about.items() <= facts["model"].items() and facts["server"]["device"] == "cpu"
    memory = facts["memory"]
    assert (memory["bf16_token_bytes"], memory["tier_token_bytes"]) == (stock, {"K8V4": high, "K4V2": low})
    assert (memory["bytes"], memory["tokens"]) == (2 << 30, model["tokens in 2 GiB"]["value"])
    assert memory["bf16_tokens"] == (2 << 30) // stock and memory["retracted_host_bytes"] >= 0
    assert capacity.main(["--model", str(NANO), "--kv-gib", "2", "--context", "1k", "--reply", "1k", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["settings"]
    assert planned["bf16"]["max_total_num_tokens"] == memory["bf16_tokens"]
    found = planned["default"]["max_total_num_tokens"]
    assert found == memory["tokens"] if not facts["gpus"] else 0.98 < found / memory["tokens"] < 1.02
    assert 0 < 10**9 - memory["evicted_host_bytes"] < 4096
    assert "0.93 GiB of the host's memory (write_through)" in model["evicted prefixes"]["text"]
    assert (
        str(tmp_path) in model["prefixes on disk"]["text"] and "at most 1.00 GiB" in model["prefixes on disk"]["text"]
    )
    configuration = facts["configuration"]
    assert configuration["values"] == DiffKVConfig().whole()
    told = {name: source for name, source in configuration["sources"].items() if source != "default"}
    assert told == {"tiers": "--diffkv-config"}


@long
def test_a_draft_model_s_cache_is_counted() -> None:
    """Nano drafts for itself: each KV slot takes a bf16 token there, and there are KV slots for all low-tier tokens."""
    tiers = ["--diffkv-config", '{"tiers": ["K8V4", "K4V2"]}']
    drafts = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(NANO)]
    drafts += ["--speculative-eagle-topk", "1", "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4"]
    done = _run("--model-path", str(NANO), "--kv-gib", "2", "--json", *tiers, *drafts)
    assert done.returncode == 0, done.stderr
    model = _lines(json.loads(done.stdout), "Model")
    slot = model["draft model"]["value"]
    assert slot == 6 * 2 * 2 * 64 * 2
    line = model["tokens in 2 GiB"]
    assert f"bf16 with that cache alone: {(2 << 30) // (2 * slot):,}" in line["text"]
    high = model["  K8V4"]["value"]
    assert line["value"] * (high + slot) < 2 << 30, "without it more than twice as many would fit"


@long
def test_states_that_take_all_memory_leave_none(tmp_path: Path) -> None:
    make_lfm2(tmp_path)
    args = ["--model-path", str(tmp_path), "--disable-radix-cache", "--kv-gib", "0.5", "--json"]
    done = _run(*args, "--max-mamba-cache-size", "100000000")
    assert done.returncode == 0, done.stderr
    model = _lines(json.loads(done.stdout), "Model")
    line = model["tokens in 0.5 GiB"]
    assert (
        line["value"] == 0 and line["text"].startswith("none: states take all of it") and "-" not in line["text"][:24]
    )
    assert model["states"]["value"] > 1 << 29
    done = _run(*args, "--max-mamba-cache-size", "4")
    assert _lines(json.loads(done.stdout), "Model")["tokens in 0.5 GiB"]["value"] > 1000


@long
def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    """A Python that does not know of the plugin, an option and a model that are refused."""
    (tmp_path / "sitecustomize.py").write_text(UNKNOWN)
    done = _run("--model-path", str(MLA), "--enable-two-batch-overlap", first=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "REFUSED: SGLang does not know of the plugin: in this Python no package has the entry point 'diffkv'" in said
    assert "REFUSED: --attention-backend diffkv does not work with two-batch overlap: drop --enable-two-batch" in said
    assert "REFUSED: --attention-backend diffkv cannot serve this model (DeepseekV2Config): it has multi-head" in said
    assert "A server would be refused, for 3 reasons." in said


@long
@pytest.mark.full
def test_a_bad_configuration() -> None:
    done = _run("--model-path", str(NANO), "--diffkv-config", '{"tiers": ["K9V4"]}', "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    (refusal,) = report["refusals"]
    assert "impossible tier K9V4" in refusal
    assert "can be served" in _lines(report, "Model")["model"]["text"]


@pytest.mark.parametrize("model", ["/no/such", "./such", "../such", "no/such/folder"])
def test_a_folder_that_is_not_there(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SGLang, which asks Hugging Face for it, is not asked; what is wrong with the configuration is told too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setattr(srt_doctor, "_hooks_fit", lambda *args: True)
    findings = Findings()
    srt_doctor.check(findings, model, '{"tiers": ["K9V4"]}', 1.0, [], gpu=False, found=True)
    refusal, configuration = findings.refusals
    assert refusal == f'--model-path "{model}": no config.json there. Name a folder that has one'
    assert "impossible tier K9V4" in configuration


def test_what_may_be_no_folder_is_left_to_sglang(tmp_path: Path) -> None:
    for model in (str(tmp_path), "org/model", "model", "s3://bucket/a/model", ""):
        assert not missing_model(model)


@long
@pytest.mark.full
def test_an_option_that_sglang_does_not_have() -> None:
    done = _run("--model-path", str(NANO), "--no-such-option", "--json")
    assert done.returncode == 1
    (refusal,) = json.loads(done.stdout)["refusals"]
    assert "unrecognized arguments: --no-such-option" in refusal


@long
@pytest.mark.full
def test_no_model() -> None:
    done = _run()
    assert done.returncode == 0, done.stderr
    assert "add --model-path DIR" in done.stdout
    assert "Nothing found that would be refused." in done.stdout


def test_a_python_without_sglang() -> None:
    done = _run(bare=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "REFUSED: SGLang is not installed in this Python." in said and "-m pip install sglang==0.5.17, or" in said
    assert "REFUSED: torch cannot be imported" in said


def test_the_plugin_s_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [SimpleNamespace(name="diffkv", dist=SimpleNamespace(name="sglang-diffkv", version="9.9"))]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group == doctor.GROUP else [])
    monkeypatch.setenv("SGLANG_PLUGINS", "other, diffkv")
    findings = Findings()
    assert doctor._look_at_plugin(findings)
    assert findings.items[-1].text == "found, of sglang-diffkv 9.9"
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert not doctor._look_at_plugin(findings)
    points.clear()
    assert not doctor._look_at_plugin(findings)
    assert [x.split(":")[0] for x in findings.refusals] == [
        "SGLANG_PLUGINS=other leaves the plugin out",
        "SGLang does not know of the plugin",
    ]


def test_a_list_for_people_and_one_for_programs() -> None:
    findings = Findings(section="One")
    findings.add("short", "text", 7)
    findings.section = "Two"
    findings.refuse("a longer name", "why " * 40)
    findings.refuse("again", "why " * 40)
    lines = findings.describe().splitlines()
    assert lines[:4] == ["One", "  short          text", "", "Two"]
    assert lines[4].startswith("  a longer name  REFUSED: why why")
    assert lines[5].startswith(" " * 17 + "why")
    assert max(map(len, lines)) <= 110
    assert lines[-1] == "A server would be refused, for 1 reason."
    report = findings.report()
    assert (report["ok"], report["refusals"]) == (False, ["why " * 40])
    assert report["sections"]["One"] == [{"name": "short", "text": "text", "refused": False, "value": 7}]


def test_packages_that_were_not_tested_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    stack: dict[str, str | None] = {"torch": "2.14.1", "triton": "3.6.0", "flashinfer": None, "sglang_kernel": "0.4.5"}
    assert releases.untested("0.5.17", stack, gpu=True) == {
        "torch": "torch 2.14.1: with SGLang 0.5.17 on a GPU 2.11.0 was tested",
        "flashinfer": "FlashInfer is not installed: with SGLang 0.5.17 on a GPU 0.6.15.post1 was tested",
    }
    assert set(releases.untested("0.5.21", stack, gpu=False)) == {"torch", "triton"}, "the others have no part there"
    assert not releases.untested("0.5.21", {"torch": "2.13.0+cpu", "triton": "3.7.1"}, gpu=False)
    assert not releases.untested("0.5.21", stack, gpu=True), "SGLang itself is refused there"
    versions = {"sglang": "0.5.21", "torch": "2.14.1", "triton": "3.7.1", "sgl-kernel": "0.4.2"}
    monkeypatch.setattr(doctor, "version_of", versions.get)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    findings = Findings()
    doctor._look_at_machine(findings)
    (warning,) = findings.warnings
    assert "torch 2.14.1: with SGLang 0.5.21 on a CPU 2.13.0 was tested" in warning and not findings.refusals
    assert "WARNING: torch 2.14.1" in findings.describe() and "sglang-kernel  0.4.2" in findings.describe()
    assert "NOT one that was tested with SGLang 0.5.21 on a CPU" in findings.describe()
    versions["torch"] = "2.13.0"
    doctor._look_at_machine(again := Findings())
    assert "packages were tested together with SGLang 0.5.21 on a CPU" in " ".join(again.describe().split())
    assert findings.report()["warnings"] == [warning] and findings.report()["ok"]
    assert findings.facts["versions"]["sglang_kernel"] == "0.4.2"


def test_what_a_gpu_server_would_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_diffkv.kernels.decode_attention import cuda
    from sglang_diffkv.ops import flash
    from sglang_diffkv.ops.ragged import RaggedPrefill
    from sglang_diffkv.srt.doctor import _kernels

    no_hopper = "FlashAttention-3 needs a Hopper GPU"
    monkeypatch.setattr(RaggedPrefill, "obstacle", lambda *heads: "")
    monkeypatch.setattr(cuda, "missing", lambda: "there is no GPU")
    assert _kernels(DiffKVConfig(), on_gpu=True).startswith("Triton; new tokens attend by FlashInfer, if all")
    decode = "; decode steps attend by Triton (there is no GPU)"
    assert _kernels(DiffKVConfig(prefill="triton"), on_gpu=True).endswith(f"by Triton{decode}")
    monkeypatch.setattr(RaggedPrefill, "obstacle", lambda *heads: "FlashInfer is not installed")
    assert _kernels(DiffKVConfig(), on_gpu=True).endswith(
        f"by Triton ({no_hopper}; FlashInfer is not installed){decode}"
    )
    assert _kernels(DiffKVConfig(decode="triton"), on_gpu=True).endswith("attend by Triton")
    with pytest.raises(UnsupportedError, match='"decode": "cuda": there is no GPU; set "decode" to "triton"'):
        _kernels(DiffKVConfig(decode="cuda"), on_gpu=True)
    for library, why in (("flashinfer", "FlashInfer is not installed"), ("fa3", no_hopper)):
        refusal = f'"prefill": "{library}": {why}; set "prefill" to "triton" or "auto"'
        with pytest.raises(UnsupportedError, match=refusal):
            _kernels(DiffKVConfig(prefill=library), on_gpu=True)
    monkeypatch.setattr(flash, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(flash, "attention_function", lambda: print)
    assert _kernels(DiffKVConfig(), on_gpu=True).startswith("Triton; new tokens attend by FlashAttention-3, if no")
    with pytest.raises(UnsupportedError, match='"prefill": "fa3": FlashAttention-3 was not tried with float16'):
        _kernels(DiffKVConfig(prefill="fa3"), on_gpu=True, dtype=torch.float16)


@pytest.mark.parametrize(
    ("architecture", "reads"),
    [
        ("Gemma2ForCausalLM", True),
        ("Qwen3ForCausalLM", False),
        ("Qwen2ForCausalLM", False),
        ("CohereForCausalLM", None),
    ],
)
def test_a_window_is_promised_where_sglang_reads_it(architecture: str, reads: bool | None) -> None:
    """``config.json`` states one in all of these; Command R's layers have it without a word to the model runner."""
    from sglang_diffkv.srt.doctor import _window

    text = SimpleNamespace(sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2)
    findings = Findings(section="Model")
    model = SimpleNamespace(hf_text_config=text, hf_config=SimpleNamespace(architectures=[architecture]))
    assert _window(findings, model) == ((64, 0, 64, 0) if reads else ())
    [line] = findings.items
    assert "64 tokens in 2 of 4 layers" in line.text and line.value == (64 if reads else None)
    assert ("does not read it" in line.text, "once they are loaded" in line.text) == (reads is False, reads is None)
    model.hf_text_config = SimpleNamespace(sliding_window=64, layer_types=["full_attention"] * 4)
    assert _window(findings, model) == () and findings.items == [line]


def test_tokens_beside_windows_can_be_reached() -> None:
    """Of four layers two see 65 tokens: of 960 they hold a tenth, 96, in the high tier whatever the policy."""
    from sglang_diffkv.srt.doctor import _tokens_that_fit

    fmt = make_format(("K8V4", "K4V2"))
    ratio = fmt.low.tokens / fmt.high.tokens
    assert _tokens_that_fit(1000, fmt, (), 960) == f"1,000 if all are K8V4, up to {int(1000 * ratio):,} if all are K4V2"
    whole, least = 1000 / (0.5 + 0.05), 1000 / (0.5 / ratio + 0.05)
    assert _tokens_that_fit(1000, fmt, (65, 0) * 2, 960) == (
        f"1,000 if all are K8V4; of sequences of 960, whose windows stay in K8V4, {whole:,.0f}, up to {least:,.0f} if "
        "all else is K4V2"
    )
    assert least < whole * ratio
    one = _tokens_that_fit(1000, make_format(("K8V4",)), (65, 0), 96)
    assert one == "1,000 if all are K8V4; of sequences of 96, whose windows stay in K8V4, 1,000"


@pytest.mark.parametrize("capacity", [1, 100, 5_000, 3_000_000])
@pytest.mark.parametrize("most", [None, 48])
def test_rows_of_requests_are_those_that_sglang_will_have(
    capacity: int, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache import kv_cache_configurator

    monkeypatch.setattr(kv_cache_configurator, "get_schedule", lambda: SimpleNamespace(max_running_requests=most))
    configurator = SimpleNamespace(
        model_config=SimpleNamespace(context_len=8192), mambaish_config=None, attn_dp_size=1,
        ps=SimpleNamespace(attn_dp_size=1), server_args=SimpleNamespace(),
    )  # fmt: skip
    resolve = kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs
    configurator.resolve_max_num_reqs = lambda tokens: resolve(configurator, tokens)
    assert planned_request_rows(most, capacity, 8192) == compat.request_rows(configurator, capacity)
