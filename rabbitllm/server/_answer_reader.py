"""An answer's reasoning, its text and its tool calls; calls are looked for only behind the reasoning."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rabbitllm.generation.reasoning import AnswerFormat
from rabbitllm.server._tools import CallReader, ParsedToolCall


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of an output.

    Attributes:
        reasoning, text: what came of each.
        calls: tool calls; only at the end.
    """

    reasoning: str
    text: str
    calls: tuple[ParsedToolCall, ...] = ()


class AnswerReader:
    """Splits an output into reasoning, text and tool calls, delta by delta.

    Args:
        form: the model's marks.
        tail: see `AnswerFormat.reader`.
        tools, types, must_call: see `CallReader`; without tools there are no calls.
        most_calls: how many calls count; None for all.
    """

    def __init__(
        self,
        form: AnswerFormat,
        tail: str,
        tools: Collection[str] = (),
        types: Mapping[str, Mapping[str, str]] | None = None,
        most_calls: int | None = None,
        *,
        must_call: bool = False,
    ) -> None:
        self._most_calls = most_calls
        self._split = form.reader(tail, tools)
        self._calls = CallReader(tools, types, form.pairs, must_call=must_call) if tools else None

    def feed(self, text: str) -> AnswerPiece:
        """The next reasoning, and the next text that does not belong to a call.

        Args:
            text: the text since the last call of this method.
        """
        reasoning, answer = self._split.feed(text)
        return AnswerPiece(reasoning, self._calls.feed(answer) if self._calls is not None else answer)

    def end(self, *, is_cut: bool = False) -> AnswerPiece:
        """The rest, and the calls.

        Args:
            is_cut: see `CallReader.end`.
        """
        reasoning, answer = self._split.end(is_cut=is_cut)
        calls = tuple(ParsedToolCall(*call) for call in self._split.calls)
        if self._calls is None:
            return AnswerPiece(reasoning, answer, calls[: self._most_calls])
        answer = self._calls.feed(answer)
        rest, last_calls = self._calls.end(is_cut=is_cut)
        return AnswerPiece(reasoning, answer + rest, (*calls, *last_calls)[: self._most_calls])
