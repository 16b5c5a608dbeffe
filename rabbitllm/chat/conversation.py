"""A conversation as an immutable record, and as a JSON file, written atomically and checked when read.

    {
     "format": "rabbitllm chat",
     "version": 1,
     "model": "organisation/name",
     "messages": [
      {"role": "system", "content": "Answer briefly."},
      {"role": "user", "content": "What is a rabbit?"},
      {"role": "assistant", "content": "A small", "stopped": true}
     ]
    }

A conversation is a system prompt and exchanges, each a question with its answer. So roles always alternate, as most
chat templates require; a question without an answer is not part of it. `stopped` is left out for a complete answer, and
`reasoning_content`, what the model thought before its answer, where there is none.
Other keys of the file are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rabbitllm.base.terminal import harmless
from rabbitllm.errors import ChatFileError
from rabbitllm.formats.bounded import decode_json, read_regular
from rabbitllm.generation.template import ASSISTANT, REASONING, SYSTEM, USER
from rabbitllm.storage import durable

if TYPE_CHECKING:
    from rabbitllm.generation.media import MediaFile


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its answer, which may be incomplete.

    Attributes:
        question: text of the user.
        answer: text of the model.
        stopped: whether the answer was stopped before its end.
        pictures: pictures that came with the question.
        reasoning: what the model thought before the answer.
    """

    question: str
    answer: str
    stopped: bool = False
    pictures: tuple[MediaFile, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt and the exchanges since, oldest first.

    Attributes:
        system: the system prompt, or None.
        exchanges: the exchanges, oldest first.
    """

    system: str | None = None
    exchanges: tuple[Exchange, ...] = ()

    def with_system(self, system: str | None) -> Conversation:
        """The same exchanges below another system prompt; None or white space for none."""
        return replace(self, system=system if system and system.strip() else None)

    def with_exchange(self, exchange: Exchange) -> Conversation:
        """A copy with one more exchange at its end."""
        return replace(self, exchanges=(*self.exchanges, exchange))

    def without_oldest(self, count: int) -> Conversation:
        """A copy without its first `count` exchanges."""
        return replace(self, exchanges=self.exchanges[count:])

    def emptied(self) -> Conversation:
        """The system prompt alone."""
        return replace(self, exchanges=())

    def messages(self, question: str | None = None, pictures: Sequence[MediaFile] = ()) -> list[dict[str, Any]]:
        """Messages for `Session.answer`: dicts with `role` and `content`, a text or parts with pictures; answers also
        with `reasoning_content`.

        Args:
            question: a question without an answer, appended as the last message; None for none.
            pictures: pictures that come with this question.
        """
        turns: list[dict[str, Any]] = [{"role": SYSTEM, "content": self.system}] if self.system is not None else []
        for exchange in self.exchanges:
            content = _with_pictures(exchange.question, exchange.pictures)
            reasoning = {REASONING: exchange.reasoning} if exchange.reasoning else {}
            answer = {"role": ASSISTANT, "content": exchange.answer, **reasoning}
            turns += [{"role": USER, "content": content}, answer]
        return turns if question is None else [*turns, {"role": USER, "content": _with_pictures(question, pictures)}]


def _with_pictures(question: str, pictures: Sequence[MediaFile]) -> str | list[dict[str, Any]]:
    """The content of a message; pictures come before its text."""
    if not pictures:
        return question
    return [*({"type": "image", "file": picture} for picture in pictures), {"type": "text", "text": question}]


FORMAT = "rabbitllm chat"
VERSION = 1
MAX_BYTES = 32 << 20
"""Maximum size of a file; a conversation that fills a context of a million tokens has about 5 MB."""
_REMEDY = "Use a file that /save wrote; nothing was changed."


@dataclass(frozen=True, slots=True)
class SavedChat:
    """The contents of a file.

    Attributes:
        model: model of the conversation, as the user named it.
        conversation: the conversation.
    """

    model: str
    conversation: Conversation


def encode(saved: SavedChat) -> bytes:
    """The bytes of a file, UTF-8.

    Raises:
        ChatFileError: the conversation has pictures, which a file cannot hold.
    """
    if any(exchange.pictures for exchange in saved.conversation.exchanges):
        raise ChatFileError("A conversation with pictures cannot be saved.", "/drop or /reset removes them.")
    messages: list[dict[str, Any]] = [*saved.conversation.messages()]
    answers = [message for message in messages if message["role"] == ASSISTANT]
    for message, exchange in zip(answers, saved.conversation.exchanges, strict=True):
        message |= {"stopped": True} if exchange.stopped else {}
    table = {"format": FORMAT, "version": VERSION, "model": saved.model, "messages": messages}
    return (json.dumps(table, indent=1, ensure_ascii=False) + "\n").encode("utf-8")


def decode(raw: bytes, name: str) -> SavedChat:
    """Parse the bytes of a file.

    Args:
        raw: all bytes of the file.
        name: name of the file, for messages.

    Raises:
        ChatFileError: they are not a valid conversation.
    """
    try:
        table = decode_json(raw)
    except ValueError as error:  # includes UnicodeDecodeError and JSONDecodeError
        raise ChatFileError(f"{name} is not valid JSON: {harmless(str(error))}.", _REMEDY) from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ChatFileError(f'{name} is not a saved conversation: it lacks "format": "{FORMAT}".', _REMEDY)
    if type(table.get("version")) is not int or table["version"] < 1:
        raise ChatFileError(f"{name} has no version; expected 1 or more.", _REMEDY)
    if table["version"] > VERSION:
        raise ChatFileError(
            f"{name} has version {table['version']}; this RabbitLLM reads up to {VERSION}.",
            "Load it with a newer RabbitLLM; nothing was changed.",
        )
    model = table.get("model", "")
    if not isinstance(model, str):
        raise ChatFileError(f"The model in {name} is of type {type(model).__name__}; expected text.", _REMEDY)
    return SavedChat(model, _conversation(table.get("messages"), name))


def _conversation(messages: Any, name: str) -> Conversation:
    if not isinstance(messages, list):
        raise ChatFileError(f'{name} has no list of "messages".', _REMEDY)
    checked = [_message(message, f"message {number} of {name}") for number, message in enumerate(messages, 1)]
    has_system = bool(checked) and checked[0][0] == SYSTEM
    talk = checked[1:] if has_system else checked
    for index, (role, *_) in enumerate(talk):
        if role != (expected := (USER, ASSISTANT)[index % 2]):
            raise ChatFileError(
                f"Message {index + 1 + has_system} of {name} has the role {role}; expected {expected}.", _REMEDY
            )
    if len(talk) % 2:
        raise ChatFileError(f"{name} ends with a question; expected an answer to it.", _REMEDY)
    exchanges = tuple(
        Exchange(question, answer, stopped, reasoning=reasoning)
        for (_, question, *_), (_, answer, stopped, reasoning) in zip(talk[::2], talk[1::2], strict=True)
    )
    return Conversation(None, exchanges).with_system(checked[0][1] if has_system else None)


def _message(message: Any, where: str) -> tuple[str, str, bool, str]:
    """Check a message; returns its role, its content, whether it was stopped, and its reasoning."""
    if not isinstance(message, dict):
        raise ChatFileError(
            f"{where[0].upper()}{where[1:]} is of type {type(message).__name__}; expected an object.", _REMEDY
        )
    role, stopped = message.get("role"), message.get("stopped", False)
    content: Any = message.get("content")
    reasoning: Any = message.get(REASONING, "")
    if role not in (SYSTEM, USER, ASSISTANT):
        raise ChatFileError(f"The role in {where} is {harmless(repr(role), 40)}; expected user or assistant.", _REMEDY)
    for name, text in (("content", content), (REASONING, reasoning)):
        if not isinstance(text, str):
            raise ChatFileError(f"The {name} in {where} is of type {type(text).__name__}; expected text.", _REMEDY)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # "\ud800" is valid JSON, but tokenizers refuse it
            raise ChatFileError(
                f"The {name} in {where} has a lone surrogate, which is not a character.", _REMEDY
            ) from None
    if not isinstance(stopped, bool):
        raise ChatFileError(
            f'"stopped" in {where} is of type {type(stopped).__name__}; expected true or false.', _REMEDY
        )
    return role, content, stopped, reasoning


def read_chat(path: Path) -> SavedChat:
    """The conversation in a file.

    Raises:
        ChatFileError: the file cannot be read, or is not a conversation.
    """
    shown = harmless(str(path))
    try:
        raw = read_regular(
            path, MAX_BYTES, lambda problem: ChatFileError(f"{shown} cannot be used: it {problem}.", _REMEDY)
        )
    except OSError as error:
        raise ChatFileError(f"{shown} cannot be read: {error.strerror}.", _REMEDY) from None
    return decode(raw, shown)


def _another_file(path: Path) -> ChatFileError:
    problem = f"{harmless(str(path))} exists and is not a saved conversation; it was not changed."
    return ChatFileError(problem, "Choose another name for the file.")


def write_chat(path: Path, saved: SavedChat) -> None:
    """Write a conversation atomically; an existing file is replaced only if it is a saved conversation.

    Raises:
        ChatFileError: the existing file is something else, or the file cannot be written.
    """
    shown = harmless(str(path))
    if path.exists() or path.is_symlink():
        try:
            read_chat(path)
        except ChatFileError:
            raise _another_file(path) from None
    part = path.with_name(path.name + durable.PART_SUFFIX)
    if part.is_file() and not durable.begins_as(part, b'{\n "format": '):
        raise _another_file(part)
    try:
        durable.write_whole(path, encode(saved))
    except OSError as error:
        raise ChatFileError(
            f"{shown} cannot be written: {error.strerror or error}.", "Choose another folder or name for the file."
        ) from None
