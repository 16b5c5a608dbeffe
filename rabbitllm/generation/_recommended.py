"""The options in a checkpoint's generation config: what becomes of each option of transformers' `GenerationConfig`.

Both executors make one sequence from one prompt, one token after the other, and a batch may begin again after the
tokens so far. An option that changes the scores of tokens is honoured. One that needs another loop, or another prompt,
is dropped, and a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from rabbitllm.base.terminal import listed
from rabbitllm.errors import OptionError

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

logger = logging.getLogger(__name__)


class Use(Enum):
    """What becomes of an option."""

    HONOURED = 1
    """It has the effect that it has in transformers."""
    REPLACED = 2
    """The request, the tokenizer or the executor sets it."""
    IDLE = 3
    """It has no effect without one that is dropped, or without an assistant."""
    DROPPED = 4
    """It has no effect here, which a warning says."""
    REFUSED = 5
    """Answers without it would not be what the checkpoint demands, so that the model is refused."""


OPTIONS: Mapping[str, Use] = {
    **dict.fromkeys(
        (
            *("min_length", "min_new_tokens", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
            *("top_k", "top_p"),
            *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "bad_words_ids"),
            *("encoder_no_repeat_ngram_size", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id"),
            *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "sequence_bias"),
            *("begin_suppress_tokens", "watermarking_config", "stop_strings", "bos_token_id", "eos_token_id"),
            "decoder_start_token_id",
        ),
        Use.HONOURED,
    ),
    **dict.fromkeys(
        (
            *("max_length", "max_new_tokens", "do_sample", "temperature", "num_return_sequences"),
            *("use_cache", "cache_implementation", "prefill_chunk_size", "pad_token_id", "return_dict_in_generate"),
            *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        ),
        Use.REPLACED,
    ),
    **dict.fromkeys(
        (
            *("early_stopping", "length_penalty", "diversity_penalty", "low_memory", "max_matching_ngram_size"),
            *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
            *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type"),
            *("cache_config", "max_cache_len", "compile_config", "disable_compile", "continuous_batching_config"),
            "transformers_version",
        ),
        Use.IDLE,
    ),
    **dict.fromkeys(
        (
            *("num_beams", "num_beam_groups", "penalty_alpha", "dola_layers", "guidance_scale", "token_healing"),
            *("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "is_assistant", "max_time"),
        ),
        Use.DROPPED,
    ),
    **dict.fromkeys(("constraints", "force_words_ids"), Use.REFUSED),
}
"""Option -> what becomes of it (transformers 5.23 and 5.24)."""
_NEUTRAL: Mapping[str, Any] = {
    **{name: None for name, use in OPTIONS.items() if use is Use.DROPPED},
    **dict.fromkeys(("num_beams", "num_beam_groups"), 1),
    **dict.fromkeys(("token_healing", "use_mtp", "is_assistant", "output_attentions", "output_hidden_states"), False),
    # stop strings are looked for in the text (`stop_strings`), which needs no tokenizer in `generate`
    **dict.fromkeys(("max_length", "cache_implementation", "prefill_chunk_size", "stop_strings")),
}
"""Option -> the argument for `generate` with which it has no effect."""


def neutral_arguments(model: StreamedModel) -> dict[str, Any]:
    """Arguments for `generate` that take the effect from options of the checkpoint, for those that are set."""
    return {name: _NEUTRAL[name] for name in _set_options(model) if name in _NEUTRAL}


def stop_strings(model: StreamedModel) -> tuple[str, ...]:
    """The strings that end an answer by the checkpoint's generation config."""
    stops = _set_options(model).get("stop_strings", ())
    return tuple(text for text in ([stops] if isinstance(stops, str) else stops) if text)


def check_options(model: StreamedModel) -> None:
    """Warn of options of the checkpoint that have no effect.

    Raises:
        OptionError: one demands what cannot be had.
    """
    options = _set_options(model)
    refused = [name for name in options if OPTIONS.get(name) is Use.REFUSED]
    if refused:
        names = listed(refused, len(refused), " and ")
        raise OptionError(
            f"The model's generation_config.json sets {names}: words that each answer must have, which need a beam "
            "search that transformers no longer has.",
            "Remove this from the file, if answers without these words are of use.",
        )
    dropped = [name for name in options if OPTIONS.get(name) is Use.DROPPED]
    if dropped:
        logger.warning(
            "The model's generation_config.json sets %s, which has no effect here: answers are made one token after "
            "the other, with one pass for each.",
            listed([f"{name}={options[name]}" for name in dropped], len(dropped), " and "),
        )


def _set_options(model: StreamedModel) -> dict[str, Any]:
    """Option -> value, of those that the checkpoint sets to another value than the neutral one."""
    settings = vars(model.generation_config) if model.can_generate() else {}
    return {
        name: settings[name]
        for name in OPTIONS
        if settings.get(name) is not None and (name not in _NEUTRAL or settings[name] != _NEUTRAL[name])
    }
