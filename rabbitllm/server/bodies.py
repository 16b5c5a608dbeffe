"""The body of a request, read within a limit of bytes and of time, and decoded.

The bytes received count, not the length in a header; so a chunked body is limited too.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from rabbitllm.formats.bounded import decode_message
from rabbitllm.server.api_error import CLOSE, TIMED_OUT, TOO_LARGE, APIError, bad


async def read_json(request: Request, max_bytes: int, seconds: float) -> Any:
    """The decoded body.

    Args:
        request: the request to read.
        max_bytes: limit of the body's size.
        seconds: time limit for reading the body.

    Raises:
        APIError: the body is too long, too slow, or invalid JSON.
        ClientDisconnect: the client has disconnected.
    """
    raw = await _read(request, max_bytes, seconds)
    try:
        return decode_message(raw)
    except ValueError as error:
        raise bad(f"The body is no JSON that is taken here: {error}.", code="invalid_json") from None


async def _read(request: Request, max_bytes: int, seconds: float) -> bytes:
    said = request.headers.get("content-length", "")
    if said.isdecimal() and (len(said) > 18 or int(said) > max_bytes):
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    length = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                length += len(part)
                if length > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
    except TimeoutError:
        raise APIError(
            TIMED_OUT, f"The body did not arrive within {seconds:g} s.", code="body_timeout", headers=CLOSE
        ) from None
    except ClientDisconnect:
        raise
    return b"".join(parts)


def _too_large(max_bytes: int) -> APIError:
    return APIError(TOO_LARGE, f"The body has more than {max_bytes:,} bytes.", code="body_too_large", headers=CLOSE)
