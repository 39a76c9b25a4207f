"""Models of random weights whose layers are mostly linear attention, state spaces or convolutions, which have states.

They have the real architectures' layers, in few and small ones; with ``--large`` in sizes that a GPU's kernels of the
real models take. For checks of servers, such as token identity:

    python -m benchmarks.quality.random_hybrids hybrid --kind qwen3_next --large
    python -m benchmarks.quality.identity --model hybrid --server-args=--disable-radix-cache
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.paths import NANO

GAIN = 4.0
"""Of matrices, so that attention is peaked and logits are apart."""
FORESEEN = 100.0
"""Of embeddings, where about every third token follows from the one before it alone."""


def _sizes(large: bool) -> dict[str, Any]:
    hidden = 512 if large else 128
    return {
        "vocab_size": 8256, "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_attention_heads": 8 if large else 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _kinds(large: bool, other: str) -> list[str]:
    """Every fourth layer attends in a large model, every second in a small one."""
    return ([other] * (3 if large else 1) + ["full_attention"]) * 2


def _delta_rule(large: bool) -> dict[str, int]:
    """Heads of the layers that do not attend."""
    dim = 128 if large else 32
    return {
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
    }  # fmt: skip


def make_qwen3_next(folder: Path, *, large: bool = False, foreseen: bool = False) -> None:
    """Gated delta rule and gated attention with heads of 256, of which a quarter is rotated by position; experts.

    ``foreseen``: its layer for the token after the next is often right, as a trained one is.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    kinds = _kinds(large, "linear_attention")
    inner = 256 if large else 64
    experts = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
    }  # fmt: skip
    config = Qwen3NextConfig(
        **_sizes(large), **_delta_rule(large), **experts, head_dim=256, num_hidden_layers=len(kinds), layer_types=kinds
    )
    save_random(folder, Qwen3NextForCausalLM, config)
    _add_interval(folder, len(kinds) // 2)
    _add_prediction_layer(folder, config.hidden_size, kinds.index("full_attention"), foreseen=foreseen)


def _add_prediction_layer(folder: Path, hidden: int, layer: int, *, foreseen: bool) -> None:
    """A layer for the token after the next, which transformers leaves out: a copy of an attending ``layer``. To have
    tokens ``foreseen`` it adds nothing, and embeddings outweigh what other layers add."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    own, generator = f"model.layers.{layer}.", torch.Generator().manual_seed(1)
    ahead = {name.replace(own, "mtp.layers.0."): x.clone() for name, x in tensors.items() if name.startswith(own)}
    ahead["mtp.fc.weight"] = (torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5).to(torch.bfloat16)
    norms = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")
    ahead |= {name: torch.zeros(hidden, dtype=torch.bfloat16) for name in norms}
    if foreseen:
        tensors["model.embed_tokens.weight"] = FORESEEN * tensors["model.embed_tokens.weight"]
        ahead["mtp.fc.weight"] = torch.eye(hidden, 2 * hidden, dtype=torch.bfloat16)
        ahead |= {name: torch.zeros_like(x) for name, x in ahead.items() if ".o_proj." in name or "down_proj" in name}
    save_file(tensors | ahead, path, metadata={"format": "pt"})


def make_qwen3_5(folder: Path, *, large: bool = False) -> None:
    """Qwen3.5's language part: as Qwen3-Next without experts, its projections laid out otherwise."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    kinds = _kinds(large, "linear_attention")
    config = Qwen3_5TextConfig(
        **_sizes(large), **_delta_rule(large), head_dim=256, num_hidden_layers=len(kinds), layer_types=kinds
    )
    save_random(folder, Qwen3_5ForCausalLM, config)
    _add_interval(folder, len(kinds) // 2)


def _add_interval(folder: Path, interval: int) -> None:
    """SGLang asks which layers attend by their distance, which transformers does not write."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "full_attention_interval": interval}, indent=1))


def make_lfm2(folder: Path, *, large: bool = False) -> None:
    """Short convolutions and attention."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    kinds = _kinds(large, "conv")
    more = {"conv_L_cache": 3, "block_auto_adjust_ff_dim": False, "head_dim": 64}
    save_random(
        folder, Lfm2ForCausalLM, Lfm2Config(**_sizes(large), **more, num_hidden_layers=len(kinds), layer_types=kinds)
    )


def make_falcon_h1(folder: Path, *, large: bool = False) -> None:
    """Attention and a state space side by side in every layer."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    heads = 8 if large else 4
    space = {
        "mamba_n_heads": heads, "mamba_d_head": 64 if large else 32, "mamba_d_ssm": heads * (64 if large else 32),
        "mamba_n_groups": 1, "mamba_d_state": 128 if large else 32, "mamba_d_conv": 4,
    }  # fmt: skip
    save_random(folder, FalconH1ForCausalLM, FalconH1Config(**_sizes(large), **space, head_dim=64, num_hidden_layers=4))


KINDS: dict[str, Callable[..., None]] = {
    "qwen3_next": make_qwen3_next,
    "qwen3_5": make_qwen3_5,
    "lfm2": make_lfm2,
    "falcon_h1": make_falcon_h1,
}


def save_random(folder: Path, kind: Any, config: Any) -> None:
    """A checkpoint of a transformers model ``kind``, the same weights each time, with the nano model's tokenizer."""
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    model = kind(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.mul_(GAIN)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(NANO).save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> None:
    """Make what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="OUT", help="of the checkpoint")
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--large", action="store_true", help="in sizes for a GPU's kernels")
    args = parser.parse_args(argv)
    KINDS[args.kind](args.folder, large=args.large)


if __name__ == "__main__":
    main()
