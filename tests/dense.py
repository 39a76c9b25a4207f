"""A dense oracle: drives a page manager with random tokens and keeps what a plain cache would hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.kernels.decode_attention.reference import StepScores, decode_attention
from sglang_diffkv.kernels.extend_attention.reference import extend_attention
from sglang_diffkv.kernels.quantize.reference import NEW, dequantize, quantize, source_of
from sglang_diffkv.layout.geometry import Segment
from sglang_diffkv.layout.page_format import Tier
from sglang_diffkv.mem_pool.page_manager import PageManager
from tests.checks import check_scores, check_searches
from tests.helpers import Visible, begin_step, end_decode, new_scores, tier_map, visible


def stored(
    x: torch.Tensor, tiers: tuple[Tier, ...], bits: str, dtype: torch.dtype, *, turned: bool
) -> list[torch.Tensor]:
    """``x`` as each tier gives it back: the lower tiers quantise what the high one stored. ``turned``: whether it
    counts as rotated."""
    high = getattr(tiers[0], bits)
    first = x.to(dtype).float() if tiers[0].is_raw else dequantize(*quantize(x, high, NEW), high)
    lower = [getattr(tier, bits) for tier in tiers[1:]]
    return [first, *(dequantize(*quantize(first, n, source_of(n, high, turned=turned)), n) for n in lower)]


@dataclass
class Dense:
    """One sequence: exact keys and values [n, L, H, dim], what each tier stores, attention received."""

    keys: list[torch.Tensor]  # exact, then as stored in each tier
    values: list[torch.Tensor]
    received: torch.Tensor  # [n, L, H] sum over later steps while it was the row's own; past a horizon, steps * mean

    def cut(self, lo: int, hi: int) -> Dense:
        """Positions [lo, hi)."""
        return Dense([x[lo:hi] for x in self.keys], [x[lo:hi] for x in self.values], self.received[lo:hi].clone())

    def joined(self, other: Dense) -> Dense:
        """This sequence and then ``other``."""
        keys, values = zip(self.keys, other.keys), zip(self.values, other.values)
        received = torch.cat([self.received, other.received])
        return Dense([torch.cat(x) for x in keys], [torch.cat(x) for x in values], received)


class Session:
    """A manager and, beside it, the dense form of each row's and each segment's tokens."""

    def __init__(
        self,
        manager: PageManager,
        *,
        group: int = 2,
        logit_cap: float = 0.0,
        spread: float = 1.0,
        seed: int = 0,
    ):
        self.manager, self.state, self.fmt = manager, manager.state, manager.fmt
        self.group, self.logit_cap, self.spread = group, logit_cap, spread
        self.sm_scale = self.fmt.head_dim**-0.5
        self.random = torch.Generator().manual_seed(seed)
        self.dense: dict[int, Dense] = {}
        self.own_from: dict[int, int] = {}
        self.shared: dict[Segment, Dense] = {}

    def _new(self, count: int) -> Dense:
        def rand(dim: int) -> torch.Tensor:
            shape = (count, self.state.num_layers, self.state.num_heads, dim)
            return torch.randn(shape, generator=self.random).bfloat16().float()

        key, value = rand(self.fmt.head_dim), rand(self.fmt.v_head_dim)
        keys = [key, *stored(key, self.fmt.tiers, "k_bits", self.state.dtype, turned=self.fmt.turned[0])]
        values = [value, *stored(value, self.fmt.tiers, "v_bits", self.state.dtype, turned=self.fmt.turned[1])]
        return Dense(keys, values, torch.zeros(key.shape[:3]))

    def query(self, count: int) -> torch.Tensor:
        """Random queries of new tokens."""
        shape = (count, self.state.num_heads * self.group, self.fmt.head_dim)
        return torch.randn(shape, generator=self.random) * self.spread

    def grow(self, rows: list[int], counts: list[int]) -> list[int]:
        """Begin a step with random tokens; returns where each row started."""
        start = [self.manager.rows.length(row) for row in rows]
        begin_step(self.manager, rows, counts, start)
        for row, count in zip(rows, counts):
            new = self._new(count)
            self.dense[row] = self.dense[row].joined(new) if row in self.dense else new
            self.own_from.setdefault(row, 0)
        return start

    def append(self, layer: int, rows: list[int], start: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the tokens from ``start`` on; returns their keys and values."""
        key = torch.cat([self.dense[r].keys[0][s:, layer] for r, s in zip(rows, start)]).bfloat16()
        value = torch.cat([self.dense[r].values[0][s:, layer] for r, s in zip(rows, start)]).bfloat16()
        counts = [len(self.dense[r].received) - s for r, s in zip(rows, start)]
        offset = torch.cat([torch.arange(n) for n in counts])
        position = offset + torch.tensor(start).repeat_interleave(torch.tensor(counts))
        append(
            self.state,
            layer,
            key,
            value,
            torch.tensor(rows).repeat_interleave(torch.tensor(counts)),
            offset,
            position,
        )
        return key, value

    def extend(self, counts: dict[int, int], *, check: bool = True, scores: bool = True) -> torch.Tensor:
        """Extend rows by new tokens in one call; returns the outputs [L, tokens, Hq, v_dim]."""
        rows = list(counts)
        start = self.grow(rows, list(counts.values()))
        outs = []
        for layer in range(self.state.num_layers):
            key, value = self.append(layer, rows, start)
            q = self.query(sum(counts.values()))
            lens, prefix = torch.tensor(list(counts.values())), torch.tensor(start)
            out = extend_attention(
                self.state, layer, q, key, value, torch.tensor(rows), lens, prefix, self.sm_scale,
                update_scores=scores and self.fmt.scored > 0, logit_cap=self.logit_cap,
                reduce=self.manager.policy.observation.reduce,
            )  # fmt: skip
            assert out.isfinite().all()
            if check:
                parts = q.split(list(counts.values())), out.split(list(counts.values()))
                for row, at, row_q, row_out in zip(rows, start, *parts):
                    expected = self._dense_extend(layer, row, at, row_q)
                    torch.testing.assert_close(row_out, expected, rtol=2e-4, atol=2e-4)
            outs.append(out)
        if check and scores:
            check_scores(self, rows)
        return torch.stack(outs)

    def decode(self, rows: list[int], *, check: bool = True) -> StepScores | None:
        """One decode step up to, not including, compaction; returns what the searches found."""
        start = self.grow(rows, [1] * len(rows))
        found = new_scores(self.manager, len(rows))
        index, seq_lens = torch.tensor(rows), torch.tensor(start) + 1
        policy = self.manager.policy
        rule = {name: getattr(policy, name) for name in ("window", "sinks", "horizon")}
        rule["reduce"] = policy.observation.reduce
        rule["row_windows"] = self.state.row_window if self.manager.windows.allowed else None
        for layer in range(self.state.num_layers):
            self.append(layer, rows, start)
            q = self.query(len(rows))
            out, lse = decode_attention(
                self.state, layer, q, index, seq_lens, self.sm_scale,
                scores=found, logit_cap=self.logit_cap, **rule,
            )  # fmt: skip
            assert out.isfinite().all() and not lse.isnan().any()
            if check:
                for b, row in enumerate(rows):
                    expected, expected_lse = self._dense_decode(layer, row, q[b])
                    torch.testing.assert_close(out[b], expected, rtol=2e-4, atol=2e-4)
                    torch.testing.assert_close(lse[b], expected_lse, rtol=1e-5, atol=1e-4)
        if check and found is not None:
            check_scores(self, rows)
            check_searches(self, rows, found)
        return found

    def end_decode(self, rows: list[int], found: StepScores | None) -> None:
        """Generation-phase compaction."""
        seq_lens = torch.tensor([self.manager.rows.length(r) for r in rows])
        end_decode(self.manager, torch.tensor(rows), seq_lens, found)

    def step(self, rows: list[int], *, check: bool = True) -> None:
        """A whole decode step."""
        self.end_decode(rows, self.decode(rows, check=check))

    def end_prompt(self, row: int) -> None:
        """Prompt-phase compaction; the manager may freeze the row."""
        self.manager.prompts.end(row)
        if (frozen := self.manager.rows.frozen(row)) is not None:
            self.own_from[row] = frozen

    def share(self, row: int, lo: int, hi: int) -> Segment | None:
        """Share and keep the dense form of the segment."""
        sealed_there = self.manager.rows.frozen(row) == hi
        segment = self.manager.segments.share(row, lo, hi)
        if segment is not None:
            self.shared[segment] = self.dense[row].cut(lo, hi)
            if not sealed_there:
                self.own_from[row] = self.manager.rows.length(row)
        return segment

    def attach(self, row: int, parts: list[tuple[Segment, int, int]]) -> None:
        """Attach a prefix to an empty row."""
        self.manager.attach_prefix(row, parts)
        cuts = [self.shared[s].cut(lo - s.lo, hi - s.lo) for s, lo, hi in parts]
        for cut in cuts:
            self.dense[row] = self.dense[row].joined(cut) if row in self.dense else cut
        self.own_from[row] = self.manager.rows.length(row)

    def release(self, row: int) -> None:
        """Drop a row."""
        self.manager.release(row)
        self.dense.pop(row, None)
        self.own_from.pop(row, None)

    def _softmax(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None = None):
        logits = q @ k.T * self.sm_scale
        if self.logit_cap:
            logits = self.logit_cap * torch.tanh(logits / self.logit_cap)
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        return logits.softmax(-1), logits.logsumexp(-1)

    def _reduced(self, x: torch.Tensor) -> torch.Tensor:
        """Over the query heads of a KV head, the first dimension, as the policy observes."""
        return x.mean(0) if self.manager.policy.observation.reduce == "mean" else x.amax(0)

    def _paged(self, seen: Visible, dense: Dense, layer: int, head: int, below: int):
        """Positions, keys and values, as stored, of the row's visible tokens at positions < ``below``."""
        here = seen.at(layer, head)
        here = here.pick(here.position < below)
        position, tier = torch.from_numpy(here.position).long(), torch.from_numpy(here.tier).long()
        keys, values = torch.stack(dense.keys[1:]), torch.stack(dense.values[1:])
        return position, keys[tier, position, layer, head], values[tier, position, layer, head]

    def _dense_decode(self, layer: int, row: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dense, outs, lses = self.dense[row], [], []
        seen, newest = visible(self.state, row), len(self.dense[row].received) - 1
        for head in range(self.state.num_heads):
            position, k, v = self._paged(seen, dense, layer, head, newest + 1)
            prob, lse = self._softmax(q[head * self.group : (head + 1) * self.group], k)
            outs.append(prob @ v)
            lses.append(lse)
            mine = (position >= self.own_from[row]) & (position < newest)
            at, got = position[mine], self._reduced(prob)[mine]
            age, total, horizon = newest - at, dense.received[at, layer, head], self.manager.policy.horizon or newest
            mean = total / (age - 1).clamp(min=1)
            new = torch.where(age <= horizon, total + got, age * (mean + (got - mean) / horizon))
            dense.received[at, layer, head] = new
        return torch.cat(outs), torch.cat(lses)

    def _dense_extend(self, layer: int, row: int, start: int, q: torch.Tensor) -> torch.Tensor:
        dense, count, outs = self.dense[row], q.shape[0], []
        seen = visible(self.state, row)
        causal = torch.ones(count, count, dtype=torch.bool).tril()
        for head in range(self.state.num_heads):
            position, k, v = self._paged(seen, dense, layer, head, start)
            k = torch.cat([k, dense.keys[0][start:, layer, head]])
            v = torch.cat([v, dense.values[0][start:, layer, head]])
            mask = torch.cat([torch.ones(count, len(position), dtype=torch.bool), causal], 1)
            position = torch.cat([position, start + torch.arange(count)])
            sums = []
            for g in range(self.group):
                prob, _ = self._softmax(q[:, head * self.group + g], k, mask)
                outs.append(prob @ v)
                later = position < start + torch.arange(count).unsqueeze(1)
                sums.append((prob * later).sum(0))
            mine = position >= self.own_from[row]
            dense.received[position[mine], layer, head] += self._reduced(torch.stack(sums))[mine]
        return torch.stack(outs, 1)


def chunks_and_steps(session: Session) -> None:
    """Two prompts in chunks that are read beside each other, then 40 steps of one or both."""
    for chunk in (9, 1, 14, 2, 16):
        session.extend({2: chunk, 3: 3})
    session.manager.prompts.end(2)
    session.manager.prompts.end(3)
    for step in range(40):
        session.step([2] if step % 3 else [3, 2])


def tiers_of(session: Session, row: int) -> np.ndarray:
    """``tier_map`` of all of a row's tokens."""
    return tier_map(session.state, row, session.manager.rows.length(row))
