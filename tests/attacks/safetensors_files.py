"""Headers that lie, or claim what nothing has. Each file is bytes and a pattern of what must be said of it.

All raise CorruptShardError. `ACCEPTED_BY_THE_LIBRARY` names those that safetensors 0.8.0 reads all the same. `LEGAL`
are files that look odd, are sound, and must stay readable.
"""

from __future__ import annotations

import json
from typing import Any

EIGHT = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
"""A tensor of 8 bytes."""


def file_of(header: Any, data: bytes = bytes(8), *, length: int | None = None) -> bytes:
    """A file with this header: JSON text, bytes as they are, or a table."""
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def one(**changes: Any) -> dict[str, Any]:
    """A header of one tensor `t`, with other fields; a field that is None is left out."""
    entry = {**EIGHT, **changes}
    return {"t": {key: value for key, value in entry.items() if value is not None}}


def two(first: tuple[int, int], second: tuple[int, int]) -> dict[str, Any]:
    """A header of two tensors of bytes at these offsets."""
    spans = {"a": first, "b": second}
    return {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in spans.items()
    }


TEXT = json.dumps({"t": EIGHT})
NESTED = "[" * 200 + "]" * 200
DEEP = "[" * 100_000 + "]" * 100_000

EMPTY = '"w%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'

