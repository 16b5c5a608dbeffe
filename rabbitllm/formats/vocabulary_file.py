"""The bytes of a vocabulary file, whose type and size are checked before it is opened. Independent of formats."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from rabbitllm.errors import CheckpointNotFoundError, CorruptVocabularyError

MAX_FILE_BYTES = 64 << 20
"""Limit of a file. Gemma's 262,144 pieces take 5 MB, Llama 3's 128,000 tokens 2 MB."""


def read_bytes(path: Path, refusal: Callable[[str], CorruptVocabularyError]) -> bytes:
    """All of a regular file of at most 64 MiB.

    Args:
        path: the file.
        refusal: makes the error for a problem.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptVocabularyError: it is not a regular file, or is larger.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"There is no vocabulary {path}.", "Name the tokenizer.model itself.") from None
    if not stat.S_ISREG(found.st_mode):  # opening a pipe blocks until a writer opens it
        raise refusal("it is no regular file")
    if found.st_size > MAX_FILE_BYTES:
        raise refusal(f"it has {found.st_size:,} bytes; at most {MAX_FILE_BYTES:,} are read")
    with path.open("rb") as stream:
        return stream.read(MAX_FILE_BYTES)
