"""Answers with a kept cache equal those with an empty one, and only new tokens are computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from rabbitllm.chat.conversation import Conversation, Exchange
from rabbitllm.errors import ChatError
from rabbitllm.generation.request import Answer, FinishReason, Sampling
from rabbitllm.generation.session import ChatOptions, Session
from rabbitllm.generation.template import prompt_ids
from rabbitllm.telemetry.passes import READ
from tests.chat.talkers import FORGETFUL, family_of, parrot_folder, talker, talker_folder
from tests.support.builders import FAMILIES
from tests.support.hybrid_families import HYBRIDS
from tests.support.tiny_models import ALL, one_thread, plain_model  # noqa: F401  a fixture that applies by itself

GREEDY = ChatOptions(max_new_tokens=10)
QUESTIONS = ("Who are you, and where do you live?", "And the others?", "Why?")
KEPT_IN_SHORT = ("llama", "gemma3", "qwen3_next")
"""Full attention alone; with sliding windows (8 tokens); with states."""
NOT_KEPT = ("jamba", "recurrent_gemma", "zamba", "bamba", "mamba2", "deepseek_v32", "minimax", "rwkv")
"""Models that begin again with every prompt, or whose states, indexes or caches are of other kinds."""


def quietly(text: str) -> None:
    """What writes nothing."""


def every(chosen: tuple[str, ...], others: tuple[str, ...]) -> list[Any]:
    """All of them; the short run has the chosen ones."""
    return [*chosen, *(pytest.param(name, marks=pytest.mark.long) for name in others if name not in chosen)]


def kept_families() -> tuple[str, ...]:
    """What can be asked without making the models: those that the session says it keeps are compared with this."""
    indexed = {"axk2", "deepseek_v32", "deepseek_v4", "dots3_note", "glm_moe_dsa", "hy_v4", "qwen4_exp"}
    without_attention = {"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"}
    not_exact = {"jamba", "recurrent_gemma", "zamba", "bamba"}
    left_out = indexed | without_attention | not_exact | {"minimax", "t5"}
    return tuple(name for name in {**FAMILIES, **HYBRIDS} if name not in left_out)


def known(name: str) -> str:
    """The same name, unless the installed transformers is from before that family."""
    if family_of(name).model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip("transformers does not know it")
    return name


def told(talk: Conversation, question: str, answer: Answer) -> Conversation:
    return talk.with_exchange(Exchange(question, answer.text, answer.finish == FinishReason.CANCELLED))


def expected(plain: Any, tokenizer: Any, talk: Conversation, question: str) -> str:
    """What transformers makes of the whole conversation, without any cache from before."""
    ids = torch.tensor([prompt_ids(tokenizer, talk.messages(question))])
    made = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
    text: str = tokenizer.decode(made[0, ids.shape[1] :])
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
    session, talk, held = Session(model, GREEDY), Conversation("Be brief."), 0
    assert session.kept is not None
    assert session.remarks == ()
    for question in QUESTIONS:
        passes = len(model.profiler.passes)
        answer = session.answer(talk.messages(question), quietly)
        assert answer.text == expected(plain, model.tokenizer, talk, question)
        assert (len(answer.tokens), answer.finish) == (10, FinishReason.LENGTH)
        assert answer.kept_tokens == held
        new = [(one.entry.past, one.entry.length) for one in model.profiler.passes[passes:]]
        assert new == [(held, answer.prompt_tokens - held), *((answer.prompt_tokens + at, 1) for at in range(9))]
        assert answer.work.passes == 10
        assert answer.work.tokens == answer.computed_tokens + 9
        assert answer.work.moved[READ] > 0
        held = answer.prompt_tokens + 9  # nothing was computed of the last token yet
        assert session.cached_tokens == held
        talk = told(talk, question, answer)
    assert held > 60


@pytest.mark.parametrize("name", every(("jamba", "mamba2"), NOT_KEPT))
def test_what_does_not_continue_exactly_is_recomputed(tmp_path: Path, name: str) -> None:
    folder = talker_folder(tmp_path / "model", known(name))
    model = talker(folder, ALL)
    plain = plain_talker(folder, model)
    session, talk = Session(model, GREEDY), Conversation()
    assert session.kept is None
    assert any("no cache is kept" in remark for remark in session.remarks)
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
    session, talk, prompt = Session(model, GREEDY), Conversation(), 0
    for number, question in enumerate(QUESTIONS):
        before = session.kept.ids if session.kept is not None else []
        answer = session.answer(talk.messages(question), quietly)
        assert answer.text == expected(plain, model.tokenizer, talk, question)
        assert answer.kept_tokens >= prompt
        assert answer.kept_tokens < len(before) or not number
        prompt, talk = answer.prompt_tokens, told(talk, question, answer)
    assert session.cached_tokens == prompt + 9


@pytest.mark.parametrize("name", KEPT_IN_SHORT)
def test_another_past(tmp_path: Path, name: str) -> None:
    """Another system prompt, exchanges that are forgotten, the same question again."""
    folder = talker_folder(tmp_path / "model", name)
    model = talker(folder, ALL)
    plain = plain_talker(folder, model)
    session, talk = Session(model, GREEDY), Conversation("Be brief.")
    for question in QUESTIONS:
        talk = told(talk, question, session.answer(talk.messages(question), quietly))
    for changed in (talk.without_oldest(1), talk.with_system("Be longer."), talk.emptied(), talk, talk):
        answer = session.answer(changed.messages("Why?"), quietly)
        assert answer.text == expected(plain, model.tokenizer, changed, "Why?")
        assert answer.kept_tokens < answer.prompt_tokens
    assert answer.kept_tokens >= answer.prompt_tokens - 1 if name == "llama" else answer.kept_tokens == 0


def at_call(count: int) -> Callable[[], bool]:
    """True from the so-manieth time on that it is asked."""
    calls = iter(range(1, 1 << 30))
    return lambda: next(calls) >= count


@pytest.mark.parametrize("name", KEPT_IN_SHORT)
def test_an_answer_that_is_stopped_anywhere(tmp_path: Path, name: str) -> None:
    """In the prompt's pass or a further one, at any layer: the next answer is right, and little is computed again."""
    folder = talker_folder(tmp_path / "model", name)
    model = talker(folder)
    plain = plain_talker(folder, model)
    units = len(model.placement.units)
    session, talk = Session(model, GREEDY), Conversation("Be brief.")
    for stop_at in (2, units, units + 1, 3 * units - 2, 5 * units + 3):
        held = session.cached_tokens
        stopped = session.answer(talk.messages("And?"), quietly, stopped=at_call(stop_at))
        assert stopped.finish == FinishReason.CANCELLED
        assert len(stopped.tokens) == (stop_at - 1) // units
        assert expected(plain, model.tokenizer, talk, "And?").startswith(stopped.text)
        assert len(stopped.text) == len(stopped.tokens)
        cuttable = name == "llama"
        if not stopped.tokens:
            assert session.cached_tokens == stopped.kept_tokens
        else:
            assert session.cached_tokens == stopped.prompt_tokens + (len(stopped.tokens) - 1 if cuttable else 0)
            talk = told(talk, "And?", stopped)
        whole = session.answer(talk.messages("Why?"), quietly)
        assert whole.text == expected(plain, model.tokenizer, talk, "Why?")
        assert whole.kept_tokens >= (stopped.prompt_tokens if stopped.tokens else min(held, 1))
        talk = told(talk, "Why?", whole)
    assert not model.streamer.bound


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_an_interrupt_inside_a_layer(tmp_path: Path, name: str) -> None:
    folder = talker_folder(tmp_path / "model", name)
    model = talker(folder)
    plain = plain_talker(folder, model)
    session, talk = Session(model, GREEDY), Conversation()
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
    session, talk = Session(model, GREEDY), Conversation()

    def fail(text: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        session.answer(talk.messages("Who?"), fail)
    answer = session.answer(talk.messages("Who?"), quietly)
    assert answer.text == expected(plain_talker(folder, model), model.tokenizer, talk, "Who?")
    assert answer.kept_tokens == 0


def test_the_context_is_the_limit(tmp_path: Path) -> None:
    model = talker(talker_folder(tmp_path / "model", "llama", max_position_embeddings=64), ALL)
    session = Session(model, ChatOptions())
    talk = Conversation()
    answer = session.answer(talk.messages("Who are you?"), quietly)
    assert session.context == 64
    assert (answer.finish, answer.prompt_tokens + len(answer.tokens)) == (FinishReason.LENGTH, 64)
    held = session.cached_tokens
    talk = told(talk, "Who are you?", answer)
    with pytest.raises(ChatError, match=r"has \d+ tokens with this question, and the model's context 64"):
        session.answer(talk.messages("And?"), quietly)
    assert session.cached_tokens == held
    again = session.answer(talk.emptied().messages("Who are you?"), quietly)
    assert again.text == answer.text
    assert again.kept_tokens == again.prompt_tokens - 1


CHAIN = " Hi\nUser"
SAYS = dict(zip(CHAIN, (*CHAIN[1:], ":"), strict=True)) | {":": " "}
"""After a space it says `Hi`, and then what a user would."""


def test_a_model_without_a_template_does_not_speak_for_the_user(tmp_path: Path) -> None:
    model = talker(parrot_folder(tmp_path / "model", SAYS, None), ALL)
    pieces: list[str] = []
    session, talk = Session(model, ChatOptions(max_new_tokens=40)), Conversation("Be brief.")
    assert any("no chat template" in remark for remark in session.remarks)
    for _ in range(2):
        answer = session.answer(talk.messages("Hello?"), pieces.append)
        assert (answer.text, answer.finish) == (" Hi", FinishReason.STOP)
        assert len(answer.tokens) < 12
        talk = told(talk, "Hello?", answer)
    assert pieces == [" ", "H", "i", " ", "H", "i"]
    assert answer.kept_tokens > 30


def test_what_was_held_back_is_said_at_the_end(tmp_path: Path) -> None:
    model = talker(parrot_folder(tmp_path / "model", SAYS, None), ALL)
    answer = Session(model, ChatOptions(max_new_tokens=7)).answer(Conversation().messages("Hello?"), quietly)
    assert (answer.text, answer.finish) == (" Hi\nUse", FinishReason.LENGTH)


def test_an_answer_ends_where_the_model_ends_it(tmp_path: Path) -> None:
    model = talker(parrot_folder(tmp_path / "model", {" ": "Y", "Y": "o", "o": "<eos>"}), ALL)
    model.generation_config.suppress_tokens = None
    session, talk = Session(model, ChatOptions()), Conversation()
    for held in (0, 26):
        answer = session.answer(talk.messages("Hello?"), quietly)
        assert (answer.text, len(answer.tokens), answer.finish, answer.kept_tokens) == (
            "Yo",
            3,
            FinishReason.STOP,
            held,
        )
        talk = told(talk, "Hello?", answer)


def test_settings_that_come_with_a_model_do_not_get_in_the_way(tmp_path: Path) -> None:
    folder = talker_folder(tmp_path / "model", "gemma3")
    model = talker(folder, ALL)
    plain = plain_talker(folder, model)
    wishes = {"cache_implementation": "static", "use_cache": False, "num_beams": 2, "return_dict_in_generate": True}
    model.generation_config.update(**wishes, do_sample=True)
    answer = Session(model, GREEDY).answer(Conversation().messages("Who?"), quietly)
    assert answer.text == expected(plain, model.tokenizer, Conversation(), "Who?")


def test_drawing_repeats_itself_with_a_seed(tmp_path: Path) -> None:
    model = talker(talker_folder(tmp_path / "model", "llama"), ALL)

    def texts(choices: ChatOptions) -> list[str]:
        session, talk = Session(model, choices), Conversation()
        for question in QUESTIONS:
            talk = told(talk, question, session.answer(talk.messages(question), quietly))
        return [exchange.answer for exchange in talk.exchanges]

    drawn = ChatOptions(20, Sampling(1.5, 0.95, 7))
    assert texts(drawn) == texts(drawn)
    assert texts(drawn) != texts(ChatOptions(20, Sampling(1.5, 0.95, 8)))
    likeliest = ChatOptions(max_new_tokens=20)
    assert texts(likeliest) == texts(ChatOptions(20, Sampling(1.5, 1e-6, 1)))


def test_models_that_cannot_chat_are_refused(tmp_path: Path) -> None:
    model = talker(talker_folder(tmp_path / "model", "llama"), ALL)
    model.tokenizer = None
    with pytest.raises(ChatError, match="without a tokenizer"):
        Session(model)
    with pytest.raises(ChatError, match="has an encoder"):
        Session(talker(talker_folder(tmp_path / "t5", "t5"), ALL))


def test_progress_of_the_first_pass(tmp_path: Path) -> None:
    model = talker(talker_folder(tmp_path / "model", "llama"))
    units = len(model.placement.units)
    told_of: list[tuple[int, int]] = []
    Session(model, GREEDY).answer(
        Conversation().messages("Who?"), quietly, at_unit=lambda done, of: told_of.append((done, of))
    )
    assert told_of == [(done, units) for done in range(units)]


def test_a_template_that_refuses_is_heard(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}x"
    session = Session(talker(talker_folder(tmp_path / "model", "llama", template), ALL), GREEDY)
    with pytest.raises(ChatError, match="refuses this conversation: No system role"):
        session.answer(Conversation("Be brief.").messages("Who?"), quietly)
    assert session.answer(Conversation().messages("Who?"), quietly).prompt_tokens == 1
