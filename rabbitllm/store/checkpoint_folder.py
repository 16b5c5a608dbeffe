"""Writes a checkpoint into a folder: safetensors shards, an index if there are several, config and tokenizer.

All files are made in a work folder inside the target, and moved out of it by renames once all of them are durable:
the shards first, the index last. So a folder has either no checkpoint or a complete one; the remains of a crash are
removed, or moved, by the next call. Independent of models and of the source of the bytes.

Invariants: a folder that holds weights is refused before anything is changed; a lack of disk space is reported
before the first byte.

`PlainReader` reads stored tensors as plain checkpoint bytes, in chunks, in bounded memory. Uncompressed tensors keep
their bits; 4bit and 8bit tensors are dequantized, a run of blocks at a time, with the same bits as dequantizing the
whole. It uses positional reads, not a mapping.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from rabbitllm.base.terminal import listed
from rabbitllm.checkpoints.index import (
    INDEX_NAME,
    META_PARAMETERS,
    SINGLE_NAME,
    TORCH_INDEX_NAME,
    WEIGHT_SUFFIXES,
    dtype_without_config,
    index_of,
    shard_names,
)
from rabbitllm.errors import IncompleteSplitError, OptionError
from rabbitllm.formats.bounded import read_json
from rabbitllm.formats.safetensors_file import TensorToWrite, encode_header, view_bytes
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, dtype_name, torch_dtype
from rabbitllm.quant.schemes import NESTED_BLOCK, SCALE_BYTES, STORED, Quantized
from rabbitllm.storage import durable
from rabbitllm.storage.file_lock import LOCK_SUFFIX, locked_file
from rabbitllm.storage.files import PositionalFile, file_opener, page_aligned
from rabbitllm.storage.folders import require_room
from rabbitllm.store.layer_file import TENSOR_ALIGNMENT
from rabbitllm.store.layer_store import StoredTensor, WeightFiles
from rabbitllm.store.manifest import JOURNAL_NAME, MANIFEST_NAME
from rabbitllm.store.tensor_values import read_tensor

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 8 << 20
"""Bytes of a stored tensor in memory at a time; for a quantized one, plus the dequantized values of that chunk."""


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A stored tensor and its form in a checkpoint; `memory` is set if it may have been changed in memory."""

    stored: StoredTensor
    placed: TensorToWrite
    memory: torch.Tensor | None = None


def plain(stored: StoredTensor, dtype: str) -> PlainTensor:
    """The plain form of a stored tensor; `dtype` is that of dequantized ones."""
    form = stored.quantized
    if form is None:
        return PlainTensor(stored, TensorToWrite(stored.name, stored.parts[0].dtype, stored.parts[0].shape))
    return PlainTensor(stored, TensorToWrite(stored.name, dtype, form.shape))


def in_memory(stored: StoredTensor, memory: torch.Tensor) -> PlainTensor:
    """A tensor that is taken from memory instead of its file."""
    return PlainTensor(stored, TensorToWrite(stored.name, dtype_name(memory.dtype), tuple(memory.shape)), memory)


