"""Splits made as a user's call makes them, what is on the disk afterwards, and a disk that fails at a chosen step."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rabbitllm import prepare
from rabbitllm.base import progress
from rabbitllm.base.options import ShardPolicy, SplitOptions
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.telemetry.profiler import Profiler
from tests.support.ticks import counts, observe_ticks


@dataclass(frozen=True)
class Call:
    """One call of a user, as data, so that another process can make the very same one.

    ``hub_url`` and ``hub_home`` are for that other process: where its hub is, and its Hugging Face home.
    """

    source: str
    saving_path: str | None = None
    compression: str | None = None
    sequential: bool = True
    delete_original: bool = False
    max_disk: int | None = None
    profiling: bool = False
    repo_id: str | None = None
    local_files_only: bool = False
    shard_transfer: str = "auto"
    verify_source: bool = False
    hub_url: str = ""
    hub_home: str = ""

    @property
    def shards(self) -> ShardPolicy:
        return ShardPolicy.of(sequential=self.sequential, delete_original=self.delete_original)

    def find(self) -> prepare.Source:
        saving_path = Path(self.saving_path) if self.saving_path else None
        access = HubAccess(local_files_only=self.local_files_only)
        return prepare.find(prepare.ModelSpec(self.source, self.compression, saving_path, access, self.repo_id))

    def make(self) -> Path:
        """Make the call, and return the split directory."""
        return self.make_with_profile()[0]

    def make_with_profile(self) -> tuple[Path, Profiler]:
        source = self.find()
        options = SplitOptions(
            compression=self.compression,
            shards=self.shards,
            max_disk=self.max_disk,
            profiling=self.profiling,
            shard_transfer=self.shard_transfer,
            verify_source=self.verify_source,
        )
        return source.split_folder, prepare.ensure_split(source, options)


def split(source: Path | str, saving_path: Path | None = None, **options: object) -> Path:
    """Make one call and return the split directory."""
    where = str(saving_path) if saving_path else None
    return Call(str(source), where, **options).make()  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder: relative name -> bytes."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def layer_files(folder: Path) -> dict[str, bytes]:
    """The layer files of a split directory and their markers: name -> bytes."""
    return {name: data for name, data in contents(folder).items() if ".safetensors" in name}


def names_in(folder: Path, pattern: str = "*") -> list[str]:
    """The names of a folder's own entries."""
    return sorted(path.name for path in folder.glob(pattern))


def occupied(*folders: Path) -> int:
    """Bytes that the files below some folders occupy on the disk: blocks, not lengths; a link counts nothing."""
    total = 0
    for folder in folders:
        for base, _, files in os.walk(folder):
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(base, file)).st_blocks * 512
    return total


class Counter:
    """Counts steps, from whichever thread they come; calls ``watch`` with each that counts and its number from 0."""

    def __init__(
        self, watch: Callable[[int, Step], None] = lambda number, step: None, kinds: tuple[str, ...] = ()
    ) -> None:
        self.count = 0
        self._watch = watch
        self._kinds = kinds
        self._lock = threading.Lock()

    def __call__(self, step: Step) -> None:
        if not counts(step) or (self._kinds and step.kind not in self._kinds):
            return
        with self._lock:
            number = self.count
            self.count += 1
            self._watch(number, step)


@contextlib.contextmanager
def failing(error: OSError, when: Callable[[int, Step], bool], kinds: tuple[str, ...] = ()) -> Iterator[None]:
    """Raise ``error`` in place of the steps for which ``when`` says so."""

    def fail(number: int, step: Step) -> None:
        if when(number, step):
            raise error

    with observe_ticks(Counter(fail, kinds)):
        yield


def steps_of(call: Call) -> int:
    """How many steps the call takes on this disk; it is carried out."""
    counter = Counter()
    with observe_ticks(counter):
        call.make()
    return counter.count


def interrupted(call: Call, shards: int = 1) -> Path:
    """Make the call, break it off when so many shards are used up, and return the split directory."""

    def stop(number: int, step: Step) -> None:
        if step.kind == "create" and done:
            raise KeyboardInterrupt

    done: list[str] = []

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.ShardDone) and event.number == shards:
            done.append(event.shard)

    with observe_steps(Counter(stop)), progress.listening(listen), pytest.raises(KeyboardInterrupt):
        call.make()
    return call.find().split_folder


def make(call: Mapping[str, Any]) -> None:
    """Make a call that is given as data, as `CrashServer` has it."""
    Call(**call).make()
