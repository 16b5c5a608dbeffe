"""A connection of uvicorn's that does not wait for ever: for a request to begin, for its head, for a peer that is gone.

uvicorn itself bounds the head's bytes and the time between two requests, but not the time that a first or half a head
takes; and a peer that has vanished without a word is found out by the kernel alone.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0
"""From the opening of a connection, or the end of an answer, to the end of a request's head; an answer that has been
written but is not taken counts as ended."""
MAX_CONNECTIONS = 1000
"""At a time; a further one is closed at once. Each takes a file descriptor, of which there often are 1,024."""
LINGER_SECONDS = 0.5
"""At the end of the server: a request may be on its way, or lie in the kernel unread, and its client is to see an
answer rather than a connection that was reset."""
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


class Connection(H11Protocol):
    """See the module."""

    head_seconds = HEAD_SECONDS
    max_connections = MAX_CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._waits_since = time.monotonic()
        self._unsent = 0
        self._watch: asyncio.TimerHandle | None = None
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        _keep_alive(transport.get_extra_info("socket"))
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection; an idle one stays for `LINGER_SECONDS`, so that a request just sent is answered."""
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(LINGER_SECONDS, self._part)
        else:
            super().shutdown()

    def _part(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def _look_again(self) -> None:
        self._watch = self.loop.call_later(self.head_seconds / 4, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        if (self.cycle is not None and not self.cycle.response_complete) or self._unsent < before:
            self._waits_since = now
        if now - self._waits_since >= self.head_seconds:
            self.transport.abort()
        elif not self.transport.is_closing():
            self._look_again()


def _keep_alive(connected: Any) -> None:
    """Have the kernel ask a silent peer whether it is still there."""
    if connected is None:
        return
    try:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    except OSError:  # it is gone already
        pass
