"""Tokenizers derived from Meta's files give the ids that SentencePiece and tiktoken themselves give."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from rabbitllm.checkpoints import meta_checkpoint
from rabbitllm.checkpoints.meta_checkpoint import derive_tokenizer, special_tokens
from rabbitllm.errors import CheckpointNotFoundError, CorruptVocabularyError
from tests.attacks.protobuf_files import HOSTILE
from tests.support.draws import draws
from tests.support.meta_files import tiktoken_file

CORPUS = [*Path(__file__).parent.glob("*.py"), *Path(__file__).parent.parent.glob("support/*.py")]
HARD = [
    "",
    " ",
    "   ",
    "a",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\n\nnew\r\nlines \n \n  x",
    "I'LL they're IT'S 'tis 's",
    "1 12 123 1234 12345678901234567890",
    "def test(self) -> None:\n        return self._x[1:-1]  # noqa",
    "naïve café straße ﬁne \uff21\uff22 e\u0301 x² ½",
    "добрый день мир",
    "你好，世界。日本語テスト한국어",  # noqa: RUF001
    "مرحبا بالعالم שלום",
    "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 ok",
    "\u00a0\u2003\u3000\u0085\x1c\u200b\ufeff x",
    "\x00\x01\x7f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "........---------======== !!!???",
    "_▁_ ▁ <unk> <s> </s> <0x41>",
    "x" * 3000 + " " * 300 + "y",
]


def loaded(folder: Path, files: dict[str, bytes]) -> Any:
    """The tokenizer that transformers loads from a folder with these files and the original."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return transformers.AutoTokenizer.from_pretrained(folder)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


# Llama 1 and 2


