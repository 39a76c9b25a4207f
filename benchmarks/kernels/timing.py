"""Timers of the kernel benchmark, and the bandwidth that the GPU's memory really has."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl

Timer = Callable[[Callable[[], None], int], float]
"""Takes a function and the number of calls in it; milliseconds of one call."""

MIN_BYTES = 400e6
"""Bytes that a measurement cycles through: several times the L2 cache of any present GPU."""
MAX_LAYERS = 512


def layers_for(call_bytes: int) -> int:
    """How many sets of inputs a measurement needs for ``MIN_BYTES``, if one call reads ``call_bytes``."""
    return min(MAX_LAYERS, max(1, -(-int(MIN_BYTES) // call_bytes)))


def median_ms(run: Callable[[], None], calls: int, repeats: int = 15) -> float:
    """Median over replays of a CUDA graph of ``run``, in milliseconds for each of its ``calls`` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    del graph
    return statistics.median(times) / calls


def cpu_median_ms(run: Callable[[], None], calls: int, repeats: int = 3) -> float:
    """The same for PyTorch on the CPU, where every call has ended when it returns."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times) / calls


def free_bytes() -> int:
    """Free memory of the GPU."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def lacking(needed: int, free: int) -> str | None:
    """Why ``needed`` bytes do not fit into ``free`` ones, a tenth kept aside; None if they do."""
    if needed <= 0.9 * free:
        return None
    return f"needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"


@triton.jit
def _read_kernel(source, sink, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """Grid (elements / (BLOCK * ROUNDS)): reads int32 [elements], keeps one number a program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK * ROUNDS + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(ROUNDS):
        total += tl.load(source + at + step * BLOCK)
    tl.store(sink + tl.program_id(0), tl.sum(total, 0))


def read_bandwidth() -> float:
    """GB/s of a plain streaming read of 4 GiB."""
    block, rounds = 4096, 8
    source = torch.zeros(2**30, dtype=torch.int32, device="cuda").random_()
    grid = source.numel() // (block * rounds)
    sink = torch.empty(grid, dtype=torch.int32, device="cuda")
    ms = median_ms(lambda: _read_kernel[(grid,)](source, sink, BLOCK=block, ROUNDS=rounds, num_warps=8), 1)
    return source.nbytes / ms / 1e6
