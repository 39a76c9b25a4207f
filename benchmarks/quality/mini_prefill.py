"""XKV's mini-prefill beside scoring at the end of a prompt, as the policy ``xkv`` does: the same tokens stay; what do
both hold until then, and how long do they take? Real forward passes of a model in transformers over one prompt for each
length, the questions of ``benchmarks/data`` one after another.

*Judged at the end*: the prompt is read once, in chunks, each attending to the cache of those before. All of its keys
and values are held until its last queries have scored them in all layers; then layers are given sizes and are cut.

*Mini-prefill* (Li et al., algorithms 1 and 2): the prompt is read without a cache, up to the last layer's attention,
for the importance of its tokens in each layer. From that follow the sizes, and the prompt is read again: each layer is
cut as soon as it has attended, so that no more is held than the reduced layers before it and its own keys and values.
Neither pass can come in chunks as a server runs them, through all layers one after the other: the second chunk would
attend to all of the first, which is cut by then, or in the first pass was never kept. So all of the prompt's
activations are there at once. (A server that ran all chunks through a layer before the next layer could chunk both
passes, and would hold the prompt's hidden states between two layers. SGLang does not.)

Bytes of keys and values are those that the cache holds, counted at each write and cut; a cut's copies are not in them,
since a page manager moves tokens within its pages, and neither are the keys and values of the layer that is computed,
before they are written. *Alive* are all tensors beside the weights, copies included: what the allocator gave and did
not get back, at most, during one more run (on a GPU PyTorch's peak of allocated memory, on a CPU the profiler's record
of allocations; what a matrix library packs for itself is in neither). *Other tokens* are those that stay where others
do in the first line. With 32-bit numbers and one piece the command fails if there are any; chunks round differently.
Seconds on a CPU are the process's time on it, of all threads together. Example:

    python -m benchmarks.quality.mini_prefill --model MODEL --lengths 1024 8192 --chunks 8192 1024 --keep 0.3

The last table is computed, not measured: ``whole_prompts.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import splits
from benchmarks.provenance import headline, provenance
from benchmarks.quality import whole_prompts
from benchmarks.quality.prompt_passes import Outcome, Reader, mini_prefill, scored_at_end
from sglang_diffkv.calibrate.layers.measure import Rule
from sglang_diffkv.calibration import model_name
from sglang_diffkv.evaluate.cli import positive
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.policies.xkv import XKVPolicyConfig

AT_END, MINI = "scored at the end", "mini-prefill"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MIB = 1 << 20


def most_alive(work: Callable[[], object], device: torch.device) -> int:
    """Bytes of what ``work`` allocates and has not given back, at most. It frees nothing that was there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    assert found.profiler is not None
    events = [x for x in found.profiler.kineto_results.events() if x.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda x: x.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


@dataclass(frozen=True)
class Measured:
    """One way to read one prompt.

    Attributes:
        chunk: tokens of a pass, at most. whole_bytes: keys and values of all tokens. peak_bytes, end_bytes: of those
            held, at most and at last. alive_bytes: of all tensors beside the weights, at most.
        seconds: medians, of each pass. fastest, slowest: of all passes together.
        other_tokens: that stay, of all layers and heads, and do not in the first way. kept: by layer, of a head.
    """

    way: str
    tokens: int
    chunk: int
    whole_bytes: int
    peak_bytes: int
    end_bytes: int
    alive_bytes: int
    seconds: tuple[float, ...]
    fastest: float
    slowest: float
    other_tokens: int
    kept: tuple[int, ...]


def others(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], tokens: int) -> int:
    """How many positions of ``second``, by layer [H, n], are not in ``first``."""

    def marked(positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(positions), tokens, dtype=torch.bool).scatter_(1, positions, True)

    return sum(int((marked(y) & ~marked(x)).sum()) for x, y in zip(first, second, strict=True))


def compare(reader: Reader, ids: torch.Tensor, rule: Rule, chunks: Sequence[int], repeat: int) -> list[Measured]:
    """All ways to read a prompt, in turn. Raises EvaluationError if in 32 bits and one piece other tokens stay."""
    tokens, device = len(ids), reader.model.device
    pieces = sorted({min(chunk, tokens) for chunk in chunks}, reverse=True)
    ways: list[tuple[str, int, Callable[[], Outcome]]] = [
        (AT_END, chunk, partial(scored_at_end, reader, ids, rule, chunk)) for chunk in pieces
    ]
    ways.append((MINI, tokens, partial(mini_prefill, reader, ids, rule)))
    alive = [most_alive(work, device) for _, _, work in ways]
    runs = [[work() for _, _, work in ways] for _ in range(repeat)]
    found = []
    for number, (way, chunk, _) in enumerate(ways):
        first, outcomes = runs[-1][0], [x[number] for x in runs]
        cache, sums = outcomes[-1].cache, [sum(x.seconds) for x in outcomes]
        cache.check_integrity()
        assert alive[number] >= cache.peak, "what the cache holds is alive"
        different = others(first.kept, outcomes[-1].kept, tokens)
        if cache.held != first.cache.held:
            raise EvaluationError(f"{way}, chunks of {chunk}: {cache.held} bytes stay, not {first.cache.held}")
        if different and chunk == pieces[0] == tokens and reader.model.dtype == torch.float32:
            raise EvaluationError(f"{way}, one piece: {different} other tokens stay")
        dim, heads = next(iter(cache.layers.values()))[0].shape[2], len(first.kept[0])
        whole = 2 * reader.layers * heads * tokens * dim * reader.model.dtype.itemsize
        medians = tuple(statistics.median(x) for x in zip(*(x.seconds for x in outcomes), strict=True))
        held, kept = (cache.peak, cache.held, alive[number]), tuple(x.shape[1] for x in outcomes[-1].kept)
        found.append(Measured(way, tokens, chunk, whole, *held, medians, min(sums), max(sums), different, kept))
    return found


