"""A hub repository at a pinned commit, one shard read at a time, and its weights as one logical checkpoint.

Listing, tokens, headers, the cache and its deletions are huggingface_hub's; only the weights are fetched by our own
code (`fetch`), into our own staging folder, so that one unlink frees them. A shard that is already in the user's
cache is used there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.base.progress import BytesFetched, DownloadStarted, tell
from rabbitllm.base.terminal import harmless
from rabbitllm.checkpoints import fetch, hub_cache
from rabbitllm.checkpoints.checkpoint import (
    Checkpoint,
    Disposal,
    Downloads,
    Release,
    ShardMetadata,
    SourceIdentity,
    file_stat,
    ignore_progress,
    is_sidecar,
)
from rabbitllm.checkpoints.fetch import side_by_side
from rabbitllm.checkpoints.gguf_checkpoint import GgufCheckpoint
from rabbitllm.checkpoints.index import (
    META_PARAMETERS,
    CheckpointIndex,
    check_shard_name,
    entry_of,
    gguf_entry,
    gguf_files,
    index_of,
    is_gguf,
    is_index,
    is_meta,
    read_index,
    remark_on,
)
from rabbitllm.checkpoints.meta_checkpoint import ranks_of, read_meta
from rabbitllm.errors import (
    CheckpointNotFoundError,
    CorruptShardError,
    GatedRepositoryError,
    HubError,
    MissingShardError,
    UnsafePathError,
)
from rabbitllm.formats.gguf import begins_gguf, parse_gguf
from rabbitllm.formats.shard_header import parse_shard_header, read_shard_header
from rabbitllm.formats.tensor_spec import Header, ReadAt
from rabbitllm.storage import durable
from rabbitllm.storage.files import read_range

FIRST_READ_BYTES = 256 << 10
"""Bytes fetched first from the start of a shard; 97 % of headers are shorter, so one request is enough."""
TAIL_READ_BYTES = 256 << 10
"""Bytes fetched first from the end of a torch zip, where its directory is; that of 2,000 tensors is shorter."""


class _Ranges:
    """Reads the header of a remote shard by range requests; keeps the ranges at the start and the end of the file."""

    def __init__(self, file: fetch.RemoteFile) -> None:
        self._file = file
        self._kept = [(0, fetch.read_range(file, 0, FIRST_READ_BYTES))]

    def read_at(self, offset: int, length: int) -> bytes:
        """The bytes of a range, fewer only at the end of the file."""
        end = min(offset + length, self._file.size)
        if begins_gguf(self._kept[0][1]):  # its header has no length: growing prefixes are fetched
            begin, data = self._kept[0]
            if end > len(data):
                missing = min(max(end, 2 * len(data)), self._file.size) - len(data)
                data = data + fetch.read_range(self._file, len(data), missing)
                self._kept[0] = begin, data
            return data[offset:end]
        for begin, data in self._kept:
            if begin <= offset and min(offset + 1, end) <= begin + len(data):
                have = data[offset - begin : end - begin]
                offset += len(have)
                return have + fetch.read_range(self._file, offset, end - offset)
        if end == self._file.size:  # the end records, with the directory before them
            begin = max(0, min(offset, end - TAIL_READ_BYTES))
            self._kept.append((begin, fetch.read_range(self._file, begin, end - begin)))
            return self._kept[-1][1][offset - begin :]
        return fetch.read_range(self._file, offset, end - offset)


DOWNLOAD_THREADS = 8
"""Number of simultaneous downloads on the standard route; huggingface_hub's own default."""

_DAMAGED = (
    "Make the same call again, in case the download was damaged; a split that was begun goes on. If it stays so, the "
    "repository's own file is damaged: tell its owner, or use another revision."
)


