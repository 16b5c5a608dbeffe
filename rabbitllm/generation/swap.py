"""KV caches of preempted requests, swapped out to RAM or to nameless files.

    on a GPU    to RAM, if they take at most a quarter of the free memory; else to a file
    in RAM      to a file, if they take at most a quarter of the free space on its disk

A cache that cannot be moved, does not fit or fails is recomputed, which is always possible.

The text of users can be recovered from the files. So the files have no names, which keeps other users from reading
them, and the system deletes them when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ReferenceType

import torch
from transformers import Cache, CacheLayerMixin

from rabbitllm.engine.free_memory import available_ram
from rabbitllm.engine.transformers_api import DummyLayer, LinearAttentionCacheLayerMixin
from rabbitllm.generation.kv_cache import Beside, without_room
from rabbitllm.storage import durable
from rabbitllm.storage.folders import folder_at

logger = logging.getLogger(__name__)

SHARE = 4
"""A swapped-out cache may take at most 1 / `SHARE` of the free memory or space."""
_HOLDERS = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, DummyLayer, Beside)
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, type, ReferenceType)


@dataclass(frozen=True, slots=True)
class _Index:
    """Placeholder of a tensor in the shell of a cache."""

    number: int


class _Unknown(Exception):
    """The cache contains a value that is neither a tensor nor plain."""


def taken_apart(cache: Cache) -> tuple[Any, list[torch.Tensor]] | None:
    """A copy of a cache with placeholders instead of tensors, and the tensors; None if it has an unknown kind of value.

    Works for any cache of transformers: attention layers, sliding windows, states, and a family's own kinds of layers,
    as long as they contain only tensors and plain values. A tensor that is a view is restored without its base.
    """
    tensors: list[torch.Tensor] = []
    indices: dict[int, _Index] = {}

    def emptied(value: Any) -> _Index:
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            raise _Unknown
        if id(value) not in indices:
            indices[id(value)] = _Index(len(tensors))
            tensors.append(value)
        return indices[id(value)]

    try:
        return _walked(cache, emptied, {}), tensors
    except _Unknown:
        return None


def put_together(shell: Any, tensors: list[torch.Tensor]) -> Any:
    """Restore a cache.

    Args:
        shell: as `taken_apart` returned it.
        tensors: tensors with the values of those that it returned, in the same order.
    """
    return _walked(shell, lambda value: tensors[value.number], {})


def _walked(value: Any, replaced: Callable[[Any], Any], walked: dict[int, Any]) -> Any:
    """A copy in which every value that is neither plain nor a container is replaced."""
    if isinstance(value, _PLAIN):
        return value
    if type(value) is dict:
        return {key: _walked(item, replaced, walked) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_walked(item, replaced, walked) for item in value)
    if not isinstance(value, _HOLDERS):
        return replaced(value)
    if id(value) not in walked:
        walked[id(value)] = result = without_room(copy(value))
        for name, item in vars(result).items():
            vars(result)[name] = _walked(item, replaced, walked)
    return walked[id(value)]


@dataclass(eq=False, slots=True)
class SwappedOutCache:
    """A KV cache that is swapped out.

    Attributes:
        shell: see `taken_apart`.
        forms: of each of its tensors a tensor without memory, and the device.
        content: its tensors in RAM, or the file with them; None once it is dropped.
    """

    shell: Any
    forms: list[tuple[torch.Tensor, torch.device]]
    content: list[torch.Tensor] | durable.NamelessFile | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(form.nbytes for form, _ in self.forms)


class SwapSpace:
    """Swaps KV caches out and in.

    Args:
        limit: limit in bytes; 0 swaps nothing out.
        folder: folder of the files; None for no files.

    Attributes:
        limit: see above.
        nbytes: bytes swapped out now.
    """

    def __init__(self, limit: int, folder: Path | None) -> None:
        self.limit = limit
        self.nbytes = 0
        self._folder = folder
        self._has_failed = False

    def put(self, cache: Cache) -> SwappedOutCache | None:
        """Swap a cache out; None if it has to be recomputed.

        Args:
            cache: KV cache of one sequence; the caller must not use it afterwards.
        """
        parts = taken_apart(cache) if self.limit else None
        if parts is None:
            return None
        shell, tensors = parts
        swapped = SwappedOutCache(shell, [(_form(tensor), tensor.device) for tensor in tensors])
        if self.nbytes + swapped.nbytes > self.limit:
            return None
        with self._recomputed_after_errors():
            if _is_on_gpu(tensors) and swapped.nbytes <= available_ram() // SHARE:
                swapped.content = [_dense(tensor) for tensor in tensors]
            elif self._folder is not None and swapped.nbytes <= shutil.disk_usage(self._folder).free // SHARE:
                swapped.content = self._written(tensors)
        if swapped.content is None:
            return None
        self.nbytes += swapped.nbytes
        return swapped

    def take(self, swapped: SwappedOutCache) -> Any | None:
        """Swap a cache in; None if it is lost.

        Args:
            swapped: as `put` returned it, once.
        """
        tensors: list[torch.Tensor] | None = None
        with self._recomputed_after_errors():
            if isinstance(swapped.content, list):
                tensors = [t.to(device) for t, (_, device) in zip(swapped.content, swapped.forms, strict=True)]
            elif swapped.content is not None:
                tensors = self._read(swapped.content, swapped.forms)
        self.drop(swapped)
        return put_together(swapped.shell, tensors) if tensors is not None else None

    def drop(self, swapped: SwappedOutCache) -> None:
        """Drop a swapped-out cache."""
        self.nbytes -= swapped.nbytes
        if isinstance(swapped.content, durable.NamelessFile):
            swapped.content.close()
        swapped.content = None

    def _written(self, tensors: list[torch.Tensor]) -> durable.NamelessFile:
        end = 0
        file = durable.NamelessFile(self._folder)
        try:
            for tensor in tensors:
                file.write_at(_bytes_of(_dense(tensor)), end)
                end += tensor.nbytes
        except BaseException:
            file.close()
            raise
        return file

    def _read(self, file: durable.NamelessFile, forms: list[tuple[torch.Tensor, torch.device]]) -> list[torch.Tensor]:
        end = 0
        tensors = []
        for form, device in forms:
            tensor = _empty(form)
            file.read_at(_bytes_of(tensor), end)
            end += tensor.nbytes
            tensors.append(tensor.to(device))
        return tensors

    @contextlib.contextmanager
    def _recomputed_after_errors(self) -> Iterator[None]:
        """Suppress an error, and warn of the first one, since a full disk remains full for a while."""
        try:
            yield
        except (OSError, MemoryError, RuntimeError) as error:
            if not self._has_failed:
                logger.warning("KV caches of preempted requests are computed again: %s", error)
            self._has_failed = True


def default_folder() -> Path | None:
    """The default folder of the files: a writable one for temporary files, not in memory; None if there is none."""
    for path in (Path(tempfile.gettempdir()), Path("/var/tmp")):
        if path.is_dir() and (folder := folder_at(path)).writable and not folder.in_memory:
            return path
    return None


def _is_on_gpu(tensors: list[torch.Tensor]) -> bool:
    return any(tensor.device.type != "cpu" for tensor in tensors)


def _form(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor after it is restored, without memory: its axes in the same order, without holes."""
    return torch.empty_like(tensor, device="meta")


def _empty(form: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(form.shape, form.stride(), dtype=form.dtype)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host, in the memory layout of `_form`."""
    form = _form(tensor)
    if tensor.device.type == "cpu" and tensor.stride() == form.stride():
        return tensor
    return _empty(form).copy_(tensor)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor on the host without holes."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8).numpy().data
