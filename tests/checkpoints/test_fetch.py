"""Fetching over a network that breaks: what is asked for again, what is kept, and what is thrown away."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from rabbitllm.checkpoints import fetch
from rabbitllm.checkpoints.fetch import RemoteFile, read_range
from rabbitllm.checkpoints.hub import translated
from rabbitllm.errors import HubError
from rabbitllm.storage import durable
from tests.support.hub_fixtures import HubEnvironment, point_at
from tests.support.local_hub import Faults, LocalHub

SIZE = 300_000
NAME = "model.safetensors"


def replace_pauses(monkeypatch: pytest.MonkeyPatch, pause: Callable[[float], None]) -> None:
    thread = threading.get_ident()

    def sleep(seconds: float) -> None:
        (pause if threading.get_ident() == thread else time.sleep)(seconds)

    monkeypatch.setattr(fetch, "time", SimpleNamespace(sleep=sleep))


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the test would have waited; it does not. Threads that are left from other tests do."""
    waited: list[float] = []
    replace_pauses(monkeypatch, waited.append)
    monkeypatch.setattr(fetch, "CHUNK_BYTES", 32_768)
    return waited


@pytest.fixture
def content(tmp_path: Path, local_hub: LocalHub) -> bytes:
    data = os.urandom(SIZE)
    folder = tmp_path / "hub" / "acme" / "tiny"
    folder.mkdir(parents=True)
    (folder / NAME).write_bytes(data)
    return data


@pytest.fixture
def remote(hub_environment: HubEnvironment, content: bytes) -> RemoteFile:
    return RemoteFile(f"{hub_environment.url}/acme/tiny/resolve/main/{NAME}", SIZE, hashlib.sha256(content).hexdigest())


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return tmp_path / "shard.part"


def ranges(hub: LocalHub) -> list[str | None]:
    return [request.range for request in hub.requests]


# Whole files


def test_fetch(local_hub: LocalHub, remote: RemoteFile, content: bytes, part: Path) -> None:
    told: list[int] = []
    fetch.fetch(remote, part, told.append)
    assert part.read_bytes() == content
    assert ranges(local_hub) == [f"bytes=0-{SIZE - 1}"]
    assert told[0] == 0
    assert told[-1] == SIZE
    assert told == sorted(told)
    assert len(set(told)) > 2


@pytest.mark.parametrize("have", [1, 100_000, SIZE - 1])
def test_resume_requests_the_rest_only(
    local_hub: LocalHub, remote: RemoteFile, content: bytes, part: Path, have: int
) -> None:
    part.write_bytes(content[:have])
    told: list[int] = []
    fetch.fetch(remote, part, told.append)
    assert part.read_bytes() == content
    assert ranges(local_hub) == [f"bytes={have}-{SIZE - 1}"]
    assert local_hub.body_bytes() == SIZE - have
    assert told[0] == have
    assert told[-1] == SIZE


def test_complete_part_is_hashed_without_a_request(
    local_hub: LocalHub, remote: RemoteFile, content: bytes, part: Path
) -> None:
    part.write_bytes(content)
    fetch.fetch(remote, part)
    assert part.read_bytes() == content
    assert local_hub.requests == []


def test_overlong_part_is_discarded(local_hub: LocalHub, remote: RemoteFile, content: bytes, part: Path) -> None:
    part.write_bytes(content + b"more")
    fetch.fetch(remote, part)
    assert part.read_bytes() == content
    assert local_hub.body_bytes() == SIZE


@pytest.mark.parametrize("damaged_at", [0, 99_999])
def test_part_with_wrong_content_is_discarded(
    local_hub: LocalHub, remote: RemoteFile, content: bytes, part: Path, damaged_at: int
) -> None:
    wrong = bytearray(content[:100_000])
    wrong[damaged_at] ^= 1
    part.write_bytes(wrong)
    fetch.fetch(remote, part)
    assert ranges(local_hub) == [f"bytes=100000-{SIZE - 1}", f"bytes=0-{SIZE - 1}"]
    assert part.read_bytes() == content


