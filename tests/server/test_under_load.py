"""A server among clients of every kind: nothing lost, nothing crossed, each place free again, memory flat; restarts."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.measure import percentile
from tests.support import ill_behaved
from tests.support.questions import Question, model_of_words, questions
from tests.support.served_model import ServedModel
from tests.support.stops import unless_stopped
from tests.support.tiny_models import one_thread  # noqa: F401  a fixture that applies by itself
from tests.support.well_behaved import Place, Tally, well_behaved

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="resets and /proc as Linux has them")

FEW, MANY = 25, 150
"""Questions; plain transformers takes its time to answer each of them alone."""
CACHE_BYTES = 1 << 20
"""Full soon, so that what is kept of earlier prompts stops growing, and places are given back at times."""
RUNNING, WAITING = 16, 12
"""Fewer than the clients of the long test, so that some are refused for the moment."""
ANSWER_SECONDS = 20
OPTIONS = (
    *("--max-running", str(RUNNING), "--max-waiting", str(WAITING), "--cache-memory", str(CACHE_BYTES)),
    *("--timeout", str(ANSWER_SECONDS), "--max-body", "1MiB"),
)
Kind = Callable[[Place, random.Random], Coroutine[Any, Any, None]]


async def streaming(place: Place, chance: random.Random) -> None:
    await well_behaved(place, chance, stream=True)


async def not_streaming(place: Place, chance: random.Random) -> None:
    await well_behaved(place, chance, stream=False)


def crowd(count: int, silence: float, tokens: int) -> list[Kind]:
    """So many clients, of every kind in about these shares.

    Args:
        count: in all.
        silence: seconds after which one that waits for the server to close gives up.
        tokens: of a long answer.
    """

    async def silent(place: Place, chance: random.Random) -> None:
        await ill_behaved.falls_silent(place, chance, silence)

    async def talking_garbage(place: Place, chance: random.Random) -> None:
        await ill_behaved.sends_garbage(place, chance, silence)

    async def asking_for_long(place: Place, chance: random.Random) -> None:
        await ill_behaved.asks_for_long(place, chance, tokens)

    shares: dict[Kind, int] = {
        streaming: 24,
        not_streaming: 11,
        ill_behaved.kills: 6,
        ill_behaved.leaves: 4,
        ill_behaved.reads_slowly: 6,
        silent: 4,
        talking_garbage: 3,
        ill_behaved.sends_too_much: 2,
        asking_for_long: 4,
    }
    total = sum(shares.values())
    return [client for client, share in shares.items() for _ in range(max(round(share * count / total), 1))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_words(tmp_path_factory.mktemp("load") / "model")


@pytest.fixture(scope="module")
def few(model: Path) -> list[Question]:
    return questions(model, FEW)


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[ServedModel]:
    """It has not begun yet."""
    model_server = ServedModel(model, tmp_path / "log", *OPTIONS)
    yield model_server
    model_server.kill()


async def watched(server: ServedModel, samples: list[tuple[float, int]]) -> None:
    """Resident bytes of the server, each second."""
    process = server.process
    while True:
        samples.append((time.monotonic(), process.memory_info().rss))
        await asyncio.sleep(1)


async def all_at_once(place: Place, clients: list[Kind], server: ServedModel) -> list[tuple[float, int]]:
    """All clients until the place's time is over and each has what it asked for; the server's memory meanwhile."""
    samples: list[tuple[float, int]] = []
    watching = asyncio.create_task(watched(server, samples))
    await asyncio.gather(*(client(place, random.Random(seed)) for seed, client in enumerate(clients)))
    watching.cancel()
    return samples


def slope(samples: list[tuple[float, int]]) -> float:
    """Bytes a second by least squares, over the second half."""
    half = samples[len(samples) // 2 :]
    return statistics.linear_regression([seconds for seconds, _ in half], [nbytes for _, nbytes in half]).slope


def free_again(server: ServedModel, seconds: float = 60) -> dict[str, float]:
    """Wait until all places are free; the server's metrics then."""
    until = time.monotonic() + seconds
    while True:
        metrics = server.metrics()
        occupied = metrics["rabbitllm_running"] + metrics["rabbitllm_waiting"]
        if not occupied and metrics["rabbitllm_http_requests_open"] <= 1:  # that for /metrics is open itself
            return metrics
        assert time.monotonic() < until, f"places are still taken: {metrics}"
        time.sleep(0.2)


