"""A checkpoint in Meta's own format: its ranks, its parameters, and the files that transformers needs, derived.

Opens params.json and tokenizer.model at given paths; the checkpoint that holds them opens the weights. Such a
checkpoint has no config.json and no tokenizer for transformers; both are derived from its files.

The `tokenizer.model` of Llama 1 and 2 is a SentencePiece model, that of Llama 3 a vocabulary of tiktoken. Both are byte
pair encoding: the next pair to merge is the one whose merged token comes first (has the best score, or the lowest
rank). A tokenizer.json lists pairs instead, so the pairs of each token are listed in the order of the tokens. The rules
that are not in a tiktoken file, the split of text and the special tokens, are those of Llama 3's own tokenizer
(https://github.com/meta-llama/llama-models, models/llama3/api/tokenizer.py), with the names that Llama 3 and later
models have at https://huggingface.co/meta-llama. Format: https://github.com/huggingface/tokenizers.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.base.terminal import listed
from rabbitllm.checkpoints._meta_llama import (
    LlamaVocabulary,
    MetaParams,
    as_json,
    config_of,
    context_length,
    index_from,
    is_llama_3,
    parse_params,
    shapes_of,
    token_ids,
    translated,
)
from rabbitllm.checkpoints.index import META_PARAMETERS, CheckpointIndex, is_rank, natural_key
from rabbitllm.errors import CorruptVocabularyError, InvalidIndexError, MissingShardError
from rabbitllm.formats.bounded import read_json
from rabbitllm.formats.sentencepiece_model import ModelType, PieceType, SentencePieceModel, read_model
from rabbitllm.formats.tensor_spec import Header
from rabbitllm.formats.tiktoken_ranks import looks_like_ranks, read_ranks
from rabbitllm.storage.files import file_opener

TOKENIZER_NAMES = ("tokenizer.json", "tokenizer_config.json")
MAX_PAIR_BYTES = 1 << 28
"""Limit of the work to find all pairs: the sum of the squares of the tokens' lengths. Llama 3 has 10 MB."""
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""Llama 3's regular expression for splitting text before encoding."""
_SPECIALS = 256
_NAMED = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
_NAMED_LATER = {**_NAMED, 4: "finetune_right_pad_id", 8: "eom_id", 10: "python_tag"}
_SPACE = "\u2581"
_ADVICE = "Put the model's tokenizer.json in transformers' format into the same folder; it is then used instead."


def derive_tokenizer(path: Path, later: bool, max_length: int) -> tuple[LlamaVocabulary, dict[str, bytes]]:
    """Convert a `tokenizer.model` for transformers: properties that the model needs, and files, name -> content.

    Args:
        path: path of the file.
        later: whether the model is Llama 3.1 or later, which gave three special tokens names.
        max_length: context length of the model, for the tokenizer's own warning.

    Raises:
        CorruptVocabularyError: it is malformed, or encodes differently from those of Llama.
    """
    with open(path, "rb", opener=file_opener) as stream:
        is_ranks = looks_like_ranks(stream.read(4096))
    if is_ranks:
        return _from_ranks(read_ranks(path), later, max_length)
    return _from_pieces(read_model(path), path.name, max_length)


