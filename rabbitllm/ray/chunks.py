"""The number of workers, their share of a machine, and the chunks of lines they answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rabbitllm.errors import OptionError
from rabbitllm.ray.cluster import Node

PASSFULS = 4
"""Limit of a chunk, in full passes: the last passes of each chunk are not full."""
TURNS = 2
"""Minimum of chunks per worker, if there are enough lines: a slow worker then delays the end less."""


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """The workers of a batch.

    Attributes:
        workers: number of workers.
        cpus, gpus: reserved by Ray for each.
        share: limit of workers on one machine.
    """

    workers: int
    cpus: int
    gpus: int
    share: int


def staff_of(nodes: Sequence[Node], workers: int | None = None) -> WorkerPool:
    """A worker for each GPU; where there is none, one for each machine.

    Args:
        nodes: the machines.
        workers: number wanted by the user; None for the default.

    Raises:
        OptionError: the number is below 1, or above the number of processors or GPUs.
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
    """Split lines, in the given order, into chunks of equal length; the last one may be shorter.

    Args:
        order: indices of lines.
        workers: number of workers, each of which answers one chunk after the other.
        sequences: limit of lines in one pass.
    """
    size = max(1, min(PASSFULS * sequences, -(-len(order) // (workers * TURNS))))
    return [list(order[at : at + size]) for at in range(0, len(order), size)]
