"""How far keys of a head repeat one another (R-KV's measure as in Zipage, appendices C.5 and C.7)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_diffkv.kernels.append.reference import read_tokens
from sglang_diffkv.kernels.parts import Part, held_tokens
from sglang_diffkv.layout.state import PageState


def redundancy(
    state: PageState, parts: Sequence[Part], values: torch.Tensor, out: torch.Tensor, *, threshold: float, block: int,
    most: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Write the sum of each token's cosines with the other tokens of its head to its position.

    Tokens of a head are compared in the order of their positions, within blocks of ``block`` of them, or all with all
    if it is 0. Of the tokens that are more than ``threshold`` alike to a token, the last one is not charged with that:
    of two that say the same the newer one stays.

    Args:
        parts: (row, lo, hi), where the tokens are; disjoint.
        values: [L, H, n] float32, NaN at positions of tokens that are not compared, as ``gather_scores`` leaves it.
        out: [L, H, n] float32; 0 where no token is compared.
        most: tokens of a head that are compared, at most, if the caller knows.

    Returns:
        [L, H] int64, tokens compared.
    """
    out.zero_()
    layers, heads, length = values.shape
    compared = ~values.isnan()
    keys = torch.zeros(layers, heads, length, state.fmt.head_dim, device=values.device)
    for row, lo, hi in parts:
        for tier in range(len(state.tiers)):
            x = held_tokens(state, (row, lo, min(hi, length)), tier)
            if x is None:
                continue
            layer, head, _, slot = x.held.nonzero(as_tuple=True)
            page = x.page.unsqueeze(3).expand(x.held.shape)[x.held]
            keys[layer, head, x.position[x.held].long()] = read_tokens(state.tiers[tier], page, slot)[0]
    for of_head, present, found in zip(keys.flatten(0, 1), compared.flatten(0, 1), out.flatten(0, 1), strict=True):
        at = present.nonzero().flatten()
        for part in at.split(block or max(len(at), 1)):
            found[part] = _charged(of_head[part], threshold)
    counts = compared.sum(2)
    assert most is None or not counts.numel() or int(counts.max()) <= most, "more tokens than the caller promised"
    return counts


def _charged(keys: torch.Tensor, threshold: float) -> torch.Tensor:
    """[n] sums of the rows of the cosines [n, n], without the diagonal and the last of each column above the
    threshold."""
    unit = keys / keys.norm(dim=1, keepdim=True).clamp(min=1e-12)
    cosine = (unit @ unit.T).fill_diagonal_(0.0)
    number = torch.arange(len(keys), device=keys.device).unsqueeze(1)
    last = torch.where(cosine > threshold, number, -1).amax(0)
    return cosine.masked_fill(number == last, 0.0).sum(1)
