"""An inspection as text for people (a summary, then a table) and as a JSON object. Decides nothing and opens nothing.

Laid out for 80 columns; columns that do not fit are left out of the table, with a note. Outside a terminal every row
is one plain line with all columns. The JSON has everything in the report, with exact numbers and nothing shortened.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.text import Text

from rabbitllm.base.terminal import Column, counted, harmless, large, listed, put, put_fact, put_table, size
from rabbitllm.formats.pickle_reader import ListedOpcode
from rabbitllm.formats.sentencepiece_model import (
    NormalizerSpec,
    PieceType,
    SentencePieceModel,
    TrainerSpec,
    VocabularyPiece,
)
from rabbitllm.models.inspection import Content, Inspection, Pickle, ShardMap, TensorInfo, Tensors

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowChoice:
    """A choice of rows.

    Attributes:
        name: a substring of names, or a pattern with `*`, `?` or `[]` for whole names; None for all.
        skip: number of rows to skip.
        limit: limit of rows to show; None for all.
    """

    name: str | None = None
    skip: int = 0
    limit: int | None = None

    def matches(self, text: str) -> bool:
        """Whether a name is chosen."""
        if self.name is None:
            return True
        if any(sign in self.name for sign in "*?["):
            return fnmatch.fnmatchcase(text, self.name)
        return self.name in text

    def of(self, rows: Sequence[T], name_of: Callable[[T], str]) -> tuple[Sequence[T], int, int]:
        """The rows to show, the number of rows whose name matches, and the number of these after the last row shown."""
        matching = rows if self.name is None else [row for row in rows if self.matches(name_of(row))]
        end = len(matching) if self.limit is None else self.skip + self.limit
        shown = matching[self.skip : end]
        return shown, len(matching), max(len(matching) - self.skip - len(shown), 0)


@dataclass(frozen=True, slots=True)
class _Listing(Generic[T]):
    """Rows of one kind.

    Attributes:
        noun: singular noun.
        items: all of them.
        name_of: the text of one that `--name` is matched against.
        columns, row_of: for the table.
        record_of: for JSON.
        collect: makes the JSON of the chosen ones' records.
    """

    noun: str
    items: Sequence[T]
    name_of: Callable[[T], str]
    columns: Sequence[Column]
    row_of: Callable[[T], Sequence[str]]
    record_of: Callable[[T], Any]
    collect: Callable[[Iterable[Any]], Any] = list

    def record(self, key: str, choice: RowChoice) -> dict[str, Any]:
        """The chosen rows under a key, and the number of those left out after them."""
        shown, _, remaining = choice.of(self.items, self.name_of)
        return {key: self.collect(map(self.record_of, shown)), "more": remaining}

    def show(self, choice: RowChoice, console: Console) -> None:
        """Print a table, and a line below it about the rows that it leaves out."""
        shown, matching, remaining = choice.of(self.items, self.name_of)
        if choice.name is not None:
            matches = f"{counted(matching, self.noun)} of {len(self.items):,}"
            put(console, Text(f"{harmless(choice.name)!r} matches {matches}", "dim"))
        if not shown:
            if matching:
                put(console, Text(f"--skip {choice.skip:,} skips all of {counted(matching, self.noun)}", "dim"))
            return
        narrow = put_table(console, self.columns, [self.row_of(item) for item in shown])
        if remaining:
            put(console, Text(f"… and {remaining:,} more; --limit 0 shows all, --name a part of them", "dim"))
        if narrow:
            put(console, Text(f"too narrow for {', '.join(narrow)}: a wider terminal or --json has them", "dim"))


def _tensors(content: Tensors) -> _Listing[TensorInfo]:
    columns = [Column("name"), Column("dtype"), Column("shape")]
    if has_strides := content.strided > 0:  # elsewhere they say what the shapes do
        columns.append(Column("stride", rank=3))
    columns += [Column("offset", right=True, rank=2), Column("bytes", right=True, rank=4), Column("layer", rank=6)]
    several = len({tensor.file for tensor in content.tensors}) > 1
    if several:
        columns.append(Column("file", rank=1))
    elif any(tensor.storage for tensor in content.tensors):
        columns.append(Column("storage", rank=5))

    def row(t: TensorInfo) -> Sequence[str]:
        strides = [str([*t.strides])] if has_strides else []
        numbers = str([*t.shape]), *strides, f"{t.offset:,}", f"{t.nbytes:,}"
        last = t.file if several else t.storage or ""
        return (harmless(t.name), t.dtype, *numbers, harmless(t.layer), last)[: len(columns)]

    def record(t: TensorInfo) -> dict[str, Any]:
        form = {"name": t.name, "dtype": t.dtype, "shape": [*t.shape], "stride": [*t.strides]}
        return form | {"offset": t.offset, "bytes": t.nbytes, "layer": t.layer, "file": t.file, "storage": t.storage}

    return _Listing("tensor", content.tensors, lambda t: t.name, columns, row, record)


def _pieces(model: SentencePieceModel) -> _Listing[VocabularyPiece]:
    return _Listing(
        "piece",
        model.pieces,
        lambda piece: piece.text,
        [Column("id", right=True), Column("piece"), Column("score", right=True), Column("type")],
        lambda p: (str(p.id), harmless(p.text, VALUE), score(p.score), p.type.name.lower().replace("_", " ")),
        lambda p: {"id": p.id, "piece": p.text, "score": p.score, "type": p.type.name.lower()},
    )


def _pairs(pairs: Mapping[str, Any], key: str, value: str) -> _Listing[tuple[str, Any]]:
    return _Listing(
        key,
        [*pairs.items()],
        lambda pair: pair[0],
        [Column(key), Column(value)],
        lambda pair: (harmless(pair[0]), harmless(_compact_json(pair[1]), VALUE)),
        lambda pair: pair,
        dict,
    )


def _opcodes(pickle: Pickle) -> _Listing[ListedOpcode]:
    return _Listing(
        "opcode",
        pickle.opcodes,
        lambda o: f"{o.name} {o.argument}",
        [Column("byte", right=True), Column("opcode"), Column("argument")],
        lambda o: (f"{o.position:,}", "  " * min(o.depth, DEEPEST) + o.name, harmless(o.argument, VALUE)),
        lambda o: {"byte": o.position, "opcode": o.name, "argument": o.argument},
    )


def _listings(content: Content | None) -> Iterator[tuple[str, _Listing[Any]]]:
    """The rows of what is not a file's pickles, with their name in JSON."""
    match content:
        case Tensors():
            yield "tensors", _tensors(content)
        case SentencePieceModel():
            yield "pieces", _pieces(content)
        case dict():
            yield "entries", _pairs(content, "key", "value")
        case ShardMap(weight_map, _):
            yield "weight_map", _pairs(weight_map, "name", "file")


