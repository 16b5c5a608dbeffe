"""A checkpoint of plain safetensors out of a finished split, whose original may be gone: its layer files joined.

Uncompressed tensors keep their bits. Those at 4bit and 8bit are dequantized, a few megabytes at a time; weights that
were published quantized stay as they were published. Knows no models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.checkpoints.checkpoint import SIDECAR_PATTERNS, SourceIdentity, is_sidecar
from rabbitllm.checkpoints.index import INDEX_NAME
from rabbitllm.checkpoints.json_file import read_json
from rabbitllm.checkpoints.meta_checkpoint import CONFIG_NAME
from rabbitllm.convert.publish import converted_from, origin_of
from rabbitllm.errors import SplitMismatchError
from rabbitllm.formats.tensor_spec import DTYPES
from rabbitllm.layers.checkpoint_folder import plan_shards, write_checkpoint
from rabbitllm.layers.layer_store import JOURNAL_NAME, MANIFEST_NAME, LayerStore, StoredTensor

SHARD_BYTES = 5_000_000_000
"""Of a shard, at most, unless one tensor is larger."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was made.

    Attributes:
        folder: where it is.
        shards, tensors: how many.
        nbytes: of all tensors.
        beside: config, tokenizer and the like that were copied, by name.
        before: it was whole already.
    """

    folder: Path
    shards: int
    tensors: int
    nbytes: int
    beside: tuple[str, ...]
    before: bool = False


def join_split(split_folder: Path, named: Path, folder: Path) -> Conversion:
    """Write the checkpoint that a split was made from, as far as the split has its bits.

    Args:
        split_folder: a finished split directory, of RabbitLLM 1.1 too.
        named: the folder that the user named; config and tokenizer are taken from there if the split has none.
        folder: where to, empty or not there yet.

    Raises:
        OptionError: the folder has weights in it.
        SplitMismatchError: they are a conversion of something else.
        IncompleteSplitError: a layer file is missing or damaged.
        NotEnoughSpaceException: it does not fit.
    """
    from rabbitllm.layers.plain_tensors import PlainReader, plain  # with torch

    store = LayerStore(split_folder)
    home = split_folder if (split_folder / CONFIG_NAME).exists() else named
    identity = _identity_of(store)
    beside = _sidecars_in(home)
    tensors = {name: plain(stored, _dtype_of(stored, home)) for name, stored in store.tensors.items()}
    shards = plan_shards((tensor.placed for tensor in tensors.values()), SHARD_BYTES)
    before = (folder / INDEX_NAME).exists()
    if before:
        if (why := origin_of(folder).differs_from(identity)) is not None:
            raise SplitMismatchError(
                f"{folder} is a conversion of something else than {split_folder}: {why}.",
                "Convert into another folder, or delete that one if it is not needed.",
            )
    else:
        with PlainReader(store) as reader:
            write_checkpoint(
                folder,
                shards,
                beside,
                lambda name: reader.chunks(tensors[name]),
                source=json.dumps(dict(identity.fingerprints)),
                metadata=converted_from(identity),
            )
    nbytes = sum(tensor.placed.nbytes for tensor in tensors.values())
    return Conversion(folder, len(shards), len(tensors), nbytes, tuple(sorted(beside)), before)


def _identity_of(store: LayerStore) -> SourceIdentity:
    """A split by the checksums of its layer files; by their sizes where RabbitLLM 1.1 made them."""
    if store.manifest is not None:
        marks = {record.file: f"crc32:{record.crc32:08x}" for record in store.manifest.layers}
    else:
        files = {part.file for stored in store.tensors.values() for part in stored.parts}
        marks = {file: f"size:{store.path(file).stat().st_size}" for file in sorted(files)}
    return SourceIdentity("split", store.folder.name, None, marks)


def _dtype_of(stored: StoredTensor, home: Path) -> str:
    """What a compressed tensor is dequantized to: the dtype that it had, else the config's, else float32."""
    names = {entry.torch_name: name for name, entry in DTYPES.items() if entry.quantisable}
    if stored.quantised is not None and stored.quantised.dtype is not None:
        return names[stored.quantised.dtype]
    config = read_json(home / CONFIG_NAME) if (home / CONFIG_NAME).exists() else {}
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        said = part.get("dtype", part.get("torch_dtype"))
        if isinstance(said, str) and said in names:
            return names[said]
    return "F32"


def _sidecars_in(home: Path) -> dict[str, bytes]:
    """Config, tokenizer and the like, by name."""
    paths = (path for pattern in SIDECAR_PATTERNS for path in home.glob(pattern) if path.is_file())
    named = {path.relative_to(home).as_posix(): path for path in paths}
    own = (MANIFEST_NAME, JOURNAL_NAME)
    return {
        name: path.read_bytes()
        for name, path in sorted(named.items())
        if name not in own and is_sidecar(name, path.stat().st_size)
    }