def trained(**changes: Any) -> bytes:
    written = io.BytesIO()
    text = iter(line for path in CORPUS for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    like_llama = {
        "model_type": "bpe",
        "vocab_size": 1500,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=text, model_writer=written, **{**like_llama, **changes})
    return written.getvalue()


@pytest.fixture(scope="module")
def pieces() -> bytes:
    return trained()


@pytest.fixture(scope="module")
def from_pieces(pieces: bytes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "tokenizer.model").write_bytes(pieces)
    vocabulary, files = derive_tokenizer(folder / "tokenizer.model", later=False, max_length=4096)
    assert vocabulary == meta_checkpoint.LlamaVocabulary(False, 1500, 1, (2,))
    return loaded(folder, files), sentencepiece.SentencePieceProcessor(model_proto=pieces)


@pytest.mark.parametrize("text", [text for text in HARD if "<s>" not in text])
def test_ids_are_those_of_sentencepiece(from_pieces: tuple[Any, Any], text: str) -> None:
    tokenizer, library = from_pieces
    assert ids_of(tokenizer, text) == library.encode(text)
    assert tokenizer(text).input_ids == [1, *library.encode(text)]
    if "\x00" not in text:
        assert tokenizer.decode(library.encode(text)) == library.decode(library.encode(text))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<\u2581"), max_size=60))
@settings(max_examples=draws(300), deadline=None)
def test_ids_of_any_text_are_those_of_sentencepiece(from_pieces: tuple[Any, Any], text: str) -> None:
    tokenizer, library = from_pieces
    assert ids_of(tokenizer, text) == library.encode(text)


def test_special_tokens_of_sentencepiece(from_pieces: tuple[Any, Any]) -> None:
    tokenizer, _ = from_pieces
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer.model_max_length == 4096


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "unigram"}, "its pieces are of UNIGRAM"),
        ({"byte_fallback": False}, "it has no byte fallback"),
        ({"normalization_rule_name": "nmt_nfkc"}, "its normaliser is 'nmt_nfkc'"),
        ({"add_dummy_prefix": False}, "it puts no space before a text"),
        ({"remove_extra_whitespaces": True}, "it removes spaces"),
        ({"treat_whitespace_as_suffix": True}, "it puts spaces behind words"),
        ({"eos_id": -1}, "it has no piece that begins or ends a text"),
    ],
)
def test_vocabulary_that_encodes_differently(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(trained(**{"vocab_size": 700, **changes}))
    with pytest.raises(CorruptVocabularyError, match=f"encodes differently from Llama's tokenizer: {says}") as refused:
        derive_tokenizer(path, later=False, max_length=4096)
    assert "tokenizer.json" in refused.value.remedy


@pytest.mark.parametrize("name", [*HOSTILE][::5])
def test_hostile_models_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(HOSTILE[name][0])
    with pytest.raises(CorruptVocabularyError):
        derive_tokenizer(path, later=False, max_length=4096)


# Llama 3


@pytest.fixture(scope="module")
def ranks() -> bytes:
    """All bytes, and merges that a trainer finds in this repository's own text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train([str(path) for path in CORPUS], trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet))
    letters = {letter: byte for byte, letter in enumerate(meta_checkpoint.byte_letters())}
    ordered = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(letters[letter] for letter in text) for text, _ in ordered]
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))


@pytest.fixture(scope="module")
def from_ranks(ranks: bytes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    tiktoken = pytest.importorskip("tiktoken")
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "tokenizer.model").write_bytes(ranks)
    vocabulary, files = derive_tokenizer(folder / "tokenizer.model", later=True, max_length=131_072)
    assert vocabulary == meta_checkpoint.LlamaVocabulary(True, 3256, 3000, (3001, 3008, 3009))
    lines = (line.split() for line in ranks.splitlines())
    library = tiktoken.Encoding(
        name="tiny",
        pat_str=meta_checkpoint._CUT,
        mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in lines},
        special_tokens={name: 3000 + index for index, name in enumerate(special_tokens(later=True))},
    )
    return loaded(folder, files), library


@pytest.mark.parametrize("text", [*HARD, "<|begin_of_text|>a<|eot_id|>\n\n <|python_tag|><|no token|>"])
def test_ids_are_those_of_tiktoken(from_ranks: tuple[Any, Any], text: str) -> None:
    tokenizer, library = from_ranks
    expected = library.encode(text, allowed_special="all")
    assert ids_of(tokenizer, text) == expected
    assert tokenizer(text).input_ids == [3000, *expected]
    assert tokenizer.decode(expected) == library.decode(expected)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=draws(300), deadline=None)
def test_ids_of_any_text_are_those_of_tiktoken(from_ranks: tuple[Any, Any], text: str) -> None:
    tokenizer, library = from_ranks
    assert ids_of(tokenizer, text) == library.encode(text, allowed_special="all")


def test_special_tokens_of_llama_3() -> None:
    first, later = special_tokens(later=False), special_tokens(later=True)
    assert len(set(first)) == len(set(later)) == 256
    assert first[:2] == later[:2] == ("<|begin_of_text|>", "<|end_of_text|>")
    assert first[9] == later[9] == "<|eot_id|>"
    assert (first[8], later[8]) == ("<|reserved_special_token_4|>", "<|eom_id|>")
    assert (first[255], later[255]) == ("<|reserved_special_token_250|>", "<|reserved_special_token_247|>")


def test_regular_token_named_like_a_special_one(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(tiktoken_file(0) + base64.b64encode(b"<|eot_id|>") + b" 256\n")
    with pytest.raises(CorruptVocabularyError, match=r"named like the special token '<\|eot_id\|>'"):
        derive_tokenizer(path, later=False, max_length=8192)


def test_overlong_tokens_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    lines = (base64.b64encode(bytes([i % 251, i // 251]) + bytes(1000)) + f" {256 + i}\n".encode() for i in range(300))
    path.write_bytes(tiktoken_file(0) + b"".join(lines))
    with pytest.raises(CorruptVocabularyError, match=r"needs .* bytes to check"):
        derive_tokenizer(path, later=False, max_length=8192)


def test_no_vocabulary(tmp_path: Path) -> None:
    with pytest.raises((FileNotFoundError, CheckpointNotFoundError)):
        derive_tokenizer(tmp_path / "tokenizer.model", later=False, max_length=1)
