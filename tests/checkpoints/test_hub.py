"""A repository on the hub: pinned once, listed once, its shards one at a time, and what the hub may refuse."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import snapshot_download

from rabbitllm import prepare
from rabbitllm.base import progress
from rabbitllm.base.options import ShardPolicy, SplitOptions
from rabbitllm.checkpoints import fetch, hub
from rabbitllm.checkpoints.checkpoint import Disposal, SourceIdentity
from rabbitllm.checkpoints.hub import (
    HubAccess,
    HubCheckpoint,
    HubRepository,
    cached_snapshot,
    download_all,
    open_repository,
)
from rabbitllm.errors import (
    CheckpointNotFoundError,
    CorruptShardError,
    DiskFullError,
    GatedRepositoryError,
    HubError,
    InvalidIndexError,
    MissingShardError,
    NotEnoughSpaceException,
    UnsafePathError,
    system_errors_by_name,
)
from rabbitllm.splitter.disk_budget import ShardTransfer
from rabbitllm.storage.durable import Step, observe_steps
from tests.support.builders import INDEX_NAME, SINGLE_NAME, cut, llama_tensors, write_shards
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import Faults, LocalHub
from tests.support.plans import uses_of
from tests.support.small_disk import small_disk
from tests.support.splitting import Call, contents, interrupted, layer_files, names_in, split

REPO = "acme/tiny"
pytestmark = pytest.mark.usefixtures("hub_environment")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_pause", lambda failures: 0.0)


@pytest.fixture
def folder(tmp_path: Path, local_hub: LocalHub) -> Path:
    """The repository: three shards, the small files, and files that no split needs."""
    folder = write_shards(tmp_path / "hub" / REPO, cut(llama_tensors(), 3))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("# tiny")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights again")
    return folder


@pytest.fixture
def shards(folder: Path) -> list[str]:
    return names_in(folder, "*.safetensors")


@pytest.fixture
def repository(folder: Path, tmp_path: Path) -> HubRepository:
    return open_repository(REPO, HubAccess(), tmp_path / "staging")


# Listing


def test_one_request_pins_the_commit_and_lists_the_files(
    repository: HubRepository, local_hub: LocalHub, folder: Path, shards: list[str]
) -> None:
    assert len(local_hub.requests) == 1
    assert repository.commit == local_hub.commit(REPO)
    assert repository.label == f"{REPO}@{repository.commit[:8]}"
    assert set(repository.files) == {path.name for path in folder.iterdir()}
    for name in shards:
        assert repository.files[name].size == (folder / name).stat().st_size
        assert len(repository.files[name].sha256 or "") == 64
    assert repository.files["README.md"].sha256 is None


def test_commit_is_pinned_while_main_moves(local_hub: LocalHub, folder: Path, tmp_path: Path) -> None:
    expected = layer_files(split(write_shards(tmp_path / "local", cut(llama_tensors(), 3))))
    newer = write_shards(tmp_path / "newer", cut(llama_tensors(seed=9), 3))
    local_hub.add_revision(REPO, "v2", newer)
    old = local_hub.commit(REPO)
    local_hub.faults = Faults(move_main_after=2, move_main_to="v2")
    result = split(REPO)
    assert local_hub.commit(REPO) != old
    assert result.parent.name == old
    assert layer_files(result) == expected
    assert {request.path.split("/")[4] for request in local_hub.requests if request.file} == {old}
    info = [request for request in local_hub.requests if "/api/models/" in request.path]
    assert len(info) == 1


def test_headers_come_by_ranges(
    repository: HubRepository, local_hub: LocalHub, folder: Path, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rabbitllm.formats.safetensors_file import read_header

    for first_read, requests in ((10_000, 1), (512, 2)):
        monkeypatch.setattr(hub, "FIRST_READ_BYTES", first_read)
        for shard in shards:
            local_hub.forget_requests()
            metadata = repository.metadata(shard)
            assert metadata is not None
            assert metadata.header == read_header(folder / shard)
            assert (metadata.size, metadata.staged) == ((folder / shard).stat().st_size, True)
            assert metadata.fingerprint == f"sha256:{repository.files[shard].sha256}"
            assert [request.status for request in local_hub.requests] == [206] * requests
            assert local_hub.body_bytes() <= max(first_read, 5000)
    assert not repository.staging.exists()


def test_index_and_identity(repository: HubRepository, local_hub: LocalHub, shards: list[str]) -> None:
    checkpoint = HubCheckpoint(repository)
    assert checkpoint.index.shards == tuple(shards)
    assert checkpoint.deletable
    marks = {shard: f"sha256:{repository.files[shard].sha256}" for shard in shards}
    assert checkpoint.identity([]) == SourceIdentity("hub", REPO, local_hub.commit(REPO), marks)
    assert sorted(checkpoint.sidecars()) == ["config.json", "tokenizer.json"]


def test_single_file_repository(local_hub: LocalHub, tmp_path: Path) -> None:
    write_shards(tmp_path / "hub" / "acme" / "one", {SINGLE_NAME: llama_tensors(layers=1)}, index=False)
    checkpoint = HubCheckpoint(open_repository("acme/one", HubAccess(), tmp_path / "staging"))
    assert checkpoint.index.shards == (SINGLE_NAME,)
    assert set(checkpoint.index.weight_map) == set(llama_tensors(layers=1))


# One shard at a time


def test_next_shard_is_requested_after_the_last_is_released(
    local_hub: LocalHub, shards: list[str], tmp_path: Path
) -> None:
    asked_by_then: dict[str, int] = {}
    unrelated: list[str] = []

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.SplitStarted):
            asked_by_then["plan"] = len(local_hub.requests)
        if isinstance(event, progress.ShardStarted | progress.ShardDone):
            staged = {name for folder in tmp_path.rglob(".staging") for name in names_in(folder)}
            coming = {f"{event.shard}.part"} if isinstance(event, progress.ShardStarted) else set()
            unrelated.extend(staged - coming)
        if isinstance(event, progress.ShardDone):
            asked_by_then[event.shard] = len(local_hub.requests)

    room = uses_of(Call(REPO, compression="4bit"))
    assert room[ShardTransfer.FILE].created < room[ShardTransfer.FILE_AHEAD].created
    with progress.listening(listen):
        split(REPO, compression="4bit", max_disk=room[ShardTransfer.FILE].created)
    assert unrelated == []  # nothing else is staged when a shard begins, and nothing when it is done
    bodies = [
        (index, request.file, request.bytes_sent)
        for index, request in enumerate(local_hub.requests)
        if request.file in shards and index >= asked_by_then["plan"]
    ]
    assert [file for _, file, _ in bodies] == shards
    assert [sent for _, _, sent in bodies] == [(tmp_path / "hub" / REPO / shard).stat().st_size for shard in shards]
    for before, (index, _, _) in zip(shards, bodies[1:], strict=False):
        assert index >= asked_by_then[before]
    assert local_hub.downloads("pytorch_model.bin") == local_hub.downloads("README.md") == 0
    assert list(tmp_path.rglob(".staging")) == []


def test_weights_never_enter_the_users_cache(hub_environment: HubEnvironment, folder: Path) -> None:
    split(REPO)
    cached = {path.name for path in hub_environment.cache.rglob("*") if path.is_symlink()}
    assert cached == {"config.json", "tokenizer.json", INDEX_NAME}


def test_a_full_disk_is_named_by_the_error_alone(
    folder: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (folder / "tokenizer.json").write_bytes(bytes(2 << 20))
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        repository = open_repository(REPO, HubAccess(cache_dir=disk.path), tmp_path / "staging")
        with pytest.raises(DiskFullError, match="A disk is full"), system_errors_by_name():
            repository.download("tokenizer.json")
    assert not [warning for warning in recwarn if "disk space" in str(warning.message)]


def test_acquire_and_release(repository: HubRepository, folder: Path, shards: list[str]) -> None:
    path = repository.acquire(shards[0])
    assert path.parent == repository.staging
    assert path.read_bytes() == (folder / shards[0]).read_bytes()
    release = repository.release(shards[0])
    assert (release.disposal, release.freed) == (Disposal.DELETED, (folder / shards[0]).stat().st_size)
    assert names_in(repository.staging) == []
    assert repository.release(shards[0]).freed == 0


def test_acquire_resumes_after_another_process(
    repository: HubRepository, local_hub: LocalHub, folder: Path, shards: list[str]
) -> None:
    raw = (folder / shards[0]).read_bytes()
    repository.staging.mkdir()
    repository.staged(shards[0]).write_bytes(raw[:40_000])
    assert repository.acquire(shards[0]).read_bytes() == raw
    assert local_hub.body_bytes(shards[0]) == len(raw) - 40_000


def test_damaged_body_is_discarded_and_the_same_call_resumes(
    local_hub: LocalHub, folder: Path, shards: list[str], tmp_path: Path
) -> None:
    expected = layer_files(split(write_shards(tmp_path / "local", cut(llama_tensors(), 3))))
    offset = (folder / shards[1]).stat().st_size - 5
    header_reads = 1
    local_hub.faults = Faults(only=shards[1], flip_byte=offset, flip_times=1 + header_reads)
    with pytest.raises(HubError, match="arrived with sha256"):
        split(REPO)
    assert not list(tmp_path.rglob(f"{shards[1]}.part"))
    local_hub.forget_requests()
    assert layer_files(split(REPO)) == expected
    first = sum(request.bytes_sent for request in local_hub.requests if request.file == shards[0])
    assert first <= hub.FIRST_READ_BYTES  # its header, not its body again


# What is in the user's cache already


def test_cached_shard_is_used_in_place_and_freed(
    local_hub: LocalHub, folder: Path, shards: list[str], hub_environment: HubEnvironment, tmp_path: Path
) -> None:
    expected = layer_files(split(write_shards(tmp_path / "local", cut(llama_tensors(), 3))))
    snapshot = Path(snapshot_download(REPO, allow_patterns=[shards[1]]))
    blob = (snapshot / shards[1]).resolve()
    local_hub.forget_requests()
    sent: list[progress.Event] = []
    with progress.listening(sent.append):
        result = split(REPO)
    assert layer_files(result) == expected
    assert local_hub.body_bytes(shards[1]) == 0
    assert not blob.exists()
    assert not (snapshot / shards[1]).is_symlink()
    assert (snapshot / "config.json").exists()
    done = [event for event in sent if isinstance(event, progress.ShardDone)]
    assert [event.disposal for event in done] == ["deleted"] * 3
    assert done[0].source_left_bytes == blob_size(folder / shards[1])
    assert done[1].source_left_bytes == 0


@pytest.mark.parametrize("transfer", ["file", "stream"])
@pytest.mark.parametrize("policy", [ShardPolicy.DELETE_FETCHED, ShardPolicy.DELETE_USED])
def test_concurrent_download_of_another_program_is_kept(
    policy: ShardPolicy, transfer: str, folder: Path, shards: list[str], hub_environment: HubEnvironment
) -> None:
    """The split fetches each shard itself, so the copies that appear in the cache meanwhile are not its own."""
    source = prepare.find(prepare.ModelSpec(REPO))
    downloaded: list[Path] = []

    def download(event: progress.Event) -> None:
        if isinstance(event, progress.ShardStarted):
            downloaded.append(Path(snapshot_download(REPO, allow_patterns=[event.shard])) / event.shard)

    with progress.listening(download):
        prepare.ensure_split(source, SplitOptions(shards=policy, shard_transfer=transfer))
    assert [path.name for path in downloaded] == shards
    assert [path.read_bytes() for path in downloaded] == [(folder / name).read_bytes() for name in shards]


def blob_size(path: Path) -> int:
    return path.stat().st_size


def test_blob_that_another_revision_uses_is_kept(
    local_hub: LocalHub, folder: Path, shards: list[str], tmp_path: Path
) -> None:
    twin = write_shards(tmp_path / "second", cut(llama_tensors(), 3))
    (twin / "config.json").write_text('{"model_type": "llama", "note": "another commit"}')
    local_hub.add_revision(REPO, "v2", twin)
    second, main = (Path(snapshot_download(REPO, revision=name)) for name in ("v2", "main"))
    before = {name: (second / name).read_bytes() for name in shards}
    told: list[progress.Event] = []
    with progress.listening(told.append):
        split(REPO)
    disposals = [event.disposal for event in told if isinstance(event, progress.ShardDone)]
    assert disposals == ["kept: another revision in the hub cache uses the same file"] * 3
    assert {name: (second / name).read_bytes() for name in shards} == before
    assert names_in(main, "*.safetensors") == []


def test_link_in_the_cache_that_leads_out_is_refused(
    local_hub: LocalHub, folder: Path, shards: list[str], tmp_path: Path
) -> None:
    snapshot = Path(snapshot_download(REPO, allow_patterns=[shards[1]]))
    (snapshot / shards[1]).unlink()
    (tmp_path / "precious").write_bytes((folder / shards[1]).read_bytes())
    (snapshot / shards[1]).symlink_to(tmp_path / "precious")
    with pytest.raises(UnsafePathError, match="is a link that leads out of the hub cache"):
        split(REPO)
    assert (tmp_path / "precious").exists()


def test_damaged_file_in_the_cache_names_the_remedy(folder: Path, shards: list[str], tmp_path: Path) -> None:
    snapshot = Path(snapshot_download(REPO, allow_patterns=[shards[1]]))
    blob = (snapshot / shards[1]).resolve()
    raw = blob.read_bytes()
    blob.write_bytes(raw[:8] + b"x" + raw[9:])
    with pytest.raises(CorruptShardError, match=f"{shards[1]} is not a valid .* starts with b'x'") as refused:
        split(REPO)
    assert str(snapshot) in str(refused.value)
    assert "Delete that link and the file it leads to, and make the same call again" in str(refused.value)
    blob.unlink()
    (snapshot / shards[1]).unlink()
    assert split(REPO)


def test_snapshot_in_the_cache(folder: Path) -> None:
    assert cached_snapshot(REPO, HubAccess()) is None
    snapshot = Path(snapshot_download(REPO))
    assert cached_snapshot(REPO, HubAccess()) == snapshot
    assert cached_snapshot(REPO, HubAccess("v2")) is None


# The standard route


def test_standard_route_fills_the_cache(repository: HubRepository, local_hub: LocalHub, shards: list[str]) -> None:
    snapshot = download_all(repository, HubCheckpoint(repository).index)
    assert names_in(snapshot) == sorted([*shards, INDEX_NAME, "config.json", "tokenizer.json"])
    assert local_hub.downloads("pytorch_model.bin") == local_hub.downloads("README.md") == 0
    assert snapshot.name == repository.commit


def test_download_reports_every_byte_once(repository: HubRepository, shards: list[str]) -> None:
    events: list[progress.Event] = []
    index = HubCheckpoint(repository).index
    with progress.listening(events.append):
        snapshot = download_all(repository, index)
        download_all(repository, index)
    names = [*shards, "config.json", "tokenizer.json"]  # the index had come before
    sizes = {name: (snapshot / name).stat().st_size for name in names}
    assert events[0] == progress.DownloadStarted(repository.label, len(names), sum(sizes.values()))
    fetched = dict.fromkeys(names, 0)
    for event in events[1:]:
        assert isinstance(event, progress.BytesFetched)
        fetched[event.shard] += event.nbytes
    assert fetched == sizes


# Refusals


def test_no_such_repository() -> None:
    with pytest.raises(CheckpointNotFoundError) as refused:
        open_repository("acme/nothing", HubAccess(), Path())
    assert "no folder 'acme/nothing' here and no repository 'acme/nothing' on the hub" in str(refused.value)
    assert "Check the spelling; for a private repository pass token='hf_" in str(refused.value)


def test_no_such_revision(folder: Path) -> None:
    with pytest.raises(HubError, match=r"^acme/tiny has no such revision: [^\n]*v9\.\n"):
        open_repository(REPO, HubAccess("v9"), Path())


def test_gated_repository(local_hub: LocalHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local_hub.token, local_hub.faults = "hf_right", Faults(gated=True)
    for token in (None, "hf_wrong"):
        with pytest.raises(GatedRepositoryError) as refused:
            split_with(token)
        assert "acme/tiny is gated" in str(refused.value)
        assert "Accept the terms at https://huggingface.co/acme/tiny, then pass token='hf_" in str(refused.value)
    assert len(layer_files(split_with("hf_right"))) == 12


def split_with(token: str | None) -> Path:
    source = prepare.find(prepare.ModelSpec(REPO, access=HubAccess(token=token)))
    prepare.ensure_split(source, SplitOptions(shards=ShardPolicy.DELETE_USED))
    return source.split_folder


def test_gated_weights(repository: HubRepository, local_hub: LocalHub, shards: list[str]) -> None:
    local_hub.faults = Faults(gated=True)
    with pytest.raises(GatedRepositoryError):
        repository.metadata(shards[0])
    with pytest.raises(GatedRepositoryError):
        repository.acquire(shards[0])


def test_unreachable_hub(local_hub: LocalHub, folder: Path) -> None:
    local_hub.stop()
    with pytest.raises(HubError) as failed:
        open_repository(REPO, HubAccess(), Path())
    assert "The hub did not answer for acme/tiny" in str(failed.value)
    assert "Make the same call again when the connection works" in str(failed.value)


def _with(**changes: object) -> Callable[[dict[str, object]], bytes]:
    return lambda listing: json.dumps({**listing, **changes}).encode()


def _first(**changes: object) -> Callable[[dict[str, Any]], bytes]:
    def changed(listing: dict[str, Any]) -> bytes:
        first, *rest = listing["siblings"]
        return json.dumps({**listing, "siblings": [{**first, **changes}, *rest]}).encode()

    return changed


@pytest.mark.parametrize(
    "listing",
    [
        lambda listing: b"<html>Log in</html>",
        lambda listing: b"[]",
        lambda listing: b"null",
        lambda listing: b"7",
        lambda listing: b"{}",
        lambda listing: b'{"a": ' * 100_000,
        _with(sha=None),
        _with(sha=["x"]),
        _with(sha="../../x"),
        _with(siblings=None),
        _with(siblings={"a": 1}),
        _with(siblings=["a"]),
        _with(siblings=[{}]),
        _first(rfilename=7),
        _first(rfilename=""),
        _first(size="large"),
        _first(size=-1),
        _first(lfs=[1]),
    ],
)
def test_malformed_listing(local_hub: LocalHub, folder: Path, listing: Any) -> None:
    local_hub.faults.listing = listing
    with pytest.raises(HubError, match="not a list of the files of acme/tiny") as failed:
        open_repository(REPO, HubAccess(), Path())
    assert "HF_ENDPOINT" in failed.value.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"rfilename": "../outside.json"},
        {"rfilename": "/etc/passwd"},
        {"rfilename": "a/../../b"},
        {"rfilename": "a\\..\\b"},
        {"rfilename": "c:/x"},
        {"rfilename": "a\0b"},
        {"blobId": "../../x"},
        {"lfs": {"sha256": "../../../x", "size": 1, "pointerSize": 1}},
        {"lfs": {"sha256": "a/b", "size": 1, "pointerSize": 1}},
    ],
    ids=str,
)
def test_listing_with_an_unsafe_path_is_refused(
    local_hub: LocalHub, folder: Path, changes: dict[str, object], tmp_path: Path
) -> None:
    local_hub.faults.listing = _first(**changes)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UnsafePathError, match="which may lead out of a folder"):
        split(REPO)
    assert sorted(tmp_path.rglob("*")) == before


def test_repository_without_weights(local_hub: LocalHub, tmp_path: Path) -> None:
    bare = tmp_path / "hub" / "acme" / "bare"
    bare.mkdir(parents=True)
    (bare / "config.json").write_text("{}")
    (bare / "mmproj-model.gguf").touch()
    with pytest.raises(CheckpointNotFoundError, match=r"looked for model.safetensors, model.safetensors.index.json, "):
        HubCheckpoint(open_repository("acme/bare", HubAccess(), tmp_path))


def test_repository_that_lacks_a_shard(folder: Path, shards: list[str], tmp_path: Path, local_hub: LocalHub) -> None:
    (folder / shards[2]).unlink()
    with pytest.raises(MissingShardError, match=f"lacks 1 of the shards in its index: {shards[2]}"):
        split(REPO)
    assert not list(tmp_path.rglob("split.journal"))
    with pytest.raises(MissingShardError, match=f"has no file {shards[2]}, which its index names"):
        open_repository(REPO, HubAccess(), tmp_path).acquire(shards[2])


@pytest.mark.parametrize("name", ["../../x.safetensors", "/etc/passwd", "a\\b"])
def test_hostile_name_in_a_repositorys_index(folder: Path, local_hub: LocalHub, name: str) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(UnsafePathError):
        split(REPO)
    assert local_hub.body_bytes(".safetensors") == 0


# Headers that cannot be believed


def test_shard_of_the_repository_that_is_damaged(folder: Path, shards: list[str], tmp_path: Path) -> None:
    raw = (folder / shards[1]).read_bytes()
    (folder / shards[1]).write_bytes(raw[:-4])
    with pytest.raises(CorruptShardError) as refused:
        split(REPO)
    assert f"{shards[1]} is not a valid safetensors file: it is truncated" in refused.value.problem
    assert f"In {REPO}@" in refused.value.problem
    assert "Make the same call again" in refused.value.remedy
    assert "tell its owner" in refused.value.remedy
    assert not list(tmp_path.rglob("split.journal"))


def test_index_and_header_that_disagree(folder: Path, shards: list[str]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"]["model.norm.weight"] = shards[0]
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(InvalidIndexError, match=f"puts 'model.norm.weight' into {shards[0]}, whose header does not"):
        split(REPO)


def test_header_damaged_in_transit_is_detected(local_hub: LocalHub, tmp_path: Path) -> None:
    """Only the header is read before the plan is made, and no digest covers it alone."""
    source = write_shards(tmp_path / "hub" / "acme" / "one", {SINGLE_NAME: {"plain": torch.zeros(9)}}, index=False)
    offset = (source / SINGLE_NAME).read_bytes().index(b"plain")
    local_hub.faults = Faults(only=SINGLE_NAME, flip_byte=offset, flip_times=2)  # of the index made up, and of the plan
    with pytest.raises(CorruptShardError, match="differs from the planned file: 'qlain' has another offset") as bad:
        split("acme/one")
    assert "delete that folder" in bad.value.remedy
    assert contents(source)[SINGLE_NAME]


def test_connection_lost_after_the_listing(
    repository: HubRepository, local_hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_hub.stop()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # huggingface_hub waits too
    with pytest.raises(HubError, match="The hub did not answer for acme/tiny"):
        repository.download("config.json")
    with pytest.raises(HubError, match="could not be read past byte 0"):
        repository.metadata(next(name for name in repository.files if name.endswith(".safetensors")))


def test_disk_errors_are_not_hub_errors() -> None:
    with pytest.raises(OSError, match="No space left") as failed, hub.translated(REPO):
        raise OSError(28, "No space left on device")
    assert not isinstance(failed.value, HubError)


# No shard on the disk at all


@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
def test_streamed_split_has_equal_bytes(
    local_hub: LocalHub, shards: list[str], tmp_path: Path, compression: str | None
) -> None:
    staged: list[Path] = []
    expected = layer_files(split(write_shards(tmp_path / "local", cut(llama_tensors(), 3)), compression=compression))
    with observe_steps(lambda step: staged.extend([step.path] if ".staging/" in str(step.path) else [])):
        result = split(REPO, compression=compression, shard_transfer="stream")
    assert layer_files(result) == expected
    assert staged == []
    for shard in shards:  # its header for the plan, and its body once
        size = (tmp_path / "hub" / REPO / shard).stat().st_size
        assert size <= local_hub.body_bytes(shard) <= size + min(size, hub.FIRST_READ_BYTES)


def test_streamed_tensors_at_odd_offsets(tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment) -> None:
    """Tensors that begin anywhere, are empty, small or longer than a buffer, in a shard that holds others' too."""
    chance = torch.Generator().manual_seed(5)
    sizes = [(3,), (2_500, 1_000), (0, 4), (1,), (65, 63), (127, 33), (7,), (1_100, 2_100), (64, 64)]
    tensors: dict[str, torch.Tensor] = {
        f"model.layers.{n % 2}.w{n}": torch.randn(shape, generator=chance).to(torch.bfloat16)
        for n, shape in enumerate(sizes)
    }
    tensors["model.layers.0.flags"] = torch.tensor([True, False, True])  # an odd length, so that all after it are odd
    folder = tmp_path / "hub" / "acme" / "odd"
    write_shards(folder, cut(tensors, 2))
    for compression in (None, "4bit", "8bit"):
        expected = layer_files(
            split(write_shards(tmp_path / f"{compression}", cut(tensors, 2)), compression=compression)
        )
        result = split("acme/odd", tmp_path / f"out-{compression}", compression=compression, shard_transfer="stream")
        assert layer_files(result) == expected


