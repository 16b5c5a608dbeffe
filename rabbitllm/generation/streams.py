"""Text of tokens as they are generated: a streamer for `generate`, and the cut at stop strings.

Text is written with the token that completes it, never half a character of UTF-8. Written text is never changed
afterwards, and all pieces together equal the tokenizer's decoding of all tokens.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rabbitllm.base.terminal import disarmed


class StoppedText:
    """Holds back text that may become a stop string, until more text decides it.

    Args:
        stops: stop strings, none of them empty.

    Attributes:
        stop: the stop string that was found, or None.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stop: str | None = None
        self._stops = stops
        self._held = ""
        self._free = ""

    def add(self, text: str) -> None:
        """Append text; after a stop string it is ignored."""
        if self.stop is not None:
            return
        text = self._held + text
        # the stop string that is complete first, as if text were added by the character; of several the longest
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.stop = min(found)
            self._free += text[:at]
            self._held = ""
            return
        keep = max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._free += text[: len(text) - keep]
        self._held = text[len(text) - keep :]

    def take(self, *, last: bool = False) -> str:
        """The text that became certain since the last call.

        Args:
            last: whether no more text follows, so that nothing is held back.
        """
        taken = self._free + (self._held if last else "")
        self._free = ""
        if last:
            self._held = ""
        return taken


UNFINISHED = "\ufffd"
"""Tokenizers decode bytes of an incomplete character to this."""


class TextStream:
    """A streamer for `generate`, of one sequence.

    `generate` passes the prompt first, which is skipped, then each token as it is generated; with prompt lookup and
    assistants several at a time.

    Args:
        tokenizer: tokenizer of the model.
        write: called with each piece of text; an exception from it (a broken pipe) ends the generation.
        skip_special_tokens: leave out tokens such as the end of the text.

    Attributes:
        tokens: ids generated so far.
        text: the text written so far.
        times: `time.perf_counter()` at the arrival of each token; tokens that arrive together have one time.
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
        # Tokens from `_from` on are decoded together, since the text of a token depends on those before it (a leading
        # space, bytes of one character); the text of those before `_to` has been written.
        self._from = 0
        self._to = 0

    def put(self, value: Any) -> None:
        """Take the prompt or the tokens after it.

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
        """Write the rest, even if it ends in half a character. The next `put` takes another prompt."""
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
    """Write text and flush; characters that the encoding lacks become question marks.

    On a terminal, control characters are written as escapes, since a model may generate any of them.

    Args:
        text: text from a model.
        out: file to write to; stdout by default.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
    """
    out = sys.stdout if out is None else out
    encoding = getattr(out, "encoding", None) or "utf-8"
    shown = disarmed(text) if out.isatty() else text
    out.write(shown.encode(encoding, "replace").decode(encoding))
    out.flush()


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
