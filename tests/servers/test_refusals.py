"""What cannot work is refused at start, with a reason that names it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from benchmarks.paths import NANO, REPOSITORY
from benchmarks.quality.random_windows import make_gemma3
from sglang_diffkv.config import CONFIG_ENV, DiffKVConfig, DiffKVPolicyConfig, load_config, read_config
from sglang_diffkv.errors import ConfigError, UnsupportedError
from sglang_diffkv.evaluate.ports import Port
from sglang_diffkv.evaluate.server import CPU_ENV, OFFLINE_ENV
from sglang_diffkv.plan import MemoryPlan
from sglang_diffkv.policies.registry import PolicyConfig
from sglang_diffkv.refusals import kind_of
from sglang_diffkv.releases import RELEASES
from sglang_diffkv.srt.hooks import registration
from sglang_diffkv.srt.hooks import table as hooks
from sglang_diffkv.srt.models.hybrids import hybrid_problems
from sglang_diffkv.srt.models.speculation import check_drafts
from sglang_diffkv.srt.startup import disaggregation, host_memory, launch, preflight
from sglang_diffkv.srt.startup.validation import check_layers, check_model, check_policy, check_server_args
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.versions import disaggregation as two
from sglang_diffkv.srt.versions.compat import TESTED_VERSIONS, UNTRIED_ENV
from tests.policies import METHOD_NAMES, diffkv_policy, documented_methods
from tests.servers.shared import completed


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"tier": ["K8V4"]}', "tier"),
        ('{"tiers": ["K9V4"]}', "tiers"),
        ('{"tiers": ["K4V2", "K8V4"]}', "ever fewer bytes"),
        ('{"tiers": ["BF16", "K8V4", "K4V2"]}', "tiers"),
        ('{"policy": {"name": "diffkv", "alpha_high": -1}}', "alpha_high"),
        ('{"policy": {"name": "diffkv", "alpha_low": 4}}', "alpha_low"),
        ('{"policy": {"name": "diffkv", "window": 0}}', "window"),
        ('{"policy": {"name": "diffkv", "sinks": -1}}', "sinks"),
        ('{"policy": {"name": "diffkv", "horizon": 0.5}}', "horizon"),
        ('{"policy": {"name": "diffkv", "head_scale": [[1, 1], [1]]}}', "head_scale"),
        ('{"policy": {"name": "diffkv", "head_scale": [[1, 0]]}}', "head_scale"),
        ('{"policy": {"name": "diffkv", "head_scale": []}}', "head_scale"),
        ('{"policy": {"name": "diffkv", "head_scale": [[]]}}', "head_scale"),
        ('{"policy": {"name": "h2o"}}', "policy"),
        ('{"policy": {"name": "uniform"}}', "uniform"),
        ('{"page_tokens": 1}', "page_tokens"),
        ('{"rotate": "queries"}', "rotate"),
        ('{"rotate": "keys", "tiers": ["BF16"]}', "rotate"),
        ('{"prefix_fidelity": "lossless"}', "prefix_fidelity"),
        ('{"tiers": ', "not valid JSON"),
        ("no/such/file.json", "cannot be read: No such file"),
    ],
)
def test_config_errors_name_the_field(text: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        load_config(text)


def test_config_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"tiers": ["k8v4"]}', encoding="utf-8")
    monkeypatch.setenv("SGLANG_DIFFKV_CONFIG", '{"page_tokens": 16}')
    assert load_config(str(path)).tiers == ("K8V4",)
    assert load_config().page_tokens == 16
    monkeypatch.delenv("SGLANG_DIFFKV_CONFIG")
    assert load_config() == DiffKVConfig()


def test_an_unsupported_sglang_is_no_news_to_other_backends(caplog: pytest.LogCaptureFixture) -> None:
    """The plugin is loaded in every process of SGLang, also where nobody asked for it."""
    hooks: dict[str, Any] = {}
    made: dict[str, Any] = {}
    registry = SimpleNamespace(register=lambda target, hook, kind: hooks.update({target: hook}))
    error = UnsupportedError("was not tested with SGLang 9.9")
    with caplog.at_level(logging.DEBUG):
        registration._refuse(
            lambda name: lambda build: made.update({name: build}), registry, SimpleNamespace(AROUND=1), error
        )
        (from_cli_args,) = hooks.values()
        assert from_cli_args(lambda cls, args: "args", object, SimpleNamespace(attention_backend="triton")) == "args"
    assert caplog.records and max(x.levelno for x in caplog.records) <= logging.INFO
    with pytest.raises(SystemExit, match=r"not available: was not tested with SGLang 9\.9"):
        from_cli_args(lambda cls, args: "args", object, SimpleNamespace(attention_backend="diffkv"))
    with pytest.raises(UnsupportedError, match=r"SGLang 9\.9"):
        made["diffkv"](None)


def test_defaults_and_round_trip() -> None:
    config = DiffKVConfig()
    assert (config.tiers, config.build_policy().window, config.lossless) == (("K8V4", "K4V2"), 256, False)
    usual = diffkv_policy(alpha_high=3.0, alpha_low=0.0, window=256, sinks=4, observe_every=4, pressure_window=64)
    assert config.build_policy() == DiffKVPolicyConfig().build() == usual
    rotated = {tiers: DiffKVConfig(tiers=tiers).rotate for tiers in (("K8V4", "K4V2"), ("K4V2",), ("K8V4",), ("BF16",))}
    assert list(rotated.values()) == ["both", "both", "none", "none"]
    assert DiffKVConfig(rotate="keys").rotate == "keys"
    assert load_config(config.model_dump_json(exclude_none=True)) == config
    assert load_config('{"tiers": ["BF16"]}').lossless


def _args(**changes: object) -> SimpleNamespace:
    fields: dict[str, object] = {
        "attention_backend": "diffkv",
        "kv_cache_dtype": "auto",
        "speculative_algorithm": None,
        "disaggregation_mode": "null",
        "enable_hierarchical_cache": False,
        "radix_cache_backend": None,
        "page_size": 1,
        "enable_mixed_chunk": False,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "enable_dp_attention": False,
        "device": "cpu",
    }
    return SimpleNamespace(**{**fields, **changes})


EAGLE_TREES = {
    "speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 4, "speculative_num_steps": 5,
    "speculative_num_draft_tokens": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3"),
        ({"speculative_algorithm": "DFLASH"}, "--speculative-algorithm DFLASH"),
        ({**EAGLE_TREES, "speculative_num_draft_tokens": 65}, "--speculative-num-draft-tokens 65: use 6 to 64"),
        ({**EAGLE_TREES, "speculative_num_draft_tokens": 5}, "--speculative-num-draft-tokens 5: use 6 to 64"),
        (
            {**EAGLE_TREES, "speculative_num_steps": 1, "speculative_num_draft_tokens": 8},
            "--speculative-num-draft-tokens 8: use 2 to 5",
        ),
        ({**EAGLE_TREES, "speculative_num_steps": 16}, "--speculative-num-steps 16: use up to 15"),
        ({**EAGLE_TREES, "page_size": 16}, "--page-size 16 with trees of drafts: .* add --speculative-eagle-topk 1"),
        ({"speculative_algorithm": "STANDALONE", "speculative_adaptive": True}, "--speculative-adaptive"),
        ({"speculative_algorithm": "EAGLE", "kv_canary": "raise"}, "--kv-canary with a draft model"),
        ({"speculative_algorithm": "NGRAM", "speculative_ngram_external_sam_budget": 3}, "an external corpus"),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 17}, "--speculative-num-draft-tokens 17"),
        ({"enable_hierarchical_cache": True, "kv_canary": "log"}, "--enable-hierarchical-cache with --kv-canary"),
        ({"page_size": 16, "kv_canary": "log"}, "--page-size 16 with --kv-canary"),
        ({"tp_size": 2, "attn_cp_size": 2}, "--attn-cp-size"),
        ({"tp_size": 2, "dcp_size": 2}, "--dcp-size"),
        ({"tp_size": 2, "pp_size": 2}, "--pp-size"),
        ({"decode_attention_backend": "triton"}, "second attention backend"),
        ({"speculative_algorithm": "NGRAM", "enable_mixed_chunk": True}, "mixed chunks beside drafts"),
        ({"device": "xpu"}, "device xpu"),
        ({"enable_streaming_session": True}, "--enable-streaming-session"),
    ],
)
def test_server_options_are_refused_by_name(changes: dict[str, object], name: str) -> None:
    check_server_args(_args())
    check_server_args(_args(tp_size=2))
    check_server_args(_args(**EAGLE_TREES))
    with pytest.raises(UnsupportedError, match=name):
        check_server_args(_args(**changes))


def _half_served(monkeypatch: pytest.MonkeyPatch, served: bool) -> None:
    """The installed SGLang is one with which a server may do one half, or is none."""
    row = replace(RELEASES[compat.sglang_version()], disaggregation=served)
    monkeypatch.setattr(compat, "installed", lambda: row)


HALF = {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "mooncake"}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"disaggregation_transfer_backend": "nixl"}, "--disaggregation-transfer-backend nixl: use mooncake"),
        ({"nnodes": 2}, "--nnodes 2 with --disaggregation-mode: keep each server on one host"),
        ({"dp_size": 2}, "--dp-size 2 with --disaggregation-mode"),
        ({"page_size": 16}, "--page-size 16 with --disaggregation-mode"),
        ({"speculative_algorithm": "STANDALONE", "speculative_num_draft_tokens": 4}, "speculative decoding with --dis"),
        ({"enable_lora": True}, "LoRA with --disaggregation-mode"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk with --disaggregation-mode"),
        ({"disaggregation_decode_host_receive_threshold": 0.5}, "--disaggregation-decode-host-receive-threshold"),
        ({"disaggregation_decode_retraction_backup": "host_pool"}, "-retraction-backup host_pool: drop it"),
        (
            {"disaggregation_decode_allocation_policy": "prefill_complete"},
            "-allocation-policy prefill_complete: drop it",
        ),
        ({"disaggregation_enable_kv_checksum": True}, "--disaggregation-enable-kv-checksum: .*rows have checksums"),
        ({"optimistic_prefill_attempts": 2}, "--optimistic-prefill-attempts with --disaggregation-mode"),
    ],
)
def test_what_two_servers_cannot_do_is_refused(
    changes: dict[str, object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = (Path(__file__).parents[1] / "data/server_args" / f"{compat.sglang_version()}.txt").read_text().split()
    if not {*changes} <= {*listed}:
        pytest.skip("this SGLang has no such option")
    _half_served(monkeypatch, True)
    check_server_args(_args(**HALF))
    with pytest.raises(UnsupportedError, match=name):
        check_server_args(_args(**{**HALF, **changes}))


def test_prefixes_of_two_servers_are_refused_where_a_pause_would_unlock_them(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(RELEASES[compat.sglang_version()], disaggregation=True, transfer_reasons=False)
    monkeypatch.setattr(compat, "installed", lambda: row)
    with pytest.raises(UnsupportedError, match=r"-decode-enable-radix-cache with SGLang .*: drop it"):
        check_server_args(_args(**HALF, disaggregation_decode_enable_radix_cache=True))


@pytest.mark.skipif(compat.sglang_version() == "0.5.17", reason="refused there anyway")
def test_what_two_servers_were_not_seen_to_do_on_a_gpu_is_refused_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _half_served(monkeypatch, True)
    monkeypatch.delenv(UNTRIED_ENV, raising=False)
    monkeypatch.setattr(disaggregation, "PAIRS_GPU_VERSIONS", (compat.sglang_version(),))
    prefixes, config = {"disaggregation_decode_enable_radix_cache": True}, load_config("{}")
    assert not disaggregation.problems(_args(**HALF, **prefixes), config)
    assert not disaggregation.problems(_args(**HALF, device="cuda"), config)
    (problem,) = disaggregation.problems(_args(**HALF, **prefixes, device="cuda"), config)
    assert problem.startswith("--disaggregation-decode-enable-radix-cache on a GPU, where it was not seen to be right")
    monkeypatch.setenv(UNTRIED_ENV, "1")
    assert not disaggregation.problems(_args(**HALF, **prefixes, device="cuda"), config)


@pytest.mark.skipif(compat.sglang_version() == "0.5.17", reason="this SGLang has no such option")
def test_the_default_of_an_option_is_no_request_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is 0 in 0.5.21 and 1 in later releases."""
    _half_served(monkeypatch, True)
    name = "disaggregation_decode_host_receive_threshold"
    check_server_args(_args(**HALF, **{name: compat.default_of(name)}))
    with pytest.raises(UnsupportedError, match="host-receive-threshold"):
        check_server_args(_args(**HALF, **{name: 1 - compat.default_of(name)}))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"prefix_fidelity": "exact"}', '"exact" with --disaggregation-mode: leave it out'),
        ('{"tiers": ["BF16"], "policy": {"name": "zipage", "max_blocks": 4}}', "compresses running requests"),
    ],
)
def test_configurations_are_refused_for_two_servers(text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _half_served(monkeypatch, True)
    with pytest.raises(UnsupportedError, match=name):
        check_server_args(_args(**HALF), load_config(text))


def test_two_servers_are_refused_by_the_name_of_other_releases_and_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UNTRIED_ENV, raising=False)
    _half_served(monkeypatch, True)
    assert disaggregation.problems(_args(**HALF), load_config("{}")) == []
    for seen in ((), (compat.sglang_version(),)):
        monkeypatch.setattr(disaggregation, "PAIRS_GPU_VERSIONS", seen)
        found = disaggregation.problems(_args(**HALF, device="cuda"), load_config("{}"))
        assert [f"set {UNTRIED_ENV}=1" in text for text in found] == [True] * (not seen)
        monkeypatch.setattr(two, "RANKS_GPU_VERSIONS", seen)
        found = disaggregation.problems(_args(**HALF, device="cuda", tp_size=2), load_config("{}"))
        assert [f"set {UNTRIED_ENV}=1" in text for text in found] == [True] * (0 if seen else 2)
    _half_served(monkeypatch, False)
    (found,) = disaggregation.problems(_args(**HALF), load_config("{}"))
    assert "install SGLang 0.5.17, 0.5.21, 0.5.22, 0.5.23, or drop --disaggregation-mode" in found


