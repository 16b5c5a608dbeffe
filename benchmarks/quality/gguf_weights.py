"""The way back from llama.cpp's file: its tensors as the checkpoint has them, dequantized by the `gguf` package.

What `worker_llama_cpp.write_gguf` does on the way there is undone: names, and the order of a Llama's query and key
rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.worker_llama_cpp import NAMES, PAIRS_NEIGHBOURS, WHOLE

_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.weight")
_IN_LAYER = {theirs: ours for ours, theirs in NAMES.items()}
_OUTSIDE = {f"{theirs}.weight": f"{ours}.weight" for ours, theirs in WHOLE.items()}


@dataclass(frozen=True)
class Weight:
    """A tensor of the file.

    Attributes:
        name: the checkpoint's.
        kind: ggml's type, as "Q4_K".
        nbytes: in the file.
        values: float32 array of numpy, in the checkpoint's shape.
    """

    name: str
    kind: str
    nbytes: int
    values: Any


def weights(path: Path) -> Iterator[Weight]:
    """The tensors of a file, in its order.

    Raises:
        ValueError: one has a name that means nothing here.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    architecture = str(_field(reader, "general.architecture"))
    heads = {}
    if architecture in PAIRS_NEIGHBOURS:
        heads = {
            ".q_proj.weight": int(_field(reader, f"{architecture}.attention.head_count")),
            ".k_proj.weight": int(_field(reader, f"{architecture}.attention.head_count_kv")),
        }
    for tensor in reader.tensors:
        name = named(tensor.name)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for end, count in heads.items():
            if name.endswith(end):
                rows = values.reshape(count, values.shape[0] // count // 2, 2, values.shape[1])
                values = rows.swapaxes(1, 2).reshape(values.shape)
        yield Weight(name, tensor.tensor_type.name, int(tensor.n_bytes), values)


def named(name: str) -> str:
    """The checkpoint's name of a tensor of the file.

    Raises:
        ValueError: there is none.
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in _IN_LAYER:
        raise ValueError(f"{name} is no tensor of a model that is written here")
    return f"model.layers.{found[1]}.{_IN_LAYER[found[2]]}.weight"


def types(found: Sequence[Weight]) -> str:
    """Which types the matrices have, for people: "attn_v 4 Q4_K and 4 Q6_K, output Q6_K", …"""
    counted: dict[str, dict[str, int]] = {}
    for weight in found:
        if weight.values.ndim > 1:
            role = weight.name.removesuffix(".weight").rpartition(".")[2]
            kinds = counted.setdefault(role, {})
            kinds[weight.kind] = kinds.get(weight.kind, 0) + 1
    by_mixture: dict[str, list[str]] = {}
    for role, kinds in counted.items():
        said = (
            next(iter(kinds)) if len(kinds) == 1 else " and ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
        )
        by_mixture.setdefault(said, []).append(role)
    return "; ".join(f"{said}: {', '.join(roles)}" for said, roles in by_mixture.items())


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"the file does not say its {name}")
    return field.contents()
