"""The wrappers run a prompt and decode steps as the references do, and a decode step replays from a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from sglang_diffkv.attention.wrappers import DecodeWrapper, ExtendWrapper
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation, rotate
from sglang_diffkv.layout.query_cache import QueryCache
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.ops import Scaling
from sglang_diffkv.ops.triton import TritonOps
from tests.kernels.triton_helpers import BF16, DEVICE, add_prompt, close, make_format, make_manager, vectors

GROUP, SCALING = 2, Scaling(0.1)


def queries(state, count, generator):
    return torch.randn(count, state.num_heads * GROUP, 64, generator=generator).to(DEVICE, BF16)


def make(manager, rotation=NO_ROTATION):
    """Wrappers over Triton ops for a manager's state."""
    ops = TritonOps(manager.state, manager.policy, manager.state.num_heads * GROUP, 200)
    return ExtendWrapper(ops, rotation=rotation), DecodeWrapper(ops, rotation=rotation)


def grow(manager, rows, counts):
    """Table blocks for new tokens of rows."""
    for row, count in zip(rows, counts, strict=True):
        manager.space.append(row, count)
        manager.rows.grow(row, count, in_prompt=False)
    manager.space.flush()


@pytest.mark.parametrize(
    "rotation", [*(pytest.param(Rotation(x), marks=pytest.mark.full) for x in (False, True)), Rotation(True, True)]
)
def test_prompt_and_steps_match_references(rotation):
    mine, reference = (make_manager(make_format("K8V4 K4V2"), layers=1, heads=1, window=6) for _ in range(2))
    generator = torch.Generator().manual_seed(2)
    state = mine.state
    extend, decode = make(mine, rotation)
    twins = [kind(reference.ops, rotation=rotation) for kind in (ExtendWrapper, DecodeWrapper)]
    rows, lengths = [2, 1], [13, 22]
    ids = torch.tensor(rows, device=DEVICE)
    key, value = vectors(state, 35, generator)
    q = queries(state, 35, generator)
    outs = []
    for manager, wrapper in ((mine, extend), (reference, twins[0])):
        grow(manager, rows, lengths)
        wrapper.plan(ids, torch.zeros_like(ids), torch.tensor(lengths, device=DEVICE), [0, 0], lengths)
        wrapper.begin()
        outs.append(wrapper.run(0, q, key, value, SCALING))
        for row, count in zip(rows, lengths, strict=True):
            wrapper.end_prompt(row, count)
        check_integrity(manager)
    assert close(*outs) < 6e-3
    for _ in range(4):
        lengths = [n + 1 for n in lengths]
        key, value = vectors(state, 3, generator)
        q = queries(state, 3, generator)
        outs = []
        for manager, wrapper, padding in ((mine, decode, 1), (reference, twins[1], 0)):
            grow(manager, rows, [1, 1])
            padded = torch.tensor(rows + [0] * padding, device=DEVICE)
            wrapper.plan(padded, torch.tensor(lengths + [1] * padding, device=DEVICE))
            wrapper.begin()
            outs.append(wrapper.run(0, *(x[: 2 + padding] for x in (q, key, value)), SCALING))
            wrapper.end()
            check_integrity(manager)
        bound = 1e-2 if rotation == NO_ROTATION else 2e-2  # bf16 is cut off in the interpreter, and rounded on a GPU
        assert close(outs[0][:2], outs[1]) < bound and not outs[0][2].any()
    assert (state.own_tokens[1] - reference.state.own_tokens[1]).abs().max() <= 1  # scores near a threshold may differ


def test_queries_are_kept_as_keys_are_stored():
    """Rotated, since they judge rotated keys later."""
    manager = make_manager(make_format("K8V4 K4V2"), layers=1, heads=1, window=6)
    state, generator = manager.state, torch.Generator().manual_seed(3)
    cache = QueryCache.create(slots=1, rows=8, layers=1, window=5, q_heads=GROUP, head_dim=64, device=DEVICE)
    cache.slot_of[2] = 0
    ops = TritonOps(state, manager.policy, GROUP, 200)
    decode = DecodeWrapper(ops, rotation=Rotation(True, True), queries=cache)
    grow(manager, [2], [1])
    decode.plan(torch.tensor([2], device=DEVICE), torch.tensor([1], device=DEVICE))
    decode.begin()
    q = queries(state, 1, generator)
    decode.run(0, q, *vectors(state, 1, generator), SCALING)
    kept = cache.queries[0, 0, 0]
    assert close(kept, rotate(q)[0][0]) < 8e-3 and close(kept, q[0]) > 0.5


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
def test_step_replays_from_a_graph():
    eager, captured = (make_manager(make_format("K8V4 K4V2"), layers=2, heads=2, window=6) for _ in range(2))
    outs = {}
    for manager in (eager, captured):
        generator = torch.Generator().manual_seed(4)
        add_prompt(manager, 1, 40, generator)
        add_prompt(manager, 2, 25, generator)
        _, decode = make(manager)
        decode.ops.prepare_graphs(4)
        static = [torch.zeros(2, 4, n, 64, dtype=BF16, device=DEVICE) for n in (2 * GROUP, 2, 2)]
        results = torch.zeros(2, 4, 2 * GROUP, 64, dtype=BF16, device=DEVICE)
        ids, seq_lens = (torch.full((4,), x, dtype=torch.int64, device=DEVICE) for x in (0, 1))

        def step(decode=decode, static=static, results=results):
            decode.begin()
            for layer in range(2):
                results[layer].copy_(decode.run(layer, *(x[layer] for x in static), SCALING))
            decode.end()

        decode.plan(ids, seq_lens)
        step()  # compiles; without requests it changes nothing
        run = step
        if manager is captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            run = graph.replay
        for number in range(20):
            rows = [1, 2] if number % 3 else [2]
            grow(manager, rows, [1] * len(rows))
            ids.copy_(torch.tensor(rows + [0] * (4 - len(rows))))
            seq_lens.copy_(torch.tensor([*(manager.rows.length(r) for r in rows), *[1] * (4 - len(rows))]))
            for x in static:
                x.copy_(torch.randn(x.shape, generator=generator))
            run()
            outs.setdefault(number, []).append(results.clone())
        torch.cuda.synchronize()
        check_integrity(manager)
    for first, second in outs.values():
        assert torch.equal(first, second)
