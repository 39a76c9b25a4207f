"""A draft model beside the model that has pages: its keys and values lie in a pool of SGLang's own, by KV slot, and its
attention runs on one of SGLang's backends.

A KV slot names a token in both: SGLang's table of requests and the prefix cache list it, so whatever finds a token's
pages finds what the draft model stored of it. The slot of a rejected draft is written again by the next chain.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.srt.backend import DiffKVAttnBackend
from sglang_diffkv.srt.models.speculation import draft_worker, drafts_by_model, table_slack
from sglang_diffkv.srt.scheduling.allocator import SERVED, requests_of
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.versions.selection import BACKEND, is_selected

logger = logging.getLogger(__name__)

BACKENDS = {"cuda": "triton", "cpu": "torch_native"}
"""Attention backend of the draft model where none is given."""

DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""What ``--speculative-draft-kv-cache-dtype`` may name that takes fewer bytes than the draft model's own numbers. Those
of 4 bits, and with scales, are planned for as the model's numbers."""


def choose_backend(server_args: Any) -> None:
    """Give the draft model an attention backend, unless the user named one: by itself SGLang takes the target's."""
    args = compat.resolved(server_args)
    if not drafts_by_model(args) or args.speculative_draft_attention_backend:
        return
    chosen = BACKENDS.get(str(args.device or ""))
    if chosen:
        compat.decide(server_args, speculative_draft_attention_backend=chosen)


def bytes_of_slot(server_args: Any) -> int:
    """Bytes that one token's keys and values take in the draft model's pool on a rank; 0 without a draft model."""
    args = compat.resolved(server_args)
    if not drafts_by_model(args):
        return 0
    from sglang.srt.configs.model_config import ModelConfig

    model = ModelConfig.from_server_args(
        server_args,
        model_path=args.speculative_draft_model_path or args.model_path,
        model_revision=args.speculative_draft_model_revision,
        is_draft_model=True,
    )
    layers = model.num_nextn_predict_layers or max(model.num_hidden_layers, model.num_attention_layers)
    numbers = layers * model.get_num_kv_heads(args.tp_size) * (model.head_dim + (model.v_head_dim or model.head_dim))
    asked = getattr(args, "speculative_draft_kv_cache_dtype", None)
    return int(numbers * DTYPES.get(str(asked), model.dtype).itemsize)


def build_pool(original: Any, configurator: Any, sizes: dict[str, Any]) -> Any:
    """SGLang's pool for the draft model, with a place for every KV slot. ``sizes``: the arguments of its builder."""
    return original(configurator, **{**sizes, "max_total_num_tokens": SERVED[BACKEND].ledger.kv_slots})


def check_pool(pool: Any) -> None:
    """Raise UnsupportedError if SGLang built the draft model a pool with fewer places than there are KV slots."""
    if pool.size < SERVED[BACKEND].ledger.kv_slots:
        raise UnsupportedError(
            f"--attention-backend diffkv: SGLang built a {type(pool).__name__} for the draft model, which the plugin "
            "cannot make large enough. Use another --speculative-draft-model-path, or --speculative-algorithm NGRAM."
        )


def keep_on_host(pool: Any) -> None:
    """With host memory for prefixes or retracted requests, what the draft model's ``pool`` has of them goes there too.
    Retracted requests are computed again with a pool of another kind than keys and values by KV slot.

    Raises UnsupportedError for such a pool with host memory for prefixes.
    """
    manager = SERVED[BACKEND].ledger.manager
    if manager.saved is None:
        return
    keys, values = (getattr(pool, name, None) for name in ("k_buffer", "v_buffer"))
    if not keys or not values or getattr(pool, "k_scale_buffer", None) is not None:
        if manager.saved_segments is None:
            logger.warning(
                "DiffKV: retracted requests are computed again: SGLang built a %s for the draft model, of which host "
                "memory has no copies.", type(pool).__name__,
            )  # fmt: skip
            manager.keeps_retracted = False
            return
        raise UnsupportedError(
            f"--attention-backend diffkv: SGLang built a {type(pool).__name__} for the draft model, of which host "
            "memory has no copies. Drop --enable-hierarchical-cache, or use --speculative-algorithm NGRAM."
        )
    manager.keep_slots([buffer.unsqueeze(0) for buffer in (*keys, *values)], manager.host_slots, by_token=True)


def create_worker(original: Any, algorithm: Any, server_args: Any) -> Any:
    """Who drafts and verifies: SGLang's worker for its ``algorithm``, which tells the pages what was accepted."""
    worker = original(algorithm, server_args)
    return draft_worker(worker, ngram=algorithm.is_ngram()) if is_selected(server_args) else worker


