"""The body of an HTTP response, read from its connection without the client's parser where that is safe.

A body of known length needs no parsing after the headers, yet httpx passes every 64 KiB of it through its parser,
which costs about as much as the digest does. The connection is the `network_stream` that httpx documents
(https://www.python-httpx.org/advanced/extensions/#network_stream). How much of the body the parser has already read
from it is not documented. The parser buffers nothing beyond the first piece that it yields; this is tested once per
process, on the mock network of the client's own library. If anything is unexpected, the client reads the body.
Independent of files and digests: the caller compares the bytes with a digest.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

LEAST_BYTES = 64 << 10
MAX_BYTES = 1 << 20
"""A read requests twice the bytes that the last one returned, within these limits. Memory is allocated for the whole
request, so a large request where little arrives (a TLS record holds 16 KiB) costs more than it saves."""


def body(client: Any, response: Any) -> Iterator[bytes]:
    """The bytes of a streamed response, as they arrive, in pieces of at most `MAX_BYTES`.

    A piece is not modified after it is yielded. The connection is closed after such a read, since the client regards
    it as still within a response. A caller that stops early closes the response, as with the client's own iterators.

    Args:
        client: the httpx (or httpx2) client of the request.
        response: a response of its `stream`, unread.

    Raises:
        TransportError: the client's own, if the connection breaks or is silent for longer than the client's timeout. A
            body that ends early raises it or just ends.
    """
    length = _plain_length(response)
    core = _network_library(client, response.extensions.get("network_stream"))
    if length is None or core is None:
        yield from response.iter_bytes()
        return
    pieces = response.iter_raw()  # keep a reference: it closes the connection when dropped
    first = next(pieces, b"")
    yield first
    if left := length - len(first):
        yield from _rest(response, core, client_library(client), left)
    else:
        yield from pieces  # to the end, so that the client finishes the response


def client_library(client: Any) -> ModuleType:
    """The package of a client: httpx or httpx2."""
    return importlib.import_module(type(client).__module__.partition(".")[0])


def _rest(response: Any, core: ModuleType, library: ModuleType, left: int) -> Iterator[bytes]:
    """The next `left` bytes of the connection, or fewer if it ends; closes it."""
    stream = response.extensions["network_stream"]
    timeout = response.request.extensions.get("timeout", {}).get("read")
    most = LEAST_BYTES
    try:
        while left and (piece := stream.read(min(most, left), timeout=timeout)):
            left -= len(piece)
            most = min(max(2 * len(piece), LEAST_BYTES), MAX_BYTES)
            yield piece
    except core.TimeoutException as error:
        raise library.ReadTimeout(str(error), request=response.request) from error
    except (core.NetworkError, OSError) as error:
        raise library.ReadError(str(error), request=response.request) from error
    finally:
        stream.close()


def _plain_length(response: Any) -> int | None:
    """The length of a body sent without any encoding, None for any other (RFC 9112, 6)."""
    headers = response.headers
    length = headers.get("content-length", "")
    as_it_is = headers.get("content-encoding", "identity") == "identity" and "transfer-encoding" not in headers
    if response.http_version != "HTTP/1.1" or response.status_code not in (200, 206) or not as_it_is:
        return None
    return int(length) if length.isascii() and length.isdigit() else None


def _network_library(client: Any, stream: Any) -> ModuleType | None:
    """The package of a client's connections, if it is one whose bodies may be read from them directly.

    A client or a transport of another class may read ahead, or not use the network at all.
    """
    try:
        library = client_library(client)
        core = importlib.import_module(type(stream).__module__.partition(".")[0])
        transports = [client._transport, *(mounted for mounted in client._mounts.values() if mounted is not None)]
        made_as_usual = type(client) is library.Client and {type(t) for t in transports} == {library.HTTPTransport}
        if made_as_usual and isinstance(stream, core.NetworkStream) and keeps_nothing_back(core):
            return core
    except (AttributeError, ImportError) as error:
        logger.debug("Bodies are left to the HTTP client: %s", error)
    return None


@functools.cache
def keeps_nothing_back(core: ModuleType) -> bool:
    """Whether the rest of a body is on the connection after its first piece is yielded; tested in memory."""
    first, rest = bytes(100_000), b"rest"
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(first + rest)
    return all(_hands_out(core, sent, first, rest) for sent in ([head + first, rest], [head, first, rest]))


def _hands_out(core: ModuleType, sent: list[bytes], first: bytes, rest: bytes) -> bool:
    try:
        with (
            core.ConnectionPool(network_backend=core.MockBackend(sent)) as pool,
            pool.stream("GET", "http://localhost/") as response,
        ):
            pieces = response.iter_stream()
            return bool(next(pieces) == first and response.extensions["network_stream"].read(len(rest)) == rest)
    except Exception as error:  # any error means that the client has changed
        logger.debug("Bodies are left to the HTTP client, which failed the trial: %s", error)
        return False
