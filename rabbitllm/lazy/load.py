"""`rabbitllm.lazy_load`: a checkpoint on this machine as a mapping of lazy tensors, whatever its format.

Headers are read and checked when it is opened, weights when they are used: as views of the file if possible, else
read.

A view is a tensor over a private mapping of the file, with the strides of the file. All live views share one mapping:
views that share bytes share memory, and a write to one is seen in the others, as with tensors of `torch.load`. Once
`hold_mapping` is called, the mapping is kept until the file is closed; without it, the mapping and its pages are freed
with the last view. A tensor that is misaligned for its dtype is read instead, in row-major order and into memory of its
own, as are all tensors if files are not mapped. A tensor of a layer file is compared with its checksums when it is
made.

Before either, the file must still be the one that was opened, of the same length and time of change: touching a mapping
of a truncated file would end the process. A file that is truncated while a view is alive still does that, as with
any mapped file. Of many files few are open at a time; a file that is opened again must be the same one too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rabbitllm.base.collection import uncollected
from rabbitllm.base.forks import own_lock
from rabbitllm.checkpoints import hub_cache
from rabbitllm.checkpoints.index import META_PARAMETERS, is_gguf_file, is_index, is_meta, read_index
from rabbitllm.checkpoints.local import LocalCheckpoint, check_path, entry_in
from rabbitllm.checkpoints.meta_checkpoint import ranks_of, read_meta
from rabbitllm.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ClosedCheckpointError,
    CorruptShardError,
    InvalidIndexError,
    MissingShardError,
    UnreadableFormatError,
    system_errors_by_name,
)
from rabbitllm.formats.safetensors_file import view_bytes
from rabbitllm.formats.shard_header import read_shard_header
from rabbitllm.formats.tensor_spec import DTYPES, Header, TensorSpec, torch_dtype
from rabbitllm.quant.stored_blocks import read_tensor
from rabbitllm.storage.files import CAN_MAP_PRIVATELY, OpenFiles, PositionalFile, identity_of
from rabbitllm.store.checksums import LayerChecks
from rabbitllm.store.layer_store import LayerStore
from rabbitllm.store.manifest import is_legacy, read_manifest

if TYPE_CHECKING:
    import torch

    from rabbitllm.lazy.tensor import LazyTensor


class ShardFile:
    """One file of weights, open until `close` or until this object is freed. Safe to use from several threads.

    Args:
        path: the file.
        name: the file's name in specs and messages.
        mapped: whether its tensors may be views of a mapping.
        checks: compares bytes that are read of a layer file with its checksums; None for no comparison.

    Attributes:
        path: the file.
        header: the specs of its tensors, checked.

    Raises:
        CheckpointError: see `read_shard_header`; or the file changed while it was opened.
    """

    def __init__(self, path: Path, name: str, *, mapped: bool, checks: LayerChecks | None = None) -> None:
        self.path = path
        self._name, self._checks = name, checks
        self._mappable = mapped and CAN_MAP_PRIVATELY
        self._lock = own_lock(threading.Lock())
        self._map: weakref.ref[Any] | None = None
        self._held: Any = None
        self._file = _Reopened(path)
        self._close = weakref.finalize(self, _FILES.drop, self._file)
        try:
            with _FILES.using(self._file):
                self.header: Header = read_shard_header(path, name)
                if identity_of(os.stat(path)) != self._file.identity:  # the header was read by name
                    raise _changed(path)
        except (OSError, CheckpointError):
            self._close()
            raise

    def viewable(self, spec: TensorSpec) -> bool:
        """Whether the tensor is made as a view of the mapped file, at the file's own strides."""
        return self._mappable and spec.blocks is None and spec.offset % max(1, DTYPES[spec.dtype].bits // 8) == 0

    def has_rows(self, spec: TensorSpec) -> bool:
        """Whether some rows of the tensor can be read as a tensor of their own."""
        return spec.strides is None and spec.blocks is None and spec.nbytes > 0

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """An ordinary tensor on the CPU, writable; writing to it never changes the file.

        Raises:
            ClosedCheckpointError: the file is closed.
            CorruptShardError: the file has changed since it was opened.
            IncompleteSplitError: a checksum differs.
        """
        import torch

        # a tensor made in inference mode could not be used outside it; a factory would heed a default device
        with torch.inference_mode(False), torch._C.DisableTorchFunction():
            if not spec.nbytes:
                return view_bytes(memoryview(b""), spec)
            view = self._view(spec) if self.viewable(spec) else None
            if view is None:
                return view_bytes(self._read(spec), spec)
            if spec.strides is None:
                return view_bytes(view, spec)
            flat = torch.frombuffer(view, dtype=torch.uint8).view(torch_dtype(spec.dtype))
            return flat.as_strided(spec.shape, spec.strides)

    def fill(self, spec: TensorSpec, buffer: memoryview) -> bool:
        """Read a tensor's bytes in row-major order into a buffer, without a view.

        Args:
            spec: of a tensor of this file.
            buffer: writable, `spec.nbytes` long; its content is undefined after an error.

        Returns:
            False, without a read, while there are views: the tensor may have been changed through them.

        Raises:
            ClosedCheckpointError, CorruptShardError, IncompleteSplitError: as `tensor`.
        """
        with self._lock:
            if self._map is not None and self._map() is not None:
                return False
        self._read_into(spec, buffer)
        return True

    def hold_mapping(self) -> None:
        """Keep the mapping, since a view of it is kept and may be written to: later views must see the change."""
        with self._lock:
            if not self._file.is_closed:
                self._held = self._map() if self._map is not None else None

    def close(self) -> None:
        """Close the file, once running reads are finished. Tensors that are made stay usable."""
        with self._lock:
            self._file.is_closed, self._held = True, None
            self._close()

    def _view(self, spec: TensorSpec) -> memoryview | None:
        """The tensor's bytes from its first element to its last; None if the file cannot be mapped after all."""
        with self._lock, self._open() as file:
            pages = self._map() if self._map is not None else None
            if pages is None:
                try:
                    pages = file.map_privately().obj
                except OSError:  # the file system cannot map files, or there is no address space left
                    return None
                self._map = weakref.ref(pages)
        if self._checks is not None:  # of the file, since a view may have been written to
            self._checks.stored(self._name, [(spec.offset, spec.extent)])
        return memoryview(pages).cast("B")[spec.offset : spec.offset + spec.extent]

    def _read(self, spec: TensorSpec) -> memoryview:
        """The tensor's bytes in row-major order."""
        import torch

        buffer = memoryview(torch.empty(spec.nbytes, dtype=torch.uint8).numpy().data)
        self._read_into(spec, buffer)
        return buffer

    def _read_into(self, spec: TensorSpec, buffer: memoryview) -> None:
        with self._open() as file:
            if read_tensor(file, spec, 0, buffer) != len(buffer) or file.identity() != self._file.identity:
                raise _changed(self.path)
        if self._checks is not None:
            self._checks.read(self._name, spec.offset, buffer)

    @contextlib.contextmanager
    def _open(self) -> Iterator[PositionalFile]:
        """The open file, checked to be unchanged; it is not closed within the context."""
        if self._file.is_closed:
            raise _closed(self.path)
        with _FILES.using(self._file):
            file = self._file.opened
            if file.identity() != self._file.identity:
                raise _changed(self.path)
            yield file


class _Reopened:
    """A file that the pool of open files opens and closes; it must be unchanged each time."""

    is_settled = True

    def __init__(self, path: Path) -> None:
        self.identity: tuple[int, ...] | None = None
        self.is_closed = False
        self.opened: PositionalFile
        self._path = path
        self._place = path.absolute()

    def reopen(self) -> None:
        """See `Reopenable`.

        Raises:
            ClosedCheckpointError: it was closed by `close`.
            CorruptShardError: the file was changed or replaced.
            OSError: it cannot be opened.
        """
        if self.is_closed:
            raise _closed(self._path)
        try:
            file = PositionalFile(self._place)
        except FileNotFoundError:
            if self.identity is None:
                raise
            raise _changed(self._path) from None
        if self.identity is None:
            self.identity = file.identity()
        elif file.identity() != self.identity:
            file.close()
            raise _changed(self._path)
        self.opened = file

    def settle(self) -> None:
        """See `Reopenable`; nothing is written."""

    def release(self) -> None:
        """See `Reopenable`."""
        self.opened.close()


def _closed(path: Path) -> ClosedCheckpointError:
    return ClosedCheckpointError(
        f"{path} is closed, and one of its unread tensors is used.",
        "Use the tensors before the checkpoint is closed, or load it lazily again.",
    )


def _changed(path: Path) -> CorruptShardError:
    return CorruptShardError(
        f"{path} has changed since it was opened: it was modified, truncated, moved or replaced.",
        "Load it lazily again when no process writes to it.",
    )


_FILES = OpenFiles()
"""The open files of all lazy checkpoints."""


class JoinedFiles:
    """Makes tensors from pieces in files, with the interface of a `ShardFile`."""

    def __init__(self, path: Path, files: Mapping[str, ShardFile], pieces: Mapping[str, Sequence[TensorSpec]]) -> None:
        self.path = path
        self._files = files
        self._pieces = pieces

    def viewable(self, spec: TensorSpec) -> bool:
        """False: such a tensor is always a copy."""
        return False

    def has_rows(self, spec: TensorSpec) -> bool:
        """False: such a tensor is only read whole."""
        return False

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """See `ShardFile.tensor`."""
        import torch

        with torch.inference_mode(False), torch._C.DisableTorchFunction():
            pieces = self._pieces[spec.name]
            parts = [self._part(piece) for piece in pieces]
            cut = pieces[0].piece
            return torch.cat(parts, cut.dim) if cut is not None else parts[0].clone()

    def _part(self, piece: TensorSpec) -> torch.Tensor:
        plain = piece._replace(shape=piece.sizes, view=None, piece=None)
        return self._files[piece.file].tensor(plain).reshape(piece.shape)

    def fill(self, spec: TensorSpec, buffer: memoryview) -> bool:
        """Read nothing; return False, see `ShardFile.fill`."""
        return False

    def hold_mapping(self) -> None:
        """Do nothing: copies use no mapping."""


class LazyCheckpoint(Mapping[str, "LazyTensor"]):
    """Tensor names -> lazy tensors, a new one at each look-up. A context manager.

    Look-ups, iteration and `len` read nothing. The files stay open until `close`, or until this object and all of its
    tensors are freed; tensors that have been read stay usable. Safe to use from several threads.

    Attributes:
        path: the file or folder that was opened.
    """

    def __init__(
        self,
        path: Path,
        files: Mapping[str, ShardFile],
        places: Mapping[str, tuple[TensorSpec, ShardFile | JoinedFiles]],
    ) -> None:
        self.path = path
        self._files = files
        self._places = places

    def __getitem__(self, name: str) -> LazyTensor:
        from rabbitllm.lazy.tensor import LazyTensor

        return LazyTensor(*self._places[name])

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(spec.nbytes for spec, _ in self._places.values())

    def close(self) -> None:
        """Close the files. Tensors that have not been read cannot be read any more."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> LazyCheckpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled or deep-copied: it holds open files. Pass the path on and load it lazily "
            "there, or pickle dict(checkpoint), which reads every tensor."
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({str(self.path)!r}, {len(self)} tensors, {self.nbytes:,} bytes "
            f"in {len(self._files)} files)"
        )


@system_errors_by_name()
def lazy_load(path: str | os.PathLike[str], *, mapped: bool = True, verify_checksums: bool = True) -> LazyCheckpoint:
    """Open a checkpoint without reading its weights; each tensor is read when it is used in a torch function.

        weights = rabbitllm.lazy_load("my-checkpoint")
        model.load_state_dict(weights, assign=True)

    Args:
        path: a file (safetensors, GGUF or `torch.save`, by its first bytes), or the folder of a checkpoint (also of
            Meta's own format, under transformers' names) or of an uncompressed split by RabbitLLM.
        mapped: make tensors views of the mapped files, without a copy; writing to them never changes the file. False
            reads them into memory, so that a disk error or a truncated file raises an error; with a mapping it would
            end the process.
        verify_checksums: compare the bytes of a tensor with the checksums of its split directory when it is first used,
            all of them also if it is mapped and only some of its pages are used.

    Returns:
        Tensor names -> lazy tensors, with the shape and dtype of the file, on the CPU, in the order of the file or of
        the index. They are never parameters and require no gradient, even if saved ones did.

    Raises:
        CheckpointNotFoundError, MissingShardError: there is no file, no weights in the folder, or not all of them.
        InvalidIndexError, UnsafePathError, CorruptShardError, UnsafePickleError, UnreadableFormatError: the files are
            invalid, unsafe, or of a format that is not supported.
        IncompleteSplitError: the split directory is incomplete, or the header of a layer file is damaged. Using a
            tensor may raise it too.
    """
    given = Path(path)
    if given.is_file():
        return _open(given, {given.name: given}, None, mapped, _checks_of(given) if verify_checksums else None)
    if not given.is_dir():
        raise CheckpointNotFoundError(
            f"{given} is neither a file nor a folder.", "Check the path; repositories cannot be loaded lazily."
        )
    if read_manifest(given) is not None or is_legacy(given):
        return _open_split(given, mapped, verify_checksums)
    return _open_folder(given, mapped)


def _open_folder(folder: Path, mapped: bool) -> LazyCheckpoint:
    entry = entry_in(folder)
    if is_meta(entry):
        return _open_meta(folder, mapped)
    if is_gguf_file(folder / entry):
        return _open_gguf(folder, mapped)
    snapshot = hub_cache.snapshot_of(folder)
    check_path(folder / entry, folder, snapshot)
    index = read_index(folder / entry) if is_index(entry) else None
    paths = {}
    for shard in index.shards if index is not None else (entry,):
        path = paths[shard] = folder / shard
        check_path(path, folder, snapshot)
        if not path.is_file():
            raise MissingShardError(f"{path} is missing; {entry} names it.", "Put the shard at that path.")
    return _open(folder, paths, index.weight_map if index is not None else None, mapped)


def _open_meta(folder: Path, mapped: bool) -> LazyCheckpoint:
    """Open Meta's own files, under the names and in the order of transformers; pieces of ranks are joined."""
    ranks = ranks_of((path.name for path in folder.iterdir() if path.is_file()), str(folder))
    for name in (META_PARAMETERS, *ranks):
        check_path(folder / name, folder, hub_cache.snapshot_of(folder))
    meta = read_meta(folder / META_PARAMETERS, ranks)
    return _joined(folder, {rank: folder / rank for rank in ranks}, meta.taken_from, mapped)


def _open_gguf(folder: Path, mapped: bool) -> LazyCheckpoint:
    """Open GGUF files, under the names of transformers; blocks are dequantized when a tensor is used."""
    checkpoint = LocalCheckpoint(folder)
    paths = {shard: checkpoint.acquire(shard) for shard in sorted(checkpoint.index.shards)}
    return _joined(folder, paths, checkpoint.taken_from, mapped)


@uncollected()
def _joined(
    folder: Path, paths: Mapping[str, Path], taken_from: Callable[[str, Header], Header], mapped: bool
) -> LazyCheckpoint:
    """Open files, name -> path, of whose tensors some are pieces, or in another order than the model's.

    Args:
        folder: of the checkpoint.
        paths: the files.
        taken_from: the tensors of the model that a file has, by its name and header.
        mapped: see `lazy_load`.
    """
    files: dict[str, ShardFile] = {}
    pieces: dict[str, list[TensorSpec]] = {}
    with contextlib.ExitStack() as failed:
        for name, path in paths.items():
            files[name] = ShardFile(path, name, mapped=mapped)
            failed.callback(files[name].close)
            for spec in taken_from(name, files[name].header).tensors:
                pieces.setdefault(spec.whole.name, []).append(spec)
        failed.pop_all()
    for parts in pieces.values():  # halves of fused experts may be in any order
        parts.sort(key=lambda spec: spec.piece.begin if spec.piece is not None else 0)
    joined = JoinedFiles(folder, files, pieces)
    places: dict[str, tuple[TensorSpec, ShardFile | JoinedFiles]] = {}
    for name, (first, *_) in pieces.items():
        plain = first.piece is None and first.view is None
        described = first._replace(strides=None, view=None) if first.piece is None else first.whole
        places[name] = (first, files[first.file]) if plain else (described, joined)
    return LazyCheckpoint(folder, files, places)


def _open_split(folder: Path, mapped: bool, verify_checksums: bool) -> LazyCheckpoint:
    store = LayerStore(folder, verify_checksums=verify_checksums)
    if packed := next((tensor.name for tensor in store.tensors.values() if tensor.quantized), None):
        raise UnreadableFormatError(
            f"{folder} is a compressed split: {packed!r} is quantized in it.",
            "Use AutoModel.from_pretrained, or load the original or an uncompressed split lazily.",
        )
    files = {name: tensor.parts[0].file for name, tensor in store.tensors.items()}
    paths = {file: store.path(file) for file in dict.fromkeys(files.values())}
    return _open(folder, paths, files, mapped, store.checks)


def _checks_of(path: Path) -> LayerChecks | None:
    """The checks of a single layer file, by the manifest in its folder; None for any other file."""
    manifest = read_manifest(path.parent)
    own = () if manifest is None else tuple(record for record in manifest.layers if record.file == path.name)
    return LayerStore(path.parent, replace(manifest, layers=own)).checks if manifest is not None and own else None


@uncollected()
def _open(
    path: Path,
    paths: Mapping[str, Path],
    wanted: Mapping[str, str] | None,
    mapped: bool,
    checks: LayerChecks | None = None,
) -> LazyCheckpoint:
    """Open files, name -> path. `wanted`: tensor -> the file that must have it; None for all tensors."""
    files: dict[str, ShardFile] = {}
    with contextlib.ExitStack() as failed:
        for name, place in paths.items():
            files[name] = ShardFile(place, name, mapped=mapped, checks=checks)
            failed.callback(files[name].close)
        found = {(tensor.name, name): tensor for name, opened in files.items() for tensor in opened.header.tensors}
        chosen = list(wanted.items()) if wanted is not None else list(found)
        for name, file in chosen:
            if (name, file) not in found:
                raise InvalidIndexError(
                    f"The index puts {name!r} into {file}, whose header does not have it.",
                    "Download the index and that shard again: they are of different versions.",
                )
        failed.pop_all()
    return LazyCheckpoint(path, files, {name: (found[name, file], files[file]) for name, file in chosen})
