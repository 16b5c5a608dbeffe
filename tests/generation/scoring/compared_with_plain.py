"""What plain transformers says of each text by itself, to compare with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rabbitllm.generation.scoring import Room, Scored, ScoredText, score

TOLERANCE = 1e-4
"""Of a sum of logarithms, and of a number of an embedding, where rounding depends on what is computed together."""
SHARED = 20
"""Tokens that several texts begin with: more than a segment has to have, and more than a window of the tests has."""


def texts_for(vocabulary: int = 270, seed: int = 0) -> list[ScoredText]:
    """Choices with and without a common prefix, of several lengths, some of one token, and embeddings."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, vocabulary, (count,), generator=generator).tolist())

    shared, texts = tokens(SHARED), []
    for question in range(5):
        context = (*shared, *tokens(1 + question)) if question % 2 else tokens(2 + 6 * question)
        for choice in range(3):
            pooling = (None, "last", "mean")[choice] if question > 2 else None
            texts.append(ScoredText(len(texts) + 100, context, tokens(1 + choice), pooling))  # type: ignore[arg-type]
    texts.append(ScoredText(90, shared, (), "mean"))
    texts.append(ScoredText(91, texts[3].context, texts[3].continuation))
    return texts


def alone(model: Any, text: ScoredText) -> Scored:
    """By one forward of transformers.

    Args:
        model: any that transformers made.
        text: the text.
    """
    ids = torch.tensor([[*text.context, *text.continuation]], device=model.device)
    embedding = None
    with torch.no_grad():
        if text.pooling is not None:
            states = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0].float()
            embedding = tuple((states[-1] if text.pooling == "last" else states.mean(0)).tolist())
        if not text.continuation:
            return Scored(text.index, embedding=embedding)
        inputs = ids if text.pooling is not None else ids[:, :-1]
        logits = model(input_ids=inputs, use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits.float(), -1)[len(text.context) - 1 :][: len(text.continuation)]
    targets = torch.tensor(text.continuation, device=model.device)
    chosen = logprobs.gather(1, targets[:, None])[:, 0].tolist()
    greedy = bool((logprobs.argmax(-1) == targets).all())
    return Scored(text.index, math.fsum(chosen), len(chosen), greedy, embedding)


def body_of(model: Any) -> Any:
    """What returns hidden states."""
    return next(model.children()) if model.base_model is model else model.base_model


def by_index(results: Iterable[Scored]) -> dict[int, Scored]:
    """Each once."""
    listed = list(results)
    by_position = {result.index: result for result in listed}
    assert len(by_position) == len(listed)
    return by_position


def scored(model: Any, texts: Sequence[ScoredText], room: Room) -> dict[int, Scored]:
    """All of them."""
    return by_index(score(model, texts, room))


def assert_alike(results: dict[int, Scored], expected: Iterable[Scored]) -> None:
    """The same but for rounding."""
    for reference in expected:
        result = results[reference.index]
        assert result.error is None, str(result.error)
        assert (result.tokens, result.greedy) == (reference.tokens, reference.greedy)
        for mine, theirs in ((result.logprob, reference.logprob), (result.embedding, reference.embedding)):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=0, atol=TOLERANCE)
