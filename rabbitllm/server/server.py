"""The life of a server: bound before the model is loaded, serving, ending.

    bound ── serves ── first signal: nothing new, what runs is finished within the grace ── ended
                          └── second signal, or the grace is over: what runs is cancelled ──┘

While it ends it still answers: new requests are refused for this reason, and `/health` tells a load balancer so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rabbitllm.engine.allocator import trimming
from rabbitllm.server.address import listen
from rabbitllm.server.app import create_app
from rabbitllm.server.service import Service

# A connection of uvicorn's that does not wait for ever: for a request to begin, for its head, for a peer that is gone.
#
# uvicorn itself bounds the head's bytes and the time between two requests, but not the time that a first or half a
# head takes; and a peer that has vanished without a word is found out by the kernel alone.

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


# Gives memory that the allocator keeps free back to the system, now and then.
#
# Requests free blocks of all sizes in any order, so that glibc's heaps grow long after the used memory has stopped
# growing: by 40 MiB in five minutes of a tiny model's server, without any leak. Python and torch never ask for free
# memory to be given back.

EVERY_SECONDS = 10.0


async def give_back_freed() -> None:
    """Do it again and again, until cancelled; at once over where the allocator cannot be asked."""
    trim = trimming()
    while trim is not None:
        await asyncio.sleep(EVERY_SECONDS)
        await asyncio.to_thread(trim)


logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
"""For answers to be taken, after the batch has ended."""
FORCED_SECONDS = 3.0
"""After a second signal, until the process ends whatever it is in."""
FORCED = 130
"""Its exit code then."""
BACKLOG = 512


class Server(uvicorn.Server):
    """Serves until it is told to end.

    Args:
        service: what answers; its batch is closed in the end.
        grace: seconds in which what runs may be finished; None for no limit.

    Attributes:
        was_forced: whether a second signal came.
    """

    def __init__(self, service: Service, grace: float | None = 30.0) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(FLUSH_SECONDS),
            )
        )
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what it says, we say better or not at all
        self._service = service
        self._grace = grace
        self._loop: asyncio.AbstractEventLoop | None = None
        self.was_forced = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: end, and at the second one at once."""
        again = self._service.is_closing
        self.end(now=again)
        if again:  # a pass cannot be interrupted, and may take minutes
            last = threading.Timer(FORCED_SECONDS, os._exit, (FORCED,))
            last.daemon = True
            last.start()

    def end(self, *, now: bool = False) -> None:
        """Take on nothing more, finish what runs, and return from `serve`; may be called from any thread.

        Args:
            now: cancel what runs.
        """
        self._service.is_closing = True
        self.was_forced = self.was_forced or now
        threading.Thread(target=self._close, args=(0.0 if now else self._grace,), daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn; first take those in who have connected already, and would be reset with what they wait at."""
        loop = asyncio.get_running_loop()
        while not self.force_exit and sockets:
            try:
                made, _ = sockets[0].accept()
            except OSError:
                break
            await loop.connect_accepted_socket(self._connection, made)
        await super().shutdown(sockets)

    def _connection(self) -> Connection:
        return Connection(self.config, self.server_state, {})

    def _close(self, grace: float | None) -> None:
        if not self.was_forced:
            within = "" if grace is None else f", within {grace:g} s"
            logger.info("ending: what runs is finished%s; once more for at once", within)
            self._service.batch.close(grace)
        else:
            self.force_exit = True
        self.should_exit = True


def serve(service: Service, listening: socket.socket, grace: float | None, started: Callable[[], None]) -> bool:
    """Serve until a signal says otherwise.

    Args:
        service: what answers.
        listening: from `bound`.
        grace: see `Server`.
        started: called when requests are answered.

    Raises:
        OptionError: nothing can listen there any more.

    Returns:
        Whether it was forced to end: then the batch may still be in a pass.
    """
    server = Server(service, grace)

    listen(listening, BACKLOG)

    async def run() -> None:
        tasks = [asyncio.ensure_future(task) for task in (_tell(server, started), give_back_freed())]
        try:
            await server.serve(sockets=[listening])
        finally:
            for task in tasks:
                task.cancel()

    asyncio.run(run())
    return server.was_forced


async def _tell(server: uvicorn.Server, started: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    started()


@contextlib.contextmanager
def in_a_thread(service: Service, listening: socket.socket, grace: float | None = 30.0) -> Iterator[Server]:
    """A server in a thread of its own, for as long as the context lasts."""
    server = Server(service, grace)
    ready = threading.Event()

    async def run() -> None:
        telling = asyncio.ensure_future(_tell(server, ready.set))
        await server.serve(sockets=[listening])
        telling.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="rabbitllm-serve", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        server.end()
        thread.join()
