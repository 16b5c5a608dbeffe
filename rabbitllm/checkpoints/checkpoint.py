"""The interface between the splitter and its sources, and its records.

A checkpoint provides its shards one at a time, and releases each once it is used up. Each source decides how: by an
unlink, by a deletion through the hub's cache, or not at all. Independent of layers.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from rabbitllm.checkpoints.index import CheckpointIndex, gguf_models
from rabbitllm.errors import OptionError, UnsafePathError
from rabbitllm.formats.tensor_spec import Header
from rabbitllm.storage.files import PositionalFile

SIDECAR_PATTERNS = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "*.txt",
    "*.py",
    "additional_chat_templates/*.jinja",
    "1_Pooling/config.json",  # how embeddings are pooled
    "1_LogitScore/config.json",  # how a reranker's score is read
    "LICENSE*",
    "NOTICE*",
)
"""Files that weights need to be loaded (config, tokenizer, chat template), and their licence."""
COMPANIONS = tuple(dict.fromkeys(pattern.partition("/")[0] for pattern in SIDECAR_PATTERNS if "/" in pattern))
"""Folders that may come with a model."""
SIDECAR_MAX_BYTES = 128 << 20
WHOLE_BYTES = 4 << 20
"""Shards up to this size are read whole for their fingerprint."""
SAMPLE_BYTES = 4096
MAX_SAMPLES = 2048
"""Limit of tensors per shard that are sampled."""


class Disposal(enum.Enum):
    """The outcome for a shard that is used up."""

    DELETED = "deleted"
    KEPT = "kept"
    READ_ONLY = "kept: the source is read-only"
    SHARED = "kept: another revision in the hub cache uses the same file"
    CHANGED = "kept: it has changed since it was split"
    LINK = "kept: nothing behind a link is deleted"
    LEAVES_OUT = "kept: the split leaves tensors of it out"


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
    """Whether a fingerprint is the digest of the whole shard, published by a hub."""
    return fingerprint.startswith("sha256:")


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """The metadata that identifies a shard without reading all of it.

    Attributes:
        name: relative to the checkpoint.
        size: bytes.
        fingerprint: `sha256:…` as the hub publishes it, or `sampled:…` of a local file.
        header: the header with its tensors.
        staged: whether it is fetched into our staging folder, and so takes disk space while it is used.
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
    """The source of a split directory.

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

    @property
    def title(self) -> str:
        """The name in messages: that of a local GGUF file, whose folder may hold other models, else `name`."""
        return next(iter(gguf_models(self.fingerprints)), self.name) if self.kind == "local" else self.name

    def is_named_like(self, other: SourceIdentity) -> bool:
        """Whether both are local folders with the same name, so that a difference is probably an edit."""
        return self.kind == other.kind == "local" and self.name == other.name

    def instead_of(self, requested: str) -> str:
        """This source in a message that another one was requested, with that one's name if it differs."""
        is_other = self.name != requested
        return f"{self.name}; requested was {requested}" if is_other else f"another source named {self.name}"

    def differs_from(self, other: SourceIdentity) -> str | None:
        """Reason text if `other` is another source; None if it may be the same.

        A source that is used up has none of the recorded shards left; it has no further ones either.
        """
        if self.kind != other.kind:  # their fingerprints are not comparable
            return f"it was made from {_KINDS[self.kind]}, not from {_KINDS[other.kind]}"
        if self.kind == "hub":
            if self.name != other.name:
                return "it is another repository"
            has_digests = bool(self.fingerprints) and all(map(has_digest, self.fingerprints.values()))
            if self.commit != other.commit and not (has_digests and self.fingerprints == other.fingerprints):
                return f"its commit is {self.commit}, not {other.commit}"
        for shard, fingerprint in other.fingerprints.items():
            recorded = self.fingerprints.get(shard)
            if recorded is None and self.fingerprints:
                return f"it has a further shard, {shard}"
            comparable = recorded is not None and recorded.split(":")[0] == fingerprint.split(":")[0]
            if comparable and recorded != fingerprint:
                return f"its shard {shard} has other contents"
        return None


