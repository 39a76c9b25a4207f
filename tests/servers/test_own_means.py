"""Key means that a server finds itself: when, of what, where they are kept, and what it says if there are none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.paths import NANO
from sglang_diffkv.config import CACHE_ENV
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import private_folder
from sglang_diffkv.key_means import SINKS, KeySums, read_key_means
from sglang_diffkv.layout.ranks import RankError, Ranks
from sglang_diffkv.ops import Scaling
from sglang_diffkv.srt.startup import model_identity, own_means
from sglang_diffkv.srt.versions import compat

LAYERS, HEADS, DIM = 3, 2, 64
PLAIN = (Scaling(0.1),)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.setattr(own_means, "_found", None)
    monkeypatch.setattr(compat, "resolved", lambda args: args)
    return tmp_path / "cache"


def runner(ranks: Ranks | None = None, **args: Any) -> Any:
    """What of SGLang's model runner is asked."""
    given = {
        "load_format": "auto", "enable_lora": False, "lora_paths": None, "moe_a2a_backend": "none",
        "skip_tokenizer_init": False, "tokenizer_path": str(NANO), "tokenizer_mode": "auto", "model_path": str(NANO),
        "trust_remote_code": False, "revision": None, "chunked_prefill_size": 512, **args,
    }  # fmt: skip
    state = SimpleNamespace(num_layers=LAYERS, num_heads=HEADS, fmt=SimpleNamespace(head_dim=DIM))
    manager = SimpleNamespace(state=state, ranks=ranks or Ranks())
    model = SimpleNamespace(
        context_len=8192, model_path=str(NANO), revision=None, hf_config=SimpleNamespace(to_dict=dict)
    )
    return SimpleNamespace(
        server_args=SimpleNamespace(**given), model_config=model, dtype=torch.bfloat16, req_to_token_pool=object(),
        token_to_kv_pool=SimpleNamespace(manager=manager),
    )  # fmt: skip


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of each pass that was run. Keys of a layer are 10 times its number, and those of sinks far off."""
    found: list[list[int]] = []

    def read(_: Any, ids: list[int], seen: Callable[[int, torch.Tensor], None]) -> None:
        found.append(ids)
        for layer in range(LAYERS):
            keys = torch.full((len(ids), HEADS, DIM), 10.0 * layer)
            keys[:SINKS] = 1e6
            seen(2 * layer + 1, keys)

    monkeypatch.setattr(own_means, "read", read)
    return found


def test_the_first_start_measures_and_later_ones_read(
    passes: list[list[int]], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    means = own_means.find(runner(), PLAIN, None)
    assert means is not None and means.shape == (LAYERS, HEADS, DIM)
    assert means[:, 0, 0].tolist() == [0, 10, 20], "sinks do not count"
    assert len(passes) == 1 and len(passes[0]) == 512, "no longer than a pass over prompts"
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    assert "measured in" in caplog.text and str(file) in caplog.text
    first, name = own_means.report(), own_means.digest()
    assert first["found"] and first["tokens"] == 512 - SINKS and first["file"] == str(file)
    again = own_means.find(runner(), PLAIN, None)
    assert again is not None and torch.equal(again, means) and len(passes) == 1
    assert own_means.digest() == name and "seconds" not in own_means.report()
    assert torch.equal(read_key_means(str(file), LAYERS, HEADS, DIM), means)


@pytest.mark.parametrize("change", ["weights", "rank", "tokens"])
def test_what_they_depend_on_names_the_file(
    change: str, passes: list[list[int]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_means.find(runner(), PLAIN, None)
    if change == "weights":
        monkeypatch.setattr(model_identity, "_weights", lambda view, model: ("", [["model.safetensors", 1, "other"]]))
    other = runner(Ranks(2, 1) if change == "rank" else None, chunked_prefill_size=256 if change == "tokens" else 512)
    own_means.find(other, PLAIN, None)
    assert len(passes) == len(list(folder.iterdir())) == 2


def test_a_damaged_file_is_measured_again(
    passes: list[list[int]], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    means = own_means.find(runner(), PLAIN, None)
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-8])
    again = own_means.find(runner(), PLAIN, None)
    assert means is not None and again is not None and torch.equal(again, means) and len(passes) == 2
    assert "measured again" in caplog.text and read_key_means(str(file), LAYERS, HEADS, DIM).isfinite().all()


def test_a_folder_that_others_may_write_to_is_not_used(passes: list[list[int]], folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    assert own_means.find(runner(), PLAIN, None) is not None
    assert not list(folder.iterdir()) and own_means.report()["file"] is None
    assert "others may write to it" in own_means.report()["how"] and CACHE_ENV in own_means.report()["how"]
    with pytest.raises(ConfigError, match="others may write"):
        private_folder(folder)


def test_weights_without_a_lasting_name_are_read_at_each_start(
    passes: list[list[int]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_means, "known_digest", lambda args, model: ("nothing says which weights", None))
    for _ in range(2):
        assert own_means.find(runner(), PLAIN, None) is not None
    assert len(passes) == 2 and not folder.exists() and "nothing says" in own_means.report()["how"]


REASONS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "random weights": ({"load_format": "dummy"}, PLAIN, None),
    "a logit cap": ({}, (Scaling(0.1, 30.0),), None),
    "attention sinks": ({}, PLAIN, torch.bfloat16),
    "with LoRA": ({"enable_lora": True}, PLAIN, None),
    "--moe-a2a-backend": ({"moe_a2a_backend": "deepep"}, PLAIN, None),
    "no tokenizer": ({"skip_tokenizer_init": True}, PLAIN, None),
    "tokenizer cannot be used": ({"tokenizer_path": "/nowhere/at/all"}, PLAIN, None),
    "256 are needed": ({"chunked_prefill_size": 64}, PLAIN, None),
}


@pytest.mark.parametrize("why", REASONS)
def test_without_them_a_server_says_why(
    why: str, passes: list[list[int]], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args, scalings, sinks = REASONS[why]
    assert own_means.find(runner(**args), scalings, sinks) is None
    assert why in caplog.text and "has no effect" in caplog.text and "\n" not in caplog.records[-1].getMessage()
    assert not passes and not folder.exists() and own_means.digest() == ""
    assert own_means.report() == {"found": False, "how": own_means.report()["how"]} and why in own_means.report()["how"]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e9])
def test_keys_that_no_model_has_give_no_means(
    value: float, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(_: Any, ids: list[int], seen: Callable[[int, torch.Tensor], None]) -> None:
        for layer in range(LAYERS):
            seen(layer, torch.full((len(ids), HEADS, DIM), value if layer else 1.0))

    monkeypatch.setattr(own_means, "read", read)
    assert own_means.find(runner(), PLAIN, None) is None and not own_means.report()["found"]
    assert "has no effect: they hold numbers" in caplog.text and not list(folder.glob("*.safetensors"))


def test_a_device_without_memory_to_read_gives_no_means(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(own_means, "read", read)
    assert own_means.find(runner(), PLAIN, None) is None
    assert "too little memory left to read a text" in caplog.text


def test_all_ranks_read_or_none(passes: list[list[int]]) -> None:
    """One rank has kept them and another has not, or another cannot read a text."""
    own_means.find(runner(Ranks(2, 0, lambda numbers: numbers)), PLAIN, None)
    assert len(passes) == 1
    # can read; equal tokens; the other has none; what was measured can be
    answers = [np.array([0]), None, np.array([1]), np.array([0])]

    def other(numbers: np.ndarray) -> np.ndarray:
        answer = answers.pop(0)
        return numbers if answer is None else answer

    assert own_means.find(runner(Ranks(2, 0, other)), PLAIN, None) is not None
    assert len(passes) == 2 and not answers
    assert own_means.find(runner(Ranks(2, 0, lambda numbers: np.array([1]))), PLAIN, None) is None
    assert len(passes) == 2 and "another rank" in own_means.report()["how"]


def test_ranks_that_read_other_tokens_end_the_start(passes: list[list[int]]) -> None:
    def other(numbers: np.ndarray) -> np.ndarray:
        return numbers if len(numbers) == 1 else numbers + 1

    with pytest.raises(RankError, match="the tokens of the text"):
        own_means.find(runner(Ranks(2, 0, other)), PLAIN, None)
    assert not passes


def test_layers_that_differ_have_no_means() -> None:
    sums = KeySums()
    with pytest.raises(ValueError, match="tokens that count"):
        sums.means()
    sums.add(0, torch.ones(9, 2, 8))
    sums.add(1, torch.ones(9, 2, 16))
    with pytest.raises(ValueError, match="one shape"):
        sums.means()


def test_the_text_is_of_the_package_and_long_enough() -> None:
    from sglang_diffkv.evaluate.prompts import load_tokenizer

    assert len(load_tokenizer(str(NANO))(own_means.text())["input_ids"]) >= own_means.TOKENS
    assert os.environ[CACHE_ENV] == str(own_means.cache_folder())
