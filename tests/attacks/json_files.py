"""JSON that configs and indexes must not be: for each the bytes and a pattern of what must be said of it.

All raise InvalidIndexError. Python's own reader takes those in `ACCEPTED_BY_PYTHON`, or takes more memory or time over
them than there is. `LEGAL` are odd, and must stay readable.
"""

from __future__ import annotations

DEEP = b"[" * 100_000 + b"]" * 100_000

HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "not valid JSON"),
    "cut off": (b'{"a": ', "not valid JSON"),
    "something behind it": (b'{"a": 1} x', "not valid JSON: Extra data"),
    "two objects": (b"{}{}", "not valid JSON: Extra data"),
    "not UTF-8": (b'{"a": "\xff"}', "not valid JSON.*0xff"),
    "byte order mark": (b"\xef\xbb\xbf{}", "begins with a byte-order mark"),
    "UTF-16": ("\ufeff{}".encode("utf-16-le"), "not valid JSON"),
    "a key twice": (b'{"a": 1, "a": 1}', "the key 'a' appears twice"),
    "a key twice, the second by an escape": (b'{"a": 1, "\\u0061": 2}', "the key 'a' appears twice"),
    "a key twice, further in": (b'{"x": {"b": 1, "c": 2, "b": 3}}', "the key 'b' appears twice"),
    "a key twice among very many": (
        b'{"weight_map": {' + b"".join(b'"%d":0,' % n for n in range(599_000)) + b'"598999":0}}',
        "the key '598999' appears twice",
    ),
    "a key twice that has no end": (
        b'{"%b": 1, "%b": 2}' % (b"k" * 100_000, b"k" * 100_000),
        "the key 'kkk.*' appears",
    ),
    "a list": (b"[]", "holds a JSON list; expected an object"),
    "null": (b"null", "holds a JSON NoneType; expected an object"),
    "text": (b'"text"', "holds a JSON str; expected an object"),
    "nested without end": (b'{"a": ' + DEEP + b"}", "not valid JSON.*recursion"),
    "number of thousands of digits": (b'{"total_size": ' + b"9" * 5000 + b"}", "not valid JSON.*4300 digits"),
    "number of a million digits": (b'{"total_size": ' + b"9" * 1_000_000 + b"}", "not valid JSON.*4300 digits"),
    "lone quote": (b'{"a": "', "not valid JSON"),
    "control character": (b'{"a": "\n"}', "not valid JSON.*control character"),
    "single quotes": (b"{'a': 1}", "not valid JSON"),
    "a comment": (b'{"a": 1 /* x */}', "not valid JSON"),
    "as wide a text as is read": (
        b'["' + "😀".encode() + b"x" * ((16 << 20) - 99) + b'"]',
        "holds a JSON list; expected an object",
    ),
    "as long a text as is read": (b'["' + b"x" * ((40 << 20) - 99) + b'"]', "holds a JSON list; expected an object"),
    "very many values": (b'{"a": [' + b"0," * 800_000 + b"0]}", "has about 800,002 values; at most 600,000 are read"),
    "very many tables": (b'{"a": [' + b"{}," * 500_000 + b"0]}", "has about 1,000,002 values"),
    "very wide text": ('{"a": "😀'.encode() + b"x" * (17 << 20) + b'"}', "bytes as text; at most 67,108,864 are read"),
    "no JSON": (b"<!DOCTYPE html><html></html>", "not valid JSON"),
    "a git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer"),
}

ACCEPTED_BY_PYTHON = {
    "a key twice",
    "a key twice, the second by an escape",
    "a key twice, further in",
    "a key twice among very many",
    "a key twice that has no end",
    "a list",
    "null",
    "text",
    "very many values",
    "very many tables",
    "very wide text",
    "as wide a text as is read",
    "as long a text as is read",
}
"""What `json.loads` makes a value of."""

LEGAL: dict[str, tuple[bytes, object]] = {
    "infinity": (b'{"time_step_limit": [0.0, Infinity]}', {"time_step_limit": [0.0, float("inf")]}),  # as in Mamba 2
    "large number": (b'{"n": 123456789012345678901234567890}', {"n": 123456789012345678901234567890}),
    "one key in two tables": (b'{"a": {"x": 1}, "b": {"x": 2}}', {"a": {"x": 1}, "b": {"x": 2}}),
    "other scripts": ('{"ключ": "猫"}'.encode(), {"ключ": "猫"}),
}
