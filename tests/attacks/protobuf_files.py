"""Vocabularies that lie: protobuf files which no writer makes, or which the SentencePiece library cannot use.

Each is bytes and a pattern of what must be said of it. `ACCEPTED_BY_THE_LIBRARY` names those that sentencepiece 0.2.3
loads all the same.
"""

from __future__ import annotations

import math
import struct

FIXED64, START_GROUP, END_GROUP, FIXED32 = 1, 3, 4, 5


def varint(number: int) -> bytes:
    """An unsigned number, or a negative one as 64 bits."""
    number &= (1 << 64) - 1
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(encoded) + bytes([number])


def number(field: int, value: int) -> bytes:
    """A field of wire type 0."""
    return varint(field << 3) + varint(value)


def span(field: int, content: bytes | str) -> bytes:
    """A field of wire type 2."""
    raw = content.encode() if isinstance(content, str) else content
    return varint(field << 3 | 2) + varint(len(raw)) + raw


def real(field: int, value: float) -> bytes:
    """A field of wire type 5."""
    return varint(field << 3 | FIXED32) + struct.pack("<f", value)


def piece(text: bytes | str, score: float = 0.0, kind: int | None = None, more: bytes = b"") -> bytes:
    """A `ModelProto.pieces`, laid out as the library does it."""
    return span(1, span(1, text) + real(2, score) + (b"" if kind is None else number(3, kind)) + more)


def charsmap(units: list[int], texts: bytes = b"x\0") -> bytes:
    """A normaliser spec with a precompiled charsmap of these trie units."""
    trie = struct.pack(f"<{len(units)}I", *units)
    return span(3, span(2, struct.pack("<I", len(trie)) + trie + texts))


SOUND = b"".join(
    [
        piece("<unk>", 0, 2),
        piece("<s>", 0, 3),
        piece("</s>", 0, 3),
        piece("\u2581", -1),
        piece("a", -2),
        piece("\u2581a", -1.5),
    ]
)
"""A vocabulary of six pieces that the library uses."""
BYTES = b"".join(piece(f"<0x{value:02X}>", 0, 6) for value in range(256))
FALLBACK = span(2, number(35, 1))
DEEP = b""
"""One message in another, 5,000 times."""
for _ in range(5_000):
    DEEP = span(1, DEEP)

