"""What is prepared for a pass's first layer serves the others, with their own tensors, and keeps none of these."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from sglang_diffkv.attention.wrappers import DecodeWrapper, ExtendWrapper
from sglang_diffkv.kernels.launch import Launch
from sglang_diffkv.kernels.rotate import reference
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation
from sglang_diffkv.kernels.rotate.triton import prepare_rotate
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.ops import Scaling
from sglang_diffkv.ops.launches import Launches, form_of
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.diffkv import DiffKVPolicy
from tests.kernels.library import Library
from tests.kernels.triton_helpers import BF16, DEVICE, close, make_format, make_manager
from tests.policies import diffkv_policy

LAYERS, HEADS, GROUP, DIM = 3, 2, 2, 64
SCALING = Scaling(0.1)
WINDOW, SCORED = diffkv_policy(1e9, 0.0, 6), diffkv_policy(1.0, 0.2, 6, observe_every=1)


def test_a_repeated_launch_takes_the_tensors_of_its_call() -> None:
    first, second = (torch.randn(5, 2, 64, device=DEVICE).to(BF16) for _ in range(2))
    again = prepare_rotate(first)
    assert close(again(first)[0], reference.rotate(first)[0]) < 5e-3
    assert close(again(second)[0], reference.rotate(second)[0]) < 5e-3
    kept = weakref.ref(second)
    del second
    gc.collect()
    assert kept() is None, "a layer's tensors end with it"


def test_later_launches_are_of_the_variant_that_the_first_was() -> None:
    """With a kernel as Triton has it: called by its constants once, and then by the variant that this gave."""
    launched = []

    class Variant:
        def __getitem__(self, grid):
            return lambda *args: launched.append((grid, args))

    class Kernel:
        arg_names = ("x", "size", "layer", "BLOCK", "WIDE")

        def __getitem__(self, grid):
            def first(*args, **constants):
                launched.append((grid, args, constants))
                return Variant()

            return first

    launch = Launch(Kernel(), (7,), (None, 12, None), {"WIDE": True, "BLOCK": 64, "num_warps": 4})
    launch(x="a", layer=0)
    launch(x="b", layer=1)
    launch.resize(3, 2)
    launch(x="c", layer=2)
    assert launched == [
        ((7, 1, 1), ("a", 12, 0), {"WIDE": True, "BLOCK": 64, "num_warps": 4}),
        ((7, 1, 1), ("b", 12, 1, 64, True)),
        ((3, 2, 1), ("c", 12, 2, 64, True)),
    ]


def test_repeated_launches_pass_addresses_and_keep_what_these_are_of() -> None:
    """Tensors of the GPU alone: of others the launcher asks itself."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    launched = []

    class Variant:
        def __getitem__(self, grid):
            return lambda *args: launched.append(args)

    class Kernel:
        arg_names = ("x", "table", "means", "layer")

        def __getitem__(self, grid):
            def first(*args, **constants):
                launched.append(args)
                return Variant()

            return first

    x, y, table = (torch.zeros(4).as_subclass(OnGpu) for _ in range(3))
    host, at = torch.zeros(4), table.data_ptr()
    launch = Launch(Kernel(), (1,), (None, table, None, None), {})
    kept = weakref.ref(table)
    del table
    launch(x=x, means=None, layer=0)
    launch(x=y, means=None, layer=1)
    launch(x=host, means=x, layer=2)
    assert launched[0][0] is x and launched[0][1].data_ptr() == at
    assert launched[1] == (y.data_ptr(), at, None, 1)
    assert launched[2][0] is host and launched[2][1:] == (at, x.data_ptr(), 2)
    launched.clear()
    gc.collect()
    assert kept() is not None, "its memory is still read"
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None, "a layer's tensors end with it"


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(8, 5, dtype=BF16)[:4, :4],  # strides
        torch.zeros(17, dtype=BF16)[1:].view(4, 4),  # alignment
        torch.zeros(4, 4),
        torch.zeros(2, 8, dtype=BF16),
        None,
    ],
)
def test_tensors_of_another_form_are_prepared_for(other: torch.Tensor | None) -> None:
    launches, made = Launches(), []

    def prepare() -> int:
        made.append(len(made))
        return made[-1]

    same = [torch.zeros(4, 4, dtype=BF16) for _ in range(2)]
    assert [launches.prepared("x", prepare, x) for x in (*same, other, same[0])] == [0, 0, 1, 2]
    assert form_of(other) != form_of(same[0])


