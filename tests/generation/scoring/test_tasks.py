"""What has to be computed for texts, and which of them are refused."""

from __future__ import annotations

import re

import pytest

from rabbitllm.errors import OptionError
from rabbitllm.generation.request import ModelLimits
from rabbitllm.generation.scoring._tasks import ScoredText, TextRequest, check_text, tasks_of

ABLE = ModelLimits(context=8, vocabulary=100)


def test_the_last_token_is_no_input() -> None:
    (task,) = tasks_of([ScoredText(0, (1, 2, 3), (4, 5))], [0], 8)
    assert task.ids == (1, 2, 3, 4)
    assert task.asked == (TextRequest(0, 2, (4, 5), None),)


def test_embeddings_use_all_tokens() -> None:
    (task,) = tasks_of([ScoredText(0, (1, 2, 3), (4, 5), "mean")], [0], 8)
    assert task.ids == (1, 2, 3, 4, 5)
    assert task.asked == (TextRequest(0, 2, (4, 5), "mean"),)


def test_one_token_choices_share_a_task() -> None:
    texts = [ScoredText(index, (1, 2, 3), (index,)) for index in range(4)]
    (task,) = tasks_of(texts, range(4), 8)
    assert task.ids == (1, 2, 3)
    assert [request.targets for request in task.asked] == [(0,), (1,), (2,), (3,)]
    assert len(tasks_of(texts, range(4), 8, shared=False)) == 4


def test_long_texts_lose_their_beginning() -> None:
    texts = [ScoredText(0, range(10), (50, 51)), ScoredText(1, range(10), (50, 51), "last")]
    without, whole = tasks_of(texts, [0, 1], 8)
    assert without.ids == (3, 4, 5, 6, 7, 8, 9, 50)
    assert without.asked == (TextRequest(0, 6, (50, 51), None),)
    assert whole.ids == (4, 5, 6, 7, 8, 9, 50, 51)
    assert whole.asked == (TextRequest(1, 5, (50, 51), "last"),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ScoredText(7, (1, 2)), "no continuation and no pooling"),
        (ScoredText(7, (), (1,)), "empty context"),
        (ScoredText(7, (), (), "last"), "no tokens"),
        (ScoredText(7, (1,), (), "first"), "pooling='first'"),  # type: ignore[arg-type]
        (ScoredText(7, (1, 100), (2,)), "the token 100"),
        (ScoredText(7, (1,), (-1,)), "the token -1"),
        (ScoredText(7, range(8), (1, 2)), "9 tokens; the model's context has 8"),
    ],
)
def test_refused_texts(text: ScoredText, words: str) -> None:
    with pytest.raises(OptionError, match=f"index 7.*{re.escape(words)}"):
        check_text(text, ABLE, truncate=False)


def test_inputs_may_fill_the_context() -> None:
    check_text(ScoredText(0, range(8), (1,)), ABLE, truncate=False)
    with pytest.raises(OptionError):
        check_text(ScoredText(0, range(8), (1,), "last"), ABLE, truncate=False)
    check_text(ScoredText(0, range(80), (1,)), ModelLimits(None, 100), truncate=False)


def test_truncating_keeps_the_continuation_whole() -> None:
    check_text(ScoredText(0, range(20), range(8)), ABLE, truncate=True)
    with pytest.raises(OptionError, match="continuation of 9 tokens"):
        check_text(ScoredText(0, range(20), range(9)), ABLE, truncate=True)
    check_text(ScoredText(0, range(20), range(7), "last"), ABLE, truncate=True)
    with pytest.raises(OptionError):
        check_text(ScoredText(0, range(20), range(8), "last"), ABLE, truncate=True)


def test_a_model_without_a_head_has_embeddings_only() -> None:
    check_text(ScoredText(0, (1,), (), "last"), ABLE, has_head=False, truncate=False)
    with pytest.raises(OptionError):
        check_text(ScoredText(0, (1,), (2,)), ABLE, has_head=False, truncate=False)
