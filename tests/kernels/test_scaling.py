"""Scales and logit caps of a model's layers: what is planned and compiled at start follows them."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import math
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.kernels.to_e4m3 import reference
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.ops import Scaling, flash, ragged
from sglang_diffkv.ops import triton as triton_ops
from sglang_diffkv.ops.base import Step, WholeRequests
from sglang_diffkv.ops.gpu import build_ops, choose_prefill
from sglang_diffkv.srt.models.scaling import layer_scalings
from sglang_diffkv.srt.startup.validation import check_layers
from tests.kernels.library import Library
from tests.kernels.triton_helpers import make_format
from tests.policies import diffkv_policy

CAPPED, PLAIN = Scaling(0.0625, 50.0), Scaling(0.125)


def model(*scalings: tuple[Any, Any], held: str = "layers") -> torch.nn.Module:
    """One with an attention layer of each scaling, in a module or, as Transformers models, in a dictionary."""
    layers = [
        RadixAttention(4, 64, scale, 2, layer_id=number, logit_cap=cap) for number, (scale, cap) in enumerate(scalings)
    ]
    made = torch.nn.Module()
    if held == "layers":
        made.layers = torch.nn.ModuleList(layers)
    else:
        made.attention_instances = dict(enumerate(layers))
    return made


@pytest.mark.parametrize("held", ["layers", "attention_instances"])
def test_of_a_model_s_layers(held):
    found = layer_scalings(model((0.125, 0.0), (0.0625, 50), (0.125, None), (1, 0), held=held))
    assert found == (PLAIN, CAPPED, Scaling(1.0))
    assert all(type(number) is float for scaling in found for number in scaling), "Triton compiles anew for an integer"


def test_layers_outside_modules_are_checked():
    chunked = model((0.125, 0.0), held="attention_instances")
    chunked.attention_instances[0].use_irope = True
    with pytest.raises(UnsupportedError, match="in chunks"):
        check_layers(chunked)


class Planned:
    """Stands for FlashInfer's wrapper, and keeps how it was made."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, *shape: Any, buffer: torch.Tensor):
        self.made.append({"scale": shape[6], "cap": shape[7]})


def build(monkeypatch, prefill, scalings, *, installed=True, dim=64, attention_spans=()):
    real = importlib.util.find_spec
    spec = SimpleNamespace() if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: spec if name == "flashinfer" else real(name, *a))
    monkeypatch.setattr(Planned, "made", [])
    monkeypatch.setattr(triton_ops, "RaggedPrefill", Planned)
    geometry = Geometry(
        make_format("K8V4 K4V2", dim),
        1,
        2,
        40,
        num_rows=4,
        num_segments=1,
        max_tokens=64,
        attention_spans=attention_spans,
    )
    state = PageState.of(geometry, device="cpu", dtype=torch.bfloat16)
    ops = build_ops(state, diffkv_policy(1.0, 0.0, 16), geometry, 4, prefill)
    choose_prefill(ops, state, prefill, scalings)
    return ops


