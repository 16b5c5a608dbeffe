"""Files changed where their format has structure, so that many get past a reader's first checks.

One mutator a format. Each takes a file and a source of chance and gives another file; what it cannot take apart it
changes as bytes. The same mutators serve the property tests and the fuzz targets. They share no code with the readers.
"""

from __future__ import annotations

import copy
import io
import json
import pickletools
import struct
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

from tests.attacks.protobuf_files import number, real, span, varint
from tests.support.torch_files import Member, pack, zip64_extra

Mutator = Callable[[bytes, Random], bytes]

EDGES = (0, 1, 2, 3, 4, 7, 8, 9, 16, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 0x7FFF, 0xFFFF, 1 << 16, 1 << 20)
EDGES += ((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
"""Numbers at which something wraps, overflows or begins."""
ODD_TEXTS = (
    "",
    ".",
    "..",
    "../x",
    "/x",
    "C:\\x",
    "a/b",
    "a\\b",
    "a\0b",
    "a\nb",
    "\ufeff",
    "\u202ea",
    "é",
    "😀",
    "w",
    "0",
)


def change_bytes(data: bytes, random: Random) -> bytes:
    """A few bytes set, put in, taken out or repeated."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        start = random.randint(0, len(changed))
        cut = random.choice((0, 0, 1, 1, 2, 4, 8))
        new = random.choice((b"", b"\0", b"\xff", random.randbytes(1), random.randbytes(4), b"\xff" * 8))
        changed[start : start + cut] = changed[start : start + random.randint(1, 30)] if random.random() < 0.2 else new
    return bytes(changed)


def change_gguf(data: bytes, random: Random) -> bytes:
    """Numbers of the header, which have no fixed places, or bytes."""
    if random.random() < 0.3 or len(data) < 32:
        return change_bytes(data, random)
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2))):
        width = random.choice((4, 8, 8))
        position = random.randint(4, min(len(changed), 400) - width)
        held = int.from_bytes(changed[position : position + width], "little")
        number = random.choice((*EDGES, held + random.choice((-1, 1, 32))))
        changed[position : position + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    return bytes(changed)


# safetensors


class Pairs(list[tuple[str, Any]]):
    """A JSON object as its pairs, so that a key can be there twice."""


ODD_JSON = (None, True, False, "", "F32", 1.0, -1, 2.5, [], [[]], Pairs(), Pairs([("x", "y")]), -0.0, 10**400)
DTYPES = ("F64", "F32", "BF16", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3", "I64", "U8", "BOOL", "C64", "f32", "F33", "")
ENDS = ("", " ", "\n", "\t", "\0", "x", "{}", "//", "\ufeff")


def change_safetensors(data: bytes, random: Random) -> bytes:
    """A header with other entries, or a length or data that contradict it."""
    length = int.from_bytes(data[:8], "little")
    body = data[8 + length :]
    try:
        table = json.loads(data[8 : 8 + length], object_pairs_hook=Pairs)
    except (ValueError, RecursionError):
        return change_bytes(data, random)
    if not isinstance(table, Pairs):
        return change_bytes(data, random)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        body = _change_table(table, body, random)
    try:
        text = _as_json(table)
    except RecursionError:
        return change_bytes(data, random)
    if random.random() < 0.1:
        text = random.choice(ENDS) + text
    if random.random() < 0.1:
        text += random.choice(ENDS)
    if random.random() < 0.1:
        position = random.randint(0, len(text))
        odd = random.choice(("1e400", "-", "NaN", "\\ud800", "[" * 2000, '"', "0", "9" * 5000))
        text = text[:position] + odd + text[position:]
    raw = text.encode("utf-8", "surrogatepass")
    claimed = len(raw) if random.random() < 0.9 else random.choice((*EDGES, len(raw) - 1, len(raw) + 1))
    return claimed.to_bytes(8, "little") + raw + body


def _change_table(table: Pairs, body: bytes, random: Random) -> bytes:
    """One change to the header; what the data is afterwards."""
    choice = random.randrange(9)
    if choice == 0 or not table:  # a further tensor that fits
        rows = random.choice((0, 1, 2, 5))
        begin = len(body)
        entry = Pairs([("dtype", "U8"), ("shape", [rows]), ("data_offsets", [begin, begin + rows])])
        table.append((random.choice((*ODD_TEXTS, f"t{len(table)}")), entry))
        return body + bytes(rows)
    index = random.randrange(len(table))
    name, entry = table[index]
    if choice == 1:
        table.insert(random.randint(0, len(table)), (name, entry))
    elif choice == 2:
        table[index] = (random.choice((*ODD_TEXTS, "__metadata__")), entry)
    elif choice == 3:
        table[index] = (name, _odd(random))
    elif choice == 4:
        del table[index]
    elif choice == 5:
        return random.choice((body + b"\0", body[:-1], body[1:], b"", body + body))
    elif isinstance(entry, Pairs) and entry:
        _change_entry(entry, random)
    return body


def _change_entry(entry: Pairs, random: Random) -> None:
    index = random.randrange(len(entry))
    key, value = entry[index]
    choice = random.randrange(8)
    if choice == 0:
        entry.append((random.choice((key, "x", "shape")), value))
    elif choice == 1:
        del entry[index]
    elif choice == 2:
        entry[index] = (key, _odd(random))
    elif key == "dtype":
        entry[index] = (key, random.choice(DTYPES))
    elif isinstance(value, list):
        numbers = list(value)
        place = random.randint(0, len(numbers))
        near = numbers[place] if place < len(numbers) and isinstance(numbers[place], int) else 0
        new = random.choice((near + 1, near - 1, -near, near * 2, random.choice(EDGES), _odd(random)))
        numbers[place : place + random.randint(0, 1)] = [new] * random.choice((1, 1, 1, 2, 65))
        entry[index] = (key, numbers)


def _odd(random: Random) -> Any:
    return copy.deepcopy(random.choice(ODD_JSON))


def _as_json(value: Any) -> str:
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(str(key))}:{_as_json(inner)}" for key, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_as_json, value)) + "]"
    if isinstance(value, int) and value.bit_length() > 4000:
        return "1" + "0" * 400  # Python refuses to write it
    return json.dumps(value)


# pickles

GLOBALS = (
    *("collections OrderedDict", "torch FloatStorage", "torch BFloat16Storage", "torch.storage UntypedStorage"),
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3", "torch._utils _rebuild_parameter"),
    *("torch._tensor _rebuild_from_type_v2", "torch Tensor", "torch.nn.parameter Parameter", "torch Size"),
    *("torch float32", "torch device", "_codecs encode", "builtins set", "__builtin__ complex", "os system"),
)


def _values() -> list[bytes]:
    """What puts one plain value on the stack."""
    texts = [b"X" + struct.pack("<I", len(text.encode())) + text.encode() for text in (*ODD_TEXTS, "storage", "cpu")]
    numbers = [b"\x8a\x09" + edge.to_bytes(9, "little", signed=True) for edge in (*EDGES, -1)]
    small = [b"K" + bytes([small]) for small in range(6)]
    return [*texts, *numbers, *small * 3, b"N", b"\x88", b"\x89", b"]", b"}", b")", b"G" + bytes(8), b"C\x01x"]


VALUES = _values()
_PLAIN = {value[:1] for value in VALUES} | {b"J", b"M", b"\x8c"}


def _opcodes() -> list[bytes]:
    """Every opcode, with an argument of the right length where it has a short one; and every global."""
    opcodes = [b"c" + name.replace(" ", "\n").encode() + b"\n" for name in GLOBALS]
    for opcode in pickletools.opcodes:
        code, width = opcode.code.encode("latin-1"), opcode.arg.n if opcode.arg else 0
        if width > 0:
            opcodes += [code + bytes(width), code + b"\1" + bytes(width - 1), code + b"\xff" * width]
        else:
            opcodes.append(code)
    return opcodes + VALUES


OPCODES = _opcodes()


def change_pickle(data: bytes, random: Random) -> bytes:
    """Opcodes taken out, put in, repeated, moved or given another argument."""
    parts = _split_pickle(data)
    plain = [number for number, part in enumerate(parts) if part[:1] in _PLAIN]
    if plain and random.random() < 0.6:  # what keeps the stack as it was
        index = random.choice(plain)
        parts[index] = random.choice(VALUES)
        if random.random() < 0.3:
            parts[index:index] = [b"](", random.choice(VALUES), b"e"] if random.random() < 0.5 else [b"]"]
        return b"".join(parts)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        index, other = random.randint(0, len(parts)), random.randint(0, len(parts))
        choice = random.randrange(7)
        if choice == 0:
            del parts[index : index + random.choice((1, 1, 2, 5))]
        elif choice <= 2:
            parts[index:index] = [random.choice(OPCODES)]
        elif choice == 3:
            parts[index : index + 1] = [random.choice(OPCODES)]
        elif choice == 4:
            parts[index:index] = parts[other : other + random.randint(1, 8)] * random.choice((1, 1, 2, 10))
        elif choice == 5:
            moved = parts[index : index + 3]
            del parts[index : index + 3]
            parts[other:other] = moved
        elif index < len(parts):
            parts[index] = parts[index][:1] + change_bytes(parts[index][1:], random)
    return b"".join(parts)


def _split_pickle(data: bytes) -> list[bytes]:
    """The opcodes with their arguments; what is none is the last part."""
    begins = []
    try:
        for _, _, position in pickletools.genops(data):
            begins.append(position or 0)
    except Exception:  # whatever Python's lister thinks of it: this is no test of that
        pass
    ends = [*begins[1:], len(data)] if begins else []
    return [data[begin:end] for begin, end in zip(begins, ends, strict=True)] or [data]


# torch zips

_ENTRY_BITS = {"version": 16, "flags": 16, "method": 16, "crc": 32, "packed": 32, "size": 32}
_CENTRAL_BITS = {**_ENTRY_BITS, "disk": 16, "attributes": 32, "header": 32}
_END_BITS = {"disk": 16, "first": 16, "here": 16, "count": 16, "size": 32, "offset": 32}
_ZIP64_BITS = {"length": 64, "here": 64, "count": 64, "size": 64, "offset": 64, "record": 64, "disk": 32, "disks": 32}
_JUNK = (b"\0", b"JUNK", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), b"PK\x06\x07" + bytes(16), bytes(64))
_RECORDS = ("data.pkl", "data/0", "data/1", "data/../x", "byteorder", "version", "constants.pkl", "", "data/", "x")


def change_torch_zip(data: bytes, random: Random) -> bytes:
    """A zip of entries, records or headers that contradict one another, or with another pickle in it."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as opened:
            if any(info.compress_type or info.file_size > len(data) for info in opened.infolist()):
                return change_bytes(data, random)
            members = [Member(info.filename, opened.read(info)) for info in opened.infolist()]
    except Exception:  # whatever Python's reader thinks of it: this is no test of that
        return change_bytes(data, random)
    whole: dict[str, Any] = {}
    for _ in range(random.choice((1, 1, 1, 2))):
        if random.random() < 0.3:
            _change_whole(whole, random)
        else:
            _change_members(members, random)
    return pack(members, **whole)


def _change_whole(whole: dict[str, Any], random: Random) -> None:
    choice = random.randrange(4)
    if choice == 0:
        where = random.choice(("prefix", "between", "behind_directory", "suffix", "comment"))
        whole[where] = random.choice(_JUNK)
    elif choice == 1:
        whole["end"] = {**whole.get("end", {}), **_field(_END_BITS, random)}
    elif choice == 2:
        whole["zip64"] = {**whole.get("zip64", {}), **_field(_ZIP64_BITS, random)}
    else:
        whole["zip64"] = {}


def _change_members(members: list[Member], random: Random) -> None:
    if not members:
        members.append(Member("archive/data.pkl", b"\x80\x02}."))
    index = random.randrange(len(members))
    member = members[index]
    choice = random.randrange(9)
    if choice <= 2:
        pickles = [number for number, entry in enumerate(members) if entry.name.endswith("data.pkl")]
        index = random.choice(pickles or [index])
        changed = change_pickle(members[index].data, random)
        members[index] = Member(members[index].name, changed)
    elif choice == 3:
        members[index] = Member(member.name, change_bytes(member.data, random))
    elif choice == 4:
        folder, _, _ = member.name.partition("/")
        name = random.choice((folder, folder, "evil", "..")) + "/" + random.choice(_RECORDS)
        members.insert(random.randint(0, len(members)), Member(name, member.data))
    elif choice == 5:
        del members[index]
    elif choice == 6:
        members[index] = Member(member.name, member.data, member.local, member.central, not member.described)
    else:
        changes = _odd_fields(random, central=bool(choice % 2))
        local, central = (member.local, {**member.central, **changes}) if choice % 2 else (changes, member.central)
        if random.random() < 0.3:  # the same lie in both
            local = central = {key: value for key, value in changes.items() if key in (*_ENTRY_BITS, "name", "extra")}
        members[index] = Member(member.name, member.data, local, central, member.described)


def _odd_fields(random: Random, central: bool) -> dict[str, Any]:
    choice = random.randrange(4)
    if choice == 0:
        return {"name": b"archive/" + random.choice((*ODD_TEXTS, *_RECORDS)).encode("utf-8", "surrogatepass")}
    if choice == 1:
        extras = (
            zip64_extra(random.choice(EDGES)),
            zip64_extra(16, 16),
            b"FB\2\0ZZ",
            b"up\0\0",
            b"\1\0",
            b"FB\xff\xffZ",
        )
        return {"extra": random.choice(extras)}
    return _field(_CENTRAL_BITS if central else _ENTRY_BITS, random)


def _field(bits: dict[str, int], random: Random) -> dict[str, int]:
    name = random.choice(list(bits))
    return {name: random.choice(EDGES) & ((1 << bits[name]) - 1)}


# protobuf


def change_protobuf(data: bytes, random: Random) -> bytes:
    """Fields taken out, put in, repeated, moved or changed, at the top or in a message."""
    fields = _split_message(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        index, other = random.randint(0, len(fields)), random.randint(0, len(fields))
        choice = random.randrange(6)
        if choice == 0:
            del fields[index : index + 1]
        elif choice == 1:
            fields[index:index] = [_made_up_field(random)]
        elif choice == 2:
            fields[index:index] = fields[other : other + 2] * random.choice((1, 1, 2, 20))
        elif choice == 3:
            fields[index : index + 2] = reversed(fields[index : index + 2])
        elif index < len(fields):
            fields[index] = _change_field(fields[index], random)
    return b"".join(fields)


def _made_up_field(random: Random) -> bytes:
    which = random.choice((*range(1, 8), 40, 45, 200, (1 << 29) - 1))
    choice = random.randrange(5)
    if choice == 0:
        return number(which, random.choice(EDGES))
    if choice == 1:
        return real(which, random.choice((0.0, -1.5, float("nan"), float("inf"))))
    if choice == 2:
        return varint(which << 3 | random.randrange(8)) + random.randbytes(random.randrange(9))
    return span(which, random.choice(ODD_TEXTS).encode() if choice == 3 else _made_up_field(random))


def _change_field(field: bytes, random: Random) -> bytes:
    tag, position = _varint_at(field, 0)
    if tag & 7 == 2 and random.random() < 0.7:
        _, begin = _varint_at(field, position)
        inner = (change_protobuf if random.random() < 0.6 else change_bytes)(field[begin:], random)
        length = len(inner) if random.random() < 0.9 else random.choice((*EDGES, len(inner) + 1))
        return varint(tag) + varint(length) + inner
    if tag & 7 == 0 and random.random() < 0.7:
        return varint(tag) + varint(random.choice(EDGES))
    return change_bytes(field, random)


def _split_message(data: bytes) -> list[bytes]:
    """The fields; what is none is the last part."""
    fields, begin = [], 0
    while begin < len(data):
        tag, value = _varint_at(data, begin)
        number_or_length, behind = _varint_at(data, value)
        end = {0: behind, 1: value + 8, 2: behind + number_or_length, 5: value + 4}.get(tag & 7, len(data))
        if end > len(data):
            end = len(data)
        fields.append(data[begin:end])
        begin = end
    return fields


def _varint_at(data: bytes, position: int) -> tuple[int, int]:
    """A number, and where it ends; at the end of the data it ends too."""
    value = shift = 0
    while position < len(data):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80 or shift > 63:
            break
    return value, position
