"""The stand-in hub against the real huggingface_hub client."""

from __future__ import annotations

import hashlib
import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from huggingface_hub import (
    HfApi,
    __version__,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    scan_cache_dir,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile, RepoFolder

from tests.support.hub_fixtures import HubEnvironment, point_at
from tests.support.local_hub import Faults, GeneratedFile, LocalHub

HUGGINGFACE_HUB = tuple(int(part) for part in __version__.split(".")[:2])
REPO = "acme/tiny"
WEIGHTS = "model.safetensors"
pytestmark = pytest.mark.usefixtures("hub_environment")


@pytest.fixture
def weights() -> bytes:
    return os.urandom(300_000)


@pytest.fixture
def folder(local_hub: LocalHub, tmp_path: Path, weights: bytes) -> Path:
    folder = tmp_path / "hub" / REPO
    write_repository(folder, weights)
    return folder


def write_repository(folder: Path, weights: bytes, config: str = '{"model_type": "none"}') -> None:
    (folder / "original").mkdir(parents=True)
    (folder / "config.json").write_text(config)
    (folder / "README.md").write_text("# tiny\n")
    (folder / WEIGHTS).write_bytes(weights)
    (folder / "original" / "notes.txt").write_text("notes")


@pytest.fixture
def redirecting_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """The same repository behind a hub that redirects and asks for a token."""
    with LocalHub(tmp_path / "hub", token="hf_right", redirect=True) as hub:
        point_at(hub.url, tmp_path / "hf_home", monkeypatch)
        yield hub


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client resumes at a multiple of what it reads at once, and reads 10 MiB unless told otherwise."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)


def raw(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One request by the plainest of clients."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


# What the repository is


def test_model_info_tells_commit_sizes_and_hashes(local_hub: LocalHub, folder: Path, weights: bytes) -> None:
    info = HfApi().model_info(REPO, files_metadata=True)
    assert info.sha == local_hub.commit(REPO)
    assert info.siblings is not None
    files = {sibling.rfilename: sibling for sibling in info.siblings}
    assert set(files) == {"config.json", "README.md", WEIGHTS, "original/notes.txt"}
    large = files[WEIGHTS].lfs
    assert large is not None
    assert large.sha256 == hashlib.sha256(weights).hexdigest()
    assert files[WEIGHTS].size == large.size == len(weights)
    readme = (folder / "README.md").read_bytes()
    assert files["README.md"].blob_id == hashlib.sha1(b"blob %d\0" % len(readme) + readme).hexdigest()
    assert files["README.md"].lfs is None


def test_model_info_without_metadata_lists_names_only(folder: Path) -> None:
    siblings = HfApi().model_info(REPO, revision="main").siblings
    assert siblings is not None
    assert all(sibling.size is None for sibling in siblings)


@pytest.mark.parametrize("page_size", [1000, 2])
def test_tree_is_paged(local_hub: LocalHub, folder: Path, page_size: int) -> None:
    local_hub.page_size = page_size
    tree = list(HfApi().list_repo_tree(REPO, recursive=True))
    assert {entry.path for entry in tree if isinstance(entry, RepoFolder)} == {"original"}
    files = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    assert len(files) == 4
    assert files[WEIGHTS].lfs is not None
    assert len(local_hub.requests) == (1 if page_size == 1000 else 3)


def test_tree_of_one_folder(folder: Path) -> None:
    assert [entry.path for entry in HfApi().list_repo_tree(REPO, "original")] == ["original/notes.txt"]
    assert {entry.path for entry in HfApi().list_repo_tree(REPO)} == {"original", "config.json", "README.md", WEIGHTS}
    with pytest.raises(EntryNotFoundError):
        list(HfApi().list_repo_tree(REPO, "nowhere"))


def test_paths_info_leaves_out_what_is_missing(folder: Path) -> None:
    entries = HfApi().get_paths_info(REPO, ["config.json", "original", "missing.txt"])
    assert [entry.path for entry in entries] == ["config.json", "original"]


def test_commit_follows_the_contents(local_hub: LocalHub, folder: Path) -> None:
    before = local_hub.commit(REPO)
    assert local_hub.commit(REPO) == before
    (folder / "config.json").write_text("{}")
    assert local_hub.commit(REPO) != before
    with pytest.raises(KeyError):
        local_hub.commit(REPO, before)


# Downloads


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "original/notes.txt"])
def test_download_is_stored_under_its_etag(folder: Path, name: str) -> None:
    path = Path(hf_hub_download(REPO, name))
    content = (folder / name).read_bytes()
    assert path.read_bytes() == content
    git_oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    sha256 = hashlib.sha256(content).hexdigest()
    assert path.resolve().name == (sha256 if name == WEIGHTS else git_oid)


