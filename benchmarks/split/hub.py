"""A Hugging Face hub with one repository, whose weights are made while they are sent; a process of its own.

    python -m benchmarks.split.hub --model qwen2.5-72b --scale 0.05 --work-dir FOLDER

It answers what huggingface_hub and rabbitllm ask for: the model's listing (sizes, SHA-256) and tree, and files by HEAD,
GET and GET of one range, with ETag and X-Repo-Commit. Once the digests are known it says on stdout, in one line of
JSON, where it is; it ends when its stdin does. What it has sent is counted in a file (`Counters`), so that a watching
process need not ask. `HubProcess` starts and ends it. Knows no faults, tokens or second origins.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import re
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import psutil

from benchmarks.lib.generated import PIECE_BYTES, Content, digests
from benchmarks.lib.idle_process import REPOSITORY
from benchmarks.lib.models import MODELS
from benchmarks.lib.published import Checkpoint, Shard, checkpoint

DIGESTS_NAME, _COUNTERS_NAME = "kaggle-72b-digests.json", "kaggle-72b-sent"
_FORM = struct.Struct("<4q")
_RATE_STEP_SECONDS = 0.02
_LEAST_PIECE_BYTES = 64 << 10


@dataclass(frozen=True)
class Sent:
    """Bytes of shards.

    Attributes:
        sent: to a client that fetches a shard to its end.
        again: of those, bytes that had been sent before.
        probed: looked at: ranges that end before their file does, for headers.
        open: no bytes but answers that are under way.
    """

    sent: int = 0
    again: int = 0
    probed: int = 0
    open: int = 0

    @property
    def new(self) -> int:
        """Sent for the first time: how far the whole is."""
        return self.sent - self.again


class Counters:
    """The counters in a file, which one process writes (`new`) and others read. A context manager."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        if new:
            path.write_bytes(bytes(_FORM.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FORM.size)

    def __enter__(self) -> Counters:
        return self

    def __exit__(self, *exception: object) -> None:
        self._map.close()

    def add(self, *, sent: int = 0, again: int = 0, probed: int = 0, open: int = 0) -> None:
        """Add to them; one thread at a time."""
        old = self.read()
        _FORM.pack_into(self._map, 0, old.sent + sent, old.again + again, old.probed + probed, old.open + open)

    def read(self) -> Sent:
        return Sent(*_FORM.unpack_from(self._map, 0))


@dataclass(frozen=True)
class Served:
    """A file of the repository: small, with its content, or a shard."""

    name: str
    size: int
    digest: str
    small: bytes = b""
    shard: Shard | None = None

    @property
    def blob(self) -> str:
        """The git id of the file, or of the pointer that git holds in place of a large one."""
        held = self.small
        if self.shard is not None:
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.digest}\nsize {self.size}\n"
            held = pointer.encode()
        return hashlib.sha1(b"blob %d\0" % len(held) + held).hexdigest()

    @property
    def etag(self) -> str:
        return self.digest if self.shard is not None else self.blob

    def facts(self, name: str, blob: str, digest: str) -> dict[str, Any]:
        """As a listing has them; the two listings of the hub call the same things by other names."""
        lfs = {"lfs": {digest: self.digest, "size": self.size, "pointerSize": 135}} if self.shard is not None else {}
        return {name: self.name, "size": self.size, blob: self.blob, **lfs}


def files_of(made: Checkpoint, shard_digests: Mapping[str, str]) -> dict[str, Served]:
    """Everything in the repository: config, generation config, index, a small tokenizer, and the shards."""
    small: dict[str, Any] = {
        "config.json": made.config,
        "generation_config.json": made.model.generation_config,
        "model.safetensors.index.json": made.index(),
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"},
    }
    encoded = {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in small.items()}
    files = [Served(name, len(data), hashlib.sha256(data).hexdigest(), data) for name, data in encoded.items()]
    files += [Served(shard.name, shard.size, shard_digests[shard.name], shard=shard) for shard in made.shards]
    return {file.name: file for file in sorted(files, key=lambda file: file.name)}