def test_a_step_keeps_nothing_that_its_kernels_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs twice before a graph records it, and is dropped when the next is planned, while the graph writes on."""
    manager = make_manager(make_format("K8V4 K4V2", DIM), layers=1, heads=HEADS, policy=WINDOW)
    ops, written = TritonOps(manager.state, WINDOW, HEADS * GROUP, 400), []

    def prepare(*args, **kwargs):
        def finish(out, lse_out, layer, sink_logits):
            written.append([weakref.ref(lse_out), weakref.ref(out)])

        return lambda q, layer: None, finish

    monkeypatch.setattr("sglang_diffkv.ops.triton.prepare_decode", prepare)
    one = torch.ones(1, dtype=torch.int64, device=DEVICE)
    step, q = ops.decode_step(one, one), torch.zeros(1, HEADS * GROUP, DIM, device=DEVICE)
    for _ in range(2):
        assert ops.decode(0, q.to(BF16), step, Scaling(0.1)).shape == q.shape
    gc.collect()
    assert [x() for refs in written for x in refs] == [None] * 4


@pytest.mark.parametrize("few", [True, False])
def test_layers_of_a_short_pass_share_the_room_of_what_is_read_back(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it ends with the pass. Those of a long one take room for a layer each."""
    monkeypatch.setattr("sglang_diffkv.ops.read_back.FEW_TOKENS", 6 if few else 5)
    manager = make_manager(make_format("K8V4 K4V2", DIM), layers=LAYERS, heads=HEADS, policy=WINDOW)
    ops = TritonOps(manager.state, WINDOW, HEADS * GROUP, 400)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Seen(Library):
        def run(self, q, key, value, scaling, *, lse=True):
            seen.append((key, value))
            return super().run(q, key, value, scaling, lse=lse)

    ops.ragged = Seen(SCALING, natural=False)
    wrapper = ExtendWrapper(ops)
    row = torch.tensor([1], device=DEVICE)
    for start, count in ((0, 20), (20, 6)):
        seen.clear()
        manager.space.append(1, count)
        manager.rows.grow(1, count, in_prompt=True)
        manager.space.flush()
        wrapper.plan(row, torch.tensor([start], device=DEVICE), torch.tensor([count], device=DEVICE), [start], [count])
        wrapper.begin()
        for layer in range(LAYERS):
            q, key, value = torch.randn(count, HEADS * (GROUP + 2), DIM, device=DEVICE).to(BF16).split(
                [HEADS * GROUP, HEADS, HEADS], 1
            )  # fmt: skip
            wrapper.run(layer, q, key, value, SCALING)
    assert all(len(key) == 26 for key, _ in seen)
    places = {(key.data_ptr(), value.data_ptr()) for key, value in seen}
    assert len(seen) == LAYERS and len(places) == (1 if few else LAYERS)
    kept = weakref.ref(seen[0][0])
    seen.clear()
    wrapper.end()
    del q, key, value
    gc.collect()
    assert kept() is None, "a pass that ended holds memory"


@pytest.mark.parametrize(
    ("tiers", "policy", "rotation", "library"),
    [
        ("K8V4 K4V2", WINDOW, Rotation(True, True), True),
        ("K8V4 K4V2", SCORED, NO_ROTATION, False),
        pytest.param("K8V4 K4V2", WINDOW, Rotation(True, True), False, marks=pytest.mark.full),
        pytest.param("K8V4 K4V2", SCORED, NO_ROTATION, True, marks=pytest.mark.full),
        pytest.param("BF16", None, NO_ROTATION, True, marks=pytest.mark.full),
    ],
)
def test_layers_of_passes_match_references(
    tiers: str, policy: DiffKVPolicy | None, rotation: Rotation, library: bool
) -> None:
    """Prompts, a chunk behind each, and decode steps; one layer's tensors lie otherwise than the others'."""
    generator = torch.Generator().manual_seed(5)
    managers = [make_manager(make_format(tiers, DIM), layers=LAYERS, heads=HEADS, policy=policy) for _ in range(2)]
    ops = [TritonOps(managers[0].state, managers[0].policy, HEADS * GROUP, 400), managers[1].ops]
    if library:
        ops[0].ragged = Library(SCALING, natural=False)
    means = torch.randn(LAYERS, HEADS, DIM, generator=generator).to(DEVICE, BF16) if rotation.keys else None
    wrappers = [
        [kind(some, rotation=rotation, key_means=means) for kind in (ExtendWrapper, DecodeWrapper)]
        for manager, some in zip(managers, ops, strict=True)
    ]

    def tensors(count: int, layer: int) -> list[torch.Tensor]:
        """q, key and value, as a projection has them or, of the second layer, each by itself."""
        joint = torch.randn(count, HEADS * (GROUP + 2), DIM, generator=generator).to(DEVICE, BF16)
        parts = list(joint.split([HEADS * GROUP, HEADS, HEADS], 1))
        return [x.contiguous() for x in parts] if layer == 1 else parts

    rows = torch.tensor([2, 1], device=DEVICE)
    lengths = [0, 0]
    for counts in ([11, 14], [5, 1], [1, 1], [1, 1]):
        prompts = counts != [1, 1]
        given = [tensors(sum(counts), layer) for layer in range(LAYERS)]
        outs: list[list[torch.Tensor]] = []
        for manager, (extend, decode) in zip(managers, wrappers, strict=True):
            for row, count in zip(rows.tolist(), counts, strict=True):
                manager.space.append(row, count)
                manager.rows.grow(row, count, in_prompt=prompts)
            manager.space.flush()
            wrapper = extend if prompts else decode
            ends = torch.tensor([n + more for n, more in zip(lengths, counts, strict=True)], device=DEVICE)
            if prompts:
                before, new = (torch.tensor(x, device=DEVICE) for x in (lengths, counts))
                extend.plan(rows, before, new, lengths, counts)
            else:
                decode.plan(rows, ends)
            wrapper.begin()
            outs.append([wrapper.run(layer, *given[layer], SCALING) for layer in range(LAYERS)])
            if not prompts:
                decode.end()
            check_integrity(manager)
        for got, expected in zip(*outs, strict=True):
            assert close(got, expected) < 2e-2
        lengths = [n + more for n, more in zip(lengths, counts, strict=True)]
    mine, theirs = (manager.state for manager in managers)
    assert (mine.own_tokens[1:3] - theirs.own_tokens[1:3]).abs().max() <= 1  # scores near a threshold may differ
