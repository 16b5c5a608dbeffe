"""Tool calls in a model's output, extracted from the text as it arrives.

Models write a call in the form that their chat template shows: in a block (`FORMS`), or as

    [TOOL_CALLS][{"name": …, "arguments": {…}}, …]                                    Mistral
    [TOOL_CALLS]NAME{…}    [TOOL_CALLS]NAME[ARGS]{…}                                  Mistral, later ones
    {"name": …, "parameters": {…}}    <|python_tag|>{…}                               Llama 3
    {{"name": …, "arguments": {…}}}                                                   Qwen 2.5 Coder

Text before a call belongs to the answer; so does text that looks like a call but is not (invalid JSON, no name), and a
call between marks of reasoning, which the model only considered. Independent of tokenizers: the text has the markers,
also those that are special tokens.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rabbitllm.generation.reasoning import CHANNEL, next_mark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MISTRAL = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
PYTHON = "<|python_tag|>"
_KEYS = ({"name", "arguments"}, {"name", "parameters"})
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class CallForm:
    """A form of calls between two marks.

    Attributes:
        opening, closing: the marks; several calls may be between them.
        call: finds a call, with its `name` and `body`; empty where calls are JSON that has the name inside. Without its
            end a call was cut off, perhaps in the middle of a value. What is before the body is the `head` of a call.
        argument: finds an argument in the body, with its `key` and `value`, and whether it is a `string`: "true" or
            "false", else the tool's schema says that; empty where the body is JSON.
        quote: the mark around strings in JSON whose keys have no quotes; empty for usual JSON.
        tag: the mark before each tag of a body whose arguments are elements named after them; empty elsewhere.
        is_strict: whether text has such marks too: a call is then nothing but JSON of name and arguments of a tool.
        special: further marks that may be special tokens, and so missing from decoded text.
    """

    opening: str
    closing: str
    call: str = ""
    argument: str = ""
    quote: str = ""
    tag: str = ""
    is_strict: bool = False
    special: tuple[str, ...] = ()

    @property
    def head(self) -> re.Pattern[str]:
        """Finds the beginning of a call, with its `name`; what is behind it are the arguments."""
        head = self.call.partition("(?P<body>")[0] or _JSON_HEAD
        return re.compile(head.replace(_FIRST, re.escape(self.opening)))


_FIRST = r"\A"
_JSON_HEAD = r'"name"\s*:\s*"(?P<name>[^"]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
_NS = "]<]minimax[>["
_ARGUMENT = "<arg_key>"
_NAME = r"(?P<name>[\w.\-]+)"
_DSML = CallForm(
    "<\uff5cDSML\uff5cfunction_calls>",
    "</\uff5cDSML\uff5cfunction_calls>",
    r'<\uff5cDSML\uff5cinvoke name="(?P<name>[^"]+)">(?P<body>.*?)</\uff5cDSML\uff5cinvoke>',
    r'<\uff5cDSML\uff5cparameter name="(?P<key>[^"]+)" string="(?P<string>true|false)">(?P<value>.*?)'
    r"</\uff5cDSML\uff5cparameter>",
    special=("\uff5cDSML\uff5c",),
)
FORMS: Mapping[str, CallForm] = {
    "Qwen 3 Coder, 3.5": CallForm(
        OPEN,
        CLOSE,
        rf"<function=(?P<name>[^<>\n]+)>(?P<body>.*?)(?:</function>|{CLOSE})",
        r"<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)",
    ),
    "GLM 4.5 to 4.7": CallForm(
        OPEN,
        CLOSE,
        rf"\A\s*{_NAME}\s*(?P<body>(?:{_ARGUMENT}.*)?){CLOSE}",
        r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        special=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "Hermes, Qwen 2.5 and 3": CallForm(OPEN, CLOSE),
    "Qwen 2.5 Coder": CallForm("<tools>", "</tools>", is_strict=True),
    "Qwen 2.5 Coder, fenced": CallForm("```json", "\n```", is_strict=True),
    "MiniMax M1": CallForm("<tool_calls>", "</tool_calls>"),
    "MiniMax M2": CallForm(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        r'<invoke name="?(?P<name>[^">]+)"?>(?P<body>.*?)</invoke>',
        r'<parameter name="?(?P<key>[^">]+)"?>(?P<value>.*?)</parameter>',
    ),
    "MiniMax M3": CallForm(
        _NS + OPEN,
        _NS + CLOSE,
        rf'{re.escape(_NS)}<invoke name="(?P<name>[^"]+)">(?P<body>.*?){re.escape(_NS)}</invoke>',
        tag=_NS,
        special=(_NS,),
    ),
    "DeepSeek V3, R1, V3.1": CallForm(
        "<\uff5ctool▁calls▁begin\uff5c>",
        "<\uff5ctool▁calls▁end\uff5c>",
        rf"<\uff5ctool▁call▁begin\uff5c>(?:function<\uff5ctool▁sep\uff5c>)?{_NAME}(?:<\uff5ctool▁sep\uff5c>|\s*```json)"
        r"\s*(?P<body>.*?)(?:\s*```)?<\uff5ctool▁call▁end\uff5c>",
        special=("<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁sep\uff5c>", "<\uff5ctool▁call▁end\uff5c>"),
    ),
    "DeepSeek V3.2": _DSML,
    "DeepSeek V4": replace(_DSML, opening="<\uff5cDSML\uff5ctool_calls>", closing="</\uff5cDSML\uff5ctool_calls>"),
    "Kimi K2": CallForm(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?\s*"
        r"<\|tool_call_argument_begin\|>(?P<body>.*?)<\|tool_call_end\|>",
        special=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "Gemma 4": CallForm(
        "<|tool_call>",
        "<tool_call|>",
        rf"call:{_NAME}(?P<body>\{{.*\}})<tool_call\|>",
        quote='<|"|>',
        special=('<|"|>',),
    ),
}
"""Models -> their form. Of those with the same marks the first that finds a call is taken."""
_OPENINGS = tuple(dict.fromkeys(form.opening for form in FORMS.values()))
_BLOCKS = {form.opening: form.closing for form in FORMS.values()}
_STRICT = tuple(form.opening for form in FORMS.values() if form.is_strict)
MARKERS = (*(opening for opening in _OPENINGS if opening not in _STRICT), MISTRAL, PYTHON)
"""Markers that begin a call wherever they are."""
SPECIAL = frozenset(
    {
        *MARKERS,
        *_BLOCKS,
        *_BLOCKS.values(),
        ARGUMENTS,
        "[CALL_ID]",
        *(mark for form in FORMS.values() for mark in form.special),
    }
)
"""Markers that may be special tokens, and so missing from decoded text."""
_CUT = (
    *(form for form in FORMS.values() if form.call),
    CallForm(MISTRAL, "", rf"\A\s*{_NAME}\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?P<body>)"),
    CallForm("", ""),
)
"""The forms in which a call may begin; the last is JSON, with any opening mark."""
_END = re.compile(r"(?:\(\?:[^()]*\)|[^()?]*)\Z")
"""What a pattern ends with: alternatives, or a text."""
_UNREAD = "<|open|>call"
"""The mark of a form that is not read though parts of it look like others: Kimi K3."""
_BARE = re.compile(r"""["']name["'].{0,400}["'](?:parameters|arguments)["']""", re.DOTALL)
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


