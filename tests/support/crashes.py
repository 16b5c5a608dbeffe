"""Calls in processes that kill themselves at a chosen step, as the kernel does when memory runs out.

    with CrashServer() as server:
        server.run(call, die_at=17)

A server process imports everything once and forks for every call, since an import of torch takes far longer than a
split of a tiny checkpoint. It runs no thread of its own, so that a fork of it is sound.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType

from rabbitllm.storage.durable import Step
from tests.support.splitting import Call, Counter
from tests.support.ticks import observe_ticks

KILLED = -signal.SIGKILL
_ROOT = Path(__file__).parent.parent.parent


class CrashServer:
    """The server process; a context manager. ``kills`` counts the processes that have died so far."""

    def __enter__(self) -> CrashServer:
        self.kills = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.crashes"],
            cwd=_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
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

    def run(self, call: Call, die_at: int) -> int:
        """Make the call in a new process that kills itself before its step ``die_at``, counted from 0.

        Returns its exit status: ``KILLED``, or 0 if it finished in fewer steps.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([dataclasses.asdict(call), die_at]) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        self.kills += status == KILLED
        return status


def _serve() -> None:
    _import_everything()
    for line in sys.stdin:
        fields, die_at = json.loads(line)
        child = os.fork()
        if not child:
            _make_and_die(Call(**fields), die_at)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _import_everything() -> None:
    import bitsandbytes.functional  # noqa: F401
    import torch
    import transformers.utils.hub  # noqa: F401

    import rabbitllm.splitter.split  # noqa: F401
    import tests.support.hub_fixtures  # noqa: F401
    from rabbitllm.quant.quantize import _compiled_kernels_agree

    torch.set_num_threads(1)
    for scheme in ("4bit", "8bit"):  # tables and kernels, longer in the making than a split
        _compiled_kernels_agree(scheme)
    gc.freeze()  # no child looks through what it shares with this process


def _make_and_die(call: Call, die_at: int) -> None:
    status = 1
    with contextlib.suppress(BaseException):
        try:
            if call.hub_url:
                _point_at_hub(call)
            with observe_ticks(Counter(lambda number, step: _die_at(number, step, die_at))):
                call.make()
            status = 0
        except BaseException:
            traceback.print_exc()
    os._exit(status)


def _point_at_hub(call: Call) -> None:
    import pytest

    from tests.support.hub_fixtures import point_at

    point_at(call.hub_url, Path(call.hub_home), pytest.MonkeyPatch())


def _die_at(number: int, step: Step, die_at: int) -> None:
    if number == die_at:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _serve()