def test_kept_prefixes_are_refused_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang itself turns the prefix cache of such a server off: the user gave no option for that."""
    _half_served(monkeypatch, True)
    args = _args(**HALF, disable_radix_cache=True)
    with pytest.raises(UnsupportedError, match='"keep_seconds" with --disaggregation-mode decode') as error:
        check_server_args(args, load_config('{"keep_seconds": 60}'))
    assert "--disable-radix-cache" not in str(error.value)


def test_rows_between_servers_need_free_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row no longer than the pool, if that is known before weights load."""
    fmt = load_config("{}").page_format(128, 128, 1 << 20)
    plan = MemoryPlan(load_config("{}"), fmt, 32, 8, 32, gpu=False)
    monkeypatch.setattr(disaggregation, "free_host_memory", lambda: 4 << 30)
    disaggregation.check_room(_args(disaggregation_mode="null"), plan, 1 << 20)
    disaggregation.check_room(_args(**HALF, max_total_tokens=10_000), plan, 1 << 20)
    with pytest.raises(UnsupportedError, match=r"for rows between servers, .* 4\.00 GiB are free: give --con"):
        disaggregation.check_room(_args(**HALF), plan, 1 << 20)


def test_servers_that_differ_are_told_in_what() -> None:
    ours = two.told_of_rows({"tiers": ["BF16"], "model": "a", "rows": 1})
    theirs = two.told_of_rows({"tiers": ["K8V4"], "model": "a", "rows": 1})
    error = (
        f"KV cache dtype mismatch: prefill server has kv_cache_dtype={theirs}, but decode server has kv_cache_dtype="
        f"{ours}. Both servers must use the same --kv-cache-dtype value."
    )
    said = two.how_servers_differ(error, ours)
    assert said == "tiers is ['K8V4'] there and ['BF16'] here. Start both servers alike"
    assert "--attention-backend diffkv" in two.how_servers_differ(error.replace(theirs, "auto"), ours)
    assert two.how_servers_differ("Page size mismatch", ours) == "Page size mismatch"
    assert two.speaks_of_rows(ours) and not two.speaks_of_rows("auto") and not two.speaks_of_rows("[1]")


