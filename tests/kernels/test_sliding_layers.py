"""Layers with a sliding window and attention sinks: the ops against a plain softmax, and Triton's against theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_diffkv.attention.wrappers import DecodeWrapper, ExtendWrapper
from sglang_diffkv.kernels.rotate.reference import Rotation
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.spans import SLACK, retained_tokens
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.ops import ReferenceOps, Scaling
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.diffkv import KEEP
from sglang_diffkv.policies.uniform import UniformPolicy
from tests.helpers import visible
from tests.kernels.triton_helpers import BF16, DEVICE, close, make_format
from tests.policies import diffkv_policy, duo_policy

GROUP, DIM, ROWS = 3, 64, [2, 1]
CHUNKS = [(33, 5), (20, 9)]
"""New tokens of each request, of two passes; then come decode steps."""
STEPS = 3


def make(ops: str, tiers: str, policy, attention_spans: tuple[int, ...]) -> PageManager:
    """A manager with poisoned memory."""
    geometry = Geometry(make_format(tiers), len(attention_spans), 1, 300, 8, 8, 300, attention_spans)
    lossless = tiers == "BF16"

    def make_ops(state):
        if ops == "triton":
            return TritonOps(state, policy, GROUP, 300)
        return ReferenceOps(state, policy, lossless and ops == "raw")

    manager = PageManager(geometry, policy, dtype=BF16, device=DEVICE, make_ops=make_ops)
    manager.state.pages.view(torch.int16).fill_(0x7FFF)
    if isinstance(manager.ops, TritonOps):
        manager.ops.prepare_graphs(len(ROWS))
        manager.ops.buffers[0].scratch.memory.fill_(0x5A)
    return manager


def dense(q, key, value, first: int, attention_span: int, scaling: Scaling, sink):
    """q [n, G, D] from position ``first`` on, key and value [m, D]: [n, G, D] in float64."""
    logits = torch.einsum("ngd,md->ngm", q.double(), key.double()) * scaling.scale
    if scaling.cap:
        logits = scaling.cap * torch.tanh(logits / scaling.cap)
    at = torch.arange(first, first + len(q)).view(-1, 1, 1)
    position = torch.arange(len(key)).view(1, 1, -1)
    seen = (position <= at) & (position > at - (attention_span or 10**6))
    logits = logits.masked_fill(~seen, float("-inf"))
    if sink is not None:
        logits = torch.cat([logits, sink.cpu().double().view(1, -1, 1).expand(len(q), -1, 1)], 2)
    return logits.softmax(2)[..., : len(key)] @ value.double()


def run(manager: PageManager, scaling: Scaling, sink, *, compact_chunks: bool, **form):
    """Prompts in two passes and decode steps. All outputs, by pass, layer and request, and what a plain softmax over
    all tokens gives. ``form``: rotation and key means of the wrappers."""
    generator = torch.Generator().manual_seed(7)
    state = manager.state
    extend, decode = ExtendWrapper(manager.ops, **form), DecodeWrapper(manager.ops, **form)
    layers = range(state.num_layers)
    past = {(layer, row): [] for layer in layers for row in ROWS}
    lengths = dict.fromkeys(ROWS, 0)
    outs, expected = [], []
    for number, counts in enumerate([*CHUNKS, *[(1, 1)] * STEPS]):
        wrapper = extend if number < len(CHUNKS) else decode
        ids, device = torch.tensor(ROWS, device=DEVICE), {"device": DEVICE}
        prefixes = [lengths[row] for row in ROWS]
        for row, count in zip(ROWS, counts, strict=True):
            manager.space.append(row, count)
            manager.rows.grow(row, count, in_prompt=False)
            lengths[row] += count
        manager.space.flush()
        if wrapper is extend:
            extend.plan(ids, torch.tensor(prefixes, **device), torch.tensor(counts, **device), prefixes, list(counts))
        else:
            decode.plan(ids, torch.tensor([lengths[row] for row in ROWS], **device))
        wrapper.begin()
        for layer in layers:
            q = torch.randn(sum(counts), GROUP, DIM, generator=generator).to(BF16)
            key, value = (torch.randn(sum(counts), 1, DIM, generator=generator).to(BF16) for _ in range(2))
            out = wrapper.run(layer, *(x.to(DEVICE) for x in (q, key, value)), scaling, sink)
            start = 0
            for row, count, prefix in zip(ROWS, counts, prefixes, strict=True):
                here = slice(start, start + count)
                past[layer, row].append((key[here, 0], value[here, 0]))
                keys, values = (torch.cat(x) for x in zip(*past[layer, row], strict=True))
                expected.append(dense(q[here], keys, values, prefix, state.attention_span(layer), scaling, sink))
                outs.append(out[here].cpu().double())
                start += count
        if wrapper is decode:
            decode.end()
        elif compact_chunks or number == len(CHUNKS) - 1:
            for row in ROWS:
                extend.end_prompt(row, lengths[row])
        check_integrity(manager)
    return outs, expected


REACHES = [(3, 0), (20, 500), (64, 1)]
"""Much shorter than a prompt, as long as all of it, and a token's own."""
SINK = torch.tensor([2.0, -1.0, 5.0])


