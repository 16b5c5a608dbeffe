"""The text of an answer as it comes, which may end before the model ends it. Knows no models and no caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteria

from rabbitllm.generation.generation_stream import TextStream


class AnswerStream(TextStream):
    """A text stream that says when the prompt is in the cache, and ends its text before certain marks.

    Args:
        tokenizer, write: see `TextStream`.
        prompt_done: called when the first token comes.
        ends: what ends the text; what could be the beginning of one is held back until more is known.

    Attributes:
        answer: the text as it was written.
        cut: whether one of `ends` came.
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
        """See `TextStream`; hands on what was held back."""
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
        """Characters at the end of the text that may become one of `ends`."""
        return max(
            (n for end in self.ends for n in range(1, len(end)) if text.endswith(end[:n])),
            default=0,
        )

    def _pass_on(self, text: str) -> None:
        if text:
            self.answer += text
            self._give(text)


class EndOfText(StoppingCriteria):  # type: ignore[misc]
    """Ends a generation whose text has come to its end."""

    def __init__(self, stream: AnswerStream) -> None:
        self._stream = stream

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        # asked before the streamer is given the token, so one more than needed is generated
        return torch.full((input_ids.shape[0],), self._stream.cut, device=input_ids.device, dtype=torch.bool)
