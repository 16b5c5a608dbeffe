"""Schemas of request bodies: the fields of OpenAI's interface, with their types and bounds.

Other fields, also those of messages, tools and all other objects, are refused, not ignored, unless they change no
answer (`HARMLESS`) or have a value that changes none (`NEUTRAL`).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rabbitllm.base.terminal import harmless
from rabbitllm.base.validation import problem_of, whole
from rabbitllm.generation.request import MAX_CHOICES, PENALTIES, SEEDS, Sampling, biases_of
from rabbitllm.server.api_error import bad, unsupported

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1_000
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 10_000
MAX_TOOLS = 128
MAX_BIASES = 1024
MAX_NAME = 100
"""Letters of an unknown field's name that are compared with the known ones."""

NO_LIMIT = -1
"""`max_tokens` of clients that want an answer as long as the server gives."""


def _count(value: int) -> int:
    if value < 0 and value != NO_LIMIT:
        raise ValueError(f"expected at least 0, or {NO_LIMIT} for no limit")
    return value


Whole = Annotated[int, BeforeValidator(whole)]
Count = Annotated[int, BeforeValidator(whole), AfterValidator(_count)]
Token = Annotated[int, Field(ge=0)]
# a list fails at its first wrong item: to name half a million of them would keep the server busy for a minute
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Prompts = str | Annotated[list[str], Field(fail_fast=True)] | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
_Parsed = TypeVar("_Parsed", bound=BaseModel)


class _Strict(BaseModel):
    """A schema without conversion between numbers and strings."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class StreamOptionsBody(_Strict):
    """`stream_options`."""

    include_usage: bool | None = None


class ResponseFormat(_Strict):
    """`response_format`; llama.cpp's clients send the schema without a name around it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None
    bare: dict[str, Any] | None = Field(None, alias="schema")


