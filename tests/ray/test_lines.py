"""How many workers there are, which lines each gets at a time, and when two of them would answer differently."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.errors import OptionError
from rabbitllm.ray._answerer import WorkerInfo
from rabbitllm.ray._cluster import Node
from rabbitllm.ray.lines import PASSFULS, WorkerPool, in_chunks, worker_pool
from rabbitllm.store.manifest import BitAllocation


def nodes(*sizes: tuple[int, int]) -> list[Node]:
    """Machines with so many processors and GPUs."""
    return [Node(f"id-{n}", f"host-{n}", cpus, gpus) for n, (cpus, gpus) in enumerate(sizes)]


def test_default_worker_pool() -> None:
    assert worker_pool(nodes((16, 4), (16, 4), (8, 0))) == WorkerPool(8, 1, 1, 4)
    assert worker_pool(nodes((16, 0), (8, 0))) == WorkerPool(2, 8, 0, 1)
    assert worker_pool(nodes((8, 0)), 4) == WorkerPool(4, 2, 0, 4)
    assert worker_pool(nodes((16, 0), (8, 0)), 3) == WorkerPool(3, 4, 0, 2)


@pytest.mark.parametrize(("machines", "workers"), [(nodes((8, 0)), 0), (nodes((8, 0)), 9), (nodes((8, 2)), 3)])
def test_too_many_workers_are_refused(machines: list[Node], workers: int) -> None:
    with pytest.raises(OptionError, match=f"--ray-workers {workers} is not possible on"):
        worker_pool(machines, workers)


@pytest.mark.parametrize("count", [0, 1, 7, 100, 1001])
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("sequences", [1, 16, 256])
def test_chunks_cover_each_line_once(count: int, workers: int, sequences: int) -> None:
    order = [*reversed(range(count))]
    chunks = in_chunks(order, workers, sequences)
    assert [index for chunk in chunks for index in chunk] == order
    assert all(0 < len(chunk) <= PASSFULS * sequences for chunk in chunks)
    assert len(chunks) >= min(count, workers)


SOURCE = SourceIdentity("local", "hare", None, {"model.safetensors": "sampled:1"})
ABOUT = WorkerInfo("host-0", 1, SOURCE, "4bit", "float32 on cpu")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replace(ABOUT, host="host-1", pid=2), None),
        (replace(ABOUT, source=None), None),
        (replace(ABOUT, computes="bfloat16 on cuda"), "computes in bfloat16 on cuda"),
        (replace(ABOUT, compression=None), "compression None"),
        (replace(ABOUT, source=replace(SOURCE, fingerprints={"model.safetensors": "sampled:2"})), "other contents"),
    ],
)
def test_workers_with_different_models_differ(other: WorkerInfo, why: str | None) -> None:
    reason = other.differs_from(ABOUT)
    assert reason is None if why is None else why in str(reason)


def test_workers_with_different_bits_differ() -> None:
    mixed = replace(ABOUT, compression="auto", chosen=BitAllocation({"lm_head.weight": "4bit"}, max_disk=1))
    assert mixed.differs_from(replace(mixed, chosen=BitAllocation({"lm_head.weight": "4bit"}, max_disk=2))) is None
    assert "other bits" in str(mixed.differs_from(replace(mixed, chosen=BitAllocation({"lm_head.weight": "8bit"}))))
