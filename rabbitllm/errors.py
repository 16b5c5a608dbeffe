"""Every error that this package raises on purpose.

    RabbitLLMError
    ├── OptionError (ValueError)               an argument has an invalid value
    │   └── DeviceError                        a device this machine does not have
    ├── AbsentWeightError (RuntimeError)       attempt to read a weight that is not in memory
    ├── ReadOnlyWeightError (RuntimeError)     attempt to write to a weight that is not in memory
    ├── MissingPackageError (ImportError)      an optional dependency is not installed
    ├── ChatError                              a conversation cannot continue
    │   └── ChatFileError                      a file is not a saved conversation, or cannot be written
    ├── CopyError (TypeError)                  attempt of another library to copy, pickle or place a model
    ├── ForkedError (RuntimeError)             a forked process uses something that works only in its parent
    ├── HostsError                             processes cannot compute one model together
    │   └── HostGoneError                      one of them has ended or cannot be reached
    ├── BatchError                             a batch cannot accept another request
    │   ├── BusyError                          the limit of waiting requests is reached
    │   └── ClosedError                        it is shutting down, or has ended
    ├── ClusterError                           a Ray cluster cannot do the work, or lost it
    ├── InputError                             the input of a batch cannot be read, or repeats an id
    ├── ResultsError                           results of a batch belong to another one, or cannot be written
    ├── ScoringError                           texts cannot be scored on this model, or memory is too small
    ├── QualityError                           two models cannot be compared, or not on this text
    ├── CheckpointError                        the source is not what it claims to be
    │   ├── CheckpointNotFoundError (FileNotFoundError)
    │   ├── UnsafePathError                    a name that points outside its folder
    │   ├── InvalidIndexError                  a malformed or contradictory index
    │   ├── CorruptShardError                  a shard whose bytes contradict its header
    │   ├── UnreadableFormatError              weights in a format that this version does not read
    │   ├── CorruptVocabularyError             a malformed or contradictory tokenizer vocabulary
    │   ├── UnsafePickleError                  a pickle with more than tensors and plain values
    │   ├── MissingShardError (FileNotFoundError)
    │   ├── IncompleteCheckpointError          its tensors are not those of its config
    │   ├── ClosedCheckpointError (ValueError)  a lazy tensor is used after its file was closed
    │   └── UnknownArchitectureError
    ├── HubError                               the hub refused or could not be reached
    │   └── GatedRepositoryError
    ├── StorageError (OSError)                 the system refuses an operation on a file or a folder
    ├── NotEnoughMemoryError (MemoryError)     the call needs more memory than this process may have
    └── SplitError                             the split directory
        ├── NotEnoughSpaceException            refused before the first byte
        ├── DiskFullError                      stopped midway: the disk is full, or nearly
        ├── InUseError                         another process reads, or deletes, files that this call needs
        ├── SplitMismatchError                 it belongs to another model, revision or compression
        └── IncompleteSplitError               a tensor the model needs is not in it

`system_errors_by_name` turns errors of the operating system into the last three kinds; every public entry point
runs inside it. Each message says what was found and what was expected; `remedy` says what to do about it. Both are
shown by `str()`.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path


class RabbitLLMError(Exception):
    """Base of all errors of this package.

    Args:
        problem: what was found and what was expected, one or two sentences.
        remedy: the user's options; printed on a separate line.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}\n  What to do: {self.remedy}" if self.remedy else self.problem


class OptionError(RabbitLLMError, ValueError):
    """An argument has an invalid value."""


class DeviceError(OptionError):
    """The requested device is not on this machine."""


class AbsentWeightError(RabbitLLMError, RuntimeError):
    """Attempt to read or pickle a weight that is not in memory, by code that cannot load it."""


class ReadOnlyWeightError(RabbitLLMError, RuntimeError):
    """Attempt to write to a weight that is not in memory, or is there only as codes."""


class MissingPackageError(RabbitLLMError, ImportError):
    """A package that only some features need is not installed."""