class Translation(Protocol):
    """How files in another program's format, Meta's or GGUF, become a checkpoint of transformers."""

    loses_metadata: bool
    """Whether files hold more about the model than becomes config, tokenizer and chat template."""

    def index(self) -> CheckpointIndex:
        """The index of all files, by the names of transformers."""

    def taken_from(self, shard: str, header: Header) -> Header:
        """The header that a split uses for a shard; see `Checkpoint.taken_from`."""

    def derived(self, sidecars: Collection[str]) -> dict[str, bytes]:
        """Config, tokenizer and similar files that are not among `sidecars`; see `Checkpoint.derived`."""

    def with_dtype(self, dtype: str | None) -> Translation | None:
        """This translation with all tensors in a dtype, see `Checkpoint.with_dtype`; None if they keep their own."""


class Checkpoint(Protocol):
    """A source of shards. Methods that access the disk or the network are documented as such."""

    label: str
    """Its name in messages: a folder or a repository id."""

    index: CheckpointIndex

    translation: Translation | None = None
    """From another program's format, or None."""

    _derived: Mapping[str, bytes] | None = None

    @property
    def deletable(self) -> bool:
        """Whether shards can be deleted where they are; False on a read-only mount."""

    def identity(self, shards: Iterable[ShardMetadata]) -> SourceIdentity:
        """The identity of this source, given the metadata of the remaining shards."""

    def stages(self, shard: str) -> bool:
        """Whether `acquire` fetches the shard into the staging folder, which `release` then frees."""

    def metadata(self, shard: str) -> ShardMetadata | None:
        """Size, fingerprint and header of a shard; None if it is gone and cannot be fetched. Reads headers only."""

    def taken_from(self, shard: str, header: Header) -> Header:
        """The header that a split uses for a shard: `header`, unless the checkpoint renames its tensors.

        Raises:
            CheckpointError: the header contradicts the rest of the checkpoint.
        """
        return header if self.translation is None else self.translation.taken_from(shard, header)

    def with_dtype(self, dtype: str | None) -> Self:
        """The checkpoint with its quantized tensors in `dtype`, a key of `DTYPES`.

        Args:
            dtype: "auto" is the file's own dtype; None keeps blocks of GGUF as they are.

        Raises:
            OptionError: its tensors keep their dtypes.
        """
        translation = self.translation.with_dtype(dtype) if self.translation is not None else None
        if translation is None:
            if dtype in (None, "auto"):
                return self
            raise OptionError(
                f"{self.label} is not a GGUF checkpoint; its tensors keep their dtypes.", "Leave outtype out."
            )
        changed = copy.copy(self)
        changed.translation, changed._derived = translation, None
        return changed

    def acquire(self, shard: str, on_have: Callable[[Path, int], None] = ...) -> Path:
        """A local path to the whole shard, fetched if necessary.

        Args:
            shard: its name.
            on_have: called during a fetch with the file and the number of its leading bytes that have arrived, not yet
                verified; the number falls if the fetch starts over. May raise to stop.

        Raises:
            MissingShardError: it is not here and cannot be fetched.
        """

    def stream(self, shard: str) -> Generator[bytes]:
        """The bytes of a shard that `stages`, in order, without a file for it; verified only after the last one.

        Raises:
            HubError: the bytes do not match the hub's digest, or the hub refused.
        """

    def at_hand(self, shard: str) -> Path | None:
        """The file, other than a staged one, that `release` would delete; None if there is none."""

    def release(self, shard: str, *, only_staged: bool = False) -> Release:
        """Release a shard whose tensors are all durable elsewhere.

        Args:
            shard: its name.
            only_staged: remove no more than its file in the staging folder. A file that another program has put into
                the folder or into the hub cache meanwhile is the user's.
        """

    def freed_bytes(self, shards: Iterable[str], device: int) -> Mapping[str, int]:
        """Bytes that the release of each of these shards frees on the disk `device` (`st_dev`).

        Shards that free nothing are left out: missing ones, those on another disk, and those that share their data
        with another file.
        """

    def discard_rest(self) -> list[Path]:
        """Remove the rest of the original once all shards are gone (`delete_original`): its index, or its remaining
        files in the hub's cache. Returns the paths removed."""

    def sidecars(self) -> Mapping[str, Path]:
        """Config, tokenizer and similar files: relative name -> local path; fetched if necessary."""

    def derived(self) -> Mapping[str, bytes]:
        """Config, tokenizer and similar files that the checkpoint lacks and that can be derived: name -> content.

        Raises:
            CheckpointError: the files to derive them from are malformed.
        """
        if self._derived is None:  # once: shards that it is derived from may be gone later
            self._derived = {} if self.translation is None else self.translation.derived(self.copied_sizes())
        return self._derived

    def downloads(self) -> Downloads | None:
        """The files that `sidecars` will download into the hub cache; None for a local source."""
        return None

    def copied_sizes(self) -> Mapping[str, int]:
        """The sizes in bytes of `sidecars`, without fetching them."""

    def sidecar_sizes(self) -> Mapping[str, int]:
        """The sizes in bytes of `sidecars` and `derived`, without fetching files that are only copied."""
        return {**self.copied_sizes(), **{name: len(content) for name, content in self.derived().items()}}