class PlainReader(contextlib.AbstractContextManager["PlainReader"]):
    """Reads tensors of a store; a context manager.

    Args:
        store: the store.
    """

    def __init__(self, store: WeightFiles) -> None:
        self._store = store
        self._buffer = page_aligned(CHUNK_BYTES)
        self._open: tuple[str, PositionalFile] | None = None

    def chunks(self, tensor: PlainTensor) -> Iterator[memoryview]:
        """The bytes of a tensor in order; each chunk is valid until the next one is requested.

        Raises:
            IncompleteSplitError: the file is truncated or damaged.
        """
        import torch

        if tensor.memory is not None:
            if self._store.checks is not None:  # it may be a view of the mapped file that was not used yet
                for part in tensor.stored.parts:
                    self._store.checks.stored(part.file, [(part.offset, part.extent)])
            whole = tensor.memory.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            for begin in range(0, len(whole), CHUNK_BYTES):
                yield whole[begin : begin + CHUNK_BYTES]
        elif tensor.stored.quantized is None:
            part = tensor.stored.parts[0]
            for begin in range(0, part.nbytes, CHUNK_BYTES):
                yield self._read(part, begin, min(CHUNK_BYTES, part.nbytes - begin))
        else:
            yield from self._dequantized(tensor.stored, tensor.stored.quantized, tensor.placed.dtype)

    def read(self, stored: StoredTensor, dtype: torch.dtype | None) -> torch.Tensor:
        """A tensor from its file; a floating-point one is converted to `dtype`, if given."""
        import torch

        tensor = plain(stored, dtype_name(dtype or torch.float32))
        data = bytearray()
        for chunk in self.chunks(tensor):
            data += chunk
        spec = TensorSpec(stored.name, tensor.placed.dtype, tensor.placed.shape, "", 0, len(data))
        loaded = view_bytes(memoryview(data), spec)
        return loaded.to(dtype) if dtype is not None and loaded.is_floating_point() else loaded

    def _dequantized(self, stored: StoredTensor, form: Quantized, dtype: str) -> Iterator[memoryview]:
        import torch

        from rabbitllm.quant import gguf_blocks
        from rabbitllm.quant.quantize import dequantize

        entry, elements = STORED[form.scheme], math.prod(form.shape)
        if entry.block_bytes:
            step = max(CHUNK_BYTES * 8 // DTYPES[dtype].bits // entry.block, 1) * entry.block
            for begin in range(0, elements, step):
                count = min(step, elements - begin)
                run = begin // entry.block * entry.block_bytes, count // entry.block * entry.block_bytes
                blocks = torch.frombuffer(self._read(stored.parts[0], *run), dtype=torch.uint8)
                weights = gguf_blocks.dequantize(form.scheme, blocks, (count,), torch_dtype(dtype))
                yield weights.view(torch.uint8).numpy().data.cast("B")
            return
        payload, _, table = stored.parts[:3]
        values = torch.frombuffer(self._read(table, 0, table.nbytes, own=True), dtype=torch.float32)
        block, codes_each = entry.block, entry.codes_a_byte
        whole = block if form.offset is None else block * NESTED_BLOCK
        step = max(CHUNK_BYTES * 8 // DTYPES[dtype].bits // whole, 1) * whole
        for begin in range(0, elements, step):
            count = min(step, elements - begin)
            scales = self._scales(stored, form, begin // block, math.ceil(count / block))
            codes = self._read(payload, begin // codes_each, math.ceil(count / codes_each))
            shape = (count // block, block) if count % block == 0 else (count,)  # rows are divided among threads
            weights = dequantize(
                Quantized(form.codes.scheme, shape, form.dtype),
                torch.frombuffer(codes, dtype=torch.uint8),
                scales,
                values,
                torch_dtype(dtype),
            )
            yield weights.view(-1).view(torch.uint8).numpy().data.cast("B")

    def _scales(self, stored: StoredTensor, form: Quantized, first: int, count: int) -> torch.Tensor:
        """A run of a tensor's scales, float32; quantized scales begin at one of their blocks."""
        import torch

        from rabbitllm.quant.quantize import NestedScales

        absmax = stored.parts[1]
        if form.offset is None:
            plain = self._read(absmax, first * SCALE_BYTES, count * SCALE_BYTES, own=True)
            return torch.frombuffer(plain, dtype=torch.float32)
        nested, table = stored.parts[3:5]
        begin, length = first // NESTED_BLOCK * SCALE_BYTES, math.ceil(count / NESTED_BLOCK) * SCALE_BYTES
        scales = NestedScales(
            torch.frombuffer(self._read(nested, begin, length, own=True), dtype=torch.float32),
            torch.frombuffer(self._read(table, 0, table.nbytes, own=True), dtype=torch.float32),
            torch.tensor(form.offset, dtype=torch.float32, device="cpu"),
        )
        return scales.expanded(torch.frombuffer(self._read(absmax, first, count, own=True), dtype=torch.uint8))

    def _read(self, part: TensorSpec, begin: int, length: int, *, own: bool = False) -> memoryview:
        """A run of a part's bytes, in the shared buffer or in newly allocated memory."""
        into = memoryview(bytearray(length)) if own else self._buffer[:length]
        if read_tensor(self._file(part.file), part, begin, into) != length:
            raise IncompleteSplitError(
                f"{self._store.path(part.file)} ends within {part.name!r}: the file was truncated after the model was "
                "loaded.",
                "Load the model again for a full check of the file.",
            )
        if self._store.checks is not None:
            self._store.checks.read(part.file, part.offset + begin, into)
        return into

    def _file(self, name: str) -> PositionalFile:
        if self._open is None or self._open[0] != name:
            self.close()
            file = PositionalFile(self._store.path(name))
            file.advise_sequential()
            self._open = name, file
        return self._open[1]

    def close(self) -> None:
        """Close the last file."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def __exit__(self, *exception: object) -> None:
        self.close()


WORK_NAME = ".saving"
"""Name of the work folder inside the target."""
LOCK_NAME = WORK_NAME + LOCK_SUFFIX
_READY_NAME = "all.is.there"
"""File in that folder: all files are durable and may be moved."""
_READY = re.compile(rb"[0-9a-f]{64}")
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_VERSION_LINE = re.compile(rb'(,\s*)?"transformers_version": "[^"]*"')
_ENTRIES = (INDEX_NAME, TORCH_INDEX_NAME, META_PARAMETERS, MANIFEST_NAME, JOURNAL_NAME)


@dataclass(frozen=True, slots=True)
class Shard:
    """A file to be written: its name and its tensors, in its order."""

    name: str
    tensors: tuple[TensorToWrite, ...]


def plan_shards(tensors: Iterable[TensorToWrite], limit: int) -> list[Shard]:
    """Assign tensors to files of at most `limit` bytes of tensors each, or of one larger tensor.

    Within a file, tensors whose size is a multiple of 64 bytes come first, so that all of them are aligned.
    """
    groups: list[list[TensorToWrite]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    names = shard_names(len(groups)) if len(groups) > 1 else (SINGLE_NAME,)
    return [
        Shard(name, tuple(sorted(group, key=lambda tensor: tensor.nbytes % TENSOR_ALIGNMENT != 0)))
        for name, group in zip(names, groups, strict=True)
    ]


def write_checkpoint(
    folder: Path,
    shards: Sequence[Shard],
    sidecars: Mapping[str, bytes],
    chunks: Callable[[str], Iterator[memoryview]],
    source: str,
    tell: Callable[[int], object] = lambda nbytes: None,
    metadata: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write a complete checkpoint, or nothing that looks like one.

    A call that was interrupted after everything was written is finished by the same call, which then writes nothing:
    also where the folder has these very files, byte for byte.

    Args:
        folder: the target; it may exist, without weights.
        shards: the files to write.
        sidecars: config, tokenizer and similar files: relative name -> content; existing files are replaced.
        chunks: tensor name -> its bytes, in order.
        source: identifies the weights among others of the same names and shapes.
        tell: called with the number of bytes written, after each chunk.
        metadata: of the index, which is then also written for a single file.

    Raises:
        OptionError: the folder has weights, or another model's config, or its work folder has files of others; nothing
            was changed.
        NotEnoughSpaceException: the disk is too small.
        InUseError: another process writes into the folder.
        OSError: a file cannot be written; nothing of it is left.
    """
    if folder.exists() and not folder.is_dir():
        raise OptionError(
            f"{folder} is a file; expected a folder.", "Use a folder without weights, or one that does not exist."
        )
    files = dict(sidecars)
    if len(shards) > 1 or metadata:
        files[INDEX_NAME] = index_of_files({shard.name: shard.tensors for shard in shards}, metadata)
    saving = _Saving(folder, shards, sidecars, files, chunks, _digest_of(shards, sidecars, source), tell)
    if not folder.exists():
        saving.require_room()
        durable.make_folder(folder)
    try:
        is_writable = os.access(folder, os.W_OK)  # else it may have these very files
        with locked_file(folder / LOCK_NAME, folder) if is_writable else contextlib.nullcontext():
            saving.save()
    finally:
        durable.remove_empty_folder(folder)


@dataclass(frozen=True, slots=True)
class _Saving:
    """A call of `write_checkpoint`.

    Attributes:
        folder, shards, sidecars, chunks, tell: see there.
        files: the sidecars, and the index.
        mark: identifies the result.
    """

    folder: Path
    shards: Sequence[Shard]
    sidecars: Mapping[str, bytes]
    files: Mapping[str, bytes]
    chunks: Callable[[str], Iterator[memoryview]]
    mark: bytes
    tell: Callable[[int], object]

    def save(self) -> None:
        """Write what the folder does not have yet, or finish an earlier call."""
        work = self.folder / WORK_NAME
        ready = work / _READY_NAME
        is_ready = ready.is_file() and _READY.fullmatch(ready.read_bytes()) is not None
        own_names = {*map(_quoted, self.sidecars), INDEX_NAME, *(() if ready.exists() else (_READY_NAME,))}
        refuse_foreign(
            work, lambda name: (is_ready and _stays_inside(name)) or name in own_names or _SHARD.fullmatch(name)
        )
        if is_ready:  # an earlier call was interrupted while moving the files
            _move_out(self.folder, work)
        if not self._is_there():
            _refuse_other_model(self.folder, self.sidecars)
            self._write_all(work)
        durable.remove_folder(work)

    def require_room(self) -> None:
        """
        Raises:
            NotEnoughSpaceException: the disk is too small.
        """
        nbytes = sum(map(_file_size, self.shards)) + sum(map(len, self.files.values()))
        require_room(self.folder, nbytes, f"Saving into {self.folder}")

    def _write_all(self, work: Path) -> None:
        """Write shards and other files into the work folder, and move them out of it."""
        durable.remove_folder(work)
        self.require_room()
        durable.make_folder(work)
        try:
            for shard in self.shards:
                with contextlib.closing(
                    durable.GrowingFile(work / shard.name, _file_size(shard), write_back=True)
                ) as file:
                    for offset, piece in self._placed(shard):
                        file.write_at(piece, offset)
                    file.sync()
            for name, content in self.files.items():
                durable.write_whole(work / _quoted(name), content)
            durable.sync_folder(work)
            durable.write_whole(work / _READY_NAME, self.mark)
        except BaseException:  # an interrupt too: partial files are useless and may be large
            durable.remove_folder(work)
            raise
        _move_out(self.folder, work)

    def _placed(self, shard: Shard) -> Iterator[tuple[int, memoryview]]:
        """The bytes of a shard in order, each piece with its offset."""
        header, offsets = encode_header(shard.tensors)
        yield 0, memoryview(header)
        for tensor, offset in zip(shard.tensors, offsets, strict=True):
            position = offset
            for chunk in self.chunks(tensor.name):
                yield position, chunk
                position += len(chunk)
                self.tell(len(chunk))
            if position != offset + tensor.nbytes:
                raise AssertionError(f"{tensor.name} has {position - offset} of {tensor.nbytes} bytes")

    def _is_there(self) -> bool:
        """Whether the folder has all of it; another version of transformers may have written config and tokenizer."""
        paths = {self.folder / shard.name: _file_size(shard) for shard in self.shards}
        if not all(path.is_file() and path.stat().st_size == nbytes for path, nbytes in paths.items()):
            return False
        for name, content in self.files.items():
            path = self.folder / name
            if not path.is_file() or _without_version(name, path.read_bytes()) != _without_version(name, content):
                return False
        return all(map(self._is_written, self.shards))

    def _is_written(self, shard: Shard) -> bool:
        """Whether a file of the right size has the bytes of a shard."""
        with open(self.folder / shard.name, "rb", opener=file_opener) as file:
            for offset, piece in self._placed(shard):
                file.seek(offset)
                if file.read(len(piece)) != piece:
                    return False
        return True


def _quoted(name: str) -> str:
    """The name of a sidecar in the work folder, which has no subfolders."""
    return quote(name, safe="")


def _stays_inside(name: str) -> bool:
    """Whether a file of the work folder is moved to a place in the target; a stranger may have made the folder."""
    path = Path(unquote(name))
    return not path.is_absolute() and ".." not in path.parts


def refuse_foreign(work: Path, is_own: Callable[[str], object]) -> None:
    """Refuse a work folder with files of others, which would be deleted with it.

    Args:
        work: the folder, which may be absent.
        is_own: whether a file of this name, without the suffix of an unfinished one, is this package's.

    Raises:
        OptionError: there are such files; nothing was changed.
    """
    names = sorted(path.name for path in work.iterdir()) if work.is_dir() else []
    if foreign := [name for name in names if not is_own(name.removesuffix(durable.PART_SUFFIX))]:
        raise OptionError(
            f"{work} holds files that RabbitLLM did not write: {listed(foreign, 3)}. Nothing was changed.",
            "Move them to another folder, or use another output folder.",
        )


def index_of_files(
    files: Mapping[str, Sequence[TensorToWrite | TensorSpec]], more: Mapping[str, Any] = MappingProxyType({})
) -> bytes:
    """The index as transformers writes it.

    Args:
        files: the tensors of each file, by name.
        more: further entries of its `metadata`, after those of transformers.
    """
    weight_map = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
    tensors = [tensor for shard_tensors in files.values() for tensor in shard_tensors]
    metadata = {
        "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "total_size": sum(tensor.nbytes for tensor in tensors),
        **more,
    }
    content = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, indent=2) + "\n").encode()


def named_dtype(files: Mapping[str, Sequence[TensorToWrite | TensorSpec]], dtype: str | None) -> dict[str, str]:
    """The entry of an index for the dtype that the source has without a config, if these files would show another."""
    return {} if dtype is None or dtype_without_config(index_of({}), files) == dtype else {"dtype": dtype}


def _digest_of(shards: Sequence[Shard], sidecars: Mapping[str, bytes], source: str) -> bytes:
    """A mark that identifies the result of a call."""
    digest = hashlib.sha256(source.encode())
    for shard in shards:
        digest.update(shard.name.encode() + encode_header(shard.tensors)[0])
    for name, content in sorted(sidecars.items()):
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest().encode()


def _refuse_other_model(folder: Path, sidecars: Mapping[str, bytes]) -> None:
    if not folder.exists():
        return
    names = sorted(path.name for path in folder.iterdir())
    conflict = next((name for name in names if name in _ENTRIES or name.endswith(WEIGHT_SUFFIXES)), None)
    if conflict is None and "config.json" in names and "config.json" in sidecars:
        model_type = read_json(folder / "config.json").get("model_type")
        conflict = "config.json" if model_type != json.loads(sidecars["config.json"]).get("model_type") else None
    if conflict is not None:
        raise OptionError(
            f"{folder} already holds a model: it has {conflict!r}. Nothing was changed.",
            "Use a folder without weights, or one that does not exist; or delete this one if you do not need it.",
        )


def _file_size(shard: Shard) -> int:
    header, offsets = encode_header(shard.tensors)
    return offsets[-1] + shard.tensors[-1].nbytes if offsets else len(header)


def _without_version(name: str, content: bytes) -> bytes:
    return _VERSION_LINE.sub(b"", content) if name in ("config.json", "generation_config.json") else content


def _move_out(folder: Path, work: Path) -> None:
    """Rename all files to their final names, the entry of the checkpoint last, and remove the work folder."""
    last = (SINGLE_NAME, INDEX_NAME)
    names = sorted(path.name for path in work.iterdir() if path.name != _READY_NAME)
    for name in sorted(names, key=lambda name: name in last):
        if name in last:
            durable.sync_folder(folder)
        final = folder / unquote(name)
        durable.make_folder(final.parent)
        durable.rename(work / name, final)
        if final.parent != folder:
            durable.sync_folder(final.parent)
    durable.sync_folder(folder)
    durable.remove_folder(work)
    durable.sync_folder(folder)
