"""The conversation itself: what is said, written, refused and forgotten; with a model that says what it is told to."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rabbitllm.chat.conversation import Conversation, Exchange, SavedChat, read_chat
from rabbitllm.chat.loop import ChatLoop, ChatStreams
from rabbitllm.generation.session import Session
from tests.chat.talkers import parrot_folder, talker
from tests.support.thinking_models import ANSWER, QUESTION, REASONING_TOKENS, THOUGHT, thinker
from tests.support.tiny_models import ALL, load, one_thread, split  # noqa: F401  a fixture that applies by itself

SAYS = {" ": "Y", "Y": "o", "o": "<eos>"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = talker(parrot_folder(tmp_path_factory.mktemp("talk") / "model", SAYS), ALL)
    model.generation_config.suppress_tokens = None
    return model


class Talk:
    """A conversation over given lines: what was said by whom, and whether all went well."""

    def __init__(
        self, model: Any, *lines: str, max_new_tokens: int | None = None, system: str | None = None, **more: Any
    ):
        remaining: Iterator[str] = iter(lines)

        def read_line(prompt: str) -> str:
            try:
                return next(remaining)
            except StopIteration:
                raise EOFError from None

        answers, notes = io.StringIO(), io.StringIO()
        streams = ChatStreams(read_line, answers, Console(file=notes, width=100), interactive=False)
        shown = {name: more.pop(name) for name in ("sampling", "with_stats") if name in more}
        streams = replace(streams, interactive=more.pop("interactive", False))
        self.session = Session(model, max_new_tokens, **more)
        chat = ChatLoop(self.session, streams, "a/model", Conversation(system), **shown)
        self.well = chat.run({"cpu resident": 5_000_000})
        self.conversation = chat.conversation
        self.answers, self.notes = answers.getvalue(), notes.getvalue()


def test_output_has_only_the_answers(model: Any) -> None:
    talk = Talk(model, "Hello?", "", "   ", '"""And', 'you?"""')
    assert (talk.answers, talk.notes, talk.well) == ("Yo\nYo\n", "", True)
    assert talk.conversation.exchanges == (Exchange("Hello?", "Yo"), Exchange("And\nyou?", "Yo"))


def test_the_sampling_is_said_at_a_terminal(model: Any) -> None:
    assert "\nsampling: greedy\n" in Talk(model, "Hello?", sampling="greedy", interactive=True).notes
    assert Talk(model, "Hello?", sampling="greedy").notes == ""


def test_statistics_after_each_answer(model: Any) -> None:
    talk = Talk(model, "Hello?", "And?", with_stats=True)
    assert talk.answers == "Yo\nYo\n"
    assert talk.notes.count("last answer") == talk.notes.count("generated   3 tokens") == 2
    assert "all 2 answers" not in talk.notes


def test_stop_texts_and_a_smaller_context(model: Any) -> None:
    assert Talk(model, "Hello?", stop=("o",)).answers == "Y\n"
    talk = Talk(model, "Hello?", "x" * 60, context=64)
    assert talk.answers == "Yo\n"
    assert "tokens with this question; the context is limited to 64" in talk.notes


def test_exit_ends_the_loop(model: Any) -> None:
    for word in ("/exit", "/bye"):
        assert Talk(model, word, "Hello?").answers == ""
    assert "Yo" not in Talk(model, "exit", "Hello?", interactive=True).answers
    assert Talk(model, "exit", "Hello?").answers == "Yo\nYo\n"  # a line of a pipe is a message


def test_help_lists_every_command(model: Any) -> None:
    notes = Talk(model, "/help").notes
    for name in ("/system TEXT", "/save FILE", "/load FILE", "/drop N", "/reset", "/stats", "/exit", '"""', "Ctrl-C"):
        assert f"\n{name} " in "\n" + notes
    for name in ("/undo", "/retry", "/temperature"):
        assert f"\n{name} " in "\n" + notes


def test_saving_and_loading(model: Any, tmp_path: Path) -> None:
    file = tmp_path / "my talk.json"
    talk = Talk(model, "Hello?", f"/save {file}", f'/save "{file}"', system="Be brief.")
    assert talk.well
    assert f"wrote 1 exchange to {file}" in talk.notes
    assert read_chat(file) == SavedChat("a/model", talk.conversation)
    later = Talk(model, "Before?", f"/load {file}", "And?")
    assert "loaded 1 exchange from" in later.notes
    assert later.conversation == talk.conversation.with_exchange(Exchange("And?", "Yo"))
    file.write_text(file.read_text().replace("a/model", "another/one"))
    assert "loaded 1 exchange with another/one from" in Talk(model, f"/load {file}").notes