def show(tally: Tally, samples: list[tuple[float, int]], metrics: dict[str, float]) -> None:
    """Print what there was, for `pytest -s` and for the report of a failure."""
    print(f"\nanswered: {dict(tally.answered)}; returned: {tally.returned}")
    print(f"refused for the moment: {dict(tally.refused)}")
    print(f"others: {dict(sorted(tally.did.items()))}")
    for name, values in (("first token", tally.firsts), ("between tokens", tally.betweens)):
        if values:
            print(f"{name}: p50 {percentile(values, 50):.3f} s, p95 {percentile(values, 95):.3f} s")
    if len(samples) > 3:
        sizes = [nbytes / 2**20 for _, nbytes in samples]
        print(
            f"resident: {sizes[0]:.0f} MiB at first, {max(sizes):.0f} at most, {sizes[-1]:.0f} at last; "
            f"slope of the second half {slope(samples) * 60 / 2**20:+.2f} MiB a minute"
        )
    ended = {name: value for name, value in metrics.items() if name.startswith("rabbitllm_generations_total")}
    print(f"ended: {ended}; gave their place back: {metrics['rabbitllm_preempted_total']:.0f}")


def under_load(server: ServedModel, few: list[Question], clients: list[Kind], seconds: float) -> float:
    """Load it, check everything but memory; bytes a second that its memory grows."""
    return unless_stopped(lambda: loaded(server, few, clients, seconds))


def loaded(server: ServedModel, few: list[Question], clients: list[Kind], seconds: float) -> float:
    """See `under_load`."""
    server.kill()
    server.start()
    place = Place(server.url, few, time.monotonic() + seconds)
    samples = asyncio.run(all_at_once(place, clients, server))
    metrics = free_again(server)
    show(place.tally, samples, metrics)
    assert not place.tally.lost
    assert not place.tally.wrong
    assert set(place.tally.answered) == {"streamed", "whole", "read slowly"}
    assert metrics["rabbitllm_cache_bytes"] <= metrics["rabbitllm_cache_limit_bytes"] == CACHE_BYTES
    assert not metrics.get('rabbitllm_generations_total{reason="failed"}')
    assert "Traceback" not in server.log.read_text()
    second = Place(server.url, few, time.monotonic() + 1)  # every place can be taken again
    asyncio.run(all_at_once(second, [streaming] * (RUNNING + WAITING), server))
    assert not second.tally.lost
    assert not second.tally.wrong
    assert not second.tally.refused
    assert server.end() == 0
    return slope(samples)


@pytest.mark.long
def test_mixed_clients(server: ServedModel, few: list[Question]) -> None:
    under_load(server, few, crowd(14, silence=2, tokens=50), seconds=6)


@pytest.mark.long
def test_64_clients_for_two_minutes(server: ServedModel, model: Path) -> None:
    growth = under_load(server, questions(model, MANY), crowd(64, silence=60, tokens=900), seconds=120)
    assert growth * 60 < 2 << 20, "bytes a minute"


@pytest.mark.long
def test_restart_under_load(server: ServedModel, model: Path, few: list[Question]) -> None:
    """Clients that ask again get every answer; the layer files are those of before."""
    unless_stopped(lambda: restarted(server, model, few))


def restarted(server: ServedModel, model: Path, few: list[Question]) -> None:
    """See the test above."""
    server.kill()
    server.start()
    split = model / "splitted_model"
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in split.iterdir()}
    place = Place(server.url, few, time.monotonic() + 60, is_restarting=True)

    async def restart() -> int:
        await asyncio.sleep(1.5)
        code = await asyncio.to_thread(server.end)
        await asyncio.to_thread(server.start)
        place.until = time.monotonic() + 1
        return code

    async def both() -> int:
        clients = asyncio.gather(
            *((streaming if seed % 3 else not_streaming)(place, random.Random(seed)) for seed in range(12))
        )
        code = await restart()
        await clients
        return code

    assert asyncio.run(both()) == 0
    show(place.tally, [], free_again(server))
    assert not place.tally.lost
    assert not place.tally.wrong
    assert place.tally.answered["streamed"]
    assert place.tally.answered["whole"]
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in split.iterdir()} == before
