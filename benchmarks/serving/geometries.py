"""Published model geometries as folders of configuration and tokenizer, served with ``--load-format dummy``.

Attention and memory cost do not depend on the weights; accuracy does, and so do the shares of DiffKV's tiers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EOS = 1


@dataclass(frozen=True)
class Preset:
    """Sizes of a dense model with grouped-query attention. All are served as Llama's block, which has the same
    matrices (Qwen's biases, a vector each, are left out)."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float
    context: int = 32768

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": EOS,
            "eos_token_id": EOS,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "mlp_bias": False,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.57.0",
            "use_cache": True,
            "vocab_size": self.vocab,
        }


ATTENDS_EVERY = 4
"""Of the layers of a hybrid model, the last of so many attends."""


@dataclass(frozen=True)
class HybridPreset(Preset):
    """Sizes of a dense model most of whose layers have states and do not attend, as Qwen3.5's: gated delta rule with
    heads of 128, half as many for keys as for values, and gated attention in every fourth layer. It drafts by a layer
    of its own (``--speculative-algorithm NEXTN``)."""

    delta_heads: int = 32

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        attending = range(ATTENDS_EVERY - 1, self.layers, ATTENDS_EVERY)
        of_llama = super().config()
        return {
            **of_llama,
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "full_attention_interval": ATTENDS_EVERY,
            "layer_types": ["full_attention" if i in attending else "linear_attention" for i in range(self.layers)],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": self.delta_heads // 2,
            "linear_num_value_heads": self.delta_heads,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": self.rope_theta, "partial_rotary_factor": 0.25
            },
        }  # fmt: skip


PRESETS = {
    "llama3-8b": Preset(32, 4096, 14336, 32, 8, 128, 128256, 500000.0),
    "qwen2.5-32b": Preset(64, 5120, 27648, 40, 8, 128, 152064, 1000000.0),
    "qwen3.5-9b": HybridPreset(32, 4096, 12288, 16, 4, 256, 248320, 10000000.0),
}


def write_model(folder: Path, preset: Preset) -> Path:
    """Write configuration and tokenizer into ``folder`` and return it.

    The tokenizer has one word for each token id, so a prompt of n words has n tokens and every generated token is
    visible text at once: the client's latencies then are those of the tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    words = {"<unk>": 0, "<eos>": EOS, **{f"w{i}": i for i in range(EOS + 1, preset.vocab)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {
        "config.json": preset.config(),
        "generation_config.json": {"bos_token_id": EOS, "eos_token_id": EOS},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "model_max_length": preset.context,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return folder
