"""Decode and extend attention over pages; ``tests/dense.py`` compares every output with a dense oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.kernels.extend_attention.reference import extend_attention
from sglang_diffkv.kernels.raw_attention.reference import raw_attention
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.policies.uniform import UniformPolicy
from tests.checks import check_row
from tests.dense import Session, chunks_and_steps
from tests.helpers import PAIR, POISONS, begin_step, make_format, make_manager, tier_map, visible
from tests.policies import diffkv_policy

FORMATS = [
    PAIR,
    ("BF16",),
    ("K8V8",),
    ("K4V4",),
    ("BF16", "K8V4"),
    ("K8V2", "K4V1"),
    ("K8V8", "K8V4"),
    ("K2V2", "K1V1"),
    ("BF16", "K8V4", "K4V2"),
    ("K8V8", "K8V4", "K4V4", "K4V2"),
]


def compressed_session(poison: str = "nan", **kwargs) -> Session:
    """Three rows of odd lengths, prompts compacted: high, low and pruned tokens in each."""
    fmt = kwargs.pop("fmt", make_format())
    between = (0.8, 0.65)[: max(len(fmt.tiers) - 2, 0)]
    policy = kwargs.pop("policy", diffkv_policy(1.0, 0.5, window=5, alpha_between=between))
    session = Session(make_manager(fmt, policy=policy, poison=poison), spread=4.0, **kwargs)
    session.extend({1: 41, 2: 3, 3: 17})
    session.extend({3: 24, 1: 1})
    for row in (1, 2, 3):
        session.manager.prompts.end(row)
    return session


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("tiers", FORMATS, ids="-".join)
def test_every_format(tiers, poison):
    session = compressed_session(poison, fmt=make_format(tiers))
    kinds = np.unique(tier_map(session.state, 1, 42))
    assert len(kinds) == len(tiers) + 1, "the test is to have tokens of each tier, and pruned ones"
    for _ in range(12):
        session.step([3, 1, 2])
        check_integrity(session.manager)
    session.extend({2: 9})
    for row in (1, 2, 3):
        check_row(session, row)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_query_head_groups(group):
    session = compressed_session(group=group)
    for _ in range(3):
        session.step([1, 2, 3])


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 128), (96, 64), (128, 128), (128, 96), (256, 64)])
@pytest.mark.parametrize("logit_cap", [0.0, 5.0])
def test_head_dims_and_logit_cap(head_dim, v_head_dim, logit_cap):
    session = compressed_session(fmt=make_format(PAIR, head_dim, v_head_dim), logit_cap=logit_cap)
    for _ in range(4):
        session.step([2, 1])


@pytest.mark.parametrize("page_tokens", [4, 5, 7, 32])
def test_page_sizes(page_tokens):
    session = compressed_session(fmt=make_format(PAIR, 64, 96, page_tokens))
    for _ in range(6):
        session.step([1, 2, 3])


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17])
def test_lengths_about_a_page(length):
    session = Session(make_manager(policy=UniformPolicy()))
    session.extend({4: length}, scores=False)
    session.manager.prompts.end(4)
    for _ in range(10):
        session.step([4])
        check_integrity(session.manager)
    assert (tier_map(session.state, 4, length + 10) == 0).all()


@pytest.mark.parametrize("cuts", [[40], [1, 39], [13, 1, 1, 25], [8, 8, 24], [39, 1]])
def test_chunks_give_what_one_extend_gives(cuts):
    """With a raw tier nothing is lost between chunks: outputs agree, and scores do for one query head."""
    outputs, scores = [], []
    for chunks in ([40], cuts):
        manager = make_manager(make_format(("BF16",)), policy=diffkv_policy(1.0, 0.1, 8))
        session = Session(manager, group=1)
        random = torch.Generator().manual_seed(5)
        q, k, v = (torch.randn(40, 2, 64, generator=random).bfloat16().float() for _ in range(3))
        parts, start = [], 0
        for count in chunks:
            begin_step(manager, [6], [count], [start])
            rows, new = torch.full((count,), 6), slice(start, start + count)
            for layer in range(2):
                append(
                    manager.state,
                    layer,
                    k[new],
                    v[new],
                    rows,
                    torch.arange(count),
                    torch.arange(start, start + count),
                )
                parts_of_layer = extend_attention(
                    manager.state, layer, q[new], k[new], v[new], torch.tensor([6]), torch.tensor([count]),
                    torch.tensor([start]), session.sm_scale, update_scores=True,
                )  # fmt: skip
            parts.append(parts_of_layer)
            start += count
        outputs.append(torch.cat(parts))
        seen = visible(manager.state, 6)
        order = np.lexsort((seen.position, seen.head, seen.layer))
        scores.append(seen.score[order])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4, atol=1e-6)


def test_long_extend_crosses_query_blocks():
    session = Session(make_manager(policy=diffkv_policy(1.0, 0.2, 16)), group=2)
    session.extend({1: 300})
    session.extend({1: 259})
    session.manager.prompts.end(1)
    check_integrity(session.manager)
    session.step([1])


@pytest.mark.parametrize("split", [1, 7, 8, 9, 30, 33, 42])
def test_attached_prefix_is_limited_to_its_range(split):
    session = compressed_session()
    for _ in range(5):
        session.step([1, 2, 3])
    segment = session.share(1, 0, 47)
    session.attach(5, [(segment, 0, split)])
    session.attach(6, [(segment, 0, split), (segment, split, 47)])
    whole, mine = tier_map(session.state, 1, 47), tier_map(session.state, 6, 47)
    assert np.array_equal(whole, mine)
    assert np.array_equal(whole[..., :split], tier_map(session.state, 5, split))
    check_integrity(session.manager)
    session.extend({5: 13, 6: 1, 4: 6})
    for row in (4, 5, 6):
        session.manager.prompts.end(row)
    for _ in range(14):
        session.step([6, 1, 4, 5, 3])
        check_integrity(session.manager)
    for row in (1, 3, 4, 5, 6):
        check_row(session, row)


def test_prefix_of_several_segments():
    session = compressed_session()
    first = session.share(1, 0, 42)
    session.attach(5, [(first, 0, 21)])
    session.extend({5: 30})
    session.manager.prompts.end(5)
    second = session.share(5, 21, 51)
    session.attach(6, [(first, 0, 21), (second, 21, 40)])
    session.attach(7, [(first, 0, 10), (first, 10, 21), (second, 21, 22), (second, 22, 51)])
    session.extend({6: 20, 7: 20})
    session.manager.prompts.end(6)
    session.manager.prompts.end(7)
    for _ in range(10):
        session.step([7, 6, 5, 1])
        check_integrity(session.manager)
    for row in (1, 5, 6, 7):
        check_row(session, row)


def test_shared_scores_do_not_change():
    session = compressed_session()
    segment = session.share(1, 0, 42)
    session.attach(5, [(segment, 0, 42)])
    before = visible(session.state, segment.row)
    session.extend({5: 8})
    for _ in range(8):
        session.step([1, 5])
    after = visible(session.state, segment.row)
    for name, array in vars(before).items():
        assert np.array_equal(array, getattr(after, name)), name


def test_scores_over_many_steps_and_chunks():
    """``Session`` compares each own token's score with the dense mean after every call."""
    session = Session(make_manager(policy=diffkv_policy(2.0, 0.3, window=6)), group=4, spread=3.0)
    chunks_and_steps(session)
    kinds = tier_map(session.state, 2, session.manager.rows.length(2))
    assert {0, 1, 2} == set(np.unique(kinds).tolist())


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("counts", [(4, 1), (1, 1), (1, 12)])
def test_raw_attention_agrees(counts, poison):
    """The op for one raw tier gives what the general one gives, within bf16 arithmetic."""
    session = Session(make_manager(make_format(("BF16",), 64, 96), policy=UniformPolicy(), poison=poison))
    session.extend({1: 21, 2: 3}, scores=False)
    session.attach(3, [(session.share(1, 0, 21), 0, 13)])
    session.extend({2: 14, 3: 2}, scores=False)
    rows = [3, 2]
    start = session.grow(rows, list(counts))
    lens = torch.tensor(rows), torch.tensor(counts), torch.tensor(start)
    for layer in range(2):
        key, value = session.append(layer, rows, start)
        q = session.query(sum(counts)).bfloat16()
        out = raw_attention(session.state, layer, q, *lens, session.sm_scale)
        expected = extend_attention(session.state, layer, q, key, value, *lens, session.sm_scale)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_output_has_the_dtype_of_the_query():
    manager = make_manager(policy=UniformPolicy())
    begin_step(manager, [1], [4], [0])
    q, kv = torch.randn(4, 4, 64).bfloat16(), torch.randn(4, 2, 64).bfloat16()
    append(manager.state, 0, kv, kv, torch.full((4,), 1), torch.arange(4), torch.arange(4))
    lens = torch.tensor([1]), torch.tensor([4]), torch.tensor([0])
    assert extend_attention(manager.state, 0, q, kv, kv, *lens, 0.1).dtype == torch.bfloat16