def is_known(template: str, tokens: Collection[str] = ()) -> bool:
    """Whether a model whose chat template takes tools writes calls in a form that is read here.

    Args:
        template: source of the template.
        tokens: names of the tokens that were added to its vocabulary.
    """
    text = "\n".join([template, *tokens])
    if _UNREAD in text:
        return False
    return any(marker in text for marker in (*MARKERS, CHANNEL)) or _BARE.search(template) is not None


class CallReader:
    """Splits an answer into text and tool calls, delta by delta.

    Args:
        tools: names of the tools; an answer that is bare JSON is a call only if it names one of these.
        types: tool -> parameter -> its type in JSON schema; for forms that write values without quotes.
        pairs: opening and closing marks of reasoning.
        must_call: whether an answer is nothing but calls.
    """

    def __init__(
        self,
        tools: Collection[str],
        types: Mapping[str, Mapping[str, str]] | None = None,
        pairs: Sequence[tuple[str, str]] = (),
        *,
        must_call: bool = False,
    ) -> None:
        self._tools = frozenset(tools)
        self._types = types or {}
        self._closing_of = dict(pairs)
        self._closing: str | None = None
        marks = (*_BLOCKS.items(), *pairs)
        spans = "|".join(f"{re.escape(first)}.*?(?:{re.escape(last)}|\\Z)" for first, last in marks)
        self._spans = re.compile(f"({spans})", re.DOTALL)
        self._marks = re.compile("|".join(map(re.escape, sorted((*MARKERS, *_STRICT, *self._closing_of)))))
        self._pending = ""
        self._begun = False
        self._calling = self._must_call = must_call
        self._is_cut = False

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
            if lead[0] in "{[" and not lead.startswith(MISTRAL):  # perhaps a call without a marker
                self._calling = not MISTRAL.startswith(lead)
                return ""
            self._begun = True
        done, certain = -1, 0
        stops = dict[str, int]()
        while not self._calling and done < certain < len(self._pending):
            done, certain = certain, self._certain(certain, stops)
        out, self._pending = self._pending[:certain], self._pending[certain:]
        return out

    def _certain(self, start: int, stops: dict[str, int]) -> int:
        """Where the pending text from a place on may belong to a call, as far as to the next mark.

        Args:
            start: the place.
            stops: mark -> the next place of its closing mark, or -1; a text of many marks is searched once.
        """
        text = self._pending
        if self._closing is not None:
            position, mark = next_mark(text[start:], (self._closing,))
            self._closing = None if mark else self._closing
            return start + position + len(mark)
        match = self._marks.search(text, start)
        if match is None:
            return start + next_mark(text[start:], (*MARKERS, *_STRICT, *self._closing_of))[0]
        mark, position, end = match[0], match.start(), match.end()
        if mark in _STRICT:
            if -1 < stops.get(mark, 0) < end:
                stops[mark] = text.find(_BLOCKS[mark], end)
            is_closed, may_call = stops[mark] >= 0, _may_call(text, end)
            self._calling = is_closed and may_call and bool(self._strict(text[end : stops[mark]]))
            return position if self._calling or (may_call and not is_closed) else end
        if mark in MARKERS:
            self._calling = True
            return position
        self._closing = self._closing_of.get(mark)
        return end

    def end(self, *, is_cut: bool = False) -> tuple[str, tuple[ParsedToolCall, ...]]:
        """The rest of the text, and the calls.

        Args:
            is_cut: whether the answer has no end; a call that it ends within has the arguments that are there.
        """
        text, self._pending, self._is_cut = self._pending, "", is_cut
        rest, calls = (self._cut(text) if is_cut else None) or self._split(text)
        return "" if is_cut and self._must_call else rest, calls

    def _cut(self, text: str) -> tuple[str, tuple[ParsedToolCall, ...]] | None:
        """Text and calls of a text that ends within a call."""
        heads = [
            (form, head)
            for form in _CUT
            if form.opening in text
            for head in form.head.finditer(text)
            if head["name"] in self._tools and head.end("name") < len(text)
        ]
        if not heads or any(mark in text for pair in self._closing_of.items() for mark in pair):
            return None
        heads.sort(key=lambda each: each[1].start("name"))
        count = len(self._split(text)[1])
        first = bisect_left(heads, count, key=lambda each: len(self._split(text[: each[1].start()])[1]))
        # what follows the first one behind whole calls may be within its arguments
        cut = (self._cut_at(text, *each, count) for each in (*heads[first : first + 1], heads[-1]))
        return next(filter(None, cut), None)

    def _cut_at(
        self, text: str, form: CallForm, head: re.Match[str], count: int
    ) -> tuple[str, tuple[ParsedToolCall, ...]] | None:
        """Text and calls if the call that begins at a place has no end, and `count` whole ones are before it."""
        before = text[: head.start()].rstrip(_SPACE if form.call else "[{" + _SPACE)
        mark = max((mark for mark in (*_BLOCKS, *MARKERS) if before.endswith(mark)), key=len, default="")
        follows = before.endswith((",", ";", "}", ">"))
        before, earlier = self._split(before.removesuffix(mark))
        begins = mark or form.call.startswith(_FIRST) or (earlier and follows) or not before
        arguments = self._begun_arguments(form, head["name"], text[head.end() :])
        if arguments is None or not begins or len(earlier) < count:
            return None
        return before.rstrip(), (*earlier, ParsedToolCall(head["name"], arguments))

    def _begun_arguments(self, form: CallForm, name: str, body: str) -> str | None:
        """The JSON of arguments whose end may be missing; None if the call has an end."""
        if form.argument or form.tag:
            if form.call.startswith(_FIRST) and not body.startswith(_ARGUMENT[: len(body)]):
                return None  # text with the mark
            whole = replace(form, argument=form.argument.replace(r"|\Z", ""))
            if form.tag:
                arguments = _elements(body, form.tag, self._types.get(name, {}), is_cut=True)
            else:
                arguments = self._arguments(whole, name, body)
            begun = json.dumps(arguments or {}, ensure_ascii=False)[:-1]
            return None if form.closing in body else begun
        body = _usual_json(body, form.quote)
        values, end = _values(body)
        behind = body[end:].strip("}]`" + _SPACE)
        is_whole = isinstance(next(iter(values), None), dict) and any(c.startswith(behind) for c in _BLOCKS.values())
        return body[:end] if is_whole else body if not values and body[:1] in ("{", "") else None

    def _split(self, pending: str) -> tuple[str, tuple[ParsedToolCall, ...]]:
        lead = pending.strip()
        for marker in (PYTHON, ""):
            if lead.startswith(marker or ("{", "[")):
                calls = tuple(self._bare(lead.removeprefix(marker)))
                if calls:
                    return "", calls
        before, marker, rest = pending.partition(MISTRAL)
        if marker and not any(mark in before for mark in (*_OPENINGS, *self._closing_of)):
            calls = tuple(self._mistral(rest))
            return (before.rstrip(), calls) if calls else (pending, ())
        if not any(opening in pending for opening in _OPENINGS):
            return pending, ()
        texts, read = list[str](), list[str]()
        all_calls: list[ParsedToolCall] = []
        for part in self._spans.split(pending):
            calls = self._block(part)
            all_calls += calls
            texts.append("" if calls else part)
            read.append(part)
            is_span = part.startswith((*_OPENINGS, *self._closing_of))
            if not is_span and self._closes(part):
                all_calls, texts = [], [*read]  # what was before is only considered
        text = "".join(texts)
        return (text.rstrip() if all_calls else text), tuple(all_calls)

    def _mistral(self, rest: str) -> list[ParsedToolCall]:
        calls: list[ParsedToolCall] = []
        for part in rest.split(MISTRAL):
            named = _NAMED.match(part)
            start = named.end() if named is not None else 0
            values, end = _values(part[start:], is_cut=self._is_cut)
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

    def _block(self, part: str) -> tuple[ParsedToolCall, ...]:
        """The calls in a text, if it begins with the opening mark of a block."""
        for form in FORMS.values():
            if part.startswith(form.opening) and (calls := tuple(self._read(form, part.removeprefix(form.opening)))):
                return calls
        return ()

    def _read(self, form: CallForm, inside: str) -> Iterator[ParsedToolCall]:
        if form.is_strict:
            yield from self._strict(inside.removesuffix(form.closing.strip()))
            return
        if not form.call:
            yield from (call for value in _values(inside, is_cut=self._is_cut)[0] for call in _calls_of(value))
            return
        for match in _matches(form.call, inside):
            name = match["name"].strip()
            arguments = self._arguments(form, name, match["body"])
            if isinstance(arguments, dict):
                yield ParsedToolCall(name, json.dumps(arguments, ensure_ascii=False))

    def _strict(self, inside: str) -> list[ParsedToolCall]:
        """The calls in a text that is nothing but JSON of names and arguments of tools."""
        values, end = _values(inside, is_cut=self._is_cut)
        calls = [call for value in values for call in _calls_of(value)]
        if inside[end:].strip("}" + _SPACE) or not all(
            isinstance(value, dict) and value.keys() in _KEYS for value in values
        ):
            return []
        return calls if all(call.name in self._tools for call in calls) else []

    def _arguments(self, form: CallForm, name: str, body: str) -> Any:
        arguments: Any = {}
        types = self._types.get(name, {})
        if form.tag:
            arguments = _elements(body, form.tag, types)
        elif form.argument:
            for match in _matches(form.argument, body):
                key, stated = match["key"].strip(), match.groupdict().get("string")
                kind = {"true": "string", "false": "json", None: types.get(key, "")}[stated]
                arguments[key] = _value(match["value"], kind)
        elif body.strip():
            arguments = next(iter(_values(_usual_json(body, form.quote))[0]), None)
        return arguments

    def _bare(self, text: str) -> Iterator[ParsedToolCall]:
        values, end = _values(text, is_cut=self._is_cut)
        if not self._closes(text[end:]):
            yield from (call for value in values for call in _calls_of(value) if call.name in self._tools)


