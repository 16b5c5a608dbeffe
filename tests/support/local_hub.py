"""A local stand-in for the Hugging Face hub, made of the standard library.

    with LocalHub(root) as hub:
        hf_hub_download("org/name", "config.json", endpoint=hub.url)

Every folder ``root/<org>/<name>`` is a model repository. The server answers what ``huggingface_hub`` asks for while it
looks at and downloads a model: model info, tree, paths info, and files by HEAD, GET and single-range GET. What a real
hub or network does wrong is switched on through ``hub.faults``; what was asked and sent is in ``hub.requests``.

It does not know uploads, data sets, spaces, Xet storage, or what is inside the files it serves.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".model")
"""Names that the stand-in treats as large files: sha256 as ETag, and a redirect to the second origin."""

_CHUNK_BYTES = 1 << 20
_HOST = "127.0.0.1"
# huggingface_hub 1.x tells origins apart by host name alone, so the second origin needs another name, not just a port.
_CDN_HOST = "localhost"


@dataclass
class Faults:
    """What goes wrong, changeable at any time; a count of -1 means for ever.

    ``only`` limits the faults that concern files to those whose name ends with it.
    """

    only: str = ""
    cut_after: int | None = None
    """Close the connection after this many bytes of a longer body ..."""
    cut_times: int = 1
    """... for this many bodies."""
    ignore_range: bool = False
    """Answer a Range request with 200 and the whole file."""
    flip_byte: int | None = None
    """Send the byte at this offset of the file with one bit changed ..."""
    flip_times: int = -1
    """... in this many bodies."""
    short_by: int | None = None
    """Leave out this many bytes of a longer body, and send the length of what is left as if it were whole ..."""
    short_tail: int = 0
    """... before the last so many bytes, which are right ..."""
    short_times: int = 1
    """... for this many bodies."""
    status: int = 0
    """Answer this status instead of a file ..."""
    status_times: int = 1
    """... this many times ..."""
    status_methods: tuple[str, ...] = ("GET",)
    """... to these methods ..."""
    retry_after: str | None = None
    """... with this Retry-After header."""
    omit_etag: bool = False
    omit_commit: bool = False
    omit_length: bool = False
    address_uses: int | None = None
    """How often the address that a redirect leads to can be used before it answers 403 ..."""
    address_times: int = -1
    """... for this many addresses."""
    delay_per_mib: float = 0.0
    """Seconds slept for each MiB sent."""
    listing: Callable[[dict[str, object]], bytes] | None = None
    """Answer this, made of the right answer, in place of the list of a repository's files."""
    gated: bool = False
    """Refuse files (not the API) without the hub's token: 401 if none came, 403 if another one came."""
    move_main_after: int | None = None
    """After this many more file GETs, ``main`` of the repository asked for becomes another commit ..."""
    move_main_to: str | None = None
    """... with the contents of this revision, or with unchanged contents if None."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def concern(self, file: str) -> bool:
        return file.endswith(self.only)

    def take_status(self, method: str, file: str) -> int:
        """The status to answer in place of this file, or 0; uses up one of the times."""
        with self._lock:
            due = self.status and self.status_times and method in self.status_methods
            if not due or not self.concern(file):
                return 0
            self.status_times -= self.status_times > 0
            return self.status

    def take_cut(self, file: str, length: int) -> int:
        """How many of ``length`` body bytes to send; uses up one of the times if not all."""
        with self._lock:
            if self.cut_after is None or not self.cut_times or not self.concern(file) or length <= self.cut_after:
                return length
            self.cut_times -= self.cut_times > 0
            return self.cut_after

    def take_gap(self, file: str, start: int, stop: int) -> tuple[int, int]:
        """The part of a body, by offsets in the file, that is left out; uses up one of the times if there is one."""
        with self._lock:
            missing = (self.short_by or 0) + self.short_tail
            if not self.short_by or not self.short_times or not self.concern(file) or stop - start <= missing:
                return stop, stop
            self.short_times -= self.short_times > 0
            return stop - missing, stop - self.short_tail

    def take_address(self, file: str) -> int | None:
        """How often the next address can be used, None for always; uses up one of the times."""
        with self._lock:
            if self.address_uses is None or not self.address_times or not self.concern(file):
                return None
            self.address_times -= self.address_times > 0
            return self.address_uses

    def take_flip(self, file: str, start: int, stop: int) -> int | None:
        """The offset of the byte to damage within this part of the file; uses up one of the times."""
        with self._lock:
            if self.flip_byte is None or not self.flip_times or not self.concern(file):
                return None
            if not start <= self.flip_byte < stop:
                return None
            self.flip_times -= self.flip_times > 0
            return self.flip_byte

    def take_move(self) -> bool:
        """Count one file GET, and say whether ``main`` moves after it."""
        with self._lock:
            if self.move_main_after is None:
                return False
            self.move_main_after -= 1
            if self.move_main_after > 0:
                return False
            self.move_main_after = None
            return True


@dataclass(frozen=True)
class Request:
    """One answered request; for a body still under way, ``bytes_sent`` is what was handed to the socket so far."""

    method: str
    path: str
    range: str | None
    status: int
    bytes_sent: int
    authorized: bool
    """Whether an Authorization header came with it, right or wrong."""
    query: str = ""
    file: str = ""
    """Name inside the repository, when a file was asked for."""


@dataclass(frozen=True)
class GeneratedFile:
    """A file that is computed when it is read. ``sha256`` is worked out on first need, which reads all of it."""

    size: int
    read: Callable[[int, int], bytes | memoryview]
    """``read(offset, length)``; never asked for bytes past the end."""
    sha256: str | None = None

    @classmethod
    def from_bytes(cls, content: bytes) -> GeneratedFile:
        sha256 = hashlib.sha256(content).hexdigest()
        return cls(len(content), lambda offset, length: content[offset : offset + length], sha256)


_Contents = Path | Mapping[str, GeneratedFile]


@dataclass(frozen=True)
class _File:
    name: str
    size: int
    source: Path | GeneratedFile

    @property
    def is_lfs(self) -> bool:
        return self.name.endswith(LFS_SUFFIXES)

    def chunks(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes from ``start`` to ``stop``; each piece is valid until the next one is asked for."""
        if isinstance(self.source, GeneratedFile):
            for offset in range(start, stop, _CHUNK_BYTES):
                yield memoryview(self.source.read(offset, min(_CHUNK_BYTES, stop - offset)))
            return
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(stop - start, 0))))
        with self.source.open("rb", buffering=0) as stream:
            stream.seek(start)
            while start < stop and (count := stream.readinto(buffer[: stop - start])):
                start += count
                yield buffer[:count]


