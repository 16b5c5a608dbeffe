"""Tokens as text while they are being generated: what `generate(streamer=…)` is given.

Text is handed on with the token that completes it: at once, and never half a character of UTF-8. What has been handed
on is never taken back, and at the end all of it is what the tokenizer makes of the tokens together. Knows tokenizers
and clocks; knows no model.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rabbitllm.base.terminal import disarmed

UNFINISHED = "\ufffd"
"""What a tokenizer puts where bytes are no character yet."""


class TextStream:
    """A streamer for `generate`, of one sequence.

    `generate` brings the prompt first, which is skipped, then each token when it is there; with prompt lookup and
    assistants several at a time.

    Args:
        tokenizer: of the model.
        write: is given each piece of text; what it raises (a broken pipe) ends the generation.
        skip_special_tokens: leave out tokens such as the end of the text.

    Attributes:
        tokens: ids generated so far.
        text: what was handed on so far.
        times: `time.perf_counter()` when each of the tokens came; those that came together have one time.
    """

    def __init__(
        self, tokenizer: Any, write: Callable[[str], object] | None = None, *, skip_special_tokens: bool = True
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.times: list[float] = []
        self._tokenizer = tokenizer
        self._write = write if write is not None else print_text
        self._skip = skip_special_tokens
        self._prompt_is_next = True
        # Tokens from `_from` on are decoded together, since what a tokenizer makes of one depends on those before it
        # (a space in front, bytes of one character); the text of those before `_to` was handed on.
        self._from = 0
        self._to = 0

    def put(self, value: Any) -> None:
        """Take the prompt, or what came after it.

        Args:
            value: ids, int64 of shape (tokens,) or (1, tokens).

        Raises:
            ValueError: several sequences.
        """
        if value.dim() > 1 and value.shape[0] > 1:
            raise ValueError(f"A stream is of one sequence; {value.shape[0]} came.")
        if self._prompt_is_next:
            self._prompt_is_next = False
            return
        ids = value.flatten().tolist()
        self.tokens += ids
        self.times += [time.perf_counter()] * len(ids)
        self._hand_on(finished=False)

    def end(self) -> None:
        """Hand on what is left, also if it ends in half a character. The next `put` brings another prompt."""
        self._hand_on(finished=True)
        self._from = self._to = len(self.tokens)
        self._prompt_is_next = True

    def _hand_on(self, *, finished: bool) -> None:
        known = self._decode(self.tokens[self._from : self._to])
        both = self._decode(self.tokens[self._from :])
        if len(both) <= len(known) or (both.endswith(UNFINISHED) and not finished):
            return
        piece = both[len(known) :]
        self._from, self._to = self._to, len(self.tokens)
        self.text += piece
        self._write(piece)

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def print_text(text: str, out: TextIO | None = None) -> None:
    """Write text now; characters that the encoding lacks become question marks.

    On a terminal, characters that it might act upon stand there as escapes: a model may say anything.

    Args:
        text: of a model.
        out: where to; by default stdout.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
    """
    out = sys.stdout if out is None else out
    encoding = getattr(out, "encoding", None) or "utf-8"
    shown = disarmed(text) if out.isatty() else text
    out.write(shown.encode(encoding, "replace").decode(encoding))
    out.flush()
