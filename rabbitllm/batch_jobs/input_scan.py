"""The scan of an input: offsets of its lines, the order to answer them in, and a check for duplicate ids.

A line takes some tens of bytes here, so that a million lines fit into the memory of any machine; lines are read
again when they are answered.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from rabbitllm.batch_jobs.items import Defaults, Item, Refused
from rabbitllm.batch_jobs.lines import LineError, asked_of, key_of
from rabbitllm.batch_jobs.order import BEGINNING, hashed, in_order, kind_of, sized
from rabbitllm.errors import InputError
from rabbitllm.formats.bounded import decode_message

MAX_LINE_BYTES = 16 << 20
"""Limit of a line's length; a longer line is answered with an error."""
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """A decoded line of the input.

    Attributes:
        number: from 1, counting empty lines.
        value: its object; None if it is invalid.
        problem: the reason why it is invalid; empty otherwise.
    """

    number: int
    value: Any
    problem: str = ""


@dataclass(slots=True)
class InputScan:
    """The scan of an input.

    Attributes:
        file: the input.
        defaults: for values that lines omit.
        digest: digest of all bytes in hexadecimal.
        offsets, numbers: of each line, in bytes and from 1.
        lengths: estimated tokens of each line, generated ones included.
        kinds: of each; see `order.kind_of`.
        beginnings: a hash of each line's beginning.
    """

    file: BinaryIO
    defaults: Defaults
    digest: str = ""
    offsets: array[int] = field(default_factory=lambda: array("q"))
    numbers: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    kinds: array[int] = field(default_factory=lambda: array("b"))
    beginnings: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.offsets)

    def item(self, index: int) -> Item:
        """Read a line again."""
        self.file.seek(self.offsets[index])
        raw, _ = _line(self.file)
        return item_of(_decoded(raw, self.numbers[index]), index, self.defaults)

    def ordered(self, wanted: Iterable[int]) -> list[int]:
        """Indices in the order in which to answer them.

        Args:
            wanted: indices of lines.
        """
        chosen = np.fromiter(wanted, dtype=np.int64)
        places = in_order(*(np.array(values)[chosen] for values in (self.kinds, self.lengths, self.beginnings)))
        return [int(index) for index in chosen[places]]


def surveyed(file: BinaryIO, defaults: Defaults) -> InputScan:
    """Scan an input.

    Args:
        file: the input, at its beginning; it stays open.
        defaults: for values that lines omit.

    Raises:
        InputError: a duplicate id, or no lines.
    """
    made = InputScan(file, defaults)
    digest = hashlib.blake2b(digest_size=16)
    keys = array("q")
    number = 0
    while True:
        offset = file.tell()
        raw, length = _line(file, digest)
        if not length:
            break
        number += 1
        if not raw.strip():
            continue
        item = item_of(_decoded(raw, number), len(made), defaults)
        made.offsets.append(offset)
        made.numbers.append(number)
        made.kinds.append(kind_of(item.asked))
        text, tokens = sized(item.asked)
        made.lengths.append(tokens)
        made.beginnings.append(hashed(text[:BEGINNING]))
        keys.append(hashed(item.key))
    made.digest = digest.hexdigest()
    if not len(made):
        raise InputError("The input has no lines.", 'Lines are such as {"id": 1, "prompt": "What is a rabbit?"}.')
    _refuse_twins(made, keys)
    return made


def item_of(line: Line, index: int, defaults: Defaults) -> Item:
    """The item of a line.

    Args:
        line: the decoded line.
        index: index of the line among those that are not empty.
        defaults: for values that it omits.
    """
    if line.problem:
        return Item(index, line.number, Refused(line.problem))
    try:
        key = key_of(line.value, line.number)
    except LineError as error:
        return Item(index, line.number, Refused(f"{error}."))
    return Item(index, key, asked_of(line.value, index, defaults))


def _line(file: BinaryIO, digest: Any = None) -> tuple[bytes, int]:
    """The next line, truncated at the limit, and its full length."""
    raw = file.readline(MAX_LINE_BYTES + 1)
    length = len(raw)
    if digest is not None:
        digest.update(raw)
    part = raw
    while len(part) > MAX_LINE_BYTES and not part.endswith(b"\n"):  # the rest of a long line is skipped
        part = file.readline(MAX_LINE_BYTES + 1)
        length += len(part)
        if digest is not None:
            digest.update(part)
    return raw, length


def _decoded(raw: bytes, number: int) -> Line:
    if number == 1:
        raw = raw.removeprefix(_BOM)
    if len(raw) > MAX_LINE_BYTES:
        return Line(number, None, f"Line {number:,} has more than {MAX_LINE_BYTES:,} bytes.")
    try:
        return Line(number, decode_message(raw))
    except ValueError as error:
        return Line(number, None, f"Line {number:,} is no JSON that is taken here: {error}.")


def _refuse_twins(survey: InputScan, keys: array[int]) -> None:
    """
    Raises:
        InputError: a duplicate id.
    """
    order = np.argsort(np.array(keys), kind="stable")
    hashes = np.array(keys)[order]
    for place in np.flatnonzero(hashes[1:] == hashes[:-1]):
        first, second = (int(order[at]) for at in (place, place + 1))
        key = survey.item(first).key
        if key == survey.item(second).key:  # not a mere hash collision
            raise InputError(
                f"Lines {survey.numbers[first]:,} and {survey.numbers[second]:,} of the input both have the id "
                f"{str(key)[:80]!r}.",
                "Give every line an id of its own, or none of them any: then lines are known by their numbers.",
            )
