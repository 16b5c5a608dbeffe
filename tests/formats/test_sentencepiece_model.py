"""Vocabularies trained by the real library: equal to what it says piece by piece. And those that are refused."""

from __future__ import annotations

import itertools
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitllm.errors import CheckpointNotFoundError, CorruptVocabularyError
from rabbitllm.formats._protobuf import schema_of
from rabbitllm.formats.bounded import MAX_FILE_BYTES
from rabbitllm.formats.sentencepiece_model import (
    ModelType,
    NormalizerSpec,
    PieceType,
    SentencePieceModel,
    SpecialIds,
    TrainerSpec,
    VocabularyPiece,
    parse_model,
    read_model,
)
from tests.attacks.protobuf_files import (
    ACCEPTED_BY_THE_LIBRARY,
    BYTES,
    DEEP,
    FALLBACK,
    HOSTILE,
    SOUND,
    number,
    piece,
    real,
    span,
)
from tests.support.draws import draws
from tests.support.fresh_process import python

WORDS = """
    the quick brown fox jumps over lazy dogs while river stones remember every winter 2024 1999 3.14 naïve café
    straße élan señor größe добрый день мир 你好 世界 日本語 テスト 한국어 مرحبا ½ ﬁne \uff21\uff22 e\u0301 x²
""".split()  # noqa: SIM905 (as text they can be read)

TRAINED: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram", "vocab_size": 200},
    "bpe": {"model_type": "bpe", "vocab_size": 250},
    "like Llama's": {
        "model_type": "bpe",
        "vocab_size": 520,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
    },
    "like T5's": {
        "model_type": "unigram",
        "vocab_size": 460,
        "byte_fallback": True,
        "normalization_rule_name": "nmt_nfkc",
        "pad_id": 0,
        "eos_id": 1,
        "unk_id": 2,
        "bos_id": -1,
        "user_defined_symbols": ["<extra_0>", "<extra_1>", "  "],
    },
    "other names": {
        "model_type": "unigram",
        "vocab_size": 200,
        "unk_piece": "[UNK]",
        "bos_piece": "[CLS]",
        "eos_piece": "[SEP]",
        "pad_piece": "[PAD]",
        "pad_id": 3,
        "control_symbols": ["[MASK]", "你"],
        "user_defined_symbols": ["fox"],
        "add_dummy_prefix": False,
        "normalization_rule_name": "nfkc_cf",
    },
    "spaces behind": {"model_type": "unigram", "vocab_size": 200, "treat_whitespace_as_suffix": True},
    "words": {"model_type": "word", "vocab_size": 40},
    "characters": {"model_type": "char", "vocab_size": 60},
}

HARD_TEXTS = [
    "",
    " ",
    "   leading, inner    and trailing   ",
    "tabs\tand\r\nlines\n\n",
    "the quick brown fox <s> </s> <unk> [MASK] <extra_0><extra_1> <0x0A>",
    "\u2581already\u2581escaped",
    "你好\uff0c世界。日本語テスト 한국어 테스트",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🤦🏽‍♀️ \U0001f9ff",
    "ﬁ \uff21\uff22 ① ½ e\u0301 é x² ㌔ Å Å",
    "ζ \u200b zero\u200dwidth \ufeff \u00a0 \u3000 \u202e",
    "\ufffd \U0010ffff \ue000 \x01\x7f",
    "مرحبا بالعالم שלום",
    "0123456789 1,000.5e-7",
    "".join(map(chr, range(1, 256))),
    "a" * 3000,
]


@pytest.fixture(scope="session", params=TRAINED)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A vocabulary made by the library's own trainer, and what was asked of it."""
    draw = random.Random(1)
    sentences = [" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) for _ in range(400)]
    prefix = tmp_path_factory.mktemp("vocabulary") / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_prefix=str(prefix),
        num_threads=1,
        minloglevel=2,
        **{"character_coverage": 1.0, "hard_vocab_limit": False, **TRAINED[request.param]},
    )
    return prefix.with_suffix(".model"), TRAINED[request.param]


def library(data: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=data)


def test_pieces_equal_those_of_the_library(trained: tuple[Path, dict[str, Any]]) -> None:
    path, _ = trained
    ours, theirs = read_model(path), library(path.read_bytes())
    assert len(ours.pieces) == theirs.get_piece_size() == theirs.vocab_size()
    for entry in ours.pieces:
        assert entry.text == theirs.id_to_piece(entry.id)
        assert entry.score == theirs.get_score(entry.id)
        assert (entry.type is PieceType.UNKNOWN) == theirs.is_unknown(entry.id)
        assert (entry.type is PieceType.CONTROL) == theirs.is_control(entry.id)
        assert (entry.type is PieceType.UNUSED) == theirs.is_unused(entry.id)
        assert (entry.type is PieceType.BYTE) == theirs.is_byte(entry.id)
        assert ours.id_of(entry.text) == theirs.piece_to_id(entry.text) == entry.id
    assert ours.special_ids() == SpecialIds(theirs.unk_id(), theirs.bos_id(), theirs.eos_id(), theirs.pad_id())