def test_empty_file(tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment, part: Path) -> None:
    file = RemoteFile(f"{hub_environment.url}/acme/tiny/resolve/main/empty", 0, hashlib.sha256(b"").hexdigest())
    fetch.fetch(file, part)
    assert part.read_bytes() == b""
    assert local_hub.requests == []


def test_part_is_never_reached_through_a_link(remote: RemoteFile, content: bytes, tmp_path: Path, part: Path) -> None:
    (tmp_path / "precious").write_bytes(b"")
    part.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        fetch.fetch(remote, part)
    assert (tmp_path / "precious").read_bytes() == b""


# A network that breaks


@pytest.mark.parametrize("cuts", [1, 4])
def test_short_body_is_resumed(
    local_hub: LocalHub, remote: RemoteFile, content: bytes, part: Path, cuts: int, pauses: list[float]
) -> None:
    local_hub.faults = Faults(cut_after=50_000, cut_times=cuts)
    fetch.fetch(remote, part)
    assert part.read_bytes() == content
    assert ranges(local_hub) == [f"bytes={50_000 * times}-{SIZE - 1}" for times in range(cuts + 1)]
    assert local_hub.body_bytes() == SIZE
    assert len(pauses) == cuts
    assert max(pauses) <= 0.75  # each came further, so none counts as a second failure


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_busy_hub_is_retried(
    local_hub: LocalHub, remote: RemoteFile, content: bytes, part: Path, status: int, pauses: list[float]
) -> None:
    local_hub.faults = Faults(status=status, status_times=3)
    fetch.fetch(remote, part)
    assert part.read_bytes() == content
    assert [request.status for request in local_hub.requests] == [status] * 3 + [206]
    assert [round(pause / low) for pause, low in zip(pauses, (0.5, 1, 2), strict=True)] == [1, 1, 1]


def test_hub_that_ignores_ranges(local_hub: LocalHub, remote: RemoteFile, content: bytes, part: Path) -> None:
    part.write_bytes(content[:100_000])
    local_hub.faults = Faults(ignore_range=True)
    fetch.fetch(remote, part)
    assert part.read_bytes() == content
    assert [(request.range, request.status) for request in local_hub.requests] == [(f"bytes=100000-{SIZE - 1}", 200)]


def test_hub_that_ignores_ranges_and_disconnects(
    local_hub: LocalHub, remote: RemoteFile, content: bytes, part: Path
) -> None:
    local_hub.faults = Faults(ignore_range=True, cut_after=120_000, cut_times=2)
    fetch.fetch(remote, part)
    assert part.read_bytes() == content


def test_length_left_out(local_hub: LocalHub, remote: RemoteFile, content: bytes, part: Path) -> None:
    local_hub.faults = Faults(omit_length=True, cut_after=120_000)
    fetch.fetch(remote, part)
    assert part.read_bytes() == content


def test_giving_up_keeps_received_bytes(
    local_hub: LocalHub, remote: RemoteFile, content: bytes, part: Path, pauses: list[float]
) -> None:
    part.write_bytes(content[:70_000])
    local_hub.faults = Faults(status=503, status_times=-1)
    with pytest.raises(HubError) as failed:
        fetch.fetch(remote, part)
    assert f"could not be read past byte 70,000 of {SIZE:,}: HTTP 503" in str(failed.value)
    assert "it resumes" in str(failed.value)
    assert len(local_hub.requests) == fetch.ATTEMPTS
    assert pauses == sorted(pauses)
    assert 30 < sum(pauses) < 120
    assert part.read_bytes() == content[:70_000]
    local_hub.faults = Faults()
    fetch.fetch(remote, part)
    assert part.read_bytes() == content
    assert local_hub.body_bytes() == SIZE - 70_000


