"""Answers in the caller's thread are transformers' own; those with a kept cache equal those with an empty one."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from rabbitllm.chat.conversation import Conversation, Exchange
from rabbitllm.errors import ChatError, OptionError
from rabbitllm.generation.request import (
    COLDEST,
    MAX_TOKENS,
    FinishReason,
    ModelLimits,
    Request,
    Result,
    Sampling,
    Work,
    end_tokens,
)
from rabbitllm.generation.session import Session, answer, work_between
from rabbitllm.generation.template import ChatTemplate
from rabbitllm.run import answer_record, finish_note, put_statistics
from rabbitllm.telemetry.passes import EXPERTS_READ, READ, UPLOAD, PassInput
from rabbitllm.telemetry.profiler import Profiler
from tests.chat.talkers import FORGETFUL, family_of, parrot_folder, talker, talker_folder
from tests.support.builders import FAMILIES, build_checkpoint, talking
from tests.support.hybrid_families import HYBRIDS
from tests.support.tiny_models import ALL, load, plain_model, split

TOKENS = 12
NOT_SAMPLED = Sampling()
IDS = torch.tensor([[1, 40, 81, 7, 200]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("ask") / "model", "llama")


@pytest.fixture
def model(folder: Path) -> Any:
    return load(split(folder), profiling=True)


def request(sampling: Sampling = NOT_SAMPLED, tokens: int = TOKENS) -> Request:
    return Request(tuple(IDS[0].tolist()), tokens, sampling)


def asked(model: Any, sampling: Sampling = NOT_SAMPLED, tokens: int = TOKENS) -> tuple[Result, list[str]]:
    pieces: list[str] = []
    return answer(model, request(sampling, tokens), pieces.append), pieces


def test_greedy_tokens_are_those_of_transformers(folder: Path, model: Any) -> None:
    result, pieces = asked(model)
    expected = plain_model(folder).generate(IDS, max_new_tokens=TOKENS, do_sample=False)[0, IDS.shape[1] :]
    assert list(result.tokens) == expected.tolist()
    assert result.text == "".join(pieces) == model.tokenizer.decode(expected, skip_special_tokens=True)
    assert (result.prompt_tokens, result.finish) == (5, FinishReason.LENGTH)
    assert result.first_seconds is not None
    assert 0 < result.first_seconds < result.seconds
    assert result.tokens_per_second == (TOKENS - 1) / (result.seconds - result.first_seconds)


def test_an_answer_stops_at_an_end_token(model: Any) -> None:
    whole, _ = asked(model)
    last = next(index for index, token in enumerate(whole.tokens) if index and token not in whole.tokens[:index])
    model.generation_config.eos_token_id = [whole.tokens[last], 299]
    result, _ = asked(model)
    assert (result.tokens, result.finish) == (whole.tokens[: last + 1], FinishReason.STOP)
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
        (Sampling(top_k=5), True),
        (Sampling(min_p=0.1), True),
        (Sampling(repetition_penalty=1.1), False),
        (Sampling(seed=3), False),
        (Sampling(1e-40), False),  # logits divided by it overflow
        (Sampling(5e-324, top_p=0.5), False),
    ],
)
def test_sampling_only_if_requested(sampling: Sampling, samples: bool) -> None:
    assert sampling.samples is samples
    assert sampling.arguments()["do_sample"] is samples


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": value} for value in (-0.1, math.nan, math.inf)),
        *({"top_p": value} for value in (0.0, math.nan)),
        *({"min_p": value} for value in (-0.1, 1.1, math.nan)),
        *({"repetition_penalty": value} for value in (0, math.inf, math.nan)),
    ],
)
def test_numbers_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="out of range"):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_a_temperature_near_the_least_is_sampled(model: Any) -> None:
    assert asked(model, Sampling(COLDEST))[0].tokens == asked(model)[0].tokens


def test_a_seed_of_more_bits(model: Any) -> None:
    (few, _), (many, _) = (asked(model, Sampling(1.0, seed=5 + more)) for more in (0, 1 << 70))
    assert many.tokens == few.tokens
    Session(model, sampling=Sampling(1.0, seed=1 << 70))


def test_an_interrupt_ends_the_answer(model: Any) -> None:
    whole, _ = asked(model)
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    result = answer(model, request(), write)
    assert result.finish is FinishReason.CANCELLED
    assert whole.text.startswith(result.text)
    assert result.text == "".join(pieces)
    assert 3 <= len(result.tokens) < TOKENS
    assert asked(model)[0].tokens == whole.tokens  # and the model is as good as before


def test_a_broken_pipe_is_raised(model: Any) -> None:
    def write(piece: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        answer(model, request(), write)


def test_limit_of_new_tokens(model: Any) -> None:
    limits = ModelLimits.of(model)
    context = model.config.max_position_embeddings
    assert limits.context == context
    assert limits.new_tokens(6, None) == min(MAX_TOKENS, context - 6)
    assert limits.new_tokens(6, 9) == 9
    assert limits.new_tokens(context - 4, 9, cut=True) == 4
    with pytest.raises(OptionError, match="9 new tokens") as caught:
        limits.new_tokens(context - 4, 9)
    assert "at most 4" in caught.value.remedy
    for options in ({}, {"cut": True}):
        with pytest.raises(OptionError, match=f"{context} tokens; the model.s context has"):
            limits.new_tokens(context, None, **options)


def test_a_smaller_context_may_be_set(model: Any) -> None:
    context = model.config.max_position_embeddings
    limits = ModelLimits.of(model, 8)
    assert limits.new_tokens(6, None) == 2
    with pytest.raises(OptionError, match="The prompt has 9 tokens; the context is limited to 8"):
        limits.new_tokens(9, None)
    assert ModelLimits.of(model, 10 * context) == ModelLimits.of(model)
    endless: Any = transformers.MambaModel(transformers.MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1))
    assert ModelLimits.of(endless, 7).context == 7


def test_models_without_a_context_set_no_limit() -> None:
    config = transformers.MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1)
    endless: Any = transformers.MambaModel(config)
    limits = ModelLimits.of(endless)
    assert limits == ModelLimits(None, 9)
    assert limits.new_tokens(6, None) == MAX_TOKENS
    assert limits.new_tokens(6, 10 * MAX_TOKENS) == 10 * MAX_TOKENS


@pytest.mark.parametrize(("ids", "why"), [((), "no tokens"), ((1, 9), "the token 9;"), ((-1, 8), "the token -1;")])
def test_ids_are_those_of_the_vocabulary(ids: tuple[int, ...], why: str) -> None:
    ModelLimits(None, 9).check_ids((0, 8))
    with pytest.raises(OptionError, match=f"^A text has {why}"):
        ModelLimits(None, 9).check_ids(ids, "A text")


def test_several_answers_have_their_own_seeds() -> None:
    assert [Sampling(seed=7).nth(index).seed for index in range(3)] == [7, 8, 9]
    assert Sampling(seed=-1).nth(0).seed == (1 << 63) - 1
    assert Sampling(0.5).nth(3) == Sampling(0.5)


def test_the_summary_of_an_answer(model: Any) -> None:
    result, _ = asked(model)
    out = io.StringIO()
    put_statistics(Console(file=out), result, 1.5, model.profiler.sums, "greedy")
    text = out.getvalue()
    assert "sampling      greedy" in text
    assert "load          1.50 s" in text
    assert f"answer        {TOKENS} tokens in" in text
    assert "a second after the first" in text
    assert "each token" in text
    assert "computing" in text
    assert finish_note(Result("2", (5, 2), 1, FinishReason.STOP, 0.1, 0.1), 5) is None
    assert "the answer is empty" in str(finish_note(Result("", (2,), 1, FinishReason.STOP, 0.1, 0.1), 5))
    assert "stopped after 12 tokens, the limit of --max" in str(finish_note(result, TOKENS, ModelLimits(256, 9)))
    context = result.prompt_tokens + TOKENS
    assert f"where the model's context of {context} tokens ends" in str(
        finish_note(result, TOKENS, ModelLimits(context, 9))
    )
    assert "interrupted after 1 token" in str(finish_note(Result("", (5,), 1, FinishReason.CANCELLED, 0.1, 0.1), 5))
    record = answer_record("m", result, 1.5, {"device": "cpu"})
    assert (record["new_tokens"], record["device"], record["text"]) == (TOKENS, "cpu", result.text)


def test_work_between_two_states() -> None:
    profiler = Profiler()
    record(profiler, PassInput(1, 9, 0, 1), {READ: 100})
    before = profiler.sums
    record(profiler, PassInput(1, 4, 9, 1), {READ: 30, UPLOAD: 30})
    record(profiler, PassInput(1, 1, 13, 1), {READ: 20, EXPERTS_READ: 7})
    record(profiler, PassInput(1, 1, 14, 1), {READ: 20, EXPERTS_READ: 7})
    work = work_between(before, profiler.sums)
    assert work == Work(3, 6, {READ: 70, UPLOAD: 30}, {EXPERTS_READ: 2})
    assert work_between({}, profiler.sums).tokens == 15
    assert work.plus(work) == Work(6, 12, {READ: 140, UPLOAD: 60}, {EXPERTS_READ: 4})


def test_no_work_without_a_profiler() -> None:
    assert work_between({}, Profiler(enabled=False).sums) == Work()


def record(profiler: Profiler, entry: PassInput, moved: dict[str, int]) -> None:
    with profiler.forward(entry):
        for stage, nbytes in moved.items():
            profiler.add("layers.0", stage, 0.1, nbytes)


NEW_TOKENS = 10
QUESTIONS = ("Who are you, and where do you live?", "And the others?", "Why?")
KEPT_IN_SHORT = ("llama", "gemma3", "qwen3_next", "deepseek_v32")
"""Full attention alone; with sliding windows (8 tokens); with states; with an index."""
CUTTABLE = ("llama", "deepseek_v32")
"""Of these, those whose KV cache keeps every token, and can be cut at any."""
NOT_KEPT = ("jamba", "recurrent_gemma", "zamba", "bamba", "mamba2", "deepseek_v4", "minimax", "rwkv")
"""Models that begin again with every prompt, or whose states, indexes or caches are of other kinds."""


def quietly(text: str) -> None:
    """What writes nothing."""


def every(chosen: tuple[str, ...], more: tuple[str, ...]) -> list[Any]:
    """All of them; the short run has the chosen ones."""
    return [*chosen, *(pytest.param(name, marks=pytest.mark.long) for name in more if name not in chosen)]


def kept_families() -> tuple[str, ...]:
    """What can be asked without making the models: those that the session says it keeps are compared with this."""
    without_attention = {"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"}
    not_exact = {"jamba", "recurrent_gemma", "zamba", "bamba"}
    left_out = without_attention | not_exact | {"deepseek_v4", "minimax", "t5"}
    return tuple(name for name in {**FAMILIES, **HYBRIDS} if name not in left_out)


def known(name: str) -> str:
    """The same name, unless the installed transformers is from before that family."""
    if family_of(name).model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip("transformers does not know it")
    return name


def told(talk: Conversation, question: str, answer: Result) -> Conversation:
    return talk.with_exchange(Exchange(question, answer.text, answer.finish == FinishReason.CANCELLED))


def expected(plain: Any, tokenizer: Any, talk: Conversation, question: str) -> str:
    """What transformers makes of the whole conversation, without any cache from before."""
    template = ChatTemplate(talking(tokenizer))
    ids = torch.tensor([template.prompt(talk.messages(question)).ids])
    output = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
    text: str = tokenizer.decode(output[0, ids.shape[1] :])
    return text


def plain_talker(folder: Path, model: Any) -> Any:
    plain = plain_model(folder)
    plain.generation_config.suppress_tokens = model.generation_config.suppress_tokens
    return plain


@pytest.mark.parametrize("name", every(KEPT_IN_SHORT, kept_families()))
def test_further_answers_compute_new_tokens_only(tmp_path: Path, name: str) -> None:
    folder = talker_folder(tmp_path / "model", known(name))
    model = talker(folder)
    plain = plain_talker(folder, model)
    session, talk, cached = Session(model, NEW_TOKENS), Conversation("Be brief."), 0
    assert session.cache is not None
    assert session.remarks == ()
    for question in QUESTIONS:
        passes = len(model.profiler.passes)
        answer = session.answer(talk.messages(question), quietly)
        assert answer.text == expected(plain, model.tokenizer, talk, question)
        assert (len(answer.tokens), answer.finish) == (10, FinishReason.LENGTH)
        assert answer.kept_tokens == cached
        new = [(record.entry.past, record.entry.length) for record in model.profiler.passes[passes:]]
        assert new == [(cached, answer.prompt_tokens - cached), *((answer.prompt_tokens + i, 1) for i in range(9))]
        assert answer.work.passes == 10
        assert answer.work.tokens == answer.prompt_tokens - answer.kept_tokens + 9
        assert answer.work.moved[READ] > 0
        cached = answer.prompt_tokens + 9  # nothing was computed of the last token yet
        assert session.cached_tokens == cached
        talk = told(talk, question, answer)
    assert cached > 60


@pytest.mark.parametrize("name", every(("jamba", "mamba2"), NOT_KEPT))
def test_changed_conversations_are_recomputed(tmp_path: Path, name: str) -> None:
    folder = talker_folder(tmp_path / "model", known(name))
    model = talker(folder, ALL)
    plain = plain_talker(folder, model)
    session, talk = Session(model, NEW_TOKENS), Conversation()
    assert session.cache is None
    assert any("no reusable KV cache" in remark for remark in session.remarks)
    for question in QUESTIONS[:2]:
        answer = session.answer(talk.messages(question), quietly)
        assert answer.text == expected(plain, model.tokenizer, talk, question)
        assert (answer.kept_tokens, session.cached_tokens, session.cache_bytes) == (0, 0, 0)
        talk = told(talk, question, answer)


@pytest.mark.parametrize("name", every(KEPT_IN_SHORT, (*kept_families(),)))
def test_a_template_that_shortens_answers(tmp_path: Path, name: str) -> None:
    """The cache goes back to where the last answer began to differ, or to the end of the prompt before it."""
    folder = talker_folder(tmp_path / "model", known(name), FORGETFUL)
    model = talker(folder)
    plain = plain_talker(folder, model)
    session, talk, prompt = Session(model, NEW_TOKENS), Conversation(), 0
    for index, question in enumerate(QUESTIONS):
        before = session.cache.ids if session.cache is not None else []
        answer = session.answer(talk.messages(question), quietly)
        assert answer.text == expected(plain, model.tokenizer, talk, question)
        assert answer.kept_tokens >= prompt
        assert answer.kept_tokens < len(before) or not index
        prompt, talk = answer.prompt_tokens, told(talk, question, answer)
    assert session.cached_tokens == prompt + 9


@pytest.mark.parametrize("name", KEPT_IN_SHORT)
def test_another_conversation(tmp_path: Path, name: str) -> None:
    """Another system prompt, exchanges that are forgotten, the same question again."""
    folder = talker_folder(tmp_path / "model", name)
    model = talker(folder, ALL)
    plain = plain_talker(folder, model)
    session, talk = Session(model, NEW_TOKENS), Conversation("Be brief.")
    for question in QUESTIONS:
        talk = told(talk, question, session.answer(talk.messages(question), quietly))
    for changed in (talk.without_oldest(1), talk.with_system("Be longer."), talk.emptied(), talk, talk):
        answer = session.answer(changed.messages("Why?"), quietly)
        assert answer.text == expected(plain, model.tokenizer, changed, "Why?")
        assert answer.kept_tokens < answer.prompt_tokens
    assert answer.kept_tokens >= answer.prompt_tokens - 1 if name in CUTTABLE else answer.kept_tokens == 0


def at_call(count: int) -> Callable[[], bool]:
    """True from the so-manieth time on that it is asked."""
    calls = iter(range(1, 1 << 30))
    return lambda: next(calls) >= count


@pytest.mark.parametrize("name", KEPT_IN_SHORT)
def test_an_answer_stopped_at_any_unit(tmp_path: Path, name: str) -> None:
    """In the prompt's pass or a further one, at any layer: the next answer is right, and little is computed again."""
    folder = talker_folder(tmp_path / "model", name)
    model = talker(folder)
    plain = plain_talker(folder, model)
    units = len(model.placement.units)
    session, talk = Session(model, NEW_TOKENS), Conversation("Be brief.")
    for stop_at in (2, units, units + 1, 3 * units - 2, 5 * units + 3):
        cached = session.cached_tokens
        stopped = session.answer(talk.messages("And?"), quietly, stopped=at_call(stop_at))
        assert stopped.finish == FinishReason.CANCELLED
        assert len(stopped.tokens) == (stop_at - 1) // units
        assert expected(plain, model.tokenizer, talk, "And?").startswith(stopped.text)
        assert len(stopped.text) == len(stopped.tokens)
        cuttable = name in CUTTABLE
        if not stopped.tokens:
            assert session.cached_tokens == stopped.kept_tokens
        else:
            assert session.cached_tokens == stopped.prompt_tokens + (len(stopped.tokens) - 1 if cuttable else 0)
            talk = told(talk, "And?", stopped)
        whole = session.answer(talk.messages("Why?"), quietly)
        assert whole.text == expected(plain, model.tokenizer, talk, "Why?")
        assert whole.kept_tokens >= (stopped.prompt_tokens if stopped.tokens else min(cached, 1))
        talk = told(talk, "Why?", whole)
    assert not model.streamer.bound


