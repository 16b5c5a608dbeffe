"""The text of an answer as it is generated, cut at the first of some stop strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteria

from rabbitllm.generation.generation_stream import TextStream


class AnswerStream(TextStream):
    """A text stream that reports when the prompt is in the cache, and ends its text before a stop string.

    Args:
        tokenizer, write: see `TextStream`.
        prompt_done: called before the first token is decoded.
        ends: stop strings; text that could be the beginning of one is held back until more tokens decide it.

    Attributes:
        answer: the text as it was written.
        cut: whether one of `ends` was generated.
    """

    def __init__(
        self, tokenizer: Any, write: Callable[[str], object], prompt_done: Callable[[], None], ends: tuple[str, ...]
    ) -> None:
        super().__init__(tokenizer, self._on_text)
        self._give = write
        self._prompt_done = prompt_done
        self._begun = False
        self._held = ""
        self.ends = ends
        self.answer = ""
        self.cut = False

    def put(self, value: Any) -> None:
        """See `TextStream`."""
        first = self._begun and not self.tokens
        self._begun = True
        if first:
            self._prompt_done()
        super().put(value)

    def end(self) -> None:
        """See `TextStream`; also writes the text that was held back."""
        super().end()
        if self._held and not self.cut:
            self._pass_on(self._held)
        self._held = ""

    def _on_text(self, text: str) -> None:
        if self.cut:
            return
        text = self._held + text
        for end in self.ends:
            if (at := text.find(end)) >= 0:
                text, self.cut = text[:at], True
        keep = 0 if self.cut else self._beginning_of_an_end(text)
        self._held = text[len(text) - keep :]
        self._pass_on(text[: len(text) - keep])

    def _beginning_of_an_end(self, text: str) -> int:
        """How many characters at the end of the text may become one of `ends`."""
        return max(
            (n for end in self.ends for n in range(1, len(end)) if text.endswith(end[:n])),
            default=0,
        )

    def _pass_on(self, text: str) -> None:
        if text:
            self.answer += text
            self._give(text)


class EndOfText(StoppingCriteria):  # type: ignore[misc]
    """Stops a generation whose text was cut at a stop string."""

    def __init__(self, stream: AnswerStream) -> None:
        self._stream = stream

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        # called before the streamer receives the token, so one more than needed is generated
        return torch.full((input_ids.shape[0],), self._stream.cut, device=input_ids.device, dtype=torch.bool)
