"""From a conversation to a prompt: by the model's chat template, in a plain format, or by its processor of pictures.

A chat template is a program by the model's authors that may fail in any way. A model without one was not trained to
chat. Its prompt is

    <system prompt>

    User: <question>
    Assistant: <answer>
    User: <question>
    Assistant:

and since it would continue with the user's next question, its answer ends before a line that begins with `User:`.

A conversation with pictures or sounds goes through the model's processor. It renders the chat template, puts the
model's placeholders in the place of each picture, and makes tensors of the pictures. A text that contains a placeholder
is refused: the model would read it as a picture.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import jinja2

from rabbitllm.base.terminal import harmless
from rabbitllm.errors import MediaError, OptionError, RabbitLLMError
from rabbitllm.formats.media_file import MAX_PIXELS, read_picture, read_sound
from rabbitllm.generation._template_process import PROCESS, TooManyLetters, in_the_process
from rabbitllm.generation.media import MAX_FILES, WORDS, MediaFile, files_in
from rabbitllm.generation.reasoning import TAIL_TOKENS, AnswerFormat, Thinking, Thoughts
from rabbitllm.generation.request import ModelLimits, Prompt, PromptMedia, tokenizer_of

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
PLAIN_NAMES = {USER: "User:", ASSISTANT: "Assistant:"}
_PLACEHOLDERS = (
    *("image_token", "boi_token", "eoi_token", "fake_image_token", "start_image_token", "end_image_token"),
    *("start_of_img_token", "end_of_img_token", "img_patch_token", "image_break_token", "image_end_token"),
    *("vision_start_token", "vision_end_token", "video_token", "audio_token", "boa_token", "eoa_token"),
    *("audio_bos_token", "audio_eos_token"),
)
"""Attributes of processors and tokenizers with texts that stand for pictures and sounds."""
_PARTS = {"image": "image_processor", "audio": "feature_extractor"}
_NOT_INPUTS = ("input_ids", "attention_mask")
REASONING = "reasoning_content"
_REASONING = (REASONING, "reasoning", "thinking")
"""Names under which templates read the reasoning of an earlier answer, and clients send it."""
_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn thinking on and off."""
_EFFORT = "reasoning_effort"


class PromptRefused(Exception):
    """The model's chat template or processor refuses a conversation, or fails on it; the text is that of its error,
    without a full stop.

    Args:
        error: its error, of any type.
        by_processor: whether it is the processor of pictures and sounds.
    """

    def __init__(self, error: Exception, *, by_processor: bool = False) -> None:
        super().__init__(str(error).rstrip("."))
        self.error = error
        self.by_processor = by_processor
        self.program = "processor" if by_processor else "chat template"