def _tokenizer() -> dict[str, Any]:
    """One word a token, for the first few; what a model needs to be loaded."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(64)}, "unk_token": "w0"},
    }


class GeneratedHub:
    """The server, in this process; `url` is the endpoint to give to the client.

    Args:
        made: what to serve.
        content: the weights.
        shard_digests: SHA-256 of each shard.
        counters: told of what is sent.
        rate: bytes a second and connection, as if over a network; None for as fast as it goes.
    """

    def __init__(
        self,
        made: Checkpoint,
        content: Content,
        shard_digests: Mapping[str, str],
        counters: Counters,
        rate: float | None = None,
    ) -> None:
        self.repository = made.model.repository
        self.files = files_of(made, shard_digests)
        listing = "".join(f"{file.name} {file.size} {file.digest}\n" for file in self.files.values())
        self.commit = hashlib.sha1(listing.encode()).hexdigest()
        self.counters = counters
        self._content = content
        self._rate = rate
        self._reached: dict[str, int] = {}
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def serve(self) -> None:
        """Answer, each connection in a thread, until `close` is called."""
        self._server.serve_forever(0.1)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def send(self, file: Served, start: int, stop: int, to: socket.socket) -> None:
        """Send bytes of a file, at the rate, and count them piece by piece."""
        if file.shard is None:
            to.sendall(memoryview(file.small)[start:stop])
            return
        with self._lock:
            self.counters.add(open=1)
        try:
            self._send_shard(file, file.shard, start, stop, to)
        finally:
            with self._lock:
                self.counters.add(open=-1)

    def _send_shard(self, file: Served, shard: Shard, start: int, stop: int, to: socket.socket) -> None:
        most = PIECE_BYTES
        if self._rate is not None:
            most = min(PIECE_BYTES, max(_LEAST_PIECE_BYTES, int(self._rate * _RATE_STEP_SECONDS)))
        begun, at = time.perf_counter(), start
        for piece in self._content.of_file(shard, start, stop, most):
            to.sendall(piece)
            at += len(piece)
            self._count(file, at - len(piece), at, probe=stop < file.size)
            if self._rate is not None:
                time.sleep(max(begun + (at - start) / self._rate - time.perf_counter(), 0))

    def _count(self, file: Served, start: int, stop: int, *, probe: bool) -> None:
        """Add to the counters; a range that ends before its file is a look at a header, no part of the transfer."""
        with self._lock:
            if probe:
                self.counters.add(probed=stop - start)
                return
            reached = self._reached.get(file.name, 0)
            self.counters.add(sent=stop - start, again=max(min(stop, reached) - start, 0))
            self._reached[file.name] = max(reached, stop)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    hub: GeneratedHub

    def server_bind(self) -> None:
        # HTTPServer would look the host's full name up, which takes seconds where there is no name service
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that is killed is what the hub is for
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are written apart

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        path, api = unquote(url.path), f"/api/models/{hub.repository}"
        if match := re.fullmatch(rf"/{re.escape(hub.repository)}/resolve/([^/]+)/(.+)", path):
            self._answer_file(*match.groups())
        elif match := re.fullmatch(rf"{re.escape(api)}/tree/([^/]+)/?", path):
            if self._knows(match[1]):
                tree = [{"type": "file", **file.facts("path", "oid", "oid")} for file in hub.files.values()]
                self._send_json(tree)
        elif match := re.fullmatch(rf"{re.escape(api)}(?:/revision/([^/]+))?", path):
            if self._knows(match[1] or "main"):
                self._answer_listing(with_facts="blobs" in parse_qs(url.query))
        else:
            self._refuse("RepoNotFound", "Repository not found")

    do_HEAD = do_GET

    def _knows(self, revision: str) -> bool:
        if revision in ("main", self.server.hub.commit):
            return True
        self._refuse("RevisionNotFound", f"Invalid rev id: {revision}")
        return False

    def _answer_listing(self, with_facts: bool) -> None:
        hub = self.server.hub
        siblings = [
            file.facts("rfilename", "blobId", "sha256") if with_facts else {"rfilename": file.name}
            for file in hub.files.values()
        ]
        facts = {"private": False, "gated": False, "disabled": False, "tags": []}
        self._send_json(
            {"id": hub.repository, "modelId": hub.repository, "sha": hub.commit, **facts, "siblings": siblings}
        )

    def _answer_file(self, revision: str, name: str) -> None:
        hub = self.server.hub
        if not self._knows(revision):
            return
        file = hub.files.get(name)
        commit = {"X-Repo-Commit": hub.commit}
        if file is None:
            self._refuse("EntryNotFound", "Entry not found", commit)
            return
        headers = {**commit, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
        span = parse_range(self.headers.get("Range"), file.size)
        if span is None:
            headers["Content-Range"] = f"bytes */{file.size}"
            self._begin(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers, 0)
            return
        start, stop, partial = span
        if partial:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{file.size}"
        headers["Content-Type"] = "application/octet-stream"
        self._begin(HTTPStatus.PARTIAL_CONTENT if partial else HTTPStatus.OK, headers, stop - start)
        if self.command != "HEAD":
            hub.send(file, start, stop, self.connection)

    def _begin(self, status: int, headers: Mapping[str, str], length: int) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send_json(
        self, content: object, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None
    ) -> None:
        body = json.dumps(content).encode()
        self._begin(status, {"Content-Type": "application/json", **(headers or {})}, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        told = {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})}
        self._send_json({"error": message}, HTTPStatus.NOT_FOUND, told)


def parse_range(header: str | None, size: int) -> tuple[int, int, bool] | None:
    """Start, stop and whether it is a part; None if nothing of the range exists. What is not understood is ignored."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if match is None or match.groups() == ("", ""):
        return 0, size, False
    first, last = match.groups()
    if not first:
        return (max(size - int(last), 0), size, True) if int(last) else None
    start, stop = int(first), min(int(last) + 1, size) if last else size
    return (start, stop, True) if start < stop else None