def _from_ranks(tokens: Sequence[bytes], later: bool, max_length: int) -> tuple[LlamaVocabulary, dict[str, bytes]]:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = byte_letters()
    texts = ["".join(map(letters.__getitem__, token)) for token in tokens]
    ids = {text: rank for rank, text in enumerate(texts)}
    check_pair_bytes(texts, "tokenizer.model")
    first = len(tokens)
    specials = special_tokens(later)
    if clash := next((name for name in specials if name in ids), None):
        raise CorruptVocabularyError(
            f"tokenizer.model has a regular token named like the special token {clash!r}.", _ADVICE
        )
    bos, end = specials[:2]
    stops = [index for index, name in enumerate(specials) if name in (end, "<|eom_id|>", "<|eot_id|>")]
    tokenizer = Tokenizer(models.BPE(ids, list(_pairs(texts, ids)), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CUT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    vocabulary = LlamaVocabulary(True, first + _SPECIALS, first, tuple(first + stop for stop in stops))
    return vocabulary, _tokenizer_files(tokenizer, {"bos_token": bos, "eos_token": end}, max_length)


def special_tokens(later: bool) -> tuple[str, ...]:
    """The 256 special tokens of Llama 3, or of 3.1 and later; unnamed ones are numbered."""
    named = _NAMED_LATER if later else _NAMED
    unnamed = (f"reserved_special_token_{spare}" for spare in itertools.count())
    return tuple(f"<|{named.get(index) or next(unnamed)}|>" for index in range(_SPECIALS))


def byte_letters() -> list[str]:
    """The character for each byte in a byte-level vocabulary: itself if printable, else one from U+0100 on."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unused = iter(range(0x100, 0x200))
    return [chr(byte if byte in printed else next(unused)) for byte in range(256)]


def _from_pieces(model: SentencePieceModel, file: str, max_length: int) -> tuple[LlamaVocabulary, dict[str, bytes]]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    _check_like_llama(model, file)
    texts = [piece.text for piece in model.pieces]
    ids = {text: piece for piece, text in enumerate(texts)}
    if len(ids) != len(texts):
        raise _unlike_llama_error(file, "a text is both an ordinary and a special piece")
    special = model.special_ids()
    added = [
        AddedToken(piece.text, normalized=False, special=piece.type is not PieceType.USER_DEFINED)
        for piece in model.pieces
        if piece.type in (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.USER_DEFINED)
    ]
    ordinary = [piece for piece in model.pieces if piece.type is PieceType.NORMAL]
    merged = {piece.text: piece.id for piece in ordinary}
    check_pair_bytes(merged, file)
    order = [piece.text for piece in sorted(ordinary, key=lambda piece: (-piece.score, piece.id))]
    unknown, pairs = texts[special.unk], list(_pairs(order, merged))
    tokenizer = Tokenizer(models.BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_tokens(added)
    vocabulary = LlamaVocabulary(False, len(texts), special.bos, (special.eos,))
    names = {"bos_token": texts[special.bos], "eos_token": texts[special.eos], "unk_token": unknown}
    return vocabulary, _tokenizer_files(tokenizer, names, max_length)


def _check_like_llama(model: SentencePieceModel, file: str) -> None:
    """Refuse a model that a derived tokenizer.json would encode differently from the library."""
    trainer, normalizer, special = model.trainer, model.normalizer, model.special_ids()
    for reason, wrong in (
        (f"its pieces are of {trainer.model_type.name}", trainer.model_type != ModelType.BPE),
        ("it has no byte fallback", not trainer.byte_fallback),
        ("it puts spaces behind words", trainer.treat_whitespace_as_suffix),
        (f"its normaliser is {normalizer.name!r}", normalizer.precompiled_charsmap_bytes > 0),
        ("it puts no space before a text", not normalizer.add_dummy_prefix),
        ("it removes spaces", normalizer.remove_extra_whitespaces),
        ("it does not escape spaces", not normalizer.escape_whitespaces),
        ("it has no piece that begins or ends a text", special.bos < 0 or special.eos < 0),
    ):
        if wrong:
            raise _unlike_llama_error(file, reason)


def _unlike_llama_error(file: str, reason: str) -> CorruptVocabularyError:
    return CorruptVocabularyError(
        f"{file} encodes differently from Llama's tokenizer: {reason}; expected byte pair encoding with byte fallback, "
        "a space before the text, and nothing normalised.",
        _ADVICE,
    )


def check_pair_bytes(texts: Iterable[str], file: str) -> None:
    """Refuse a vocabulary whose pairs would take too long to find.

    Raises:
        CorruptVocabularyError: it has too many, or too long, tokens.
    """
    if (total := sum(len(text) ** 2 for text in texts)) > MAX_PAIR_BYTES:
        raise CorruptVocabularyError(
            f"The vocabulary of {file} needs {total:,} bytes to check; the limit is {MAX_PAIR_BYTES:,}.", _ADVICE
        )


def _pairs(order: Sequence[str], ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Every pair of tokens that forms a token, in the order of that token; then by the ids of both."""
    for text in order:
        pairs = []
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                pairs.append((ids[left], ids[right], left, right))
        for _, _, left, right in sorted(pairs):
            yield left, right


def _tokenizer_files(tokenizer: Any, names: Mapping[str, str], max_length: int) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json: name -> content.

    Args:
        tokenizer: a `tokenizers.Tokenizer`, without the post-processor that puts the first special token.
        names: of the special tokens.
        max_length: context length of the model.
    """
    begin = names["bos_token"]
    content = json.loads(tokenizer.to_str())
    content["post_processor"] = _begin_with_token(begin, tokenizer.token_to_id(begin))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": as_json(content), "tokenizer_config.json": as_json(config)}


def _begin_with_token(text: str, token_id: int) -> dict[str, Any]:
    def part(which: str, type_id: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": text, "type_id": type_id}}, {"Sequence": {"id": which, "type_id": type_id}}]

    return {
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": part("A", 0) + part("B", 1),
        "special_tokens": {text: {"id": text, "ids": [token_id], "tokens": [text]}},
    }


VOCABULARY_NAME = "tokenizer.model"
CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
MAX_RANKS = 64
_NUMBER = re.compile(r"\d+")


def ranks_of(names: Iterable[str], label: str) -> tuple[str, ...]:
    """The files of all ranks in numerical order.

    Args:
        names: names of these and possibly other files.
        label: the folder's name in messages.

    Raises:
        MissingShardError: a rank is missing; the message names it.
        InvalidIndexError: two files have the same number, or there are more than any model has.
    """
    ranks = sorted(filter(is_rank, names), key=natural_key)
    numbers = [int(digits[0]) for name in ranks if (digits := _NUMBER.search(name))]
    if len(set(numbers)) != len(numbers) or len(numbers) > MAX_RANKS or max(numbers, default=0) >= MAX_RANKS:
        raise InvalidIndexError(
            f"{label} holds {listed(ranks)}; expected consolidated.00.pth, .01.pth, …, each number once and below "
            f"{MAX_RANKS}.",
            "Keep only files that were published together in the folder.",
        )
    missing = sorted({*range(max(numbers, default=0) + 1)} - {*numbers})
    if missing:
        lacking = ", ".join(f"consolidated.{rank:02}.pth" for rank in missing)
        raise MissingShardError(
            f"{label} lacks {lacking}; found {', '.join(ranks) or 'no other'}.",
            "Add the missing files: each has a part of every weight. Nothing was changed.",
        )
    return tuple(ranks)


@dataclass(frozen=True)
class MetaCheckpoint:
    """A checkpoint in Meta's format, as known before a shard is opened.

    Attributes:
        params: the parameters of the model.
        ranks: the names of all files of weights, used-up ones included.
        rank_header: name of a rank -> its header, with its own names; None if it is gone.
        path_of: name of another file -> its local path.
    """

    params: MetaParams
    ranks: tuple[str, ...]
    rank_header: Callable[[str], Header | None]
    path_of: Callable[[str], Path]
    loses_metadata = False

    def taken_from(self, shard: str, header: Header) -> Header:
        """The header that a split uses for a rank; for errors see `translated`."""
        return translated(header, self.params, self.ranks.index(shard), len(self.ranks), shard)

    def index(self) -> CheckpointIndex:
        """The index of all ranks, from the header of one; for errors see `translated`."""
        shard, header = self._first_rank or (self.ranks[0], None)
        if header is None:
            raise MissingShardError(
                f"{shard} is missing, as are all other ranks.", "Add the files. Nothing was changed."
            )
        return index_from(header, self.params, self.ranks, shard)

    @functools.cached_property
    def _first_rank(self) -> tuple[str, Header] | None:
        """The first rank that exists, and its header; all have the same names and shapes."""
        return next(((rank, header) for rank in self.ranks if (header := self.rank_header(rank))), None)

    def with_dtype(self, dtype: str | None) -> None:
        """None: its tensors keep their dtypes."""

    def derived(self, sidecars: Collection[str]) -> dict[str, bytes]:
        """Config and tokenizer for transformers: name -> content; nothing once all ranks are gone.

        Args:
            sidecars: names of existing files, which need not be derived.

        Raises:
            CheckpointError: see `shapes_of` and `derive_tokenizer`; or the tokenizer has more tokens than the model.
        """
        if self._first_rank is None:
            return {}
        shard, header = self._first_rank
        path_of = self.path_of
        vocabulary = path_of(VOCABULARY_NAME) if VOCABULARY_NAME in sidecars else None
        present = {name for name in sidecars if name != CONFIG_NAME or names_a_model(path_of(name))}
        shapes = shapes_of(header, self.params, len(self.ranks), shard)
        known_vocabulary: LlamaVocabulary | None = None
        files: dict[str, bytes] = {}
        if vocabulary is not None and not set(TOKENIZER_NAMES) & present:
            max_length = context_length(self.params, shapes, None)
            known_vocabulary, files = derive_tokenizer(vocabulary, self.params.use_scaled_rope, max_length)
            if known_vocabulary.size > shapes.vocab_size:
                raise InvalidIndexError(
                    f"{VOCABULARY_NAME} has {known_vocabulary.size:,} tokens, the weights have {shapes.vocab_size:,}.",
                    "Put the tokenizer.model that was published with the weights into their folder.",
                )
        if CONFIG_NAME not in present:
            files[CONFIG_NAME] = as_json(config_of(self.params, shapes, known_vocabulary))
        if GENERATION_NAME not in present:
            llama_3 = is_llama_3(self.params, shapes, known_vocabulary)
            files[GENERATION_NAME] = as_json(token_ids(llama_3, shapes, known_vocabulary))
        return files


def read_meta(
    params: Path, ranks: tuple[str, ...], rank_header: Callable[[str], Header | None], path_of: Callable[[str], Path]
) -> MetaCheckpoint:
    """A checkpoint from its params.json; for the rest see `MetaCheckpoint`.

    Raises:
        InvalidIndexError, UnreadableFormatError: see `parse_params`.
    """
    return MetaCheckpoint(parse_params(read_json(params), META_PARAMETERS), ranks, rank_header, path_of)


def names_a_model(config: Path) -> bool:
    """Whether a config.json is in transformers' format; Meta's repositories may have another, or none.

    A damaged file counts as one of transformers': the error is raised where it is read.
    """
    try:
        return config.is_file() and isinstance(read_json(config).get("model_type"), str)
    except InvalidIndexError:
        return True
