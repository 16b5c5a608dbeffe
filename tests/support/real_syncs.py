"""What a call really asks of the system: syncs, renames, unlinks and writes, noted where Python makes the calls.

    with recorded() as calls:
        ...

The steps of `rabbitllm.storage.durable` are announced before they are carried out; a power cut replayed from those
says nothing about calls that are announced and then left out. Here the functions of `os` are wrapped. Paths are those
of the moment: a descriptor's comes from /proc.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class SystemCall:
    """One call that succeeded: "fsync", "write", "replace", "unlink", "mkdir" or "truncate", and its path."""

    name: str
    path: Path
    target: Path | None = None


def _path_of(file: int | str | Path) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{file}")) if isinstance(file, int) else Path(os.path.abspath(file))


@contextlib.contextmanager
def recorded() -> Iterator[list[SystemCall]]:
    """Note the calls of all threads while the context is open."""
    calls: list[SystemCall] = []

    def wrap(name: str, noted: str) -> None:
        original = getattr(os, name)

        def call(file: Any, *rest: Any, **options: Any) -> Any:
            path = _path_of(file)
            result = original(file, *rest, **options)
            target = Path(os.path.abspath(rest[0])) if noted == "replace" else None
            calls.append(SystemCall(noted, path, target))
            return result

        patch.setattr(os, name, call)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "replace", "unlink", "mkdir"):
            wrap(name, name)
        for name, noted in {"pwrite": "write", "write": "write", "ftruncate": "truncate"}.items():
            wrap(name, noted)
        yield calls
