"""Choices of `/v1/completions`: text, and log probabilities in the older form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rabbitllm.generation.request import Delta, Finished, TokenLogprob
from rabbitllm.server.answers import REASONS, without_end
from rabbitllm.server.chat_answers import finite
from rabbitllm.server.completion_requests import CompletionAsked
from rabbitllm.server.spelling import Spelling


class CompletionChoices:
    """See `answers.AnswerChoices`.

    Args:
        asked: the request.
        spelling: the texts and bytes of tokens.
        ends: end-of-text tokens.
    """

    def __init__(self, asked: CompletionAsked, spelling: Spelling, ends: frozenset[int]) -> None:
        self._asked = asked
        self._spelling = spelling
        self._ends = ends
        self._lengths = [0] * len(asked.requests)

    def begin(self, choice: int) -> list[dict[str, Any]]:
        """The prompt, if `echo` is set."""
        echo = self._echo(choice)
        return [_choice(choice, echo, None)] if echo else []

    def more(self, choice: int, piece: Delta) -> list[dict[str, Any]]:
        """Text, and the log probabilities of its tokens."""
        logprobs = self._logprobs(choice, piece.tokens)
        if not piece.text and not (logprobs and logprobs["tokens"]):
            return []
        return [_choice(choice, piece.text, logprobs)]

    def end(self, choice: int, finished: Finished) -> list[dict[str, Any]]:
        """The finish reason."""
        return [_choice(choice, "", None, REASONS[finished.ended])]

    def whole(self, choice: int, piece: Delta, finished: Finished) -> dict[str, Any]:
        """The text."""
        text = self._echo(choice) + piece.text
        return _choice(choice, text, self._logprobs(choice, piece.tokens), REASONS[finished.ended])

    def _echo(self, choice: int) -> str:
        return self._asked.echoes[choice] if self._asked.echoes else ""

    def _logprobs(self, choice: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Lists of tokens, their log probabilities, the likeliest alternatives at each position, and text offsets."""
        if self._asked.likeliest is None:
            return None
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for chosen in without_end(tokens, self._ends):
            text, _ = self._spelling.of(chosen.token)
            found["tokens"].append(text)
            found["token_logprobs"].append(finite(chosen.logprob))
            top: dict[str, float] = {}
            for one in chosen.likeliest[: self._asked.likeliest]:
                top.setdefault(self._spelling.of(one.token)[0], finite(one.logprob))
            found["top_logprobs"].append(top)
            found["text_offset"].append(self._lengths[choice])
            self._lengths[choice] += len(text)
        return found


def _choice(choice: int, text: str, logprobs: dict[str, Any] | None, reason: str | None = None) -> dict[str, Any]:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}
