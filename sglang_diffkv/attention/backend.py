"""The attention backend that SGLang calls: one object for prefill and decode, over a page manager."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_diffkv.mem_pool.pool import DiffKVPool
from sglang_diffkv.ops import Step


class DiffKVAttnBackend(AttentionBackend):
    """Extend and decode over compressed pages.

    The step's protocol: ``init_forward_metadata`` reserves slots for all layers; each layer appends and
    attends; after the last layer the policy's decisions are carried out for all layers together.
    """

    def __init__(self, runner: Any):
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, DiffKVPool) or pool.manager is None:
            raise RuntimeError(
                "--attention-backend diffkv: the KV pool is not DiffKV's, so nothing would be compressed. "
                "The plugin's hooks did not take effect; see the log for 'Failed to apply hooks'."
            )
        self.manager = pool.manager
        self.state = pool.manager.state
        self.first_layer = pool.start_layer
        self.last_layer = pool.start_layer + self.manager.geometry.num_layers - 1
        self.step: Step | None = None
        self.finishing: list[int] = []
        """Rows whose prompt ends with this pass."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if forward_batch.forward_mode.is_idle():
            self.step = None
            return
        rows = forward_batch.req_pool_indices.tolist()
        seq_lens = forward_batch.seq_lens.tolist()
        decode = forward_batch.forward_mode.is_decode()
        counts = [1] * len(rows) if decode else list(forward_batch.extend_seq_lens_cpu)
        prefixes = [n - c for n, c in zip(seq_lens, counts, strict=True)]
        self.manager.begin_step(rows, counts, prefixes)
        self.step = Step.build(rows, prefixes, counts, self.state.device)
        self.step.found = self.manager.new_scores(len(rows)) if decode else None
        self.finishing = [] if decode else self.manager.take_finishing(rows)

    def _run(self, q: torch.Tensor, k: Any, v: Any, layer: Any, decode: bool) -> torch.Tensor:
        step, state, index = self.step, self.state, layer.layer_id - self.first_layer
        ops, policy = self.manager.ops, self.manager.policy
        assert step is not None
        if k is None or v is None:
            raise NotImplementedError("diffkv does not serve models that share one layer's KV with another")
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        ops.append(state, index, k, v, step)
        cap = layer.logit_cap or 0.0
        if decode:
            out = ops.decode(state, index, q, step, layer.scaling, policy.window, cap)
        else:
            out = ops.extend(state, index, q, k, v, step, layer.scaling, cap, policy.compresses)
        if layer.layer_id == self.last_layer:
            self._end(decode)
        return out.reshape(out.shape[0], -1)

    def _end(self, decode: bool) -> None:
        step = self.step
        assert step is not None
        if decode:
            self.manager.end_decode(step.rows, step.seq_lens, step.found)
        for row in self.finishing:
            self.manager.end_prompt(row)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> torch.Tensor:
        return self._run(q, k, v, layer, decode=False)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> torch.Tensor:
        return self._run(q, k, v, layer, decode=True)

    def support_triton(self) -> bool:
        return False