def test_specs_have_the_options_of_the_trainer(trained: tuple[Path, dict[str, Any]]) -> None:
    path, options = trained
    model = read_model(path)
    for name, value in options.items():
        if name == "normalization_rule_name":
            assert model.normalizer.name == value
        elif name in ("add_dummy_prefix", "remove_extra_whitespaces"):
            assert getattr(model.normalizer, name) == value
        elif name == "model_type":
            assert model.trainer.model_type.name.lower() == value
        elif name == "vocab_size":
            assert model.trainer.vocab_size == len(model.pieces) <= value
        elif hasattr(model.trainer, name):
            assert getattr(model.trainer, name) == value
        else:
            assert name in ("split_digits", "allow_whitespace_only_pieces", "control_symbols", "user_defined_symbols")
    rule = model.normalizer.name
    assert (model.normalizer.precompiled_charsmap_bytes == 0) == (rule == "identity")
    assert rule == options.get("normalization_rule_name", "nmt_nfkc")
    kinds = [entry.type for entry in model.pieces]
    assert kinds.count(PieceType.BYTE) == (256 if options.get("byte_fallback") else 0)
    assert kinds.count(PieceType.USER_DEFINED) == len(options.get("user_defined_symbols", ()))


def test_ids_of_hard_texts_are_our_pieces(trained: tuple[Path, dict[str, Any]]) -> None:
    path, _ = trained
    model, theirs = read_model(path), library(path.read_bytes())
    used = set()
    for text in [*HARD_TEXTS, *WORDS]:
        ids, texts = theirs.encode(text), theirs.encode(text, out_type=str)
        assert len(ids) == len(texts)
        for number_, shown in zip(ids, texts, strict=True):
            entry = model.pieces[number_]
            assert entry.type not in (PieceType.CONTROL, PieceType.UNUSED)
            assert entry.type is PieceType.UNKNOWN or entry.text == shown
            used.add(entry.type)
    assert PieceType.NORMAL in used
    assert (PieceType.BYTE in used) == model.trainer.byte_fallback