@pytest.mark.parametrize("budget", [ALL, 0], ids=["resident", "streamed"])
def test_layers_in_memory_are_watched_in_the_prompt_alone(tmp_path: Path, budget: int) -> None:
    """After it only the first unit is, so that the layers of a token compute together."""
    model = talker(talker_folder(tmp_path / "model", "llama"), budget)
    hooks, seen = model.get_decoder().layers[1]._forward_pre_hooks, list[int]()
    session = Session(model, NEW_TOKENS)
    session.answer(Conversation().messages("Who?"), quietly)  # whose first pass checks the files
    before = len(hooks)
    session.answer(Conversation().messages("Why?"), lambda text: seen.append(len(hooks) - before))
    assert {*seen} == {0 if budget == ALL else 1}
    assert len(hooks) == before
    stops = at_call(len(model.placement.units) + 4)
    stopped = session.answer(Conversation().messages("And?"), quietly, stopped=stops)
    assert len(stopped.tokens) == (4 if budget == ALL else 1)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_an_interrupt_inside_a_layer(tmp_path: Path, name: str) -> None:
    folder = talker_folder(tmp_path / "model", name)
    model = talker(folder)
    plain = plain_talker(folder, model)
    session, talk = Session(model, NEW_TOKENS), Conversation()
    talk = told(talk, "Who?", session.answer(talk.messages("Who?"), quietly))
    calls = []

    def interrupt(module: Any, args: Any, output: Any) -> None:
        calls.append(module)
        if len(calls) == 3:
            raise KeyboardInterrupt

    hook = model.get_decoder().layers[1].register_forward_hook(interrupt)
    stopped = session.answer(talk.messages("And?"), quietly)
    hook.remove()
    assert (stopped.finish, len(stopped.tokens)) == (FinishReason.CANCELLED, 2)
    talk = told(talk, "And?", stopped)
    answer = session.answer(talk.messages("Why?"), quietly)
    assert answer.text == expected(plain, model.tokenizer, talk, "Why?")
    assert answer.kept_tokens >= stopped.prompt_tokens


