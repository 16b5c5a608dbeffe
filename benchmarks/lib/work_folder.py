"""A folder for what a benchmark's rows need in addition to the checkpoint, there for as long as it runs."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """Empty at the start, whatever an earlier run left there, and gone at the end."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
