"""A model as its ``config.json`` describes it: layers with keys and values, layers with states, size of its weights.

Only what a plan needs is read. Whether SGLang has such a model, and what a server would refuse, says the doctor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_diffkv.calibration import MODEL_CONFIG_BYTES, model_file
from sglang_diffkv.capacity.weights import MOST_SIZE, Weights, read_others_json, weights_of
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import named

FULL, SLIDING = "full_attention", "sliding_attention"
IGNORED_WINDOWS = ("mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Types whose window SGLang does not read."""
PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Types of which every Nth layer sees all and the others slide, where their file does not list layers."""
STATEFUL = ("linear_attention", "conv", "mamba", "mamba2")
MOST_LAYERS = 4096
"""Beyond any model."""


@dataclass(frozen=True)
class Model:
    """What a plan needs of a model.

    Attributes:
        layers: those with keys and values. spans: of these layers, as ``attention_spans`` of ``Geometry``.
        context: longest sequence that the model takes, in tokens.
        fields: of ``config.json``, the text model's.
    """

    path: Path
    kind: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    hidden: int
    context: int
    spans: tuple[int, ...]
    weights: Weights
    fields: Mapping[str, Any]

    @property
    def stateful(self) -> int:
        """Layers that have states."""
        kinds = self.fields["layer_types"]
        return len(kinds) if self.kind == "falcon_h1" else sum(x in STATEFUL for x in kinds)

    def ranks_heads(self, ranks: int) -> tuple[int, int]:
        """KV heads and query heads of one of so many ranks. Raises ConfigError if they cannot be dealt out."""
        if self.query_heads % ranks or (self.kv_heads % ranks and ranks % self.kv_heads):
            heads = f"{self.query_heads} query and {self.kv_heads} KV heads"
            raise ConfigError(f"--tp {ranks}: the model has {heads}, which so many ranks cannot share")
        return max(self.kv_heads // ranks, 1), self.query_heads // ranks

    def state_bytes(self, ranks: int) -> int:
        """Bytes of a request's states on each rank, as SGLang allocates them; 0 for a model that has none. Raises
        ConfigError for a kind whose states are not known here."""
        if not self.stateful:
            return 0
        numbers = _state_sizes(self.kind, self.fields)
        if numbers is None:
            raise ConfigError(
                f"{named(self.path)}: the size of the states of a {self.kind} is not known here. Give the MiB that a "
                "request's states take on each rank: --state-mib (the doctor says it, --model-path)"
            )
        inner, groups, heads, dim, size, kernel = numbers
        groups = groups if groups % ranks == 0 else math.ceil(groups / ranks) * ranks
        conv = (inner + 2 * groups * size) // ranks * (kernel - 1)
        number = 2 if self.fields.get("mamba_ssm_dtype") in ("bfloat16", "float16") else 4
        return self.stateful * (2 * conv + number * (heads // ranks) * dim * size)


def read_model(model: str) -> Model:
    """From a model's folder, its ``config.json`` or a name whose file is in the local cache of Hugging Face.

    Raises ConfigError for a file that is not there or lacks what a plan needs.
    """
    try:
        path = Path(model) if Path(model).is_file() else model_file(model, "config.json")
    except (ImportError, OSError, ValueError):  # no cache of Hugging Face to look into, or no possible path
        path = None
    if path is None:
        raise ConfigError(f"--model {named(model)}: no config.json there. Name a folder that has one, or the file")
    try:
        config = read_others_json(path, MODEL_CONFIG_BYTES)
    except ConfigError as error:
        raise ConfigError(f"{named(path)} {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{named(path)} is no model's configuration: it has no fields")
    text = config.get("text_config")
    fields = {**config, **_defaults(path), **text} if isinstance(text, dict) else config
    try:
        return _model_of(path, fields)
    except ConfigError as error:
        raise ConfigError(f"{named(path)}: {error}") from None


def _defaults(path: Path) -> dict[str, Any]:
    """Fields of a text model within another, whose file leaves out what is usual: as transformers has them. None if it
    does not know the model."""
    try:
        from transformers import AutoConfig

        # Code beside the file is not run, and nobody is asked whether to.
        found = AutoConfig.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
        return dict(found.get_text_config().to_dict())
    except Exception:
        return {}


def _model_of(path: Path, fields: dict[str, Any]) -> Model:
    kind = str(fields.get("model_type") or "model")[:60]
    if fields.get("kv_lora_rank"):
        raise ConfigError("it has multi-head latent attention (MLA), which diffkv refuses")
    every = _size(fields, "num_hidden_layers", MOST_LAYERS)
    heads, hidden = _size(fields, "num_attention_heads"), _size(fields, "hidden_size")
    head_dim = _size(fields, "head_dim") if fields.get("head_dim") else hidden // heads
    kv_heads = _size(fields, "num_key_value_heads") if fields.get("num_key_value_heads") else heads
    kinds = _layer_types(kind, fields, every)
    fields = {**fields, "layer_types": kinds}
    paged = [x for x in kinds if x not in STATEFUL]
    if not paged:
        raise ConfigError("it has states alone, and no layer with keys and values")
    window = fields.get("sliding_window")
    slides = isinstance(window, int) and window > 0 and kind not in IGNORED_WINDOWS
    spans = tuple(min(int(window), MOST_SIZE) if slides and x == SLIDING else 0 for x in paged)  # type: ignore[arg-type]
    return Model(
        path=path,
        kind=kind,
        layers=len(paged),
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=_size(fields, "v_head_dim") if fields.get("v_head_dim") else head_dim,
        hidden=hidden,
        context=_size(fields, "max_position_embeddings") if fields.get("max_position_embeddings") else 2048,
        spans=spans if any(spans) else (),
        weights=weights_of(path, fields, kinds, heads=heads, kv_heads=kv_heads, head_dim=head_dim),
        fields=fields,
    )


def _size(fields: Mapping[str, Any], name: str, most: int = MOST_SIZE) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{name} is {'missing' if value is None else 'no such number'}, so this is no model to plan")
    return value


def _layer_types(kind: str, fields: Mapping[str, Any], every: int) -> Sequence[str]:
    """What each layer is: as the file lists them, or by the rule of its type."""
    listed = fields.get("layer_types")
    if isinstance(listed, list) and len(listed) == every:
        return [str(x) for x in listed]
    interval = fields.get("full_attention_interval")
    if kind.startswith(("qwen3_next", "qwen3_5")) or interval:
        step = interval if isinstance(interval, int) and interval > 0 else 4
        return [FULL if (x + 1) % step == 0 else "linear_attention" for x in range(every)]
    attends = fields.get("full_attn_idxs")
    if kind.startswith("lfm2") and isinstance(attends, list):
        return [FULL if x in attends else "conv" for x in range(every)]
    period = fields.get("sliding_window_pattern") or PATTERNS.get(kind)
    if isinstance(period, int) and period > 1 and fields.get("sliding_window"):
        return [FULL if (x + 1) % period == 0 else SLIDING for x in range(every)]
    return [FULL] * every


def _state_sizes(kind: str, fields: Mapping[str, Any]) -> tuple[int, int, int, int, int, int] | None:
    """Of the state of a layer: inner size, groups, heads, their dimension, state size, kernel of the convolution."""

    def size(name: str, usual: int | None = None) -> int:
        found = fields.get(name, usual)
        if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= MOST_SIZE:
            raise ConfigError(f"it lacks a size of the states of a {kind}, {name}. Give --state-mib")
        return found

    if kind.startswith(("qwen3_next", "qwen3_5")):
        heads, dim = size("linear_num_value_heads"), size("linear_value_head_dim")
        keys, key_dim = size("linear_num_key_heads"), size("linear_key_head_dim")
        return heads * dim, keys, heads, dim, key_dim, size("linear_conv_kernel_dim", 4)
    if kind.startswith("lfm2"):
        return size("hidden_size"), 1, 1, size("hidden_size"), 0, size("conv_L_cache", 3)
    if kind == "falcon_h1":
        heads, dim = size("mamba_n_heads"), size("mamba_d_head")
        inner = size("mamba_d_ssm") if fields.get("mamba_d_ssm") else size("mamba_expand", 2) * size("hidden_size")
        return inner, size("mamba_n_groups"), heads, dim, size("mamba_d_state"), size("mamba_d_conv")
    return None
