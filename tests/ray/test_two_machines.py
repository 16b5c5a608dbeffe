"""A cluster of two machines, as far as Ray is concerned: two of its nodes on this one, and one of them is lost."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")

from rabbitllm.base import progress
from rabbitllm.models.pull import pull
from rabbitllm.ray._cluster import check_machines, nodes
from rabbitllm.ray.shards import RayShardExecutor
from tests.support.builders import build_checkpoint
from tests.support.load_requests import asked
from tests.support.ray_cluster import OBJECT_STORE_BYTES, recorded, recording
from tests.support.splitting import contents

pytestmark = pytest.mark.long


@pytest.fixture
def machines() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    resources = {"num_cpus": 4, "object_store_memory": OBJECT_STORE_BYTES}
    with contextlib.ExitStack() as stack:
        # Ray's own stand-in for a cluster writes its address there, and does not make the folder
        noted = Path(tempfile.gettempdir(), "ray")
        if not noted.exists():
            noted.mkdir()
            stack.callback(shutil.rmtree, noted, ignore_errors=True)
        folder = tempfile.mkdtemp(prefix="rr-", dir="/tmp")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        head = {**resources, "include_dashboard": False, "temp_dir": folder}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        stack.callback(cluster.shutdown)
        cluster.add_node(**resources)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        stack.callback(ray.shutdown)
        yield cluster


def test_two_machines_never_share_a_layer_file(machines: Any, tmp_path: Path) -> None:
    source = build_checkpoint(tmp_path / "hare", "llama", shards=12, num_hidden_layers=8)
    expected = contents(pull(asked(source, folder=tmp_path / "local")).entry.folder)
    log = tmp_path / "log"
    log.mkdir()
    executor = RayShardExecutor(nodes(), None, quantizes=False, fill=recording(log, 0.3))
    assert executor.at_once == 4
    finished: list[str] = []
    lost: list[str] = []
    check_machines(nodes(), None, [], quantizes=False)  # each has a worker then, however busy it is

    def lose_one(event: progress.Event) -> None:
        if isinstance(event, progress.ShardDone):
            finished.append(event.shard)
            if not lost and len({record.node for record in recorded(log)}) == 2:
                lost.append(event.shard)
                machines.remove_node(next(iter(machines.worker_nodes)), allow_graceful=False)

    with progress.listening(lose_one):
        pulled = pull(asked(source, folder=tmp_path / "spread", sequential=True), executor)
    assert contents(pulled.entry.folder) == expected
    assert len(finished) == 12
    assert lost
    records = recorded(log)
    assert len({record.node for record in records}) == 2
    together = [(a, b) for a in records for b in records if a.shard < b.shard and a.begin < b.end and b.begin < a.end]
    assert together
    assert not [(a, b) for a, b in together if a.layers & b.layers]
