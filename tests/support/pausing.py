"""Calls in other processes that pause at a moment, until they are told to go on; or are killed there.

with Paused("split", {"source": str(folder)}) as other:
    ...                 # it stands behind its first shard
    other.goes_on()
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rabbitllm.storage.durable import Step

_ROOT = Path(__file__).parent.parent.parent


class Paused:
    """A process that has come to its moment.

    Args:
        what: "split": behind its first shard; "repair": see `at`; "load": with the model in memory.
        **options: of `Call`; for repairs `folder`, `original` and `at`, one or several of "begins": when the journal is
            there and the manifest still is; "goes": when the manifest is gone; "ends": when it is there again; for
            "load" those of `from_pretrained` and `name`.
    """

    def __init__(self, what: str, **options: Any) -> None:
        words = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.pausing", what, json.dumps(words)],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._comes()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _comes(self) -> None:
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        if said != "here\n":
            raise AssertionError(f"it said {said!r}, and {self.process.communicate()[1]}")

    def goes_to_the_next(self) -> None:
        """Let it come to its next moment."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self._comes()

    def goes_on(self) -> None:
        """Let it come to its end."""
        output = self.process.communicate("\n", timeout=600)
        assert self.process.returncode == 0, output

    def is_killed(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Paused:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.is_killed()


def _pause() -> None:
    print("here", flush=True)
    sys.stdin.readline()


def _split(**options: Any) -> None:
    from rabbitllm.base import progress
    from tests.support.splitting import Call

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.ShardDone) and event.number == 1:
            _pause()

    with progress.listening(listen):
        Call(**options).make()


def _repair(folder: str, original: str, *, moments: Sequence[str] = ("goes",)) -> None:
    from rabbitllm import prepare
    from rabbitllm.storage.durable import observe_steps
    from rabbitllm.store.layer_store import verify
    from rabbitllm.store.manifest import JOURNAL_NAME, read_manifest

    split, left = Path(folder), [*moments]
    manifest = read_manifest(split)
    assert manifest is not None

    def look(step: Step) -> None:
        if not left or not (split / JOURNAL_NAME).exists() or step.path.name == "split.journal.part":
            return
        is_gone, is_last = not (split / "split.json").exists(), step.path.name == JOURNAL_NAME
        match left[0]:
            case "begins":
                has_come = step.kind == "unlink"
            case "goes":
                has_come = step.kind == "create" and is_gone
            case _:
                has_come = step.kind == "unlink" and is_last
        if has_come:
            del left[0]
            _pause()

    with observe_steps(look):
        prepare.repair_split(split, manifest, {damage.layer for damage in verify(split).damaged}, Path(original))


def _load(name: str, **options: Any) -> None:
    from rabbitllm import AutoModel

    model = AutoModel.from_pretrained(name, device="cpu", **options)
    _pause()
    del model


if __name__ == "__main__":
    arguments = json.loads(sys.argv[2])
    match sys.argv[1]:
        case "split":
            _split(**arguments)
        case "repair":
            _repair(**arguments)
        case "load":
            _load(**arguments)
