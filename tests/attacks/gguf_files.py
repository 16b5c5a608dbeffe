"""GGUF headers that lie, or claim what nothing has. Each file is bytes, a pattern of what must be said of it, and the
error. `LEGAL` are files that look odd, are sound, and must stay readable.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from rabbitllm.errors import CorruptShardError, RabbitLLMError, UnreadableFormatError

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
FORMATS = {U8: "<B", U32: "<I", F32: "<f", BOOL: "<B", U64: "<Q"}
ARCHITECTURE = ("general.architecture", STRING, "llama")
TENSOR = ("t", (2,), 0, 0)
"""Name, shape with the fastest dimension first, number of the type, offset in the data."""


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def single(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else struct.pack(FORMATS[kind], value)


def array(kind: int, values: Iterable[Any], count: int | None = None) -> bytes:
    made = [single(kind, value) for value in values]
    return struct.pack("<IQ", kind, len(made) if count is None else count) + b"".join(made)


def entry(key: str | bytes, kind: int, value: Any) -> bytes:
    """An entry of the metadata; a value of bytes is written as it is."""
    raw = value if isinstance(value, bytes) else single(kind, value)
    return text(key) + struct.pack("<I", kind) + raw


def tensor(name: str | bytes, shape: tuple[int, ...], kind: int, offset: int, dimensions: int | None = None) -> bytes:
    count = len(shape) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(shape)}Q", count, *shape) + struct.pack("<IQ", kind, offset)


def file_of(
    tensors: Iterable[tuple[Any, ...]] = (TENSOR,),
    entries: Iterable[tuple[Any, ...]] = (ARCHITECTURE,),
    data: bytes = bytes(32),
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A file with these tensors and metadata; `counts` are the numbers that it declares instead of theirs."""
    listed, held = [tensor(*one) for one in tensors], [entry(*one) for one in entries]
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(listed), len(held)))) + b"".join(held + listed)
    return head + bytes(-len(head) % alignment) + data


def with_entry(kind: int, value: Any, key: str | bytes = "k") -> bytes:
    return file_of(entries=[ARCHITECTURE, (key, kind, value)])


def aligned_to(kind: int, value: Any) -> bytes:
    return with_entry(kind, value, "general.alignment")


