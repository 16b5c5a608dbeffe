"""Embeddings of texts, from models whose checkpoint says how they are computed.

Only some models have embeddings. Models trained for embeddings come with the files of
sentence-transformers: `modules.json` lists the steps after the transformer, and `1_Pooling/config.json` says how
hidden states are pooled. Several texts are computed in a pass, and these passes alternate with those of generation.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rabbitllm.base.building import BUILDING
from rabbitllm.base.openmp import computed
from rabbitllm.engine.streamed_model import refuse_overflow
from rabbitllm.errors import InvalidIndexError
from rabbitllm.formats.bounded import decode_json, read_json
from rabbitllm.generation.request import ModelLimits
from rabbitllm.generation.scoring.micro_batches import TextLayout
from rabbitllm.generation.scoring.score import layout_of
from rabbitllm.server.api_error import bad, bad_options
from rabbitllm.server.requests import list_prompts, token_ids
from rabbitllm.server.schemas import Embedding, RerankBody
from rabbitllm.telemetry.passes import PassInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rabbitllm.engine.streamed_model import StreamedModel

_Input = TypeVar("_Input")
_Output = TypeVar("_Output")
MODULES = "modules.json"
NO_RECIPE = f"the checkpoint has no {MODULES} with a supported pooling"
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
"""Supported settings of sentence-transformers' pooling."""
MAX_INPUTS = 2048
MAX_TOKENS = 4096
"""Limit of tokens in one pass, unless one input is longer."""


@dataclass(frozen=True, slots=True)
class PoolingRecipe:
    """The way from hidden states to a vector.

    Attributes:
        pooling: "last", "mean" or "cls".
        normalise: whether vectors are scaled to length one.
    """

    pooling: str
    normalise: bool


@dataclass(frozen=True, slots=True)
class CheckedEmbedding:
    """A checked request for embeddings.

    Attributes:
        inputs: token ids of each input.
        as_base64: whether vectors are base64 of little-endian float32, instead of lists of numbers.
        dimensions: how many of the first dimensions to return; None for all.
    """

    inputs: tuple[tuple[int, ...], ...]
    as_base64: bool = False
    dimensions: int | None = None


def modules_in(folder: Path) -> list[tuple[str, str]]:
    """The steps of sentence-transformers in a checkpoint's folder, each with the name of its folder; empty for none."""
    try:
        modules = decode_json((folder / MODULES).read_bytes())
        steps = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in modules]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, InvalidIndexError):
        return []
    is_plain = all(name.replace("_", "").isalnum() for _, name in steps[1:])  # a name is never a path
    return steps if is_plain else []


