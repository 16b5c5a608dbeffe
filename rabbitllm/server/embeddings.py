"""Vectors of texts, from models whose checkpoint says how they are made.

A causal model has no embeddings of its own. Those that were trained for them come with the files of
sentence-transformers: `modules.json` lists what follows the transformer, and `1_Pooling/config.json` says which of the
hidden states counts. Several texts are computed in a pass, and these passes alternate with those of generations.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rabbitllm.checkpoints.json_file import read_json
from rabbitllm.errors import InvalidIndexError
from rabbitllm.formats.json_text import decode_json
from rabbitllm.server.api_error import bad
from rabbitllm.server.completion_requests import listed, token_ids
from rabbitllm.server.schemas import Embedding
from rabbitllm.server.settings import ModelLimits, Settings
from rabbitllm.telemetry.passes import PassInput

MODULES = "modules.json"
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
"""Settings of sentence-transformers' pooling that are computed here."""
MAX_INPUTS = 2048
MAX_TOKENS = 4096
"""In one pass, unless one text has more."""


@dataclass(frozen=True, slots=True)
class PoolingRecipe:
    """How hidden states become a vector.

    Attributes:
        pooling: "last", "mean" or "cls".
        normalise: to length one.
    """

    pooling: str
    normalise: bool


@dataclass(frozen=True, slots=True)
class EmbeddingAsked:
    """Embeddings that can be made.

    Attributes:
        inputs: token ids of each.
        as_base64: bytes of float32, little-endian, rather than numbers.
        dimensions: so many of the first ones only; None for all.
    """

    inputs: tuple[tuple[int, ...], ...]
    as_base64: bool = False
    dimensions: int | None = None


def recipe_in(folder: Path) -> PoolingRecipe | None:
    """What a checkpoint's folder says; None if it says nothing, or something that is not computed here.

    Args:
        folder: of config and tokenizer.
    """
    try:
        modules = decode_json((folder / MODULES).read_bytes())
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
            return None
        place = str(modules[1]["path"])
        if not place.replace("_", "").isalnum():  # a name is never a path
            return None
        said = read_json(folder / place / "config.json")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, InvalidIndexError):
        return None
    chosen = [name for name, value in said.items() if name.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        return None
    return PoolingRecipe(POOLINGS[chosen[0]], kinds[2:] == ["Normalize"])


class Embedder:
    """Makes vectors.

    Args:
        model: as `AutoModel.from_pretrained` returns it.
        recipe: see `recipe_in`.
    """

    def __init__(self, model: Any, recipe: PoolingRecipe) -> None:
        self._model = model
        self._recipe = recipe
        self._turn = asyncio.Lock()

    @property
    def width(self) -> int:
        """Numbers in a vector."""
        return int(self._model.config.get_text_config().hidden_size)

    async def embed(self, inputs: Sequence[Sequence[int]]) -> list[list[float]]:
        """A vector for each input; a client that leaves ends it between two passes."""
        found: list[list[float]] = [[]] * len(inputs)
        async with self._turn:
            for group in groups([len(ids) for ids in inputs]):
                vectors = await asyncio.to_thread(self.vectors, [inputs[place] for place in group])
                for place, vector in zip(group, vectors, strict=True):
                    found[place] = vector
        return found

    def vectors(self, inputs: Sequence[Sequence[int]]) -> list[list[float]]:
        """The vectors of some texts, float32, all in one pass.

        Shorter ones are filled up behind their end, where a causal model does not look: what is there changes nothing
        but the rounding.

        Args:
            inputs: tokens of each.
        """
        longest = max(map(len, inputs))
        tokens = torch.zeros(len(inputs), longest, dtype=torch.long)
        for row, ids in zip(tokens, inputs, strict=True):
            row[: len(ids)] = torch.tensor(list(ids))
        with self._model.joint_pass(PassInput(len(inputs), longest, None, None)):
            states = self._model.base_model(input_ids=tokens.to(self._model.device), use_cache=False).last_hidden_state
        return [self._pooled(of_one[: len(ids)].float()) for of_one, ids in zip(states, inputs, strict=True)]

    def _pooled(self, states: torch.Tensor) -> list[float]:
        pooled = {"last": states[-1], "cls": states[0], "mean": states.mean(dim=0)}[self._recipe.pooling]
        if self._recipe.normalise:
            pooled = torch.nn.functional.normalize(pooled, dim=0)
        return [float(value) for value in pooled.tolist()]


def groups(lengths: Sequence[int]) -> list[list[int]]:
    """Which inputs go through the model together: those of like length, `MAX_TOKENS` with what fills them up.

    Args:
        lengths: of all.

    Returns:
        Places of inputs, each in one group.
    """
    found: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if found and lengths[found[-1][0]] * (len(found[-1]) + 1) <= MAX_TOKENS:
            found[-1].append(place)
        else:
            found.append([place])
    return found


def embedding_asked(
    body: Embedding, tokenizer: Any, model: ModelLimits, settings: Settings, embedder: Embedder
) -> EmbeddingAsked:
    """What to compute.

    Raises:
        APIError: nothing to embed, too much of it, or more dimensions than there are.
    """
    given = listed(body.input)
    if not given:
        raise bad("There is no input.", "input")
    if len(given) > MAX_INPUTS:
        raise bad(f"There are {len(given):,} inputs; expected at most {MAX_INPUTS:,}.", "input")
    if body.dimensions is not None and body.dimensions > embedder.width:
        raise bad(f"dimensions is {body.dimensions:,}; this model's vectors have {embedder.width:,}.", "dimensions")
    inputs = []
    for one in given:
        ids = token_ids(one, tokenizer)
        if not ids:
            raise bad("An input has no tokens.", "input")
        if max(ids) >= model.vocabulary:
            raise bad(f"An input has token {max(ids)}; this model has {model.vocabulary:,}.", "input")
        if model.context is not None and len(ids) > model.context:
            raise bad(
                f"An input has {len(ids):,} tokens; the model's context has {model.context:,}.",
                "input",
                "context_length_exceeded",
            )
        inputs.append(tuple(ids))
    return EmbeddingAsked(tuple(inputs), body.encoding_format == "base64", body.dimensions)


def embedding_object(asked: EmbeddingAsked, vectors: Sequence[Sequence[float]], name: str) -> dict[str, Any]:
    """As OpenAI's interface has it."""
    tokens = sum(map(len, asked.inputs))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": at, "embedding": _written(_cut(vector, asked.dimensions), asked)}
            for at, vector in enumerate(vectors)
        ],
        "model": name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _cut(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """The first dimensions, at the length that the whole has."""
    if dimensions is None or dimensions == len(vector):
        return vector
    cut = torch.tensor(vector[:dimensions])
    length = float(torch.tensor(vector).norm())
    return [float(value) for value in (torch.nn.functional.normalize(cut, dim=0) * length).tolist()]


def _written(vector: Sequence[float], asked: EmbeddingAsked) -> Any:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if asked.as_base64 else list(vector)
