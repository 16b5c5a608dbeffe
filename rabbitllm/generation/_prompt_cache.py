"""A prefix cache on disk, which survives restarts: KV caches of finished sequences, in files that never change.

    <folder>/<digest of the model>/64-<digest of the first 64 ids>.kv       keys and values of tokens 0 to 63
                                   128-<digest of the first 128 ids>.kv     of tokens 64 to 127
                                   1024-<digest of 1,024 ids>.state         windows and states after 1,024 tokens

A name says the content, so sequences with a common prefix share files, and so do servers on one folder. What the digest
of the model covers says `engine/identity.py`; a template shows in the ids. Layers that keep every token are in blocks
of `BLOCK_TOKENS`. Windows and states cannot be cut, so they are stored at a few lengths, together with the keys and
values after the last whole block.

A thread writes while no request runs. Each file gets its name once its bytes are on the disk, so a kill leaves at most
an unfinished file, which the next writer removes. Writers hold a lock on the folder; readers need none. Beyond the size
limit the files leave whose last use is longest ago. The first blocks of a text leave after its later ones.

The text of users can be recovered from the files, so only the user who runs the server may read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import struct
import sys
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, DynamicLayer

from rabbitllm.base.forks import DaemonThread, own_lock
from rabbitllm.base.rounding import round_up
from rabbitllm.engine.identity import identity
from rabbitllm.engine.kv_room import is_indexed
from rabbitllm.errors import OptionError
from rabbitllm.generation.kv_cache import (
    MAX_SEQUENCES,
    MIN_PREFIX_TOKENS,
    Saved,
    cache_layers,
    grows,
    is_nothing,
    restore,
    saved,
    tensors_in,
    why_not_kept,
)
from rabbitllm.storage import durable
from rabbitllm.storage.durable import PART_SUFFIX
from rabbitllm.storage.folder_lock import alone
from rabbitllm.store.checksums import crc32

if TYPE_CHECKING:
    from transformers import Cache, CacheLayerMixin

    from rabbitllm.engine.streamed_model import StreamedModel
    from rabbitllm.generation.request import BatchStats

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 64
"""Tokens of a block: up to so many tokens of a prefix are computed again."""
POLL_SECONDS = 0.05
"""Time between two looks whether requests still run, or another process still writes."""
_BLOCK, _STATE = ".kv", ".state"
_NAME = re.compile(rf"\d+-[0-9a-f]{{32}}(?:{_BLOCK}|{_STATE})")
_MODEL = re.compile(r"[0-9a-f]{32}")
_MAGIC = b"RABBITKV"
_BEGIN = struct.Struct("<8sIQ")
"""The magic number, the CRC-32 of the file's name and what follows, and the bytes of the JSON header."""
_ALIGNMENT = 64
_AXES = {"keys": -2, "values": -2, "indexer_keys": 1, "indexer_position_ids": -1}
"""Tensors of a layer that keep every token -> their axis of tokens."""


class _DamagedFile(Exception):
    """A file is not what was written."""


# files ---------------------------------------------------------------------------------------------------------------


def file_pieces(value: Any, name: str) -> list[bytes | memoryview]:
    """The bytes of a file.

    Args:
        name: of the file; the checksum covers it, since it says which tokens these are.
        value: dicts, lists, tuples, plain values, dtypes, devices and tensors.

    Raises:
        TypeError: it contains something else.
    """
    tensors: list[torch.Tensor] = []
    header = json.dumps(_as_json(value, tensors)).encode()
    pieces: list[bytes | memoryview] = [header, bytes(-(_BEGIN.size + len(header)) % _ALIGNMENT)]
    for tensor in tensors:
        if tensor.numel():
            dense = tensor.detach().to("cpu").contiguous()
            pieces += [dense.reshape(-1).view(torch.uint8).numpy().data, bytes(-tensor.nbytes % _ALIGNMENT)]
    crc = crc32(name.encode())
    for piece in pieces:
        crc = crc32(piece, crc)
    return [_BEGIN.pack(_MAGIC, crc, len(header)), *filter(len, pieces)]


