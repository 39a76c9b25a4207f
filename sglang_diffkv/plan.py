"""The resolved memory plan: from a model's geometry and a configuration to pages and capacity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.mem_pool.geometry import Geometry
from sglang_diffkv.mem_pool.ledger import pages_for
from sglang_diffkv.mem_pool.page_format import PageFormat
from sglang_diffkv.mem_pool.state import TABLE_BLOCK

MIB = 1 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """Page format and heads of one rank."""

    fmt: PageFormat
    num_layers: int
    num_heads: int

    @classmethod
    def of(cls, configurator: Any, config: DiffKVConfig, num_layers: int) -> MemoryPlan:
        """Plan for the model of SGLang's KVCacheConfigurator. With more ranks than KV heads several have the same one.

        Raises ConfigError for unsupported head sizes.
        """
        model = configurator.model_config
        fmt = config.page_format(model.head_dim, model.v_head_dim or model.head_dim)
        return cls(fmt, num_layers, model.get_num_kv_heads(configurator.server_args.tp_size))

    @property
    def heads(self) -> int:
        return self.num_layers * self.num_heads

    @property
    def token_bytes(self) -> int:
        """Bytes that a high-tier token takes in all layers and heads, its share of the page table included."""
        page = self.fmt.page_bytes + 3 * 12 + 8
        return -(-page * self.heads // self.fmt.high.tokens)

    def geometry(self, capacity: int, num_rows: int, max_tokens: int) -> Geometry:
        """Sizes for ``capacity`` high-tier tokens and ``num_rows`` request rows of up to ``max_tokens``."""
        segments = max(64, min(8192, capacity // self.fmt.high.tokens))
        return Geometry(
            fmt=self.fmt,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_pages=pages_for(capacity, self.fmt.high.tokens, self.heads),
            num_rows=num_rows,
            num_segments=segments,
            max_tokens=max_tokens,
        )

    def describe(self, config: DiffKVConfig, geometry: Geometry, capacity: int) -> str:
        """One line for the log: tiers, bytes a token, pages, capacity against bf16."""
        fmt = self.fmt
        tiers = ", ".join(
            f"{x.tier.name} {x.tier.token_bytes(fmt.head_dim, fmt.v_head_dim)} B/token/head, {x.tokens} tokens/page"
            for x in fmt.layouts
        )
        policy = config.build_policy()
        pool = geometry.num_pages * fmt.page_bytes
        bf16 = pool // (fmt.bf16_token_bytes * self.heads)
        return (
            f"tiers [{tiers}]; policy {policy}; bf16 {fmt.bf16_token_bytes} B/token/head; "
            f"{geometry.num_pages} pages of {fmt.page_bytes} B for {self.num_layers} layers x {self.num_heads} "
            f"KV heads = {pool / MIB:.1f} MiB, page table and counts {geometry.table_bytes() / MIB:.1f} MiB "
            f"({geometry.num_blocks} blocks of {TABLE_BLOCK}); capacity {capacity} tokens at the high tier, "
            f"bf16 in the same bytes: {bf16}; rotation {config.rotate}; prefix fidelity {config.prefix_fidelity}"
        )