def as_record(result: Inspection, choice: RowChoice) -> dict[str, Any]:
    """The record for `json.dump`. The summary covers everything, the rows are those of the choice."""
    record: dict[str, Any] = {"source": result.source, "format": result.format, "bytes": result.size}
    if result.shards:
        record |= {"files": dict(result.shards), "missing": list(result.absent), "beside": list(result.beside)}
    match result.content:
        case Tensors() as content:
            record |= {"tensor_count": len(content.tensors), "tensor_bytes": content.nbytes}
            record |= {"parameters": content.parameters, "dtypes": dict(content.dtypes)}
            record |= {"layers": list(content.layers), "sharing": content.sharing, "strided": content.strided}
            record |= {"metadata": dict(content.metadata), "left_out": list(content.left_out)}
            if content.left_tensors:
                record["left_out_bytes"] = {group.name: group.nbytes for group in content.left_tensors}
        case SentencePieceModel() as model:
            record |= _vocabulary_record(model)
        case ShardMap(weight_map, metadata):
            record |= {"metadata": dict(metadata), "shards": dict(Counter(weight_map.values()))}
        case tuple() as pickles:
            record["pickles"] = [_pickle_record(pickle, choice) for pickle in pickles]
    for key, listing in _listings(result.content):
        record |= listing.record(key, choice)
    if result.refusal is not None:
        error = type(result.refusal).__name__
        record["refused"] = {"error": error, "problem": result.refusal.problem, "remedy": result.refusal.remedy}
    return record


