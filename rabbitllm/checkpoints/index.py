"""The index of a checkpoint: tensor name -> shard, from `*.index.json` or derived from a single file; and the choice
of the file with which a folder's checkpoint begins.

Format: the `weight_map` that transformers writes for sharded weights
(https://huggingface.co/docs/transformers/big_models#sharded-checkpoints). An index is downloaded, so its shard names
are checked before they are used to open or delete a file.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import MappingProxyType

from rabbitllm.base.logs import warn_once
from rabbitllm.base.terminal import listed
from rabbitllm.errors import CheckpointNotFoundError, InvalidIndexError, UnsafePathError
from rabbitllm.formats.bounded import read_json, short
from rabbitllm.formats.gguf import MAGIC, begins_gguf
from rabbitllm.formats.safetensors_file import TensorToWrite
from rabbitllm.formats.shard_header import HEAD_BYTES, READABLE, Weights, recognise
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec
from rabbitllm.storage.files import file_opener

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"
TORCH_SINGLE_NAME = "pytorch_model.bin"
ENTRY_NAMES = (SINGLE_NAME, INDEX_NAME, TORCH_SINGLE_NAME, TORCH_INDEX_NAME)
"""File names that a checkpoint may begin with, preferred ones first, in transformers' order."""
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of files of `torch.save`; their format is recognised by their first bytes."""
GGUF_SUFFIX = ".gguf"
SAFETENSORS_SUFFIX = ".safetensors"
WEIGHT_SUFFIXES = (SAFETENSORS_SUFFIX, *TORCH_SUFFIXES, GGUF_SUFFIX)
"""Suffixes of files of weights that can be read here."""
_NO_MODEL = re.compile(
    r"(?:optimizer|optim|scheduler|scaler|rng_state|random_states|training_args|trainer_state|adapter_model)(?:[._-].*)?"
)
"""Files of a training run without a model: state of the optimizer and similar, arguments, adapters."""
ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's file of settings, in the folder of an adapter's weights."""
META_PARAMETERS = "params.json"
"""The file with which a checkpoint in Meta's own format begins."""
_GGUF_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})(?P<of>-of-)(?P<count>\d{5})(?P<ending>\.gguf)", re.IGNORECASE)
_NO_GGUF_MODEL = re.compile(r"(?:.*[-_.])?(?:mmproj|imatrix|vocab)(?:[-_.].*)?\.gguf", re.IGNORECASE)
"""Files without a model: a vision encoder, a calibration, a vocabulary."""
MAX_GGUF_FILES = 4096
_RANK = re.compile(r"consolidated\.\d{1,4}\.pth")

_SEGMENT = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._+@()\[\] -]{0,198}[A-Za-z0-9_+@()\[\]-])?")
"""At most 200 characters, since file systems allow 255 and suffixes are appended; no trailing dot or space, which
Windows drops."""
_ODD = re.compile(r"[^/\\:.~$%-][^/\\:~$%]{0,198}\.(?:safetensors|bin|pt|pth)")
"""Names that their owner may have given, such as `modèle.safetensors`, but not those that lead to another folder."""
_DEVICE = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?", re.IGNORECASE)
"""Names that Windows opens as a device, in any folder."""
_REMEDY = "Download the index again."
_HOSTILE = "Do not use this checkpoint: an honest index has no such name. Nothing was opened or deleted."
_RENAME = (
    "Rename the file, and its name in the index: letters of English, digits, spaces and ._-+@()[] are read. Nothing "
    "was opened or deleted."
)
_LINKS = (
    "A link may lead to a file of weights, to an index, or to a small file in the folder of such weights. Put the file "
    "itself (or a hard link) into the folder. Nothing was deleted."
)
_SHARD = re.compile(r"-\d+-of-\d+\.")
_DIGITS = re.compile(r"(\d+)")
MODEL_DTYPES = {name: DTYPES[name].torch_name for name in ("F64", "F32", "F16", "BF16")}
"""Dtypes that a model may have: name in safetensors -> name in torch."""


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """The shard of each tensor.

    Attributes:
        weight_map: tensor name -> shard name, in the index's own order.
        shards: every shard once, in numerical order (`-2-` before `-10-`).
        dtype: of the model, where the index names one: a torch name such as "bfloat16".
    """

    weight_map: Mapping[str, str]
    shards: tuple[str, ...]
    dtype: str | None = None


