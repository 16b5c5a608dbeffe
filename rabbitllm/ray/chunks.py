"""How many workers there are, what each gets of its machine, and which lines it is given at a time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rabbitllm.errors import OptionError
from rabbitllm.ray.cluster import Node

PASSFULS = 4
"""What a worker is given at a time, at most, in lines that share a pass: each time its last passes are not full."""
TURNS = 2
"""How often each worker is given lines, at least, where there are enough: a slow one then holds up less."""


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """The workers of a batch.

    Attributes:
        workers: how many.
        cpus, gpus: that Ray sets aside for each.
        share: workers on one machine, at most.
    """

    workers: int
    cpus: int
    gpus: int
    share: int


def staff_of(nodes: Sequence[Node], workers: int | None = None) -> WorkerPool:
    """A worker for each GPU; where there is none, one for each machine.

    Args:
        nodes: the machines.
        workers: how many the user wants; None for that.

    Raises:
        OptionError: no number of workers, or more than there are processors or GPUs.
    """
    gpus, cpus = sum(node.gpus for node in nodes), sum(node.cpus for node in nodes)
    count = (gpus or len(nodes)) if workers is None else workers
    most = gpus or cpus
    if not 1 <= count <= most:
        kind = "GPUs" if gpus else "processors"
        raise OptionError(
            f"--ray-workers {count} does not suit a cluster of {most} {kind}.", f"Say 1 to {most}, or leave it out."
        )
    if gpus:
        return WorkerPool(count, 1, 1, min(count, max(node.gpus for node in nodes)))
    share = -(-count // len(nodes))
    return WorkerPool(count, max(1, min(node.cpus for node in nodes) // share), 0, share)


def in_chunks(order: Sequence[int], workers: int, sequences: int) -> list[list[int]]:
    """Lines, in the order given, in runs of about one length.

    Args:
        order: indices of lines.
        workers: that take one run after the other.
        sequences: lines in one pass, at most.
    """
    size = max(1, min(PASSFULS * sequences, -(-len(order) // (workers * TURNS))))
    return [list(order[at : at + size]) for at in range(0, len(order), size)]
