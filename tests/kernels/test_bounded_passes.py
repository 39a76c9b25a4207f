"""Passes whose shapes follow bounds, as CUDA graphs hold them, against passes whose shapes follow their requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sglang_diffkv.attention.bounded import BoundedWrapper
from sglang_diffkv.attention.wrappers import ExtendWrapper
from sglang_diffkv.kernels.rotate.reference import Rotation
from sglang_diffkv.mem_pool.device import layer_groups
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.ops.flash import FlashPrefill
from sglang_diffkv.ops.launches import Launches
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies import diffkv
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.srt.whole_passes import record
from tests.kernels.library import Library
from tests.kernels.test_unpacked_prefixes import (
    BOTH,
    DIM,
    GROUP,
    HEADS,
    LAYERS,
    SAMPLED,
    SCALING,
    SCORED,
    WINDOW,
    in_every_form,
)  # fmt: skip
from tests.kernels.triton_helpers import BF16, DEVICE, close, held_pages, make_format, make_manager

TOKENS, STORED = 48, 150


class Server:
    """Rows of prompts that share a prefix, and a wrapper for their last passes."""

    def __init__(self, tiers: str, policy: Policy, rotation: Rotation, means: torch.Tensor | None, *, bounded: bool):
        fmt = make_format(tiers, DIM)
        library: Any = Library(SCALING)
        self.manager = make_manager(
            fmt, layers=LAYERS, heads=HEADS, policy=policy, pages=600,
            make_ops=lambda state: TritonOps(state, policy, HEADS * GROUP, 400, library),
        )  # fmt: skip
        form: dict[str, Any] = {"rotation": rotation, "key_means": None if means is None else means.to(DEVICE)}
        self.plain = ExtendWrapper(self.manager.ops, **form)
        self.bounded: BoundedWrapper | None = None
        if bounded:
            self.bounded = BoundedWrapper(self.manager.ops, requests=5, tokens=TOKENS, stored=STORED, **form)
        self.generator = torch.Generator().manual_seed(2)

    def tokens(self, count: int) -> list[torch.Tensor]:
        """Queries, keys and values."""
        sizes = (HEADS * GROUP, HEADS, HEADS)
        made = [torch.randn(count, heads, DIM, generator=self.generator).to(DEVICE, BF16) for heads in sizes]
        return [made[0], made[1] * 2 + 1, made[2]]

    def extend(self, rows: list[int], counts: list[int], size: int = 0) -> list[torch.Tensor]:
        """What layers get of a pass that ends the rows' prompts, whether or not it is filled up to ``size`` tokens."""
        manager = self.manager
        starts = [manager.rows.length(row) for row in rows]
        manager.plan_step(rows, counts, starts, ending=tuple(rows))
        launched = manager.launch_step()
        assert launched is not None
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        wrapper: ExtendWrapper = self.plain
        if self.bounded is not None and size:
            wrapper = self.bounded
            self.bounded.bound(size)
            self.bounded.give(rows, starts, counts, ends)
        else:
            numbers = [torch.tensor(x, device=DEVICE) for x in (rows, starts, counts)]
            shared = [manager.rows.shared(row) for row in rows]
            self.plain.plan(*numbers, starts, counts, prompts=ends, shared=shared)
        wrapper.begin()
        outs = []
        for layer in range(LAYERS):
            given = self.tokens(sum(counts))
            if wrapper is self.bounded:  # padding may be anything
                more = size - sum(counts)
                given = [torch.cat([x, torch.full_like(x[:1], 3e4).expand(more, -1, -1)]) for x in given]
            outs.append(wrapper.run(layer, *given, SCALING)[: sum(counts)].clone())
        wrapper.end()
        manager.end_prompts(launched)
        check_integrity(manager)
        return outs

    def padded(self, size: int) -> list[torch.Tensor]:
        """What layers get of a bounded pass of no request, as a graph is captured."""
        assert self.bounded is not None
        self.bounded.bound(size)
        self.bounded.give([], [], [], [])
        self.bounded.begin()
        outs = [self.bounded.run(layer, *self.tokens(size), SCALING) for layer in range(LAYERS)]
        assert self.bounded.step is not None
        self.bounded.end()
        assert vars(self.bounded.step.launches) == vars(Launches()), "a graph's launches are of its own"
        return outs

    def held(self, *rows: int) -> list[torch.Tensor]:
        """Scores and positions of what rows hold in the high tier, and bytes of their pages."""
        state, view = self.manager.state, self.manager.state.tiers[0]
        found = []
        for row in rows:
            pages = held_pages(state, torch.tensor([row], device=DEVICE), 0)
            position = view.positions[pages]
            there = (position >= 0) & (position < 300)
            found.append(position[there])
            if view.scores is not None:
                found.append(view.scores[pages][there])
        return found