def read_value(path: Path) -> Any:
    """What was written to a file; tensors are views of its bytes.

    Raises:
        _DamagedFile: it is damaged.
        OSError: it cannot be read.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    flags |= getattr(os, "O_NONBLOCK", 0)  # a FIFO would wait for a writer
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise _DamagedFile("it is no regular file")
        nbytes = status.st_size
        whole = torch.empty(round_up(max(nbytes, _BEGIN.size), _ALIGNMENT), dtype=torch.uint8)
        data = whole.numpy().data[:nbytes]
        end = file.readinto(data)
    if end < max(nbytes, _BEGIN.size):
        raise _DamagedFile("it is too short")
    magic, crc, length = _BEGIN.unpack_from(data)
    if magic != _MAGIC or crc32(data[_BEGIN.size :], crc32(path.name.encode())) != crc:
        raise _DamagedFile("its checksum is another one")
    content = json.loads(bytes(data[_BEGIN.size : _BEGIN.size + length]))
    return _from_json(content, whole, round_up(_BEGIN.size + length, _ALIGNMENT))


def _as_json(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A value for `json.dumps`; tensors become their form and their place after the header."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        place = sum(round_up(tensor.nbytes, _ALIGNMENT) for tensor in tensors)
        tensors.append(value)
        return {"tensor": [place, str(value.dtype)[6:], list(value.shape), str(value.device)]}
    if isinstance(value, (torch.dtype, torch.device)):
        return {"dtype": str(value)[6:]} if isinstance(value, torch.dtype) else {"device": str(value)}
    if isinstance(value, Mapping):
        return {"dict": [[_as_json(key, tensors), _as_json(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [_as_json(item, tensors) for item in value]}
    raise TypeError(f"a {type(value).__name__} is neither a tensor nor plain")


def _from_json(content: Any, whole: torch.Tensor, begin: int) -> Any:
    """The value of `_as_json`.

    Args:
        content: what `_as_json` returned.
        whole: bytes of the file.
        begin: where the first tensor begins in them.
    """
    if not isinstance(content, dict):
        return content
    ((kind, item),) = content.items()
    if kind == "tensor":
        place, dtype, shape, device = item
        form = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        part = whole[begin + place : begin + place + form.nbytes]
        return part.view(form.dtype).view(shape).to(device)
    if kind in ("dtype", "device"):
        return getattr(torch, item) if kind == "dtype" else torch.device(item)
    if kind == "dict":
        return {_from_json(key, whole, begin): _from_json(value, whole, begin) for key, value in item}
    items = [_from_json(value, whole, begin) for value in item]
    return tuple(items) if kind == "tuple" else items


# caches --------------------------------------------------------------------------------------------------------------

Parts = Mapping[tuple[int, str], torch.Tensor]
"""Number of a layer and name of a tensor -> some of its tokens."""


def parts_of(cache: Cache, begin: int, end: int) -> Parts:
    """Keys and values of the tokens from `begin` to `end`, in layers that keep every token; views."""
    return {
        (index, name): tensor.narrow(axis, begin, end - begin)
        for index, layer in enumerate(cache.layers)
        if grows(layer)
        for name, axis in _AXES.items()
        if isinstance(tensor := vars(layer).get(name), torch.Tensor) and tensor.numel()
    }


def cache_of(cache: Cache, tokens: int, blocks: Sequence[Callable[[], Parts]], states: Saved) -> Cache:
    """Fill an empty cache.

    Args:
        cache: the empty cache, whose layers are known.
        tokens: number of tokens.
        blocks: functions that return the parts, which together have all tokens, in their order.
        states: windows and states after these tokens.
    """
    tensors: dict[tuple[int, str], torch.Tensor] = {}
    end = 0
    for block in blocks:
        count = 0
        for key, part in block().items():
            axis = _AXES[key[1]] % part.dim()
            count = part.shape[axis]
            if key not in tensors:
                tensors[key] = part.new_empty((*part.shape[:axis], tokens, *part.shape[axis + 1 :]))
            tensors[key].narrow(axis, end, count).copy_(part)
        end += count
    for (index, name), tensor in tensors.items():
        layer = cache.layers[index]
        if name == "keys":
            DynamicLayer.lazy_initialization(layer, tensor, tensors[index, "values"])
        elif name == "indexer_keys":
            layer.lazy_initialization_indexer(tensor)
    for (index, name), tensor in tensors.items():
        setattr(cache.layers[index], name, tensor)
    restore(cache, states, tokens)
    if cache.get_seq_length() != tokens:
        raise ValueError(f"it has {cache.get_seq_length()} of {tokens} tokens")
    return cache


def _needs_state(layer: CacheLayerMixin) -> bool:
    """Whether a layer has more than tensors that can be cut at any token."""
    return not is_nothing(layer) and not is_indexed(layer) and type(layer) is not DynamicLayer


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Files that together have the KV cache of a prefix.

    Attributes:
        tokens: number of tokens.
        blocks: names of the files of whole blocks.
        state: name of the file with windows, states, and the tokens after the last block; "" for none.
    """

    tokens: int
    blocks: tuple[str, ...]
    state: str = ""


