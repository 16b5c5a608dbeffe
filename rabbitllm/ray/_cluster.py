"""A connection to a Ray cluster for the duration of a call, and checks of each of its machines.

The cluster is a running one, or one started on this machine. Each machine needs the same version of this package, the
lease in the shared folder and the source: without the check, the error would appear hours later, or never. Independent
of the work done on the cluster.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rabbitllm.auto_model import LoadRequest
from rabbitllm.base.options import expand
from rabbitllm.base.transformers_version import version_of
from rabbitllm.errors import ClusterError, OptionError, RabbitLLMError, missing_package
from rabbitllm.splitter.lock import LEASE_NAME, Lease
from rabbitllm.version import __version__

AUTO = "auto"
"""The address of a running cluster if there is one, else of one started for this call."""
CONNECT_SECONDS = 5.0
"""Time limit for a head node's answer. Ray itself was seen to try for more than ten minutes."""
OBJECT_STORE_BYTES = 80 << 20
"""Size for a cluster started for a call: only plans and answers go through it, never weights."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of a cluster with processors for tasks.

    Attributes:
        id: Ray's id.
        host: its name or address, for messages.
        cpus, gpus: available to Ray.
    """

    id: str
    host: str
    cpus: int
    gpus: int


def say(line: str) -> None:
    """Print a progress message: a cluster takes seconds to start, and its workers some more."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def connected(address: str) -> Iterator[list[Node]]:
    """The machines of a cluster to which this process is connected while the context is open.

    Args:
        address: "auto" for the cluster of `RAY_ADDRESS`, or one that was started on this machine (`ray start --head`),
            or else one that is started here and shut down with the context; or HOST:PORT of a head node. An existing
            connection of this process is used, and kept open.

    Raises:
        MissingPackageError: Ray is not installed.
        OptionError: the address is malformed.
        ClusterError: there is no answer from it.
    """
    if importlib.util.find_spec("ray") is None:
        raise missing_package("--ray needs", "ray", "ray")
    import ray

    if ray.is_initialized():
        yield nodes()
        return
    running = _running_cluster() if address == AUTO else _check_address(address)
    say("starting Ray on this machine …" if running is None else f"connecting to Ray at {running} …")
    # the paths of Ray's sockets are limited to 107 bytes
    short = "/tmp" if len(tempfile.gettempdir()) > 20 and Path("/tmp").is_dir() else None
    scratch = tempfile.mkdtemp(prefix="rr-", dir=short) if running is None else None
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Ray reports lost workers there, amid the results
            _connect(running, scratch)
            try:
                yield nodes()
            finally:
                ray.shutdown()
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def nodes() -> list[Node]:
    """The machines that are in the cluster now and have processors.

    Raises:
        ClusterError: there are none.
    """
    import ray

    listed: Callable[[], list[dict[str, Any]]] = ray.nodes
    machines = [
        Node(
            node["NodeID"],
            str(node.get("NodeManagerHostname") or node.get("NodeManagerAddress") or node["NodeID"][:8]),
            int(resources["CPU"]),
            int(resources.get("GPU", 0)),
        )
        for node in listed()
        if node["Alive"] and (resources := node["Resources"]).get("CPU", 0) >= 1
    ]
    if not machines:
        raise ClusterError(
            "The Ray cluster has no machine with a processor for tasks.",
            "Add one: ray start --address=HOST:PORT on it.",
        )
    return machines


def _connect(running: str | None, scratch: str | None) -> None:
    import ray

    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if running is not None:
            ray.init(address=running, **common)
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read by the processes that `init` starts
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=scratch,
            **common,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = running or "on this machine"
        raise ClusterError(
            f"Ray cannot be used at {where}: {type(error).__name__}: {error}.",
            "All machines need the same Python and the same Ray; `ray status --address=HOST:PORT` shows the cluster.",
        ) from error


def _running_cluster() -> str | None:
    """The address of the default cluster; None where none is known or the known one is gone."""
    if named := os.environ.get("RAY_ADDRESS"):
        return _check_address(named)
    from ray._private.utils import read_ray_address

    address = read_ray_address()
    return address if address and _is_reachable(address) else None


def _check_address(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if "://" in address or not (host and colon and port.isdigit()):
        raise OptionError(
            f"{address!r} is not the address of a Ray cluster.",
            "Use 'auto', or HOST:PORT of the head node (what `ray start --head` printed; its port is 6379 by default).",
        )
    if not _is_reachable(address):
        raise ClusterError(
            f"Nothing answers at {address} within {CONNECT_SECONDS:.0f} s; expected a Ray cluster.",
            "Start one there (ray start --head --port=PORT), check HOST, PORT and firewall, or use --ray auto.",
        )
    return address


def _is_reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def portable(request: LoadRequest) -> LoadRequest:
    """The same request, with paths that do not depend on the working directory."""
    spec = request.spec
    path = expand(spec.name)
    name = str(path.absolute()) if spec.name and path.exists() else spec.name
    folder = spec.folder.absolute() if spec.folder is not None else None
    return replace(request, spec=replace(spec, name=name, folder=folder))


ANSWER_SECONDS = 120.0
"""Time limit for a machine to start a worker and answer."""


def check_machines(nodes: Sequence[Node], lease: Lease | None, required: Sequence[Path], *, quantizes: bool) -> None:
    """Check that every machine can work on the job.

    Args:
        nodes: the machines.
        lease: in the shared folder; None if none is needed.
        required: further paths that must exist on each machine.
        quantizes: whether the versions of bitsandbytes must agree.

    Raises:
        ClusterError: a machine fails a check, or does not answer; names the machine.
    """
    for node, facts in zip(nodes, _inspect_all(nodes, lease, required), strict=True):
        _check(node.host, facts, lease, quantizes=quantizes)


def _check(host: str, facts: Mapping[str, Any], lease: Lease | None, *, quantizes: bool) -> None:
    if "error" in facts:
        raise ClusterError(
            f"rabbitllm cannot be imported on {host}: {facts['error']}.",
            'Install it there, with what Ray needs: pip install ".[ray]" in a copy of the repository.',
        )
    if facts["version"] != __version__:
        raise ClusterError(
            f"{host} has rabbitllm {facts['version']}; this machine has {__version__}.",
            "Install the same version on all machines.",
        )
    if quantizes and facts["quantizer"] != (ours := version_of("bitsandbytes")):
        raise ClusterError(
            f"{host} has bitsandbytes {facts['quantizer']}; this machine has {ours}.",
            "Install the same version on all machines, so that all quantize to the same bytes.",
        )
    if lease is not None and not facts["lease"]:
        raise ClusterError(
            f"{host} does not see {lease.folder / LEASE_NAME}, which this machine has just written.",
            "Put the split directory into a folder that all machines share under the same path, and set it with --dir.",
        )
    if facts["missing"]:
        raise ClusterError(
            f"{host} does not see {facts['missing'][0]}, where the source is.",
            "Put the source into a folder that all machines share under the same path, or use a repository.",
        )


def _inspect_all(nodes: Sequence[Node], lease: Lease | None, required: Sequence[Path]) -> list[dict[str, Any]]:
    """The properties of each machine; see `_inspector`."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    inspect = ray.remote(num_cpus=0, max_retries=1)(_inspector())
    about = ("", "") if lease is None else (str(lease.folder / LEASE_NAME), lease.run)
    paths = [str(path) for path in required]
    strategies = [NodeAffinitySchedulingStrategy(node.id, soft=False) for node in nodes]
    references = [inspect.options(scheduling_strategy=strategy).remote(*about, paths) for strategy in strategies]
    facts = []
    for node, answer in zip(nodes, references, strict=True):
        try:
            facts.append(ray.get(answer, timeout=ANSWER_SECONDS))
        except RayError as error:
            raise ClusterError(
                f"{node.host} did not answer within {ANSWER_SECONDS:.0f} s: {type(error).__name__}.",
                "Check that the machine runs, has free memory, and is listed by `ray status`.",
            ) from error
    return facts


def _inspector() -> Callable[[str, str, list[str]], dict[str, Any]]:
    """The remote function. A nested function is pickled by value, so that a machine without this package can run it."""

    def inspect(lease: str, run: str, required: list[str]) -> dict[str, Any]:
        import importlib.metadata
        import os

        try:
            from rabbitllm.version import __version__ as version
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        try:
            quantizer = importlib.metadata.version("bitsandbytes")
        except importlib.metadata.PackageNotFoundError:
            quantizer = None
        try:
            with open(lease) as file:
                reads = file.read() == run
        except OSError:
            reads = False
        missing = [path for path in required if not os.path.exists(path)]
        return {"version": version, "quantizer": quantizer, "lease": reads, "missing": missing}

    return inspect


def error_of(error: Any, task: str) -> BaseException:
    """The error of a task (a `RayTaskError`): its cause, if that is an error for users.

    Args:
        error: the error as Ray raised it.
        task: what the worker worked on.
    """
    cause = error.cause
    if isinstance(cause, RabbitLLMError | OSError | MemoryError):
        return cause
    return ClusterError(
        f"A worker failed at {task}: {type(cause).__name__}: {cause}.",
        "The same call resumes; without --ray its error has more details.",
    )
