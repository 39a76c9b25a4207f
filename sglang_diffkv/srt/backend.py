"""The attention backend that SGLang calls: one object for prefill and decode, over a page manager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_diffkv.config import load_config
from sglang_diffkv.ops import Scaling, Step
from sglang_diffkv.srt.pool import DiffKVPool
from sglang_diffkv.srt.scaling import scaling_of


class DiffKVAttnBackend(AttentionBackend):
    """Extend and decode over compressed pages.

    The step's protocol: hooks plan it on the host; ``init_forward_metadata`` takes slots for all layers; each
    layer appends and attends; after the last layer the policy's decisions are carried out for all layers
    together. A CUDA graph holds all of a decode step but the table blocks that the host hands out.
    """

    def __init__(self, runner: Any, scalings: Sequence[Scaling] = ()):
        """``scalings``: of the model's layers, for which kernels are made ready; by default the usual one."""
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, DiffKVPool) or pool.manager is None:
            raise RuntimeError(
                "--attention-backend diffkv: the KV pool is not DiffKV's, so nothing would be compressed. "
                "The plugin's hooks did not take effect; see the log for 'Failed to apply hooks'."
            )
        self.manager = manager = pool.manager
        self.state = manager.state
        self.first_layer = pool.start_layer
        self.last_layer = pool.start_layer + manager.geometry.num_layers - 1
        config = load_config()
        self.rotates = config.rotate == "keys"
        if self.state.pages.is_cuda:
            if config.gpu_ops != "reference":
                from sglang_diffkv.ops.gpu import build_ops
                from sglang_diffkv.ops.warm_up import compile_kernels

                q_heads = runner.model_config.num_attention_heads // manager.ranks.size
                ops = build_ops(self.state, manager.policy, manager.geometry, q_heads, config.prefill, scalings)
                manager.ops = ops
                copies = config.prefix_fidelity == "exact"
                compile_kernels(
                    ops, self.state, manager.policy, dtype=runner.dtype, scalings=scalings, rotates=self.rotates,
                    copies=copies,
                )  # fmt: skip
            if not runner.server_args.disable_overlap_schedule:
                manager.stream = runner.forward_stream
        self.step: Step | None = None
        self.finishing: list[int] = []
        """Rows whose prompt ends with this pass."""
        self.chunking: list[int] = []
        """Rows that are compacted after this pass, though more of their prompt comes."""

    # What SGLang's graph runner asks

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.manager.ops.prepare_graphs(self.state, max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """A pass outside graphs."""
        self._prepare(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """What a graph cannot hold: for a replay the host's table blocks, the rest is captured."""
        if in_capture:
            self._prepare(forward_batch)
        else:
            self.manager.launch_step()

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        if self.step is not None:
            self.manager.ops.begin(self.state, self.step, forward_batch.forward_mode.is_decode())

    def _prepare(self, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        self.step, self.finishing, self.chunking = None, [], []
        if mode.is_idle():
            return
        self.manager.launch_step()
        rows, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        if mode.is_decode():
            self.step = self.manager.ops.decode_step(self.state, rows, seq_lens, self.manager.policy)
            return
        planned = self.manager.planned
        if planned is None or list(forward_batch.extend_seq_lens_cpu) != planned.new_tokens:
            raise RuntimeError("diffkv: SGLang runs a prefill that it did not schedule")
        lens = (forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens)
        since = self.manager.policy.observation.since(planned.start, planned.new_tokens)
        self.step = Step.extend(rows, *lens, planned.start, planned.new_tokens, since)
        judged = self.manager.copies.judged
        self.step.judged = {i: judged[row] for i, row in enumerate(planned.rows) if row in judged}
        self.finishing = self.manager.prompts.take_finishing(planned.rows)
        self.chunking = self.manager.prompts.take_chunking(planned.rows)

    # Layers

    def _run(self, q: torch.Tensor, k: Any, v: Any, layer: Any, decode: bool) -> torch.Tensor:
        step, state, index = self.step, self.state, layer.layer_id - self.first_layer
        ops, policy = self.manager.ops, self.manager.policy
        assert step is not None
        if k is None or v is None:
            raise NotImplementedError("diffkv does not serve models that share one layer's KV with another")
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        if self.rotates:
            q, k = ops.rotate(q, k)
        ops.append(state, index, k, v, step)
        scale, cap = scaling_of(layer)
        if decode:
            out = ops.decode(state, index, q, step, scale, policy, cap)
        else:
            out = ops.extend(state, index, q, k, v, step, scale, policy, cap)
        if layer.layer_id == self.last_layer:
            self._end(decode)
        return out.reshape(out.shape[0], -1)

    def _end(self, decode: bool) -> None:
        step, manager = self.step, self.manager
        assert step is not None
        if decode:
            manager.end_decode(step.rows, step.seq_lens, step.found, step.num_rows)
        for row in self.finishing:
            manager.prompts.end(row)
        for row in self.chunking:
            manager.prompts.end_chunk(row)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> torch.Tensor:
        _refuse(more)
        return self._run(q, k, v, layer, decode=False)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> torch.Tensor:
        _refuse(more)
        return self._run(q, k, v, layer, decode=True)

    def support_triton(self) -> bool:
        return self.state.pages.is_cuda


def _refuse(more: Mapping[str, Any]) -> None:
    """What a model gives its attention beside q, k and v, such as attention sinks, changes the result."""
    given = sorted(name for name, value in more.items() if value is not None and value is not False)
    if given:
        raise NotImplementedError(
            f"diffkv does not compute attention with {', '.join(given)}: use another --attention-backend for this model"
        )
