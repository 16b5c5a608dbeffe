"""Checks, before anything else is done, whether every machine of a cluster can take part.

The same version of this package, the lease in the shared folder, the source: if one of them is missing on a machine,
the error would otherwise appear hours later, or never. Depends on Ray, but not on splits and batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.errors import ClusterError
from rabbitllm.ray.cluster import Node
from rabbitllm.splitter.lock import LEASE_NAME, Lease
from rabbitllm.version import __version__

ANSWER_SECONDS = 120.0
"""Time limit for a machine to start a worker and answer."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The answer of a machine.

    Attributes:
        rabbitllm: version of this package; None where it cannot be imported.
        quantizer: version of bitsandbytes; None where there is none.
        lease: whether the lease can be read there.
        unseen: requested paths that do not exist there.
        error: why the package cannot be imported.
    """

    rabbitllm: str | None
    quantizer: str | None
    lease: bool
    unseen: tuple[str, ...]
    error: str = ""


def check_machines(nodes: Sequence[Node], lease: Lease | None, seen: Sequence[Path], *, quantizes: bool) -> None:
    """Check that every machine can take part.

    Args:
        nodes: the machines.
        lease: in the shared folder; None if none is needed.
        seen: further paths that must exist on each machine.
        quantizes: whether the versions of bitsandbytes must agree.

    Raises:
        ClusterError: a machine cannot take part, or does not answer; names the machine.
    """
    for node, present in zip(nodes, _answers(nodes, lease, seen), strict=True):
        _check(node, present, lease, quantizes)


def _check(node: Node, present: NodeInfo, lease: Lease | None, quantizes: bool) -> None:
    if present.rabbitllm is None:
        raise ClusterError(
            f"rabbitllm cannot be imported on {node.host}: {present.error}.",
            'Install it there, with what Ray needs: pip install ".[ray]" in a copy of the repository.',
        )
    if present.rabbitllm != __version__:
        raise ClusterError(
            f"{node.host} has rabbitllm {present.rabbitllm}; this machine has {__version__}.",
            "Install the same version on all machines.",
        )
    ours = quantizer_version()
    if quantizes and present.quantizer != ours:
        raise ClusterError(
            f"{node.host} has bitsandbytes {present.quantizer}; this machine has {ours}.",
            "Install the same version on all machines, so that all quantize alike.",
        )
    if lease is not None and not present.lease:
        raise ClusterError(
            f"{node.host} does not see {lease.folder / LEASE_NAME}, which this machine has just written.",
            "The split directory has to be in a folder that all machines share, under the same path: name one with "
            "--dir.",
        )
    if present.unseen:
        raise ClusterError(
            f"{node.host} does not see {present.unseen[0]}, where the source is.",
            "Put the source into a folder that all machines share, under the same path, or name a repository on the "
            "hub.",
        )


def quantizer_version() -> str | None:
    """The version of bitsandbytes here; None where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("bitsandbytes")
    except PackageNotFoundError:
        return None


def _answers(nodes: Sequence[Node], lease: Lease | None, seen: Sequence[Path]) -> list[NodeInfo]:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=1)(_looker())
    asked = [
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
            *(("", "") if lease is None else (str(lease.folder / LEASE_NAME), lease.run)), [str(path) for path in seen]
        )
        for node in nodes
    ]
    found = []
    for node, answer in zip(nodes, asked, strict=True):
        try:
            found.append(NodeInfo(*ray.get(answer, timeout=ANSWER_SECONDS)))
        except RayError as error:
            raise ClusterError(
                f"{node.host} did not answer within {ANSWER_SECONDS:.0f} s: {type(error).__name__}.",
                "Look at that machine: is it up, has it memory left, does `ray status` know it?",
            ) from error
    return found


def _looker() -> Callable[[str, str, list[str]], tuple[Any, ...]]:
    """The remote function. A nested function is pickled by value, so it needs no import of this package there."""

    def look(lease: str, run: str, seen: list[str]) -> tuple[Any, ...]:
        import importlib.metadata
        import os

        try:
            from rabbitllm.version import __version__ as version
        except Exception as error:
            return None, None, False, (), f"{type(error).__name__}: {error}"
        try:
            quantizer = importlib.metadata.version("bitsandbytes")
        except importlib.metadata.PackageNotFoundError:
            quantizer = None
        try:
            with open(lease) as file:
                reads = file.read() == run
        except OSError:
            reads = False
        return version, quantizer, reads, tuple(path for path in seen if not os.path.exists(path))

    return look
