"""What the tests of ``benchmarks.figures`` share: stand-in servers, points and reading what was written."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import cases, cli
from benchmarks.figures.data import FigureData, Point
from benchmarks.paths import NANO
from benchmarks.quality.random_hybrids import save_random
from sglang_diffkv.evaluate import runner
from sglang_diffkv.evaluate.endpoint import Endpoint
from tests.tools.evaluation import REFERENCE, replies, tokenizer_of
from tests.tools.fake_server import FakeServer

RANDOM: dict[str, Any] = {
    "vocab_size": 8256, "intermediate_size": 128, "num_hidden_layers": 2,
    "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def make_llama(folder: Path, **heads: int) -> Path:
    """A model of random weights with nano's tokenizer; ``heads``: their dimension and numbers, as transformers calls
    them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**RANDOM, hidden_size=16 * heads["num_attention_heads"], **heads)
    save_random(folder, LlamaForCausalLM, config)
    return folder


BASE = ["--model", str(NANO), "--task", REFERENCE]


def servers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the servers started from now on; those whose name ends in 2 or 1 bits get two questions wrong."""
    names: list[str] = []

    @contextmanager
    def start(configuration, model, args):
        names.append(configuration.name)
        wrong = ("t-add-easy-0", "t-few-a-0") if configuration.name[-1] in "12" else ()
        with FakeServer(replies(wrong), share=configuration.diffkv and 0.4) as fake:
            yield Endpoint.connect(fake.url, owned=True)

    monkeypatch.setattr(runner, "start", start)
    monkeypatch.setattr(cli, "load_tokenizer", tokenizer_of)
    monkeypatch.setattr("sglang_diffkv.evaluate.configuration.has_gpu", lambda: False)
    return names


def point(name: str, accuracy: float, ratio: float | None, **fields: object) -> Point:
    base = {"configuration": name, "suite": "reference/dev", "series": cases.EQUAL, "label": name, "n": 10}
    base |= {"accuracy": accuracy, "error": 0.1, "ratio_pages": ratio, "ratio_tokens": ratio}
    return Point.model_validate({**base, **fields})


def figure(folder, name: str) -> FigureData:
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return FigureData.model_validate_json((folder / f"{name}.json").read_text())
