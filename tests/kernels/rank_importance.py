"""A rank in a process of its own: ``python -m tests.kernels.rank_importance RANK SIZE BACKEND MEETING`` prints what it
makes of its two heads and the other ranks', which it meets at the file MEETING, exchanging numbers as a server does."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch

from sglang_diffkv.kernels.importance import reference
from tests.kernels.test_select import KINDS, random_values

CASES = [(kind, length) for kind in [*KINDS, "tiny"] for length in (1, 40, 2500)]
LAYERS = 3


def importance_of(kind: str, length: int, size: int) -> torch.Tensor:
    """[layers, 2 * size, length]: what the heads of all ranks say of tokens."""
    return random_values(kind, LAYERS, 2 * size, length)


def main(rank: int, size: int, backend: str, meeting: str) -> None:
    """Join the others, judge all cases, print them as JSON lines: tokens by layer, and the parts' bits."""
    import sglang.srt.distributed as sglang_distributed
    from torch import distributed

    from sglang_diffkv.srt.versions import compat

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    kernel = reference.importance
    if backend == "nccl":
        from sglang_diffkv.kernels.importance import triton as on_gpu

        torch.cuda.set_device(device)
        kernel = on_gpu.importance
    distributed.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=size)
    members = list(range(size))
    group = SimpleNamespace(
        world_size=size,
        rank_in_group=rank,
        cpu_group=distributed.new_group(members, backend="gloo"),
        device_group=distributed.new_group(members, backend=backend),
    )
    sglang_distributed.get_tp_group = lambda: group
    ranks = compat.tensor_parallel_ranks()
    ranks.require_equal("the cases", [len(CASES), size])
    with torch.cuda.stream(torch.cuda.Stream() if backend == "nccl" else None):
        for kind, length in CASES:
            values = importance_of(kind, length, size)[:, 2 * rank : 2 * rank + 2].contiguous().to(device)
            out, room = torch.empty(LAYERS, 1, length, device=device), torch.empty(2, LAYERS, length, device=device)
            tokens = kernel(values, out, reference.Shared(ranks.size, ranks.add, room))
            bits = out.nan_to_num(nan=-1.0).view(torch.int32).flatten().tolist()
            print(json.dumps([kind, length, tokens.tolist(), bits]), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
