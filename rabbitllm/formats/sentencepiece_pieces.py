"""The pieces of a SentencePiece model: their messages parsed into columns, and the library's lookup.

Schema: `ModelProto.SentencePiece` of
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto. An id is a piece's index in the
file. Columns, since a quarter of a million objects would take more time and memory than the parsing.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import overload

from rabbitllm.formats.protobuf import (
    FieldKind,
    FieldRead,
    SchemaField,
    WireFormatError,
    read_fields,
    read_message,
    read_text,
)

MAX_PIECES = 1 << 20
"""Limit of pieces. The largest published vocabulary has nine tenths of that (XLM-V, 901,629)."""
_MAX_PIECE_FIELDS = 16
_MAX_UNUSUAL_PIECES = 1 << 16
"""Limit of pieces that take three times as long or more, so that no file takes seconds."""
_MAX_OTHER_FIELDS = 1000
_FLOAT = struct.Struct("<f")
_PIECES_TAG = 0x0A
_TEXT_TAG, _SCORE_TAG, _TYPE_TAG = 0x0A, 0x15, 0x18


class PieceType(IntEnum):
    """The kind of a piece; the numbers are the format's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_TYPES = frozenset(PieceType)
_RESERVED = frozenset({PieceType.UNKNOWN, PieceType.CONTROL, PieceType.BYTE})
_PIECE = {
    1: SchemaField("piece", FieldKind.TEXT),
    2: SchemaField("score", FieldKind.FLOAT),
    3: SchemaField("type", FieldKind.INT32, values=PieceType),
}


@dataclass(frozen=True, slots=True)
class VocabularyPiece:
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


@dataclass(frozen=True, slots=True)
class Pieces(Sequence[VocabularyPiece]):
    """All pieces in the order of their ids, in columns.

    Attributes:
        texts: UTF-8.
        scores: float32.
        types: numbers of `PieceType`, a byte each.
    """

    texts: tuple[bytes, ...]
    scores: array[float]
    types: bytes

    def __len__(self) -> int:
        return len(self.texts)

    @overload
    def __getitem__(self, index: int) -> VocabularyPiece: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[VocabularyPiece]: ...

    def __getitem__(self, index: int | slice) -> VocabularyPiece | Sequence[VocabularyPiece]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return VocabularyPiece(number, self.texts[number].decode(), self.scores[number], PieceType(self.types[number]))

    def is_reserved(self, index: int) -> bool:
        """Whether a piece is unknown, control or byte: the library keeps these in a separate table."""
        return self.types[index] in _RESERVED

    def id_of(self, text: str) -> int | None:
        """The id of a text, looked up as in the library: among the reserved pieces, then among the others."""
        wanted, fallback = text.encode(), None
        for number, found in enumerate(self.texts):
            if found == wanted:
                if self.is_reserved(number):
                    return number
                fallback = number
        return fallback


def read_pieces(data: bytes) -> tuple[Pieces, list[FieldRead]]:
    """The pieces of a serialised `ModelProto`, and its other fields.

    Raises:
        WireFormatError: a malformed field or piece; or a limit above is exceeded.
    """
    texts: list[bytes] = []
    scores, types = array("f"), bytearray()
    others: list[FieldRead] = []
    unusual = 0
    for one in read_fields(data, 0, len(data)):
        tag, begin, end = one
        if tag != _PIECES_TAG:
            if len(others) == _MAX_OTHER_FIELDS:
                raise WireFormatError(f"more than {_MAX_OTHER_FIELDS:,} fields are no pieces")
            others.append(one)
            continue
        if len(texts) == MAX_PIECES:
            raise WireFormatError(f"it has more than {MAX_PIECES:,} pieces")
        # Every known writer puts the text, the score and, unless it is the default, the type, in this order. Parsing
        # that order directly takes a third of the time; any other layout is parsed generally.
        size = data[begin + 1] if end - begin >= 7 else 0x80
        score_at = begin + 3 + size
        rest = end - score_at
        if (
            size < 0x80
            and (rest == 4 or (rest == 6 and data[end - 2] == _TYPE_TAG and data[end - 1] in _TYPES))
            and data[begin] == _TEXT_TAG
            and data[score_at - 1] == _SCORE_TAG
        ):
            text = data[begin + 2 : score_at - 1]
            if not text.isascii():
                read_text(data, begin + 2, score_at - 1, "piece")
            texts.append(text)
            scores.append(_FLOAT.unpack_from(data, score_at)[0])
            types.append(data[end - 1] if rest == 6 else PieceType.NORMAL)
        else:
            unusual += 1
            if unusual > _MAX_UNUSUAL_PIECES:
                raise WireFormatError(f"more than {_MAX_UNUSUAL_PIECES:,} pieces are not laid out as a writer does it")
            piece = read_message(data, begin, end, _PIECE, _MAX_PIECE_FIELDS)
            texts.append(piece.get("piece", "").encode())
            scores.append(piece.get("score", 0.0))
            types.append(piece.get("type", PieceType.NORMAL))
    return Pieces(tuple(texts), scores, bytes(types)), others