def prompt_ids(model: str, tokens: int) -> torch.Tensor:
    """So many tokens of questions, one after another. Raises EvaluationError if there are fewer."""
    tokenizer = load_tokenizer(model)
    ids: list[int] = []
    for question in splits.load("calib"):
        if len(ids) >= tokens:
            break
        ids += tokenizer(question.prompt + "\n\n", add_special_tokens=False)["input_ids"]
    if len(ids) < tokens:
        raise EvaluationError(f"the questions have {len(ids)} tokens, fewer than {tokens}")
    return torch.tensor(ids[:tokens])


def table(rows: Sequence[Measured]) -> str:
    """As Markdown, in MiB and seconds."""
    header = ["prompt tokens", "way", "tokens of a pass", "keys and values at most, MiB", "of the whole prompt's"]
    header += ["at the end", "alive at most, MiB", "seconds (passes)", "fastest, slowest", "other tokens"]
    lines = []
    for x in rows:
        passes = f" ({' + '.join(f'{y:.2f}' for y in x.seconds)})" if len(x.seconds) > 1 else ""
        line = [f"{x.tokens:,}", x.way, f"{x.chunk:,}", f"{x.peak_bytes / MIB:.1f}"]
        line += [f"{x.peak_bytes / x.whole_bytes:.3f}", f"{x.end_bytes / x.whole_bytes:.3f}"]
        line += [f"{x.alive_bytes / MIB:.1f}", f"{sum(x.seconds):.2f}{passes}", f"{x.fastest:.2f}, {x.slowest:.2f}"]
        lines.append([*line, str(x.other_tokens)])
    return markdown(header, lines)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.mini_prefill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    fields = XKVPolicyConfig.model_fields
    parser.add_argument("--model", required=True, help="its folder")
    parser.add_argument("--lengths", type=positive, nargs="+", default=[512, 1024, 2048], help="tokens of prompts")
    parser.add_argument(
        "--chunks", type=positive, nargs="+", default=[8192], help="tokens of a pass, scored at the end"
    )
    parser.add_argument("--keep", type=float, default=0.3, help="as xkv's (default: %(default)s)")
    for name in ("window", "pool"):
        parser.add_argument(f"--{name}", type=int, default=fields[name].default, help="as xkv's (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights, keys and values")
    parser.add_argument("--repeat", type=positive, default=3, help="timed runs (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="folder: mini_prefill.md and .json")
    args = parser.parse_args(argv)
    try:
        XKVPolicyConfig(keep=args.keep, window=args.window, pool=args.pool)
    except ValueError as error:
        parser.error(str(error))
    if min(args.lengths) <= args.window:
        parser.error("--lengths must be above --window")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables and write them; 1 with the reason if that is not possible."""
    args = parse_args(argv)
    rule = Rule(args.window, args.pool, args.keep)
    about, rows = provenance("quality.mini_prefill", argv), list[Measured]()
    try:
        ids = prompt_ids(args.model, max(args.lengths))
        reader = Reader(args.model, DTYPES[args.dtype])
        for tokens in tqdm(args.lengths, "mini-prefill", unit="prompt"):
            rows += compare(reader, ids[:tokens].to(reader.model.device), rule, args.chunks, args.repeat)
    except EvaluationError as error:
        print(f"benchmarks.quality.mini_prefill: {error}", file=sys.stderr)
        return 1
    threads = torch.get_num_threads() if reader.model.device.type == "cpu" else None
    where = "a GPU" if threads is None else f"a CPU, threads: {threads}, seconds of its time"
    said = f"{model_name(args.model)} in {args.dtype}, {where}; one prompt of each length, medians of {args.repeat}, "
    said += "ways in turn."
    served = whole_prompts.rows()
    source = f"{headline(about)}\n\n```\n{about['command']}\n```"
    text = "\n\n".join([said, table(rows), whole_prompts.SAID, whole_prompts.table(served), source]) + "\n"
    print(text, flush=True)
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        content = {"provenance": about, "model": model_name(args.model), "dtype": args.dtype, "threads": threads}
        content |= {"rule": asdict(rule), "rows": [asdict(x) for x in rows], "server": [asdict(x) for x in served]}
        (args.output / "mini_prefill.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (args.output / "mini_prefill.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