def shard_names(count: int) -> tuple[str, ...]:
    """The names of `count` shards, as transformers writes them."""
    return tuple(f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1))


def entry_of(names: Iterable[str], label: str) -> str:
    """The file with which a checkpoint begins: its index, or the one file that holds all its tensors, or Meta's
    params.json if the folder holds weights in Meta's format, or the first GGUF file.

    Args:
        names: names of the files in the folder.
        label: the folder's name in messages.

    Raises:
        CheckpointNotFoundError: there is none; or several torch files without an index, or several models as GGUF.
    """
    files = set(names)
    for name in ENTRY_NAMES:
        if name in files:
            return name
    torch_files = sorted(filter(_is_torch_file, files), key=natural_key)
    if META_PARAMETERS in files and any(map(is_rank, torch_files)):
        return META_PARAMETERS
    if len(torch_files) == 1:
        return torch_files[0]
    if not torch_files and (models := gguf_models(files)):
        if len(models) == 1:
            return models[0]
        raise CheckpointNotFoundError(
            f"{label} holds {len(models)} GGUF models: {listed(models)}.",
            "Name one: the path of its file, or organisation/name:Q4_K_M with its quantization.",
        )
    if len([name for name in torch_files if is_rank(name)]) > 1:
        raise CheckpointNotFoundError(
            f"{label} has Meta weights ({listed(torch_files)}) but no {META_PARAMETERS}.",
            f"Put the {META_PARAMETERS} that was published with them into the same folder.",
        )
    if torch_files:
        raise CheckpointNotFoundError(
            f"{label} has several weight files and no index: {listed(torch_files)}.",
            f"Leave one in the folder, name it {TORCH_SINGLE_NAME}, or add a {TORCH_INDEX_NAME}.",
        )
    raise _no_checkpoint_error(files, label)


def remark_on(entry: str, names: Collection[str], label: str) -> None:
    """Warn once of files in the folder of a checkpoint that a user may expect to be used.

    Args:
        entry: the file with which the checkpoint begins.
        names: of all files in its folder.
        label: the folder's name in messages.
    """
    if ADAPTER_CONFIG in names:
        text = (
            "%s has an adapter (%s) in the folder of the weights. It is not applied: the weights are used as they are."
        )
        warn_once(logger, text, label, ADAPTER_CONFIG)
    index = {SINGLE_NAME: INDEX_NAME, TORCH_SINGLE_NAME: TORCH_INDEX_NAME}.get(entry)
    if index is not None and index in names:
        text = "%s has both %s and %s. The single file is used, as by transformers; move it away to use the shards."
        warn_once(logger, text, label, entry, index)


def has_format_of(entry: str, shards: Iterable[str]) -> bool:
    """Whether the checkpoint that begins with a file has the format of any of these shards, by its suffix."""
    suffix = PurePath(entry.removesuffix(".index.json")).suffix
    return any(shard.endswith(suffix) for shard in shards)


def is_index(entry: str) -> bool:
    """Whether the first file of a checkpoint is an index, not weights."""
    return entry.endswith(".index.json")


def is_meta(entry: str) -> bool:
    """Whether a checkpoint that begins with this file is in Meta's own format."""
    return entry == META_PARAMETERS


def is_rank(name: str) -> bool:
    """Whether a file name is that of a rank in Meta's own format."""
    return _RANK.fullmatch(name) is not None


def is_gguf(name: str) -> bool:
    """Whether a file name is that of a GGUF file."""
    return name.lower().endswith(GGUF_SUFFIX)


def is_gguf_file(path: Path) -> bool:
    """Whether a local file is GGUF: by its name, or by its first bytes if its name says nothing (Ollama's blobs)."""
    if is_gguf(path.name):
        return True
    if path.name.endswith((*WEIGHT_SUFFIXES, ".json")) or not path.is_file():
        return False
    with contextlib.suppress(OSError), path.open("rb") as file:
        return begins_gguf(file.read(len(MAGIC)))
    return False


