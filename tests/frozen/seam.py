"""The one file of the frozen suite that knows the inside: the steps by which the package changes the disk.

    with Crashes() as crashes:
        status = crashes.run({"command": ["pull", "model"], "folder": "/tmp/x"}, at=17)

A process imports everything once and forks for each call; the fork kills itself before the step. Each other file of the
suite uses public names alone, so that only this one follows when the seam moves.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from rabbitllm.storage.durable import Step, observe_steps

KILLED = -signal.SIGKILL
_ROOT = Path(__file__).parent.parent.parent

Call = Mapping[str, Any]
"""A call of a user, as data: `folder` to be in, and `command`, its arguments; or `save`, a model and where to. With
`first_order` split directories are made in the order of format version 1."""
Moment = Mapping[str, Any]
"""A step, by its `kind` and a pattern of its `name`; of several the `number`-th, from 0."""


class Crashes:
    """The process that forks; a context manager."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}

    def __enter__(self) -> Crashes:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.frozen.seam"],
            cwd=_ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, call: Call, at: int | Moment) -> int:
        """Make the call in a new process that kills itself before a step: one of that number, or of that moment.

        Returns its exit status: `KILLED`, or that of the call if the step did not come.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([dict(call), at]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextlib.contextmanager
def steps() -> Iterator[list[str]]:
    """The kinds of the steps of this process while the context is open."""
    seen: list[str] = []
    with observe_steps(lambda step: seen.append(step.kind)):
        yield seen


class _Death(BaseException):
    """What is raised in place of a step; no handler of errors catches it."""


def dead_from(call: Call, at: int | Moment) -> bool:
    """Make a call in this process, of which no step on the disk is carried out from a certain one on.

    Much sooner than a kill, and the same to the disk, but for lock files. False: the step did not come.
    """
    lock, seen, dead = threading.Lock(), [0], [False]

    def watch(step: Step) -> None:
        with lock:
            dead[0] = dead[0] or _is_due(step, at, seen)
            if dead[0]:
                raise _Death

    before = set(threading.enumerate())
    with observe_steps(watch), contextlib.suppress(_Death):
        make(call)
    for thread in set(threading.enumerate()) - before:
        thread.join()
    gc.collect()  # the locks of what has died
    return dead[0]


def make(call: Call) -> int:
    """Make a call in this process, and return its exit code."""
    from tests.frozen.support.command_line import rabbitllm

    os.chdir(call["folder"])
    with _first_order() if call.get("first_order") else contextlib.nullcontext():
        if "command" in call:
            ran = rabbitllm(*call["command"])
            sys.stderr.write(ran.err)
            return ran.code
        import rabbitllm as package

        name, target = call["save"]
        model = package.AutoModel.from_pretrained(name, device="cpu", split=False)
        try:
            model.save_pretrained(target, max_shard_size="200kB")
        except package.RabbitLLMError as error:
            return 2 if isinstance(error, ValueError) else 1
        return 0


@contextlib.contextmanager
def _first_order() -> Iterator[None]:
    import functools
    from unittest import mock

    from rabbitllm.splitter import split
    from rabbitllm.store.layer_file import BY_NAME

    with mock.patch.object(split, "plan_split", functools.partial(split.plan_split, format_version=BY_NAME)):
        yield


def leave_lease(folder: Path) -> None:
    """Put the lease of a run that has died into a split directory."""
    from rabbitllm.splitter import lock

    with lock.granted(folder):
        content = (folder / lock.LEASE_NAME).read_bytes()
    (folder / lock.LEASE_NAME).write_bytes(content)


def _killer(at: int | Moment) -> Callable[[Step], None]:
    lock, seen = threading.Lock(), [0]

    def watch(step: Step) -> None:
        with lock:
            if _is_due(step, at, seen):
                os.kill(os.getpid(), signal.SIGKILL)

    return watch


def _is_due(step: Step, at: int | Moment, seen: list[int]) -> bool:
    """Whether a step is the one; `seen` counts those that could have been."""
    if isinstance(at, int):
        number = at
    elif step.kind == at["kind"] and fnmatch.fnmatch(f"/{step.path.as_posix()}", f"*/{at['name']}"):
        number = at.get("number", 0)
    else:
        return False
    seen[0] += 1
    return seen[0] > number


PRELOADED = (
    *("accelerate", "bitsandbytes.functional", "numba", "rabbitllm.auto_model", "rabbitllm.cli.main"),
    *("transformers.convert_slow_tokenizer", "transformers.generation.utils", "transformers.processing_utils"),
    *("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"),
)
"""Modules that are slow to import and start no thread."""


def _serve() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    gc.freeze()  # no child looks through what it shares with this process
    for line in sys.stdin:
        call, at = json.loads(line)
        child = os.fork()
        if not child:
            _make_and_die(call, at)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _make_and_die(call: Call, at: int | Moment) -> None:
    status = 1
    with contextlib.suppress(BaseException):
        try:
            with observe_steps(_killer(at)), contextlib.redirect_stdout(sys.stderr):
                status = make(call)
        except BaseException:
            traceback.print_exc()
    os._exit(status)


if __name__ == "__main__":
    _serve()
