"""From the events of a batch to OpenAI's objects, whole and in chunks. Pure: events in, dicts out.

`AnswerChoices` makes the choices of an answer, `Envelope` the object around them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rabbitllm.generation.request import Delta, Finished, FinishReason, TokenLogprob

REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "length",
    FinishReason.TIMEOUT: "length",
}
"""OpenAI's finish reason for each way of ending; an answer that was cut off counts as out of tokens."""


class AnswerChoices(Protocol):
    """The choices of one answer, whole or streamed."""

    def begin(self, choice: int) -> list[dict[str, Any]]:
        """The first deltas of a choice in a stream."""

    def more(self, choice: int, piece: Delta) -> list[dict[str, Any]]:
        """The deltas of a piece in a stream."""

    def end(self, choice: int, finished: Finished) -> list[dict[str, Any]]:
        """The last deltas of a choice in a stream."""

    def whole(self, choice: int, piece: Delta, finished: Finished) -> dict[str, Any]:
        """A choice that is answered at once, with all its pieces joined."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The object around the choices of one answer.

    Attributes:
        id: id of the answer.
        created: seconds since 1970.
        model: its name.
        kind: `object` of a whole answer.
        chunk_kind: `object` of a chunk.
        include_usage: whether a stream ends with its token usage.
    """

    id: str
    created: int
    model: str
    kind: str
    chunk_kind: str
    include_usage: bool = False

    def _around(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": list(choices),
        }

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A chunk of a stream."""
        return self._around(self.chunk_kind, choices) | ({"usage": None} if self.include_usage else {})

    def last_chunk(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The chunk with the token usage."""
        return self._around(self.chunk_kind, ()) | {"usage": usage}

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any]) -> dict[str, Any]:
        """A whole answer."""
        return self._around(self.kind, choices) | {"usage": usage}


def usage_of(finished: Sequence[Finished], choices_of_a_prompt: int) -> dict[str, Any]:
    """The token usage of an answer; each prompt counts once, however many answers it got.

    Args:
        finished: the end of each choice, all of the first prompt first.
        choices_of_a_prompt: choices per prompt.
    """
    firsts = finished[::choices_of_a_prompt]
    prompt, new = sum(one.prompt_tokens for one in firsts), sum(one.new_tokens for one in finished)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(one.kept_tokens for one in firsts)},
    }


def joined(first: Delta, second: Delta) -> Delta:
    """Two pieces joined."""
    return Delta(first.text + second.text, first.tokens + second.tokens)


NOTHING = Delta("", ())


def without_end(tokens: Sequence[TokenLogprob], ends: frozenset[int]) -> Sequence[TokenLogprob]:
    """Tokens without the end-of-text token, which is not part of the text."""
    return tokens[:-1] if tokens and tokens[-1].token in ends else tokens
