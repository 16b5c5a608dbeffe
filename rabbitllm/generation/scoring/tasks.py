"""What has to be computed for texts: distinct rows of tokens, and which of their rows' logits are asked for. Pure.

    context  a b c   continuation  d e      inputs  a b c d     logits of the rows of c and d, at d and e

The last token of a continuation is predicted, and predicts nothing: it is no input unless an embedding is wanted.
Texts with the same inputs, as those of a choice between single tokens, are one task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rabbitllm.errors import OptionError
from rabbitllm.generation.scoring.records import ScoredText

POOLINGS = ("last", "mean")


@dataclass(frozen=True, slots=True)
class Ability:
    """What a model can be asked.

    Attributes:
        vocabulary: tokens it knows.
        context: tokens that it takes; None where nothing says so.
        has_head: whether it gives probabilities.
    """

    vocabulary: int
    context: int | None
    has_head: bool = True


@dataclass(frozen=True, slots=True)
class Asked:
    """What one text wants of a task.

    Attributes:
        number: of the text, among those given.
        first: the input row whose logits belong to the first of `targets`; the next rows' belong to the others.
        targets: tokens whose probabilities are wanted.
        pooling: see `ScoredText`.
    """

    number: int
    first: int
    targets: tuple[int, ...]
    pooling: str | None


@dataclass(frozen=True, slots=True)
class Task:
    """Tokens that go through the model once.

    Attributes:
        ids: of the inputs.
        asked: by whom, and for what.
    """

    ids: tuple[int, ...]
    asked: tuple[Asked, ...]


def problem_of(text: ScoredText, ability: Ability, *, truncate: bool) -> OptionError | None:
    """Why a text cannot be scored; None if it can.

    Args:
        text: the text.
        ability: of the model.
        truncate: whether it may lose its beginning.
    """
    name = f"The text with index {text.index}"
    if not text.continuation and text.pooling is None:
        return OptionError(f"{name} asks for nothing.", "Give a continuation, or a pooling for an embedding.")
    if text.pooling is not None and text.pooling not in POOLINGS:
        return OptionError(f"{name} has pooling={text.pooling!r}; expected one of {', '.join(POOLINGS)}.")
    if not text.context and (text.continuation or text.pooling is None):
        return OptionError(
            f"{name} has an empty context, so that nothing predicts the first token of its continuation.",
            "Give at least one token as context: the tokenizer's beginning-of-sequence or end-of-sequence token.",
        )
    if not text.context:
        return OptionError(f"{name} has no tokens.", "Leave it out.")
    if text.continuation and not ability.has_head:
        return OptionError(f"{name} has a continuation, and the model gives no probabilities, only embeddings.")
    wrong = [token for token in (*text.context, *text.continuation) if not 0 <= token < ability.vocabulary]
    if wrong:
        return OptionError(f"{name} has the token {wrong[0]}; the model knows {ability.vocabulary:,}.")
    inputs = len(_inputs(text))
    if ability.context is None or inputs <= ability.context:
        return None
    if not truncate:
        return OptionError(
            f"{name} brings {inputs:,} tokens into the model, whose context has {ability.context:,}.",
            "Shorten it, or let it lose its beginning (truncate).",
        )
    if len(text.continuation) > ability.context:
        return OptionError(
            f"{name} has a continuation of {len(text.continuation):,} tokens; the model's context has "
            f"{ability.context:,}.",
            "Score it in parts, each with what comes before it as context.",
        )
    return None


def tasks_of(
    texts: Sequence[ScoredText], numbers: Iterable[int], context: int | None, *, shared: bool = True
) -> list[Task]:
    """What has to be computed for some texts that have no problem.

    Args:
        texts: all of them.
        numbers: of those.
        context: the model's; what is longer loses its beginning.
        shared: texts with the same inputs are one task.
    """
    asked: dict[tuple[int, tuple[int, ...]], list[Asked]] = {}
    for number in numbers:
        text = texts[number]
        whole = _inputs(text)
        ids = whole if context is None else whole[-context:]
        targets = tuple(text.continuation)
        last = len(ids) - (text.pooling is not None)  # behind the row of the last target
        one = Asked(number, last - len(targets), targets, text.pooling)
        asked.setdefault((0 if shared else number, ids), []).append(one)
    return [Task(ids, tuple(found)) for (_, ids), found in asked.items()]


def _inputs(text: ScoredText) -> tuple[int, ...]:
    whole = (*text.context, *text.continuation)
    return whole if text.pooling is not None else whole[:-1]
