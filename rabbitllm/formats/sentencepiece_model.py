"""`tokenizer.model`, the vocabulary that SentencePiece trains: pieces, specs and samples, fully checked.

Schema: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto, with its defaults. The
library does the encoding; this module inspects a file, and refuses a malformed one before the library reads it. The
library accepts more: ids in the trainer spec outside the vocabulary, and everything that only `protobuf.py` refuses.

The size of a vocabulary is its number of pieces, as in the library; `TrainerSpec.vocab_size` may differ. Independent
of models and of encoding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from rabbitllm.errors import CorruptVocabularyError
from rabbitllm.formats.protobuf import (
    FieldKind,
    Schema,
    SchemaField,
    numbered,
    read_message,
    schema_of,
    values_of,
)
from rabbitllm.formats.sentencepiece_checks import check_charsmap, check_id, check_pieces
from rabbitllm.formats.sentencepiece_pieces import Pieces, PieceType, read_pieces
from rabbitllm.formats.vocabulary_file import read_bytes

MAX_SPEC_BYTES = 4 << 20
"""Limit of one spec with its charsmap, and of all samples. The library's own charsmaps have up to 0.4 MB."""
MAX_SPEC_FIELDS = 100_000
_IDS = {"unk_id", "bos_id", "eos_id", "pad_id"}