@pytest.mark.parametrize("attention_spans", REACHES)
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("sink", [None, SINK], ids=["", "sinks"])
@pytest.mark.parametrize("ops", ["raw", "reference", "triton"])
@pytest.mark.cover(1)
def test_lossless_layers_see_what_is_in_reach(ops, sink, cap, attention_spans):
    """Though all else is dropped, behind each chunk and in each step."""
    manager = make(ops, "BF16", UniformPolicy(), attention_spans)
    sink = None if sink is None else sink.to(DEVICE)
    outs, expected = run(manager, Scaling(0.2, cap), sink, compact_chunks=True)
    for got, want in zip(outs, expected, strict=True):
        assert close(got, want) < 8e-3
    length = sum(count[0] for count in CHUNKS) + STEPS
    seen = visible(manager.state, ROWS[0])
    for layer, attention_span in enumerate(attention_spans):
        held = sorted(seen.at(layer, 0).position.tolist())
        least = max(length - retained_tokens(attention_span), 0) if attention_span else 0
        assert held == list(range(least, length)), "a layer holds something else than its window and the slack"
    pages = manager.state.entries[ROWS[0], :, 0, 0].tolist()
    for layer, attention_span in enumerate(attention_spans):
        most = -(
            -(min(retained_tokens(attention_span) + 1, length) if attention_span else length) // manager.fmt.high.tokens
        )
        assert pages[layer] <= most, "the pages of a sliding layer grow"


@pytest.mark.parametrize("tiers", ["K8V4 K4V2", pytest.param("K8V8 K8V4 K4V4 K4V2", marks=pytest.mark.full)])
def test_triton_is_the_reference_with_tiers(tiers):
    """Full layers are sorted into tiers, sliding ones hold their window in the high tier."""
    policy = diffkv_policy(1.0, 0.0, window=6, sinks=2, alpha_between=(0.5, 0.2) if len(tiers.split()) > 2 else ())
    found = {}
    for ops in ("reference", "triton"):
        manager = make(ops, tiers, policy, (9, 0))
        sink = SINK.to(DEVICE)
        found[ops] = run(manager, Scaling(0.2), sink, compact_chunks=False)[0], manager
    for got, want in zip(found["triton"][0], found["reference"][0], strict=True):
        assert close(got, want) < 2e-2
    for _, manager in found.values():
        seen = visible(manager.state, ROWS[0])
        length = sum(count[0] for count in CHUNKS) + STEPS
        sliding, full = seen.at(0, 0), seen.at(1, 0)
        assert sorted(sliding.position.tolist()) == list(range(length - retained_tokens(9), length))
        assert not sliding.tier.any() and full.tier.any() and len(full.position) == length


