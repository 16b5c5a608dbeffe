"""Any input as JSON lines that can be read twice: a file of them directly, anything else through an unnamed file.

A Parquet file, a `datasets.Dataset`, a list, a generator, a pipe: each is read once, from the beginning, part by
part, into an unnamed file that disappears with this process. So the rest of the code sees one kind of input, and a
million records need no memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rabbitllm.batch_jobs.lines import KEYS
from rabbitllm.errors import InputError, MissingPackageError, OptionError
from rabbitllm.storage import durable

PARQUET = ".parquet"
ROWS = 1_024
"""Rows of a Parquet file that are decoded at a time."""
BLOCK_BYTES = 4 << 20
STDIN = "-"


def columns_of(given: Iterable[str]) -> dict[str, str] | None:
    """`prompt=question`, one for each column -> the `columns` of `opened`; None without any.

    Raises:
        OptionError: no equals sign, or a name that is never read.
    """
    found: dict[str, str] = {}
    for word in given:
        wanted, equals, name = word.partition("=")
        if not equals or wanted not in KEYS:
            raise OptionError(
                f"--column {word} does not say what a column is.", "For example --column prompt=question."
            )
        found[wanted] = name
    return found or None


@contextlib.contextmanager
def opened(source: Any, columns: Mapping[str, str] | None = None) -> Iterator[BinaryIO]:
    """An input as a file of lines, from its beginning.

    Args:
        source: path of a file of JSON lines or of a Parquet file, "-" for standard input, or an iterable of mappings.
        columns: expected name -> name in the records; for inputs of records only.

    Raises:
        InputError: the file does not exist, or is not of these formats.
        MissingPackageError: a Parquet file without pyarrow.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if str(source) == STDIN:
            blocks = _blocks_of(sys.stdin.buffer)
        elif path.suffix == PARQUET:
            blocks = _joined(_records_of_parquet(path), columns)
        else:
            with _plain(path) as file:
                if not columns and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    yield file
                    return
                blocks = _joined(_records_of_lines(file, path), columns) if columns else _blocks_of(file)
                with _spooled(blocks) as spool:
                    yield spool
                return
    elif isinstance(source, Iterable) and not isinstance(source, Mapping):
        blocks = _joined(source, columns)
    else:
        raise InputError(
            f"The input is of type {type(source).__name__}; expected the path of a file, or an iterable of records.",
            'Give a file of JSON lines, or a list such as [{"prompt": "…"}].',
        )
    with _spooled(blocks) as spool:
        yield spool


def _plain(path: Path) -> BinaryIO:
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
                f"The input cannot be kept in {folder} while it is answered: {error.strerror}.",
                "Make room there, let TMPDIR name another folder, or give JSON lines, which are read in place.",
            ) from None
        file.seek(0)
        yield file


def _blocks_of(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def _joined(records: Iterable[Any], columns: Mapping[str, str] | None) -> Iterator[bytes]:
    """Records as lines, in blocks of some MB."""
    out = io.BytesIO()
    for number, record in enumerate(records, 1):
        out.write(_line_of(record, columns or {}, number))
        if out.tell() >= BLOCK_BYTES:
            yield out.getvalue()
            out = io.BytesIO()
    yield out.getvalue()


def _line_of(record: Any, columns: Mapping[str, str], number: int) -> bytes:
    if not isinstance(record, Mapping):
        raise InputError(
            f"Record {number:,} of the input is of type {type(record).__name__}; expected a mapping.",
            'Records are such as {"prompt": "…"}.',
        )
    named = {name: record[name] for name in KEYS & record.keys()}  # other columns may hold anything
    for wanted, name in columns.items():
        if name not in record:
            raise InputError(
                f"Record {number:,} of the input has no {name!r}; it has {', '.join(map(repr, record)) or 'nothing'}.",
                "Name columns that every record has.",
            )
        named[wanted] = record[name]
    return json.dumps(named, ensure_ascii=False, default=_plain_value).encode("utf-8", "surrogatepass") + b"\n"


def _plain_value(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays and their numbers
        return value.tolist()
    return str(value)


def _records_of_lines(file: BinaryIO, path: Path) -> Iterator[Any]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise InputError(
                    f"Line {number:,} of {path} is no JSON, so its columns cannot be named: {error}.", "Mend that line."
                ) from None


def _records_of_parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        from pyarrow import ArrowException  # type: ignore[import-untyped,unused-ignore]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise MissingPackageError(
            "A Parquet file needs the package pyarrow, which is not installed.",
            'Install it: pip install ".[batch]" in a copy of the repository.',
        ) from None
    with _plain(path):  # raises our own error if it is missing
        pass
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS):
                yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise InputError(
            f"{path} is no Parquet file that can be read: {error}.", "Check that it is whole, or give JSON lines."
        ) from None
