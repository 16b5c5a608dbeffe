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
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.errors import ClusterError, IncompleteSplitError
from rabbitllm.ray.shards import Part, fill_from, next_part
from rabbitllm.splitter import journal
from rabbitllm.splitter.disk_budget import ShardTransfer
from rabbitllm.splitter.filler import Filled, SplitWork
from rabbitllm.splitter.lock import LEASE_NAME, Lease, granted, revoke
from rabbitllm.splitter.plan import PlannedShard, SplitPlan
from rabbitllm.storage.durable import Step, observe_steps
from tests.support.builders import build_checkpoint
from tests.support.dying import dying_at
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.meta_files import tiny_llama, write_meta
from tests.support.plans import MIB, all_freed, peak_of, plan_of, shard_of
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
        waiting, results = [*parts], list[Filled]()
        while waiting or results:
            while waiting and len(results) < min(self.at_once, parts[0][1].at_once):
                shard, work = waiting.pop(0)
                began(shard)
                self.fill(shard, work, self.lease, 2)
                results.append((shard, self.fill(shard, work, self.lease, 2)))  # twice: a worker may be lost at the end
            yield results.pop(self.chance.randrange(len(results)))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "hare", "llama", shards=SHARDS)


def spread(call: Call, executor: Here) -> Path:
    source = call.find()
    options = SplitOptions(call.compression, call.shards, shard_transfer=call.shard_transfer)
    prepare.ensure_split(source, options, executor=executor)
    return source.split_folder


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_bytes_are_independent_of_the_order(source: Path, tmp_path: Path, compression: str | None) -> None:
    expected = contents(Call(str(source), str(tmp_path / "local"), compression, sequential=False).make())
    for seed in range(2):
        call = Call(str(source), str(tmp_path / f"spread-{seed}"), compression, sequential=False)
        assert contents(spread(call, Here(seed))) == expected


