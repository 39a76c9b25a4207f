"""Decode attention and page management on a GPU: milliseconds, GB/s and the ratio to FlashInfer in the same run.

    python -m benchmarks.kernels [--quick] [--out benchmarks/results]

Every time is the median of CUDA-graph replays over inputs several times larger than the L2 cache. Without
FlashInfer its columns stay empty.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_cases import Case, build_state, median_ms, read_bandwidth
from benchmarks.kernel_report import versions, write_report
from sglang_diffkv.kernels.allocate.triton import reserve
from sglang_diffkv.kernels.compact_step.triton import CompactWorkspace, compact_step
from sglang_diffkv.kernels.decode_attention.triton import DecodeWorkspace, FoundTokens, decode_attention

WINDOW = 64
MIN_BYTES = 400e6
"""KV bytes that a measurement cycles through: several times the L2 cache of any present GPU."""
MIXES = (("K8V4 K4V2", 1.0), ("K8V4 K4V2", 0.5), ("K8V4 K4V2", 0.0))
HEADS = ((32, 8), (40, 8), (8, 8))


def quick_cases() -> list[Case]:
    return [Case(64, 32, 8, 128, length, *mix) for length in (4096, 16384) for mix in MIXES]


def all_cases() -> list[Case]:
    grid = [
        Case(batch, *heads, 128, length, *mix)
        for heads in HEADS
        for length in (512, 2048, 8192, 32768)
        for batch in (1, 8, 32, 128)
        for mix in MIXES
        if batch * length <= 2**20
    ]
    tiers = [Case(64, 32, 8, 128, 4096, t, 1.0) for t in ("BF16", "K8V8", "K4V4", "K8V2", "K4V1")]
    return quick_cases() + tiers + grid


def ours(case: Case, scores: bool) -> float:
    """Milliseconds of one layer's decode attention, with or without score update and searches."""
    layers = max(1, -(-int(MIN_BYTES) // case.kv_bytes()))
    layers = min(layers, 32)
    state = build_state(case, layers)
    device, batch = state.device, case.batch
    q = torch.randn(layers, batch, case.q_heads, case.head_dim, device=device).bfloat16()
    rows = torch.arange(1, batch + 1, device=device)
    seq_lens = torch.full((batch,), case.length, device=device)
    valid = torch.tensor([batch], dtype=torch.int32, device=device)
    workspace = DecodeWorkspace.create(state, batch, case.q_heads, max_tokens=case.length if scores else 0)
    found = FoundTokens.create(state, batch) if scores else None
    out = torch.empty(batch, case.q_heads, case.head_dim, dtype=torch.bfloat16, device=device)
    lse = torch.empty(batch, case.q_heads, device=device)

    def run() -> None:
        for layer in range(layers):
            decode_attention(
                state, layer, q[layer], rows, seq_lens, case.head_dim**-0.5, workspace, valid,
                out=out, lse=lse, found=found, window=WINDOW,
            )  # fmt: skip

    return median_ms(run, layers)


def flashinfer_ms(case: Case, dtype: torch.dtype) -> float | None:
    """Milliseconds of FlashInfer's paged decode (page 16, tensor cores) at the same lengths; None without it."""
    try:
        import flashinfer
    except ImportError:
        return None
    size, count = 16, -(-case.length // 16)
    pages = case.batch * count
    token = 2 * case.kv_heads * case.head_dim * dtype.itemsize
    layers = min(32, max(1, -(-int(MIN_BYTES) // (pages * size * token))))
    shape = (pages, 2, size, case.kv_heads, case.head_dim)
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(layers)]
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(scratch, "NHD", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(0, pages + 1, count, dtype=torch.int32),
        torch.randperm(pages).int().cuda(),
        torch.full((case.batch,), (case.length - 1) % size + 1, dtype=torch.int32),
        case.q_heads, case.kv_heads, case.head_dim, size, q_data_type=torch.bfloat16, kv_data_type=dtype,
    )  # fmt: skip
    q = torch.randn(case.batch, case.q_heads, case.head_dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)

    def run() -> None:
        for cache in caches:
            wrapper.run(q, cache, out=out)

    return median_ms(run, layers)


def attention_rows(cases: list[Case], bandwidth: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    others: dict[tuple, tuple] = {}
    for case in cases:
        key = (case.batch, case.q_heads, case.kv_heads, case.length)
        if key not in others:
            others[key] = tuple(flashinfer_ms(case, d) for d in (torch.bfloat16, torch.float8_e4m3fn))
        plain, scored = ours(case, False), ours(case, True) if case.tiers != "BF16" else None
        speed = case.kv_bytes() / plain / 1e6
        bf16, fp8 = others[key]
        row: dict[str, Any] = {
            "case": case.name,
            "batch": case.batch,
            "heads": f"{case.q_heads}/{case.kv_heads}",
            "length": case.length,
            "ms": plain,
            "ms_scores": scored,
            "gb_s": speed,
            "fraction": speed / bandwidth,
            "flashinfer_bf16_ms": bf16,
            "flashinfer_fp8_ms": fp8,
            "vs_bf16": bf16 / plain if bf16 else None,
            "vs_bf16_scores": bf16 / scored if bf16 and scored else None,
            "vs_fp8": fp8 / plain if fp8 else None,
        }
        rows.append(row)
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    return rows


def management_times(batch: int) -> dict[str, Any]:
    """Milliseconds of page management of one decode step of 32 layers x 8 heads."""
    case = Case(batch, 32, 8, 128, 256, "K8V4 K4V2", 0.5)
    state = build_state(case, 32, free_pages=12 * batch * 32 * 8)
    rows = torch.arange(1, batch + 1, device="cuda")
    one, lengths = torch.ones_like(rows), torch.full_like(rows, 256)
    valid = torch.tensor([batch], dtype=torch.int32, device="cuda")
    workspace, found = CompactWorkspace.create(state, batch), FoundTokens.create(state, batch)
    score = int(torch.tensor([0.5 / 256]).view(torch.int32))
    found.packed[:, :, :, 0, 0] = (score << 32) | 3  # every head's candidate goes to the low tier

    def reserve_only() -> None:
        reserve(state, rows, one, workspace.ticket, valid)

    def reserve_and_compact() -> None:
        reserve_only()
        compact_step(state, rows, lengths, found, workspace, valid, alpha_high=1.0, alpha_low=0.02)

    row: dict[str, Any] = {"batch": batch}
    saved = state.own_tokens.clone(), state.hole.clone(), state.entries.clone()
    for name, run in (("reserve", reserve_only), ("reserve and compact", reserve_and_compact)):
        row[name] = median_ms(run, 1, repeats=5)
        for target, source in zip((state.own_tokens, state.hole, state.entries), saved, strict=True):
            target.copy_(source)
    return row


def management_rows(batches: list[int]) -> list[dict[str, Any]]:
    rows = []
    for batch in batches:
        rows.append(management_times(batch))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="batch 64, lengths 4k and 16k only")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    report = {"system": versions(), "read_gb_s": bandwidth}
    print(json.dumps(report), flush=True)
    report["attention"] = attention_rows(quick_cases() if args.quick else all_cases(), bandwidth)
    report["management"] = management_rows([1, 16, 64] if args.quick else [1, 4, 16, 64, 128, 256])
    write_report(report, args.out)


if __name__ == "__main__":
    main()
