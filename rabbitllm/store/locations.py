"""Resolves a model's name, for every command and `AutoModel`; and the locations of split directories.

A folder and a repository as `organisation/name` are returned unchanged; an address on the hub
(`hf://organisation/name`, or the browser's URL) means that repository, and a file of weights means the checkpoint in
its folder. Opens at most an index and manifests, and never contacts the hub: other code checks whether the repository
exists.

A local checkpoint is split into a directory in its own folder, a GGUF file into one with its name. A hub repository is
split into our own folder next to the hub cache (`HF_HOME/rabbitllm`, or `RABBITLLM_HOME`), since a snapshot in the
cache may be pruned at any time.
RabbitLLM 1.1 wrote layers into the snapshot; they are still found there.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import hashlib
import json
import os
import re
from pathlib import Path
from typing import TypeVar

from rabbitllm.base.grouping import grouped
from rabbitllm.base.options import expand
from rabbitllm.checkpoints import hub_cache
from rabbitllm.checkpoints.index import (
    WEIGHT_SUFFIXES,
    gguf_models,
    gguf_stem,
    is_gguf,
    is_gguf_file,
    is_index,
    is_meta,
    is_rank,
    names_quantization,
    read_index,
)
from rabbitllm.checkpoints.local import entry_in, is_writable
from rabbitllm.errors import CheckpointNotFoundError, OptionError, RabbitLLMError
from rabbitllm.storage import durable
from rabbitllm.storage.files import file_opener
from rabbitllm.store.manifest import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    SPLIT_DIRECTORY,
    SPLITS,
    directory_name,
    is_begun,
    is_legacy,
    read_manifest,
)

HOME_VARIABLE = "RABBITLLM_HOME"
LOCAL_FOLDER = "local"
"""Subfolder of `home()` for checkpoints in folders that are not writable."""
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_QUANTIZATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def home() -> Path:
    """The folder for splits of hub models: `RABBITLLM_HOME`, else `rabbitllm` in huggingface_hub's `HF_HOME`."""
    chosen = os.environ.get(HOME_VARIABLE)
    if chosen:
        return expand(chosen)
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "rabbitllm"


def is_repo_id(name: str) -> bool:
    """Whether a name could be a repository on the hub rather than a path."""
    return _REPO_ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def checked_quantization(name: str) -> str:
    """The name of a quantization, such as Q4_K_M, in capitals, as a part of a folder's name.

    Raises:
        OptionError: it has other characters than letters, digits, `_`, `-` and dots.
    """
    if not _QUANTIZATION.fullmatch(name):
        raise OptionError(
            f"{name[:80]!r} is not the name of a quantization.", "Use organisation/name:Q4_K_M, for example."
        )
    return name.upper()


def is_commit(revision: str) -> bool:
    """Whether a revision is a commit's full hash rather than the name of a branch or tag."""
    return _COMMIT.fullmatch(revision) is not None


def for_local(checkpoint: Path, saving_path: Path | None, compression: str | None, base: str = SPLIT_DIRECTORY) -> Path:
    """The split directory of a checkpoint in a folder, existing or not.

    In `saving_path` if given; else in the folder of the weights; or, if that is in the hub cache or on a read-only
    mount, in `home()`.
    """
    if saving_path is not None:
        return saving_path / directory_name(compression, base)
    inside = _named_or_earlier(checkpoint, compression, base)
    if inside.is_dir() and (is_legacy(inside) or any(inside.iterdir())):
        return inside
    snapshot = hub_cache.snapshot_of(checkpoint)
    if snapshot is not None:
        return _named_or_earlier(home() / snapshot.repo_folder / snapshot.commit, compression, base)
    if is_writable(checkpoint):
        return inside
    return _named_or_earlier(home() / LOCAL_FOLDER / local_folder_name(checkpoint), compression, base)


def _named_or_earlier(parent: Path, compression: str | None, base: str) -> Path:
    """The split directory of a base name; that without the name of a GGUF model if it was made from this model.

    So were those of a folder's only model named at first.
    """
    named, earlier = parent / directory_name(compression, base), parent / directory_name(compression)
    model = model_of(named, compression)
    if not model or is_begun(named) or not is_begun(earlier):
        return named
    shards = _shards_of(earlier)
    return earlier if model in map(gguf_stem, gguf_models(shards) or shards) else named


def local_folder_name(checkpoint: Path) -> str:
    """The folder name for a checkpoint that is not writable: its own name with a hash of its path."""
    resolved = checkpoint.resolve()
    return f"{resolved.name}-{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"


