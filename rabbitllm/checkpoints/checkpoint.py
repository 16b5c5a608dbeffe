"""What the splitter asks of any source, and the records it answers with.

A checkpoint hands out its shards one at a time and is told when each is used up; what "used up" leads to
(an unlink, a deletion through the hub's cache, nothing at all) is the checkpoint's own affair. Knows no layers.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rabbitllm.checkpoints.index import CheckpointIndex
from rabbitllm.formats.safetensors_file import Header

SIDECAR_PATTERNS = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "*.txt",
    "*.py",
    "additional_chat_templates/*.jinja",
    "LICENSE*",
    "NOTICE*",
)
"""Files that make a folder of weights loadable (config, tokenizer, chat template), and its licence."""
SIDECAR_MAX_BYTES = 128 << 20


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
class ShardFacts:
    """What identifies a shard without reading all of it.

    Attributes:
        name: relative to the checkpoint.
        size: bytes.
        fingerprint: `sha256:…` as the hub publishes it, or `sampled:…` of a local file.
        header: its tensors.
        staged: the shard is fetched into our own staging folder, and so costs disk of ours while it is used.
    """

    name: str
    size: int
    fingerprint: str
    header: Header
    staged: bool = False


_KINDS = {"local": "a folder", "hub": "a repository on the hub"}


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """Which checkpoint a split directory was made from.

    Attributes:
        kind: "local" or "hub".
        name: the repository id, or the folder's name.
        commit: the pinned commit of a hub repository, else None.
        fingerprints: shard name -> fingerprint.
    """

    kind: str
    name: str
    commit: str | None
    fingerprints: Mapping[str, str]

    def differs_from(self, other: SourceIdentity) -> str | None:
        """Why `other` is another source, in words; None if it may be the same.

        Shards that only one side knows do not count: a source that is used up has none left.
        """
        if self.kind != other.kind:  # their fingerprints are of different kinds too, so nothing could tell
            return f"it was made from {_KINDS[self.kind]}, not from {_KINDS[other.kind]}"
        if self.kind == other.kind == "hub" and (self.name, self.commit) != (other.name, other.commit):
            return f"{self.name} at commit {self.commit} is not {other.name} at commit {other.commit}"
        for shard, fingerprint in other.fingerprints.items():
            known = self.fingerprints.get(shard)
            comparable = known is not None and known.split(":")[0] == fingerprint.split(":")[0]
            if comparable and known != fingerprint:
                return f"its shard {shard} has other contents"
        return None


class Checkpoint(Protocol):
    """A source of shards. Methods that touch the disk or the network say so."""

    label: str
    """What to call it in messages: a folder or a repository id."""

    index: CheckpointIndex

    @property
    def deletable(self) -> bool:
        """Whether shards can be deleted where they are; False on a read-only mount."""
        ...

    def identity(self, shards: Iterable[ShardFacts]) -> SourceIdentity:
        """The identity of this source, given the facts of the shards that are still there."""
        ...

    def facts(self, shard: str) -> ShardFacts | None:
        """Size, fingerprint and header; None if the shard is gone and cannot be fetched. Reads headers only."""
        ...

    def acquire(self, shard: str) -> Path:
        """A local path to the whole shard, fetched if need be.

        Raises:
            MissingShardError: it is neither here nor to be had.
        """
        ...

    def release(self, shard: str) -> Release:
        """Give up a shard whose every tensor is durable elsewhere."""
        ...

    def discard_rest(self) -> list[Path]:
        """Remove what is left of the original once all shards are gone (`delete_original`): its index, or its
        remaining files in the hub's cache. Returns the paths removed."""
        ...

    def sidecars(self) -> Mapping[str, Path]:
        """Config, tokenizer and the like: relative name -> local path."""
        ...


def sampled_fingerprint(path: Path, size: int, samples: int = 16, sample_bytes: int = 4096) -> str:
    """A fingerprint of a local file from its size and `samples` evenly spread pieces, without reading all of it.

    Two checkpoints of one architecture have equal headers and sizes; 64 KiB of weights tells them apart.
    """
    digest = hashlib.sha256(f"{size}".encode())
    with path.open("rb") as stream:
        for i in range(samples):
            stream.seek(max(size - sample_bytes, 0) * i // max(samples - 1, 1))
            digest.update(stream.read(sample_bytes))
    return f"sampled:{digest.hexdigest()}"


def is_sidecar(name: str, size: int) -> bool:
    """Whether a file of a checkpoint belongs into the split directory beside the layers."""
    import fnmatch

    if name.endswith(".index.json") or size > SIDECAR_MAX_BYTES:
        return False
    depth = name.count("/")
    return any(fnmatch.fnmatchcase(name, p) and p.count("/") == depth for p in SIDECAR_PATTERNS)
