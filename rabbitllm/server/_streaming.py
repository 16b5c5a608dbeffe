"""Answers on their way from the batch's thread to the client: whole, or as server-sent events.

    data: {"id": …}        an event, then an empty line
    data: [DONE]           the last one
    : waiting              a comment that keeps the connection alive; clients skip it

A response waits for a client that reads slowly; meanwhile events wait in the `Inbox`. It ends when the client
disconnects or reads nothing for too long.

The batch's thread wakes the loop once for the events of all answers (`_Bell`): each wake-up hands Python's lock over,
and the next pass would wait while the loop writes one answer's event.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rabbitllm.errors import BatchError, BusyError, ClosedError, NotANumberError, OptionError
from rabbitllm.generation.request import Delta, Event, Failed, FinishReason, Request, Result, TokenLogprob
from rabbitllm.server.answers import ChatChoices, CompletionChoices, ResponseBuilder
from rabbitllm.server.api_error import BROKEN, BUSY, NOT_A_NUMBER, TOO_LATE, APIError, bad, closing

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",  # otherwise nginx buffers deltas
}
NO_RETRY = {"x-should-retry": "false"}
"""Header against automatic retries by clients: another attempt would take as long."""
_Done = TypeVar("_Done")
_on_one_line = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
ChoiceEvents = list[tuple[int, Event]]


def text_of(value: Any) -> bytes:
    """JSON on one line, with every character escaped that a reader may take for a line break."""
    text = _on_one_line(value)
    for character in ("\x85", "\u2028", "\u2029"):
        if character in text:
            text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "backslashreplace")


def event(value: Any) -> bytes:
    """One event."""
    return b"data: " + text_of(value) + b"\n\n"


class _Bell:
    """Wakes the tasks of an event loop from another thread, all that are due at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._due = deque[asyncio.Event]()
        self._rings = False

    def ring(self, event: asyncio.Event) -> None:
        """Set an event of the loop.

        Raises:
            RuntimeError: the event loop is closed.
        """
        self._due.append(event)
        if not self._rings and (loop := self._loop()) is not None:
            self._rings = not loop.is_closed()
            loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._rings = False  # what is due from here on rings again
        while self._due:
            self._due.popleft().set()


_bells: WeakKeyDictionary[asyncio.AbstractEventLoop, _Bell] = WeakKeyDictionary()