def test_mixed_chunks_are_refused_beside_asynchronous_compression() -> None:
    policy = '{"tiers": ["BF16"], "policy": {"name": "zipage", "max_blocks": 4, "asynchronous": %s}}'
    check_server_args(_args(enable_mixed_chunk=True), load_config(policy % "false"))
    check_server_args(_args(), load_config(policy % "true"))
    with pytest.raises(UnsupportedError, match='--enable-mixed-chunk with "asynchronous": true'):
        check_server_args(_args(enable_mixed_chunk=True), load_config(policy % "true"))


def test_mixed_chunks_are_refused_where_results_come_before_a_planned_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP", "1")
    check_server_args(_args())
    with pytest.raises(UnsupportedError, match="with SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP"):
        check_server_args(_args(enable_mixed_chunk=True))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"prefix_fidelity": "exact"}', '"exact" with speculative decoding: use "compressed"'),
        ('{"tiers": ["BF16"], "policy": {"name": "zipage", "max_blocks": 4}}', "holds requests to a budget"),
    ],
)
def test_configurations_are_refused_with_drafts(text: str, name: str) -> None:
    check_drafts(load_config("{}"), (0, 0))
    with pytest.raises(UnsupportedError, match=name):
        check_drafts(load_config(text))
    with pytest.raises(UnsupportedError, match="sliding window with speculative decoding"):
        check_drafts(load_config("{}"), (0, 512))


