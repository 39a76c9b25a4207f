"""Which layers of a model with states have pages, and what its states take, without a server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_diffkv.capacity.model import read_model
from sglang_diffkv.config import CONFIG_ENV, UNTRIED_ENV
from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.findings import Findings
from sglang_diffkv.releases import TESTED_VERSIONS
from sglang_diffkv.srt.backend import DiffKVAttnBackend
from sglang_diffkv.srt.doctor import _without_states
from sglang_diffkv.srt.models import hybrids
from sglang_diffkv.srt.models.hybrids import check_paged_layers, describe_layers, hybrid_problems, paged_layers
from sglang_diffkv.srt.startup.draft_model import update_mamba_state_after_mtp_verify
from sglang_diffkv.srt.startup.preflight import reading_obstacle
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.versions import states as compat_states

MIB = 1 << 20


def _hybrid(layers: int = 8, **more: Any) -> Any:
    from sglang.srt.configs.qwen3_next import Qwen3NextConfig

    sizes = {"linear_num_value_heads": 8, "linear_num_key_heads": 4, "full_attention_interval": 4}
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4}
    config = Qwen3NextConfig(num_hidden_layers=layers, **{**sizes, **heads, **more})
    info = SimpleNamespace(start_layer=0, num_effective_layers=layers)
    args = SimpleNamespace(disable_radix_cache=True)
    return SimpleNamespace(mambaish_config=config, layer_info=info, server_args=args)


def test_layers_that_attend_have_pages() -> None:
    hybrid = _hybrid()
    assert paged_layers(hybrid) == (3, 7)
    hybrid.layer_info.start_layer, hybrid.layer_info.num_effective_layers = 4, 4
    assert paged_layers(hybrid) == (7,)
    hybrid.mambaish_config = None
    assert paged_layers(hybrid) == (4, 5, 6, 7)


def test_states_go_back_to_the_last_draft_that_was_accepted() -> None:
    """On a CPU, where SGLang's kernel for it does not run: chains of three drafts, of which one, all and none stay."""
    layers, slots, chains, drafts = 2, 5, 3, 3
    draw = torch.Generator().manual_seed(0)
    caches = SimpleNamespace(
        temporal=torch.randn(layers, slots, 2, 4, generator=draw),
        conv=[torch.randn(layers, slots, 6, 3, generator=draw)],
        intermediate_ssm=torch.randn(layers, chains, drafts, 2, 4, generator=draw),
        intermediate_conv_window=[torch.randn(layers, chains, drafts, 6, 3, generator=draw)],
    )
    before = [caches.temporal.clone(), caches.conv[0].clone()]
    rows = SimpleNamespace(get_speculative_mamba2_params_all_layers=lambda: caches)
    metadata = SimpleNamespace(mamba_cache_indices=torch.tensor([4, 1, 2, 0], dtype=torch.int32))
    linear = SimpleNamespace(req_to_token_pool=rows, forward_metadata=metadata)
    ours = DiffKVAttnBackend.__new__(DiffKVAttnBackend)
    backend = SimpleNamespace(linear_attn_backend=linear, full_attn_backend=ours)
    steps = torch.tensor([0, 2, -1])
    update_mamba_state_after_mtp_verify(None, backend, steps, None, None, None)
    pairs = [(caches.temporal, caches.intermediate_ssm), (caches.conv[0], caches.intermediate_conv_window[0])]
    for (states, each), old in zip(pairs, before):
        assert torch.equal(states[:, 4], each[:, 0, 0]) and torch.equal(states[:, 1], each[:, 1, 2])
        assert all(torch.equal(states[:, slot], old[:, slot]) for slot in (0, 2, 3)), "others' states stay"
    another = SimpleNamespace(full_attn_backend=object())
    assert update_mamba_state_after_mtp_verify(lambda *given: given, another, steps) == (another, steps), "as stock's"


