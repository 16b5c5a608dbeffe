"""`split.json`, the record of a finished split: its source, compression, layer files, and the bits of each tensor.

`split.json` is written last, so a directory that has one is complete. A directory without one is unfinished (it has a
journal), or made by RabbitLLM 1.1 (every layer file has its `.done`), or not a split directory.

Journal and manifest keep the `BitAllocation` of a split at "auto" or a preset, so that an unfinished split resumes with
the same bits.
"""

from __future__ import annotations

import json
import shlex
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rabbitllm.base.grouping import grouped
from rabbitllm.base.plain_json import fields_of
from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.checkpoints.index import model_dtype
from rabbitllm.errors import IncompleteSplitError, InvalidIndexError, SplitMismatchError
from rabbitllm.formats.bounded import read_json, text_of
from rabbitllm.quant.schemes import BLOCKS, PRESETS, SCHEMES, check_compression
from rabbitllm.storage import durable
from rabbitllm.store.checksums import SUM_BYTES
from rabbitllm.store.layer_file import BY_NAME, DONE_SUFFIX, FORMAT_VERSION, LAYER_SUFFIX

AUTO = "auto"
"""A compression for each tensor."""
SPLITS: tuple[str | None, ...] = (
    *(None, "q8_0", "8bit", AUTO, "q6_k", "q5_k_m", "q5_k", "q4_k_m", "q4_k"),
    *("iq4_xs", "4bit", "4bit-double", "q4_0", "q3_k", "q2_k"),
)
"""Names for the compression of a split directory, by increasing loss."""
MIXTURES = (AUTO, *PRESETS)
"""Those at which tensors have different compressions."""


def check_split(compression: str | None) -> str | None:
    """Return the name of a compression in small letters.

    Raises:
        OptionError, MissingPackageError: see `check_compression`.
    """
    name = compression.lower() if isinstance(compression, str) else compression
    check_compression(None if name == AUTO else name)
    return name