def test_budget_below_one_shard_selects_streaming(local_hub: LocalHub, shards: list[str], tmp_path: Path) -> None:
    call = Call(REPO, compression="4bit")
    budget = uses_of(call)[ShardTransfer.FILE].created - 1
    with observe_steps(lambda step: staged.append(step.path) if ".staging/" in str(step.path) else None):
        staged: list[Path] = []
        result = split(REPO, compression="4bit", max_disk=budget)
    assert staged == []
    assert layer_files(result) == layer_files(
        split(write_shards(tmp_path / "local", cut(llama_tensors(), 3)), compression="4bit")
    )


def test_streamed_shard_with_a_wrong_byte_finishes_no_layer(
    local_hub: LocalHub, folder: Path, shards: list[str], tmp_path: Path
) -> None:
    expected = layer_files(split(write_shards(tmp_path / "local", cut(llama_tensors(), 3))))
    header_reads = 1
    offset = (folder / shards[1]).stat().st_size - 5
    local_hub.faults = Faults(only=shards[1], flip_byte=offset, flip_times=1 + header_reads)
    with pytest.raises(HubError, match="arrived with sha256") as refused:
        split(REPO, shard_transfer="stream")
    assert "Make the same call again" in refused.value.remedy
    output = Call(REPO).find().split_folder
    finished = names_in(output, "*.safetensors")
    assert {name: (output / name).read_bytes() for name in finished} == {name: expected[name] for name in finished}
    local_hub.forget_requests()
    assert layer_files(split(REPO, shard_transfer="stream")) == expected
    assert local_hub.body_bytes(shards[0]) == 0  # what was verified is not asked for again