def run(*given: Any, bounded: bool, sizes: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A prompt whose pages others share, then passes of one, of several and of new requests, one of a single token."""
    server = Server(*given, bounded=bounded)
    server.extend([1], [67])
    segment = server.manager.segments.share(1, 0, 61)
    assert segment is not None
    for row, shared in ((2, 61), (3, 33), (5, 40)):
        server.manager.attach_prefix(row, [(segment, 0, shared)])
    outs = server.extend([2], [13], sizes[0])
    outs += server.extend([3, 4, 5], [17, 9, 1], sizes[1])
    outs += server.extend([6], [31], sizes[2])
    return outs, server.held(1, 2, 3, 4, 5, 6)


@in_every_form
def test_they_give_and_store_the_same(tiers: str, policy: Policy, rotated: str, means: bool) -> None:
    common = torch.randn(LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(7)) * 2 if means else None
    given = (tiers, policy, Rotation.named(rotated), common)
    mine, stored = run(*given, bounded=True, sizes=(13, 32, TOKENS))
    expected, known = run(*given, bounded=False, sizes=(0, 0, 0))
    for got, wanted in zip(mine, expected, strict=True):
        assert close(got, wanted) < 1e-3
    assert len(stored) == len(known)
    for got, wanted in zip(stored, known, strict=True):
        assert got.shape == wanted.shape and close(got, wanted) < 1e-3


def test_queries_that_observe_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt's tokens but the newest: who they are is told for each pass."""
    monkeypatch.setattr(diffkv, "OBSERVERS", 5)
    given = ("K8V4 K4V2", SAMPLED, BOTH, None)
    _, stored = run(*given, bounded=True, sizes=(13, 32, TOKENS))
    _, known = run(*given, bounded=False, sizes=(0, 0, 0))
    for got, wanted in zip(stored, known, strict=True):
        assert got.shape == wanted.shape and close(got, wanted) < 1e-3


@pytest.mark.parametrize("prompts", [((1, 3), (2, 1), (3, 7), (4, 2), (5, 5)), ((1, 48),)], ids=["most", "full"])
def test_as_many_requests_or_tokens_as_there_may_be(prompts: tuple[tuple[int, int], ...]) -> None:
    rows, counts = [row for row, _ in prompts], [count for _, count in prompts]
    found = []
    for bounded in (True, False):
        server = Server("K8V4 K4V2", SCORED, BOTH, None, bounded=bounded)
        server.extend([7], [STORED])
        segment = server.manager.segments.share(7, 0, STORED)
        assert segment is not None
        server.manager.attach_prefix(rows[-1], [(segment, 0, STORED)])
        found.append(server.extend(rows, counts, TOKENS) + server.held(*rows))
    for got, wanted in zip(*found, strict=True):
        assert got.shape == wanted.shape and close(got, wanted) < 1e-3


def test_the_same_graph_serves_passes_of_different_requests() -> None:
    """What an earlier pass left in the fixed memory, bad numbers among it, does not reach the next one."""
    server = Server("K8V4 K4V2", SCORED, BOTH, None, bounded=True)
    assert server.bounded is not None
    first = server.extend([1, 2, 3], [20, 11, 16], TOKENS)
    for room in server.bounded.known.room:
        room.fill_(float("nan"))
    second = server.extend([4], [5], 8)
    plain = Server("K8V4 K4V2", SCORED, BOTH, None, bounded=False)
    expected = plain.extend([1, 2, 3], [20, 11, 16]) + plain.extend([4], [5])
    for got, wanted in zip(first + second, expected, strict=True):
        assert close(got, wanted) < 1e-3
    for room in server.bounded.known.room:
        room.fill_(float("nan"))
    assert not any(out.any() for out in server.padded(8)), "padding gets zeros, whatever was there"


def test_padding_alone_stores_nothing() -> None:
    server = Server("K8V4 K4V2", SCORED, BOTH, None, bounded=True)
    free = server.manager.device.free_pages()
    server.padded(8)
    assert server.manager.device.free_pages() == free
    check_integrity(server.manager)


def test_what_fits() -> None:
    bounded = Server("K8V4 K4V2", SCORED, BOTH, None, bounded=True).bounded
    assert bounded is not None
    assert bounded.fits([STORED], [TOKENS]) and bounded.fits([0] * 5, [9, 9, 9, 9, 12])
    assert not bounded.fits([STORED + 1], [1])
    assert not bounded.fits([STORED - 1, 2], [1, 1])
    assert not bounded.fits([0], [TOKENS + 1])
    assert not bounded.fits([0] * 6, [1] * 6)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [WINDOW, SAMPLED], ids=["window", "sampled"])
