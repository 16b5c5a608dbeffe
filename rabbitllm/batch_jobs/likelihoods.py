"""Items that ask for likelihoods or embeddings, by `rabbitllm.generation.scoring`: many in one pass.

    {"id": …, "logprob": …, "tokens": …, "greedy": …}              of one continuation
    {"id": …, "scores": [{"logprob": …, "tokens": …, "greedy": …}, …]}    of a list of them
    {"id": …, "choice": …, "choice_by_length": …, "logprobs": […], "tokens": […]}
    {"id": …, "embedding": […]} or {"id": …, "embeddings": [[…], …]}

Texts are tokenized as in lm-evaluation-harness: context and continuation together, and the tokens after those of
the context alone belong to the continuation (https://github.com/EleutherAI/lm-evaluation-harness, `_encode_pair`).
Spaces at the end of a context belong to the continuation too. An empty context becomes the model's first token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rabbitllm.batch_jobs.asking import RequestBuilder, call_line, error_line, missing_pydantic
from rabbitllm.batch_jobs.items import BatchAnswer, BatchCall, Choose, Embed, Item, JobLimits, ScoreItem
from rabbitllm.errors import RabbitLLMError
from rabbitllm.generation.scoring import Room, Scored, ScoredText, score
from rabbitllm.server.api_error import APIError, bad

MAX_TOKENS = 1 << 22
"""Tokens per call of scoring, which makes as few passes of them as memory allows; more would only occupy memory."""
MAX_TEXTS = 1 << 16


@dataclass(slots=True)
class _Open:
    """An item with texts that are not scored yet.

    Attributes:
        item: the item.
        texts: the texts to score.
        found: results so far, by text.
        embedding: the request, for an embedding in OpenAI's form.
    """

    item: Item
    texts: Sequence[ScoredText]
    embedding: Any = None
    found: dict[int, Scored] = field(default_factory=dict)


def scored(model: Any, name: str, items: Iterator[Item], limits: JobLimits) -> Iterator[list[BatchAnswer]]:
    """Answers in the order of their completion.

    Args:
        model: a model from `AutoModel.from_pretrained`; nothing else may call it meanwhile.
        name: the model's name in answers.
        items: items that ask for likelihoods or embeddings.
        limits: see `JobLimits`.
    """
    desk = RequestBuilder(model, name)
    room = Room(memory_bytes=limits.cache_bytes, exact=limits.exact)
    at_end = False
    while not at_end:
        by_text: list[_Open] = []  # item of each text
        texts: list[ScoredText] = []
        refused: list[BatchAnswer] = []
        tokens = 0
        while tokens < MAX_TOKENS and len(by_text) < MAX_TEXTS:
            item = next(items, None)
            if item is None:
                at_end = True
                break
            try:
                one = _open(desk, item, len(by_text))
            except APIError as error:
                refused.append(BatchAnswer(item.index, item.key, error_line(item, error), is_error=True))
                continue
            tokens += sum(len(text.context) + len(text.continuation) for text in one.texts)
            by_text += [one] * len(one.texts)
            texts += one.texts
        if refused:
            yield refused
        if texts:
            for result in score(model, texts, room):
                one = by_text[result.index]
                one.found[result.index] = result
                if len(one.found) == len(one.texts):
                    yield [_answer(desk, one)]


def _open(desk: RequestBuilder, item: Item, first: int) -> _Open:
    """
    Args:
        desk: tokenizes texts.
        item: the item.
        first: index of its first text.

    Raises:
        APIError: it cannot be answered.
    """
    asked = item.asked
    if isinstance(asked, ScoreItem | Choose):
        wanted = asked.continuations if isinstance(asked, ScoreItem) else asked.choices
        pairs = [_pair(desk, asked.context, text) for text in wanted]
        return _Open(item, [ScoredText(first + at, *pair) for at, pair in enumerate(pairs)])
    if isinstance(asked, Embed):
        ids = [desk.ids_of(text) for text in asked.texts]
        return _Open(item, [ScoredText(first + at, one, (), asked.pooling) for at, one in enumerate(ids)])
    assert isinstance(asked, BatchCall)
    wanted_call = _embedding_call(asked, desk)
    pooling = asked.defaults.pooling
    texts = [ScoredText(first + at, one, (), pooling) for at, one in enumerate(wanted_call.inputs)]
    return _Open(item, texts, wanted_call)


def _pair(desk: RequestBuilder, context: str, continuation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    bare = context.rstrip()
    continuation = context[len(bare) :] + continuation
    if not bare:
        whole = tuple(int(one) for one in desk.tokenizer(continuation, add_special_tokens=False)["input_ids"])
        first = desk.tokenizer.bos_token_id
        first = desk.tokenizer.eos_token_id if first is None else first
        if first is None:
            raise bad("The context is empty, and the model has no token to begin with.")
        behind = whole[1:] if whole[:1] == (first,) else whole
        before: tuple[int, ...] = (int(first),)
    else:
        before = desk.ids_of(bare)
        behind = desk.ids_of(bare + continuation)[len(before) :]
    if not behind:
        raise bad("The continuation has no token of its own.")
    return before, behind


def _embedding_call(asked: BatchCall, desk: RequestBuilder) -> Any:
    try:
        from rabbitllm.server.embeddings import EmbeddingAsked
        from rabbitllm.server.requests import listed
        from rabbitllm.server.schemas import Embedding, parsed
    except ImportError as error:
        raise missing_pydantic(error) from None
    body = parsed(Embedding, {name: value for name, value in asked.body.items() if value is not None})
    given = listed(body.input)
    if not given:
        raise bad("There is no input.", "input")
    inputs = tuple(desk.ids_of(one if isinstance(one, str) else tuple(one)) for one in given)
    if body.dimensions is not None and body.dimensions > desk.width:
        raise bad(f"dimensions is {body.dimensions:,}; this model's vectors have {desk.width:,}.", "dimensions")
    return EmbeddingAsked(inputs, body.encoding_format == "base64", body.dimensions)


def _answer(desk: RequestBuilder, one: _Open) -> BatchAnswer:
    found = [one.found[text.index] for text in one.texts]
    item = one.item
    for result in found:
        if result.error is not None:
            return BatchAnswer(item.index, item.key, error_line(item, _refusal(result.error)), is_error=True)
    line = _line(desk, one, found)
    prompt = sum(len(text.context) + len(text.continuation) for text in one.texts)
    return BatchAnswer(item.index, item.key, line, False, prompt, 0)


def _line(desk: RequestBuilder, one: _Open, found: Sequence[Scored]) -> Mapping[str, Any]:
    item, asked = one.item, one.item.asked
    if isinstance(asked, ScoreItem):
        scores = [{"logprob": each.logprob, "tokens": each.tokens, "greedy": each.greedy} for each in found]
        return {"id": item.key, "scores": scores} if asked.is_listed else {"id": item.key, **scores[0]}
    if isinstance(asked, Choose):
        logprobs = [_number(each.logprob) for each in found]
        by_length = [value / len(text) for value, text in zip(logprobs, asked.choices, strict=True)]
        return {
            "id": item.key,
            "choice": logprobs.index(max(logprobs)),
            "choice_by_length": by_length.index(max(by_length)),
            "logprobs": logprobs,
            "tokens": [each.tokens for each in found],
        }
    if isinstance(asked, Embed):
        vectors = [_vector(each, normalise=asked.normalise) for each in found]
        return {"id": item.key, "embeddings": vectors} if asked.is_listed else {"id": item.key, "embedding": vectors[0]}
    from rabbitllm.server.embeddings import embedding_object

    assert isinstance(asked, BatchCall)
    vectors = [_vector(each, normalise=asked.defaults.normalise) for each in found]
    return call_line(item, 200, embedding_object(one.embedding, vectors, desk.name))


def _number(value: float | None) -> float:
    assert value is not None
    return value


def _vector(found: Scored, *, normalise: bool) -> list[float]:
    assert found.embedding is not None
    if not normalise:
        return list(found.embedding)
    length = sum(value * value for value in found.embedding) ** 0.5
    return [value / length for value in found.embedding] if length else list(found.embedding)


def _refusal(error: RabbitLLMError) -> APIError:
    return bad(error.problem)
