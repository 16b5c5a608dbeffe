"""tiktoken's vocabulary files: a line for each token, its bytes in base64 and its rank, which is its id.

Format: https://github.com/openai/tiktoken, tiktoken/load.py. Special tokens and the rule for splitting text are not
in the file. Stricter than that reader: ranks run from 0 without a gap, and no token is repeated. Independent of models.
"""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path

from rabbitllm.errors import CorruptVocabularyError
from rabbitllm.formats.bounded import read_vocabulary

MAX_TOKENS = 1 << 20
MAX_TOKEN_BYTES = 1024
"""Limit of a token's bytes. The longest of Llama 3 are runs of 128 spaces."""
_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (0|[1-9][0-9]{0,7})\r?")
_LONGEST_LINE = MAX_TOKEN_BYTES * 4 // 3 + 16


def looks_like_ranks(head: bytes) -> bool:
    """Whether a file that begins with `head` has this format; a SentencePiece model begins with a line feed."""
    return _LINE.fullmatch(head.partition(b"\n")[0]) is not None


def read_ranks(path: Path) -> tuple[bytes, ...]:
    """The tokens of a file, each at its rank.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptVocabularyError: see `parse_ranks`; or it is not a regular file, or has more than 67 MB.
    """
    return parse_ranks(read_vocabulary(path, lambda problem: _corrupt(path.name, problem)), path.name)


def parse_ranks(data: bytes, file: str) -> tuple[bytes, ...]:
    """The tokens in a file's bytes, each at its rank.

    Raises:
        CorruptVocabularyError: a malformed line, a token that is too long or repeated, a rank that is repeated or
            missing, a single byte that is not a token, or more than 1,048,576 lines.
    """
    lines = data.split(b"\n", MAX_TOKENS + 1)
    if lines and not lines[-1]:
        lines.pop()
    if len(lines) > MAX_TOKENS:
        raise _corrupt(file, f"it has more than {MAX_TOKENS:,} lines")
    by_rank: dict[int, bytes] = {}
    for number, line in enumerate(lines, 1):
        if len(line) > _LONGEST_LINE:
            raise _corrupt(file, f"line {number:,} has {len(line):,} bytes; a token has at most {MAX_TOKEN_BYTES:,}")
        match = _LINE.fullmatch(line)
        if match is None:
            raise _corrupt(file, f"line {number:,} is {line[:40]!r}; expected a token in base64 and its rank")
        try:
            token = base64.b64decode(match[1], validate=True)
        except binascii.Error as error:
            raise _corrupt(file, f"line {number:,} is {line[:40]!r}, which is not base64: {error}") from None
        rank = int(match[2])
        if rank in by_rank:
            raise _corrupt(file, f"rank {rank:,} appears twice, again in line {number:,}")
        by_rank[rank] = token
    missing = next((rank for rank in range(len(by_rank)) if rank not in by_rank), None)
    if missing is not None:
        raise _corrupt(file, f"of its {len(by_rank):,} ranks {missing:,} is missing; expected them without a gap")
    tokens = tuple(by_rank[rank] for rank in range(len(by_rank)))
    _check_tokens(tokens, file)
    return tokens


def _check_tokens(tokens: tuple[bytes, ...], file: str) -> None:
    ranks: dict[bytes, int] = {}
    for rank, token in enumerate(tokens):
        if ranks.setdefault(token, rank) != rank:
            raise _corrupt(file, f"the token {token[:40]!r} appears twice, at ranks {ranks[token]:,} and {rank:,}")
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise _corrupt(file, f"the byte {missing} is not a token, so some text cannot be tokenized")


def _corrupt(file: str, problem: str) -> CorruptVocabularyError:
    return CorruptVocabularyError(
        f"{file} is not a valid tiktoken vocabulary: {problem}.",
        "Download it again from the model's publisher, and compare its size.",
    )
