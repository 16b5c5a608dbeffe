"""Byte ranges of a file on a hub, files that pass by whole, and files that resume where the last process stopped.

huggingface_hub starts a download over in each new process and leaves an orphan behind, and over HTTP it checks
the size alone (https://github.com/huggingface/huggingface_hub/pull/4306). With shards of 4 GB and machines that
are taken away, this fetch keeps one file, asks for the rest of it, and checks the hub's own sha256 on the way.
Sessions, headers, tokens, proxies and error types are huggingface_hub's. Knows no shards.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.checkpoints import raw_body
from rabbitllm.errors import HubError
from rabbitllm.storage import durable

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
ATTEMPTS = 8
"""Tries in a row that bring no new byte before giving up."""
LONGEST_PAUSE = 120.0
"""Seconds; what a hub's Retry-After is cut to."""
_RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at a pinned commit of a hub.

    Attributes:
        url: its resolve URL; asked again at each try, so that an expired redirect is redone.
        size: bytes.
        sha256: the hub's own digest (hex) of a large file; None for a small one, which has none.
        git_sha1: the id (hex) of a small file as git names it; None if the hub did not say.
        token: as huggingface_hub takes it: a string, None for the saved one, False for none.
    """

    url: str
    size: int
    sha256: str | None
    token: str | bool | None = None
    git_sha1: str | None = None

    def new_digest(self) -> Any:
        """A hash to be fed the file's bytes in order, of the kind by which the hub names this file."""
        if self.sha256 is None and self.git_sha1 is not None:  # https://git-scm.com/book, "Git Objects"
            return hashlib.sha1(f"blob {self.size}\0".encode())
        return hashlib.sha256()

    def check(self, digest: Any) -> None:
        """Compare the digest of what arrived with the hub's own.

        Raises:
            HubError: they differ. Nothing of the bytes may be used.
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
        HubError: the hub did not answer in `ATTEMPTS` tries, or refused.
    """
    stop = min(start + length, file.size)
    if stop <= start:
        return b""
    return b"".join(_resuming(file, start, stop))


def fetch(file: RemoteFile, part: Path, on_have: Callable[[int], None] = lambda have: None) -> None:
    """Bring `part` to the whole content of a remote file, keeping what an earlier try left in it.

    `part` is ours alone and never the only copy, so it needs no fsync: what is trusted of it is what was hashed
    in this process.

    Args:
        file: what to bring.
        part: where to.
        on_have: told, before each run of bytes is written and at the end, how many of the first are there; fewer than
            before if an earlier run's were damaged and all comes again. May raise to stop.

    Raises:
        HubError: the bytes are not those the hub's digest names (`part` is removed), or the hub refused.
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
    """The whole content of a remote file, in order, without a copy of it on the disk.

    The caller must read to the end before trusting any of the bytes: the digest is compared after the last one.

    Raises:
        HubError: the bytes are not those the hub's digest names, or the hub refused.
    """
    digest = file.new_digest()
    for chunk in _resuming(file, 0, file.size):
        digest.update(chunk)
        yield chunk
    file.check(digest)


def _rehash(part: Path, size: int, digest: Any) -> int:
    """Feed what is there of `part` to `digest`; return its length, 0 if it is unusable."""
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
    """The bytes from `start` to `stop`, asking for the rest again whenever the connection breaks."""
    failures, at = 0, start
    while at < stop:
        before, wanted_pause = at, 0.0
        try:
            with _request(file, at, stop) as (client, response):
                for chunk in _wanted(raw_body.body(client, response), response.status_code, at, stop):
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
    """The hub is busy; the message says how, `pause` for how many seconds it asks to be left alone."""

    def __init__(self, status: int, retry_after: str | None) -> None:
        super().__init__(f"HTTP {status}")
        # RFC 9110, 10.2.3; a date, its other form, is left to our own pauses
        self.pause = min(float(retry_after), LONGEST_PAUSE) if retry_after and retry_after.isdecimal() else 0.0


def _wanted(body: Iterator[bytes], status: int, at: int, stop: int) -> Iterator[bytes]:
    """The wanted part of what answers a Range request; a hub that ignores the Range sends all from byte 0."""
    skip = at if status == 200 else 0
    left = stop - at
    for chunk in body:  # as they come: pieces of a given size would lose what a break cuts short
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


def _request(file: RemoteFile, at: int, stop: int) -> AbstractContextManager[tuple[Any, Any]]:
    """The client that asks for these bytes, and its response, whose body is still to come."""
    from contextlib import contextmanager

    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    silence = constants.HF_HUB_DOWNLOAD_TIMEOUT  # seconds; the session by itself would wait for ever
    headers = build_hf_headers(token=file.token) | {"Range": f"bytes={at}-{stop - 1}", "Accept-Encoding": "identity"}

    @contextmanager
    def opened() -> Iterator[tuple[Any, Any]]:
        client = get_session()
        with client.stream("GET", file.url, headers=headers, timeout=silence, follow_redirects=True) as response:
            if response.status_code in _RETRIED_STATUS:
                raise _RetryLater(response.status_code, response.headers.get("retry-after"))
            if response.status_code in (401, 403) and response.history:  # a signed address that has run out
                raise _RetryLater(response.status_code, None)
            if response.status_code >= 400:
                response.read()
                hf_raise_for_status(response)
            yield client, response

    return opened()


def transport_errors() -> tuple[type[Exception], ...]:
    """The connection errors of whichever HTTP library this huggingface_hub uses (httpx or httpx2)."""
    from huggingface_hub.utils import get_session

    return (raw_body.client_library(get_session()).TransportError,)


def _pause(failures: int) -> float:
    """Seconds to wait before the next try: 0.5, 1, 2, … up to 30, each with up to half as much again at random."""
    return float(min(0.5 * 2 ** (failures - 1), 30.0) * random.uniform(1.0, 1.5))