def _matches(pattern: str, text: str) -> Iterator[re.Match[str]]:
    """What a pattern of a form finds; nothing is looked for behind the last place where it can end, since a model that
    repeats itself may begin thousands of calls."""
    last = max((match.end() for match in re.finditer(_END.findall(pattern)[0], text)), default=0)
    return re.finditer(pattern, text[:last], re.DOTALL)


_LEAD = re.compile(r"[{ \t\r\n]*(.{,12})", re.DOTALL)
"""What comes before the first key of a call, and as much as the longest has."""


def _may_call(text: str, start: int) -> bool:
    """Whether a text may become JSON of a call from a place on, by its first key."""
    lead = _LEAD.search(text, start)[1]  # type: ignore[index]
    return any(key.startswith(lead[: len(key)]) for key in ('"name"', '"arguments"', '"parameters"'))


def _elements(body: str, mark: str, types: Mapping[str, str], *, is_cut: bool = False) -> Any:
    """Elements within each other: a list of those named `item`, an object of others; None if the tags do not match.
    Of a text that is cut off, those that are whole.

    Args:
        body: the text.
        mark: the mark before each tag.
        types: path of an element -> its type.
    """
    pieces = re.split(rf"{re.escape(mark)}<(/?)([^>]*)>", body)
    open_elements: list[tuple[str, list[tuple[str, Any]], str]] = [("", [], "")]
    for slash, name, text in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        if not slash:
            open_elements.append((f"{open_elements[-1][0]}.{name}", [], text))
            continue
        path, inner, value = open_elements.pop()
        if not open_elements or path != f"{open_elements[-1][0]}.{name}":
            return None
        json_type = types.get(path[1:], "")
        content: Any = dict(inner)
        if not inner:
            is_empty = json_type in ("object", "array") and not value.strip()
            content = {"object": {}, "array": []}[json_type] if is_empty else _value(value, json_type)
        elif json_type != "object" and content.keys() == {"item"}:
            content = [item for _, item in inner]
        open_elements[-1][1].append((name, content))
    return dict(open_elements[0][1]) if is_cut or len(open_elements) == 1 else None


def _values(text: str, *, is_cut: bool = False) -> tuple[list[Any], int]:
    """Consecutive JSON values, up to the first invalid one, and where they end; those in a list that is cut, too."""
    decoder = json.JSONDecoder()
    values: list[Any] = []
    position = 0
    while position < len(text):
        while position < len(text) and (text[position] in " \t\r\n;," or text.startswith('{{"', position)):
            position += 1  # no JSON begins with two braces; a published template shows calls so
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            if not is_cut or values or not text.startswith("[{", position):
                break
            position += 1
            continue
        values.append(value)
    return values, position


def _usual_json(text: str, quote: str) -> str:
    """JSON with its usual quotes, of one with other marks around strings and none around keys."""
    if not quote:
        return text
    parts = text.split(quote)
    parts[::2] = [re.sub(r"([{,]\s*)([\w.\-]+)(\s*:)", r'\1"\2"\3', part) for part in parts[::2]]
    parts[::2] = [re.sub(r"(?<=[:\[,])None(?=[,\]}])", "null", part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return "".join(parts)


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