def _vocabulary_record(model: SentencePieceModel) -> dict[str, Any]:
    denormalizer = model.denormalizer
    return {
        "piece_count": len(model.pieces),
        "types": {kind.name.lower(): count for kind, count in _types_of(model)},
        "special_ids": dataclasses.asdict(model.special_ids()),
        "trainer": {**dataclasses.asdict(model.trainer), "model_type": model.trainer.model_type.name.lower()},
        "normalizer": dataclasses.asdict(model.normalizer),
        "denormalizer": None if denormalizer is None else dataclasses.asdict(denormalizer),
    }


def _pickle_record(pickle: Pickle, choice: RowChoice) -> dict[str, Any]:
    about = {"name": pickle.name, "bytes": pickle.nbytes, "opcode_count": len(pickle.opcodes)}
    return {**about, **_opcodes(pickle).record("opcodes", choice), "stopped": pickle.stopped}


ON_A_TERMINAL = 50
"""Default number of rows on a terminal."""
VALUE = 100
"""Limit of characters of a value, a piece or an opcode's argument in a table."""
DEEPEST = 12
"""Limit of nested marks by which a listing is indented; a pickle may open a thousand."""
_SOME = 12
_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})")


def show(result: Inspection, choice: RowChoice, console: Console) -> None:
    """Print an inspection."""
    put(console, Text(harmless(result.source, 4096), "bold"))
    console.print()
    for name, value in _facts(result):
        put_fact(console, name, value)
    if result.content is not None:
        console.print()
        _show_content(result.content, choice, console)
    console.file.flush()


def _facts(result: Inspection) -> Iterator[tuple[str, str]]:
    yield "format", result.format
    files = f" in {counted(len(result.shards), 'file')}" if result.shards else ""
    exactly = f" ({result.size:,} bytes)" if "byte" not in size(result.size) else ""
    yield "size", f"{size(result.size)}{exactly}{files}"
    if result.absent:
        yield "missing", f"{counted(len(result.absent), 'shard')}: {_list_some(result.absent)}"
    match result.content:
        case Tensors():
            yield from _tensor_facts(result.content)
        case SentencePieceModel():
            yield from _vocabulary_facts(result.content)
        case ShardMap():
            yield from _shard_map_facts(result.content)
        case tuple():
            yield from _pickle_facts(result.content)
    if result.beside:
        yield "other files", _list_some(result.beside)
    if result.has_pickle and not isinstance(result.content, tuple):
        yield "pickle", "--opcodes lists it; nothing of it is run"
    if result.refusal is not None:
        yield "refused", "see the error below"


def _tensor_facts(tensors: Tensors) -> Iterator[tuple[str, str]]:
    kinds = ", ".join(f"{count:,} {dtype}" for dtype, count in tensors.dtypes.items())
    yield "tensors", f"{len(tensors.tensors):,}, {size(tensors.nbytes)}: {kinds}" if kinds else "0"
    yield "parameters", large(tensors.parameters)
    yield "layer files", f"{len(tensors.layers):,}: {_list_some(runs(tensors.layers))}" if tensors.layers else "0"
    if heads := tensors.heads:
        nbytes = size(sum(tensor.nbytes for tensor in tensors.tensors if tensor.layer in heads))
        use = f"not used: {tensors.why_no_heads}" if tensors.why_no_heads else "for --draft mtp"
        yield "heads", f"{_list_some(heads)} ({nbytes}, multi-token prediction), {use}"
    if tensors.sharing:
        yield "shared", f"{counted(tensors.sharing, 'tensor')} in the bytes of others"
    if tensors.strided:
        yield "strided", f"{counted(tensors.strided, 'tensor')} not in row-major order"
    if tensors.left_tensors:
        yield "left out", f"{_list_some([*map(str, tensors.left_tensors)])}: a split keeps the file for it"
    if keys := [key for key in tensors.left_out if key not in {group.name for group in tensors.left_tensors}]:
        yield "left out", f"{_list_some(keys)}: no weights"
    if tensors.metadata:
        yield "metadata", _list_some([f"{key}={value}" for key, value in tensors.metadata.items()])