def gguf_stem(name: str) -> str:
    """The name of a GGUF file without its suffix."""
    return name[: -len(GGUF_SUFFIX)] if is_gguf(name) else name


_GGUF_TYPE = re.compile(
    r"[-_.](?P<type>I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|F16|F32)(?=[-.]|$)", re.IGNORECASE
)
GGUF_TYPE = "general.file_type"
"""Key of a header's metadata: the name of the type of most tensors in a GGUF file."""


def gguf_label(shards: Iterable[str], metadata: Mapping[str, Mapping[str, str]] = MappingProxyType({})) -> str | None:
    """How people name the weights of GGUF files, "GGUF Q4_K_M"; None if they are of another format.

    Args:
        shards: names of the files. Only GGUF files may have no suffix.
        metadata: of their headers, as far as it is known; else the names of the files tell the type.
    """
    files = [name for name in shards if is_gguf(name) or not name.endswith(WEIGHT_SUFFIXES)]
    if not files:
        return None
    recorded = (metadata[name].get(GGUF_TYPE) for name in files if name in metadata)
    named = (match["type"].upper() for name in files for match in _GGUF_TYPE.finditer(gguf_stem(name)))
    return f"GGUF {next(filter(None, recorded), None) or next(named, '')}".rstrip()


def gguf_named(folder: Path, stem: str) -> str:
    """The name of the GGUF file in a folder that has this stem."""
    usual = stem + GGUF_SUFFIX
    if (folder / usual).exists():
        return usual
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return next((name for name in names if is_gguf(name) and gguf_stem(name) == stem), stem if stem in names else usual)


def gguf_models(names: Iterable[str]) -> list[str]:
    """The first file of each model among GGUF files, sorted; files without a model are left out."""
    models = set()
    for name in names:
        if is_gguf(name) and not _NO_GGUF_MODEL.fullmatch(name.rpartition("/")[2]):
            part = _GGUF_PART.fullmatch(name)
            models.add(_part_name(part, 1) if part else name)
    return sorted(models, key=natural_key)


def gguf_files(entry: str) -> tuple[str, ...]:
    """All files of the model that a file belongs to, in the order of use: the first, which has the metadata, last.

    Raises:
        InvalidIndexError: its name counts too many files.
    """
    part = _GGUF_PART.fullmatch(entry)
    if part is None:
        return (entry,)
    count = int(part["count"])
    if not 1 <= int(part["number"]) <= count <= MAX_GGUF_FILES:
        raise InvalidIndexError(
            f"{entry} is file {part['number']} of {part['count']}; expected 1 to {MAX_GGUF_FILES:,} files.",
            "Download the files again, with their names.",
        )
    return tuple(_part_name(part, number) for number in (*range(2, count + 1), 1))


def _part_name(part: re.Match[str], number: int) -> str:
    return f"{part['stem']}-{number:05}{part['of']}{part['count']}{part['ending']}"


def names_quantization(name: str, quantization: str) -> bool:
    """Whether the name of a file (or of its folder) names a quantization, such as Q4_K_M, in any case."""
    return re.search(rf"(?:^|[-_./]){re.escape(quantization)}(?:[-_./]|$)", name, re.IGNORECASE) is not None


def gguf_entry(names: Iterable[str], quantization: str | None, label: str) -> str | None:
    """The first GGUF file of the model that the user names; None if the repository has other weights.

    Args:
        names: of all files, also those in folders.
        quantization: as the user named it; None if the repository should have one model only.
        label: the repository's name in messages.

    Raises:
        CheckpointNotFoundError: there is no such model, or it is not clear which.
    """
    files = list(names)
    models = gguf_models(files)
    if quantization is None:
        weights = [name for name in files if "/" not in name and name.endswith(WEIGHT_SUFFIXES) and not is_gguf(name)]
        if not models or weights:
            return None
        fitting = models
    else:
        fitting = [name for name in models if names_quantization(name, quantization)]
    if len(fitting) == 1:
        return fitting[0]
    if not models:
        raise CheckpointNotFoundError(
            f"{label} holds no GGUF model; {quantization!r} is the name of one.", "Remove the part after the colon."
        )
    matching = "" if quantization is None else f" {len(fitting)} of them match {quantization!r}."
    raise CheckpointNotFoundError(
        f"{label} holds the GGUF models {listed(models)}.{matching}",
        "Name one by its quantization, as organisation/name:Q4_K_M.",
    )


