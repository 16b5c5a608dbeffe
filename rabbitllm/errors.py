"""Every error that this package raises on purpose.

docs/reference/errors.md is made from the docstrings of the classes. `system_errors_by_name` turns errors of the system
into the last three kinds; every public entry point runs inside it. A message says what was found and what was expected;
`remedy` is the advice. `str()` shows both.
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
    """An argument has an invalid value.

    What to do:
        Change the argument that the message names; the message says what is accepted.
    """


class DeviceError(OptionError):
    """The requested device is not on this machine.

    What to do:
        Name a device of this machine, or leave `device` out. `rabbitllm doctor` lists the devices.
    """


class AbsentWeightError(RabbitLLMError, RuntimeError):
    """Attempt to read or pickle a weight that is not in memory, by code that cannot load it.

    What to do:
        Read a streamed weight inside a forward pass only, or raise `max_memory` so that it stays in memory. A hook
        keeps a copy, `weight.clone()`: the memory of a layer's weights is used again.
        To read single tensors, use `rabbitllm.lazy_load`.
    """


class ReadOnlyWeightError(RabbitLLMError, RuntimeError):
    """Attempt to write to a weight that is not in memory, or is there only as codes.

    Writes through `torch.from_dlpack(weight)` or `untyped_storage()`, and those of a hook to a streamed layer that
    computes, cannot be noticed: they are lost.

    What to do:
        Load the model without `compression` and with enough `max_memory` for the weight, and change it then.
    """


class MissingPackageError(RabbitLLMError, ImportError):
    """A package is not installed, or is installed in a version that cannot be used.

    What to do:
        Install the package, or the version, that the message names.
    """


def missing_package(use: str, package: str, extra: str) -> MissingPackageError:
    """Return the error for a missing package.

    Args:
        use: begins the sentence with the use and its verb: "Pictures need".
        package: the package.
        extra: the extra of RabbitLLM that has it.
    """
    return MissingPackageError(
        f"{use} the package {package}, which is not installed.",
        f'Run pip install ".[{extra}]" in a copy of the repository.',
    )


class ChatError(RabbitLLMError):
    """A conversation cannot continue: the context is full, or the chat template refuses it.

    What to do:
        Remove old messages (`/drop`, `/reset`), or start a new conversation.
    """


class ChatFileError(ChatError):
    """A file is not a saved conversation, or cannot be written.

    What to do:
        Check the path and the position in the file that the message names. The conversation in memory is
        unchanged.
    """


class CopyError(RabbitLLMError, TypeError):
    """Attempt of another library to copy, pickle or place a model whose weights stay in its files.

    What to do:
        Load the model again with `AutoModel.from_pretrained` in the process that needs it, and set `device`,
        `dtype` and `max_memory` there.
    """


class ForkedError(RabbitLLMError, RuntimeError):
    """A forked process uses something that works only in its parent.

    What to do:
        Load the model in the child process, or start the process with `spawn`.
    """


class HostsError(RabbitLLMError):
    """Processes cannot compute one model together: they differ, or the model cannot be divided.

    What to do:
        Give all processes the same model, versions and number of threads. See the guide about several
        machines.
    """


class HostGoneError(HostsError):
    """One of the processes that compute a model together has ended, or does not answer.

    What to do:
        Start all processes again. Check that they reach each other, and name the network interface in
        `GLOO_SOCKET_IFNAME`.
    """


class BatchError(RabbitLLMError):
    """A batch cannot accept another request.

    What to do:
        See the classes below it.
    """


class BusyError(BatchError):
    """The limit of waiting requests is reached.

    Args:
        problem, remedy: see `RabbitLLMError`.
        retry_after: seconds until there will probably be room.

    What to do:
        Wait `retry_after` seconds and submit the request again, or raise the limit of waiting requests.
    """

    def __init__(self, problem: str, remedy: str = "", retry_after: float = 1.0) -> None:
        super().__init__(problem, remedy)
        self.retry_after = retry_after


class ClosedError(BatchError):
    """The batch is shutting down, or has ended.

    What to do:
        Start a new batch or server.
    """


class ClusterError(RabbitLLMError):
    """A Ray cluster cannot be reached, cannot do the work, or lost it too often.

    What to do:
        Check `ray status`, and make the same call again: finished work is kept.
    """


class InputError(RabbitLLMError):
    """The input of `rabbitllm batch` cannot be read, or repeats an id.

    What to do:
        Correct the input: JSON lines or Parquet, each id once.
    """


class MediaError(RabbitLLMError, ValueError):
    """A picture or a sound cannot be read, is too large, or cannot be part of this prompt.

    What to do:
        Use a file in a format that the message names, or a smaller one.
    """


class ResultsError(RabbitLLMError):
    """Results of `rabbitllm batch` exist already, belong to another batch, or cannot be written.

    What to do:
        Name another output, pass `overwrite=True` (`--overwrite`), or repeat the command that made the
        output.
    """


class NotANumberError(RabbitLLMError, ArithmeticError):
    """A model's scores of the next token, or its embeddings, are not numbers.

    What to do:
        Load the model with another `dtype` (float16 overflows where bfloat16 does not), and check its weights
        with `rabbitllm verify`. Other requests go on.
    """


class ScoringError(RabbitLLMError):
    """Texts cannot be scored on this model, or not in the available memory.

    What to do:
        Shorten the texts, or give weights less memory (`max_memory`). Models without causal attention cannot
        score texts.
    """


class QualityError(RabbitLLMError):
    """Two models cannot be compared, or not on this text.

    What to do:
        Compare two models with the same tokenizer, and give a text that is long enough.
    """


class CheckpointError(RabbitLLMError):
    """The source checkpoint is not what it claims to be.

    What to do:
        See the classes below it.
    """


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the given location.

    What to do:
        Check the path or the repository id. A private repository needs a token.
    """


