"""Chains and trees of drafts: they attend as decode would, and what is accepted is stored as decode steps store it."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch

from sglang_diffkv.attention.draft_trees import TreeLinks, ancestors_of
from sglang_diffkv.attention.verification import VerifyWrapper
from sglang_diffkv.attention.wrappers import DecodeWrapper
from sglang_diffkv.kernels.rotate.fitted import NOT_FITTED, FittedTransform
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation
from sglang_diffkv.kernels.table import layer_table, max_entries
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.noise_shaping import NoiseShaping
from sglang_diffkv.ops import ReferenceOps, Scaling
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.uniform import UniformPolicy
from tests.kernels.triton_helpers import (
    BF16,
    DEVICE,
    FOUR,
    add_prompt,
    clone_state,
    close,
    make_format,
    make_manager,
    vectors,
)
from tests.policies import diffkv_policy

GROUP, SCALING, DRAFTS = 2, Scaling(0.1), 3
NODES = 7
"""Drafts of a tree, of which a path has up to ``DRAFTS``."""
RAW = UniformPolicy()


def make(
    tiers: str, kind: str, policy: Policy | None = None, *, rotation=NO_ROTATION, means=None, fitted=NOT_FITTED,
    longest_path=0,
):  # fmt: skip
    """A manager with three rows, and its wrappers of decode and of verification."""
    layers, heads = (1, 1) if kind == "triton" else (2, 2)
    manager = make_manager(make_format(tiers), layers=layers, heads=heads, window=6, policy=policy)
    state, policy = manager.state, manager.policy
    ops = (
        TritonOps(state, policy, GROUP * heads, 200)
        if kind == "triton"
        else ReferenceOps(state, policy, not policy.compresses)
    )
    generator = torch.Generator().manual_seed(3)
    for row, length in ((1, 20), (2, 9), (3, 17)):
        add_prompt(manager, row, length, generator)
    more = {"rotation": rotation, "key_means": means, "fitted": fitted}
    verify = VerifyWrapper(ops, q_heads=GROUP * heads, longest_path=longest_path, **more)
    return manager, DecodeWrapper(ops, **more), verify


def drawn(manager, generator, drafts=DRAFTS):
    """Queries, keys and values of a chain or a tree for each of three requests, by layer."""
    state, layers = manager.state, []
    for _ in range(state.num_layers):
        q = torch.randn(3 * drafts, state.num_heads * GROUP, 64, generator=generator).to(DEVICE, BF16)
        layers.append((q, *vectors(state, 3 * drafts, generator)))
    return layers


def tree(draw, count, deepest):
    """The parent of each draft of a random tree, below which paths of ``deepest`` drafts end; -1 for the root."""
    depth, parents = [1], [-1]
    for node in range(1, count):
        parents.append(node - 1 if node < deepest else draw.choice([x for x in range(node) if depth[x] < deepest]))
        depth.append(depth[parents[-1]] + 1)
    return parents


def path_to(parents, node):
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


def links_of(trees):
    """As samplers get them: from each draft to its first child, and to the next one of the same parent."""
    found = torch.full((2, len(trees), len(trees[0])), -1, device=DEVICE)
    for number, parents in enumerate(trees):
        last = {}
        for node, parent in enumerate(parents):
            if parent in last:
                found[1, number, last[parent]] = node
            elif parent >= 0:
                found[0, number, parent] = node
            last[parent] = node
    return TreeLinks(*found)


def room(manager, rows, count):
    for row in rows:
        manager.space.append(row, count)
    manager.space.flush()


def check_same(drafted, plain, *, but=""):
    """All that the device holds is equal bit for bit, ``but`` one field, and scores nearly: a chain's tokens saw each
    other as they were, where decode steps see them quantised. From then on they are the same."""
    for mine, theirs in scores_of(drafted, plain):
        held = ~theirs.isnan()
        assert torch.allclose(mine[held], theirs[held], rtol=0.15, atol=2e-3), (mine - theirs).abs().max()
        mine.copy_(theirs)
    for field in fields(plain.state):
        mine, theirs = getattr(drafted.state, field.name), getattr(plain.state, field.name)
        if isinstance(mine, torch.Tensor) and field.name != but:
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), field.name


def scores_of(*managers):
    """Of all pages of rows 1 to 3 that have scores, those of each manager, which hold the same pages."""
    state, rows = managers[0].state, torch.tensor([1, 2, 3], device=DEVICE)
    for tier, view in enumerate(state.tiers):
        for layer in range(state.num_layers):
            if view.scores is None:
                continue
            page, lo, hi = layer_table(state, rows, tier, layer, max_entries(state, rows, tier, layer))
            for number in page[lo < hi].tolist():
                yield tuple(manager.state.tiers[tier].scores[number] for manager in managers)


def decode_steps(manager, decode, rows, lengths, accepted, layers):
    """Plain decode of the accepted tokens; outputs [layer][request, number]."""
    outs = {}
    order = sorted(range(len(rows)), key=lambda i: -accepted[i])  # pages are taken in a batch's order
    for number in range(max(accepted)):
        goes = [i for i in order if accepted[i] > number]
        ids = torch.tensor([rows[i] for i in goes], device=DEVICE)
        decode.plan(ids, torch.tensor([lengths[i] + number + 1 for i in goes], device=DEVICE))
        decode.begin()
        for layer, tensors in enumerate(layers):
            at = torch.tensor([i * DRAFTS + number for i in goes], device=DEVICE)
            out = decode.run(layer, *(x[at] for x in tensors), SCALING).clone()
            outs.update({(layer, i, number): out[j] for j, i in enumerate(goes)})
        decode.end()
    return outs


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize(
    ("tiers", "policy", "rotation"),
    [
        pytest.param("K8V4 K4V2", diffkv_policy(1.0, 0.0, 6), Rotation(True, True), id="two"),
        pytest.param("K8V4 K4V2", diffkv_policy(1.0, 0.2, 6), NO_ROTATION, id="pruned", marks=pytest.mark.full),
        pytest.param(FOUR, None, NO_ROTATION, id="four", marks=pytest.mark.full),
        pytest.param("BF16", RAW, NO_ROTATION, id="raw"),
    ],
)
def test_what_is_accepted_is_what_decode_steps_store(kind, tiers, policy, rotation):
    shape = (1, 1, 64) if kind == "triton" else (2, 2, 64)
    means = torch.randn(shape, generator=torch.Generator().manual_seed(8)) if rotation.values else None
    check_commits(kind, tiers, policy, rotation=rotation, means=means)


def test_what_is_stored_behind_fitted_matrices():
    drawn_matrices = torch.randn(2, 2, 2, 64, 64, generator=torch.Generator().manual_seed(9))
    keys, values = torch.linalg.qr(drawn_matrices).Q.to(DEVICE, BF16)
    check_commits("reference", "K8V4 K4V2", diffkv_policy(1.0, 0.0, 6), fitted=FittedTransform(keys, values))
    stretched = torch.diag(torch.linspace(0.5, 3, 64)).expand(2, 2, 64, 64)
    shaped = NoiseShaping(stretched, stretched.flip(2, 3)).transform(BF16, DEVICE, Rotation(True, True))
    check_commits("reference", "K8V4 K4V2", diffkv_policy(1.0, 0.0, 6), fitted=shaped)
    common = 100 * torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(8))
    check_commits("reference", "BF16", RAW, common, fitted=shaped)
    check_commits("reference", "K8V4 K4V2", diffkv_policy(1.0, 0.0, 6), common, fitted=shaped)


def check_committed(plain, drafted, lengths, got, outs, *, raw, exact):
    """Both managers hold the same of rows that have these ``lengths`` now, and attention was that of decode steps.

    ``got``: [layer][request * DRAFTS + number]. ``outs``: by (layer, request, number). ``exact``: as where nothing is
    rounded otherwise.
    """
    for manager in (plain, drafted):
        for row, length in lengths.items():
            manager.rows.accepted(row, length)
        check_integrity(manager)
    check_same(drafted, plain)
    bound = 2e-2 if raw else 0.25  # decode reads what it has just quantised
    for (layer, request, number), out in outs.items():
        found = got[layer][request * DRAFTS + number]
        assert close(found, out) < bound
        assert torch.equal(found, out) or not (raw and exact)


def check_commits(kind, tiers, policy, common=None, **form):
    """``common``: [L, H, 64], what the drafts' keys have in common, which comes off."""
    if common is not None:
        form["means"] = common
    plain, decode, _ = make(tiers, kind, policy, **form)
    drafted, _, verify = make(tiers, kind, policy, **form)
    rows, generator = [2, 3, 1], torch.Generator().manual_seed(5)
    rounds = [[2, 1, 3], [3, 3, 3], [1, 3, 2], [1, 1, 1]]
    for accepted in rounds if kind == "reference" else rounds[:2]:
        layers = drawn(plain, generator)
        if common is not None:
            layers = [(q, key + of_layer.to(BF16), v) for (q, key, v), of_layer in zip(layers, common, strict=True)]
        lengths = [plain.rows.length(row) for row in rows]
        for manager in (plain, drafted):
            room(manager, rows, DRAFTS)
        outs = decode_steps(plain, decode, rows, lengths, accepted, layers)
        ids, stored = torch.tensor(rows, device=DEVICE), torch.tensor(lengths, device=DEVICE)
        verify.plan(ids, stored, DRAFTS)
        verify.begin()
        before = drafted.state.pages.clone()
        got = [verify.run(layer, *tensors, SCALING) for layer, tensors in enumerate(layers)]
        assert torch.equal(before.view(torch.int16), drafted.state.pages.view(torch.int16))
        verify.commit(torch.tensor(accepted, device=DEVICE))
        lengths = dict(zip(rows, map(sum, zip(lengths, accepted, strict=True)), strict=True))
        check_committed(plain, drafted, lengths, got, outs, raw=policy is RAW, exact=kind == "reference")