@dataclass(frozen=True, slots=True)
class HubAccess:
    """Options for the hub, passed to huggingface_hub unchanged."""

    revision: str | None = None
    token: str | bool | None = None
    cache_dir: Path | None = None
    local_files_only: bool = False


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of the repository as the hub lists it; `sha256` only of large files."""

    name: str
    size: int
    sha256: str | None
    blob_id: str | None

    @property
    def fingerprint(self) -> str:
        """An identifier of its content."""
        return f"sha256:{self.sha256}" if self.sha256 else f"blob:{self.blob_id}"


@contextlib.contextmanager
def translated(repo_id: str) -> Iterator[None]:
    """Convert huggingface_hub's errors into ours, with a remedy."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise GatedRepositoryError(
            f"{repo_id} is gated: the hub lists it but does not give its files to this token.",
            f"Accept the terms at https://huggingface.co/{repo_id}, then pass token='hf_…' or run `hf auth login`.",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{repo_id} has no such revision: {_last_line(error)}.", "Check the revision's name.") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointNotFoundError(
            f"There is no folder {repo_id!r} here and no repository {repo_id!r} on the hub that this token may see.",
            "Check the spelling; for a private repository pass token='hf_…' or run `hf auth login`.",
        ) from error
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):  # not in the cache, and the hub could not be reached
            raise _no_answer_error(repo_id, error) from error
        raise CheckpointNotFoundError(
            f"{repo_id} lacks a file it needs: {_last_line(error)}.", "Check the repository."
        ) from error
    except Exception as error:
        refusals = (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, ConnectionError, TimeoutError)
        if not isinstance(error, refusals + fetch.request_errors()):
            raise
        raise _no_answer_error(repo_id, error) from error


def _last_line(error: Exception) -> str:
    """The part of a message of huggingface_hub that says what is wrong; its status is in another paragraph."""
    return str(error).rstrip(".\n ").rpartition("\n")[2]


def _no_answer_error(repo_id: str, error: Exception) -> HubError:
    return HubError(
        f"The hub did not answer for {repo_id}: {type(error).__name__}: {' '.join(str(error).split())}.",
        f"Make the same call again when the connection works; finished downloads are kept. If {repo_id} is a folder, "
        "check its path.",
    )


