"""A split that is ready to be carried out: all decisions made before the first byte. A record only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rabbitllm.base.options import SplitOptions
from rabbitllm.checkpoints.checkpoint import Checkpoint
from rabbitllm.splitter.disk_use import DiskUse, ShardTransfer
from rabbitllm.splitter.layer_map import LayerMap
from rabbitllm.splitter.plan import SplitPlan
from rabbitllm.splitter.sums import TensorSums

ROOM: Mapping[ShardTransfer, int] = {ShardTransfer.FILE_AHEAD: 2, ShardTransfer.FILE: 1, ShardTransfer.STREAM: 0}
"""Fetched shards that may be on the disk at a time."""


@dataclass(frozen=True, slots=True)
class SplitWork:
    """A split that is ready to be carried out.

    Attributes:
        plan: the plan.
        checkpoint: the source.
        folder: the split directory, with a journal in it.
        options: the caller's.
        quantize_on: "cpu" or "cuda:N".
        shard_transfer: how fetched shards reach the layer files.
        use: its disk use.
        used: shards that an earlier run used up.
        checksums: tensor -> checksums of its stored parts, as far as the journal has them.
        source_checksums: shard -> `source_check.source_crc32`, from the journal.
        at_once: the most shards in work at a time.
        fitted: whether scales of 4bit are fitted to their blocks.
    """

    plan: SplitPlan
    checkpoint: Checkpoint
    folder: Path
    options: SplitOptions
    quantize_on: str
    shard_transfer: ShardTransfer
    use: DiskUse
    used: frozenset[str]
    checksums: TensorSums
    at_once: int = 1
    fitted: bool = False
    source_checksums: Mapping[str, int] = field(default_factory=dict)

    def of_shard(self, shard: str, layers: Iterable[str]) -> SplitWork:
        """Return the part of it that fills these layers from one shard, which is all that another process needs."""
        layers = tuple(layers)
        whole = self.plan.layer_map
        layer_map = LayerMap(
            {layer: whole.layers[layer] for layer in layers},
            {layer: whole.layer_to_tensors[layer] for layer in layers},
            {layer: whole.layer_to_shards[layer] for layer in layers},
            {shard: layers},
        )
        plan = dataclasses.replace(
            self.plan,
            source=dataclasses.replace(self.plan.source, fingerprints={}),
            shards=tuple(one for one in self.plan.shards if one.name == shard),
            layer_map=layer_map,
            layouts={layer: self.plan.layouts[layer] for layer in layers},
        )
        return dataclasses.replace(self, plan=plan, used=frozenset(), checksums={}, source_checksums={})
