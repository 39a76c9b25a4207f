"""What a server would refuse once its weights are loaded, asked before they are: of the model's files, of the
configuration and of the machine. The doctor asks the same."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import ConfigError, UnsupportedError
from sglang_diffkv.ladder import LEAST_TOKENS
from sglang_diffkv.mem_pool.host_pages import GIB
from sglang_diffkv.plan import MemoryPlan
from sglang_diffkv.srt.models import kv_scales
from sglang_diffkv.srt.models.hybrids import paged_layers
from sglang_diffkv.srt.models.scaling import configured_spans, reads_window
from sglang_diffkv.srt.models.speculation import check_drafts, drafts_of, longest_row
from sglang_diffkv.srt.startup import disaggregation, tree_pages
from sglang_diffkv.srt.startup.draft_model import bytes_of_slot
from sglang_diffkv.srt.startup.host_memory import host_memory, ranks_here
from sglang_diffkv.srt.startup.optional_parts import host_room
from sglang_diffkv.srt.startup.validation import check_model, check_policy
from sglang_diffkv.srt.tree.retracted import why_recomputed
from sglang_diffkv.srt.versions import compat

logger = logging.getLogger(__name__)

ON_A_GPU = {"decode": "auto", "prefill": "auto"}
"""Fields that choose a GPU's kernels, and what they have where there is none."""


def configurator_of(args: Any) -> SimpleNamespace:
    """What of SGLang's KVCacheConfigurator is known before weights are loaded."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig

    model, view = ModelConfig.from_server_args(args), compat.resolved(args)
    return SimpleNamespace(
        model_config=model,
        server_args=view,
        arguments=args,
        device=view.device,
        use_mla_backend=model.attention_arch == AttentionArch.MLA,
        is_hybrid_swa=model.is_hybrid_swa,
        sliding_window_size=model.attention_chunk_size,
        mambaish_config=mambaish_config(model),
        layer_info=SimpleNamespace(start_layer=0, num_effective_layers=model.num_hidden_layers),
        states=None,
        attention_spans=(),
        kv_cache_dtype=model.dtype,
    )


def model_reads_window(model: Any) -> bool | None:
    """``reads_window`` of SGLang's class for its ``model_config``."""
    from sglang.srt.models.registry import ModelRegistry

    return reads_window(ModelRegistry.resolve_model_cls(model.hf_config.architectures)[0])


def ask(args: Any, *configs: DiffKVConfig) -> None:
    """Raise ConfigError or UnsupportedError for what a server with these arguments would refuse later, whichever of
    ``configs`` it runs. What SGLang itself does not take is left to it."""
    try:
        configurator = configurator_of(args)
        stated = configured_spans(configurator.model_config.hf_text_config)
        configurator.attention_spans = stated if any(stated) and model_reads_window(configurator.model_config) else ()
        draft_bytes = bytes_of_slot(args)
    except Exception as error:
        logger.info("DiffKV: the model is checked once it is loaded, since SGLang said before: %s", error)
        return
    check_model(configurator)
    for config in configs:
        planned(configurator, config, draft_bytes)
    if scales := kv_scales.told(configurator.model_config, configs[0].tiers):
        logger.info("DiffKV: %s", scales)


def cannot_read(args: Any) -> str:
    """Why the model of a server with these arguments cannot read a text at the start, as far as its files say; empty if
    it can, or if SGLang does not take the model."""
    try:
        return reading_obstacle(configurator_of(args))
    except Exception as error:
        logger.info("DiffKV: whether the model can choose shows once it is loaded, since SGLang said before: %s", error)
        return ""


def reading_obstacle(configurator: Any) -> str:
    """Why a model cannot read a text at the start, to choose a configuration by it; empty if it can."""
    most = configurator.model_config.context_len
    if configurator.mambaish_config is not None:
        return "the model has layers with states, which only requests have. So it cannot read a text at the start"
    if most < LEAST_TOKENS:
        return f"the model has a context of {most:,} tokens, and a text of {LEAST_TOKENS:,} is read at the start"
    return ""


