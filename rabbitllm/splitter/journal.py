"""The journal of a split: its plan, and the shards that are used up.

`split.journal` in the split directory, lines of JSON. The first line is the content of all headers, written before the
first shard is touched, because the header of a deleted shard cannot be read again. Each further line names a shard
whose tensors are all durable in layer files, and the checksums of what was written: `crc32` of each stored part, and in
the same order `runs` of parts that span several blocks of the layer file. A line without a shard has the checksums of
layers that are complete, and lose their scratch files before their last shard is used up; or it names layers whose
files were lost, and shards that are to be used once more for them. A line that a crash truncated is ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rabbitllm.base.collection import uncollected
from rabbitllm.base.plain_json import fields_of
from rabbitllm.checkpoints.checkpoint import FileStat, SourceIdentity
from rabbitllm.checkpoints.index import model_dtype
from rabbitllm.checkpoints.naming import LayerName
from rabbitllm.errors import IncompleteSplitError
from rabbitllm.formats.gguf_types import TENSOR_TYPES
from rabbitllm.formats.tensor_spec import LeftOut, StoredBlocks, TensorPiece, TensorSpec, ValueChange
from rabbitllm.splitter.plan import PlannedShard, SplitPlan, make_plan
from rabbitllm.splitter.sums import FileSums, PartSums, TensorSums, part_sums, whole_sum
from rabbitllm.storage import durable
from rabbitllm.storage.files import read_whole
from rabbitllm.store import manifest
from rabbitllm.store.checksums import SUM_BYTES
from rabbitllm.store.layer_file import BY_NAME, FORMAT_VERSION
from rabbitllm.store.manifest import JOURNAL_NAME, MANIFEST_NAME

_NO_SUMS: FileSums = {}
JOURNAL_VERSION, MIXED_VERSION, PARTIAL_VERSION = 2, 3, 4
"""Version 1 does not record the format version of the layer files, which was the first. Version 3 has a compression for
each tensor, version 4 is a repair without all shards. Other journals keep 2, which earlier releases can resume."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A journal read back.

    Attributes:
        plan: the plan of the split.
        quantizer: as the split was begun with.
        used: shards used up so far.
        checksums: of the tensors whose writing is recorded.
        source_checksums: shard -> `source_check.source_crc32`, of used shards that have no digest.
        sound: see `begin`.
    """

    plan: SplitPlan
    quantizer: str | None
    used: frozenset[str]
    checksums: TensorSums
    source_checksums: Mapping[str, int] = field(default_factory=dict)
    sound: FileSums = field(default_factory=dict)

    def without(self, layers: Collection[str]) -> Replay:
        """The same where the files of these layers are lost: none of their shards counts as used."""
        used = self.used.difference(*(self.plan.layer_map.layer_to_shards[layer] for layer in layers))
        sound = {layer: sums for layer, sums in self.sound.items() if layer not in layers}
        return dataclasses.replace(self, used=used, sound=sound)


@uncollected()
def begin(
    folder: Path,
    plan: SplitPlan,
    quantizer: str | None,
    repair_from: str | None = None,
    sound: FileSums = _NO_SUMS,
    *,
    new: bool = False,
) -> None:
    """Write a journal with no shard used up yet, durably.

    Args:
        folder: the split directory.
        plan: the plan of the split.
        quantizer: as in the manifest.
        repair_from: of a repair, the original that the user named, "" if none; None for any other split.
        sound: of a repair, the checksums of the layers that stay as they are. The files are not summed again: damage
            that comes to them meanwhile would get the checksum of damaged bytes.
        new: refuse to replace a journal.

    Raises:
        FileExistsError: `new`, and there is one.
    """
    sums = {
        layer: [crc, None if blocks is None else b64encode(blocks).decode()] for layer, (crc, blocks) in sound.items()
    }
    mark = {} if repair_from is None else {"repair_from": repair_from, "sound": sums}
    line = json.dumps(_encode(plan, quantizer) | mark, separators=(",", ":"))
    durable.write_whole(folder / JOURNAL_NAME, (line + "\n").encode(), new=new)


def source_of(folder: Path) -> SourceIdentity | None:
    """The source of the split in a folder, finished or not; None if there is none.

    Raises:
        IncompleteSplitError: its manifest or journal is damaged.
    """
    if (finished := manifest.read_manifest(folder)) is None:
        with contextlib.suppress(FileNotFoundError):  # another process has just finished it
            if (earlier := replay(folder)) is not None:
                return earlier.plan.source
        finished = manifest.read_manifest(folder)
    return finished.source if finished is not None else None


@uncollected()
def replay(folder: Path) -> Replay | None:
    """Read the journal of an unfinished split; None if there is none.

    Raises:
        IncompleteSplitError: the journal is damaged or of an unknown version.
    """
    path = folder / JOURNAL_NAME
    if not path.exists():
        return None
    head, *lines = read_whole(path).split(b"\n")
    try:
        content = json.loads(head)
        plan, quantizer = _decode(content)
        sound = {
            layer: (int(crc), None if blocks is None else b64decode(blocks, validate=True))
            for layer, (crc, blocks) in content.get("sound", {}).items()
        }
        entries = [entry for line in lines if (entry := _parse_entry(line)) is not None]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IncompleteSplitError(
            f"{path} is not a readable split journal: {type(error).__name__} {error}.",
            "If every shard of the source is still there (or it is on the hub), delete that folder and call again. "
            "Otherwise keep it: it may hold the only copy of some tensors.",
        ) from None
    checksums: dict[str, tuple[PartSums, ...]] = {}
    for entry in entries:
        checksums |= entry.checksums
        for layer in entry.lost:
            sound.pop(layer, None)
    source_checksums = {e.shard: e.source_crc32 for e in entries if e.shard and e.source_crc32 is not None}
    return Replay(plan, quantizer, _used(entries), checksums, source_checksums, sound)


@dataclass(frozen=True, slots=True)
class UnfinishedSplit:
    """Summary of an unfinished split.

    Attributes:
        shards: all shards of the source.
        used: those of them that are used up.
        source: identity of the source.
        compression: None, one for all tensors, or "auto".
        stems: stems of the layer files.
        repair_from: see `begin`.
        is_partial: whether it is a repair without all shards.
    """

    shards: frozenset[str]
    used: frozenset[str]
    source: SourceIdentity
    compression: str | None
    stems: tuple[str, ...]
    repair_from: str | None = None
    is_partial: bool = False


def glance(folder: Path, name: str = JOURNAL_NAME) -> UnfinishedSplit | None:
    """Summarize a journal without a replay, which makes the plan again and takes seconds for 90,000 tensors.

    Return None if there is no journal, or it is damaged.
    """
    try:
        head, *lines = read_whole(folder / name).split(b"\n")
        content = json.loads(head)
        fingerprints = {shard["name"]: shard["fingerprint"] for shard in content["shards"]}
        source_kind, source, commit = content["source"]
        kept = content.get("kept", ())
        stems = *(stem for _, stem, _ in content["layers"]), *(record["stem"] for record in kept)
        compression, repair_from = content["compression"], content.get("repair_from")
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    used = _used(entry for line in lines if (entry := _parse_entry(line)) is not None)
    identity = SourceIdentity(source_kind, source, commit, fingerprints)
    return UnfinishedSplit(frozenset(fingerprints), used, identity, compression, stems, repair_from, bool(kept))


def repair_command(folder: Path, *, only_partial: bool = False) -> str | None:
    """The command that finishes an interrupted repair; None if the folder has none, or not one without all shards."""
    seen = glance(folder)
    if seen is None or seen.repair_from is None or (folder / MANIFEST_NAME).exists():
        return None
    if only_partial and not seen.is_partial:
        return None
    original = ["--original", seen.repair_from] if seen.repair_from else []
    return shlex.join(["rabbitllm", "verify", str(folder), "--repair", *original])


@dataclass(frozen=True, slots=True)
class _JournalEntry:
    """One line: the shard that is used up, if it names one, tensors' checksums, and the checksum of its source; or
    layers that were lost, and their shards."""

    shard: str | None
    checksums: TensorSums
    source_crc32: int | None
    lost: tuple[str, ...] = ()
    unused: frozenset[str] = frozenset()


def _parse_entry(line: bytes) -> _JournalEntry | None:
    """Parse a line; None for a line that a crash truncated."""
    try:
        content = json.loads(line)
        if "lost" in content:
            return _JournalEntry(None, {}, None, tuple(content["lost"]), frozenset(content["unused"]))
        shard, source_crc32 = content.get("used"), content.get("source_crc32")
        whole = {tensor: tuple(map(int, parts)) for tensor, parts in content["crc32"].items()}
        runs = content["runs"] if "runs" in content else [[""] * len(parts) for parts in whole.values()]
        sums = {
            tensor: tuple(
                part_sums(crc, b64decode(encoded, validate=True)) for crc, encoded in zip(parts, part_runs, strict=True)
            )
            for (tensor, parts), part_runs in zip(whole.items(), runs, strict=True)
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return _JournalEntry(shard, sums, source_crc32) if isinstance(shard, str | None) else None


def _used(entries: Iterable[_JournalEntry]) -> frozenset[str]:
    used: set[str] = set()
    for entry in entries:
        used -= entry.unused
        used |= {entry.shard} if entry.shard is not None else set()
    return frozenset(used)


class SplitJournal:
    """The journal of a split in progress."""

    def __init__(self, folder: Path) -> None:
        path = folder / JOURNAL_NAME
        torn = not read_whole(path).endswith(b"\n")
        self._log = durable.Log(path)
        self._complete: set[str] = set()
        if torn:  # end the line that a crash truncated, so that the next one is separate
            try:
                self._log.append("")
            except BaseException:
                self._log.close()
                raise

    def mark_used(self, shard: str, checksums: TensorSums, source_crc32: int | None = None) -> None:
        """Declare that everything taken from `shard` is durable. Only then may it be deleted.

        Fields that earlier versions of this package lack are separate, so that those can still resume the split.

        Args:
            shard: name of the shard.
            checksums: of the tensors that were written.
            source_crc32: `source_check.source_crc32` of the shard; None if it has a digest.
        """
        checksum = {} if source_crc32 is None else {"source_crc32": source_crc32}
        new = {tensor: sums for tensor, sums in checksums.items() if tensor not in self._complete}
        self._append({"used": shard, **checksum}, new)

    def mark_complete(self, checksums: TensorSums) -> None:
        """Record checksums of layers that get their names, and cannot be written again from their last shard alone."""
        self._append({}, checksums)
        self._complete.update(checksums)

    def mark_lost(self, layers: Iterable[str], unused: Iterable[str]) -> None:
        """Declare that the files of these layers are gone, and that these shards are to be used once more."""
        self._log.append(json.dumps({"lost": [*layers], "unused": sorted(unused)}))

    def _append(self, fields: Mapping[str, object], checksums: TensorSums) -> None:
        content = {
            **fields,
            "crc32": {tensor: [whole_sum(part) for part in parts] for tensor, parts in checksums.items()},
            "runs": [[b64encode(part[SUM_BYTES:]).decode() for part in parts] for parts in checksums.values()],
        }
        self._log.append(json.dumps(content, separators=(",", ":")))

    def close(self) -> None:
        self._log.close()


def settle(folder: Path) -> None:
    """Make the readable part of an earlier run's journal durable, before a shard is deleted because of it.

    Data written by a process that died is visible but may not be durable; after a sync that failed, another sync alone
    does not make it so (https://wiki.postgresql.org/wiki/Fsync_Errors). So it is written once more, in place, which
    takes no space.
    """
    path = folder / JOURNAL_NAME
    content = read_whole(path)
    with contextlib.closing(durable.GrowingFile(path, len(content))) as file:
        file.write_at(memoryview(content), 0)
        file.sync()


def _encode(plan: SplitPlan, quantizer: str | None) -> dict[str, Any]:
    source = plan.source
    return {
        "journal_version": PARTIAL_VERSION if plan.kept else JOURNAL_VERSION if plan.chosen is None else MIXED_VERSION,
        "format_version": plan.format_version,
        "source": [source.kind, source.name, source.commit],
        "compression": plan.compression,
        **({} if plan.chosen is None else {"chosen": plan.chosen.as_json()}),
        **({} if plan.dtype is None else {"dtype": plan.dtype}),
        **({"kept": [*map(manifest.record_as_json, plan.kept)]} if plan.kept else {}),
        "quantiser": quantizer,
        "shards": [
            {
                **fields_of(shard, "name", "size", "fingerprint", "staged"),
                "tensors": [_encode_tensor(tensor) for tensor in shard.tensors],
                **({} if shard.header_first else {"header_first": False}),
                **({} if shard.stat is None else {"stat": dataclasses.astuple(shard.stat)}),
                **({} if shard.expected_crc32 is None else {"expected_crc32": shard.expected_crc32}),
                **({"left_out": shard.left_out} if shard.left_out else {}),
                **({"metadata": shard.metadata} if shard.metadata else {}),
            }
            for shard in plan.shards
        ],
        "layers": [
            [name.id, name.stem, plan.layer_map.layer_to_tensors[layer]]
            for layer, name in plan.layer_map.layers.items()
        ],
    }


def _encode_tensor(tensor: TensorSpec) -> list[object]:
    """Encode a tensor; the fields that few tensors have come last and are omitted if None: strides, view, piece,
    blocks."""
    piece, blocks = tensor.piece, tensor.blocks
    cut = None if piece is None else [piece.of, piece.shape, piece.dim, piece.begin]
    stored = None if blocks is None else [blocks.kind.name, blocks.nbytes, blocks.change.value, blocks.may_stay]
    optional = [tensor.strides, tensor.view, cut, stored]
    while optional and optional[-1] is None:
        optional.pop()
    return [tensor.name, tensor.dtype, tensor.shape, tensor.offset, tensor.nbytes, *optional]


def _decode_tensor(shard: str, content: list[Any]) -> TensorSpec:
    name, dtype, shape, offset, nbytes, *optional = content
    strides, view, cut, stored = (*optional, None, None, None, None)[:4]
    strides, view = (None if part is None else tuple(part) for part in (strides, view))
    piece = None if cut is None else TensorPiece(cut[0], tuple(cut[1]), *cut[2:])
    blocks = stored and StoredBlocks(TENSOR_TYPES[stored[0]], stored[1], ValueChange(stored[2]), *stored[3:])
    return TensorSpec(name, dtype, tuple(shape), shard, offset, nbytes, strides, view, piece, blocks)


def _decode(content: dict[str, Any]) -> tuple[SplitPlan, str | None]:
    version = content["journal_version"]
    if version not in (1, JOURNAL_VERSION, MIXED_VERSION, PARTIAL_VERSION):
        raise ValueError(f"journal version {version}, expected {JOURNAL_VERSION} to {PARTIAL_VERSION}")
    layout = BY_NAME if version == 1 else content["format_version"]
    if layout not in range(BY_NAME, FORMAT_VERSION + 1):
        raise ValueError(f"layer files of format version {layout}, expected at most {FORMAT_VERSION}")
    shards = tuple(
        PlannedShard(
            shard["name"],
            shard["size"],
            shard["fingerprint"],
            tuple(_decode_tensor(shard["name"], tensor) for tensor in shard["tensors"]),
            shard["staged"],
            shard.get("header_first", True),
            FileStat(*map(int, shard["stat"])) if "stat" in shard else None,
            shard.get("expected_crc32"),
            tuple(LeftOut(name, int(nbytes), int(count)) for name, nbytes, count in shard.get("left_out", ())),
            dict(shard.get("metadata", {})),
        )
        for shard in content["shards"]
    )
    source_kind, name, commit = content["source"]
    source = SourceIdentity(source_kind, name, commit, {shard.name: shard.fingerprint for shard in shards})
    assigned = {tensor: LayerName(id, stem) for id, stem, tensors in content["layers"] for tensor in tensors}
    chosen, dtype = manifest.allocation_in(content), model_dtype(content.get("dtype"))
    kept = tuple(map(manifest.record_from_json, content.get("kept", ())))
    plan = make_plan(source, shards, assigned, content["compression"], layout, chosen, dtype, kept=kept)
    return plan, content["quantiser"]
