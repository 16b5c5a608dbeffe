"""The weights of a hub repository as one logical checkpoint, Meta's own format included. Opens no connection itself."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path

from rabbitllm.checkpoints import hub_cache
from rabbitllm.checkpoints.checkpoint import (
    Downloads,
    Release,
    ShardMetadata,
    SourceIdentity,
    ignore_progress,
    is_sidecar,
)
from rabbitllm.checkpoints.hub import HubRepository
from rabbitllm.checkpoints.index import CheckpointIndex, check_shard_name, index_of, is_index, is_meta, read_index
from rabbitllm.checkpoints.meta_checkpoint import (
    CONFIG_NAME,
    VOCABULARY_NAME,
    MetaCheckpoint,
    names_a_model,
    ranks_of,
    read_meta,
)
from rabbitllm.formats.safetensors_file import Header


class HubCheckpoint:
    """The weights of a repository, as the splitter sees them."""

    def __init__(self, repository: HubRepository) -> None:
        self.repository = repository
        self.label = repository.label
        self._meta: MetaCheckpoint | None = None
        self.index = self._find_index()

    def _find_index(self) -> CheckpointIndex:
        entry = self.repository.entry()
        if is_index(entry):
            return read_index(self.repository.download(entry))
        if is_meta(entry):
            ranks = ranks_of((name for name in self.repository.files if "/" not in name), self.label)
            self._meta = read_meta(self.repository.download(entry), ranks)
            return self._meta.index(self._first_rank, ranks[0])
        facts = self.repository.facts(entry)
        assert facts is not None
        return index_of({tensor.name: entry for tensor in facts.header.tensors})

    @functools.cached_property
    def _first_rank(self) -> Header:
        """The header of the first rank, with its own names; all ranks have the same names and shapes."""
        assert self._meta is not None
        facts = self.repository.facts(self._meta.ranks[0])
        assert facts is not None
        return facts.header

    @property
    def deletable(self) -> bool:
        """Staged files can always be deleted; files in the user's cache only if that is writable."""
        cache = self.repository.cache
        return not cache.exists() or os.access(cache, os.W_OK)

    def identity(self, shards: Iterable[ShardMetadata]) -> SourceIdentity:
        """Complete from the hub's listing, whichever shards are still needed."""
        return self.repository.identity(self.index.shards)

    def stages(self, shard: str) -> bool:
        return self.repository.stages(shard)

    def facts(self, shard: str) -> ShardMetadata | None:
        check_shard_name(shard, self.label)
        found = self.repository.facts(shard)
        return found and dataclasses.replace(found, header=self.taken_from(shard, found.header))

    def taken_from(self, shard: str, header: Header) -> Header:
        return header if self._meta is None else self._meta.taken_from(shard, header)

    def acquire(self, shard: str, on_have: Callable[[Path, int], None] = ignore_progress) -> Path:
        return self.repository.acquire(shard, on_have)

    def stream(self, shard: str) -> Generator[bytes]:
        return self.repository.stream(shard)

    def release(self, shard: str) -> Release:
        return self.repository.release(shard)

    def freed_bytes(self, shards: Iterable[str], device: int) -> Mapping[str, int]:
        cached = {shard: found[0] for shard in shards if (found := self.repository.cached(shard)) is not None}
        return hub_cache.freed_bytes(next(iter(cached.values())), cached, device) if cached else {}

    def discard_rest(self) -> list[Path]:
        cached = self.repository.cached("config.json") or self.repository.cached(self.repository.entry())
        return hub_cache.free_rest(cached[0]) if cached else []

    def sidecars(self) -> Mapping[str, Path]:
        return {name: self.repository.download(name) for name in sorted(self._copied_sizes())}

    @functools.cached_property
    def _derived(self) -> Mapping[str, bytes]:
        if self._meta is None:
            return {}
        sidecars = set(self._copied_sizes())
        vocabulary = self.repository.download(VOCABULARY_NAME) if VOCABULARY_NAME in sidecars else None
        if CONFIG_NAME in sidecars and not names_a_model(self.repository.download(CONFIG_NAME)):
            sidecars.discard(CONFIG_NAME)
        return self._meta.derived(self._first_rank, self._meta.ranks[0], vocabulary, sidecars)

    def derived(self) -> Mapping[str, bytes]:
        return self._derived

    def downloads(self) -> Downloads:
        wanted = self._copied_sizes().items()
        sizes = {name: size for name, size in wanted if self.repository.cached(name) is None}
        return Downloads(self.repository.cache, sizes, len(self.repository.files))

    def sidecar_sizes(self) -> Mapping[str, int]:
        return {**self._copied_sizes(), **{name: len(content) for name, content in self.derived().items()}}

    def _copied_sizes(self) -> Mapping[str, int]:
        return {name: file.size for name, file in self.repository.files.items() if is_sidecar(name, file.size)}
