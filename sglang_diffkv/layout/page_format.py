"""The one description of what a page holds: every offset, size and capacity comes from here.

A page is ``page_bytes`` of one uint8 buffer and stores tokens of one tier, one KV head, one layer and one owner. It has
up to six fields: quantised keys, key metadata, quantised values, value metadata, scores, positions (DiffKV, section
5.2, "unified pages"). Token order inside a page is free; an empty slot has position -1.

A key and a value take ``bits / 8`` bytes an element, at any number of bits: nothing is padded to 4 or 8. A vector's
bytes follow each other, its slices too where its bits do not divide 8. How codes lie in them is written in
``kernels/quantize/reference.py``, and kernels take the number of bits from the tier.

A page holds what somebody reads. Tiers whose scores no decision of the policy asks for have none
(``Policy.scored_tiers``), the raw tier has no metadata, and positions take 16 bits where the longest
sequence allows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from sglang_diffkv.files import shown

RAW_BITS = 16
QUANTISED_BITS = range(1, 9)
"""Of a key's or a value's element: any of these, for the two apart. How codes are packed is in
``kernels/quantize/reference.py``."""
META_BYTES = 4  # scale and zero point, two fp16 numbers a vector
SCORE_BYTES = 4  # float32
POSITION_BYTES = 4  # int32
SHORT_POSITION_BYTES = 2
"""Of the lower 16 bits of a position. All ones, which is ``EMPTY``, is no position."""
SHORT_TOKENS = 65535
"""Longest sequence whose positions take 16 bits."""
FIELD_ALIGN = 16
PADDING_STEPS = 2
"""Steps of ``FIELD_ALIGN`` bytes that a page may be larger than its high-tier tokens need, if lower tiers fill it
better."""
HIGH_SHARE = 0.25
"""Share of tokens in the high tier that this is scored for; lower tiers have equal parts of the rest. Measured where a
question is answered with the default configuration: 0.24."""
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
                f"impossible tier K{self.k_bits}V{self.v_bits}: keys and values take 1 to 8 bits, "
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
        found = re.fullmatch(r"[Kk]([0-9]{1,3})[Vv]([0-9]{1,3})", name)
        if not found:
            raise ValueError(
                f"impossible tier {shown(name)}: write K<bits>V<bits> with 1 to 8 bits, for example K8V4, or BF16"
            )
        return cls(int(found[1]), int(found[2]))

    def token_bytes(
        self, head_dim: int, v_head_dim: int, score_bytes: int = SCORE_BYTES, position_bytes: int = POSITION_BYTES
    ) -> int:
        """Bytes of one token of one KV head; by default with a score and a position of full width."""
        meta = 0 if self.is_raw else 2 * META_BYTES
        payload = head_dim * self.k_bits // 8 + v_head_dim * self.v_bits // 8
        return payload + meta + score_bytes + position_bytes


def position_bytes_for(max_tokens: int) -> int:
    """Bytes of a position where the longest sequence has ``max_tokens``."""
    return SHORT_POSITION_BYTES if max_tokens <= SHORT_TOKENS else POSITION_BYTES


def _align(n: int) -> int:
    return -(-n // FIELD_ALIGN) * FIELD_ALIGN


@dataclass(frozen=True)
class TierLayout:
    """Offsets in bytes from the start of a page that holds ``tokens`` tokens of ``tier``. ``score_offset`` is None
    where tokens have no score. ``turned``: as of ``PageFormat``."""

    tier: Tier
    tokens: int
    key_bytes: int
    value_bytes: int
    position_bytes: int
    key_offset: int
    key_meta_offset: int
    value_offset: int
    value_meta_offset: int
    score_offset: int | None
    position_offset: int
    end: int
    turned: tuple[bool, bool] = (False, False)

    @classmethod
    def build(
        cls,
        tier: Tier,
        tokens: int,
        head_dim: int,
        v_head_dim: int,
        *,
        scored: bool = True,
        position_bytes: int = POSITION_BYTES,
        turned: tuple[bool, bool] = (False, False),
    ) -> TierLayout:
        key_bytes, value_bytes = head_dim * tier.k_bits // 8, v_head_dim * tier.v_bits // 8
        meta = 0 if tier.is_raw else META_BYTES
        key = 0
        value = _align(key + tokens * key_bytes)
        key_meta = _align(value + tokens * value_bytes)
        value_meta = key_meta + tokens * meta
        score = value_meta + tokens * meta
        position = score + tokens * SCORE_BYTES * scored
        end = position + tokens * position_bytes
        return cls(
            tier, tokens, key_bytes, value_bytes, position_bytes, key, key_meta, value, value_meta,
            score if scored else None, position, end, turned,
        )  # fmt: skip

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, without what its page leaves over."""
        meta = 0 if self.tier.is_raw else 2 * META_BYTES
        score = 0 if self.score_offset is None else SCORE_BYTES
        return self.key_bytes + self.value_bytes + meta + score + self.position_bytes


