"""Checks of a SentencePiece model before the library reads the file.

The library (https://github.com/google/sentencepiece, 0.2.3) checks pieces and the charsmap's lengths itself; earlier
versions skip some checks. So each is made here first, with a message that says what was found.
"""

from __future__ import annotations

import math
import re
import struct
from itertools import repeat
from operator import contains

from rabbitllm.formats.sentencepiece_pieces import Pieces, PieceType

_TRIE_BLOCK_BYTES = 1024
"""The trie of a charsmap (https://github.com/s-yata/darts-clone) consists of blocks of 256 units of 4 bytes."""
MAX_PIECE_BYTES = 7999
"""Limit of the library (0.2.3)."""
_BYTE_PIECE = re.compile(rb"<0x[0-9A-F]{2}>")


def check_pieces(pieces: Pieces, byte_fallback: bool, bpe: bool) -> None:
    """Refuse a vocabulary that the library could not use.

    The library checks scores, and that there is an ordinary piece, in unigram models only; here all models are checked,
    since no trainer makes others.

    Raises:
        ValueError: a piece that is empty, too long, repeated or contains a zero byte; a score that is not finite; not
            exactly one unknown piece; no ordinary piece; byte pieces that are not the 256 of byte fallback.
    """
    texts, scores, types = pieces.texts, pieces.scores, pieces.types  # loops run in C: there may be a million pieces
    if not all(texts):
        raise ValueError(f"piece {texts.index(b''):,} is empty")
    if len(longest := max(texts, key=len, default=b"")) > MAX_PIECE_BYTES:
        number = texts.index(longest)
        raise ValueError(f"piece {number:,} has {len(longest):,} bytes; at most {MAX_PIECE_BYTES:,} are allowed")
    if any(map(contains, texts, repeat(0))):
        number = next(number for number, text in enumerate(texts) if 0 in text)
        raise ValueError(f"piece {number:,} holds a zero byte; the library's tries end a piece there")
    if not all(map(math.isfinite, scores)):
        number = next(number for number, score in enumerate(scores) if not math.isfinite(score))
        raise ValueError(f"piece {number:,} has score {scores[number]}; expected a finite number")
    if (count := types.count(PieceType.UNKNOWN)) != 1:
        raise ValueError(f"it has {count:,} pieces of type unknown; expected exactly one")
    if all(map(pieces.is_reserved, range(len(pieces)))):  # stops at the first that is not
        raise ValueError("it has none but unknown, control and byte pieces, which no text is split into")
    _check_unique(pieces, bpe)
    _check_byte_pieces(pieces, byte_fallback)


def _check_unique(pieces: Pieces, bpe: bool) -> None:
    """The library has two tables: a text may be in both, but once in each; in a BPE model only in one."""
    if len(set(pieces.texts)) == len(pieces):
        return
    seen: dict[tuple[bool, bytes], int] = {}
    for number, text in enumerate(pieces.texts):
        first = seen.setdefault((not bpe and pieces.is_reserved(number), text), number)
        if first != number:
            raise ValueError(f"pieces {first:,} and {number:,} are both {_short(text)}")


def _check_byte_pieces(pieces: Pieces, byte_fallback: bool) -> None:
    numbers = [number for number, kind in enumerate(pieces.types) if kind == PieceType.BYTE]
    if numbers and not byte_fallback:
        raise ValueError(f"piece {numbers[0]:,} is of type byte and the trainer spec has no byte_fallback")
    for number in numbers:
        if not _BYTE_PIECE.fullmatch(pieces.texts[number]):
            raise ValueError(f"byte piece {number:,} is {_short(pieces.texts[number])}; expected <0x00> to <0xFF>")
    if byte_fallback and len(numbers) != 256:
        raise ValueError(f"it has {len(numbers)} byte pieces; byte_fallback needs 256")


def check_id(name: str, value: int, pieces: int) -> None:
    """Refuse an id outside the vocabulary; -1 means none.

    The library ignores these ids and looks pieces up by their texts, but converters to other formats use the ids.

    Raises:
        ValueError: it is below -1, or not below the number of pieces.
    """
    if not -1 <= value < pieces:
        raise ValueError(f"{name} is {value:,}; expected -1 (none) or the id of one of {pieces:,} pieces")


def check_charsmap(data: bytes, begin: int, end: int) -> None:
    """Refuse a precompiled charsmap (bytes `begin` to `end` of `data`) in which a lookup could leave its bounds.

    Layout (`Normalizer::DecodePrecompiledCharsMap`): 4 bytes little-endian size of the trie, the trie, replacement
    texts that each end in a zero byte. A trie unit is a value (if bit 31 is set: an offset into the texts) or leads to
    other units, by exclusive or with an offset and a byte of text; the library's lookup has no bounds checks. The
    library (0.2.3) refuses some further charsmaps, whose lookups stay within bounds too.

    Raises:
        ValueError: a size that does not fit, texts without an end, a unit that leads out of bounds, a root that leads
            nowhere.
    """
    size = end - begin
    if not size:
        return
    if size <= 4:
        raise ValueError(f"its charsmap at byte {begin:,} has {size} bytes; expected more than 4")
    (trie_bytes,) = struct.unpack_from("<I", data, begin)
    if 4 + trie_bytes >= size:
        raise ValueError(f"its charsmap at byte {begin:,} has {size:,} bytes and claims a trie of {trie_bytes:,}")
    if not trie_bytes or trie_bytes % _TRIE_BLOCK_BYTES:
        raise ValueError(f"the trie of its charsmap has {trie_bytes:,} bytes; expected a multiple of 1,024")
    if data[end - 1]:
        raise ValueError(f"the texts of its charsmap do not end in a zero byte at {end - 1:,}")
    texts_bytes = size - 4 - trie_bytes
    count = trie_bytes // 4
    for number, unit in enumerate(struct.unpack_from(f"<{count}I", data, begin + 4)):
        if unit >> 31:
            if unit & 0x7FFFFFFF >= texts_bytes:
                raise ValueError(
                    f"unit {number:,} of its charsmap points {unit & 0x7FFFFFFF:,} bytes into {texts_bytes:,}"
                )
        # counts are whole blocks of 256 units, so that the exclusive or with a byte of text stays within the block
        elif number ^ ((unit >> 10) << ((unit & 0x200) >> 6)) >= count:
            raise ValueError(f"unit {number:,} of its charsmap leads outside its {count:,} units")
    (root,) = struct.unpack_from("<I", data, begin + 4)
    if not root >> 10 or root & 0x3FF or root >> 31:
        raise ValueError(f"the root of its charsmap is {root:#010x}; expected one that leads to other units")


def _short(text: bytes) -> str:
    shown = repr(text.decode())
    return shown if len(shown) <= 80 else shown[:77] + "..."