def test_snapshot_is_complete_and_second_one_sends_nothing(
    local_hub: LocalHub, folder: Path, hub_environment: HubEnvironment, weights: bytes
) -> None:
    snapshot = Path(snapshot_download(REPO))
    assert snapshot.is_relative_to(hub_environment.cache)
    names = {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()}
    assert names == {"config.json", "README.md", WEIGHTS, "original/notes.txt"}
    assert local_hub.body_bytes(".safetensors") == len(weights)
    assert local_hub.downloads(WEIGHTS) == 1
    local_hub.forget_requests()
    assert Path(snapshot_download(REPO)) == snapshot
    assert local_hub.body_bytes() == 0


@pytest.mark.parametrize(
    ("span", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=1000-1999", 1000, 2000),
        ("bytes=299999-", 299_999, 300_000),
        ("bytes=299000-999999", 299_000, 300_000),
        ("bytes=-10", 299_990, 300_000),
        ("bytes=-999999", 0, 300_000),
    ],
)
def test_one_range(local_hub: LocalHub, folder: Path, weights: bytes, span: str, start: int, stop: int) -> None:
    status, headers, body = raw(local_hub.url, f"/{REPO}/resolve/main/{WEIGHTS}", Range=span)
    assert status == 206
    assert headers["Content-Range"] == f"bytes {start}-{stop - 1}/300000"
    assert body == weights[start:stop]
    assert local_hub.requests[-1].range == span
    assert local_hub.body_bytes(".safetensors") == stop - start


@pytest.mark.parametrize("span", ["bytes=300000-", "bytes=400000-400001", "bytes=-0"])
def test_range_past_the_end(local_hub: LocalHub, folder: Path, span: str) -> None:
    status, headers, body = raw(local_hub.url, f"/{REPO}/resolve/main/{WEIGHTS}", Range=span)
    assert (status, headers["Content-Range"], body) == (416, "bytes */300000", b"")


@pytest.mark.parametrize("span", ["bytes=5-4", "bytes=-", "bytes=0-1,5-6", "lines=0-1"])
def test_range_not_understood_is_ignored(local_hub: LocalHub, folder: Path, weights: bytes, span: str) -> None:
    assert raw(local_hub.url, f"/{REPO}/resolve/main/{WEIGHTS}", Range=span)[::2] == (200, weights)


def test_head_has_the_headers_of_the_get_and_no_body(local_hub: LocalHub, folder: Path, weights: bytes) -> None:
    path = f"/{REPO}/resolve/main/{WEIGHTS}"
    status, headers, body = raw(local_hub.url, path, "HEAD")
    assert (status, body) == (200, b"")
    assert headers["Content-Length"] == str(len(weights))
    assert headers["X-Repo-Commit"] == local_hub.commit(REPO)
    got = raw(local_hub.url, path)[1]
    assert headers.items() - got.items() <= {("Date", headers["Date"])}


# Redirects and tokens


