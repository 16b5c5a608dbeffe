"""Verification of a split directory: every layer's checksum, header, shapes and tensors.

Reads every byte of every layer file; changes nothing. Of the sources it uses only the shard names in a manifest, by
which a damaged layer can be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.errors import IncompleteSplitError, RabbitLLMError
from rabbitllm.formats.crc32 import combine_all, crc32_of_file
from rabbitllm.formats.safetensors_file import Header, read_header
from rabbitllm.store.checksums import block_starts, lengths_of, numbers
from rabbitllm.store.layer_file import DONE_SUFFIX, LAYER_SUFFIX
from rabbitllm.store.layer_store import JOURNAL_NAME, LayerRecord, Manifest, is_legacy, read_forms, read_manifest


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged layer file: its name, the layer's id, and the problem."""

    file: str
    layer: str
    problem: str


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a verification.

    Attributes:
        folder: the split directory.
        manifest: None for a directory of RabbitLLM 1.1, which has neither checksums nor a list of its layers.
        files: number of layer files checked.
        nbytes: their total size.
        damaged: the damaged ones.
    """

    folder: Path
    manifest: Manifest | None
    files: int
    nbytes: int
    damaged: tuple[Damage, ...]


def verify(folder: Path, on_file: Callable[[str, int], None] = lambda name, nbytes: None) -> Verification:
    """Check every layer file of a finished split directory.

    Args:
        folder: the split directory.
        on_file: called with each file's name and size in bytes after its check.

    Raises:
        IncompleteSplitError: the directory is not a finished split, or its manifest is damaged.
    """
    manifest = read_manifest(folder)
    if manifest is None and not is_legacy(folder):
        if (folder / JOURNAL_NAME).exists():
            raise IncompleteSplitError(f"{folder} is an unfinished split.", "The call that began it goes on with it.")
        raise IncompleteSplitError(f"{folder} is no split directory.", "Name a folder that has a split.json.")
    damaged, files, nbytes = [], 0, 0
    for file, record in _files(folder, manifest):
        path = folder / file
        size = path.stat().st_size if path.exists() else 0
        problem = _problem(path, record)
        if problem is not None:
            damaged.append(Damage(file, record.id if record else file.removesuffix(LAYER_SUFFIX), problem))
        files, nbytes = files + 1, nbytes + size
        on_file(file, size)
    return Verification(folder, manifest, files, nbytes, tuple(damaged))


def _files(folder: Path, manifest: Manifest | None) -> Iterator[tuple[str, LayerRecord | None]]:
    if manifest is not None:
        yield from ((record.file, record) for record in manifest.layers)
    else:
        yield from ((path.name, None) for path in sorted(folder.glob(f"*{LAYER_SUFFIX}")))


def _problem(path: Path, record: LayerRecord | None) -> str | None:
    """The problem with a layer file, in words; None if it is intact."""
    if not path.exists():
        return "it is missing"
    if record is None and not path.with_name(path.name + DONE_SUFFIX).exists():
        return f"it has no {DONE_SUFFIX} marker"
    size = path.stat().st_size
    if record is not None and size != record.size:
        return f"it has {size:,} bytes; {record.size:,} were written"
    try:
        header = read_header(path)
        tensors = _tensors(path, header)
    except RabbitLLMError as error:
        return error.problem
    except OSError as error:
        return f"it cannot be read: {error}"
    if record is None:
        return None
    if lost := sorted(set(record.tensors) ^ tensors):
        return f"its tensors are not those of its layer: {lost[0]!r}{f' and {len(lost) - 1} more' * (len(lost) > 1)}"
    if record.blocks is not None:
        parts = ((part.offset, part.nbytes) for part in header.tensors)
        lengths = lengths_of(block_starts(size, header.data_start, parts), size)
        sums = numbers(record.blocks)
        if len(sums) != len(lengths) or combine_all(zip(sums, lengths, strict=True)) != record.crc32:
            return "the checksums of its blocks are not those of the file"
    found = crc32_of_file(path)
    return None if found == record.crc32 else f"its checksum is {found:08x}; {record.crc32:08x} was written"


def _tensors(path: Path, header: Header) -> set[str]:
    """Names of the checkpoint tensors in a layer file; the parts of quantized ones are compared."""
    return set(read_forms(path, {spec.name: spec for spec in header.tensors}))