def test_all_that_is_wrong_with_drafts_is_told_at_once() -> None:
    with pytest.raises(UnsupportedError) as refused:
        check_drafts(load_config('{"prefix_fidelity": "exact"}'), (0, 512))
    assert 'use "compressed"; and not with layers with a sliding window' in str(refused.value)


SERVED = ("diffkv", "uniform", "streaming", "duo")
"""Methods for models with sliding layers; all others score whole heads."""


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_methods_for_layers_with_a_window(name: str) -> None:
    tiers = ["K8V4", "K4V2"] if name in ("diffkv", "leankv") else ["BF16"]
    config = load_config(json.dumps({"tiers": tiers, "policy": documented_methods(2, 2)[name]}))
    check_policy(config, (0, 0))
    if name in SERVED:
        check_policy(config, (0, 512))
        return
    with pytest.raises(UnsupportedError, match=f"policy {name} scores .* Use policy {', '.join(SERVED[:-1])} or duo"):
        check_policy(config, (0, 512))


@pytest.mark.parametrize(
    "text",
    ['{"policy": {"name": "diffkv", "alpha_low": 0.1}}', '{"tiers": ["K8V4"], "policy": {"name": "streaming"}}'],
)
def test_a_draft_model_and_dropped_tokens_are_refused_together(text: str) -> None:
    """A place in the draft model's cache would be needed for each of them."""
    check_drafts(load_config(text))
    check_drafts(load_config("{}"), by_model=True)
    with pytest.raises(UnsupportedError, match="drops tokens with a draft model"):
        check_drafts(load_config(text), by_model=True)