@dataclass
class HubRepository:
    """One repository at one commit.

    Created by `open_repository`. `staging` is our folder for fetched shards. Without `uses_cache` the user's hub
    cache is not searched. `quantization` names one of several GGUF models, such as Q4_K_M.
    """

    repo_id: str
    commit: str
    files: Mapping[str, HubFile]
    access: HubAccess
    staging: Path
    uses_cache: bool = True
    quantization: str | None = None

    def __post_init__(self) -> None:
        self.label = f"{self.repo_id}@{self.commit[:8]}"

    @property
    def cache(self) -> Path:
        """The user's hub cache."""
        from huggingface_hub import constants

        return self.access.cache_dir or Path(constants.HF_HUB_CACHE)

    def download(self, name: str, *, is_reported: bool = False) -> Path:
        """A file in the user's own hub cache, downloaded by huggingface_hub if it is missing.

        Args:
            name: of the file.
            is_reported: whether its bytes are reported as events, as of large files.
        """
        from huggingface_hub import hf_hub_download

        access = self.access
        warnings.filterwarnings("ignore", "Not enough free disk space to download", UserWarning)  # the error says so
        with translated(self.repo_id):
            get = functools.partial(
                hf_hub_download,
                self.repo_id,
                name,
                revision=self.commit,
                token=access.token,
                cache_dir=access.cache_dir,
                tqdm_class=_silent_bar(name if is_reported else None),
            )
            path = Path(get())
            return path if self._is_whole(name, path) else Path(get(force_download=True))

    def _is_whole(self, name: str, path: Path) -> bool:
        """Whether a file has its size; huggingface_hub syncs none, and after a power cut one may be empty."""
        return name not in self.files or path.stat().st_size == self.files[name].size

    def cached(self, name: str) -> tuple[hub_cache.CachedSnapshot, Path] | None:
        """The snapshot and path of a file at this commit in the user's hub cache, or None."""
        path = self._in_cache(name) if self.uses_cache else None
        if path is None or not self._is_whole(name, path):
            return None
        snapshot = hub_cache.snapshot_of(path.parents[name.count("/")])
        return (snapshot, path) if snapshot is not None else None

    def _in_cache(self, name: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.repo_id, name, cache_dir=self.access.cache_dir, revision=self.commit)
        return Path(path) if isinstance(path, str) and Path(path).exists() else None

    def download_torn(self) -> None:
        """Download the small files again that a power cut has left incomplete in the user's hub cache."""
        for name, file in self.files.items():
            path = self._in_cache(name) if is_sidecar(name, file.size) else None
            if path is not None and not self._is_whole(name, path):
                self.download(name)

    def identity_of(self, shards: Iterable[str]) -> SourceIdentity:
        """The identity of these shards at this commit, from the listing alone."""
        fingerprints = {name: self.files[name].fingerprint for name in shards if name in self.files}
        return SourceIdentity("hub", self.repo_id, self.commit, fingerprints)

    def identity_against(self, made_from: SourceIdentity) -> SourceIdentity:
        """The identity to compare with that of a split; at another commit, of all shards in the index."""
        identity = self.identity_of(made_from.fingerprints)
        is_settled = self.commit == made_from.commit or made_from.differs_from(identity) is not None
        if is_settled or not is_index(self.entry()):
            return identity
        return self.identity_of(HubCheckpoint(self).index.shards)

    def small_files(self) -> dict[str, Callable[[bytes], bool]]:
        """Config, tokenizer and the like: name -> whether this is its content, without a request."""
        files = (file for name, file in sorted(self.files.items()) if is_sidecar(name, file.size))
        return {file.name: self._remote(file.name, file).is_of for file in files}

    def staged(self, name: str) -> Path:
        """The staging path of a fetched shard; never its final name, since it is hashed again before it is trusted."""
        return self.staging / staged_name(name)

    def stages(self, shard: str) -> bool:
        """Whether a shard is fetched into the staging folder, because it is not in the user's cache."""
        return self.cached(shard) is None

    def entry(self) -> str:
        """The file that its checkpoint begins with; for errors see `entry_of`."""
        return self.gguf_entry() or entry_of((name for name in self.files if "/" not in name), self.label)

    def gguf_entry(self) -> str | None:
        """The first GGUF file of its checkpoint; None if that has another format. For errors see `gguf_entry`."""
        return gguf_entry(self.files, self.quantization, self.label)

    def metadata(self, shard: str) -> ShardMetadata | None:
        """Size, digest and header of a shard, from the cache or by range requests."""
        listed = self.files.get(shard)
        if listed is None:
            return None
        cached = self.cached(shard)
        stat = file_stat(cached[1]) if cached else None
        try:
            header = read_shard_header(cached[1], shard) if cached else self._remote_header(shard, listed)
        except CorruptShardError as error:
            place, remedy = (cached[1].parent, hub_cache.DAMAGED) if cached else (self.label, _DAMAGED)
            raise CorruptShardError(f"In {place}: {error.problem}", f"{error.remedy} {remedy}".strip()) from None
        return ShardMetadata(shard, listed.size, listed.fingerprint, header, cached is None, stat)

    def _remote_header(self, shard: str, listed: HubFile) -> Header:
        with translated(self.repo_id):
            # offsets follow without the bytes between the storages of a torch file, which are checked once it is here
            ranges = _Ranges(self._remote(shard, listed))
            return parse_shard_header(ranges.read_at, listed.size, shard, scattered=False)

    def _remote(self, shard: str, listed: HubFile) -> fetch.RemoteFile:
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.repo_id, shard, revision=self.commit)
        return fetch.RemoteFile(url, listed.size, listed.sha256, self.access.token, listed.blob_id)

    def acquire(self, shard: str, on_have: Callable[[Path, int], None] = ignore_progress) -> Path:
        """The shard in the user's cache, or fetched (or resumed) into the staging folder."""
        if cached := self.cached(shard):
            hub_cache.check_in_cache(cached[1], cached[0])
            return cached[1]
        remote = self._remote(shard, self.listed(shard))
        durable.make_folder(self.staging)
        part = self.staged(shard)
        with translated(self.repo_id):
            fetch.fetch(remote, part, functools.partial(on_have, part))
        return part

    def listed(self, shard: str) -> HubFile:
        """The hub's entry of a file.

        Raises:
            MissingShardError: there is no file of that name.
        """
        listed = self.files.get(shard)
        if listed is None:
            raise MissingShardError(
                f"{self.label} has no file {shard}, which its index names.",
                "The repository is incomplete: use another revision, or report it to the owner.",
            )
        return listed

    def require_access(self, shard: str) -> None:
        """Check that the hub gives a file to this user: one request, of no data.

        Raises:
            GatedRepositoryError, HubError, CheckpointNotFoundError: see `translated`.
        """
        from huggingface_hub import get_hf_file_metadata

        with translated(self.repo_id):
            get_hf_file_metadata(self._remote(shard, self.listed(shard)).url, token=self.access.token)

    def stream(self, shard: str) -> Generator[bytes]:
        """The shard's bytes as the hub sends them, in order; the digest is compared after the last."""
        with translated(self.repo_id):
            yield from fetch.stream(self._remote(shard, self.listed(shard)))

    def at_hand(self, shard: str) -> Path | None:
        """The shard in the user's cache, or None."""
        return None if self.cached(shard) is None else self.acquire(shard)

    def release(self, shard: str, *, only_staged: bool = False) -> Release:
        """Remove the staged shard, or free the cached one through huggingface_hub's deletion, if that may go too."""
        part = self.staged(shard)
        if part.exists():
            size = part.stat().st_size
            durable.remove(part)
            return Release(shard, Disposal.DELETED, size)
        if not only_staged and (cached := self.cached(shard)):
            return hub_cache.release_file(cached[0], shard)
        return Release(shard, Disposal.DELETED)


