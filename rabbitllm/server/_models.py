"""The models of a server: loaded when a request names them, unloaded when idle or when another needs their memory.

    absent ── a request waits ── loading ── loaded ── nobody asks for it, or another waits for memory ── leaving ─┐
       └──────────────────────────────────────────────────────────────────────────────────────────────────────────┘

Models are loaded one at a time, in the order in which requests asked for them. Several stay loaded if the weights of
all are in memory; otherwise the least recently used ones leave, each after its running requests. A model that has to
leave takes no new requests: these wait until it is loaded again. So two models that are in demand take turns, and each
turn answers all requests that have waited for it.

All of it happens in the event loop but for loading and unloading, which have a thread.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from rabbitllm.base.forks import DaemonThread, fulfil
from rabbitllm.base.terminal import harmless, listed
from rabbitllm.engine.free_memory import trimming
from rabbitllm.errors import BusyError, RabbitLLMError
from rabbitllm.server._metrics import Metrics
from rabbitllm.server._service import Service
from rabbitllm.server._streaming import NO_RETRY, api_error_of
from rabbitllm.server.api_error import BROKEN, NOT_FOUND, TOO_LATE, APIError, closing
from rabbitllm.server.settings import Settings

logger = logging.getLogger(__name__)

KEEP_ALIVE = 300.0
"""By default a model of several is unloaded after so many seconds without a request."""
CLOSE_SECONDS = 0.02
"""Seconds between two looks at whether all requests are answered."""
SCOPE_KEY = "rabbitllm.model"
"""Key of the model that a request uses in its ASGI scope."""
_Done = TypeVar("_Done")
Loader = Callable[[Sequence[Service]], Service | None]
"""Loads a model beside loaded ones; None if not all weights would stay in memory then."""


class ModelState(Enum):
    """What a model does."""

    ABSENT = "not loaded"
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"


@dataclass(eq=False, slots=True)
class Entry:
    """A model of the server.

    Attributes:
        settings: its name, and limits and defaults of requests.
        load: loads it.
        service: while it is loaded.
        state: see `ModelState`.
        users: requests that it is answering.
        waiters: requests that wait for it.
        used: `time.monotonic()` of the last answer's end.
        error: why it could not be loaded the last time.
        context: its context, once it was loaded.
        created: seconds since 1970, when the server began.
        keep_alive: seconds without a request after which it is unloaded.
        timer: unloads it then.
    """

    settings: Settings
    load: Loader
    service: Service | None = None
    state: ModelState = ModelState.ABSENT
    users: int = 0
    waiters: deque[asyncio.Future[None]] = field(default_factory=deque)
    used: float = 0.0
    error: str | None = None
    context: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    keep_alive: float = math.inf
    timer: asyncio.TimerHandle | None = None

    @property
    def seconds_left(self) -> float:
        """Seconds until it is unloaded if nobody asks for it; read in the event loop."""
        return self.keep_alive if self.timer is None else self.timer.when() - asyncio.get_running_loop().time()

    def arrived(self, service: Service) -> None:
        """The model is loaded."""
        self.service, self.state, self.error = service, ModelState.LOADED, None
        self.context, self.used = service.limits.context, time.monotonic()


class Models:
    """The models of a server, by name.

    Args:
        loaders: the settings of each model, and what loads it; the first is that of requests without a name.
        metrics: of the server.
        keep_alive: seconds without a request after which a model is unloaded; None to keep it.
        most_waiting: maximum requests that wait for a model to be loaded.

    Attributes:
        settings: those of the first model; all but the name, and what a model recommends, is the same for all.
        metrics: see above.
        is_closing: whether new requests are refused.
    """

    def __init__(
        self,
        loaders: Sequence[tuple[Settings, Loader]],
        metrics: Metrics,
        keep_alive: float | None = None,
        most_waiting: int = 320,
    ) -> None:
        kept = math.inf if keep_alive is None else keep_alive
        self.entries = tuple(Entry(settings, load, keep_alive=kept) for settings, load in loaders)
        self.settings = self.entries[0].settings
        self.metrics = metrics
        self.is_closing = False
        self._most_waiting = most_waiting
        self._queue: deque[Entry] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mover: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()
        self._thread: DaemonThread | None = None

    @classmethod
    def of(cls, service: Service, loader: Loader | None = None, keep_alive: float | None = None) -> Models:
        """One model, which is loaded."""
        models = cls([(service.settings, loader or (lambda beside: service))], service.metrics, keep_alive)
        models.entries[0].arrived(service)
        return models

    @property
    def has_failed(self) -> bool:
        """Whether the thread that computes a model's answers has failed."""
        return any(service.batch.error is not None for service in self.services)

    @property
    def is_moving(self) -> bool:
        """Whether a thread loads or unloads a model now."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def services(self) -> list[Service]:
        """The loaded models."""
        return [entry.service for entry in self.entries if entry.service is not None]

    @property
    def last_used(self) -> Entry:
        """The loaded model that was used last, else the first one."""
        return max(
            self.entries, key=lambda entry: (entry.service is not None, entry.used * (entry.service is not None))
        )

    def entry(self, name: str | None) -> Entry:
        """The model of this name; the first one without a name.

        Raises:
            APIError: there is none.
        """
        for entry in self.entries:
            if not name or name == entry.settings.name:
                return entry
        names = [repr(entry.settings.name) for entry in self.entries]
        here = f"this is {names[0]}" if len(names) == 1 else f"this server has {listed(names, len(names))}"
        problem = f"The model {str(name)[:200]!r} does not exist here; {here}."
        raise APIError(NOT_FOUND, problem, param="model", code="model_not_found")

    def at_once(self, name: str | None, scope: Any) -> Service | None:
        """Use a model for a request, until `release`; None if it has to be loaded first.

        Raises:
            APIError: there is no such model.
        """
        entry = self.entry(name)
        if entry.state is not ModelState.LOADED:
            return None
        entry.users += 1
        return self._used(entry, scope)

    async def acquire(self, name: str | None, scope: Any) -> Service:
        """Use a model that is not loaded for a request, until `release`; wait until it is.

        Raises:
            APIError: there is no such model, it cannot be loaded, too many requests wait for it, or the server ends.
        """
        entry = self.entry(name)
        if self.is_closing:
            raise self.closing()
        if len(entry.waiters) >= self._most_waiting:
            raise api_error_of(BusyError("The request queue is full.", "Try again.", 10.0))
        self._loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = self._loop.create_future()
        entry.waiters.append(waiter)
        if entry not in self._queue:
            self._queue.append(entry)
        if self._mover is None or self._mover.done():
            self._mover = self._loop.create_task(self._move())
        try:
            async with asyncio.timeout(entry.settings.seconds):
                await waiter
        except BaseException as error:
            if waiter in entry.waiters:
                entry.waiters.remove(waiter)
                self._notify()
            elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._leave(entry)
            if isinstance(error, TimeoutError):
                problem = f"The model was not loaded after {entry.settings.seconds:.0f} s."
                raise APIError(TOO_LATE, problem, code="timeout", headers=NO_RETRY) from None
            raise
        return self._used(entry, scope)

    def begin(self) -> None:
        """Count the seconds without a request of a model that is loaded already; called in the event loop."""
        for entry in self.entries:
            if entry.service is not None:
                self._count_down(entry)

    def release(self, scope: Any) -> None:
        """A request has been answered; does nothing for one that uses no model."""
        if (entry := scope.pop(SCOPE_KEY, None)) is not None:
            self._leave(entry)

    def close(self, seconds: float | None) -> None:
        """Refuse the requests that wait for a model, and finish the others; blocks until done. For any thread.

        Args:
            seconds: time after which unfinished requests are cancelled; None for no limit.
        """
        self.is_closing = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._refuse_waiters)
        end = math.inf if seconds is None else time.monotonic() + seconds
        # a batch that is open yet answers those that first compute without it: log probabilities of their prompts
        while any(entry.users for entry in self.entries) and time.monotonic() < end:
            time.sleep(CLOSE_SECONDS)
        left = None if seconds is None else max(end - time.monotonic(), 0.0)
        threads = [DaemonThread(service.batch.close, "close", left) for service in self.services]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def closing(self) -> APIError:
        """The error of requests while the server ends."""
        return closing(failed=self.has_failed)

    def states(self) -> list[Mapping[str, Any]]:
        """The models as `/status` shows them: requests in `waiting` wait for the load."""
        return [
            {
                "id": entry.settings.name,
                "state": entry.state.value,
                "running": entry.users,
                "waiting": len(entry.waiters),
                "error": entry.error,
            }
            for entry in self.entries
        ]

    def _used(self, entry: Entry, scope: Any) -> Service:
        """Record that a request uses a model; it is counted already."""
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        scope[SCOPE_KEY] = entry
        assert entry.service is not None, "a model that is used stays"
        return entry.service

    def _leave(self, entry: Entry) -> None:
        entry.users -= 1
        entry.used = time.monotonic()
        self._notify()
        self._count_down(entry)

    def _count_down(self, entry: Entry) -> None:
        """Have a model unloaded after the time without a request, if nobody uses it now."""
        if not entry.users and entry.timer is None and entry.keep_alive < math.inf:
            self._loop = asyncio.get_running_loop()
            entry.timer = self._loop.call_later(entry.keep_alive, self._rest, entry)

    def _rest(self, entry: Entry) -> None:
        """Unload a model that nobody has asked for."""
        entry.timer = None

        async def unload() -> None:
            async with self._lock:
                if entry.state is ModelState.LOADED and not entry.users and entry.timer is None and not self.is_closing:
                    await self._unload(entry)

        self._resting = asyncio.ensure_future(unload())

    def _notify(self) -> None:
        self._changed.set()
        self._changed.clear()

    def _refuse_waiters(self) -> None:
        for entry in self.entries:
            self._fail(entry, self.closing())
        self._notify()

    def _fail(self, entry: Entry, error: APIError) -> None:
        while entry.waiters:
            if not (waiter := entry.waiters.popleft()).done():
                waiter.set_exception(error)

    async def _move(self) -> None:
        """Load the models that requests wait for, in their order."""
        while self._queue:
            entry = self._queue[0]
            try:
                async with self._lock:
                    await self._bring(entry)
            except Exception as error:
                self._fail(entry, _why_not(entry, error))
            self._queue.popleft()
            while entry.state is ModelState.LOADED and entry.waiters:
                if not (waiter := entry.waiters.popleft()).done():
                    entry.users += 1
                    waiter.set_result(None)
            if entry.state is ModelState.LOADED:  # those who asked may have left during the load
                self._count_down(entry)

    async def _bring(self, entry: Entry) -> None:
        """Load a model, if a request still waits for it; others leave while not all of them have room."""
        while entry.state is not ModelState.LOADED and entry.waiters:
            others = [other for other in self.entries if other.service is not None]
            entry.state = ModelState.LOADING
            try:
                service = await self._in_thread(lambda: entry.load(self.services))
            except BaseException:
                entry.state = ModelState.ABSENT
                raise
            if service is not None:
                entry.arrived(service)
                if self.is_closing:
                    service.batch.close(0)
                logger.info("loaded %s", harmless(entry.settings.name))
                return
            entry.state = ModelState.ABSENT
            leaving = min(others, key=lambda other: (other.users > 0, other.used))
            leaving.state = ModelState.LEAVING
            while leaving.users and entry.waiters:
                await self._changed.wait()
            if entry.waiters:
                await self._unload(leaving)
            else:
                leaving.state = ModelState.LOADED

    async def _unload(self, entry: Entry) -> None:
        """Unload a model that answers no requests."""
        entry.state, box, entry.service = ModelState.LEAVING, [entry.service], None
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        await self._in_thread(lambda: _free(box))
        entry.state = ModelState.ABSENT
        logger.info("unloaded %s", harmless(entry.settings.name))

    async def _in_thread(self, work: Callable[[], _Done]) -> _Done:
        """The result of work in a thread that the end of the process does not wait for."""
        future: Future[_Done] = Future()
        future.set_running_or_notify_cancel()  # work that has begun cannot be cancelled

        self._thread = DaemonThread(fulfil, "rabbitllm-models", future, work)
        self._thread.start()
        return await asyncio.wrap_future(future)


def _free(box: list[Service | None]) -> None:
    """Close the service in a box, which has the only reference to it, and return its memory to the system."""
    service = box.pop()
    assert service is not None, "it is loaded"
    devices = [executor.device for executor in service.model.streamer.executors.values()]
    service.close()
    del service
    gc.collect()
    for device in devices:
        device.empty_cache()
    if (trim := trimming()) is not None:
        trim()


def _why_not(entry: Entry, error: Exception) -> APIError:
    """The error of the requests that waited for a model; it has no path of this machine."""
    name = entry.settings.name
    if isinstance(error, APIError):
        return error
    unexpected = None if isinstance(error, RabbitLLMError) else error
    logger.error("%s cannot be loaded: %s", harmless(name), error, exc_info=unexpected)
    problem = error.problem if isinstance(error, RabbitLLMError) else ""
    reason = (
        problem if problem and not {"/", "\\"} & set(problem) else f"{type(error).__name__}; the log has the reason."
    )
    entry.error = reason
    return APIError(BROKEN, f"The model {name!r} cannot be loaded: {reason}", code="model_not_loaded", headers=NO_RETRY)