class ChatError(RabbitLLMError):
    """A conversation cannot continue: the context is full, or the chat template refuses it."""


class ChatFileError(ChatError):
    """A file is not a saved conversation, or cannot be written."""


class CopyError(RabbitLLMError, TypeError):
    """Attempt of another library to copy, pickle or place a model whose weights stay in its files."""


class ForkedError(RabbitLLMError, RuntimeError):
    """A forked process uses something that works only in its parent."""


class HostsError(RabbitLLMError):
    """Processes cannot compute one model together: they differ, or the model cannot be divided."""


class HostGoneError(HostsError):
    """One of the processes that compute a model together has ended, or does not answer."""


class BatchError(RabbitLLMError):
    """A batch cannot accept another request."""


class BusyError(BatchError):
    """The limit of waiting requests is reached.

    Args:
        problem, remedy: see `RabbitLLMError`.
        retry_after: seconds until there will probably be room.
    """

    def __init__(self, problem: str, remedy: str = "", retry_after: float = 1.0) -> None:
        super().__init__(problem, remedy)
        self.retry_after = retry_after


class ClosedError(BatchError):
    """The batch is shutting down, or has ended."""


class ClusterError(RabbitLLMError):
    """A Ray cluster cannot be reached, cannot do the work, or lost it too often."""


class InputError(RabbitLLMError):
    """The input of `rabbitllm batch` cannot be read, or repeats an id."""


class ResultsError(RabbitLLMError):
    """Results of `rabbitllm batch` exist already, belong to another batch, or cannot be written."""


class ScoringError(RabbitLLMError):
    """Texts cannot be scored on this model, or not in the available memory."""


class QualityError(RabbitLLMError):
    """Two models cannot be compared, or not on this text."""


class CheckpointError(RabbitLLMError):
    """The source checkpoint is not what it claims to be."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the given location."""


class UnsafePathError(CheckpointError):
    """A checkpoint names a file outside its own folder, or by a name that is not plain."""


class InvalidIndexError(CheckpointError):
    """The index is malformed, or contradicts the headers of the shards."""


class CorruptShardError(CheckpointError):
    """A shard is truncated or its header is malformed."""


class UnreadableFormatError(CheckpointError):
    """A file of weights is in a format that this version does not read."""


class CorruptVocabularyError(CheckpointError):
    """A tokenizer's vocabulary is truncated, malformed or contradicts itself."""


class UnsafePickleError(CheckpointError):
    """A pickle holds a global, an opcode or a structure that no checkpoint of tensors needs; nothing of it was run."""


class MissingShardError(CheckpointError, FileNotFoundError):
    """The index names a shard that is missing and cannot be fetched."""


class IncompleteCheckpointError(CheckpointError):
    """A checkpoint lacks tensors that its model needs, or has them in another shape or dtype. Nothing was deleted."""


class ClosedCheckpointError(CheckpointError, ValueError):
    """A tensor of a lazily loaded checkpoint is first used after the checkpoint was closed."""


class UnknownArchitectureError(CheckpointError):
    """The installed transformers does not support the model's architecture."""


class HubError(RabbitLLMError):
    """The hub refused a request or could not be reached."""


class GatedRepositoryError(HubError):
    """The repository exists, but this token (or no token) may not read it."""


class SplitError(RabbitLLMError):
    """Base of errors about the split directory."""


class NotEnoughSpaceException(SplitError):
    """The split would not fit on the disk; raised before the first byte is written.

    The name is RabbitLLM 1.1's, which callers catch.
    """


class DiskFullError(SplitError):
    """The disk is full, or its free space fell below the reserve; the same call resumes."""


class InUseError(SplitError):
    """Another process reads files that a call would delete, or deletes files that it would read."""


class SplitMismatchError(SplitError):
    """A split directory belongs to another model, revision or compression than requested."""


class IncompleteSplitError(SplitError):
    """A split directory lacks tensors that the model needs, or a layer file is damaged."""


class StorageError(RabbitLLMError, OSError):
    """The operating system refuses to read, write or create a file or a folder; has the `errno` of its cause."""


