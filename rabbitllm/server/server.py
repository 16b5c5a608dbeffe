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
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from rabbitllm.server.address import listen
from rabbitllm.server.app import create_app
from rabbitllm.server.connections import Connection
from rabbitllm.server.freed_memory import give_back_freed
from rabbitllm.server.service import Service

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