class GenerationBody(_Strict):
    """Fields shared by chats and completions."""

    model: str | None = None
    n: Whole | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: Annotated[Whole, Field(ge=-1, le=SEEDS), AfterValidator(lambda count: max(count, 0))] | None = None
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(
        None, ge=PENALTIES[0], le=PENALTIES[1], validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: Annotated[dict[str, Any], AfterValidator(biases_of)] | None = Field(None, max_length=MAX_BIASES)
    min_tokens: Whole | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    seed: Whole | None = Field(None, ge=-SEEDS - 1, le=SEEDS)
    max_tokens: Count | None = None
    priority: Whole | None = Field(None, ge=-SEEDS - 1, le=SEEDS)
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptionsBody | None = None

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen, as far as the body says."""
        return Sampling(**{option.name: getattr(self, option.name) for option in fields(Sampling)})

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts at which an answer ends, without empty ones.

        Raises:
            APIError: too many, or too long.
        """
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(texts) > MAX_STOPS:
            raise bad(f"stop has {len(texts)} texts; expected at most {MAX_STOPS}.", "stop")
        if any(len(text) > MAX_STOP_CHARACTERS for text in texts):
            raise bad(f"A text of stop has more than {MAX_STOP_CHARACTERS:,} characters.", "stop")
        return tuple(dict.fromkeys(text for text in texts if text))

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its token usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ImageURL(_Strict):
    """`image_url` of a part."""

    url: str | None = None
    detail: str | None = None


class InputAudio(_Strict):
    """`input_audio` of a part."""

    data: str | None = None
    format: str | None = None


class ContentPart(_Strict):
    """A part of a message's content; only the field of its type is set."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageURL | None = None
    input_audio: InputAudio | None = None


class CalledFunction(_Strict):
    """`tool_calls[].function`."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(_Strict):
    """A call that the model made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Strict):
    """One of `messages`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None


class Function(_Strict):
    """`tools[].function`."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Strict):
    """One of `tools`."""

    type: Literal["function"]
    function: Function


class ChatBody(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Whole | None = Field(None, ge=0)


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Whole | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: Whole | None = Field(None, ge=1, le=MAX_CHOICES)
    suffix: str | None = None


class Embedding(_Strict):
    """Body of `/v1/embeddings`."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = Field(None, ge=1)


def _text_in(document: Any) -> Any:
    """The text of a document that is an object of nothing else."""
    return document["text"] if isinstance(document, dict) and document.keys() == {"text"} else document


class RerankBody(_Strict):
    """Body of `/v1/rerank`."""

    model: str | None = None
    query: Annotated[str, BeforeValidator(_text_in)]
    documents: Annotated[list[Annotated[str, BeforeValidator(_text_in)]], Field(fail_fast=True)] = Field(min_length=1)
    top_n: Whole | None = Field(None, ge=1)
    return_documents: bool | None = None


class TokenizeBody(_Strict):
    """Body of `/tokenize`, with llama.cpp's and vLLM's names."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def text(self) -> str:
        """The text.

        Raises:
            APIError: there is none.
        """
        text = self.content if self.content is not None else self.prompt
        if text is None:
            raise bad("Expected content, prompt or messages.", "content")
        return text

    @property
    def adds_special(self) -> bool:
        """Whether the tokens of a text begin with the model's own; by default as for a completion."""
        return next((value for value in (self.add_special, self.add_special_tokens) if value is not None), True)


class DetokenizeBody(_Strict):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: Tokens


_ELSEWHERE = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
"""Fields that a body for another path begins with."""


def parsed(schema: type[_Parsed], body: Any) -> _Parsed:
    """A body as one of these schemas.

    Raises:
        APIError: the body does not fit, or has an unknown field; the message names the field and the problem.
    """
    if not isinstance(body, dict):
        raise bad("The request body is not a JSON object.")
    try:
        checked = schema.model_validate(body)
    except ValidationError as error:
        details = error.errors(include_url=False)
        first = _field(details[0]["loc"])
        within = [name for name in (_field(detail["loc"]) for detail in details) if f"{name}.".startswith(f"{first}.")]
        where = max(within, key=_items)
        of_it = [detail for detail in details if _field(detail["loc"]) == where][:4]
        problem = problem_of({**detail, "input": _quoted(detail["input"])} for detail in of_it)
        is_missing = details[0]["type"] == "missing" and len(details[0]["loc"]) == 1
        paths = [f" {name}: a field of {path}." for name, path in _ELSEWHERE.items() if is_missing and name in body]
        raise bad(f"{where or 'The body'}: {problem}.{''.join(paths)}", first or None) from None
    _refuse_unknown(checked, "")
    return checked


def _quoted(value: Any) -> Any:
    """A text as JSON shows it, at its beginning, since "1" is no number; anything else as it is."""
    return json.dumps(value[:50]) if isinstance(value, str) else value


def _items(field: str) -> list[int]:
    """The indices in a field's name: of the types that it may have, what reads the furthest was meant."""
    return [int(name) for name in field.split(".") if name.isdecimal()]


def _field(location: tuple[int | str, ...]) -> str:
    """`messages.0.content`, without the names of the types that pydantic tried."""
    types = {"str", "int", "float", "bool", "dict", "list"}
    names = [str(part) for part in location if isinstance(part, int) or (part.isidentifier() and part not in types)]
    return ".".join(names)[:200]


def _refuse_unknown(value: Any, where: str) -> None:
    """Refuse unknown fields of a body, and of all objects in it.

    Raises:
        APIError: there is one; the message names fields that are near.
    """
    if isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, BaseModel):
                _refuse_unknown(item, f"{where}.{index}")
    if not isinstance(value, _Strict) or (
        isinstance(value, ContentPart) and value.type not in type(value).model_fields
    ):
        return  # such a part is refused for its type
    allowed = {name for schema in type(value).__mro__ for name in HARMLESS.get(schema, ())}
    if isinstance(value, GenerationBody):
        allowed |= NEUTRAL.keys()
    for name, content in (value.model_extra or {}).items():
        if content is None or name in allowed or _is_one_of(content, _NEUTRAL_IN.get((type(value), name), ())):
            continue
        fields = [name for name in type(value).model_fields if name != "type"]
        near = difflib.get_close_matches(name[:MAX_NAME], fields)
        if name in _INSTEAD:
            near = [field for field in (_INSTEAD[name],) if field in fields]
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        if not near and isinstance(value, ChatBody):
            hint = " Variables of the chat template are set in chat_template_kwargs."
        full = f"{where}.{name}".strip(".")[:200]
        raise unsupported(f"{harmless(full, 100)} is not supported; omit it.{hint}", full)
    for name in type(value).model_fields:
        _refuse_unknown(getattr(value, name), f"{where}.{name}".strip("."))


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is one of these; true is not 1."""
    return any(value == option and (value is option or bool not in (type(value), type(option))) for option in neutral)


HARMLESS: Mapping[type, tuple[str, ...]] = {
    GenerationBody: (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "cache_prompt", "keep_alive", "request_id", "session_id", "chat_id"),
        *("id", "usage"),
    ),
    StreamOptionsBody: ("include_obfuscation",),
    Message: ("id", "annotations", "parsed", "cache_control", "provider_specific_fields", "reasoning_details"),
    ContentPart: ("cache_control",),
    ImageURL: ("format",),
    ToolCall: ("index",),
    CalledFunction: ("parsed_arguments",),
    Tool: ("cache_control",),
    Function: ("strict", "return"),
    Embedding: ("user", "metadata"),
}
"""Schema -> fields that change no answer, of any value; `strict` and `return` of a tool are shown to the model."""
_NEUTRAL_IN: Mapping[tuple[type, str], tuple[Any, ...]] = {
    (Message, "refusal"): ("",),
    (Message, "prefix"): (False,),
    (Message, "partial"): (False,),
    (StreamOptionsBody, "continuous_usage_stats"): (False,),
}
"""Schema and field -> values without effect."""
_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("max_new_tokens", "max_length", "n_predict", "num_predict", "max_output_tokens"), "max_tokens"),
    **dict.fromkeys(("stop_sequences", "stop_strings", "stop_token_ids"), "stop"),
    **dict.fromkeys(("enable_thinking", "thinking", "documents"), "chat_template_kwargs"),
    **dict.fromkeys(("format", "json_schema", "schema"), "response_format"),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_grammar", "guided_decoding"), "structured_outputs"),
    "chat_template": "",
    "reasoning": "reasoning_effort",
    "do_sample": "temperature",
    "num_return_sequences": "n",
}
"""Field of another server -> the field here; empty if a near name would mislead."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "prompt_logprobs"), (0,)),
    **dict.fromkeys(("dry_multiplier", "xtc_probability", "mirostat"), (0,)),
    **dict.fromkeys(("length_penalty", "typical_p", "tfs_z", "num_beams", "best_of"), (1,)),
    **dict.fromkeys(("echo", "use_beam_search", "continue_final_message"), (False,)),
    **dict.fromkeys(("include_reasoning", "separate_reasoning", "skip_special_tokens"), (True,)),
    **dict.fromkeys(("suffix", "grammar"), ("",)),
    **dict.fromkeys(("stop_token_ids", "bad_words", "suppress_tokens", "guided_choice", "functions"), ([],)),
    **dict.fromkeys(("truncate_prompt_tokens", "audio", "web_search_options", "prediction"), ()),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "function_call": ("none",),
    "modalities": (["text"], []),
    "verbosity": ("medium",),
}
"""Field -> values without effect, unless the model has a value of its own; None counts for every field."""


def refuse_unsupported(body: GenerationBody, of_the_model: Mapping[str, float]) -> None:
    """Refuse a field that would change the answer and is not supported.

    Args:
        body: the body.
        of_the_model: field -> the value that every answer is made with, where that is not the neutral one.

    Raises:
        APIError: there is one.
    """
    for name, value in (body.model_extra or {}).items():
        if name not in NEUTRAL or value is None:
            continue
        allowed = (of_the_model[name],) if name in of_the_model else NEUTRAL[name]
        if not _is_one_of(value, allowed):
            hint = f" or use {' or '.join(map(repr, allowed))}" if allowed else ""
            raise unsupported(f"{name} is not supported; omit it{hint}.", name)
