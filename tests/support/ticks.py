"""Steps that are the same in each run, however a hub's bytes arrive.

A shard that is fetched is written in the pieces in which its body comes off the network, and these differ from run to
run. Here such a write is shown in parts that end at fixed places of the file, and a part counts only if it begins at
one; so the step of a number is the same one each time. Every other step of a call is the plan's.

    with observe_ticks(observer): ...

Knows where shards are staged, and nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator

from rabbitllm.splitter.split import STAGING_NAME
from rabbitllm.storage.durable import Step, observe_steps

TICK_BYTES = 16 << 10


@contextlib.contextmanager
def observe_ticks(observer: Callable[[Step], None]) -> Iterator[None]:
    """Call ``observer`` before each step, and before each part of a write of a staged shard.

    The parts before one from which it raises are carried out, as a process that is killed within a write leaves them.
    """

    def watch(step: Step) -> None:
        parts = list(_parts(step))
        for part in parts[:-1]:
            observer(part)
            _carry_out(part)
        observer(parts[-1])

    with observe_steps(watch):
        yield


def counts(step: Step) -> bool:
    """Whether a step has a number of its own: all but what a piece of a body adds to a part that has begun."""
    return not _is_piece(step) or step.offset % TICK_BYTES == 0


def _is_piece(step: Step) -> bool:
    return step.kind == "write" and step.path.parent.name == STAGING_NAME


def _parts(step: Step) -> Iterator[Step]:
    if not _is_piece(step):
        yield step
        return
    data, begin = memoryview(step.data), step.offset
    while begin < step.offset + len(data):
        end = min((begin // TICK_BYTES + 1) * TICK_BYTES, step.offset + len(data))
        yield dataclasses.replace(step, offset=begin, data=data[begin - step.offset : end - step.offset])
        begin = end


def _carry_out(part: Step) -> None:
    descriptor = os.open(part.path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, part.data, part.offset)
    finally:
        os.close(descriptor)