@pytest.mark.parametrize("alone", [True, False])
def test_which_drafts_beside_states_are_served(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UNTRIED_ENV, raising=False)
    hybrid = _hybrid()
    hybrid.device, hybrid.model_config = "cpu", SimpleNamespace(hf_text_config=None)
    args = hybrid.server_args = SimpleNamespace(disable_radix_cache=alone, chunked_prefill_size=64, page_size=1)
    older = replace(compat.installed(), draft_states_on_cpu=False)
    for args.speculative_algorithm in ("NGRAM", "NEXTN"):
        monkeypatch.setattr(compat, "installed", lambda: older)
        assert "install a later SGLang" in next(hybrid_problems(hybrid))
        monkeypatch.setattr(compat, "installed", lambda: replace(older, draft_states_on_cpu=True))
        assert not list(hybrid_problems(hybrid)), "chains"
    args.speculative_algorithm, args.speculative_ngram_max_bfs_breadth = "NGRAM", 10
    (trees,) = hybrid_problems(hybrid)
    assert "trees of drafts beside layers with states" in trees and "max-bfs-breadth 1" in trees
    args.speculative_ngram_max_bfs_breadth = 1
    hybrid.device = "cuda"
    monkeypatch.setattr(hybrids, "DRAFTS_GPU_VERSIONS", ())
    monkeypatch.setattr(hybrids, "STATES_GPU_VERSIONS", ())
    monkeypatch.setattr(hybrids, "DELTA_GPU_VERSIONS", TESTED_VERSIONS)
    other, own = "other drafts than its own layer's", "drafts of the model's own layer"
    args.model_path = "here"
    ways = (("NGRAM", None, other), ("NEXTN", None, own), ("EAGLE", "here", own), ("STANDALONE", "there", other))
    for args.speculative_algorithm, args.speculative_draft_model_path, what in (*ways, ("EAGLE", "there", other)):
        (untried,) = hybrid_problems(hybrid)
        assert untried.startswith(f"{what} beside layers with states, of SGLang")
    monkeypatch.setattr(hybrids, "DRAFTS_GPU_VERSIONS", TESTED_VERSIONS)
    for args.speculative_algorithm, args.speculative_draft_model_path, what in ways:
        assert len(list(hybrid_problems(hybrid))) == (what == other)
    args.speculative_algorithm = None
    assert not list(hybrid_problems(hybrid))
    monkeypatch.setattr(hybrids, "DELTA_GPU_VERSIONS", ())
    assert "layers with states, of SGLang" in next(hybrid_problems(hybrid))
    args.speculative_algorithm = "NGRAM"
    hybrid.device, hybrid.mambaish_config = "cpu", SimpleNamespace(full_attention_layer_ids=[3, 7])
    (other,) = hybrid_problems(hybrid)
    assert "states other than those of a gated delta rule" in other


def test_pages_and_attention_are_in_the_same_layers() -> None:
    check_paged_layers("Model", {7, 3}, (3, 7))
    for found in ({3}, {3, 5, 7}):
        with pytest.raises(UnsupportedError, match=r"Model.*attention is in layers .* for \[3, 7\]"):
            check_paged_layers("Model", found, (3, 7))


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_take_what_sglang_says(ranks: int) -> None:
    hybrid = _hybrid()
    states = compat_states.planned_states(hybrid.mambaish_config, ranks)
    size = 6 * (8 * 64 * 64 * 4 + (2 * 4 * 64 + 8 * 64) * 3 * 2) // ranks
    assert (list(states.layers), states.mamba_cache_per_req) == ([0, 1, 2, 4, 5, 6], size)
    told = describe_layers(hybrid, states)
    assert "2 of 8 layers have keys and values, which are compressed (3, 7); 6 have states" in told
    assert f"{size / MIB:.2f} MiB a request" in told and "Prefixes are not shared" in told
    hybrid.server_args.disable_radix_cache = False
    assert "Prefixes are shared up to where a state is kept" in describe_layers(hybrid, states)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "lfm2", "falcon_h1"])
