"""A server of the standard library that says what a test tells it to, byte for byte.

    with ScriptedServer(lambda connection, head: connection.sendall(b"HTTP/1.1 200 OK...")) as server:
        client.get(server.url)

For answers that a proper HTTP server would not give; knows nothing of hubs.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

Answer = Callable[[socket.socket, str], object]
"""Sends the answer to a request whose head is given; the connection stays open unless it closes it."""


@dataclass(frozen=True)
class Asked:
    """A request: the number of its connection, from 0, and its head."""

    connection: int
    head: str


class ScriptedServer:
    """The running server, a thread for each connection; a context manager. With ``tls`` it speaks HTTPS."""

    def __init__(self, answer: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.asked: list[Asked] = []
        self.closed: list[int] = []
        """The connections that the client has closed."""
        self._answer = answer
        self._tls = tls
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> ScriptedServer:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection, number), daemon=True).start()
                number += 1

    def _serve(self, connection: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                while head := _head(connection):
                    self.asked.append(Asked(number, head))
                    self._answer(connection, head)
        self.closed.append(number)


def reset(connection: socket.socket) -> None:
    """Close a connection so that the other end sees a reset, and no end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _head(connection: socket.socket) -> str:
    """The next request's head; nothing if the client has closed the connection."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        if not (byte := connection.recv(1)):
            return ""
        head += byte
    return head.decode()