class _Digests:
    """Hashes of files, each computed once for as long as the file on disk is the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], str] = {}
        self._lock = threading.Lock()

    def etag(self, file: _File) -> str:
        return self.sha256(file) if file.is_lfs else self.git_oid(file)

    def git_oid(self, file: _File) -> str:
        """The git blob id: of the file, or of the pointer that git holds in place of a large file."""
        if file.is_lfs:
            pointer = self.pointer(file)
            return hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest()
        return self._digest(file, "sha1", b"blob %d\0" % file.size)

    def pointer(self, file: _File) -> bytes:
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256(file)}\nsize {file.size}\n"
        return text.encode()

    def sha256(self, file: _File) -> str:
        if isinstance(file.source, GeneratedFile) and file.source.sha256:
            return file.source.sha256
        return self._digest(file, "sha256", b"")

    def commit(self, files: Mapping[str, _File], salt: int) -> str:
        digest = hashlib.sha1(b"commit %d\n" % salt)
        for name, file in files.items():
            # A generated file may be too big to be read for the sake of a commit id: only a declared hash counts.
            declared = isinstance(file.source, Path) or file.source.sha256
            digest.update(f"{name} {file.size} {self.etag(file) if declared else 'generated'}\n".encode())
        return digest.hexdigest()

    def _digest(self, file: _File, algorithm: str, prefix: bytes) -> str:
        if isinstance(file.source, GeneratedFile):
            key: tuple[object, ...] = (algorithm, file.source)
        else:
            stat = file.source.stat()
            key = (algorithm, file.source, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        # Held while hashing, so that eight clients asking for one big file do not hash it eight times.
        with self._lock:
            if key not in self._known:
                digest = hashlib.new(algorithm, prefix)
                for chunk in file.chunks(0, file.size):
                    digest.update(chunk)
                self._known[key] = digest.hexdigest()
            return self._known[key]


@dataclass(frozen=True)
class _Revision:
    """What a name or a commit stands for; ``salt`` tells two commits with the same contents apart."""

    contents: _Contents
    salt: int = 0

    def files(self) -> dict[str, _File]:
        if isinstance(self.contents, Path):
            paths = (path for path in sorted(self.contents.rglob("*")) if path.is_file())
            named = ((path.relative_to(self.contents).as_posix(), path) for path in paths)
            return {name: _File(name, path.stat().st_size, path) for name, path in named}
        return {name: _File(name, content.size, content) for name, content in sorted(self.contents.items())}


class _Repositories:
    """Which revisions each repository has. A revision that a name has left stays reachable by its commit."""

    def __init__(self, root: Path) -> None:
        self.digests = _Digests()
        self._root = root
        self._named: dict[str, dict[str, _Revision]] = {}
        self._left: dict[str, list[_Revision]] = {}
        self._lock = threading.Lock()

    def exists(self, repo: str) -> bool:
        return bool(self._names(repo))

    def put(self, repo: str, name: str, revision: _Revision) -> None:
        before = self._names(repo).get(name)
        with self._lock:
            if before is not None:
                self._left.setdefault(repo, []).append(before)
            self._named.setdefault(repo, {})[name] = revision

    def find(self, repo: str, name_or_commit: str) -> tuple[str, dict[str, _File]] | None:
        """The commit and its files, or None if there is no such name or commit."""
        names = self._names(repo)
        if name_or_commit in names:
            return self._resolve(names[name_or_commit])
        with self._lock:
            left = tuple(self._left.get(repo, ()))
        resolved = (self._resolve(revision) for revision in (*names.values(), *left))
        return next((snapshot for snapshot in resolved if snapshot[0] == name_or_commit), None)

    def move_main(self, repo: str, to: str | None) -> None:
        names = self._names(repo)
        main = names["main"]
        self.put(repo, "main", replace(main, salt=main.salt + 1) if to is None else names[to])

    def _names(self, repo: str) -> dict[str, _Revision]:
        with self._lock:
            names = dict(self._named.get(repo, {}))
        folder = self._root / repo
        if "main" not in names and folder.is_dir() and not {".", ".."} & set(repo.split("/")):
            names["main"] = _Revision(folder)
        return names

    def _resolve(self, revision: _Revision) -> tuple[str, dict[str, _File]]:
        files = revision.files()
        return self.digests.commit(files, revision.salt), files


class LocalHub:
    """The running stand-in: a context manager, whose ``url`` is the endpoint to give to the client.

    With ``token`` the repositories are private to its bearer. With ``redirect`` large files are answered by a redirect
    to another origin that takes no token, and small ones by a redirect inside this origin, as the real hub does.
    """

    def __init__(self, root: Path, token: str | None = None, redirect: bool = False, *, page_size: int = 1000) -> None:
        self.token = token
        self.redirect = redirect
        self.page_size = page_size
        self.faults = Faults()
        self.repositories = _Repositories(root)
        self._lock = threading.Lock()
        self._log: dict[int, Request] = {}
        self._next_key = 0
        self._ports: dict[type[_Handler], int] = {}
        self._servers: list[_Server] = []
        self._uses_left: dict[str, int] = {}

    def __enter__(self) -> LocalHub:
        self.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start answering; after a ``stop`` on the same ports as before."""
        for handler in (_HubHandler, _CdnHandler):
            server = _Server((_HOST, self._ports.get(handler, 0)), handler, self)
            self._ports[handler] = server.server_port
            self._servers.append(server)
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Stop answering and cut every open connection."""
        while self._servers:
            self._servers.pop().close()

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self._ports[_HubHandler]}"

    @property
    def cdn_url(self) -> str:
        """The second origin, where ``redirect`` sends large files."""
        return f"http://{_CDN_HOST}:{self._ports[_CdnHandler]}"

    def commit(self, repo: str, revision: str = "main") -> str:
        """The commit that a revision stands for now; it follows from the contents."""
        snapshot = self.repositories.find(repo, revision)
        if snapshot is None:
            raise KeyError(f"no revision {revision} in {repo}")
        return snapshot[0]

    def add_revision(self, repo: str, name: str, folder: Path) -> str:
        """Make ``folder`` the revision ``name`` (``main`` too) and return its commit; older commits stay servable."""
        self.repositories.put(repo, name, _Revision(folder))
        return self.commit(repo, name)

    def add_generated(self, repo: str, files: Mapping[str, GeneratedFile], revision: str = "main") -> str:
        """Serve computed files as a revision and return its commit."""
        self.repositories.put(repo, revision, _Revision(dict(files)))
        return self.commit(repo, revision)

    @property
    def requests(self) -> list[Request]:
        """What was answered so far, in order of arrival."""
        with self._lock:
            return list(self._log.values())

    def forget_requests(self) -> None:
        """Empty the log; bodies under way are forgotten too."""
        with self._lock:
            self._log.clear()

    def body_bytes(self, suffix: str = "") -> int:
        """Bytes of file contents sent, of the files whose name ends with ``suffix``."""
        return sum(request.bytes_sent for request in self._bodies() if request.file.endswith(suffix))

    def downloads(self, name: str) -> int:
        """How many times a body of this file was begun, whole or in part."""
        return sum(request.file == name for request in self._bodies())

    def _bodies(self) -> Iterator[Request]:
        answered = (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT)
        return (r for r in self.requests if r.file and r.method == "GET" and r.status in answered)

    def record(self, request: Request) -> int:
        """Note a request when its answer begins, and return the key under which bytes are added to it."""
        with self._lock:
            self._next_key += 1
            self._log[self._next_key] = request
            return self._next_key

    def record_bytes(self, key: int, count: int) -> None:
        with self._lock:
            if key in self._log:
                self._log[key] = replace(self._log[key], bytes_sent=self._log[key].bytes_sent + count)

    def body_ended(self, key: int) -> None:
        """Called when no more of a body is sent; for subclasses."""

    def sign(self, file: str) -> str:
        """What makes an address of the second origin valid, for as often as the faults say."""
        uses = self.faults.take_address(file)
        if uses is None:
            return "local"
        with self._lock:
            signature = f"local-{len(self._uses_left)}"
            self._uses_left[signature] = uses
            return signature

    def admits(self, signature: str) -> bool:
        """Whether an address is still valid; uses it once."""
        with self._lock:
            left = self._uses_left.get(signature)
            if left:
                self._uses_left[signature] = left - 1
            return left is None or left > 0

    def count_get(self, repo: str) -> None:
        """Move ``main`` if this was the last GET before it is due."""
        if self.faults.take_move():
            self.repositories.move_main(repo, self.faults.move_main_to)


class _Server(ThreadingHTTPServer):
    """A threaded server that can cut its open connections, so that a stopped hub is really gone."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[_Handler], hub: LocalHub) -> None:
        self.hub = hub
        self._connections: set[socket.socket] = set()
        self._connections_lock = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer would look the host's full name up, which takes seconds where there is no name service.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._connections_lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._connections_lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that goes away is what the tests are about; anything else is a mistake here and must be seen.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        with self._connections_lock:
            for connection in self._connections:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue


