"""The input of a batch: a file of lines that is scanned once, ordered for efficiency, and read again line by line.

A file of JSON lines is read in place. Anything else (a Parquet file, a `datasets.Dataset`, a list, a generator, a pipe)
is read once, part by part, into an unnamed file that disappears with this process. So the rest of the code sees one
kind of input, and a million records need no memory: of a line the scan keeps some tens of bytes, and reads it again
when it is answered.

Lines of one kind come together, since they share passes; among these, lines with the same prefix, which is
computed once; otherwise the longest come first, so that the slowest do not come last.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import stat
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rabbitllm.batch_jobs.items import (
    KEYS,
    BatchCall,
    Choose,
    Defaults,
    Embed,
    Generate,
    Item,
    Key,
    LineError,
    Refused,
    ScoreItem,
    Task,
    key_of,
    parse_task,
    text_of_messages,
)
from rabbitllm.errors import InputError, OptionError, missing_package
from rabbitllm.formats.bounded import decode_message
from rabbitllm.storage import durable

MAX_LINE_BYTES = 16 << 20
"""Limit of a line's length; a longer line is answered with an error."""
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class InputScan:
    """The scan of an input; each array is (lines,) int64.

    Attributes:
        file: the input.
        defaults: for values that lines omit.
        digest: digest of all bytes in hexadecimal.
        offsets, numbers: of each line, in bytes and from 1.
        kinds: see `kind_of`.
        lengths: estimated tokens of each line, generated ones included.
        prefixes, keys: hashes of each line's prefix and of its key.
    """

    file: BinaryIO
    defaults: Defaults
    digest: str
    offsets: Any
    numbers: Any
    kinds: Any
    lengths: Any
    prefixes: Any
    keys: Any

    def __len__(self) -> int:
        return len(self.offsets)

    def item(self, index: int) -> Item:
        """Read a line again."""
        self.file.seek(int(self.offsets[index]))
        return _item(_line(self.file), int(self.numbers[index]), index, self.defaults)

    def longest(self, count: int) -> tuple[int, ...]:
        """The largest estimated numbers of tokens of lines that ask for a generation, at most `count`."""
        lengths = np.sort(self.lengths[self.kinds == GENERATIONS])[::-1]
        return tuple(int(length) for length in lengths[:count])

    def ordered(self, indices: Iterable[int]) -> list[int]:
        """Indices in the order in which to answer them."""
        chosen = np.fromiter(indices, dtype=np.int64)
        order = in_order(self.kinds[chosen], self.lengths[chosen], self.prefixes[chosen])
        return [int(index) for index in chosen[order]]


def scanned(file: BinaryIO, defaults: Defaults) -> InputScan:
    """Scan an input.

    Args:
        file: the input, at its start; it stays open.
        defaults: for values that lines omit.

    Raises:
        InputError: a duplicate id, or no lines.
    """
    digest = hashlib.blake2b(digest_size=16)
    rows = array("q")
    number = count = offset = 0
    while raw := _line(file, digest):
        number += 1
        if raw.strip():
            item = _item(raw, number, count, defaults)
            text, tokens = text_and_size(item.task)
            hashes = hashed(text[:PREFIX_CHARACTERS]), hashed(item.key)
            rows.extend((offset, number, kind_of(item.task), tokens, *hashes))
            count += 1
        offset = file.tell()
    if not count:
        raise InputError("The input has no lines.", 'Example of a line: {"id": 1, "prompt": "What is a rabbit?"}.')
    scan = InputScan(file, defaults, digest.hexdigest(), *np.array(rows).reshape(count, -1).T)
    _refuse_duplicates(scan)
    return scan


def _item(raw: bytes, number: int, index: int, defaults: Defaults) -> Item:
    """The item of a line; `number` counts from 1 and with empty lines, `index` from 0 and without them."""
    if number == 1:
        raw = raw.removeprefix(_BOM)
    if len(raw) > MAX_LINE_BYTES:
        return Item(index, number, Refused(f"Line {number:,} has more than {MAX_LINE_BYTES:,} bytes."))
    try:
        value = decode_message(raw)
    except ValueError as error:
        return Item(index, number, Refused(f"Line {number:,} is not valid JSON: {error}."))
    try:
        key = key_of(value, number)
    except LineError as error:
        return Item(index, number, Refused(f"{error}."))
    return Item(index, key, parse_task(value, index, defaults))


def _line(file: BinaryIO, digest: Any = None) -> bytes:
    """The next line, truncated at the limit."""
    raw = b""
    while part := file.readline(MAX_LINE_BYTES + 1):
        raw = raw or part
        if digest is not None:
            digest.update(part)
        if len(part) <= MAX_LINE_BYTES or part.endswith(b"\n"):  # else the rest of a long line follows, and is skipped
            break
    return raw