class ModelType(IntEnum):
    """The library's algorithm for splitting text into pieces; the numbers are the format's."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """The options of the trainer; fields are documented in the schema.

    Two of them affect encoding: `model_type` and `treat_whitespace_as_suffix`. `byte_fallback` makes unknown characters
    byte pieces, and the four texts name the pieces with a special meaning. The others only document the training.
    """

    input: tuple[str, ...] = numbered(1, FieldKind.TEXT, (), repeated=True)
    model_prefix: str = numbered(2, FieldKind.TEXT, "")
    model_type: ModelType = numbered(3, FieldKind.INT32, ModelType.UNIGRAM, values=ModelType)  # noqa: RUF009 (an enumerator)
    vocab_size: int = numbered(4, FieldKind.INT32, 8000)
    accept_language: tuple[str, ...] = numbered(5, FieldKind.TEXT, (), repeated=True)
    self_test_sample_size: int = numbered(6, FieldKind.INT32, 0)
    input_format: str = numbered(7, FieldKind.TEXT, "")
    character_coverage: float = numbered(10, FieldKind.FLOAT, 0.9995)
    input_sentence_size: int = numbered(11, FieldKind.UINT64, 0)
    seed_sentencepiece_size: int = numbered(14, FieldKind.INT32, 1_000_000)
    shrinking_factor: float = numbered(15, FieldKind.FLOAT, 0.75)
    num_threads: int = numbered(16, FieldKind.INT32, 16)
    num_sub_iterations: int = numbered(17, FieldKind.INT32, 2)
    max_sentence_length: int = numbered(18, FieldKind.INT32, 4192)
    shuffle_input_sentence: bool = numbered(19, FieldKind.BOOL, True)
    max_sentencepiece_length: int = numbered(20, FieldKind.INT32, 16)
    split_by_unicode_script: bool = numbered(21, FieldKind.BOOL, True)
    split_by_whitespace: bool = numbered(22, FieldKind.BOOL, True)
    split_by_number: bool = numbered(23, FieldKind.BOOL, True)
    treat_whitespace_as_suffix: bool = numbered(24, FieldKind.BOOL, False)
    split_digits: bool = numbered(25, FieldKind.BOOL, False)
    allow_whitespace_only_pieces: bool = numbered(26, FieldKind.BOOL, False)
    control_symbols: tuple[str, ...] = numbered(30, FieldKind.TEXT, (), repeated=True)
    user_defined_symbols: tuple[str, ...] = numbered(31, FieldKind.TEXT, (), repeated=True)
    vocabulary_output_piece_score: bool = numbered(32, FieldKind.BOOL, True)
    hard_vocab_limit: bool = numbered(33, FieldKind.BOOL, True)
    use_all_vocab: bool = numbered(34, FieldKind.BOOL, False)
    byte_fallback: bool = numbered(35, FieldKind.BOOL, False)
    required_chars: str = numbered(36, FieldKind.TEXT, "")
    unk_id: int = numbered(40, FieldKind.INT32, 0)
    bos_id: int = numbered(41, FieldKind.INT32, 1)
    eos_id: int = numbered(42, FieldKind.INT32, 2)
    pad_id: int = numbered(43, FieldKind.INT32, -1)
    unk_surface: str = numbered(44, FieldKind.TEXT, " \u2047 ")
    unk_piece: str = numbered(45, FieldKind.TEXT, "<unk>")
    bos_piece: str = numbered(46, FieldKind.TEXT, "<s>")
    eos_piece: str = numbered(47, FieldKind.TEXT, "</s>")
    pad_piece: str = numbered(48, FieldKind.TEXT, "<pad>")
    train_extremely_large_corpus: bool = numbered(49, FieldKind.BOOL, False)
    pretokenization_delimiter: str = numbered(53, FieldKind.TEXT, "")
    seed_sentencepieces_file: str = numbered(54, FieldKind.TEXT, "")


@dataclass(frozen=True, slots=True)
class NormalizerSpec:
    """The normalisation of a text before it is split, or after its pieces are joined (the denormaliser).

    Attributes:
        name: of the rule, such as `nmt_nfkc` or `identity`.
        precompiled_charsmap_bytes: length of the compiled rule, 0 for none; the rule itself is not read.
        add_dummy_prefix: whether a space is put before the text.
        remove_extra_whitespaces: whether leading, trailing and repeated spaces are removed.
        escape_whitespaces: whether spaces become U+2581.
        normalization_rule_tsv: the source of a custom rule.
    """

    name: str = numbered(1, FieldKind.TEXT, "")
    precompiled_charsmap_bytes: int = numbered(2, FieldKind.SPAN, 0)
    add_dummy_prefix: bool = numbered(3, FieldKind.BOOL, True)
    remove_extra_whitespaces: bool = numbered(4, FieldKind.BOOL, True)
    escape_whitespaces: bool = numbered(5, FieldKind.BOOL, True)
    normalization_rule_tsv: str = numbered(6, FieldKind.TEXT, "")


@dataclass(frozen=True, slots=True)
class PieceSample:
    """A text and its pieces, separated by spaces, as the trainer's library split it."""

    input: str = numbered(1, FieldKind.TEXT, "")
    expected: str = numbered(2, FieldKind.TEXT, "")


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The ids of the pieces with a special meaning in the library; -1 for none."""

    unk: int
    bos: int
    eos: int
    pad: int


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """A whole `tokenizer.model`. A spec that is absent has its defaults; an absent denormaliser is None."""

    pieces: Pieces
    trainer: TrainerSpec
    normalizer: NormalizerSpec
    denormalizer: NormalizerSpec | None
    samples: tuple[PieceSample, ...]

    def special_ids(self) -> SpecialIds:
        """The results of the library's `unk_id()`, `bos_id()`, `eos_id()` and `pad_id()`.

        The library looks up the texts in the trainer spec, and ignores the ids there.
        """
        unknown = self.pieces.types.index(PieceType.UNKNOWN)

        def id_of(text: str, default: str, wanted: PieceType) -> int:
            found = self.pieces.id_of(text or default)
            number = unknown if found is None else found
            return number if self.pieces.types[number] == wanted else -1

        return SpecialIds(
            unk=id_of(self.trainer.unk_piece, "<unk>", PieceType.UNKNOWN),
            bos=id_of(self.trainer.bos_piece, "<s>", PieceType.CONTROL),
            eos=id_of(self.trainer.eos_piece, "</s>", PieceType.CONTROL),
            pad=id_of(self.trainer.pad_piece, "<pad>", PieceType.CONTROL),
        )


_MODEL = {
    1: SchemaField(
        "pieces", FieldKind.SPAN, repeated=True
    ),  # only those of another wire type reach this, and are refused
    2: SchemaField("trainer_spec", FieldKind.SPAN),
    3: SchemaField("normalizer_spec", FieldKind.SPAN),
    4: SchemaField("self_test_data", FieldKind.SPAN),
    5: SchemaField("denormalizer_spec", FieldKind.SPAN),
}
_TRAINER, _NORMALIZER, _SAMPLE = schema_of(TrainerSpec), schema_of(NormalizerSpec), schema_of(PieceSample)
_SAMPLES = {1: SchemaField("samples", FieldKind.SPAN, repeated=True)}


def read_model(path: Path, file: str | None = None) -> SentencePieceModel:
    """Read and check a local `tokenizer.model`.

    Args:
        path: the file.
        file: the name for error messages; the file's own by default.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptVocabularyError: see `parse_model`; or it is not a regular file, or has more than 64 MiB.
    """
    name = file or path.name
    return parse_model(read_bytes(path, lambda what: _corrupt(name, what)), name)


def parse_model(data: bytes, file: str) -> SentencePieceModel:
    """Read and check a complete serialised `ModelProto`.

    Raises:
        CorruptVocabularyError: the vocabulary is malformed, or the library could not use it.
    """
    try:
        return _parse(data)
    except ValueError as error:
        raise _corrupt(file, str(error) + _looks_like(data)) from None


def _parse(data: bytes) -> SentencePieceModel:
    pieces, others = read_pieces(data)
    found = values_of(data, others, _MODEL)
    for name, (begin, end) in found.items():
        if end - begin > MAX_SPEC_BYTES:
            raise ValueError(f"its {name} has {end - begin:,} bytes; at most {MAX_SPEC_BYTES:,} are read")
    told = _message(data, found.get("trainer_spec"), _TRAINER)
    trainer = TrainerSpec(**told)
    check_pieces(pieces, trainer.byte_fallback, trainer.model_type is ModelType.BPE)
    for name in sorted(_IDS & told.keys()):
        check_id(name, told[name], len(pieces))
    denormalizer = found.get("denormalizer_spec")
    samples = _message(data, found.get("self_test_data"), _SAMPLES).get("samples", ())
    return SentencePieceModel(
        pieces,
        trainer,
        _normalizer(data, found.get("normalizer_spec")),
        denormalizer and _normalizer(data, denormalizer),
        tuple(PieceSample(**_message(data, span, _SAMPLE)) for span in samples),
    )


def _message(data: bytes, span: tuple[int, int] | None, schema: Schema) -> dict[str, Any]:
    return read_message(data, *span, schema, MAX_SPEC_FIELDS) if span else {}


def _normalizer(data: bytes, span: tuple[int, int] | None) -> NormalizerSpec:
    found = _message(data, span, _NORMALIZER)
    begin, end = found.get("precompiled_charsmap_bytes", (0, 0))
    check_charsmap(data, begin, end)
    return NormalizerSpec(**{**found, "precompiled_charsmap_bytes": end - begin})


def _looks_like(data: bytes) -> str:
    """The real format of a file that only has this name, for messages."""
    if data.startswith(b"version https://git-lfs"):
        return " (it is a git-lfs pointer, not the file itself)"
    if re.match(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\n", data):
        return " (it looks like a tiktoken vocabulary, as Llama 3's is)"
    return ""


def _corrupt(file: str, what: str) -> CorruptVocabularyError:
    return CorruptVocabularyError(
        f"{file} is not a sound SentencePiece model: {what}.",
        "Fetch the file again from where the model was published, and compare its sha256 with the one given there.",
    )
