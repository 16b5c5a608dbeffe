"""Checksums of blocks: where a layer file is cut, and that each block is compared once, before it is used."""

from __future__ import annotations

import itertools
import random
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rabbitllm.errors import IncompleteSplitError
from rabbitllm.formats.safetensors_file import MappedFile, TensorToWrite, encode_header, read_header
from rabbitllm.storage.files import CAN_MAP_PRIVATELY
from rabbitllm.store import checksums
from rabbitllm.store.checksums import LayerChecks, block_starts, block_sums, numbers, sums_of_file
from tests.support.draws import draws

BLOCK = 4096
SIZES = {"large": 5 * BLOCK, "larger": 9 * BLOCK + 64, "small": 700, "smaller": 60, "last": 3 * BLOCK + 5}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(checksums, "OWN_BLOCK_BYTES", 2 * BLOCK)
    monkeypatch.setattr(checksums, "GROUP_BYTES", 3 * BLOCK)


@pytest.fixture
def read_again(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Ranges of files that were read for a comparison."""
    ranges: list[tuple[int, int]] = []
    of_mapped, of_file = checksums._crc_of_mapped, checksums._crc_of_file

    def recorded(mapped: memoryview, begin: int, end: int, crc: int) -> int:
        if begin < end:
            ranges.append((begin, end))
        return of_mapped(mapped, begin, end, crc)

    def recorded_of_file(path: Path, begin: int, end: int, crc: int = 0) -> int:
        ranges.append((begin, end))
        return of_file(path, begin, end, crc)

    monkeypatch.setattr(checksums, "_crc_of_mapped", recorded)
    monkeypatch.setattr(checksums, "_crc_of_file", recorded_of_file)
    return ranges


def write(folder: Path, name: str = "layer.safetensors") -> tuple[bytes, list[int]]:
    """A layer file; its bytes, and where its blocks begin."""
    parts = [TensorToWrite(part, "U8", (nbytes,)) for part, nbytes in SIZES.items()]
    header, places = encode_header(parts)
    content = header + random.Random(3).randbytes(sum(SIZES.values()))
    (folder / name).write_bytes(content)
    return content, block_starts(len(content), len(header), zip(places, SIZES.values(), strict=True))


def opened(folder: Path, content: bytes, *, blocks: bool = True, name: str = "layer.safetensors") -> LayerChecks:
    """Checks of the file as it is now, by the checksums of `content`."""
    header = read_header(folder / name)
    starts = block_starts(len(content), header.data_start, ((part.offset, part.nbytes) for part in header.tensors))
    ends = [*starts[1:], len(content)]
    runs = [(b, e - b, zlib.crc32(content[b:e])) for b, e in zip(starts, ends, strict=True)]
    checks, mapped = LayerChecks(folder), MappedFile(folder / name)
    checks.open(name, header, mapped.whole, zlib.crc32(content), block_sums(runs, starts) if blocks else None)
    return checks


def flip(path: Path, offset: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1 << bit
    path.write_bytes(raw)


def test_block_starts_of_a_file(tmp_path: Path) -> None:
    content, starts = write(tmp_path)
    large = BLOCK  # the header is a block
    larger = large + SIZES["large"]
    small = larger + SIZES["larger"]
    last = small + SIZES["small"] + SIZES["smaller"]
    cuts = {0, large, larger, last, *range(0, len(content), BLOCK)}
    assert starts == sorted(cuts)
    assert small not in cuts
    assert larger % BLOCK == 0
    assert last % BLOCK


def test_sums_of_blocks_are_those_of_the_file(tmp_path: Path) -> None:
    content, starts = write(tmp_path)
    expected = [zlib.crc32(content[b:e]) for b, e in zip(starts, [*starts[1:], len(content)], strict=True)]
    whole, sums = sums_of_file(tmp_path / "layer.safetensors", starts)
    assert (whole, numbers(sums)) == (zlib.crc32(content), expected)
    chance = random.Random(1)  # any further cuts make the same sums
    cuts = sorted({*starts, *(chance.randrange(len(content)) for _ in range(30)), len(content)})
    runs = [(b, e - b, zlib.crc32(content[b:e])) for b, e in itertools.pairwise(cuts)]
    assert block_sums(runs, starts) == sums


def ranges_of(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 3 * BLOCK)), min_size=1, max_size=5)


@settings(max_examples=draws(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), read=st.booleans())
def test_flipped_bit_is_found_when_its_block_is_read(tmp_path: Path, data: st.DataObject, read: bool) -> None:
    content, starts = write(tmp_path)
    path = tmp_path / "layer.safetensors"
    flipped = data.draw(st.integers(BLOCK, len(content) - 1))
    flip(path, flipped, data.draw(st.integers(0, 7)))
    checksums._STATES.clear()  # some file systems keep times by several milliseconds
    checks, now = opened(tmp_path, content), path.read_bytes()
    block = max(start for start in starts if start <= flipped)
    end = next((start for start in starts if start > flipped), len(content))
    for offset, nbytes in data.draw(ranges_of(len(content))):
        stop = min(offset + nbytes, len(content))
        touches = offset < end and stop > block and stop > offset

        def compare(offset: int = offset, stop: int = stop) -> None:
            if read:
                checks.read("layer.safetensors", offset, memoryview(now[offset:stop]))
            else:
                checks.stored("layer.safetensors", [(offset, stop - offset)])

        if touches:
            with pytest.raises(IncompleteSplitError, match=rf"layer.safetensors is damaged: .* {block:,} to {end:,}"):
                compare()
        else:
            compare()


@pytest.mark.skipif(not CAN_MAP_PRIVATELY, reason="a mapped file cannot be replaced there")
def test_an_intact_file_in_its_place_says_nothing_of_a_mapped_one(tmp_path: Path) -> None:
    """A repair puts it there while a model computes with the damaged one."""
    content, starts = write(tmp_path)
    flip(tmp_path / "layer.safetensors", starts[3])
    checks = opened(tmp_path, content)
    (tmp_path / "repaired").write_bytes(content)
    (tmp_path / "repaired").replace(tmp_path / "layer.safetensors")
    for _ in range(2):
        with pytest.raises(IncompleteSplitError, match="damaged"):
            checks.stored("layer.safetensors", [(0, len(content))])
    opened(tmp_path, content).stored("layer.safetensors", [(0, len(content))])


def test_read_bytes_are_compared_instead_of_the_file(tmp_path: Path) -> None:
    content, _ = write(tmp_path)
    checks = opened(tmp_path, content)
    wrong = bytearray(content[BLOCK + 10 : 4 * BLOCK])
    wrong[5000] ^= 4
    with pytest.raises(IncompleteSplitError, match=r"\(in 'large'\)"):
        checks.read("layer.safetensors", BLOCK + 10, memoryview(wrong))
    checks.read("layer.safetensors", BLOCK + 10, memoryview(content)[BLOCK + 10 : 4 * BLOCK])


def test_comparison_reads_few_additional_bytes(tmp_path: Path, read_again: list[tuple[int, int]]) -> None:
    content, _ = write(tmp_path)
    checks = opened(tmp_path, content)
    read_again.clear()
    checks.read("layer.safetensors", 2 * BLOCK + 100, memoryview(content)[2 * BLOCK + 100 : 4 * BLOCK + 1])
    assert read_again == [(2 * BLOCK, 2 * BLOCK + 100), (4 * BLOCK + 1, 5 * BLOCK)]
    read_again.clear()
    offset = BLOCK + SIZES["large"]  # a part that begins a block needs nothing before it
    checks.read("layer.safetensors", offset, memoryview(content)[offset : offset + SIZES["larger"]])
    assert [begin >= offset for begin, _ in read_again] == [True]


def test_every_block_is_compared_once_in_a_process(tmp_path: Path, read_again: list[tuple[int, int]]) -> None:
    content, _ = write(tmp_path)
    size = len(content)
    checks = opened(tmp_path, content)
    checks.stored("layer.safetensors", [(0, size)])
    assert checks.is_done("layer.safetensors")
    read_again.clear()
    checks.stored("layer.safetensors", [(0, size)])
    other = opened(tmp_path, content)  # another model
    assert other.is_done("layer.safetensors")
    other.read("layer.safetensors", 100, memoryview(bytes(500)))
    assert read_again == []
    flip(tmp_path / "layer.safetensors", size - 1)
    with pytest.raises(IncompleteSplitError, match="is damaged"):
        opened(tmp_path, content).stored("layer.safetensors", [(size - 1, 1)])


@pytest.mark.parametrize("at", [0, 5, 9, 300, BLOCK - 1])
def test_a_header_is_compared_at_once(tmp_path: Path, at: int) -> None:
    content, _ = write(tmp_path)
    mapped = MappedFile(tmp_path / "layer.safetensors")
    header = mapped.header
    checks = opened(tmp_path, content)
    flip(tmp_path / "layer.safetensors", at)
    sums = sums_of_file(tmp_path / "layer.safetensors", [0])[0]
    with pytest.raises(IncompleteSplitError, match="is damaged: its header differs from what was written") as caught:
        checks.open("layer.safetensors", header, mapped.whole, sums, opened_blocks(content, header.data_start))
    assert f"rabbitllm verify {tmp_path} --repair" in caught.value.remedy


def opened_blocks(content: bytes, header_bytes: int) -> bytes:
    return zlib.crc32(content[:header_bytes]).to_bytes(4, "little")


def test_wrong_number_of_checksums(tmp_path: Path) -> None:
    content, starts = write(tmp_path)
    mapped = MappedFile(tmp_path / "layer.safetensors")
    with pytest.raises(IncompleteSplitError, match=f"split.json has 1 checksums for its {len(starts)} blocks"):
        LayerChecks(tmp_path).open("layer.safetensors", mapped.header, mapped.whole, 0, opened_blocks(content, BLOCK))


# a file that has one checksum for all of it


@pytest.mark.parametrize("read", [True, False])
def test_a_whole_file_is_compared_at_its_first_use(
    tmp_path: Path, read: bool, read_again: list[tuple[int, int]]
) -> None:
    content, _ = write(tmp_path)
    checks = opened(tmp_path, content, blocks=False)
    assert not checks.by_block("layer.safetensors")
    assert read_again == []
    if read:
        checks.read("layer.safetensors", 2 * BLOCK, memoryview(content)[2 * BLOCK : 5 * BLOCK])
        assert read_again == [(0, 2 * BLOCK), (5 * BLOCK, len(content))]
    else:
        checks.stored("layer.safetensors", [(2 * BLOCK, 3 * BLOCK)])
        assert read_again == [(0, len(content))]
    assert checks.is_done("layer.safetensors")
    read_again.clear()
    checks.stored("layer.safetensors", [(0, len(content))])
    assert opened(tmp_path, content, blocks=False).is_done("layer.safetensors")
    assert read_again == []


@pytest.mark.parametrize("at", [20, BLOCK, 6 * BLOCK + 1, -1])
def test_a_flipped_bit_in_a_whole_file(tmp_path: Path, at: int) -> None:
    content, _ = write(tmp_path)
    path = tmp_path / "layer.safetensors"
    flip(path, at % len(content))
    now = path.read_bytes()
    checks = LayerChecks(tmp_path)
    (tmp_path / "sound").mkdir()
    write(tmp_path / "sound")
    mapped = MappedFile(tmp_path / "sound" / path.name)
    checks.open("layer.safetensors", mapped.header, lambda: memoryview(now), zlib.crc32(content), None)
    for _ in range(2):  # every pass says so
        with pytest.raises(IncompleteSplitError, match=f"checksum is {zlib.crc32(now):08x}; {zlib.crc32(content):08x}"):
            checks.read(path.name, BLOCK, memoryview(now)[BLOCK:])
