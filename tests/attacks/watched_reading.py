"""Reads files in a process of its own, under a limit of memory, and tells what came of each and what else happened.

`python -m tests.attacks.watched_reading LIST`, where LIST is a file with a line of JSON for each case: [reader, path].
Prints a line of JSON for each: an `Outcome`. Without torch, so that little is in memory before.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rabbitllm.errors import RabbitLLMError
from rabbitllm.formats._torch_pickle import name_tensors, read_torch_pickle
from rabbitllm.formats.bounded import read_json
from rabbitllm.formats.safetensors_file import read_header
from rabbitllm.formats.sentencepiece_model import read_model
from rabbitllm.formats.shard_header import read_shard_header
from rabbitllm.formats.torch_file import read_torch_zip
from tests.attacks import folders

MEMORY_BYTES = 256_000_000
"""What reading may take in addition to what the idle process has."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
HARMLESS = {"os.listdir", "os.scandir", "builtins.id", "array.__new__", "pathlib.Path.glob"}
"""Events other than opening a file for reading that may happen."""


@dataclass(slots=True)
class Outcome:
    """What reading one file came to.

    Attributes:
        error: the class of the exception, None if there was none.
        ours: whether it is a RabbitLLMError.
        problem, remedy: its two parts, or all of another exception's text as the problem.
        seconds: of this process's own time.
        opened: files that were opened outside the case's folder, or for writing.
        events: whatever else the interpreter announced (PEP 578): imports, processes, sockets, deletions.
    """

    error: str | None = None
    ours: bool = False
    problem: str = ""
    remedy: str = ""
    seconds: float = 0.0
    opened: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)


def _read_pickle(path: Path) -> None:
    root, _ = read_torch_pickle(path.read_bytes(), path.name)
    name_tensors(root, path.name)


READERS: dict[str, Callable[[Path], object]] = {
    "shard": read_shard_header,
    "safetensors": read_header,
    "torch zip": read_torch_zip,
    "pickle": _read_pickle,
    "vocabulary": read_model,
    "json": read_json,
    "folder": folders.read_all,
}
CONTROLS: dict[str, Callable[[Path], object]] = {
    "runs it": lambda path: pickle.loads(path.read_bytes()),
    "takes memory": lambda path: bytearray(MEMORY_BYTES + (8 << 20)),
    "follows links": lambda path: (path / folders.SINGLE).read_bytes(),
    "writes": lambda path: path.write_bytes(b""),
}
"""Readers that do what none may, to show that the watch sees it."""

_watching: tuple[Path, Outcome] | None = None


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook; there is no taking it off."""
    if _watching is None:
        return
    folder, outcome = _watching
    if event == "open":
        path, _, flags = arguments
        inside = isinstance(path, str) and Path(os.path.realpath(path)).is_relative_to(folder)
        if not inside or flags & WRITING:
            outcome.opened.append(str(path))
    elif event not in HARMLESS:
        outcome.events.append(event)


def read(reader: str, path: Path) -> Outcome:
    global _watching
    outcome = Outcome()
    folder = path if path.is_dir() else path.parent
    _watching = folder.resolve(), outcome
    began = time.process_time()
    try:
        (READERS | CONTROLS)[reader](path)
    except RabbitLLMError as error:
        outcome.error, outcome.ours = type(error).__name__, True
        outcome.problem, outcome.remedy = error.problem, error.remedy
    except Exception as error:
        outcome.error, outcome.problem = type(error).__name__, str(error)[:1000]
    finally:
        _watching = None
    outcome.seconds = time.process_time() - began
    return outcome


def main(cases: Path) -> None:
    listed = [json.loads(line) for line in cases.read_text().splitlines()]
    for reader, path in dict(reversed(listed)).items():
        if reader not in CONTROLS:  # the first of each, so that what is imported late is imported before the watch
            read(reader, Path(path))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    sys.addaudithook(watch)
    assert "torch" not in sys.modules
    for reader, path in listed:
        print(json.dumps(asdict(read(reader, Path(path)))), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
