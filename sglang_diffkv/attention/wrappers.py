"""Attention over compressed pages in plan/run form, as in FlashInfer: ``plan`` once a pass, ``run`` once a layer.

SGLang's backend and programs without SGLang use the same two wrappers, over the same ops: Triton's (with FlashInfer for
new tokens where they have it), or the references. They work on a ``PageState``; the caller keeps a ``TableSpace``
for it and calls ``space.append(row, tokens)`` for each row and ``space.flush()`` before a pass, so that every table
entry has its block (``PageManager.plan_step`` and ``launch_step`` do).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from sglang_diffkv.kernels.rotate.fitted import NOT_FITTED, FittedTransform
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation, rotated
from sglang_diffkv.layout.query_cache import QueryCache
from sglang_diffkv.ops.base import Ops, Scaling, Step
from sglang_diffkv.ops.decisions import untouched_tokens
from sglang_diffkv.ops.launches import Launches


class Wrapper:
    """What decode and extend passes share.

    Args:
        ops: kernels over a state, for a policy. rotation: what is rotated before it is stored. queries: where decode
            steps keep their queries, for a policy that scores running requests. key_means: [L, H, head_dim] float,
            taken off keys before they are stored, not rotated; see ``sglang_diffkv/key_means.py``. Not for layers with
            a logit cap, which sees what softmax does not. fitted: matrices that come before all else, in the state's
            dtype; key means are of keys before them. The means come off behind rotations, and before other matrices:
            a product of keys with much in common, once rounded, hardly holds what they differ by.
    """

    decodes: bool

    def __init__(
        self,
        ops: Ops,
        *,
        rotation: Rotation = NO_ROTATION,
        queries: QueryCache | None = None,
        key_means: torch.Tensor | None = None,
        fitted: FittedTransform = NOT_FITTED,
    ):
        self.ops, self.rotation, self.queries, self.fitted = ops, rotation, queries, fitted
        self.state, self.policy = ops.state, ops.policy
        state = self.state
        self.key_means: torch.Tensor | None = None  # [L, H, head_dim] float32, rotated as keys are
        self._rounded_means: torch.Tensor | None = None  # the same numbers in the state's dtype
        self._given_means: torch.Tensor | None = None  # and before they are rotated, float32
        self._means_of: Sequence[torch.Tensor | None] = [None] * state.num_layers  # ``key_means`` of each layer
        self._first_means: torch.Tensor | None = None  # in place of all these where they come off before ``fitted``
        assert key_means is None or key_means.shape == (state.num_layers, state.num_heads, state.fmt.head_dim)
        if key_means is not None and fitted.stretches_keys:
            self._first_means = key_means.to(state.device, state.dtype)
        elif key_means is not None:
            means = fitted.of_means(key_means.to(state.device, torch.float32))
            self._rounded_means = (rotated(means) if rotation.keys else means).to(state.dtype)
            self.key_means = self._rounded_means.float()
            self._means_of = self.key_means.unbind()
            self._given_means = rotated(self.key_means) if rotation.keys else self.key_means
        self.step: Step | None = None

    def begin(self) -> None:
        """Slots and pages for the new tokens of all layers."""
        assert self.step is not None, "plan comes first"
        self.ops.begin(self.step, self.decodes)

    def run(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: Scaling,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Store one layer's new tokens and attend from them, requests in the plan's order.

        Args:
            q: [tokens, Hq, head_dim] in the state's dtype; query head ``h`` belongs to KV head ``h // (Hq / H)``.
            key: [tokens, H, head_dim]. value: [tokens, H, v_head_dim].
            sink_logits: [Hq] of any float type: of each query head, the logit of an attention sink, which joins the
                softmax and has no value; None for none.

        Returns:
            [tokens, Hq, v_head_dim]; after a decode step on a GPU a buffer that the next call overwrites.
        """
        raise NotImplementedError

    def _planned(self, q: torch.Tensor, scaling: Scaling, sink_logits: torch.Tensor | None) -> Step:
        """The step that runs, for which such a layer is possible."""
        assert self.step is not None, "plan comes first"
        assert sink_logits is None or sink_logits.shape == (q.shape[1],)
        if self.key_means is not None or self._first_means is not None:
            assert not scaling.cap, "a logit cap sees what is taken off keys"
            assert sink_logits is None, "a sink's logit is not moved with those of keys"
        return self.step

    def _fitted(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """New tokens behind the fitted matrices. Softmax does not see what comes off all keys alike."""
        if self._first_means is not None:
            key = key - self._first_means[layer]
        return self.fitted.turn(layer, q, key, value)

    def _as_stored(
        self, step: Step, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """New tokens that attend to stored ones too, in the form of these."""
        q, key, value = self.rotation.of(partial(self.ops.rotate, launches=step.launches), q, key, value)
        if self._rounded_means is not None:
            key = key - self._rounded_means[layer]
        return q, key, value

    def _turned_back(self, step: Step, layer: int, out: torch.Tensor) -> torch.Tensor:
        """What attention to stored values gives, [tokens, Hq, v_head_dim], as the model expects it."""
        if self.rotation.values:
            out = self.ops.rotate(out, launches=step.launches)[0]
        return self.fitted.turn_back(layer, out)


class DecodeWrapper(Wrapper):
    """Decode steps: one new token a request.

    ``begin``, ``run`` for each layer and ``end`` launch kernels only, so that a CUDA graph can hold them, after
    ``Ops.prepare_graphs``. Replays read the tensors that were given to ``plan`` when it was captured.
    """

    decodes = True

    def plan(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """rows, seq_lens: [B] integers on the device, the new token counted; row 0 is padding, and gets zeros."""
        self.step = self.ops.decode_step(rows, seq_lens)

    def run(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: Scaling,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        step = self._planned(q, scaling, sink_logits)
        q, key, value = self._fitted(layer, q, key, value)
        means = self._means_of[layer]
        rotated = self.ops.append(layer, key, value, step, rotation=self.rotation, key_means=means, query=q)
        assert rotated is not None
        if self.queries is not None:
            self.ops.store_queries(self.queries, layer, rotated, step)
        out = self.ops.decode(layer, rotated, step, scaling, sink_logits)
        return self._turned_back(step, layer, out)

    def end(self) -> None:
        """Compaction of all layers, where the policy wants any; sliding layers drop what has left their window."""
        step = self.step
        assert step is not None, "plan comes first"
        if step.found is not None:
            self.ops.compact_step(step.rows, step.seq_lens, step.found, step.num_valid)
        if self.state.slides:
            self.ops.slide(step.rows, step.seq_lens, step.num_valid)


class ExtendWrapper(Wrapper):
    """Prompts, whole or in chunks. Not for graphs: shapes follow the plan."""

    decodes = False

    def plan(
        self,
        rows: torch.Tensor,
        prefix_lens: torch.Tensor,
        extend_lens: torch.Tensor,
        prefixes: list[int],
        counts: list[int],
        *,
        prompts: list[int] | None = None,
        shared: list[int] | None = None,
        shared_scores: dict[int, torch.Tensor] | None = None,
        as_computed: bool = False,
    ) -> None:
        """rows, prefix_lens, extend_lens: [B] integers on the device; ``prefixes`` and ``counts`` are the latter two on
        the host.

        Args:
            prompts: of each request, where its prompt ends, if not with this pass: a policy that observes the last
                queries of a prompt has to know. shared: of each, its first tokens that segments hold for it; none where
                that is not known. shared_scores: as in ``Step``. as_computed: every head holds all
                stored tokens of these requests, also where the policy drops some.
        """
        observed = self._observed(prefixes, counts, prompts)
        self.step = Step.extend(rows, prefix_lens, extend_lens, prefixes, counts, *observed)
        self.step.shared_scores, self.step.as_computed = shared_scores or {}, as_computed
        scored = self.step.shared_scores
        self.step.unscored = tuple(0 if number in scored else held for number, held in enumerate(shared or ()))

    def run(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: Scaling,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        step = self._planned(q, scaling, sink_logits)
        q, key, value = self._fitted(layer, q, key, value)
        self.ops.append(layer, key, value, step, rotation=self.rotation, key_means=self._means_of[layer])
        # New tokens that see each other only: in any form attention is the same, and so are scores.
        if not step.max_prefix and not self.ops.reads_new_tokens:
            return self.fitted.turn_back(layer, self.ops.extend(layer, q, key, value, step, scaling, sink_logits))
        means = None if self._given_means is None else self._given_means[layer]
        out = self.ops.extend_unpacked(
            layer, q, key, value, step, scaling, rotation=self.rotation, key_means=means, sink_logits=sink_logits
        )
        if out is not None:
            return self.fitted.turn_back(layer, out)
        form = self._as_stored(step, layer, q, key, value)
        return self._turned_back(step, layer, self.ops.extend(layer, *form, step, scaling, sink_logits))

    def _observed(
        self, prefixes: Sequence[int], counts: Sequence[int], prompts: Sequence[int] | None
    ) -> tuple[list[int] | None, list[int]]:
        """Who observes in each request: from which position on all do, None where all do, and every how manieth before.
        Arguments as of ``plan``."""
        ends = prompts or [prefix + count for prefix, count in zip(prefixes, counts, strict=True)]
        return self.policy.observation.since(ends), self.policy.observation.every_of(ends)

    def end(self) -> None:
        """Behind the last layer: what its layers had in common takes memory no more."""
        assert self.step is not None, "plan comes first"
        self.step.launches = Launches()

    def end_prompt(self, row: int, seq_len: int) -> None:
        """Sort a row's prompt of ``seq_len`` tokens into tiers, where the policy wants it, and drop what has left
        sliding layers' windows."""
        if seq_len > untouched_tokens(self.state, self.policy):
            self.ops.compact_prompts([(row, seq_len)], self.policy)
