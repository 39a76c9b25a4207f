"""The Triton ops. They carry out any policy, see ``ops/decisions.py``."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import partial

import torch

from sglang_diffkv.kernels.allocate.triton import reserve
from sglang_diffkv.kernels.append.triton import PreparedAppend, prepare_append
from sglang_diffkv.kernels.attach.triton import (
    attach,
    freeze,
    keep,
    prepare_attach,
    prepare_attach_rows,
    prepare_seal,
)
from sglang_diffkv.kernels.compact_prompt.triton import PROMPTS, PreparedCompaction, PromptWorkspace, prepare_compact
from sglang_diffkv.kernels.compact_step.triton import compact_step
from sglang_diffkv.kernels.copy_compact.triton import PreparedCopy, form_of_cuts, prepare_copy
from sglang_diffkv.kernels.count_owners.triton import count_owners
from sglang_diffkv.kernels.count_rows.triton import count_rows, prepare_count_rows
from sglang_diffkv.kernels.cuts import Cuts, StepCuts
from sglang_diffkv.kernels.decode_attention.triton import (
    NOTHING,
    FoundTokens,
    PreparedDecode,
    batches_of_each_variant,
    prepare_decode,
)
from sglang_diffkv.kernels.decode_attention.triton_workspace import DecodeConfig
from sglang_diffkv.kernels.extend_attention.triton import extend_attention
from sglang_diffkv.kernels.gather_scores.triton import gather_scores, smooth
from sglang_diffkv.kernels.importance.triton import importance
from sglang_diffkv.kernels.key_norms.triton import key_norms
from sglang_diffkv.kernels.list_pages.triton import prepare_list
from sglang_diffkv.kernels.measure.triton import measure, prepare_add_held, prepare_measure, prepare_tally
from sglang_diffkv.kernels.parts import Part
from sglang_diffkv.kernels.put_scores.triton import put_scores
from sglang_diffkv.kernels.query_cache.triton import store_queries
from sglang_diffkv.kernels.random_scores.triton import random_scores
from sglang_diffkv.kernels.redundancy.triton import redundancy
from sglang_diffkv.kernels.release.triton import prepare_release
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation
from sglang_diffkv.kernels.rotate.triton import prepare_rotate, rotate
from sglang_diffkv.kernels.select.triton import count_above, select_count, select_least, select_mass
from sglang_diffkv.kernels.set_blocks.triton import prepare_set_blocks
from sglang_diffkv.kernels.slide.triton import slide
from sglang_diffkv.kernels.step_scores.triton import step_scores
from sglang_diffkv.kernels.sum_scores.triton import sum_scores
from sglang_diffkv.kernels.transfer_pages.triton import transfer_pages
from sglang_diffkv.kernels.triton_ring import Spans
from sglang_diffkv.kernels.window_scores.triton import window_scores
from sglang_diffkv.layout.state import PageState, tensor_bytes
from sglang_diffkv.layout.transfer import to_device
from sglang_diffkv.ops import read_back
from sglang_diffkv.ops.base import Ops, RowKernels, Scaling, Step
from sglang_diffkv.ops.decisions import Decisions, Scoring, WholeHeadKernels
from sglang_diffkv.ops.decode_buffers import DecodeBuffers
from sglang_diffkv.ops.flash import FlashPrefill
from sglang_diffkv.ops.launches import Launches
from sglang_diffkv.ops.library import PrefillLibrary, base_2
from sglang_diffkv.ops.prompt_scores import prompts_scored, score_new
from sglang_diffkv.ops.ragged import RaggedPrefill
from sglang_diffkv.policies.base import Policy, WholeHead

logger = logging.getLogger(__name__)

WHOLE_HEADS = WholeHeadKernels(
    gather_scores, key_norms, random_scores, smooth, select_count, select_mass, select_least, count_above, importance,
    redundancy, window_scores,
)  # fmt: skip


class TritonOps(Ops):
    """Kernels of a server on a GPU.

    Args:
        q_heads: query heads. max_tokens: longest sequence, for the scratch that keeps a step's logits.
        ragged: computes the attention of new tokens; None for the Triton kernel.
        least_scratch: bytes of the scratch at least, for ``ragged``, which may use it between decode steps.
        prefill_bytes: bytes for ``ragged`` alone, where requests decode in passes over prompts too; 0 for none.
        config: how decode attention is cut.
    """

    pads = True
    of_rows = RowKernels(attach, transfer_pages, freeze, keep, count_rows, measure, store_queries)
    reads_new_tokens = False

    def __init__(
        self,
        state: PageState,
        policy: Policy,
        q_heads: int,
        max_tokens: int,
        ragged: PrefillLibrary | None = None,
        least_scratch: int = 0,
        config: DecodeConfig | None = None,
        prefill_bytes: int = 0,
    ):
        super().__init__(state, policy)
        self.config = config or DecodeConfig()
        self.q_heads, self.max_tokens, self.ragged = q_heads, max_tokens, ragged
        self.least_scratch, self.prefill_bytes = least_scratch, prefill_bytes
        self.has_sinks = False
        """Of the model's layers: attention that sinks join is rounded once, behind them."""
        self._heads_hold_all = read_back.heads_hold_all(policy, len(state.fmt.tiers))
        self.prompt = PromptWorkspace.create(state)
        self.decisions = Decisions.of(WHOLE_HEADS, state, policy, max_tokens)
        self._set_blocks = prepare_set_blocks(state.row_blocks)
        self._attach = {kept_only: prepare_attach(state, kept_only=kept_only) for kept_only in (False, True)}
        self._attach_rows = prepare_attach_rows(state)
        self._list = prepare_list(state)
        self._seal = prepare_seal(state)
        self._count_rows = {
            grows: prepare_count_rows(state, low_grows=grows, used=self.used) for grows in (False, True)
        }
        spans = self.prompt.spans
        self._release = {
            everything: prepare_release(state, spans, everything=everything) for everything in (False, True)
        }
        self._measure = prepare_measure(state)
        self._tally, self._add_held = prepare_tally(state), prepare_add_held(state)
        self._copies: dict[Hashable, PreparedCopy] = {}  # by groups of layers and forms of cuts
        self._compactions: dict[Hashable, PreparedCompaction] = {}  # by these, with tails or without
        self.buffers: list[DecodeBuffers] = []  # by growing size; a graph may hold any of them

    def prepare_graphs(self, max_batch: int) -> None:
        if self.buffers and self.buffers[-1].max_batch >= max_batch:
            return
        least = 0 if self.buffers else self.least_scratch
        sizes = (max_batch, self.q_heads, self.max_tokens)
        self.buffers.append(DecodeBuffers.create(self.state, *sizes, self.policy, self.config, least))

    def use_ragged(self, scaling: Scaling, *, sinks: bool = False) -> None:
        """New tokens of layers of this scaling attend by FlashInfer, in the scratch of the decode steps, or in memory
        of its own. ``sinks``: whether any layers have attention sinks."""
        self.has_sinks = sinks
        state = self.state
        if not state.pages.is_meta:
            fmt, buffer = state.fmt, self.buffers[0].scratch.memory
            if self.prefill_bytes:
                buffer = torch.empty(self.prefill_bytes, dtype=torch.uint8, device=state.device)
            shape = (self.q_heads, state.num_heads, fmt.head_dim, fmt.v_head_dim)
            self.ragged = RaggedPrefill(*shape, state.dtype, state.device, *scaling, buffer=buffer)

    def use_flash(self, *, sinks: bool = False, eight_bits: bool = False) -> None:
        """New tokens of layers without a logit cap attend by FlashAttention-3. ``sinks``: as of ``use_ragged``.
        ``eight_bits``: as of ``FlashPrefill``. Raises UnsupportedError where it cannot."""
        self.has_sinks = sinks
        if not self.state.pages.is_meta:
            self.ragged = library = FlashPrefill(eight_bits=eight_bits)
            if eight_bits:
                library.check(self.q_heads, self.state.num_heads, self.state.fmt.head_dim, self.state.device)

    def memory(self) -> dict[str, int]:
        lines = dict.fromkeys(("decode scratch", "decode spans", "step constants"), 0)
        for x in self.buffers:
            lines["decode scratch"] += x.scratch.memory.nbytes
            lines["decode spans"] += tensor_bytes(x.compaction.spans)
            lines["step constants"] += tensor_bytes(x)
        lines["step constants"] += tensor_bytes(self) + tensor_bytes(self.prompt) + tensor_bytes(self.prompt.spans)
        decisions = self.decisions.nbytes() + (0 if self.used is None else self.used.nbytes)
        return {**lines, "decisions": decisions, "FlashInfer's plans and results": self.prefill_bytes}

    def _buffers(self, batch: int) -> DecodeBuffers:
        if not self.buffers or self.buffers[-1].max_batch < batch:
            self.prepare_graphs(1 << (batch - 1).bit_length())
        return next(x for x in self.buffers if x.max_batch >= batch)

    def _spans(self, batch: int) -> Spans:
        """Where requests of a step take their pages. An extend step may have more requests than any decode step."""
        held = (self.prompt.spans, *(x.compaction.spans for x in self.buffers))
        return next((x for x in held if x.requests >= batch), None) or Spans.create(self.state, batch)

    def bounded_obstacle(self) -> str:
        """Why bounded passes (``Step.bounded``) cannot be computed; empty if they can."""
        if not isinstance(self.ragged, FlashPrefill):
            return "new tokens do not attend by FlashAttention-3"
        if self.state.slides:
            return "layers have sliding windows"
        if self.has_sinks:
            return "layers have attention sinks"
        return "" if self._heads_hold_all else "heads of a request hold different tokens"

    def rounds_prompts(self, prefixes: Sequence[int], counts: Sequence[int]) -> bool:
        lens = [stored + new for stored, new in zip(prefixes, counts, strict=True)]
        return isinstance(self.ragged, FlashPrefill) and self.ragged.rounds(counts, lens)

    def decode_batches(self, most: int) -> list[int]:
        """Sizes of decode steps up to ``most`` requests that between them launch every kernel any of them does."""
        state, searches, found = self.state, self.policy.searches_steps, []
        for searched in {searches, searches and not state.slides}:
            group = self.q_heads // state.num_heads
            found += batches_of_each_variant(state, most, group, self.config, searched=searched)
        return sorted(set(found))

    def decode_step(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> Step:
        batch = rows.shape[0]
        b = self._buffers(batch)
        return Step(
            rows,
            seq_lens,
            b.positions[:batch],
            b.ones[:batch],
            rows,
            b.zeros[:batch],
            b.positions[:batch],
            b.num_valid,
            b.num_valid,
            found=None if b.searches is None else b.searches.found(self.state, batch),
            scratch=(b, b.scratch.workspaces(self.state, batch)),
        )

    def _slice(self, step: Step, number: int) -> tuple[slice, torch.Tensor]:
        """Requests of a decode step that attend together, and [1] int32 how many of them are not padding."""
        buffers, workspaces = step.scratch
        valid = step.num_valid if len(workspaces) == 1 else buffers.valid_of[number, :1]
        return slice(number * self.config.requests, (number + 1) * self.config.requests), valid

    def begin(self, step: Step, decode: bool, *, attends: bool = True) -> None:
        state = self.state
        if decode:
            torch.sub(step.seq_lens, 1, out=step.prefix_lens)
            step.num_valid.copy_((step.rows != 0).sum())
        elif self.ragged is not None:
            if step.ends is None and not self.has_sinks and (step.as_computed or self._heads_hold_all):
                step.whole = read_back.whole_requests(state, step, self.ragged)
            self.ragged.plan(step)
        reserve(state, step.rows, step.extend_lens, self._spans(step.rows.shape[0]), step.num_valid)
        if decode and state.slides and step.found is not None:  # nothing is searched in sliding layers
            step.found.packed.fill_(NOTHING)
        if decode and attends:
            buffers, workspaces = step.scratch
            if len(workspaces) > 1:
                buffers.share_out(step.num_valid)
            score_low = step.found is not None and step.found.score_low
            for number, workspace in enumerate(workspaces):
                part, valid = self._slice(step, number)
                workspace.plan(state, step.rows[part], valid, score_low=score_low)

    def reserve(self, rows: torch.Tensor, new_tokens: torch.Tensor, most: int) -> None:
        reserve(self.state, rows, new_tokens, self._spans(rows.shape[0]), _all_of(rows))

    def rotate(self, *tensors: torch.Tensor, launches: Launches | None = None) -> tuple[torch.Tensor, ...]:
        if launches is None:
            return rotate(*tensors)
        what = ("rotate", *(x.shape for x in tensors))
        again = launches.prepared(what, partial(prepare_rotate, *tensors), *tensors)
        rotated: tuple[torch.Tensor, ...] = again(*tensors)
        return rotated

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, step: Step, *, rotation: Rotation = NO_ROTATION,
        key_means: torch.Tensor | None = None, query: torch.Tensor | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        def prepare() -> PreparedAppend:
            owners = (step.token_rows, step.token_offset, step.token_position, step.num_tokens)
            return prepare_append(
                self.state, key, value, *owners, rotation=rotation, key_means=key_means, query=query
            )  # fmt: skip

        again = step.launches.prepared(("append", rotation), prepare, key, value, key_means, query)
        return again(layer, key, value, key_means, query)

    def new_found(self, batch: int) -> FoundTokens:
        kept = self.step_tiers
        return FoundTokens.create(self.state, batch, self.config, score_low=kept > 1, scored=kept > 0)

    def decode(
        self, layer: int, q: torch.Tensor, step: Step, scaling: Scaling, sink_logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, attention_span, workspaces = q.contiguous(), self.state.attention_span(layer), step.scratch[1]
        out = torch.empty(*q.shape[:2], self.state.fmt.v_head_dim, dtype=q.dtype, device=q.device)
        for number in range(len(workspaces)):
            part, _ = self._slice(step, number)
            some, result = (q, out) if len(workspaces) == 1 else (q[part], out[part])
            prepare = partial(self._prepare_decode, number, some, step, scaling, attention_span, sink_logits)
            split, finish = step.launches.prepared(
                ("decode", number, *scaling, attention_span), prepare, some, result, sink_logits
            )  # fmt: skip
            # Nobody reads it. Of this call, since what a graph writes to has to be in the graph's own memory.
            lse = torch.empty(some.shape[:2], dtype=torch.float32, device=q.device)
            split(q=some, layer=layer)
            finish(out=result, lse_out=lse, layer=layer, sink_logits=sink_logits)
        return out

    def _prepare_decode(
        self, number: int, q: torch.Tensor, step: Step, scaling: Scaling, attention_span: int,
        sink_logits: torch.Tensor | None,
    ) -> PreparedDecode:  # fmt: skip
        part, valid = self._slice(step, number)
        found = None if attention_span or step.found is None else step.found.of_requests(part)
        return prepare_decode(
            self.state, q, step.rows[part], step.seq_lens[part], scaling.scale, step.scratch[1][number], valid,
            found=found, logit_cap=scaling.cap, attention_span=attention_span, sink_logits=sink_logits,
            **self.search_rule,
        )  # fmt: skip

    def extend(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step, scaling: Scaling,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        state, policy, attention_span = self.state, self.policy, self.state.attention_span(layer)
        ragged = None if attention_span or step.whole is not None else self._ragged(scaling)
        if ragged is None or step.max_prefix:  # FlashInfer and the scores of new tokens take a slice of a projection
            q = q.contiguous()
        scored = prompts_scored(state, step, policy) and not attention_span
        alone = not step.max_prefix and sink_logits is None  # new tokens are all there is
        new_part = None
        if ragged is not None:
            out, lse = ragged.run(q, key, value, scaling, lse=scored or not alone)
            if alone:
                if lse is not None:
                    score_new(state, layer, q, key, lse, step, scaling, policy, ragged.lse_unit)
                return out
            assert lse is not None
            new_part = out, base_2(ragged, lse)
        return extend_attention(
            state,
            layer,
            q,
            key,
            value,
            step.rows,
            step.starts,
            step.extend_lens,
            step.prefix_lens,
            step.max_extend,
            step.max_prefix,
            scaling.scale,
            update_scores=scored,
            logit_cap=scaling.cap,
            new_part=new_part,
            shared_scores=step.shared_scores,
            attention_span=attention_span,
            sink_logits=sink_logits,
            **step.observers(policy.observation),
        )[0]

    def _ragged(self, scaling: Scaling) -> PrefillLibrary | None:
        """The library, if it serves layers of this scaling; otherwise it is not used any more."""
        if self.ragged is not None and not self.ragged.serves(scaling):
            logger.warning("DiffKV: new tokens of layers with scale %s and logit cap %s attend by Triton", *scaling)
            self.ragged = None
        return self.ragged

    def extend_unpacked(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step, scaling: Scaling, *,
        rotation: Rotation = NO_ROTATION, key_means: torch.Tensor | None = None,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        if step.whole is None or self.state.attention_span(layer) or sink_logits is not None:
            return None
        ragged = self._ragged(scaling)
        if ragged is None:
            return None
        return read_back.attend(
            self.state, layer, q, key, value, step, ragged, scaling, self.policy, rotation, key_means
        )  # fmt: skip

    def verify(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step, scaling: Scaling,
        sink_logits: torch.Tensor | None = None, lse: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        lens = (step.rows, step.starts, step.extend_lens, step.prefix_lens, step.max_extend, step.max_prefix)
        out, norm = extend_attention(
            self.state, layer, q.contiguous(), key, value, *lens, scaling.scale, logit_cap=scaling.cap,
            attention_span=self.state.attention_span(layer), sink_logits=sink_logits, stored=False,
            ancestors=step.ancestors,
        )  # fmt: skip
        if lse is not None:
            lse.copy_(norm)
        return out

    def score_step(
        self, layers: range, q: torch.Tensor, lse: torch.Tensor, chosen: torch.Tensor, step: Step, scaling: Scaling
    ) -> None:
        step_scores(
            self.state, layers, q, lse, chosen, step.rows, step.seq_lens, scaling.scale, step.found, step.num_valid,
            self.config, q_heads=self.q_heads, logit_cap=scaling.cap, **self.search_rule,
        )  # fmt: skip

    def slide(self, rows: torch.Tensor, seq_lens: torch.Tensor, num_valid: torch.Tensor | None = None) -> None:
        slide(self.state, rows, seq_lens, _all_of(rows) if num_valid is None else num_valid)

    def compact_step(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, found: FoundTokens, num_valid: torch.Tensor | None = None
    ) -> None:
        rule = self.decisions.step(self.state, self.policy)
        if rule is None:
            return
        workspace = self._buffers(rows.shape[0]).compaction
        if num_valid is None:
            num_valid = _all_of(rows)
        if isinstance(rule, StepCuts) and rule.of_sum:
            sum_scores(self.state, rows, num_valid, workspace.sums)
            self.decisions.spare_sums(self.state, rows, workspace.sums[: rows.shape[0]])
        lengths = self.decisions.lengths(self.state, rows, seq_lens)
        compact_step(self.state, rows, lengths, found, workspace, num_valid, rule)

    def compact_prompts(
        self, ends: Sequence[tuple[int, int]], policy: Policy, tails: Sequence[int] | None = None
    ) -> None:
        most = 1 if isinstance(policy.prompt, WholeHead) else PROMPTS  # rows whose heads are scored whole go one by one
        for first in range(0, len(ends), most):
            some = slice(first, first + most)
            for _, layers in self.state.groups(policy.layer_stride):
                cuts = self.decisions.of_row(layers, *ends[first], policy)
                if cuts is not None:
                    self._compact(layers, ends[some], cuts, None if tails is None else tails[some])

    def _compact(
        self, layers: PageState, ends: Sequence[tuple[int, int]], cuts: Cuts, tails: Sequence[int] | None = None
    ) -> None:
        columns = tuple(zip(*ends, strict=True))
        rows, seq_lens, *last = to_device(columns if tails is None else (*columns, tuple(tails)), layers.device)
        tails = last[0] if last else None
        form = (layers.first_layer, layers.num_layers, form_of_cuts(cuts), tails is not None)
        again = self._compactions.get(form)
        if again is None:
            again = self._compactions[form] = prepare_compact(layers, self.prompt, cuts, tailed=tails is not None)
        again(rows, seq_lens, cuts, tails)

    def copy_compact(
        self, target: int, parts: Sequence[Part], seq_len: int, policy: Policy, shared_scores: torch.Tensor | None
    ) -> None:
        for at, layers in self.state.groups(policy.layer_stride):
            known = None if shared_scores is None else shared_scores[at]
            cuts = self.decisions.of_parts(layers, parts, seq_len, policy, known)
            self._copy(layers, target, parts, seq_len, cuts, known)

    def _copy(
        self, layers: PageState, target: int, parts: Sequence[Part], seq_len: int, cuts: Cuts,
        shared_scores: torch.Tensor | None,
    ) -> None:  # fmt: skip
        form = (layers.first_layer, layers.num_layers, form_of_cuts(cuts))
        again = self._copies.get(form)
        if again is None:
            again = self._copies[form] = prepare_copy(layers, self.prompt.spans, cuts)
        for source, lo, hi in parts:
            again(target, source, lo, hi, seq_len, cuts, shared_scores)

    def compact_scored(self, layers: PageState, row: int, seq_len: int, scoring: Scoring) -> None:
        put_scores(layers, row, scoring.scores)
        self._compact(layers, [(row, seq_len)], scoring.cuts)

    def copy_scored(
        self, layers: PageState, target: int, parts: Sequence[Part], seq_len: int, scoring: Scoring
    ) -> None:
        self._copy(layers, target, parts, seq_len, scoring.cuts, scoring.scores)

    def set_blocks(self, at: Sequence[int], blocks: Sequence[int]) -> None:
        self._set_blocks(at, blocks)

    def attach(self, target: int, source: int, lo: int, hi: int, *, kept_only: bool = False) -> None:
        self._attach[kept_only](target, [(source, lo, hi)])

    def attach_paths(self, paths: Sequence[tuple[int, Sequence[Part]]]) -> None:
        if len(paths) > 1:
            with suppress(torch.OutOfMemoryError):  # of the copy of the numbers, before anything is launched
                self._attach_rows(paths)
                return
        for path in paths:
            self._attach[False](*path)

    def count_rows(self, rows: torch.Tensor, *, steps: int, low_grows: bool) -> torch.Tensor:
        return self._count_rows[low_grows](rows, steps)

    def seal(self, row: int) -> None:
        self._seal(row)

    def release(self, row: int) -> None:
        self._release[True](row, 0)

    def trim(self, row: int, end: int) -> None:
        self._release[False](row, end)

    def measure(self, rows: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
        return self._measure(rows, lo, hi)

    def add_held(self, rows: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, out: torch.Tensor) -> None:
        self._add_held(rows, lo, hi, out)

    def tally(self, row: int, hi: int, out: torch.Tensor, number: int) -> None:
        self._tally(row, hi, out, number)

    def list_pages(self, asked: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._list(asked, total)

    def count_owners(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.buffers:
            return count_owners(self.state, rows, torch.empty_like(self.state.refcount))
        memory = self.buffers[0].scratch.memory  # no decode step needs it before the next
        return count_owners(self.state, rows, memory[: memory.numel() // 4 * 4].view(torch.int32))


def _all_of(rows: torch.Tensor) -> torch.Tensor:
    """``num_valid`` of rows without padding."""
    return torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device)
