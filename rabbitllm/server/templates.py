"""A model's chat template: the variables it reads, and a conversation as token ids.

A template is a program that comes with the model. The variables it reads (`tools`, `response_format`,
`reasoning_effort`) are found in its source; any other would be ignored silently, so requests that set it are refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from rabbitllm.base.terminal import harmless
from rabbitllm.errors import MediaError, MissingPackageError, ProcessorError
from rabbitllm.generation.media import has_media, media_prompt
from rabbitllm.generation.request import Prompt
from rabbitllm.generation.template import PLAIN_END, has_template, plain_text, template_ids
from rabbitllm.server.api_error import APIError, bad

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rabbitllm.engine.streamed_model import StreamedModel

logger = logging.getLogger(__name__)

UNSUPPORTED, BAD_MEDIA = "unsupported_content", "invalid_media"
"""Codes of errors about pictures and sounds."""

OURS = frozenset(
    {
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict",
        "return_tensors", "padding", "truncation", "max_length", "chat_template", "conversation", "tokenizer_kwargs",
        "return_assistant_tokens_mask", "processor_kwargs",
    }
)  # fmt: skip
"""Arguments of `apply_chat_template` that requests must not set."""


class _Generation(Extension):
    """The tag `{% generation %}`, by which templates mark an answer for training."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own way

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Parse the tag as its content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template, or the plain format where it has none.

    Attributes:
        tokenizer: the model's tokenizer.
        model: the model, for prompts with pictures and sounds; None where there are none.
    """

    tokenizer: PreTrainedTokenizerBase
    model: StreamedModel | None = None

    @cached_property
    def is_there(self) -> bool:
        """Whether the tokenizer has a template."""
        return has_template(self.tokenizer)

    def source(self, *, with_tools: bool = False) -> str:
        """The template's source; some models have a separate one for tools."""
        if not self.is_there:
            return ""
        given = self.tokenizer.chat_template
        if isinstance(given, str):
            return given
        named = dict(given)
        return str(named.get("tool_use" if with_tools else "default", named.get("default", "")))

    @cached_property
    def _names(self) -> dict[bool, frozenset[str]]:
        return {with_tools: names_in(self.source(with_tools=with_tools)) for with_tools in (False, True)}

    def reads(self, name: str, *, with_tools: bool = False) -> bool:
        """Whether the template reads a variable of this name."""
        return name in self._names[with_tools]

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts at which every answer ends."""
        return () if self.is_there else (PLAIN_END,)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], more: Mapping[str, Any]
    ) -> Prompt:
        """The conversation, which may have pictures and sounds, up to the beginning of the answer; see `ids`.

        Raises:
            APIError: the template rejects the conversation, or a picture or sound cannot be used.
        """
        if not has_media(messages):
            return Prompt(tuple(self.ids(messages, tools, more)))
        if self.model is None:
            raise bad("This model takes no pictures.", "messages", UNSUPPORTED)
        given = [dict(tool) for tool in tools] or None
        try:
            return media_prompt(self.model, messages, refused_by_processor, tools=given, **more)
        except MediaError as error:
            raise bad(error.problem, "messages", UNSUPPORTED if "takes no" in error.problem else BAD_MEDIA) from error
        except (ProcessorError, MissingPackageError) as error:  # its message has paths of this machine
            logger.warning("pictures cannot be read: %s", error)
            raise bad("This server cannot read pictures; its log has the reason.", "messages", UNSUPPORTED) from error

    def ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], more: Mapping[str, Any]
    ) -> list[int]:
        """The conversation as token ids, up to the beginning of the answer.

        Args:
            messages: as templates expect them.
            tools: likewise; empty for none.
            more: further variables of the template.

        Raises:
            APIError: the template rejects the conversation.
        """
        if not self.is_there:
            if any(message["role"] == "tool" for message in messages):
                raise bad("This model has no chat template, so it supports no tool messages.", "messages")
            plain = [{"role": message["role"], "content": message["content"] or ""} for message in messages]
            return [int(token) for token in self.tokenizer(plain_text(plain))["input_ids"]]
        given = [dict(tool) for tool in tools] or None
        return template_ids(self.tokenizer, messages, refused_by_template, tools=given, **more)


def refused_by_template(error: Exception) -> APIError:
    """The error for a rejected conversation; it quotes a template that raises on purpose, and nothing else."""
    said = f": {str(error)[:300]}" if isinstance(error, jinja2.TemplateError) and error.message else ""
    return bad(f"The model's chat template refuses this conversation{said}.", "messages", "template_error")


def refused_by_processor(error: Exception) -> APIError:
    """The error for pictures that the processor rejects; likewise."""
    if isinstance(error, jinja2.TemplateError):
        return refused_by_template(error)
    said = f": {harmless(str(error), 300)}" if type(error) is ValueError else ""
    return bad(f"The model's processor refuses these pictures{said}.", "messages", BAD_MEDIA)


def names_in(source: str) -> frozenset[str]:
    """Names of the variables, attributes and keys in a template's source."""
    environment = jinja2.Environment(extensions=[loopcontrols, _Generation])
    try:
        tree = environment.parse(source)
    except jinja2.TemplateError:  # an unknown extension
        return frozenset(re.findall(r"[A-Za-z_]\w*", source))
    found = {node.name for node in tree.find_all(nodes.Name)}
    found |= {node.attr for node in tree.find_all(nodes.Getattr)}
    found |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str) and len(node.value) < 64}
    return frozenset(found)
