"""An inspection as a JSON object (`--json`): everything in the report, with exact numbers and nothing shortened."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from rabbitllm.formats.sentencepiece_model import PieceType, SentencePieceModel
from rabbitllm.models.inspection.choice import RowChoice, searched
from rabbitllm.models.inspection.records import Entries, Inspection, Pickle, Pickles, ShardMap, Tensors, Vocabulary


def as_record(found: Inspection, choice: RowChoice) -> dict[str, Any]:
    """The record for `json.dump`. The summary covers everything, the rows are those of the choice."""
    record: dict[str, Any] = {"source": found.source, "format": found.format, "bytes": found.size}
    if found.shards:
        record |= {"files": dict(found.shards), "missing": list(found.absent), "beside": list(found.beside)}
    match found.content:
        case Tensors():
            record |= _of_tensors(found.content, choice)
        case Vocabulary():
            record |= _of_vocabulary(found.content.model, choice)
        case Entries():
            shown, _, more = choice.of([*found.content.entries.items()], lambda pair: pair[0])
            record |= {"entries": dict(shown), "more": more}
        case ShardMap():
            pairs, _, more = choice.of([*found.content.weight_map.items()], lambda pair: pair[0])
            shards = Counter(found.content.weight_map.values())
            record |= {"metadata": dict(found.content.metadata), "shards": dict(shards)}
            record |= {"weight_map": dict(pairs), "more": more}
        case Pickles():
            record["pickles"] = [_of_pickle(pickle, choice) for pickle in found.content.pickles]
    if found.refusal is not None:
        kind = type(found.refusal).__name__
        record["refused"] = {"error": kind, "problem": found.refusal.problem, "remedy": found.refusal.remedy}
    return record


def _of_tensors(content: Tensors, choice: RowChoice) -> dict[str, Any]:
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


def _of_vocabulary(model: SentencePieceModel, choice: RowChoice) -> dict[str, Any]:
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


def _of_pickle(pickle: Pickle, choice: RowChoice) -> dict[str, Any]:
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