HOSTILE: dict[str, tuple[bytes, str]] = {
    # varints
    "varint cut off": (SOUND + b"\x08\xff", "varint at byte .* is truncated"),
    "tag cut off": (SOUND + b"\xff", "varint at byte .* is truncated"),
    "tag without a length": (SOUND + b"\x0a", "varint at byte .* is truncated"),
    "varint of 11 bytes": (SOUND + number(200, 0)[:-1] + b"\xff" * 10 + b"\x01", "more than 10 bytes"),
    "varint without end": (SOUND + number(200, 0)[:-1] + b"\x80" * 100_000, "more than 10 bytes"),
    "varint of 70 bits": (SOUND + number(200, 0)[:-1] + b"\xff" * 9 + b"\x7f", "more than 64 bits"),
    # lengths
    "length beyond the file": (SOUND + b"\x0a\x05abcd", "needs 5 bytes; 4 remain"),
    "length of 2 GiB": (SOUND + b"\x0a" + varint(1 << 31), "needs 2,147,483,648 bytes; 0 remain"),
    "length of 2^64 - 1": (SOUND + b"\x0a" + varint(-1), "needs 18,446,744,073,709,551,615 bytes"),
    "piece longer than its message": (SOUND + span(1, b"\x0a\x7fabcdefgh"), "needs 127 bytes; 8 remain"),
    "text that runs into the next piece": (SOUND + span(1, b"\x0a\x0bq\x15\0\0\0\0") + piece("zzz"), "needs 11 bytes"),
    "score of 3 bytes": (SOUND + span(1, span(1, "q") + b"\x15\0\0\0"), "needs 4 bytes; 3 remain"),
    "fixed64 of 7 bytes": (SOUND + varint(200 << 3 | FIXED64) + bytes(7), "needs 8 bytes; 7 remain"),
    # tags
    "field 0": (SOUND + b"\0\0", "has number 0; expected 1 to 536,870,911"),
    "field 2^29": (SOUND + varint(1 << 32) + b"\0", "has number 536,870,912"),
    "group": (
        SOUND + varint(300 << 3 | START_GROUP) + varint(300 << 3 | END_GROUP),
        "has wire type 3; 3 and 4 are gro",
    ),
    "groups in each other": (SOUND + varint(300 << 3 | START_GROUP) * 100_000, "has wire type 3"),
    "end of no group": (SOUND + varint(300 << 3 | END_GROUP), "has wire type 4"),
    "wire type 6": (SOUND + varint(300 << 3 | 6), "has wire type 6"),
    "wire type 7": (SOUND + varint(300 << 3 | 7), "has wire type 7"),
    # wire types other than the schema's
    "pieces a number": (SOUND + number(1, 5), r"field 1 \(pieces\) .* wire type 0; expected 2"),
    "trainer spec a number": (SOUND + number(2, 5), r"field 2 \(trainer_spec\) .* wire type 0; expected 2"),
    "text a number": (SOUND + span(1, number(1, 5) + real(2, 0)), r"field 1 \(piece\) .* wire type 0; expected 2"),
    "score a number": (SOUND + span(1, span(1, "q") + number(2, 5)), r"\(score\) .* wire type 0; expected 5"),
    "type a float": (SOUND + span(1, span(1, "q") + real(2, 0) + real(3, 0)), r"\(type\) .* wire type 5; expected 0"),
    "vocab_size a text": (SOUND + span(2, span(4, "x")), r"\(vocab_size\) .* wire type 2; expected 0"),
    # fields twice
    "two trainer specs": (SOUND + span(2, number(4, 5)) + span(2, number(3, 2)), r"\(trainer_spec\) .* appears twice"),
    "two scores": (SOUND + piece("q", 1.0, None, real(2, 2.0)), r"\(score\) .* appears twice"),
    "two texts": (SOUND + span(1, span(1, "q") + span(1, "r")), r"\(piece\) .* appears twice"),
    "two unk_ids": (SOUND + span(2, number(40, 0) * 2), r"\(unk_id\) .* appears twice"),
    # texts and enumerators
    "piece that is not UTF-8": (SOUND + piece(b"\xff\xfe"), "the piece at byte .* is not UTF-8"),
    "an unpaired surrogate": (SOUND + piece(b"\xed\xa0\x80"), "the piece at byte .* is not UTF-8"),
    "unk_piece that is not UTF-8": (SOUND + span(2, span(45, b"\xff")), "the unk_piece at byte .* is not UTF-8"),
    "piece of type 0": (SOUND + piece("q", 0, 0), "the type before byte .* is 0; known ones are 1 normal, 2 unknown"),
    "piece of type 7": (SOUND + piece("q", 0, 7), "the type before byte .* is 7"),
    "piece of type -1": (SOUND + piece("q", 0, -1), "the type before byte .* is -1"),
    "model of type 9": (SOUND + span(2, number(3, 9)), "model_type .* is 9; known ones are 1 unigram, 2 bpe"),
    # pieces
    "empty file": (b"", "0 pieces of type unknown"),
    "empty piece": (SOUND + piece(""), "piece 6 is empty"),
    "piece without fields": (SOUND + span(1, b""), "piece 6 is empty"),
    "deep nesting": (SOUND + DEEP, "is not UTF-8"),
    "the same piece twice": (SOUND + piece("a"), "pieces 4 and 6 are both 'a'"),
    "the same control piece twice": (SOUND + piece("<s>", 0, 3), "pieces 1 and 6 are both '<s>'"),
    "one text in both tables of a BPE model": (
        SOUND + piece("a", 0, 3) + span(2, number(3, 2)),
        "pieces 4 and 6 are both 'a'",
    ),
    "zero byte in a piece": (SOUND + piece("a\0b"), "piece 6 holds a zero byte"),
    "NaN": (SOUND + piece("q", math.nan), "piece 6 has score nan"),
    "infinity": (SOUND + piece("q", math.inf), "piece 6 has score inf"),
    "minus infinity": (SOUND + piece("q", -math.inf), "piece 6 has score -inf"),
    "piece of 8,000 bytes": (SOUND + piece("z" * 8000), "piece 6 has 8,000 bytes; at most 7,999"),
    "nothing but reserved pieces": (piece("<unk>", 0, 2) + piece("<s>", 0, 3), "only unknown, control and byte"),
    "NaN in a BPE model": (SOUND + piece("q", math.nan) + span(2, number(3, 2)), "piece 6 has score nan"),
    "reserved pieces in a BPE model": (piece("<unk>", 0, 2) + span(2, number(3, 2)), "only unknown, control"),
    "no unknown piece": (piece("a"), "0 pieces of type unknown; expected exactly one"),
    "two unknown pieces": (SOUND + piece("q", 0, 2), "2 pieces of type unknown"),
    "byte piece without byte_fallback": (SOUND + piece("<0x00>", 0, 6), "piece 6 is of type byte"),
    "byte_fallback without byte pieces": (SOUND + FALLBACK, "it has 0 byte pieces; byte_fallback needs 256"),
    "255 byte pieces": (SOUND + BYTES[: -len(piece("<0xFF>", 0, 6))] + FALLBACK, "it has 255 byte pieces"),
    "byte piece in small letters": (SOUND + BYTES.replace(b"0x0A", b"0x0a") + FALLBACK, "is '<0x0a>'; expected <0x00>"),
    "piece of 17 fields": (SOUND + piece("q", 0, 1, number(200, 0) * 14), "more than 16 fields"),
    # ids
    "unk_id beyond the pieces": (SOUND + span(2, number(40, 6)), "unk_id is 6; expected -1 .* one of 6 pieces"),
    "eos_id of 2^31 - 1": (SOUND + span(2, number(42, (1 << 31) - 1)), "eos_id is 2,147,483,647"),
    "pad_id of -2": (SOUND + span(2, number(43, -2)), "pad_id is -2"),
    # sizes
    "more other fields than any": (SOUND + number(200, 0) * 1001, "more than 1,000 fields are not pieces"),
    "trainer spec of 5 MB": (SOUND + span(2, span(200, bytes(5_000_000))), "trainer_spec has 5,000,00. bytes; at most"),
    "charsmap of 5 MB": (SOUND + charsmap([0] * 1_280_000), "normalizer_spec has .* bytes; at most"),
    "more pieces than any": (piece("a") * ((1 << 20) + 1), "more than 1,048,576 pieces"),
    # other files of this name
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git-lfs pointer"),
    "tiktoken vocabulary": (b"IQ== 0\nIg== 1\n", "looks like a tiktoken vocabulary"),
    "zip": (b"PK\x03\x04" + bytes(100), "is not a valid SentencePiece model"),
    "JSON": (b'{"model": {}}', "is not a valid SentencePiece model"),
    "zeros": (bytes(1 << 20), "has number 0"),
}

ACCEPTED_BY_THE_LIBRARY = {
    "varint of 70 bits",
    "group",
    "pieces a number",
    "trainer spec a number",
    "score a number",
    "type a float",
    "vocab_size a text",
    "two trainer specs",
    "two scores",
    "two texts",
    "two unk_ids",
    "piece that is not UTF-8",
    "an unpaired surrogate",
    "unk_piece that is not UTF-8",
    "piece of type 0",
    "piece of type 7",
    "piece of type -1",
    "model of type 9",
    "piece of 17 fields",
    "NaN in a BPE model",
    "reserved pieces in a BPE model",
    "unk_id beyond the pieces",
    "eos_id of 2^31 - 1",
    "pad_id of -2",
    "more other fields than any",
    "trainer spec of 5 MB",
}
"""What sentencepiece 0.2.3 loads; each is stricter here on purpose."""
