"""The served model reads a text once, before requests and graphs: attention is plain, or what a cache would make of it,
and nothing is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_diffkv.attention.emulated import Span, Stored, attend
from sglang_diffkv.attention.whole import Sight, causal
from sglang_diffkv.ladder import parts_of
from sglang_diffkv.srt.models.scaling import scaling_of
from sglang_diffkv.srt.pool import DiffKVPool

Seen = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float, Sight], None]
"""Told of each layer's id, of its queries [N, Hq, D], keys [N, H, D] and values [N, H, Dv], as attention gets them:
normalised and rotated by position, and of its scale and sight."""
SeenKeys = Callable[[int, torch.Tensor], None]
"""Told of each layer's id and of its keys, likewise."""


class ReadingBackend(AttentionBackend):
    """Stands where SGLang's layers look for the attention backend. A pass is one whole sequence.

    Args:
        runner: SGLang's model runner; pools are there or not. seen: told of each layer's vectors.
    """

    def __init__(self, runner: Any, seen: Seen):
        super().__init__()
        self.token_to_kv_pool = getattr(runner, "token_to_kv_pool", None) or without_pages(runner)
        self.req_to_token_pool = getattr(runner, "req_to_token_pool", None)
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
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        value = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        scaling, window = scaling_of(layer), getattr(layer, "sliding_window_size", None)
        sight = Sight(None if window is None or window < 0 else window + 1, scaling.cap or None)
        self.seen(layer.layer_id, query, key, value, scaling.scale, sight)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, N, D]
        out = self.attended(layer, q, k, v, scaling.scale, sight)
        return out.reshape(key.shape[0], -1)

    def attended(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, sight: Sight
    ) -> torch.Tensor:
        """What a layer's attention gives, [N, Hq, v_head_dim] perhaps behind a dimension of 1; arguments as of
        ``causal``."""
        return causal(query, key, value, scale, sight)


class JudgingBackend(ReadingBackend):
    """The same over what a cache would have stored of the sequence.

    Args:
        stored: by which cache. layers: ids of the model's layers that attend, in order.
    """

    def __init__(self, runner: Any, stored: Stored, layers: Sequence[int], tokens: int):
        super().__init__(runner, lambda *told: None)
        self.stored, self.span = stored, Span(*parts_of(tokens))
        self.places = {layer: place for place, layer in enumerate(layers)}

    def attended(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, sight: Sight
    ) -> torch.Tensor:
        place = self.places[layer.layer_id]
        return attend(query[0], key[0], value[0], scale, place, self.stored, self.span, sight)


def without_pages(runner: Any) -> DiffKVPool:
    """A pool without memory, for a pass before there is one: models ask what kind theirs is."""
    layers = runner.layer_info
    every = range(layers.start_layer, layers.end_layer)
    return DiffKVPool(1, runner.dtype, every, runner.device, False, layers.start_layer, layers.end_layer)


@torch.no_grad()
def read(runner: Any, ids: Sequence[int], seen: SeenKeys) -> None:
    """One pass of SGLang's loaded model over a sequence. All tensor-parallel ranks have to call it, with the same one.
    What it took on a GPU goes back to the device."""
    read_vectors(runner, ids, lambda layer, query, key, *others: seen(layer, key))


@torch.no_grad()
def read_vectors(runner: Any, ids: Sequence[int], seen: Seen) -> None:
    """As ``read``, with queries and values."""
    _pass(runner, ids, ReadingBackend(runner, seen), [len(ids)])
    give_back(runner)


@torch.no_grad()
def logits(
    runner: Any, ids: Sequence[int], layers: Sequence[int], positions: Sequence[int], stored: Stored
) -> torch.Tensor:
    """[M, vocabulary] at ``positions``, of which the last is the sequence's last token; as ``read`` otherwise.

    Args:
        layers, stored: as of ``JudgingBackend``.
    """
    backend = JudgingBackend(runner, stored, layers, len(ids))
    found = _pass(runner, ids, backend, [x + 1 for x in positions]).next_token_logits.clone()
    give_back(runner)
    return found


def give_back(runner: Any) -> None:
    """What PyTorch keeps of a GPU's memory for later goes back to the device."""
    if str(runner.device).startswith("cuda"):
        torch.cuda.empty_cache()


def _pass(runner: Any, ids: Sequence[int], backend: ReadingBackend, ends: Sequence[int]) -> Any:
    """What the model gives, with logits of the token before each of ``ends``."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    batch = _batch(runner, ids, ends)
    with forward_context(ForwardContext(attn_backend=backend)):
        return runner.model.forward(batch.input_ids, batch.positions, batch)


def _batch(runner: Any, ids: Sequence[int], ends: Sequence[int]) -> Any:
    """SGLang's ForwardBatch of one new sequence, which has no row and no KV slots. To SGLang its parts that end at
    ``ends`` are sequences, since it works out the logits of each one's last token."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    count, parts, device = len(ids), len(ends), runner.device
    starts = [0, *ends[:-1]]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    positions = torch.arange(count, dtype=torch.int64, device=device)
    length, start, end = (torch.tensor(x, dtype=torch.int32, device=device) for x in (lengths, starts, ends))
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=parts,
        input_ids=torch.tensor(ids, dtype=torch.int64, device=device),
        req_pool_indices=torch.zeros(parts, dtype=torch.int64, device=device),
        seq_lens=end.long(),
        seq_lens_cpu=torch.tensor(ends, dtype=torch.int64),
        orig_seq_lens=end,
        out_cache_loc=torch.zeros(count, dtype=torch.int64, device=device),
        seq_lens_sum=sum(ends),
        return_logprob=False,
        positions=positions,
        mrope_positions=positions.expand(3, -1) if runner.model_config.model_is_mrope else None,
        extend_num_tokens=count,
        extend_seq_lens=length,
        extend_prefix_lens=start,
        extend_start_loc=start,
        extend_prefix_lens_cpu=starts,
        extend_seq_lens_cpu=lengths,
        extend_logprob_start_lens_cpu=[0] * parts,
        spec_algorithm=runner.spec_algorithm,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        global_forward_mode=ForwardMode.EXTEND,
    )
