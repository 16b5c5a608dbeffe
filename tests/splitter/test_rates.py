"""Measurements on small samples: how much they read, how long they may take, and that their rates are real."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from rabbitllm.checkpoints.hub import HubAccess, HubRepository, open_repository
from rabbitllm.errors import MissingPackageError
from rabbitllm.splitter import split_estimate
from rabbitllm.splitter.plan import CHUNK_BYTES
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import GeneratedFile, LocalHub
from tests.support.plans import MIB

REPO = "org/model"
SHARD = "model.safetensors"


def repository(hub: LocalHub, size: int) -> HubRepository:
    """A repository with one large file, of which no digest need be computed."""
    hub.add_generated(REPO, {SHARD: GeneratedFile(size, lambda offset, length: bytes(length), "0" * 64)})
    opened = open_repository(REPO, HubAccess(), Path())
    hub.forget_requests()
    return opened


def test_fetch_asks_for_the_sample_alone(hub_environment: HubEnvironment, local_hub: LocalHub) -> None:
    found = split_estimate.fetch_rate(repository(local_hub, 1 << 40), SHARD)
    assert found is not None
    assert found.measured_bytes == split_estimate.FETCHED_BYTES
    assert [request.range for request in local_hub.requests] == [f"bytes=0-{split_estimate.FETCHED_BYTES - 1}"]
    assert local_hub.body_bytes() == split_estimate.FETCHED_BYTES


def test_fetch_of_a_small_shard(hub_environment: HubEnvironment, local_hub: LocalHub) -> None:
    found = split_estimate.fetch_rate(repository(local_hub, 1000), SHARD)
    assert found is not None
    assert found.measured_bytes == 1000


def test_fetch_is_as_fast_as_the_hub(hub_environment: HubEnvironment, local_hub: LocalHub) -> None:
    """A hub that needs a tenth of a second for each MiB sends at most 10 MiB a second."""
    opened = repository(local_hub, 1 << 30)
    local_hub.faults.delay_per_mib = 0.1
    found = split_estimate.fetch_rate(opened, SHARD)
    assert found is not None
    assert 0 < found.bytes_per_second < 12 * MIB


def test_fetch_stops_in_time(
    hub_environment: HubEnvironment,
    local_hub: LocalHub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(split_estimate, "MAX_SECONDS", 0.5)
    opened = repository(local_hub, 1 << 30)
    local_hub.faults.delay_per_mib = 0.2
    found = split_estimate.fetch_rate(opened, SHARD)
    assert found is not None
    assert 0 < found.measured_bytes < split_estimate.FETCHED_BYTES


def test_fetch_from_a_hub_that_fails(
    hub_environment: HubEnvironment,
    local_hub: LocalHub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(split_estimate, "MAX_SECONDS", 0.3)
    opened = repository(local_hub, 1 << 30)
    local_hub.faults.status, local_hub.faults.status_times = 404, -1
    assert split_estimate.fetch_rate(opened, SHARD) is None
    local_hub.faults.status = 503
    assert split_estimate.fetch_rate(opened, SHARD) is None


@pytest.mark.parametrize(
    ("arrived", "expected"),
    [
        ([(2.0, 100), (3.0, 400), (4.0, 600)], (1000 / 2, 1100)),  # the wait for the first is no part of the rate
        ([(2.0, 900), (2.1, 100)], (1000 / 2.1, 1000)),  # too little is left without the first
        ([(2.0, 100)], (100 / 2, 100)),
        ([], None),
    ],
)
def test_rate_of_chunks(arrived: list[tuple[float, int]], expected: tuple[float, int] | None) -> None:
    found = split_estimate._steady_rate(arrived)
    assert (found and (pytest.approx(found.bytes_per_second), found.measured_bytes)) == expected


def files(folder: Path, sizes: list[int]) -> list[Path]:
    made = [folder / f"{number}.bin" for number in range(len(sizes))]
    for path, size in zip(made, sizes, strict=True):
        path.write_bytes(bytes(size))
    return made


def test_small_files_are_read_whole(tmp_path: Path) -> None:
    found = split_estimate.read_rate(files(tmp_path, [CHUNK_BYTES + 5, 100, 0, 3 * MIB]))
    assert found is not None
    assert found.measured_bytes == CHUNK_BYTES + 5 + 100 + 3 * MIB
    assert found.bytes_per_second > 0


def test_of_large_files_pieces_all_over_them_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_estimate, "READ_BYTES", 4 * CHUNK_BYTES)
    paths = files(tmp_path, [])
    for number in range(4):
        paths.append(tmp_path / f"large-{number}")
        with paths[-1].open("wb") as file:
            file.truncate(10 * CHUNK_BYTES)
    pieces = list(split_estimate._pieces(paths))
    assert pieces == [(path, 0) for path in paths]
    assert split_estimate.read_rate(paths).measured_bytes == 4 * CHUNK_BYTES  # type: ignore[union-attr]
    assert len(list(split_estimate._pieces(paths[:1]))) == 4


def test_no_files_have_no_rate(tmp_path: Path) -> None:
    assert split_estimate.read_rate([]) is None
    folder = tmp_path / "a folder"
    folder.mkdir()
    assert split_estimate.read_rate([folder]) is None


def test_quantizer_is_called_as_a_split_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, int, str, str, bool]] = set()
    threads = set()

    def quantize(
        scheme: str, data: memoryview, dtype: str, device: str, *, fitted: bool
    ) -> tuple[memoryview, memoryview]:
        seen.add((scheme, len(data), dtype, device, fitted))
        threads.add(threading.get_ident())
        time.sleep(0.01)
        return data, data

    monkeypatch.setattr(split_estimate, "quantize_blocks", quantize)
    monkeypatch.setattr(split_estimate, "QUANTIZE_SECONDS", 0.1)
    found = split_estimate.quantize_rate("4bit", "F32", 3, "cuda:7", fitted=True)
    assert seen == {("4bit", CHUNK_BYTES, "F32", "cuda:7", True)}
    assert len(threads) == 3
    assert found is not None
    assert found.bytes_per_second <= 3 * CHUNK_BYTES / 0.01
    assert found.measured_bytes >= 3 * CHUNK_BYTES


@pytest.mark.parametrize(("scheme", "fitted"), [("4bit", False), ("8bit", False), ("4bit-double", True)])
def test_quantizer_itself(scheme: str, fitted: bool) -> None:
    found = split_estimate.quantize_rate(scheme, "BF16", 2, "cpu", fitted=fitted)
    assert found is not None
    assert found.measured_bytes % CHUNK_BYTES == 0
    assert 1e6 < found.bytes_per_second < 1e12


def test_nothing_is_drawn_from_a_caller_s_seed() -> None:
    state = torch.get_rng_state()
    assert split_estimate.quantize_rate("8bit", "BF16", 1, "cpu") is not None
    assert torch.equal(torch.get_rng_state(), state)


def test_without_bitsandbytes_there_is_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object, **named: object) -> None:
        raise MissingPackageError("not installed")

    monkeypatch.setattr(split_estimate, "quantize_blocks", missing)
    assert split_estimate.quantize_rate("8bit", "BF16", 2, "cpu") is None