HOSTILE: dict[str, tuple[bytes, str]] = {
    # the length
    "empty file": (b"", "it has 0 bytes; a safetensors file has at least 8"),
    "shorter than a length": (b"1234567", "it has 7 bytes"),
    "length of zero": (file_of("", b""), "declares a header of 0 bytes and has 8 bytes"),
    "length of one": (file_of("{", b""), "declares a header of 1 bytes"),
    "length above the format's limit": (file_of(TEXT, length=100_000_001), "at most 33,554,432 are read"),
    "length above ours": (file_of(TEXT, length=(32 << 20) + 1), "declare a header of 33,554,433 bytes; at most"),
    "length with the sign bit": (file_of(TEXT, length=1 << 63), "declare a header of 9,223,372,036,854,775,808 bytes"),
    "length that overflows": (file_of(TEXT, length=2**64 - 1), "declare a header of 18,446,744,073,709,551,615 bytes"),
    "length beyond the file": (file_of("{}", b"", length=3), "header of 3 bytes and has 10 bytes"),
    # the text
    "not UTF-8": (file_of(b'{"\xff": 1}'), "not valid JSON .*can't decode byte 0xff"),
    "byte order mark": (file_of(b"\xef\xbb\xbf" + TEXT.encode()), r"starts with b'\\xef'"),
    "leading space": (file_of(" " + TEXT), "starts with b' '; a safetensors header starts with '{'"),
    "leading newline": (file_of("\n" + TEXT), "starts with"),
    "a list": (file_of("[]"), r"starts with b'\['"),
    "null": (file_of("null"), "starts with b'n'"),
    "not JSON": (file_of('{"t": }'), "not valid JSON"),
    "cut off": (file_of(TEXT[:-1]), "not valid JSON"),
    "something after the JSON": (file_of(TEXT + "x"), "not valid JSON .*Extra data"),
    "a second object": (file_of(TEXT + TEXT), "not valid JSON .*Extra data"),
    "NUL after the JSON": (file_of(TEXT + "\0"), "not valid JSON .*Extra data"),
    "nested": (file_of(f'{{"t": {NESTED}}}'), r"is described by \[\["),
    "nested without end": (file_of(f'{{"t": {DEEP}}}'), "not valid JSON .*recursion"),
    "lone surrogate": (file_of(TEXT.replace('"t"', '"\\ud800"')), "not printable"),
    "NaN": (file_of('{"t": NaN}'), "NaN is not JSON"),
    "Infinity": (file_of('{"t": -Infinity}'), "-Infinity is not JSON"),
    "number out of range": (file_of(TEXT.replace("[2]", "[1e999]")), r"has shape \[inf\]"),
    "number of thousands of digits": (file_of(TEXT.replace("[2]", f"[{'9' * 5000}]")), "not valid JSON|has shape"),
    "minus zero": (file_of(TEXT.replace("[0, 8]", "[-0, 8]")), "not valid JSON .*-0"),
    "number with an exponent": (file_of(TEXT.replace("[2]", "[2e0]")), r"has shape \[2.0\]"),
    "comment": (file_of(TEXT + "//"), "not valid JSON .*Extra data"),
    "nothing but spaces": (file_of(" " * 64), "starts with b' '"),
    "UTF-16": (file_of(TEXT.encode("utf-16-le")), "not valid JSON"),
    "overlong UTF-8": (file_of(b'{"\xc0\xae\xc0\xae/x": 1}'), "not valid JSON .*can't decode byte 0xc0"),
    # names
    "tensor twice over one range": (
        file_of(f'{{"t": {json.dumps(EIGHT)}, "t": {json.dumps(EIGHT)}}}'),
        "'t' appears twice",
    ),
    "metadata twice": (file_of('{"__metadata__": {}, "__metadata__": {}}', b""), "'__metadata__' appears twice"),
    "field twice": (file_of(TEXT.replace('"shape"', '"shape": [2], "shape"')), "'shape' appears twice"),
    "empty name": (file_of({"": EIGHT}), "empty or not printable"),
    "NUL in a name": (file_of({"a\0b": EIGHT}), "empty or not printable"),
    "newline in a name": (file_of({"a\nb": EIGHT}), "empty or not printable"),
    "text that turns its direction": (file_of({"a\u202eb": EIGHT}), "empty or not printable"),
    "name without end": (file_of({"a" * 100_000: EIGHT}), "has 100,000 characters; at most 1,024"),
    "tensor twice by an escape": (
        file_of(f'{{"t": {json.dumps(EIGHT)}, "\\u0074": {json.dumps(EIGHT)}}}'),
        "'t' appears twice",
    ),
    "tensor twice as two dtypes": (
        file_of(f'{{"t": {json.dumps(EIGHT)}, "t": {json.dumps({**EIGHT, "dtype": "I32"})}}}'),
        "'t' appears twice",
    ),
    "tensor twice over two ranges": (
        file_of(f'{{"t": {json.dumps(EIGHT)}, "t": {json.dumps({**EIGHT, "data_offsets": [8, 16]})}}}', bytes(16)),
        "'t' appears twice",
    ),
    # metadata
    "metadata null": (file_of({"__metadata__": None}, b""), "__metadata__ is not a table of strings"),
    "metadata a list": (file_of({"__metadata__": []}, b""), "__metadata__ is not a table of strings"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}, b""), "__metadata__ is not a table of strings"),
    "metadata of tables": (file_of({"__metadata__": {"a": {"b": "c"}}}, b""), "__metadata__ is not a table of strings"),
    "lone surrogate in the metadata": (file_of('{"__metadata__": {"a": "\\udc00"}}', b""), "an unpaired surrogate"),
    "lone surrogate as a key": (file_of('{"__metadata__": {"\\ud800": "a"}}', b""), "an unpaired surrogate"),
    "metadata that is a tensor": (file_of({"__metadata__": EIGHT}), "__metadata__ is not a table of strings"),
    # fields
    "no table": (file_of({"t": 5}), "tensor 't' is described by 5"),
    "no dtype": (file_of(one(dtype=None)), "expected dtype, shape and data_offsets only"),
    "no shape": (file_of(one(shape=None)), "expected dtype, shape and data_offsets only"),
    "no offsets": (file_of(one(data_offsets=None)), "expected dtype, shape and data_offsets only"),
    "unknown field": (file_of(one(checksum="x")), "expected dtype, shape and data_offsets only"),
    "unknown dtype": (file_of(one(dtype="F33")), "has dtype 'F33'; expected one of F64, F32, F16"),
    "lower-case dtype": (file_of(one(dtype="f32")), "has dtype 'f32'"),
    "dtype a number": (file_of(one(dtype=5)), "has dtype 5"),
    "dtype a list": (file_of(one(dtype=["F32"])), "has dtype"),
    "dtype torch does not have": (file_of(one(dtype="F6_E2M3", shape=[4], data_offsets=[0, 3])), "has dtype 'F6_E2M3'"),
    "shape negative": (file_of(one(shape=[-2])), r"has shape \[-2\]; expected at most 64 natural numbers"),
    "shape of floats": (file_of(one(shape=[2.0])), r"has shape \[2.0\]"),
    "shape of text": (file_of(one(shape=["2"])), "has shape"),
    "shape of null": (file_of(one(shape=[None])), "has shape"),
    "shape of true": (file_of(one(shape=[2, True])), "has shape"),
    "shape a number": (file_of(one(shape=2)), "has shape 2"),
    "shape null": (file_of(TEXT.replace("[2]", "null")), "has shape None"),
    "shape of lists": (file_of(one(shape=[[2]])), r"has shape \[\[2\]\]"),
    "shape a table": (file_of(one(shape={"0": 2})), "has shape"),
    "shape above 64 bits": (file_of(one(shape=[2**64 + 2])), "has shape"),
    "shape of very many dimensions": (file_of(one(shape=[2] + [1] * 99_999)), "expected at most 64 natural numbers"),
    "one offset": (file_of(one(data_offsets=[0])), r"has data_offsets \[0\]; expected \[begin, end\]"),
    "three offsets": (file_of(one(data_offsets=[0, 8, 8])), "has data_offsets"),
    "negative offset": (file_of(one(data_offsets=[-8, 0])), "has data_offsets"),
    "offsets of floats": (file_of(one(data_offsets=[0.0, 8.0])), r"has data_offsets \[0.0, 8.0\]"),
    "offsets of truths": (file_of(one(shape=[], dtype="U8", data_offsets=[False, True]), b"x"), "has data_offsets"),
    "offsets a table": (file_of(one(data_offsets={"begin": 0, "end": 8})), "has data_offsets"),
    "offsets null": (file_of(TEXT.replace("[0, 8]", "null")), "has data_offsets None"),
    "offsets above 64 bits": (file_of(one(data_offsets=[2**64, 2**64 + 8])), "has data_offsets"),
    "end before start": (file_of(one(data_offsets=[8, 0])), "has data_offsets"),
    # the data
    "larger than its shape": (file_of(one(shape=[1])), r"spans 8 bytes; F32 of shape \[1\] needs 4"),
    "smaller than its shape": (file_of(one(shape=[3])), r"spans 8 bytes; F32 of shape \[3\] needs 12"),
    "product that overflows": (file_of(one(shape=[2**62, 2**62])), "no tensor is that large"),
    "bytes that overflow": (
        file_of(one(shape=[2**61])),
        r"spans 8 bytes; F32 of shape .* needs 9,223,372,036,854,775,808",
    ),
    "wrapped to its length": (file_of(one(shape=[2**62 + 2])), "spans 8 bytes; F32 of shape"),
    "overflow before a zero": (
        file_of(one(shape=[2**62, 2**62, 0], data_offsets=[0, 0]), b""),
        "no tensor is that large",
    ),
    "huge but for a zero": (file_of(one(shape=[0, 2**62, 2**62], data_offsets=[0, 0]), b""), "no tensor is that large"),
    "not ending on a byte": (
        file_of(one(dtype="F4", shape=[15])),
        "60 bits, which is not a whole number of bytes",
    ),
    "half a byte": (
        file_of(one(dtype="F4", shape=[3], data_offsets=[0, 1]), b"x"),
        "12 bits, which is not a whole number",
    ),
    "8-bit floats of another length": (file_of(one(dtype="F8_E8M0", shape=[9])), "spans 8 bytes; F8_E8M0 of shape"),
    "half of a half": (file_of(one(dtype="F16", shape=[2], data_offsets=[0, 3]), bytes(3)), "spans 3 bytes; F16"),
    "hole at the start": (
        file_of(one(data_offsets=[8, 16]), bytes(16)),
        "'t' leaves a hole before it: it starts at byte",
    ),
    "hole in the middle": (file_of(two((0, 3), (4, 8))), "'b' leaves a hole before it"),
    "overlap": (file_of(two((0, 5), (4, 8))), "'b' overlaps the tensor before it"),
    "one range twice": (file_of(two((0, 8), (0, 8))), "overlaps the tensor before it"),
    "empty tensor inside another": (file_of(two((0, 8), (4, 4))), "overlaps the tensor before it"),
    "truncated": (file_of({"t": EIGHT}, bytes(7)), "it is truncated: .* bytes found, .* expected from its header"),
    "truncated to its header": (file_of({"t": EIGHT}, b""), "it is truncated"),
    "trailing bytes": (file_of({"t": EIGHT}, bytes(9)), "followed by bytes that belong to no tensor"),
    "trailing bytes and no tensor": (file_of({}, bytes(1)), "followed by bytes that belong to no tensor"),
    "a zip behind the data": (
        file_of({"t": EIGHT}, bytes(8) + b"PK\5\6" + bytes(18)),
        "bytes that belong to no tensor",
    ),
    # other files of this name
    "a bare pickle": (b"\x80\x02}q\x00X\x01\x00\x00\x00aK\x01s.", "declare a header of"),
    "a web page": (b"<!DOCTYPE html><html>Access denied</html>", "declare a header of"),
    "a git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\nsize 5\n", "declare a header of"),
    "zeros": (bytes(4096), "declares a header of 0 bytes"),
    # more than any checkpoint needs
    "very many empty tensors": (
        file_of("{" + ",".join(EMPTY % n for n in range(200_000)) + "}", b""),
        "about 1,400,000",
    ),
    "as many tensors as are read, and a hole": (
        file_of("{" + ",".join([EMPTY % n for n in range(85_000)] + [TEXT[1:-1].replace("[0, 8]", "[8, 16]")]) + "}"),
        "'t' leaves a hole before it",
    ),
    "as many pairs as are read, and a hole": (
        file_of(
            '{"__metadata__": {' + ",".join(f'"{n}": "{n}"' for n in range(599_000)) + "}," + TEXT[1:].replace("8", "9")
        ),
        "spans 9 bytes",
    ),
    "as many lists as are read": (file_of('{"t": [' + "[]," * 299_000 + "0]}", b""), r"is described by \[\[\], \[\]"),
    "as wide a text as is read": (
        file_of('{"__metadata__": {"a": "😀' + "x" * ((16 << 20) - 99) + '"}}'),
        "bytes that belong to no tensor",
    ),
    "very many pairs": (
        file_of('{"__metadata__": {' + ",".join(f'"{n}": ""' for n in range(800_000)) + "}}", b""),
        "about 800,001 values; at most 600,000 are read",
    ),
    "very many lists": (file_of('{"t": [' + "[]," * 500_000 + "0]}", b""), "about 1,000,002 values"),
    "very wide text": (file_of('{"__metadata__": {"a": "😀' + "x" * (17 << 20) + '"}}', b""), "bytes as text; at most"),
}

