"""What the splitter asks of any source, and the records it answers with.

A checkpoint hands out its shards one at a time and is told when each is used up; what "used up" leads to
(an unlink, a deletion through the hub's cache, nothing at all) is the checkpoint's own affair. Knows no layers.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rabbitllm.checkpoints.index import CheckpointIndex
from rabbitllm.formats.positional import PositionalFile
from rabbitllm.formats.safetensors_file import Header

SIDECAR_PATTERNS = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "*.txt",
    "*.py",
    "additional_chat_templates/*.jinja",
    "1_Pooling/config.json",  # how embeddings are made of what the model computes
    "LICENSE*",
    "NOTICE*",
)
"""Files that make a folder of weights loadable (config, tokenizer, chat template), and its licence."""
SIDECAR_MAX_BYTES = 128 << 20
WHOLE_BYTES = 4 << 20
"""A shard up to this size is read whole for its fingerprint."""
SAMPLE_BYTES = 4096
MAX_SAMPLES = 2048
"""Tensors of a shard that are sampled at most."""


class Disposal(enum.Enum):
    """What became of a shard that is used up."""

    DELETED = "deleted"
    KEPT = "kept"
    READ_ONLY = "kept: the source is read-only"
    SHARED = "kept: another revision in the hub cache uses the same file"


@dataclass(frozen=True, slots=True)
class Release:
    """The outcome of releasing one shard; `freed` in bytes."""

    shard: str
    disposal: Disposal
    freed: int = 0


@dataclass(frozen=True, slots=True)
class FileStat:
    """Metadata of a file, from which most modifications can be detected without reading the file.

    Attributes:
        size: bytes.
        mtime_ns: modification time, nanoseconds; a program can set it.
        inode: number of the file on its disk; a copy has another.
        ctime_ns: time of the last change of data, name or attributes, nanoseconds; a program cannot set it.
    """

    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int


def file_stat(path: Path) -> FileStat:
    """The metadata of a file; links are followed."""
    status = path.stat()
    return FileStat(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


def has_digest(fingerprint: str) -> bool:
    """Whether a fingerprint is the digest of the whole shard that a hub has published."""
    return fingerprint.startswith("sha256:")


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """What identifies a shard without reading all of it.

    Attributes:
        name: relative to the checkpoint.
        size: bytes.
        fingerprint: `sha256:…` as the hub publishes it, or `sampled:…` of a local file.
        header: its tensors.
        staged: the shard is fetched into our own staging folder, and so costs disk of ours while it is used.
        stat: metadata of its file; None if it is not on this machine.
    """

    name: str
    size: int
    fingerprint: str
    header: Header
    staged: bool = False
    stat: FileStat | None = None


@dataclass(frozen=True, slots=True)
class Downloads:
    """Files that will be downloaded into a hub cache.

    Attributes:
        cache: the folder of the cache.
        sizes: file name -> bytes.
        listed: number of files in the repository; the cache keeps a list of them.
    """

    cache: Path
    sizes: Mapping[str, int]
    listed: int


_KINDS = {"local": "a folder", "hub": "a repository on the hub", "split": "a split directory"}


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """Which checkpoint a split directory was made from.

    Attributes:
        kind: "local" or "hub"; "split" for a checkpoint that was converted from a split directory.
        name: the repository id, or the folder's name.
        commit: the pinned commit of a hub repository, else None.
        fingerprints: shard name -> fingerprint.
    """

    kind: str
    name: str
    commit: str | None
    fingerprints: Mapping[str, str]

    def is_named_like(self, other: SourceIdentity) -> bool:
        """Whether both are local folders with the same name, so that a difference is probably an edit."""
        return self.kind == other.kind == "local" and self.name == other.name

    def differs_from(self, other: SourceIdentity) -> str | None:
        """Why `other` is another source, in words; None if it may be the same.

        Shards that only one side knows do not count: a source that is used up has none left.
        """
        if self.kind != other.kind:  # their fingerprints are of different kinds too, so nothing could tell
            return f"it was made from {_KINDS[self.kind]}, not from {_KINDS[other.kind]}"
        if self.kind == "hub" and not (
            self.name == other.name and (self.commit == other.commit or self._has_the_weights_of(other))
        ):
            return f"{self.name} at commit {self.commit} is not {other.name} at commit {other.commit}"
        for shard, fingerprint in other.fingerprints.items():
            known = self.fingerprints.get(shard)
            comparable = known is not None and known.split(":")[0] == fingerprint.split(":")[0]
            if comparable and known != fingerprint:
                return f"its shard {shard} has other contents"
        return None

    def _has_the_weights_of(self, other: SourceIdentity) -> bool:
        """Whether both know the same shards by digests of their whole contents: two commits with the same weights."""
        whole = bool(self.fingerprints) and all(has_digest(mark) for mark in self.fingerprints.values())
        return whole and self.fingerprints == other.fingerprints


class Checkpoint(Protocol):
    """A source of shards. Methods that touch the disk or the network say so."""

    label: str
    """What to call it in messages: a folder or a repository id."""

    index: CheckpointIndex

    @property
    def deletable(self) -> bool:
        """Whether shards can be deleted where they are; False on a read-only mount."""
        ...

    def identity(self, shards: Iterable[ShardMetadata]) -> SourceIdentity:
        """The identity of this source, given the facts of the shards that are still there."""
        ...

    def stages(self, shard: str) -> bool:
        """Whether `acquire` fetches the shard into a folder of ours, which `release` then frees."""
        ...

    def facts(self, shard: str) -> ShardMetadata | None:
        """Size, fingerprint and header; None if the shard is gone and cannot be fetched. Reads headers only."""
        ...

    def taken_from(self, shard: str, header: Header) -> Header:
        """What a split takes of a shard whose file says `header`: the same, unless the checkpoint has names of its own.

        Raises:
            CheckpointError: it is not what the rest of the checkpoint says.
        """
        ...

    def acquire(self, shard: str, on_have: Callable[[Path, int], None] = ...) -> Path:
        """A local path to the whole shard, fetched if need be.

        Args:
            shard: its name.
            on_have: told as a shard is fetched into which file, and how many of its first bytes are there, not
                verified yet; fewer than before if all comes again. May raise to stop.

        Raises:
            MissingShardError: it is neither here nor to be had.
        """
        ...

    def stream(self, shard: str) -> Generator[bytes]:
        """The bytes of a shard that `stages`, in order, without a file of it; to be believed after the last one only.

        Raises:
            HubError: they are not those the hub's digest names, or the hub refused.
        """
        ...

    def release(self, shard: str) -> Release:
        """Give up a shard whose every tensor is durable elsewhere."""
        ...

    def freed_bytes(self, shards: Iterable[str], device: int) -> Mapping[str, int]:
        """Bytes that the release of each of these shards frees on the disk `device` (`st_dev`).

        Shards that free nothing are left out: missing ones, those on another disk, and those that share their data with
        another file.
        """
        ...

    def discard_rest(self) -> list[Path]:
        """Remove what is left of the original once all shards are gone (`delete_original`): its index, or its
        remaining files in the hub's cache. Returns the paths removed."""
        ...

    def sidecars(self) -> Mapping[str, Path]:
        """Config, tokenizer and the like: relative name -> local path; fetched if need be."""
        ...

    def derived(self) -> Mapping[str, bytes]:
        """Config, tokenizer and the like that the checkpoint lacks and that follow from what it has: name -> content.

        Raises:
            CheckpointError: what they would follow from cannot be believed.
        """
        ...

    def downloads(self) -> Downloads | None:
        """The files that `sidecars` will download into the hub cache; None for a local source."""
        ...

    def sidecar_sizes(self) -> Mapping[str, int]:
        """The sizes in bytes of both, without fetching what is only copied."""
        ...


