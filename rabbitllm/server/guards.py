"""Middleware around every route: ASGI applications inside each other, the outermost first.

    RequestLog     a request id, counts, one log line; exceptions inside are answered in one form
    HostGuard      host names that may call this server, so that no web page reaches it under a name of its own
    ApiKeyGuard    the API key, for every route that describes or uses the model
    ShutdownGuard  no new requests while the server shuts down

Routes under `/v1` and `/metrics` require the key; `/health` and the page, which holds no data, do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rabbitllm.server.api_error import CLOSE, FORBIDDEN, UNAUTHORISED, APIError, broken, closing
from rabbitllm.server.event_stream import text_of
from rabbitllm.server.metrics import Metrics
from rabbitllm.server.record import SCOPE_KEY, Record, logger, request_id

errors = logging.getLogger(__name__)

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/health", "/metrics", "/")
QUIET = ("/health", "/metrics", "/status")
"""Paths that are polled and so not logged."""
PROTECTED = ("/v1", "/metrics", "/status")
MAX_READ_OFF, MAX_READ_OFF_SECONDS = 1 << 20, 2.0
"""Limits in bytes and seconds for reading the body of a rejected request."""
ALWAYS = ("/health", "/metrics")
"""Paths that are answered even while the server shuts down."""


class JsonResponse(Response):
    """JSON with the same encoder as streams."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return text_of(content)


def answer_of(refusal: APIError) -> JsonResponse:
    """A refusal as a response."""
    return JsonResponse(refusal.as_object(), refusal.status, refusal.headers)


async def _refuse(refusal: APIError, scope: Scope, receive: Receive, send: Send) -> None:
    record: Record | None = scope.get(SCOPE_KEY)
    if record is not None:
        record.error = refusal.code
    await _read_off(receive)
    await answer_of(refusal)(scope, receive, send)


async def _read_off(receive: Receive) -> None:
    """Read and drop a body of usual size: some clients read no answer while they are still writing."""
    length = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MAX_READ_OFF_SECONDS):
            while length <= MAX_READ_OFF:
                message = await receive()
                length += len(message.get("body", b""))
                if not message.get("more_body"):
                    return


class RequestLog:
    """Gives requests an id, counts and logs them, and answers those that ended with an error."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        record = Record(request_id(Headers(scope=scope).get("x-request-id")), f"{scope['method']} {path}")
        scope[SCOPE_KEY] = record

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.id
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        self._metrics.begin()
        try:
            try:
                await self._app(scope, receive, sending)
            except Exception as error:
                if record.status:
                    raise
                await answer_of(told(error))(scope, receive, sending)
        except asyncio.CancelledError:  # the server is forced to end
            if not record.status:
                await answer_of(closing())(scope, receive, sending)
        except Exception:
            errors.exception("An answer broke off.")
            raise ConnectionAbortedError("An answer broke off.") from None
        finally:
            self._metrics.end()
            endpoint = path if path in ENDPOINTS else "other"
            self._metrics.requests.add(endpoint, str(record.status or "none"))
            if record.gone:
                self._metrics.left.add()
            if path not in QUIET:
                logger.info("%s", record.line())


def told(error: Exception) -> APIError:
    """The answer to an error; an unexpected error is logged, and its details are not sent to the client."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        return APIError(error.status_code, str(error.detail), headers=error.headers)
    errors.error("A request could not be answered.", exc_info=error)
    return broken()


class HostGuard:
    """Rejects requests that a page on another host makes through the user's browser.

    An unknown host name means an attacker's page whose own name resolves to this machine (DNS rebinding); an
    `Origin` of another host means a page that sends requests although it may not read the answers.

    Args:
        app: the application inside.
        hosts: names in lower case, None for any; addresses are always allowed, since DNS rebinding needs a name.
        origins: other origins that may send requests.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...] | None, origins: tuple[str, ...]) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host, origin = headers.get("host"), headers.get("origin")
            if host is not None and not self._is_called(name_of(host)):
                problem = "This server is not called by that name; serve --allow-host NAME permits it."
                await _refuse(APIError(FORBIDDEN, problem, code="wrong_host", headers=CLOSE), scope, receive, send)
                return
            if scope["method"] not in ("GET", "HEAD", "OPTIONS") and not self._may_ask(origin, host):
                wrong = APIError(
                    FORBIDDEN, "Pages of that origin may not ask here.", code="wrong_origin", headers=CLOSE
                )
                await _refuse(wrong, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_called(self, name: str) -> bool:
        return self._hosts is None or name in self._hosts or is_address(name)

    def _may_ask(self, origin: str | None, host: str | None) -> bool:
        if origin is None or "*" in self._origins or origin in self._origins:
            return True
        return host is not None and origin.partition("://")[2] == host


def name_of(host: str) -> str:
    """`[::1]:8000` -> `::1`."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_address(name: str) -> bool:
    """Whether a host is given by an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class ApiKeyGuard:
    """Requires the API key, compared in constant time."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._key = key.encode() if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and self._key is not None and scope["path"].startswith(PROTECTED):
            given = Headers(scope=scope).get("authorization", "")
            kind, _, key = given.partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self._key):
                unknown = APIError(
                    UNAUTHORISED,
                    "No API key that is accepted here. Expected Authorization: Bearer KEY.",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer", **CLOSE},
                )
                await _refuse(unknown, scope, receive, send)
                return
        await self._app(scope, receive, send)


class ShutdownGuard:
    """Rejects new requests while the server shuts down."""

    def __init__(self, app: ASGIApp, is_closing: Callable[[], bool]) -> None:
        self._app = app
        self._is_closing = is_closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and self._is_closing() and scope["path"] not in ALWAYS:
            await _refuse(closing(), scope, receive, send)
            return
        await self._app(scope, receive, send)