HYBRID = {"mambaish_config": SimpleNamespace(full_attention_layer_ids=[3, 7])}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"use_mla_backend": True}, "MLA"),
        ({"is_hybrid_swa": True}, "sliding-window.*--disable-hybrid-swa-memory"),
        ({"model_config": SimpleNamespace(attention_chunk_size=8192)}, "in chunks"),
        (
            {"model_config": SimpleNamespace(hf_text_config=SimpleNamespace(num_kv_shared_layers=2))},
            "share the keys and values",
        ),
        ({"mambaish_config": SimpleNamespace(full_attention_layer_ids=[])}, "no layer with keys and values"),
        (
            {**HYBRID, "server_args": SimpleNamespace(disable_radix_cache=True, speculative_algorithm="NGRAM")},
            "states other than those of a gated delta rule.*drop --speculative-algorithm",
        ),
        (
            {**HYBRID, "server_args": SimpleNamespace(disable_radix_cache=True, enable_mixed_chunk=True)},
            "drop --enable-mixed-chunk",
        ),
        ({**HYBRID, "model_config": SimpleNamespace(hf_text_config=SimpleNamespace(indexer_n_heads=4))}, "sparse"),
        ({"kv_cache_dtype": torch.float32}, "float32"),
    ],
)
def test_models_are_refused_by_name(changes: dict[str, object], name: str) -> None:
    good = {
        "model_config": SimpleNamespace(hf_config=None, hf_text_config=None),
        "server_args": SimpleNamespace(disable_radix_cache=True),
        "use_mla_backend": False,
        "is_hybrid_swa": False,
        "sliding_window_size": 127,
        "mambaish_config": None,
        "device": "cpu",
        "kv_cache_dtype": torch.bfloat16,
    }
    check_model(SimpleNamespace(**good))
    check_model(SimpleNamespace(**{**good, **HYBRID}))
    with pytest.raises(UnsupportedError, match=name):
        check_model(SimpleNamespace(**{**good, **changes}))


def test_models_with_states_are_served_on_a_gpu_by_versions_that_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {
        "model_config": SimpleNamespace(hf_config=None, hf_text_config=None),
        "server_args": SimpleNamespace(disable_radix_cache=True),
        "use_mla_backend": False,
        "is_hybrid_swa": False,
        "device": "cuda",
        "kv_cache_dtype": torch.bfloat16,
        **HYBRID,
    }
    monkeypatch.setattr("sglang_diffkv.srt.models.hybrids.STATES_GPU_VERSIONS", TESTED_VERSIONS)
    check_model(SimpleNamespace(**model))
    monkeypatch.setattr("sglang_diffkv.srt.models.hybrids.STATES_GPU_VERSIONS", ())
    refusal = "layers with states, of SGLang .*, on a GPU, where it was not seen to be right in all ways: .*UNTRIED"
    with pytest.raises(UnsupportedError, match=refusal):
        check_model(SimpleNamespace(**model))


@pytest.mark.parametrize(("fidelity", "alone"), [("exact", False), ("exact", True), ("compressed", False)])
def test_states_are_kept_beside_compressed_prompts_only(
    fidelity: str, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DIFFKV_CONFIG", f'{{"prefix_fidelity": "{fidelity}"}}')
    args = SimpleNamespace(disable_radix_cache=alone, chunked_prefill_size=4096)
    model = SimpleNamespace(hf_config=None, hf_text_config=None)
    problems = list(hybrid_problems(SimpleNamespace(**HYBRID, server_args=args, model_config=model, device="cpu")))
    if fidelity == "exact" and not alone:
        assert '"prefix_fidelity": "compressed"' in problems[0] and "--disable-radix-cache" in problems[0]
    else:
        assert not problems


@pytest.mark.parametrize(("size", "alone"), [(-1, False), (-1, True), (64, False)])
def test_states_are_kept_where_prompts_are_cut(size: int, alone: bool) -> None:
    args = SimpleNamespace(disable_radix_cache=alone, chunked_prefill_size=size)
    model = SimpleNamespace(hf_config=None, hf_text_config=None)
    problems = list(hybrid_problems(SimpleNamespace(**HYBRID, server_args=args, model_config=model, device="cpu")))
    assert [("--chunked-prefill-size -1" in x) for x in problems] == [True] * (size < 0 and not alone)


@pytest.mark.parametrize(
    ("asked", "computed", "told"),
    [
        (torch.float8_e4m3fn, torch.bfloat16, True),
        (torch.float8_e4m3fn, torch.float16, True),
        (torch.bfloat16, torch.float16, True),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, False),  # check_model refuses it
    ],
)
def test_the_cache_gets_the_dtype_that_the_model_computes(
    asked: torch.dtype, computed: torch.dtype, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang_diffkv.srt.startup.build import keep_computed_dtype

    runner = SimpleNamespace(kv_cache_dtype=asked, kv_cache_dtype_str="of SGLang", dtype=computed)
    with caplog.at_level("INFO", logger="sglang_diffkv"):
        keep_computed_dtype(runner)
    assert runner.kv_cache_dtype == computed
    assert runner.kv_cache_dtype_str == ("of SGLang" if asked == computed else "auto")
    assert (f"was to be {asked}" in caplog.text) is told


def _launch(*args: str, path: Path | None = None, model: str | Path = NANO) -> str:
    """Output of a server that must refuse to start."""
    env = {**os.environ, **CPU_ENV, **OFFLINE_ENV}
    env.pop("TRITON_INTERPRET", None)
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(path), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu", *args]
    done = completed(command, env)
    told = done.stdout + done.stderr
    assert done.returncode != 0, told
    return told


@pytest.mark.server
def test_malformed_config_stops_the_server_at_once() -> None:
    output = _launch("--attention-backend", "diffkv", "--diffkv-config", '{"policy": {"name": "diffkv", "alpha": 1}}')
    assert 'unknown field "alpha" in policy; did you mean alpha_low? allowed are name' in output
    assert "Traceback" not in output


@pytest.mark.server
def test_what_the_doctor_refuses_ends_the_launch_with_a_line_before_weights_are_loaded(tmp_path: Path) -> None:
    """Weights that cannot be loaded are not missed."""
    for path in Path(NANO).iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).symlink_to(path)
    output = _launch(
        *("--attention-backend", "diffkv", "--dtype", "bfloat16", "--port", str(Port().number)),
        *("--diffkv-config", '{"key_means": "none.safetensors"}'),
        model=tmp_path,
    )
    assert 'sglang_diffkv: key_means: "none.safetensors" cannot be read: No such file or directory' in output
    assert "Traceback" not in output and "Load weight" not in output, output


