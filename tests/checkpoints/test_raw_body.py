"""Bodies that are read past the HTTP client's parser: the same bytes and the same errors, whatever a server sends."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import random
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session, get_session

from rabbitllm.checkpoints import fetch
from rabbitllm.checkpoints.fetch import RemoteFile
from tests.support.scripted_server import Answer, ScriptedServer, reset

LIBRARY: Any = fetch.client_library(get_session())
"""httpx or httpx2, whichever this huggingface_hub uses."""
CONTENT = random.Random(0).randbytes(3_000_000)
PATIENCE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def own_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No proxies from the environment, and a session that no other test has used."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(fetch, "_pause", lambda failures: 0.0)
    close_session()
    yield
    close_session()


@pytest.fixture
def past_the_parser(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of each body were left to be read past the parser."""
    lefts: list[int] = []
    rest = fetch._rest

    def noted(response: Any, core: Any, library: Any, left: int) -> Iterator[bytes]:
        lefts.append(left)
        return rest(response, core, library, left)

    monkeypatch.setattr(fetch, "_rest", noted)
    return lefts


@pytest.fixture(params=["http", "https"])
def tls(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext | None:
    """What a server needs to speak HTTPS, with a certificate that clients made from now on trust; None for HTTP."""
    return trusted_certificate(tmp_path, monkeypatch) if request.param == "https" else None


def trusted_certificate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    if shutil.which("openssl") is None:
        pytest.skip("a certificate can only be made with the openssl command")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def head_of(length: int | None, status: str = "200 OK", version: str = "1.1", **headers: str) -> bytes:
    lines = [f"HTTP/{version} {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    lines += [] if length is None else [f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


def whole(connection: socket.socket, head: str) -> None:
    connection.sendall(head_of(len(CONTENT)) + CONTENT)


def read(client: Any, url: str) -> bytes:
    with fetch.streamed(client, url) as (_, content):
        return b"".join(content)


def ranged(answer: Callable[[socket.socket, bytes, bytes], object]) -> Answer:
    """An answer from the head and the content of a range request."""

    def answer_range(connection: socket.socket, head: str) -> None:
        begin, end = head.lower().partition("range: bytes=")[2].split("\r\n")[0].split("-")
        wanted = CONTENT[int(begin) : int(end) + 1]
        place = f"bytes {begin}-{end}/{len(CONTENT)}"
        answer(connection, head_of(len(wanted), "206 Partial Content", Content_Range=place), wanted)

    return answer_range


def remote(server: ScriptedServer) -> RemoteFile:
    return RemoteFile(f"{server.url}/file", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), token=False)


def bring(how: str, file: RemoteFile, part: Path) -> bytes:
    if how == "stream":
        return b"".join(fetch.stream(file))
    fetch.fetch(file, part)
    return part.read_bytes()


BOTH = pytest.mark.parametrize("how", ["fetch", "stream"])


# Bodies that are as they should be


@pytest.mark.parametrize("together", [0, 1, 1000, 64 << 10, len(CONTENT) - 1])
def test_what_came_with_the_headers_comes_first(
    tls: ssl.SSLContext | None, past_the_parser: list[int], together: int
) -> None:
    def answer(connection: socket.socket, head: str) -> None:
        connection.sendall(head_of(len(CONTENT)) + CONTENT[:together])
        time.sleep(0.05)  # so that the rest comes by itself
        connection.sendall(CONTENT[together:])

    with ScriptedServer(answer, tls) as server:
        assert read(get_session(), server.url) == CONTENT
    assert len(past_the_parser) == 1
    assert 0 < past_the_parser[0] < len(CONTENT)


def test_headers_that_come_in_small_pieces(past_the_parser: list[int]) -> None:
    def answer(connection: socket.socket, head: str) -> None:
        sent = head_of(len(CONTENT)) + CONTENT[:5]
        for at in range(0, len(sent), 10):
            connection.sendall(sent[at : at + 10])
            time.sleep(0.002)
        connection.sendall(CONTENT[5:])

    with ScriptedServer(answer) as server:
        assert read(get_session(), server.url) == CONTENT
    assert len(past_the_parser) == 1


@pytest.mark.parametrize("length", [0, 1, 100])
def test_connection_of_a_body_that_came_with_its_headers_is_used_again(length: int) -> None:
    with ScriptedServer(lambda connection, head: connection.sendall(head_of(length) + CONTENT[:length])) as server:
        client = get_session()
        assert [read(client, server.url) for _ in range(3)] == [CONTENT[:length]] * 3
        assert [asked.connection for asked in server.asked] == [0, 0, 0]


def test_pieces_are_the_reader_s_to_keep(tls: ssl.SSLContext | None) -> None:
    with ScriptedServer(whole, tls) as server:
        client = get_session()
        with fetch.streamed(client, server.url) as (_, content):
            pieces = list(content)
    assert b"".join(pieces) == CONTENT
    assert {type(piece) for piece in pieces} == {bytes}
    assert max(map(len, pieces)) <= fetch.MAX_BYTES


def test_connection_is_not_used_again_and_the_client_goes_on(
    tls: ssl.SSLContext | None, past_the_parser: list[int]
) -> None:
    with ScriptedServer(whole, tls) as server:
        client = get_session()
        for _ in range(3):
            assert read(client, server.url) == CONTENT
        assert client.get(server.url).content == client.get(server.url).content == CONTENT
        assert [asked.connection for asked in server.asked] == [0, 1, 2, 3, 3]
        until(lambda: sorted(server.closed) == [0, 1, 2])
    assert len(past_the_parser) == 3


def test_reader_who_breaks_off_closes_the_connection(tls: ssl.SSLContext | None) -> None:
    with ScriptedServer(whole, tls) as server:
        for chunk in fetch.stream(remote(server)):
            assert CONTENT.startswith(chunk)
            break
        until(lambda: server.closed == [0])
        assert get_session().get(server.url).content == CONTENT


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Bodies that are not


def cut_short(number: int, connection: socket.socket, head: bytes, wanted: bytes) -> None:
    connection.sendall(head + wanted[: max(len(wanted) // 2, 1000)])
    connection.close()


def reset_once(number: int, connection: socket.socket, head: bytes, wanted: bytes) -> None:
    connection.sendall(head + (wanted if number else wanted[: len(wanted) // 2]))
    if not number:
        reset(connection)  # which overtakes what has not been read, perhaps the head too


@BOTH
@pytest.mark.parametrize("breaks", [cut_short, reset_once])
def test_body_that_breaks_off_is_asked_for_from_there(
    tls: ssl.SSLContext | None, how: str, breaks: Callable[..., None], tmp_path: Path, past_the_parser: list[int]
) -> None:
    numbers = itertools.count()
    with ScriptedServer(ranged(lambda *answer: breaks(next(numbers), *answer)), tls) as server:
        assert bring(how, remote(server), tmp_path / "part") == CONTENT
        assert 2 <= len(server.asked) <= 20
    assert past_the_parser


@BOTH
def test_body_that_is_longer_than_was_said(
    tls: ssl.SSLContext | None, how: str, tmp_path: Path, past_the_parser: list[int]
) -> None:
    def answer(connection: socket.socket, head: bytes, wanted: bytes) -> None:
        connection.sendall(head + wanted + b"and more" * 1000)

    with ScriptedServer(ranged(answer), tls) as server:
        assert bring(how, remote(server), tmp_path / "part") == CONTENT
        assert bring(how, remote(server), tmp_path / "again") == CONTENT
        assert [asked.connection for asked in server.asked] == [0, 1]
    assert len(past_the_parser) == 2


@BOTH
def test_whole_file_in_answer_to_a_range(
    tls: ssl.SSLContext | None, how: str, tmp_path: Path, past_the_parser: list[int]
) -> None:
    def answer(connection: socket.socket, head: str) -> None:
        sent = CONTENT if "bytes=0-" not in head else CONTENT[:1_000_000]
        connection.sendall(head_of(len(CONTENT)) + sent)
        connection.close()

    with ScriptedServer(answer, tls) as server:
        assert bring(how, remote(server), tmp_path / "part") == CONTENT
        assert len(server.asked) == 2
    assert len(past_the_parser) == 2


def test_silence_is_no_longer_waited_out_than_the_client_would(tls: ssl.SSLContext | None) -> None:
    silent = threading.Event()

    def answer(connection: socket.socket, head: str) -> None:
        connection.sendall(head_of(len(CONTENT)) + CONTENT[:500_000])
        silent.wait(PATIENCE_SECONDS)

    got = bytearray()

    def take(client: Any, url: str) -> None:
        with fetch.streamed(client, url) as (_, content):
            for piece in content:
                got.extend(piece)

    with ScriptedServer(answer, tls) as server, LIBRARY.Client(timeout=0.3) as client:
        with pytest.raises(LIBRARY.ReadTimeout):
            take(client, server.url)
        silent.set()
    assert got == CONTENT[:500_000]


@BOTH
def test_server_that_falls_silent_is_asked_again(
    tls: ssl.SSLContext | None, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    numbers, over = itertools.count(), threading.Event()

    def answer(connection: socket.socket, head: bytes, wanted: bytes) -> None:
        if next(numbers):
            connection.sendall(head + wanted)
        else:
            connection.sendall(head + wanted[: len(wanted) // 2])
            over.wait(PATIENCE_SECONDS)

    with ScriptedServer(ranged(answer), tls) as server:
        assert bring(how, remote(server), tmp_path / "part") == CONTENT
        over.set()
        assert f"bytes={len(CONTENT) // 2}-" in server.asked[1].head


def test_trickle_is_no_silence(past_the_parser: list[int]) -> None:
    def answer(connection: socket.socket, head: str) -> None:
        connection.sendall(head_of(24))
        for at in range(24):
            time.sleep(0.1)
            connection.sendall(CONTENT[at : at + 1])

    with ScriptedServer(answer) as server, LIBRARY.Client(timeout=2) as client:
        assert read(client, server.url) == CONTENT[:24]
    assert past_the_parser == [23]


def test_broken_connection_is_the_client_s_own_error(past_the_parser: list[int]) -> None:
    def answer(connection: socket.socket, head: str) -> None:
        connection.sendall(head_of(len(CONTENT)) + CONTENT[:1000])
        read_so_far.wait(PATIENCE_SECONDS)
        reset(connection)

    def take(client: Any, url: str) -> None:
        with fetch.streamed(client, url) as (_, content):
            for piece in content:
                got.extend(piece)
                if len(got) == 1000:
                    read_so_far.set()

    read_so_far, got = threading.Event(), bytearray()
    with ScriptedServer(answer) as server, pytest.raises(LIBRARY.ReadError):
        take(get_session(), server.url)
    assert got == CONTENT[:1000]
    assert len(past_the_parser) == 1


# Ways to the server


def test_redirect_to_another_host(tls: ssl.SSLContext | None, past_the_parser: list[int], tmp_path: Path) -> None:
    def redirect(connection: socket.socket, head: str) -> None:
        address = f"{there.url.replace('127.0.0.1', 'localhost')}/there"
        connection.sendall(head_of(0, "302 Found", Location=address))

    answer = ranged(lambda connection, head, wanted: connection.sendall(head + wanted))
    with ScriptedServer(answer, tls) as there, ScriptedServer(redirect, tls) as server:
        assert bring("fetch", remote(server), tmp_path / "part") == CONTENT
        assert (len(server.asked), len(there.asked)) == (1, 1)
        assert "host: localhost" in there.asked[0].head.lower()
    assert len(past_the_parser) == 1


def test_proxy(past_the_parser: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP a proxy is asked like a server, but for the whole address."""
    with ScriptedServer(ranged(lambda connection, head, wanted: connection.sendall(head + wanted))) as server:
        monkeypatch.setenv("HTTP_PROXY", server.url)
        monkeypatch.setenv("NO_PROXY", "")
        close_session()
        file = RemoteFile("http://hub.invalid/file", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), token=False)
        assert b"".join(fetch.stream(file)) == CONTENT
        assert server.asked[0].head.startswith("GET http://hub.invalid/file ")
    assert len(past_the_parser) == 1


def test_tunnel(past_the_parser: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTPS a proxy opens a tunnel, and TLS begins within it."""
    context = trusted_certificate(tmp_path, monkeypatch)
    serve = ranged(lambda connection, head, wanted: connection.sendall(head + wanted))
    through: list[str] = []

    def answer(connection: socket.socket, head: str) -> None:
        through.append(head.split("\r\n")[0])
        connection.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
        with context.wrap_socket(connection, server_side=True) as inner:
            asked = b""
            while not asked.endswith(b"\r\n\r\n"):
                asked += inner.recv(1000)
            serve(inner, asked.decode())

    with ScriptedServer(answer) as server:
        monkeypatch.setenv("HTTPS_PROXY", server.url)
        monkeypatch.setenv("NO_PROXY", "")
        close_session()
        file = RemoteFile("https://localhost/file", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), token=False)
        assert b"".join(fetch.stream(file)) == CONTENT
    assert through == ["CONNECT localhost:443 HTTP/1.1"]
    assert len(past_the_parser) == 1


# Bodies that are left to the client


def chunked(content: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (content, b""))


LEFT_TO_THE_CLIENT: Mapping[str, bytes] = {
    "gzip": head_of(len(packed := gzip.compress(CONTENT, 1)), Content_Encoding="gzip") + packed,
    "chunked": head_of(None, Transfer_Encoding="chunked") + chunked(CONTENT),
    "no length": head_of(None, Connection="close") + CONTENT,
    "an older HTTP": head_of(len(CONTENT), version="1.0") + CONTENT,
}


@pytest.mark.parametrize("sent", LEFT_TO_THE_CLIENT)
def test_body_that_is_left_to_the_client(tls: ssl.SSLContext | None, past_the_parser: list[int], sent: str) -> None:
    def answer(connection: socket.socket, head: str) -> None:
        connection.sendall(LEFT_TO_THE_CLIENT[sent])
        if sent in ("no length", "an older HTTP"):
            connection.close()

    with ScriptedServer(answer, tls) as server:
        assert read(get_session(), server.url) == CONTENT
    assert past_the_parser == []


class OwnTransport(LIBRARY.HTTPTransport):  # type: ignore[misc]
    """One that reads nothing ahead."""


class OwnClient(LIBRARY.Client):  # type: ignore[misc]
    """One that might."""


class ReadsAhead(LIBRARY.BaseTransport):  # type: ignore[misc]
    """Hands out a response of which it has read so many pieces; None for all."""

    def __init__(self, pieces: int | None) -> None:
        self._pieces = pieces
        self._inner = LIBRARY.HTTPTransport()

    def handle_request(self, request: Any) -> Any:
        found = self._inner.handle_request(request)
        body = iter(found.stream)
        read = list(itertools.islice(body, self._pieces))

        class Stream(LIBRARY.SyncByteStream):  # type: ignore[misc]
            def __iter__(self) -> Iterator[bytes]:
                yield from read
                yield from body

        return LIBRARY.Response(found.status_code, headers=found.headers, stream=Stream(), extensions=found.extensions)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LIBRARY.Client(transport=ReadsAhead(None)),
        lambda: LIBRARY.Client(transport=ReadsAhead(1)),
        lambda: LIBRARY.Client(mounts={"http://": ReadsAhead(2)}),
        lambda: OwnClient(),
    ],
)
def test_client_or_transport_that_has_read_of_the_body(make: Callable[[], Any], past_the_parser: list[int]) -> None:
    with ScriptedServer(whole) as server, make() as client:
        assert read(client, server.url) == CONTENT
    assert past_the_parser == []


def test_transport_of_another_class_that_reads_nothing_ahead(past_the_parser: list[int]) -> None:
    with ScriptedServer(whole) as server, LIBRARY.Client(transport=OwnTransport()) as client:
        assert read(client, server.url) == CONTENT
    assert len(past_the_parser) == 1


def test_client_that_asks_no_network(past_the_parser: list[int]) -> None:
    answer = LIBRARY.MockTransport(lambda request: LIBRARY.Response(200, content=CONTENT))
    with LIBRARY.Client(transport=answer) as client:
        assert read(client, "http://localhost/") == CONTENT
    assert past_the_parser == []


def test_parser_that_keeps_something_back_is_found_out(
    monkeypatch: pytest.MonkeyPatch, past_the_parser: list[int]
) -> None:
    import h11._receivebuffer

    extract = h11._receivebuffer.ReceiveBuffer.maybe_extract_at_most
    monkeypatch.setattr(
        h11._receivebuffer.ReceiveBuffer, "maybe_extract_at_most", lambda buffer, most: extract(buffer, min(most, 100))
    )
    fetch.keeps_nothing_back.cache_clear()
    try:
        with ScriptedServer(whole) as server:
            assert read(get_session(), server.url) == CONTENT
    finally:
        fetch.keeps_nothing_back.cache_clear()
    assert past_the_parser == []
