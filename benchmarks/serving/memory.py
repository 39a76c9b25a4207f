"""Equal KV memory for every backend: how many tokens fit into the same bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_diffkv.calibration import ModelGeometry
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.evaluate.server import has_gpu
from sglang_diffkv.mem_pool.footprint import Footprint
from sglang_diffkv.plan import CONTEXT_SLACK, MemoryPlan

GIB = 1 << 30
DTYPE_BYTES = {"bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class KVShape:
    """What a model's KV cache depends on.

    Attributes:
        layers: those with keys and values. stateful: others, which have states. drafting: more with keys and values,
            that draft (``--speculative-algorithm NEXTN``). DiffKV does not compress what these have. SGLang
            stores it in FP8 where that is asked for.
    """

    layers: int
    kv_heads: int
    head_dim: int
    context: int
    vocab: int
    q_heads: int
    stateful: int = 0
    drafting: int = 0

    @property
    def all_layers(self) -> int:
        return self.layers + self.stateful

    @classmethod
    def of(cls, model: str | Path) -> KVShape:
        """Read from the model's ``config.json``. Raises ValueError for a folder without one, or without a model's."""
        path = Path(model) / "config.json"
        if not path.is_file():
            raise ValueError(f"{model} is not a model's folder: it has no config.json")
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{path} is no JSON object")
        try:
            found = ModelGeometry.of_config(config)
            context, vocab = config["max_position_embeddings"], config["vocab_size"]
        except KeyError as error:
            raise ValueError(f"{path} has no {error.args[0]}") from None
        return cls(
            layers=found.layers - (stateful := _stateful(config)),
            kv_heads=found.kv_heads,
            head_dim=found.head_dim,
            context=context,
            vocab=vocab,
            q_heads=found.query_heads,
            stateful=stateful,
        )

    def of_rank(self, ranks: int) -> KVShape:
        """What each of so many tensor-parallel ranks holds. Raises ValueError if they cannot share the heads evenly."""
        if self.kv_heads % ranks or self.q_heads % ranks:
            raise ValueError(f"{self.q_heads} and {self.kv_heads} heads cannot be shared by {ranks} ranks")
        return replace(self, kv_heads=self.kv_heads // ranks, q_heads=self.q_heads // ranks)

    def token_bytes(self, dtype: str) -> int:
        """Bytes of a token's keys and values in all layers, those that draft among them."""
        return (self.layers + self.drafting) * self._layer_bytes(dtype)

    def draft_bytes(self, dtype: str) -> int:
        """Bytes of a token's keys and values in the layers that draft."""
        return self.drafting * self._layer_bytes(dtype)

    def _layer_bytes(self, dtype: str) -> int:
        return 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]


def _stateful(config: dict[str, Any]) -> int:
    """Layers that do not attend to keys, of a model that names the kinds of its layers."""
    return sum(kind == "linear_attention" or "attention" not in kind for kind in config.get("layer_types") or ())


def stock_tokens(kv_bytes: int, shape: KVShape, dtype: str) -> int:
    """Tokens of a stock cache of ``dtype`` in ``kv_bytes``."""
    tokens = kv_bytes // shape.token_bytes(dtype)
    if tokens < 1:
        raise ValueError(f"{kv_bytes} bytes do not hold one {dtype} token of {shape.token_bytes(dtype)} bytes")
    return tokens


def diffkv_footprint(
    tokens: int, shape: KVShape, config: DiffKVConfig, max_running: int, drafts: str = "bf16"
) -> Footprint:
    """All that a DiffKV server of ``tokens`` high-tier tokens puts on the device. ``drafts``: dtype of what the layers
    have that draft."""
    plan = diffkv_plan(shape, config, drafts)
    return plan.footprint(plan.geometry(tokens, max_running + 1, shape.context + CONTEXT_SLACK), tokens)


def diffkv_plan(shape: KVShape, config: DiffKVConfig, drafts: str = "bf16") -> MemoryPlan:
    """Its plan, for one rank. ``drafts``: as above."""
    fmt = config.page_format(shape.head_dim, shape.head_dim, shape.context + CONTEXT_SLACK)
    beside = shape.draft_bytes(drafts)
    return MemoryPlan(config, fmt, shape.layers, shape.kv_heads, shape.q_heads, gpu=has_gpu(), draft_bytes=beside)


def diffkv_tokens(kv_bytes: int, shape: KVShape, config: DiffKVConfig, max_running: int, drafts: str = "bf16") -> int:
    """Most high-tier tokens of a DiffKV server that fit into ``kv_bytes`` with all that it needs beside the pages.
    ``drafts``: as above."""
    plan, context = diffkv_plan(shape, config, drafts), shape.context + CONTEXT_SLACK
    tokens = plan.capacity_in(kv_bytes, lambda _: max_running + 1, context)
    if tokens < 1:
        least = diffkv_footprint(1, shape, config, max_running, drafts).total
        raise ValueError(f"{kv_bytes} bytes do not hold DiffKV's smallest pool of {least} bytes")
    return tokens


def check_bytes(held: float, wanted: float, rounding: float) -> None:
    """Raise ValueError if a server's cache is not within 2% of the wanted GiB (and the server's own rounding)."""
    if abs(held - wanted) > 0.02 * wanted + rounding:
        raise ValueError(f"the server's cache has {held:.3f} GiB where {wanted:.3f} GiB were to be compared")