def _refuse_duplicates(scan: InputScan) -> None:
    """
    Raises:
        InputError: a duplicate id.
    """
    order = np.argsort(scan.keys, kind="stable")
    hashes = scan.keys[order]
    for position in np.flatnonzero(hashes[1:] == hashes[:-1]):
        first, second = (int(order[i]) for i in (position, position + 1))
        key = scan.item(first).key
        if key == scan.item(second).key:  # not a mere hash collision
            raise InputError(
                f"Lines {scan.numbers[first]:,} and {scan.numbers[second]:,} of the input both have the id "
                f"{str(key)[:80]!r}.",
                "Use a different id on each line, or no ids: then line numbers are the ids.",
            )


PREFIX_CHARACTERS = 256
"""Characters of a line's prefix; lines with the same prefix are answered together."""
CHARACTERS_OF_A_TOKEN = 3
"""Below the average of most languages, so that the estimate of tokens tends to be high."""
MEDIA_TOKENS = 1024
"""Estimate of the tokens of a picture or a sound."""
MOST_TOKENS = 1 << 40
"""Limits of new tokens above this one count as this, which no context has."""
ERRORS, GENERATIONS, LIKELIHOODS, EMBEDDINGS = range(4)
"""Kinds of lines."""


def ordered(items: Sequence[Item]) -> list[Item]:
    """Items in an efficient order."""
    sizes = [text_and_size(item.task) for item in items]
    order = in_order(
        np.array([kind_of(item.task) for item in items], dtype=np.int64),
        np.array([tokens for _, tokens in sizes], dtype=np.int64),
        np.array([hashed(text[:PREFIX_CHARACTERS]) for text, _ in sizes], dtype=np.int64),
    )
    return [items[index] for index in order]


def in_order(kinds: Any, lengths: Any, prefixes: Any) -> Any:
    """Indices of lines in an efficient order.

    Args:
        kinds, lengths, prefixes: of each line: see `kind_of` and `text_and_size` (prefixes hashed); arrays of (lines,).
    """
    if not len(kinds):
        return np.zeros(0, dtype=np.int64)
    _, groups, counts = np.unique(prefixes, return_inverse=True, return_counts=True)
    groups = np.where(counts[groups] > 1, groups, -1)  # a prefix that occurs once forms no group
    return np.lexsort((-lengths, groups, kinds))


def kind_of(task: Task) -> int:
    """The kind of a line; lines of one kind share passes."""
    if isinstance(task, Refused):
        return ERRORS
    if isinstance(task, Generate) or (isinstance(task, BatchCall) and not task.url.endswith("embeddings")):
        return GENERATIONS
    return LIKELIHOODS if isinstance(task, ScoreItem | Choose) else EMBEDDINGS


def text_and_size(task: Task) -> tuple[str, int]:
    """The text of a line, and its estimated number of tokens."""
    if isinstance(task, Generate):
        new_tokens = min(task.max_new_tokens, MOST_TOKENS)
        if isinstance(task.prompt, str):
            return task.prompt, len(task.prompt) // CHARACTERS_OF_A_TOKEN + new_tokens
        if task.prompt and isinstance(task.prompt[0], int):
            return str(task.prompt[:PREFIX_CHARACTERS]), len(task.prompt) + new_tokens
        text, media = text_of_messages(task.prompt)
        return text, len(text) // CHARACTERS_OF_A_TOKEN + media * MEDIA_TOKENS + new_tokens
    if isinstance(task, ScoreItem | Choose):
        texts = task.continuations if isinstance(task, ScoreItem) else task.choices
        return task.context, (len(task.context) + max(map(len, texts))) // CHARACTERS_OF_A_TOKEN
    if isinstance(task, Embed):
        longest = max(task.texts, key=len)
        return "", len(longest) // (CHARACTERS_OF_A_TOKEN if isinstance(longest, str) else 1)
    if isinstance(task, BatchCall):
        text, media = text_of_messages(task.body.get("messages") or ())
        text = text or str(task.body.get("prompt") or task.body.get("input") or "")
        limit = task.body.get("max_completion_tokens") or task.body.get("max_tokens") or task.defaults.max_new_tokens
        tokens = len(text) // CHARACTERS_OF_A_TOKEN + media * MEDIA_TOKENS
        return text, tokens + (max(0, min(limit, MOST_TOKENS)) if isinstance(limit, int) else 0)
    return "", 0


def hashed(value: Key) -> int:
    """A 64-bit hash of a text or number, the same in every process."""
    text = f"{type(value).__name__} {value}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


PARQUET = ".parquet"
ROWS = 1_024
"""Rows of a Parquet file that are decoded at a time."""
BLOCK_BYTES = 4 << 20
STDIN = "-"


