"""Middleware around every route: ASGI applications inside each other, the outermost first.

    RequestLog     a request id, counts, one log line; exceptions inside are answered in one form
    Guard          `wrong_caller`: host names that may call this server, so that no web page reaches it by its own name
    Guard          `wrong_key`: the API key; and no new requests while the server shuts down

Every path requires the key but `/health`, which then tells only that the server lives, and the page, which holds no
data.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rabbitllm.base.terminal import counted, harmless
from rabbitllm.generation.request import Result
from rabbitllm.server._metrics import Metrics
from rabbitllm.server._streaming import api_error_of, text_of
from rabbitllm.server.api_error import CLOSE, FORBIDDEN, NOT_FOUND, UNAUTHORISED, APIError, bad, closing

logger = logging.getLogger("rabbitllm.server.requests")
errors = logging.getLogger(__name__)

SCOPE_KEY = "rabbitllm.record"
"""Key of a request's record in its ASGI scope."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class Record:
    """An HTTP request.

    Attributes:
        id: the caller's `x-request-id` if it is a plain word, else a new one.
        what: method and path.
        status: HTTP status of the response; 0 where there was none.
        error: code, else message, of the error that answered the request or ended its stream.
        gone: whether the client disconnected before the end.
        finished: the end of each choice.
        started: `time.perf_counter()`.
    """

    id: str
    what: str
    status: int = 0
    error: str | None = None
    gone: bool = False
    finished: list[Result] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def line(self) -> str:
        """The log line: what happened, how long it took, and its tokens."""
        parts = [f"{harmless(self.what, 80)} {self.status or 'no answer'}"]
        if self.error is not None:
            parts[0] += f" {harmless(self.error, 60)}"
        if self.gone:
            parts.append("client left")
        if self.finished:
            parts += self._generated()
        parts.append(f"{time.perf_counter() - self.started:.2f} s")
        return ", ".join(parts) + f" [{self.id}]"

    def _generated(self) -> list[str]:
        prompt, cached = (sum(getattr(r, name) for r in self.finished) for name in ("prompt_tokens", "kept_tokens"))
        new = sum(len(result.tokens) for result in self.finished)
        parts = [f"{prompt:,} + {counted(new, 'token')}" + (f" ({cached:,} kept)" if cached else "")]
        firsts = [result.first_seconds for result in self.finished if result.first_seconds is not None]
        if firsts:
            parts.append(f"first after {min(firsts):.2f} s")
            decode_seconds = max(result.seconds for result in self.finished) - min(firsts)
            if new > len(firsts) and decode_seconds > 0:
                parts.append(f"then {(new - len(firsts)) / decode_seconds:.1f} tokens/s")
        return parts


def request_id(header: str | None) -> str:
    """The caller's id if it is a plain word, else a new one."""
    return header if header is not None and _ID.fullmatch(header) else uuid.uuid4().hex[:20]


ENDPOINTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/embeddings", "/v1/rerank", "/v1/models", "/tokenize", "/detokenize", "/apply-template"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/tags", "/api/ps", "/api/show"),
    *("/api/version", "/health", "/metrics", "/"),
)
QUIET = ("/health", "/metrics", "/status")
"""Paths that are polled and so not logged."""
MAX_READ_OFF, MAX_READ_OFF_SECONDS = 1 << 20, 2.0
"""Limits in bytes and seconds for reading the body of a rejected request."""