def planned(configurator: Any, config: DiffKVConfig, draft_bytes: int) -> MemoryPlan:
    """The plan of a server. Raises ConfigError or UnsupportedError where there would be none."""
    model, view, attention_spans = configurator.model_config, configurator.server_args, configurator.attention_spans
    check_policy(config, attention_spans)
    tree_pages.check_spans(configurator.arguments, attention_spans)
    if drafts_of(view):
        check_drafts(config, attention_spans, by_model=draft_bytes > 0)
    layers, longest = len(paged_layers(configurator)), longest_row(model.context_len, view)
    plan = MemoryPlan.of(configurator, config, layers, longest, attention_spans, draft_bytes)
    check_kernels(config, plan, on_gpu=plan.gpu, dtype=model.dtype)
    obstacle = why_recomputed(configurator, config)
    if not obstacle or disaggregation.mode_of(view) == disaggregation.DECODE:
        check_host_memory(config, (getattr(view, "dp_size", 1) or 1) * ranks_here(view))
    disaggregation.check_room(view, plan, longest)
    return replace(plan, keeps_retracted=not obstacle, host_room=host_room(configurator))


def check_host_memory(config: DiffKVConfig, replicas: int) -> None:
    """Raise ConfigError if ``host_gib`` is more than there is."""
    asked, most = (config.host_gib or 0) * replicas, host_memory() / GIB
    if asked > most:
        each = f" for each of {replicas} ranks and replicas" if replicas > 1 else ""
        raise ConfigError(f"host_gib is {config.host_gib:g}{each}, but the machine has {most:.1f} GiB: ask for less")


def check_kernels(config: DiffKVConfig, plan: MemoryPlan | None, *, on_gpu: bool, dtype: torch.dtype) -> None:
    """Raise UnsupportedError for kernels that are asked for by name and cannot be used. Others are not looked for: the
    process that launches a server stays off its GPU."""
    if not on_gpu or config.decode == "cuda" or config.prefill in ("fa3", "fa3_fp8", "flashinfer"):
        kernels(config, plan, on_gpu=on_gpu, dtype=dtype)


def kernels(
    config: DiffKVConfig, plan: MemoryPlan | None = None, *, on_gpu: bool, dtype: torch.dtype = torch.bfloat16
) -> str:
    """What a server of a model of this ``dtype`` runs on. Raises UnsupportedError for what is asked for and cannot be
    used."""
    if not on_gpu:
        return _on_a_cpu(config)
    if config.gpu_ops == "reference":
        return "plain PyTorch (gpu_ops)"
    from sglang_diffkv.ops.gpu import LIBRARIES, decode_obstacle, prefill_library

    fmt, attention_spans = (
        (plan.fmt, plan.attention_spans) if plan is not None else (config.page_format(128, 128, 0), ())
    )
    group = plan.q_heads // plan.num_heads if plan is not None else 1
    unable = decode_obstacle(fmt, group, config.decode)
    why = f" ({unable})" if unable and config.decode == "auto" else ""
    decode = f"; decode steps attend by {'Triton' if unable or config.decode == 'triton' else 'CUDA C++'}{why}"
    gpu = torch.device("meta")
    library, reason = prefill_library(fmt, config.prefill, (), attention_spans, dtype=dtype, device=gpu)
    no_cap = ", if no layer has a logit cap"
    more = {"fa3": no_cap, "fa3_fp8": no_cap, "flashinfer": ", if all layers have one scale and logit cap"}
    by = LIBRARIES[library] + more.get(library, "") + (f" ({reason})" if reason else "")
    return f"Triton; new tokens attend by {by}{decode}"


def _on_a_cpu(config: DiffKVConfig) -> str:
    asked = [f'"{name}": "{value}"' for name in ON_A_GPU if (value := getattr(config, name)) != ON_A_GPU[name]]
    if asked:
        raise UnsupportedError(
            f"{' and '.join(asked)} in --diffkv-config: a kernel of GPUs, and this server runs on a CPU. Leave the "
            'field out, or set it to "auto"'
        )
    return "plain PyTorch, on the CPU: for tests, not for speed"