class ChatTemplate:
    """The chat template of a model, or the plain format for a model without one.

    Args:
        model: a model with its `tokenizer`, and its `processor` for pictures and sounds.

    Attributes:
        tokenizer: the model's tokenizer.
        is_there: whether there is a template.
        stops: stop strings of every answer.

    Raises:
        OptionError: the model has no tokenizer.
    """

    def __init__(self, model: StreamedModel) -> None:
        self._model = model
        self.tokenizer = tokenizer_of(model)
        self.is_there = bool(getattr(self.tokenizer, "chat_template", None))
        self.stops = () if self.is_there else ("\n" + PLAIN_NAMES[USER],)

    def reads(self, name: str, *, with_tools: bool = False) -> bool:
        """Whether the template reads a variable of this name; a template ignores all others.

        Args:
            name: name of the variable.
            with_tools: whether the prompt has tools; some models have a separate template for these.
        """
        return name in names_in(self.sources[with_tools])[0]

    def settable(self, *, with_tools: bool = False) -> frozenset[str]:
        """The variables that a request may set: those that only the template reads; see `variables_in`."""
        special = frozenset(getattr(self.tokenizer, "special_tokens_map", {}))
        return variables_in(self.sources[with_tools]) - special

    def media_kinds(self) -> list[str]:
        """The kinds of files that a prompt may hold, "image" and "audio"; empty if the processor cannot be read."""
        try:
            processor = self._model.processor
        except RabbitLLMError:  # each request with such a file is told why
            return []
        return _kinds_of(processor)

    @cached_property
    def form(self) -> AnswerFormat:
        """How the model marks its reasoning."""
        return AnswerFormat.of(self.sources, self.tokenizer)

    def thoughts(self, ids: Sequence[int]) -> Thoughts | None:
        """How an answer to a prompt of these ids is read; None without a template."""
        if not self.is_there:
            return None
        return Thoughts(self.form, str(self.tokenizer.decode(list(ids[-TAIL_TOKENS:]), skip_special_tokens=False)))

    @cached_property
    def thinks(self) -> bool:
        """Whether template or vocabulary know of reasoning."""
        known = "\n".join((*self.sources, *self.tokenizer.get_added_vocab()))
        return self.form.has_channels or bool(self.less_thinking) or any(last in known for _, last in self.form.pairs)

    @cached_property
    def thought_tokens(self) -> tuple[int, int] | None:
        """Tokens that begin and end reasoning; None where they are no tokens."""
        added = self.tokenizer.get_added_vocab()
        for opening, closing in () if self.form.has_channels else self.form.pairs:
            begins = [token for name, token in added.items() if opening.startswith(name)]
            if closing in added and begins:
                return begins[0], added[closing]
        return None

    def thinking(self, thinking: Thinking) -> dict[str, Any]:
        """The variables that say whether the model thinks, and how much.

        Raises:
            OptionError: the template reads none of them.
        """
        settable = self.settable()
        switches = self.switches
        efforts = [_EFFORT] if _EFFORT in settable else []
        for name, value, names in (
            ("Thinking cannot be turned on or off", thinking.enabled, switches),
            ("An effort of thinking cannot be set", thinking.effort, efforts),
        ):
            if value is not None and not names:
                read = " or ".join(_SWITCHES) if names is switches else _EFFORT
                instead = "--effort" if efforts else "--thinking or --no-thinking" if switches else ""
                raise OptionError(
                    f"{name}: this model's chat template does not read {read}.",
                    f"Use {instead}, which it does read." if instead else "Leave the option out.",
                )
        values = {**dict.fromkeys(switches, thinking.enabled), **dict.fromkeys(efforts, thinking.effort)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def switches(self) -> list[str]:
        """The variables by which the template turns thinking on and off."""
        settable = self.settable()
        return [name for name in _SWITCHES if name in settable]

    @property
    def less_thinking(self) -> str:
        """The option by which a model thinks less; empty if its template reads none."""
        settable = self.settable()
        return "--no-thinking" if settable & {*_SWITCHES} else "--effort low" if _EFFORT in settable else ""

    def of_reasoning(self, text: str) -> dict[str, str]:
        """Keys of a message for the reasoning of an earlier answer: those that the template reads; most read none."""
        return {name: text for name in _REASONING if text and self.reads(name, with_tools=True)}

    @property
    def sources(self) -> tuple[str, str]:
        """The template, and the one for a prompt with tools; empty for none."""
        return _sources(self.tokenizer)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        begins: bool = True,
        **variables: Any,
    ) -> Prompt:
        """The conversation up to the beginning of the model's answer.

        Args:
            messages: each with its `role` and its `content`: a text, or a list of parts; see `media`.
            tools: tools as templates expect them.
            begins: whether the template begins the answer.
            variables: further variables of the template; see `settable`.

        Raises:
            PromptRefused: the template or the processor refuses these messages, or the template does not read one of
                the variables. A processor would take it as an argument: `images` with an address, or a `size`.
            OptionError: the text is too long for the model's context.
            MediaError: the model takes no such files, or one of them cannot be used.
            ProcessorError, MissingPackageError: the processor cannot be made.
        """
        if files := files_in(messages):
            loader = _MediaLoader(self._model, files)
            program: Any = loader.processor
            loaded = [loader.loaded(message) for message in messages]
            if not getattr(program, "chat_template", None):
                raise MediaError(
                    "The processor of this model has no chat template, so pictures and sounds have no place in a "
                    "message.",
                    "Use --raw with the model's placeholders in the prompt, or add chat_template.jinja to the "
                    "checkpoint.",
                )
            _refuse_arguments(variables, variables_in(_sources(program)[0]))
            variables["return_tensors"] = "pt"
        elif self.is_there:
            _refuse_arguments(variables, variables_in(self.sources[bool(tools)]))
            program, loaded = self.tokenizer, [dict(message) for message in messages]
        else:
            return self.raw(_plain(messages))
        variables |= {"tools": [dict(tool) for tool in tools] or None}
        limits = ModelLimits.of(self._model)
        try:
            with in_the_process(limits.letters):
                encoded = program.apply_chat_template(
                    loaded, add_generation_prompt=begins, tokenize=True, return_dict=True, **variables
                )
        except TooManyLetters as error:
            raise limits.too_many_letters(error.letters) from None
        except Exception as error:  # templates and processors may raise anything
            raise PromptRefused(error, by_processor=bool(files)) from error
        return self._media_prompt(encoded) if files else Prompt(tuple(map(int, encoded["input_ids"])))

    def raw(self, text: str, files: Sequence[MediaFile] = ()) -> Prompt:
        """A text without the template; with media it has the model's placeholders, in the order of the files.

        Raises:
            PromptRefused: there are more or fewer placeholders than files.
            OptionError: the text is too long for the model's context.
            MediaError, ProcessorError, MissingPackageError: see `prompt`.
        """
        ModelLimits.of(self._model).check_letters(len(text))
        if not files:
            return Prompt(tuple(map(int, self.tokenizer(text)["input_ids"])))
        loader = _MediaLoader(self._model, files)
        pictures = [loader.picture(file) for file in files if file.kind == "image"]
        sounds = [loader.sound(file) for file in files if file.kind == "audio"]
        named: dict[str, Any] = {"images": pictures} if pictures else {}
        if sounds:
            named |= {"audio": sounds, "sampling_rate": loader.rate}
        try:
            encoded = loader.processor(text=text, return_tensors="pt", **named)
        except Exception as error:  # processors may raise anything
            raise PromptRefused(error, by_processor=True) from error
        return self._media_prompt(encoded)

    def _media_prompt(self, encoded: Mapping[str, Any]) -> Prompt:
        import torch

        tensors = {
            name: value.to(self._model.dtype) if value.is_floating_point() else value
            for name, value in encoded.items()
            if name not in _NOT_INPUTS and isinstance(value, torch.Tensor)
        }
        return Prompt(tuple(map(int, encoded["input_ids"][0])), PromptMedia(tensors))