class JsonResponse(Response):
    """JSON with the same encoder as streams."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return text_of(content)


def response_of(api_error: APIError, path: str) -> JsonResponse:
    """An error as a response to a request for this path, in the form of its interface."""
    if path.startswith("/api/"):
        return JsonResponse({"error": api_error.message}, api_error.status, api_error.headers)
    is_anthropic = path.startswith("/v1/messages")
    body = api_error.as_object(anthropic=is_anthropic)
    return JsonResponse({"type": "error", **body} if is_anthropic else body, api_error.status, api_error.headers)


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
        """See ASGI; the server is run without web sockets and lifespan events, so every scope is of a request."""
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

        self._metrics.open.add()
        try:
            try:
                await self._app(scope, receive, sending)
            except Exception as error:
                if record.status:
                    raise
                await response_of(api_error_of(error), path)(scope, receive, sending)
        except asyncio.CancelledError:  # the server is forced to end
            if not record.status:
                await response_of(closing(), path)(scope, receive, sending)
        except Exception:
            errors.exception("An answer was aborted.")
            raise ConnectionAbortedError("An answer was aborted.") from None
        finally:
            self._metrics.open.add(amount=-1)
            endpoint = path if path in ENDPOINTS else "other"
            self._metrics.requests.add(endpoint, str(record.status or "none"))
            if record.gone:
                self._metrics.left.add()
            if path not in QUIET:
                logger.info("%s", record.line())


def no_such_path(path: str) -> APIError:
    """The error for a path that other servers have; it names those that are here."""
    paths = [endpoint for endpoint in ENDPOINTS if endpoint.startswith("/api/" if path.startswith("/api") else "/v1/")]
    names = f"{', '.join(paths[:-1])} and {paths[-1]}"
    return APIError(NOT_FOUND, f"There is no {harmless(path, 80)} here. This server has {names}.", code="not_found")


class Guard:
    """Answers the requests that a check refuses, and passes on all others.

    Args:
        app: the application inside.
        refused: the error for a request; None to pass it on.
    """

    def __init__(self, app: ASGIApp, refused: Callable[[Scope], APIError | None]) -> None:
        self._app = app
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if (api_error := self._refused(scope)) is None:
            await self._app(scope, receive, send)
            return
        scope[SCOPE_KEY].error = api_error.code
        await _read_off(receive)
        await response_of(api_error, scope["path"])(scope, receive, send)


def wrong_caller(scope: Scope, hosts: tuple[str, ...] | None, origins: tuple[str, ...]) -> APIError | None:
    """The error for a request whose end is ambiguous, or that a page on another host makes through the user's browser.

    An unknown host name means an attacker's page whose own name resolves to this machine (DNS rebinding); an
    `Origin` of another host or scheme means a page that sends requests although it may not read the answers.

    Args:
        scope: the request.
        hosts: names in lower case, None for any; addresses are always allowed, since DNS rebinding needs a name.
        origins: other origins that may send requests.
    """
    headers = Headers(scope=scope)
    if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may see another request than we do
        return bad("The request has both Content-Length and Transfer-Encoding; send one of them.", headers=CLOSE)
    host, origin = headers.get("host"), headers.get("origin")
    if host is not None and hosts is not None and (name := name_of(host)) not in hosts and not is_address(name):
        problem = "The Host header is not allowed; start the server with --allow-host NAME to allow it."
        return APIError(FORBIDDEN, problem, code="wrong_host", headers=CLOSE)
    if scope["method"] in ("GET", "HEAD", "OPTIONS") or origin is None or "*" in origins or origin in origins:
        return None
    if host is not None and origin.lower() == f"{scope['scheme']}://{host}".lower():
        return None
    return APIError(
        FORBIDDEN,
        "This origin is not allowed; start the server with --allow-origin ORIGIN to allow it.",
        code="wrong_origin",
        headers=CLOSE,
    )


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


def key_of(scope: Scope, api_key: str | None) -> str | None:
    """The number of the API key that a request has, compared in constant time; "" where there are none.

    Args:
        scope: the request.
        api_key: keys, separated by commas; None for none.
    """
    if not api_key:
        return ""
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    keys = [*([key.strip()] if scheme.lower() == "bearer" else []), headers.get("x-api-key", "")]
    allowed = [(str(number), key.encode()) for number, key in enumerate(split_keys(api_key))]
    given = [key.encode("latin-1") for key in keys]
    return next((number for number, key in allowed if any(hmac.compare_digest(key, other) for other in given)), None)


def split_keys(api_key: str) -> list[str]:
    """The keys in a text that separates them by commas."""
    return [key for part in api_key.split(",") if (key := part.strip())]


def wrong_key(scope: Scope, api_key: str | None, open_paths: frozenset[str]) -> APIError | None:
    """The error for a request without the API key, unless its path is one of the open ones."""
    if scope["path"] in open_paths or key_of(scope, api_key) is not None:
        return None
    return APIError(
        UNAUTHORISED,
        "The API key is missing or wrong; expected Authorization: Bearer KEY, or x-api-key: KEY.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer", **CLOSE},
    )
