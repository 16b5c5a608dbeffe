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
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from rabbitllm.base.terminal import Column, counted, harmless, large, put, put_fact, put_table, size
from rabbitllm.formats.sentencepiece_model import NormalizerSpec, PieceType, SentencePieceModel, TrainerSpec
from rabbitllm.models.inspection import (
    Content,
    Entries,
    Inspection,
    Opcode,
    Pickle,
    Pickles,
    ShardMap,
    Tensors,
    Vocabulary,
)

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
        wanted = rows if self.name is None else [row for row in rows if self.matches(name_of(row))]
        end = len(wanted) if self.limit is None else self.skip + self.limit
        shown = wanted[self.skip : end]
        return shown, len(wanted), max(len(wanted) - self.skip - len(shown), 0)


def searched(opcode: Opcode) -> str:
    """The text of an opcode that names are matched against."""
    return f"{opcode.name} {opcode.argument}"


# JSON


def as_record(found: Inspection, choice: RowChoice) -> dict[str, Any]:
    """The record for `json.dump`. The summary covers everything, the rows are those of the choice."""
    record: dict[str, Any] = {"source": found.source, "format": found.format, "bytes": found.size}
    if found.shards:
        record |= {"files": dict(found.shards), "missing": list(found.absent), "beside": list(found.beside)}
    match found.content:
        case Tensors():
            record |= _tensors_record(found.content, choice)
        case Vocabulary():
            record |= _vocabulary_record(found.content.model, choice)
        case Entries():
            shown, _, more = choice.of([*found.content.entries.items()], lambda pair: pair[0])
            record |= {"entries": dict(shown), "more": more}
        case ShardMap():
            pairs, _, more = choice.of([*found.content.weight_map.items()], lambda pair: pair[0])
            shards = Counter(found.content.weight_map.values())
            record |= {"metadata": dict(found.content.metadata), "shards": dict(shards)}
            record |= {"weight_map": dict(pairs), "more": more}
        case Pickles():
            record["pickles"] = [_pickle_record(pickle, choice) for pickle in found.content.pickles]
    if found.refusal is not None:
        kind = type(found.refusal).__name__
        record["refused"] = {"error": kind, "problem": found.refusal.problem, "remedy": found.refusal.remedy}
    return record


def _tensors_record(content: Tensors, choice: RowChoice) -> dict[str, Any]:
    tensors, _, more = choice.of(content.tensors, lambda tensor: tensor.name)
    return {
        "tensor_count": len(content.tensors),
        "tensor_bytes": content.nbytes,
        "parameters": content.parameters,
        "dtypes": dict(content.dtypes),
        "layers": list(content.layers),
        "sharing": content.sharing,
        "strided": content.strided,
        "metadata": dict(content.metadata),
        "left_out": list(content.left_out),
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "stride": list(tensor.strides),
                "offset": tensor.offset,
                "bytes": tensor.nbytes,
                "layer": tensor.layer,
                "file": tensor.file,
                "storage": tensor.storage,
            }
            for tensor in tensors
        ],
        "more": more,
    }


def _vocabulary_record(model: SentencePieceModel, choice: RowChoice) -> dict[str, Any]:
    pieces, _, more = choice.of(model.pieces, lambda piece: piece.text)
    denormalizer = model.denormalizer
    return {
        "piece_count": len(model.pieces),
        "types": {PieceType(kind).name.lower(): count for kind, count in Counter(model.pieces.types).most_common()},
        "special_ids": dataclasses.asdict(model.special_ids()),
        "trainer": {**dataclasses.asdict(model.trainer), "model_type": model.trainer.model_type.name.lower()},
        "normalizer": dataclasses.asdict(model.normalizer),
        "denormalizer": None if denormalizer is None else dataclasses.asdict(denormalizer),
        "samples": [dataclasses.asdict(sample) for sample in model.samples],
        "pieces": [
            {"id": piece.id, "piece": piece.text, "score": piece.score, "type": piece.type.name.lower()}
            for piece in pieces
        ],
        "more": more,
    }


def _pickle_record(pickle: Pickle, choice: RowChoice) -> dict[str, Any]:
    opcodes, _, more = choice.of(pickle.opcodes, searched)
    return {
        "name": pickle.name,
        "bytes": pickle.nbytes,
        "opcode_count": len(pickle.opcodes),
        "opcodes": [
            {"byte": opcode.position, "opcode": opcode.name, "argument": opcode.argument} for opcode in opcodes
        ],
        "more": more,
        "stopped": pickle.stopped,
    }


# Text


ON_A_TERMINAL = 50
"""Default number of rows on a terminal."""
VALUE = 100
"""Limit of characters of a value, a piece or an opcode's argument in a table."""
DEEPEST = 12
"""Limit of nested marks by which a listing is indented; a pickle may open a thousand."""
_SOME = 12
_NUMBERED = re.compile(r"(.*?)(\d+)")


