"""Tiny checkpoints split and run, and plain transformers on the same weights; for the tests of the engine.

Compression is referred to bitsandbytes itself: `dequantized` writes the checkpoint that compressed weights stand for,
by rules written down here a second time, so that a wrong rule in the package shows.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors.torch import save_file

from rabbitllm import prepare
from rabbitllm.base.options import RunOptions, SplitOptions
from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.load import load_model
from rabbitllm.engine.load_plan import make_load_plan
from rabbitllm.engine.placement import Pool, Tier
from rabbitllm.engine.units import find_units
from rabbitllm.quant import block_encoders
from rabbitllm.quant.schemes import BLOCKS, ROW_ELEMENTS, type_for_rows
from rabbitllm.store.layer_store import LayerStore
from tests.support.builders import SINGLE_NAME, Reference, read_tensors
from tests.support.one_thread import one_thread as one_thread

INPUT = torch.tensor([[1, 40, 81, 7, 200, 33, 160, 5, 92, 11, 64]])
NEW_TOKENS = 4
"""A prompt, and steps that come one after the other; long generations are tested in `test_hybrid_caches.py`."""
ALL = 1 << 34
"""A budget in which every tiny model fits."""

_NEVER_COMPRESSED = re.compile(r"(^|\.)(gate|router|shared_expert_gate)\.weight$|conv|A_log$|[._]bias$")


def split(folder: Path, compression: str | None = None) -> Path:
    """Split a checkpoint in its own folder, and return the split directory."""
    source = prepare.find(prepare.ModelSpec(str(folder), compression))
    prepare.ensure_split(source, SplitOptions(compression))
    return source.split_folder


def load(folder: Path, budget: int = ALL, **options: Any) -> Any:
    """A model from a split directory, on the CPU, with so many bytes for its weights; computing exactly."""
    return load_model(folder, options_for(budget, **options))


def options_for(budget: int, **options: Any) -> RunOptions:
    """Of `load`."""
    settings = {"device": "cpu", "max_memory": {"cpu": budget}, "show_progress": False, "exact": True, **options}
    return RunOptions(**settings)


def budget_that_keeps(folder: Path, share: float, **options: Any) -> int:
    """The bytes for weights with which a model keeps this share of the experts that it brings in by themselves, and
    not all of them."""
    settings = options_for(0, **options)
    drawn = make_load_plan(LayerStore(folder), settings, folder, [CpuDevice()])

    def pools(budget: int) -> tuple[Pool, ...]:
        """As loaded with so many bytes; placing by itself is quick."""
        wanted = dataclasses.replace(settings, max_memory={"cpu": budget})
        return drawn.placed([CpuDevice()], wanted).placement.pools

    low, high = 0, 1 << 26
    while high - low > 1000:
        middle = (low + high) // 2
        placed = pools(middle)
        enough = not placed or sum(pool.slots for pool in placed) >= share * sum(pool.experts for pool in placed)
        low, high = (low, middle) if enough else (middle, high)
    placed = load(folder, high, **options).placement.pools
    assert sum(pool.slots for pool in placed) >= share * sum(pool.experts for pool in placed) > 0
    return high


def run(model: Any, ids: torch.Tensor = INPUT) -> Reference:
    """What `builders.reference_logits` does with a plain model."""
    ids = ids.to(model.device)
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.inference_mode():
        logits = model(ids, **decoder).logits
        tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    return Reference(logits, tokens)


def plain_model(folder: Path, **options: Any) -> Any:
    """The model as transformers loads it, each weight at an address that suits every kernel."""
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    auto: Any = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, **options)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def assert_same(got: Reference, expected: Reference) -> None:
    """The same logits, bit for bit, and the same tokens."""
    assert got.logits.dtype == expected.logits.dtype
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.tokens, expected.tokens)


def tiers(model: Any) -> dict[str, Tier]:
    """Where each unit is, and the experts of each module that has any."""
    return {placed.unit: placed.tier for placed in (*model.placement.units, *model.placement.experts)}


def bytes_when_made(model: Any) -> int:
    """What all units take when every one of them is ready to use, tied ones once, and the slots that experts go
    through, but no expert that is brought in by itself."""
    by_themselves = tuple(placed.unit + "." for placed in model.placement.experts)
    entries = {entry.target: entry for unit in find_units(model) for entry in unit.entries}
    tied = {name for name, source in model.all_tied_weights_keys.items() if source in entries}
    own = [p for name, p in entries.items() if name not in tied and not name.startswith(by_themselves)]
    nbytes = sum(p.shape.numel() * p.dtype.itemsize for p in own)
    return nbytes + (_transit_bytes(model) if by_themselves else 0)


def _transit_bytes(model: Any) -> int:
    """Of a pool that keeps nothing."""
    pools = load(Path(model.name_or_path), 0).placement.pools
    return sum(pool.nbytes for pool in pools)


def is_compressed(name: str, tensor: torch.Tensor) -> bool:
    """Whether the rules compress a tensor of a checkpoint."""
    large = tensor.is_floating_point() and tensor.dim() >= 2 and tensor.numel() >= 4096
    return large and not _NEVER_COMPRESSED.search(name)


def dequantized(folder: Path, target: Path, compression: str | Mapping[str, str], dtype: torch.dtype) -> Path:
    """The checkpoint of the weights that bitsandbytes, or for blocks gguf, makes of a compressed one, in `dtype`.

    `compression` may be one for all tensors, or one by name for some of them. A model that keeps matrices in float32
    needs that dtype: 8bit and blocks store none, so only a load rounds them, and the kept ones not at all. For float64
    the weights are those that the codes stand for, in float32, whatever dtype was stored.
    """
    from bitsandbytes import functional

    target.mkdir()
    for path in (*folder.glob("*.json"), *folder.glob("*.jinja")):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, target)
    tensors = read_tensors(folder)
    if dtype == torch.float64:
        tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        dtype = torch.float32
    for name, tensor in tensors.items():
        if not is_compressed(name, tensor):
            continue
        scheme = compression if isinstance(compression, str) else compression.get(name)
        if scheme is None:
            continue
        if scheme in ("4bit", "4bit-double"):
            doubled = scheme == "4bit-double" and tensor.numel() >= 32768
            codes, state = functional.quantize_4bit(tensor, blocksize=64, quant_type="nf4", compress_statistics=doubled)
            state.shape = torch.Size([tensor.numel()])  # its kernel for the CPU begins a block with each row
            changed = functional.dequantize_4bit(codes, state)
        elif scheme in BLOCKS:
            block = type_for_rows(BLOCKS[scheme], tensor.shape[-1]) if tensor.shape[-1] % ROW_ELEMENTS == 0 else None
            if block is None:
                continue
            codes = block_encoders.encode(block, tensor.reshape(-1, tensor.shape[-1]))
            changed = torch.from_numpy(gguf.quants.dequantize(codes.numpy(), gguf.GGMLQuantizationType[block])).to(
                dtype
            )
        else:
            codes, state = functional.quantize_blockwise(tensor, blocksize=2048)
            state.dtype = dtype
            changed = functional.dequantize_blockwise(codes, state)
        tensors[name] = changed.reshape(tensor.shape)
    save_file(tensors, target / SINGLE_NAME, metadata={"format": "pt"})
    return target