def for_repository(
    repo_id: str, commit: str, saving_path: Path | None, compression: str | None, base: str = SPLIT_DIRECTORY
) -> Path:
    """The split directory of a repository at a commit."""
    name = directory_name(compression, base)
    return (saving_path or home() / hub_cache.folder_name(repo_id) / commit) / name


def of_other_commits(repo_id: str, commit: str, compression: str | None, base: str = SPLIT_DIRECTORY) -> list[Path]:
    """Split directories of the same repository at other commits, in `home()`."""
    paths = (home() / hub_cache.folder_name(repo_id)).glob(f"*/{directory_name(compression, base)}")
    return sorted(path for path in paths if path.parent.name != commit)


def of_any_name(folder: Path, compression: str | None) -> list[Path]:
    """Split directories beside one, at its compression, of GGUF models that were named by their quantization or not."""
    others = {f".{name}" for name in SPLITS if name != compression}
    paths = folder.parent.glob(directory_name(compression, f"{SPLIT_DIRECTORY}*"))
    return sorted(path for path in paths if path != folder and path.suffix not in others)


def of_repository(repo_id: str, base: str) -> list[Path]:
    """Split directories of a repository in `home()`: with this base name, and with another one of the same GGUF model.

    The hub is not asked whether a repository has one GGUF model only: its splits decide.
    """
    paths = sorted((home() / hub_cache.folder_name(repo_id)).glob(f"*/{SPLIT_DIRECTORY}*"))
    models = {path: tuple(gguf_models(_shards_of(path))) for path in paths}
    names = {directory_name(compression, base) for compression in SPLITS}
    if model := base.removeprefix(SPLIT_DIRECTORY)[1:]:
        same = {path for path in paths if any(names_quantization(name, model) for name in models[path])}
    else:
        same = {*paths} if len({*models.values()}) == 1 and models[paths[0]] else set()
    return [path for path in paths if path.name in names or path in same]


def known_names() -> list[str]:
    """Names of the models in `home()`: repositories, and folders that were not writable."""
    base = home()
    repositories = (hub_cache.repo_id_of(path.name) for path in base.glob(f"{hub_cache.REPO_PREFIX}*"))
    return sorted({*repositories, *(path.name.rpartition("-")[0] for path in (base / LOCAL_FOLDER).glob("*-*"))})


def remember_commit(repo_id: str, revision: str | None, commit: str) -> None:
    """Record the commit of a revision, for calls without a connection."""
    path = home() / hub_cache.folder_name(repo_id) / "refs" / (revision or "main").replace("/", "--")
    if path.exists() and path.read_text() == commit:
        return
    durable.make_folder(path.parent)
    durable.write_whole(path, commit.encode())


def remembered_commit(repo_id: str, revision: str | None) -> str | None:
    """The commit of a revision when it was last split here; a commit is returned unchanged."""
    if revision is not None and is_commit(revision):
        return revision
    path = home() / hub_cache.folder_name(repo_id) / "refs" / (revision or "main").replace("/", "--")
    return path.read_text() if path.exists() else None


_Error = TypeVar("_Error", bound=RabbitLLMError)
MAX_NEAR = 3
"""Limit of proposed names."""
_HUB_ADDRESS = re.compile(r"(?:hf://(?:models/)?|https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)(.*)")


def resolve_name(name: str) -> str:
    """Resolve a name to a folder or repository id; other names are returned unchanged.

    Raises:
        OptionError: an address on the hub that is not a repository's.
        CheckpointNotFoundError: a pipe or a device; or the file does not belong to the checkpoint of its folder.
        InvalidIndexError, UnsafePathError: see `read_index`.
        IncompleteSplitError, SplitMismatchError: see `read_manifest`.
    """
    address = _HUB_ADDRESS.fullmatch(name)
    if address is not None:
        return _parse_address(name, address[1])
    path = expand(name)
    if not name or path.is_dir():
        return name
    if path.exists() and not path.is_file():
        raise CheckpointNotFoundError(
            f"{path} is neither a file nor a folder, but a pipe or a device.",
            "A checkpoint is not read in one go: write it to a file, and use that.",
        )
    if is_gguf_file(path) or _has_own_split(path):
        return name
    if path.is_file():
        return str(_folder_of(path))
    if _is_recorded(path) or (path.suffix in WEIGHT_SUFFIXES and _is_used_up(path)):
        return str(path.parent)
    return name


def one_of_several(name: str) -> tuple[str, str]:
    """The folder or repository that a resolved name means, and which GGUF model in it: "" for other weights, and for a
    repository without a quantization.

    The name of that model is a part of the names of its split directories, so that another file in its folder does not
    change them.

    Raises:
        OptionError: the quantization is not the name of one.
    """
    path = expand(name)
    if path.is_dir():
        return name, _gguf_model_in(path)
    if path.parent.is_dir() and (is_gguf_file(path) or _has_own_split(path)):
        [entry] = gguf_models([path.name]) or [path.name]
        return str(path.parent), gguf_stem(entry)
    repo_id, _, quantization = name.partition(":")
    if quantization and is_repo_id(repo_id):
        return repo_id, checked_quantization(quantization)
    return name, ""


