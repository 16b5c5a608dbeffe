"""What a disk may hold after a power cut, rebuilt from the steps that were taken until then.

A kill leaves everything that was written; a power cut leaves only what was synced, and of the rest whatever the file
system happened to have written back, in any order. The model is the pessimistic one of POSIX: written bytes are certain
once the file is synced, names once their folder is.

    recorder = Recorder(folder)
    with observe_steps(recorder): ...
    recorder.rebuild(into, upto=17, keep=lambda step: False)

Several calls may be recorded one after the other: what a killed process has written stays visible to the next one,
and is not durable for that. Knows the steps of ``rabbitllm.storage.durable``, and nothing of splits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rabbitllm.storage.durable import Step

LOST_SYNC = "lost sync"
_BLOCK = 4096


@dataclass
class _File:
    """One file's bytes: those that are certain, and the writes since it was last synced."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Step] = field(default_factory=list)

    def settle(self, keep: Callable[[Step], bool]) -> bytes:
        """What is found after the cut: the certain bytes, and those writes (or halves of them) that are kept."""
        content = bytearray(self.durable)
        for step in self.pending:
            data = bytes(step.data)
            for begin, end in ((0, len(data) // 2), (len(data) // 2, len(data))):
                if keep(step):
                    _write(content, step.offset + begin, data[begin:end])
        return bytes(content)

    def lose(self, keep: Callable[[Step], bool]) -> None:
        """Decide now what of the writes since the last sync is on the disk; nothing makes the rest durable later."""
        self.durable = bytearray(self.settle(keep))
        self.pending.clear()


def _write(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(offset + len(data) - len(content), 0)))
    content[offset : offset + len(data)] = data


class Recorder:
    """Notes every step below a folder, whose own name is certain; an observer for ``observe_steps``."""

    def __init__(self, root: Path, *, ignore: Callable[[Step], bool] = lambda step: False) -> None:
        self._root = root
        self._ignore = ignore
        files = {path.relative_to(root): path for path in root.rglob("*") if path.is_file()}
        self._before = {name: path.read_bytes() for name, path in files.items()}
        self._times = {name: path.stat().st_mtime_ns for name, path in files.items()}
        self.steps: list[Step] = []

    def __call__(self, step: Step) -> None:
        below = step.path.is_relative_to(self._root) and (step.path != self._root or step.kind == "sync_folder")
        if below and not self._ignore(step):
            self.steps.append(Step(step.kind, step.path, step.offset, bytes(step.data), step.target))

    def lose_sync(self, step: Step) -> None:
        """Note a sync that failed: the kernel forgets what was to be written, and a later sync knows nothing of it.

        https://wiki.postgresql.org/wiki/Fsync_Errors
        """
        self.steps.append(Step(LOST_SYNC, step.path))

    def rebuild(self, into: Path, upto: int, keep: Callable[[Step], bool]) -> None:
        """Write the files that are found if the power is cut before step ``upto``.

        ``keep`` decides, for every step that is not certain, whether what it did is found. ``into`` may be the folder
        that was recorded; it has to be empty.
        """
        names: dict[Path, _File] = {path: _File(bytearray(data)) for path, data in self._before.items()}
        certain = dict(names)
        unsettled: list[tuple[Step, Path, _Change]] = []

        def change(step: Step, folder: Path, apply: _Change) -> None:
            apply(names)
            unsettled.append((step, folder, apply))

        for step in self.steps[:upto]:
            path = step.path.relative_to(self._root)
            if step.kind == "create" and path not in names:
                change(step, path.parent, _naming(path, _File()))
            elif step.kind == "write":
                names[path].pending.append(step)
            elif step.kind == "sync":
                _settle_all(names[path])
            elif step.kind == "rename" and step.target is not None:
                change(step, path.parent, _renaming(path, step.target.relative_to(self._root), names[path]))
            elif step.kind == "unlink":
                change(step, path.parent, _removing(path))
            elif step.kind == "make_folder":
                change(step, path.parent, lambda table: None)
            elif step.kind == LOST_SYNC:
                names[path].lose(keep)
            elif step.kind == "sync_folder":
                for _, _, apply in (entry for entry in unsettled if entry[1] == path):
                    apply(certain)
                unsettled = [entry for entry in unsettled if entry[1] != path]
        lost_folders = []
        for step, _, apply in unsettled:
            if keep(step):
                apply(certain)
            elif step.kind == "make_folder":
                lost_folders.append(step.path.relative_to(self._root))
        for path, file in certain.items():
            if any(path.is_relative_to(folder) for folder in lost_folders):
                continue
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            content = file.settle(keep)
            _write_with_holes(into / path, content)
            if content == self._before.get(path):  # a file that was not written keeps its time
                os.utime(into / path, ns=(0, self._times[path]))


def _write_with_holes(path: Path, content: bytes) -> None:
    """Write a file so that blocks of zeros take no space, as where nothing was ever written."""
    with path.open("wb") as file:
        for offset in range(0, len(content), _BLOCK):
            if any(block := content[offset : offset + _BLOCK]):
                file.seek(offset)
                file.write(block)
        file.truncate(len(content))


_Change = Callable[[dict[Path, _File]], object]


def _naming(path: Path, file: _File) -> _Change:
    return lambda table: table.update({path: file})


def _removing(path: Path) -> _Change:
    return lambda table: table.pop(path, None)


def _renaming(path: Path, target: Path, file: _File) -> _Change:
    def apply(table: dict[Path, _File]) -> None:
        table.pop(path, None)
        table[target] = file

    return apply


def _settle_all(file: _File) -> None:
    for step in file.pending:
        _write(file.durable, step.offset, bytes(step.data))
    file.pending.clear()
