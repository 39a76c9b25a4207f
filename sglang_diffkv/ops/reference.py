"""The plain PyTorch ops: the CPU server's, and on a GPU the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.kernels.allocate.reference import reserve
from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.kernels.attach.reference import attach, freeze, keep
from sglang_diffkv.kernels.compact_prompt.reference import compact_prompt
from sglang_diffkv.kernels.compact_step.reference import compact_step, step_moves
from sglang_diffkv.kernels.copy_compact.reference import copy_compact
from sglang_diffkv.kernels.count_owners.reference import count_owners
from sglang_diffkv.kernels.count_rows.reference import count_rows
from sglang_diffkv.kernels.cuts import StepCuts
from sglang_diffkv.kernels.decode_attention.reference import StepScores, decode_attention
from sglang_diffkv.kernels.extend_attention.reference import extend_attention
from sglang_diffkv.kernels.list_pages.reference import list_pages
from sglang_diffkv.kernels.measure.reference import measure
from sglang_diffkv.kernels.parts import Part
from sglang_diffkv.kernels.put_scores.reference import put_scores
from sglang_diffkv.kernels.query_cache.reference import store_queries
from sglang_diffkv.kernels.raw_attention.reference import raw_attention, raw_verification
from sglang_diffkv.kernels.release.reference import release, trim
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation, rotate
from sglang_diffkv.kernels.slide.reference import slide
from sglang_diffkv.kernels.step_scores.reference import step_scores
from sglang_diffkv.kernels.sum_scores.reference import sum_scores
from sglang_diffkv.kernels.transfer_pages.reference import transfer_pages
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.ops.base import Ops, RowKernels, Scaling, Step
from sglang_diffkv.ops.decisions import Decisions, Scoring
from sglang_diffkv.ops.launches import Launches
from sglang_diffkv.policies.base import Policy


class ReferenceOps(Ops):
    """Each method is the reference of its op.

    With one raw tier and no policy attention takes ``raw_attention``, whose numbers are stock SGLang's bit for bit.
    """

    pads = False
    of_rows = RowKernels(attach, transfer_pages, freeze, keep, count_rows, measure, store_queries)

    def __init__(self, state: PageState, policy: Policy, lossless: bool = False):
        super().__init__(state, policy)
        self.lossless = self.reads_new_tokens = lossless
        self.decisions = Decisions()

    def prepare_graphs(self, max_batch: int) -> None:
        raise UnsupportedError("the reference ops cannot be captured in a CUDA graph; add --disable-cuda-graph")

    def memory(self) -> dict[str, int]:
        return {}

    def decode_step(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> Step:
        rows, seq_lens, batch = rows.long(), seq_lens.long(), rows.shape[0]
        ones, count = torch.ones_like(rows), torch.full((1,), batch, dtype=torch.int32, device=rows.device)
        step = Step(rows, seq_lens, seq_lens - 1, ones, rows, torch.zeros_like(rows), seq_lens - 1, count, count)
        step.found = self.new_found(batch) if self.policy.searches_steps else None
        return step

    def begin(self, step: Step, decode: bool, *, attends: bool = True) -> None:
        reserve(self.state, step.rows, step.extend_lens, step.max_extend)

    def reserve(self, rows: torch.Tensor, new_tokens: torch.Tensor, most: int) -> None:
        reserve(self.state, rows, new_tokens, most)

    def rotate(self, *tensors: torch.Tensor, launches: Launches | None = None) -> tuple[torch.Tensor, ...]:
        return rotate(*tensors)

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, step: Step, *, rotation: Rotation = NO_ROTATION,
        key_means: torch.Tensor | None = None, query: torch.Tensor | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        owners = (step.token_rows, step.token_offset, step.token_position)
        append(self.state, layer, key, value, *owners, rotation=rotation, key_means=key_means)
        return rotate(query)[0] if query is not None and rotation.keys else query

    def new_found(self, batch: int) -> StepScores:
        return StepScores.create(self.state, batch, self.step_tiers > 1, self.step_tiers > 0)

    def _as_stock(self, scaling: Scaling, sink_logits: torch.Tensor | None) -> bool:
        """Whether attention takes ``raw_attention``."""
        return self.lossless and not scaling.cap and sink_logits is None

    def decode(
        self, layer: int, q: torch.Tensor, step: Step, scaling: Scaling, sink_logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        state, (scale, cap), attention_span = self.state, scaling, self.state.attention_span(layer)
        if self._as_stock(scaling, sink_logits):
            return raw_attention(state, layer, q, step.rows, step.extend_lens, step.prefix_lens, scale, attention_span)
        out, _ = decode_attention(
            state, layer, q, step.rows, step.seq_lens, scale, scores=None if attention_span else step.found,
            logit_cap=cap, attention_span=attention_span, sink_logits=sink_logits, **self.search_rule,
        )  # fmt: skip
        return out

    def extend(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step, scaling: Scaling,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        lens, attention_span = (step.rows, step.extend_lens, step.prefix_lens), self.state.attention_span(layer)
        if self._as_stock(scaling, sink_logits):
            return raw_attention(self.state, layer, q, *lens, scaling.scale, attention_span)
        scored, observation = self.policy.scored_tiers(len(self.state.fmt.tiers)) > 0, self.policy.observation
        return extend_attention(
            self.state, layer, q, key, value, *lens, scaling.scale, update_scores=scored and not attention_span,
            logit_cap=scaling.cap, shared_scores=step.shared_scores, attention_span=attention_span,
            sink_logits=sink_logits, **step.observers(observation),
        )  # fmt: skip

    def extend_unpacked(self, *step: Any, **form: Any) -> None:
        """Nothing: pages are attended to as they are."""

    def verify(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step, scaling: Scaling,
        sink_logits: torch.Tensor | None = None, lse: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        lens, attention_span = (step.rows, step.extend_lens, step.prefix_lens), self.state.attention_span(layer)
        if self._as_stock(scaling, sink_logits):
            assert lse is None, "nothing is scored"
            spans = (scaling.scale, attention_span, step.ancestors)
            return raw_verification(self.state, layer, q, key, value, *lens, *spans)
        return extend_attention(
            self.state, layer, q, key, value, *lens, scaling.scale, logit_cap=scaling.cap,
            attention_span=attention_span, sink_logits=sink_logits, lse=lse, ancestors=step.ancestors,
        )  # fmt: skip

    def score_step(
        self, layers: range, q: torch.Tensor, lse: torch.Tensor, chosen: torch.Tensor, step: Step, scaling: Scaling
    ) -> None:
        step_scores(
            self.state, layers, q, lse, chosen, step.rows, step.seq_lens, scaling.scale, step.found,
            logit_cap=scaling.cap, **self.search_rule,
        )  # fmt: skip

    def slide(self, rows: torch.Tensor, seq_lens: torch.Tensor, num_valid: torch.Tensor | None = None) -> None:
        slide(self.state, rows.long(), seq_lens.long())

    def compact_step(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, found: StepScores, num_valid: torch.Tensor | None = None
    ) -> None:
        state, rule = self.state, self.decisions.step(self.state, self.policy)
        if rule is not None:
            sums = sum_scores(state, rows) if isinstance(rule, StepCuts) and rule.of_sum else None
            if sums is not None:
                self.decisions.spare_sums(state, rows, sums)
            lengths = self.decisions.lengths(state, rows, seq_lens)
            compact_step(state, rows, step_moves(rule, found, lengths, len(state.fmt.tiers), sums))

    def compact_prompts(
        self, ends: Sequence[tuple[int, int]], policy: Policy, tails: Sequence[int] | None = None
    ) -> None:
        for (row, seq_len), tail in zip(ends, tails or [0] * len(ends), strict=True):
            self.compact_prompt(row, seq_len, policy, tail)

    def compact_prompt(self, row: int, seq_len: int, policy: Policy, tail: int = 0) -> None:
        for _, layers in self.state.groups(policy.layer_stride):
            cuts = self.decisions.of_row(layers, row, seq_len, policy)
            if cuts is not None:
                compact_prompt(layers, row, seq_len, cuts, tail)

    def copy_compact(
        self, target: int, parts: Sequence[Part], seq_len: int, policy: Policy, shared_scores: torch.Tensor | None
    ) -> None:
        for at, layers in self.state.groups(policy.layer_stride):
            known = None if shared_scores is None else shared_scores[at]
            cuts = self.decisions.of_parts(layers, parts, seq_len, policy, known)
            copy_compact(layers, target, parts, seq_len, cuts, known)

    def compact_scored(self, layers: PageState, row: int, seq_len: int, scoring: Scoring) -> None:
        put_scores(layers, row, scoring.scores)
        compact_prompt(layers, row, seq_len, scoring.cuts)

    def copy_scored(
        self, layers: PageState, target: int, parts: Sequence[Part], seq_len: int, scoring: Scoring
    ) -> None:
        copy_compact(layers, target, parts, seq_len, scoring.cuts, scoring.scores)

    def release(self, row: int) -> None:
        release(self.state, row)

    def trim(self, row: int, end: int) -> None:
        trim(self.state, row, end)

    def list_pages(self, asked: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        return list_pages(self.state, asked, total)

    def count_owners(self, rows: torch.Tensor) -> torch.Tensor:
        return count_owners(self.state, rows)
