"""Tool calls in a model's output, extracted from the text as it arrives.

Models write a call in the form that their chat template shows:

    <tool_call>{"name": …, "arguments": {…}}</tool_call>                              Hermes, Qwen 2.5 and 3
    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>  Qwen 3 Coder, 3.5
    [TOOL_CALLS][{"name": …, "arguments": {…}}, …]                                    Mistral
    [TOOL_CALLS]NAME{…}    [TOOL_CALLS]NAME[ARGS]{…}                                  Mistral, later ones
    {"name": …, "parameters": {…}}    <|python_tag|>{…}                               Llama 3

Text before a call belongs to the answer; so does text that looks like a call but is not (invalid JSON, no name), and a
call between marks of reasoning, which the model only considered. Independent of tokenizers: the text has the markers,
also those that are special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rabbitllm.generation.reasoning import next_mark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MISTRAL = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
PYTHON = "<|python_tag|>"
MARKERS = (OPEN, MISTRAL, PYTHON)
"""Markers that begin a call."""
SPECIAL = (*MARKERS, CLOSE, ARGUMENTS, "[CALL_ID]")
"""Markers that may be special tokens, and so missing from decoded text."""

# without an end it was cut off, perhaps in the middle of a value
_FUNCTION = re.compile(rf"<function=([^>\n]+)>(.*?)(?:</function>|{CLOSE})", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A tool call.

    Attributes:
        name: name of the tool.
        arguments: its arguments as JSON.
    """

    name: str
    arguments: str


def call_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that are marks of calls."""
    return frozenset(token for name, token in tokenizer.get_added_vocab().items() if name in SPECIAL)


class CallReader:
    """Splits an answer into text and tool calls, delta by delta.

    Args:
        tools: names of the tools; an answer that is bare JSON is a call only if it names one of these.
        types: tool -> parameter -> its type in JSON schema; for forms that write values without quotes.
        pairs: opening and closing marks of reasoning.
    """

    def __init__(
        self,
        tools: Collection[str],
        types: Mapping[str, Mapping[str, str]] | None = None,
        pairs: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._tools = frozenset(tools)
        self._types = types or {}
        self._closing_of = dict(pairs)
        self._closing: str | None = None
        spans = "|".join(f"{re.escape(first)}.*?(?:{re.escape(last)}|\\Z)" for first, last in ((OPEN, CLOSE), *pairs))
        self._spans = re.compile(f"({spans})", re.DOTALL)
        self._pending = ""
        self._begun = False
        self._calling = False

    def feed(self, text: str) -> str:
        """The next text that does not belong to a call.

        Args:
            text: the text since the last call of this method.
        """
        self._pending += text
        if self._calling or not self._pending:
            return ""
        if not self._begun:
            lead = self._pending.lstrip()
            if not lead:
                return ""
            if lead[0] in "{[" and not lead.startswith(MISTRAL[: len(lead)]):  # perhaps a call without a marker
                self._calling = True
                return ""
            self._begun = True
        out = ""
        while not self._calling and self._pending:
            certain = self._certain()
            out, self._pending = out + self._pending[:certain], self._pending[certain:]
            if not certain:
                break
        return out

    def _certain(self) -> int:
        """How much of the pending text belongs to no call, as far as to the next mark."""
        if self._closing is not None:
            position, mark = next_mark(self._pending, (self._closing,))
            self._closing = None if mark else self._closing
            return position + len(mark)
        position, mark = next_mark(self._pending, (*MARKERS, *self._closing_of))
        if mark in MARKERS:
            self._calling = True
            return position
        self._closing = self._closing_of.get(mark)
        return position + len(mark)

    def end(self) -> tuple[str, tuple[ParsedToolCall, ...]]:
        """The rest of the text, and the calls."""
        text, self._pending = self._pending, ""
        return self._split(text)

    def _split(self, pending: str) -> tuple[str, tuple[ParsedToolCall, ...]]:
        lead = pending.strip()
        for marker in (PYTHON, ""):
            if lead.startswith(marker or ("{", "[")):
                calls = tuple(self._bare(lead.removeprefix(marker)))
                if calls:
                    return "", calls
        before, marker, rest = pending.partition(MISTRAL)
        if marker and not any(mark in before for mark in (OPEN, *self._closing_of)):
            calls = tuple(self._mistral(rest))
            return (before.rstrip(), calls) if calls else (pending, ())
        if OPEN not in pending:
            return pending, ()
        text = read = ""
        all_calls: list[ParsedToolCall] = []
        for part in self._spans.split(pending):
            calls = tuple(self._hermes(part.removeprefix(OPEN))) if part.startswith(OPEN) else ()
            all_calls, text, read = [*all_calls, *calls], text + ("" if calls else part), read + part
            is_span = part.startswith((OPEN, *self._closing_of))
            if not is_span and self._closes(part):
                all_calls, text = [], read  # what was before is only considered
        return (text.rstrip() if all_calls else text), tuple(all_calls)

    def _mistral(self, rest: str) -> list[ParsedToolCall]:
        calls: list[ParsedToolCall] = []
        for part in rest.split(MISTRAL):
            named = _NAMED.match(part)
            start = named.end() if named is not None else 0
            values, end = _values(part[start:])
            if named is None:
                calls += [call for value in values for call in _calls_of(value)]
            elif values and isinstance(values[0], dict):
                calls.append(ParsedToolCall(named[1], json.dumps(values[0], ensure_ascii=False)))
            following = part[start + end :]
            if any(mark in following for mark in self._closing_of):
                break  # the rest is only considered
            if self._closes(following):
                calls = []
        return calls

    def _closes(self, text: str) -> bool:
        """Whether a text ends reasoning whose opening mark is missing."""
        return any(mark in text for mark in self._closing_of.values())

    def _hermes(self, inside: str) -> Iterator[ParsedToolCall]:
        functions = _FUNCTION.findall(inside)
        if functions:
            for name, body in functions:
                types = self._types.get(name.strip(), {})
                texts = {key.strip(): text for key, text in _PARAMETER.findall(body)}
                arguments = {key: _value(text, types.get(key, "")) for key, text in texts.items()}
                yield ParsedToolCall(name.strip(), json.dumps(arguments, ensure_ascii=False))
            return
        for value in _values(inside)[0]:
            yield from _calls_of(value)

    def _bare(self, text: str) -> Iterator[ParsedToolCall]:
        values, end = _values(text)
        if not self._closes(text[end:]):
            yield from (call for value in values for call in _calls_of(value) if call.name in self._tools)


def _values(text: str) -> tuple[list[Any], int]:
    """Consecutive JSON values, up to the first invalid one, and where they end."""
    decoder = json.JSONDecoder()
    values: list[Any] = []
    position = 0
    while position < len(text):
        while position < len(text) and text[position] in " \t\r\n;,":
            position += 1
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            break
        values.append(value)
    return values, position


def _calls_of(value: Any) -> Iterator[ParsedToolCall]:
    if isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict):
                yield from _calls_of(entry)
        return
    if not isinstance(value, dict):
        return
    value = value["function"] if isinstance(value.get("function"), dict) else value
    name = value.get("name")
    args = value.get("arguments", value.get("parameters", {}))
    if isinstance(name, str) and name and isinstance(args, dict | str):
        yield ParsedToolCall(name, args if isinstance(args, str) else json.dumps(args, ensure_ascii=False))


def _value(text: str, json_type: str) -> Any:
    """A parameter written without quotes, converted to the type in the tool's schema."""
    if json_type in ("", "string"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