def _plain(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages in the plain format, ready for an answer."""
    parts = []
    for message in messages:
        role, content = message["role"], (message["content"] or "").strip()
        if role not in (SYSTEM, *PLAIN_NAMES):
            raise PromptRefused(
                jinja2.TemplateError(f"messages of the role {harmless(role, 40)} need a template, and there is none")
            )
        parts.append(f"{content}\n" if role == SYSTEM else f"{PLAIN_NAMES[role]} {content}")
    return "\n".join([*parts, PLAIN_NAMES[ASSISTANT]])


def _sources(program: Any) -> tuple[str, str]:
    """The chat template of a tokenizer or a processor, and the one for a prompt with tools; empty for none."""
    templates = getattr(program, "chat_template", None) or ""
    named = {"default": templates} if isinstance(templates, str) else dict(templates)
    default = str(named.get("default", ""))
    return default, str(named.get("tool_use", default))


def _refuse_arguments(variables: Mapping[str, Any], settable: frozenset[str]) -> None:
    for name in variables:
        if name not in settable:
            raise PromptRefused(jinja2.TemplateError(f"it does not read the variable {harmless(name, 60)}"))


@cache
def _arguments() -> frozenset[str]:
    """Everything that tokenizers and processors of transformers take, and that templates get from them."""
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from rabbitllm.generation.transformers_api import processor_arguments

    programs = PreTrainedTokenizerBase, ProcessorMixin
    calls = [call for program in programs for call in (program.apply_chat_template, program.__call__)]
    names = {name for call in calls for name in inspect.signature(call).parameters} | processor_arguments()
    return frozenset({*names, "messages", "raise_exception", "strftime_now", *jinja2.defaults.DEFAULT_NAMESPACE})


def variables_in(source: str) -> frozenset[str]:
    """Variables that a template's source reads, without those that transformers sets or takes as its own arguments."""
    return names_in(source)[1] - _arguments()


def names_in(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """See `TemplateProcess.names`; none for a template that exceeds a limit."""
    try:
        return _names_in(source)
    except (RuntimeError, ValueError):  # a prompt by this template tells why
        return frozenset(), frozenset()


@cache
def _names_in(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Errors are not kept: the process may have ended for another reason."""
    names, variables = PROCESS.names(source) if source else ((), ())
    return frozenset(names), frozenset(variables)


def _kinds_of(processor: Any) -> list[str]:
    """The kinds of files that a processor takes."""
    has_tokenizer = getattr(processor, "tokenizer", None) is not None
    return [kind for kind, part in _PARTS.items() if has_tokenizer and getattr(processor, part, None) is not None]


class _MediaLoader:
    """Decodes the pictures and sounds of a prompt, its pictures within one limit of pixels.

    Attributes:
        processor: the model's processor.
        rate: samples of a sound per second that it expects.

    Raises:
        MediaError: too many files, or the model takes none of their kind.
    """

    def __init__(self, model: StreamedModel, files: Sequence[MediaFile]) -> None:
        if len(files) > MAX_FILES:
            raise MediaError(
                f"The prompt has {len(files):,} pictures and sounds; at most {MAX_FILES} are possible.", "Use fewer."
            )
        processor: Any = model.processor
        self.processor = processor
        for kind in sorted({file.kind for file in files}):
            if kind not in _kinds_of(processor):
                raise MediaError(
                    f"This model takes no {WORDS[kind]}.", "Leave them out, or use a model that takes them."
                )
        self.rate = int(getattr(getattr(processor, "feature_extractor", None), "sampling_rate", 16_000))
        holders = (getattr(owner, name, None) for name in _PLACEHOLDERS for owner in (processor, processor.tokenizer))
        self._placeholders = [holder for holder in holders if isinstance(holder, str) and holder]
        self._pixels = MAX_PIXELS

    def picture(self, file: MediaFile) -> Any:
        picture = read_picture(file.data, file.name, self._pixels)
        self._pixels -= picture.width * picture.height
        return picture

    def sound(self, file: MediaFile) -> Any:
        return read_sound(file.data, file.name, self.rate)

    def loaded(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as processors expect it; every content is a list, which all templates for pictures read.

        Raises:
            MediaError: a text contains a placeholder, or a file cannot be used.
        """
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        return {**message, "content": [self._part(part) for part in parts]}

    def _part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        if part["type"] == "image":
            return {"type": "image", "image": self.picture(part["file"])}
        if part["type"] == "audio":
            return {"type": "audio", "audio": self.sound(part["file"])}
        for holder in self._placeholders:
            if holder in part["text"]:
                raise MediaError(
                    f"The text contains the placeholder {harmless(holder)}, which marks pictures or sounds.",
                    "Remove it from the text.",
                )
        return {"type": "text", "text": part["text"]}