def test_redirect_drops_the_token_off_origin(redirecting_hub: LocalHub, folder: Path, weights: bytes) -> None:
    assert Path(hf_hub_download(REPO, WEIGHTS, token="hf_right")).read_bytes() == weights
    assert Path(hf_hub_download(REPO, "config.json", token="hf_right")).exists()
    on_cdn = [request for request in redirecting_hub.requests if request.path.startswith("/cdn/")]
    assert [(r.method, r.status, r.authorized, r.file) for r in on_cdn] == [("GET", 200, False, WEIGHTS)]
    elsewhere = [request for request in redirecting_hub.requests if request not in on_cdn]
    assert elsewhere
    assert all(request.authorized for request in elsewhere)
    assert {request.status for request in elsewhere} == {200, 302, 307}
    assert redirecting_hub.body_bytes(".safetensors") == len(weights)


def test_metadata_is_on_the_redirect_itself(redirecting_hub: LocalHub, weights: bytes) -> None:
    metadata = get_hf_file_metadata(hf_hub_url(REPO, WEIGHTS), token="hf_right")
    assert metadata.location.startswith(redirecting_hub.cdn_url)
    assert metadata.etag == hashlib.sha256(weights).hexdigest()
    assert metadata.size == len(weights)
    assert metadata.commit_hash == redirecting_hub.commit(REPO)


def test_cdn_serves_ranges_but_no_other_contents(redirecting_hub: LocalHub, weights: bytes) -> None:
    location = get_hf_file_metadata(hf_hub_url(REPO, WEIGHTS), token="hf_right").location
    path = location.removeprefix(redirecting_hub.cdn_url)
    status, _, body = raw(redirecting_hub.cdn_url, path, Range="bytes=7-9")
    assert (status, body) == (206, weights[7:10])
    assert raw(redirecting_hub.cdn_url, path.replace(hashlib.sha256(weights).hexdigest(), "0" * 64))[0] == 403


def test_private_repository(redirecting_hub: LocalHub) -> None:
    with pytest.raises(RepositoryNotFoundError) as missing:
        HfApi().model_info(REPO, token=False)
    assert missing.value.response.status_code == 401
    with pytest.raises(HfHubHTTPError, match="Invalid credentials") as wrong:
        HfApi().model_info(REPO, token="hf_wrong")
    assert wrong.value.response.status_code == 401
    assert HfApi().model_info(REPO, token="hf_right").private


@pytest.mark.parametrize(("token", "status"), [(False, 401), ("hf_wrong", 403)])
def test_gated_repository(redirecting_hub: LocalHub, token: str | bool, status: int) -> None:
    redirecting_hub.faults.gated = True
    assert HfApi().model_info(REPO, token=token).gated == "manual"
    with pytest.raises(GatedRepoError) as refused:
        hf_hub_download(REPO, "config.json", token=token)
    assert refused.value.response.status_code == status
    assert redirecting_hub.body_bytes() == 0
    assert hf_hub_download(REPO, "config.json", token="hf_right")


@pytest.mark.usefixtures("small_reads")
def test_cut_after_a_redirect_is_resumed_where_the_redirect_led(redirecting_hub: LocalHub, weights: bytes) -> None:
    redirecting_hub.faults = Faults(cut_after=200_000)
    assert Path(hf_hub_download(REPO, WEIGHTS, token="hf_right")).read_bytes() == weights
    bodies = [(r.status, r.range, r.authorized) for r in redirecting_hub.requests if r.path.startswith("/cdn/")]
    assert bodies == [(200, None, False), (206, "bytes=200000-", False)]


# What is not there


def test_missing_repository(local_hub: LocalHub) -> None:
    for token, status in ((False, 401), ("hf_any", 404)):
        with pytest.raises(RepositoryNotFoundError) as missing:
            HfApi().model_info("acme/none", token=token)
        assert missing.value.response.status_code == status
    with pytest.raises(RepositoryNotFoundError):
        hf_hub_download("acme/none", "config.json")


def test_missing_revision(folder: Path) -> None:
    with pytest.raises(RevisionNotFoundError):
        HfApi().model_info(REPO, revision="v9")
    with pytest.raises(RevisionNotFoundError):
        hf_hub_download(REPO, "config.json", revision="0" * 40)


