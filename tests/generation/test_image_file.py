"""Images that are in a file: read as they were written, and not in the page cache unless all of it stays there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.generation.cache_file import Image, ImageFile, image_of
from rabbitllm.storage.files import DIRECT_ALIGNMENT
from tests.engine.test_span_reader import _cached_pages

MORE_THAN_ANY_MEMORY = 1 << 60
TOKENS = (300, 301, 700)
"""Of images larger than what is kept small; two of them not of whole blocks."""

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT, mincore, /proc")


def image(tokens: int, seed: int) -> Image:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn((1, 2, tokens, width), generator=generator).bfloat16() for width in (40, 24))
    return image_of(keys, values, 3)


def opened(folder: Path, beside: int) -> ImageFile:
    return ImageFile(folder, 1 << 22, beside)


def pages(folder: Path) -> int:
    """In the page cache, of the nameless files in a folder that this process has open."""
    return sum(_cached_pages(path) for path in nameless(folder))


def nameless(folder: Path) -> Iterator[Path]:
    seen = set()
    for path in Path("/proc/self/fd").iterdir():
        if os.path.lexists(path) and str(path.readlink()).startswith(f"{folder}/"):
            status = path.stat()
            if status.st_ino not in seen:
                seen.add(status.st_ino)
                yield path


def fill_and_compare(file: ImageFile, seeds: range) -> None:
    """Images there and back, some of them in places of others that were given back."""
    kept: dict[int, tuple[Any, Image]] = {}
    for seed in seeds:
        one = image(TOKENS[seed % len(TOKENS)], seed)
        stored = file.put(one)
        assert stored is not None
        kept[seed] = stored, one
        if seed % 4 == 3:
            file.give_back(kept.pop(seed - 2)[0])
    for stored, one in kept.values():
        back = file.get(stored)
        assert torch.equal(back.keys, one.keys)
        assert torch.equal(back.values, one.values)
        assert back.form == one.form


@on_linux
def test_what_does_not_stay_in_the_page_cache_leaves_nothing_there(tmp_path: Path) -> None:
    file = opened(tmp_path, MORE_THAN_ANY_MEMORY)
    fill_and_compare(file, range(12))
    assert file.is_past_the_cache
    assert file.nbytes > 100 * DIRECT_ALIGNMENT
    assert pages(tmp_path) == 0
    file.close()


@on_linux
def test_where_memory_has_room_for_all_of_it_the_page_cache_keeps_it(tmp_path: Path) -> None:
    file = opened(tmp_path, 0)
    fill_and_compare(file, range(12))
    assert not file.is_past_the_cache
    assert pages(tmp_path) >= file.nbytes // DIRECT_ALIGNMENT
    file.close()


@on_linux
def test_from_when_on_it_does_not_stay_there_it_goes_past(tmp_path: Path) -> None:
    file = opened(tmp_path, 0)
    first = image(300, 0)
    stored = file.put(first)
    assert stored is not None
    assert pages(tmp_path) > 0
    file._weight_bytes = MORE_THAN_ANY_MEMORY
    fill_and_compare(file, range(1, 12))
    assert file.is_past_the_cache
    assert torch.equal(file.get(stored).keys, first.keys)  # written through the cache, read past it
    assert pages(tmp_path) == 0
    file.close()


@on_linux
def test_without_direct_reads_it_is_dropped_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    file = opened(tmp_path, MORE_THAN_ANY_MEMORY)
    made = [image(tokens, seed) for seed, tokens in enumerate(4 * TOKENS)]
    held = [file.put(one) for one in made]
    for path in nameless(tmp_path):
        with path.open("rb+") as again:
            os.fsync(again)  # what is not on the disk yet cannot be dropped
    for one, stored in zip(made, held, strict=True):
        assert stored is not None
        assert torch.equal(file.get(stored).values, one.values)
    assert pages(tmp_path) == 0
    for stored in held[: len(TOKENS)]:
        assert stored is not None
        file.get(stored)
    assert pages(tmp_path) == 0  # nor has anything been read ahead of the next one
    file.close()


@pytest.mark.parametrize("beside", [0, MORE_THAN_ANY_MEMORY])
def test_small_images_take_what_they_are(tmp_path: Path, beside: int) -> None:
    file = opened(tmp_path, beside)
    small, large = image(5, 1), image(300, 2)
    assert len(small.whole) == 2 * (5 + 3) * (40 + 24) * 2
    assert len(large.whole) % DIRECT_ALIGNMENT == 0
    assert large.is_aligned
    first, second = file.put(small), file.put(large)  # a large one whose place is on no block
    assert first is not None
    assert second is not None
    assert second.place % DIRECT_ALIGNMENT
    assert torch.equal(file.get(first).values, small.values)
    assert torch.equal(file.get(second).values, large.values)
    file.close()
