"""What an attack is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rabbitllm.errors import CorruptShardError, UnsafePickleError


@dataclass(frozen=True)
class Attack:
    """One way to write a file that must be refused.

    Attributes:
        name: what is wrong with the file.
        message: a pattern that the text of the error must match.
        content: the bytes; or makes them, given the path of a marker that no reader may bring into being.
        error: the class that must be raised.
        live: whether `pickle.loads` of the same bytes does touch the marker, so that a reader that ran it would show.
    """

    name: str
    message: str
    content: bytes | Callable[[Path], bytes]
    error: type[Exception] = CorruptShardError
    live: bool = False

    def build(self, marker: Path) -> bytes:
        """The bytes, which touch this marker if something runs them."""
        return self.content if isinstance(self.content, bytes) else self.content(marker)


unsafe = partial(Attack, error=UnsafePickleError)
"""An attack by a pickle that would run, or hold, what no checkpoint needs."""
