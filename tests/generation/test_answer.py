"""One generation: the tokens are transformers' own, where and why it ends is said, and the work that it took."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console

from rabbitllm.errors import OptionError
from rabbitllm.generation.request import (
    MAX_TOKENS,
    Answer,
    AnswerWork,
    FinishReason,
    Sampling,
    context_of,
    end_tokens,
    most_new_tokens,
)
from rabbitllm.generation.session import answer, work_between
from rabbitllm.run.prompt import answer_record, how_it_ended, put_statistics
from rabbitllm.telemetry.passes import PassInput
from rabbitllm.telemetry.profiler import EXPERTS_READ, READ, UPLOAD, Profiler
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import load, one_thread, plain_model, split  # noqa: F401  a fixture that applies itself

TOKENS = 12
GREEDY = Sampling()
IDS = torch.tensor([[1, 40, 81, 7, 200]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("ask") / "model", "llama")


@pytest.fixture
def model(folder: Path) -> Any:
    return load(split(folder), profiling=True)


def asked(model: Any, sampling: Sampling = GREEDY, tokens: int = TOKENS) -> tuple[Answer, list[str]]:
    pieces: list[str] = []
    return answer(model, IDS, tokens, sampling, pieces.append), pieces


def test_greedy_by_default_and_those_of_transformers(folder: Path, model: Any) -> None:
    found, pieces = asked(model)
    expected = plain_model(folder).generate(IDS, max_new_tokens=TOKENS, do_sample=False)[0, IDS.shape[1] :]
    assert list(found.tokens) == expected.tolist()
    assert found.text == "".join(pieces) == model.tokenizer.decode(expected, skip_special_tokens=True)
    assert (found.prompt_tokens, found.finish) == (5, FinishReason.LENGTH)
    assert found.first_seconds is not None
    assert 0 < found.first_seconds < found.seconds
    assert found.tokens_per_second == (TOKENS - 1) / (found.seconds - found.first_seconds)


def test_it_stops_at_an_end(model: Any) -> None:
    whole, _ = asked(model)
    last = next(at for at, token in enumerate(whole.tokens) if at and token not in whole.tokens[:at])
    model.generation_config.eos_token_id = [whole.tokens[last], 299]
    found, _ = asked(model)
    assert (found.tokens, found.finish) == (whole.tokens[: last + 1], FinishReason.STOP)
    assert end_tokens(model) == [whole.tokens[last], 299, model.tokenizer.eos_token_id]


def test_a_tokenizer_may_lack_a_pad_and_an_end(model: Any) -> None:
    whole, _ = asked(model)
    model.tokenizer.pad_token = None
    assert asked(model)[0].tokens == whole.tokens
    model.tokenizer.eos_token = None
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    assert asked(model)[0].tokens == whole.tokens


def test_a_seed_gives_the_same_text_again(model: Any) -> None:
    hot = [asked(model, Sampling(temperature=5.0, seed=seed))[0].tokens for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    torch.manual_seed(1)
    plain = model.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=TOKENS, do_sample=True, temperature=5.0
    )
    assert hot[0] == tuple(plain[0, IDS.shape[1] :].tolist())


@pytest.mark.parametrize(
    ("sampling", "samples"),
    [
        (Sampling(), False),
        (Sampling(0.0), False),
        (Sampling(0, top_p=0.5), False),
        (Sampling(0.7), True),
        (Sampling(top_p=0.9), True),
        (Sampling(seed=3), False),
    ],
)
def test_chance_only_where_it_is_asked_for(sampling: Sampling, samples: bool) -> None:
    assert sampling.samples is samples
    assert sampling.arguments()["do_sample"] is samples


@pytest.mark.parametrize(("wrong", "message"), [({"temperature": -0.1}, "negative"), ({"top_p": 0.0}, "probability")])
def test_numbers_out_of_range(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_an_interrupt_ends_the_text_where_it_is(model: Any) -> None:
    whole, _ = asked(model)
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    found = answer(model, IDS, TOKENS, Sampling(), write)
    assert found.finish is FinishReason.CANCELLED
    assert whole.text.startswith(found.text)
    assert found.text == "".join(pieces)
    assert 3 <= len(found.tokens) < TOKENS
    assert asked(model)[0].tokens == whole.tokens  # and the model is as good as before


def test_a_reader_that_left_is_not_swallowed(model: Any) -> None:
    def write(piece: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        answer(model, IDS, TOKENS, Sampling(), write)


def test_how_many_may_follow(model: Any) -> None:
    context = model.config.max_position_embeddings
    assert most_new_tokens(model, 6, None) == min(MAX_TOKENS, context - 6)
    assert most_new_tokens(model, 6, 9) == 9
    with pytest.raises(OptionError, match="with 9 to follow") as caught:
        most_new_tokens(model, context - 4, 9)
    assert "at most 4" in caught.value.remedy
    with pytest.raises(OptionError, match=f"{context} tokens; the model was made for"):
        most_new_tokens(model, context, None)


def test_as_many_as_asked_for_may_follow_where_the_model_sets_no_limit() -> None:
    endless = SimpleNamespace(config=transformers.MambaConfig())
    assert context_of(endless) is None
    assert most_new_tokens(endless, 6, None) == MAX_TOKENS
    assert most_new_tokens(endless, 6, 10 * MAX_TOKENS) == 10 * MAX_TOKENS


def test_what_is_said_of_it(model: Any) -> None:
    found, _ = asked(model)
    out = io.StringIO()
    put_statistics(Console(file=out), found, 1.5, model.profiler.sums)
    text = out.getvalue()
    assert "load          1.50 s" in text
    assert f"answer        {TOKENS} tokens in" in text
    assert "a second after the first" in text
    assert "each token" in text
    assert "computing" in text
    assert how_it_ended(Answer("2", (5, 2), 1, FinishReason.STOP, 0.1, 0.1), 5) is None
    assert "the answer is empty" in str(how_it_ended(Answer("", (2,), 1, FinishReason.STOP, 0.1, 0.1), 5))
    assert "cut off after 12 tokens" in str(how_it_ended(found, TOKENS))
    assert "interrupted after 1 token" in str(how_it_ended(Answer("", (5,), 1, FinishReason.CANCELLED, 0.1, 0.1), 5))
    record = answer_record("m", found, 1.5, {"device": "cpu"})
    assert (record["new_tokens"], record["device"], record["text"]) == (TOKENS, "cpu", found.text)


def test_only_what_came_since_counts() -> None:
    profiler = Profiler()
    record(profiler, PassInput(1, 9, 0, 1), {READ: 100})
    before = profiler.sums
    record(profiler, PassInput(1, 4, 9, 1), {READ: 30, UPLOAD: 30})
    record(profiler, PassInput(1, 1, 13, 1), {READ: 20, EXPERTS_READ: 7})
    record(profiler, PassInput(1, 1, 14, 1), {READ: 20, EXPERTS_READ: 7})
    got = work_between(before, profiler.sums)
    assert got == AnswerWork(3, 6, {READ: 70, UPLOAD: 30}, {EXPERTS_READ: 2})
    assert work_between({}, profiler.sums).tokens == 15
    assert got.plus(got) == AnswerWork(6, 12, {READ: 140, UPLOAD: 60}, {EXPERTS_READ: 4})


def test_without_a_profiler_there_is_nothing() -> None:
    assert work_between({}, Profiler(enabled=False).sums) == AnswerWork()


def record(profiler: Profiler, entry: PassInput, moved: dict[str, int]) -> None:
    with profiler.forward(entry):
        for stage, nbytes in moved.items():
            profiler.add("layers.0", stage, 0.1, nbytes)
