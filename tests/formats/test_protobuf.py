"""The wire format: numbers, fields and messages that are read, and those that are refused where they are wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitllm.formats._protobuf import (
    LENGTH_DELIMITED,
    FieldKind,
    SchemaField,
    WireFormatError,
    numbered,
    read_fields,
    read_message,
    read_varint,
    schema_of,
)
from tests.attacks.protobuf_files import FIXED64, number, real, span, varint
from tests.support.draws import draws


class Colour(IntEnum):
    RED = 1
    GREEN = 2


SCHEMA = {
    1: SchemaField("text", FieldKind.TEXT),
    2: SchemaField("real", FieldKind.FLOAT),
    3: SchemaField("whole", FieldKind.INT32),
    4: SchemaField("yes", FieldKind.BOOL),
    5: SchemaField("colour", FieldKind.INT32, values=Colour),
    6: SchemaField("span", FieldKind.SPAN),
}


def read(data: bytes) -> dict[str, object]:
    return read_message(data, 0, len(data), SCHEMA, 100)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, (1 << 32) - 1, 1 << 63, (1 << 64) - 1])
def test_varint(value: int) -> None:
    data = b"\xff" + varint(value) + b"\xff"
    assert read_varint(data, 1, len(data)) == (value, len(data) - 1)


def test_overlong_varint_is_read() -> None:
    assert read_varint(b"\x81\x80\x80\x00", 0, 4) == (1, 4)


@pytest.mark.parametrize(
    ("data", "end", "said"),
    [
        (b"", 0, "at byte 0 is truncated at byte 0"),
        (b"\x80\x01", 1, "at byte 0 is truncated at byte 1"),
        (b"\xff" * 9 + b"\x02", 10, "more than 64 bits"),
        (b"\x80" * 10 + b"\x00", 11, "more than 10 bytes"),
    ],
)
def test_invalid_varint(data: bytes, end: int, said: str) -> None:
    with pytest.raises(WireFormatError, match=said):
        read_varint(data, 0, end)


def test_fields_are_read_within_their_message_only() -> None:
    data = b"\xff\xff" + number(1, 300) + span(2, "abc") + real(3, 1.0) + varint(4 << 3 | FIXED64) + bytes(8) + b"\xff"
    assert list(read_fields(data, 2, len(data) - 1)) == [
        (1 << 3, 300, 5),
        (2 << 3 | LENGTH_DELIMITED, 7, 10),
        (3 << 3 | 5, 11, 15),
        (4 << 3 | FIXED64, 16, 24),
    ]
    for begin, end in ((2, 4), (5, 9), (10, 14), (15, 23)):
        with pytest.raises(WireFormatError):
            list(read_fields(data, begin, end))


def test_every_value_type() -> None:
    data = span(1, "\u2581é") + real(2, 0.1) + number(3, -5) + number(4, 2) + number(5, 2) + span(6, "ab")
    assert read(data + number(99, 1)) == {
        "text": "\u2581é",
        "real": pytest.approx(0.1, rel=1e-7),
        "whole": -5,
        "yes": True,
        "colour": Colour.GREEN,
        "span": (len(data) - 2, len(data)),
    }
    assert read(b"") == {}


def test_int32_is_truncated_to_32_bits() -> None:
    assert read(number(3, 0xFFFFFFFF)) == {"whole": -1}
    assert read(number(3, (1 << 40) + 7)) == {"whole": 7}


def test_float_may_be_nan() -> None:
    value = read(real(2, math.nan))["real"]
    assert isinstance(value, float)
    assert math.isnan(value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (number(1, 5), r"field 1 \(text\) before byte 2 has wire type 0; expected 2"),
        (number(3, 1) + number(3, 1), r"field 3 \(whole\) before byte 4 appears twice"),
        (number(5, 3), "the colour before byte 2 is 3; known ones are 1 red, 2 green"),
        (span(1, b"ab\xff"), "the text at byte 2 is not UTF-8 .* at byte 4"),
        (number(9, 1) * 101, "the message at byte 0 has more than 100 fields"),
    ],
)
def test_invalid_message(data: bytes, said: str) -> None:
    with pytest.raises(WireFormatError, match=said):
        read(data)


def test_schema_of_a_dataclass() -> None:
    @dataclass(frozen=True, slots=True)
    class Record:
        text: str = numbered(1, FieldKind.TEXT, "none")
        colour: Colour = numbered(8, FieldKind.INT32, Colour.RED, Colour)  # noqa: RUF009 (an enumerator)
        ours: int = 0

    assert schema_of(Record) == {
        1: SchemaField("text", FieldKind.TEXT),
        8: SchemaField("colour", FieldKind.INT32, Colour),
    }
    assert Record() == Record("none", Colour.RED, 0)


FIELDS = st.one_of(
    st.builds(number, st.integers(8, 1000), st.integers(0, (1 << 64) - 1)),
    st.builds(span, st.integers(8, 1000), st.binary(max_size=200)),
    st.builds(real, st.integers(8, 1000), st.floats(width=32)),
)


@given(st.lists(FIELDS, max_size=20))
@settings(max_examples=draws(200), deadline=None)
def test_unknown_fields_are_skipped(fields: list[bytes]) -> None:
    data = b"".join(fields) + number(3, 9)
    assert read(data) == {"whole": 9}
    assert len(list(read_fields(data, 0, len(data)))) == len(fields) + 1


@given(st.binary(max_size=300))
@settings(max_examples=draws(500), deadline=None)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        after = [end for _, _, end in read_fields(data, 0, len(data))]
        read(data)
    except WireFormatError:
        return
    assert after == sorted(after)
    assert not data or after[-1] == len(data)