_QUIET_SECONDS = 5
_UNSET = ("PYTHONHOME", "HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TRANSFORMERS_OFFLINE")


class HubProcess:
    """The running hub: a context manager, ready when it is entered.

    Attributes:
        url, commit: of the repository `made.model.repository`.
        digests: how many bytes had to be hashed for it, in what time.
    """

    def __init__(self, made: Checkpoint, scale: float, work: Path, rate: float | None = None) -> None:
        name = next(name for name, model in MODELS.items() if model is made.model)
        self._command = [sys.executable, "-m", "benchmarks.split.hub", "--model", name, "--scale", repr(scale)]
        self._command += ["--work-dir", str(work), "--counters", str(work / _COUNTERS_NAME)]
        self._command += ["--rate", repr(rate)] if rate is not None else []
        self._work = work
        self.url = self.commit = ""
        self.digests: Mapping[str, Any] = {}

    def __enter__(self) -> HubProcess:
        self._process = subprocess.Popen(
            self._command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"The hub ended with exit status {self._process.wait()} before it was ready.")
        ready = json.loads(line)
        self.url, self.commit, self.digests = ready["url"], ready["commit"], ready["digests"]
        self._counters = Counters(self._work / _COUNTERS_NAME)
        return self

    def __exit__(self, *exception: object) -> None:
        self._counters.__exit__()
        self._process.communicate("")
        (self._work / _COUNTERS_NAME).unlink(missing_ok=True)

    def sent(self) -> Sent:
        """Since it was started."""
        return self._counters.read()

    def quiet(self) -> Sent:
        """The same, once no shard is being sent any more: a client that was killed leaves answers behind."""
        limit = time.monotonic() + _QUIET_SECONDS
        while self.sent().open and time.monotonic() < limit:
            time.sleep(0.001)
        return self.sent()

    def cpu_seconds(self) -> float:
        """Of all its threads, since it was started."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def variables(self, home: Path) -> dict[str, str]:
        """The environment of a process whose hub this is, with `home` as its Hugging Face home."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in _UNSET and not name.lower().endswith("_proxy")
        }
        return kept | {
            "PYTHONPATH": str(REPOSITORY),
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "RABBITLLM_HOME": str(home / "rabbitllm"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="qwen2.5-72b")
    parser.add_argument("--scale", type=float, default=1.0, help="how many times the model's layers")
    parser.add_argument("--work-dir", type=Path, required=True, help="for the digests")
    parser.add_argument("--counters", type=Path, help="file for what is sent (default: in the work folder)")
    parser.add_argument("--rate", type=float, help="MB/s of each connection (default: as fast as it goes)")
    options = parser.parse_args(arguments)
    made, content = checkpoint(MODELS[options.model], options.scale), Content()
    found = digests(made, content, options.work_dir / DIGESTS_NAME)
    rate = options.rate * 1e6 if options.rate else None
    with Counters(options.counters or options.work_dir / _COUNTERS_NAME, new=True) as counters:
        hub = GeneratedHub(made, content, found.of, counters, rate)
        threading.Thread(target=hub.serve, daemon=True).start()
        took = {key: value for key, value in asdict(found).items() if key != "of"}
        print(json.dumps({"url": hub.url, "commit": hub.commit, "digests": took}), flush=True)
        sys.stdin.read()
        hub.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