def test_after_an_error_the_cache_is_empty(tmp_path: Path) -> None:
    folder = talker_folder(tmp_path / "model", "llama")
    model = talker(folder)
    session, talk = Session(model, NEW_TOKENS), Conversation()

    def fail(text: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        session.answer(talk.messages("Who?"), fail)
    answer = session.answer(talk.messages("Who?"), quietly)
    assert answer.text == expected(plain_talker(folder, model), model.tokenizer, talk, "Who?")
    assert answer.kept_tokens == 0


def test_the_context_is_the_limit(tmp_path: Path) -> None:
    model = talker(talker_folder(tmp_path / "model", "llama", max_position_embeddings=64), ALL)
    session = Session(model)
    talk = Conversation()
    answer = session.answer(talk.messages("Who are you?"), quietly)
    assert session.context == 64
    assert (answer.finish, answer.prompt_tokens + len(answer.tokens)) == (FinishReason.LENGTH, 64)
    cached = session.cached_tokens
    talk = told(talk, "Who are you?", answer)
    with pytest.raises(ChatError, match=r"has \d+ tokens with this question; the model's context has 64"):
        session.answer(talk.messages("And?"), quietly)
    assert session.cached_tokens == cached
    with pytest.raises(ChatError, match=r"has (\d+) tokens with .* limited to \1, and an answer needs one"):
        Session(model, context=answer.prompt_tokens).answer(Conversation().messages("Who are you?"), quietly)
    with pytest.raises(ChatError, match=r"Shorten the message\."):
        session.answer(Conversation().messages("And? " * 64), quietly)
    again = session.answer(talk.emptied().messages("Who are you?"), quietly)
    assert again.text == answer.text
    assert again.kept_tokens == again.prompt_tokens - 1


CHAIN = " Hi\nUser"
SAYS = dict(zip(CHAIN, (*CHAIN[1:], ":"), strict=True)) | {":": " "}
"""After a space it says `Hi`, and then what a user would."""


def test_a_model_without_a_template_does_not_speak_for_the_user(tmp_path: Path) -> None:
    model = talker(parrot_folder(tmp_path / "model", SAYS, None), ALL)
    pieces: list[str] = []
    session, talk = Session(model, 40), Conversation("Be brief.")
    assert any("no chat template" in remark for remark in session.remarks)
    for _ in range(2):
        answer = session.answer(talk.messages("Hello?"), pieces.append)
        assert (answer.text, answer.finish) == (" Hi", FinishReason.STOP)
        assert len(answer.tokens) < 12
        talk = told(talk, "Hello?", answer)
    assert pieces == [" ", "H", "i", " ", "H", "i"]
    assert answer.kept_tokens > 30


def test_pending_text_is_written_at_the_end(tmp_path: Path) -> None:
    model = talker(parrot_folder(tmp_path / "model", SAYS, None), ALL)
    answer = Session(model, 7).answer(Conversation().messages("Hello?"), quietly)
    assert (answer.text, answer.finish) == (" Hi\nUse", FinishReason.LENGTH)


def test_an_answer_ends_where_the_model_ends_it(tmp_path: Path) -> None:
    model = talker(parrot_folder(tmp_path / "model", {" ": "Y", "Y": "o", "o": "<eos>"}), ALL)
    model.generation_config.suppress_tokens = None
    session, talk = Session(model), Conversation()
    for size in (0, 26):
        answer = session.answer(talk.messages("Hello?"), quietly)
        assert (answer.text, len(answer.tokens), answer.finish, answer.kept_tokens) == (
            "Yo",
            3,
            FinishReason.STOP,
            size,
        )
        talk = told(talk, "Hello?", answer)


def test_unused_settings_of_a_model_are_ignored(tmp_path: Path) -> None:
    folder = talker_folder(tmp_path / "model", "gemma3")
    model = talker(folder, ALL)
    plain = plain_talker(folder, model)
    wishes = {"cache_implementation": "static", "use_cache": False, "num_beams": 2, "return_dict_in_generate": True}
    model.generation_config.update(**wishes, do_sample=True)
    answer = Session(model, NEW_TOKENS).answer(Conversation().messages("Who?"), quietly)
    assert answer.text == expected(plain, model.tokenizer, Conversation(), "Who?")


def test_sampling_with_a_seed_is_reproducible(tmp_path: Path) -> None:
    model = talker(talker_folder(tmp_path / "model", "llama"), ALL)

    def texts(*sampling: Sampling) -> list[str]:
        session, talk = Session(model, 8, *sampling), Conversation()
        for question in QUESTIONS:
            talk = told(talk, question, session.answer(talk.messages(question), quietly))
        return [exchange.answer for exchange in talk.exchanges]

    drawn = Sampling(1.5, 0.95, 7)
    assert texts(drawn) == texts(drawn)
    assert texts(drawn) != texts(Sampling(1.5, 0.95, 8))
    assert texts() == texts(Sampling(1.5, 1e-6, 1))


def test_models_that_cannot_chat_are_refused(tmp_path: Path) -> None:
    model = talker(talker_folder(tmp_path / "model", "llama"), ALL)
    model.tokenizer = None
    with pytest.raises(ChatError, match=f"(?s)has no tokenizer.*{re.escape(model.name_or_path)}"):
        Session(model)
    with pytest.raises(ChatError, match="has an encoder"):
        Session(talker(talker_folder(tmp_path / "t5", "t5"), ALL))


def test_progress_of_the_first_pass(tmp_path: Path) -> None:
    model = talker(talker_folder(tmp_path / "model", "llama"))
    units = len(model.placement.units)
    told_of: list[tuple[int, int]] = []
    Session(model, NEW_TOKENS).answer(
        Conversation().messages("Who?"), quietly, at_unit=lambda done, of: told_of.append((done, of))
    )
    assert told_of == [(done, units) for done in range(units)]


def test_an_error_of_a_template_is_raised(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}x"
    session = Session(talker(talker_folder(tmp_path / "model", "llama", template), ALL), NEW_TOKENS)
    with pytest.raises(ChatError, match="refuses this conversation: No system role"):
        session.answer(Conversation("Be brief.").messages("Who?"), quietly)
    assert session.answer(Conversation().messages("Who?"), quietly).prompt_tokens == 1
