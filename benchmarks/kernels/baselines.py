"""Decode attention of others on the same lengths: FlashInfer's paged decode and SGLang's Triton decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.kernels.cases import Case
from benchmarks.kernels.timing import Timer, layers_for

PAGE = 16
"""Tokens that lie together in memory, for both."""
KV_SPLITS = 8
"""SGLang's default of --triton-attention-num-kv-splits."""


class Missing(RuntimeError):
    """The library is not installed."""


@dataclass
class Baseline:
    """``run`` attends once with each of ``calls`` caches; ``out`` then has the result of the last one, whose rows
    of keys and values ``last`` gives."""

    run: Callable[[], None]
    calls: int
    q: torch.Tensor
    out: torch.Tensor
    last: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    slots: torch.Tensor  # [batch, length] rows of keys and values


def shuffled_slots(case: Case, device: str) -> torch.Tensor:
    """[batch, length] int64: each request's slots, shuffled in groups of ``PAGE``."""
    count = -(-case.length // PAGE)
    pages = torch.randperm(case.batch * count, device=device).view(case.batch, count, 1)
    return (pages * PAGE + torch.arange(PAGE, device=device)).flatten(1)[:, : case.length]


def flashinfer_decode(case: Case, dtype: torch.dtype) -> Baseline:
    """FlashInfer's paged decode, page 16, tensor cores. Raises Missing without FlashInfer."""
    try:
        import flashinfer
    except ImportError as error:
        raise Missing("FlashInfer is not installed") from error
    count = -(-case.length // PAGE)
    pages = case.batch * count
    calls = layers_for(2 * pages * PAGE * case.kv_heads * case.head_dim * dtype.itemsize)
    shape = (pages, 2, PAGE, case.kv_heads, case.head_dim)
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(calls)]
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(scratch, "NHD", use_tensor_cores=True)
    slots = shuffled_slots(case, "cuda")
    wrapper.plan(
        torch.arange(0, pages + 1, count, dtype=torch.int32),
        (slots[:, ::PAGE] // PAGE).flatten().int(),
        torch.full((case.batch,), (case.length - 1) % PAGE + 1, dtype=torch.int32),
        case.q_heads, case.kv_heads, case.head_dim, PAGE, q_data_type=torch.bfloat16, kv_data_type=dtype,
    )  # fmt: skip
    q = torch.randn(case.batch, case.q_heads, case.head_dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)

    def run() -> None:
        for cache in caches:
            wrapper.run(q, cache, out=out)

    def last() -> tuple[torch.Tensor, torch.Tensor]:
        return caches[-1][:, 0].flatten(0, 1), caches[-1][:, 1].flatten(0, 1)

    return Baseline(run, calls, q, out, last, slots)


def sglang_triton_decode(
    case: Case, device: str = "cuda", calls: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Baseline:
    """SGLang's Triton decode on a cache of ``dtype``, with its own choice of splits. Raises Missing without SGLang."""
    try:
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
        from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton
    except ImportError as error:
        raise Missing(f"SGLang's Triton decode attention is not there: {error}") from error
    slots = shuffled_slots(case, device)
    count = -(-case.length // PAGE) * PAGE * case.batch
    calls = calls or layers_for(case.bf16_bytes())
    shape = (2, count, case.kv_heads, case.head_dim)
    caches = [torch.randn(shape, device=device, dtype=dtype) for _ in range(calls)]
    q = torch.randn(case.batch, case.q_heads, case.head_dim, device=device, dtype=dtype)
    out = torch.empty_like(q)
    indptr = torch.arange(0, case.batch + 1, dtype=torch.int32, device=device) * case.length
    indices = slots.flatten().contiguous()
    logits = torch.empty(case.batch, case.q_heads, KV_SPLITS, case.head_dim, device=device)
    lse = torch.empty(case.batch, case.q_heads, KV_SPLITS, device=device)
    lengths = torch.full((case.batch,), case.length, device=device)
    splits = torch.empty(case.batch, dtype=torch.int32, device=device)
    cores = 1 if device == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
    get_num_kv_splits_triton[(1,)](
        splits, lengths, case.batch, 1, case.q_heads, case.kv_heads, KV_SPLITS, cores,
        MAX_NUM_SEQ=max(256, 1 << (case.batch - 1).bit_length()),
    )  # fmt: skip
    overlapped = _overlapped_launches(device)

    def run() -> None:
        for keys, values in caches:
            decode_attention_fwd(
                q, keys, values, out, indptr, indices, logits, lse, splits, KV_SPLITS,
                case.head_dim**-0.5, 1.0, 1.0, use_pdl=overlapped,
            )  # fmt: skip

    return Baseline(run, calls, q, out, lambda: (caches[-1][0], caches[-1][1]), slots)


def _overlapped_launches(device: str) -> bool:
    """Whether SGLang launches its two kernels with programmatic dependent launch here."""
    if device == "cpu":
        return False
    try:
        from sgl_kernel.utils import is_arch_support_pdl
    except ImportError:
        return False
    return bool(is_arch_support_pdl())


BASELINES: dict[str, Callable[[Case], Baseline]] = {
    "flashinfer_bf16": lambda case: flashinfer_decode(case, torch.bfloat16),
    "flashinfer_fp8": lambda case: flashinfer_decode(case, torch.float8_e4m3fn),
    "sglang_triton": sglang_triton_decode,
}


def baseline_bytes(name: str, case: Case) -> int:
    """Memory that a baseline needs: its caches, and a bf16 copy of one while fp8 is made."""
    one = case.bf16_bytes() // (2 if name.endswith("fp8") else 1)
    return one * layers_for(one) + case.bf16_bytes() + (512 << 20)


def baseline_ms(name: str, case: Case, timer: Timer) -> float:
    """Milliseconds of one layer. Raises Missing."""
    baseline = BASELINES[name](case)
    return timer(baseline.run, baseline.calls)
