"""What a disk may hold after a power cut, rebuilt from the steps that were taken until then.

A kill leaves everything that was written; a power cut leaves only what was synced, and of the rest whatever the file
system happened to have written back, in any order. The model is the pessimistic one of POSIX: written bytes are certain
once the file is synced, names once their folder is.

    recorder = Recorder(folder)
    with observe_steps(recorder): ...
    recorder.rebuild(into, upto=17, keep=lambda step: False)

Knows the steps of ``rabbitllm.durable``, and nothing of splits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rabbitllm.durable import Step


@dataclass
class _File:
    """One file's bytes: those that are certain, and the writes since it was last synced."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Step] = field(default_factory=list)

    def settle(self, keep: Callable[[Step], bool]) -> bytes:
        """What is found after the cut: the certain bytes, and those writes (or halves of them) that are kept."""
        found = bytearray(self.durable)
        for step in self.pending:
            data = bytes(step.data)
            for begin, end in ((0, len(data) // 2), (len(data) // 2, len(data))):
                if keep(step):
                    _write(found, step.offset + begin, data[begin:end])
        return bytes(found)


def _write(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(offset + len(data) - len(content), 0)))
    content[offset : offset + len(data)] = data


class Recorder:
    """Notes every step below a folder; an observer for ``observe_steps``."""

    def __init__(self, root: Path, *, ignore: Callable[[Step], bool] = lambda step: False) -> None:
        self._root = root
        self._ignore = ignore
        self._before = {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        self.steps: list[Step] = []

    def __call__(self, step: Step) -> None:
        if not self._ignore(step):
            self.steps.append(Step(step.kind, step.path, step.offset, bytes(step.data), step.target))

    def rebuild(self, into: Path, upto: int, keep: Callable[[Step], bool]) -> None:
        """Write the files that are found if the power is cut before step ``upto``.

        ``keep`` decides, for every step that is not certain, whether what it did is found.
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
            elif step.kind == "sync_folder":
                for _, _, apply in (entry for entry in unsettled if entry[1] == path):
                    apply(certain)
                unsettled = [entry for entry in unsettled if entry[1] != path]
        for step, _, apply in unsettled:
            if keep(step):
                apply(certain)
        for path, file in certain.items():
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            (into / path).write_bytes(file.settle(keep))


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
