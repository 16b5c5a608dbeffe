"""Choices of `/v1/chat/completions`: messages and their deltas, tool calls, log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rabbitllm.generation.request import Delta, Finished, Likelihood, TokenLogprob
from rabbitllm.server.answers import REASONS, without_end
from rabbitllm.server.chat_requests import ChatAsked
from rabbitllm.server.spelling import Spelling
from rabbitllm.server.tools import SPECIAL, CallReader, ParsedToolCall


class ChatChoices:
    """See `answers.AnswerChoices`.

    Args:
        asked: the request.
        spelling: the texts and bytes of tokens.
        ends: end-of-text tokens.
        new_id: makes the id of a tool call.
    """

    def __init__(self, asked: ChatAsked, spelling: Spelling, ends: frozenset[int], new_id: Callable[[], str]) -> None:
        self._asked = asked
        self._spelling = spelling
        self._ends = ends
        self._new_id = new_id
        self._readers = [self._reader() for _ in asked.requests]

    def text_of(self, piece: Delta) -> str:
        """Text of a piece, with the tool call markers before it that are special tokens and so missing from its text.

        For a `CallReader`. It must be called before pieces are joined, since a joined piece has lost the positions of
        these markers.
        """
        if not self._asked.tools:
            return piece.text
        spelt = (self._spelling.of(chosen.token)[0] for chosen in piece.tokens)
        return "".join(text for text in spelt if text in SPECIAL and text not in piece.text) + piece.text

    def begin(self, choice: int) -> list[dict[str, Any]]:
        """The role."""
        return [_delta(choice, {"role": "assistant", "content": ""})]

    def more(self, choice: int, piece: Delta) -> list[dict[str, Any]]:
        """Text, unless it may belong to a tool call, and log probabilities."""
        reader = self._readers[choice]
        text = piece.text if reader is None else reader.feed(piece.text)
        logprobs = self._logprobs(piece.tokens)
        if not text and not (logprobs and logprobs["content"]):
            return []
        return [_delta(choice, {"content": text}, logprobs)]

    def end(self, choice: int, finished: Finished) -> list[dict[str, Any]]:
        """Text that was held back, the tool calls and the finish reason."""
        reader = self._readers[choice]
        text, calls = ("", ()) if reader is None else reader.end()
        found = [_delta(choice, {"content": text})] if text else []
        if calls:
            listed = [{"index": at, **call} for at, call in enumerate(self._calls(calls))]
            found.append(_delta(choice, {"tool_calls": listed}))
        return [*found, _delta(choice, {}, reason=_reason(finished, calls))]

    def whole(self, choice: int, piece: Delta, finished: Finished) -> dict[str, Any]:
        """The message."""
        reader = self._reader()
        text = piece.text
        calls: tuple[ParsedToolCall, ...] = ()
        if reader is not None:
            text = reader.feed(piece.text)
            rest, calls = reader.end()
            text = (text + rest).rstrip() if calls else text + rest
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = self._calls(calls)
        return {
            "index": choice,
            "message": message,
            "logprobs": self._logprobs(piece.tokens),
            "finish_reason": _reason(finished, calls),
        }

    def _reader(self) -> CallReader | None:
        return CallReader(self._asked.tools, self._asked.types) if self._asked.tools else None

    def _calls(self, calls: Sequence[ParsedToolCall]) -> list[dict[str, Any]]:
        return [
            {
                "id": self._new_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._asked.likeliest is None:
            return None
        content = [
            self._entry(chosen.token, chosen.logprob)
            | {"top_logprobs": [self._entry(one.token, one.logprob) for one in self._top(chosen)]}
            for chosen in without_end(tokens, self._ends)
        ]
        return {"content": content, "refusal": None}

    def _top(self, chosen: TokenLogprob) -> Sequence[Likelihood]:
        return chosen.likeliest[: self._asked.likeliest]

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text, raw = self._spelling.of(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


LEAST = -9999.0
"""The log probability given for probability zero, whose logarithm JSON cannot represent; OpenAI uses the same."""


def finite(logprob: float | None) -> float:
    """A log probability as JSON can represent it."""
    return max(logprob, LEAST) if logprob is not None and logprob == logprob else LEAST


def _delta(
    choice: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _reason(finished: Finished, calls: Sequence[ParsedToolCall]) -> str:
    return "tool_calls" if calls else REASONS[finished.ended]
