"""What is read to find how fast streamed layers come, and that nothing of it is left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from rabbitllm.engine.span_reader import BLOCK, READ_BYTES, THROUGH_THE_CACHE, ReadMode
from rabbitllm.estimate import reading
from rabbitllm.estimate.reading import FileSample, something_to_read, upload_rate
from tests.support.fake_gpu import FakeGpu


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SAMPLE_BYTES", 1 << 20)
    monkeypatch.setattr(reading, "WRITTEN_BYTES", READ_BYTES)
    monkeypatch.setattr(reading, "UPLOADED_BYTES", 1 << 16)
    monkeypatch.setattr(reading, "SECONDS", 0.02)


def file(folder: Path, nbytes: int, name: str = "f") -> Path:
    path = folder / name
    path.write_bytes(os.urandom(nbytes))
    return path


def test_pieces_are_spread_over_the_files(tmp_path: Path) -> None:
    files = [file(tmp_path, 3_000_000, name) for name in "abc"]
    spans = FileSample(files, 100_000).spans
    assert {span.file for span in spans} == {"0", "1", "2"}
    assert all(span.offset % BLOCK == 0 and span.offset + span.nbytes <= 3_000_000 for span in spans)
    assert 1 << 19 <= sum(span.nbytes for span in spans) <= 1 << 20


def test_of_a_small_file_all_is_read(tmp_path: Path) -> None:
    assert [(span.offset, span.nbytes) for span in FileSample([file(tmp_path, 1000)], 1 << 30).spans] == [(0, 1000)]


def test_runs_of_an_expert_are_as_long_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of DeepSeek-V3's is 44 MB, and was not found in runs of what one call reads."""
    monkeypatch.setattr(reading, "READ_BYTES", 1 << 16)
    files = [file(tmp_path, 900_000)]
    assert {span.nbytes for span in FileSample(files, 1 << 18).spans} <= {1 << 16, 900_000 % (1 << 16)}
    whole = FileSample(files, 1 << 18, whole=True)
    assert [span.nbytes for span in whole.spans].count(1 << 18) == 3
    assert (whole.rate(THROUGH_THE_CACHE) or 0) > 0


@pytest.mark.parametrize("way", [THROUGH_THE_CACHE, ReadMode(drop=True)])
def test_rates(tmp_path: Path, way: ReadMode) -> None:
    sample = FileSample([file(tmp_path, 2_000_000)], 300_000)
    assert (sample.rate(way) or 0) > 0
    assert (sample.cached_rate() or 0) > 0
    assert (sample.mapped_rate() or 0) > 0
    with sample.going_on(way) as beside:
        pass
    assert (beside.rate or 0) > 0


def test_nothing_to_read_has_no_rate(tmp_path: Path) -> None:
    for sample in (FileSample([], 1), FileSample([file(tmp_path, 0)], 1)):
        assert sample.spans == ()
        assert sample.rate(THROUGH_THE_CACHE) is sample.cached_rate() is sample.mapped_rate() is None
    gone = file(tmp_path, 5000)
    sample = FileSample([gone], 1 << 20)
    gone.unlink()
    assert sample.rate(THROUGH_THE_CACHE) is None


def test_files_that_are_there_are_taken(tmp_path: Path) -> None:
    here, before = file(tmp_path, 5000), sorted(tmp_path.iterdir())
    with something_to_read(tmp_path / "not" / "there", [here, tmp_path / "gone"], 0) as found:
        assert list(found) == [here]
    assert sorted(tmp_path.iterdir()) == before


def test_where_there_are_none_one_without_a_name_is_written(tmp_path: Path) -> None:
    status = tmp_path.stat()
    with something_to_read(tmp_path / "not" / "there", [], 0) as found:
        assert list(tmp_path.iterdir()) == []
        (path,) = found
        assert 0 < path.stat().st_size <= READ_BYTES
        assert path.stat().st_dev == status.st_dev
        assert (FileSample(found, 1 << 18).rate(THROUGH_THE_CACHE) or 0) > 0
    assert not path.exists() or path.stat().st_size == 0
    assert list(tmp_path.iterdir()) == []


def test_without_room_nothing_is_written(tmp_path: Path) -> None:
    with something_to_read(tmp_path, [], shutil.disk_usage(tmp_path).free) as found:
        assert list(found) == []


def test_uploads_go_the_engines_way() -> None:
    gpu = FakeGpu(0)
    assert upload_rate(gpu) > 0
    assert gpu.locked == {}  # else the driver would go on believing in memory that is gone
    assert upload_rate(FakeGpu(0, lockable=0)) > 0
    assert gpu.uploads >= 2
    assert gpu.uploaded_bytes == gpu.uploads * (1 << 16)