def require_place(name: str) -> None:
    """Refuse a name that no model can have: nothing of it is on this machine, and it is no repository id.

    Raises:
        CheckpointNotFoundError: it is one.
        OptionError, InvalidIndexError, UnsafePathError, IncompleteSplitError, SplitMismatchError: as in `resolve_name`.
    """
    resolved = resolve_name(name)
    place, _ = one_of_several(resolved)
    if not is_repo_id(place) and not (place and expand(place).is_dir()):
        error = CheckpointNotFoundError(
            f"There is no folder {resolved!r}, and it is not a repository id.",
            "Use an existing folder, or a repository as 'organisation/name'.",
        )
        raise with_near_names(error, resolved)


def served_name(name: str) -> str:
    """The name in requests to a server: the id of a repository, the name of a GGUF model, or a folder's.

    A split directory without a name of its own has its model's.

    Args:
        name: the name as the user wrote it.
    """
    if is_gguf_file(expand(name)):
        return gguf_stem(expand(name).name)
    resolved = resolve_name(name)
    path = expand(resolved)
    if not path.is_dir():
        return resolved
    path = path.resolve()
    with contextlib.suppress(RabbitLLMError):  # of a damaged split; the load says so
        manifest = read_manifest(path) if path.name.startswith(SPLIT_DIRECTORY) else None
        if manifest is not None and manifest.source.kind == "hub":
            return ":".join(filter(None, (manifest.source.name, model_of(path, manifest.compression))))
        if manifest is not None and gguf_models([manifest.source.title]):
            return gguf_stem(manifest.source.title)
    while path.name.startswith(SPLIT_DIRECTORY) and path.parent.name:
        path = path.parent
    return path.name or "model"


def base_for(model: str, saving_path: Path | None, base: str = SPLIT_DIRECTORY) -> str:
    """The base name of the split directories of one of several models; a folder that the user chose is for one."""
    return f"{base}-{model}" if model and saving_path is None else base


def model_of(folder: Path, compression: str | None) -> str:
    """The model of several whose split directory a folder is, by its name; "" if there is no other."""
    base = folder.name.removesuffix(f".{compression}")
    return base.removeprefix(f"{SPLIT_DIRECTORY}-") if base.startswith(f"{SPLIT_DIRECTORY}-") else ""


def spelled_out(folder: Path) -> Path:
    """The path of a folder that ends with its own name, where it is `.` or ends with `..`."""
    return folder.resolve() if folder.name in ("", "..") else folder


def _has_own_split(file: Path) -> bool:
    """Whether a GGUF file, which may be gone, has a split directory of its own among those of its folder."""
    pattern = f"{SPLIT_DIRECTORY}-{glob.escape(gguf_stem(file.name))}*"
    return any(file.parent.glob(pattern)) if is_gguf(file.name) else _is_recorded(file, pattern)


def _is_recorded(file: Path, pattern: str = f"{SPLIT_DIRECTORY}*") -> bool:
    """Whether a finished split next to a file that does not exist was made from it."""
    if not file.name or file.exists():
        return False
    for folder in file.parent.glob(pattern):
        with contextlib.suppress(RabbitLLMError):  # a damaged one says nothing about this name
            manifest = read_manifest(folder)
            if manifest is not None and file.name in manifest.source.fingerprints:
                return True
    return False


def _gguf_model_in(folder: Path) -> str:
    """The GGUF model with which a folder begins, or whose splits are all that is left; "" if that is not one model.

    A snapshot of the hub cache is named as its repository is. A folder whose other weights a split has used up still
    means these; and one with an unfinished split of a GGUF model that model, also if other weights came into it since.
    """
    if is_begun(folder) or is_legacy(folder) or hub_cache.snapshot_of(folder) is not None:
        return ""
    try:
        entry = entry_in(folder)
    except CheckpointNotFoundError:
        entry = ""
    made_from = {split.name: _shards_of(split) for split in folder.glob(f"{SPLIT_DIRECTORY}*")}
    own = [shards for name, shards in made_from.items() if not name.startswith(f"{SPLIT_DIRECTORY}-")]
    if entry and not is_gguf_file(folder / entry):
        begun = {name: shards for name, shards in made_from.items() if not (folder / name / MANIFEST_NAME).exists()}
        models = {gguf_stem(first) for shards in begun.values() for first in gguf_models(shards)}
        return models.pop() if len(models) == 1 and not any(own) else ""
    if any(shards and not gguf_models(shards) and entry not in shards for shards in own):
        return ""
    if entry:
        return gguf_stem(entry)
    models = {gguf_stem(first) for shards in made_from.values() for first in gguf_models(shards)}
    return models.pop() if len(models) == 1 and not any(is_gguf(path.name) for path in folder.iterdir()) else ""


