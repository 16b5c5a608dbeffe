"""The text of generated tokens: a streamer for `generate`, which can end its text before a stop string.

Text is written with the token that completes it, never half a character of UTF-8. Written text is never changed
afterwards, and all pieces joined equal the tokenizer's decoding of all tokens, up to the stop string.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rabbitllm.generation._recommended import stop_strings
from rabbitllm.generation.reasoning import begun
from rabbitllm.generation.request import FinishReason, Request, Result, tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rabbitllm.engine.streamed_model import StreamedModel
    from rabbitllm.generation.grammar import GrammarState
    from rabbitllm.generation.reasoning import Thoughts

Think = Callable[[str, int], object]
"""Takes a piece of reasoning, and the number of tokens of reasoning before it."""
UNFINISHED = "\ufffd"
"""Tokenizers decode bytes of an incomplete character to this."""


class StoppedText:
    """Withholds text that may become a stop string, until more text decides it.

    Args:
        stops: stop strings, none of them empty.

    Attributes:
        stop: the stop string that was found, or None.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stop: str | None = None
        self._stops = stops
        self._pending = ""

    def add(self, text: str, *, last: bool = False) -> str:
        """Append text, and return the text that became certain; after a stop string there is none.

        Args:
            text: the text.
            last: whether no more text follows, so that nothing is held back.
        """
        if self.stop is not None:
            return ""
        text = self._pending + text
        # the stop string that is complete first, as if text were added by the character; of several the longest
        matches = [(begin + len(stop), begin, stop) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if matches:
            _, begin, self.stop = min(matches)
            return text[:begin]
        certain = len(text) - (0 if last else begun(text, self._stops))
        self._pending = text[certain:]
        return text[:certain]


class TextStream:
    """A streamer for `generate`, of one sequence; special tokens such as the end of the text are left out.

    `generate` passes the prompt first, which is skipped, then each generated token; with prompt lookup and assistants
    several at a time.

    Args:
        tokenizer: tokenizer of the model.
        write: called with each piece of text; an exception from it (a broken pipe) ends the generation.
        think: called with each piece of reasoning, which `write` then does not get; None: it gets all, marks included.
        stops: stop strings; text that could be the beginning of one is held back until more tokens decide it.
        shown: special tokens that are part of the text.
        thoughts: how reasoning is told from the answer; None where all text is the answer.
        prompt_done: called before the first token is decoded.

    Attributes:
        tokens: ids generated so far.
        text: the text so far, without reasoning.
        reasoning: the reasoning so far.
        reasoning_tokens: how many of the tokens are reasoning or its marks.
        times: `time.perf_counter()` at the arrival of each token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        write: Callable[[str], object],
        *,
        stops: tuple[str, ...] = (),
        think: Think | None = None,
        shown: frozenset[int] = frozenset(),
        thoughts: Thoughts | None = None,
        prompt_done: Callable[[], object] = lambda: None,
    ) -> None:
        self.tokens: list[int] = []
        self.text = self.reasoning = ""
        self.reasoning_tokens = 0
        self.times: list[float] = []
        self._tokenizer = tokenizer
        self._write = write
        self._stops = StoppedText(stops)
        self._think = think
        self._reader = thoughts.reader() if thoughts is not None else None
        shown = shown | thoughts.form.shown if thoughts is not None else shown
        added = tokenizer.added_tokens_decoder.items() if shown else ()
        self._hidden = {token for token, details in added if details.special} - shown if shown else None
        self._prompt_done = prompt_done
        self._prompt_is_next = True
        # Tokens from `_from` on are decoded at once, since the text of a token depends on those before it (a leading
        # space, bytes of one character); the text of those before `_to` has been written.
        self._from = 0
        self._to = 0

    @classmethod
    def of(cls, model: StreamedModel, request: Request, write: Callable[[str], object], **options: Any) -> TextStream:
        """The text of the answer to a request; `options` are `think` and `prompt_done`."""
        options |= {"stops": (*request.stop, *stop_strings(model)), "shown": request.shown}
        return cls(tokenizer_of(model), write, thoughts=request.thoughts, **options)

    def result(
        self, request: Request, grammar: GrammarState | None, finish: FinishReason, first: float | None, seconds: float
    ) -> Result:
        """The whole answer.

        Args:
            request, grammar: the request, and the state of its grammar.
            finish: why it ended.
            first, seconds: time to the first token, and to the last.
        """
        return Result(
            self.text,
            tuple(self.tokens),
            len(request.prompt),
            finish,
            first,
            seconds,
            stop=self.stop,
            reasoning=self.reasoning,
            reasoning_tokens=self.reasoning_tokens,
            forced_tokens=grammar.saved if grammar is not None else 0,
        )

    @property
    def stop(self) -> str | None:
        """The stop string that was generated, or None."""
        return self._stops.stop

    def put(self, value: Any) -> None:
        """Take the prompt or the tokens after it.

        Args:
            value: ids, int64 of shape (tokens,) or (1, tokens).

        Raises:
            ValueError: several sequences.
        """
        if value.dim() > 1 and value.shape[0] > 1:
            raise ValueError(f"A streamer supports one sequence; got {value.shape[0]}.")
        if self._prompt_is_next:
            self._prompt_is_next = False
            return
        self.add(value.flatten().tolist())

    def add(self, ids: list[int]) -> None:
        """Take tokens after the prompt."""
        if not self.tokens:
            self._prompt_done()
        now = time.perf_counter()
        for token in ids:  # one by one, so that those of the reasoning can be counted
            self.tokens.append(token)
            self.times.append(now)
            is_reasoning = self._is_reasoning
            self._emit(finished=False)
            self.reasoning_tokens += is_reasoning or self._is_reasoning

    def end(self) -> None:
        """Write the rest, even if it ends in half a character."""
        self._emit(finished=True)

    def _emit(self, *, finished: bool) -> None:
        written = self._decode(self.tokens[self._from : self._to])
        both = self._decode(self.tokens[self._from :])
        text = both[len(written) :]
        if both.endswith(UNFINISHED) and not finished:
            return
        if text:
            self._from, self._to = self._to, len(self.tokens)
        piece = self._stops.add(text, last=finished)
        reasoning, answer = self._read(piece, last=finished)
        self.reasoning += reasoning
        self.text += answer
        if self._think is None:
            answer = piece
        elif reasoning:
            self._think(reasoning, self.reasoning_tokens)
        if answer:
            self._write(answer)

    @property
    def _is_reasoning(self) -> bool:
        return self._reader is not None and self._reader.is_reasoning

    def _read(self, text: str, *, last: bool) -> tuple[str, str]:
        if self._reader is None:
            return "", text
        reasoning, answer = self._reader.feed(text)
        rest, end = self._reader.end() if last else ("", "")
        return reasoning + rest, answer + end

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        shown = list(ids) if self._hidden is None else [token for token in ids if token not in self._hidden]
        skips = self._hidden is None
        text = self._tokenizer.decode(shown, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
