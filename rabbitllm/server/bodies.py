"""The body of a request: read within a limit of bytes and of time, and decoded.

A body is as long as what comes of it, whatever a header says; so a chunked one is bounded too.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from rabbitllm.formats.json_text import decode_message
from rabbitllm.server.api_error import CLOSE, TIMED_OUT, TOO_LARGE, APIError, bad


async def read_json(request: Request, max_bytes: int, seconds: float) -> Any:
    """What the body says.

    Args:
        request: whose body it is.
        max_bytes: it may have.
        seconds: in which it must be there.

    Raises:
        APIError: too long, too slow, or no JSON.
        ClientDisconnect: the client is gone.
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
