"""Matrices that a server fits to its model itself: when, of what, where they are kept, and what it says if there are
none. Texts, folders and ranks are as of key means (``test_own_means.py``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_diffkv.attention.whole import Sight
from sglang_diffkv.config import CACHE_ENV
from sglang_diffkv.key_means import SINKS
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.noise_shaping import NoiseShaping, output_products, read_noise_shaping, write_noise_shaping
from sglang_diffkv.srt.models.outputs import products_behind_attention
from sglang_diffkv.srt.startup import own_shaping
from sglang_diffkv.srt.startup.reading_pass import Seen
from sglang_diffkv.srt.versions import compat
from tests.servers.test_own_means import DIM, HEADS, LAYERS, runner

GROUP, VALUE_DIM = 2, 16


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.setattr(own_shaping, "_found", None)
    monkeypatch.setattr(compat, "resolved", lambda args: args)
    return tmp_path / "cache"


def server(ranks: Ranks | None = None, **args: Any) -> Any:
    found = runner(ranks, **args)
    found.model, found.device = object(), "cpu"
    found.token_to_kv_pool.manager.state.fmt = SimpleNamespace(head_dim=DIM, v_head_dim=VALUE_DIM)
    return found


def layers(tokens: int, seen: Seen, *, keys: float = 1.0) -> None:
    """What a model of random queries, keys and values tells."""
    generator = torch.Generator().manual_seed(3)
    for layer in range(LAYERS):
        q = torch.randn(tokens, HEADS * GROUP, DIM, generator=generator) * torch.linspace(1, 4, DIM)
        key, value = (torch.randn(tokens, HEADS, dim, generator=generator) for dim in (DIM, VALUE_DIM))
        seen(layer, q, key * keys, value, 0.1, Sight())


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each pass that was run."""
    found: list[int] = []

    def read(_: Any, ids: list[int], seen: Seen) -> None:
        found.append(len(ids))
        layers(len(ids), seen)

    monkeypatch.setattr(own_shaping, "read_vectors", read)
    products = {x: torch.eye(VALUE_DIM).double().expand(HEADS, -1, -1) for x in range(LAYERS)}
    monkeypatch.setattr(own_shaping, "products_behind_attention", lambda model, dtype: products)
    return found