def ignore_progress(path: Path, have: int) -> None:
    """A progress callback for `acquire` that does nothing."""


def sampled_fingerprint(path: Path, header: Header) -> str:
    """A fingerprint of a local shard from its header and a piece of every tensor, without reading all of it.

    Two checkpoints of one architecture have equal headers, and a fine-tune may change only a few tensors. A small
    file is read whole; of a file with very many tensors, evenly spread ones are sampled.
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


def sidecars_in(folder: Path, *, needed: bool = True) -> dict[str, Path]:
    """Sidecar files below a folder: name -> path, sorted by name.

    Raises:
        UnsafePathError: they are needed, and in the place of one is a pipe, a device, a folder or a link to nothing.
    """
    paths = [(path, pattern) for pattern in SIDECAR_PATTERNS for path in folder.glob(pattern)]
    named = [(folder / name, name) for name in (*SIDECAR_PATTERNS, *COMPANIONS) if "*" not in name]
    paths += [(path, pattern) for path, pattern in named if path.is_symlink()]  # `glob` leaves out one to nothing
    sidecars = {path.relative_to(folder).as_posix(): path for path, _ in paths}
    for path, pattern in paths if needed else ():
        if path.is_file() or (pattern.endswith("*") and path.is_dir()):  # licences may be in a folder
            continue
        if path.name.startswith(".") or (pattern in COMPANIONS and path.is_dir()):
            continue  # the lock of Emacs is a link to nothing, `.#config.json`
        if pattern in COMPANIONS or is_sidecar(path.relative_to(folder).as_posix(), 0):
            raise UnsafePathError(
                f"{path} is a pipe, a device, a folder or a link to nothing; expected a file.",
                "Put the model's own file there, or remove it if the model has none of this name.",
            )
    files = {name: path for name, path in sorted(sidecars.items()) if path.is_file()}
    return {name: path for name, path in files.items() if is_sidecar(name, path.stat().st_size)}


def is_sidecar(name: str, size: int) -> bool:
    """Whether a file of a checkpoint (config, tokenizer and similar) belongs into the split directory."""
    import fnmatch

    if name.endswith(".index.json") or size > SIDECAR_MAX_BYTES:
        return False
    depth = name.count("/")
    return any(fnmatch.fnmatchcase(name, p) and p.count("/") == depth for p in SIDECAR_PATTERNS)


_VOCABULARY = re.compile(r"tokeniz(?!er_config)|vocab|merges|tekken|\.(model|tiktoken|bpe)$")
NO_TOKENIZER = (
    "no tokenizer: only token ids work, no texts; put the model's tokenizer.json and tokenizer_config.json beside its "
    "weights"
)


def has_vocabulary(names: Iterable[str]) -> bool:
    """Whether any of these files could be the vocabulary of a tokenizer."""
    return any(map(_VOCABULARY.search, names))


def lacks_tokenizer(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Whether a model of tokens, by the content of its config.json, has no file of a tokenizer among these.

    A tokenizer of bytes has no vocabulary, only a config.
    """
    has_tokens = any("vocab_size" in part for part in (config, *config.values()) if isinstance(part, Mapping))
    return has_tokens and not has_vocabulary(names) and "tokenizer_config.json" not in names