def test_trained_vocabulary_passes_every_check(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    path, _ = trained
    data = path.read_bytes()
    assert parse_model(data, "m") == read_model(path)
    with pytest.raises(CorruptVocabularyError, match="appears twice"):
        parse_model(data + data, "m")


def test_defaults_are_those_of_the_format() -> None:
    model = parse_model(SOUND, "m")
    assert model.trainer == TrainerSpec()
    assert model.normalizer == NormalizerSpec()
    assert model.denormalizer is None
    assert model.trainer.model_type is ModelType.UNIGRAM
    assert model.trainer.vocab_size == 8000
    assert model.pieces[-1] == VocabularyPiece(5, "\u2581a", -1.5, PieceType.NORMAL)
    assert [entry.id for entry in model.pieces[1:3]] == [1, 2]
    with pytest.raises(IndexError):
        model.pieces[6]


def test_every_field_of_a_spec_is_read() -> None:
    """Values other than the defaults, for every number of the schemas."""
    for record, field in ((TrainerSpec, 2), (NormalizerSpec, 3)):
        for place, slot in schema_of(record).items():
            if slot.name == "precompiled_charsmap_bytes":
                continue
            default = getattr(record(), slot.name)
            if slot.kind.wire_type == 2:
                raw, expected = span(place, "né"), "né"
            elif isinstance(default, bool):
                raw, expected = number(place, not default), not default
            else:
                raw, expected = number(place, 3), 3
            fallback = BYTES if slot.name == "byte_fallback" else b""
            model = parse_model(SOUND + fallback + span(field, raw), "m")
            spec = model.trainer if record is TrainerSpec else model.normalizer
            assert getattr(spec, slot.name) == expected != default, slot.name


def test_a_denormaliser() -> None:
    model = parse_model(SOUND + span(5, span(1, "back")), "m")
    assert model.denormalizer == NormalizerSpec(name="back")


def test_what_documents_the_training_is_skipped() -> None:
    samples = span(4, span(1, span(1, "a a") + span(2, "\u2581a \u2581a")))
    model = parse_model(SOUND + span(2, real(10, 0.5) + span(30, "[MASK]")) + samples, "m")
    assert model == parse_model(SOUND, "m")


@pytest.mark.parametrize(
    "entry",
    {
        "no score": span(1, span(1, "q") + number(3, 4)),
        "another order": span(1, number(3, 4) + real(2, 0) + span(1, "q")),
        "an unknown field": piece("q", 0, 4, span(200, "x")),
        "a long varint": span(1, span(1, "q") + real(2, 0) + b"\x18\x84\x00"),
        "a long length": span(1, b"\x0a\x81\x00q" + real(2, 0) + number(3, 4)),
    }.values(),
)
def test_unusual_layouts_of_a_piece(entry: bytes) -> None:
    expected = parse_model(SOUND + piece("q", 0, 4), "m").pieces
    pieces = parse_model(SOUND + entry, "m").pieces
    assert pieces == expected
    assert library(SOUND + entry).id_to_piece(6) == "q"


@pytest.mark.parametrize("length", [1, 126, 127, 128, 129, 3999])
def test_piece_of_any_length(length: int) -> None:
    data = SOUND + piece("z" * length, -3) + piece("é" * length, -4, 4)
    assert [entry.text for entry in parse_model(data, "m").pieces[6:]] == ["z" * length, "é" * length]
    assert library(data).id_to_piece(7) == "é" * length


def test_text_in_both_tables_of_the_library() -> None:
    data = SOUND + piece("a", 0, 3) + piece("<s>", 0, 1)
    model, theirs = parse_model(data, "m"), library(data)
    assert model.id_of("a") == theirs.piece_to_id("a") == 6
    assert model.id_of("<s>") == theirs.piece_to_id("<s>") == 1
    assert model.id_of("nowhere") is None


@pytest.mark.parametrize(
    "spec",
    [
        number(4, 5),  # the library's size is the number of pieces too
        span(46, "a"),
        span(45, "a"),
        span(45, "<s>"),
        span(48, ""),
        span(47, "<unk>"),
        span(46, "nowhere"),
    ],
)
def test_special_ids_come_from_the_texts(spec: bytes) -> None:
    data = SOUND + span(2, spec)
    model, theirs = parse_model(data, "m"), library(data)
    assert model.special_ids() == SpecialIds(theirs.unk_id(), theirs.bos_id(), theirs.eos_id(), theirs.pad_id())
    assert len(model.pieces) == theirs.vocab_size() == 6


def test_deep_nesting_in_an_unknown_field_is_skipped() -> None:
    assert len(parse_model(SOUND + span(200, DEEP), "m").pieces) == 6


def test_all_byte_pieces() -> None:
    model = parse_model(SOUND + BYTES + FALLBACK, "m")
    assert [entry.text for entry in model.pieces if entry.type is PieceType.BYTE] == [
        f"<0x{n:02X}>" for n in range(256)
    ]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_vocabulary_is_refused(name: str) -> None:
    data, said = HOSTILE[name]
    with pytest.raises(CorruptVocabularyError) as caught:
        parse_model(data, "tokenizer.model")
    assert re.search(said, str(caught.value))
    assert str(caught.value).startswith("tokenizer.model is not a valid SentencePiece model: ")
    assert caught.value.remedy
    assert len(str(caught.value)) < 600


def test_malformed_inputs_that_the_library_refuses() -> None:
    """In a process of its own: what is given to it is hostile."""
    code = (
        "import sentencepiece\n"
        "from tests.attacks.protobuf_files import HOSTILE\n"
        "for name, (data, _) in HOSTILE.items():\n"
        "    try:\n"
        "        sentencepiece.SentencePieceProcessor(model_proto=data).encode('a b')\n"
        "    except RuntimeError:\n"
        "        continue\n"
        "    print(name)\n"
    )
    result = python(code)
    assert set(result.stdout.splitlines()) == ACCEPTED_BY_THE_LIBRARY


@pytest.mark.long
def test_memory_of_the_largest_inputs(tmp_path: Path) -> None:
    """The largest file that is read, of as many pieces as are read, and refused at the end."""
    path = tmp_path / "tokenizer.model"
    entries = b"".join(b"\x0a\x3a\x0a\x33%05x%b\x15\0\0\0\0" % (n, b"z" * 46) for n in range((1 << 20) - 6))
    entries = SOUND + entries + FALLBACK
    path.write_bytes(entries + span(200, bytes(MAX_FILE_BYTES - len(entries) - 6)))
    assert MAX_FILE_BYTES - 10 < path.stat().st_size <= MAX_FILE_BYTES
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from rabbitllm.errors import CorruptVocabularyError\n"
        "from rabbitllm.formats.sentencepiece_model import read_model\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "idle = peak()\n"
        "try:\n"
        "    read_model(Path(sys.argv[1]))\n"
        "except CorruptVocabularyError as error:\n"
        "    print(error.problem, peak() - idle, sep='\\n')\n"
    )
    result = python(code, path, timeout=600)
    problem, kibibytes = result.stdout.splitlines()
    assert "0 byte pieces" in problem
    assert int(kibibytes) < 256 * 1000


