"""`tokenizer.model`, the vocabulary that SentencePiece trains: its pieces and specs, checked.

Schema: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto, with its defaults. Only what
decides how text is encoded is read; options that document the training are skipped, and so is the content of a
normaliser's compiled rule. The library (0.2.3) accepts more: ids in the trainer spec outside the vocabulary, and
everything that only `_protobuf.py` refuses.

The size of a vocabulary is its number of pieces, as in the library; `TrainerSpec.vocab_size` may differ. Independent of
models and of encoding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from rabbitllm.errors import CorruptVocabularyError
from rabbitllm.formats._protobuf import (
    FieldKind,
    FieldRead,
    Schema,
    SchemaField,
    WireFormatError,
    numbered,
    read_fields,
    read_message,
    schema_of,
    values_of,
)
from rabbitllm.formats.bounded import is_lfs_pointer, read_vocabulary, short

MAX_PIECES = 1 << 20
"""Limit of pieces. The largest published vocabulary has nine tenths of that (XLM-V, 901,629)."""
_MAX_PIECE_FIELDS = 16
_MAX_OTHER_FIELDS = 1000
_PIECES_TAG = 0x0A


class PieceType(IntEnum):
    """The kind of a piece; the numbers are the format's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_RESERVED = frozenset({PieceType.UNKNOWN, PieceType.CONTROL, PieceType.BYTE})
_PIECE = {
    1: SchemaField("piece", FieldKind.TEXT),
    2: SchemaField("score", FieldKind.FLOAT),
    3: SchemaField("type", FieldKind.INT32, values=PieceType),
}


class VocabularyPiece(NamedTuple):
    """One entry of the vocabulary.

    Attributes:
        id: its index in the file.
        text: with U+2581 for a space.
        score: float32; a log probability (unigram), or minus the number of its merge (BPE).
        type: its kind.
    """

    id: int
    text: str
    score: float
    type: PieceType

    @property
    def is_reserved(self) -> bool:
        """Whether it is unknown, control or byte: the library keeps these in a separate table."""
        return self.type in _RESERVED


def read_pieces(data: bytes) -> tuple[tuple[VocabularyPiece, ...], list[FieldRead]]:
    """The pieces of a serialised `ModelProto`, and its other fields.

    Raises:
        WireFormatError: a malformed field or piece; or a limit above is exceeded.
    """
    pieces: list[VocabularyPiece] = []
    other_fields: list[FieldRead] = []
    for entry in read_fields(data, 0, len(data)):
        tag, begin, end = entry
        if tag != _PIECES_TAG:
            if len(other_fields) == _MAX_OTHER_FIELDS:
                raise WireFormatError(f"more than {_MAX_OTHER_FIELDS:,} fields are not pieces")
            other_fields.append(entry)
            continue
        if len(pieces) == MAX_PIECES:
            raise WireFormatError(f"it has more than {MAX_PIECES:,} pieces")
        piece = read_message(data, begin, end, _PIECE, _MAX_PIECE_FIELDS)
        text, score, piece_type = piece.get("piece", ""), piece.get("score", 0.0), piece.get("type", PieceType.NORMAL)
        pieces.append(VocabularyPiece(len(pieces), text, score, piece_type))
    return tuple(pieces), other_fields


MAX_PIECE_BYTES = 7999
"""Limit of the library (0.2.3)."""
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


def check_pieces(pieces: Sequence[VocabularyPiece], byte_fallback: bool, bpe: bool) -> None:
    """Refuse a vocabulary that the library could not use.

    The library checks scores, and that there is an ordinary piece, in unigram models only; here all models are checked,
    since no trainer makes others.

    Raises:
        ValueError: a piece that is empty, too long, repeated or contains a zero byte; a score that is not finite; not
            exactly one unknown piece; no ordinary piece; byte pieces that are not the 256 of byte fallback.
    """
    # the library has two tables: a text may be in both, but once in each; in a BPE model only in one
    first_by_text: dict[tuple[bool, str], int] = {}
    for piece in pieces:
        if not piece.text:
            raise ValueError(f"piece {piece.id:,} is empty")
        if (nbytes := len(piece.text.encode())) > MAX_PIECE_BYTES:
            raise ValueError(f"piece {piece.id:,} has {nbytes:,} bytes; at most {MAX_PIECE_BYTES:,} are allowed")
        if "\0" in piece.text:
            raise ValueError(f"piece {piece.id:,} holds a zero byte; the library's tries end a piece there")
        if not math.isfinite(piece.score):
            raise ValueError(f"piece {piece.id:,} has score {piece.score}; expected a finite number")
        first = first_by_text.setdefault((not bpe and piece.is_reserved, piece.text), piece.id)
        if first != piece.id:
            raise ValueError(f"pieces {first:,} and {piece.id:,} are both {short(piece.text)}")
    if (count := sum(piece.type is PieceType.UNKNOWN for piece in pieces)) != 1:
        raise ValueError(f"it has {count:,} pieces of type unknown; expected exactly one")
    if all(piece.is_reserved for piece in pieces):
        raise ValueError("it has only unknown, control and byte pieces, which no text is split into")
    _check_byte_pieces([piece for piece in pieces if piece.type is PieceType.BYTE], byte_fallback)