def runs(layers: Iterable[str]) -> list[str]:
    """Ranges of layers with consecutive numbers: `layers.0 to layers.31`."""

    def key(numbered_layer: tuple[int, str]) -> tuple[str, object]:
        index, layer = numbered_layer
        numbered = _NUMBERED.fullmatch(layer)
        return (layer, (index,)) if numbered is None else (numbered[1], int(numbered[2]) - index)

    ranges = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), key)]
    return [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in ranges]


def _vocabulary_facts(model: SentencePieceModel) -> Iterator[tuple[str, str]]:
    types = ", ".join(f"{count:,} {kind.name.lower()}" for kind, count in _types_of(model))
    yield "pieces", f"{len(model.pieces):,}: {types.replace('_', ' ')}"
    ids = dataclasses.asdict(model.special_ids()).items()
    yield "special ids", ", ".join(f"{name} {token}" if token >= 0 else f"no {name}" for name, token in ids)
    yield "model type", model.trainer.model_type.name.lower()
    yield "trainer", _spec_text(model.trainer)
    yield "normaliser", _spec_text(model.normalizer)
    if model.denormalizer is not None:
        yield "denormaliser", _spec_text(model.denormalizer)


def _types_of(model: SentencePieceModel) -> list[tuple[PieceType, int]]:
    return Counter(piece.type for piece in model.pieces).most_common()


def _spec_text(spec: TrainerSpec | NormalizerSpec) -> str:
    """The fields of a spec that differ from their defaults; the JSON has all of them."""
    values = [(field, getattr(spec, field.name)) for field in dataclasses.fields(spec) if field.name != "model_type"]
    texts = [f"{field.name}={harmless(str(value), VALUE)}" for field, value in values if value != field.default]
    return ", ".join(texts) or "all defaults"


def _shard_map_facts(index: ShardMap) -> Iterator[tuple[str, str]]:
    shards = Counter(index.weight_map.values())
    yield "tensors", f"{len(index.weight_map):,} in {counted(len(shards), 'shard')}"
    if index.metadata:
        yield "metadata", _list_some([f"{key}={_compact_json(value)}" for key, value in index.metadata.items()])


def _pickle_facts(pickles: tuple[Pickle, ...]) -> Iterator[tuple[str, str]]:
    for pickle in pickles:
        yield "pickle", f"{harmless(pickle.name)}: {counted(len(pickle.opcodes), 'opcode')}, nothing of it is run"
        if names := list(_globals(pickle)):
            yield "names", _list_some(names)
    if not pickles:
        yield "pickle", "none found"


def _globals(pickle: Pickle) -> Iterator[str]:
    """The globals that it would import, each once, and the number of those taken from the stack."""
    names = (opcode.argument for opcode in pickle.opcodes if opcode.name in ("GLOBAL", "INST"))
    for argument in dict.fromkeys(names):
        yield argument.strip("'\"").replace(" ", ".")
    if hidden := sum(opcode.name == "STACK_GLOBAL" for opcode in pickle.opcodes):
        yield f"{hidden:,} from the stack (STACK_GLOBAL)"


def _list_some(texts: Sequence[str]) -> str:
    return listed((harmless(text, VALUE) for text in texts), _SOME)


def _compact_json(value: object) -> str:
    """A value of a JSON file on one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(", ", ": "))


def _show_content(content: Content, choice: RowChoice, console: Console) -> None:
    for _, listing in _listings(content):
        listing.show(choice, console)
    pickles = content if isinstance(content, tuple) else ()
    for index, pickle in enumerate(pickles):
        if len(pickles) > 1:
            put(console, Text(("\n" if index else "") + harmless(pickle.name), "bold"))
        _opcodes(pickle).show(choice, console)
        if pickle.stopped is not None:
            put(console, Text(harmless(pickle.stopped, 1000), "red"))


def score(value: float) -> str:
    """A score; whole numbers, such as those of BPE, with all digits."""
    return f"{value:.0f}" if value == int(value) else f"{value:.6g}"
