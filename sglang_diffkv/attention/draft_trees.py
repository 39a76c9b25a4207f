"""Trees of drafts: which drafts each of them sees, from the links that samplers walk."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TreeLinks(NamedTuple):
    """Trees of ``n`` drafts each, [B, n] integers, -1 for none. Draft 0 is the root, the token sampled last."""

    first_child: torch.Tensor  # SGLang's ``retrieve_next_token``
    next_sibling: torch.Tensor  # SGLang's ``retrieve_next_sibling``


def ancestors_of(links: TreeLinks) -> torch.Tensor:
    """[B, n] int64: bit ``j`` is set where draft ``j`` is the draft itself or one that it continues. A draft that no
    link leads to sees itself alone. Launches kernels only. ``n`` is at most 64.

    Links are followed up to the root in steps that double: to where a draft was reached from, to where that one was
    reached from, and so on.
    """
    batch, count = links.first_child.shape
    nodes = torch.arange(count, device=links.first_child.device)
    bits = torch.ones_like(nodes) << nodes
    # The last column stands for no draft: it takes what links of -1 lead to, and is where the root comes from.
    came_from = torch.full((batch, count + 1), count, device=nodes.device)
    seen = torch.zeros_like(came_from)
    nodes, bits_of_all = nodes.expand(batch, count), bits.expand(batch, count)
    children, siblings = (torch.where(x < 0, count, x.long()) for x in links)
    came_from.scatter_(1, children, nodes).scatter_(1, siblings, nodes)
    seen.scatter_(1, children, bits_of_all)
    came_from[:, count], seen[:, count] = count, 0
    for _ in range((count - 1).bit_length()):
        seen |= seen.gather(1, came_from)
        came_from = came_from.gather(1, came_from)
    return seen[:, :count] | bits