def test_the_first_start_fits_and_later_ones_read(
    passes: list[int], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    shaping = own_shaping.find(server(), None)
    assert shaping is not None and shaping.values is not None and passes == [512]
    sizes = shaping.keys.diagonal(dim1=2, dim2=3)
    assert (sizes[..., -1] > 1.5 * sizes[..., 0]).all(), "queries look most at the last element"
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    first, name = own_shaping.report(), own_shaping.digest()
    assert first["found"] and first["values"] and first["tokens"] == 512 - SINKS and first["file"] == str(file) and name
    assert "fitted in" in caplog.text and str(file) in caplog.text
    again = own_shaping.find(server(), None)
    assert again is not None and torch.equal(again.keys, shaping.keys) and len(passes) == 1
    assert own_shaping.digest() == name and "seconds" not in own_shaping.report()
    file.write_bytes(file.read_bytes()[:-8])
    again = own_shaping.find(server(), None)
    assert again is not None and torch.equal(again.keys, shaping.keys) and len(passes) == 2
    assert (
        "fitted again" in caplog.text
        and read_noise_shaping(str(file), LAYERS, HEADS, DIM, VALUE_DIM).values is not None
    )
    own_shaping.find(server(Ranks(2, 1)), None)
    assert len(passes) == 3 and len(list(folder.iterdir())) == 2, "another rank's are others"


@pytest.mark.parametrize("kept", ["zeros", "factor", "singular"])
def test_damaged_matrices_are_fitted_again(
    kept: str, passes: list[int], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files of the right form, whose numbers are none that a fit gives."""
    shaping = own_shaping.find(server(), None)
    assert shaping is not None
    (file,), keys = folder.iterdir(), shaping.keys
    bad = {"zeros": keys * 0, "factor": keys * 1e3, "singular": keys.clone()}[kept]
    bad[1, 0] = torch.ones(DIM, DIM) if kept == "singular" else bad[1, 0]
    write_noise_shaping(file, NoiseShaping(bad, shaping.values), {})
    again = own_shaping.find(server(), None)
    assert again is not None and torch.equal(again.keys, keys) and len(passes) == 2
    assert "kept noise shaping is fitted again" in caplog.text
    assert torch.equal(read_noise_shaping(str(file), LAYERS, HEADS, DIM, VALUE_DIM).keys, keys), "and kept"


def test_values_are_left_where_the_weights_behind_attention_are_not_found(
    passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_shaping, "products_behind_attention", lambda model, dtype: {})
    shaping = own_shaping.find(server(), None)
    assert shaping is not None and shaping.values is None and own_shaping.report()["values"] is False
    assert "for keys alone" in own_shaping.report()["how"]


def projected(weight: torch.Tensor, apply: Callable[..., torch.Tensor] | None = None) -> torch.nn.Module:
    """A model of two layers of attention, each beside the projection of what it gives, as SGLang builds them."""
    layers = []
    for number in range(2):
        attention, projection = RadixAttention.__new__(RadixAttention), RowParallelLinear.__new__(RowParallelLinear)
        for module in (attention, projection):
            torch.nn.Module.__init__(module)
        attention.layer_id, attention.v_head_dim = number, VALUE_DIM
        attention.tp_q_head_num, attention.tp_v_head_num = HEADS * GROUP, HEADS
        projection.input_size_per_partition = HEADS * GROUP * VALUE_DIM
        if apply is None or number == 0:
            projection.weight = torch.nn.Parameter(weight)
        method = SimpleNamespace(apply=lambda layer, x, bias: x @ layer.weight.T)
        projection.quant_method = method if apply is None or number == 0 else SimpleNamespace(apply=apply)
        layers.append(torch.nn.ModuleList([attention, projection]))
    return torch.nn.ModuleList(layers)


def test_projections_that_cannot_be_asked_are_not_found(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.randn(10, HEADS * GROUP * VALUE_DIM, generator=torch.Generator().manual_seed(1))
    expected = output_products(weight, HEADS, VALUE_DIM)
    found = products_behind_attention(projected(weight), torch.float32)
    assert sorted(found) == [0, 1] and all(torch.allclose(x, expected) for x in found.values())
    with_none = products_behind_attention(projected(weight, lambda layer, x, bias: x), torch.float32)
    assert sorted(with_none) == [0] and "StopIteration" in caplog.text, "it has no parameters"
    broken = projected(weight)
    broken[0][1].weight.data[3, 4] = float("nan")
    assert products_behind_attention(broken, torch.float32) == {} and "layer 0 cannot be read" in caplog.text
    assert "not finite" in caplog.text


@pytest.mark.parametrize("other", [0, 1])
def test_ranks_shape_values_together_or_not(other: int, passes: list[int]) -> None:
    """``other``: whether another rank found no weights behind attention."""
    told = [0, 1, other, 0]  # cannot read, has no file, has no values, has bad matrices

    def largest(numbers: np.ndarray) -> np.ndarray:
        return np.maximum(numbers, told.pop(0)) if len(numbers) == 1 else numbers

    shaping = own_shaping.find(server(Ranks(2, 0, largest)), None)
    assert shaping is not None and (shaping.values is None) == bool(other) and not told
    assert ("for keys alone" in own_shaping.report()["how"]) == bool(other)


def test_weights_of_no_use_leave_values_alone(passes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where LAPACK finds no eigenvectors."""
    eigh = torch.linalg.eigh

    def fails(moment: torch.Tensor) -> Any:
        if moment.shape[-1] == VALUE_DIM:
            raise torch.linalg.LinAlgError("did not converge")
        return eigh(moment)

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    shaping = own_shaping.find(server(), None)
    assert shaping is not None and shaping.values is None and "for keys alone" in own_shaping.report()["how"]


@pytest.mark.parametrize("full", [False, True])
def test_the_device_gets_back_what_the_fit_took(full: bool, passes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the products, or where these do not fit."""
    order = []

    def products(model: Any, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        order.append("products")
        if full:
            raise torch.OutOfMemoryError("full")
        return {}

    monkeypatch.setattr(own_shaping, "products_behind_attention", products)
    monkeypatch.setattr(own_shaping, "give_back", lambda runner: order.append("given back"))
    assert (own_shaping.find(server(), None) is None) == full and order == ["products", "given back"]


@pytest.mark.parametrize(
    ("args", "sinks", "why"),
    [
        ({"load_format": "dummy"}, None, "random weights"),
        ({}, torch.bfloat16, "attention sinks"),
        ({"enable_lora": True}, None, "with LoRA"),
        ({"skip_tokenizer_init": True}, None, "no tokenizer"),
    ],
)
def test_without_them_a_server_says_why(
    args: dict[str, Any], sinks: torch.dtype | None, why: str, passes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assert own_shaping.find(server(**args), sinks) is None and not passes and own_shaping.digest() == ""
    assert why in caplog.text and '"noise_shaping": "auto" has no effect' in caplog.text
    assert not own_shaping.report()["found"] and why in own_shaping.report()["how"]


@pytest.mark.parametrize("keys", [float("inf"), float("nan")])
def test_keys_that_no_model_has_give_none(
    keys: float, passes: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_shaping, "read_vectors", lambda _, ids, seen: layers(len(ids), seen, keys=keys))
    assert own_shaping.find(server(), None) is None and not own_shaping.report()["found"]
    assert "the matrices hold numbers that are not finite" in caplog.text and not list(folder.glob("*.safetensors"))


def test_a_device_without_memory_to_read_gives_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(own_shaping, "read_vectors", read)
    assert own_shaping.find(server(), None) is None and "too little memory" in caplog.text