@pytest.mark.parametrize("prefill", ["auto", "flashinfer"])
@pytest.mark.parametrize(("scalings", "planned"), [([CAPPED], CAPPED), ([PLAIN], PLAIN), ([], Scaling(64**-0.5))])
def test_flashinfer_gets_the_model_s(monkeypatch, prefill, scalings, planned):
    ops = build(monkeypatch, prefill, scalings)
    assert Planned.made == [{"scale": planned.scale, "cap": planned.cap}] and ops.ragged is not None


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_flashinfer_gets_the_kernels_and_the_memory_that_were_planned(monkeypatch, backend):
    """Its plan lies in the buffer too, before the split results, and neither is memory of its own."""
    made: list[Any] = []

    class Wrapper:
        def __init__(self, results: torch.Tensor, layout: str, *, backend: str):
            made.append((results, layout, backend))

        def reset_workspace_buffer(self, results: torch.Tensor, plans: torch.Tensor) -> None:
            made.append((results, plans))

    module = SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(ragged, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(ragged, "flashinfer_choice", lambda *model: backend)
    device = torch.device("cpu")
    size = ragged.workspace_bytes(4, 2, 64, device, backend)
    buffer = torch.empty(size + 5, dtype=torch.uint8)
    ragged.RaggedPrefill(4, 2, 64, 64, torch.bfloat16, device, 0.1, buffer=buffer)
    (results, layout, named), (again, plans) = made
    assert (layout, named) == ("NHD", backend) and again is results
    assert plans.data_ptr() == buffer.data_ptr() and plans.numel() == ragged.PLAN_BYTES
    assert results.data_ptr() == buffer.data_ptr() + plans.numel() and plans.numel() + results.numel() == size + 5
    assert (results.numel() == ragged.UNUSED_BYTES + 5) == (backend == "fa3")


OBSTACLES = [
    ({"scalings": [PLAIN, CAPPED]}, "this model's differ"),
    ({"scalings": [PLAIN], "installed": False}, "not installed"),
    ({"scalings": [PLAIN], "dim": 96}, "no kernel for head_dim 96"),
    ({"scalings": [PLAIN], "attention_spans": (5,)}, "all layers have a sliding window"),
]


@pytest.mark.parametrize(("case", "reason"), OBSTACLES)
def test_where_flashinfer_cannot_be(monkeypatch, caplog, case, reason):
    """Asked for it is refused; otherwise Triton takes its place, and the log says why."""
    with pytest.raises(UnsupportedError, match=f'"prefill": "flashinfer": .*{reason}.*set "prefill" to "triton"'):
        build(monkeypatch, "flashinfer", **case)
    with caplog.at_level(logging.INFO):
        ops = build(monkeypatch, "auto", **case)
    assert Planned.made == [] and ops.ragged is None
    assert reason in caplog.text and "by Triton" in caplog.text


class Flash:
    """Stands for ``flash_attn_varlen_func``: attention in plain PyTorch, with the log-sum-exp as it gives it."""

    def __init__(self):
        self.calls: list[dict[str, Any]] = []

    def __call__(self, q, k, v, ends, key_ends, longest, longest_key, **more):
        self.calls.append({"alone": q.dim() == 4, "longest": (longest, longest_key), **more})
        if q.dim() == 4:
            (q, k, v), ends, key_ends = (x.squeeze(0) for x in (q, k, v)), [0, q.shape[1]], [0, k.shape[1]]
        else:
            assert ends.dtype == key_ends.dtype == torch.int32
            ends, key_ends = ends.tolist(), key_ends.tolist()
        counts, keys = (tuple(b - a for a, b in itertools.pairwise(x)) for x in (ends, key_ends))
        assert (max(counts), max(keys)) == (longest, longest_key)
        scaling = Scaling(more["softmax_scale"])
        library, step = Library(scaling), SimpleNamespace(counts=counts, whole=SimpleNamespace(lens=keys), ends=None)
        library.plan(step)
        out, lse = library.run(q, k, v, scaling)
        norm = lse.t() * math.log(2)
        return (out.unsqueeze(0), norm.unsqueeze(0)) if self.calls[-1]["alone"] else (out, norm)


@pytest.mark.parametrize("prefixes", [[0], [9], [0, 0, 0], [5, 0, 31]])
def test_flash_attention_gets_a_pass_s_requests(monkeypatch, prefixes):
    """One request without a table of ends; of several those of queries and of all keys."""
    attend = Flash()
    monkeypatch.setattr(flash, "attention_function", lambda: attend)
    counts = [7, 1, 12][: len(prefixes)]
    generator = torch.Generator().manual_seed(len(prefixes))
    rows = torch.arange(1, 1 + len(counts))
    step = Step.extend(rows, torch.tensor(prefixes), torch.tensor(counts), prefixes, counts)
    lens = [a + b for a, b in zip(prefixes, counts)]
    if any(prefixes):
        step.whole = WholeRequests(rows, tuple(lens), 2)
    q = torch.randn(sum(counts), 4, 64, generator=generator).bfloat16()
    key, value = (torch.randn(sum(lens), 2, 64, generator=generator).bfloat16() for _ in range(2))
    mine, expected = flash.FlashPrefill(), Library(PLAIN)
    for library in (mine, expected):
        library.plan(step)
    out, lse = mine.run(q, key, value, PLAIN)
    known, norm = expected.run(q, key, value, PLAIN)
    assert torch.equal(out, known)
    torch.testing.assert_close(lse * mine.lse_unit, norm)
    assert mine.run(q, key, value, PLAIN, lse=False)[1] is None
    (call, _) = attend.calls
    assert call["alone"] == (len(counts) == 1) and call["causal"] and call["return_softmax_lse"]


@pytest.mark.parametrize(
    ("counts", "heads", "parts"),
    [([1], 8, 0), ([256], 8, 0), ([257], 8, 1), ([512], 4, 0), ([8192], 8, 1), ([24] * 8, 8, 0), ([24] * 9, 8, 1)],
)
def test_keys_are_split_where_queries_are_few(monkeypatch, counts, heads, parts):
    """At most half of 132 multiprocessors would have work. What is known of a pass is not of the next one."""
    asked = []

    def attend(q, k, v, *ends, num_splits, **more):
        asked.append(num_splits)
        return q, q.new_zeros(q.shape[:-1]).mT if q.dim() == 4 else q.new_zeros(q.shape[:-1]).t()

    monkeypatch.setattr(flash, "attention_function", lambda: attend)
    monkeypatch.setattr(flash, "processors_of", lambda device: 132)
    library = flash.FlashPrefill()
    for each in (counts, [8192], counts):
        step = Step.extend(torch.arange(len(each)), torch.zeros(len(each)), torch.tensor(each), [0] * len(each), each)
        library.plan(step)
        q, key = (torch.zeros(sum(each), n, 64, dtype=torch.bfloat16) for n in (4 * heads, heads))
        for _ in range(2):
            library.run(q, key, key, PLAIN)
    assert asked == [parts, parts, 1, 1, parts, parts]


def attend_in_any(q, k, v, ends, key_ends, longest, longest_key, **more):
    """``Flash`` for tensors in 8 bits too: its result is in 16, as FlashAttention-3's is, and log-sum-exps base e."""
    out, lse = Flash()(*(x.bfloat16() for x in (q, k, v)), ends, key_ends, longest, longest_key, **more)
    return out.bfloat16(), lse / math.log(2)


@pytest.mark.parametrize(
    ("counts", "prefixes", "converts"),
    [
        ([2900], [0], True), ([2897], [0], True), ([2896], [0], False), ([1000], [12000], True),
        ([511], [30000], False), ([520], [30000], True),
        ([2000] * 3, [0] * 3, True), ([2000] + [1] * 9, [4000] + [8000] * 9, False),
    ],
)  # fmt: skip
def test_passes_of_much_work_attend_in_8_bits(monkeypatch, counts, prefixes, converts):
    """Where they were asked to. Keys that few queries attend to would take longer to convert than they save."""
    asked = []

    def attend(q, k, v, *ends, num_splits, **more):
        asked.append(({x.dtype for x in (q, k, v)}, num_splits))
        return q.bfloat16(), q.new_zeros(q.shape[:-1], dtype=torch.float32).mT

    monkeypatch.setattr(flash, "attention_function", lambda: attend)
    monkeypatch.setattr(flash, "to_e4m3", reference.to_e4m3)
    step = Step.extend(
        torch.arange(len(counts)), torch.tensor(prefixes), torch.tensor(counts), prefixes, counts
    )  # fmt: skip
    lens = [a + b for a, b in zip(prefixes, counts)]
    step.whole = WholeRequests(torch.arange(len(counts)), tuple(lens), 2) if any(prefixes) else None
    q, key = (torch.zeros(sum(n), 1, 8, dtype=torch.bfloat16) for n in (counts, lens))
    for eight_bits in (True, False):
        library = flash.FlashPrefill(eight_bits=eight_bits)
        library.plan(step)
        assert library.run(q, key, key, PLAIN)[0].dtype == torch.bfloat16
    e4m3 = {reference.E4M3} if converts else {torch.bfloat16}
    assert [dtypes for dtypes, _ in asked] == [e4m3, {torch.bfloat16}]
    assert asked[0][1] == 1 or not converts


def test_attention_in_8_bits_is_tried_at_the_start(monkeypatch):
    """It is refused where it fails, and where it gives something else; else nothing is left of the trial."""
    monkeypatch.setattr(flash, "to_e4m3", reference.to_e4m3)

    def check(attend):
        monkeypatch.setattr(flash, "attention_function", lambda: attend)
        library = flash.FlashPrefill(eight_bits=True)
        library.check(8, 2, 64, torch.device("cpu"))
        return library

    def fails(q, *rest, **more):
        if q.dtype == reference.E4M3:
            raise RuntimeError("no kernel for this type")
        return attend_in_any(q, *rest, **more)

    def other(q, k, v, *rest, **more):
        wrong = v.float().neg().to(v.dtype) if v.dtype == reference.E4M3 else v
        return attend_in_any(q, k, wrong, *rest, **more)

    def breaks(*rest, **more):
        raise RuntimeError("no image for this GPU")

    for attend, why in (
        (fails, 'not attend in 8 bits; set it to "fa3": no kernel for this type'),
        (other, "not attend in 8 bits.*results differ by 2.00 of their size"),
        (breaks, 'not attend here; set it to "auto": no image for this GPU'),
    ):
        with pytest.raises(UnsupportedError, match=f'"prefill": "fa3_fp8": .*{why}'):
            check(attend)
    library = check(attend_in_any)
    library.plan(Step.extend(torch.arange(1), torch.zeros(1), torch.ones(1), [0], [1]))
    q = torch.randn(1, 8, 64).bfloat16()
    assert torch.equal(library.run(q, q[:, :2], q[:, :2], PLAIN)[0][:, :4], q[:, :1].expand(-1, 4, -1))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({}, ""),
        ({"scalings": [PLAIN, Scaling(1.0)]}, ""),
        ({"scalings": [PLAIN, CAPPED]}, "was not tried with a logit cap"),
        ({"dim": 96}, "was not tried with head_dim 96"),
        ({"dtype": torch.float16}, "was not tried with float16"),
        ({"capability": (8, 0)}, "needs a Hopper GPU"),
        ({"there": False}, "sgl_kernel has no FlashAttention-3"),
        ({"attention_spans": (5,)}, "all layers have a sliding window"),
    ],
)
def test_where_flash_attention_can_be(monkeypatch, caplog, case, reason):
    """Asked for it is refused where it cannot; ``auto`` takes it wherever it can, else what comes behind it."""
    given = {"dim": 64, "dtype": torch.bfloat16, "scalings": [PLAIN], "attention_spans": (), **case}
    there = case.get("there", True)
    monkeypatch.setattr(flash, "capability_of", lambda device: case.get("capability", (9, 0)))
    monkeypatch.setattr(flash, "attention_function", lambda: print if there else None)

    def build(prefill):
        geometry = Geometry(
            make_format("K8V4 K4V2", given["dim"]), 1, 2, 40, num_rows=4, num_segments=1, max_tokens=64,
            attention_spans=given["attention_spans"],
        )  # fmt: skip
        state = PageState.of(geometry, device="cpu", dtype=given["dtype"])
        ops = build_ops(state, diffkv_policy(1.0, 0.0, 16), geometry, 4, prefill)
        choose_prefill(ops, state, prefill, given["scalings"])
        return ops

    with caplog.at_level(logging.INFO):
        ops = build("auto")
    assert isinstance(ops.ragged, flash.FlashPrefill) == (not reason)
    assert ("attend by FlashAttention-3" in caplog.text) == (not reason) and reason in caplog.text
    if reason:
        for asked in ("fa3", "fa3_fp8"):
            with pytest.raises(UnsupportedError, match=f'"prefill": "{asked}": .*{reason}.*set "prefill" to "triton"'):
                build(asked)
        return
    assert isinstance(build("fa3").ragged, flash.FlashPrefill) and not ops.prefill_bytes
    assert not ops.ragged.serves(CAPPED) and ops.ragged.serves(Scaling(3.0))
