"""CUDA graphs of passes over prompts, as SGLang captures them by default: of what is between two layers' attention, for
some numbers of tokens. Attention runs between the graphs, so that requests of any lengths share a pass."""

from __future__ import annotations

import logging
from typing import Any

from sglang_diffkv.releases import seen_on_gpu
from sglang_diffkv.srt.models.speculation import algorithm_of, drafts_by_model
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.versions.states import model_has_states

logger = logging.getLogger(__name__)

GRAPHS_GPU_VERSIONS = seen_on_gpu("prefill graphs")
"""Versions of SGLang with which they gave stock's tokens on a GPU."""
DRAFTS_GPU_VERSIONS = seen_on_gpu("prefill graphs beside n-grams")
"""Versions of SGLang with which they did so beside drafts of n-grams."""


def graphs_obstacle(args: Any) -> str:
    """Why graphs that hold passes over prompts under these arguments, as SGLang resolved them, are not served; empty if
    they are, or if there are none."""
    kind = compat.prefill_graphs(args)
    if kind == "disabled":
        return ""
    if kind != compat.BETWEEN_LAYERS:
        return f"{kind} graphs of prompts hold attention too, or are compiled around it"
    if drafts_by_model(args):
        return "they were not tried with a draft model"
    if getattr(args, "enable_torch_compile", False):
        return "they were not tried with --enable-torch-compile"
    if getattr(args, "enable_lora", False) or getattr(args, "lora_paths", None):
        return "they were not tried with LoRA"
    if getattr(args, "tp_size", 1) > 1:
        return "they were not tried with several ranks, of which SGLang lets each decide by its free memory"
    drafts = algorithm_of(args)
    if compat.sglang_version() not in (DRAFTS_GPU_VERSIONS if drafts else GRAPHS_GPU_VERSIONS):
        what = f"those of SGLang {compat.sglang_version()}" + (" beside drafts of n-grams" if drafts else "")
        return "".join(compat.untried_on_a_gpu(args.device, what, "leave them off"))
    return ""


def choose_graphs(server_args: Any) -> None:
    """Switch graphs that SGLang chose off where they are not served, and say so. Those that a user asked for stay, and
    are refused."""
    if compat.asked_for_prefill_graphs(server_args):
        return
    obstacle = graphs_obstacle(compat.resolved(server_args))
    if not obstacle and compat.prefill_graphs(server_args) == compat.BETWEEN_LAYERS and model_has_states(server_args):
        obstacle = "they were not tried with layers that have states"
    if obstacle:
        if compat.resolved(server_args).device == "cuda":
            logger.info("DiffKV: passes over prompts run without CUDA graphs: %s", obstacle)
        compat.decline_prefill_graphs(server_args)