def test_missing_file_is_remembered_by_the_client(
    local_hub: LocalHub, folder: Path, hub_environment: HubEnvironment
) -> None:
    with pytest.raises(EntryNotFoundError):
        hf_hub_download(REPO, "absent.json")
    marker = hub_environment.cache / "models--acme--tiny" / ".no_exist" / local_hub.commit(REPO) / "absent.json"
    assert marker.exists()
    assert try_to_load_from_cache(REPO, "absent.json") is not None


# Several revisions


def test_two_revisions_share_a_blob(
    local_hub: LocalHub, folder: Path, tmp_path: Path, weights: bytes, hub_environment: HubEnvironment
) -> None:
    write_repository(tmp_path / "second", weights, config='{"model_type": "other"}')
    commit = local_hub.add_revision(REPO, "v2", tmp_path / "second")
    assert commit == local_hub.commit(REPO, "v2") != local_hub.commit(REPO)
    assert HfApi().model_info(REPO, revision="v2").sha == commit
    first, second = (Path(snapshot_download(REPO, revision=name)) for name in ("main", commit))
    assert first != second
    assert (first / WEIGHTS).resolve() == (second / WEIGHTS).resolve()
    assert (first / "config.json").read_text() != (second / "config.json").read_text()
    assert local_hub.downloads(WEIGHTS) == 1
    assert local_hub.downloads("config.json") == 2
    (cached,) = scan_cache_dir().repos
    assert {revision.commit_hash for revision in cached.revisions} == {commit, local_hub.commit(REPO)}
    assert cached.repo_path.parent == hub_environment.cache


def test_commit_that_main_has_left_is_still_served(local_hub: LocalHub, folder: Path, tmp_path: Path) -> None:
    old = local_hub.commit(REPO)
    write_repository(tmp_path / "second", b"new", config="{}")
    new = local_hub.add_revision(REPO, "main", tmp_path / "second")
    assert HfApi().model_info(REPO).sha == new
    assert HfApi().model_info(REPO, revision=old).sha == old
    assert Path(hf_hub_download(REPO, "config.json", revision=old)).read_text() != "{}"
    assert Path(hf_hub_download(REPO, "config.json")).read_text() == "{}"


@pytest.mark.parametrize("to", [None, "v2"])
def test_main_moves_after_some_gets(local_hub: LocalHub, folder: Path, tmp_path: Path, to: str | None) -> None:
    write_repository(tmp_path / "second", b"new", config="{}")
    second = local_hub.add_revision(REPO, "v2", tmp_path / "second")
    old = local_hub.commit(REPO)
    local_hub.faults = Faults(move_main_after=2, move_main_to=to)
    first = Path(hf_hub_download(REPO, "config.json")).parent.name
    assert first == local_hub.commit(REPO) == old
    assert Path(hf_hub_download(REPO, "README.md")).parent.name == old
    moved = local_hub.commit(REPO)
    assert moved != old
    assert (moved == second) == (to == "v2")
    assert Path(hf_hub_download(REPO, WEIGHTS)).parent.name == moved
    assert Path(hf_hub_download(REPO, WEIGHTS, revision=old)).parent.name == old


# Faults


@pytest.mark.usefixtures("small_reads")
def test_cut_body_is_resumed_by_range(local_hub: LocalHub, folder: Path, weights: bytes) -> None:
    local_hub.faults = Faults(cut_after=100_000, only=".safetensors")
    assert Path(hf_hub_download(REPO, WEIGHTS)).read_bytes() == weights
    bodies = [request for request in local_hub.requests if request.method == "GET"]
    assert [(r.status, r.range, r.bytes_sent) for r in bodies] == [
        (200, None, 100_000),
        (206, "bytes=100000-", 200_000),
    ]


def test_cut_for_ever(local_hub: LocalHub, folder: Path) -> None:
    local_hub.faults = Faults(cut_after=0, cut_times=-1)
    for _ in range(3):
        with pytest.raises(http.client.IncompleteRead):
            raw(local_hub.url, f"/{REPO}/resolve/main/{WEIGHTS}")
    assert local_hub.body_bytes() == 0
    assert local_hub.downloads(WEIGHTS) == 3