@dataclass(frozen=True, slots=True)
class BitAllocation:
    """Bits by tensor.

    Attributes:
        schemes: tensor -> its compression; tensors without one are stored uncompressed.
        max_disk: disk budget in bytes; None for the space that was free.
        memory: memory budget of all weights in bytes; None for no limit.
    """

    schemes: Mapping[str, str]
    max_disk: int | None = None
    memory: int | None = None

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`: names by scheme."""
        names = grouped((scheme, name) for name, scheme in self.schemes.items())
        return {"max_disk": self.max_disk, "memory": self.memory, "schemes": names}


def allocation_in(content: Mapping[str, Any]) -> BitAllocation | None:
    """The bits by tensor in a manifest or in the head of a journal, as `as_json` wrote them; None without any.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: they are malformed.
    """
    if content["compression"] not in MIXTURES and "chosen" not in content:
        return None
    chosen, schemes = content["chosen"], dict[str, str]()
    for scheme, names in chosen["schemes"].items():
        if scheme not in SCHEMES and scheme not in BLOCKS:
            raise ValueError(f"{scheme!r} is not a compression")
        schemes.update(dict.fromkeys(map(text_of, names), scheme))
    return BitAllocation(schemes, _size(chosen["max_disk"]), _size(chosen["memory"]))


def _size(value: object) -> int | None:
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"{value!r} is not a size")
    return value


MANIFEST_NAME = "split.json"
JOURNAL_NAME = "split.journal"
REMOVED_SUFFIX = ".removed"
"""Suffix of these two while `rabbitllm rm` removes the directory."""
SPLIT_DIRECTORY = "splitted_model"
"""RabbitLLM 1.1's directory name; the compression is appended, as `.4bit`."""


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer file of a finished split.

    Attributes:
        id, stem: id and stem of the layer.
        file: its name.
        size: bytes.
        tensors: the checkpoint's names.
        crc32: CRC-32 of the whole file as intended.
        shards: names of the shards that its tensors came from.
        blocks: CRC-32 of each of its blocks (`checksums.py`); None in an older split without them.
        owners: of each tensor, the number of its shard; empty unless some shard has a tensor that another one gives.
    """

    id: str
    stem: str
    file: str
    size: int
    tensors: tuple[str, ...]
    crc32: int
    shards: tuple[str, ...]
    blocks: bytes | None = None
    owners: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `split.json`.

    Attributes:
        source: the checkpoint that was split.
        compression: one of `SPLITS`.
        quantizer: name of the quantizer; None without compression.
        layers: all layer files.
        format_version: determines the order of tensors in them, see `layer_file.py`.
        chosen: the compression of each tensor, if they are not all the same.
        source_checksums: shard -> CRC-32 of its data that the split used (`source_check.source_crc32`); only for shards
            without a digest of the hub.
        dtype: of the model, if neither its config nor its layer files show it; earlier versions did not record it.
        source_metadata: shard -> texts in its header besides the format, which layer files do not have.
    """

    source: SourceIdentity
    compression: str | None
    quantizer: str | None
    layers: tuple[LayerRecord, ...]
    format_version: int = FORMAT_VERSION
    chosen: BitAllocation | None = None
    source_checksums: Mapping[str, int] = field(default_factory=dict)
    dtype: str | None = None
    source_metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


FITTED = ", scales fitted"
"""Suffix of a quantizer's name if its 4bit scales are fitted to their blocks."""


def is_fitted(quantizer: str | None) -> bool:
    """Whether 4bit scales are fitted to their blocks, by the quantizer's name in the journal or the manifest."""
    return quantizer is not None and quantizer.endswith(FITTED)


def require_fitted(folder: Path, quantizer: str | None, *, fit_scales: bool) -> None:
    """Refuse a split, finished or not, whose scales are not fitted although the call wants that.

    Raises:
        SplitMismatchError: they are not.
    """
    if fit_scales and not is_fitted(quantizer):
        raise SplitMismatchError(
            f"{folder} is a split with the scales of bitsandbytes; requested was fit_scales=True.",
            "Split into another folder (--dir, layer_shards_saving_path), or remove fit_scales.",
        )


def directory_name(compression: str | None, base: str = SPLIT_DIRECTORY) -> str:
    """`splitted_model`, or with the compression: `splitted_model.4bit`, `splitted_model.auto`."""
    return base if compression is None else f"{base}.{compression}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Declare the directory complete. All files that the manifest names must be durable."""
    from rabbitllm.version import __version__

    checksums = {shard: f"{crc:08x}" for shard, crc in manifest.source_checksums.items()}
    content = {
        "format": "rabbitllm split directory",
        "format_version": manifest.format_version,
        "written_by": f"rabbitllm {__version__}",
        "source": {
            **asdict(manifest.source),
            **({"crc32": checksums} if checksums else {}),
            **({"metadata": manifest.source_metadata} if manifest.source_metadata else {}),
        },
        **({} if manifest.dtype is None else {"dtype": manifest.dtype}),
        "compression": manifest.compression,
        **({} if manifest.chosen is None else {"chosen": manifest.chosen.as_json()}),
        "quantiser": manifest.quantizer,
        "layers": [record_as_json(record) for record in manifest.layers],
    }
    durable.write_whole(folder / MANIFEST_NAME, (json.dumps(content, indent=1) + "\n").encode())


def read_manifest(folder: Path, name: str = MANIFEST_NAME) -> Manifest | None:
    """The manifest of a finished split; None if there is none.

    Args:
        folder: the split directory.
        name: name of the file, if not the usual one.

    Raises:
        IncompleteSplitError: it is malformed.
        SplitMismatchError: a later version of this package wrote it.
    """
    path = folder / name
    if not path.exists():
        return None
    try:
        content = read_json(path)
    except InvalidIndexError as error:
        raise IncompleteSplitError(error.problem, REMAKE) from None
    version = content.get("format_version")
    if type(version) is not int or version < BY_NAME:
        raise IncompleteSplitError(f"{path} is not a manifest: it has no format_version.", REMAKE)
    if version > FORMAT_VERSION:
        raise SplitMismatchError(
            f"{path} has format version {version}; this rabbitllm reads up to {FORMAT_VERSION}.",
            "Update rabbitllm, or split the checkpoint again into another folder.",
        )
    try:
        return _parse(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IncompleteSplitError(f"{path} is damaged: {type(error).__name__} {error}.", REMAKE) from None


REMAKE = (
    "Split the checkpoint again, into another folder (--dir, layer_shards_saving_path) or after moving this one away. "
    "Keep this one until then: if the checkpoint was deleted, it holds the only copy."
)


def _parse(content: dict[str, Any]) -> Manifest:
    source, compression = content["source"], content["compression"]
    if compression not in SPLITS:
        raise ValueError(f"{compression!r} is not a compression")
    fingerprints = {shard: text_of(mark) for shard, mark in source["fingerprints"].items()}
    identity = SourceIdentity(text_of(source["kind"]), text_of(source["name"]), source["commit"], fingerprints)
    layers, chosen = tuple(map(record_from_json, content["layers"])), allocation_in(content)
    checksums = {shard: int(text_of(crc), 16) for shard, crc in source.get("crc32", {}).items()}
    metadata = {
        shard: {key: text_of(text) for key, text in texts.items()}
        for shard, texts in source.get("metadata", {}).items()
    }
    fields = identity, compression, content["quantiser"], layers, content["format_version"], chosen, checksums
    return Manifest(*fields, model_dtype(content.get("dtype")), metadata)


def record_as_json(record: LayerRecord) -> dict[str, Any]:
    """For `json.dumps`."""
    return {
        **fields_of(record, "id", "stem", "file", "size"),
        "crc32": f"{record.crc32:08x}",
        **({} if record.blocks is None else {"blocks": b64encode(record.blocks).decode()}),
        "shards": list(record.shards),
        **({"owners": list(record.owners)} if record.owners else {}),
        "tensors": list(record.tensors),
    }


def record_from_json(entry: dict[str, Any]) -> LayerRecord:
    """The record that `record_as_json` wrote.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is malformed.
    """
    file, size = text_of(entry["file"]), entry["size"]
    if Path(file).name != file or not file.endswith(LAYER_SUFFIX):  # a folder may come from anywhere
        raise ValueError(f"{file!r} is not the name of a layer file")
    if type(size) is not int or size < 0:
        raise ValueError(f"{size!r} is not a size")
    tensors = tuple(text_of(name) for name in entry["tensors"])
    shards = tuple(text_of(name) for name in entry["shards"])
    crc, blocks = int(text_of(entry["crc32"]), 16), entry.get("blocks")
    block_sums = None if blocks is None else b64decode(text_of(blocks), validate=True)
    if block_sums is not None and len(block_sums) % SUM_BYTES:
        raise ValueError(f"{len(block_sums)} bytes are not checksums")
    owners = tuple(map(range(len(shards)).index, entry.get("owners", ())))
    fields = text_of(entry["id"]), text_of(entry["stem"]), file, size, tensors, crc, shards, block_sums
    return LayerRecord(*fields, owners)


def is_begun(folder: Path) -> bool:
    """Whether a folder has the record of a split, finished or not."""
    return (folder / MANIFEST_NAME).exists() or (folder / JOURNAL_NAME).exists()


def is_legacy(folder: Path) -> bool:
    """Whether RabbitLLM 1.1 (or AirLLM) made this directory: finished layer files, but no manifest or journal.

    One that is being removed, or whose removal was killed, has these under other names.
    """
    is_recorded = is_begun(folder) or is_half_removed(folder)
    return not is_recorded and any(folder.glob(f"*{LAYER_SUFFIX}{DONE_SUFFIX}"))


def is_half_removed(folder: Path) -> bool:
    """Whether the removal of a split directory was interrupted."""
    names = (name + REMOVED_SUFFIX for name in (MANIFEST_NAME, JOURNAL_NAME))
    return not is_begun(folder) and any((folder / name).exists() for name in names)


def refuse_half_removed(folder: Path) -> None:
    """Refuse a split directory whose removal was interrupted.

    Raises:
        IncompleteSplitError: it was; the remedy is the command that finishes it.
    """
    if is_half_removed(folder):
        raise IncompleteSplitError(
            f"{folder} is partly removed: its removal was interrupted.",
            f"Finish that: {shlex.join(['rabbitllm', 'rm', str(folder)])}. To use the model, split its original again.",
        )


def is_finished(folder: Path) -> bool:
    """Whether a folder is a complete split directory by its manifest, or by RabbitLLM 1.1's markers."""
    return (folder / MANIFEST_NAME).exists() or is_legacy(folder)
