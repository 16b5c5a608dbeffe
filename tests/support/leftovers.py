"""What a call that has failed must not leave behind in the process: threads, open files, mappings."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE_SECONDS = 600.0
"""How long a thread may take to notice that it is not wanted any more."""
_OF_THE_HUB = "(process_request_thread)"


@contextlib.contextmanager
def none_left(*folders: Path) -> Iterator[None]:
    """Make sure that what runs in the context leaves no thread, and nothing below these folders open.

    Threads of a local hub, which may still be sending, do not count. Open files are known on Linux alone.
    """
    before = set(threading.enumerate())
    yield
    wait_for_threads(before)
    open_yet = [path for folder in folders for path in (*open_files(folder), *_mapped_files(folder))]
    assert open_yet == [], "files are left open"


def wait_for_threads(known: set[threading.Thread]) -> None:
    """Wait until there are no other threads than these, and those of a local hub."""
    until = time.monotonic() + PATIENCE_SECONDS
    while (left := _threads_besides(known)) and time.monotonic() < until:
        left[0].join(0.05)
    assert left == [], "threads are left"


def _threads_besides(known: set[threading.Thread]) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t not in known and not t.name.endswith(_OF_THE_HUB)]


def open_files(folder: Path) -> Iterator[str]:
    """Below a folder, once for each descriptor of this process; none where the system does not say."""
    descriptors = Path("/proc/self/fd")
    for descriptor in descriptors.iterdir() if descriptors.exists() else ():
        with contextlib.suppress(OSError):  # that of the listing itself is gone by now
            if (target := os.readlink(descriptor)).startswith(f"{folder}/"):
                yield target


def _mapped_files(folder: Path) -> Iterator[str]:
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        if f" {folder}/" in line:
            yield line
