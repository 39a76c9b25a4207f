"""How many bytes a model's weights take: of its files if they lie beside ``config.json``, else counted from it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import quoted, read_text

GB = 1e9
INDEX, QUANTISED = "model.safetensors.index.json", "hf_quant_config.json"
INDEX_BYTES = 64 << 20
MOST_SIZE = 1 << 24
"""Of a number of heads, elements or experts: beyond any model."""
TIED = ("gemma", "cohere")
"""Types that use the table of embeddings twice unless their file says otherwise."""


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's weights on all ranks together.

    Attributes:
        total: all. read: of these, what every token's step reads: without the table of embeddings, whose rows it picks.
        active: the same, of an expert model if only one token's experts are read.
        chosen: share of the experts that one token takes; 1 without experts.
        products: parameters that every prompt token is multiplied with.
        source: where the sizes come from, for people.
    """

    total: float
    read: float
    active: float
    chosen: float
    products: float
    source: str

    def read_by(self, requests: float) -> float:
        """Bytes that a decode step of so many requests reads, whose experts are independent of each other."""
        if self.chosen >= 1:
            return self.read
        experts = (self.read - self.active) / (1 - self.chosen)
        return self.read - experts * (1 - self.chosen) ** max(requests, 1.0)

    def scaled_to(self, total: float, source: str) -> Weights:
        """With a known size, all parts in proportion."""
        part = total / self.total if self.total else 1.0
        return replace(self, total=total, read=self.read * part, active=self.active * part, source=source)


def weights_of(
    path: Path, fields: Mapping[str, Any], kinds: Sequence[str], *, heads: int, kv_heads: int, head_dim: int
) -> Weights:
    """Of the model of a ``config.json`` at ``path``.

    Args:
        fields: of the text model. kinds: of its layers. heads, kv_heads: of a layer that attends. head_dim: elements.

    Raises ConfigError for a quantisation whose bits are not known, where there are no files to measure.
    """
    found = _bytes_of_files(path.parent)
    try:
        bits = _bits(path, fields)
    except ConfigError:
        if not found:
            raise
        bits = 16.0
    counted = _counted(fields, kinds, heads, kv_heads, head_dim, bits)
    return counted.scaled_to(found, "size of the files beside config.json") if found else counted


