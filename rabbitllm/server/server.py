"""The life of a server: bound before a model is loaded (`serve_models`), serving, shutting down.

    bound ── serves ── first signal: no new requests, running ones may finish within the grace period ── ended
                          └── second signal, or the period is over: running requests are cancelled ──┘

Signals are SIGINT, SIGTERM and SIGHUP; a second SIGHUP changes nothing, since a shell and the kernel both send it.
During the shutdown it still answers: new requests are refused with this reason, and `/health` reports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from rich.console import Console
from rich.text import Text
from uvicorn.protocols.http.h11_impl import H11Protocol

from rabbitllm.auto_model import LoadRequest
from rabbitllm.base.forks import DaemonThread
from rabbitllm.base.interrupts import handling
from rabbitllm.base.terminal import harmless, put, put_fact, size
from rabbitllm.display.wait_status import compilation_told
from rabbitllm.engine.free_memory import trimming
from rabbitllm.generation.request import BatchStats, Limits
from rabbitllm.server._app import create_app
from rabbitllm.server._metrics import Metrics
from rabbitllm.server._models import KEEP_ALIVE, Loader, Models
from rabbitllm.server._service import Service
from rabbitllm.server.embeddings import NO_RECIPE
from rabbitllm.server.settings import Settings, address_of, is_local, listen

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

logger = logging.getLogger(__name__)

# uvicorn itself limits the head's bytes and the time between two requests, but not the time for the first head or half
# a head. Only the kernel detects a peer that vanished without closing the connection.

HEAD_SECONDS = 20.0
"""Seconds from the opening of a connection, or the end of an answer, to the end of a request's head; an answer that
was written but not yet read by the client counts as ended."""
MAX_CONNECTIONS = 1000
"""Limit of open connections; a further one is closed at once. Each takes a file descriptor; 1,024 is a common limit."""
LINGER_SECONDS = 0.5
"""Seconds at shutdown in which a request on its way, or unread in the kernel, still gets an answer instead of a reset
connection."""
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


class Connection(H11Protocol):
    """A connection with timeouts for the head of a request and for a vanished peer."""

    head_seconds = HEAD_SECONDS
    max_connections = MAX_CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeouts of a new connection."""
        super().connection_made(transport)
        self._waits_since = time.monotonic()
        self._unsent = 0
        self._watch: asyncio.TimerHandle | None = None
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        _keep_alive(transport.get_extra_info("socket"))
        self._schedule_check()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeouts of a closed connection."""
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection; an idle one stays open for `LINGER_SECONDS`, to answer a request just sent."""
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(LINGER_SECONDS, self._close_idle)
        else:
            super().shutdown()

    def _close_idle(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def _schedule_check(self) -> None:
        self._watch = self.loop.call_later(self.head_seconds / 4, self._check)

    def _check(self) -> None:
        now = time.monotonic()
        previous_unsent, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        if (self.cycle is not None and not self.cycle.response_complete) or self._unsent < previous_unsent:
            self._waits_since = now
        if now - self._waits_since >= self.head_seconds:
            self.transport.abort()
        elif not self.transport.is_closing():
            self._schedule_check()


def _keep_alive(connected: Any) -> None:
    """Turn on TCP keep-alive, by which the kernel detects a vanished peer."""
    with contextlib.suppress(OSError):  # closed already
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# Requests free blocks of all sizes in any order, so that glibc's heaps grow long after the used memory has stopped
# growing: by 40 MiB in five minutes of a tiny model's server, without any leak. Neither Python nor torch returns freed
# memory to the system.

TRIM_SECONDS = 10.0


async def trim_periodically() -> None:
    """Return freed memory to the system until cancelled; at once done where the allocator cannot."""
    trim = trimming()
    while trim is not None:
        await asyncio.sleep(TRIM_SECONDS)
        await asyncio.to_thread(trim)


FLUSH_SECONDS = 5.0
"""Seconds for clients to read their answers after the batch has ended."""
FORCED_SECONDS = 3.0
"""Seconds from a second signal until the process exits, even in the middle of a pass."""
FORCED, FAILED = 130, 1
"""Exit codes in that case, and after a batch has failed."""
BACKLOG = 512


class Server(uvicorn.Server):
    """Serves until it is asked to end.

    Args:
        models: the models and everything that answers requests; their batches are closed at the end.
        grace: seconds in which running requests may finish; None for no limit.
        on_start: called when requests are accepted.

    Attributes:
        was_forced: whether a second signal arrived.
    """

    def __init__(self, models: Models, grace: float | None = 30.0, on_start: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(models),
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
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # we log what matters ourselves
        self._models = models
        self._grace = grace
        self._on_start = on_start
        self.was_forced = False

    @property
    def exit_code(self) -> int | None:
        """The exit code if the process must end at once: a pass, or the load of a model, cannot be interrupted, and a
        device may not work any more after an error."""
        if self.was_forced:
            return FORCED
        return FAILED if self._models.has_failed else 0 if self._models.is_moving else None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn; a terminal that closes (SIGHUP) ends the server as SIGTERM does, unless `nohup` ignores it."""
        with super().capture_signals():
            hang_up = getattr(signal, "SIGHUP", None)
            if hang_up is None or signal.getsignal(hang_up) is signal.SIG_IGN:
                yield
                return
            with handling(hang_up, self.handle_exit):
                yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: the first ends the server, the second ends it at once."""
        is_second = self._models.is_closing
        if is_second and sig == getattr(signal, "SIGHUP", None):
            return
        self.end(now=is_second)
        if is_second:  # a pass cannot be interrupted, and may take minutes
            exit_timer = threading.Timer(FORCED_SECONDS, os._exit, (FORCED,))
            exit_timer.daemon = True
            exit_timer.start()

    async def on_tick(self, counter: int) -> bool:
        """See uvicorn; called ten times a second. A batch that has failed ends the server."""
        if self._models.has_failed and not self._models.is_closing:
            logger.error("the thread that computes answers has failed; the server ends with exit code %d", FAILED)
            self.end()
        return await super().on_tick(counter)

    def end(self, *, now: bool = False) -> None:
        """Refuse new requests, finish running ones, and return from `serve`; safe to call from any thread.

        Args:
            now: whether to cancel running requests.
        """
        self._models.is_closing = True
        self.was_forced = self.was_forced or now
        DaemonThread(self._close, "close", 0.0 if now else self._grace).start()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        self._models.begin()
        with contextlib.suppress(OSError):  # the greeting has no reader
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn; first accept clients that have connected already, whose connections would be reset otherwise."""
        loop = asyncio.get_running_loop()
        while not self.force_exit and sockets:
            try:
                accepted, _ = sockets[0].accept()
            except OSError:
                break
            await loop.connect_accepted_socket(lambda: Connection(self.config, self.server_state, {}), accepted)
        await super().shutdown(sockets)

    def _close(self, grace: float | None) -> None:
        try:
            if not self.was_forced:
                within = "" if grace is None else f", within {grace:g} s"
                logger.info("shutting down: finishing running requests%s; another Ctrl-C or SIGTERM stops now", within)
                self._models.close(grace)
            else:
                self.force_exit = True
        finally:  # also where no thread can be started to close a batch
            self.should_exit = True


def serve(models: Models, listening: socket.socket, grace: float | None, started: Callable[[], None]) -> int | None:
    """Serve until a signal arrives.

    Args:
        models: the models and everything that answers requests.
        listening: the socket of `bound`.
        grace: see `Server`.
        started: called when requests are accepted.

    Raises:
        OptionError: the address is no longer available.

    Returns:
        See `Server.exit_code`.
    """
    server = Server(models, grace, started)
    listen(listening, BACKLOG)

    async def run() -> None:
        trimmer = asyncio.ensure_future(trim_periodically())
        try:
            await server.serve(sockets=[listening])
        finally:
            trimmer.cancel()

    with compilation_told(logger.info):
        asyncio.run(run())
    return server.exit_code


def put_greeting(console: Console, service: Service, address: str, *, is_local: bool) -> None:
    """Print the greeting.

    Args:
        console: receives the greeting.
        service: the served model.
        address: URL of the server.
        is_local: whether only this machine reaches the server.
    """
    settings, stats = service.settings, service.batch.stats
    put(console, Text(f"{harmless(settings.name)} at {address}", "bold green"))
    if service.split is not None:
        existed, folder = service.split
        put_fact(console, "split", f"{'existed' if existed else 'made'}, in {harmless(str(folder))}")
    put_fact(console, "weights", _weights(service.model))
    put_fact(console, "requests", _requests(stats))
    put_fact(console, "sampling", service.sampling_words)
    put_fact(console, "embeddings", "yes" if service.embedder is not None else f"no, {NO_RECIPE}")
    if service.reranker is not None:
        put_fact(console, "reranking", "by the model's own scores")
    service.put_tools(console)
    _put_access(console, settings, _curl(service, address), is_local=is_local)


def put_names(console: Console, models: Models, address: str, keep_alive: float, *, is_local: bool) -> None:
    """Print the greeting of a server of several models, none of which is loaded yet.

    Args:
        console: receives the greeting.
        models: the models.
        address: URL of the server.
        keep_alive: seconds without a request after which a model is unloaded.
        is_local: whether only this machine reaches the server.
    """
    names = [harmless(entry.settings.name) for entry in models.entries]
    put(console, Text(f"{', '.join(names)} at {address}", "bold green"))
    put_fact(console, "models", f"loaded on request, unloaded after {keep_alive:g} s without one, or for another")
    body = json.dumps({"model": names[0], "prompt": "A rabbit is", "max_tokens": 64})
    _put_access(console, models.settings, _curl_of(models.settings, address, "completions", body), is_local=is_local)


def _put_access(console: Console, settings: Settings, curl: str, *, is_local: bool) -> None:
    put_fact(console, "API key", "required" if settings.api_key else "none")
    put_fact(console, "try", curl)
    if not is_local and not settings.api_key:
        warning = (
            "Every machine that reaches this address can use the model; prevent it with --api-key or --host 127.0.0.1."
        )
        put(console, Text(warning, "bold yellow"))


def _weights(model: StreamedModel) -> str:
    """`in RAM: 0.35 GB; disk, read for each pass: 3.20 GB`."""
    parts = []
    for device, tiers in model.placement.bytes_by_device.items():
        for tier, nbytes in tiers.items():
            where = f" of {device}" if device.startswith("cuda") else ""
            parts.append(f"{tier}{where}: {size(nbytes)}")
    return "; ".join(parts) or "none"


def _requests(stats: BatchStats) -> str:
    room = size(stats.cache_limit_bytes)
    swap = f", with up to {size(stats.aside_limit_bytes)} of swap" if stats.aside_limit_bytes else ""
    disk = (
        f"; prompts on disk: {size(stats.prompt_bytes)} of {size(limit)}" if (limit := stats.prompt_limit_bytes) else ""
    )
    return f"at most {stats.most_running} running, {stats.most_waiting} waiting; KV cache of up to {room}{swap}{disk}"


def _curl(service: Service, address: str) -> str:
    """A command to paste."""
    body: dict[str, Any] = {"max_tokens": 64}
    if service.template.is_there:
        endpoint, body["messages"] = "chat/completions", [{"role": "user", "content": "What is a rabbit?"}]
    else:
        endpoint, body["prompt"] = "completions", "A rabbit is"
    return _curl_of(service.settings, address, endpoint, json.dumps(body))


def _curl_of(settings: Settings, address: str, endpoint: str, body: str) -> str:
    key = ' -H "authorization: Bearer $RABBITLLM_API_KEY"' if settings.api_key else ""
    return f"curl {address}/v1/{endpoint}{key} -d {shlex.quote(body)}"


def serve_models(
    requests: Mapping[str, LoadRequest],
    draft: Any,
    limits: Limits,
    settings: Settings,
    listening: socket.socket,
    console: Console,
    grace: float | None,
    keep_alive: float | None = None,
) -> int | None:
    """Serve models until a signal arrives. A single one is loaded first, several are checked, and loaded on request.

    Args:
        requests: name in requests -> the model, its split and its run.
        draft: the draft, or the request for one.
        limits: limits of each batch, without the draft.
        settings: limits and defaults of requests; the name is replaced.
        listening: the socket of `settings.bound`.
        console: receives the progress messages.
        grace: seconds; see `Server`.
        keep_alive: seconds without a request after which a model is unloaded; None for the default: a single model
            stays.

    Returns:
        See `serve`.

    Raises:
        RabbitLLMError: see `Service.load` and `serve`.
    """
    metrics = Metrics()

    def loader(name: str, request: LoadRequest) -> tuple[Settings, Loader]:
        own = replace(settings, name=name)
        load = partial(Service.load, request, draft, limits, own, console, metrics, len(requests))
        return own, load

    loaders = [loader(name, request) for name, request in requests.items()]
    address, only_here = address_of(listening), is_local(listening)
    if len(loaders) > 1:
        with console.status("checking the models …"):
            for (own, _), request in zip(loaders, requests.values(), strict=True):
                Service.check(request, draft, own)
        kept = KEEP_ALIVE if keep_alive is None else keep_alive
        models = Models(loaders, metrics, kept, limits.running + limits.waiting)
        return serve(models, listening, grace, lambda: put_names(console, models, address, kept, is_local=only_here))
    with contextlib.redirect_stdout(sys.stderr):  # output while loading is not part of the result
        service = loaders[0][1]([])
    assert service is not None, "no other model is loaded"

    from transformers import logging

    logging.set_verbosity_error()  # no warnings about missing kernels amid requests
    box = [service]
    models = Models.of(service, loaders[0][1], keep_alive)
    del service  # the models have the only reference, so that it can be unloaded

    def started() -> None:
        put_greeting(console, box.pop(), address, is_local=only_here)

    return serve(models, listening, grace, started)
