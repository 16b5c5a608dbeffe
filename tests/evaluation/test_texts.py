"""Windows of a text cover it once, from its beginning on, and nothing else is predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import rabbitllm.demo
from rabbitllm.demo.tasks import held_out
from rabbitllm.errors import OptionError, QualityError
from rabbitllm.evaluation.quality import answers_of, bundled_text, is_trained_here, text_of, windows
from tests.support.builders import make_tokenizer

DEMO_MODEL = Path(rabbitllm.demo.__file__).parent / "model"
TEXT = "the hare and the rabbit ran on. " * 20


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def bundled() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def test_windows_with_a_beginning_predict_every_token_once(tokenizer: Any) -> None:
    assert tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    found = windows(tokenizer, TEXT, window=32, tokens=10_000)
    assert [token for one in found for token in one.continuation] == ids
    assert {tuple(one.context) for one in found} == {(tokenizer.bos_token_id,)}
    assert [one.index for one in found] == list(range(len(found)))
    assert {1 + len(one.continuation) for one in found[:-1]} == {32}


def test_windows_without_one_predict_all_but_their_first_token(bundled: Any) -> None:
    ids = bundled(TEXT)["input_ids"]
    found = windows(bundled, TEXT, window=32, tokens=10_000)
    whole = [token for one in found for token in (*one.context, *one.continuation)]
    assert whole == ids[: len(whole)]
    assert len(ids) - len(whole) < 2
    assert {len(one.context) for one in found} == {1}


@pytest.mark.parametrize("tokens", [16, 31, 32, 100])
def test_no_more_is_predicted_than_asked_for(tokenizer: Any, tokens: int) -> None:
    found = windows(tokenizer, TEXT, window=32, tokens=tokens)
    assert sum(len(one.continuation) for one in found) == tokens


def test_too_short_a_text_and_impossible_numbers_are_refused(tokenizer: Any) -> None:
    with pytest.raises(QualityError, match="has 0 tokens to be predicted; at least 16"):
        windows(tokenizer, "", window=32, tokens=100)
    with pytest.raises(QualityError, match="tokens to be predicted; at least 16"):
        windows(tokenizer, "the hare", window=32, tokens=100)
    for window, tokens in ((1, 100), (32, 15)):
        with pytest.raises(OptionError, match=f"window={window}, tokens={tokens}"):
            windows(tokenizer, TEXT, window=window, tokens=tokens)


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"nowhere\.txt cannot be read as text"):
        text_of(tmp_path / "nowhere.txt")
    (tmp_path / "other.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match=r"other\.txt cannot be read as text"):
        text_of(tmp_path / "other.txt")
    (tmp_path / "one.txt").write_text("héron", encoding="utf-8")
    assert text_of(tmp_path / "one.txt") == "héron"


def test_what_comes_along_is_enough(tokenizer: Any) -> None:
    """Also for tokenizers whose tokens are longer."""
    words = len(bundled_text().split())
    assert words > 800
    assert sum(len(one.continuation) for one in windows(tokenizer, bundled_text(), window=256, tokens=4096)) > words


def test_of_a_problem_its_answer_is_predicted_and_its_end(bundled: Any) -> None:
    problems = held_out(8)
    for one, problem in zip(answers_of(bundled, problems), problems, strict=True):
        assert bundled.decode(one.context) == problem.prompt
        assert bundled.decode(one.continuation[:-1]).strip() == problem.answer
        assert one.continuation[-1] == bundled.eos_token_id
    assert is_trained_here(bundled)


def test_other_tokenizers_are_told_from_the_bundled_one(tokenizer: Any) -> None:
    assert not is_trained_here(tokenizer)
