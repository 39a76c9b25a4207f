"""One layer of a pass over a prompt that has stored tokens before its new ones: its time by kernel.

The pass appends, reads the stored tokens back, attends and scores, as in a server. A case is STORED+NEW tokens; behind
``c`` the stored ones are compressed, as a cached prompt is, and else as computed, as a prompt's own chunks are.
Example:

    python -m benchmarks.kernels.chunks --cases 0+8192 8192+8192 24576+5424 c12000+1000 --prefill fa3 flashinfer

``--check`` compares each case with plain PyTorch instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import provenance
from sglang_diffkv.attention.wrappers import ExtendWrapper
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.kernels.rotate.reference import Rotation
from sglang_diffkv.kernels.table import TABLE_BLOCK
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.ops.base import Ops, Scaling
from sglang_diffkv.ops.gpu import choose_prefill
from sglang_diffkv.ops.reference import ReferenceOps
from sglang_diffkv.ops.triton import TritonOps

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CHUNK = 8192
LIMIT = 0.02
"""Of the relative error of outputs and of scores."""


@dataclass(frozen=True)
class Chunk:
    """``new`` tokens behind ``stored`` ones, which are ``compressed`` or not."""

    stored: int
    new: int
    compressed: bool = False

    @classmethod
    def parse(cls, text: str) -> Chunk:
        """``8192+8192`` or ``c12000+1000``."""
        stored, plus, new = text.removeprefix("c").partition("+")
        if not plus or not stored.isdecimal() or not new.isdecimal() or not int(new):
            raise argparse.ArgumentTypeError(f"{text!r} is not STORED+NEW, as 8192+8192 or c12000+1000")
        return cls(int(stored), int(new), text.startswith("c"))

    def __str__(self) -> str:
        return f"{'c' if self.compressed else ''}{self.stored}+{self.new}"


class Prompt:
    """A manager of one layer and a prompt whose next pass is planned; random tokens, the same for the same case.

    Args:
        prefill: as configured; empty for the plain PyTorch ops. q_heads, kv_heads, head_dim: of the layer.
    """

    def __init__(
        self, chunk: Chunk, config: DiffKVConfig, prefill: str, device: str, q_heads: int = Q_HEADS,
        kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM, chunk_tokens: int = CHUNK,
    ):  # fmt: skip
        policy, tokens = config.build_policy(), chunk.stored + chunk.new
        self.scaling, self.chunk, self.shape = Scaling(head_dim**-0.5), chunk, (q_heads, kv_heads, head_dim)
        fmt = config.page_format(head_dim, head_dim, tokens + 64)
        pages = 2 * kv_heads * (tokens // config.page_tokens + 64)
        geometry = Geometry(fmt, 1, kv_heads, pages, num_rows=3, num_segments=1, max_tokens=tokens + 64)

        def make_ops(state: PageState) -> Ops:
            if not prefill:
                return ReferenceOps(state, policy)
            ops = TritonOps(state, policy, q_heads, geometry.max_tokens, least_scratch=64 << 20)
            ops.prepare_graphs(2)
            choose_prefill(ops, state, prefill, [self.scaling])
            return ops

        self.manager = PageManager(geometry, policy, device=device, q_heads=q_heads, make_ops=make_ops)
        self.wrapper = ExtendWrapper(self.manager.ops, rotation=Rotation.named(config.rotate))
        self._generator = torch.Generator(device=device).manual_seed(tokens)
        for start in range(0, chunk.stored, chunk_tokens):
            count = min(chunk_tokens, chunk.stored - start)
            ends = chunk.compressed and start + count == chunk.stored
            launched = self._plan(start, count, chunk.stored if chunk.compressed else tokens, ends=ends)
            self.wrapper.run(0, *self.tokens(count), self.scaling)
            self.manager.end_prompts(launched)
        self._plan(chunk.stored, chunk.new, tokens, ends=False)
        self.new = self.tokens(chunk.new)

    def _plan(self, start: int, count: int, prompt: int, *, ends: bool) -> Any:
        device = self.manager.state.device
        self.manager.plan_step([1], [count], [start], ending=(1,) if ends else ())
        launched = self.manager.launch_step()
        row, stored, new = (torch.tensor([x], device=device) for x in (1, start, count))
        self.wrapper.plan(
            row, stored, new, [start], [count], prompts=[prompt], shared=[self.manager.rows.shared(1)],
            as_computed=self.manager.rows.as_computed(1),
        )  # fmt: skip
        self.wrapper.begin()
        return launched

    def tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, slices of one projection. Some keys are like many queries, as in models."""
        q_heads, kv_heads, dim = self.shape
        heads = q_heads + 2 * kv_heads
        fused = torch.randn(count, heads, dim, generator=self._generator, device=self._generator.device)
        fused[::37, q_heads : q_heads + kv_heads] += 1.0
        fused[:, :q_heads] += 0.3
        fused = fused.to(self.manager.state.dtype)
        return fused[:, :q_heads], fused[:, q_heads : q_heads + kv_heads], fused[:, q_heads + kv_heads :]

    def run(self) -> torch.Tensor:
        """The layer; again and again it gives the same but for scores."""
        return self.wrapper.run(0, *self.new, self.scaling)

    def scores(self) -> torch.Tensor | None:
        """[H, tokens] of the high tier, NaN for tokens that it does not hold; None where it keeps none."""
        state = self.manager.state
        view = state.tiers[0]
        if view.scores is None:
            return None
        found = torch.full((self.shape[1], self.chunk.stored + self.chunk.new), torch.nan, device=state.device)
        entries = state.entries[1, 0, :, 0].tolist()
        for head, count in enumerate(entries):
            column = torch.arange(count, device=state.device)
            page = state.page_table[
                state.row_blocks[1, column // TABLE_BLOCK].long(), 0, head, column % TABLE_BLOCK
            ].long()
            position = view.positions[page].long()
            held = (position >= 0) & (position < found.shape[1])
            found[head, position[held]] = view.scores[page][held]
        return found


def kernel_times(run: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Microseconds of a call on the GPU by kernel, and ``all`` from the first to the last kernel."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    spans = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        spans.append(1e3 * begin.elapsed_time(end))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    found: dict[str, float] = {"all": statistics.median(spans)}
    for event in profile.key_averages():
        micros = event.self_device_time_total / repeats
        if micros > 0.5:
            found[event.key[:80]] = micros
    return found


def host_us(run: Callable[[], Any], repeats: int) -> float:
    """Microseconds until the host has launched a call, when the device is idle."""
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times)


def errors(chunk: Chunk, config: DiffKVConfig, prefill: str, device: str, **shape: int) -> dict[str, float]:
    """Relative errors of outputs and scores against the plain PyTorch ops."""
    mine, reference = (Prompt(chunk, config, x, device, **shape) for x in (prefill, ""))
    found = {"output": relative(mine.run(), reference.run())}
    scores, known = mine.scores(), reference.scores()
    if scores is not None and known is not None:
        both = ~scores.isnan() & ~known.isnan()
        found["scores"] = relative(scores[both], known[both])
        found["tokens held by one alone"] = (scores.isnan() != known.isnan()).float().mean().item()
    return found


def relative(got: torch.Tensor, known: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((got.float() - known.float()).norm() / known.float().norm())


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [Chunk.parse(x) for x in ("0+8192", "8192+8192", "16384+8192", "24576+5424", "c12000+1000", "0+1000")]
    parser.add_argument("--cases", nargs="+", type=Chunk.parse, default=usual, metavar="STORED+NEW")
    parser.add_argument("--prefill", nargs="+", default=["fa3", "flashinfer"], choices=["fa3", "flashinfer", "triton"])
    parser.add_argument("--config", type=DiffKVConfig.model_validate_json, default=DiffKVConfig(), metavar="JSON")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--check", action="store_true", help="compare with plain PyTorch; exit code 1 if they differ")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: Triton's interpreter")
    parser.add_argument("--output", type=Path, help="write everything to this JSON file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    rows: list[dict[str, Any]] = []
    failed = False
    for chunk in args.cases:
        for prefill in args.prefill:
            row: dict[str, Any] = {"case": str(chunk), "prefill": prefill}
            if args.check:
                row |= errors(chunk, args.config, prefill, args.device)
                failed |= max(row["output"], row.get("scores", 0.0)) > LIMIT
            else:
                prompt = Prompt(chunk, args.config, prefill, args.device)
                row |= {
                    "host_us": host_us(prompt.run, args.repeats),
                    "kernels_us": kernel_times(prompt.run, args.repeats),
                }
            rows.append(row)
            print(json.dumps(row), flush=True)
    if not args.check:
        names = list(dict.fromkeys(name for x in rows for name in x["kernels_us"]))
        cells = [
            [name, *(f"{x['kernels_us'][name]:.0f}" if name in x["kernels_us"] else "" for x in rows)] for name in names
        ]
        cells.append(["host", *(f"{x['host_us']:.0f}" for x in rows)])
        print(markdown(["us a layer", *(f"{x['case']} {x['prefill']}" for x in rows)], cells))
    if args.output:
        args.output.write_text(json.dumps({"provenance": provenance("kernels.chunks", argv), "rows": rows}, indent=1))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