@dataclass(frozen=True, slots=True)
class _Offer:
    """What may be written.

    Attributes:
        ids: of the tokens.
        cache: their KV cache, as long as it is in memory; None for a state alone.
        state: content of the state's file, if it was copied; else that of `cache` is meant.
    """

    ids: Sequence[int]
    cache: Callable[[], Any]
    state: Mapping[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in tensors_in(self.state))


class PromptCache:
    """The prefix cache on disk of one model.

    Args:
        model: as `AutoModel.from_pretrained` returns it.
        folder: folder of the files of all models; made if missing.
        limit: bytes of all files in it.
        is_idle: whether no request runs; called in another thread.
        stats: counts what is read and written.

    Attributes:
        has_states: whether prefixes have windows or states, and so continue only from lengths that were offered.

    Raises:
        OptionError: the model's prompts cannot be kept, or the folder cannot be used.
    """

    def __init__(
        self, model: StreamedModel, folder: Path, limit: int, is_idle: Callable[[], bool], stats: BatchStats
    ) -> None:
        if reason := why_not_kept(model):
            raise OptionError(
                f"The prompts of this {type(model).__name__} cannot be kept on disk: {reason}.",
                "Leave the prompt cache out (--prompt-cache, Limits.prompt_bytes).",
            )
        self._config = model.config.get_text_config(decoder=True)
        layers = cache_layers(model)
        self.has_states = any(map(_needs_state, layers))
        self._has_blocks = any(map(grows, layers))
        self._identity = identity(model)
        self._root = folder
        self._folder = folder / self._identity.hex()[:32]
        _make_private(folder, self._folder)
        self._limit = limit
        self._is_idle = is_idle
        self._is_tidy = False
        self._said: set[str] = set()
        self._damaged: set[str] = set()
        self._stats = stats
        stats.prompt_bytes = sum(file.nbytes for file in self._files())
        self._offers: deque[_Offer] = deque(maxlen=MAX_SEQUENCES)  # those of a busy server leave unwritten
        self._until: float | None = None
        self._change = own_lock(threading.Condition())
        self._thread = DaemonThread(self._work, "rabbitllm-prompt-cache")
        self._thread.start()

    # in the batch's thread -------------------------------------------------------------------------------------------

    def find(self, ids: Sequence[int], least: int) -> StoredPrefix | None:
        """The longest stored prefix of a sequence, without its last token; None if it has fewer than `least` tokens."""
        end = len(ids) - 1
        if end < max(least, MIN_PREFIX_TOKENS):
            return None
        try:
            names = set(os.listdir(self._folder)) - self._damaged
        except OSError:
            return None
        blocks = []
        for name in self._block_names(ids[:end]):
            if self._has_blocks and name not in names:
                break
            blocks.append(name)
        most = min(end, (len(blocks) + 1) * BLOCK_TOKENS - 1)
        prefix = StoredPrefix(len(blocks) * BLOCK_TOKENS, tuple(blocks))
        if self.has_states:
            prefix = StoredPrefix(0, ())
            lengths = {int(name.partition("-")[0]) for name in names if name.endswith(_STATE) and _NAME.fullmatch(name)}
            for tokens in sorted((length for length in lengths if length <= most), reverse=True):
                if (name := self._name(ids[:tokens], _STATE)) in names:
                    prefix = StoredPrefix(tokens, tuple(blocks[: tokens // BLOCK_TOKENS]), name)
                    break
        return prefix if prefix.tokens >= max(least, MIN_PREFIX_TOKENS) else None

    def read(self, prefix: StoredPrefix) -> Cache | None:
        """The KV cache of a prefix; None if it has to be computed: a file is damaged, or has left meanwhile."""
        name, nbytes = "", 0

        def read(file: str) -> Any:
            nonlocal name, nbytes
            name = file
            nbytes += (self._folder / file).stat().st_size
            return read_value(self._folder / file)

        try:
            state = read(prefix.state) if prefix.state else {"parts": {}, "states": {}}
            blocks = prefix.blocks if self._has_blocks else ()
            parts: list[Callable[[], Parts]] = [partial(read, block) for block in blocks]
            parts.append(lambda: state["parts"])
            cache = cache_of(DynamicCache(config=self._config), prefix.tokens, parts, state["states"])
        except FileNotFoundError:
            return None
        except OSError as error:
            if self._is_new("read"):
                logger.warning("The prompt cache cannot be read, and prompts are computed: %s", error)
            return None
        except (_DamagedFile, KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if self._is_new("damaged"):
                logger.warning(
                    "A file of the prompt cache is damaged; it is dropped, and its tokens are computed again: %s: %s",
                    *(self._folder / name, error),
                )
            self._damaged.add(name)  # also where it cannot be removed
            durable.remove_scratch(self._folder / name)
            return None
        except MemoryError:
            return None
        self._stats.prompt_hits += 1
        self._stats.prompt_saved_tokens += prefix.tokens
        self._stats.prompt_read_bytes += nbytes
        self._mark_used((*prefix.blocks, *filter(None, (prefix.state,))))
        return cache

    def offer(self, ids: Sequence[int], cache: Cache) -> None:
        """Write the KV cache of a finished sequence when there is time, if it is in memory then.

        Args:
            ids: ids of the tokens in the cache.
            cache: the KV cache, which does not change any more.
        """
        if len(ids) >= (MIN_PREFIX_TOKENS if self.has_states else BLOCK_TOKENS):
            self._append(_Offer(tuple(ids), weakref.ref(cache)))

    def offer_state(self, ids: Sequence[int], cache: Cache) -> None:
        """Write windows and states of a running sequence when there is time; they are copied now.

        Args:
            ids: ids of the tokens in the cache.
            cache: the KV cache.
        """
        name = self._name(ids, _STATE)
        if len(ids) >= MIN_PREFIX_TOKENS and not (self._folder / name).exists():
            parts = parts_of(cache, len(ids) // BLOCK_TOKENS * BLOCK_TOKENS, len(ids))
            copies = {key: part.clone() for key, part in parts.items()}
            self._append(_Offer(tuple(ids), lambda: None, {"parts": copies, "states": saved(cache)}))

    def forget_states(self) -> None:
        """Drop copies that are not written yet: running sequences need their memory."""
        with self._change:
            kept = [offer for offer in self._offers if offer.state is None]
            self._offers = deque(kept, MAX_SEQUENCES)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of copies that are not written yet; may be called from any thread."""
        with self._change:
            return sum(offer.nbytes for offer in self._offers)

    def close(self, until: float) -> None:
        """Write what was offered, until a time in `time.monotonic()`, and end the thread."""
        with self._change:
            self._until = until
            self._change.notify_all()
        self._thread.join()

    def _is_new(self, warning: str) -> bool:
        """Whether a warning was not given yet; it is given once."""
        is_new = warning not in self._said
        self._said.add(warning)
        return is_new

    def _append(self, offer: _Offer) -> None:
        with self._change:
            self._offers.append(offer)
            self._change.notify_all()

    # in the writing thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (offer := self._next()) is not None:
            try:
                self._store(offer)
            except Exception as error:
                if self._is_new("write"):
                    logger.warning("The prompt cache could not be written; answers are not affected: %s", error)

    def _next(self) -> _Offer | None:
        """The next offer, once no request runs; None at the end. It stays among the offers until then."""
        with self._change:
            while not self._is_over() and not (self._offers and self._is_idle()):
                if self._until is not None and not self._offers:
                    return None
                self._change.wait(POLL_SECONDS if self._offers else None)
            return None if self._is_over() or not self._offers else self._offers.popleft()

    def _is_over(self) -> bool:
        return self._until is not None and time.monotonic() >= self._until

    def _store(self, offer: _Offer) -> None:
        """Write those files of an offer that are missing."""
        own = dict.fromkeys(self._block_names(offer.ids)) if self._has_blocks else {}
        state = self._name(offer.ids, _STATE) if self.has_states else ""
        keep = {*own, state}
        contents: dict[str, Callable[[], Any]] = {
            name: partial(_parts, offer.cache, number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS)
            for number, name in enumerate(own if offer.state is None else ())
        }
        if state:
            contents[state] = lambda: offer.state or _state(offer.cache, len(offer.ids))
        for name, content in contents.items():
            if not self._write(name, keep, content):
                break
        self._mark_used(list(contents))

    def _write(self, name: str, keep: set[str], content: Callable[[], Any]) -> bool:
        """Write a file, unless it is there; False if it has no room, or the content is no longer in memory.

        Args:
            name: of the file.
            keep: names of files that do not leave for it.
            content: returns the content; None if it is gone.
        """
        path = self._folder / name
        while not path.exists():
            if self._is_over():
                return False
            lock = alone(self._root) if self._is_idle() else None
            if lock is None:
                time.sleep(POLL_SECONDS)
                continue
            with lock:
                if path.exists():  # by another server
                    return True
                if not self._is_tidy:
                    self._tidy()
                if (value := content()) is None:
                    return False
                pieces = file_pieces(value, name)
                nbytes = sum(map(len, pieces))
                if not self._make_room(nbytes, keep):
                    return False
                durable.make_folder(self._folder, 0o700)
                durable.write_private(path, pieces)
            self._damaged.discard(name)
            self._stats.prompt_written_bytes += nbytes
            self._stats.prompt_bytes += nbytes
        return True

    def _mark_used(self, names: Sequence[str]) -> None:
        """Mark the files of a text as used now; the first ones last, so that they leave last."""
        for name in reversed(names):
            durable.mark_used(self._folder / name)

    def _tidy(self) -> None:
        """Remove what killed servers left unfinished; the lock says that none writes now."""
        for folder in self._folders():
            for path in folder.glob(f"*{PART_SUFFIX}"):
                if _NAME.match(path.name):
                    durable.remove(path)
        self._is_tidy = True

    def _make_room(self, nbytes: int, keep: set[str]) -> bool:
        """Remove files that were not used for longest, so that so many bytes fit; False if they cannot."""
        if self._stats.prompt_bytes + nbytes > self._limit:  # count again, since other servers write and remove too
            files = sorted(self._files(), key=lambda file: (file.used, -file.tokens))
            self._stats.prompt_bytes = sum(file.nbytes for file in files)
            for file in files:
                if self._stats.prompt_bytes + nbytes <= self._limit:
                    break
                if file.path.parent == self._folder and file.path.name in keep:
                    continue
                durable.remove(file.path)
                durable.remove_empty_folder(file.path.parent)
                self._stats.prompt_bytes -= file.nbytes
        return self._stats.prompt_bytes + nbytes <= self._limit

    # names -----------------------------------------------------------------------------------------------------------

    def _files(self) -> Iterator[_File]:
        """All files, of other models too."""
        for folder in self._folders():
            with contextlib.suppress(OSError):  # it leaves now, or is another user's
                for path in (folder / name for name in os.listdir(folder) if _NAME.fullmatch(name)):
                    with contextlib.suppress(FileNotFoundError):
                        status = path.lstat()
                        if stat.S_ISREG(status.st_mode):
                            tokens = int(path.name.partition("-")[0])
                            yield _File(path, status.st_size, status.st_mtime_ns, tokens)

    def _folders(self) -> list[Path]:
        return [path for path in self._root.iterdir() if _MODEL.fullmatch(path.name) and path.is_dir()]

    def _block_names(self, ids: Sequence[int]) -> Iterator[str]:
        """Names of the files of whole blocks, in order."""
        digest = hashlib.sha256(self._identity)
        data = _bytes_of(ids)
        size = len(data) // max(len(ids), 1)
        for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
            digest.update(data[(end - BLOCK_TOKENS) * size : end * size])
            yield f"{end}-{digest.hexdigest()[:32]}{_BLOCK}"

    def _name(self, ids: Sequence[int], suffix: str) -> str:
        """Name of the file for these tokens."""
        return f"{len(ids)}-{hashlib.sha256(self._identity + _bytes_of(ids)).hexdigest()[:32]}{suffix}"


@dataclass(frozen=True, slots=True)
class _File:
    """A file: its path, its bytes, the time of its last use in nanoseconds, and the length in its name."""

    path: Path
    nbytes: int
    used: int
    tokens: int


def _bytes_of(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def _parts(kept: Callable[[], Any], begin: int, end: int) -> Parts | None:
    """Parts of the cache that `kept` returns, if that is in memory."""
    cache = kept()
    return parts_of(cache, begin, end) if cache is not None else None


def _state(kept: Callable[[], Any], tokens: int) -> Mapping[str, Any] | None:
    """Content of the state's file of the cache that `kept` returns, if that is in memory."""
    parts = _parts(kept, tokens // BLOCK_TOKENS * BLOCK_TOKENS, tokens)
    cache = kept()
    return {"parts": parts, "states": saved(cache)} if cache is not None else None


def _make_private(root: Path, folder: Path) -> None:
    """Make the folders, for this user alone.

    Raises:
        OptionError: they cannot be made, or another user could write into them.
    """
    try:
        durable.make_folder(root.parent)
        durable.make_folder(root, 0o700)
        durable.make_folder(folder, 0o700)
    except OSError as error:
        raise OptionError(
            f"The folder of the prompt cache, {folder}, cannot be made: {error.strerror}.",
            "Set RABBITLLM_HOME to a folder that is writable, or leave --prompt-cache out.",
        ) from error
    if sys.platform == "win32":
        return
    for path in (root, folder):
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OptionError(
                f"Other users can write into {path}, the folder of the prompt cache.",
                f"Make it yours alone: chmod 700 {path}; or remove it.",
            )
