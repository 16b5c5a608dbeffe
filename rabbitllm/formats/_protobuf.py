"""The protobuf wire format, read strictly: fields one after the other, and their values by a schema.

Format: https://protobuf.dev/programming-guides/encoding/. A message is a run of fields; each has a tag (number and
wire type) and a value, none of them aligned. Every length is compared with the remaining bytes before it is used. An
embedded message is a span, which the caller reads by its own schema: the schema limits the depth, not the file.

Stricter than the reference reader, which accepts input that no writer makes: groups, a known field with another wire
type (skipped there), a repeated singular field (the last wins there, or both are merged), varints of more than 64
bits, enumerators missing in the schema (the default there), text that is not UTF-8. Independent of messages and files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, IntEnum
from typing import Any, TypeVar

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
"""Wire types: the low three bits of a tag. 3 and 4 are groups."""
MAX_VARINT_BYTES = 10
MAX_FIELD_NUMBER = (1 << 29) - 1
_FLOAT = struct.Struct("<f")
_Value = TypeVar("_Value")


class WireFormatError(ValueError):
    """Bytes that no protobuf writer makes, at least not for this schema; the message has the byte offset."""


class FieldKind(Enum):
    """The Python type of a field's value."""

    BOOL = "bool"
    INT32 = "int32"
    FLOAT = "float"
    TEXT = "string"
    SPAN = "bytes"  # or an embedded message: (first byte, byte after the last), not copied

    @property
    def wire_type(self) -> int:
        """The wire type of its encoding."""
        if self in (FieldKind.TEXT, FieldKind.SPAN):
            return LENGTH_DELIMITED
        return FIXED32 if self is FieldKind.FLOAT else VARINT


@dataclass(frozen=True, slots=True)
class SchemaField:
    """One field of a schema.

    Attributes:
        name: its key in the result.
        kind: the Python type of its value.
        values: its enumerators, if it is an enumeration (INT32).
    """

    name: str
    kind: FieldKind
    values: type[IntEnum] | None = None


Schema = Mapping[int, SchemaField]
"""Field number -> its schema."""

FieldRead = tuple[int, int, int]
"""A field as `read_fields` yields it."""


def numbered(number: int, kind: FieldKind, default: _Value, values: type[IntEnum] | None = None) -> _Value:
    """A dataclass field with its number in the message; `schema_of` collects them."""
    entry: Any = field(default=default, metadata={"number": number, "slot": (kind, values)})
    return entry  # type: ignore[no-any-return]


def schema_of(record: type) -> Schema:
    """The schema of a dataclass, of its `numbered` fields; others are not read from a message."""
    return {
        entry.metadata["number"]: SchemaField(entry.name, *entry.metadata["slot"])
        for entry in fields(record)
        if "number" in entry.metadata
    }