def gguf_number(name: str) -> int | None:
    """The number of a GGUF file within its set, from 1; None if its name has none."""
    part = _GGUF_PART.fullmatch(name)
    return None if part is None else int(part["number"])


def _is_torch_file(name: str) -> bool:
    stem = next((name.removesuffix(suffix) for suffix in TORCH_SUFFIXES if name.endswith(suffix)), "")
    return bool(_SEGMENT.fullmatch(name)) and bool(stem) and not _NO_MODEL.fullmatch(stem)


def _no_checkpoint_error(files: Collection[str], label: str) -> CheckpointNotFoundError:
    weights = sorted(name for name in files if name.endswith(WEIGHT_SUFFIXES))
    contents = f"the weights {listed(weights)}" if weights else listed(sorted(files), 3) if files else "no files"
    remedy = "Use the folder that holds the weights, or a repository id."
    if ADAPTER_CONFIG in files:
        remedy = (
            f"These are the files of an adapter. Load the model that its {ADAPTER_CONFIG} names, and then the adapter: "
            "peft.PeftModel.from_pretrained(model, folder)."
        )
    elif any(map(_SHARD.search, weights)):
        remedy = f"Put the index of these shards ({INDEX_NAME}) next to them; it was published with them."
    elif weights:
        remedy = (
            "Use the complete model (safetensors or torch.save files); apply adapters after loading. If one file of "
            f"safetensors is the whole model, name it {SINGLE_NAME}."
        )
    return CheckpointNotFoundError(
        f"{label} holds no checkpoint: looked for {', '.join(ENTRY_NAMES)}, a single file of torch.save, and GGUF; "
        f"found {contents}.",
        remedy,
    )


def natural_key(name: str) -> tuple[object, ...]:
    """A sort key that puts `shard-2` before `shard-10`, whatever the padding."""
    pieces = _DIGITS.split(name)  # text and digits in turns, text first
    key: list[object] = [*pieces]
    for index, digits in enumerate(pieces[1::2]):  # numeric order without int(): there may be thousands of digits
        significant = digits.lstrip("0")
        key[2 * index + 1] = (len(significant), significant, digits)
    return tuple(key)


def index_of(weight_map: Mapping[str, str], dtype: str | None = None) -> CheckpointIndex:
    """An index from a weight map; the caller checks the names of shards."""
    return CheckpointIndex(dict(weight_map), tuple(sorted(set(weight_map.values()), key=natural_key)), dtype)


def read_index(path: Path) -> CheckpointIndex:
    """Read and check an index file.

    Raises:
        InvalidIndexError: no `weight_map` of strings, or an empty one.
        UnsafePathError: a shard name is not a plain relative name, or two names can become one file.
    """
    content = read_json(path)
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidIndexError(f"{path} has no weight_map; expected a table of tensor name to shard.", _REMEDY)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise InvalidIndexError(
                f"{path} puts tensor {tensor[:80]!r} into {short(shard, 120)}; expected the name of a shard.", _REMEDY
            )
    dtype = metadata.get("dtype") if isinstance(metadata, dict) else None
    index = index_of(weight_map, dtype if dtype in MODEL_DTYPES.values() else None)
    _check_shard_names(index.shards, path.name)
    return index


def model_dtype(value: object) -> str | None:
    """A recorded dtype of a model: a torch name, or None.

    Raises:
        ValueError: it is something else.
    """
    if value is not None and value not in MODEL_DTYPES.values():
        raise ValueError(f"{value!r} is not a dtype of a model")
    return str(value) if value is not None else None


