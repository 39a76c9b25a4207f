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
from sglang_diffkv.layout.query_cache import QueryCache
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.ops.base import Scaling, Step
from sglang_diffkv.ops.decisions import Decisions, Judgement
from sglang_diffkv.ops.launches import Launches
from sglang_diffkv.policies.base import Policy


class ReferenceOps:
    """Each method is the reference of its op.

    With one raw tier and no policy attention takes ``raw_attention``, whose numbers are stock SGLang's bit for bit.
    """

    pads = False

    def __init__(self, lossless: bool = False):
        self.lossless = self.reads_new_tokens = lossless
        self.decisions = Decisions()

    def prepare_graphs(self, state: PageState, max_batch: int) -> None:
        raise UnsupportedError("the reference ops cannot be captured in a CUDA graph; add --disable-cuda-graph")

    def memory(self) -> dict[str, int]:
        return {}

    def decode_step(self, state: PageState, rows: torch.Tensor, seq_lens: torch.Tensor, policy: Policy) -> Step:
        rows, seq_lens, batch = rows.long(), seq_lens.long(), rows.shape[0]
        ones, count = torch.ones_like(rows), torch.full((1,), batch, dtype=torch.int32, device=rows.device)
        step = Step(rows, seq_lens, seq_lens - 1, ones, rows, torch.zeros_like(rows), seq_lens - 1, count, count)
        step.found = self.new_found(state, batch, policy) if policy.searches_steps else None
        return step

    def begin(self, state: PageState, step: Step, decode: bool, *, attends: bool = True) -> None:
        reserve(state, step.rows, step.extend_lens, step.max_extend)

    def reserve(self, state: PageState, rows: torch.Tensor, new_tokens: torch.Tensor, most: int) -> None:
        reserve(state, rows, new_tokens, most)

    def rotate(self, *tensors: torch.Tensor, launches: Launches | None = None) -> tuple[torch.Tensor, ...]:
        return rotate(*tensors)

    def append(
        self, state: PageState, layer: int, key: torch.Tensor, value: torch.Tensor, step: Step, *,
        rotation: Rotation = NO_ROTATION, key_means: torch.Tensor | None = None, query: torch.Tensor | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        owners = (step.token_rows, step.token_offset, step.token_position)
        append(state, layer, key, value, *owners, rotation=rotation, key_means=key_means)
        return rotate(query)[0] if query is not None and rotation.keys else query

    def new_found(self, state: PageState, batch: int, policy: Policy) -> StepScores:
        kept = policy.step_tiers(len(state.fmt.tiers))
        return StepScores.create(state, batch, kept > 1, kept > 0)

    def decode(
        self, state: PageState, layer: int, q: torch.Tensor, step: Step, scale: float, policy: Policy, cap: float,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        attention_span = state.attention_span(layer)
        if self.lossless and not cap and sink_logits is None:
            return raw_attention(state, layer, q, step.rows, step.extend_lens, step.prefix_lens, scale, attention_span)
        out, _ = decode_attention(
            state, layer, q, step.rows, step.seq_lens, scale, scores=None if attention_span else step.found,
            logit_cap=cap,
            attention_span=attention_span, sink_logits=sink_logits, **policy.search_rule,
        )  # fmt: skip
        return out

    def extend(
        self,
        state: PageState,
        layer: int,
        q: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: Step,
        scale: float,
        policy: Policy,
        cap: float,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        lens, attention_span = (step.rows, step.extend_lens, step.prefix_lens), state.attention_span(layer)
        if self.lossless and not cap and sink_logits is None:
            return raw_attention(state, layer, q, *lens, scale, attention_span)
        scored = policy.scored_tiers(len(state.fmt.tiers)) > 0
        return extend_attention(
            state, layer, q, key, value, *lens, scale, update_scores=scored and not attention_span, logit_cap=cap,
            judged=step.judged, observe_from=step.observe_from, observe_every=policy.observation.every,
            reduce=policy.observation.reduce, attention_span=attention_span, sink_logits=sink_logits,
        )  # fmt: skip

    def extend_unpacked(self, *step: Any, **form: Any) -> None:
        """Nothing: pages are attended to as they are."""

    def verify(
        self, state: PageState, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step,
        scale: float, cap: float, sink_logits: torch.Tensor | None = None, lse: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        lens, attention_span = (step.rows, step.extend_lens, step.prefix_lens), state.attention_span(layer)
        if self.lossless and not cap and sink_logits is None:
            assert lse is None, "nothing is scored"
            return raw_verification(state, layer, q, key, value, *lens, scale, attention_span)
        return extend_attention(
            state,
            layer,
            q,
            key,
            value,
            *lens,
            scale,
            logit_cap=cap,
            attention_span=attention_span,
            sink_logits=sink_logits,
            lse=lse,
        )

    def score_step(
        self, state: PageState, layers: range, q: torch.Tensor, lse: torch.Tensor, chosen: torch.Tensor, step: Step,
        scaling: Scaling, policy: Policy,
    ) -> None:  # fmt: skip
        scale, cap = scaling
        step_scores(
            state, layers, q, lse, chosen, step.rows, step.seq_lens, scale, step.found, logit_cap=cap,
            **policy.search_rule,
        )  # fmt: skip

    def slide(
        self, state: PageState, rows: torch.Tensor, seq_lens: torch.Tensor, num_valid: torch.Tensor | None = None
    ) -> None:
        slide(state, rows.long(), seq_lens.long())

    def compact_step(
        self,
        state: PageState,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        found: StepScores,
        policy: Policy,
        num_valid: torch.Tensor | None = None,
    ) -> None:
        rule = self.decisions.step(state, policy)
        if rule is not None:
            sums = sum_scores(state, rows) if isinstance(rule, StepCuts) and rule.of_sum else None
            compact_step(state, rows, step_moves(rule, found, seq_lens, len(state.fmt.tiers), sums))

    def compact_prompts(
        self,
        state: PageState,
        ends: Sequence[tuple[int, int]],
        policy: Policy,
        tails: Sequence[int] | None = None,
    ) -> None:
        for (row, seq_len), tail in zip(ends, tails or [0] * len(ends), strict=True):
            self.compact_prompt(state, row, seq_len, policy, tail)

    def compact_prompt(self, state: PageState, row: int, seq_len: int, policy: Policy, tail: int = 0) -> None:
        for _, layers in state.groups(policy.layer_stride):
            cuts = self.decisions.of_row(layers, row, seq_len, policy)
            if cuts is not None:
                compact_prompt(layers, row, seq_len, cuts, tail)

    def copy_compact(
        self,
        state: PageState,
        target: int,
        parts: Sequence[Part],
        seq_len: int,
        policy: Policy,
        judged: torch.Tensor | None,
    ) -> None:
        for at, layers in state.groups(policy.layer_stride):
            known = None if judged is None else judged[at]
            cuts = self.decisions.of_parts(layers, parts, seq_len, policy, known)
            copy_compact(layers, target, parts, seq_len, cuts, known)

    def store_queries(self, cache: QueryCache, layer: int, q: torch.Tensor, step: Step) -> None:
        store_queries(cache, layer, q, step.rows, step.seq_lens)

    def judge_running(
        self,
        state: PageState,
        row: int,
        seq_len: int,
        policy: Policy,
        queries: torch.Tensor,
        scaling: Scaling,
        *,
        first: bool,
        most: int,
        beside: int | None = None,
    ) -> Judgement:
        decisions = self.decisions if beside is None else self.decisions.beside(state, beside)
        return decisions.of_running(state, row, seq_len, policy, queries, scaling, first=first, most=most)

    def compact_judged(self, state: PageState, row: int, seq_len: int, judgement: Judgement) -> None:
        put_scores(state, row, judgement.scores)
        compact_prompt(state, row, seq_len, judgement.cuts)

    def copy_judged(
        self, state: PageState, target: int, parts: Sequence[Part], seq_len: int, judgement: Judgement
    ) -> None:
        copy_compact(state, target, parts, seq_len, judgement.cuts, judgement.scores)

    def attach(self, state: PageState, target: int, source: int, lo: int, hi: int, *, kept_only: bool = False) -> None:
        attach(state, target, source, lo, hi, kept_only=kept_only)

    def transfer_pages(self, state: PageState, row: int, target: int) -> None:
        transfer_pages(state, row, target)

    def freeze(self, state: PageState, rows: int | torch.Tensor, tails: torch.Tensor | None = None) -> None:
        freeze(state, rows, tails)

    def keep(self, state: PageState, row: int) -> None:
        keep(state, row)

    def release(self, state: PageState, row: int) -> None:
        release(state, row)

    def trim(self, state: PageState, row: int, end: int) -> None:
        trim(state, row, end)

    def count_rows(self, state: PageState, rows: torch.Tensor, *, steps: int, low_grows: bool) -> torch.Tensor:
        return count_rows(state, rows, steps=steps, low_grows=low_grows)

    def measure(self, state: PageState, rows: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
        return measure(state, rows, lo, hi)

    def count_owners(self, state: PageState, rows: torch.Tensor) -> torch.Tensor:
        return count_owners(state, rows)