_MANY = 1 << 62
_CORRUPT: dict[str, tuple[bytes, str]] = {
    "only a magic": (b"GGUF", "declares 4 bytes"),
    "cut in the counts": (b"GGUF" + struct.pack("<IQ", 3, 1), "declares 8 bytes"),
    "tensors without end": (file_of(counts=(_MANY, 1)), "tensors and 1 metadata entries; at most"),
    "entries without end": (file_of(counts=(1, _MANY)), "metadata entries; at most"),
    "more tensors than there are": (file_of(counts=(9, 1)), "not printable text|declares .* bytes"),
    "more entries than there are": (file_of(counts=(1, 9)), "does not exist|declares .* bytes|not printable"),
    "key without end": (with_entry(U32, b"", b"") + bytes(8), "is not printable text"),
    "key that is long": (with_entry(U32, 1, "k" * 5000), "text of 5,000 bytes; at most 4,096"),
    "key with a newline": (with_entry(U32, 1, "a\nb"), "is not printable text"),
    "key not UTF-8": (with_entry(U32, 1, b"\xff"), "is not UTF-8"),
    "key twice": (file_of(entries=[ARCHITECTURE, ARCHITECTURE]), "appears twice"),
    "text longer than the file": (with_entry(STRING, text("x", 1000)), "declares 1,000 bytes"),
    "text without end": (with_entry(STRING, text("x", _MANY)), "text of 4,611,686,018,427,387,904 bytes; at most"),
    "text of the largest length": (with_entry(STRING, text("x", 2**64 - 1)), "text of 18,446,744,073,709,551,615"),
    "text not UTF-8": (with_entry(STRING, text(b"\xc0\xae")), "is not UTF-8"),
    "unknown type": (with_entry(13, bytes(8)), "has the type 13, which does not exist"),
    "array of arrays": (with_entry(ARRAY, struct.pack("<IQ", ARRAY, 1) + array(U8, [1])), "is an array of type 9"),
    "arrays nested deeply": (with_entry(ARRAY, struct.pack("<IQ", ARRAY, 1) * 10_000), "is an array of type 9"),
    "array of an unknown type": (with_entry(ARRAY, struct.pack("<IQ", 99, 0)), "is an array of type 99"),
    "array longer than the file": (with_entry(ARRAY, array(U32, [1], 1 << 20)), "declares 4,194,304 bytes"),
    "array without end": (with_entry(ARRAY, array(U64, [], 2**64 - 1)), "declares 147,573,952,589,676,412,920 bytes"),
    "texts without end": (with_entry(ARRAY, array(STRING, [], _MANY)), "more than 2,097,152 texts"),
    "empty texts without end": (with_entry(ARRAY, array(STRING, [], 1 << 21)), "declares 16,777,216 bytes"),
    "text in an array longer than the file": (
        with_entry(ARRAY, struct.pack("<IQ", STRING, 5000) + text("x", _MANY) + bytes(40_000)),
        "declares 4,611,686,018,427,387,904 bytes",
    ),
    "alignment of zero": (aligned_to(U32, 0), "its alignment is 0"),
    "alignment not a power of two": (aligned_to(U32, 48), "its alignment is 48"),
    "alignment without end": (aligned_to(U32, 1 << 31), "its alignment is 2147483648"),
    "alignment a text": (aligned_to(STRING, "32"), "its alignment is '32'"),
    "alignment true": (aligned_to(BOOL, 1), "its alignment is True"),
    "tensor without a name": (file_of([("", (2,), 0, 0)]), "is not printable text"),
    "tensor name that is long": (file_of([("n" * 2000, (2,), 0, 0)]), "text of 2,000 bytes; at most 1,024"),
    "tensor name with a NUL": (file_of([("a\0b", (2,), 0, 0)]), "is not printable text"),
    "tensor twice": (file_of([TENSOR, ("t", (2,), 0, 32)], data=bytes(64)), "appears twice"),
    "five dimensions": (file_of([("t", (2, 1, 1, 1, 1), 0, 0)]), "has 5 dimensions; at most 4"),
    "dimensions without end": (file_of([("t", (2,), 0, 0, 2**32 - 1)]), "dimensions; at most 4"),
    "shape that overflows": (file_of([("t", (1 << 33, 1 << 33), 0, 0)]), "which blocks of 1 cannot have"),
    "shape with the sign bit": (file_of([("t", (2**64 - 1,), 0, 0)]), "which blocks of 1 cannot have"),
    "row of half a block": (file_of([("t", (16,), 8, 0)]), "which blocks of 32 cannot have"),
    "single value in blocks": (file_of([("t", (), 8, 0)]), "is a single value of Q8_0"),
    "offset between": (file_of([("t", (2,), 0, 4)]), "begins at byte 4 of the data"),
    "offset beyond the file": (file_of([("t", (2,), 0, 1 << 40)]), "and the file has"),
    "offset that overflows": (file_of([("t", (2,), 0, (1 << 64) - 32)]), "and the file has"),
    "tensor beyond the file": (file_of([("t", (1 << 20,), 0, 0)]), "and the file has"),
    "tensors that overlap": (file_of([("a", (16,), 0, 0), ("b", (2,), 0, 32)], data=bytes(64)), "overlaps another"),
    "tensors at one place": (file_of([("a", (2,), 0, 0), ("b", (2,), 0, 0)]), "overlaps another"),
    "more behind the data": (file_of(data=bytes(33)), "its tensors end at byte 136, and it has"),
    "cut in the data": (file_of(data=bytes(7)), "and the file has"),
}
_UNREADABLE: dict[str, tuple[bytes, str]] = {
    "version 1": (file_of(version=1), "is GGUF of version 1; versions 2 and 3 are read"),
    "version without end": (file_of(version=(1 << 32) - 1), "is GGUF of version 4294967295"),
    "big-endian": (file_of(version=3 << 24), "of a big-endian machine"),
    "unknown tensor type": (file_of([("t", (2,), 99, 0)]), "the ggml type 99, which is not supported"),
    "type that was removed": (file_of([("t", (32,), 4, 0)]), "the ggml type 4"),
}
HOSTILE: dict[str, tuple[bytes, str, type[RabbitLLMError]]] = {
    **{name: (data, says, CorruptShardError) for name, (data, says) in _CORRUPT.items()},
    **{name: (data, says, UnreadableFormatError) for name, (data, says) in _UNREADABLE.items()},
}
LEGAL: dict[str, bytes] = {
    "ordinary": file_of([("a", (32, 2), 8, 0), ("b", (3,), 0, 96)], data=bytes(128)),
    "version 2": file_of(version=2),
    "no padding behind the data": file_of(data=bytes(8)),
    "no tensors": file_of([], data=b""),
    "an empty tensor": file_of([("e", (0,), 0, 0), TENSOR]),
    "tensors in another order": file_of([("b", (2,), 0, 32), ("a", (2,), 0, 0)], data=bytes(64)),
    "a hole": file_of([("a", (2,), 0, 64)], data=bytes(96)),
    "another alignment": file_of(
        [("a", (2,), 0, 8)], [ARCHITECTURE, ("general.alignment", U32, 8)], bytes(16), alignment=8
    ),
    "a long array": with_entry(ARRAY, array(STRING, ["x"] * 5000)),
    "every kind of value": file_of(
        entries=[ARCHITECTURE, ("a", U8, 1), ("b", F32, 0.5), ("c", BOOL, 2), ("d", U64, 2**64 - 1), ("e", STRING, "")]
    ),
}