class NotEnoughMemoryError(RabbitLLMError, MemoryError):
    """The call needs more memory than this process may have."""


def _numbers(*names: str) -> frozenset[int]:
    """The error numbers of these names that exist on this system."""
    return frozenset(getattr(errno, name) for name in names if hasattr(errno, name))


_FULL_ERRORS = _numbers("ENOSPC", "EDQUOT")
"""Errors of a write without space: on the disk, in its inode table, or in a quota."""
_IN_THE_WAY = "The path of a folder is a file or a broken link: use another path, or move it away."
_REMEDIES = (
    (_numbers("EROFS"), "The disk is mounted read-only: use a folder on another disk, or mount it for writing."),
    (_numbers("EACCES", "EPERM"), "Use a folder that this user can write to, or change its permissions."),
    (
        _numbers("EIO", "ESTALE", "ENXIO", "ENODEV", "ENOLCK"),
        "Check the disk or file server (on Linux see `dmesg`), and make the same call again.",
    ),
    (
        _numbers("ENOENT", "ELOOP", "ENAMETOOLONG", "EISDIR", "EINVAL"),
        "Check the path and the targets of its links.",
    ),
    (_numbers("ENOTDIR", "EEXIST"), _IN_THE_WAY),
    (_numbers("EMFILE", "ENFILE"), "Raise the limit of open files (`ulimit -n`), or end other processes."),
)
"""Error numbers of an `OSError`, and their remedies."""
_NO_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|out of memory|cannot allocate memory|start new thread|map segment", re.I
)
"""Parts of messages of torch, Python and the loader of libraries about memory or threads that the system refuses."""


@contextlib.contextmanager
def system_errors_by_name(prepared: str | Path | None = None) -> Iterator[None]:
    """Turn errors of the operating system into errors of this package, as their cause, while the context is open.

    Errors not caused by a disk or memory (of the caller, of the network, an interrupt) are raised unchanged.

    Args:
        prepared: the split directory, or the source, that is being prepared; the error for a full disk names it.

    Raises:
        DiskFullError: no space, no inodes or no quota left.
        StorageError: any other error of a file or a folder.
        NotEnoughMemoryError: memory that the system refuses.
    """
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        named = _named(error, prepared)
        if named is None:
            raise
        raise named from error


def _named(error: BaseException, prepared: str | Path | None) -> RabbitLLMError | None:
    """The package's error for a system error; None for any other."""
    if isinstance(error, RabbitLLMError):
        return None
    is_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if not is_memory and isinstance(error, OSError) and error.errno is not None:
        return _of_storage(error, prepared)
    if not is_memory and not any(_NO_MEMORY.search(str(one)) for one in (error, error.__context__)):
        return None
    said = str(error).strip().partition("\n")[0]
    return NotEnoughMemoryError(
        f"There is not enough memory for this call ({type(error).__name__}{f': {said}' if said else ''}).",
        "Lower max_memory, use a stronger compression, or raise the memory limit of this process (`ulimit -v`, the "
        "container's limit). The finished part of a split is kept: the same call resumes it.",
    )


def _of_storage(error: OSError, prepared: str | Path | None) -> RabbitLLMError | None:
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    where = " -> ".join(names) or "A file or folder"
    if error.errno in _FULL_ERRORS:
        why = f"{where}: {error.strerror}" if names else error.strerror
        what_to_do = "Free disk space, or inodes if there is space (`df -i`), and make the same call again"
        if prepared is None:
            return DiskFullError(f"A disk is full ({why}).", f"{what_to_do}.")
        return DiskFullError(
            f"A disk became full while {prepared} was prepared ({why}). The split stopped; its finished part is kept.",
            f"{what_to_do}: it resumes.",
        )
    remedy = next((said for numbers, said in _REMEDIES if error.errno in numbers), None)
    if remedy is None:
        return None
    found = StorageError(f"{where} cannot be used: {error.strerror}.", remedy)
    found.errno, found.strerror, found.filename = error.errno, error.strerror, error.filename
    return found
