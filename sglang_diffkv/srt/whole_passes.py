"""Passes over few new tokens as few CUDA graphs each, attention and all.

SGLang's graphs of prompts end before each layer's attention and begin behind it, so the host launches attention for
every layer. Where new tokens are few the GPU waits for that. Of such passes SGLang's runner gets graphs that hold them
whole, beside its own: whichever serves a pass is replayed. There is one for each group of layers whose bytes come back
from host memory together, so that a pass begins before all of its prefix is there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from sglang_diffkv.attention.bounded import BoundedWrapper
from sglang_diffkv.layout.ranks import OtherRankError
from sglang_diffkv.mem_pool.device import layer_groups
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.steps import LaunchedStep, PlannedStep
from sglang_diffkv.releases import seen_on_gpu
from sglang_diffkv.srt.versions import compat

logger = logging.getLogger(__name__)

GPU_VERSIONS = seen_on_gpu("whole passes over prompts")
"""Versions of SGLang with which they gave stock's tokens on a GPU."""
TOKENS = 1024
"""New tokens of the largest such pass: with more the GPU takes longer than the host."""
REQUESTS = 16
"""Of a pass, at most."""
ROOM_BYTES = 256 << 20
"""For keys and values of all tokens that a pass attends to: 65,536 of Llama-3-8B's."""
FILLED_UP = 64
"""Tokens to which a pass of fewer is filled up, at most, however few it has."""
RATIO = 0.8
"""Of two sizes of graphs that follow one another, the smaller is at most this part of the larger."""


class Graph(Protocol):
    """A CUDA graph, or several and what runs between them."""

    def replay(self) -> None: ...


class LayerGraphs:
    """Graphs of a pass, one behind the other.

    Args:
        graphs: each with the first layer whose pages it reads; the one behind it reads those from another layer on.
        reach: is called before each, with that layer (``PageDevice.reach``).
    """

    def __init__(self, graphs: Sequence[tuple[int, Graph]], reach: Callable[[int], None]):
        self._graphs, self._reach = graphs, reach

    def replay(self) -> None:
        for layer, graph in self._graphs:
            self._reach(layer)
            graph.replay()