def test_truncated_anywhere(tmp_path: Path) -> None:
    """Every prefix is refused, or ends between two fields and is what a writer of fewer pieces would have made."""
    data = SOUND + span(2, number(4, 6) + span(45, "<unk>")) + span(3, span(1, "identity"))
    accepted = 0
    for length in range(len(data)):
        try:
            model = parse_model(data[:length], "m")
        except CorruptVocabularyError:
            continue
        accepted += 1
        assert library(data[:length]).get_piece_size() == len(model.pieces)
    assert accepted == 4  # after the last three pieces, before which there is no ordinary one, and after a spec


def loads(data: bytes) -> SentencePieceModel | None:
    try:
        return parse_model(data, "m")
    except CorruptVocabularyError:
        return None


FLIPPED = b"".join(
    [
        SOUND,
        piece("é" * 20, -7, 4),
        piece("fox", -8.5, 5),
        span(2, number(3, 2) + number(4, 8) + number(42, 2) + number(43, -1) + span(46, "<s>") + real(10, 0.5)),
        span(3, span(1, "identity") + number(4, 0)),
    ]
)


def test_flipped_input_was_sound() -> None:
    assert len(parse_model(FLIPPED, "m").pieces) == len(library(FLIPPED)) == 8


@given(st.data())
@settings(max_examples=draws(400), deadline=None)
def test_flipped_bits_are_refused_or_read_like_the_library(data: st.DataObject) -> None:
    changed = bytearray(FLIPPED)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    model = loads(bytes(changed))
    if model is not None:
        theirs = library(bytes(changed))
        assert [entry.text for entry in model.pieces] == [theirs.id_to_piece(n) for n in range(len(theirs))]
        assert [entry.score for entry in model.pieces] == [theirs.get_score(n) for n in range(len(theirs))]


PARTS = st.one_of(
    st.builds(
        piece, st.text(min_size=1, max_size=5), st.floats(width=32, allow_nan=False), st.sampled_from([1, 3, 4, 5])
    ),
    st.builds(piece, st.text(max_size=5), st.floats(width=32), st.integers(0, 7)),
    st.builds(span, st.integers(6, 1000), st.binary(max_size=40)),
    st.builds(span, st.integers(1, 5), st.binary(max_size=40)),
    st.builds(lambda field, value: span(2, number(field, value)), st.integers(1, 50), st.integers(-3, 1 << 40)),
    st.binary(max_size=20),
)


@given(st.lists(PARTS, max_size=4), st.booleans())
@settings(max_examples=draws(600), deadline=None)
def test_generated_files_are_refused_or_read_like_the_library(parts: list[bytes], sound: bool) -> None:
    raw = b"".join([SOUND] * sound + parts)
    model = loads(raw)
    if model is not None:
        theirs = library(raw)
        assert [entry.text for entry in model.pieces] == [theirs.id_to_piece(n) for n in range(len(theirs))]


def test_flipped_bits_of_a_trained_vocabulary(trained: tuple[Path, dict[str, Any]]) -> None:
    """The library is not asked about those, whose charsmap may be damaged."""
    data, draw = trained[0].read_bytes(), random.Random(2)
    for _ in range(30):
        changed = bytearray(data)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        loads(bytes(changed))


def test_irregular_file_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no vocabulary"):
        read_model(tmp_path / "tokenizer.model")
    with pytest.raises(CorruptVocabularyError, match="is not a regular file"):
        read_model(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.model")
        with pytest.raises(CorruptVocabularyError, match="is not a regular file"):
            read_model(tmp_path / "pipe.model")


def test_oversized_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    with path.open("wb") as stream:
        stream.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(CorruptVocabularyError, match=f"has {MAX_FILE_BYTES + 1:,} bytes; at most"):
        read_model(path)


def test_messages_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(CorruptVocabularyError, match=r"^x is not"):
        read_model(tmp_path / "x")
    (tmp_path / "x").write_bytes(SOUND)
    assert list(itertools.islice(read_model(tmp_path / "x").pieces, 1)) == [
        VocabularyPiece(0, "<unk>", 0.0, PieceType.UNKNOWN)
    ]
