"""Server-sent events: their framing, and a response that ends when its client disconnects.

    data: {"id": …}        an event, then an empty line
    data: [DONE]           the last one
    : waiting              a comment that keeps the connection alive; clients skip it

A response waits for a client that reads slowly; meanwhile events wait in the `Inbox`. It ends when the client
disconnects or reads nothing for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",  # otherwise nginx buffers pieces
}


def text_of(value: Any) -> bytes:
    """JSON on one line, with every character escaped that a reader may take for a line break."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in ("\x85", "\u2028", "\u2029"):
        if character in text:
            text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "backslashreplace")


def event(value: Any) -> bytes:
    """One event."""
    return b"data: " + text_of(value) + b"\n\n"


class EventStream(Response):
    """A response whose frames are written as they arrive.

    Args:
        frames: the frames, in order.
        over: called at the end in any case, with whether the client stayed connected until then.
        headers: added to those of every stream.
        heartbeat_seconds: see `Settings`.
        stall_seconds: likewise.
    """

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        over: Callable[[bool], None],
        headers: Mapping[str, str],
        *,
        heartbeat_seconds: float,
        stall_seconds: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**HEADERS, **headers})
        self._frames = frames
        self._over = over
        self._heartbeat = heartbeat_seconds
        self._stall = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the end, or until the client stops reading."""
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(left(receive))
        stayed = False
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                stayed = writing.result()
        finally:
            self._over(stayed)
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)

    async def _write(self, send: Send) -> bool:
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for frame in self._with_heartbeats():
                await self._send(send, {"type": "http.response.body", "body": frame, "more_body": True})
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):
            return False
        return True

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        async with asyncio.timeout(self._stall):
            await send(message)

    async def _with_heartbeats(self) -> AsyncIterator[bytes]:
        coming: asyncio.Future[bytes] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(_next(self._frames))
                done, _ = await asyncio.wait({coming}, timeout=self._heartbeat)
                if not done:
                    yield COMMENT
                    continue
                frame, coming = coming.result(), None
                if not frame:
                    return
                yield frame
        finally:
            if coming is not None:
                coming.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await coming


async def _next(frames: AsyncIterator[bytes]) -> bytes:
    async for frame in frames:
        if frame:
            return frame
    return b""


async def left(receive: Receive) -> None:
    """Return when the client has disconnected; the body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
