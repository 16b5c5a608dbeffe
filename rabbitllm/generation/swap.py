"""KV caches of preempted requests, swapped out to RAM or to nameless files.

    on a GPU    to RAM, if they take at most a quarter of the free memory; else to a file
    in RAM      to a file, if they take at most a quarter of the free space on its disk

A file is written if writing and reading it takes no longer than recomputing the cache, estimated from the measured
speed of earlier files. A cache that cannot be moved, does not fit or fails is recomputed, which is always possible.

The text of users can be recovered from the files. So the files have no names, which keeps other users from reading
them, and the system deletes them when the process ends, however it ends.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import cache_utils

from rabbitllm.engine.free_memory import available_ram
from rabbitllm.storage import durable
from rabbitllm.storage.folders import folder_at

# Takes a cache apart into a shell and tensors, and puts it together again, bitwise the same.
#
# Works for any cache of transformers: attention layers, sliding windows, states, and a family's own kinds of layers, as
# long as they contain only tensors and plain values. A tensor that is a view is restored without its base.

_HOLDERS = tuple(
    getattr(cache_utils, name)
    for name in ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")
    if hasattr(cache_utils, name)  # not every version has all of them
)
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, type)


@dataclass(frozen=True, slots=True)
class _Place:
    """Placeholder of a tensor in the shell."""

    number: int


class _Unknown(Exception):
    """The cache contains a value that is neither a tensor nor plain."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A cache that was taken apart.

    Attributes:
        shell: copy of the cache with placeholders instead of tensors.
        tensors: the tensors, by the numbers of their placeholders.
    """

    shell: Any
    tensors: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def taken_apart(cache: Any) -> Parts | None:
    """The parts of a cache, which is not changed; None if it contains an unknown kind of value."""
    tensors: list[torch.Tensor] = []
    places: dict[int, _Place] = {}

    def emptied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            raise _Unknown
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            raise _Unknown
        if id(value) not in places:
            places[id(value)] = _Place(len(tensors))
            tensors.append(value)
        return places[id(value)]

    try:
        return Parts(_walked(cache, emptied, {}), tensors)
    except _Unknown:
        return None


def put_together(shell: Any, tensors: list[torch.Tensor]) -> Any:
    """Restore a cache from its parts.

    Args:
        shell: see `Parts`.
        tensors: tensors with the values of `Parts.tensors`, in the same order.
    """
    return _walked(shell, lambda value: tensors[value.number], {})


def _walked(value: Any, replaced: Callable[[Any], Any], seen: dict[int, Any]) -> Any:
    """A copy in which every value that is neither plain nor a container is replaced."""
    if isinstance(value, _PLAIN):
        return value
    if type(value) is dict:
        return {key: _walked(one, replaced, seen) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_walked(one, replaced, seen) for one in value)
    if not isinstance(value, _HOLDERS):
        return replaced(value)
    if id(value) not in seen:
        seen[id(value)] = made = copy(value)
        vars(made).pop("_room", None)  # the base of the key and value views; see `kv_cache.append`
        for name, one in vars(made).items():
            vars(made)[name] = _walked(one, replaced, seen)
    return seen[id(value)]


logger = logging.getLogger(__name__)

SHARE = 4
"""A swapped-out cache may take at most 1 / `SHARE` of the free memory or space."""
FIRST_RATE = 200e6
"""Assumed bytes per second to and from a file, before the first one was measured."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A tensor without its bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(eq=False, slots=True)
class SwappedOutCache:
    """A KV cache that is swapped out.

    Attributes:
        nbytes: bytes of its tensors.
        shell: see `Parts`.
        forms: form of each of its tensors.
        tensors: its tensors in RAM; None if they are in a file.
        file: the file with its tensors; None if they are in RAM.
    """

    nbytes: int
    shell: Any
    forms: list[_Form]
    tensors: list[torch.Tensor] | None
    file: durable.NamelessFile | None


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
        self._rate = FIRST_RATE
        self._has_failed = False

    def put(self, cache: Any, recompute_seconds: float | None) -> SwappedOutCache | None:
        """Swap a cache out; None if it is faster, or necessary, to recompute it.

        Args:
            cache: KV cache of one sequence; the caller must not use it afterwards.
            recompute_seconds: estimated time to recompute it; None to swap it out whenever that is possible.
        """
        parts = taken_apart(cache) if self.limit else None
        if parts is None or self.nbytes + parts.nbytes > self.limit:
            return None
        forms = [_form(tensor) for tensor in parts.tensors]
        held = SwappedOutCache(parts.nbytes, parts.shell, forms, None, None)
        try:
            if _leaves_a_device(forms) and parts.nbytes <= available_ram() // SHARE:
                held.tensors = [_dense(tensor) for tensor in parts.tensors]
            elif self._is_worth_a_file(parts.nbytes, recompute_seconds):
                held.file = self._written(parts.tensors)
            else:
                return None
        except (OSError, MemoryError, RuntimeError) as error:
            self._complain(error)
            return None
        self.nbytes += held.nbytes
        return held

    def take(self, held: SwappedOutCache) -> Any | None:
        """Swap a cache in; None if it is lost.

        Args:
            held: as `put` returned it, once.
        """
        try:
            if held.file is not None:
                tensors = self._read(held.file, held.forms, held.nbytes)
            else:
                assert held.tensors is not None
                tensors = [one.to(form.device) for one, form in zip(held.tensors, held.forms, strict=True)]
        except (OSError, MemoryError, RuntimeError) as error:
            self._complain(error)
            return None
        finally:
            self.drop(held)
        return put_together(held.shell, tensors)

    def drop(self, held: SwappedOutCache) -> None:
        """Drop a swapped-out cache."""
        self.nbytes -= held.nbytes
        held.tensors = None
        if held.file is not None:
            held.file.close()
            held.file = None

    def _is_worth_a_file(self, nbytes: int, recompute_seconds: float | None) -> bool:
        if self._folder is None or nbytes > shutil.disk_usage(self._folder).free // SHARE:
            return False
        return recompute_seconds is None or 2 * nbytes / self._rate <= recompute_seconds

    def _written(self, tensors: list[torch.Tensor]) -> durable.NamelessFile:
        assert self._folder is not None
        start = time.perf_counter()
        file = durable.NamelessFile(self._folder)
        try:
            at = 0
            for tensor in tensors:
                file.write_at(_bytes_of(_dense(tensor)), at)
                at += tensor.nbytes
        except BaseException:
            file.close()
            raise
        self._learn(sum(tensor.nbytes for tensor in tensors), time.perf_counter() - start)
        return file

    def _read(self, file: durable.NamelessFile, forms: list[_Form], nbytes: int) -> list[torch.Tensor]:
        start = time.perf_counter()
        tensors = []
        at = 0
        for form in forms:
            made = torch.empty_strided(form.shape, form.strides, dtype=form.dtype)
            file.read_at(_bytes_of(made), at)
            at += made.nbytes
            tensors.append(made.to(form.device))
        self._learn(nbytes, time.perf_counter() - start)
        return tensors

    def _learn(self, nbytes: int, seconds: float) -> None:
        self._rate = 0.5 * (self._rate + nbytes / max(seconds, 1e-6))

    def _complain(self, error: Exception) -> None:
        """Warn once, since a full disk remains full for a while."""
        if not self._has_failed:
            logger.warning("KV caches of preempted requests are computed again: %s", error)
        self._has_failed = True


def usual_folder() -> Path | None:
    """The default folder of the files: a writable one for temporary files, not in memory; None if there is none."""
    for path in (Path(tempfile.gettempdir()), Path("/var/tmp")):
        if path.is_dir() and (folder := folder_at(path)).writable and not folder.in_memory:
            return path
    return None


def _leaves_a_device(forms: list[_Form]) -> bool:
    """Whether any of the tensors is on another device than the CPU."""
    return any(form.device.type != "cpu" for form in forms)


def _form(tensor: torch.Tensor) -> _Form:
    """The form of a tensor after it is restored: its axes in the same order in memory, without holes."""
    dense = torch.empty_like(tensor, device="meta")
    return _Form(tuple(dense.shape), dense.stride(), tensor.dtype, tensor.device)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host, in the memory layout of `_form`."""
    form = _form(tensor)
    if tensor.device.type == "cpu" and tensor.stride() == form.strides:
        return tensor
    return torch.empty_strided(form.shape, form.strides, dtype=form.dtype).copy_(tensor)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor on the host without holes."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8).numpy().data
