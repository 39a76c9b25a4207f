"""Every option of the supported SGLang versions is checked: it works, is refused, or has no bearing on the cache."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from benchmarks.paths import NANO
from sglang_diffkv.config import UNTRIED_ENV, DiffKVConfig
from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.srt.models.speculation import MODEL_CHAIN
from sglang_diffkv.srt.startup import launch
from sglang_diffkv.srt.startup.server_flags import REFUSED, OnlyWith, Refused, flags
from sglang_diffkv.srt.startup.supported_flags import WORKS
from sglang_diffkv.srt.startup.validation import check_server_args
from sglang_diffkv.srt.versions.compat import TESTED_VERSIONS, installed, resolved, sglang_version
from sglang_diffkv.srt.versions.states import model_has_states

ROOT = Path(__file__).parents[2]
FIELDS = {path.stem: set(path.read_text().split()) for path in (ROOT / "tests/data/server_args").glob("*.txt")}


def server_args_fields() -> dict[str, Any]:
    """The installed ``ServerArgs``' fields and defaults; the class is a dataclass or a struct of msgspec."""
    import dataclasses

    if dataclasses.is_dataclass(ServerArgs):
        return {x.name: x.default for x in dataclasses.fields(ServerArgs)}
    import msgspec

    return {x.name: x.default for x in msgspec.structs.fields(ServerArgs)}


def test_the_lists_of_fields_are_those_of_the_supported_versions():
    assert set(FIELDS) == set(TESTED_VERSIONS)
    assert FIELDS[sglang_version()] == set(server_args_fields()), "tests/data/server_args is not this SGLang's"


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_every_field_is_checked(version):
    assert FIELDS[version] - set(flags()) == set(), f"options of SGLang {version} that server_flags.py does not list"


def test_nothing_else_is_listed():
    assert set(flags()) - set.union(*FIELDS.values()) == set(), "options that no supported SGLang has"


def test_what_is_read_only_with_a_refused_option_names_one():
    for name, flag in flags().items():
        if isinstance(flag, OnlyWith):
            assert flag.what in REFUSED or flag.what.startswith("models with"), name


def _tests(path: Path) -> set[str]:
    return {x.name for x in ast.parse(path.read_text()).body if isinstance(x, ast.FunctionDef)}


def test_the_tests_that_are_named_exist():
    named = [*WORKS, *(x.otherwise for x in REFUSED.values() if x.otherwise.startswith("tests/"))]
    for text in named:
        path, _, name = text.partition("::")
        assert name in _tests(ROOT / path), f"{text}, which shows that options work, does not exist"


REFUSED_VALUES: dict[str, Any] = {
    "attention_backend": "triton",
    "prefill_attention_backend": "triton",
    "decode_attention_backend": "triton",
    "kv_cache_dtype": "fp8_e4m3",
    "speculative_algorithm": "DFLASH",
    "speculative_ngram_external_sam_budget": 3,
    "speculative_num_draft_tokens": 17,
    "speculative_num_steps": 16,
    "speculative_draft_attention_backend": "diffkv",
    "decoupled_spec_role": "drafter",
    "uno_lora_path": "adapter",
    "hicache_storage_backend": "nixl",
    "hicache_storage_prefetch_retry_poll_interval": 3,
    "hicache_storage_prefetch_retry_max_attempts": 3,
    "hicache_host_memory_mode": "buffer_only",
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_head",
    "radix_cache_backend": "lmcache",
    "attn_cp_size": 2,
    "dcp_size": 2,
    "dwdp_size": 2,
    "pp_size": 2,
    "attn_dp_size": 2,
    "elastic_ep_backend": "mooncake",
    "ep_join_mode": "scale",
    "dllm_algorithm": "LowConfidence",
    "mamba_radix_cache_strategy": "extra_buffer",
    "mamba_max_states_per_path": 4,
    "device": "xpu",
    "rl_on_policy_target": "fsdp",
    "cuda_graph_backend_decode": "breakable",
    "kv_canary": "raise",
    "kv_canary_real_data": "partial",
}
"""For the fields that are no switches."""