def dtype_without_config(
    index: CheckpointIndex, files: Mapping[str, Iterable[TensorSpec | TensorToWrite]]
) -> str | None:
    """The dtype of a model whose config names none, by transformers' rule: that of the index, else of the first
    floating-point tensor in the first file. A safetensors file is read in the order of names, a torch file in its own.

    Args:
        index: of the checkpoint.
        files: the tensors of each file, by the file's name.

    Returns:
        A torch name, such as "bfloat16"; None if all floating-point tensors have that dtype, or there are none. Floats
        of a byte or less do not count.
    """
    floats = {file: [tensor for tensor in tensors if tensor.dtype in MODEL_DTYPES] for file, tensors in files.items()}
    first = min(files, default="")
    rows = floats.get(first, [])
    if first.endswith(SAFETENSORS_SUFFIX):
        rows = sorted(rows, key=lambda tensor: tensor.name)
    dtype = index.dtype or (MODEL_DTYPES[rows[0].dtype] if rows else None)
    return None if {MODEL_DTYPES[spec.dtype] for specs in floats.values() for spec in specs} <= {dtype} else dtype


def check_shard_name(shard: str, source: str) -> None:
    """Refuse a shard name that is not one or two plain path segments.

    Raises:
        UnsafePathError: an absolute path, `..`, a drive letter, a backslash, a control character, more than two
            segments, a Windows device, or longer than file systems allow.
    """
    segments = shard.split("/")
    if len(segments) > 2 or not all(_SEGMENT.fullmatch(part) and not _DEVICE.fullmatch(part) for part in segments):
        is_odd = bool(_ODD.fullmatch(shard)) and shard.isprintable() and not _DEVICE.fullmatch(shard)
        raise UnsafePathError(
            f"{source} names the shard {short(shard, 120)}; expected a plain file name inside the checkpoint's own "
            "folder.",
            _RENAME if is_odd else _HOSTILE,
        )


def _check_shard_names(shards: Iterable[str], source: str) -> None:
    """Refuse names that `check_shard_name` refuses, and names that differ only in case, or only in `/` and `--` (by
    which it is replaced in staging): deleting one would delete the other."""
    shards_by_key: dict[str, str] = {}
    for shard in shards:
        check_shard_name(shard, source)
        other = shards_by_key.setdefault(shard.casefold().replace("/", "--"), shard)
        if other != shard:
            raise UnsafePathError(
                f"{source} names the shards {short(other, 120)} and {short(shard, 120)}, the same file on some disks; "
                "expected names that differ in more than case and slashes.",
                _HOSTILE,
            )


def _begins_checkpoint(file: Path, name: str) -> bool:
    """Whether a file begins like weights of a known format; like JSON, if an index leads to it."""
    try:
        with open(file, "rb", opener=file_opener) as opened:
            head = opened.read(HEAD_BYTES)
    except OSError:
        return False
    if is_index(name) or is_meta(name):
        return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    return recognise(head) in (*READABLE, Weights.POINTER)


def check_inside(path: Path, folder: Path, linked_folders: Collection[Path] | None = None) -> None:
    """Refuse a file that a symbolic link leads out of its folder, and existing paths that are not files.

    Weights may be links, since people keep them on another disk. So a link may lead to a file that begins like weights
    or, for an index, like JSON; only that beginning is read here.

    Args:
        path: the file, in the folder.
        folder: the checkpoint's folder.
        linked_folders: for a file without weights, which a split copies: the resolved folders of linked weights, into
            which a link may lead.

    Raises:
        UnsafePathError: a link leads to something else outside; or the path is a folder, a pipe or a device.
    """
    try:
        resolved = path.resolve()
        is_cycle = resolved.is_symlink()  # since Python 3.13 that is no error
    except (OSError, RuntimeError):
        is_cycle = True
    if is_cycle:
        raise UnsafePathError(f"{path} is a link that leads to itself; expected a file.", _LINKS)
    is_inside = resolved.is_relative_to(folder.resolve())
    if not is_inside and resolved.is_file():
        is_inside = (
            _begins_checkpoint(resolved, path.name) if linked_folders is None else resolved.parent in linked_folders
        )
    if not is_inside:
        raise UnsafePathError(f"{path} is a link that leads outside its folder, to {resolved}.", _LINKS)
    if resolved.exists() and not resolved.is_file():  # opening a pipe blocks until a writer opens it
        raise UnsafePathError(f"{path} is not a regular file; expected one with weights.", _LINKS)
