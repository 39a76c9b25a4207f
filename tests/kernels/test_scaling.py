"""Scales and logit caps of a model's layers: what is planned and compiled at start follows them."""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.ops import Scaling, ragged
from sglang_diffkv.ops import triton as triton_ops
from sglang_diffkv.ops.gpu import build_ops, choose_prefill
from sglang_diffkv.srt.models.scaling import layer_scalings
from sglang_diffkv.srt.startup.validation import check_layers
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
