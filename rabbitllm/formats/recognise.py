"""The format of a file of weights, by its first bytes; the extension does not count.

Only the beginning is checked; the reader of the format checks the rest.
"""

from __future__ import annotations

import enum
from pathlib import Path

HEAD_BYTES = 512
"""Bytes of a file that `recognise` needs."""

LEGACY_NUMBER = 0x1950A86A20F9469CFC6C
"""Before torch 1.6, files of `torch.save` began with a pickle of this (torch/serialization.py, MAGIC_NUMBER)."""
_LEGACY_PICKLE = b"\x8a\x0a" + LEGACY_NUMBER.to_bytes(10, "little") + b"."
_MAX_HEADER_BYTES = 100_000_000


class Weights(enum.Enum):
    """A format of weights; the value is its name in messages."""

    SAFETENSORS = "safetensors"
    TORCH_ZIP = "a torch zip"
    TORCH_LEGACY = "a torch file from before torch 1.6"
    TORCH_TAR = "a torch file in a tar archive, from before torch 0.1.10"
    PICKLE = "a bare pickle"
    GGUF = "GGUF"
    UNKNOWN = "of no format known here"


def recognise(head: bytes) -> Weights:
    """The format of a file that begins with `head`, its first `HEAD_BYTES` bytes or all of it."""
    # first, since the length of a header may look like the start of a pickle: 128 is 0x80, as is 640
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= _MAX_HEADER_BYTES:
        return Weights.SAFETENSORS
    if head.startswith(b"PK\x03\x04"):
        return Weights.TORCH_ZIP
    if head.startswith(b"GGUF"):
        return Weights.GGUF
    if len(head) >= 2 and head[0] == 0x80 and head[1] <= 5:
        # protocols 4 and 5 put a frame before the number
        return Weights.TORCH_LEGACY if _LEGACY_PICKLE in head[2:32] else Weights.PICKLE
    if head[257:262] == b"ustar":
        return Weights.TORCH_TAR
    return Weights.UNKNOWN


def recognise_file(path: Path) -> Weights:
    """The format of a local file."""
    with path.open("rb") as stream:
        return recognise(stream.read(HEAD_BYTES))
