"""What an attack is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.errors import CorruptShardError


@dataclass(frozen=True)
class Attack:
    """One way to write a file that must be refused.

    Attributes:
        build: makes the bytes; given the path of a marker that no reader may bring into being.
        error: the class that must be raised.
        message: a pattern that its text must match.
        live: whether `pickle.loads` of the same bytes does touch the marker, so that a reader that ran it would show.
    """

    build: Callable[[Path], bytes]
    error: type[Exception]
    message: str
    live: bool = False

    @property
    def name(self) -> str:
        """Its builder's name, in words."""
        return self.build.__name__.strip("_").replace("_", " ")


def listed(
    attacks: list[Attack], message: str, error: type[Exception] = CorruptShardError
) -> Callable[[Callable[[], bytes]], None]:
    """Put a builder that needs no marker on a list.

    Args:
        attacks: the list.
        message, error: see `Attack`.
    """

    def add(build: Callable[[], bytes]) -> None:
        def made(_: Path) -> bytes:
            return build()

        made.__name__ = build.__name__
        attacks.append(Attack(made, error, message))

    return add