class Inbox:
    """A queue of one answer's events, from the batch's thread to an event loop whose client may read slowly.

    Waiting deltas are joined, so that the queue is never larger than the answer itself, however many passes produced
    it. The loop is woken once, however many events arrive meanwhile.

    Args:
        keep_tokens: whether to keep tokens as well as text.
        watch: called with the choice, the event and `time.perf_counter()`, in the batch's thread.
    """

    def __init__(
        self,
        *,
        keep_tokens: bool = True,
        watch: Callable[[int, Event, float], None] = lambda choice, event, now: None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._bell = _bells.setdefault(loop, _Bell(loop))
        self._has_events = asyncio.Event()
        self._lock = threading.Lock()
        self._deltas: dict[int, tuple[list[str], list[TokenLogprob]]] = {}
        self._ends: ChoiceEvents = []
        self._is_woken = False
        self._keep_tokens = keep_tokens
        self._watch = watch

    def put(self, choice: int, event: Event) -> None:
        """Add an event; callable from any thread.

        Raises:
            RuntimeError: the event loop is closed.
        """
        self._watch(choice, event, time.perf_counter())
        with self._lock:
            if isinstance(event, Delta):
                texts, tokens = self._deltas.setdefault(choice, ([], []))
                texts.append(event.text)
                if self._keep_tokens:
                    tokens += event.tokens
            else:
                self._ends.append((choice, event))
            wake, self._is_woken = not self._is_woken, True
        if wake:
            self._bell.ring(self._has_events)

    async def take(self, seconds: float | None = None) -> ChoiceEvents:
        """The events that have arrived, with the deltas of each choice joined; waits until there is one.

        A delta always comes before the end of its choice. None after so many seconds without any.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._has_events.wait()
        with self._lock:
            deltas, self._deltas = self._deltas, {}
            ends, self._ends = self._ends, []
            self._is_woken = False
            self._has_events.clear()
        joined = {choice: Delta("".join(texts), tuple(tokens)) for choice, (texts, tokens) in deltas.items()}
        return [*joined.items(), *ends]


class Submission:
    """Requests that the batch has accepted.

    Args:
        batch: a `Batch` or `EmbeddingsOnly`.
        requests: one for each choice.
        inbox: receives their events.

    Attributes:
        finished: the end of each choice; None for those still running.
        error: code of the refusal that ended a stream.

    Raises:
        APIError: the batch refuses one of them; then none is submitted.
    """

    def __init__(self, batch: Any, requests: Sequence[Request], inbox: Inbox) -> None:
        self._inbox = inbox
        self._handles: list[Any] = []
        self._open = len(requests)
        self.finished: list[Result | None] = [None] * len(requests)
        self.error: str | None = None
        try:
            for choice, request in enumerate(requests):
                self._handles.append(batch.submit(request, partial(inbox.put, choice)))
        except Exception as error:
            self.cancel()
            limit = batch.stats.most_running + batch.stats.most_waiting
            if isinstance(error, BusyError) and len(requests) > limit:  # however long the client waits
                raise bad(f"{len(requests)} choices are too many: this server holds at most {limit}.", "n") from error
            raise api_error_of(error) from error

    def cancel(self) -> None:
        """Cancel all its requests."""
        for handle in self._handles:
            handle.cancel()

    async def events(self, seconds: float | None = None) -> AsyncIterator[Sequence[tuple[int, Delta | Result]]]:
        """Events as they arrive, until all choices have ended; none after so many seconds without any.

        Raises:
            APIError: a request failed or took too long.
        """
        while self._open:
            events: list[tuple[int, Delta | Result]] = []
            for choice, event in await self._inbox.take(seconds):
                if isinstance(event, Failed):
                    raise api_error_of(event.error)
                if isinstance(event, Result):
                    self.finished[choice] = event
                    self._open -= 1
                    if event.finish is FinishReason.TIMEOUT:
                        raise APIError(
                            TOO_LATE,
                            f"The answer was not complete after {event.seconds:.0f} s.",
                            code="timeout",
                            headers=NO_RETRY,
                        )
                    if event.finish is FinishReason.CANCELLED and not event.tokens:
                        raise closing()
                events.append((choice, event))
            yield events

    def ends(self) -> list[Result]:
        """The end of each choice that has ended."""
        return [result for result in self.finished if result is not None]


def api_error_of(error: Exception) -> APIError:
    """The answer to an error; an unexpected error is logged, and its details are not sent to the client."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        allowed = (error.headers or {}).get("Allow")
        methods = " and ".join(sorted(allowed.split(", "))) if allowed else ""
        message = f"This path answers {methods} only." if methods else str(error.detail)
        return APIError(error.status_code, message, headers=error.headers)
    if isinstance(error, BusyError):
        seconds = max(math.ceil(error.retry_after), 1)
        return APIError(
            BUSY,
            f"{error.problem} Try again in {seconds} s.",
            code="queue_full",
            headers={"retry-after": str(seconds)},
        )
    if isinstance(error, BatchError):
        return closing(failed=not isinstance(error, ClosedError))
    if isinstance(error, OptionError):
        return bad(error.problem)
    logger.error("A request failed.", exc_info=error)
    if isinstance(error, NotANumberError):
        return APIError(BROKEN, error.problem, code=NOT_A_NUMBER, headers=NO_RETRY)
    return APIError(BROKEN, "The server failed to answer this request; its log has the reason.", code="internal_error")


def cut_in(usage: Mapping[str, Any], name: str = "max_tokens") -> dict[str, int]:
    """The limit of new tokens in a usage, under a name: it is there where the context made it less."""
    return {name: usage["max_tokens"]} if "max_tokens" in usage else {}


class Dialect:
    """How an interface writes answers, from the objects of OpenAI's chats and completions: here as they are.

    Args:
        include_usage: whether a stream ends with its token usage.

    Attributes:
        content_type: media type of a stream.
    """

    content_type = HEADERS["content-type"]

    def __init__(self, *, include_usage: bool = False) -> None:
        self._include_usage = include_usage

    def whole(self, answer: dict[str, Any], ends: Sequence[Result]) -> dict[str, Any]:
        """A whole answer, whose choices ended so."""
        return answer

    def frame(self, chunk: Mapping[str, Any]) -> bytes:
        """The events of a chunk."""
        return event(chunk)

    def idle(self) -> bytes:
        """What an idle stream sends, so that nobody between takes it for dead."""
        return COMMENT

    def end(self, last: Mapping[str, Any], ends: Sequence[Result]) -> bytes:
        """The events after the chunks; `last` has the usage."""
        return (event(last) if self._include_usage else b"") + DONE

    def failed(self, error: APIError) -> bytes:
        """The events of an error after the response has begun."""
        return event(error.as_object()) + DONE


async def whole(
    submission: Submission, builder: ResponseBuilder, choices: ChatChoices | CompletionChoices, dialect: Dialect
) -> dict[str, Any]:
    """The whole answer, once it is complete.

    Raises:
        APIError: see `Submission.events`.
    """
    deltas = [Delta("", ())] * len(submission.finished)
    async for events in submission.events():
        for choice, event in events:
            if isinstance(event, Delta):
                deltas[choice] = Delta(deltas[choice].text + event.text, deltas[choice].tokens + event.tokens)
    ends = submission.ends()
    return dialect.whole(builder.whole(choices.all(deltas, ends), ends), ends)


async def frames(
    submission: Submission,
    builder: ResponseBuilder,
    choices: ChatChoices | CompletionChoices,
    dialect: Dialect,
    heartbeat_seconds: float,
) -> AsyncIterator[bytes]:
    """The answer as server-sent events, as they arrive, and a sign of life after some time without any."""

    def chunks(parts: Sequence[dict[str, Any]]) -> bytes:
        return b"".join(dialect.frame(builder.chunk([part])) for part in parts)

    yield b"".join(chunks(choices.begin(choice)) for choice in range(len(submission.finished)))
    try:
        async for events in submission.events(heartbeat_seconds):
            written = (
                chunks(choices.more(choice, item) if isinstance(item, Delta) else choices.end(choice, item))
                for choice, item in events
            )
            yield b"".join(written) if events else dialect.idle()
    except Exception as error:  # the response has begun, so the error is sent as an event
        api_error = api_error_of(error)
        submission.error = api_error.code
        yield dialect.failed(api_error)
        return
    ends = submission.ends()
    yield dialect.end(builder.last_chunk(ends), ends)


class EventStream(Response):
    """A response whose frames are written as they arrive.

    Args:
        frames: the frames, in order.
        on_end: called at the end in any case, with whether the client stayed connected until then.
        stall_seconds: a client that reads nothing for this time is disconnected.
    """

    def __init__(self, frames: AsyncIterator[bytes], on_end: Callable[[bool], None], stall_seconds: float) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self._frames = frames
        self._on_end = on_end
        self._stall = stall_seconds
        self._stayed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the end, or until the client stops reading."""
        with contextlib.suppress(ClientDisconnect):
            await unless_disconnected(self._write(send), receive, lambda: self._on_end(self._stayed))

    async def _write(self, send: Send) -> None:
        with contextlib.suppress(TimeoutError, OSError):
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for frame in self._frames:
                if frame:
                    await self._send(send, {"type": "http.response.body", "body": frame, "more_body": True})
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
            self._stayed = True

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        async with asyncio.timeout(self._stall):
            await send(message)


async def unless_disconnected(
    work: Coroutine[Any, Any, _Done], receive: Receive, on_end: Callable[[], object] = lambda: None
) -> _Done:
    """The result of the work, unless the client disconnects first; the body must have been read before.

    Args:
        work: cancelled if the client disconnects.
        receive: see ASGI.
        on_end: called in any case, before the work is cancelled.

    Raises:
        ClientDisconnect: the client has disconnected.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        on_end()
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
