"""`rabbitllm.lazy_load`: a checkpoint on this machine as a mapping of lazy tensors, whatever its format.

Headers are read and checked when it is opened, weights when they are used (`_files.py`): as views of the file if
possible, else read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rabbitllm.base.collection import uncollected
from rabbitllm.base.options import arguments_checked
from rabbitllm.checkpoints import hub_cache
from rabbitllm.checkpoints.index import is_gguf_file, is_index, is_meta, read_index
from rabbitllm.checkpoints.local import LocalCheckpoint, check_path, entry_in
from rabbitllm.errors import (
    USED_UP,
    CheckpointNotFoundError,
    InvalidIndexError,
    MissingShardError,
    OptionError,
    UnreadableFormatError,
    system_errors_by_name,
)
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.lazy._files import JoinedFiles, ShardFile
from rabbitllm.store.checksums import LayerChecks
from rabbitllm.store.layer_store import LayerStore
from rabbitllm.store.manifest import is_legacy, read_manifest

if TYPE_CHECKING:
    from rabbitllm.lazy._tensor import LazyTensor


class LazyCheckpoint(Mapping[str, "LazyTensor"], contextlib.AbstractContextManager["LazyCheckpoint"]):
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
        from rabbitllm.lazy._tensor import LazyTensor

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


@arguments_checked()
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
        OptionError: `path` is no path.
        CheckpointNotFoundError, MissingShardError: there is no file, no weights in the folder, or not all of them.
        InvalidIndexError, UnsafePathError, CorruptShardError, UnsafePickleError, UnreadableFormatError: the files are
            invalid, unsafe, or of a format that is not supported.
        IncompleteSplitError: the split directory is incomplete, or the header of a layer file is damaged. Using a
            tensor may raise it too.
    """
    if not isinstance(path, str | os.PathLike):
        raise OptionError(
            f"The model is {path!r}; expected the path of a folder or file.",
            "Example: rabbitllm.lazy_load('model.safetensors').",
        )
    where = Path(path)
    if where.is_file():
        return _open(where, {where.name: where}, None, mapped, _checks_of(where) if verify_checksums else None)
    if not where.is_dir():
        raise CheckpointNotFoundError(
            f"{where} is neither a file nor a folder.", "Check the path; repositories cannot be loaded lazily."
        )
    if read_manifest(where) is not None or is_legacy(where):
        return _open_split(where, mapped, verify_checksums)
    return _open_folder(where, mapped)


def _open_folder(folder: Path, mapped: bool) -> LazyCheckpoint:
    entry = entry_in(folder)
    if is_meta(entry) or is_gguf_file(folder / entry):
        return _open_translated(folder, mapped)
    snapshot = hub_cache.snapshot_of(folder)
    check_path(folder / entry, folder, snapshot)
    index = read_index(folder / entry) if is_index(entry) else None
    paths = {}
    for shard in index.shards if index is not None else (entry,):
        path = paths[shard] = folder / shard
        check_path(path, folder, snapshot)
        if not path.is_file():
            raise MissingShardError(f"{path} is missing; {entry} names it.", f"Put the shard at that path. {USED_UP}")
    return _open(folder, paths, index.weight_map if index is not None else None, mapped)


@uncollected()
def _open_translated(folder: Path, mapped: bool) -> LazyCheckpoint:
    """Open Meta's own files or GGUF, under the names and in the order of transformers.

    Pieces of ranks are joined; blocks are dequantized when a tensor is used.
    """
    checkpoint = LocalCheckpoint(folder)
    paths = {shard: checkpoint.acquire(shard) for shard in sorted(checkpoint.index.shards)}
    pieces: dict[str, list[TensorSpec]] = {}
    with _opened(paths, mapped) as files:
        for name, file in files.items():
            for spec in checkpoint.taken_from(name, file.header).tensors:
                pieces.setdefault(spec.whole.name, []).append(spec)
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
    layers = () if manifest is None else tuple(record for record in manifest.layers if record.file == path.name)
    return LayerStore(path.parent, replace(manifest, layers=layers)).checks if manifest is not None and layers else None


@uncollected()
def _open(
    path: Path,
    paths: Mapping[str, Path],
    file_of: Mapping[str, str] | None,
    mapped: bool,
    checks: LayerChecks | None = None,
) -> LazyCheckpoint:
    """Open files, name -> path. `file_of`: tensor -> the file that must have it; None for all tensors."""
    with _opened(paths, mapped, checks) as files:
        tensors = {(tensor.name, name): tensor for name, opened in files.items() for tensor in opened.header.tensors}
        chosen = list(file_of.items()) if file_of is not None else list(tensors)
        for name, file in chosen:
            if (name, file) not in tensors:
                raise InvalidIndexError(
                    f"The index puts {name!r} into {file}, whose header does not have it.",
                    "Download the index and that shard again: they are of different versions.",
                )
    return LazyCheckpoint(path, files, {name: (tensors[name, file], files[file]) for name, file in chosen})


@contextlib.contextmanager
def _opened(
    paths: Mapping[str, Path], mapped: bool, checks: LayerChecks | None = None
) -> Iterator[dict[str, ShardFile]]:
    """Open files, name -> path; an error meanwhile closes them."""
    files: dict[str, ShardFile] = {}
    with contextlib.ExitStack() as failed:
        for name, path in paths.items():
            files[name] = ShardFile(path, name, mapped=mapped, checks=checks)
            failed.callback(files[name].close)
        yield files
        failed.pop_all()