@pytest.fixture(scope="module")
def nano_args() -> Any:
    """SGLang's arguments for nano on a CPU, as a launch has them before it starts processes."""
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path=str(NANO), device="cpu", dtype="bfloat16", attention_backend="torch_native")
    if hasattr(args, "resolve_once"):
        args.resolve_once()
    return args


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"key_means": "none.safetensors"}, "cannot be read"),
        ({"value_rotation": "none.pt"}, 'value_rotation: "none.pt" cannot be read'),
        ({"policy": {"name": "diffkv", "head_scale": [[1.0]]}}, "head_scale is of 1 layers with 1 KV heads"),
        ({"tiers": ["BF16"], "policy": {"name": "xkv", "layer_fractions": [0.5]}}, "layer_fractions is of 1 layers"),
        ({"tiers": ["BF16"], "policy": {"name": "duo", "pattern": [[1.0]]}}, "pattern is of 1 layers"),
        ({"host_gib": 2000}, "host_gib is 2000, but the machine has"),
        ({"decode": "cuda"}, '"decode": "cuda" .* runs on a CPU'),
        ({"decode": "triton", "prefill": "flashinfer"}, '"decode": "triton" and "prefill": "flashinfer" .* on a CPU'),
    ],
)
def test_a_launch_asks_what_the_doctor_asks(
    config: dict[str, Any], reason: str, nano_args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "host_memory", lambda: 64 << 30)
    preflight.ask(nano_args, DiffKVConfig())
    start = time.perf_counter()
    with pytest.raises((ConfigError, UnsupportedError), match=reason) as found:
        preflight.ask(nano_args, load_config(json.dumps(config)))
    assert time.perf_counter() - start < 5 and "\n" not in str(found.value)


def test_a_window_and_a_policy_that_cannot_have_it_are_refused_before_loading(
    nano_args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "configured_spans", lambda config: (64, 0) * 3)
    monkeypatch.setattr(preflight, "model_reads_window", lambda model: True)
    preflight.ask(nano_args, DiffKVConfig())
    with pytest.raises(UnsupportedError, match="policy h2o scores the heads"):
        preflight.ask(nano_args, load_config('{"tiers": ["BF16"], "policy": {"name": "h2o", "budget": 128}}'))


def test_what_sglang_does_not_take_is_left_to_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="sglang_diffkv"):
        preflight.ask(SimpleNamespace(model_path="none"), DiffKVConfig())
    assert "checked once it is loaded" in caplog.text


@pytest.mark.parametrize("command", [True, False])
def test_only_a_command_ends_its_process(command: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ``Engine`` is part of somebody's program, and raises."""
    monkeypatch.setenv(CONFIG_ENV, "{}")
    monkeypatch.setattr(launch, "_launched", launch.Launch("m", "{}", "", command))
    monkeypatch.setattr(launch, "_check", lambda args, config: None)

    def ask(args: Any, config: DiffKVConfig) -> None:
        raise ConfigError("no such head")

    monkeypatch.setattr(preflight, "ask", ask)
    args = SimpleNamespace(attention_backend="diffkv", model_path="m")
    with pytest.raises(SystemExit if command else ConfigError, match="no such head"):
        hooks.check_server_args(lambda self: None, args)


@pytest.mark.parametrize(("text", "expected"), [("max", 100), ("40\n", 40), ("400", 100), (None, 100)])
def test_a_container_s_memory_is_the_machine_s(
    text: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "memory.max"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(host_memory, "CGROUP_LIMIT", path)
    monkeypatch.setattr(os, "sysconf", lambda name: 10)
    assert host_memory.host_memory() == expected


def test_a_configuration_that_processes_cannot_be_given_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_ENV, "")
    monkeypatch.setattr(launch, "_check", lambda args, config: None)
    scale = [[1.0 + head / 3e9 for head in range(100)] for _ in range(100)]
    text = json.dumps({"policy": {"name": "diffkv", "head_scale": scale}})
    with pytest.raises(ConfigError, match="with fewer digits"):
        launch.configure(SimpleNamespace(model_path="m"), text)


@pytest.mark.server
def test_untested_sglang_is_refused_by_name(tmp_path: Path) -> None:
    info = tmp_path / "sglang-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n", encoding="utf-8")
    output = _launch("--attention-backend", "diffkv", path=tmp_path)
    assert "was not tested with SGLang 9.9.9" in output


@pytest.mark.server
def test_config_without_the_backend_is_refused() -> None:
    output = _launch("--attention-backend", "torch_native", "--diffkv-config", "{}")
    assert "no effect without --attention-backend diffkv" in output