CHAINS = {
    "speculative_ngram_external_sam_budget": 0,
    "speculative_num_draft_tokens": 4,
    "speculative_num_steps": 3,
    "speculative_adaptive": False,
    "speculative_draft_attention_backend": "triton",
}

ON_A_GPU = {"cuda_graph_config", "cuda_graph_backend_prefill"}


def _args(**changes: Any) -> SimpleNamespace:
    """The installed SGLang's defaults for a CPU server, and the other versions' fields off."""
    off = dict.fromkeys(set().union(*FIELDS.values()))
    given = {**off, **server_args_fields(), "attention_backend": "diffkv", "device": "cpu", "page_size": 1}
    return SimpleNamespace(**{**given, "kv_canary": "none", "kv_canary_real_data": "none", **changes})


@pytest.mark.parametrize("name", sorted(set(REFUSED) - ON_A_GPU))
def test_each_refusal_says_what_to_do(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    check_server_args(_args())
    value = REFUSED_VALUES.get(name, True)
    also: dict[str, Any] = {"dp_size": 2} if name == "enable_dp_attention" else {}
    if name in ("hicache_host_memory_mode", "hicache_io_backend", "hicache_mem_layout"):
        check_server_args(_args(**{name: value}))  # read by nobody
        also = {"enable_hierarchical_cache": True}
        check_server_args(_args(**also))
    if name in CHAINS or name == "enable_mixed_chunk":
        also = {**CHAINS, "speculative_algorithm": "NGRAM" if "ngram" in name else "EAGLE"}
        check_server_args(_args(**also))
        also.pop(name, None)
    args = _args(**{name: value}, **also)
    with pytest.raises(UnsupportedError) as refusal:
        check_server_args(args)
    assert REFUSED[name].why.format(value=value, found=REFUSED[name].when(value, args)) in str(refusal.value)


@pytest.mark.parametrize("dtype", ["auto", "bf16", "bfloat16"])
def test_a_cache_of_the_model_s_numbers_may_be_asked_for(dtype):
    check_server_args(_args(kv_cache_dtype=dtype))


def test_states_may_be_kept_otherwise_where_the_prefix_cache_keeps_none():
    otherwise = {"mamba_max_states_per_path": 4, "enable_int8_mamba_checkpoint": True, "enable_linear_replayssm": True}
    check_server_args(_args(disable_radix_cache=True, mamba_radix_cache_strategy="extra_buffer", **otherwise))
    check_server_args(_args(mamba_radix_cache_strategy="no_buffer"))


CHAIN = {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
TREE = {"speculative_eagle_topk": 4, "speculative_num_steps": 5, "speculative_num_draft_tokens": 8}
N_GRAMS = {"speculative_ngram_min_bfs_breadth": 1, "speculative_ngram_max_bfs_breadth": 1}


@pytest.fixture
def drafts_on_a_gpu(monkeypatch):
    """The installed SGLang is one with which drafts ran on a GPU."""
    monkeypatch.delenv(UNTRIED_ENV, raising=False)
    monkeypatch.setattr("sglang_diffkv.srt.versions.compat.GPU_VERSIONS", TESTED_VERSIONS)
    monkeypatch.setattr("sglang_diffkv.srt.startup.validation.DRAFTS_GPU_VERSIONS", TESTED_VERSIONS)


def test_drafts_are_refused_on_a_gpu_until_they_were_run_there(drafts_on_a_gpu, monkeypatch):
    check_server_args(_args(device="cuda", speculative_algorithm="NGRAM", **N_GRAMS))
    check_server_args(_args(device="cuda", speculative_algorithm="STANDALONE", **CHAIN))
    heads = {"speculative_algorithm": "EAGLE", **CHAIN}
    check_server_args(_args(device="cpu", **heads))
    check_server_args(_args(device="cuda", **heads))
    monkeypatch.setattr("sglang_diffkv.srt.startup.validation.DRAFTS_GPU_VERSIONS", ("0.1",))
    with pytest.raises(UnsupportedError, match=rf"EAGLE .*drop --speculative-algorithm, or set {UNTRIED_ENV}=1"):
        check_server_args(_args(device="cuda", **heads))
    with pytest.raises(UnsupportedError, match=r"STANDALONE of SGLang .*drop --speculative-algorithm"):
        check_server_args(_args(device="cuda", speculative_algorithm="STANDALONE", **CHAIN))
    monkeypatch.setenv(UNTRIED_ENV, "1")
    check_server_args(_args(device="cuda", **heads))


def test_trees_of_a_model_s_drafts_are_refused_on_a_gpu_until_they_were_run_there(drafts_on_a_gpu, monkeypatch):
    """Those of n-grams, which draft trees by default, were."""
    trees = {"speculative_algorithm": "EAGLE", **TREE}
    check_server_args(_args(device="cpu", **trees))
    check_server_args(_args(device="cuda", speculative_algorithm="NGRAM"))
    monkeypatch.setattr("sglang_diffkv.srt.startup.validation.TREES_GPU_VERSIONS", ())
    what = rf"trees of EAGLE's drafts on a GPU.*add {MODEL_CHAIN}, or set {UNTRIED_ENV}=1"
    with pytest.raises(UnsupportedError, match=what):
        check_server_args(_args(device="cuda", **trees))
    monkeypatch.setattr("sglang_diffkv.srt.startup.validation.TREES_GPU_VERSIONS", TESTED_VERSIONS)
    check_server_args(_args(device="cuda", **trees))
    alone = {**trees, "speculative_algorithm": "STANDALONE"}
    with pytest.raises(UnsupportedError, match=r"trees of STANDALONE's drafts on a GPU"):
        check_server_args(_args(device="cuda", **alone))
    monkeypatch.setenv(UNTRIED_ENV, "1")
    check_server_args(_args(device="cuda", **alone))


def test_a_release_that_was_not_run_on_a_gpu_is_refused_there_but_to_who_wants_to_try(monkeypatch):
    monkeypatch.delenv(UNTRIED_ENV, raising=False)
    monkeypatch.setattr("sglang_diffkv.srt.versions.compat.GPU_VERSIONS", ("0.1",))
    check_server_args(_args(device="cpu"))
    with pytest.raises(UnsupportedError, match=rf"on a GPU, where it was not tested: .*or set {UNTRIED_ENV}=1"):
        check_server_args(_args(device="cuda"))
    monkeypatch.setenv(UNTRIED_ENV, "1")
    check_server_args(_args(device="cuda"))


def test_a_draft_model_in_graphs_runs_under_overlap_scheduling(drafts_on_a_gpu):
    """SGLang's own servers end with an assertion without it."""
    model = {"device": "cuda", "speculative_algorithm": "STANDALONE", **CHAIN, "disable_overlap_schedule": True}
    check_server_args(_args(**model, disable_cuda_graph=True))
    with pytest.raises(UnsupportedError, match="drop --disable-overlap-schedule, or add --disable-cuda-graph"):
        check_server_args(_args(**model))
    check_server_args(_args(**{**model, "speculative_algorithm": "EAGLE"}))
    n_grams = {"speculative_algorithm": "NGRAM", **N_GRAMS}
    check_server_args(_args(device="cuda", disable_overlap_schedule=True, **n_grams))


def test_judging_beside_passes_is_refused_on_a_gpu_until_it_was_run_there(drafts_on_a_gpu, monkeypatch):
    policy = {"name": "zipage", "max_blocks": 4, "asynchronous": True}
    config = DiffKVConfig(tiers=("BF16",), policy=policy)
    check_server_args(_args(device="cpu"), config)
    with pytest.raises(UnsupportedError, match=rf'"asynchronous": true on a GPU, .*{UNTRIED_ENV}=1'):
        check_server_args(_args(device="cuda"), config)
    check_server_args(_args(device="cuda"), DiffKVConfig(tiers=("BF16",), policy={**policy, "asynchronous": False}))
    monkeypatch.setenv(UNTRIED_ENV, "1")
    check_server_args(_args(device="cuda"), config)


def test_drafts_are_planned_on_the_stream_of_the_passes(drafts_on_a_gpu, monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    check_server_args(_args(device="cuda"))
    with pytest.raises(UnsupportedError, match="SGLANG_ENABLE_OVERLAP_PLAN_STREAM"):
        check_server_args(_args(device="cuda", speculative_algorithm="NGRAM", **N_GRAMS))


def test_what_hides_steps_from_the_backend_is_refused_on_a_gpu(monkeypatch):
    """SGLang's graphs of what is prepared outside of a pass's graph: the host would not be asked before a replay."""
    monkeypatch.setattr("sglang_diffkv.srt.versions.compat.GPU_VERSIONS", TESTED_VERSIONS)
    monkeypatch.setenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1")
    check_server_args(_args(device="cpu"))
    with pytest.raises(UnsupportedError, match="SGLANG_ENABLE_METADATA_GLUE_GRAPH"):
        check_server_args(_args(device="cuda"))
    monkeypatch.setenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "false")
    check_server_args(_args(device="cuda"))


@pytest.mark.parametrize("phase, kind", [("prefill", "full"), ("prefill", "tc_piecewise"), ("decode", "breakable")])
def test_graphs_that_are_not_served_are_refused_on_a_gpu(phase, kind, tried):
    backends = {"prefill": SimpleNamespace(backend="breakable"), "decode": SimpleNamespace(backend="full")}
    check_server_args(_args(device="cuda", cuda_graph_config=SimpleNamespace(**backends)))
    backends[phase] = SimpleNamespace(backend=kind)
    with pytest.raises(UnsupportedError, match="graphs"):
        check_server_args(_args(device="cuda", cuda_graph_config=SimpleNamespace(**backends)))
    check_server_args(_args(device="cpu", cuda_graph_config=SimpleNamespace(**backends)))


@pytest.fixture
def tried(monkeypatch):
    """The installed SGLang was tried on a GPU, with graphs of prompts too."""
    monkeypatch.setattr("sglang_diffkv.srt.versions.compat.GPU_VERSIONS", TESTED_VERSIONS)
    monkeypatch.setattr("sglang_diffkv.srt.startup.prefill_graphs.GRAPHS_GPU_VERSIONS", TESTED_VERSIONS)


@pytest.mark.parametrize(
    "more",
    [
        {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": str(NANO),
            "speculative_eagle_topk": 1,
            "speculative_num_steps": 3,
            "speculative_num_draft_tokens": 4,
        },
        {"enable_torch_compile": True},
        {"enable_lora": True},
        {"tp_size": 2},
    ],
)
def test_prefill_graphs_are_refused_beside_what_they_were_not_tried_with(more, tried, monkeypatch):
    monkeypatch.setenv("SGLANG_DIFFKV_UNTRIED", "1")
    backends = {"prefill": SimpleNamespace(backend="breakable"), "decode": SimpleNamespace(backend="full")}
    args = _args(device="cuda", cuda_graph_config=SimpleNamespace(**backends), **more)
    with pytest.raises(UnsupportedError, match="CUDA graphs for prefill"):
        check_server_args(args)
    backends["prefill"].backend = "disabled"
    check_server_args(_args(device="cuda", cuda_graph_config=SimpleNamespace(**backends), **more))


@pytest.mark.parametrize("kind", ["breakable", "tc_piecewise"])
@pytest.mark.parametrize("obstacle", ["", "version", "states", "n-grams", "untried n-grams"])
def test_prefill_graphs_that_sglang_chooses_stay_where_they_are_served(obstacle, kind, tried, monkeypatch, caplog):
    """Through SGLang's own resolution, which on a GPU ends with prefill graphs."""
    if obstacle == "version":
        monkeypatch.setattr("sglang_diffkv.srt.startup.prefill_graphs.GRAPHS_GPU_VERSIONS", ())
    seen = () if obstacle == "untried n-grams" else (sglang_version(),)
    monkeypatch.setattr("sglang_diffkv.srt.startup.prefill_graphs.DRAFTS_GPU_VERSIONS", seen)
    if obstacle == "states":
        monkeypatch.setattr("sglang_diffkv.srt.startup.prefill_graphs.model_has_states", lambda args: True)
    monkeypatch.setattr("sglang_diffkv.srt.startup.validation.DRAFTS_GPU_VERSIONS", (sglang_version(),))
    drafts = {"speculative_algorithm": "NGRAM"} if "n-grams" in obstacle else {}
    args = _resolved_args(monkeypatch, **drafts)
    _choose_prefill_graphs(args, kind)
    with caplog.at_level("INFO"):
        launch.configure(args, "{}")
    stays = kind == "breakable" and obstacle in ("", "n-grams")
    assert resolved(args).cuda_graph_config.prefill.backend == (kind if stays else "disabled")
    assert resolved(args).cuda_graph_config.decode.backend == "full"
    assert ("passes over prompts run without CUDA graphs" in caplog.text) == (not stays)
    _choose_prefill_graphs(args, kind)  # a launch from the command line is configured before SGLang has chosen anything
    launch.configure_unless_done(args)
    assert resolved(args).cuda_graph_config.prefill.backend == (kind if stays else "disabled")


def test_prefill_graphs_that_a_user_asks_for_are_refused_where_they_are_not_served(tried, monkeypatch):
    args = _resolved_args(monkeypatch, cuda_graph_backend_prefill="breakable")
    _choose_prefill_graphs(args)
    launch.configure(args, "{}")
    assert resolved(args).cuda_graph_config.prefill.backend == "breakable"
    monkeypatch.setattr("sglang_diffkv.srt.startup.prefill_graphs.GRAPHS_GPU_VERSIONS", ())
    with pytest.raises(UnsupportedError, match="CUDA graphs for prefill"):
        launch.configure(args, "{}")


def test_a_model_without_states_is_known_by_its_configuration(monkeypatch):
    assert not model_has_states(_resolved_args(monkeypatch))


def _resolved_args(monkeypatch, **more):
    monkeypatch.setenv("SGLANG_DIFFKV_CONFIG", "")
    monkeypatch.setattr(launch, "_launched", None)
    args = ServerArgs(str(NANO), attention_backend="diffkv", device="cuda", mm_feature_transport="cpu", **more)
    if hasattr(args, "resolve_once"):
        args.resolve_once()
    return args


def _choose_prefill_graphs(args: ServerArgs, kind: str = "breakable") -> None:
    """What SGLang decides where there is a GPU."""
    if not installed().declared_arguments:
        args.cuda_graph_config.prefill.backend = kind
        return
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.model_executor.cuda_graph_config import with_phase

    config = with_phase(resolved(args).cuda_graph_config, "prefill", backend=kind)
    declare_resolution(args, "test", cuda_graph_config=config)


@pytest.mark.skipif(not installed().canary_on_cpu, reason="SGLang 0.5.17 has no canary for a CPU")
def test_the_canary_runs_on_a_cpu_in_triton_s_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_server_args(_args(kv_canary="raise"))


def test_all_problems_are_told_at_once():
    with pytest.raises(UnsupportedError) as refusal:
        check_server_args(_args(is_embedding=True, enable_flexkv=True, enable_mis=True))
    assert all(x in str(refusal.value) for x in ("--is-embedding", "FlexKV", "multi-item"))


def test_the_page_for_users_names_every_refused_option():
    page = (ROOT / "docs/flags.md").read_text()
    for name, flag in flags().items():
        if isinstance(flag, Refused) and not flag.otherwise:
            assert f"`--{name.replace('_', '-')}`" in page, f"docs/flags.md lacks {name}"