@pytest.mark.parametrize("count", [1, 2, NODES, 64])
def test_a_draft_sees_itself_and_what_it_continues(count):
    draw = random.Random(count)
    trees = [tree(draw, count, 1 + count // 2), tree(draw, count, count), tree(draw, count, min(count, 2))]
    bits = ancestors_of(links_of(trees)).tolist()
    for number, parents in enumerate(trees):
        for node in range(count):
            assert [j for j in range(count) if bits[number][node] >> j & 1] == path_to(parents, node)


def test_a_draft_that_no_link_leads_to_sees_itself_alone():
    links = links_of([tree(random.Random(1), NODES, 3)])
    for links_of_a_kind in links:
        links_of_a_kind.fill_(-1)
    assert ancestors_of(links).tolist() == [[1 << node for node in range(NODES)]]


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize(
    ("tiers", "policy", "rotation"),
    [
        pytest.param("K8V4 K4V2", diffkv_policy(1.0, 0.0, 6), Rotation(True, True), id="two"),
        pytest.param("K8V4 K4V2", diffkv_policy(1.0, 0.2, 6), NO_ROTATION, id="pruned", marks=pytest.mark.full),
        pytest.param("BF16", RAW, NO_ROTATION, id="raw"),
    ],
)
def test_the_accepted_path_of_a_tree_is_what_decode_steps_store(kind, tiers, policy, rotation):
    """As if its drafts had been a chain, whatever else is in the tree."""
    plain, decode, _ = make(tiers, kind, policy, rotation=rotation)
    drafted, _, verify = make(tiers, kind, policy, rotation=rotation, longest_path=DRAFTS)
    rows, generator, draw = [2, 3, 1], torch.Generator().manual_seed(5), random.Random(6)
    rounds = [[2, 1, 3], [3, 3, 3], [1, 3, 2]]
    for accepted in rounds if kind == "reference" else rounds[:1]:
        trees = [tree(draw, NODES, DRAFTS) for _ in rows]
        depths = [[len(path_to(x, node)) for node in range(NODES)] for x in trees]
        ends = [
            draw.choice([n for n in range(NODES) if x[n] == count])
            for x, count in zip(depths, accepted, strict=True)
        ]  # fmt: skip
        paths = torch.full((3, DRAFTS), -1, dtype=torch.int32, device=DEVICE)
        for number, (parents, end) in enumerate(zip(trees, ends, strict=True)):
            found = path_to(parents, end)
            paths[number, : len(found)] = number * NODES + torch.tensor(found)
        layers = drawn(plain, generator, NODES)
        chosen = paths.clamp(min=0).flatten()
        chains = [[x[chosen] for x in tensors] for tensors in layers]
        lengths = [plain.rows.length(row) for row in rows]
        for manager in (plain, drafted):
            room(manager, rows, DRAFTS)
        outs = decode_steps(plain, decode, rows, lengths, accepted, chains)
        ids, stored = torch.tensor(rows, device=DEVICE), torch.tensor(lengths, device=DEVICE)
        verify.plan(ids, stored, NODES, links_of(trees))
        verify.begin()
        got = [verify.run(layer, *tensors, SCALING)[chosen] for layer, tensors in enumerate(layers)]
        verify.commit(torch.tensor(accepted, device=DEVICE), path=paths)
        lengths = dict(zip(rows, map(sum, zip(lengths, accepted, strict=True)), strict=True))
        check_committed(plain, drafted, lengths, got, outs, raw=policy is RAW, exact=kind == "reference")


@pytest.mark.parametrize(("tiers", "count"), [("K8V4 K4V2", NODES), ("BF16", 64)])
def test_kernels_verify_trees_as_the_reference(tiers, count):
    """Also where several programs share a tree's queries, and the largest of trees."""
    manager, _, verify = make(tiers, "triton", longest_path=count)
    reference = VerifyWrapper(ReferenceOps(manager.state, manager.policy), q_heads=GROUP, longest_path=count)
    draw, rows, lengths = random.Random(count), [1, 3, 2], [20, 17, 9]
    links = links_of([tree(draw, count, count), tree(draw, count, 3), tree(draw, count, 2)])
    ((q, key, value),) = drawn(manager, torch.Generator().manual_seed(6), count)
    outs = []
    for wrapper in (verify, reference):
        wrapper.plan(torch.tensor(rows, device=DEVICE), torch.tensor(lengths, device=DEVICE), count, links)
        wrapper.begin()
        outs.append(wrapper.run(0, q, key, value, SCALING))
    assert not outs[1].isnan().any() and close(*outs) < 1e-2
    chains = VerifyWrapper(ReferenceOps(manager.state, manager.policy), q_heads=GROUP)
    chains.plan(torch.tensor(rows, device=DEVICE), torch.tensor(lengths, device=DEVICE), count)
    chains.begin()
    assert close(chains.run(0, q, key, value, SCALING), outs[1]) > 0.1, "they would see more"


@pytest.mark.parametrize(("tiers", "splits"), [("K8V4 K4V2", 2), ("BF16", 16)])
def test_kernels_verify_as_the_reference(tiers, splits, monkeypatch):
    """Also where programs that share a head's pages have several each, or none."""
    monkeypatch.setattr("sglang_diffkv.kernels.extend_attention.triton.MOST_SPLITS", splits)
    manager, _, verify = make(tiers, "triton")
    reference = VerifyWrapper(ReferenceOps(manager.state, manager.policy), q_heads=GROUP)
    layers = drawn(manager, torch.Generator().manual_seed(6))
    for rows, lengths, drafts in (([1, 2, 3], [20, 9, 17], DRAFTS), ([3, 1, 1], [17, 12, 15], 1)):
        for wrapper in (verify, reference):
            wrapper.plan(torch.tensor(rows, device=DEVICE), torch.tensor(lengths, device=DEVICE), drafts)
            wrapper.begin()
        for layer, tensors in enumerate(layers):
            some = [x[: 3 * drafts] for x in tensors]
            got, expected = (wrapper.run(layer, *some, SCALING) for wrapper in (verify, reference))
            assert not expected.isnan().any() and close(got, expected) < 1e-2


@pytest.mark.parametrize(
    ("tiers", "policy", "nodes"),
    [
        pytest.param("K8V4 K4V2", diffkv_policy(1.0, 0.2, 6), DRAFTS, id="two", marks=pytest.mark.full),
        pytest.param("BF16", RAW, DRAFTS, id="raw"),
        pytest.param("BF16", RAW, NODES, id="trees"),
    ],
)
def test_what_a_graph_would_replay_reads_what_its_tensors_hold_then(tiers, policy, nodes):
    """A pass is planned and its commit recorded on padding alone, as for graphs. Launched again over other
    rows, lengths and trees in the same tensors, and fewer of them than there is room for, they verify and store
    those."""
    form = {"longest_path": 0 if nodes == DRAFTS else DRAFTS}
    plain, decode, _ = make(tiers, "triton", policy)
    drafted, _, verify = make(tiers, "triton", policy, **form)
    size, generator, recorded = 4, torch.Generator().manual_seed(9), []
    ids, stored = (
        torch.zeros(size, dtype=torch.int64, device=DEVICE),
        torch.ones(size, dtype=torch.int64, device=DEVICE),
    )
    before = clone_state(drafted.state)
    verify.prepare_graphs(size, nodes)
    verify.plan(ids, stored, nodes)

    def launch(layers):
        verify.begin()
        padded = [[torch.cat([x, x.new_zeros(nodes, *x.shape[1:])]) for x in tensors] for tensors in layers]
        return [verify.run(layer, *tensors, SCALING) for layer, tensors in enumerate(padded)]

    def recorder(launches):
        launches()
        recorded.append(launches)
        return lambda: recorded[0]()

    launch(drawn(drafted, generator, nodes))
    verify.record(size, nodes, recorder)
    for name in ("pages", "entries", "own_tokens", "write_slot", "hole", "refcount"):
        mine, theirs = (getattr(x, name).view(torch.uint8) for x in (drafted.state, before))
        assert torch.equal(mine, theirs), f"padding changed {name}"
    rows, lengths, accepted = [2, 3, 1], [9, 17, 20], [2, 1, 3]
    layers = drawn(plain, generator, nodes)
    trees = [tree(random.Random(number), nodes, DRAFTS) for number in range(3)]  # chains where there is no other
    places = torch.tensor([path_to(parents, DRAFTS - 1) for parents in trees], device=DEVICE)
    places += nodes * torch.arange(3, device=DEVICE).unsqueeze(1)
    chosen = places.flatten()
    for manager in (plain, drafted):
        room(manager, rows, DRAFTS)
    outs = decode_steps(plain, decode, rows, lengths, accepted, [[x[chosen] for x in tensors] for tensors in layers])
    ids[:3], stored[:3] = torch.tensor(rows), torch.tensor(lengths)
    more = {} if nodes == DRAFTS else {"path": places}
    verify.replayed(size, nodes, links_of(trees) if more else None)
    got = [x[chosen] for x in launch(layers)]
    verify.replayed(size, nodes)
    verify.commit(torch.tensor(accepted, device=DEVICE), **more)
    assert len(recorded) == 1
    for manager in (plain, drafted):
        for row, length, count in zip(rows, lengths, accepted, strict=True):
            manager.rows.accepted(row, length + count)
        check_integrity(manager)
    check_same(drafted, plain, but="fault")
    for (layer, request, number), out in outs.items():
        assert close(got[layer][request * DRAFTS + number], out) < (2e-2 if policy is RAW else 0.25)


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_nothing_is_stored_of_a_request_that_left_before_the_pass(kind):
    """Its row is released between the plan and the launch; those of the others get what they would get alone."""
    plain, decode, _ = make("K8V4 K4V2", kind)
    drafted, _, verify = make("K8V4 K4V2", kind)
    layers = drawn(plain, torch.Generator().manual_seed(7))
    rows, lengths, accepted = [2, 3, 1], [9, 17, 20], [2, 0, 3]
    for manager in (plain, drafted):
        room(manager, rows, DRAFTS)
        manager.release(3)
        manager.space.flush()
    decode_steps(plain, decode, rows, lengths, accepted, layers)
    verify.plan(torch.tensor(rows, device=DEVICE), torch.tensor(lengths, device=DEVICE), DRAFTS)
    verify.begin()
    for layer, tensors in enumerate(layers):
        verify.run(layer, *tensors, SCALING)
    verify.commit(torch.tensor([2, 3, 3], device=DEVICE), left=[1])
    for manager in (plain, drafted):
        for row, length, count in ((2, 9, 2), (1, 20, 3)):
            manager.rows.accepted(row, length + count)
        check_integrity(manager)
    check_same(drafted, plain, but="fault")
