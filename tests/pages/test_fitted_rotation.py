"""Rotations that were fitted to a model: attention stays the same, files of two forms are read, and others refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_diffkv.config import load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.fitted_rotation import MOST_BYTES, of_rank, read_rotation
from sglang_diffkv.kernels.rotate.fitted import NOT_FITTED, FittedTransform, turned
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation, hadamard
from tests.pages.test_key_means import DIM, HEADS, LAYERS, error, keys_with_much_in_common


def orthogonal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random rotations [..., dim, dim] float32."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(drawn).Q.contiguous()


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (1, 1, 1, 5), (7, 3, 2, 96), (4, 2, 7, 64), (5, 3, 1, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_head_is_multiplied_by_its_matrix(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Also of a part of a wider tensor, as projections give it. Tokens, KV heads, query heads of each, dimensions."""
    tokens, heads, group, dim = shape
    wide = torch.randn(tokens, heads * group + 2, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = wide[:, 1:-1]
    for matrix in (orthogonal(1, dim, dim).to(dtype), orthogonal(heads, dim, dim).to(dtype)):
        each = matrix.float().expand(heads, dim, dim).repeat_interleave(group, 0)
        expected = torch.einsum("thd,hde->the", x.float(), each)
        out = turned(x, matrix)
        assert out.dtype == dtype and out.shape == x.shape and out.is_contiguous()
        torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2 if dtype != torch.float32 else 1e-5)


def fitted(keys: bool, values: bool, heads: int) -> FittedTransform:
    found = [orthogonal(LAYERS, heads, DIM, DIM, seed=x).bfloat16() for x in (2, 3)]
    return FittedTransform(found[0] if keys else None, found[1] if values else None)


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize(
    ("keys", "values", "rotation", "with_means"),
    [(True, False, NO_ROTATION, False), (True, True, NO_ROTATION, True), (False, True, Rotation(keys=True), True),
     (True, False, Rotation(values=True), False)],
)  # fmt: skip
def test_attention_stays(keys: bool, values: bool, rotation: Rotation, with_means: bool, heads: int) -> None:
    """In prompts of several chunks and in decode steps, beside the Hadamard matrix and with key means."""
    key, common = keys_with_much_in_common()
    means = common if with_means else None
    own = fitted(keys, values, heads)
    assert error("BF16", means, rotation, key, fitted=own) < 3e-2
    plain, turned_ = (error("K8V8", means, rotation, key, fitted=x) for x in (NOT_FITTED, own))
    assert turned_ < 2 * plain + 1e-2
    assert error("BF16", means, rotation, key, 24, fitted=own) < 3e-2, "a sliding layer"


def test_one_that_fits_loses_less_than_the_hadamard_matrix() -> None:
    """Keys that vary along a direction which the Hadamard matrix turns onto one axis."""
    generator = torch.Generator().manual_seed(4)
    key = torch.randn(60, HEADS, DIM, generator=generator) * 0.3
    direction = hadamard(DIM, torch.device("cpu"))[5]
    key = (key + torch.randn(60, HEADS, 1, generator=generator) * 8 * direction).bfloat16()
    basis = torch.linalg.qr(torch.cat([direction[:, None], torch.randn(DIM, DIM - 1, generator=generator)], 1)).Q
    own = (basis @ hadamard(DIM, basis.device)).expand(LAYERS, 1, DIM, DIM).bfloat16()
    by_hadamard = error("K4V8", None, Rotation(keys=True), key)
    assert error("K4V8", None, NO_ROTATION, key, fitted=FittedTransform(own)) < 0.5 * by_hadamard


def as_oscar(rotation: torch.Tensor) -> dict[str, object]:
    return {"format_version": 2, "layers": {number: {"rotation": x, "rank": 1} for number, x in enumerate(rotation)}}


def test_files_of_both_forms(tmp_path: Path) -> None:
    by_layer, by_head = orthogonal(3, 8, 8), orthogonal(3, 2, 8, 8)
    for rotation, shape in ((by_layer, (3, 1, 8, 8)), (by_head, (3, 2, 8, 8))):
        for dtype in (torch.float32, torch.bfloat16):
            stored = rotation.to(dtype)
            save_file({"rotation": stored}, tmp_path / "r.safetensors")
            torch.save(as_oscar(stored), tmp_path / "r.pt")
            for name in ("r.safetensors", "r.pt"):
                found = read_rotation("key_rotation", str(tmp_path / name), 3, 2, 8)
                assert found.shape == shape and found.dtype == torch.float32
                assert torch.equal(found, stored.float().view(shape))


class Harmful:
    """What a pickle may do."""

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return Path.touch, (Path("touched"),)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"nothing", "is neither safetensors with"),
        ({"layers": []}, "is neither safetensors with"),
        ({"layers": {0: torch.eye(8)}}, "is neither safetensors with"),
        ({"rotation": orthogonal(3, 8, 8)}, "is neither safetensors with"),
        (as_oscar(orthogonal(2, 8, 8)), r"is of \[2, 1, 8, 8\], this model takes \[3, 8, 8\] or \[3, 2, 8, 8\]"),
        (as_oscar(orthogonal(3, 4, 8, 8)), r"is of \[3, 4, 8, 8\]"),
        (as_oscar(torch.full((3, 8, 8), float("nan"))), "not finite"),
        (as_oscar(2 * orthogonal(3, 8, 8)), "holds a matrix that is no rotation"),
        (as_oscar(torch.randn(3, 8, 8)), "holds a matrix that is no rotation"),
        ({"layers": Harmful()}, "is neither safetensors with"),
    ],
)
def test_other_files_are_refused(content: object, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in them is carried out."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "r.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ConfigError, match=said) as found:
        read_rotation("value_rotation", str(path), 3, 2, 8)
    assert str(found.value).startswith('value_rotation: "') and "\n" not in str(found.value)
    assert not (tmp_path / "touched").exists()


def test_files_of_other_names_and_sizes(tmp_path: Path) -> None:
    save_file({"other": torch.eye(8)}, tmp_path / "r.safetensors")
    for name, said in (("r.safetensors", 'has no tensor "rotation"'), ("none.pt", "cannot be read")):
        with pytest.raises(ConfigError, match=said):
            read_rotation("key_rotation", str(tmp_path / name), 3, 2, 8)
    with (tmp_path / "large.pt").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(ConfigError, match="at most 536,870,912 are read"):
        read_rotation("key_rotation", str(tmp_path / "large.pt"), 3, 2, 8)


def test_each_rank_has_those_of_its_heads() -> None:
    rotation = torch.arange(4.0).view(1, 4, 1, 1)
    assert [of_rank(rotation, rank, 2, 2).flatten().tolist() for rank in range(2)] == [[0, 1], [2, 3]]
    assert [of_rank(rotation, rank, 8, 1).flatten().tolist() for rank in (0, 1, 7)] == [[0], [0], [3]]
    assert of_rank(rotation[:, :1], 5, 8, 1).shape == (1, 1, 1, 1), "one of all heads"


def test_a_file_takes_the_place_of_the_hadamard_matrix() -> None:
    for name, left in (("key_rotation", Rotation(values=True)), ("value_rotation", Rotation(keys=True))):
        assert load_config(f'{{"{name}": "x.pt"}}').rotation == left
        with pytest.raises(ConfigError, match=f"{name} serves quantised tiers, and BF16 is none"):
            load_config(f'{{"tiers": ["BF16"], "{name}": "x.pt"}}')
    assert load_config("{}").rotation == Rotation(True, True)
    assert load_config('{"tiers": ["K8V4"], "key_rotation": "x"}').rotation == NO_ROTATION