def ignore_progress(path: Path, have: int) -> None:
    """A progress callback for `acquire` that does nothing."""


def sampled_fingerprint(path: Path, header: Header) -> str:
    """A fingerprint of a local shard from its header and a piece of every tensor, without reading all of it.

    Two checkpoints of one architecture have equal headers, and a fine-tune may have changed a few of the tensors only.
    A small file is read whole; of one with very many tensors, evenly spread ones are sampled.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size}".encode())
    with PositionalFile(path) as file:
        for offset, length in _samples(header, size):
            piece = bytearray(length)
            digest.update(piece[: file.read_into(memoryview(piece), offset)])
    return f"sampled:{digest.hexdigest()}"


def _samples(header: Header, size: int) -> Iterator[tuple[int, int]]:
    """The (offset, length) of the pieces, bytes: the header, and the middle of the chosen tensors."""
    if size <= WHOLE_BYTES:
        yield 0, size
        return
    yield 0, min(header.data_start, WHOLE_BYTES)
    step = -(-len(header.tensors) // MAX_SAMPLES)
    for tensor in header.tensors[::step]:
        length = min(SAMPLE_BYTES, tensor.extent)
        yield tensor.offset + (tensor.extent - length) // 2, length


def sidecars_in(folder: Path) -> dict[str, Path]:
    """The files below a folder that are sidecars: name -> path, in the order of names."""
    found = (path for pattern in SIDECAR_PATTERNS for path in folder.glob(pattern) if path.is_file())
    named = {path.relative_to(folder).as_posix(): path for path in found}
    return {name: path for name, path in sorted(named.items()) if is_sidecar(name, path.stat().st_size)}


def is_sidecar(name: str, size: int) -> bool:
    """Whether a file of a checkpoint (config, tokenizer and the like) belongs into the split directory."""
    import fnmatch

    if name.endswith(".index.json") or size > SIDECAR_MAX_BYTES:
        return False
    depth = name.count("/")
    return any(fnmatch.fnmatchcase(name, p) and p.count("/") == depth for p in SIDECAR_PATTERNS)