def _shards_of(split_folder: Path) -> set[str]:
    """The shards that a split, finished or not, was made from, as far as its record can be read."""
    with contextlib.suppress(RabbitLLMError, OSError, ValueError, KeyError, TypeError):
        manifest = read_manifest(split_folder)
        if manifest is not None:
            return {*manifest.source.fingerprints}
        with open(split_folder / JOURNAL_NAME, "rb", opener=file_opener) as record:
            return {shard["name"] for shard in json.loads(record.readline())["shards"]}
    return set()


def _parse_address(name: str, path: str) -> str:
    """The repository of an address; a browser's URL may continue with `tree/main` and the like."""
    parts = path.partition("?")[0].rstrip("/").split("/")
    repo_id = "/".join(parts[:2])
    browsed = name.startswith("http") and parts[2:] in ([], ["tree", "main"])
    if not is_repo_id(repo_id) or not (len(parts) <= 2 or browsed):
        raise OptionError(
            f"{name} is not the address of a model repository.",
            "Use hf://organisation/name, and --revision for a branch, tag or commit.",
        )
    return repo_id


def _is_used_up(file: Path) -> bool:
    """Whether an unfinished split, or one of RabbitLLM 1.1, next to a file that does not exist may have deleted it: the
    file belongs to what is left of the checkpoint."""
    for folder in file.parent.glob(f"{SPLIT_DIRECTORY}*"):
        if read_manifest(folder) is None and (is_begun(folder) or is_legacy(folder)):
            try:
                entry = entry_in(file.parent)
            except CheckpointNotFoundError:  # nothing is left
                return True
            if _belongs(file, entry):
                return True
    return False


def _belongs(file: Path, entry: str) -> bool:
    """Whether a file of weights belongs to the checkpoint of its folder that begins with `entry`."""
    if is_index(entry) and file.name in read_index(file.parent / entry).shards:
        return True
    return entry == file.name or (is_meta(entry) and is_rank(file.name))


def _folder_of(file: Path) -> Path:
    folder = file.parent
    try:
        entry = entry_in(folder)
    except CheckpointNotFoundError as error:
        if file.name.endswith(WEIGHT_SUFFIXES):
            raise
        raise CheckpointNotFoundError(
            f"{file} is no file of weights: those are GGUF, safetensors and files of torch.save.",
            "Use the folder or file that holds the weights, or a repository id.",
        ) from error
    if not _belongs(file, entry):
        raise CheckpointNotFoundError(
            f"{file} does not belong to the checkpoint in {folder}, which is {entry}.",
            "Use the folder, or move the file into a separate folder with config and tokenizer.",
        )
    return folder


def similar_names(name: str) -> tuple[str, ...]:
    """Local names similar to one that was not found, most similar first: of split models, and of folders and files of
    weights next to a path."""
    names = known_names()
    path = expand(name)
    files: dict[str, str] = {}
    if path.parent.is_dir():
        siblings = [sibling for sibling in path.parent.iterdir() if not sibling.name.startswith(".")]
        names = [*names, *(str(folder) for folder in siblings if folder.is_dir())]
        weights = [file for file in siblings if file.name.lower().endswith(WEIGHT_SUFFIXES) and file.is_file()]
        files = {file.name.lower(): str(file) for file in weights}
    lowered = name.lower()
    parts = ((part, name) for name in names for part in {name.lower(), name.lower().rpartition("/")[2]})
    by_part = grouped(parts)
    similar = [
        local_name
        for part in {lowered: None, lowered.rpartition("/")[2]: None}
        for match in difflib.get_close_matches(part, by_part, n=MAX_NEAR, cutoff=0.7)
        for local_name in by_part[match]
    ]
    # the name of a file ends with versions and a quantization, which people leave out
    near_files = difflib.get_close_matches(path.name.lower(), files, n=MAX_NEAR, cutoff=0.7 if similar else 0.5)
    return tuple(dict.fromkeys([*similar, *(files[file] for file in near_files)]))[:MAX_NEAR]


def with_near_names(error: _Error, name: str) -> _Error:
    """The same error, with a suggestion of similar local names."""
    names = [local_name for local_name in similar_names(name) if local_name != name]
    if not names:
        return error
    return type(error)(error.problem, f"Did you mean {' or '.join(names)}? Else: {error.remedy}")
