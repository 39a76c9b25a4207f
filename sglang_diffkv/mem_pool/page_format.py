"""The one description of what a page holds: every offset, size and capacity comes from here.

A page is ``page_bytes`` of one uint8 buffer and stores tokens of one tier, one KV head, one
layer and one owner, in six fields: quantised keys, key metadata, quantised values, value
metadata, scores, positions (DiffKV, section 5.2, "unified pages"). Token order inside a page is
free; an empty slot has position -1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

RAW_BITS = 16
QUANTISED_BITS = (8, 4, 2, 1)
META_BYTES = 4  # scale and zero point, two fp16 numbers a vector
SCORE_BYTES = 4  # float32
POSITION_BYTES = 4  # int32
FIELD_ALIGN = 16
EMPTY = -1
"""Position of an empty slot, and page id of an unused table entry."""

SUPPORTED_HEAD_DIMS = (64, 96, 128, 256)

MOST_TIERS = 4
"""Two bidirectional page tables hold so many (DiffKV, section 5.3)."""


@dataclass(frozen=True)
class Tier:
    """Bits of a key element and of a value element; 16 keeps the model's two-byte numbers as they are."""

    k_bits: int
    v_bits: int

    def __post_init__(self) -> None:
        raw = self.k_bits == RAW_BITS and self.v_bits == RAW_BITS
        if not raw and not (self.k_bits in QUANTISED_BITS and self.v_bits in QUANTISED_BITS):
            raise ValueError(
                f"impossible tier K{self.k_bits}V{self.v_bits}: keys and values take 8, 4, 2 or 1 bits, "
                "or both stay at 16 (BF16)"
            )

    @property
    def is_raw(self) -> bool:
        return self.k_bits == RAW_BITS

    @property
    def name(self) -> str:
        return "BF16" if self.is_raw else f"K{self.k_bits}V{self.v_bits}"

    @classmethod
    def parse(cls, name: str) -> Tier:
        """``"K8V4"`` or ``"BF16"`` to a tier. Raises ValueError for any other name."""
        if name.upper() == "BF16":
            return cls(RAW_BITS, RAW_BITS)
        found = re.fullmatch(r"[Kk](\d+)[Vv](\d+)", name)
        if not found:
            raise ValueError(f"impossible tier {name!r}: write K<bits>V<bits>, for example K8V4, or BF16")
        return cls(int(found[1]), int(found[2]))

    def token_bytes(self, head_dim: int, v_head_dim: int) -> int:
        """Bytes of one token of one KV head, score and position included."""
        meta = 0 if self.is_raw else 2 * META_BYTES
        payload = head_dim * self.k_bits // 8 + v_head_dim * self.v_bits // 8
        return payload + meta + SCORE_BYTES + POSITION_BYTES


def _align(n: int) -> int:
    return -(-n // FIELD_ALIGN) * FIELD_ALIGN


@dataclass(frozen=True)
class TierLayout:
    """Offsets in bytes from the start of a page that holds ``tokens`` tokens of ``tier``."""

    tier: Tier
    tokens: int
    key_bytes: int
    value_bytes: int
    key_offset: int
    key_meta_offset: int
    value_offset: int
    value_meta_offset: int
    score_offset: int
    position_offset: int
    end: int

    @classmethod
    def build(cls, tier: Tier, tokens: int, head_dim: int, v_head_dim: int) -> TierLayout:
        key_bytes, value_bytes = head_dim * tier.k_bits // 8, v_head_dim * tier.v_bits // 8
        meta = 0 if tier.is_raw else META_BYTES
        key = 0
        value = _align(key + tokens * key_bytes)
        key_meta = _align(value + tokens * value_bytes)
        value_meta = key_meta + tokens * meta
        score = value_meta + tokens * meta
        position = score + tokens * SCORE_BYTES
        end = position + tokens * POSITION_BYTES
        return cls(tier, tokens, key_bytes, value_bytes, key, key_meta, value, value_meta, score, position, end)


@dataclass(frozen=True)
class PageFormat:
    """Layout of a page for each tier, high tier first.

    ``page_tokens`` is the number of high-tier tokens of a page; a lower tier fits as many tokens as
    the same bytes hold. Raises ValueError for geometries and tiers that cannot be stored.
    """

    head_dim: int
    v_head_dim: int
    tiers: tuple[Tier, ...]
    page_tokens: int = 32

    def __post_init__(self) -> None:
        for name in ("head_dim", "v_head_dim"):
            if getattr(self, name) not in SUPPORTED_HEAD_DIMS:
                raise ValueError(f"{name} {getattr(self, name)} is not one of {SUPPORTED_HEAD_DIMS}")
        if not 1 <= len(self.tiers) <= MOST_TIERS:
            raise ValueError(f"{len(self.tiers)} tiers given: two bidirectional page tables hold one to {MOST_TIERS}")
        if not 4 <= self.page_tokens <= 256:
            raise ValueError(f"page_tokens {self.page_tokens} is not between 4 and 256")
        sizes = [t.token_bytes(self.head_dim, self.v_head_dim) for t in self.tiers]
        if sizes != sorted(sizes, reverse=True) or len(set(sizes)) != len(sizes):
            raise ValueError(f"tiers {[t.name for t in self.tiers]} must take ever fewer bytes a token")

    @cached_property
    def page_bytes(self) -> int:
        high = TierLayout.build(self.tiers[0], self.page_tokens, self.head_dim, self.v_head_dim)
        return _align(high.end)

    @cached_property
    def layouts(self) -> tuple[TierLayout, ...]:
        return tuple(self._fit(tier) for tier in self.tiers)

    def _fit(self, tier: Tier) -> TierLayout:
        tokens = self.page_bytes // tier.token_bytes(self.head_dim, self.v_head_dim)
        while True:
            layout = TierLayout.build(tier, tokens, self.head_dim, self.v_head_dim)
            if layout.end <= self.page_bytes:
                return layout
            tokens -= 1

    @property
    def high(self) -> TierLayout:
        return self.layouts[0]

    @property
    def low(self) -> TierLayout:
        """Layout of the lowest tier (the high one where there is only one)."""
        return self.layouts[-1]

    @property
    def bf16_token_bytes(self) -> int:
        """Bytes of one token of one KV head in an uncompressed two-byte cache."""
        return 2 * (self.head_dim + self.v_head_dim)