@dataclass(frozen=True)
class PageFormat:
    """Layout of a page for each tier, high tier first.

    ``page_tokens`` is the number of high-tier tokens of a page; a lower tier fits as many tokens as the same bytes
    hold, but

    - never so many that kernels, whose tiles are powers of two, would take a larger tile than with all fields there;
    - with positions of 16 bits an even number, so that a thread of the attention kernels reads two of them at once,
      if that is not below ``page_tokens``.

    ``scored``: of the first so many tiers tokens have a score. ``position_bytes``: 2 for sequences of up to
    ``SHORT_TOKENS``, else 4. ``turned``: whether keys, and values, are rotated before they are stored. Then
    numbers are near normal, and each vector that goes down chooses the range of its codes. Raises ValueError for
    geometries and tiers that cannot be stored.
    """

    head_dim: int
    v_head_dim: int
    tiers: tuple[Tier, ...]
    page_tokens: int = 32
    scored: int = MOST_TIERS
    position_bytes: int = POSITION_BYTES
    turned: tuple[bool, bool] = (False, False)

    def __post_init__(self) -> None:
        for name in ("head_dim", "v_head_dim"):
            if getattr(self, name) not in SUPPORTED_HEAD_DIMS:
                raise ValueError(f"{name} {getattr(self, name)} is not one of {SUPPORTED_HEAD_DIMS}")
        if not 1 <= len(self.tiers) <= MOST_TIERS:
            raise ValueError(f"{len(self.tiers)} tiers given: two bidirectional page tables hold one to {MOST_TIERS}")
        if not 4 <= self.page_tokens <= 256:
            raise ValueError(f"page_tokens {self.page_tokens} is not between 4 and 256")
        if not 0 <= self.scored <= MOST_TIERS:
            raise ValueError(f"scored {self.scored} is not between 0 and {MOST_TIERS}")
        if self.position_bytes not in (kinds := (SHORT_POSITION_BYTES, POSITION_BYTES)):
            raise ValueError(f"position_bytes {self.position_bytes} is not one of {kinds}")
        sizes = [t.token_bytes(self.head_dim, self.v_head_dim) for t in self.tiers]
        if sizes != sorted(sizes, reverse=True) or len(set(sizes)) != len(sizes):
            raise ValueError(
                f"tiers {[t.name for t in self.tiers]} must take ever fewer bytes a token: list the largest first"
            )

    @property
    def max_tokens(self) -> int:
        """Longest sequence whose positions can be stored."""
        return SHORT_TOKENS if self.position_bytes == SHORT_POSITION_BYTES else 2**31 - 1

    @property
    def entry_bytes(self) -> int:
        """Of an entry of the page table: a page's number, and two ends of a position range, as wide as positions."""
        return 4 + 2 * self.position_bytes

    @cached_property
    def page_bytes(self) -> int:
        least = _align(self._layout(0, self.page_tokens).end)
        lower = range(1, len(self.tiers))
        if not lower:
            return least

        def cost(page_bytes: int) -> float:
            """Mean bytes of a token."""
            low = sum(1 / self._fit(tier, page_bytes).tokens for tier in lower) / len(lower)
            return page_bytes * (HIGH_SHARE / self.page_tokens + (1 - HIGH_SHARE) * low)

        return min((least + step * FIELD_ALIGN for step in range(PADDING_STEPS + 1)), key=cost)

    @cached_property
    def layouts(self) -> tuple[TierLayout, ...]:
        lower = (self._fit(tier, self.page_bytes) for tier in range(1, len(self.tiers)))
        return self._layout(0, self.page_tokens), *lower

    def _layout(self, tier: int, tokens: int) -> TierLayout:
        scored, position_bytes = tier < self.scored, self.position_bytes
        return TierLayout.build(
            self.tiers[tier], tokens, self.head_dim, self.v_head_dim, scored=scored, position_bytes=position_bytes,
            turned=self.turned,
        )  # fmt: skip

    def _fit(self, tier: int, page_bytes: int) -> TierLayout:
        step = 2 if self.position_bytes == SHORT_POSITION_BYTES else 1
        tokens = min(page_bytes // self._layout(tier, 1).token_bytes, self._most(tier)) // step * step
        while tokens > self.page_tokens and self._layout(tier, tokens).end > page_bytes:
            tokens -= step
        return self._layout(tier, max(tokens, self.page_tokens))

    def _most(self, tier: int) -> int:
        """The power of two that holds the tokens of a page if none of the fields is left out."""
        first, own = (self.tiers[x].token_bytes(self.head_dim, self.v_head_dim) for x in (0, tier))
        return 1 << (self.page_tokens * first // own - 1).bit_length()

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