def test_a_cuda_graph_holds_them(policy: Policy) -> None:
    """Replays of the same graphs, attention by FlashAttention-3 in them, compute passes of different requests."""
    form: dict[str, Any] = {"rotation": BOTH}
    plain, held = (Server("K8V4 K4V2", policy, BOTH, None, bounded=False) for _ in range(2))
    for server in (plain, held):
        ops = server.manager.ops
        assert isinstance(ops, TritonOps)
        if FlashPrefill.obstacle(DIM, DIM, BF16, torch.device("meta"), [SCALING]):
            pytest.skip("there is no FlashAttention-3")
        ops.use_flash()
        assert not ops.bounded_obstacle()
    wrapper = BoundedWrapper(held.manager.ops, requests=5, tokens=TOKENS, stored=STORED, **form)
    sizes = (HEADS * GROUP, HEADS, HEADS)
    given = [[torch.zeros(TOKENS, x, DIM, dtype=BF16, device=DEVICE) for x in sizes] for _ in range(LAYERS)]
    outs: list[torch.Tensor] = []

    def whole() -> None:
        outs.clear()
        wrapper.begin()
        outs.extend(wrapper.run(layer, *given[layer], SCALING) for layer in range(LAYERS))
        wrapper.end()

    for _ in range(2):
        whole()
    torch.cuda.synchronize()
    reached: list[int] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = record(whole, wrapper, torch.cuda.graph_pool_handle(), reached.append)
    for server in (plain, held):
        server.extend([7], [STORED])
        segment = server.manager.segments.share(7, 0, STORED - 30)
        assert segment is not None
        server.manager.attach_prefix(2, [(segment, 0, 60)])
        server.manager.attach_prefix(4, [(segment, 0, STORED - 30)])
    for rows, counts in (([1, 2, 3], [20, 11, 16]), ([4], [5]), ([5, 6], [TOKENS - 1, 1])):
        expected = plain.extend(rows, counts)
        manager = held.manager
        starts = [manager.rows.length(row) for row in rows]
        manager.plan_step(rows, counts, starts, ending=tuple(rows))
        launched = manager.launch_step()
        assert launched is not None
        wrapper.give(rows, starts, counts, [start + count for start, count in zip(starts, counts, strict=True)])
        for layer in range(LAYERS):
            for fixed, new in zip(given[layer], held.tokens(sum(counts)), strict=True):
                fixed[: len(new)] = new
        for room in wrapper.known.room:
            room.fill_(float("nan"))
        graph.replay()
        assert reached == layer_groups(LAYERS) and len(reached) > 1, "there is a graph for each group of layers"
        reached.clear()
        manager.end_prompts(launched)
        check_integrity(manager)
        for got, wanted in zip(outs, expected, strict=True):
            assert close(got[: sum(counts)], wanted) < 1e-2
            assert not got[sum(counts) :].any(), "padding gets zeros"
    for got, wanted in zip(held.held(*range(1, 7)), plain.held(*range(1, 7)), strict=True):
        assert got.shape == wanted.shape and close(got, wanted) < 1e-2
