"""The folder that ``make public`` writes."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFWriter, TokenType
from transformers import AutoTokenizer

from benchmarks.quality.public_model import tokenizer_of

TOKENS = ["<unknown>", "<begin>", "<end>", "<pad>", "a", "b", "c", "ab", "bc"]


def _file(folder: Path, *, padding: bool = True) -> Path:
    """The metadata of a small model of Llama's kind, without weights."""
    file = folder / "model.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * 4 + [TokenType.NORMAL] * 5)
    writer.add_token_merges(["a b", "b c"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if padding:
        writer.add_pad_token_id(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def test_special_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    """They are the folder's too, once it is written and read again."""
    tokenizer_of(_file(tmp_path)).save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    names = ("unk_token", "bos_token", "eos_token", "pad_token")
    assert [getattr(tokenizer, name) for name in names] == TOKENS[:4]
    assert [getattr(tokenizer, f"{name}_id") for name in names] == [0, 1, 2, 3]
    assert tokenizer("ab")["input_ids"] == [7]


def test_a_token_that_the_file_does_not_name(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(_file(tmp_path, padding=False))
    assert tokenizer.pad_token is None and tokenizer.eos_token == "<end>"
