"""The one file of the frozen suite that knows the inside: the steps by which the package changes the disk.

    with CrashServer() as server:
        ended = server.ask(MAKE, {"command": ["pull", "model"], "folder": "/tmp/x"}, moment=17)

A process imports everything once and forks for each call; the fork is killed at the step. Each other file of the suite
uses public names alone, so that only this one follows when the seam moves.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rabbitllm.storage.durable import Step, observe_steps
from tests.support.crashes import Moment, is_due

MAKE = "tests.frozen.seam:make"
"""For `CrashServer.ask`."""
Call = Mapping[str, Any]
"""A call of a user, as data: `folder` to be in, and `command`, its arguments; or `save`, a model and where to. Perhaps
`stdin`. With `first_order` split directories are made in the order of format version 1."""


class _Death(BaseException):
    """What is raised in place of a step; no handler of errors catches it."""


def dead_from(call: Call, at: int | Moment) -> bool:
    """Make a call in this process, of which no step on the disk is carried out from a certain one on.

    Much sooner than a kill, and the same to the disk, but for lock files. False: the step did not come.
    """
    lock, seen, dead = threading.Lock(), [0], [False]

    def watch(step: Step) -> None:
        with lock:
            dead[0] = dead[0] or is_due(step, at, seen)
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
            ran = rabbitllm(*call["command"], stdin=call.get("stdin", ""))
            sys.stderr.write(ran.err)
            return ran.code
        import rabbitllm as package

        name, target = call["save"]
        model = package.AutoModel.from_pretrained(name, device="cpu", split=False)
        try:
            model.save_pretrained(target, max_shard_size="200kB")
        except package.RabbitLLMError as error:
            sys.stderr.write(f"{error}\n")
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