def read_or_empty(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; empty if it cannot be read."""
    try:
        return read_json(path)
    except (OSError, InvalidIndexError):
        return {}


def recipe_in(folder: Path) -> PoolingRecipe | None:
    """The recipe in a checkpoint's folder; None if there is none, or if it is not supported.

    Args:
        folder: the folder of config and tokenizer.
    """
    modules = modules_in(folder)
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        return None
    config = read_or_empty(folder / modules[1][1] / "config.json")
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        return None
    return PoolingRecipe(POOLINGS[chosen[0]], kinds[2:] == ["Normalize"])


class Embedder:
    """Computes embeddings."""

    def __init__(self, model: StreamedModel, recipe: PoolingRecipe) -> None:
        self._model = model
        self._recipe = recipe
        self._pads = layout_of(model, exact=False) is not TextLayout.EQUAL  # in an encoder each token sees the padding
        self._lock = asyncio.Lock()

    @property
    def width(self) -> int:
        """Dimensions of a vector."""
        return int(self._model.config.get_text_config().hidden_size)

    async def embed(self, inputs: Sequence[Sequence[int]]) -> list[list[float]]:
        """A vector for each input; cancellation when the client disconnects takes effect between two passes."""
        async with self._lock:
            return await in_passes(self.vectors, inputs, groups([len(ids) for ids in inputs], pads=self._pads))

    def vectors(self, inputs: Sequence[Sequence[int]]) -> list[list[float]]:
        """The vectors of some inputs, float32, all in one pass.

        Shorter inputs are padded at the end, where causal attention does not look: padding changes only the rounding.

        Args:
            inputs: token ids of each input; of one group, see `groups`.
        """
        longest = max(map(len, inputs))
        tokens = torch.zeros(len(inputs), longest, dtype=torch.long)
        for row, ids in zip(tokens, inputs, strict=True):
            row[: len(ids)] = torch.tensor(list(ids))
        with BUILDING.a_pass(), self._model.joint_pass(PassInput(len(inputs), longest, None, None)):
            states = self._model.base_model(input_ids=tokens.to(self._model.device), use_cache=False).last_hidden_state
        return [self._pooled(hidden[: len(ids)].float()) for hidden, ids in zip(states, inputs, strict=True)]

    def _pooled(self, states: torch.Tensor) -> list[float]:
        refuse_overflow(states, "hidden states")
        pooled = {"last": states[-1], "cls": states[0], "mean": states.mean(dim=0)}[self._recipe.pooling]
        if self._recipe.normalise:
            pooled = torch.nn.functional.normalize(pooled, dim=0)
        return [float(value) for value in pooled.tolist()]


def groups(lengths: Sequence[int], *, pads: bool = True) -> list[list[int]]:
    """Group inputs of similar length into passes of at most `MAX_TOKENS` tokens each, padding included.

    Args:
        lengths: the length of each input.
        pads: whether a group may have inputs of several lengths.

    Returns:
        Indices of inputs, each in one group.
    """
    passes: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        longest = lengths[passes[-1][0]] if passes else None
        if longest and longest * (len(passes[-1]) + 1) <= MAX_TOKENS and (pads or lengths[index] == longest):
            passes[-1].append(index)
        else:
            passes.append([index])
    return passes


async def in_passes(
    compute: Callable[[list[_Input]], list[_Output]], inputs: Sequence[_Input], passes: Iterable[Sequence[int]]
) -> list[_Output]:
    """What is computed of each input, in passes over some of them; cancellation takes effect between two passes."""
    outputs: dict[int, _Output] = {}
    for group in passes:
        of_group = await to_its_end(compute, [inputs[index] for index in group])
        outputs |= zip(group, of_group, strict=True)
    return [outputs[index] for index in range(len(inputs))]


async def to_its_end(compute: Callable[..., _Output], *arguments: Any) -> _Output:
    """The result of a pass in a thread.

    Cancellation waits for the end of the pass: until then the request uses the model, and the lock that it holds keeps
    those behind it from beginning passes that nothing can stop.
    """
    running = asyncio.ensure_future(asyncio.to_thread(computed, compute, *arguments))
    try:
        return await asyncio.shield(running)
    finally:
        await asyncio.gather(running, return_exceptions=True)


def checked_embedding(
    body: Embedding,
    tokenizer: PreTrainedTokenizerBase,
    limits: ModelLimits,
    width: int,
    max_inputs: int | None = MAX_INPUTS,
) -> CheckedEmbedding:
    """Check the body and tokenize its inputs.

    Args:
        body: the body.
        tokenizer: tokenizer of the model.
        limits: bounds of the model.
        width: dimensions of a vector.
        max_inputs: maximum number of inputs; None for no limit.

    Raises:
        APIError: no input, too many or too long inputs, or more dimensions than the model has.
    """
    entries = list_prompts(body.input)
    if not entries:
        raise bad("The input is empty.", "input")
    if max_inputs is not None and len(entries) > max_inputs:
        raise bad(f"There are {len(entries):,} inputs; expected at most {max_inputs:,}.", "input")
    if body.dimensions is not None and body.dimensions > width:
        raise bad(f"dimensions is {body.dimensions:,}; this model's vectors have {width:,}.", "dimensions")
    inputs = []
    for entry in entries:
        ids = token_ids(entry, tokenizer, limits, "input")
        check_ids(ids, limits, "input", "An input")
        inputs.append(tuple(ids))
    return CheckedEmbedding(tuple(inputs), body.encoding_format == "base64", body.dimensions)


def check_ids(ids: Sequence[int], limits: ModelLimits, param: str, name: str) -> None:
    """Refuse what has no tokens, unknown ones, or more than the context; `name` is that of the text in messages.

    Raises:
        APIError: it has.
    """
    with bad_options(param):
        limits.check_ids(ids, name)
    if limits.context is not None and len(ids) > limits.context:
        raise bad(
            f"{name} has {len(ids):,} tokens; the model's context has {limits.context:,}.",
            param,
            "context_length_exceeded",
        )


def embedding_object(call: CheckedEmbedding, vectors: Sequence[Sequence[float]], name: str) -> dict[str, Any]:
    """The response object of OpenAI's interface."""

    def encode(vector: Sequence[float]) -> Any:
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if call.as_base64 else list(vector)

    tokens = sum(map(len, call.inputs))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(_cut(vector, call.dimensions))}
            for index, vector in enumerate(vectors)
        ],
        "model": name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def cosines(vectors: Sequence[Sequence[float]]) -> list[float]:
    """The cosine of the first vector and each of the others."""
    unit = torch.nn.functional.normalize(torch.tensor([list(vector) for vector in vectors]), dim=1)
    return [float(cosine) for cosine in (unit[1:] @ unit[0]).tolist()]


def rerank_object(body: RerankBody, scores: Sequence[float], tokens: int, name: str) -> dict[str, Any]:
    """Documents by their scores, as Jina's and Cohere's interfaces return them."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    shown = [{"document": {"text": body.documents[index]}} if body.return_documents else {} for index in order]
    return {
        "model": name,
        "results": [
            {"index": index, "relevance_score": scores[index], **document}
            for index, document in zip(order, shown, strict=True)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _cut(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """The first dimensions, rescaled to the length of the whole vector."""
    if dimensions is None or dimensions == len(vector):
        return vector
    cut = torch.tensor(vector[:dimensions])
    length = float(torch.tensor(vector).norm())
    return [float(value) for value in (torch.nn.functional.normalize(cut, dim=0) * length).tolist()]
