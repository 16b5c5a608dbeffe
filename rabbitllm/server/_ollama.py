"""Ollama's `/api/chat`, `/api/generate`, `/api/embed`, from and to the bodies of `/v1`; its models. Pure."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rabbitllm.base.terminal import harmless
from rabbitllm.generation.request import Result
from rabbitllm.generation.template import ChatTemplate
from rabbitllm.server._messages import arguments_of
from rabbitllm.server._models import Entry, Models
from rabbitllm.server._streaming import Dialect, cut_in, text_of
from rabbitllm.server.api_error import APIError, bad, refuse_others, take_fields, taken, unsupported

HARMLESS = ("truncate", "shift")
"""Fields that change no answer."""
_OF_LOADING = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap"),
    *("use_mlock", "vocab_only", "logits_all", "num_keep", "embedding_only"),
)
"""Options of Ollama's loading; those of `serve` apply."""
_OF_SEVERAL = ("n", "stream_options")
"""Options of a chat that make answers which Ollama's objects cannot say."""
_OF_GENERATE = ("prompt", "system", "images")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "": 1, "s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([a-zµ]*)")
_ALWAYS = 292 * 365 * 86_400
"""Seconds that stand for ever in Ollama's answers."""


def named(body: Any, models: Models) -> tuple[dict[str, Any], Entry, float]:
    """The fields of a body, the model that it names, and for how many seconds `keep_alive` would keep this loaded.

    Raises:
        APIError: it is no object, there is no such model, or `keep_alive` is no time.
    """
    fields = take_fields(body, HARMLESS)
    fields["model"] = str(fields.get("model") or "").removesuffix(":latest") or None
    entry, kept = models.entry(fields["model"]), fields.pop("keep_alive", None)
    return fields, entry, entry.keep_alive if kept is None else _seconds(kept)


def _seconds(kept: Any) -> float:
    """Seconds of a number, or of a text such as `1h30m`; those below 0 are for ever."""
    if type(kept) in (int, float):
        return float(kept) if kept >= 0 else math.inf
    text = kept.removeprefix("-") if isinstance(kept, str) else ""
    parts = _DURATION.findall(text)
    if not text or "".join(map("".join, parts)) != text or {unit for _, unit in parts} - {*_UNITS}:
        what = harmless(json.dumps(kept), 40)
        raise bad(f"keep_alive is {what}; expected seconds, a time such as '5m', or -1 for ever.", "keep_alive")
    return math.inf if kept.startswith("-") else sum(float(number) * _UNITS[unit] for number, unit in parts)


def embedding_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of `/v1/embeddings` that asks for the same; that of `/api/embeddings` has a `prompt`."""
    fields = dict(body)
    texts = [fields.pop(name, None) for name in ("input", "prompt")]
    asked = {name: fields.pop(name, None) for name in ("model", "dimensions")}
    refuse_others({**taken(fields, "options", dict), **fields}, _OF_LOADING)
    return {**asked, "input": texts[0] if texts[0] is not None else texts[1]}


def embedded(answer: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """What `/v1/embeddings` answers after so many seconds, for both of Ollama's paths: vectors of length 1."""
    vectors = [each["embedding"] for each in answer["data"]]
    units = [[value / (math.hypot(*vector) or 1) for value in vector] for vector in vectors]
    about = {"total_duration": int(seconds * 1e9), "prompt_eval_count": answer["usage"]["prompt_tokens"]}
    return {"model": answer["model"], "embeddings": units, "embedding": units[0], "load_duration": 0, **about}


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
    if (think := fields.pop("think", None)) and not template.thinks:
        raise unsupported("think is not supported: this model does not think; omit it.", "think")
    if isinstance(think, str):
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
            fields["content"] = [*parts, {"type": "text", "text": message.get("content") or ""}]  # in Ollama's order
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
        return self._object(answer, choice["message"], choice) | self._ending(ends[0], answer["usage"])

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
        return text_of(self._object(last, {}, {}) | self._ending(ends[0], last["usage"])) + b"\n"

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

    def _ending(self, end: Result, usage: Mapping[str, Any]) -> dict[str, Any]:
        first, whole = end.first_seconds or 0.0, time.perf_counter() - self._begun
        seconds = {"total": whole, "load": 0.0, "prompt_eval": first, "eval": end.seconds - first}
        counts = {"prompt_eval_count": end.prompt_tokens, "eval_count": len(end.tokens)}
        reason = "length" if self._reason == "length" else "stop"
        times = {f"{name}_duration": int(each * 1e9) for name, each in seconds.items()}
        return {"done": True, "done_reason": reason, **times, **counts, **cut_in(usage, "num_predict")}


def loaded(entry: Entry) -> dict[str, Any]:
    """The answer to a request that only loads a model, or unloads it."""
    silent = {"response": "", "message": {"role": "assistant", "content": ""}}
    done = {"done": True, "done_reason": "load" if entry.keep_alive else "unload"}
    return {"model": entry.settings.name, "created_at": _time(time.time()), **silent, **done}


async def shown(entry: Entry) -> dict[str, Any]:
    """A model of `/api/tags`, `/api/show` and `/api/ps`; what its files alone say is there while it is loaded."""
    name, service = entry.settings.name, entry.service
    about: dict[str, Any] = {"name": name, "model": name, "modified_at": _time(entry.created)}
    about["capabilities"] = ["completion"]
    if service is None:
        return {**about, "details": {}, "model_info": {}}
    template, family, placement = service.template, service.model.config.model_type, service.model.placement
    can = ["completion"] * service.model.can_generate() + ["embedding"] * (service.embedder is not None)
    can += ["vision"] * ("image" in await service.encoded(service.template.media_kinds))
    can += ["tools"] * template.reads("tools", with_tools=True) + ["thinking"] * template.thinks
    info = {"general.architecture": family, f"{family}.context_length": entry.context}
    held = {device: placement.bytes_on(device) for device in placement.limits}
    sizes = {"size": sum(held.values()), "size_vram": sum(held.values()) - held.get("cpu", 0)}
    about |= {"template": template.sources[0], "capabilities": can, "context_length": entry.context, **sizes}
    expires = _time(time.time() + min(entry.seconds_left, _ALWAYS))
    return {**about, "details": {"family": family}, "model_info": info, "expires_at": expires}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
