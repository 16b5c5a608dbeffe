"""Compares 4bit layer files with bitsandbytes' own quantization of the checkpoint's weights, without rabbitllm.

bitsandbytes quantizes a piece of every matrix at a random place, and its end; codes and scales are compared with the
layer file bit for bit. Tensors that are not quantized are compared whole. A piece is a whole number of blocks, which do
not depend on each other.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.generated import Content
from benchmarks.lib.published import ELEMENT_BYTES, Checkpoint, Placed, Shard

BLOCK = 64
SAMPLE_BYTES = 1 << 30
"""Of a checkpoint's weights, about: bitsandbytes takes a second for every 67 MB."""
PIECE_BYTES = (16 << 10, 1 << 20)
"""Least and most of a matrix in one piece."""
END_BYTES = 64 << 10
"""Of a matrix's end, at most."""
_MAX_NAMED = 5


@dataclass(frozen=True)
class SpotCheck:
    """The result: the number of tensors, the bytes of the checkpoint's weights that were compared, and differences."""

    tensors: int
    nbytes: int
    wrong: tuple[str, ...]


def check(checkpoint: Checkpoint, content: Content, folder: Path, seed: int) -> SpotCheck:
    """Compare a sample of every tensor of every layer file in `folder` with the checkpoint's weights."""
    from safetensors import safe_open

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it recommends faster kernels, which must not be used
    files: dict[str, Any] = {p.name: safe_open(p, framework="pt") for p in sorted(folder.glob("*.safetensors"))}
    where = {name: file for file, opened in files.items() for name in opened.keys()}  # noqa: SIM118  no mapping
    chance, nbytes, wrong = random.Random(seed), 0, []
    piece = piece_elements(sum(len(shard.tensors) for shard in checkpoint.shards))
    for shard in checkpoint.shards:
        for placed in shard.tensors:
            name = placed.tensor.name
            if name not in where:
                wrong.append(f"{name} is in no layer file")
                continue
            compared, problem = _compare(files[where[name]], shard, placed, content, chance, piece)
            nbytes += compared
            if problem is not None:
                wrong.append(f"{name} in {where[name]}: {problem}")
    return SpotCheck(sum(len(shard.tensors) for shard in checkpoint.shards), nbytes, tuple(wrong))


def piece_elements(tensors: int) -> int:
    """Elements of each matrix compared at a random place: the more matrices, the fewer."""
    least, most = PIECE_BYTES
    return min(max(SAMPLE_BYTES // max(tensors, 1), least), most) // ELEMENT_BYTES // BLOCK * BLOCK


def named(wrong: tuple[str, ...]) -> str:
    """The first few differences."""
    more = len(wrong) - _MAX_NAMED
    return "; ".join(wrong[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _compare(
    opened: Any, shard: Shard, placed: Placed, content: Content, chance: random.Random, piece: int
) -> tuple[int, str | None]:
    """Bytes compared, and the difference."""
    import torch

    tensor = placed.tensor
    if not tensor.is_quantized:
        held = opened.get_tensor(tensor.name).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        expected = content.of_tensor(shard, placed, 0, tensor.elements)
        return len(expected), None if held == expected else "the bytes differ"
    if (problem := _constants(opened, tensor.name, tensor.shape)) is not None:
        return 0, problem
    blocks = -(-tensor.elements // BLOCK)
    piece, end = min(piece, tensor.elements), min(piece, END_BYTES // ELEMENT_BYTES)
    starts = {chance.randrange(blocks - piece // BLOCK + 1) * BLOCK: piece}
    starts[max(blocks - end // BLOCK, 0) * BLOCK] = end
    compared = 0
    for first, most in starts.items():
        count = min(most, tensor.elements - first)
        weights = content.of_tensor(shard, placed, first, count)
        if not _same_piece(opened, tensor.name, first, weights):
            return compared, f"elements {first:,} to {first + count:,} differ from bitsandbytes' own"
        compared += len(weights)
    return compared, None


def _constants(opened: Any, name: str, shape: tuple[int, ...]) -> str | None:
    """The difference in the parts of a quantized tensor that do not depend on its weights."""
    from bitsandbytes.functional import get_4bit_type

    raw = opened.get_tensor(f"{name}.4bit.quant_state.bitsandbytes__nf4").numpy().tobytes()
    state: Mapping[str, Any] = json.loads(raw)
    expected = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": list(shape)}
    if state != expected:
        return f"its quantization state is {state}"
    levels = get_4bit_type("nf4", device="cpu").numpy().tobytes()
    return None if opened.get_tensor(f"{name}.4bit.quant_map").numpy().tobytes() == levels else "its levels are others"


def _same_piece(opened: Any, name: str, first: int, weights: bytes) -> bool:
    import torch
    from bitsandbytes.functional import quantize_4bit

    values = torch.frombuffer(bytearray(weights), dtype=torch.bfloat16)
    codes, state = quantize_4bit(values, blocksize=BLOCK, quant_type="nf4")
    begin, scale = first // 2, first // BLOCK
    held_codes = opened.get_slice(name)[begin : begin + codes.numel()]
    held_scales = opened.get_slice(f"{name}.4bit.absmax")[scale : scale + state.absmax.numel()]
    return bool(
        torch.equal(held_codes.view(-1), codes.view(-1))
        and torch.equal(held_scales.view(torch.int32), state.absmax.view(torch.int32))
    )
