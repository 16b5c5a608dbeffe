"""From items to requests of a batch, and from its results to answers; the part that needs the tokenizer.

Lines in this package's format are answered in the same format; those of OpenAI's batch format in OpenAI's, by the
server's code.

    {"id": …, "text": …, "finish": "stop" | "length", "prompt_tokens": …, "new_tokens": …}
    {"id": …, "text": …, "reasoning": …, "reasoning_tokens": …, …}    where the model thought before its answer
    {"id": …, "answers": [{"text": …, "finish": …, "new_tokens": …}, …], "prompt_tokens": …, "new_tokens": …}    n > 1
    {"id": …, "error": {"code": …, "message": …}}
    {"id": …, "custom_id": …, "response": {"status_code": …, "request_id": …, "body": …}, "error": null or …}
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rabbitllm.batch_jobs.items import BatchAnswer, BatchCall, Generate, Item, Refused
from rabbitllm.errors import MediaError
from rabbitllm.generation.media import openai_part, text_of_parts
from rabbitllm.generation.request import (
    Delta,
    ModelLimits,
    Prompt,
    Request,
    Result,
    options_of,
)
from rabbitllm.generation.template import ChatTemplate
from rabbitllm.server.answers import ChatChoices, CompletionChoices, ResponseBuilder, TokenTexts
from rabbitllm.server.api_error import (
    BAD_MEDIA,
    BROKEN,
    APIError,
    bad,
    bad_options,
    prompt_errors,
    unsupported,
)
from rabbitllm.server.requests import checked_chat, checked_completion
from rabbitllm.server.schemas import ChatBody, CompletionBody, parsed
from rabbitllm.server.settings import Settings

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """An item as requests for the batch.

    Attributes:
        item: the item.
        requests: one for each answer to it.
        line_of: makes the output line from the whole text of each answer, with its tokens, and from the results.
        keeps_tokens: whether the line needs tokens with their probabilities.
    """

    item: Item
    requests: tuple[Request, ...]
    line_of: Callable[[Sequence[Delta], Sequence[Result]], Mapping[str, Any]]
    keeps_tokens: bool = False

    @property
    def media_bytes(self) -> int:
        """Bytes of its pictures and sounds, which all of its requests share."""
        media = self.requests[0].media if self.requests else None
        return media.nbytes if media is not None else 0


class RequestBuilder:
    """Makes requests from items.

    Args:
        model: a model from `AutoModel.from_pretrained`.
        name: the model's name in answers.
    """

    def __init__(self, model: StreamedModel, name: str) -> None:
        self.template = ChatTemplate(model)
        self.tokenizer = self.template.tokenizer
        self.limits = ModelLimits.of(model)
        self.width = int(model.config.get_text_config(decoder=True).hidden_size)
        self._model = model
        self._of_the_model = options_of(model)
        self.name = name

    def prepared(self, item: Item) -> PreparedItem:
        """The requests of an item.

        Args:
            item: an item that asks for a generation.

        Raises:
            APIError: the item is invalid or unsupported; the error is its answer.
        """
        if isinstance(item.task, BatchCall):
            return self._prepare_call(item, item.task)
        assert isinstance(item.task, Generate)
        return self._prepare_native(item, item.task)

    def ids_of(self, text: str | tuple[int, ...]) -> tuple[int, ...]:
        """The token ids of a text; ids are returned unchanged.

        Raises:
            APIError: an id outside the vocabulary, or no ids.
        """
        ids = tuple(int(token) for token in self.tokenizer(text)["input_ids"]) if isinstance(text, str) else text
        with bad_options():
            self.limits.check_ids(ids, "The text")
        return ids

    def _prepare_native(self, item: Item, task: Generate) -> PreparedItem:
        stop, thoughts = task.stop, None
        if isinstance(task.prompt, str) or isinstance(task.prompt[0], int):
            prompt = Prompt(self.ids_of(task.prompt))
        else:
            messages, stop = _with_media(task.prompt), (*stop, *self.template.stops)
            with prompt_errors():
                prompt = self.template.prompt(messages, **self.template.thinking(task.thinking))
            thoughts = self.template.thoughts(prompt.ids)
        with bad_options("logit_bias"):
            self.limits.check_bias(task.sampling)
        with bad_options(code="context_length_exceeded"):
            limit = self.limits.new_tokens(len(prompt.ids), task.max_new_tokens, cut=task.may_cut)
        requests = tuple(
            Request(prompt.ids, limit, task.sampling.nth(i), stop, media=prompt.media, thoughts=thoughts)
            for i in range(task.n)
        )
        return PreparedItem(item, requests, lambda _, results: _native_line(item, results))

    def _prepare_call(self, item: Item, task: BatchCall) -> PreparedItem:
        defaults = task.defaults
        max_new_tokens = defaults.max_new_tokens
        settings = Settings(
            self.name,
            max_new_tokens=max_new_tokens,
            completion_new_tokens=max_new_tokens,
            sampling=replace(defaults.sampling, seed=None),
            thinking=defaults.thinking,
            of_the_model=self._of_the_model,
        )
        raw, texts = _with_defaults(task, item.index), TokenTexts(self.tokenizer)
        body: ChatBody | CompletionBody
        choices: ChatChoices | CompletionChoices
        if task.url == "/v1/chat/completions":
            body = parsed(ChatBody, raw)
            checked = checked_chat(body, self.template, self.limits, settings)
            choices = ChatChoices(checked, texts, self._model, lambda: _new("call_"))
            object_type, lead = "chat.completion", "chatcmpl-"
        else:
            body = parsed(CompletionBody, raw)
            checked = checked_completion(body, self.tokenizer, self.limits, settings)
            if checked.scored:
                raise unsupported("echo with logprobs is not supported here; use context and continuation.", "echo")
            choices = CompletionChoices(checked, texts, self._model)
            object_type, lead = "text_completion", "cmpl-"

        def line_of(deltas: Sequence[Delta], results: Sequence[Result]) -> Mapping[str, Any]:
            n, limit = checked.candidates, checked.max_tokens
            builder = ResponseBuilder(_new(lead), int(time.time()), self.name, object_type, n=n, max_tokens=limit)
            return call_line(item, 200, builder.whole(choices.all(deltas, results), results))

        return PreparedItem(item, checked.requests, line_of, checked.keeps_tokens)


def _with_media(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages whose pictures and sounds are read.

    Raises:
        APIError: one of them cannot be read.
    """
    converted = []
    for index, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, str):
            parts = []
            for part_index, part in enumerate(content):
                where = f"messages.{index}.content.{part_index}"
                try:
                    parts.append(openai_part(part, where) or {"type": "text", "text": part["text"]})
                except MediaError as error:
                    raise bad(error.problem, where, BAD_MEDIA) from error
            content = text_of_parts(parts)
        converted.append({**message, "content": content})
    return converted