def read_varint(data: bytes, begin: int, end: int) -> tuple[int, int]:
    """The unsigned number that starts at byte `begin`, and the offset after it.

    Raises:
        WireFormatError: it continues past byte `end`, or has more than 10 bytes or 64 bits.
    """
    value = 0
    for index in range(MAX_VARINT_BYTES):
        if begin + index >= end:
            raise WireFormatError(f"the varint at byte {begin:,} is truncated at byte {end:,}")
        byte = data[begin + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if value >> 64:
                raise WireFormatError(f"the varint at byte {begin:,} has more than 64 bits")
            return value, begin + index + 1
    raise WireFormatError(f"the varint at byte {begin:,} has more than {MAX_VARINT_BYTES} bytes")


def read_fields(data: bytes, begin: int, end: int) -> Iterator[FieldRead]:
    """The fields of the message at bytes `begin` to `end`, each as (tag, value, offset after the field).

    The tag is `number << 3 | wire type`. The value is the unsigned number itself for a varint, else the offset of the
    payload: the payload is `data[value:offset after the field]`.

    Raises:
        WireFormatError: a truncated field, a group, or an invalid wire type or field number.
    """
    pos = begin
    while pos < end:
        start, tag = pos, data[pos]
        pos += 1
        if tag > 0x7F:
            tag, pos = read_varint(data, start, end)
        if not 1 <= tag >> 3 <= MAX_FIELD_NUMBER:
            raise WireFormatError(
                f"the field at byte {start:,} has number {tag >> 3:,}; expected 1 to {MAX_FIELD_NUMBER:,}"
            )
        wire_type = tag & 7
        if wire_type == LENGTH_DELIMITED:
            if pos < end and data[pos] < 0x80:  # nearly all lengths; a call would cost more than the rest of this loop
                length, pos = data[pos], pos + 1
            else:
                length, pos = read_varint(data, pos, end)
            value, after = pos, pos + length
        elif wire_type == VARINT:
            value, after = read_varint(data, pos, end)
        elif wire_type == FIXED32:
            value, after = pos, pos + 4
        elif wire_type == FIXED64:
            value, after = pos, pos + 8
        else:
            raise WireFormatError(
                f"field {tag >> 3} at byte {start:,} has wire type {wire_type}; "
                "3 and 4 are groups, which are not read, and 6 and 7 do not exist"
            )
        if after > end:
            raise WireFormatError(
                f"field {tag >> 3} at byte {start:,} needs {after - pos:,} bytes; {end - pos:,} remain"
            )
        yield tag, value, after
        pos = after


def read_message(data: bytes, begin: int, end: int, schema: Schema, max_fields: int) -> dict[str, Any]:
    """The fields of the message at bytes `begin` to `end`: slot name -> value, for the fields in it.

    Raises:
        WireFormatError: see `read_fields` and `values_of`; or more than `max_fields` fields, known or not.
    """
    return values_of(data, _at_most(max_fields, read_fields(data, begin, end), begin), schema)


def values_of(data: bytes, fields_read: Iterable[FieldRead], schema: Schema) -> dict[str, Any]:
    """The values of fields of `data`: slot name -> value.

    Fields that the schema lacks are skipped, as the format requires.

    Raises:
        WireFormatError: a known field with another wire type, a repeated singular field, or an invalid value.
    """
    values: dict[str, Any] = {}
    for tag, value, after in fields_read:
        slot = schema.get(tag >> 3)
        if slot is None:
            continue
        if tag & 7 != slot.kind.wire_type:
            raise WireFormatError(
                f"field {tag >> 3} ({slot.name}) before byte {after:,} has wire type {tag & 7}; "
                f"expected {slot.kind.wire_type}"
            )
        if slot.name in values:
            raise WireFormatError(f"field {tag >> 3} ({slot.name}) before byte {after:,} appears twice")
        values[slot.name] = _value(data, value, after, slot)
    return values


def _at_most(limit: int, fields_read: Iterable[FieldRead], begin: int) -> Iterator[FieldRead]:
    for count, entry in enumerate(fields_read):
        if count == limit:
            raise WireFormatError(f"the message at byte {begin:,} has more than {limit:,} fields")
        yield entry


def read_text(data: bytes, begin: int, end: int, name: str) -> str:
    """The text at bytes `begin` to `end`; `name` is for error messages.

    Raises:
        WireFormatError: it is not UTF-8.
    """
    try:
        return str(data[begin:end], "utf-8")
    except UnicodeDecodeError as error:
        raise WireFormatError(
            f"the {name} at byte {begin:,} is not UTF-8 ({error.reason} at byte {begin + error.start:,})"
        ) from None


def _value(data: bytes, value: int, after: int, slot: SchemaField) -> Any:
    kind = slot.kind
    if kind is FieldKind.SPAN:
        return value, after
    if kind is FieldKind.BOOL:
        return bool(value)
    if kind is FieldKind.FLOAT:
        return _FLOAT.unpack_from(data, value)[0]
    if kind is FieldKind.TEXT:
        return read_text(data, value, after, slot.name)
    integer = (value & 0xFFFFFFFF ^ 0x80000000) - 0x80000000  # the format truncates to 32 bits, like a cast
    if slot.values is None:
        return integer
    try:
        return slot.values(integer)
    except ValueError:
        names = ", ".join(f"{entry.value} {entry.name.lower()}" for entry in slot.values)
        raise WireFormatError(f"the {slot.name} before byte {after:,} is {integer}; known ones are {names}") from None
