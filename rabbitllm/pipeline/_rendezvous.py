"""Rendezvous and communication of processes, by torch's store and gloo.

Each process writes its description to the store, and all compare them before they connect. Then they exchange frames.
gloo detects at once that a process has ended, and after `timeout` that a machine does not answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from rabbitllm.base.options import Hosts
from rabbitllm.errors import HostGoneError, HostsError
from rabbitllm.pipeline._frames import Frame, from_bytes, invalid, to_bytes

_POLL_SECONDS = 0.02
_LONGEST_FRAME = 1 << 40


class Rendezvous:
    """Lets the processes find each other, before they are connected.

    Args:
        hosts: address, number and role of the processes.

    Attributes:
        rank: rank of this process; 0 has the inputs.
        ranks: number of processes.

    Raises:
        HostGoneError: the first process is not reached in time.
        HostsError: all expected workers have already joined.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._until = time.monotonic() + hosts.patience
        self._host, _, port = hosts.address.rpartition(":")
        serves = hosts.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = TCPStore(
                self._host,
                int(port),
                is_master=serves,
                timeout=timedelta(seconds=hosts.patience),
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError, OSError) as error:
            if serves:
                raise HostGoneError(
                    f"The first process cannot listen at {hosts.address}: {_first_line(error)}",
                    "Use an address of this machine that workers can reach, and a free port.",
                ) from error
            raise HostGoneError(
                f"The first process cannot be reached at {hosts.address}: {_first_line(error)}",
                "Start it with this address, and check that the port is open between the hosts.",
            ) from error
        self._server = store
        self._store = PrefixStore("rabbitllm", store)
        if hosts.is_first:
            self.rank, self.ranks = 0, hosts.workers + 1
            self._store.set("ranks", str(self.ranks))
            if hosts.announce is not None:
                hosts.announce(f"{self._host}:{store.port}")
        else:
            self.ranks = int(self._wait_for("ranks", "the first process"))
            self.rank = self._store.add("joined", 1) if hosts.rank is None else hosts.rank
        if self.rank >= self.ranks:
            raise HostsError(
                f"{hosts.address} waits for {self.ranks - 1} workers; all of them have already joined.",
                "Start the first process with more workers.",
            )

    def exchange(self, description: Any) -> list[Any]:
        """Publish this process's description; returns those of all processes, by rank.

        Args:
            description: plain JSON.

        Raises:
            HostGoneError: a process has not published its description in time.
        """
        self._store.set(f"facts/{self.rank}", json.dumps(description))
        return [json.loads(self._wait_for(f"facts/{rank}", f"process {rank}")) for rank in range(self.ranks)]

    def connect(self, names: list[str]) -> Link:
        """Connect every process with every other one.

        Args:
            names: names of the processes, for messages.

        Raises:
            HostGoneError: one of them cannot be reached.
        """
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=self._hosts.timeout)
        options._devices = [self._device()]
        try:
            group = ProcessGroupGloo(PrefixStore("gloo", self._store), self.rank, self.ranks, options)
        except RuntimeError as error:
            raise HostGoneError(
                f"The hosts do not reach each other: {_first_line(error)}",
                "Each needs open ports to every other one. Name the network interface in GLOO_SOCKET_IFNAME.",
            ) from error
        return Link(group, self.rank, names, self._server)

    def _device(self) -> Any:
        """The network interface: GLOO_SOCKET_IFNAME if set, else the one that reaches the first process."""
        named = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        if named:
            return ProcessGroupGloo.create_device(interface=named)
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self._host, 9))  # sends nothing; the system chooses the local address
            return ProcessGroupGloo.create_device(hostname=probe.getsockname()[0])
        return ProcessGroupGloo.create_default_device()

    def _wait_for(self, key: str, peer: str) -> str:
        """Wait for the value of a key in the store; polls, so that an interrupt takes effect."""
        try:
            while not self._store.check([key]):
                if time.monotonic() > self._until:
                    patience = f"{self._hosts.patience:.0f} s"
                    raise HostGoneError(
                        f"{peer[0].upper()}{peer[1:]} did not connect to {self._hosts.address} within {patience}.",
                        "Start it with the same address; if a host has ended, start all processes again.",
                    )
                time.sleep(_POLL_SECONDS)
            return str(self._store.get(key).decode())
        except RuntimeError as error:
            if isinstance(error, HostGoneError):
                raise
            raise HostGoneError(
                f"The first process at {self._hosts.address} has ended: {_first_line(error)}",
                "Start all processes again.",
            ) from error


class Link:
    """Sends and receives frames.

    Args:
        group: process group.
        rank: rank of this process.
        names: names of all processes.
        server: store, kept alive with the link.
    """

    def __init__(self, group: Any, rank: int, names: list[str], server: Any) -> None:
        self._group = group
        self._server = server
        self.rank = rank
        self.names = names

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return len(self.names)

    def send(self, rank: int, frame: Frame) -> None:
        """Send a frame.

        Raises:
            HostGoneError: the receiver has ended.
        """
        body = to_bytes(frame)
        self._move(self._group.send, torch.tensor([len(body)]), rank)
        self._move(self._group.send, body, rank)

    def receive(self, rank: int) -> Frame:
        """Wait for the next frame of a process.

        Raises:
            HostGoneError: it has ended, or does not answer in time.
            HostsError: its message is not a frame.
        """
        length = torch.zeros(1, dtype=torch.long)
        self._move(self._group.recv, length, rank)
        if not 0 < int(length) < _LONGEST_FRAME:
            raise invalid(f" of {int(length):,} bytes")
        body = torch.empty(int(length), dtype=torch.uint8)
        self._move(self._group.recv, body, rank)
        return from_bytes(body)

    def _move(self, do: Callable[..., Any], tensor: torch.Tensor, rank: int) -> None:
        try:
            do([tensor], rank, 0).wait()
        except RuntimeError as error:
            raise HostGoneError(
                f"{self.names[rank]} has ended or does not answer: {_first_line(error)}",
                "Check its output, then start all processes again.",
            ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rpartition("] ")[2][:200] or type(error).__name__