def _check_byte_pieces(pieces: Sequence[VocabularyPiece], byte_fallback: bool) -> None:
    if pieces and not byte_fallback:
        raise ValueError(f"piece {pieces[0].id:,} is of type byte and the trainer spec has no byte_fallback")
    for piece in pieces:
        if not _BYTE_PIECE.fullmatch(piece.text):
            raise ValueError(f"byte piece {piece.id:,} is {short(piece.text)}; expected <0x00> to <0xFF>")
    if byte_fallback and len(pieces) != 256:
        raise ValueError(f"it has {len(pieces)} byte pieces; byte_fallback needs 256")


MAX_SPEC_BYTES = 4 << 20
"""Limit of one spec with its charsmap. The library's own charsmaps have up to 0.4 MB."""
MAX_SPEC_FIELDS = 100_000
_IDS = {"unk_id", "bos_id", "eos_id", "pad_id"}


class ModelType(IntEnum):
    """The library's algorithm for splitting text into pieces; the numbers are the format's."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """The options of the trainer that decide how text is encoded, and the size that it was asked for.

    `byte_fallback` makes unknown characters byte pieces, and the four texts name the pieces with a special meaning.
    """

    model_type: ModelType = numbered(3, FieldKind.INT32, ModelType.UNIGRAM, ModelType)  # noqa: RUF009 (an enumerator)
    vocab_size: int = numbered(4, FieldKind.INT32, 8000)
    treat_whitespace_as_suffix: bool = numbered(24, FieldKind.BOOL, False)
    byte_fallback: bool = numbered(35, FieldKind.BOOL, False)
    unk_id: int = numbered(40, FieldKind.INT32, 0)
    bos_id: int = numbered(41, FieldKind.INT32, 1)
    eos_id: int = numbered(42, FieldKind.INT32, 2)
    pad_id: int = numbered(43, FieldKind.INT32, -1)
    unk_piece: str = numbered(45, FieldKind.TEXT, "<unk>")
    bos_piece: str = numbered(46, FieldKind.TEXT, "<s>")
    eos_piece: str = numbered(47, FieldKind.TEXT, "</s>")
    pad_piece: str = numbered(48, FieldKind.TEXT, "<pad>")


@dataclass(frozen=True, slots=True)
class NormalizerSpec:
    """The normalisation of a text before it is split, or after its pieces are joined (the denormaliser).

    Attributes:
        name: of the rule, such as `nmt_nfkc` or `identity`.
        precompiled_charsmap_bytes: length of the compiled rule, 0 for none; the rule itself is not read.
        add_dummy_prefix: whether a space is put before the text.
        remove_extra_whitespaces: whether leading, trailing and repeated spaces are removed.
        escape_whitespaces: whether spaces become U+2581.
    """

    name: str = numbered(1, FieldKind.TEXT, "")
    precompiled_charsmap_bytes: int = numbered(2, FieldKind.SPAN, 0)
    add_dummy_prefix: bool = numbered(3, FieldKind.BOOL, True)
    remove_extra_whitespaces: bool = numbered(4, FieldKind.BOOL, True)
    escape_whitespaces: bool = numbered(5, FieldKind.BOOL, True)


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The ids of the pieces with a special meaning in the library; -1 for none."""

    unk: int
    bos: int
    eos: int
    pad: int


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """A whole `tokenizer.model`. A spec that is absent has its defaults; an absent denormaliser is None."""

    pieces: tuple[VocabularyPiece, ...]
    trainer: TrainerSpec
    normalizer: NormalizerSpec
    denormalizer: NormalizerSpec | None

    def id_of(self, text: str) -> int | None:
        """The id of a text, looked up as in the library: among the reserved pieces, then among the others."""
        same = [piece for piece in self.pieces if piece.text == text]
        return next((piece.id for piece in same if piece.is_reserved), same[0].id if same else None)

    def special_ids(self) -> SpecialIds:
        """The results of the library's `unk_id()`, `bos_id()`, `eos_id()` and `pad_id()`.

        The library looks up the texts in the trainer spec, and ignores the ids there.
        """
        unknown = next(piece.id for piece in self.pieces if piece.type is PieceType.UNKNOWN)

        def id_of(text: str, default: str, expected: PieceType) -> int:
            piece = self.id_of(text or default)
            index = unknown if piece is None else piece
            return index if self.pieces[index].type is expected else -1

        return SpecialIds(
            unk=id_of(self.trainer.unk_piece, "<unk>", PieceType.UNKNOWN),
            bos=id_of(self.trainer.bos_piece, "<s>", PieceType.CONTROL),
            eos=id_of(self.trainer.eos_piece, "</s>", PieceType.CONTROL),
            pad=id_of(self.trainer.pad_piece, "<pad>", PieceType.CONTROL),
        )