@pytest.mark.usefixtures("small_reads")
def test_ignored_range_makes_the_client_start_again(local_hub: LocalHub, folder: Path, weights: bytes) -> None:
    local_hub.faults = Faults(cut_after=100_000, ignore_range=True)
    assert Path(hf_hub_download(REPO, WEIGHTS)).read_bytes() == weights
    assert local_hub.body_bytes(".safetensors") == 100_000 + len(weights)
    assert [request.range for request in local_hub.requests][-1] == "bytes=100000-"


def test_flipped_byte_is_not_noticed_by_the_client(local_hub: LocalHub, folder: Path, weights: bytes) -> None:
    local_hub.faults = Faults(flip_byte=250_000, flip_times=1)
    damaged = Path(hf_hub_download(REPO, WEIGHTS)).read_bytes()
    assert [index for index, (a, b) in enumerate(zip(damaged, weights, strict=True)) if a != b] == [250_000]
    assert Path(hf_hub_download(REPO, WEIGHTS, force_download=True)).read_bytes() == weights


def test_flip_concerns_only_the_range_that_holds_the_byte(local_hub: LocalHub, folder: Path, weights: bytes) -> None:
    local_hub.faults = Faults(flip_byte=1000)
    path = f"/{REPO}/resolve/main/{WEIGHTS}"
    assert raw(local_hub.url, path, Range="bytes=0-999")[2] == weights[:1000]
    assert raw(local_hub.url, path, Range="bytes=1000-1001")[2] == bytes([weights[1000] ^ 1, weights[1001]])


def test_too_many_requests_is_retried(local_hub: LocalHub, folder: Path, weights: bytes) -> None:
    local_hub.faults = Faults(status=429, retry_after="0")
    assert Path(hf_hub_download(REPO, WEIGHTS)).read_bytes() == weights
    assert [request.status for request in local_hub.requests] == [200, 429, 200]


def test_server_error_reaches_the_caller(local_hub: LocalHub, folder: Path) -> None:
    local_hub.faults = Faults(status=503, only=".safetensors")
    assert hf_hub_download(REPO, "config.json")
    with pytest.raises(HfHubHTTPError) as failed:
        hf_hub_download(REPO, WEIGHTS)
    assert failed.value.response.status_code == 503
    assert hf_hub_download(REPO, WEIGHTS)


@pytest.mark.parametrize("faults", [Faults(omit_etag=True), Faults(omit_commit=True)])
def test_needed_header_left_out(local_hub: LocalHub, folder: Path, faults: Faults) -> None:
    local_hub.faults = faults
    with pytest.raises(LocalEntryNotFoundError):
        hf_hub_download(REPO, "config.json")


@pytest.mark.skipif(HUGGINGFACE_HUB < (1, 31), reason="an obstacle to that client")
def test_length_left_out_is_no_obstacle(local_hub: LocalHub, folder: Path, weights: bytes) -> None:
    local_hub.faults = Faults(omit_length=True)
    assert Path(hf_hub_download(REPO, WEIGHTS)).read_bytes() == weights
    assert "Content-Length" not in raw(local_hub.url, f"/{REPO}/resolve/main/{WEIGHTS}", "HEAD")[1]


@pytest.mark.parametrize("tail", [0, 1000])
def test_body_that_is_short_and_looks_whole(local_hub: LocalHub, folder: Path, weights: bytes, tail: int) -> None:
    local_hub.faults = Faults(short_by=70_000, short_tail=tail, only=WEIGHTS)
    path = f"/{REPO}/resolve/main/{WEIGHTS}"
    gap = len(weights) - 70_000 - tail
    status, headers, body = raw(local_hub.url, path, Range="bytes=1000-")
    assert (status, headers["Content-Range"]) == (206, f"bytes 1000-{len(weights) - 1}/{len(weights)}")
    assert headers["Content-Length"] == str(len(body))
    assert body == weights[1000:gap] + weights[gap + 70_000 :]
    assert raw(local_hub.url, path)[2] == weights


