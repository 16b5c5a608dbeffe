"""Ollama's `/api/chat`, `/api/generate`, from and to the chats of `/v1/chat/completions`; its models. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rabbitllm.generation.request import Result
from rabbitllm.generation.template import ChatTemplate
from rabbitllm.server._messages import arguments_of
from rabbitllm.server._models import Entry
from rabbitllm.server._streaming import Dialect, text_of
from rabbitllm.server.api_error import APIError, bad, refuse_others, take_fields, taken

HARMLESS = ("keep_alive", "truncate", "shift")
"""Fields that change no answer."""
_OF_LOADING = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap"),
    *("use_mlock", "vocab_only", "logits_all", "num_keep", "embedding_only"),
)
"""Options of Ollama's loading; those of `serve` apply."""
_OF_SEVERAL = ("n", "stream_options")
"""Options of a chat that make answers which Ollama's objects cannot say."""
_OF_GENERATE = ("prompt", "system", "images")


def named(body: Any) -> dict[str, Any]:
    """The fields of a body, the model by its name here; refuses what is no object."""
    fields = take_fields(body, HARMLESS)
    return fields | {"model": str(fields["model"]).removesuffix(":latest")} if fields.get("model") else fields


def only_loads(fields: Mapping[str, Any]) -> bool:
    """Whether a request has no question: such a one only loads the model."""
    return not any(fields.get(name) for name in ("messages", *_OF_GENERATE))


def chat_of(body: Mapping[str, Any], template: ChatTemplate) -> dict[str, Any]:
    """The body of a chat that asks for the same.

    Raises:
        APIError: it has a field that is not supported, or of a wrong form.
    """
    fields = dict(body)
    chat = {"model": fields.pop("model", None), "stream": fields.pop("stream", None) is not False}
    options = {name: value for name, value in taken(fields, "options", dict).items() if name not in _OF_LOADING}
    if (limit := options.pop("num_predict", None)) is not None:
        chat["max_tokens"] = -1 if limit == -2 else limit  # -2: to the end of the context
    messages, (prompt, system, images) = taken(fields, "messages", list), (fields.pop(n, None) for n in _OF_GENERATE)
    if not messages:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt or "", "images": images})
    chat["messages"] = list(_messages(messages))
    chat |= {name: fields.pop(name) for name in ("tools", "logprobs", "top_logprobs") if name in fields}
    if form := fields.pop("format", None):
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}
        chat["response_format"] = {"type": "json_object"} if form == "json" else schema
    if isinstance(think := fields.pop("think", None), str):
        chat["reasoning_effort"] = think
    elif think is not None:
        chat["chat_template_kwargs"] = dict.fromkeys(template.switches, bool(think))
    refuse_others(fields | {name: options.pop(name, None) for name in _OF_SEVERAL}, ())
    return options | chat  # a chat refuses unknown options


def _messages(messages: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("images") or [], list):
            raise bad(f"messages.{index} is no message.", f"messages.{index}")
        fields = {name: value for name, value in message.items() if name not in ("images", "tool_name")}
        if images := message.get("images"):
            parts = [{"type": "image_url", "image_url": {"url": f"data:;base64,{image}"}} for image in images]
            fields["content"] = [{"type": "text", "text": message.get("content") or ""}, *parts]
        yield fields | ({"name": message["tool_name"]} if message.get("tool_name") else {})


class OllamaLines(Dialect):
    """Answers as lines of Ollama's objects; `generates` says whether these have a text in place of a message."""

    content_type = "application/x-ndjson"

    def __init__(self, *, generates: bool) -> None:
        self._generates, self._reason, self._begun = generates, "stop", time.perf_counter()

    def whole(self, answer: Mapping[str, Any], ends: Sequence[Result]) -> dict[str, Any]:
        """The answer."""
        (choice,) = answer["choices"]
        self._reason = choice["finish_reason"]
        return self._object(answer, choice["message"], choice) | self._ending(ends[0])

    def frame(self, chunk: Mapping[str, Any]) -> bytes:
        """A line for each piece."""
        (choice,) = chunk["choices"]
        self._reason = choice["finish_reason"] or self._reason
        has_some = any(choice["delta"].get(name) for name in ("content", "reasoning_content", "tool_calls"))
        return text_of(self._object(chunk, choice["delta"], choice) | {"done": False}) + b"\n" if has_some else b""

    def idle(self) -> bytes:
        """Nothing: every line is an answer."""
        return b""

    def end(self, last: Mapping[str, Any], ends: Sequence[Result]) -> bytes:
        """The last line."""
        return text_of(self._object(last, {}, {}) | self._ending(ends[0])) + b"\n"

    def failed(self, error: APIError) -> bytes:
        """The line of an error."""
        return text_of({"error": error.message}) + b"\n"

    def _object(self, answer: Mapping[str, Any], piece: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
        listed, thinking = (choice.get("logprobs") or {}).get("content"), piece.get("reasoning_content")
        about = {"model": answer["model"], "created_at": _time(time.time()), **({"logprobs": listed} if listed else {})}
        fields = {"content": piece.get("content") or "", **({"thinking": thinking} if thinking else {})}
        if self._generates:
            return {**about, "response": fields.pop("content"), **fields}
        functions = [call["function"] for call in piece.get("tool_calls", ())]
        calls = [{"function": {"name": f["name"], "arguments": arguments_of(f["arguments"])}} for f in functions]
        return {**about, "message": {"role": "assistant", **fields, **({"tool_calls": calls} if calls else {})}}

    def _ending(self, end: Result) -> dict[str, Any]:
        first, whole = end.first_seconds or 0.0, time.perf_counter() - self._begun
        seconds = {"total": whole, "load": 0.0, "prompt_eval": first, "eval": end.seconds - first}
        counts = {"prompt_eval_count": end.prompt_tokens, "eval_count": len(end.tokens)}
        reason = "length" if self._reason == "length" else "stop"
        times = {f"{name}_duration": int(each * 1e9) for name, each in seconds.items()}
        return {"done": True, "done_reason": reason, **times, **counts}


def loaded(name: str) -> dict[str, Any]:
    """The answer to a request that only loads a model."""
    silent = {"response": "", "message": {"role": "assistant", "content": ""}}
    return {"model": name, "created_at": _time(time.time()), **silent, "done": True, "done_reason": "load"}


def shown(entry: Entry) -> dict[str, Any]:
    """A model of `/api/tags` and `/api/show`; what its files alone say is there while it is loaded."""
    name, service = entry.settings.name, entry.service
    about = {"name": name, "model": name, "modified_at": _time(entry.created), "capabilities": ["completion"]}
    if service is None:
        return {**about, "details": {}, "model_info": {}}
    template, family = service.template, service.model.config.model_type
    can = ["tools"] * template.reads("tools", with_tools=True) + ["thinking"] * bool(template.switches)
    info = {"general.architecture": family, f"{family}.context_length": entry.context}
    about |= {"template": template.sources[0], "capabilities": ["completion", *can]}
    return {**about, "details": {"family": family}, "model_info": info}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
