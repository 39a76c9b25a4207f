"""What a rounding of attention does to a model of random weights: log-probabilities of prompt tokens, with attention's
outputs as they are and times 1 plus a little noise, in plain transformers on a CPU, without any of this package.

Random weights choose among tokens whose logits are nearly equal, and experts among experts, so servers that only round
differently are told apart by them. This says by how much, for the models that ``kinds.py`` asks on a GPU.

    python -m benchmarks.quality.rounding --kinds qwen3_next gpt_oss
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality import kinds, random_hybrids, random_windows
from sglang_diffkv.evaluate.report import markdown

MAKE: dict[str, Callable[[Path], object]] = {
    "gemma3": random_windows.make_gemma3,
    "gpt_oss": random_windows.make_gpt_oss,
    **{name: partial(make, large=True) for name, make in random_hybrids.KINDS.items()},
}
OUTPUT = ("self_attn.o_proj", "self_attn.out_proj")
"""What reads attention's outputs."""
LAST_BIT = 2.0**-8
"""Of a bf16 number next to 1."""


class Noise:
    """Multiplies inputs of modules by 1 plus normal noise of a ``level``; with 0 it leaves them alone."""

    def __init__(self) -> None:
        self.level, self.generator = 0.0, torch.Generator().manual_seed(0)

    def __call__(self, module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if not self.level:
            return None
        (x,) = inputs
        return ((x * (1 + self.level * torch.randn(x.shape, generator=self.generator))).to(x.dtype),)


def log_probabilities(model: Any, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """[tokens] of the texts' tokens behind each first one."""
    found = []
    for text in texts:
        ids = torch.tensor([list(text)])
        likely = model(ids).logits[0].float().log_softmax(1)
        found.append(likely[:-1].gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)


def measure(make: Callable[[Path], object], texts: Sequence[Sequence[int]], bits: Sequence[float]) -> list[list[str]]:
    """For each level of noise, in last bits of bf16: mean and largest change of the log-probabilities."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        make(Path(folder) / "model")
        model = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.bfloat16)
        noise = Noise()
        hooked = [x.register_forward_pre_hook(noise) for name, x in model.named_modules() if name.endswith(OUTPUT)]
        if not hooked:
            raise ValueError(f"no module of {type(model).__name__} is named as one that reads attention's outputs")
        plain, rows = log_probabilities(model, texts), []
        for count in bits:
            noise.level = count * LAST_BIT
            moved = (log_probabilities(model, texts) - plain).abs()
            rows.append([f"{count:g}", str(len(moved)), f"{moved.mean():.4f}", f"{moved.max():.3f}"])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=MAKE, default=list(MAKE))
    parser.add_argument("--bits", nargs="+", type=float, default=[0.25, 0.5, 1.0], help="last bits of noise")
    args = parser.parse_args(argv)
    texts = kinds.Run(kinds.parse_args(["--kinds", "nano"])).texts
    rows = [[name, *row] for name in args.kinds for row in measure(MAKE[name], texts, args.bits)]
    print(markdown(["model", "noise, last bits", "tokens", "mean change", "largest"], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