def staged_name(shard: str) -> str:
    """The name of a shard in the staging folder."""
    return shard.replace("/", "--") + durable.PART_SUFFIX


def open_repository(repo_id: str, access: HubAccess, staging: Path, quantization: str | None = None) -> HubRepository:
    """Pin the commit of a repository and list its files: one request.

    Args:
        repo_id: organisation and name.
        access: how to reach the hub.
        staging: folder for fetched shards.
        quantization: of the GGUF model, if there are several.

    Raises:
        CheckpointNotFoundError, GatedRepositoryError, HubError: see `translated`.
        HubError: the response is not a list of a repository's files.
        UnsafePathError: a name or a checksum in it points outside its folder.
    """
    from huggingface_hub import HfApi

    with translated(repo_id):
        try:
            info = HfApi(token=access.token).model_info(repo_id, revision=access.revision, files_metadata=True)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, OSError):  # a connection error
                raise
            raise _malformed_listing_error(repo_id, f"{type(error).__name__}: {error}") from error
    commit: Any = info.sha
    siblings: Any = info.siblings
    if not isinstance(commit, str) or _DIGEST.fullmatch(commit) is None or not isinstance(siblings, list):
        raise _malformed_listing_error(repo_id, "it names no commit, or no files")
    files = {}
    for sibling in siblings:
        sha256 = sibling.lfs.sha256 if sibling.lfs else None
        listed = HubFile(sibling.rfilename, sibling.size or 0, sha256, sibling.blob_id)
        _check_listed(repo_id, listed)
        files[listed.name] = listed
    return HubRepository(repo_id, commit, files, access, staging, quantization=quantization)