def columns_of(words: Iterable[str]) -> dict[str, str] | None:
    """`prompt=question`, one for each column -> the `columns` of `opened`; None without any.

    Raises:
        OptionError: no equals sign, or a name that is never read.
    """
    columns: dict[str, str] = {}
    for word in words:
        key, equals, column = word.partition("=")
        if not equals or key not in KEYS:
            raise OptionError(
                f"--column {word} is not a mapping of columns; expected NAME=COLUMN.",
                "Example: --column prompt=question.",
            )
        columns[key] = column
    return columns or None


@contextlib.contextmanager
def opened(source: Any, columns: Mapping[str, str] | None = None) -> Iterator[BinaryIO]:
    """An input as a file of lines, at its start.

    Args:
        source: path of a file of JSON lines or of a Parquet file, "-" for standard input, or an iterable of mappings.
        columns: expected name -> name in the records; for inputs of records only.

    Raises:
        InputError: the file does not exist, or is not of these formats.
        MissingPackageError: a Parquet file without pyarrow.
    """
    with contextlib.ExitStack() as stack:
        if not isinstance(source, str | os.PathLike):
            if isinstance(source, Mapping) or not isinstance(source, Iterable):
                raise InputError(
                    f"The input is of type {type(source).__name__}; expected the path of a file, or an iterable of "
                    "records.",
                    'Use a file of JSON lines, or a list such as [{"prompt": "…"}].',
                )
            blocks = _joined(source, columns)
        elif str(source) == STDIN:
            blocks = _blocks_of(sys.stdin.buffer)
        elif (path := Path(source)).suffix == PARQUET:
            blocks = _joined(_records_of_parquet(path), columns)
        else:
            file = stack.enter_context(_open_binary(path))
            if not columns and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                yield file
                return
            blocks = _joined(_records_of_lines(file, path), columns) if columns else _blocks_of(file)
        yield stack.enter_context(_spooled(blocks))


def _open_binary(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(
            f"The input {path} cannot be read: {error.strerror}.",
            "Expected a file of JSON lines, a Parquet file, or - for standard input.",
        ) from None


@contextlib.contextmanager
def _spooled(blocks: Iterable[bytes]) -> Iterator[BinaryIO]:
    """
    Raises:
        InputError: the disk is full.
    """
    folder = Path(tempfile.gettempdir())
    with contextlib.ExitStack() as stack:
        try:
            descriptor = stack.enter_context(durable.nameless_file(folder, blocks))
            file = stack.enter_context(os.fdopen(os.dup(descriptor), "rb"))
        except OSError as error:
            raise InputError(
                f"The input cannot be stored in {folder} while it is answered: {error.strerror}.",
                "Free disk space there, set TMPDIR to another folder, or use JSON lines, which need no copy.",
            ) from None
        file.seek(0)
        yield file


def _blocks_of(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def in_blocks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Lines in blocks of some MB."""
    buffer = io.BytesIO()
    for line in lines:
        buffer.write(line)
        if buffer.tell() >= BLOCK_BYTES:
            yield buffer.getvalue()
            buffer = io.BytesIO()
    yield buffer.getvalue()


def _joined(records: Iterable[Any], columns: Mapping[str, str] | None) -> Iterator[bytes]:
    return in_blocks(_line_of(record, columns or {}, number) for number, record in enumerate(records, 1))


def _line_of(record: Any, columns: Mapping[str, str], number: int) -> bytes:
    if not isinstance(record, Mapping):
        raise InputError(
            f"Record {number:,} of the input is of type {type(record).__name__}; expected a mapping.",
            'Example of a record: {"prompt": "…"}.',
        )
    named = {name: record[name] for name in KEYS & record.keys()}  # other columns may hold anything
    for field, key in columns.items():
        if key not in record:
            raise InputError(
                f"Record {number:,} of the input has no {key!r}; it has {', '.join(map(repr, record)) or 'nothing'}.",
                "Use columns that every record has.",
            )
        named[field] = record[key]

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else str(value)  # of arrays and their numbers

    return json.dumps(named, ensure_ascii=False, default=plain).encode("utf-8", "surrogatepass") + b"\n"


def _records_of_lines(file: BinaryIO, path: Path) -> Iterator[Any]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise InputError(
                    f"Line {number:,} of {path} is not valid JSON, so --column cannot be applied: {error}.",
                    "Correct that line.",
                ) from None


def _records_of_parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        from pyarrow import ArrowException  # type: ignore[import-untyped,unused-ignore]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise missing_package("A Parquet file needs", "pyarrow", "batch") from None
    with _open_binary(path):  # raises InputError if it is missing
        pass
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS):
                yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise InputError(
            f"{path} is not a readable Parquet file: {error}.", "Check that the file is complete, or use JSON lines."
        ) from None
