"""Byte ranges of files on a hub, files as a stream, and downloads that resume where the last process stopped.

huggingface_hub restarts a download in each new process and leaves an orphan behind, and over HTTP it checks only
the size (https://github.com/huggingface/huggingface_hub/pull/4306). With shards of 4 GB and machines that may be
preempted, this module keeps one file, requests the rest of it, and checks the hub's own sha256 on the way.
Sessions, headers, tokens, proxies and error types are huggingface_hub's. Independent of shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import queue
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rabbitllm.base.forks import DaemonThread, fulfil
from rabbitllm.errors import HubError
from rabbitllm.storage import durable
from rabbitllm.storage.files import file_opener

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
            fulfil(future, call, item)
            if future.exception() is not None:
                for _, unstarted in tasks:
                    unstarted.cancel()

    futures = [future for _, future in tasks]
    try:
        for index in range(min(threads, len(tasks))):
            DaemonThread(work, f"side-by-side-{index}").start()
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            if not future.cancelled():
                future.result()
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


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

    def is_of(self, content: bytes) -> bool:
        """Whether this is its content, as far as the hub tells."""
        digest = self.new_digest()
        digest.update(content)
        return (self.sha256 or self.git_sha1) in (None, digest.hexdigest())

    def check(self, digest: Any) -> None:
        """Compare the digest of the received bytes with the hub's own.

        Raises:
            HubError: they differ. None of the bytes may be used.
        """
        expected = self.sha256 or self.git_sha1
        if expected is not None and digest.hexdigest() != expected:
            raise HubError(
                f"{self.url} arrived with {digest.name} {digest.hexdigest()}; the hub says {expected}.",
                "Make the same call again: the wrong bytes were deleted and not used.",
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


def fetch(file: RemoteFile, part: Path, on_have: Callable[[int], None] = lambda received: None) -> None:
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
    resumed = received = _rehash(part, file.size, digest)
    sink = durable.GrowingFile(part, received)
    try:
        on_have(received)
        for chunk in _resuming(file, received, file.size):
            on_have(received)
            sink.write_at(memoryview(chunk), received)
            digest.update(chunk)
            received += len(chunk)
        on_have(received)
    finally:
        sink.close()
    try:
        file.check(digest)
    except HubError:
        if not resumed:
            durable.remove(part)
            raise
        logger.warning("The earlier download of %s is damaged and will be repeated.", file.url)
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
    nbytes = 0
    with open(part, "rb", opener=file_opener) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            nbytes += len(chunk)
    return nbytes


def _resuming(file: RemoteFile, start: int, stop: int) -> Iterator[bytes]:
    """The bytes from `start` to `stop`, with a new request for the rest whenever the connection breaks."""
    failures, position = 0, start
    while position < stop:
        first, asked_pause = position, 0.0
        try:
            with _request(file, position, stop) as response:
                for chunk in _requested_bytes(response.iter_bytes(), response.status_code, position, stop):
                    position += len(chunk)
                    yield chunk
        except request_errors() as error:
            reason = f"{type(error).__name__}: {error}"
        except _RetryLater as later:
            reason, asked_pause = str(later), later.pause
        else:
            reason = "the connection closed early"
        if position >= stop:
            return
        failures = 1 if position > first else failures + 1
        if failures >= ATTEMPTS:
            raise HubError(
                f"{file.url} could not be read past byte {position:,} of {file.size:,}: {reason}.",
                "Make the same call again later: it resumes.",
            )
        logger.info("%s: %s; retrying from byte %s", file.url, reason, f"{position:,}")
        time.sleep(max(_pause(failures), asked_pause))


class _RetryLater(Exception):
    """The hub is busy; `pause` is the number of seconds that it asks to wait."""

    def __init__(self, status: int, retry_after: str | None) -> None:
        super().__init__(f"HTTP {status}")
        # RFC 9110, 10.2.3; its other form, a date, is ignored
        self.pause = min(float(retry_after), LONGEST_PAUSE) if retry_after and retry_after.isdecimal() else 0.0


def _requested_bytes(body: Iterator[bytes], status: int, start: int, stop: int) -> Iterator[bytes]:
    """The requested part of the response to a Range request; a hub that ignores the Range sends all from byte 0."""
    skip = start if status == 200 else 0
    remaining = stop - start
    for chunk in body:  # in pieces as received: a fixed size would lose the bytes before a break
        data = chunk
        if skip:
            dropped = min(skip, len(data))
            data, skip = data[dropped:], skip - dropped
        data = data[:remaining]
        remaining -= len(data)
        if data:
            yield data
        if not remaining:
            return


@contextlib.contextmanager
def _request(file: RemoteFile, start: int, stop: int) -> Iterator[Any]:
    """The response for these bytes, whose body is not read yet."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = build_hf_headers(token=file.token) | {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    silence = constants.HF_HUB_DOWNLOAD_TIMEOUT  # seconds; the session has no timeout of its own
    with get_session().stream("GET", file.url, headers=headers, timeout=silence, follow_redirects=True) as response:
        if response.status_code in _RETRIED_STATUS:
            raise _RetryLater(response.status_code, response.headers.get("retry-after"))
        if response.status_code in (401, 403) and response.history:  # an expired signed URL
            raise _RetryLater(response.status_code, None)
        if response.status_code >= 400:
            response.read()
            hf_raise_for_status(response)
        yield response


def request_errors() -> tuple[type[Exception], ...]:
    """Errors of requests without an answer, by the HTTP library of this huggingface_hub version (httpx or httpx2).

    Of connections, and of what a proxy may answer: redirects in a circle, a body in another encoding than it says.
    """
    from huggingface_hub.utils import get_session

    return (importlib.import_module(type(get_session()).__module__.partition(".")[0]).RequestError,)


def _pause(failures: int) -> float:
    """Seconds before the next attempt: 0.5, 1, 2, … up to 30, each times a random factor from 1 to 1.5."""
    return float(min(0.5 * 2 ** (failures - 1), 30.0) * random.uniform(1.0, 1.5))
