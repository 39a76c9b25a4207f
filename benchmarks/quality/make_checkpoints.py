"""Small checkpoints of other kinds, made of a small model without network: 4-bit weights (GPTQ, AWQ) and experts.

They are for checks of servers that only a GPU can run, such as token identity:

    python -m benchmarks.quality.make_checkpoints gptq-model --kind gptq
    python -m benchmarks.quality.identity --model gptq-model

Weights are rounded to nearest, with no calibration, in the layouts that SGLang loads: GPTQ symmetric without
``desc_act``, AWQ with zero points. The inner size of MLPs is padded with zeros, which change nothing, to what
Marlin's kernels take. ``qwen3-moe`` is an untrained mixture of experts: each is the model's MLP with noise of its own
behind a random router, so replies still resemble the model's.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.paths import NANO

Weights = dict[str, torch.Tensor]

BITS = 4
CODES = 2**BITS
PER_INT = 32 // BITS
MLP_MULTIPLE = 128
"""Of a linear layer's inputs, for Marlin's kernels."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring columns has the i-th lowest bits of an int32."""

COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
EXPERTS, CHOSEN, NOISE = 8, 2, 0.05
"""Experts, experts of a token, and the noise's size relative to a matrix's standard deviation."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="OUT", help="of the checkpoint; it must not exist")
    parser.add_argument("--kind", choices=("gptq", "awq", "qwen3-moe"), required=True)
    parser.add_argument("--group-size", type=int, choices=(64, 128), default=64, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the experts and the router (default: %(default)s)")
    parser.add_argument("--model", type=Path, default=NANO, help="a Qwen3 model (default: the nano model)")
    return parser.parse_args(argv)


def padded(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
    """The same model with an inner size of its MLPs that is a multiple of ``MLP_MULTIPLE``."""
    inner = config["intermediate_size"]
    more = -inner % MLP_MULTIPLE

    def pad(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            return torch.nn.functional.pad(weight, (0, 0, 0, more))
        return torch.nn.functional.pad(weight, (0, more)) if name.endswith("down_proj.weight") else weight

    return {**config, "intermediate_size": inner + more}, {name: pad(name, x) for name, x in weights.items()}


def pack(codes: torch.Tensor, dim: int, order: Sequence[int] = range(PER_INT)) -> torch.Tensor:
    """Eight neighbouring codes of 4 bits along ``dim`` to one int32, the ``order[i]``-th to its i-th lowest bits."""
    nibbles = codes.movedim(dim, -1).unflatten(-1, (-1, PER_INT))[..., list(order)].to(torch.int64)
    joined = (nibbles << torch.arange(0, 32, BITS)).sum(-1)
    signed = torch.where(joined >= 2**31, joined - 2**32, joined)
    return signed.to(torch.int32).movedim(-1, dim).contiguous()


def _codes(groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """[inputs, outputs] codes of weights [groups, inputs of one, outputs]."""
    steps = (groups / scales.float().unsqueeze(1)).round() + zeros.unsqueeze(1)
    return steps.clamp(0, CODES - 1).flatten(0, 1).to(torch.int32)


def gptq(weight: torch.Tensor, group_size: int) -> Weights:
    """Symmetric codes of a weight [outputs, inputs], packed along the inputs."""
    groups = weight.float().t().unflatten(0, (-1, group_size))
    scales = _scales(2 * groups.abs().amax(1))
    zeros = torch.full_like(scales, CODES // 2, dtype=torch.int32)
    return {
        "qweight": pack(_codes(groups, scales, zeros), 0),
        "qzeros": pack(zeros - 1, 1),  # the format's first version keeps them less one
        "scales": scales,
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group_size,
    }


def awq(weight: torch.Tensor, group_size: int) -> Weights:
    """Codes with zero points of a weight [outputs, inputs], packed along the outputs."""
    groups = weight.float().t().unflatten(0, (-1, group_size))
    least, most = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scales = _scales(most - least)
    zeros = (-least / scales.float()).round().clamp(0, CODES - 1).to(torch.int32)
    codes = _codes(groups, scales, zeros)
    return {"qweight": pack(codes, 1, AWQ_ORDER), "qzeros": pack(zeros, 1, AWQ_ORDER), "scales": scales}


def _scales(ranges: torch.Tensor) -> torch.Tensor:
    """fp16 steps that cover ranges; of a group of zeros any step does."""
    return torch.where(ranges > 0, ranges / (CODES - 1), 1.0).half().clamp(min=torch.finfo(torch.float16).tiny)


def quantised(
    config: dict[str, Any], weights: Weights, settings: dict[str, Any], one: Callable[[torch.Tensor, int], Weights]
) -> tuple[dict[str, Any], Weights]:
    """The model with its layers' matrices in 4 bits, all else in fp16. ``settings`` stand in its configuration."""
    found: Weights = {}
    for name, weight in padded(config, weights)[1].items():
        if name.endswith("_proj.weight"):
            layer = name.removesuffix("weight")
            found.update({layer + part: x for part, x in one(weight, settings["group_size"]).items()})
        else:
            found[name] = weight.half()
    return {**padded(config, {})[0], "torch_dtype": "float16", "quantization_config": settings}, found


def with_experts(
    config: dict[str, Any], weights: Weights, seed: int, noise: float = NOISE
) -> tuple[dict[str, Any], Weights]:
    """The model with experts in place of its MLPs. Without ``noise`` it computes what the model computes."""
    config, weights = padded(config, weights)
    draw = torch.Generator().manual_seed(seed)
    found: Weights = {}
    for name, weight in weights.items():
        layer, is_mlp, matrix = name.partition(".mlp.")
        if not is_mlp:
            found[name] = weight
            continue
        for expert in range(EXPERTS):
            more = torch.randn(weight.shape, generator=draw) * weight.float().std() * noise
            found[f"{layer}.mlp.experts.{expert}.{matrix}"] = (weight.float() + more).to(weight.dtype)
        if matrix == "gate_proj.weight":
            router = torch.randn(EXPERTS, weight.shape[1], generator=draw) * weight.shape[1] ** -0.5
            found[f"{layer}.mlp.gate.weight"] = router.to(weight.dtype)
    found.setdefault("lm_head.weight", found["model.embed_tokens.weight"].clone())  # SGLang does not tie this model's
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN, "moe_intermediate_size": config["intermediate_size"], "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": True, "output_router_logits": False,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return {**config, **experts}, found


def make(folder: Path, kind: str, *, group_size: int = 64, seed: int = 0, model: Path = NANO) -> None:
    """Write the checkpoint of a ``kind`` to a new folder."""
    config, weights = json.loads((model / "config.json").read_text()), dict(_weights(model))
    if kind == "gptq":
        settings = {
            "quant_method": "gptq", "bits": BITS, "group_size": group_size, "desc_act": False, "sym": True,
            "lm_head": False, "checkpoint_format": "gptq",
        }  # fmt: skip
        config, weights = quantised(config, weights, settings, gptq)
    elif kind == "awq":
        settings = {
            "quant_method": "awq", "bits": BITS, "group_size": group_size, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": None,
        }  # fmt: skip
        config, weights = quantised(config, weights, settings, awq)
    else:
        config, weights = with_experts(config, weights, seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    for name in COPIED:
        if (model / name).exists():
            shutil.copy(model / name, folder)


def _weights(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(model.glob("*.safetensors")):
        yield from load_file(path).items()


def main(argv: Sequence[str] | None = None) -> None:
    """Make what the command line says."""
    args = parse_args(argv)
    make(args.folder, args.kind, group_size=args.group_size, seed=args.seed, model=args.model)


if __name__ == "__main__":
    main()
