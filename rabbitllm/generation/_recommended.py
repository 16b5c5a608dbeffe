"""A checkpoint's generation config: the tokens that end a text, and which options of transformers' have no effect.

Both executors make one sequence from one prompt, one token after the other, and a batch may begin again after the
tokens so far. An option that changes the scores of tokens is honoured. One that needs another loop, or another prompt,
is dropped, and a warning says so. `tests/generation/test_recommended.py` says of every option (transformers 5.23 and
5.24) what becomes of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rabbitllm.base.terminal import listed
from rabbitllm.errors import OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rabbitllm.engine.streamed_model import StreamedModel

logger = logging.getLogger(__name__)


DROPPED = (
    *("num_beams", "num_beam_groups", "penalty_alpha", "dola_layers", "guidance_scale", "token_healing"),
    *("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "is_assistant", "max_time"),
)
"""Options that have no effect here, which a warning says."""
REFUSED = ("constraints", "force_words_ids")
"""Options without which answers would not be what the checkpoint demands, so that the model is refused."""
_NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(DROPPED),
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


def tokenizer_of(model: StreamedModel) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        OptionError: the model has no tokenizer, or none that could be read.
    """
    if model.tokenizer is None:
        raise OptionError(
            "This model has no tokenizer, so text cannot be tokenized.",
            f"Put its tokenizer files into {model.name_or_path}, where its config.json is.",
        )
    return model.tokenizer


def end_tokens(model: StreamedModel, *, ignored: bool | None = False) -> list[int]:
    """The tokens that end a text: those of the model's generation config and of its tokenizer; none if ignored.

    A stop string of the generation config that is one token, such as a special one, which no text shows, is among them.

    Raises:
        OptionError: see `tokenizer_of`.
    """
    if ignored:
        return []
    configured = model.generation_config.eos_token_id if model.can_generate() else None
    ends = [] if configured is None else [configured] if isinstance(configured, int) else [*configured]
    tokenizer = tokenizer_of(model)
    eos, added = tokenizer.eos_token_id, tokenizer.get_added_vocab()
    stops = [added[text] for text in stop_strings(model) if text in added]
    return list(dict.fromkeys([*ends, *([eos] if eos is not None else []), *stops]))


def check_options(model: StreamedModel) -> None:
    """Warn of options of the checkpoint that have no effect.

    Raises:
        OptionError: one demands what cannot be had.
    """
    options = _set_options(model)
    refused = [name for name in REFUSED if name in options]
    if refused:
        names = listed(refused, len(refused), " and ")
        raise OptionError(
            f"The model's generation_config.json sets {names}: words that each answer must have, which need a beam "
            "search that transformers no longer has.",
            "Remove this from the file, if answers without these words are of use.",
        )
    dropped = [f"{name}={options[name]}" for name in DROPPED if name in options]
    if dropped:
        logger.warning(
            "The model's generation_config.json sets %s, which has no effect here: answers are made one token after "
            "the other, with one pass for each.",
            listed(dropped, len(dropped), " and "),
        )


def _set_options(model: StreamedModel) -> dict[str, Any]:
    """Option -> value, of those above that the checkpoint sets to another value than the neutral one."""
    settings = vars(model.generation_config) if model.can_generate() else {}
    neutral = {**_NEUTRAL, **dict.fromkeys(REFUSED)}
    return {name: settings[name] for name, value in neutral.items() if settings.get(name) not in (None, value)}
