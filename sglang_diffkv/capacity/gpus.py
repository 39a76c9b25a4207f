"""GPUs by name: memory, bandwidth, and how much of it was measured."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import quoted


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        mib: memory in MiB, as its driver reports it. bandwidth: bytes a second, as its maker states.
        read: bytes a second that a plain read reached here, None for a GPU on which nothing was measured.
        prompt_flops: operations a second that prompts' matrix products reached here, None where not measured.
    """

    name: str
    mib: int
    bandwidth: float
    read: float | None = None
    prompt_flops: float | None = None

    @property
    def measured(self) -> bool:
        return self.read is not None

    @property
    def reads(self) -> float:
        """Bytes a second: those measured, or the stated ones times the measured GPUs' least share of theirs."""
        return self.read if self.read is not None else self.bandwidth * READ_SHARE


READ_SHARE = 0.93
"""Of the stated bandwidth: an H100's plain read, 3,128 of 3,350 GB/s; an H200's has 0.95 to 0.97."""

_PROMPTS = 7.3e14
"""Matrix products of a prompt of 8,190 tokens, Llama-3-8B's shape, H100: 152.8 ms (docs/kernels.md). An H200 computes
as fast."""

GPUS = {
    x.name: x
    for x in (
        Gpu("h100-80gb", 81559, 3.35e12, 3.128e12, _PROMPTS),
        Gpu("h200-141gb", 143771, 4.8e12, 4.54e12, _PROMPTS),
        Gpu("a100-40gb", 40960, 1.555e12),
        Gpu("a100-80gb", 81920, 2.039e12),
        Gpu("a10g-24gb", 23028, 0.6e12),
        Gpu("b200-180gb", 183359, 8e12),
        Gpu("h20-96gb", 97871, 4e12),
        Gpu("l4-24gb", 23034, 0.3e12),
        Gpu("l40s-48gb", 46068, 0.864e12),
        Gpu("rtx4090-24gb", 24564, 1.008e12),
    )
}
"""Only the first two were measured, in ``benchmarks/results/kernels.csv``."""


def gpu_of(name: str) -> Gpu:
    """By name, with or without its memory, in any case. Raises ConfigError, which lists those known."""
    wanted = name.strip().lower()
    found = [x for key, x in GPUS.items() if wanted in (key, key.rpartition("-")[0])]
    if len(found) == 1:
        return found[0]
    known = ", ".join(GPUS)
    near = difflib.get_close_matches(wanted[:40], list(GPUS), n=1)
    which = "is several: name its memory too" if found else "is not known"
    meant = f"; did you mean {near[0]}?" if near and not found else "."
    raise ConfigError(
        f"--gpu {quoted(name)} {which}{meant} Known are {known}. For another one give the GiB of its cache: --kv-gib"
    )
