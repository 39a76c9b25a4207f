"""A vision-language model of random weights, Qwen2.5-VL's layers, and pictures to ask it about."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

from benchmarks.paths import NANO
from benchmarks.quality.random_hybrids import save_random

START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
PICTURE = f"{START}{IMAGE}{END}"
"""What a prompt has where a picture belongs."""
SIDE = 224
IMAGE_TOKENS = 64
"""Of a picture of ``SIDE`` by ``SIDE`` points."""


def make_qwen2_5_vl(folder: Path, *, large: bool = False) -> None:
    """Four layers of text with heads of 64, and two of vision with heads of 32, or 64 in a ``large`` one."""
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
    hidden = 128 if large else 64
    vision = {
        "depth": 2, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_heads": 2, "out_hidden_size": 256,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=False,
    )  # fmt: skip
    save_random(folder, Qwen2_5_VLForConditionalGeneration, config)
    tokenizer.save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", "merge_size": 2,
        "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def picture_ids(folder: Path) -> list[int]:
    """``PICTURE`` in tokens of the model in ``folder``; of a text it has those of nano."""
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids([START, IMAGE, END]))


def picture(seed: int) -> str:
    """A PNG of random points, as the ``image_data`` of a request."""
    import numpy as np
    from PIL import Image

    points = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(points).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