class UnsafePathError(CheckpointError):
    """A checkpoint names a file outside its folder or by a name that is not plain, or has something else in its place.

    What to do:
        Do not use this checkpoint unless you trust its author. A link may lead to weights on another disk; put
        other files themselves, without links, into the folder.
    """


class InvalidIndexError(CheckpointError):
    """The index is malformed, or contradicts the headers of the shards.

    What to do:
        Fetch the index and the shards again, from one revision.
    """


class CorruptShardError(CheckpointError):
    """A shard is truncated or its header is malformed.

    What to do:
        Fetch the named shard again. Keep the split directory: it may hold the only copy of other tensors.
    """


class UnreadableFormatError(CheckpointError):
    """A file of weights is in a format that this version does not read.

    What to do:
        Convert the weights to safetensors with the program that wrote them.
    """


class CorruptVocabularyError(CheckpointError):
    """A tokenizer's vocabulary is truncated, malformed or contradicts itself.

    What to do:
        Fetch the tokenizer files again.
    """


class ProcessorError(CheckpointError):
    """The processor of a model for pictures or sounds lacks a file, or its files are malformed.

    What to do:
        Put the named file of the checkpoint into the split directory. Text needs no processor.
    """


class UnsafePickleError(CheckpointError):
    """A pickle holds a global, an opcode or a structure that no checkpoint of tensors needs; nothing of it was run.

    What to do:
        Do not load this file with other programs. Ask its author for safetensors. `rabbitllm inspect
        --opcodes` shows the pickle.
    """


class MissingShardError(CheckpointError, FileNotFoundError):
    """The index names a shard that is missing and cannot be fetched.

    What to do:
        Put the named shard at the named path, or name the repository so that it can be fetched.
    """


USED_UP = (
    "If a split with deletion used them up, perhaps in another process, it has their tensors: repeat the call that "
    "began it, or load its folder."
)
"""Advice about shards that are gone."""


class IncompleteCheckpointError(CheckpointError):
    """A checkpoint lacks tensors that its model needs, or has them in another shape or dtype. Nothing was deleted.

    What to do:
        Fetch the named shards again, or use the config that belongs to the weights.
    """


class ClosedCheckpointError(CheckpointError, ValueError):
    """A tensor of a lazily loaded checkpoint is first used after the checkpoint was closed.

    What to do:
        Use the tensor before `close()`, or open the checkpoint again.
    """


class UnknownArchitectureError(CheckpointError):
    """The installed transformers does not support the model's architecture.

    What to do:
        Update transformers; or pass `trust_remote_code=True` for a model with its own code.
    """


class HubError(RabbitLLMError):
    """The hub refused a request or could not be reached.

    What to do:
        Check the connection and the revision, and make the same call again. Without a connection, pass
        `local_files_only=True`.
    """


class GatedRepositoryError(HubError):
    """The repository exists, but this token (or no token) may not read it.

    What to do:
        Accept the terms on the model's page, then run `hf auth login` or pass `token`.
    """


class SplitError(RabbitLLMError):
    """Base of errors about the split directory.

    What to do:
        See the classes below it.
    """


class NotEnoughSpaceException(SplitError):
    """The split would not fit on the disk; raised before the first byte is written.

    The name is RabbitLLM 1.1's, which callers catch.

    What to do:
        Free disk space, raise `max_disk`, choose a smaller `compression`, or set
        `sequential_shard_processing=True`. `rabbitllm plan` shows what fits.
    """


class DiskFullError(SplitError):
    """The disk is full, or its free space fell below the reserve; the same call resumes.

    What to do:
        Free disk space, and make the same call again: it resumes.
    """