@pytest.mark.server
def test_mla_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "data" / "mla" / "config.json", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(Path(NANO) / name, tmp_path)
    output = _launch(
        *("--attention-backend", "diffkv", "--dtype", "bfloat16", "--load-format", "dummy"),
        *("--max-total-tokens", "2000", "--port", str(Port().number)),
        model=tmp_path,
    )
    assert "cannot serve this model" in output
    assert "multi-head latent attention (MLA)" in output


@pytest.mark.server
def test_all_reasons_of_a_model_with_windows_are_told_before_it_is_loaded(tmp_path: Path) -> None:
    """The policy, the form of the drafts, and drafts at all. A folder without weights would end a start otherwise."""
    make_gemma3(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    policy = {"tiers": ["BF16"], "policy": {"name": "zipage", "max_blocks": 4}}
    output = _launch(
        *("--attention-backend", "diffkv", "--diffkv-config", json.dumps(policy)),
        *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"),
        *("--speculative-ngram-external-sam-budget", "2"),
        model=tmp_path,
    )
    assert "--speculative-ngram-external-sam-budget" in output
    assert "policy zipage scores the heads of all layers as a whole" in output
    assert "holds requests to a budget" in output and "sliding window with speculative decoding" in output
    assert "Traceback" not in output and "Load weight" not in output


def _model(temperature: int = -1, **changes: Any) -> torch.nn.Module:
    """A model of two attention layers, of which the second is changed."""
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [RadixAttention(4, 64, 0.125, 2, 0, logit_cap=30.0), RadixAttention(4, 64, 0.125, 2, 1, **changes)]
    layers[1].xai_temperature_len = temperature
    return torch.nn.Sequential(torch.nn.ModuleList(layers), torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attn_type": "ENCODER_ONLY"}, r"not causal \(encoder_only\)"),
        ({"attn_type": "DECODER_BIDIRECTIONAL"}, "not causal"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"v_head_dim": 128}, "heads of other numbers or sizes"),
        ({"use_irope": True}, "in chunks"),
        ({"pos_encoding_mode": "ALIBI"}, "ALIBI"),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, "capped by sigmoid"),
        ({"temperature": 1024}, "scaled by position"),
    ],
)
def test_layers_that_are_not_plain_causal_attention(changes: dict[str, Any], reason: str) -> None:
    from sglang.srt.layers.radix_attention import AttentionType

    if "attn_type" in changes:
        changes = {"attn_type": AttentionType[changes["attn_type"]]}
    check_layers(_model())
    check_layers(_model(sliding_window_size=127))
    with pytest.raises(UnsupportedError, match=f"cannot serve this model \\(Sequential\\): it has .*{reason}"):
        check_layers(_model(**changes))


@pytest.mark.parametrize("windows", [(127, 63), (127, -1), (-1, 127)])
def test_two_windows_of_one_layer_are_refused(windows: tuple[int, int]) -> None:
    """A layer drops what has left its window, so two modules that keep keys in one layer must see as far."""
    from sglang.srt.layers.radix_attention import RadixAttention

    def model(*of_layer_7: int) -> torch.nn.Module:
        modules = [RadixAttention(4, 64, 0.125, 2, 7, sliding_window_size=x) for x in of_layer_7]
        return torch.nn.ModuleList([RadixAttention(4, 64, 0.125, 2, 0), *modules])

    for window in windows:
        check_layers(model(window, window))
    with pytest.raises(UnsupportedError, match="two different windows in layer 7"):
        check_layers(model(*windows))


def test_what_is_given_to_attention_beside_q_k_and_v_is_refused() -> None:
    from sglang_diffkv.srt.backend import DiffKVAttnBackend

    backend = DiffKVAttnBackend.__new__(DiffKVAttnBackend)
    for run in (backend.forward_extend, backend.forward_decode):
        with pytest.raises(NotImplementedError, match="attention with q_rope, sinks:"):
            run(None, None, None, None, None, sinks=torch.zeros(4), q_rope=torch.zeros(4), return_lse=False, aux=None)


