"""Conversations as records and as files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.chat.conversation import (
    MAX_BYTES,
    Conversation,
    Exchange,
    SavedChat,
    decode,
    encode,
    read_chat,
    write_chat,
)
from rabbitllm.errors import ChatFileError
from rabbitllm.storage import durable

FIRST, SECOND = Exchange("Hello?", "Hello."), Exchange("More?", "A lo", stopped=True)


def test_roles_alternate() -> None:
    talk = Conversation("Be brief.").with_exchange(FIRST).with_exchange(SECOND)
    assert [message["role"] for message in talk.messages("And?")] == [
        *("system", "user", "assistant", "user", "assistant", "user"),
    ]
    assert [message["content"] for message in talk.messages()] == ["Be brief.", "Hello?", "Hello.", "More?", "A lo"]
    assert Conversation().messages("And?") == [{"role": "user", "content": "And?"}]


def test_emptied_conversation_keeps_the_system_prompt() -> None:
    talk = Conversation("Be brief.", (FIRST, SECOND, FIRST))
    assert talk.without_oldest(1) == Conversation("Be brief.", (SECOND, FIRST))
    assert talk.without_oldest(7) == talk.emptied() == Conversation("Be brief.")


def test_a_blank_system_prompt_is_none() -> None:
    assert Conversation("Be brief.").with_system(" \n").system is None
    assert Conversation().with_system("Rhyme.").system == "Rhyme."


SAVED = SavedChat("a/model", Conversation("Be brief.", (Exchange("Größe?", "大きい\n\t🐇"), Exchange("", "x", True))))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    TEXTS,
    st.none() | TEXTS.filter(str.strip),
    st.lists(st.builds(Exchange, TEXTS, TEXTS, st.booleans()), max_size=3).map(tuple),
)
def test_encoding_round_trips(model: str, system: str | None, exchanges: tuple[Exchange, ...]) -> None:
    saved = SavedChat(model, Conversation(system, exchanges))
    assert decode(encode(saved), "it") == saved


def test_saved_file_is_indented_utf8(tmp_path: Path) -> None:
    write_chat(tmp_path / "talk.json", SAVED)
    text = (tmp_path / "talk.json").read_text(encoding="utf-8")
    assert '"role": "user", "content": "Größe?"' in text.replace(",\n   ", ", ")
    assert "大きい" in text
    assert json.loads(text)["messages"][-1] == {"role": "assistant", "content": "x", "stopped": True}
    assert read_chat(tmp_path / "talk.json") == SAVED
    assert list(tmp_path.iterdir()) == [tmp_path / "talk.json"]


def table(**changes: Any) -> dict[str, Any]:
    """A sound file with some of it changed; None leaves a key out."""
    content = {**json.loads(encode(SAVED)), **changes}
    return {key: value for key, value in content.items() if value is not None}


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
WRONG: dict[str, tuple[Any, str]] = {
    "a list": ([1], "is not a saved conversation"),
    "another format": (table(format="gguf"), "is not a saved conversation"),
    "no format": (table(format=None), "is not a saved conversation"),
    "no version": (table(version=None), "no version"),
    "version true": (table(version=True), "no version"),
    "version 0": (table(version=0), "no version"),
    "a later version": (table(version=2), "has version 2; this RabbitLLM reads up to 1"),
    "model is a number": (table(model=3), "The model in it is of type int"),
    "no messages": (table(messages=None), 'no list of "messages"'),
    "messages are a table": (table(messages={}), 'no list of "messages"'),
    "a message is text": (table(messages=["hello"]), "Message 1 of it is of type str"),
    "a role of its own": (table(messages=[{"role": "root", "content": ""}]), "The role in message 1 of it is 'root'"),
    "a role is a list": (table(messages=[{"role": [], "content": ""}]), r"The role in message 1 of it is \[\]"),
    "no content": (table(messages=[{"role": "user"}]), "The content in message 1 of it is of type NoneType"),
    "content in parts": (
        table(messages=[{"role": "user", "content": [{}]}]),
        "The content in message 1 of it is of type lis",
    ),
    "stopped is text": (table(messages=[USER, {**ASSISTANT, "stopped": "no"}]), '"stopped" in message 2'),
    "the model begins": (table(messages=[ASSISTANT, USER]), "Message 1 of it has the role assistant; expected user"),
    "twice the user": (table(messages=[USER, USER]), "Message 2 of it has the role user; expected assistant"),
    "a system prompt later": (
        table(messages=[USER, ASSISTANT, {"role": "system", "content": ""}]),
        "Message 3 of it has the role system; expected user",
    ),
    "no answer at the end": (table(messages=[USER]), "ends with a question"),
}
RAW: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not valid JSON"),
    "cut off": (encode(SAVED)[:-9], "not valid JSON"),
    "no UTF-8": (encode(SAVED).replace(b"Be", b"\xff\xfe"), "not valid JSON"),
    "binary": (bytes(range(256)), "not valid JSON"),
    "a key twice": (b'{"format": "rabbitllm chat", "format": "rabbitllm chat"}', "appears twice"),
    "nested deeply": (b'{"format": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
    "too many values": (b'{"format": [' + b"1," * 700_000 + b"1]}", "at most 600,000"),
    "half a character": (
        b'{"format":"rabbitllm chat","version":1,"messages":[{"role":"user","content":"\\ud800"}]}',
        "lone surrogate",
    ),
    "an escape sequence": (b'{"format": "\x1b[2J', "not valid JSON"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_files_are_refused(name: str) -> None:
    value, message = WRONG[name]
    with pytest.raises(ChatFileError, match=message) as caught:
        decode(json.dumps(value).encode(), "it")
    assert caught.value.remedy


@pytest.mark.parametrize("name", RAW)
def test_damaged_bytes_are_refused(name: str, tmp_path: Path) -> None:
    raw, message = RAW[name]
    (tmp_path / "talk.json").write_bytes(raw)
    with pytest.raises(ChatFileError, match=message) as caught:
        read_chat(tmp_path / "talk.json")
    assert "talk.json" in str(caught.value)
    assert str(caught.value).replace("\n", "").isprintable()


def test_truncated_files_are_refused() -> None:
    raw = encode(SAVED).rstrip()
    for length in range(len(raw)):
        with pytest.raises(ChatFileError):
            decode(raw[:length], "it")


def test_other_keys_are_ignored() -> None:
    assert decode(json.dumps(table(colour="grey")).encode(), "it") == SAVED


def test_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ChatFileError, match="cannot be read: No such file"):
        read_chat(tmp_path / "talk.json")
    with pytest.raises(ChatFileError, match=r"cannot be read|not a regular file"):
        read_chat(tmp_path)
    if sys.platform != "win32":
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ChatFileError, match="not a regular file"):
            read_chat(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ChatFileError, match="at most"):
        read_chat(tmp_path / "large")


def test_only_a_conversation_is_overwritten(tmp_path: Path) -> None:
    other = tmp_path / "thesis.json"
    other.write_text('{"chapters": 12}')
    with pytest.raises(ChatFileError, match="exists and is not a saved conversation"):
        write_chat(other, SAVED)
    assert other.read_text() == '{"chapters": 12}'
    with pytest.raises(ChatFileError, match="cannot be written: No such file"):
        write_chat(tmp_path / "nowhere" / "talk.json", SAVED)
    write_chat(tmp_path / "talk.json", SAVED)
    later = SavedChat("b", Conversation())
    write_chat(tmp_path / "talk.json", later)
    assert read_chat(tmp_path / "talk.json") == later


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    write_chat(tmp_path / "talk.json", SAVED)

    def fail(step: durable.Step) -> None:
        if step.kind in ("sync", "rename"):
            raise OSError(28, "No space left on device")

    with durable.observe_steps(fail), pytest.raises(ChatFileError, match="No space left on device"):
        write_chat(tmp_path / "talk.json", SavedChat("b", Conversation()))
    assert read_chat(tmp_path / "talk.json") == SAVED


def test_an_unfinished_file_of_others_is_kept(tmp_path: Path) -> None:
    (tmp_path / "talk.json.part").write_text("mine")
    with pytest.raises(ChatFileError, match=r"talk\.json\.part exists and is not a saved conversation"):
        write_chat(tmp_path / "talk.json", SAVED)
    assert (tmp_path / "talk.json.part").read_text() == "mine"
