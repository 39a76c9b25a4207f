"""Offline generation with SGLang's engine on a compressed cache: ``python examples/engine.py [MODEL [CONFIG]]``.

The engine takes SGLang's server arguments, and ``diffkv_config``: a preset's name, a dict, JSON or the path of a file.
Without it the configuration comes from the environment variable ``SGLANG_DIFFKV_CONFIG``; else the model chooses.
"""

from __future__ import annotations

import sys
from pathlib import Path

import sglang
import torch

NANO = Path(__file__).parent / "models" / "nano"
CPU = {"device": "cpu", "dtype": "bfloat16", "max_total_tokens": 20000}


def main(model: str, config: str | None = None) -> None:
    cpu = {} if torch.cuda.is_available() else CPU
    engine = sglang.Engine(model_path=model, attention_backend="diffkv", diffkv_config=config, **cpu)
    try:
        prompts = ["The capital of France is", "One, two, three, four,"]
        replies = engine.generate(prompts, {"temperature": 0, "max_new_tokens": 24})
        for prompt, reply in zip(prompts, replies, strict=True):
            print(f"{prompt!r} -> {reply['text']!r}")
        found = engine.get_server_info()["internal_states"][0]["diffkv"]
        tiers, tokens = found["configuration"]["values"]["tiers"], found["finished"]["tokens"]
        print(f"cache of {tiers}: {tokens:.0f} tokens of finished requests ({found['configuration']['thresholds']})")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:3] or (str(NANO),))