@pytest.mark.parametrize("text", ["", "[]", '{"format": "rabbitllm chat", "version": 1}', "\x1b[31m"])
def test_damaged_file_is_refused(model: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "talk.json").write_text(text)
    talk = Talk(model, "Hello?", f"/load {tmp_path}/talk.json", "And?", system="Be brief.")
    assert not talk.well
    assert "error: " in talk.notes
    assert "What to do: " in talk.notes
    assert "\x1b" not in talk.notes
    assert talk.answers == "Yo\nYo\n"
    assert len(talk.conversation.exchanges) == 2
    assert (tmp_path / "talk.json").read_text() == text


@pytest.mark.parametrize("interactive", [True, False])
def test_a_refused_command_fails_a_script_alone(model: Any, interactive: bool) -> None:
    talk = Talk(model, "/nonsense", "Hello?", "/exit", interactive=interactive)
    assert "There is no command '/nonsense'" in talk.notes
    assert talk.well is interactive


def test_other_files_are_not_overwritten(model: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    talk = Talk(model, "Hello?", f"/save {tmp_path}/notes.txt")
    assert not talk.well
    assert "is not a saved conversation" in talk.notes
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_system_prompts(model: Any) -> None:
    talk = Talk(model, "/system", "/system Answer in [bold]rhymes[/].", "/system", "Hello?", "/reset", "/system -")
    assert talk.notes.splitlines() == [
        "there is no system prompt",
        "set the system prompt",
        "Answer in [bold]rhymes[/].",
        "removed all exchanges, kept the system prompt",
        "removed the system prompt",
    ]
    assert talk.conversation == Conversation()


def test_reset_and_drop(model: Any) -> None:
    talk = Talk(model, "1?", "2?", "3?", "/drop", "/drop 5", "4?", "/reset", "5?")
    assert "removed 1 exchange; 2 left" in talk.notes
    assert "removed 2 exchanges; 0 left" in talk.notes
    assert talk.conversation.exchanges == (Exchange("5?", "Yo"),)
    assert talk.session.cached_tokens == len("user: 5?\nassistant: ") + 2


def test_wrong_commands_are_reported_and_the_loop_continues(model: Any) -> None:
    talk = Talk(model, "/frob", "/drop x", "Hello?")
    assert (talk.answers, talk.well) == ("Yo\n", False)
    assert "There is no command '/frob'." in talk.notes


def test_question_beyond_the_context_is_removed(model: Any) -> None:
    talk = Talk(model, "Hello?", "x" * 2000, "And?")
    assert not talk.well
    assert "the model's context has 1,024" in talk.notes
    assert "/drop removes the oldest exchange" in " ".join(talk.notes.split())
    assert [exchange.question for exchange in talk.conversation.exchanges] == ["Hello?", "And?"]


@pytest.mark.long
def test_reached_limits_are_reported(tmp_path: Path) -> None:
    endless = talker(parrot_folder(tmp_path / "model", {" ": "Y", "Y": "o", "o": " "}), ALL)
    talk = Talk(endless, "Hello?", max_new_tokens=5)
    assert talk.answers == "Yo Yo\n"
    assert "ended after 5 tokens, the limit of --max-new-tokens" in talk.notes
    talk = Talk(endless, "Hello?")
    assert "the context of 1,024 tokens is full" in talk.notes


def test_stats(model: Any) -> None:
    notes = Talk(model, "/stats", "Hello?", "/stats", "And?", "/stats").notes
    first, second, third = notes.split("KV cache")[:3]
    assert "none yet" in first
    assert "answers" not in second.split("last answer")[1]
    facts = third.split("last answer")[1]
    prompt = len("user: Hello?\nassistant: Yo\nuser: And?\nassistant: ")
    tokens = len("user: Hello?\nassistant: Yo")
    assert f"prompt      {prompt} tokens: {tokens} kept in the cache, {prompt - tokens} computed" in facts
    assert f"passes      3, with {prompt - tokens + 2} tokens altogether" in facts
    assert "all 2 answers" in facts
    assert "nothing: all weights are resident" in facts
    assert "5.00 MB cpu resident" in facts
    assert f"{prompt + 2} of 1,024 tokens" in notes


def test_a_saved_file_is_plain_json(model: Any, tmp_path: Path) -> None:
    Talk(model, "Hello?", f"/save {tmp_path}/talk.json")
    assert json.loads((tmp_path / "talk.json").read_text())["messages"][1] == {"role": "assistant", "content": "Yo"}


def test_undo_removes_the_last_exchange(model: Any) -> None:
    talk = Talk(model, "1?", "2?", "/undo", "3?")
    assert "removed the last exchange; 1 left" in talk.notes
    assert [exchange.question for exchange in talk.conversation.exchanges] == ["1?", "3?"]
    talk = Talk(model, "/undo", "1?")
    assert "error: There is no exchange yet." in talk.notes
    assert len(talk.conversation.exchanges) == 1


def test_retry_replaces_the_last_answer(tmp_path: Path) -> None:
    """Each letter but Y is as likely as any other after the prompt, so seeds decide."""
    model = talker(parrot_folder(tmp_path / "model", {"Y": "<eos>"}), ALL)
    talk = Talk(model, "1?", "/temperature 1", "2?", "/retry", max_new_tokens=8)
    first, second = talk.conversation.exchanges
    assert (first.question, second.question) == ("1?", "2?")
    answers = talk.answers.splitlines()
    assert second.answer in talk.answers
    assert len(set(answers)) == len(answers)
    assert "gets the same answer" not in talk.notes
    again = Talk(model, "1?", "/retry", max_new_tokens=8)
    assert "the temperature is 0, so the answer changes only by rounding" in " ".join(again.notes.split())
    assert len(again.conversation.exchanges) == 1


def test_a_retry_without_an_answer_keeps_the_earlier_one(model: Any) -> None:
    talk = Talk(model, "1?", "/system " + "x" * 2000, "/retry")
    assert not talk.well
    assert "the earlier answer stays in the conversation" in talk.notes
    assert talk.conversation.exchanges == (Exchange("1?", "Yo"),)


def test_the_temperature_is_shown_set_and_checked(model: Any) -> None:
    talk = Talk(model, "/temperature", "/temperature 0.7", "/temperature", "/temperature hot", "/temperature -1")
    lines = talk.notes.splitlines()
    assert lines[:3] == ["temperature: 0 (greedy)", "temperature: 0.7", "temperature: 0.7"]
    assert talk.notes.count("/temperature takes 0 or a larger number, not") == 2
    assert talk.session.sampling.temperature == 0.7


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(split(thinker(tmp_path_factory.mktemp("thinking") / "model")), profiling=True)


def test_thoughts_are_counted_kept_and_not_sent_back(thinking: Any, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talk = Talk(thinking, "/thoughts", QUESTION, QUESTION, "/thoughts", "/stats", f"/save {file}", f"/load {file}")
    assert talk.answers == f"{ANSWER}\n{ANSWER}\n"
    assert talk.conversation.exchanges == (Exchange(QUESTION, ANSWER, reasoning=THOUGHT),) * 2
    assert talk.notes.startswith(f"there are no thoughts\n{THOUGHT}\n")
    assert f"5 tokens, {REASONING_TOKENS} of them thoughts" in talk.notes
    assert f"10 tokens, {2 * REASONING_TOKENS} of them thoughts" in talk.notes
    assert json.loads(file.read_text())["messages"][1]["reasoning_content"] == THOUGHT
    plain = "".join(f"{role} {text}" for role, text in (("user", QUESTION), ("assistant", ANSWER), ("user", QUESTION)))
    tokens = thinking.tokenizer(plain, add_special_tokens=False)["input_ids"]
    assert f"prompt      {len(tokens)} tokens" in talk.notes.split("last answer")[1]


def test_a_limit_that_thoughts_alone_reached_says_so(thinking: Any) -> None:
    talk = Talk(thinking, QUESTION, max_new_tokens=3)
    note = "ended after 3 tokens, all of them thoughts: raise --max-new-tokens, or use --no-thinking"
    assert note in " ".join(talk.notes.split())
