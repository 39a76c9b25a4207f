"""Draft models for nano, and a target with a prediction layer of its own, all small and mostly of random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.paths import NANO
from sglang_diffkv.evaluate.prompts import load_tokenizer

NANO_CONFIG: dict[str, Any] = json.loads((NANO / "config.json").read_text())
HIDDEN, INNER, HEADS, KV_HEADS, DIM = 256, 704, 4, 2, 64
NOISE = 0.02
"""Scale of random weights."""


def model_drafts(
    algorithm: str, model: Path | str, steps: int = 3, *, branches: int = 1, drafts: int | None = None
) -> tuple[str, ...]:
    """Arguments of a server to which ``model`` proposes chains, or trees with several ``branches``, of ``drafts``."""
    return (
        "--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(model), "--speculative-eagle-topk",
        str(branches), "--speculative-num-steps", str(steps), "--speculative-num-draft-tokens",
        str(drafts or steps + 1),
    )  # fmt: skip


def make_eagle(folder: Path, texts: list[list[int]]) -> None:
    """An EAGLE head that foresees nano's hidden states by a linear map, fitted to ``texts``, beside a random layer."""
    tensors = {name: NOISE * x for name, x in _layer("layers.0.", HIDDEN).items() if "input_layernorm" not in name}
    tensors |= {"fc.weight": _foresight(texts), "fc.bias": torch.zeros(HIDDEN)}
    more = {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False}
    _save(folder, {"architectures": ["LlamaForCausalLMEagle"], **more}, tensors)


def make_eagle3(folder: Path) -> None:
    """A random EAGLE-3 head, which reads hidden states of three of nano's layers."""
    tensors = _layer("layers.0.", 2 * HIDDEN) | {"layers.0.hidden_norm.weight": torch.ones(HIDDEN)}
    tensors |= {"fc.weight": NOISE * torch.randn(HIDDEN, 3 * HIDDEN), "norm.weight": torch.ones(HIDDEN)}
    more = {"model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": None, "tie_word_embeddings": False}
    reads = {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}
    _save(folder, {"architectures": ["LlamaForCausalLMEagle3"], **more, **reads}, tensors)


def make_mimo(folder: Path, layers: int = 2) -> None:
    """A random MiMo, a target with one layer for the token after the next."""
    size = NANO_CONFIG["vocab_size"]
    tensors = {"model.embed_tokens.weight": torch.randn(size, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    tensors["lm_head.weight"] = torch.randn(size, HIDDEN)
    for number in range(layers):
        tensors |= _layer(f"model.layers.{number}.", HIDDEN, biased=True)
    ahead = "model.mtp_layers.0."
    tensors |= _layer(ahead, HIDDEN, biased=True)
    tensors |= {ahead + name: torch.ones(HIDDEN) for name in _NORMS_AHEAD}
    tensors[ahead + "input_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) / HIDDEN**0.5
    more = {"model_type": "qwen2", "num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    _save(folder, {"architectures": ["MiMoForCausalLM"], **more, "tie_word_embeddings": False}, tensors)


_NORMS_AHEAD = ("token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight")


def _layer(prefix: str, reads: int, *, biased: bool = False) -> dict[str, torch.Tensor]:
    """Weights of a decoder layer whose attention reads vectors of ``reads``."""
    generator = torch.Generator().manual_seed(len(prefix))
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, reads), "self_attn.k_proj": (KV_HEADS * DIM, reads),
        "self_attn.v_proj": (KV_HEADS * DIM, reads), "self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    found = {f"{name}.weight": torch.randn(*x, generator=generator) / x[1] ** 0.5 for name, x in shapes.items()}
    if biased:
        found |= {f"{name}.bias": torch.zeros(shapes[name][0]) for name in shapes if name[-6:-4] in ("q_", "k_", "v_")}
    found |= {f"{name}.weight": torch.ones(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
    return {prefix + name: x for name, x in found.items()}


def _foresight(texts: list[list[int]]) -> torch.Tensor:
    """[hidden, 2 * hidden]: from the next token's embedding and this one's last hidden state to the next one's."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    given, wanted = [], []
    with torch.no_grad():
        for ids in texts:
            states = model.model(torch.tensor([ids])).last_hidden_state[0]
            next_tokens = model.get_input_embeddings()(torch.tensor(ids[1:]))
            given.append(torch.cat([next_tokens, states[:-1]], 1))
            wanted.append(states[1:])
    found = torch.linalg.lstsq(torch.cat(given), torch.cat(wanted), driver="gelsd").solution
    return found.T.contiguous()


def _save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**NANO_CONFIG, **config}))
    save_file({name: x.to(torch.bfloat16).contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    load_tokenizer(NANO).save_pretrained(folder)