_REPO = r"(?P<repo>[^/]+(?:/[^/]+)?)"


class _Handler(BaseHTTPRequestHandler):
    """One connection. A route is a pattern of the undecoded path and the name of the method that answers it."""

    server: _Server
    protocol_version = "HTTP/1.1"
    # Headers and body are written apart; with Nagle's algorithm the body would wait for the client's acknowledgement.
    disable_nagle_algorithm = True
    routes: ClassVar[tuple[tuple[str, str], ...]] = ()

    def setup(self) -> None:
        super().setup()
        self.hub = self.server.hub

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the log is ``hub.requests``."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.file = ""
        self.url_path, self.query = unquote(url.path), url.query
        # Read before any answer: an unread body would be taken for the next request of this connection.
        self.form = parse_qs(self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode())
        for pattern, answer in self.routes:
            if match := re.fullmatch(pattern, url.path):
                parameters = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                getattr(self, answer)(**parameters)
                return
        self.refuse(HTTPStatus.NOT_FOUND, "", "no such route")

    do_HEAD = do_GET
    do_POST = do_GET

    def begin(self, status: int, headers: Mapping[str, str], length: int | None) -> int:
        """Send the status line and headers, and note the request."""
        key = self.hub.record(
            Request(
                method=self.command,
                path=self.url_path,
                range=self.headers.get("Range"),
                status=int(status),
                bytes_sent=0,
                authorized="Authorization" in self.headers,
                query=self.query,
                file=self.file,
            )
        )
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        else:
            self.send_header("Connection", "close")
        self.end_headers()
        return key

    def send_json(self, content: object, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> None:
        self.send_text(json.dumps(content).encode(), status, headers)

    def send_text(self, body: bytes, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> None:
        key = self.begin(status, {"Content-Type": "application/json", **(headers or {})}, len(body))
        if self.command != "HEAD":
            self.hub.record_bytes(key, len(body))
            self.wfile.write(body)

    def refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        """Answer an error; the client chooses its exception by ``code``."""
        fields = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **(headers or {})}
        self.send_json({"error": message}, status, fields)

    def send_file(self, file: _File, headers: dict[str, str]) -> None:
        """Answer a HEAD or GET for the contents, in whole or the one range asked for, with the faults that are due."""
        faults = self.hub.faults
        concerned = faults.concern(file.name)
        span = _parse_range(None if faults.ignore_range and concerned else self.headers.get("Range"), file.size)
        if span is None:
            self.begin(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, {"Content-Range": f"bytes */{file.size}"}, 0)
            return
        start, stop, partial = span
        headers |= {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        if partial:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{file.size}"
        status = HTTPStatus.PARTIAL_CONTENT if partial else HTTPStatus.OK
        gap = faults.take_gap(file.name, start, stop) if self.command == "GET" else (stop, stop)
        length = stop - start - (gap[1] - gap[0])
        key = self.begin(status, headers, None if faults.omit_length and concerned else length)
        if self.command != "HEAD":
            delay = faults.delay_per_mib if concerned else 0.0
            for begin, end in ((start, gap[0]), (gap[1], stop)):
                if begin < end and not self._send_body(key, file, begin, end, delay):
                    return

    def _send_body(self, key: int, file: _File, start: int, stop: int, delay_per_mib: float) -> bool:
        """Send this part of the file, and say whether all of it was sent."""
        cut = start + self.hub.faults.take_cut(file.name, stop - start)
        damaged = self.hub.faults.take_flip(file.name, start, cut)
        offset = start
        try:
            for chunk in file.chunks(start, cut):
                if damaged is not None and offset <= damaged < offset + len(chunk):
                    chunk = memoryview(bytearray(chunk))
                    chunk[damaged - offset] ^= 1
                if delay_per_mib:
                    time.sleep(delay_per_mib * len(chunk) / (1 << 20))
                # Noted before it is sent: a client that has received a whole body also sees all of it in the log.
                self.hub.record_bytes(key, len(chunk))
                self.connection.sendall(chunk)
                offset += len(chunk)
        finally:
            self.hub.body_ended(key)
            # A body that ends early can only be told by the end of the connection.
            self.close_connection |= offset < stop
        return offset == stop


class _HubHandler(_Handler):
    routes = (
        (rf"/api/models/{_REPO}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", "answer_tree"),
        (rf"/api/models/{_REPO}/paths-info/(?P<revision>[^/]+)", "answer_paths"),
        (rf"/api/resolve-cache/models/{_REPO}/(?P<commit>[0-9a-f]{{40}})/(?P<name>.+)", "answer_small_file"),
        (rf"/api/models/{_REPO}(?:/revision/(?P<revision>[^/]+))?", "answer_info"),
        (rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", "answer_resolve"),
    )

    def answer_info(self, repo: str, revision: str = "main") -> None:
        snapshot = self._admitted(repo, revision)
        if snapshot is None:
            return
        commit, files = snapshot
        siblings: list[dict[str, object]] = [{"rfilename": name} for name in files]
        if "blobs" in parse_qs(self.query):
            siblings = [self._sibling(file) for file in files.values()]
        listing: dict[str, object] = {
            "id": repo,
            "modelId": repo,
            "sha": commit,
            "private": self.hub.token is not None and not self.hub.faults.gated,
            "gated": "manual" if self.hub.faults.gated else False,
            "disabled": False,
            "tags": [],
            "siblings": siblings,
        }
        if self.hub.faults.listing is not None:
            self.send_text(self.hub.faults.listing(listing))
            return
        self.send_json(listing)

    def answer_tree(self, repo: str, revision: str, folder: str = "") -> None:
        snapshot = self._admitted(repo, revision)
        if snapshot is None:
            return
        commit, files = snapshot
        query = parse_qs(self.query)
        prefix = f"{folder.strip('/')}/" if folder else ""
        below = {name: file for name, file in files.items() if name.startswith(prefix)}
        if not below and prefix:
            self.refuse(HTTPStatus.NOT_FOUND, "EntryNotFound", f"no folder {folder}", {"X-Repo-Commit": commit})
            return
        recursive = query.get("recursive", ["false"])[0].lower() == "true"
        entries = self._tree(below, prefix, recursive)
        start = int(query.get("cursor", ["0"])[0])
        stop = start + self.hub.page_size
        headers = {}
        if stop < len(entries):
            following = f"recursive={str(recursive).lower()}&cursor={stop}"
            headers["Link"] = f'<{self.hub.url}{urlsplit(self.path).path}?{following}>; rel="next"'
        self.send_json(entries[start:stop], headers=headers)

    def answer_paths(self, repo: str, revision: str) -> None:
        snapshot = self._admitted(repo, revision)
        if snapshot is None:
            return
        entries = self._tree(snapshot[1], "", recursive=True)
        wanted = {path.strip("/") for path in self.form.get("paths", [])}
        self.send_json([entry for entry in entries if entry["path"] in wanted])

    def answer_small_file(self, repo: str, commit: str, name: str) -> None:
        self.answer_resolve(repo, commit, name, redirect=False)

    def answer_resolve(self, repo: str, revision: str, name: str, redirect: bool | None = None) -> None:
        self.file = name
        snapshot = self._admitted(repo, revision)
        if snapshot is None:
            return
        commit, files = snapshot
        if name not in files:
            # With the commit, the client also remembers that the file does not exist.
            self.refuse(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
            return
        faults = self.hub.faults
        if status := faults.take_status(self.command, name):
            self.refuse(status, "", "made to fail", {"Retry-After": faults.retry_after} if faults.retry_after else {})
            return
        concerned = faults.concern(name)
        headers = {} if faults.omit_commit and concerned else {"X-Repo-Commit": commit}
        etag = (
            {} if faults.omit_etag and concerned else {"ETag": f'"{self.hub.repositories.digests.etag(files[name])}"'}
        )
        if self.hub.redirect if redirect is None else redirect:
            self._redirect(repo, commit, files[name], headers, etag)
        else:
            if self.command == "GET":
                self.hub.count_get(repo)
            self.send_file(files[name], headers | etag)

    def _redirect(self, repo: str, commit: str, file: _File, headers: dict[str, str], etag: dict[str, str]) -> None:
        if not file.is_lfs:
            headers["Location"] = f"/api/resolve-cache/models/{repo}/{commit}/{quote(file.name)}"
            self.begin(HTTPStatus.TEMPORARY_REDIRECT, headers, 0)
            return
        if self.command == "GET":
            self.hub.count_get(repo)
        sha256 = self.hub.repositories.digests.sha256(file)
        headers |= {f"X-Linked-{name}": value for name, value in etag.items()}
        headers |= {"X-Linked-Size": str(file.size)}
        address = f"{self.hub.cdn_url}/cdn/{repo}/{commit}/{sha256}/{quote(file.name)}"
        headers["Location"] = f"{address}?signature={self.hub.sign(file.name)}"
        self.begin(HTTPStatus.FOUND, headers, 0)

    def _admitted(self, repo: str, revision: str) -> tuple[str, dict[str, _File]] | None:
        """The commit and files of a revision, or None after the refusal has been sent."""
        refusal = self._refusal()
        if refusal is not None:
            self.refuse(*refusal)
        elif not self.hub.repositories.exists(repo):
            # Like the hub, which does not tell strangers whether a private repository exists.
            known = "Authorization" in self.headers
            status = HTTPStatus.NOT_FOUND if known else HTTPStatus.UNAUTHORIZED
            self.refuse(status, "RepoNotFound", "Repository not found")
        elif (snapshot := self.hub.repositories.find(repo, revision)) is None:
            self.refuse(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return snapshot
        return None

    def _refusal(self) -> tuple[int, str, str] | None:
        sent = self.headers.get("Authorization")
        if self.hub.token is not None and sent == f"Bearer {self.hub.token}":
            return None
        if self.hub.faults.gated:
            if not self.file:
                return None
            status = HTTPStatus.UNAUTHORIZED if sent is None else HTTPStatus.FORBIDDEN
            return status, "GatedRepo", "Access to this model is restricted"
        if self.hub.token is None:
            return None
        if sent is None:
            return HTTPStatus.UNAUTHORIZED, "RepoNotFound", "Invalid username or password."
        return HTTPStatus.UNAUTHORIZED, "", "Invalid credentials in Authorization header"

    def _sibling(self, file: _File) -> dict[str, object]:
        digests = self.hub.repositories.digests
        facts: dict[str, object] = {"rfilename": file.name, "size": file.size, "blobId": digests.git_oid(file)}
        if file.is_lfs:
            pointer_size = len(digests.pointer(file))
            facts["lfs"] = {"sha256": digests.sha256(file), "size": file.size, "pointerSize": pointer_size}
        return facts

    def _tree(self, files: Mapping[str, _File], prefix: str, recursive: bool) -> list[dict[str, object]]:
        entries: dict[str, dict[str, object]] = {}
        for name, file in files.items():
            parents = name[len(prefix) :].split("/")[:-1]
            for depth in range(1, len(parents) + 1):
                path = prefix + "/".join(parents[:depth])
                if depth == 1 or recursive:
                    oid = hashlib.sha1(path.encode()).hexdigest()
                    entries.setdefault(path, {"type": "directory", "path": path, "oid": oid, "size": 0})
            if not parents or recursive:
                entries[name] = self._tree_file(file)
        return list(entries.values())

    def _tree_file(self, file: _File) -> dict[str, object]:
        digests = self.hub.repositories.digests
        entry: dict[str, object] = {
            "type": "file",
            "path": file.name,
            "size": file.size,
            "oid": digests.git_oid(file),
        }
        if file.is_lfs:
            pointer_size = len(digests.pointer(file))
            entry["lfs"] = {"oid": digests.sha256(file), "size": file.size, "pointerSize": pointer_size}
        return entry


class _CdnHandler(_Handler):
    """The second origin: contents only, by signed address, for every client that has the address."""

    routes = ((rf"/cdn/{_REPO}/(?P<commit>[0-9a-f]{{40}})/(?P<sha256>[0-9a-f]{{64}})/(?P<name>.+)", "answer_contents"),)

    def answer_contents(self, repo: str, commit: str, sha256: str, name: str) -> None:
        self.file = name
        if not self.hub.admits(parse_qs(self.query).get("signature", [""])[0]):
            self.refuse(HTTPStatus.FORBIDDEN, "", "Request has expired")
            return
        snapshot = self.hub.repositories.find(repo, commit)
        file = snapshot[1].get(name) if snapshot else None
        if file is None or self.hub.repositories.digests.sha256(file) != sha256:
            self.refuse(HTTPStatus.FORBIDDEN, "", "no such contents")
            return
        self.send_file(file, {"ETag": f'"{sha256}"'})


def _parse_range(header: str | None, size: int) -> tuple[int, int, bool] | None:
    """Start, stop and whether it is a part; None if nothing of the range exists. What is not understood is ignored."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if match is None or match.groups() == ("", ""):
        return 0, size, False
    first, last = match.groups()
    if not first:
        start, stop = max(size - int(last), 0), size
    elif last and int(last) < int(first):
        return 0, size, False
    else:
        start, stop = int(first), min(int(last) + 1, size) if last else size
    return (start, stop, True) if start < stop else None