def test_address_that_runs_out(local_hub: LocalHub, folder: Path, weights: bytes) -> None:
    local_hub.redirect = True
    local_hub.faults = Faults(address_uses=1, address_times=1)
    path = f"/{REPO}/resolve/main/{WEIGHTS}"
    first, second = (urlsplit(raw(local_hub.url, path)[1]["Location"]) for _ in range(2))
    assert first.query != second.query
    assert raw(local_hub.cdn_url, f"{first.path}?{first.query}")[2] == weights
    assert raw(local_hub.cdn_url, f"{first.path}?{first.query}")[0] == 403
    for _ in range(2):
        assert raw(local_hub.cdn_url, f"{second.path}?{second.query}")[2] == weights


def test_delay_slows_the_body_down(local_hub: LocalHub, folder: Path) -> None:
    local_hub.faults = Faults(delay_per_mib=0.5)
    before = time.monotonic()
    raw(local_hub.url, f"/{REPO}/resolve/main/{WEIGHTS}")
    assert time.monotonic() - before >= 0.5 * 300_000 / (1 << 20)


def test_stopped_hub_is_gone_and_comes_back_at_the_same_address(local_hub: LocalHub, folder: Path) -> None:
    url = local_hub.url
    HfApi().model_info(REPO)
    local_hub.stop()
    with pytest.raises(LocalEntryNotFoundError):
        snapshot_download(REPO)
    with pytest.raises(ConnectionRefusedError):
        raw(url, f"/{REPO}/resolve/main/config.json")
    local_hub.start()
    assert local_hub.url == url
    assert hf_hub_download(REPO, "config.json")


# Computed files


def test_generated_files_are_downloaded(local_hub: LocalHub) -> None:
    content = os.urandom(3_000_000)
    file = GeneratedFile(len(content), lambda offset, length: content[offset : offset + length])
    local_hub.add_generated("acme/made", {"a.safetensors": file, "config.json": GeneratedFile.from_bytes(b"{}")})
    path = Path(hf_hub_download("acme/made", "a.safetensors"))
    assert path.read_bytes() == content
    assert path.resolve().name == hashlib.sha256(content).hexdigest()
    assert Path(hf_hub_download("acme/made", "config.json")).read_text() == "{}"


def test_huge_generated_file_is_never_read_whole(local_hub: LocalHub) -> None:
    size, read = 145_000_000_000, []

    def pattern(offset: int, length: int) -> bytes:
        read.append(length)
        return bytes((offset + index) % 251 for index in range(length))

    local_hub.add_generated("acme/huge", {"big.safetensors": GeneratedFile(size, pattern, "ab" * 32)})
    metadata = get_hf_file_metadata(hf_hub_url("acme/huge", "big.safetensors"))
    assert (metadata.size, metadata.etag) == (size, "ab" * 32)
    _, headers, body = raw(local_hub.url, "/acme/huge/resolve/main/big.safetensors", Range="bytes=-3")
    assert headers["Content-Range"] == f"bytes {size - 3}-{size - 1}/{size}"
    assert body == bytes((size - 3 + index) % 251 for index in range(3))
    assert sum(read) == 3


# The environment


def test_environment_reaches_subprocesses(hub_environment: HubEnvironment) -> None:
    code = "from huggingface_hub import constants as c; print(c.ENDPOINT, c.HF_HUB_CACHE, c.HF_HUB_DISABLE_XET)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == [hub_environment.url, str(hub_environment.cache), "True"]


def test_environment_is_put_back(tmp_path: Path, hub_environment: HubEnvironment) -> None:
    before = dict(vars(constants))
    with pytest.MonkeyPatch.context() as monkeypatch:
        other = point_at("http://127.0.0.1:9", tmp_path / "other", monkeypatch)
        assert other.cache == Path(constants.HF_HUB_CACHE)
        assert HfApi().endpoint == constants.ENDPOINT == other.url
    assert dict(vars(constants)) == before
    assert hub_environment.cache == Path(constants.HF_HUB_CACHE)