@pytest.mark.parametrize("ops", ["reference", "triton"])
def test_heads_that_stream_stream_in_full_layers_only(ops):
    """DuoAttention: a sliding layer holds its window, whichever kind its head is of."""
    manager = make(ops, "BF16", duo_policy(((True,), (False,), (True,), (False,)), 6, 2, False), (20, 20, 0, 0))
    run(manager, Scaling(0.2), None, compact_chunks=False)
    length, seen = sum(count[0] for count in CHUNKS) + STEPS, visible(manager.state, ROWS[0])
    window = list(range(length - retained_tokens(20), length))
    streamed = [0, 1, *range(length - 6, length)]
    held = [sorted(seen.at(layer, 0).position.tolist()) for layer in range(4)]
    assert held == [window, window, streamed, list(range(length))]


@pytest.mark.parametrize("ops", ["reference", pytest.param("triton", marks=pytest.mark.full)])
def test_rotated_and_less_key_means_layers_see_the_same(ops):
    """What is stored at 8 bits gives nearly what a plain softmax gives, in sliding layers as in full ones."""
    means = torch.randn(2, 1, DIM, generator=torch.Generator().manual_seed(3))
    manager = make(ops, "K8V8", UniformPolicy(), (20, 0))
    form = {"rotation": Rotation(True, True), "key_means": means}
    outs, expected = run(manager, Scaling(0.2), None, compact_chunks=True, **form)
    for got, want in zip(outs, expected, strict=True):
        assert close(got, want) < 2e-2
    held = visible(manager.state, ROWS[0]).at(0, 0).position
    assert len(held) == retained_tokens(20), "the sliding layer holds more than its window and the slack"


def test_copies_slide_and_copies_as_they_are_do_not():
    """``copy_compact`` of both ops, by the policy and by KEEP."""
    for ops in ("reference", "triton"):
        manager = make(ops, "BF16", UniformPolicy(), (5, 0))
        generator = torch.Generator().manual_seed(1)
        extend, count = ExtendWrapper(manager.ops), 60
        manager.space.append(1, count)
        manager.space.flush()
        one = torch.tensor([1], device=DEVICE)
        extend.plan(one, one * 0, one * count, [0], [count])
        extend.begin()
        for layer in range(2):
            new = (torch.randn(count, n, DIM, generator=generator).to(DEVICE, BF16) for n in (GROUP, 1, 1))
            extend.run(layer, *new, Scaling(0.1))
        for row, policy, least in ((3, manager.policy, count - 4 - SLACK), (4, KEEP, 0)):
            manager.space.append(row, count)
            manager.space.flush()
            manager.ops.copy_compact(row, [(1, 0, count)], count, policy, None)
            seen = visible(manager.state, row)
            assert sorted(seen.at(0, 0).position.tolist()) == list(range(least, count))
            assert sorted(seen.at(1, 0).position.tolist()) == list(range(count))


def test_a_shared_token_stays():
    """A row drops only what is in pages of its own; its references to a segment's are as they were."""
    for ops in ("reference", "triton"):
        manager = make(ops, "BF16", UniformPolicy(), (5,))
        state = manager.state
        run(manager, Scaling(0.1), None, compact_chunks=False)
        row = ROWS[0]
        manager.device.freeze({row: 0})
        held = visible(state, row).position.tolist()
        rows = torch.tensor([row], device=DEVICE)
        for position in held:
            manager.ops.slide(rows, torch.tensor([position + retained_tokens(5) + 1], device=DEVICE))
        assert visible(state, row).position.tolist() == held and int(state.hole[row].max()) == -1


def test_a_step_that_found_no_page_slides_past_the_scratch_page():
    """What lies in the scratch page is nobody's."""
    for ops in ("reference", "triton"):
        manager = make(ops, "BF16", UniformPolicy(), (5,))
        state = replace(manager.state)
        run(manager, Scaling(0.1), None, compact_chunks=False)
        state.tiers[0].positions[state.scratch_page] = 7
        state.page_table[state.row_blocks[ROWS[0], 0], 0, 0, 0] = state.scratch_page
        before = state.hole.clone()
        at = torch.tensor([7 + retained_tokens(5) + 1], device=DEVICE)
        manager.ops.slide(torch.tensor(ROWS[:1], device=DEVICE), at)
        assert (state.tiers[0].positions[state.scratch_page] == 7).all() and torch.equal(state.hole, before)
