"""Bodies of a hub's answers: whole, broken off, encoded, and by way of redirects and proxies."""

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

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from rabbitllm.checkpoints import fetch
from rabbitllm.checkpoints.fetch import RemoteFile
from tests.support.scripted_server import Answer, ScriptedServer, reset

CONTENT = random.Random(0).randbytes(3_000_000)
PATIENCE_SECONDS = 600.0


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


def ranged(answer: Callable[[socket.socket, bytes, bytes], object]) -> Answer:
    """An answer from the head and the content of a range request."""

    def answer_range(connection: socket.socket, head: str) -> None:
        begin, end = head.lower().partition("range: bytes=")[2].split("\r\n")[0].split("-")
        payload = CONTENT[int(begin) : int(end) + 1]
        place = f"bytes {begin}-{end}/{len(CONTENT)}"
        answer(connection, head_of(len(payload), "206 Partial Content", Content_Range=place), payload)

    return answer_range


def remote(server: ScriptedServer) -> RemoteFile:
    return RemoteFile(f"{server.url}/file", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), token=False)


def bring(how: str, file: RemoteFile, part: Path) -> bytes:
    if how == "stream":
        return b"".join(fetch.stream(file))
    fetch.fetch(file, part)
    return part.read_bytes()


BOTH = pytest.mark.parametrize("how", ["fetch", "stream"])


# Bodies that are not as they should be


def cut_short(request: int, connection: socket.socket, head: bytes, payload: bytes) -> None:
    connection.sendall(head + payload[: max(len(payload) // 2, 1000)])
    connection.close()


def reset_once(request: int, connection: socket.socket, head: bytes, payload: bytes) -> None:
    connection.sendall(head + (payload if request else payload[: len(payload) // 2]))
    if not request:
        reset(connection)  # which overtakes what has not been read, perhaps the head too


@BOTH
@pytest.mark.parametrize("breaks", [cut_short, reset_once])
def test_truncated_body_is_resumed(
    tls: ssl.SSLContext | None, how: str, breaks: Callable[..., None], tmp_path: Path
) -> None:
    numbers = itertools.count()
    with ScriptedServer(ranged(lambda *answer: breaks(next(numbers), *answer)), tls) as server:
        assert bring(how, remote(server), tmp_path / "part") == CONTENT
        assert 2 <= len(server.asked) <= 20


@BOTH
def test_body_longer_than_announced(tls: ssl.SSLContext | None, how: str, tmp_path: Path) -> None:
    def answer(connection: socket.socket, head: bytes, payload: bytes) -> None:
        connection.sendall(head + payload + b"and more" * 1000)

    with ScriptedServer(ranged(answer), tls) as server:
        assert bring(how, remote(server), tmp_path / "part") == CONTENT
        assert bring(how, remote(server), tmp_path / "again") == CONTENT


@BOTH
def test_whole_file_in_answer_to_a_range(tls: ssl.SSLContext | None, how: str, tmp_path: Path) -> None:
    def answer(connection: socket.socket, head: str) -> None:
        sent = CONTENT if "bytes=0-" not in head else CONTENT[:1_000_000]
        connection.sendall(head_of(len(CONTENT)) + sent)
        connection.close()

    with ScriptedServer(answer, tls) as server:
        assert bring(how, remote(server), tmp_path / "part") == CONTENT
        assert len(server.asked) == 2


@BOTH
def test_silent_server_is_retried(
    tls: ssl.SSLContext | None, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    numbers, over = itertools.count(), threading.Event()

    def answer(connection: socket.socket, head: bytes, payload: bytes) -> None:
        if next(numbers):
            connection.sendall(head + payload)
        else:
            connection.sendall(head + payload[: len(payload) // 2])
            over.wait(PATIENCE_SECONDS)

    with ScriptedServer(ranged(answer), tls) as server:
        assert bring(how, remote(server), tmp_path / "part") == CONTENT
        over.set()
        assert f"bytes={len(CONTENT) // 2}-" in server.asked[1].head


# Ways to the server


def test_redirect_to_another_host(tls: ssl.SSLContext | None, tmp_path: Path) -> None:
    def redirect(connection: socket.socket, head: str) -> None:
        address = f"{target.url.replace('127.0.0.1', 'localhost')}/there"
        connection.sendall(head_of(0, "302 Found", Location=address))

    answer = ranged(lambda connection, head, payload: connection.sendall(head + payload))
    with ScriptedServer(answer, tls) as target, ScriptedServer(redirect, tls) as server:
        assert bring("fetch", remote(server), tmp_path / "part") == CONTENT
        assert (len(server.asked), len(target.asked)) == (1, 1)
        assert "host: localhost" in target.asked[0].head.lower()


def test_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP a proxy is asked like a server, but for the whole address."""
    with ScriptedServer(ranged(lambda connection, head, payload: connection.sendall(head + payload))) as server:
        monkeypatch.setenv("HTTP_PROXY", server.url)
        monkeypatch.setenv("NO_PROXY", "")
        close_session()
        file = RemoteFile("http://hub.invalid/file", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), token=False)
        assert b"".join(fetch.stream(file)) == CONTENT
        assert server.asked[0].head.startswith("GET http://hub.invalid/file ")


def test_tunnel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTPS a proxy opens a tunnel, and TLS begins within it."""
    context = trusted_certificate(tmp_path, monkeypatch)
    serve = ranged(lambda connection, head, payload: connection.sendall(head + payload))
    through: list[str] = []

    def answer(connection: socket.socket, head: str) -> None:
        through.append(head.split("\r\n")[0])
        connection.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
        with context.wrap_socket(connection, server_side=True) as inner:
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                request += inner.recv(1000)
            serve(inner, request.decode())

    with ScriptedServer(answer) as server:
        monkeypatch.setenv("HTTPS_PROXY", server.url)
        monkeypatch.setenv("NO_PROXY", "")
        close_session()
        file = RemoteFile("https://localhost/file", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), token=False)
        assert b"".join(fetch.stream(file)) == CONTENT
    own = [line for line in through if "huggingface.co" not in line]  # which its library asks once in a process
    assert own == ["CONNECT localhost:443 HTTP/1.1"]


# Bodies of other forms


def chunked(content: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (content, b""))


OTHER_FORMS: Mapping[str, bytes] = {
    "gzip": head_of(len(packed := gzip.compress(CONTENT, 1)), Content_Encoding="gzip") + packed,
    "chunked": head_of(None, Transfer_Encoding="chunked") + chunked(CONTENT),
    "no length": head_of(None, Connection="close") + CONTENT,
    "an older HTTP": head_of(len(CONTENT), version="1.0") + CONTENT,
}


@pytest.mark.parametrize("sent", OTHER_FORMS)
def test_body_of_another_form(tls: ssl.SSLContext | None, tmp_path: Path, sent: str) -> None:
    def answer(connection: socket.socket, head: str) -> None:
        connection.sendall(OTHER_FORMS[sent])
        if sent in ("no length", "an older HTTP"):
            connection.close()

    with ScriptedServer(answer, tls) as server:
        assert bring("stream", remote(server), tmp_path / "part") == CONTENT


def test_abandoned_stream_closes_the_connection(tls: ssl.SSLContext | None) -> None:
    with ScriptedServer(ranged(lambda connection, head, payload: connection.sendall(head + payload)), tls) as server:
        body = fetch.stream(remote(server))
        assert CONTENT.startswith(next(body))
        body.close()  # type: ignore[attr-defined]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while server.closed != [0]:
            assert time.monotonic() < deadline
            time.sleep(0.005)