_DIGEST = re.compile(r"[0-9A-Za-z]{1,128}")
"""A commit, a blob or a checksum, which become parts of paths."""
_SHOWN_LETTERS = 80
"""Characters shown of a refused name."""


def _malformed_listing_error(repo_id: str, why: str) -> HubError:
    return HubError(
        f"The hub's answer is not a list of the files of {repo_id}: {harmless(why)}.",
        "Check HF_ENDPOINT and the proxy, and make the same call again.",
    )


def _check_listed(repo_id: str, listed: HubFile) -> None:
    """Refuse an invalid entry of a listing.

    Raises:
        UnsafePathError: a name or a checksum points outside its folder.
        HubError: a size or a name of another type.
    """
    name: Any = listed.name
    if not isinstance(name, str) or not name or type(listed.size) is not int or listed.size < 0:
        raise _malformed_listing_error(repo_id, f"a file has the name {name!r} and the size {listed.size!r}")
    parts = name.replace("\\", "/").split("/")
    digests: tuple[Any, ...] = (listed.sha256, listed.blob_id)
    is_unsafe = "\0" in name or ".." in parts or "." in parts or not parts[0] or parts[0][1:2] == ":"
    if is_unsafe or any(d is not None and not (isinstance(d, str) and _DIGEST.fullmatch(d)) for d in digests):
        raise UnsafePathError(
            f"The hub lists a file of {repo_id} as {harmless(name, _SHOWN_LETTERS)!r} with the checksum "
            f"{harmless(str(listed.sha256 or listed.blob_id), _SHOWN_LETTERS)!r}, which may lead out of a folder.",
            "Use another copy of the model: this repository cannot be trusted. Nothing was downloaded.",
        )


def cached_snapshot(repo_id: str, access: HubAccess) -> Path | None:
    """The folder of a repository's revision in the user's cache, without a request; None if there is no model.

    It may be incomplete. Without a revision it is the only one, if the cache does not know which commit the main branch
    is at: this package downloads by commit.
    """
    from huggingface_hub import constants

    repository = (access.cache_dir or Path(constants.HF_HUB_CACHE)) / hub_cache.folder_name(repo_id)
    revision = access.revision or "main"
    branch = repository / "refs" / revision
    folder = repository / "snapshots" / (branch.read_text().strip() if branch.is_file() else revision)
    if not folder.is_dir():
        snapshots = list((repository / "snapshots").glob("*"))
        if access.revision is not None or len(snapshots) != 1:
            return None
        folder = snapshots[0]
    files = cached_files(folder)
    return folder if {"config.json", META_PARAMETERS} & {*files} or any(map(is_gguf, files)) else None


def cached_files(snapshot: Path) -> list[str]:
    """The files of a repository's revision that are in the user's cache, as the repository names them."""
    return sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())


def download_all(repository: HubRepository, index: CheckpointIndex) -> Path:
    """Fetch a whole repository's weights and small files into the user's cache (the standard route).

    Returns:
        The snapshot's folder.
    """
    names = {*index.shards, *(name for name, file in repository.files.items() if is_sidecar(name, file.size))}
    names.add(repository.entry())
    missing = [repository.listed(name) for name in sorted(names) if repository.cached(name) is None]
    if missing:
        tell(DownloadStarted(repository.label, len(missing), sum(file.size for file in missing)))

    first, *_ = side_by_side(lambda name: repository.download(name, is_reported=True), sorted(names), DOWNLOAD_THREADS)
    return first.parents[min(names).count("/")]


def _silent_bar(reported: str | None = None) -> type[Any]:
    """A tqdm class that shows nothing; it reports the bytes of a file of this name as events."""
    from tqdm import tqdm

    class SilentBar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # otherwise each class has a thread that redraws its bars

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            if reported is not None and (initial := int(options.get("initial", 0))):
                tell(BytesFetched(reported, initial, earlier=True))

        def update(self, n: float | None = 1) -> None:
            if reported is not None:
                tell(BytesFetched(reported, int(n or 0)))

    return SilentBar