def read_others_json(path: Path, most: int) -> Any:
    """A file of at most so many bytes that belongs to a model. What other programs take, such as Infinity, is taken.
    Raises ConfigError."""
    try:
        return json.loads(read_text(path, most))
    except json.JSONDecodeError as error:
        raise ConfigError(f"is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("is JSON that cannot be read") from None


def _bytes_of_files(folder: Path) -> float:
    """Of safetensors in a folder, whole or as their index says; 0 if there are none."""
    try:
        sizes = sum(x.stat().st_size for x in folder.glob("*.safetensors") if x.is_file())
        index = folder / INDEX
        stated = read_others_json(index, INDEX_BYTES)["metadata"]["total_size"] if index.is_file() else 0
        return float(max(sizes, stated)) if math.isfinite(stated) else float(sizes)
    except (ConfigError, OSError, KeyError, TypeError, ValueError, OverflowError):
        return 0.0


def _number(fields: Mapping[str, Any], *names: str) -> int:
    """The first of some fields that is a positive number; 0 if none is. Raises ConfigError for one beyond any model."""
    for name in names:
        found = fields.get(name)
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            if found > MOST_SIZE:
                raise ConfigError(f"{name} is more than {MOST_SIZE:,}, so this is no model to plan")
            return found
    return 0


def _counted(
    fields: Mapping[str, Any], kinds: Sequence[str], heads: int, kv_heads: int, head_dim: int, bits: float
) -> Weights:
    hidden, table = _number(fields, "hidden_size"), _number(fields, "vocab_size") * _number(fields, "hidden_size")
    value_dim = _number(fields, "v_head_dim") or head_dim
    gate = heads * head_dim if fields.get("attn_output_gate") or fields.get("model_type") == "qwen3_next" else 0
    attention = hidden * (heads * head_dim + gate + kv_heads * (head_dim + value_dim)) + heads * value_dim * hidden
    mixers = sum(_mixer(x, fields, hidden) or attention for x in kinds)
    if fields.get("model_type") == "falcon_h1":  # both in each layer
        mixers += len(kinds) * _mamba(fields, hidden)
    dense, routed, chosen = _feed_forward(fields, len(kinds), hidden)
    only_experts = _method(fields) == "mxfp4"
    each, others = bits / 8, 2.0 if only_experts else bits / 8
    kind = str(fields.get("model_type") or "")
    tables = 1 if fields.get("tie_word_embeddings", kind.startswith(TIED)) else 2
    fixed = others * (mixers + dense) + 2 * table
    return Weights(
        total=others * (mixers + dense) + each * routed + 2 * table * tables,
        read=fixed + each * routed,
        active=fixed + each * chosen,
        chosen=chosen / routed if routed else 1.0,
        products=mixers + dense + chosen,
        source=f"counted from config.json, matrices of {bits:g} bits"
        + (", without the vision model's" if fields.get("vision_config") else ""),
    )


def _mixer(kind: str, fields: Mapping[str, Any], hidden: int) -> int:
    """Parameters of a layer that mixes tokens without attending; 0 for one that attends."""
    if kind == "conv":
        return 4 * hidden * hidden
    if kind == "linear_attention":
        keys = _number(fields, "linear_num_key_heads") * _number(fields, "linear_key_head_dim")
        heads = _number(fields, "linear_num_value_heads")
        values = heads * _number(fields, "linear_value_head_dim")
        return hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
    return _mamba(fields, hidden) if kind in ("mamba", "mamba2") else 0


def _mamba(fields: Mapping[str, Any], hidden: int) -> int:
    inner = _number(fields, "mamba_d_ssm") or _number(fields, "mamba_expand") * hidden or 2 * hidden
    groups, size = _number(fields, "mamba_n_groups") or 1, _number(fields, "mamba_d_state")
    return hidden * (2 * inner + 2 * groups * size + _number(fields, "mamba_n_heads")) + inner * hidden


def _feed_forward(fields: Mapping[str, Any], layers: int, hidden: int) -> tuple[int, int, int]:
    """Parameters behind the mixers: those of all tokens, those of all experts, those of one token's experts."""
    inner = _number(fields, "intermediate_size", "ffn_hidden_size", "n_inner") or 4 * hidden
    if fields.get("block_auto_adjust_ff_dim"):
        multiple = _number(fields, "block_multiple_of") or 256
        inner = -(-int(2 * inner / 3) // multiple) * multiple
    experts = _number(fields, "num_experts", "num_local_experts", "n_routed_experts")
    if not experts:
        return 3 * hidden * inner * layers, 0, 0
    first = _number(fields, "first_k_dense_replace", "num_dense_layers")
    step = _number(fields, "decoder_sparse_step") or 1
    alone = fields.get("mlp_only_layers")
    alone = {x for x in alone if isinstance(x, int)} if isinstance(alone, list) else set()
    sparse = sum(x >= first and (x + 1) % step == 0 and x not in alone for x in range(layers))
    small = _number(fields, "moe_intermediate_size") or inner
    shared = _number(fields, "shared_expert_intermediate_size") or small * _number(fields, "n_shared_experts")
    taken = _number(fields, "num_experts_per_tok", "num_experts_per_token") or 1
    dense = 3 * hidden * (inner * (layers - sparse) + shared * sparse) + hidden * experts * sparse
    return dense, 3 * hidden * small * experts * sparse, 3 * hidden * small * min(taken, experts) * sparse


def _method(fields: Mapping[str, Any]) -> str:
    quantisation = fields.get("quantization_config") or fields.get("compression_config")
    return str(quantisation.get("quant_method", "")).lower() if isinstance(quantisation, dict) else ""


def _bits(path: Path, fields: Mapping[str, Any]) -> float:
    """Of a matrix's element, scales included. Raises ConfigError for a method that is not known here."""
    given = fields.get("quantization_config") or fields.get("compression_config")
    if not isinstance(given, dict):
        beside = path.with_name(QUANTISED)
        found = read_others_json(beside, INDEX_BYTES) if beside.is_file() else None
        given = found.get("quantization") if isinstance(found, dict) else None
        if not isinstance(given, dict):
            return 16.0
        given = {"quant_method": "modelopt", **given}
    method, algorithm = _method({"quantization_config": given}), str(given.get("quant_algo", "")).lower()
    if "fp4" in algorithm or method in ("mxfp4", "modelopt_fp4"):
        return 4 + 8 / (32 if method == "mxfp4" else 16)
    if method in ("fp8", "fbgemm_fp8", "modelopt_fp8") or "fp8" in algorithm:
        return 8.0
    groups = given.get("config_groups")
    if isinstance(groups, dict):
        if not groups:
            return 16.0
        weights = [x.get("weights") for x in groups.values() if isinstance(x, dict)]
        return max((_grouped(x, "num_bits") for x in weights if isinstance(x, dict)), default=16.0)
    if method == "bitsandbytes":
        return 4.5 if given.get("load_in_4bit") or given.get("_load_in_4bit") else 8.0
    if any(isinstance(given.get(x), int) for x in ("bits", "w_bit")):
        return _grouped(given, "bits" if "bits" in given else "w_bit")
    if not method or algorithm in ("none", "null"):
        return 16.0
    raise ConfigError(f"the bits of quantization {quoted(method)} are not known here. Give --weights-gb")


def _grouped(given: Mapping[str, Any], name: str) -> float:
    bits, group = given.get(name), given.get("group_size")
    if not isinstance(bits, int) or not 1 <= bits <= 32:
        raise ConfigError(f"quantization: {name} is no number of bits. Give --weights-gb")
    more = (16 + bits) / group if isinstance(group, int) and group > 0 else 0.0  # a scale and a zero point
    return bits + (more if bits < 8 else 0.0)
