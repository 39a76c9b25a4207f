"""Quantise new tokens and write them to the slots that ``reserve`` set aside."""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.quantize.reference import NEW, dequantize, quantize, source_of
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation, rotated
from sglang_diffkv.kernels.table import TABLE_BLOCK
from sglang_diffkv.layout.page_format import Tier
from sglang_diffkv.layout.state import PageState, TierView


def write_tokens(
    view: TierView,
    page: torch.Tensor,
    slot: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score: torch.Tensor,
    position: torch.Tensor,
    source: Tier | None = None,
) -> None:
    """Quantise and store tokens at (page, slot), each [N]; key [N, dim], value [N, v_dim] of tier ``source``, or
    new. The score goes nowhere where the tier has none."""
    tier = view.layout.tier
    k_source = v_source = NEW
    if source is not None:
        keys_turned, values_turned = view.layout.turned
        k_source = source_of(tier.k_bits, source.k_bits, turned=keys_turned)
        v_source = source_of(tier.v_bits, source.v_bits, turned=values_turned)
    if view.key_meta is None or view.value_meta is None:
        view.keys[page, slot] = key.to(view.keys.dtype)
        view.values[page, slot] = value.to(view.values.dtype)
    else:
        view.keys[page, slot], view.key_meta[page, slot] = quantize(key, tier.k_bits, k_source)
        view.values[page, slot], view.value_meta[page, slot] = quantize(value, tier.v_bits, v_source)
    if view.scores is not None:
        view.scores[page, slot] = score.float()
    view.positions[page, slot] = position.int()


def read_tokens(view: TierView, page: torch.Tensor, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantised keys [..., dim] and values [..., v_dim], float32, of tokens at (page, slot), each [...]."""
    tier = view.layout.tier
    if view.key_meta is None or view.value_meta is None:
        return view.keys[page, slot].float(), view.values[page, slot].float()
    return (
        dequantize(view.keys[page, slot], view.key_meta[page, slot], tier.k_bits),
        dequantize(view.values[page, slot], view.value_meta[page, slot], tier.v_bits),
    )


def append(
    state: PageState,
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    offset: torch.Tensor,
    position: torch.Tensor,
    *,
    rotation: Rotation = NO_ROTATION,
    key_means: torch.Tensor | None = None,
) -> None:
    """Store one layer's new tokens in the high tier, with score 0 where the tier has scores.

    Args:
        key: [tokens, H, head_dim]. value: [tokens, H, v_head_dim].
        rows: [tokens] int64, the owner of each token.
        offset: [tokens] int64, the token's number among its row's new tokens.
        position: [tokens] int64, its position in the sequence.
        rotation: what is rotated before it is stored, in float32. key_means: [H, head_dim] float32, then taken off
            keys; they are rotated already.
    """
    key = rotated(key) if rotation.keys else key
    key = key if key_means is None else key.float() - key_means
    value = rotated(value) if rotation.values else value
    view = state.tiers[0]
    tokens = view.layout.tokens
    slot = state.write_slot[rows, layer].long() + offset.unsqueeze(1)  # [tokens, H]
    column = state.own_entry[rows, layer, :, 0].long() + slot // tokens
    block = state.row_blocks[rows.unsqueeze(1), column // TABLE_BLOCK].long()
    head = torch.arange(state.num_heads, device=rows.device)
    page = state.page_table[block, layer, head, column % TABLE_BLOCK].long()
    shape = page.shape
    write_tokens(
        view,
        page.flatten(),
        (slot % tokens).flatten(),
        key.flatten(0, 1),
        value.flatten(0, 1),
        torch.zeros(shape.numel(), device=rows.device),
        position.unsqueeze(1).expand(shape).flatten(),
    )