class HubCheckpoint(HubRepository, Checkpoint):
    """The weights of a repository, as the splitter sees them."""

    def __init__(self, repository: HubRepository) -> None:
        super().__init__(**{field.name: getattr(repository, field.name) for field in dataclasses.fields(HubRepository)})
        self._gguf_headers: Mapping[str, Header] = {}
        self.index = self._find_index()

    def _find_index(self) -> CheckpointIndex:
        entry = self.entry()
        remark_on(entry, self.files, self.label)
        if is_index(entry):
            return read_index(self.download(entry))
        if is_meta(entry):
            ranks = ranks_of((name for name in self.files if "/" not in name), self.label)
            self.translation = read_meta(self.download(entry), ranks, self._rank_header, self.download)
        elif is_gguf(entry):
            self.translation = self._read_gguf(entry)
        else:
            metadata = super().metadata(entry)
            assert metadata is not None
            return index_of({tensor.name: entry for tensor in metadata.header.tensors})
        return self.translation.index()

    def _read_gguf(self, entry: str) -> GgufCheckpoint:
        shards = gguf_files(entry)
        for shard in shards:
            check_shard_name(shard, self.label)
        readers = dict(zip(shards, side_by_side(self._reader, shards, DOWNLOAD_THREADS), strict=True))
        files = {shard: parse_gguf(read, self.listed(shard).size, shard) for shard, read in readers.items()}
        self._gguf_headers = {shard: file.header for shard, file in files.items()}
        return GgufCheckpoint(shards, files, readers[shards[-1]])

    def _remote_header(self, shard: str, listed: HubFile) -> Header:
        return self._gguf_headers.get(shard) or super()._remote_header(shard, listed)

    def _reader(self, shard: str) -> ReadAt:
        """A function that reads ranges of a shard, from the cache or by requests."""
        listed = self.listed(shard)
        if cached := self.cached(shard):
            return functools.partial(read_range, cached[1])
        with translated(self.repo_id):
            return _Ranges(self._remote(shard, listed)).read_at

    def _rank_header(self, rank: str) -> Header | None:
        """The header of a rank, with its own names."""
        metadata = super().metadata(rank)
        return None if metadata is None else metadata.header

    @property
    def deletable(self) -> bool:
        """Whether files in the user's cache can be deleted; staged files always can."""
        cache = self.cache
        return not cache.exists() or os.access(cache, os.W_OK)

    def identity(self, shards: Iterable[ShardMetadata]) -> SourceIdentity:
        """Complete from the hub's listing, whichever shards are still needed."""
        return self.identity_of(self.index.shards)

    def metadata(self, shard: str) -> ShardMetadata | None:
        check_shard_name(shard, self.label)
        metadata = super().metadata(shard)
        return metadata and dataclasses.replace(metadata, header=self.taken_from(shard, metadata.header))

    def freed_bytes(self, shards: Iterable[str], device: int) -> Mapping[str, int]:
        snapshots = {shard: location[0] for shard in shards if (location := self.cached(shard)) is not None}
        return hub_cache.freed_bytes(next(iter(snapshots.values())), snapshots, device) if snapshots else {}

    def discard_rest(self) -> list[Path]:
        cached = self.cached("config.json") or self.cached(self.entry())
        return hub_cache.free_rest(cached[0]) if cached else []

    def sidecars(self) -> Mapping[str, Path]:
        return {name: self.download(name) for name in sorted(self.copied_sizes())}

    def downloads(self) -> Downloads:
        sidecars = self.copied_sizes().items()
        sizes = {name: size for name, size in sidecars if self.cached(name) is None}
        return Downloads(self.cache, sizes, len(self.files))

    def copied_sizes(self) -> Mapping[str, int]:
        return {name: file.size for name, file in self.files.items() if is_sidecar(name, file.size)}
