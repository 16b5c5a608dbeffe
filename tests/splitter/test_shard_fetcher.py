"""Shards that are split while they arrive: how far they may be read, when they start over, and how a fetch stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rabbitllm.base import progress
from rabbitllm.checkpoints.hub import HubAccess, HubCheckpoint, HubRepository, open_repository
from rabbitllm.errors import HubError
from rabbitllm.formats.safetensors_file import read_header
from rabbitllm.splitter.filler import ShardFetcher, StartedOverError
from rabbitllm.splitter.plan import PlannedShard
from rabbitllm.splitter.split import STAGING_NAME
from rabbitllm.storage import durable
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.store.manifest import read_manifest
from tests.support.builders import cut, llama_tensors, plain_torch_files, write_shards, write_torch
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import Faults, GeneratedFile, LocalHub
from tests.support.splitting import Call, layer_files, names_in, split

REPO = "acme/tiny"
PATIENCE = 600.0
"""Seconds that a test waits for what must come."""
LARGE = {"layers": 2, "hidden": 768, "vocabulary": 2048}


class Gate:
    """A repository of which one shard stops near a byte until the gate opens."""

    def __init__(self, hub: LocalHub, model: Path, shard: str, stops_at: int) -> None:
        self.reached, self.opens = threading.Event(), threading.Event()
        self.in_time = True
        """Whether it was opened before the hub lost its patience."""
        self._stops_at = stops_at
        files = {path.name: GeneratedFile.from_bytes(path.read_bytes()) for path in model.iterdir()}
        whole = self._whole = files[shard]
        files[shard] = GeneratedFile(whole.size, self._read, whole.sha256)
        hub.add_generated(REPO, files)

    def _read(self, offset: int, length: int) -> bytes:
        if offset + length > self._stops_at:
            self.reached.set()
            self.in_time &= self.opens.wait(PATIENCE)
        return self._whole.read(offset, length)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "model", cut(llama_tensors(**LARGE), 2))


@pytest.fixture
def shards(model: Path) -> list[str]:
    return names_in(model, "*.safetensors")


@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("transfer", ["file", "auto"])
def test_layers_are_written_before_a_shard_is_complete(
    model: Path,
    shards: list[str],
    local_hub: LocalHub,
    hub_environment: HubEnvironment,
    transfer: str,
    compression: str | None,
) -> None:
    gate = Gate(local_hub, model, shards[0], (model / shards[0]).stat().st_size - 100_000)

    def look(step: Step) -> None:
        if step.kind == "write" and step.path.suffix == ".part" and step.path.parent.name != STAGING_NAME:
            gate.opens.set()

    with observe_steps(look):
        folder = split(REPO, shard_transfer=transfer, compression=compression)
    assert gate.reached.is_set()
    assert gate.in_time
    assert layer_files(folder) == layer_files(split(model, compression=compression))


def test_torch_file_is_used_while_it_arrives(
    tmp_path: Path, model: Path, local_hub: LocalHub, hub_environment: HubEnvironment
) -> None:
    """Its directory comes last, but the plan knows it by then."""
    torch_model = write_torch(tmp_path / "torch", plain_torch_files(cut(llama_tensors(**LARGE), 2)), index=True)
    first = names_in(torch_model, "*.bin")[0]
    gate = Gate(local_hub, torch_model, first, (torch_model / first).stat().st_size - 100_000)

    def look(step: Step) -> None:
        if step.kind == "write" and step.path.suffix == ".part" and step.path.parent.name != STAGING_NAME:
            gate.opens.set()

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.SplitStarted):
            gate.reached.clear()
            gate.opens.clear()

    gate.opens.set()  # while the plan asks for the end of it
    with observe_steps(look), progress.listening(listen):
        folder = split(REPO, shard_transfer="file")
    assert gate.reached.is_set()
    assert gate.in_time
    assert layer_files(folder) == layer_files(split(model))


def positions(header_end: int, have: int) -> dict[str, int]:
    return {"length": 0, "header": 20, "first tensor": header_end + 10, "last byte": have - 1}


@pytest.mark.parametrize("where", positions(0, 0))
@pytest.mark.parametrize("compression", [None, "4bit"])
def test_damaged_staged_bytes_restart_the_shard(
    model: Path,
    shards: list[str],
    local_hub: LocalHub,
    hub_environment: HubEnvironment,
    where: str,
    compression: str | None,
) -> None:
    local_hub.add_revision(REPO, "main", model)
    call = Call(REPO, compression=compression, shard_transfer="file")
    staging = call.find().split_folder / STAGING_NAME
    staging.mkdir(parents=True)
    content = (model / shards[1]).read_bytes()
    prefix = bytearray(content[:6_000_000])
    prefix[positions(read_header(model / shards[1]).data_start, len(prefix))[where]] ^= 1
    (staging / f"{shards[1]}.part").write_bytes(prefix)
    local_hub.forget_requests()
    assert layer_files(call.make()) == layer_files(split(model, compression=compression))
    ranges = [request.range for request in local_hub.requests if request.file == shards[1]]
    assert ranges[-1] == f"bytes=0-{len(content) - 1}"  # all of it, after the rest


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_damaged_bytes_are_removed_from_the_sums(
    model: Path, shards: list[str], local_hub: LocalHub, hub_environment: HubEnvironment, compression: str | None
) -> None:
    """Damaged bytes are in layer files, and summed, before the end of the shard shows that they are damaged."""
    call = Call(REPO, compression=compression, shard_transfer="file")
    content = (model / shards[0]).read_bytes()
    prefix = bytearray(content[:6_000_000])
    prefix[read_header(model / shards[0]).data_start + 10] ^= 1
    gate = Gate(local_hub, model, shards[0], len(prefix))
    staging = call.find().split_folder / STAGING_NAME
    staging.mkdir(parents=True)
    (staging / f"{shards[0]}.part").write_bytes(prefix)
    damaged: list[Step] = []

    def look(step: Step) -> None:
        is_of_layer = step.path.name.endswith(".safetensors.part") and step.path.parent != staging
        if step.kind == "write" and is_of_layer and not gate.opens.is_set():
            damaged.append(step)

    def open_gate() -> None:
        """The last write may come before the hub is at the gate."""
        gate.reached.wait(PATIENCE)
        while not damaged:
            time.sleep(0.01)
        gate.opens.set()

    threading.Thread(target=open_gate, daemon=True).start()
    with observe_steps(look):
        folder = call.make()
    assert damaged
    assert gate.in_time
    expected = split(model, compression=compression)
    assert layer_files(folder) == layer_files(expected)
    assert sums_of_layers(folder) == sums_of_layers(expected)


def sums_of_layers(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    manifest = read_manifest(folder)
    assert manifest is not None
    return {record.file: (record.crc32, record.blocks) for record in manifest.layers}


# One by one


@pytest.fixture
def repository(model: Path, local_hub: LocalHub, hub_environment: HubEnvironment, tmp_path: Path) -> HubRepository:
    local_hub.add_revision(REPO, "main", model)
    return open_repository(REPO, HubAccess(), tmp_path / "staging")


def planned(repository: HubRepository, shards: list[str]) -> list[PlannedShard]:
    return [PlannedShard(name, repository.files[name].size, "", (), staged=True) for name in shards]


Start = Callable[..., ShardFetcher]


@pytest.fixture
def start(repository: HubRepository) -> Iterator[Start]:
    begun: list[ShardFetcher] = []

    def make(room: int = 1, watch: Callable[[], None] = lambda: None) -> ShardFetcher:
        begun.append(ShardFetcher(HubCheckpoint(repository), room, watch))
        return begun[-1]

    yield make
    for fetcher in begun:
        fetcher.close()


def test_waiting_returns_when_the_bytes_have_arrived(
    repository: HubRepository, model: Path, shards: list[str], start: Start
) -> None:
    for shard, arriving in start().shards(planned(repository, shards)):
        content = (model / shard.name).read_bytes()
        for end in (1, 5000, len(content) // 2, len(content)):
            with arriving.until(end).open("rb") as file:
                assert file.read(end) == content[:end]
        assert arriving.whole().read_bytes() == content
        repository.release(shard.name)


def test_wrong_bytes_raise_an_error(
    repository: HubRepository, local_hub: LocalHub, shards: list[str], start: Start
) -> None:
    local_hub.faults = Faults(flip_byte=repository.files[shards[0]].size - 1)
    _, arriving = next(start().shards(planned(repository, shards)))
    arriving.until(1000)
    with pytest.raises(HubError, match="arrived with sha256"):
        arriving.whole()
    with pytest.raises(HubError, match="arrived with sha256"):
        arriving.until(1000)
    assert not repository.staged(shards[0]).exists()


def test_reader_of_damaged_bytes_gets_one_error(repository: HubRepository, shards: list[str], start: Start) -> None:
    repository.staging.mkdir()
    repository.staged(shards[0]).write_bytes(bytes(1000))
    _, arriving = next(start().shards(planned(repository, shards)))
    with pytest.raises(StartedOverError):
        arriving.whole()
    assert arriving.whole() == repository.staged(shards[0])


@pytest.mark.parametrize("room", [1, 2])
def test_fetched_shards_are_limited(
    repository: HubRepository, model: Path, shards: list[str], start: Start, room: int
) -> None:
    incoming = start(room).shards(planned(repository, shards))
    _, first = next(incoming)
    first.whole()
    staged, size = repository.staged(shards[1]), (model / shards[1]).stat().st_size
    deadline = time.monotonic() + (PATIENCE if room == 2 else 0.3)
    while time.monotonic() < deadline and not (staged.exists() and staged.stat().st_size == size):
        time.sleep(0.01)
    assert staged.exists() == (room == 2)
    _, second = next(incoming)
    assert second.whole() == staged


def test_watch_can_stop_a_fetch(repository: HubRepository, shards: list[str], start: Start) -> None:
    def refuse() -> None:
        raise KeyError("the disk is full")

    _, arriving = next(start(watch=refuse).shards(planned(repository, shards)))
    with pytest.raises(KeyError, match="the disk is full"):
        arriving.until(1000)


def test_closing_does_not_wait_for_a_silent_hub_and_ends_all_writes(
    model: Path, shards: list[str], local_hub: LocalHub, hub_environment: HubEnvironment, tmp_path: Path
) -> None:
    gate = Gate(local_hub, model, shards[0], 5_000_000)
    repository = open_repository(REPO, HubAccess(), tmp_path / "staging")
    fetcher = ShardFetcher(HubCheckpoint(repository), 1, lambda: None)
    _, arriving = next(fetcher.shards(planned(repository, shards)))
    arriving.until(100_000)
    assert gate.reached.wait(PATIENCE)
    start = time.monotonic()
    fetcher.close()
    assert time.monotonic() - start < PATIENCE
    written: list[Step] = []
    with durable.observe_steps(written.append):
        gate.opens.set()
        thread = fetcher._thread
        assert thread is not None
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert written == []
