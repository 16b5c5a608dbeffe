"""Unsupported fields: those that would change an answer are refused, not ignored.

A field at its neutral value is accepted, and so are fields that change no answer (`user`, `store`, `metadata`).
Unknown fields are ignored, as OpenAI-compatible servers do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rabbitllm.server.api_error import bad
from rabbitllm.server.schemas import GenerationBody

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (0, -1),
    "min_p": (0,),
    "typical_p": (1,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "structured_outputs": (),
    "grammar": ("",),
    "json_schema": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"], []),
    "audio": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "prediction": (),
}
"""Field -> values at which it has no effect; None counts for every field."""


def refuse_unsupported(body: GenerationBody) -> None:
    """
    Raises:
        APIError: a field is set that would change the answer and is not supported.
    """
    for name, value in (body.model_extra or {}).items():
        if name not in NEUTRAL or value is None:
            continue
        if not any(_same(neutral, value) for neutral in NEUTRAL[name]):
            what = f"; expected {' or '.join(map(repr, NEUTRAL[name]))}, or none of it" if NEUTRAL[name] else ""
            raise bad(f"{name} is not supported here{what}.", name, "unsupported_parameter")


def _same(neutral: Any, value: Any) -> bool:
    if isinstance(neutral, bool) or isinstance(value, bool):
        return neutral is value
    return bool(neutral == value)
