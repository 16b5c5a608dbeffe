"""Calls in processes that are killed at a chosen step, as the kernel does when memory runs out.

    with CrashServer() as server:
        server.run(call, die_at=17)
        server.ask("tests.frozen.seam:make", {"command": ["pull", "model"], "folder": "/tmp/x"}, 17, delay=0.001)

A server process imports everything once and forks for every call, since an import of torch takes far longer than a
split of a tiny checkpoint. It runs no thread of its own, so that a fork of it is sound.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rabbitllm.storage.durable import Step
from tests.support import swift_disk
from tests.support.splitting import Call, Counter
from tests.support.ticks import counts, observe_ticks

KILLED = -signal.SIGKILL
_ROOT = Path(__file__).parent.parent.parent

Moment = Mapping[str, Any]
"""A step, by its `kind` and a pattern of its `name`; of several the `number`-th, from 0."""


@dataclass(frozen=True)
class Ended:
    """How a call ended: exit status, or `KILLED`; steps that it announced, if it was not; its processor seconds."""

    status: int
    steps: int
    seconds: float


class CrashServer:
    """The server process; a context manager. ``kills`` counts the processes that have died so far.

    Args:
        environment: further variables of the process.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self.kills = 0

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=_ROOT, env=self._environment, stdin=pipe, stdout=pipe, text=True
        )
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, call: Call, die_at: int) -> int:
        """Make the call in a new process that kills itself before its step ``die_at``, counted from 0.

        Returns its exit status: ``KILLED``, or 0 if it finished in fewer steps.
        """
        return self.ask("tests.support.splitting:make", dataclasses.asdict(call), die_at).status

    def ask(
        self, function: str, call: Mapping[str, Any], moment: int | Moment | None = None, delay: float | None = None
    ) -> Ended:
        """Let a function make a call in a new process.

        Args:
            function: "module:name"; it takes `call`, and returns an exit code, or None for 0.
            call: data for JSON; with `hub_url` and `hub_home` that process uses this hub.
            moment: the step before which it dies: one of that number, from 0, or of that moment; None: it lives.
            delay: seconds by which it outlives that step: then this process sends the signal.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([function, dict(call), moment, delay]) + "\n")
        self._process.stdin.flush()
        ended = Ended(*json.loads(self._process.stdout.readline()))
        self.kills += ended.status == KILLED
        return ended


def is_due(step: Step, moment: int | Moment | None, seen: list[int]) -> bool:
    """Whether the process dies before this step; `seen` counts the steps that fit `moment`."""
    path = f"/{step.path.as_posix()}"
    if isinstance(moment, int):
        number = moment
    elif moment is not None and step.kind == moment["kind"] and fnmatch.fnmatch(path, f"*/{moment['name']}"):
        number = moment.get("number", 0)
    else:
        return False
    seen[0] += 1
    return seen[0] > number


def import_everything() -> None:
    """Import what the calls need, and compute what they would compute in each process."""
    import bitsandbytes.functional  # noqa: F401
    import torch
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from rabbitllm.quant.quantize import _compiled_kernels_agree

    torch.set_num_threads(1)
    get_checkpoint_conversion_mapping("llama")  # the table of all models, longer in the making than a split
    for scheme in ("4bit", "8bit"):
        _compiled_kernels_agree(scheme)


def _serve() -> None:
    from rabbitllm.models import convert, gguf_output

    swift_disk.install()  # a kill takes nothing from the page cache
    import_everything()
    gguf_output.SYNC_BYTES = 1  # each tensor of a small model is a step of its own, as those of a large one are
    convert.SHARD_BYTES = 60_000
    for line in sys.stdin:
        gc.freeze()  # no child looks through what it shares with this process
        function, call, moment, delay = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            _make_and_die(function, call, moment, delay, writing)
        os.close(writing)
        ended, imported = _waited_for(child, reading, delay)
        for name in imported:
            with contextlib.suppress(Exception):  # a later call need not import it again
                importlib.import_module(name)
        print(json.dumps(ended), flush=True)


def _waited_for(child: int, reading: int, delay: float | None) -> tuple[tuple[int, int, float], list[str]]:
    """Wait for a child, and kill it once its step has come and the delay is over.

    Returns the fields of `Ended`, and the modules that a child that came to its end has imported.
    """
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read(1)
        if said == b"!" and delay is not None:
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
        steps, imported = json.loads(pipe.read()) if said == b"#" else (0, [])
    _, status, used = os.wait4(child, 0)
    return (os.waitstatus_to_exitcode(status), steps, used.ru_utime + used.ru_stime), imported


def _make_and_die(
    function: str, call: dict[str, Any], moment: int | Moment | None, delay: float | None, tell: int
) -> None:
    status, counter, known = 1, Counter(), {*sys.modules}
    with contextlib.suppress(BaseException):
        try:
            _settle_in(call)
            module, _, name = function.partition(":")
            with observe_ticks(_killer(moment, delay, tell, counter)), contextlib.redirect_stdout(sys.stderr):
                status = getattr(importlib.import_module(module), name)(call) or 0
        except BaseException:
            traceback.print_exc()
    with contextlib.suppress(BaseException):
        os.write(tell, b"#" + json.dumps([counter.count, [*({*sys.modules} - known)]]).encode())
    os._exit(status)


def _settle_in(call: Mapping[str, Any]) -> None:
    """Use the hub of a call, and its folder for temporary files."""
    if call.get("temporary"):
        tempfile.tempdir = call["temporary"]
    if call.get("hub_url"):
        import pytest

        from tests.support.hub_fixtures import point_at

        point_at(call["hub_url"], Path(call["hub_home"]), pytest.MonkeyPatch())


def _killer(moment: int | Moment | None, delay: float | None, tell: int, counter: Counter) -> Callable[[Step], None]:
    lock, seen, is_told = threading.Lock(), [0], [False]

    def watch(step: Step) -> None:
        counter(step)
        with lock:
            if not counts(step) or is_told[0] or not is_due(step, moment, seen):
                return
            if delay is None:
                os.kill(os.getpid(), signal.SIGKILL)
            is_told[0] = True
            os.write(tell, b"!")

    return watch


if __name__ == "__main__":
    _serve()
