"""The wrappers run a prompt and decode steps as the references do, and a decode step replays from a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from sglang_diffkv.attention.wrappers import DecodeWrapper, ExtendWrapper
from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.kernels.decode_attention.reference import decode_attention
from sglang_diffkv.kernels.decode_attention.triton_workspace import DecodeConfig
from sglang_diffkv.kernels.extend_attention.reference import extend_attention
from sglang_diffkv.mem_pool.integrity import check_integrity
from tests.helpers import begin_step, new_scores
from tests.kernels.triton_helpers import BF16, DEVICE, add_prompt, close, make_format, make_manager, vectors

GROUP, SCALE = 2, 0.1


def queries(state, count, generator):
    return torch.randn(count, state.num_heads * GROUP, 64, generator=generator).to(DEVICE, BF16)


def test_prompt_and_steps_match_references():
    mine, reference = (make_manager(make_format("K8V4 K4V2"), layers=1, heads=1, window=6) for _ in range(2))
    generator = torch.Generator().manual_seed(2)
    state, twin, policy = mine.state, reference.state, mine.policy
    extend = ExtendWrapper(state, sm_scale=SCALE, policy=policy)
    rows, lengths, start = [2, 1], [13, 22], [0, 0]
    for row, count in zip(rows, lengths, strict=True):
        mine.space.append(row, count)
        mine.lengths[row] = count
    mine.space.flush()
    extend.plan(rows, lengths, start)
    begin_step(reference, rows, lengths, start)
    key, value = vectors(state, 35, generator)
    q = queries(state, 35, generator)
    got = extend.run(0, q, key, value)
    append(twin, 0, key, value, extend.owners, extend.offsets, extend.positions)
    arguments = (torch.tensor(rows), torch.tensor(lengths), torch.tensor(start))
    expected = extend_attention(twin, 0, q, key, value, *arguments, SCALE, update_scores=True)
    assert close(got, expected) < 6e-3
    for row, count in zip(rows, lengths, strict=True):
        extend.end_prompt(row, count)
        reference.prompts.end(row)
    check_integrity(mine)
    config = DecodeConfig(score_parts=1, score_tokens=32)
    decode = DecodeWrapper(state, GROUP, 3, sm_scale=SCALE, policy=policy, max_tokens=100, splits=2, config=config)
    ids = torch.tensor(rows, device=DEVICE)
    for _ in range(4):
        lengths = [n + 1 for n in lengths]
        seq_lens = torch.tensor(lengths, device=DEVICE)
        for row, count in zip(rows, lengths, strict=True):
            mine.space.append(row, 1)
            mine.lengths[row] = count
        mine.space.flush()
        begin_step(reference, rows, [1, 1], [n - 1 for n in lengths])
        key, value = vectors(state, 3, generator)
        q = queries(state, 3, generator)
        decode.plan(ids, seq_lens)
        decode.begin_step()
        got = decode.run(0, q, key, value)
        decode.end_step()
        scores = new_scores(reference, 2)
        append(twin, 0, key[:2], value[:2], ids, torch.zeros_like(ids), seq_lens - 1)
        expected, _ = decode_attention(twin, 0, q[:2], ids, seq_lens, SCALE, scores=scores, window=policy.window)
        reference.end_decode(ids, seq_lens, scores)
        assert close(got[:2], expected) < 1e-2 and not got[2].any()
        check_integrity(mine)
    assert (state.own_tokens[1] - twin.own_tokens[1]).abs().max() <= 1  # scores near a threshold may differ


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
def test_step_replays_from_a_graph():
    eager, captured = (make_manager(make_format("K8V4 K4V2"), layers=2, heads=2, window=6) for _ in range(2))
    outs = {}
    for manager in (eager, captured):
        generator = torch.Generator().manual_seed(4)
        state = manager.state
        add_prompt(manager, 1, 40, generator)
        add_prompt(manager, 2, 25, generator)
        decode = DecodeWrapper(state, 2 * GROUP, 4, sm_scale=SCALE, policy=manager.policy, max_tokens=200)
        static = [torch.zeros(2, 4, n, 64, dtype=BF16, device=DEVICE) for n in (2 * GROUP, 2, 2)]
        results = torch.zeros(2, 4, 2 * GROUP, 64, dtype=BF16, device=DEVICE)

        def step(decode=decode, static=static, results=results):
            decode.begin_step()
            for layer in range(2):
                results[layer].copy_(decode.run(layer, *(x[layer] for x in static)))
            decode.end_step()

        decode.plan(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
        step()  # compiles; without requests it changes nothing
        run = step
        if manager is captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            run = graph.replay
        for number in range(20):
            rows = [1, 2] if number % 3 else [2]
            for row in rows:
                manager.space.append(row, 1)
                manager.rows.grow(row, 1, in_prompt=False)
            manager.space.flush()
            decode.plan(torch.tensor(rows), torch.tensor([manager.rows.length(r) for r in rows]))
            for x in static:
                x.copy_(torch.randn(x.shape, generator=generator))
            run()
            outs.setdefault(number, []).append(results.clone())
        torch.cuda.synchronize()
        check_integrity(manager)
    for first, second in outs.values():
        assert torch.equal(first, second)
