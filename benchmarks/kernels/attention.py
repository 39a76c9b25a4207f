"""One layer's decode attention: DiffKV with and without its policy, against the baselines, over a grid of cases."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.budget import Budget
from benchmarks.kernels.baselines import BASELINES, Missing, baseline_bytes, baseline_ms
from benchmarks.kernels.cases import Case, build_state
from benchmarks.kernels.timing import Timer, free_bytes, lacking, median_ms
from sglang_diffkv.kernels.decode_attention.triton import FoundTokens, decode_attention
from sglang_diffkv.kernels.decode_attention.triton_workspace import DecodeConfig, DecodeWorkspace
from sglang_diffkv.ops.gpu import decode_obstacle

WINDOW = 64
SAMPLED = 4
"""Every Nth generated token observes, where they are sampled."""
TIERS = "K8V4 K4V2"
MIXES = ((TIERS, 1.0), (TIERS, 0.5), (TIERS, 0.0))
MORE_TIERS = (("K8V4 K4V4 K4V2", 0.25), ("K8V8 K8V4 K4V4 K4V2", 0.25))
HEADS = ((32, 8), (40, 8), (8, 8))
LENGTHS = (512, 2048, 8192, 32768)
BATCHES = (1, 8, 32, 128)
HEAD_DIM = 128

Row = dict[str, Any]


def quick_cases() -> list[Case]:
    """Batch 64 at two lengths."""
    return [Case(64, 32, 8, HEAD_DIM, length, *mix) for length in (4096, 16384) for mix in MIXES]


def all_cases(
    heads: Iterable[tuple[int, int]] = HEADS, lengths: Iterable[int] = LENGTHS, batches: Iterable[int] = BATCHES
) -> list[Case]:
    """The quick cases, other tiers, then the grid: the first heads first, so that a short run has whole curves."""
    tiers = [Case(64, 32, 8, HEAD_DIM, 4096, t, 1.0) for t in ("BF16", "K8V8", "K4V4", "K8V2", "K4V1")]
    tiers += [Case(64, 32, 8, HEAD_DIM, 4096, *mix) for mix in MORE_TIERS]
    lengths, batches = tuple(lengths), tuple(batches)
    grid = [
        Case(batch, *pair, HEAD_DIM, length, *mix)
        for pair in heads
        for batch in reversed(batches)
        for length in lengths
        for mix in MIXES
    ]
    return quick_cases() + tiers + grid


def served_config(case: Case) -> DecodeConfig:
    """By what a server attends that is not told: CUDA C++ where it can, else Triton."""
    return DecodeConfig(cuda=not decode_obstacle(case.fmt, case.q_heads // case.kv_heads, "auto"))


def diffkv_run(case: Case, scores: bool, layers: int, device: str = "cuda", every: int = 1) -> Callable[[], None]:
    """A function that attends once in each of ``layers`` layers, with or without score update and searches.
    ``every``: scores of every Nth request are updated, in each layer of others."""
    state = build_state(case, layers, device=device)
    batch = case.batch
    q = torch.randn(layers, batch, case.q_heads, case.head_dim, device=device).bfloat16()
    rows = torch.arange(1, batch + 1, device=device)
    seq_lens = [case.length - (rows + turn) % every for turn in range(every)]
    valid = torch.tensor([batch], dtype=torch.int32, device=device)
    config, longest = served_config(case), case.length if scores else 0
    workspace = DecodeWorkspace.create(state, batch, case.q_heads, max_tokens=longest, config=config)
    found = FoundTokens.create(state, batch, config, score_low=False) if scores else None  # as DiffKV without pruning
    workspace.plan(state, rows, valid, score_low=False)
    out = torch.empty(batch, case.q_heads, case.head_dim, dtype=torch.bfloat16, device=device)
    lse = torch.empty(batch, case.q_heads, device=device)

    def run() -> None:
        for layer in range(layers):
            decode_attention(
                state, layer, q[layer], rows, seq_lens[layer % every], case.head_dim**-0.5, workspace, valid,
                out=out, lse=lse, found=found, window=WINDOW, every=every,
            )  # fmt: skip

    return run


def layers_of(case: Case, every: int) -> int:
    """As many that each request's scores are updated in as many of them."""
    return -(-case.layers() // every) * every


def diffkv_ms(case: Case, scores: bool, timer: Timer = median_ms, every: int = 1) -> float:
    """Milliseconds of one layer."""
    layers = layers_of(case, every)
    return timer(diffkv_run(case, scores, layers, every=every), layers)


def ratio(other: float | None, mine: float | None) -> float | None:
    """How many times faster this is than the other."""
    return other / mine if other and mine else None


class Baselines:
    """Times of the baselines, each measured once for the cases that differ only in tiers."""

    def __init__(self, timer: Timer = median_ms, free: Callable[[], int] = free_bytes):
        self.timer, self.free = timer, free
        self.times: dict[tuple[Any, ...], float | None] = {}
        self.notes: dict[str, None] = {}

    def ms(self, name: str, case: Case) -> float | None:
        """Milliseconds, None where it could not be measured; ``notes`` says why."""
        key = (name, case.batch, case.q_heads, case.kv_heads, case.head_dim, case.length)
        if key not in self.times:
            self.times[key] = None
            if reason := lacking(baseline_bytes(name, case), self.free()):
                self.notes[f"{name} at batch {case.batch}, length {case.length}: {reason}"] = None
            else:
                try:
                    self.times[key] = baseline_ms(name, case, self.timer)
                except Missing as error:
                    self.notes[f"{name}: {error}"] = None
        return self.times[key]


def attention_row(case: Case, bandwidth: float, baselines: Baselines, timer: Timer = median_ms) -> Row:
    """The figures of one case."""
    others = {name: baselines.ms(name, case) for name in BASELINES}
    plain, judged = diffkv_ms(case, False, timer), case.tiers != "BF16"
    scored, sampled = (diffkv_ms(case, True, timer, every) if judged else None for every in (1, SAMPLED))
    speed = case.kv_bytes() / plain / 1e6
    by = "CUDA C++" if served_config(case).cuda else "Triton"
    row: Row = {**place(case), "by": by, "ms": plain, "ms_scores": scored, "ms_sampled": sampled}
    row |= {"gb_s": speed, "fraction": speed / bandwidth}
    for name, other in others.items():
        row |= {f"{name}_ms": other, f"to_{name}": ratio(other, plain), f"to_{name}_scores": ratio(other, scored)}
        row[f"to_{name}_sampled"] = ratio(other, sampled)
    return row


def place(case: Case) -> Row:
    """What identifies a case in a row."""
    heads = f"{case.q_heads}/{case.kv_heads}"
    return {"case": case.name, "batch": case.batch, "heads": heads, "length": case.length}


def attention_rows(
    cases: Iterable[Case],
    bandwidth: float,
    budget: Budget,
    keep: Callable[[Row], None],
    baselines: Baselines,
    timer: Timer = median_ms,
) -> None:
    """Measure the cases, each once; ``keep`` gets a row of each, with the reason of those that were skipped."""
    for case in dict.fromkeys(cases):
        row = place(case)
        if reason := budget.refusal("attention") or lacking(
            case.state_bytes(layers_of(case, SAMPLED)), baselines.free()
        ):
            row["skipped"] = reason
        else:
            try:
                with budget.step("attention"):
                    row = attention_row(case, bandwidth, baselines, timer)
            except torch.OutOfMemoryError as error:
                row["skipped"] = str(error).partition(". ")[0]
        keep(row)
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
