"""The served model reads a text once, before requests and graphs: attention is plain, and nothing is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_diffkv.attention.whole import Sight, causal
from sglang_diffkv.srt.models.scaling import scaling_of

Seen = Callable[[int, torch.Tensor], None]
"""Told of each layer's id and of its keys [N, H, D], as attention gets them: normalised and rotated by position."""


class ReadingBackend(AttentionBackend):
    """Stands where SGLang's layers look for the attention backend. A pass is one whole sequence.

    Args:
        runner: SGLang's model runner, with its pools. seen: told of each layer's keys.
    """

    def __init__(self, runner: Any, seen: Seen):
        super().__init__()
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        self.seen = seen

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing depends on the pass."""

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> torch.Tensor:
        """[N, Hq * v_head_dim]. Raises NotImplementedError for layers that the plugin does not serve either."""
        if k is None or v is None:
            raise NotImplementedError("diffkv does not serve models that share one layer's KV with another")
        if given := sorted(x for x, value in more.items() if value is not None and value is not False):
            raise NotImplementedError(f"diffkv does not read texts with {', '.join(given)} of layers")
        key = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        self.seen(layer.layer_id, key)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).transpose(0, 1)[None]  # [1, Hq, N, D]
        value = v.view(-1, layer.tp_v_head_num, layer.v_head_dim).transpose(0, 1)[None]
        scaling, window = scaling_of(layer), getattr(layer, "sliding_window_size", None)
        sight = Sight(None if window is None or window < 0 else window + 1, scaling.cap or None)
        out = causal(query, key.transpose(0, 1)[None], value, scaling.scale, sight)
        return out.reshape(key.shape[0], -1)


@torch.no_grad()
def read(runner: Any, ids: Sequence[int], seen: Seen) -> None:
    """One pass of SGLang's loaded model over a sequence. All tensor-parallel ranks have to call it, with the same one.
    What it took on a GPU goes back to the device."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    batch = _batch(runner, ids)
    with forward_context(ForwardContext(attn_backend=ReadingBackend(runner, seen))):
        runner.model.forward(batch.input_ids, batch.positions, batch)
    if str(runner.device).startswith("cuda"):
        torch.cuda.empty_cache()


def _batch(runner: Any, ids: Sequence[int]) -> Any:
    """SGLang's ForwardBatch of one new sequence, which has no row and no KV slots."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    count, device = len(ids), runner.device
    positions = torch.arange(count, dtype=torch.int64, device=device)
    length, start = (torch.tensor([x], dtype=torch.int32, device=device) for x in (count, 0))
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.tensor(ids, dtype=torch.int64, device=device),
        req_pool_indices=torch.zeros(1, dtype=torch.int64, device=device),
        seq_lens=length.long(),
        seq_lens_cpu=torch.tensor([count], dtype=torch.int64),
        orig_seq_lens=length,
        out_cache_loc=torch.zeros(count, dtype=torch.int64, device=device),
        seq_lens_sum=count,
        return_logprob=False,
        positions=positions,
        mrope_positions=positions.expand(3, -1) if runner.model_config.model_is_mrope else None,
        extend_num_tokens=count,
        extend_seq_lens=length,
        extend_prefix_lens=start,
        extend_start_loc=start,
        extend_prefix_lens_cpu=[0],
        extend_seq_lens_cpu=[count],
        extend_logprob_start_lens_cpu=[0],
        spec_algorithm=runner.spec_algorithm,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        global_forward_mode=ForwardMode.EXTEND,
    )
