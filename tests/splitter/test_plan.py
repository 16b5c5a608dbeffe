"""The plan: which shard gives a tensor, and what layer files come to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rabbitllm.checkpoints.checkpoint import ShardMetadata
from rabbitllm.checkpoints.index import index_of
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.errors import InvalidIndexError
from rabbitllm.formats.tensor_spec import Header
from rabbitllm.splitter.plan import PlannedShard, recompressed, tensors_by_shard
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.plans import MIB, even, plan_of, shard_of
from tests.support.splitting import split


def test_plan_depends_on_nothing_but_its_arguments() -> None:
    shards = even(3, 16384)
    assert plan_of(shards, "4bit") == plan_of(shards, "4bit")
    assert plan_of(shards).output_bytes == 3 * (4096 + 16384)
    assert plan_of(shards).source_bytes == 3 * (100 + 16384)


def facts_of(shard: PlannedShard) -> ShardMetadata:
    return ShardMetadata(shard.name, shard.size, shard.fingerprint, Header(shard.tensors, {}, 100))


def test_index_decides_between_two_shards() -> None:
    tensor = ("F32", (8,))
    first, second = shard_of("a", {"x": tensor, "y": tensor}), shard_of("b", {"y": tensor, "z": tensor})
    found = tensors_by_shard(index_of({"x": "a", "y": "b"}), [facts_of(first), facts_of(second)])
    assert {shard: [t.name for t in tensors] for shard, tensors in found.items()} == {"a": ["x"], "b": ["y", "z"]}
    found = tensors_by_shard(index_of({"x": "a", "z": "b"}), [facts_of(first), facts_of(second)])
    assert [t.name for t in found["a"]] == ["x", "y"]  # a tensor that only headers know is taken from the first


@pytest.mark.parametrize(("promised", "more"), [(["p"], ""), (["p", "q", "r"], " and 2 more")])
def test_index_promises_what_the_header_does_not_have(promised: list[str], more: str) -> None:
    shard = shard_of("a", {"x": ("F32", (8,))})
    with pytest.raises(
        InvalidIndexError, match=f"The index puts 'p'{more} into a, whose header does not have it"
    ) as bad:
        tensors_by_shard(index_of(dict.fromkeys(["x", *promised], "a")), [facts_of(shard)])
    assert "Fetch the index and that shard again" in str(bad.value)


def test_recompressed_plan_is_the_plan_at_that_compression() -> None:
    shards = even(3, MIB)
    assert recompressed(plan_of(shards), "4bit") == plan_of(shards, "4bit")
    assert recompressed(plan_of(shards, "4bit"), None) == plan_of(shards)


def test_plan_of_a_real_checkpoint_counts_its_files(tmp_path: Path) -> None:
    tensors = llama_tensors(dtype=torch.float32)
    source = write_shards(tmp_path / "model", cut(tensors, 3))
    checkpoint = LocalCheckpoint(source)
    facts = [found for shard in checkpoint.index.shards if (found := checkpoint.facts(shard))]
    chosen = tensors_by_shard(checkpoint.index, facts)
    shards = tuple(PlannedShard(f.name, f.size, f.fingerprint, chosen[f.name], f.staged) for f in facts)
    plan = plan_of(shards, "8bit")
    made = split(source, compression="8bit")
    assert plan.output_bytes == sum(path.stat().st_size for path in made.glob("*.safetensors"))
    assert {layout.file_name: layout.size for layout in plan.layouts.values()} == {
        path.name: path.stat().st_size for path in made.glob("*.safetensors")
    }
