"""A KV cache that is in a file between passes has the bits of one that stays in memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from rabbitllm.generation import cache_file
from rabbitllm.generation.cache_file import CacheFile, ImagesAhead
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.storage.files import DIRECT_ALIGNMENT

LAYERS, HEADS, WIDTH, VALUE_WIDTH = 3, 2, 8, 4
PROMPTS = (11, 5, 8)
STEPS = 9
"""More than a text's tail has, so that layers are written again."""


@pytest.fixture(autouse=True)
def short_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_file, "TAIL_TOKENS", 4)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., CacheFile]]:
    made: list[CacheFile] = []

    def open_one(limit: int = 1 << 20, ahead: int = 1 << 12, weight_bytes: int = 0) -> CacheFile:
        made.append(CacheFile(tmp_path, limit, ahead, weight_bytes))
        return made[-1]

    yield open_one
    for one in made:
        one.close()


def new(rows: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn((1, HEADS, rows, WIDTH), generator=generator)
    return keys.to(dtype), torch.randn((1, HEADS, rows, VALUE_WIDTH), generator=generator).to(dtype)


def attend(file: CacheFile, caches: list[Any], plain: list[Any], rows: list[int], seed: int) -> None:
    """One pass: each layer of each sequence gets rows, and returns the KV cache of one that was always in memory."""
    file.begin(caches)
    for number in range(LAYERS):
        for text, (cache, other) in enumerate(zip(caches, plain, strict=True)):
            keys, values = new(rows[text], 1000 * seed + 10 * number + text)
            expected = other.update(keys, values, number)
            if not file.brings(cache, number):
                got = cache.update(keys, values, number)
            else:
                got = file.joined(cache, number, keys, values)
            assert all(torch.equal(one, two) for one, two in zip(got, expected, strict=True))
            if file.brings(cache, number):
                file.put_back(cache, number, keys, values)
            assert cache.get_seq_length(number) == other.get_seq_length(number)


def caches() -> tuple[list[Any], list[Any]]:
    """Of texts, and of the same ones in memory."""
    made = [DynamicCache() for _ in (*PROMPTS, *PROMPTS)]
    for cache in made:
        cache.layers = [DynamicLayer() for _ in range(LAYERS)]
    return made[: len(PROMPTS)], made[len(PROMPTS) :]


@pytest.mark.parametrize("ahead", [0, 1 << 9, 1 << 20])
def test_attention_sees_what_it_would_see_in_memory(opened: Callable[..., CacheFile], ahead: int) -> None:
    file, (texts, plain) = opened(ahead=ahead), caches()
    for one in texts[:2]:
        file.add(one)
    attend(file, texts, plain, [*PROMPTS], 0)
    for step in range(STEPS):
        attend(file, texts, plain, [1, 1, 1], step + 1)
    assert all(torch.isnan(layer.keys).all() for layer in texts[0].layers)
    assert file.nbytes > 0
    assert file.read > STEPS * LAYERS * HEADS * (PROMPTS[0] + PROMPTS[1]) * (WIDTH + VALUE_WIDTH) * 2
    attend(file, texts, plain, [6, 1, 1], 99)  # several at once, as of a prompt that is cut
    for one in texts:
        file.drop(one)
    assert file.nbytes == 0


def test_attention_sees_the_same_past_the_page_cache(
    opened: Callable[..., CacheFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_file, "LEAST_BLOCKS", 0)  # these are small, and go past it all the same
    file, (texts, plain) = opened(ahead=1 << 14, weight_bytes=1 << 60), caches()
    for one in texts:
        file.add(one)
    attend(file, texts, plain, [*PROMPTS], 0)
    for step in range(STEPS):
        attend(file, texts, plain, [1, 1, 1], step + 1)
    assert file.nbytes == len(texts) * LAYERS * DIRECT_ALIGNMENT
    assert file.read == STEPS * file.nbytes
    for one in texts:
        file.let_return(one)
    attend(file, texts, plain, [1, 1, 1], STEPS + 1)
    assert file.nbytes == 0


def test_texts_go_there_at_any_time_and_come_back(opened: Callable[..., CacheFile]) -> None:
    file, (texts, plain) = opened(), caches()
    attend(file, texts, plain, [*PROMPTS], 0)
    file.add(texts[0])
    file.put(texts[1])
    assert torch.isnan(texts[1].layers[0].keys).all()
    for step in range(3):
        attend(file, texts, plain, [1, 1, 1], step + 1)
    copied = file.whole_copy(texts[0])
    assert all(torch.equal(one.keys, two.keys) for one, two in zip(copied.layers, plain[0].layers, strict=True))
    file.let_return(texts[0])
    assert file.holds(texts[0])
    assert not file.keeps(texts[0])
    attend(file, texts, plain, [1, 1, 1], 7)
    assert not file.holds(texts[0])
    file.begin([texts[0]], [texts[1], None])
    for text in range(2):
        for one, two in zip(texts[text].layers, plain[text].layers, strict=True):
            assert torch.equal(one.keys, two.keys)
            assert torch.equal(one.values, two.values)
    assert file.nbytes == 0


def test_never_more_than_so_much_is_ahead(opened: Callable[..., CacheFile], monkeypatch: pytest.MonkeyPatch) -> None:
    file, (texts, plain) = opened(ahead=1 << 11), caches()
    for one in texts:
        file.add(one)
    attend(file, texts, plain, [*PROMPTS], 0)
    seen: list[int] = []
    take = ImagesAhead.take

    def taken(self: ImagesAhead, *given: Any) -> Any:
        seen.append(sum(len(image.whole) for image, _ in self._coming.values()))
        assert seen[-1] == self.nbytes
        return take(self, *given)

    monkeypatch.setattr(ImagesAhead, "take", taken)
    attend(file, texts, plain, [1, 1, 1], 1)
    assert len(seen) == LAYERS * len(PROMPTS)
    assert min(seen[:-1]) > 0
    assert max(seen) <= 1 << 11


def test_a_pass_that_broke_off_leaves_nothing_behind(opened: Callable[..., CacheFile]) -> None:
    file, (texts, plain) = opened(), caches()
    for one in texts:
        file.add(one)
    attend(file, texts, plain, [*PROMPTS], 0)
    file.begin(texts)
    file.drop(texts[0])
    file.begin(texts[1:])
    attend(file, texts[1:], plain[1:], [1, 1], 1)


@pytest.mark.parametrize("full", [True, False], ids=["full disk", "limit"])
def test_what_cannot_be_written_is_lost_and_the_pass_is_right(
    opened: Callable[..., CacheFile], full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file, (texts, plain) = opened(limit=1 << 20 if full else 2500), caches()
    for one in texts[:2]:
        file.add(one)

    def fail(step: Step) -> None:
        if full and step.offset > 1500:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with observe_steps(fail):
        attend(file, texts, plain, [*PROMPTS], 0)
    assert [file.is_lost(one) for one in texts] == [True, True, False]
    assert file.limit == 0 if full else 0 < file.limit < 2500
    assert caplog.text.count("No space left on device") == int(full)
    for one in texts[:2]:
        file.drop(one)
    assert file.nbytes == 0
    attend(file, texts[2:], plain[2:], [1], 1)


def test_the_file_has_no_name_and_is_gone_with_it(opened: Callable[..., CacheFile], tmp_path: Path) -> None:
    file, (texts, plain) = opened(), caches()
    file.add(texts[0])
    attend(file, texts, plain, [*PROMPTS], 0)
    assert file.written > 0
    assert not list(tmp_path.iterdir())
