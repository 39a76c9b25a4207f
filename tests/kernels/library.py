"""What an attention library does for new tokens, in plain PyTorch: for machines that have none."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from sglang_diffkv.ops.base import Scaling, Step


class Library:
    """Stands for ``RaggedPrefill`` or ``FlashPrefill``.

    Attributes:
        asked: for every layer, tokens of keys and of queries that it was asked for. heads: of each time, those of keys.
        lse_unit: with ``natural`` log-sum-exps are as FlashAttention-3 gives them, base e and [Hq, tokens] in memory.
    """

    def __init__(self, scaling: Scaling, *, natural: bool = True):
        self.scale, self.logit_cap = scaling
        self.copy_bytes = 0
        self.lse_unit = 1 / math.log(2) if natural else 1.0
        self.asked: list[tuple[int, int]] = []
        self.heads: list[int] = []
        self._lens: list[tuple[int, int]] = []

    def plan(self, step: Step) -> None:
        if step.ends is not None:
            assert all(x.dtype == torch.int32 for x in step.ends), "as FlashAttention takes them"
            queries, keys = (x.diff().tolist() for x in step.ends)
            self._lens = list(zip(queries, keys, strict=True))
            return
        keys = step.counts if step.whole is None else step.whole.lens
        self._lens = list(zip(step.counts, keys, strict=True))

    def serves(self, scaling: Scaling) -> bool:
        return scaling == (self.scale, self.logit_cap)

    def run(
        self, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: Scaling, *, lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.serves(scaling)
        self.heads.append(key.shape[1])
        self.asked.append((len(key), len(q)))
        queries, keys = map(sum, zip(*self._lens, strict=True))
        assert len(q) == queries and len(key) >= keys  # behind the last ones there is room that nobody reads
        outs, norms = zip(*self._requests(q, key, value), strict=True)
        norm = torch.cat(norms) / self.lse_unit
        return torch.cat(outs).to(q.dtype), (norm if self.lse_unit == 1 else norm.t().contiguous().t()) if lse else None

    def _requests(
        self, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        group = q.shape[1] // key.shape[1]
        at = of_keys = 0
        for count, keys in self._lens:
            k, v = (x[of_keys : of_keys + keys].float().repeat_interleave(group, 1) for x in (key, value))
            logits = torch.einsum("qhd,khd->qhk", q[at : at + count].float(), k) * self.scale
            if self.logit_cap:
                logits = self.logit_cap * torch.tanh(logits / self.logit_cap)
            later = torch.ones(count, keys, dtype=torch.bool, device=q.device).triu(keys - count + 1)
            logits.masked_fill_(later.unsqueeze(1), -torch.inf)
            yield torch.einsum("qhk,khd->qhd", logits.softmax(2), v), logits.logsumexp(2) / math.log(2)
            at, of_keys = at + count, of_keys + keys
