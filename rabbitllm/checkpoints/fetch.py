"""Byte ranges of files on a hub, files as a stream, and downloads that resume where the last process stopped.

huggingface_hub restarts a download in each new process and leaves an orphan behind, and over HTTP it checks only
the size (https://github.com/huggingface/huggingface_hub/pull/4306). With shards of 4 GB and machines that may be
preempted, this module keeps one file, requests the rest of it, and checks the hub's own sha256 on the way.
Sessions, headers, tokens, proxies and error types are huggingface_hub's. Independent of shards.

A body of known length needs no parsing after the headers, yet httpx passes every 64 KiB of it through its parser,
which costs about as much as the digest does. So it is read from its connection, the `network_stream` that httpx
documents (https://www.python-httpx.org/advanced/extensions/#network_stream), if nothing of it has been read before: the
`trace` that httpx documents there too tells when the client's connection received the headers, and when it begins with
the body. The parser buffers nothing beyond the first piece that it yields; this is tested once per process, on the mock
network of the client's own library. If anything is unexpected, the client reads the body.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rabbitllm.errors import HubError
from rabbitllm.storage import durable

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(call: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """Call `call` with each item, in at most `threads` daemon threads.

    Returns:
        The results, in the order of the items.

    Raises:
        Exception: that of the first call to fail; no further item is started, and running calls are abandoned. The same
            if the caller is interrupted.
    """
    tasks = [(item, Future[Result]()) for item in items]
    waiting: queue.SimpleQueue[tuple[Item, Future[Result]]] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)

    def work() -> None:
        while True:
            try:
                item, future = waiting.get_nowait()
            except queue.Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call(item))
            except BaseException as error:
                future.set_exception(error)
                for _, later in tasks:
                    later.cancel()

    for number in range(min(threads, len(tasks))):
        threading.Thread(target=work, name=f"side-by-side-{number}", daemon=True).start()
    futures = [future for _, future in tasks]
    try:
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            if not future.cancelled():
                future.result()
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


LEAST_BYTES = 64 << 10
MAX_BYTES = 1 << 20
"""A read requests twice the bytes that the last one returned, within these limits. Memory is allocated for the whole
request, so a large request where little arrives (a TLS record holds 16 KiB) costs more than it saves."""


_HEADERS_CAME, _BODY_BEGAN = "http11.receive_response_headers.complete", "http11.receive_response_body.started"
"""Events of a trace."""


@contextlib.contextmanager
def streamed(client: Any, url: str, **options: Any) -> Iterator[tuple[Any, Iterator[bytes]]]:
    """The response to a GET and the bytes of its body, as they arrive, in pieces of at most `MAX_BYTES`.

    A piece is not modified after it is yielded. The connection is closed after a read past the client's parser, since
    the client regards it as still within a response. A caller that stops early closes the response.

    Args:
        client: an httpx (or httpx2) client.
        url: the address.
        options: of the client's `stream`.

    Raises:
        TransportError: the client's own, if the connection breaks or is silent for longer than the client's timeout. A
            body that ends early raises it or just ends.
    """
    events: list[str] = []
    trace = {"trace": lambda event, info: events.append(event)}
    with client.stream("GET", url, extensions=trace, **options) as response:
        yield response, _body(client, response, events)


def _body(client: Any, response: Any, events: Sequence[str]) -> Iterator[bytes]:
    length = _plain_length(response)
    core = _network_library(client, response.extensions.get("network_stream"))
    if length is None or core is None or events[-1:] != [_HEADERS_CAME]:
        yield from response.iter_bytes()
        return
    pieces = response.iter_raw()  # keep a reference: it closes the connection when dropped
    first = next(pieces, b"")
    yield first
    if (left := length - len(first)) and events[-1] == _BODY_BEGAN:
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
    """The package of a client's connections, if bodies may be read from them directly.

    A client of another class may have its own way to read a response.
    """
    try:
        core = importlib.import_module(type(stream).__module__.partition(".")[0])
        is_usual = type(client) is client_library(client).Client and isinstance(stream, core.NetworkStream)
        return core if is_usual and keeps_nothing_back(core) else None
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


CHUNK_BYTES = 4 << 20
ATTEMPTS = 8
"""Limit of consecutive attempts without a new byte."""
LONGEST_PAUSE = 120.0
"""Upper limit in seconds of a hub's Retry-After."""
_RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at a pinned commit of a hub.

    Attributes:
        url: its resolve URL; requested again at each attempt, so that an expired redirect is renewed.
        size: bytes.
        sha256: the hub's own digest (hex) of a large file; None for a small file, which has none.
        git_sha1: git's object id (hex) of a small file; None if the hub did not send it.
        token: as huggingface_hub takes it: a string, None for the saved one, False for none.
    """

    url: str
    size: int
    sha256: str | None
    token: str | bool | None = None
    git_sha1: str | None = None

    def new_digest(self) -> Any:
        """A new hash object of the kind by which the hub identifies this file."""
        if self.sha256 is None and self.git_sha1 is not None:  # https://git-scm.com/book, "Git Objects"
            return hashlib.sha1(f"blob {self.size}\0".encode())
        return hashlib.sha256()

    def check(self, digest: Any) -> None:
        """Compare the digest of the received bytes with the hub's own.

        Raises:
            HubError: they differ. None of the bytes may be used.
        """
        expected = self.sha256 or self.git_sha1
        if expected is not None and digest.hexdigest() != expected:
            raise HubError(
                f"{self.url} arrived with {digest.name} {digest.hexdigest()}; the hub says {expected}.",
                "Make the same call again: the wrong bytes were thrown away, and nothing of them was used.",
            )


def read_range(file: RemoteFile, start: int, length: int) -> bytes:
    """Bytes `start` to `start + length` of a remote file; fewer at its end.

    Raises:
        HubError: the hub did not answer in `ATTEMPTS` attempts, or refused.
    """
    stop = min(start + length, file.size)
    if stop <= start:
        return b""
    return b"".join(_resuming(file, start, stop))


def fetch(file: RemoteFile, part: Path, on_have: Callable[[int], None] = lambda have: None) -> None:
    """Complete `part` to the whole content of a remote file, keeping the bytes that an earlier attempt left in it.

    `part` is private and never the only copy, so it needs no fsync: only bytes that were hashed in this process are
    trusted.

    Args:
        file: the remote file.
        part: path of the local file.
        on_have: called before each run of bytes is written and at the end with the number of leading bytes present; the
            number falls if an earlier run's bytes were damaged and the fetch starts over. May raise to stop.

    Raises:
        HubError: the bytes do not match the hub's digest (`part` is removed), or the hub refused.
    """
    digest = file.new_digest()
    earlier = have = _rehash(part, file.size, digest)
    sink = durable.GrowingFile(part, have)
    try:
        on_have(have)
        for chunk in _resuming(file, have, file.size):
            on_have(have)
            sink.write_at(memoryview(chunk), have)
            digest.update(chunk)
            have += len(chunk)
        on_have(have)
    finally:
        sink.close()
    try:
        file.check(digest)
    except HubError:
        if not earlier:
            durable.remove(part)
            raise
        logger.warning("What an earlier run fetched of %s is damaged; it is fetched again.", file.url)
        on_have(0)
        durable.remove(part)
        fetch(file, part, on_have)


def stream(file: RemoteFile) -> Iterator[bytes]:
    """The whole content of a remote file, in order, without a copy on the disk.

    The caller must read to the end before using any of the bytes: the digest is compared after the last one.

    Raises:
        HubError: the bytes do not match the hub's digest, or the hub refused.
    """
    digest = file.new_digest()
    for chunk in _resuming(file, 0, file.size):
        digest.update(chunk)
        yield chunk
    file.check(digest)


def _rehash(part: Path, size: int, digest: Any) -> int:
    """Hash the existing bytes of `part` into `digest`; return their number, 0 if they are unusable."""
    if not part.exists():
        return 0
    if part.stat().st_size > size:
        durable.remove(part)
        return 0
    have = 0
    with part.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            have += len(chunk)
    return have


def _resuming(file: RemoteFile, start: int, stop: int) -> Iterator[bytes]:
    """The bytes from `start` to `stop`, with a new request for the rest whenever the connection breaks."""
    failures, at = 0, start
    while at < stop:
        before, wanted_pause = at, 0.0
        try:
            with _request(file, at, stop) as (response, content):
                for chunk in _wanted(content, response.status_code, at, stop):
                    at += len(chunk)
                    yield chunk
        except transport_errors() as error:
            reason = f"{type(error).__name__}: {error}"
        except _RetryLater as later:
            reason, wanted_pause = str(later), later.pause
        else:
            reason = "the connection closed early"
        if at >= stop:
            return
        failures = 1 if at > before else failures + 1
        if failures >= ATTEMPTS:
            raise HubError(
                f"{file.url} could not be read past byte {at:,} of {file.size:,}: {reason}.",
                "Make the same call again later: it goes on where this one stopped.",
            )
        logger.info("%s: %s; asking again from byte %s", file.url, reason, f"{at:,}")
        time.sleep(max(_pause(failures), wanted_pause))


class _RetryLater(Exception):
    """The hub is busy; the message says how, `pause` is the number of seconds that it asks to wait."""

    def __init__(self, status: int, retry_after: str | None) -> None:
        super().__init__(f"HTTP {status}")
        # RFC 9110, 10.2.3; its other form, a date, is ignored
        self.pause = min(float(retry_after), LONGEST_PAUSE) if retry_after and retry_after.isdecimal() else 0.0


def _wanted(body: Iterator[bytes], status: int, at: int, stop: int) -> Iterator[bytes]:
    """The wanted part of the response to a Range request; a hub that ignores the Range sends all from byte 0."""
    skip = at if status == 200 else 0
    left = stop - at
    for chunk in body:  # in pieces as received: a fixed size would lose the bytes before a break
        data = chunk
        if skip:
            dropped = min(skip, len(data))
            data, skip = data[dropped:], skip - dropped
        data = data[:left]
        left -= len(data)
        if data:
            yield data
        if not left:
            return


@contextlib.contextmanager
def _request(file: RemoteFile, at: int, stop: int) -> Iterator[tuple[Any, Iterator[bytes]]]:
    """The response for these bytes, and its body."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = build_hf_headers(token=file.token) | {"Range": f"bytes={at}-{stop - 1}", "Accept-Encoding": "identity"}
    silence = constants.HF_HUB_DOWNLOAD_TIMEOUT  # seconds; the session has no timeout of its own
    opened = streamed(get_session(), file.url, headers=headers, timeout=silence, follow_redirects=True)
    with opened as (response, content):
        if response.status_code in _RETRIED_STATUS:
            raise _RetryLater(response.status_code, response.headers.get("retry-after"))
        if response.status_code in (401, 403) and response.history:  # an expired signed URL
            raise _RetryLater(response.status_code, None)
        if response.status_code >= 400:
            response.read()
            hf_raise_for_status(response)
        yield response, content


def transport_errors() -> tuple[type[Exception], ...]:
    """The connection errors of the HTTP library of this huggingface_hub version (httpx or httpx2)."""
    from huggingface_hub.utils import get_session

    return (client_library(get_session()).TransportError,)


def _pause(failures: int) -> float:
    """Seconds before the next attempt: 0.5, 1, 2, … up to 30, each with up to half as much again at random."""
    return float(min(0.5 * 2 ** (failures - 1), 30.0) * random.uniform(1.0, 1.5))