ACCEPTED_BY_THE_LIBRARY = {
    "leading space",
    "leading newline",
    "tensor twice over one range",
    "empty name",
    "NUL in a name",
    "newline in a name",
    "text that turns its direction",
    "name without end",
    "tensor twice by an escape",
    "tensor twice as two dtypes",
    "metadata null",
    "unknown field",
    "shape of very many dimensions",
    "huge but for a zero",
    "very many empty tensors",
    "very many pairs",
    "very wide text",
}
"""What safetensors 0.8.0 reads; each is stricter here on purpose."""

LEGAL: dict[str, tuple[bytes, dict[str, tuple[str, tuple[int, ...], int]]]] = {
    "no tensor": (file_of({}, b""), {}),
    "metadata": (file_of({"__metadata__": {"format": "pt"}, "t": EIGHT}), {"t": ("F32", (2,), 8)}),
    "padded with spaces": (file_of(TEXT + " " * 99), {"t": ("F32", (2,), 8)}),
    "a name that looks like a path": (file_of({"../../x": EIGHT}), {"../../x": ("F32", (2,), 8)}),
    "a name in another script": (file_of({"слой.0": EIGHT}), {"слой.0": ("F32", (2,), 8)}),
    "out of order": (
        file_of(dict(reversed(two((0, 3), (3, 8)).items()))),
        {"a": ("U8", (3,), 3), "b": ("U8", (5,), 5)},
    ),
    "scalar": (file_of(one(shape=[], dtype="I64")), {"t": ("I64", (), 8)}),
    "empty ones sharing an offset": (
        file_of({**two((0, 8), (8, 8)), "c": {"dtype": "F32", "shape": [0, 7], "data_offsets": [0, 0]}}),
        {"c": ("F32", (0, 7), 0), "a": ("U8", (8,), 8), "b": ("U8", (0,), 0)},
    ),
    "4-bit floats": (file_of(one(dtype="F4", shape=[2, 8])), {"t": ("F4", (2, 8), 8)}),
    "8-bit floats": (file_of(one(dtype="F8_E4M3", shape=[2, 4])), {"t": ("F8_E4M3", (2, 4), 8)}),
    "8-bit exponents": (file_of(one(dtype="F8_E8M0", shape=[8])), {"t": ("F8_E8M0", (8,), 8)}),
    "a zero and a large size": (
        file_of(one(shape=[0, 2**62], data_offsets=[0, 0]), b""),
        {"t": ("F32", (0, 2**62), 0)},
    ),
    "NaN": (file_of({"t": EIGHT}, b"\xff\xff\xff\x7f\0\0\xc0\xff"), {"t": ("F32", (2,), 8)}),
    "infinities": (file_of({"t": EIGHT}, b"\0\0\x80\x7f\0\0\x80\xff"), {"t": ("F32", (2,), 8)}),
    "truths of other bytes": (file_of(one(dtype="BOOL", shape=[8]), b"\7\xff" + bytes(6)), {"t": ("BOOL", (8,), 8)}),
    "64 dimensions": (file_of(one(shape=[2] + [1] * 63)), {"t": ("F32", (2, *[1] * 63), 8)}),
}