_MODEL = {
    # only pieces of another wire type reach this, and are refused
    1: SchemaField("pieces", FieldKind.SPAN),
    2: SchemaField("trainer_spec", FieldKind.SPAN),
    3: SchemaField("normalizer_spec", FieldKind.SPAN),
    5: SchemaField("denormalizer_spec", FieldKind.SPAN),
}
_TRAINER, _NORMALIZER = schema_of(TrainerSpec), schema_of(NormalizerSpec)


def read_model(path: Path) -> SentencePieceModel:
    """Read and check a local `tokenizer.model`.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptVocabularyError: see `parse_model`; or it is not a regular file, or has more than 67 MB.
    """
    return parse_model(read_vocabulary(path, lambda problem: _corrupt(path.name, problem)), path.name)


def parse_model(data: bytes, file: str) -> SentencePieceModel:
    """Read and check a complete serialised `ModelProto`.

    Raises:
        CorruptVocabularyError: the vocabulary is malformed, or the library could not use it.
    """
    try:
        return _parse(data)
    except ValueError as error:
        raise _corrupt(file, str(error) + _looks_like(data)) from None


def _parse(data: bytes) -> SentencePieceModel:
    pieces, other_fields = read_pieces(data)
    specs = values_of(data, other_fields, _MODEL)
    for name, (begin, end) in specs.items():
        if end - begin > MAX_SPEC_BYTES:
            raise ValueError(f"its {name} has {end - begin:,} bytes; at most {MAX_SPEC_BYTES:,} are read")
    options = _message(data, specs.get("trainer_spec"), _TRAINER)
    trainer = TrainerSpec(**options)
    check_pieces(pieces, trainer.byte_fallback, trainer.model_type is ModelType.BPE)
    for name in sorted(_IDS & options.keys()):  # ignored by the library, but used by converters to other formats
        if not -1 <= options[name] < len(pieces):
            raise ValueError(f"{name} is {options[name]:,}; expected -1 (none) or one of {len(pieces):,} pieces")
    denormalizer = specs.get("denormalizer_spec")
    return SentencePieceModel(
        pieces,
        trainer,
        _normalizer(data, specs.get("normalizer_spec")),
        denormalizer and _normalizer(data, denormalizer),
    )


def _message(data: bytes, span: tuple[int, int] | None, schema: Schema) -> dict[str, Any]:
    return read_message(data, *span, schema, MAX_SPEC_FIELDS) if span else {}


def _normalizer(data: bytes, span: tuple[int, int] | None) -> NormalizerSpec:
    options = _message(data, span, _NORMALIZER)
    begin, end = options.get("precompiled_charsmap_bytes", (0, 0))
    return NormalizerSpec(**{**options, "precompiled_charsmap_bytes": end - begin})


def _looks_like(data: bytes) -> str:
    """The real format of a file of this name, for messages."""
    if is_lfs_pointer(data):
        return " (it is a git-lfs pointer, not the file itself)"
    if re.match(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\n", data):
        return " (it looks like a tiktoken vocabulary, as Llama 3's is)"
    return ""


def _corrupt(file: str, problem: str) -> CorruptVocabularyError:
    return CorruptVocabularyError(
        f"{file} is not a valid SentencePiece model: {problem}.",
        "Download the file again from the model's publisher, and compare its sha256.",
    )