@pytest.mark.parametrize("transfer", ["file", "stream"])
def test_each_task_fetches_its_shard(
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
def test_joined_ranks(tmp_path: Path, compression: str | None) -> None:
    """Every rank is in every layer, and pieces wait in scratch files, which the loop joins."""
    folder = write_meta(tmp_path / "meta", tiny_llama(), ranks=4)
    expected = contents(Call(str(folder), str(tmp_path / "local"), compression, sequential=False).make())
    for seed in range(2):
        call = Call(str(folder), str(tmp_path / f"spread-{seed}"), compression, sequential=False)
        assert contents(spread(call, Here(seed))) == expected


def test_crash_at_any_step_is_resumed(tmp_path: Path) -> None:
    """With hands or without, one after the other."""
    source = build_checkpoint(tmp_path / "first", "llama", shards=SHARDS)
    shards = contents(source)
    expected = contents(Call(str(source), str(tmp_path / "local"), sequential=False).make())
    for run, step in enumerate(range(0, 1000, EVERY)):
        hare = tmp_path / f"hare-{run}"
        hare.mkdir()
        for name, data in shards.items():
            (hare / name).write_bytes(data)
        call = Call(str(hare), str(tmp_path / f"made-{run}"))
        with dying_at(step) as death:
            spread(call, Here(run))
        folder = call.find().split_folder
        if death.step is None:
            assert run > 5
            break
        earlier = journal.replay(folder) if folder.exists() else None
        used = earlier.used if earlier is not None else frozenset()
        deleted = {name for name in shards if "-of-" in name} - {path.name for path in hare.glob("*-of-*")}
        assert deleted <= used
        if run % 2:
            call.make()
        else:
            spread(call, Here(run + 1))
        files = contents(folder)
        assert files.keys() == expected.keys()
        assert {n: d for n, d in files.items() if n != "split.json"} == {
            n: d for n, d in expected.items() if n != "split.json"
        }
        assert names_in(hare, "*-of-*") == []
    else:
        raise AssertionError("it never came to its end")


def test_missing_checksums_of_a_task_are_refused(source: Path, tmp_path: Path) -> None:
    before = contents(source)
    call = Call(str(source), str(tmp_path / "spread"))
    with pytest.raises(IncompleteSplitError, match="on this machine the file is missing"):
        spread(call, Here(fill=lambda *args: {}))
    assert contents(source) == before


def test_revoked_lease_stops_all_writes(source: Path, tmp_path: Path) -> None:
    def fill(shard: PlannedShard, work: SplitWork, lease: Lease, threads: int) -> Mapping[str, tuple[int, ...]]:
        revoke(lease.folder)
        with observe_steps(Counter(lambda number, step: steps.append(step))):
            return fill_from(shard, work, lease, threads)

    steps: list[Step] = []
    before = contents(source)
    call = Call(str(source), str(tmp_path / "spread"))
    with pytest.raises(ClusterError, match="no longer belongs to the run"):
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


def chain(shards: int) -> SplitPlan:
    """Each shard has a layer of its own, and one that it shares with the next."""
    return plan_of(
        tuple(
            shard_of(
                f"shard-{n}",
                {
                    f"model.layers.{2 * n}.b": ("BF16", (512, 64)),
                    f"model.layers.{2 * n + 1}.w": ("BF16", (512, 64)),
                    f"model.layers.{2 * n + 2}.a": ("BF16", (512, 64)),
                },
            )
            for n in range(shards)
        )
    )


@pytest.fixture
def parts(tmp_path: Path) -> list[Part]:
    checkpoint = LocalCheckpoint(build_checkpoint(tmp_path / "any", "llama"))
    plan = chain(7)
    use = peak_of(plan, 3, shard_transfer=ShardTransfer.FILE)
    work = SplitWork(plan, checkpoint, tmp_path, SplitOptions(), ShardTransfer.FILE, use, frozenset(), {}, 3)
    layers = plan.layer_map.shard_to_layers
    return [(shard, work.of_shard(shard.name, layers[shard.name])) for shard in plan.shards]


def names(parts: list[Part]) -> list[str]:
    return [shard.name for shard, _ in parts]


def test_separate_machines_never_fill_the_same_layer(parts: list[Part]) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        waiting, in_work, max_in_work, begun = [*parts], list[Part](), 0, list[str]()
        while waiting or in_work:
            while len(in_work) < 3 and (part := next_part(waiting, in_work, apart=True)) is not None:
                layers = [layer for _, work in in_work for layer in work.plan.layouts]
                assert not set(layers) & part[1].plan.layouts.keys()
                waiting.remove(part)
                in_work.append(part)
                begun.append(part[0].name)
            max_in_work = max(max_in_work, len(in_work))
            in_work.remove(chance.choice(in_work))
        assert sorted(begun) == names(parts)
        assert max_in_work == 3


def test_one_machine_keeps_the_order(parts: list[Part]) -> None:
    assert next_part(parts[2:], parts[:2], apart=False) == parts[2]
    assert next_part(parts[1:], parts[:1], apart=True) == parts[2]
    assert next_part([], parts, apart=False) is None
    assert next_part(parts[1:2], parts[:1], apart=True) is None


def test_part_of_a_split_is_minimal(parts: list[Part]) -> None:
    shard, work = parts[3]
    assert work.plan.shards == (shard,)
    assert sorted(work.plan.layouts) == ["layers.6", "layers.7", "layers.8"]
    assert work.plan.layer_map.shard_to_layers == {shard.name: tuple(work.plan.layouts)}


def reached(plan: SplitPlan, at_once: int, deletes: bool, chance: random.Random) -> int:
    """The most that the disk is fuller than at the start, when shards are finished in some order."""
    waiting, in_work, written, freed, peak = [*plan.shards], [], 0, 0, 0
    layers: set[str] = set()
    while waiting or in_work:
        while waiting and len(in_work) < at_once:
            shard = waiting.pop(0)
            in_work.append(shard)
            for layer in plan.layer_map.shard_to_layers[shard.name]:
                layout = plan.layouts[layer]
                written += layout.shard_bytes[shard.name] + (layout.header_bytes if layer not in layers else 0)
                layers.add(layer)
        peak = max(peak, written - freed)
        part = chance.choice(in_work)
        in_work.remove(part)
        freed += part.size if deletes else 0
    return peak


@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("deletes", [False, True])
def test_disk_bound_holds_in_any_order(compression: str | None, deletes: bool) -> None:
    sizes = [8, 1, 3, 1, 5, 2]
    plan = plan_of(
        tuple(
            shard_of(f"shard-{n}", {f"model.layers.{n}.w": ("BF16", (size * MIB // 128, 64))})
            for n, size in enumerate(sizes)
        ),
        compression,
    )
    for at_once in (1, 2, 3, 6):
        bound = peak_of(plan, at_once, shard_transfer=ShardTransfer.FILE, freed=all_freed(plan, deletes))
        peak = max(reached(plan, at_once, deletes, random.Random(seed)) for seed in range(200))
        assert peak <= bound.added
        if not deletes:
            assert bound.added <= peak + 16384 * len(sizes)
        assert bound.created >= plan.output_bytes
    assert peak_of(plan, 6, shard_transfer=ShardTransfer.FILE, freed=all_freed(plan)).added <= plan.output_bytes + (
        1 << 16
    )


def test_disk_bound_counts_fetched_shards_in_work() -> None:
    plan = plan_of(
        tuple(shard_of(f"shard-{n}", {f"model.layers.{n}.w": ("BF16", (8192, 64))}, staged=True) for n in range(4))
    )
    streamed = peak_of(plan, 3, shard_transfer=ShardTransfer.STREAM, freed=all_freed(plan))
    files = peak_of(plan, 3, shard_transfer=ShardTransfer.FILE, freed=all_freed(plan))
    assert files.created - streamed.created == 3 * (-(-plan.shards[0].size // 4096) * 4096)