@pytest.mark.parametrize("ours", [True, False])
def test_no_model_writes_k_and_v_by_itself(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    from sglang.srt.models import utils

    from sglang_diffkv.srt.hooks.table import enable_fused_set_kv_buffer
    from sglang_diffkv.srt.pool import DiffKVPool

    pool = DiffKVPool(64, torch.bfloat16, [0], "cpu", False, 0, 0) if ours else object()
    monkeypatch.setattr(utils, "get_token_to_kv_pool", lambda: pool)
    assert enable_fused_set_kv_buffer(lambda batch: True, None) is (not ours)


@pytest.mark.server
def test_a_start_that_died_without_a_word_says_why() -> None:
    from sglang.srt.server_args import ServerArgs

    options = ["--enable-flexkv", "--is-embedding", "--kv-canary-real-data", "all"]
    reasons = [
        "FlexKV, which moves K and V by KV slot: drop --enable-flexkv",
        "--is-embedding: ",
        "--kv-canary-real-data all: use",
    ]
    if hasattr(ServerArgs, "enable_unified_cache_external_linker"):
        options.append("--enable-unified-cache-external-linker")
        reasons.append(
            "an external KV store, which moves K and V by KV slot: drop --enable-unified-cache-external-linker"
        )
    output = _launch("--attention-backend", "diffkv", *options)
    assert all(reason in output for reason in reasons), output
    assert "Traceback" not in output


def _diffkv(**fields: Any) -> str:
    return json.dumps({"policy": {"name": "diffkv", **fields}})


def _one_tier(name: str, **fields: Any) -> str:
    return json.dumps({"tiers": ["BF16"], "policy": {"name": name, **fields}})


SAID = [
    ('{"tier": ["K8V4"]}', 'unknown field "tier"; did you mean tiers? allowed are tiers, policy, page_tokens'),
    ('{"alpha_high": 3}', 'unknown field "alpha_high"; did you mean policy.alpha_high? allowed are tiers'),
    (_diffkv(alpha_hihg=1), 'unknown field "alpha_hihg" in policy; did you mean alpha_high? allowed are name'),
    (_diffkv(page_tokens=8), "did you mean page_tokens beside policy?"),
    (_one_tier("streaming", budget=3), 'unknown field "budget" in policy: allowed are name, window, sinks'),
    ('{"policy": {"name": "diffvk"}}', 'policy.name is "diffvk": allowed is "diffkv", "leankv"'),
    ('{"policy": {"name": "diffvk"}}', 'or "zipage"; did you mean "diffkv"?'),
    ('{"policy": "duo"}', 'policy is "duo": allowed is an object with the field name, one of "diffkv"'),
    ('{"policy": {}}', 'policy.name is missing: "diffkv"'),
    ('{"prefix_fidelity": "exakt"}', 'is "exakt": allowed is "compressed" or "exact"; did you mean "exact"?'),
    ('{"page_tokens": 1}', "page_tokens is 1: allowed is a whole number from 4 to 256"),
    ('{"host_gib": 4096}', "host_gib is 4096: allowed is a number from 0 to 2048, or null"),
    (_diffkv(window="64"), 'policy.window is "64": allowed is a whole number from 1 to 4,096 (newest tokens'),
    (_diffkv(alpha_high="3"), 'policy.alpha_high is "3": allowed is a number from 0 to 1e+12'),
    (_diffkv(head_scale=[[1, 0]]), "policy.head_scale[0][1] is 0: allowed is a number from 1e-06 to 1e+06"),
    (_one_tier("zipage"), "policy.max_blocks is missing: a whole number from 2 to 262,144 (blocks"),
    (_one_tier("duo", pattern=[["x"]]), 'policy.pattern[0][0] is "x": allowed is a number from -1e+06'),
    (_one_tier("duo", pattern="none"), 'policy.pattern: "none" cannot be read: No such file or directory'),
    (_one_tier("xkv", keep=0), "policy.keep is 0: allowed is a number above 0 and at most 1, or null"),
    ('{"tiers": [8]}', "tiers[0] is 8: allowed is a text"),
    ('{"rotate": 2}', 'rotate is 2: allowed is "none", "keys", "values" or "both"'),
    ("[1]", "the whole is a list of 1: allowed is an object"),
]


@pytest.mark.parametrize(("text", "said"), SAID)
def test_refusals_say_what_is_wrong_and_what_is_allowed_in_a_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        read_config(text)
    told = str(found.value)
    assert said in told and "\n" not in told
    page = "docs/configuration.md#methods" if '"policy"' in text else "docs/configuration.md"
    assert told.endswith(f"(see {page})")
    for word in ("Input should", "validated data", "Extra inputs", "Value error", "pydantic", "tuple", "dict"):
        assert word not in told


def test_several_mistakes_have_a_line_each() -> None:
    with pytest.raises(ConfigError) as found:
        read_config('{"page_tokens": 1, "rotate": 2, "tiers": ["x"], "decode": 1, "prefill": 1, "gpu_ops": 1}')
    first, *lines = str(found.value).splitlines()
    assert first == "--diffkv-config (inline JSON): 6 mistakes (see docs/configuration.md):"
    assert lines[0].startswith('  tiers: impossible tier "x"') and lines[-1] == "  and 1 more" and len(lines) == 6


def _in_a_table(allowed: str) -> str:
    """What a refusal says is allowed, in fewer words."""
    for words, fewer in (("a whole number from ", "integer, "), ("a number above", "above"), ("a number from ", "")):
        allowed = allowed.replace(words, fewer)
    return f"text, {allowed.removeprefix('a text of ')}" if allowed.startswith("a text of ") else allowed


def test_the_documentation_has_what_is_allowed() -> None:
    """Of every field, as refusals say it."""
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    told = page[page.index("## Allowed values") :]
    for name in DiffKVConfig.model_fields:
        allowed = _in_a_table(kind_of(DiffKVConfig, name).describe())
        assert name == "policy" or f"| `{name}` | {allowed} |" in told
    for kind in get_args(PolicyConfig):
        for name in set(kind.model_fields) - {"name"}:
            allowed = _in_a_table(kind_of(kind, name).describe())
            row = f"`{kind.model_fields['name'].default}.{name}` | {allowed} |"
            assert f"| {row}" in told, row