def _with_defaults(task: BatchCall, index: int) -> dict[str, Any]:
    body = {name: value for name, value in task.body.items() if value is not None}
    usual = task.defaults.sampling.nth(index)
    if usual.seed is not None:
        body.setdefault("seed", usual.seed)
    if task.defaults.stop:
        body.setdefault("stop", list(task.defaults.stop))
    return body


def refused_answer(item: Item, error: APIError) -> BatchAnswer:
    """The answer to an item that is invalid or unsupported."""
    if isinstance(item.task, BatchCall):
        line = call_line(item, error.status, error.as_object())
    else:
        code = error.code or ("internal_error" if error.status >= BROKEN else "invalid_line")
        line = {"id": item.key, "error": {"code": code, "message": error.message}}
    return BatchAnswer(item.index, item.key, line, is_error=True)


def call_line(item: Item, status: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A line of OpenAI's batch output (https://platform.openai.com/docs/api-reference/batch/request-output)."""
    response = {"status_code": status, "request_id": _new("req_"), "body": body}
    return {"id": _new("batch_req_"), "custom_id": item.key, "response": response, "error": None}


def unreadable_answer(item: Item) -> BatchAnswer:
    """The answer to an invalid input line."""
    assert isinstance(item.task, Refused)
    error = {"code": item.task.code, "message": item.task.message}
    line: dict[str, Any] = {"id": item.key}
    if item.task.as_call:
        line = {"id": _new("batch_req_"), "custom_id": item.key, "response": None}
    return BatchAnswer(item.index, item.key, {**line, "error": error}, is_error=True)


def _native_line(item: Item, results: Sequence[Result]) -> Mapping[str, Any]:
    answers = [{"text": result.text, **_thoughts(result), "finish": result.finish.value} for result in results]
    counts = [len(result.tokens) for result in results]
    of_each = [{**answer, "new_tokens": count} for answer, count in zip(answers, counts, strict=True)]
    texts = answers[0] if len(answers) == 1 else {"answers": of_each}
    return {"id": item.key, **texts, "prompt_tokens": results[0].prompt_tokens, "new_tokens": sum(counts)}


def _thoughts(result: Result) -> dict[str, Any]:
    """The fields of an answer before which the model thought."""
    if not result.reasoning_tokens:
        return {}
    return {"reasoning": result.reasoning, "reasoning_tokens": result.reasoning_tokens}


def _new(lead: str) -> str:
    return lead + uuid.uuid4().hex[:24]