def test_hub_outage(
    local_hub: LocalHub, remote: RemoteFile, content: bytes, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_hub.faults = Faults(cut_after=100_000)
    away = []

    def go_away_and_come_back(seconds: float) -> None:
        away.append(seconds)
        if len(away) == 1:
            local_hub.stop()
        if len(away) == 3:
            local_hub.start()

    replace_pauses(monkeypatch, go_away_and_come_back)
    fetch.fetch(remote, part)
    assert part.read_bytes() == content
    assert len(away) == 3


# Bytes that are not those promised


@pytest.mark.parametrize("flipped", [0, 150_000, SIZE - 1])
def test_flipped_byte_is_detected(
    local_hub: LocalHub, remote: RemoteFile, content: bytes, part: Path, flipped: int
) -> None:
    local_hub.faults = Faults(flip_byte=flipped, flip_times=1)
    with pytest.raises(HubError) as failed:
        fetch.fetch(remote, part)
    assert f"the hub says {remote.sha256}" in str(failed.value)
    assert "the wrong bytes were deleted and not used" in str(failed.value)
    assert not part.exists()
    fetch.fetch(remote, part)
    assert part.read_bytes() == content


def test_file_that_is_shorter_than_listed(local_hub: LocalHub, remote: RemoteFile, content: bytes, part: Path) -> None:
    with pytest.raises(HubError, match=r"The hub did not answer for acme/tiny: .*416"), translated("acme/tiny"):
        fetch.fetch(RemoteFile(remote.url, SIZE + 10, remote.sha256), part)
    assert part.read_bytes() == content


def test_file_that_is_longer_than_listed(local_hub: LocalHub, remote: RemoteFile, part: Path) -> None:
    with pytest.raises(HubError, match="arrived with sha256"):
        fetch.fetch(RemoteFile(remote.url, SIZE - 10, remote.sha256), part)
    assert not part.exists()


def test_small_file_without_digest_has_its_size_at_least(remote: RemoteFile, content: bytes, part: Path) -> None:
    fetch.fetch(RemoteFile(remote.url, SIZE, None), part)
    assert part.read_bytes() == content


def test_full_disk_keeps_received_bytes(remote: RemoteFile, content: bytes, part: Path) -> None:
    def full(step: durable.Step) -> None:
        if step.kind == "write" and step.offset >= 200_000:
            raise OSError(28, "No space left on device")

    with durable.observe_steps(full), pytest.raises(OSError, match="No space left"):
        fetch.fetch(remote, part)
    have = part.stat().st_size
    assert 100_000 < have < SIZE
    assert part.read_bytes() == content[:have]
    fetch.fetch(remote, part)
    assert part.read_bytes() == content


# Ranges


@pytest.mark.parametrize(
    ("start", "length"), [(0, 8), (0, SIZE), (1000, 1), (SIZE - 5, 5), (SIZE - 5, 500), (0, 10**9)]
)
def test_range(local_hub: LocalHub, remote: RemoteFile, content: bytes, start: int, length: int) -> None:
    assert read_range(remote, start, length) == content[start : start + length]
    assert local_hub.body_bytes() == min(length, SIZE - start)


@pytest.mark.parametrize(("start", "length"), [(0, 0), (SIZE, 5), (SIZE + 5, 5)])
def test_empty_range_is_not_requested(local_hub: LocalHub, remote: RemoteFile, start: int, length: int) -> None:
    assert read_range(remote, start, length) == b""
    assert local_hub.requests == []


def test_range_of_a_hub_that_ignores_ranges(local_hub: LocalHub, remote: RemoteFile, content: bytes) -> None:
    local_hub.faults = Faults(ignore_range=True)
    assert read_range(remote, 100_000, 50_000) == content[100_000:150_000]


def test_range_that_is_cut(local_hub: LocalHub, remote: RemoteFile, content: bytes) -> None:
    local_hub.faults = Faults(cut_after=10_000, cut_times=2)
    assert read_range(remote, 5, 40_000) == content[5:40_005]
    assert ranges(local_hub) == ["bytes=5-40004", "bytes=10005-40004", "bytes=20005-40004"]


# Tokens and other origins


def test_token_is_sent_to_the_hub_but_not_to_redirects(
    tmp_path: Path, content: bytes, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalHub(tmp_path / "hub", token="hf_right", redirect=True) as hub:
        point_at(hub.url, tmp_path / "hf_home", monkeypatch)
        hub.faults = Faults(cut_after=100_000)
        url = f"{hub.url}/acme/tiny/resolve/main/{NAME}"
        fetch.fetch(RemoteFile(url, SIZE, hashlib.sha256(content).hexdigest(), "hf_right"), part)
        assert part.read_bytes() == content
        requests = [(request.path.split("/")[1], request.authorized) for request in hub.requests]
        assert requests == [("acme", True), ("cdn", False)] * 2  # an address that has expired is asked for again


# Files that pass by


def test_stream(local_hub: LocalHub, remote: RemoteFile, content: bytes) -> None:
    assert b"".join(fetch.stream(remote)) == content
    local_hub.faults = Faults(cut_after=70_000, cut_times=2)
    assert b"".join(fetch.stream(remote)) == content


def test_streamed_bytes_are_compared_after_the_last(local_hub: LocalHub, remote: RemoteFile, content: bytes) -> None:
    local_hub.faults = Faults(flip_byte=50_000)
    passed = bytearray()

    def take() -> None:
        for chunk in fetch.stream(remote):
            passed.extend(chunk)

    with pytest.raises(HubError, match="arrived with sha256"):
        take()
    assert len(passed) == SIZE
    assert bytes(passed) != content


def test_small_file_is_checked_by_its_git_id(
    local_hub: LocalHub, remote: RemoteFile, content: bytes, part: Path
) -> None:
    name = hashlib.sha1(f"blob {SIZE}\0".encode() + content).hexdigest()
    small = dataclasses.replace(remote, sha256=None, git_sha1=name)
    fetch.fetch(small, part)
    assert part.read_bytes() == content
    part.unlink()
    local_hub.faults = Faults(flip_byte=5)
    with pytest.raises(HubError, match=r"arrived with sha1 [0-9a-f]{40}; the hub says"):
        fetch.fetch(small, part)
    assert not part.exists()


@pytest.mark.parametrize(("delay", "waited"), [("7", 7.0), ("9999", fetch.LONGEST_PAUSE), ("soon", 0.0), (None, 0.0)])
def test_retry_after_is_honored(
    local_hub: LocalHub, remote: RemoteFile, content: bytes, pauses: list[float], delay: str | None, waited: float
) -> None:
    local_hub.faults = Faults(status=429, retry_after=delay)
    assert fetch.read_range(remote, 0, SIZE) == content
    assert len(pauses) == 1
    assert pauses[0] >= waited
    assert (pauses[0] > 2) == (waited > 2)


class InCircles(BaseHTTPRequestHandler):
    """A login page of a network that sends to itself, or says gzip of what is none."""

    def do_GET(self) -> None:
        is_circle = self.path.startswith("/circle")
        self.send_response(302 if is_circle else 200)
        for name, value in {"Location": self.path, "Content-Encoding": "gzip", "Content-Length": "5"}.items():
            if (name == "Location") == is_circle or name == "Content-Length":
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"plain")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(("path", "error"), [("circle", "TooManyRedirects"), ("encoding", "DecodingError")])
def test_answers_of_a_login_page_are_no_answers_of_the_hub(
    hub_environment: HubEnvironment, path: str, error: str
) -> None:
    from huggingface_hub.utils import get_session

    with ThreadingHTTPServer(("127.0.0.1", 0), InCircles) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/{path}"
        with pytest.raises(HubError, match=f"could not be read past byte 0 of 300,000: {error}"):
            read_range(RemoteFile(url, SIZE, None), 0, SIZE)
        with pytest.raises(HubError, match=f"The hub did not answer for acme/tiny: {error}"), translated("acme/tiny"):
            get_session().get(url, follow_redirects=True)
        server.shutdown()
