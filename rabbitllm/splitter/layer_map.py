"""Maps layers to their shards and tensors, from an index. Pure: opens nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rabbitllm.checkpoints.naming import LayerName, layer_order


@dataclass(frozen=True, slots=True)
class LayerMap:
    """The distribution of a checkpoint's tensors over layers and shards.

    Attributes:
        layers: layer id -> its name, in the order of a forward pass.
        layer_to_tensors: layer id -> its tensors, in the index's order.
        layer_to_shards: layer id -> the shards that hold a tensor of it.
        shard_to_layers: shard -> the layers it holds a tensor of.
    """

    layers: Mapping[str, LayerName]
    layer_to_tensors: Mapping[str, tuple[str, ...]]
    layer_to_shards: Mapping[str, frozenset[str]]
    shard_to_layers: Mapping[str, tuple[str, ...]]

    def completed_by(self, shard: str, processed: Iterable[str]) -> tuple[str, ...]:
        """Return the layers that have all their tensors once `shard` joins the `processed` ones.

        Only the layers of the shard are checked, each with one set comparison.
        """
        done = {*processed, shard}
        return tuple(layer for layer in self.shard_to_layers.get(shard, ()) if self.layer_to_shards[layer] <= done)


def build_layer_map(weight_map: Mapping[str, str], assigned: Mapping[str, LayerName]) -> LayerMap:
    """Turn tensor -> shard and tensor -> layer into the maps that the loop needs.

    Args:
        weight_map: tensor name -> shard name, as the index has it.
        assigned: tensor name -> layer (`assign_layers`).
    """
    names: dict[str, LayerName] = {}
    tensors: dict[str, list[str]] = {}
    shards: dict[str, set[str]] = {}
    touched: dict[str, dict[str, None]] = {}
    for tensor, shard in weight_map.items():
        layer = assigned[tensor]
        names[layer.id] = layer
        tensors.setdefault(layer.id, []).append(tensor)
        shards.setdefault(layer.id, set()).add(shard)
        touched.setdefault(shard, {})[layer.id] = None
    order = sorted(names, key=lambda layer: layer_order(names[layer].stem))
    return LayerMap(
        {layer: names[layer] for layer in order},
        {layer: tuple(tensors[layer]) for layer in order},
        {layer: frozenset(shards[layer]) for layer in order},
        {shard: tuple(layers) for shard, layers in touched.items()},
    )
