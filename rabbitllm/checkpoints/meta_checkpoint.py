"""A checkpoint in Meta's own format: its ranks, its parameters, and the files to derive.

Opens params.json and tokenizer.model at given paths; the checkpoint that holds them opens the weights. Such a
checkpoint has no config.json and no tokenizer for transformers; both are derived from its files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.checkpoints.index import META_PARAMETERS, CheckpointIndex, is_rank, natural_key
from rabbitllm.checkpoints.json_file import read_json
from rabbitllm.checkpoints.meta_llama import (
    LlamaVocabulary,
    as_json,
    config_of,
    context_length,
    index_from,
    is_llama_3,
    shapes_of,
    token_ids,
    translated,
)
from rabbitllm.checkpoints.meta_params import MetaParams, parse_params
from rabbitllm.checkpoints.meta_tokenizer import TOKENIZER_NAMES, derive_tokenizer
from rabbitllm.errors import InvalidIndexError, MissingShardError
from rabbitllm.formats.safetensors_file import Header

logger = logging.getLogger(__name__)

VOCABULARY_NAME = "tokenizer.model"
CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
MAX_RANKS = 64
_NUMBER = re.compile(r"\d+")


def ranks_of(names: Iterable[str], where: str) -> tuple[str, ...]:
    """The files of all ranks in numerical order.

    Args:
        names: names of these and possibly other files.
        where: the folder's name in messages.

    Raises:
        MissingShardError: a rank is missing; the message names it.
        InvalidIndexError: two files have the same number, or there are more than any model has.
    """
    ranks = sorted(filter(is_rank, names), key=natural_key)
    numbers = [int(found[0]) for name in ranks if (found := _NUMBER.search(name))]
    if len(set(numbers)) != len(numbers) or len(numbers) > MAX_RANKS or max(numbers, default=0) >= MAX_RANKS:
        raise InvalidIndexError(
            f"{where} holds {', '.join(ranks[:5])}{' …' if len(ranks) > 5 else ''}; expected consolidated.00.pth and "
            f"on, each number once and below {MAX_RANKS}.",
            "Leave in the folder what was published together.",
        )
    missing = sorted({*range(max(numbers, default=0) + 1)} - {*numbers})
    if missing:
        lacking = ", ".join(f"consolidated.{number:02}.pth" for number in missing)
        raise MissingShardError(
            f"{where} lacks {lacking}; found {', '.join(ranks) or 'no other'}.",
            "Put the missing files there: each has a part of every weight. Nothing was touched.",
        )
    return tuple(ranks)


@dataclass(frozen=True, slots=True)
class MetaCheckpoint:
    """The content of such a checkpoint, as far as it is known before a shard is opened.

    Attributes:
        params: the parameters of the model.
        ranks: the names of all files of weights, used-up ones included.
    """

    params: MetaParams
    ranks: tuple[str, ...]

    def taken_from(self, shard: str, header: Header) -> Header:
        """The header that a split uses for a rank; for errors see `translated`."""
        return translated(header, self.params, self.ranks.index(shard), len(self.ranks), shard)

    def index(self, header: Header, shard: str) -> CheckpointIndex:
        """The index of all ranks, from the header of one; for errors see `translated`."""
        return index_from(header, self.params, self.ranks, shard)

    def derived(
        self, header: Header, shard: str, vocabulary: Path | None, sidecars: Collection[str]
    ) -> dict[str, bytes]:
        """Config and tokenizer for transformers: name -> content.

        Args:
            header: of a rank, with its own names.
            shard: that rank's name.
            vocabulary: the tokenizer.model, if there is one.
            sidecars: names of existing files, which need not be derived.

        Raises:
            CheckpointError: see `shapes_of` and `derive_tokenizer`; or the tokenizer has more tokens than the model.
        """
        shapes = shapes_of(header, self.params, len(self.ranks), shard)
        known: LlamaVocabulary | None = None
        files: dict[str, bytes] = {}
        if vocabulary is not None and not set(TOKENIZER_NAMES) & set(sidecars):
            longest = context_length(self.params, shapes, None)
            tokenizer = derive_tokenizer(vocabulary, self.params.scaled_rope, longest)
            known = tokenizer.vocabulary
            files |= tokenizer.files
            if known.size > shapes.vocab_size:
                raise InvalidIndexError(
                    f"{VOCABULARY_NAME} has {known.size:,} tokens, the weights have {shapes.vocab_size:,}.",
                    "Put the tokenizer.model that was published with the weights into their folder.",
                )
        elif vocabulary is None and not set(TOKENIZER_NAMES) & set(sidecars):
            logger.warning("The checkpoint has no %s; the model will have no tokenizer.", VOCABULARY_NAME)
        if CONFIG_NAME not in sidecars:
            files[CONFIG_NAME] = as_json(config_of(self.params, shapes, known))
        if GENERATION_NAME not in sidecars:
            llama_3 = is_llama_3(self.params, shapes, known)
            files[GENERATION_NAME] = as_json(token_ids(llama_3, shapes, known))
        return files


def read_meta(params: Path, ranks: tuple[str, ...]) -> MetaCheckpoint:
    """A checkpoint from its params.json.

    Raises:
        InvalidIndexError, UnreadableFormatError: see `parse_params`.
    """
    return MetaCheckpoint(parse_params(read_json(params), META_PARAMETERS), ranks)


def names_a_model(config: Path) -> bool:
    """Whether a config.json is in transformers' format; Meta's repositories may have another, or none.

    A damaged file counts as one of transformers': the error is raised where it is read.
    """
    try:
        return config.is_file() and isinstance(read_json(config).get("model_type"), str)
    except InvalidIndexError:
        return True