def show(found: Inspection, choice: RowChoice, console: Console) -> None:
    """Print an inspection."""
    put(console, Text(harmless(found.source, 4096), "bold"))
    console.print()
    for name, value in _facts(found):
        put_fact(console, name, value)
    if found.content is not None:
        console.print()
        _show_content(found.content, choice, console)
    console.file.flush()


def _facts(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "format", found.format
    files = f" in {counted(len(found.shards), 'file')}" if found.shards else ""
    exactly = f" ({found.size:,} bytes)" if "byte" not in size(found.size) else ""
    yield "size", f"{size(found.size)}{exactly}{files}"
    if found.absent:
        yield "missing", f"{counted(len(found.absent), 'shard')}: {_some(found.absent)}"
    match found.content:
        case Tensors():
            yield from _of_tensors(found.content)
        case Vocabulary():
            yield from _of_vocabulary(found.content.model)
        case ShardMap():
            yield from _of_shard_map(found.content)
        case Pickles():
            yield from _of_pickles(found.content)
    if found.beside:
        yield "other files", _some(found.beside)
    if found.has_pickle and not isinstance(found.content, Pickles):
        yield "pickle", "--opcodes lists it; nothing of it is run"
    if found.refusal is not None:
        yield "refused", "what is wrong is said below"


def _of_tensors(tensors: Tensors) -> Iterator[tuple[str, str]]:
    kinds = ", ".join(f"{count:,} {dtype}" for dtype, count in tensors.dtypes.items())
    yield "tensors", f"{len(tensors.tensors):,}, {size(tensors.nbytes)}: {kinds}" if kinds else "0"
    yield "parameters", large(tensors.parameters)
    yield "layers", f"{len(tensors.layers):,}: {_some(runs(tensors.layers))}" if tensors.layers else "0"
    if tensors.sharing:
        yield "shared", f"{counted(tensors.sharing, 'tensor')} in the bytes of others"
    if tensors.strided:
        yield "strided", f"{counted(tensors.strided, 'tensor')} whose elements do not lie one after the other"
    if tensors.left_out:
        yield "left out", f"{_some(tensors.left_out)}: no weights"
    if tensors.metadata:
        yield "metadata", _some([f"{key}={value}" for key, value in tensors.metadata.items()])


def runs(layers: Iterable[str]) -> list[str]:
    """Ranges of layers with consecutive numbers: `layers.0 to layers.31`."""
    found: list[list[str]] = []
    for layer in layers:
        if found and _follows(found[-1][-1], layer):
            found[-1].append(layer)
        else:
            found.append([layer])
    return [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in found]


def _follows(layer: str, following: str) -> bool:
    one, other = _NUMBERED.fullmatch(layer), _NUMBERED.fullmatch(following)
    if one is None or other is None or len(other[2]) > 18:
        return False
    return one[1] == other[1] and other[2].isascii() and one[2].isascii() and int(other[2]) == int(one[2]) + 1


def _of_vocabulary(model: SentencePieceModel) -> Iterator[tuple[str, str]]:
    kinds = Counter(model.pieces.types)
    named = ", ".join(f"{count:,} {PieceType(kind).name.lower()}" for kind, count in kinds.most_common())
    yield "pieces", f"{len(model.pieces):,}: {named.replace('_', ' ')}"
    ids = dataclasses.asdict(model.special_ids()).items()
    yield "special ids", ", ".join(f"{name} {number}" if number >= 0 else f"no {name}" for name, number in ids)
    yield "model type", model.trainer.model_type.name.lower()
    yield "trainer", _spec(model.trainer)
    yield "normaliser", _spec(model.normalizer)
    if model.denormalizer is not None:
        yield "denormaliser", _spec(model.denormalizer)
    if model.samples:
        yield "samples", counted(len(model.samples), "text")


def _spec(spec: TrainerSpec | NormalizerSpec) -> str:
    """The fields of a spec that differ from their defaults; the JSON has all of them."""
    told = []
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if value != field.default and field.name != "model_type":
            told.append(f"{field.name}={_value(value)}")
    return ", ".join(told) if told else "all as by default"


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return f"[{_some([str(part) for part in value])}]"
    return harmless(str(value), VALUE)


def _of_shard_map(index: ShardMap) -> Iterator[tuple[str, str]]:
    shards = Counter(index.weight_map.values())
    yield "tensors", f"{len(index.weight_map):,} in {counted(len(shards), 'shard')}"
    if index.metadata:
        yield "metadata", _some([f"{key}={_compact(value)}" for key, value in index.metadata.items()])


def _of_pickles(pickles: Pickles) -> Iterator[tuple[str, str]]:
    for pickle in pickles.pickles:
        yield "pickle", f"{harmless(pickle.name)}: {counted(len(pickle.opcodes), 'opcode')}, nothing of it is run"
        if named := list(_globals(pickle)):
            yield "names", _some(named)
    if not pickles.pickles:
        yield "pickle", "none can be told from the rest of the file"


def _globals(pickle: Pickle) -> Iterator[str]:
    """The globals that it would import, each once, and the number of those taken from the stack."""
    told = (opcode.argument for opcode in pickle.opcodes if opcode.name in ("GLOBAL", "INST"))
    for argument in dict.fromkeys(told):
        yield argument.strip("'\"").replace(" ", ".")
    if hidden := sum(opcode.name == "STACK_GLOBAL" for opcode in pickle.opcodes):
        yield f"{hidden:,} from the stack (STACK_GLOBAL)"


def _some(texts: Sequence[str]) -> str:
    shown = ", ".join(harmless(text, VALUE) for text in texts[:_SOME])
    return shown + (f" … and {len(texts) - _SOME:,} more" if len(texts) > _SOME else "")


def _compact(value: object) -> str:
    """A value of a JSON file on one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(", ", ": "))


def _show_content(content: Content, choice: RowChoice, console: Console) -> None:
    match content:
        case Tensors():
            _show_tensors(content, choice, console)
        case Vocabulary():
            _show_pieces(content.model, choice, console)
        case Entries():
            _show_pairs(content.entries, ("key", "value"), choice, console)
        case ShardMap():
            _show_pairs(content.weight_map, ("name", "file"), choice, console)
        case Pickles():
            for number, pickle in enumerate(content.pickles):
                if len(content.pickles) > 1:
                    put(console, Text(("\n" if number else "") + harmless(pickle.name), "bold"))
                _show_opcodes(pickle, choice, console)


def _show_tensors(content: Tensors, choice: RowChoice, console: Console) -> None:
    several = len({tensor.file for tensor in content.tensors}) > 1
    columns = [
        Column("name"),
        Column("dtype"),
        Column("shape"),
        Column("stride", rank=3),
        Column("offset", right=True, rank=2),
        Column("bytes", right=True, rank=4),
        Column("layer", rank=6),
        Column("file", rank=1) if several else Column("storage", rank=5),
    ]
    tensors, matching, more = choice.of(content.tensors, lambda tensor: tensor.name)
    rows: list[tuple[str, ...]] = [
        (
            harmless(t.name),
            t.dtype,
            _sizes(t.shape),
            _sizes(t.strides),
            f"{t.offset:,}",
            f"{t.nbytes:,}",
            harmless(t.layer),
            t.file if several else t.storage or "",
        )
        for t in tensors
    ]
    if not several and not any(tensor.storage for tensor in content.tensors):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    _table(console, columns, rows, choice, len(content.tensors), matching, more, "tensor")


def _sizes(sizes: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _show_pieces(model: SentencePieceModel, choice: RowChoice, console: Console) -> None:
    columns = [Column("id", right=True), Column("piece"), Column("score", right=True), Column("type")]
    pieces, matching, more = choice.of(model.pieces, lambda piece: piece.text)
    rows = [
        (str(piece.id), harmless(piece.text, VALUE), score(piece.score), piece.type.name.lower().replace("_", " "))
        for piece in pieces
    ]
    _table(console, columns, rows, choice, len(model.pieces), matching, more, "piece")


def score(value: float) -> str:
    """A score; whole numbers, such as those of BPE, with all digits."""
    return f"{value:.0f}" if value == int(value) else f"{value:.6g}"


def _show_pairs(pairs: Mapping[str, object], heads: tuple[str, str], choice: RowChoice, console: Console) -> None:
    shown, matching, more = choice.of([*pairs.items()], lambda pair: pair[0])
    rows = [(harmless(key), harmless(_compact(value), VALUE)) for key, value in shown]
    _table(console, [Column(heads[0]), Column(heads[1])], rows, choice, len(pairs), matching, more, heads[0])


def _show_opcodes(pickle: Pickle, choice: RowChoice, console: Console) -> None:
    columns = [Column("byte", right=True), Column("opcode"), Column("argument")]
    opcodes, matching, more = choice.of(pickle.opcodes, searched)
    rows = [(f"{o.position:,}", "  " * min(o.depth, DEEPEST) + o.name, harmless(o.argument, VALUE)) for o in opcodes]
    _table(console, columns, rows, choice, len(pickle.opcodes), matching, more, "opcode")
    if pickle.stopped is not None:
        put(console, Text(harmless(pickle.stopped, 1000), "red"))


def _table(
    console: Console,
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    choice: RowChoice,
    total: int,
    matching: int,
    more: int,
    what: str,
) -> None:
    """A table, and a line below it about the rows that it leaves out."""
    if choice.name is not None:
        put(console, Text(f"{harmless(choice.name)!r} matches {counted(matching, what)} of {total:,}", "dim"))
    if not rows and matching:
        put(console, Text(f"--skip {choice.skip:,} leaves none of {counted(matching, what)}", "dim"))
        return
    if not rows:
        return
    narrow = put_table(console, columns, rows)
    if more:
        put(console, Text(f"… and {more:,} more; --limit 0 shows all, --name a part of them", "dim"))
    if narrow:
        put(console, Text(f"too narrow for {', '.join(narrow)}: a wider terminal or --json has them", "dim"))
