"""The page at `/` for chatting with the model: a few files of this package, and headers that restrict its sources.

The page sends requests only to the server that it came from: to `/v1/chat/completions`, `/v1/models` and `/status`. Its
files are the same for all users and hold no secret, so they need no key. Independent of models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILES = {
    "": ("page.html", "text/html; charset=utf-8"),
    "static/page.css": ("page.css", "text/css; charset=utf-8"),
    "static/icon.svg": ("icon.svg", "image/svg+xml"),
    **{
        f"static/{name}": (name, "text/javascript; charset=utf-8")
        for name in ("page.js", "talk.js", "chats.js", "markdown.js", "status.js", "timing.js", "view.js")
    },
}
"""Path -> file and media type."""
HEADERS = {
    # scripts, styles and pictures only from here, none inline; requests only to here; no frames
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # cached by the browser, but revalidated each time: another version of the package has other files
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _PageFile:
    body: bytes
    kind: str
    tag: str


@cache
def _file(path: str) -> _PageFile:
    name, kind = FILES[path]
    body = resources.files("rabbitllm.server").joinpath("static", name).read_bytes()
    return _PageFile(body, kind, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def _answer(path: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        file = _file(path)
        headers = {**HEADERS, "etag": file.tag}
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if known & {file.tag, "*"}:
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.kind)

    return answer


ROUTES = tuple(Route(f"/{path}", _answer(path)) for path in FILES)
"""The page and its files."""