class WholePasses:
    """Graphs of whole passes over prompts, by their new tokens, and what the next replay is to compute.

    Args:
        manager: of the pages. wrapper: what the graphs hold of attention.

    Attributes:
        counts: passes for which SGLang has graphs, by what was replayed.
    """

    def __init__(self, manager: PageManager, wrapper: BoundedWrapper):
        self.manager, self.wrapper = manager, wrapper
        self.graphs: dict[int, Graph] = {}
        self.counts = {"whole": 0, "between_layers": 0}
        self._chosen: tuple[Graph, LaunchedStep] | None = None

    @classmethod
    def create(cls, manager: PageManager, form: dict[str, Any], max_tokens: int) -> WholePasses | None:
        """None, saying why, where passes cannot be held so. ``form``: of the wrappers. ``max_tokens``: of a request."""
        state = manager.state
        token_bytes = state.num_heads * (state.fmt.head_dim + state.fmt.v_head_dim) * state.dtype.itemsize
        stored = min(ROOM_BYTES // token_bytes - TOKENS, REQUESTS * max_tokens)
        size = max(stored + TOKENS, 0) * token_bytes >> 20
        obstacle = _obstacle(manager) or ("tokens are too large" if stored <= 0 else "")
        if not obstacle:
            try:
                sizes = {"requests": REQUESTS, "tokens": TOKENS, "stored": stored}
                passes = cls(manager, manager.ranks.together(lambda: BoundedWrapper(manager.ops, **sizes, **form)))
            except (torch.OutOfMemoryError, OtherRankError):
                obstacle = f"no {size} MiB are left"
        if obstacle:
            logger.info("DiffKV: short passes over prompts do not run as one CUDA graph: %s", obstacle)
            return None
        logger.info(
            "DiffKV: a pass over at most %d new tokens, behind at most %d cached ones, runs as one CUDA graph. This "
            "takes %d MiB beside the KV cache. To leave it out, give --cuda-graph-bs-prefill larger sizes alone",
            TOKENS, stored, size,
        )  # fmt: skip
        return passes

    def wants(self, tokens: int) -> bool:
        """Whether a graph of so many tokens is worth its memory. SGLang captures larger sizes first."""
        return tokens <= TOKENS and (not self.graphs or tokens <= RATIO * min(self.graphs))

    def filled_up(self, tokens: int) -> int | None:
        """The size of the smallest graph, for a pass that is worth filling up to it; None for others."""
        size = min(self.graphs, default=0)
        return size if 0 < tokens < size <= FILLED_UP else None

    def add(self, tokens: int, record: Callable[[], Graph]) -> None:
        """A graph of passes of up to so many new tokens. ``record`` makes it, while ``wrapper`` is what layers call."""
        self.wrapper.bound(tokens)
        self.graphs[tokens] = record()

    def choose(self, tokens: int, counts: list[int]) -> bool:
        """Whether the planned pass is the next replay of a graph here; its numbers are on their way then, and its table
        blocks. ``tokens``: new ones, with those that fill it up to one of SGLang's sizes. ``counts``: without."""
        self._chosen = None
        size = min((size for size in self.graphs if size >= tokens), default=None)
        step = self.manager.counts.upcoming
        if size is None or step is None or step.new_tokens != counts or not self._fits(step):
            self.counts["between_layers"] += 1
            return False
        self.counts["whole"] += 1
        launched = self.manager.launch_step(by_layer=True)
        assert launched is not None
        self.wrapper.give(step.rows, step.start, step.new_tokens, step.prompts)
        self._chosen = self.graphs[size], launched
        return True

    def _fits(self, step: PlannedStep) -> bool:
        """Whether graphs can compute a pass: over prompts alone, of stored tokens that others hold the scores of."""
        if step.decoding or not self.wrapper.fits(step.start, step.new_tokens):
            return False
        rows, prompts = self.manager.rows, self.manager.prompts
        if not self.wrapper.scores:
            return True
        return all(
            start <= rows.shared(row) and row not in prompts.shared_scores
            for row, start in zip(step.rows, step.start, strict=True)
        )

    def replay(self) -> bool:
        """Launch the pass that was chosen; False if there is none."""
        chosen, self._chosen = self._chosen, None
        if chosen is None:
            return False
        graph, launched = chosen
        graph.replay()
        self.manager.computed(launched)
        return True


def _obstacle(manager: PageManager) -> str:
    """Why passes cannot be held whole, whatever their sizes; empty if they can."""
    from sglang_diffkv.ops.triton import TritonOps

    if not isinstance(manager.ops, TritonOps):
        return "kernels are not Triton's"
    if manager.drafts:
        return "they were not tried with drafts"
    if compat.sglang_version() not in GPU_VERSIONS and not os.environ.get(compat.UNTRIED_ENV):
        return f"they were not tried on a GPU with SGLang {compat.sglang_version()}"
    return manager.ops.bounded_obstacle()


class EitherGraph:
    """In place of a graph of SGLang's for one size: replays the whole pass where one was chosen, else SGLang's."""

    def __init__(self, passes: WholePasses, other: Graph):
        self._passes, self._other = passes, other

    def replay(self) -> None:
        if not self._passes.replay():
            self._other.replay()


def capture(runner_backend: Any, shape_key: Any, forward: Callable[[], Any], passes: WholePasses, out: Any) -> None:
    """Behind SGLang's capture of passes of one size, where there is room for it on all ranks: a graph of them whole.
    Ranks that replay others would add up different numbers of tokens.

    Args:
        runner_backend: SGLang's ``BreakableCudaGraphBackend``. shape_key: SGLang's name of the size. forward: the
            layers, as SGLang captured them. out: where their results go, as SGLang's own graph's do.
    """
    size = shape_key.size
    if passes.wants(size):
        try:
            record = partial(_record, runner_backend, forward, passes, out)
            passes.manager.ranks.together(lambda: passes.add(size, record))
        except RuntimeError as error:  # for want of memory, as a rule; PyTorch has several errors for that
            passes.graphs.pop(size, None)
            logger.warning(
                "DiffKV: passes of %d new tokens do not run as one CUDA graph, and take longer: %s", size, error
            )  # fmt: skip
    if passes.graphs:
        graphs = runner_backend._graphs
        graphs[shape_key] = EitherGraph(passes, graphs[shape_key])


def _record(runner_backend: Any, forward: Callable[[], Any], passes: WholePasses, out: Any) -> LayerGraphs:
    wrapper = passes.wrapper

    def whole() -> None:
        wrapper.begin()
        found = forward()
        runner_backend._copy_output_to_buffer(found, out, runner_backend._output_rows(found, wrapper.tokens))

    for _ in range(2):
        torch.cuda.synchronize()
        whole()
    torch.cuda.synchronize()
    with torch.cuda.stream(runner_backend._capture_stream):
        return record(whole, wrapper, runner_backend._pool, passes.manager.device.reach)


def record(whole: Callable[[], None], wrapper: BoundedWrapper, pool: Any, reach: Callable[[int], None]) -> LayerGraphs:
    """Graphs of what ``whole`` launches on the current stream, which is not PyTorch's default one: one ends before the
    first layer of each group but the first, and another begins. Memory is of a ``pool`` of graphs."""
    graphs: list[tuple[int, torch.cuda.CUDAGraph]] = []
    groups = layer_groups(wrapper.state.num_layers)

    def begin(layer: int) -> None:
        graphs.append((layer, torch.cuda.CUDAGraph()))
        graphs[-1][1].capture_begin(pool=pool)

    def before(layer: int) -> None:
        if layer in groups[1:]:
            graphs[-1][1].capture_end()
            begin(layer)

    begin(groups[0])
    wrapper.before_layer = before
    try:
        whole()
    finally:
        wrapper.before_layer = lambda layer: None
        graphs[-1][1].capture_end()
    return LayerGraphs(graphs, reach)
