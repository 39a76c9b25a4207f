"""A vision-language model: images are embeddings before the first layer, and its language part is served like any.

The model is a Qwen2.5-VL of random weights; its positions have three parts (mrope), which the cache does not see.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.paths import NANO
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.server import Server, stock_backend
from tests.servers.identity import check_tokens
from tests.servers.shared import STRICT, check_idle, stats_of

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.timeout(1800)]

START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
IMAGE_TOKENS = 64
"""Of a picture of 224 by 224 points."""


def _make(folder: Path) -> None:
    from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(NANO)
    tokenizer.add_special_tokens({"additional_special_tokens": [START, END, IMAGE, VIDEO]})
    start, end, image, video = tokenizer.convert_tokens_to_ids([START, END, IMAGE, VIDEO])
    text = {
        "vocab_size": 8256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "rope_theta": 500000.0, "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [8, 12, 12]},
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 256,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)  # so that logits are apart
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", "merge_size": 2,
        "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., Any]:
    _make(tmp_path)

    @contextmanager
    def start(config: dict[str, Any] | None, *args: str) -> Iterator[Server]:
        backend = stock_backend() if config is None else "diffkv"
        args = ("--mm-attention-backend", "sdpa", "--max-total-tokens", "4000", *args)
        with Server(tmp_path, backend, args, diffkv_config=config, env=STRICT, timeout=600) as server:
            yield server
            check_idle(server)

    return start


def _picture(seed: int) -> str:
    points = np.random.default_rng(seed).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(points).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


ASKED = [
    ("the cat sat on the mat", None), ("what is in this picture", 1), ("what is in this picture", 1),
    ("what is in this picture", 2), ("what is in this picture tell me", 2), ("name the colours", 1),
]  # fmt: skip
"""Texts, and the picture before each."""


def _ask(server: Server) -> list[client.Record]:
    replies = []
    for text, picture in ASKED:
        more = {} if picture is None else {"image_data": _picture(picture)}
        request = {
            "text": text if picture is None else f"{START}{IMAGE}{END} {text}", "return_logprob": True,
            "top_logprobs_num": 2, "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
        }  # fmt: skip
        replies.append(client.record(server.generate({**request, **more})))
    return replies


def test_a_picture_is_cached_and_answered_as_stock_does(serve: Callable[..., Any]) -> None:
    with serve(None) as server:
        stock = _ask(server)
    assert stock[1].output_ids != stock[3].output_ids, "the picture changes nothing"
    with serve({"tiers": ["BF16"]}, "--chunked-prefill-size", "32") as server:
        found = _ask(server)
    check_tokens([x.output_ids for x in found], stock, "with pictures")
    assert [x.cached_tokens for x in found] == [x.cached_tokens for x in stock]
    assert found[2].cached_tokens == found[2].prompt_tokens - 1 > IMAGE_TOKENS, "the picture was not found again"
    assert found[3].cached_tokens < IMAGE_TOKENS, "another picture was taken for the first"
    with serve({"policy": {"name": "diffkv", "window": 16}}) as server:
        compressed = _ask(server)
        assert stats_of(server)["finished"]["low"] > 0
    assert [x.cached_tokens for x in compressed] == [x.cached_tokens for x in stock]