def get_req_to_token_extra_context_len(original: Any, *server_args: Any) -> int:
    """KV slots for which SGLang's table of requests has room behind a sequence. By itself SGLang has room for the
    drafts of one pass, and writes those of two: of a request at its longest into the next one's line."""
    args = server_args[0] if server_args else compat.published_args()
    extra = int(original(*server_args))
    return max(extra, table_slack(compat.resolved(args))) if is_selected(args) else extra


def eagle_sample(original: Any, verify_input: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """What SGLang accepts of a pass's drafts, of n-grams too. The places of those on the accepted paths, [B, longest
    path] int32, stay with its ``batch`` for the commit."""
    predicted, accepted, path = original(verify_input, batch, *args, **kwargs)
    if requests_of(batch) is not None:
        batch.diffkv_path = path
    return predicted, accepted, path


# On a CPU SGLang drafts with the AMX kernels alone


def _on_torch(factory: Any) -> bool:
    return bool(factory.draft_attn_backend == "torch_native")


def create_decode_backend(original: Any, factory: Any) -> Any:
    """What the draft model's steps attend with, one after the other; None where a pass has one step."""
    if not _on_torch(factory) or factory.speculative_num_steps <= 1:
        return original(factory)
    return TorchSteps(factory.draft_model_runner, factory.speculative_num_steps, factory.topk)


def create_draft_extend_backend(original: Any, factory: Any) -> Any:
    """What the draft model attends with when it takes prompts and accepted tokens."""
    if not _on_torch(factory):
        return original(factory)
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(factory.draft_model_runner)


class TorchSteps:
    """The steps of a draft model on SGLang's PyTorch backend: in each of the ``branches`` a token sees the drafts that
    this branch has before it, which the batch's lengths do not count. Behind a request's tokens SGLang has KV slots
    for the ``steps`` tokens of its first branch, then for those of the next one."""

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any, steps: int, branches: int):
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        def tables(req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, count: int) -> torch.Tensor:
            """[B * branches, longest] KV slots that each branch sees."""
            seen = []
            for line, length in zip(req_to_token[rows.long()], seq_lens.tolist(), strict=True):
                drafts = line[length : length + branches * steps].view(branches, steps)[:, :count]
                seen += [torch.cat([line[:length], branch]) for branch in drafts]
            return torch.nn.utils.rnn.pad_sequence(seen, batch_first=True)

        class Step(TorchNativeAttnBackend):
            def __init__(self, number: int):
                super().__init__(runner)
                self.drafts = number + 1

            def _run_sdpa_forward_decode(
                self, query: Any, output: Any, k_cache: Any, v_cache: Any, req_to_token: Any, rows: Any, seq_lens: Any,
                *args: Any, **more: Any,
            ) -> Any:  # fmt: skip
                run = super()._run_sdpa_forward_decode
                if branches > 1:
                    req_to_token = tables(req_to_token, rows, seq_lens, self.drafts)
                    rows, seq_lens = torch.arange(len(req_to_token)), seq_lens.repeat_interleave(branches)
                lens = seq_lens + self.drafts
                return run(query, output, k_cache, v_cache, req_to_token, rows, lens, *args, **more)

        self.attn_backends = [Step(number) for number in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def update_mamba_state_after_mtp_verify(
    original: Any, backend: Any, last_correct_step_indices: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """The states of layers that do not attend become those behind the last accepted drafts, as SGLang's kernel of GPUs
    does it. ``last_correct_step_indices``: [B], the place of each in its chain; below 0 the state stays."""
    if last_correct_step_indices.device.type != "cpu" or not isinstance(backend.full_attn_backend, DiffKVAttnBackend):
        return original(backend, last_correct_step_indices, *args, **kwargs)
    linear, steps = backend.linear_attn_backend, last_correct_step_indices.long()
    caches = linear.req_to_token_pool.get_speculative_mamba2_params_all_layers()
    slots = linear.forward_metadata.mamba_cache_indices[: len(steps)].long()
    (chains,) = torch.where((steps >= 0) & (slots >= 0))
    pairs = [(caches.temporal, caches.intermediate_ssm), *zip(caches.conv, caches.intermediate_conv_window)]
    for states, after_each in pairs:
        states[:, slots[chains]] = after_each[:, chains, steps[chains]].to(states.dtype)
    return None


HOOKS = (
    create_worker,
    eagle_sample,
    get_req_to_token_extra_context_len,
    create_decode_backend,
    create_draft_extend_backend,
    update_mamba_state_after_mtp_verify,
)
"""The fourth and fifth are without effect unless a draft model runs on torch_native, which SGLang itself refuses; the
last one is for a CPU."""
