"""A connection to a Ray cluster for the duration of a call: a running one, or one started on this machine.

Independent of the work done on it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.errors import ClusterError, MissingPackageError, OptionError

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


def check_installed() -> None:
    """
    Raises:
        MissingPackageError: Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise MissingPackageError(
            "--ray needs the package ray, which is not installed.",
            'Install it: pip install ".[ray]" in a copy of the repository, on every machine.',
        )


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
    check_installed()
    import ray

    if ray.is_initialized():
        yield nodes()
        return
    running = _running_cluster() if address == AUTO else _checked(address)
    say("starting Ray on this machine …" if running is None else f"connecting to Ray at {running} …")
    scratch = tempfile.mkdtemp(prefix="rr-", dir=_short_folder()) if running is None else None
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
    found = [
        Node(node["NodeID"], _host(node), int(resources["CPU"]), int(resources.get("GPU", 0)))
        for node in listed()
        if node["Alive"] and (resources := node["Resources"]).get("CPU", 0) >= 1
    ]
    if not found:
        raise ClusterError(
            "The Ray cluster has no machine with a processor for tasks.",
            "Add one: ray start --address=HOST:PORT on it.",
        )
    return found


def _host(node: Any) -> str:
    return str(node.get("NodeManagerHostname") or node.get("NodeManagerAddress") or node["NodeID"][:8])


def _connect(running: str | None, scratch: str | None) -> None:
    import ray

    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if running is not None:
            ray.init(address=running, **common)
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read by what `init` starts
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
            "All machines need the same Python and the same Ray; `ray status --address=HOST:PORT` says what runs.",
        ) from error


def _running_cluster() -> str | None:
    """The address of the default cluster; None where none is known or the known one is gone."""
    if named := os.environ.get("RAY_ADDRESS"):
        return _checked(named)
    from ray._private.utils import read_ray_address

    found = read_ray_address()
    return found if found and _answers(found) else None


def _checked(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if "://" in address or not (host and colon and port.isdigit()):
        raise OptionError(
            f"{address!r} is no address of a Ray cluster that can be used here.",
            "Say 'auto', or HOST:PORT of the head node (what `ray start --head` printed; its port is 6379 by default).",
        )
    if not _answers(address):
        raise ClusterError(
            f"Nothing answers at {address} within {CONNECT_SECONDS:.0f} s, where a Ray cluster was to be.",
            "Start one there (ray start --head --port=PORT), check HOST, PORT and firewall, or say --ray auto.",
        )
    return address


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _short_folder() -> str | None:
    """A folder short enough for the paths of Ray's sockets, which are limited to 107 bytes; None for the usual one."""
    usual = tempfile.gettempdir()
    return "/tmp" if len(usual) > 20 and Path("/tmp").is_dir() else None
