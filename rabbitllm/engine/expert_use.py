"""How often each expert was used, written to a file and read from it, so that the next start is warm.

A safetensors file with one tensor a module, (half-lives, experts) of float64, named as the module. Knows no slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rabbitllm.engine.expert_cache import HALF_LIVES, Values
from rabbitllm.engine.expert_source import ExpertSource
from rabbitllm.errors import OptionError
from rabbitllm.formats.safetensors_file import MappedFile, TensorToWrite, encode_header
from rabbitllm.storage import durable


def write_uses(path: Path, uses: Mapping[str, Values]) -> None:
    """Write the uses of every module, durably."""
    header, _ = encode_header(TensorToWrite(name, "F64", found.shape) for name, found in uses.items())
    durable.write_whole(path, header + b"".join(found.astype("<f8").tobytes() for found in uses.values()))


def read_uses(path: Path, sources: Sequence[ExpertSource]) -> dict[str, Values]:
    """The uses of every one of these modules.

    Raises:
        CorruptShardError: it is no safetensors file.
        OptionError: it was written for another model, or has numbers that count nothing.
    """
    file = MappedFile(path)
    known = {spec.name: spec for spec in file.header.tensors}
    found = {}
    for source in sources:
        spec = known.get(source.name)
        shape = (len(HALF_LIVES), source.experts)
        if spec is None or (spec.dtype, spec.shape) != ("F64", shape):
            has = f"{spec.dtype} {spec.shape}" if spec else "nothing"
            raise OptionError(
                f"{path} has {has} for {source.name}; expected F64 {shape}: it was written for another model.",
                "Give the file that save_expert_use wrote for this one.",
            )
        found[source.name] = np.frombuffer(file.bytes_of(spec), "<f8").reshape(shape).astype(np.float64)
        if not (np.isfinite(found[source.name]).all() and (found[source.name] >= 0).all()):
            raise OptionError(f"{path} has numbers for {source.name} that are no uses.", "Write it again.")
    return found
