"""Sequences whose KV cache is in a file get the tokens that they get alone."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.generation import _cache_file, _sequence, cache_manager, memory
from rabbitllm.generation._packed_batch import PACKABLE
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.kv_cache import cost_by_config
from rabbitllm.generation.request import BatchStats, Limits, Request
from rabbitllm.storage.durable import Step, observe_steps
from tests.generation.submitting import Open, Submitted, alone, begin, prompt
from tests.support.builders import FAMILIES, build_checkpoint
from tests.support.tiny_models import plain_model, split

SHOWN = ("llama", "gemma3", "deepseek_v3")
"""Layers that keep every token, alone and with sliding windows, and latent attention."""
RUNNING = 12
NEW_TOKENS = 14
ROOM_TEXTS = 3
"""For so many of them there is memory."""

each_family = pytest.mark.parametrize(
    "family",
    [
        *SHOWN,
        *(pytest.param(name, marks=pytest.mark.long) for name in sorted(PACKABLE & {*FAMILIES}) if name not in SHOWN),
    ],
)


@pytest.fixture(autouse=True)
def all_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sequence, "RESERVED_TOKENS", 4)
    for module in (_cache_file, memory, cache_manager):
        monkeypatch.setattr(module, "TAIL_TOKENS", 4)


def requests(count: int = RUNNING + 3) -> list[Request]:
    return [Request(prompt(38 + index % 5, index), NEW_TOKENS - index % 3) for index in range(count)]


def limits(plain: Any, folder: Path, **options: Any) -> Limits:
    cost = cost_by_config(plain.config.get_text_config(decoder=True), plain.dtype)
    room = ROOM_TEXTS * cost.bytes_for(50)
    return Limits(RUNNING, 256, room, throughput=True, file_bytes=1 << 26, swap_folder=folder, **options)


def together(batch: Batch, queue: Sequence[Request]) -> tuple[list[Submitted], list[BatchStats]]:
    """All at once, with what there was at each token of the first."""
    stats: list[BatchStats] = []
    with batch.paused():
        submitted = [begin(batch, request) for request in queue[1:]]
        first = Submitted(queue[0])

        def receive(event: Any) -> None:
            stats.append(batch.stats)
            first.receive(event)

        first.handle = batch.submit(queue[0], receive)
    return [answer.wait() for answer in (first, *submitted)], stats


@each_family
def test_tokens_are_those_alone_and_more_sequences_share_a_pass(tmp_path: Path, open_batch: Open, family: str) -> None:
    folder = build_checkpoint(tmp_path / family, family, dtype=torch.float32)
    plain = plain_model(folder, dtype=torch.float32).eval()
    batch, model = open_batch(limits(plain, tmp_path), folder=split(folder), budget=0)
    several, over_time = together(batch, requests())
    for answer in several:
        assert answer.tokens == alone(plain, answer.request)
    assert batch.stats.preempted == 0
    if family in SHOWN:
        assert model.placement.streamed_bytes > batch.stats.cache_limit_bytes
        assert max(stats.running for stats in over_time) > 3 * ROOM_TEXTS  # some may have ended with their first token
        assert batch.stats.file_read_bytes > 0
    assert all(stats.cache_bytes <= stats.cache_limit_bytes for stats in over_time)
    assert batch.stats.file_bytes == 0


def test_without_a_file_memory_limits_running_sequences(open_batch: Open, plain: Any, tmp_path: Path) -> None:
    options = limits(plain, tmp_path)
    batch, _ = open_batch(Limits(RUNNING, 256, options.cache_bytes, throughput=True), budget=0)
    several, over_time = together(batch, requests(8))
    assert max(stats.running for stats in over_time) <= ROOM_TEXTS + 1
    assert [answer.tokens for answer in several] == [alone(plain, answer.request) for answer in several]


def test_a_shared_prefix_is_computed_once(open_batch: Open, plain: Any, tmp_path: Path) -> None:
    beginning = prompt(70, 99)
    batch, _ = open_batch(limits(plain, tmp_path), budget=0)
    several, _ = together(batch, [Request((*beginning, 5 + index, 9), 6) for index in range(8)])
    assert [answer.tokens for answer in several] == [alone(plain, answer.request) for answer in several]
    assert batch.stats.file_read_bytes > 0
    assert batch.stats.kept_tokens >= 7 * 64


def test_a_full_disk_has_them_computed_again(
    open_batch: Open, plain: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(step: Step) -> None:
        if step.path == tmp_path and step.offset > 50_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    batch, _ = open_batch(limits(plain, tmp_path, swap_bytes=0), budget=0)
    with observe_steps(full):
        several, _ = together(batch, requests())
    assert [answer.tokens for answer in several] == [alone(plain, answer.request) for answer in several]
    assert batch.stats.preempted > 0
    assert batch.stats.file_bytes == 0
    assert caplog.text.count("cannot be written to a file") == 1


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the file has no name")
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "by themselves"])
def test_an_unreadable_sequence_is_recomputed_alone(
    open_batch: Open, plain: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, packs: bool
) -> None:
    """The file is cut: reads after its end fail, as from a broken disk."""
    batch, _ = open_batch(limits(plain, tmp_path, swap_bytes=0), budget=0)
    queue, cut = requests(), []
    with batch.paused():
        submitted = [begin(batch, request) for request in queue[1:]]
        first = Submitted(queue[0])

        def receive(event: Any) -> None:
            first.receive(event)
            if not cut and batch.stats.file_read_bytes:
                for link in Path("/proc/self/fd").iterdir():
                    with contextlib.suppress(OSError):
                        if os.readlink(link).startswith(str(tmp_path)):
                            cut.append(link)
                            os.truncate(link, os.stat(link).st_size // 3)
                if not packs:
                    batch._scheduler._runner._packed = None

        batch.submit(first.request, receive)
    several = [answer.wait() for answer in (first, *submitted)]
    assert cut
    assert [answer.tokens for answer in several] == [alone(plain, answer.request) for answer in several]
    assert 0 < batch.stats.preempted < len(queue)
    assert batch.error is None
    assert caplog.text.count("cannot be written to a file") == 1


@pytest.mark.parametrize("share", [2, 3, 5])
def test_a_small_file_holds_some_sequences_and_others_wait(
    open_batch: Open, plain: Any, tmp_path: Path, share: int
) -> None:
    options = limits(plain, tmp_path)
    assert options.cache_bytes is not None
    small = dataclasses.replace(options, file_bytes=RUNNING * options.cache_bytes // ROOM_TEXTS // share)
    batch, _ = open_batch(small, budget=0)
    several, _ = together(batch, requests())
    assert [answer.tokens for answer in several] == [alone(plain, answer.request) for answer in several]
    assert batch.stats.file_read_bytes > 0
    assert batch.stats.passes < 15 * NEW_TOKENS


def test_cancelled_requests_leave_no_buffers(open_batch: Open, plain: Any, tmp_path: Path) -> None:
    batch, _ = open_batch(limits(plain, tmp_path), budget=0)
    submitted: list[Submitted] = []

    def receive(event: Any) -> None:
        if batch.stats.file_read_bytes:
            for answer in submitted[1::2]:
                assert answer.handle is not None
                answer.handle.cancel()
        submitted[0].receive(event)

    with batch.paused():
        submitted.append(Submitted(requests()[0]))
        batch.submit(submitted[0].request, receive)
        submitted += [begin(batch, request) for request in requests()[1:]]
    for answer in submitted[::2]:
        assert answer.wait().tokens == alone(plain, answer.request)
    for answer in submitted:
        answer.wait()
    assert batch.stats.ended["cancelled"] > 0
    assert batch.stats.file_bytes == 0


@pytest.mark.parametrize("why", ["switched off", "memory has more", "exact"])
def test_no_file_where_it_does_not_pay(open_batch: Open, plain: Any, tmp_path: Path, why: str) -> None:
    options: dict[str, Any] = {"file_bytes": 0 if why == "switched off" else None, "exact": why == "exact"}
    room = 1 << 26 if why == "memory has more" else 200_000
    batch, _ = open_batch(Limits(4, 64, room, throughput=True, swap_folder=tmp_path, **options), budget=0)
    assert batch._scheduler.caches.file.buffers.limit == 0