def test_route_may_change_between_calls(local_hub: LocalHub, folder: Path, shards: list[str], tmp_path: Path) -> None:
    """A split begun with files goes on as a stream and the other way round; what was staged is cleared away."""
    expected = layer_files(split(write_shards(tmp_path / "local", cut(llama_tensors(), 3)), compression="8bit"))
    for index, (first, then) in enumerate((("file", "stream"), ("stream", "file"))):
        call = Call(REPO, str(tmp_path / f"out-{index}"), compression="8bit", shard_transfer=first)
        result = interrupted(call)
        (result / ".staging").mkdir(exist_ok=True)
        (result / ".staging" / f"{shards[2]}.part").write_bytes(b"\0" * 1000)
        assert layer_files(dataclasses.replace(call, shard_transfer=then).make()) == expected
        assert not (result / ".staging").exists()


def test_next_shard_is_fetched_during_the_last(local_hub: LocalHub, shards: list[str]) -> None:
    coming = threading.Event()
    waited: list[bool] = []

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.BytesFetched) and event.shard == shards[1]:
            coming.set()

    def look(step: Step) -> None:
        if step.kind == "sync" and step.path.name == "model.embed_tokens.safetensors.part" and not waited:
            waited.append(coming.wait(600))

    with progress.listening(listen), observe_steps(look):
        split(REPO, shard_transfer="file")
    assert waited == [True]


def test_standard_route_is_refused_before_it_downloads(
    local_hub: LocalHub,
    folder: Path,
    shards: list[str],
    monkeypatch: pytest.MonkeyPatch,
    hub_environment: HubEnvironment,
) -> None:
    """Checkpoint and layer files must both fit the disk that they share; that is known from headers."""
    sizes = sum((folder / shard).stat().st_size for shard in shards)
    usage = shutil.disk_usage(folder)
    for spare in (0, 2 * sizes + 300_000):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=spare: usage._replace(free=free + 1_000_000_000))
        if not spare:
            with pytest.raises(NotEnoughSpaceException, match=r"at its peak; 1\.00 GB is free on the disk of"):
                split(REPO, sequential=False)
            assert not list(hub_environment.cache.rglob("*.safetensors"))
            assert all(local_hub.downloads(shard) == 1 for shard in shards)  # its header
    assert layer_files(split(REPO, sequential=False))
