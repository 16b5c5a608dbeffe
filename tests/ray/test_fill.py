"""Splits by workers without a cluster: by any worker and in any order, the bytes are equal and crashes are safe."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download

from rabbitllm import prepare
from rabbitllm.base.options import SplitOptions
from rabbitllm.errors import ClusterError, IncompleteSplitError
from rabbitllm.ray.ray_shard_executor import fill_from
from rabbitllm.splitter import journal
from rabbitllm.splitter.filler import Filled, SplitWork
from rabbitllm.splitter.lock import LEASE_NAME, Lease, granted, revoke
from rabbitllm.splitter.plan import PlannedShard
from rabbitllm.storage.durable import Step, observe_steps
from tests.support.builders import build_checkpoint
from tests.support.dying import dying_at
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.meta_files import tiny_llama, write_meta
from tests.support.splitting import Call, Counter, contents, names_in

SHARDS = 5
EVERY = 23
"""Steps between the moments at which a call is made to die."""


class Here:
    """Hands in this process: they fill from several shards, and hand these out in an order of chance."""

    at_once = 3

    def __init__(self, seed: int = 0, fill: Callable[..., Mapping[str, tuple[int, ...]]] = fill_from) -> None:
        self.chance = random.Random(seed)
        self.fill = fill
        self.lease: Lease | None = None

    @contextlib.contextmanager
    def sharing(self, folder: Path, seen: Sequence[Path]) -> Iterator[None]:
        with granted(folder) as self.lease:
            yield

    def filled(
        self,
        parts: Sequence[tuple[PlannedShard, SplitWork]],
        began: Callable[[PlannedShard], None],
        watch: Callable[[], None],
    ) -> Generator[Filled]:
        waiting, through = [*parts], list[Filled]()
        while waiting or through:
            while waiting and len(through) < min(self.at_once, parts[0][1].at_once):
                shard, work = waiting.pop(0)
                began(shard)
                self.fill(shard, work, self.lease, 2)
                through.append((shard, self.fill(shard, work, self.lease, 2)))  # twice: a worker may be lost at the end
            yield through.pop(self.chance.randrange(len(through)))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "hare", "llama", shards=SHARDS)


def spread(call: Call, executor: Here) -> Path:
    found = call.find()
    options = SplitOptions(call.compression, call.shards, shard_transfer=call.shard_transfer)
    prepare.ensure_split(found, options, executor=executor)
    return found.split_folder


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_in_any_order_the_bytes_are_the_same(source: Path, tmp_path: Path, compression: str | None) -> None:
    expected = contents(Call(str(source), str(tmp_path / "local"), compression, sequential=False).make())
    for seed in range(2):
        call = Call(str(source), str(tmp_path / f"spread-{seed}"), compression, sequential=False)
        assert contents(spread(call, Here(seed))) == expected


@pytest.mark.parametrize("transfer", ["file", "stream"])
def test_each_shard_is_fetched_by_who_fills_from_it(
    tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment, transfer: str
) -> None:
    """Also one that is in this user's cache, which others do not see; it stays there."""
    repository = build_checkpoint(tmp_path / "hub" / "org" / "rabbit", "llama", shards=SHARDS)
    shards = names_in(repository, "*-of-*")
    cached = Path(hf_hub_download("org/rabbit", shards[1]))
    before = len(local_hub.requests)
    folder = spread(Call("org/rabbit", str(tmp_path / "spread"), shard_transfer=transfer), Here(1))
    sent = sum(request.bytes_sent for request in local_hub.requests[before:] if request.file == shards[1])
    assert sent >= (repository / shards[1]).stat().st_size
    expected = Call("org/rabbit", str(tmp_path / "local"), sequential=False).make()
    assert contents(folder) == contents(expected)
    assert cached.exists()


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_ranks_that_are_joined(tmp_path: Path, compression: str | None) -> None:
    """Every rank is in every layer, and pieces wait in scratch files, which the loop joins."""
    folder = write_meta(tmp_path / "meta", tiny_llama(), ranks=4)
    expected = contents(Call(str(folder), str(tmp_path / "local"), compression, sequential=False).make())
    for seed in range(2):
        call = Call(str(folder), str(tmp_path / f"spread-{seed}"), compression, sequential=False)
        assert contents(spread(call, Here(seed))) == expected


def test_wherever_it_dies_nothing_is_lost_and_it_is_finished(tmp_path: Path) -> None:
    """With hands or without, one after the other."""
    source = build_checkpoint(tmp_path / "first", "llama", shards=SHARDS)
    shards = contents(source)
    expected = contents(Call(str(source), str(tmp_path / "local"), sequential=False).make())
    for number, at in enumerate(range(0, 1000, EVERY)):
        hare = tmp_path / f"hare-{number}"
        hare.mkdir()
        for name, data in shards.items():
            (hare / name).write_bytes(data)
        call = Call(str(hare), str(tmp_path / f"made-{number}"))
        with dying_at(at) as death:
            spread(call, Here(number))
        folder = call.find().split_folder
        if death.step is None:
            assert number > 5
            break
        earlier = journal.replay(folder) if folder.exists() else None
        used = earlier.used if earlier is not None else frozenset()
        gone = {name for name in shards if "-of-" in name} - {path.name for path in hare.glob("*-of-*")}
        assert gone <= used
        if number % 2:
            call.make()
        else:
            spread(call, Here(number + 1))
        made = contents(folder)
        assert made.keys() == expected.keys()
        assert {n: d for n, d in made.items() if n != "split.json"} == {
            n: d for n, d in expected.items() if n != "split.json"
        }
        assert names_in(hare, "*-of-*") == []
    else:
        raise AssertionError("it never came to its end")


def test_what_was_filled_elsewhere_is_not_believed_unseen(source: Path, tmp_path: Path) -> None:
    before = contents(source)
    call = Call(str(source), str(tmp_path / "spread"))
    with pytest.raises(IncompleteSplitError, match="here that file is not there"):
        spread(call, Here(fill=lambda *given: {}))
    assert contents(source) == before


def test_without_its_lease_a_worker_writes_nothing(source: Path, tmp_path: Path) -> None:
    def fill(shard: PlannedShard, work: SplitWork, lease: Lease, threads: int) -> Mapping[str, tuple[int, ...]]:
        revoke(lease.folder)
        with observe_steps(Counter(lambda number, step: steps.append(step))):
            return fill_from(shard, work, lease, threads)

    steps: list[Step] = []
    before = contents(source)
    call = Call(str(source), str(tmp_path / "spread"))
    with pytest.raises(ClusterError, match="no longer the split directory"):
        spread(call, Here(fill=fill))
    assert not steps
    assert contents(source) == before


def test_a_lease_is_of_one_run(tmp_path: Path) -> None:
    with granted(tmp_path) as lease:
        assert lease.holds()
        assert not Lease(tmp_path, "another").holds()
        with granted(tmp_path) as later:
            assert later.holds()
            assert not lease.holds()
    assert not lease.holds()
    assert not (tmp_path / LEASE_NAME).exists()
