"""The durable journal of answers in the output's folder, and the output that is made from it at the end.

    OUT.journal   {"head": input, model, settings}           one line, written before the first answer
                  crc32 {"weights": digest}                  of the weights, once the model is loaded
                  crc32 {"index": 7, "line": {…}}            a line for each answer, in order of completion
    OUT           line 0, line 1, …                          in the order of the input; written whole, then renamed
    OUT.done      {"head": as above, "bytes", "crc32", …}    of a finished output, so that a repeated call finds it

An answer counts once the journal is synced. Answers that arrive during a sync are written together, with one fsync.
After kill -9, every readable line of the journal counts; a truncated line does not match its checksum and is ignored.
The head identifies the output; a journal with another head is refused. Independent of models.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rabbitllm.base.options import parse_dtype
from rabbitllm.batch_jobs.inputs import BLOCK_BYTES, in_blocks
from rabbitllm.batch_jobs.items import BatchAnswer
from rabbitllm.errors import InUseError, ResultsError
from rabbitllm.storage import durable
from rabbitllm.storage.file_lock import LOCK_SUFFIX, locked_file

SUFFIX = ".journal"
DONE_SUFFIX = ".done"
VERSION = 1
_OTHER_OUTPUT = "Use another output, or move that file away."
_ABSENT = -1


class BatchJournal:
    """The journal of one output. Made by `opened`.

    Args:
        path: path of the journal.
        lines: number of lines of the output.
        head: identifies the output; see `opened`.

    Attributes:
        done: number of lines with an answer.
        errors: number of these that are errors.
        resumed: number of lines answered by an earlier run.
    """

    def __init__(self, path: Path, lines: int, head: Mapping[str, Any]) -> None:
        self.path = path
        self._head = head
        self.done = self.errors = 0
        self._weights: str | None = None
        self._offsets = array("q", [_ABSENT]) * lines
        self._is_cut = False
        self._read_back()
        self.resumed = self.done
        self._log = durable.Log(path)
        try:
            if self._is_cut:
                self._log.append("")  # ends the truncated line, so that the next one is separate
            self._log.sync()  # writes of a killed process are visible but perhaps not durable
        except BaseException:
            self._log.close()
            raise
        self._end = path.stat().st_size

    def __len__(self) -> int:
        return len(self._offsets)

    def missing(self) -> Iterator[int]:
        """Indices without an answer."""
        return (index for index, offset in enumerate(self._offsets) if offset == _ABSENT)

    def check_weights(self, digest: str) -> None:
        """Record the weights' digest, or compare it to the recorded one: a name may later mean another model.

        Args:
            digest: of the source of the weights.

        Raises:
            ResultsError: the recorded digest is of other weights; or the disk is full.
        """
        if self._weights is None:
            self._weights = digest
            self._append([_with_checksum({"weights": digest})])
        elif self._weights != digest:
            raise ResultsError(
                f"{self.path} was started with other weights of the same name.",
                "Use another output, or remove that file to start again.",
            )

    def add(self, answers: Sequence[BatchAnswer]) -> None:
        """Append answers; they are durable on return.

        Raises:
            ResultsError: the disk is full; earlier answers are kept.
        """
        new = [answer for answer in answers if self._offsets[answer.index] == _ABSENT]
        entries = [{"index": answer.index, "is_error": answer.is_error, "line": answer.line} for answer in new]
        for answer, offset in zip(new, self._append([_with_checksum(entry) for entry in entries]), strict=True):
            self._offsets[answer.index] = offset
            self.done += 1
            self.errors += answer.is_error

    def _append(self, lines: Sequence[str]) -> list[int]:
        """Append lines, and return their offsets."""
        try:
            self._log.append("\n".join(lines))
        except OSError as error:
            raise _write_error(error, self.path) from error
        *offsets, self._end = accumulate((len(line.encode()) + 1 for line in lines), initial=self._end)
        return offsets

    def close(self) -> None:
        """Close the file; nothing can be added after this."""
        self._log.close()

    def write_output(self, out: Path) -> None:
        """Write the output in the order of the input: whole or not at all.

        Raises:
            ResultsError: the disk is full; the journal is kept.
        """
        part = out.with_name(out.name + durable.PART_SUFFIX)
        try:
            durable.remove(part)
            file = durable.GrowingFile(part, 0, write_back=True)
            try:
                offset = checksum = 0
                for block in in_blocks(self._lines()):
                    file.write_at(memoryview(block), offset)
                    offset += len(block)
                    checksum = zlib.crc32(block, checksum)
                file.sync()
            finally:
                file.close()
            durable.publish(part, out)
            record = {"head": self._head, "bytes": offset, "crc32": checksum, "errors": self.errors}
            durable.write_whole(out.with_name(out.name + DONE_SUFFIX), (_dumped(record) + "\n").encode())
            durable.remove(self.path)
            durable.sync_folder(self.path.parent)
        except OSError as error:
            raise _write_error(error, out) from error

    def _lines(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            for offset in self._offsets:
                file.seek(offset)
                entry = _answer_in(file.readline())
                if entry is None:
                    raise ResultsError(f"A line of {self.path} can no longer be read.", "Run the same command again.")
                yield _dumped(entry["line"]).encode() + b"\n"

    def _read_back(self) -> None:
        """
        Raises:
            ResultsError: the journal belongs to something else.
        """
        if (error := _head_error(self.path, self._head)) is not None:
            raise error
        with self.path.open("rb") as file:
            offset = len(file.readline())
            for line in file:
                entry = _answer_in(line)
                if entry is not None and "weights" in entry:
                    self._weights = str(entry["weights"])
                elif entry is not None and 0 <= entry["index"] < len(self) and self._offsets[entry["index"]] == _ABSENT:
                    self._offsets[entry["index"]] = offset
                    self.done += 1
                    self.errors += bool(entry.get("is_error"))
                offset += len(line)
                self._is_cut = not line.endswith(b"\n")


def errors_of_finished(out: Path, head: Mapping[str, Any]) -> int | None:
    """Number of errors in a finished output; None if it is unfinished, has another head, or was changed."""
    try:
        record = json.loads(out.with_name(out.name + DONE_SUFFIX).read_bytes())
        if out.with_name(out.name + SUFFIX).exists() or _differences(_as_parsed(record["head"]), head):
            return None
        nbytes = checksum = 0
        with out.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                nbytes, checksum = nbytes + len(block), zlib.crc32(block, checksum)
        return int(record["errors"]) if (nbytes, checksum) == (record["bytes"], record["crc32"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def clear_lock(out: Path) -> None:
    """Remove the lock of a finished output, if the process that held it was killed at its end."""
    path = out.with_name(out.name + SUFFIX)
    lock = path.with_name(path.name + LOCK_SUFFIX)
    if lock.exists():
        with contextlib.suppress(InUseError, OSError), locked_file(lock, out):
            pass


_BEGINNINGS = {
    durable.PART_SUFFIX: b'{"id":',
    SUFFIX: b'{"journal":',
    SUFFIX + durable.PART_SUFFIX: b'{"journal":',
    DONE_SUFFIX: b'{"head":',
    DONE_SUFFIX + durable.PART_SUFFIX: b'{"head":',
}
"""Suffixes of the files beside an output, and the first bytes of each."""


def check_output(out: Path, source: Any, folders: Iterable[Path] = ()) -> None:
    """Refuse an output that is no file, or would replace the input or a file of the model.

    Args:
        out: path of the output.
        source: see `inputs.opened`.
        folders: folders of the model.

    Raises:
        ResultsError: see above.
    """
    if not out.name or (out.exists() and not out.is_file()):
        raise ResultsError(f"The output {str(out)!r} is not a file.", "Use the path of a file, such as answers.jsonl.")
    beside = [out.with_name(out.name + suffix) for suffix in (*_BEGINNINGS, SUFFIX + LOCK_SUFFIX)]
    if isinstance(source, str | os.PathLike) and os.path.exists(source):
        if out.exists() and out.samefile(source):
            raise ResultsError(f"The output {str(out)!r} is the input.", "Use another output.")
        if any(path.exists() and path.samefile(source) for path in beside):
            raise ResultsError(f"The output {str(out)!r} would replace the input, {source}.", "Use another output.")
    done = out.with_name(out.name + DONE_SUFFIX)
    if out.exists() and not (done.is_file() and done.stat().st_size and _is_ours(out, DONE_SUFFIX)):
        for folder in folders:
            is_inside = out.resolve().is_relative_to(folder.resolve())
            if is_inside or any(out.samefile(path) for path in folder.iterdir() if path.exists()):
                raise ResultsError(
                    f"The output {str(out)!r} is a file in the folder of the model.", "Use another output."
                )


def _is_ours(out: Path, suffix: str) -> bool:
    """Whether a file beside an output begins as this package writes it."""
    try:
        return durable.begins_as(out.with_name(out.name + suffix), _BEGINNINGS[suffix])
    except OSError:
        return False


def _refuse_foreign(out: Path) -> None:
    """Refuse to replace files beside an output that this package did not write."""
    for suffix in _BEGINNINGS.keys() - {SUFFIX}:  # the head of a journal is compared later
        path = out.with_name(out.name + suffix)
        is_stray = suffix == durable.PART_SUFFIX and not out.with_name(out.name + SUFFIX).exists()
        if path.exists() and (is_stray or not _is_ours(out, suffix)):
            raise ResultsError(f"{path} is not a file of rabbitllm batch.", _OTHER_OUTPUT)


@contextlib.contextmanager
def opened(out: Path, lines: int, head: Mapping[str, Any], *, overwrite: bool = False) -> Iterator[BatchJournal]:
    """The journal of an output, new or continued. A lock excludes other processes while the context is open.

    Args:
        out: path of the output.
        lines: number of its lines.
        head: the input's digest, the model and the settings; another head means another output.
        overwrite: replace an existing output, finished or begun. A begun output with this head is continued
            nevertheless.

    Raises:
        ResultsError: the output exists already, the journal has another head, another process holds it, or it cannot
            be written.
    """
    path = out.with_name(out.name + SUFFIX)
    _refuse_foreign(out)
    with contextlib.ExitStack() as stack:
        try:
            durable.make_folder(out.parent)
            stack.enter_context(locked_file(path.with_name(path.name + LOCK_SUFFIX), out))
            is_begun = path.exists()
            if not is_begun and out.exists() and not overwrite:
                raise ResultsError(
                    f"{out} already exists.", "Use another output, or pass --overwrite (overwrite=True) to replace it."
                )
            if not is_begun or (overwrite and _is_ours(out, SUFFIX) and _head_error(path, head) is not None):
                durable.write_whole(path, (_dumped({"journal": VERSION, "head": head}) + "\n").encode())
            journal = BatchJournal(path, lines, head)
        except OSError as error:
            raise _write_error(error, path) from error
        stack.callback(journal.close)
        yield journal


def _head_error(path: Path, head: Mapping[str, Any]) -> ResultsError | None:
    """Why a journal cannot be continued with this head; None if it can."""
    with path.open("rb") as file:
        line = file.readline()
    try:
        record = json.loads(line)
        version, recorded = record["journal"], _as_parsed(record["head"])
    except (ValueError, KeyError, TypeError):
        return ResultsError(f"{path} is not a journal of rabbitllm batch.", _OTHER_OUTPUT)
    if version != VERSION:
        return ResultsError(
            f"{path} is a journal of version {version}; this version of RabbitLLM resumes {VERSION}.",
            "Use the version that started it, or --overwrite (overwrite=True) to start again.",
        )
    if differences := _differences(recorded, head):
        return ResultsError(
            f"{path} was started with other inputs or options: {'; '.join(differences)}.",
            "Use the same ones to resume, another output, or --overwrite (overwrite=True) to start again.",
        )
    return None


def _differences(recorded: Mapping[str, Any], head: Mapping[str, Any]) -> list[str]:
    """How a recorded head differs from today's; an option that only one of them has counts as not given."""
    current = json.loads(_dumped(head))
    pairs = {name: (recorded.get(name), current.get(name)) for name in {**recorded, **current}}
    return [f"{name} was {_short(was)}, now {_short(now)}" for name, (was, now) in pairs.items() if was != now]


def _as_parsed(head: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded head in today's form; earlier versions recorded the dtype as the user typed it, "auto" included."""
    return {**head, "dtype": parse_dtype(head["dtype"])} if "dtype" in head else dict(head)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:80] + "…"


def _with_checksum(value: Mapping[str, Any]) -> str:
    body = _dumped(value)
    return f"{zlib.crc32(body.encode()):08x} {body}"


def _answer_in(line: bytes) -> dict[str, Any] | None:
    """The content of a journal line; None for a truncated or empty one."""
    checksum, _, body = line.rstrip(b"\n").partition(b" ")
    if len(checksum) != 8 or not body or checksum != b"%08x" % zlib.crc32(body):
        return None
    entry: dict[str, Any] = json.loads(body)
    return entry


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _write_error(error: OSError, path: Path) -> ResultsError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResultsError(
            f"The disk is full: {path} cannot be written.",
            "Free disk space and run the same command again: it resumes.",
        )
    return ResultsError(
        f"{path} cannot be written: {error.strerror}.",
        "Fix this and run the same command again: finished answers are kept.",
    )
