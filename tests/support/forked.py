"""Runs a part of a test in a forked process."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

PATIENCE = 600
"""Seconds after which a child that hangs is ended."""


def in_a_fork(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE)
        try:
            result: Any = work()
        except BaseException as error:
            result = error
        with os.fdopen(writing, "wb") as out:
            pickle.dump(result, out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child hung, or died"
    result = pickle.loads(data)
    if isinstance(result, BaseException):
        raise result
    return result