class InUseError(SplitError):
    """Another process reads files that a call would delete, deletes files that it would read, or writes its output.

    What to do:
        Wait for the process that the message names, or end it. Then make the same call again.
    """


class SplitMismatchError(SplitError):
    """A split directory belongs to another model, revision or compression than requested.

    What to do:
        Name another folder (`layer_shards_saving_path`), or remove the split directory with `rabbitllm rm`.
    """


class IncompleteSplitError(SplitError):
    """A split directory lacks tensors that the model needs, or a layer file is damaged.

    What to do:
        Run `rabbitllm verify FOLDER --repair`. Without the shards, split the checkpoint again into another
        folder.
    """


class StorageError(RabbitLLMError, OSError):
    """The operating system refuses to read, write or create a file or a folder; has the `errno` of its cause.

    What to do:
        Check the path, its permissions and the disk. The message names the operation.
    """


class NotEnoughMemoryError(RabbitLLMError, MemoryError):
    """The call needs more memory than this process may have, or than a GPU has left.

    What to do:
        Lower `max_memory`, choose a smaller `compression`, or raise the limit of the process (`ulimit -v`,
        its container). On a GPU a smaller `max_memory` leaves more for activations and the KV cache.
    """


def _numbers(*names: str) -> frozenset[int]:
    """The error numbers of these names that exist on this system."""
    return frozenset(getattr(errno, name) for name in names if hasattr(errno, name))


_FULL_ERRORS = _numbers("ENOSPC", "EDQUOT")
"""Errors of a write without space: on the disk, in its inode table, or in a quota."""
_IN_THE_WAY = "The path of a folder is a file or a broken link: use another path, or move it away."
_REMEDIES = (
    (_numbers("EROFS"), "The disk is mounted read-only: use a folder on another disk, or mount it for writing."),
    (_numbers("EACCES", "EPERM"), "Use a folder that this user can read and write, or change its permissions."),
    (
        _numbers("EIO", "ESTALE", "ENXIO", "ENODEV", "ENOLCK", "ENOTCONN"),
        "Check the disk or file server (on Linux see `dmesg`), and make the same call again.",
    ),
    (_numbers("ENOENT", "ELOOP", "ENAMETOOLONG", "EISDIR", "EINVAL"), "Check the path and the targets of its links."),
    (_numbers("ENOTDIR", "EEXIST"), _IN_THE_WAY),
    (_numbers("EOPNOTSUPP"), "This file system lacks an operation that is needed: use a folder on another disk."),
    (_numbers("EFBIG"), "Use a disk without FAT32, which has no files above 4.29 GB, or raise `ulimit -f`."),
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
        prepared: the split directory, or the source, that is being prepared; errors name it.

    Raises:
        DiskFullError: no space, no inodes or no quota left.
        StorageError: any other error of a file or a folder.
        NotEnoughMemoryError: memory that the system refuses.
    """
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        translated = _translated_error(error, prepared)
        if translated is None:
            raise
        raise translated from error


def _translated_error(error: BaseException, prepared: str | Path | None) -> RabbitLLMError | None:
    """The package's error for a system error; None for any other."""
    if isinstance(error, RabbitLLMError):
        return None
    is_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if not is_memory and isinstance(error, OSError) and error.errno is not None:
        return _storage_error(error, prepared)
    if not is_memory and not any(_NO_MEMORY.search(str(cause)) for cause in (error, error.__context__)):
        return None
    text = str(error).strip().partition("\n")[0]
    return NotEnoughMemoryError(
        f"There is not enough memory for this call ({type(error).__name__}{f': {text}' if text else ''}).",
        "Lower max_memory, use a stronger compression, or raise the memory limit of this process (`ulimit -v`, the "
        "container's limit). The finished part of a split is kept: the same call resumes it.",
    )


def _storage_error(error: OSError, prepared: str | Path | None) -> RabbitLLMError | None:
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    paths = " -> ".join(names) or ("A file or folder" if prepared is None else f"A file of {prepared}")
    if error.errno in _FULL_ERRORS:
        why = f"{paths}: {error.strerror}" if names else error.strerror
        what_to_do = "Free disk space, or inodes if there is space (`df -i`), and make the same call again"
        if prepared is None:
            return DiskFullError(f"A disk is full ({why}).", f"{what_to_do}.")
        return DiskFullError(
            f"The disk ran full while {prepared} was prepared ({why}). The split stopped; its finished part is kept.",
            f"{what_to_do}: it resumes.",
        )
    remedy = next((advice for numbers, advice in _REMEDIES if error.errno in numbers), None)
    if remedy is None:
        return None
    storage_error = StorageError(f"{paths} cannot be used: {error.strerror}.", remedy)
    storage_error.errno, storage_error.strerror, storage_error.filename = error.errno, error.strerror, error.filename
    return storage_error
