"""The private parts of transformers that generation uses; see `engine/transformers_api.py`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, LogitsProcessorList, PretrainedConfig, PreTrainedModel

from rabbitllm.base.transformers_version import check_call, checked_parts
from rabbitllm.errors import NotANumberError

with checked_parts():
    from transformers import processing_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils import chat_template_utils

    check_call(sdpa_attention_forward, "module", "query", "key", "value", "attention_mask", scaling="")
    check_call(GenerationMixin._sample, "self", "ids", "processors", "stopping_criteria", "generation_config")
    callable(GenerationMixin._supports_default_dynamic_cache)
    check_call(chat_template_utils._compile_jinja_template, "template")
    check_call(chat_template_utils._cached_compile_jinja_template, "template")


def name_attention(config: PretrainedConfig, name: str) -> None:
    """Set the attention implementation of one config, not of the configs in it, unchecked."""
    config._attn_implementation_internal = name


def attention_function(name: str, module: nn.Module) -> Callable[..., Any] | None:
    """The function of an attention implementation; of "eager" that of the module's own model. None if it is unknown."""
    forward = inspect.unwrap(type(module).forward)  # wrapped by decorators for deprecated arguments
    eager = getattr(forward, "__globals__", {}).get("eager_attention_forward")
    function: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get(name, eager)
    return function


def has_dynamic_cache(model: PreTrainedModel) -> bool:
    """Whether `generate` makes a `DynamicCache` for the model."""
    return bool(model._supports_default_dynamic_cache())


class Processors(LogitsProcessorList):  # type: ignore[misc]
    """Processors of scores whose signatures are read once; transformers reads them for each token."""

    def __init__(self, processors: Iterable[Callable[..., torch.Tensor]]) -> None:
        super().__init__(processors)
        self._are_plain = all(len(inspect.signature(processor.__call__).parameters) <= 2 for processor in self)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """As in transformers."""
        if self._are_plain:
            for processor in self:
                scores = processor(input_ids, scores)
        else:
            scores = super().__call__(input_ids, scores, **kwargs)
        return scores


class CheckedProcessors(Processors):
    """Processors of scores whose result has a highest one: without, token 0 would be chosen."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """As in transformers.

        Raises:
            NotANumberError: a score is NaN or infinite, or no token may be chosen.
        """
        scores = super().__call__(input_ids, scores, **kwargs)
        highest = float(scores.amax())  # NaN if any is; takes a tenth of the time of `argmax`
        if not math.isfinite(highest):
            raise NotANumberError(
                f"The scores of the next token are not numbers (the highest is {highest}), so none can be chosen.",
                "Try another --dtype, as float16 overflows where bfloat16 does not; check the weights with verify.",
            )
        return scores


def sample(model: Any, ids: torch.Tensor, logits_processor: LogitsProcessorList, **options: Any) -> Any:
    """The loop of `generate` that chooses one token after the other, for `custom_generate`.

    Raises:
        NotANumberError: see `CheckedProcessors`.
    """
    return type(model)._sample(model, ids, logits_processor=CheckedProcessors(logits_processor), **options)


def processor_arguments() -> set[str]:
    """Names of the arguments that processors pass on to their parts."""
    parts = ("TextKwargs", "ImagesKwargs", "VideosKwargs", "AudioKwargs", "ProcessingKwargs")
    return {name for part in parts for name in getattr(processing_utils, part).__annotations__}


def template_compiler_source() -> str:
    """The source of the function that compiles chat templates."""
    return inspect.getsource(chat_template_utils._cached_compile_jinja_template)


def wrap_template_compiler(wrap: Callable[[Callable[[str], Any]], Callable[[str], Any]]) -> None:
    """Replace the function that compiles chat templates by the result of `wrap`, which is called with it."""
    chat_template_utils._compile_jinja_template = wrap(chat_template_utils._compile_jinja_template)