def test_a_plan_from_config_json_counts_the_same_states(kind: str, ranks: int, tmp_path: Path) -> None:
    """``sglang_diffkv.capacity`` reads the file without SGLang."""
    from sglang.srt.configs import FalconH1Config, Lfm2Config, Qwen3NextConfig
    from sglang.srt.configs.qwen3_5 import Qwen3_5TextConfig

    sizes = {
        "vocab_size": 8256, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
        "num_key_value_heads": 2, "max_position_embeddings": 8192, "num_hidden_layers": 8,
    }  # fmt: skip
    rule = {
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "full_attention_interval": 4, "head_dim": 256,
    }  # fmt: skip
    mamba = {
        "mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
        "mamba_d_conv": 4,
    }  # fmt: skip
    config: Any = {
        "qwen3_next": lambda: Qwen3NextConfig(**sizes, **rule),
        "qwen3_5": lambda: Qwen3_5TextConfig(**sizes, **rule),
        "lfm2": lambda: Lfm2Config(**sizes, layer_types=(["conv"] * 3 + ["full_attention"]) * 2),
        "falcon_h1": lambda: FalconH1Config(**sizes, **mamba),
    }[kind]()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    model, states = read_model(str(tmp_path)), compat_states.planned_states(config, ranks)
    assert model.state_bytes(ranks) == states.mamba_cache_per_req and model.stateful == len(states.layers)
    assert model.layers == len(config.full_attention_layer_ids)


@pytest.mark.parametrize("slot", [None, 5])
def test_a_request_that_leaves_before_it_has_tokens_gives_its_state_back(slot: int | None) -> None:
    told: list[str] = []
    kv = SimpleNamespace(req_pool_idx=2, mamba_pool_idx=slot, kv_allocated_len=0)
    old = compat.installed().row_on_request
    req = SimpleNamespace(
        kv=None if old else kv, last_node=None, lock=None, reset_for_retract=lambda: told.append("reset")
    )
    if old:
        vars(req).update(vars(kv))
    rows = SimpleNamespace(free_mamba_cache=lambda x: told.append("state"), free=lambda x: told.append("row"))
    batch = SimpleNamespace(reqs=[req], req_to_token_pool=rows, tree_cache=SimpleNamespace(unlock=lambda lock: None))
    compat.release_request(batch, 0)
    assert told == [*([] if slot is None else ["state"]), "row", "reset"]


def test_the_plan_leaves_room_for_states() -> None:
    hybrid = _hybrid()
    hybrid.states = states = SimpleNamespace(mamba_cache_per_req=MIB)
    asked = {"max_mamba_cache_size": None, "max_running_requests": None, "mamba_full_memory_ratio": 0.5}
    of_alone = ((99, 99, {}), (7, 7, {"max_running_requests": 7}), (9, 9, {"max_mamba_cache_size": 9}))
    of_shared = ((99, 33, {}), (99, 33, {"max_running_requests": 7}), (9, 3, {"max_mamba_cache_size": 9}))
    for alone, cases in ((True, of_alone), (False, of_shared)):
        for slots, most, changes in cases:
            hybrid.server_args = SimpleNamespace(disable_radix_cache=alone, **{**asked, **changes})
            findings = Findings()
            assert _without_states(findings, hybrid, 300 * MIB) == (300 * MIB - (slots + 1) * MIB, most)
            assert findings.items[0].value == (slots + 1) * states.mamba_cache_per_req
    hybrid.server_args = SimpleNamespace(disable_radix_cache=True, **{**asked, "mamba_full_memory_ratio": None})
    assert _without_states(Findings(), hybrid, 300 * MIB) == (158 * MIB, 141), "SGLang's ratio where none is given"
    drafting = {"max_running_requests": 48, "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    for alone, slots, most, behind in ((True, 48, 48, 49), (False, 40, 13, 14)):
        hybrid.server_args = SimpleNamespace(disable_radix_cache=alone, **{**asked, **drafting})
        left = 300 * MIB - (slots + 1 + 4 * behind) * MIB
        assert _without_states(Findings(), hybrid, 300 * MIB) == (left, most), "a state behind each draft"
    hybrid.states = None
    assert _without_states(Findings(), hybrid, 300) == (300, None)


def test_a_model_that_reads_no_text_is_known_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_ENV, "auto")
    hybrid = _hybrid()
    hybrid.server_args.disable_radix_cache, hybrid.server_args.chunked_prefill_size = False, 512
    hybrid.device, hybrid.model_config = "cpu", SimpleNamespace(hf_text_config=None, context_len=4096)
    assert list(hybrid_problems(hybrid)) == [], "what is chosen does not matter to it"
    assert "the model has layers with states" in reading_obstacle(hybrid)
    hybrid.mambaish_config = None
    assert not reading_obstacle(hybrid)
    hybrid.model_config.context_len = 512
    assert "a context of 512 tokens, and a text of 1,024" in reading_obstacle(hybrid)
