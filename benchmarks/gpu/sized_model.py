"""Writes a Qwen2 with as many layers as a size allows, without holding it in memory.

Layers have the shapes of a model of 7 billion weights; weights are normally distributed, norms are one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib import models
from benchmarks.lib.checkpoint import made_once
from benchmarks.lib.generated import Content, write_around
from benchmarks.lib.published import Checkpoint, Config, Model, checkpoint

SHARD_BYTES = 1000**3
_ONE = 0x3F80
"""In bfloat16."""
_SHAPE: Config = {
    **models.QWEN2_5_72B,
    "bos_token_id": None,
    "eos_token_id": None,  # every generation has the asked length
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "max_window_layers": 0,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "vocab_size": 32000,
}
_TINY: Config = {
    **_SHAPE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


def model_of(gigabytes: float, *, tiny: bool = False) -> Checkpoint:
    """The largest model of at most so many GB, of at least one layer.

    Args:
        gigabytes: 1000**3 bytes, of all shards.
        tiny: of the shapes that a rehearsal has.
    """
    shape = _TINY if tiny else _SHAPE
    model = Model("", "", {**shape, "num_hidden_layers": 1}, {"do_sample": False}, models.qwen2, SHARD_BYTES, 0)
    first, both = (sum(tensor.nbytes for tensor in models.qwen2({**shape, "num_hidden_layers": n})) for n in (1, 2))
    return checkpoint(model, max(1, 1 + int((gigabytes * 1e9 - first) // (both - first))))


def write(part: Checkpoint, folder: Path) -> None:
    """Write a checkpoint into `folder`, unless an earlier run finished it."""
    made_once(folder, part.config, lambda empty: _write(part, empty))


def repeat_a_layer(folder: Path, layers: int) -> None:
    """Give a split directory so many decoder layers: the others are copies of layer 1 under other names.

    So a model of 145 GB needs no download of 145 GB. Their checksums are wrong: load it without comparing them.
    """
    path, config = folder / "split.json", folder / "config.json"
    split, old = json.loads(path.read_text()), "model.layers.1."
    first = next(index for index, entry in enumerate(split["layers"]) if entry["id"] == "layers.1")
    text = json.dumps({key: value for key, value in split["layers"][first].items() if key != "blocks"})
    with (folder / "model.layers.1.safetensors").open("rb") as source:
        length = int.from_bytes(source.read(8), "little")
        header = source.read(length).decode()
        for layer in range(2, layers):
            new = f"model.layers.{layer}."
            with (folder / f"{new}safetensors").open("wb") as target:
                target.write(length.to_bytes(8, "little"))
                target.write(header.replace(old, new).rstrip().ljust(length).encode())
                source.seek(8 + length)
                shutil.copyfileobj(source, target, 1 << 24)
            shutil.copyfile(folder / f"{old}safetensors.done", folder / f"{new}safetensors.done")
            renamed = text.replace(old, new).replace('"model.layers.1"', f'"model.layers.{layer}"')
            entry: dict[str, Any] = json.loads(renamed) | {"id": f"layers.{layer}"}
            split["layers"].insert(first + layer - 1, entry)
    path.write_text(json.dumps(split))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": layers}))


def _write(part: Checkpoint, folder: Path) -> None:
    write_around(folder, part, part.config["vocab_size"])
    content = Content()
    for shard in part.shards:
        with (folder / shard.name).open("wb") as file:
            for piece in content.of_file(shard, 0, shard.size):
                file.write(piece)
            for placed in shard.tensors:
                if placed.tensor.name.endswith("norm.weight"):
                    file.seek(placed.offset)
                    file.write(np.full(placed.tensor.elements, _ONE, np.uint16).tobytes())
