"""Open files of weights, from which lazy tensors are made.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rabbitllm.base.forks import own_lock
from rabbitllm.errors import CheckpointError, ClosedCheckpointError, CorruptShardError
from rabbitllm.formats.safetensors_file import view_bytes
from rabbitllm.formats.shard_header import read_shard_header
from rabbitllm.formats.tensor_spec import DTYPES, Header, TensorSpec, torch_dtype
from rabbitllm.storage.files import CAN_MAP_PRIVATELY, OpenFiles, PositionalFile, identity_of
from rabbitllm.store.checksums import LayerChecks
from rabbitllm.store.tensor_values import read_tensor

if TYPE_CHECKING:
    import torch


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
