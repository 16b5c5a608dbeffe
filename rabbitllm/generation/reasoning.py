"""Reasoning and the answer, told apart in a model's output as it arrives.

    <think>REASONING</think>ANSWER      and other marks of this kind
    REASONING</think>ANSWER             where the prompt ends with the opening mark
    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>final<|message|>ANSWER        gpt-oss

Reasoning without a closing mark ends with the output. Marks that are special tokens are kept in the text
(`AnswerFormat.shown`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from rabbitllm.base.terminal import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USUAL = ("<think>", "</think>")
"""Marks that models write also without a word of them in template or vocabulary."""
PAIRS = (
    USUAL,
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<mm:think>", "</mm:think>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
)
"""Opening and closing marks of reasoning, in force where the model's template or vocabulary has them."""
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CHANNEL_MARKS = (START, CHANNEL, MESSAGE, END, "<|return|>", "<|call|>")
_SHOWN_OF_CHANNELS = (START, CHANNEL, MESSAGE, END, "<|constrain|>")
_FINAL = "final"
_TOOL = re.compile(r"\bto=functions\.([\w.\-]+)")
TAIL_TOKENS = 48
"""Tokens at the end of a prompt in which an opening mark is looked for."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model marks its reasoning.

    Attributes:
        pairs: opening and closing marks in force.
        has_channels: whether answers are in gpt-oss's channels.
        shown: special tokens that are marks of reasoning.
    """

    pairs: tuple[tuple[str, str], ...] = (USUAL,)
    has_channels: bool = False
    shown: frozenset[int] = frozenset()

    @classmethod
    def of(cls, templates: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> AnswerFormat:
        """The format of a model, from the sources of its chat templates and its vocabulary."""
        tokens = tokenizer.get_added_vocab()
        special = {name: token for token, name in special_tokens(tokenizer).items()}
        sources = "\n".join([*templates, *tokens])
        pairs = tuple(pair for pair in PAIRS if pair == USUAL or pair[1] in sources)
        has_channels = CHANNEL in sources and MESSAGE in sources
        marks = [mark for pair in pairs for mark in pair] + [*(_SHOWN_OF_CHANNELS if has_channels else ())]
        shown = {token for name, token in special.items() if name.strip() and any(name in mark for mark in marks)}
        return cls(pairs, has_channels, frozenset(shown))

    def reader(self, tail: str, tools: Collection[str] = ()) -> ReasoningReader:
        """A reader of one output.

        Args:
            tail: the end of the prompt as text, special tokens included; it may open the reasoning.
            tools: names of tools that can be called in channels.
        """
        return _Channels(tail, tools) if self.has_channels else _Marks(self.pairs, tail)


Effort = Literal["low", "medium", "high"]


@dataclass(frozen=True, slots=True)
class Thinking:
    """What a user wants of a model that thinks; None leaves it to the model.

    Attributes:
        enabled: whether it thinks before it answers.
        effort: how much it thinks.
    """

    enabled: bool | None = None
    effort: Effort | None = None


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How the output of one prompt is read.

    Attributes:
        form: the model's marks.
        tail: see `AnswerFormat.reader`.
    """

    form: AnswerFormat = AnswerFormat()
    tail: str = ""

    def reader(self) -> ReasoningReader:
        """A reader of one output."""
        return self.form.reader(self.tail)


def thoughts_note(tokens: int, less_thinking: str, *, is_full: bool) -> str:
    """A remark on an answer that ended before its first word.

    Args:
        tokens: how many it has.
        less_thinking: see `ChatTemplate`.
        is_full: whether the context ended it, and not the limit of new tokens.
    """
    remedies = [*([] if is_full else ["raise --max-new-tokens"]), *([f"use {less_thinking}"] if less_thinking else [])]
    advice = ": " + ", or ".join(remedies) if remedies else ""
    return f"ended after {counted(tokens, 'token')}, all of them thoughts{advice}"


def special_tokens(tokenizer: object) -> dict[int, str]:
    """Id of each special token -> its text."""
    decoder: Mapping[int, object] = getattr(tokenizer, "added_tokens_decoder", {})
    return {token: str(added) for token, added in decoder.items() if getattr(added, "special", False)}


def begun(text: str, words: Iterable[str]) -> int:
    """Length of the longest suffix of a text that begins one of the words."""
    return max((n for word in words for n in range(1, len(word)) if text.endswith(word[:n])), default=0)


def next_mark(text: str, marks: Collection[str]) -> tuple[int, str]:
    """Where the first of some marks begins, and the mark; if there is none, where one may begin at the end, and ""."""
    positions = [(position, mark) for mark in marks if (position := text.find(mark)) >= 0]
    return min(positions) if positions else (len(text) - begun(text, marks), "")


class ReasoningReader(Protocol):
    """Splits an output into reasoning and answer, delta by delta.

    Attributes:
        calls: name and JSON text of each tool call in a channel.
    """

    calls: tuple[tuple[str, str], ...]

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning."""

    def feed(self, text: str) -> tuple[str, str]:
        """The next reasoning, and the next text of the answer."""

    def end(self, *, is_cut: bool = False) -> tuple[str, str]:
        """The rest of both; of an output without an end, a call is kept as far as it is there."""


class _Marks:
    """Reasoning between two marks, at the beginning of the output; newlines around it are dropped."""

    def __init__(self, pairs: tuple[tuple[str, str], ...], tail: str) -> None:
        self.calls: tuple[tuple[str, str], ...] = ()
        self._closing_of = dict(pairs)
        self._pending = ""
        self._is_over = False
        self._has_reasoned = False
        self._begins = True
        end = tail.rstrip()
        self._closing = next((close for open_, close in pairs if end.endswith(open_)), None)

    @property
    def is_reasoning(self) -> bool:
        return self._closing is not None

    def feed(self, text: str) -> tuple[str, str]:
        self._pending += text
        reasoning = ""
        while not self._is_over:
            if self._closing is not None:
                position, mark = next_mark(self._pending, (self._closing,))
                reasoning += self._take_reasoning(len(self._pending[:position].rstrip("\n")))
                if not mark:
                    return reasoning, ""
                self._pending = self._pending.lstrip("\n").removeprefix(self._closing)
                self._closing, self._has_reasoned = None, True
            lead = self._pending.lstrip()
            # a closing mark alone ends reasoning that is empty, as MiniMax M3 writes it
            marks = (*self._closing_of, *(() if self._has_reasoned else self._closing_of.values()))
            mark = next((mark for mark in marks if lead.startswith(mark)), "")
            if mark:
                self._closing, self._begins = self._closing_of.get(mark), True
                self._has_reasoned = self._has_reasoned or self._closing is None
                self._pending = lead.removeprefix(mark)
            elif any(mark.startswith(lead) for mark in marks):
                return reasoning, ""  # perhaps a mark, or nothing yet
            else:
                self._is_over = True
                self._pending = self._pending.lstrip("\n") if self._has_reasoned else self._pending
        answer, self._pending = self._pending, ""
        return reasoning, answer

    def end(self, *, is_cut: bool = False) -> tuple[str, str]:
        rest, self._pending = self._pending, ""
        if self._closing is not None:
            return rest.strip("\n") if self._begins else rest.rstrip("\n"), ""
        return "", rest.lstrip("\n") if self._has_reasoned and not self._is_over else rest

    def _take_reasoning(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        if self._begins:
            text = text.lstrip("\n")
            self._begins = not text
        return text


class _Channels:
    """Messages of gpt-oss: a header that names a channel, and a body."""

    def __init__(self, tail: str, tools: Collection[str]) -> None:
        self._tools = frozenset(tools)
        self._pending = ""
        self._header: str | None = None
        self._body: str | None = None
        self._tool: str | None = None
        self._arguments = ""
        self._reasoning = self._answer = ""
        self._has_reasoned = False
        self.calls: tuple[tuple[str, str], ...] = ()
        if START in tail:
            self.feed(tail[tail.rindex(START) :])
            self._has_reasoned = False

    def feed(self, text: str) -> tuple[str, str]:
        self._pending += text
        while True:
            position, mark = next_mark(self._pending, CHANNEL_MARKS)
            self._add(self._pending[:position])
            self._pending = self._pending[position + len(mark) :]
            if not mark:
                return self._take_output()
            self._handle_mark(mark)

    def end(self, *, is_cut: bool = False) -> tuple[str, str]:
        self._add(self._pending)
        self._pending = ""
        if is_cut and self._tool is not None:
            self.calls, self._tool = (*self.calls, (self._tool, self._arguments.lstrip())), None
        self._handle_mark(END)
        return self._take_output()

    def _take_output(self) -> tuple[str, str]:
        pieces = self._reasoning, self._answer
        self._reasoning = self._answer = ""
        return pieces

    def _handle_mark(self, mark: str) -> None:
        """Go on behind a mark."""
        if mark == CHANNEL and self._header is not None:
            self._header += " " + CHANNEL
        elif mark == MESSAGE:
            header = self._header or ""
            words = header.partition(CHANNEL)[2].split()
            tool = _TOOL.search(header)
            self._tool = tool[1] if tool and tool[1] in self._tools else None
            self._header, self._body = None, words[0] if words else _FINAL
            if self.is_reasoning and self._has_reasoned:
                self._reasoning += "\n"
        else:
            self._end_call()
            self._body = None
            self._header = {START: "", CHANNEL: CHANNEL}.get(mark)

    @property
    def is_reasoning(self) -> bool:
        return self._body is not None and self._body != _FINAL and self._tool is None

    def _add(self, text: str) -> None:
        if self._header is not None:
            self._header += text
        elif self._tool is not None:
            self._arguments += text
        elif self.is_reasoning:
            self._reasoning += text
            self._has_reasoned = self._has_reasoned or bool(text)
        else:
            self._answer += text

    def _end_call(self) -> None:
        """Keep a call whose arguments are complete; one that was cut off is no call, only considered."""
        tool, text, self._tool, self._arguments = self._tool, self._arguments.strip(), None, ""
        if tool is None:
            return
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            self.calls += ((tool, text or "{}"),)
        else:
            self._reasoning += text
