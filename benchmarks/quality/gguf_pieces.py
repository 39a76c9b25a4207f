"""The tokenizer of a GGUF file whose pieces are SentencePiece's, as Gemma's are.

transformers (5.12.1) makes one that cuts text into other tokens: it takes the pieces of one script or one letter, and
puts no beginning in front. Here merges follow from the pieces' scores, and ``check`` compares with SentencePiece.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader, TokenType

SPACE = "\u2581"
"""What stands for a space in a piece."""
SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
"""A GGUF file's names of special tokens, and those of transformers."""


def special_tokens(reader: GGUFReader) -> dict[str, int]:
    """Of transformers' names, the ids that the file has."""
    fields = reader.fields
    names = {attribute: f"tokenizer.ggml.{name}_token_id" for name, attribute in SPECIAL.items()}
    return {attribute: int(fields[name].contents()) for attribute, name in names.items() if name in fields}


@dataclass(frozen=True)
class Pieces:
    """What a file says of its pieces, by id.

    Attributes:
        texts: as SentencePiece has them; in those that a user defined a space is a space.
        scores: of two pieces that could be made next, the one of the larger score is.
        types: ``gguf.TokenType``.
        special: of transformers' names of special tokens, their ids.
        begins: whether the beginning's token stands in front of a text.
    """

    texts: list[str]
    scores: list[float]
    types: list[int]
    special: dict[str, int]
    begins: bool

    @classmethod
    def of(cls, file: Path) -> Pieces:
        """Raises ValueError for a file whose pieces are not SentencePiece's."""
        reader = GGUFReader(file)
        fields = {name.removeprefix("tokenizer.ggml."): field for name, field in reader.fields.items()}
        if fields["model"].contents() != "llama" or "scores" not in fields:
            raise ValueError(f"{file.name}: its tokenizer is {fields['model'].contents()}, not SentencePiece's")
        if "add_space_prefix" in fields and fields["add_space_prefix"].contents():
            raise ValueError(f"{file.name}: a space in front of each text is not provided for")
        begins = "add_bos_token" in fields and bool(fields["add_bos_token"].contents())
        texts, scores, types = (fields[name].contents() for name in ("tokens", "scores", "token_type"))
        return cls(texts, scores, types, special_tokens(reader), begins)

    def of_type(self, *types: TokenType) -> list[int]:
        """The ids of pieces of these types."""
        return [index for index, kind in enumerate(self.types) if kind in types]

    def merges(self) -> list[tuple[str, str]]:
        """Pairs of pieces that become one, those that come first first: of the larger score, then of the shorter left
        part."""
        normal = {self.texts[index]: self.scores[index] for index in self.of_type(TokenType.NORMAL)}
        found = [
            (-score, cut, text[:cut], text[cut:])
            for text, score in normal.items()
            for cut in range(1, len(text))
            if text[:cut] in normal and text[cut:] in normal
        ]
        return [(left, right) for _, _, left, right in sorted(found)]


def tokenizer_of(pieces: Pieces) -> Any:
    """transformers' fast tokenizer of these pieces."""
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    ids = {text: index for index, text in enumerate(pieces.texts)}
    names = {attribute: pieces.texts[index] for attribute, index in pieces.special.items()}
    model = BPE(ids, pieces.merges(), byte_fallback=True, fuse_unk=True, unk_token=names.get("unk_token"))
    made = Tokenizer(model)
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_tokens([AddedToken(pieces.texts[x], normalized=False) for x in pieces.of_type(TokenType.USER_DEFINED)])
    control = pieces.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    made.add_special_tokens([AddedToken(pieces.texts[x], normalized=False, special=True) for x in control])
    if pieces.begins:
        first = names["bos_token"]
        made.post_processor = processors.TemplateProcessing(
            single=[first, "$A"], pair=[first, "$A", first, "$B:1"], special_tokens=[(first, ids[first])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **names)


def _field(number: int, value: int | float | str | bytes) -> bytes:
    """A field of a message of Protocol Buffers, in whose form SentencePiece takes its model."""
    if isinstance(value, float):
        return _number(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _number(number << 3) + _number(value)
    data = value.encode() if isinstance(value, str) else value
    return _number(number << 3 | 2) + _number(len(data)) + data


def _number(value: int) -> bytes:
    """As a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


BPE, BYTE_FALLBACK = (3, 2), (35, 1)
IDS, NAMES = {"unk_token": 40, "bos_token": 41, "eos_token": 42, "pad_token": 43}, 5
"""Fields of SentencePiece's ``TrainerSpec``: of special tokens their ids, and so many further on their pieces."""
NORMALIZER = (_field(1, "identity"), _field(3, 0), _field(4, 0), _field(5, 1))
"""``NormalizerSpec``: no space in front, none removed, spaces stand as ``SPACE``."""


def sentencepiece_of(pieces: Pieces) -> Any:
    """SentencePiece's own processor of the same pieces."""
    from sentencepiece import SentencePieceProcessor

    trainer = _field(*BPE) + _field(*BYTE_FALLBACK)
    for attribute, index in pieces.special.items():
        trainer += _field(IDS[attribute], index) + _field(IDS[attribute] + NAMES, pieces.texts[index])
    model = []
    for index, (text, score, kind) in enumerate(zip(pieces.texts, pieces.scores, pieces.types, strict=True)):
        plain = text.replace(" ", SPACE) if kind == TokenType.USER_DEFINED else text
        kind = TokenType.UNKNOWN if index == pieces.special.get("unk_token") else kind
        model.append(_field(1, _field(1, plain) + _field(2, float(score)) + _field(3, int(kind))))
    proto = b"".join(model) + _field(2, trainer) + _field(3, b"".join(NORMALIZER))
    return SentencePieceProcessor(model_proto=proto)


def check(tokenizer: Any, pieces: Pieces, text: str) -> None:
    """Raise ValueError if the tokenizer's tokens of a text are not SentencePiece's."""
    expected, found = sentencepiece_of(pieces).encode(text), tokenizer(text, add_special_tokens=False)["input_ids"]
    if expected != found:
        at = next(
            (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
            min(map(len, (expected, found))),
        )
        raise ValueError(
            f"token {at} of a text is {tokenizer.convert_ids_to_tokens(found[at : at + 1])}, by SentencePiece it is "
            f"{tokenizer.convert_ids_to_tokens(expected[at : at + 1])}: another version of transformers or tokenizers?"
        )
