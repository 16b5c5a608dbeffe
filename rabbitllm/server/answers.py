"""From the batch's events to OpenAI's objects, whole and in chunks. Pure: events in, dicts out.

`ChatChoices` and `CompletionChoices` make the choices of an answer, `ResponseBuilder` the object around them. Lists
of log probabilities need single tokens as text and as bytes (`TokenTexts`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

from rabbitllm.checkpoints.meta_checkpoint import byte_letters
from rabbitllm.generation.reasoning import Thoughts
from rabbitllm.generation.request import Delta, FinishReason, Result, TokenLogprob
from rabbitllm.generation.streams import UNFINISHED
from rabbitllm.server._answer_reader import AnswerPiece, AnswerReader
from rabbitllm.server._tools import ParsedToolCall
from rabbitllm.server.requests import CheckedCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rabbitllm.engine.streamed_model import StreamedModel

REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "length",
    FinishReason.TIMEOUT: "length",
}
"""OpenAI's finish reason for each way of ending; an answer that was cut off counts as out of tokens."""
LEAST = -9999.0
"""The log probability given for probability zero, whose logarithm JSON cannot represent; OpenAI uses the same."""


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"
"""A space, in SentencePiece vocabularies."""


@dataclass(frozen=True, slots=True)
class ResponseBuilder:
    """The object around the choices of one answer.

    Attributes:
        id: id of the answer.
        created: seconds since 1970.
        model: its name.
        object_type: `object` of a whole answer.
        chunk_type: `object` of a chunk.
        n: choices of a prompt.
        include_usage: whether a stream ends with its token usage.
        max_tokens: the limit of new tokens if the context made it less than the request's; part of the usage.
    """

    id: str
    created: int
    model: str
    object_type: str
    chunk_type: str = ""
    n: int = 1
    include_usage: bool = False
    max_tokens: int | None = None

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A chunk of a stream."""
        return self._object(self.chunk_type, choices) | ({"usage": None} if self.include_usage else {})

    def last_chunk(self, finished: Sequence[Result]) -> dict[str, Any]:
        """The chunk with the token usage of choices that ended so."""
        return self._object(self.chunk_type, ()) | {"usage": self._usage(finished)}

    def whole(self, choices: Sequence[Mapping[str, Any]], finished: Sequence[Result]) -> dict[str, Any]:
        """A whole answer, of choices that ended so."""
        return self._object(self.object_type, choices) | {"usage": self._usage(finished)}

    def _object(self, object_type: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_type,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": list(choices),
        }

    def _usage(self, finished: Sequence[Result]) -> dict[str, Any]:
        """The token usage; each prompt counts once, however many choices it has."""
        firsts = finished[:: self.n]
        prompt, new = sum(result.prompt_tokens for result in firsts), sum(len(result.tokens) for result in finished)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(result.kept_tokens for result in firsts)},
            "completion_tokens_details": {"reasoning_tokens": sum(result.reasoning_tokens for result in finished)},
            **({} if self.max_tokens is None else {"max_tokens": self.max_tokens}),
        }


class TokenTexts:
    """Single tokens as text and as bytes.

    A token may be a single byte of a character. Its text is then U+FFFD, as a decoder gives it; its bytes are exact.

    Args:
        tokenizer: the model's tokenizer.

    Attributes:
        of: id of a token -> its text and its bytes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.of = lru_cache(1 << 16)(self._text_of)

    def _text_of(self, token: int) -> tuple[str, tuple[int, ...]]:
        name = self._tokenizer.convert_ids_to_tokens(token)
        text = str(self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if not isinstance(name, str):
            return text, tuple(text.encode())
        byte = _BYTE.fullmatch(name)
        if byte is not None:
            value = int(byte[1], 16)
            return (chr(value) if value < 0x80 else UNFINISHED), (value,)
        if name.startswith(SPACE) and not text.startswith(" "):  # a decoder drops the first space
            text = " " + text
        if UNFINISHED in text and all(character in bytes_of_characters() for character in name):
            return text, tuple(bytes_of_characters()[character] for character in name)
        return text, tuple(text.encode())


@cache
def bytes_of_characters() -> Mapping[str, int]:
    """The characters by which byte-level vocabularies write bytes."""
    return {letter: byte for byte, letter in enumerate(byte_letters())}


class _Choices:
    """The choices of one answer, whole or streamed; subclasses make its objects."""

    def __init__(self, call: CheckedCall, texts: TokenTexts, model: StreamedModel) -> None:
        self._call = call
        self._texts = texts
        self._ends = call.requests[0].ends(model)

    def whole(self, choice: int, delta: Delta, finished: Result) -> dict[str, Any]:
        """One choice."""
        raise NotImplementedError

    def all(self, deltas: Sequence[Delta], finished: Sequence[Result]) -> list[dict[str, Any]]:
        """The choices of a whole answer; of several candidates for each, those with the highest mean probability.

        Args:
            deltas: text and tokens of each candidate.
            finished: their ends.
        """
        each, kept = self._call.candidates, list(range(len(deltas)))
        if 0 < self._call.n < each:
            groups = [kept[begin : begin + each] for begin in range(0, len(kept), each)]
            likeliest = [sorted(group, key=lambda choice: -_mean(deltas[choice])) for group in groups]
            kept = [choice for group in likeliest for choice in group[: self._call.n]]
        return [
            {**self.whole(choice, deltas[choice], finished[choice]), "index": index}
            for index, choice in enumerate(kept)
        ]

    def _without_end(self, tokens: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
        """Tokens without the end-of-text token, which is not part of the text."""
        return tokens[:-1] if tokens and tokens[-1].token in self._ends else tokens


class ChatChoices(_Choices):
    """Choices of `/v1/chat/completions`: messages and their deltas, reasoning, tool calls, log probabilities.

    Args:
        call, texts, model: see `_Choices`.
        new_id: makes the id of a tool call.
    """

    def __init__(self, call: CheckedCall, texts: TokenTexts, model: StreamedModel, new_id: Callable[[], str]) -> None:
        super().__init__(call, texts, model)
        self._new_id = new_id
        thoughts = [request.thoughts or Thoughts() for request in call.requests]
        make = partial(AnswerReader, must_call=call.must_call)
        self._readers = [make(each.form, each.tail, call.tools, call.types, call.most_calls) for each in thoughts]

    def begin(self, choice: int) -> list[dict[str, Any]]:
        """The role."""
        return [_delta(choice, {"role": "assistant", "content": ""})]

    def more(self, choice: int, delta: Delta) -> list[dict[str, Any]]:
        """Reasoning and text, unless it may belong to a tool call, and log probabilities."""
        piece = self._readers[choice].feed(delta.text)
        logprobs = self._logprobs(delta.tokens)
        fields = _delta_fields(piece) or ({"content": ""} if logprobs and logprobs["content"] else {})
        return [_delta(choice, fields, logprobs)] if fields else []

    def end(self, choice: int, finished: Result) -> list[dict[str, Any]]:
        """The withheld reasoning and text, the tool calls and the finish reason."""
        is_cut = self._is_cut(choice, finished)
        piece = self._readers[choice].end(is_cut=is_cut)
        fields = _delta_fields(piece)
        chunks = [_delta(choice, fields)] if fields else []
        if piece.calls:
            listed = [{"index": index, **call} for index, call in enumerate(self._calls(piece.calls))]
            chunks.append(_delta(choice, {"tool_calls": listed}))
        return [*chunks, _delta(choice, {}, reason=_reason(finished, piece.calls, is_cut=is_cut))]

    def whole(self, choice: int, delta: Delta, finished: Result) -> dict[str, Any]:
        """The message."""
        reader, is_cut = self._readers[choice], self._is_cut(choice, finished)
        piece, rest = reader.feed(delta.text), reader.end(is_cut=is_cut)
        calls, text, reasoning = rest.calls, piece.text + rest.text, piece.reasoning + rest.reasoning
        text = text.rstrip() if calls else text
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = self._calls(calls)
        return {
            "index": choice,
            "message": message,
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": _reason(finished, calls, is_cut=is_cut),
        }

    def _is_cut(self, choice: int, finished: Result) -> bool:
        return REASONS[finished.finish] == "length" or finished.stop in self._call.requests[choice].stop

    def _calls(self, calls: Sequence[ParsedToolCall]) -> list[dict[str, Any]]:
        return [{"id": self._new_id(), "type": "function", "function": asdict(call)} for call in calls]

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._call.top_logprobs is None:
            return None
        content = []
        for chosen in self._without_end(tokens):
            top = [self._entry(other.token, other.logprob) for other in chosen.top_logprobs[: self._call.top_logprobs]]
            content.append(self._entry(chosen.token, chosen.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text, raw = self._texts.of(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionChoices(_Choices):
    """Choices of `/v1/completions`: text, and log probabilities in the older form.

    Args:
        call, texts, model: see `_Choices`.
        prompts: prompt -> log probabilities of its tokens, if they are part of the answer.
    """

    def __init__(
        self,
        call: CheckedCall,
        texts: TokenTexts,
        model: StreamedModel,
        prompts: Mapping[tuple[int, ...], Sequence[TokenLogprob]] | None = None,
    ) -> None:
        super().__init__(call, texts, model)
        self._lengths = [0] * len(call.requests)
        self._prompts = prompts or {}

    def begin(self, choice: int) -> list[dict[str, Any]]:
        """The prompt, if `echo` is set."""
        echo = self._echo(choice)
        return [_choice(choice, echo, self._logprobs(choice, self._prompt(choice)))] if echo else []

    def more(self, choice: int, delta: Delta) -> list[dict[str, Any]]:
        """Text, and the log probabilities of its tokens."""
        logprobs = self._logprobs(choice, self._without_end(delta.tokens))
        if not delta.text and not (logprobs and logprobs["tokens"]):
            return []
        return [_choice(choice, delta.text, logprobs)]

    def end(self, choice: int, finished: Result) -> list[dict[str, Any]]:
        """The finish reason."""
        return [_choice(choice, "", None, REASONS[finished.finish])]

    def whole(self, choice: int, delta: Delta, finished: Result) -> dict[str, Any]:
        """The text."""
        text = self._echo(choice) + delta.text
        tokens = (*self._prompt(choice), *self._without_end(delta.tokens))
        return _choice(choice, text, self._logprobs(choice, tokens), REASONS[finished.finish])

    def _prompt(self, choice: int) -> Sequence[TokenLogprob]:
        return self._prompts.get(self._call.requests[choice].prompt, ())

    def _echo(self, choice: int) -> str:
        return self._call.echoes[choice] if self._call.echoes else ""

    def _logprobs(self, choice: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Lists of tokens, their log probabilities, the most likely alternatives at each position, and text offsets."""
        if self._call.top_logprobs is None:
            return None
        logprobs: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for chosen in tokens:
            text, _ = self._texts.of(chosen.token)
            logprobs["tokens"].append(text)
            # the first token of a prompt has none
            logprobs["token_logprobs"].append(None if chosen.logprob is None else _finite(chosen.logprob))
            top: dict[str, float] = {}
            for candidate in chosen.top_logprobs[: self._call.top_logprobs]:
                top.setdefault(self._texts.of(candidate.token)[0], _finite(candidate.logprob))
            logprobs["top_logprobs"].append(None if chosen.logprob is None else top)
            logprobs["text_offset"].append(self._lengths[choice])
            self._lengths[choice] += len(text)
        return logprobs


def _delta_fields(piece: AnswerPiece) -> dict[str, Any]:
    reasoning = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
    return {**reasoning, **({"content": piece.text} if piece.text else {})}


def _choice(choice: int, text: str, logprobs: dict[str, Any] | None, reason: str | None = None) -> dict[str, Any]:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _mean(candidate: Delta) -> float:
    """The mean log probability of its tokens."""
    return sum(_finite(token.logprob) for token in candidate.tokens) / max(len(candidate.tokens), 1)


def _finite(logprob: float | None) -> float:
    """A log probability as JSON can represent it."""
    return max(logprob, LEAST) if logprob is not None and logprob == logprob else LEAST


def _delta(
    choice: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _reason(finished: Result, calls: Sequence[ParsedToolCall], *, is_cut: bool) -> str:
    reason = REASONS[finished.finish]
    return "tool_calls" if calls and reason == "stop" and not (is_cut and _is_begun(calls[-1])) else reason


def _is_begun(call: ParsedToolCall) -> bool:
    """Whether the end of a call's arguments is missing."""
    try:
        json.loads(call.arguments)
    except ValueError:
        return True
    return False
