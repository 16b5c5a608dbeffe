"""Reads the size of a pass's input from the arguments of a model's forward, for the profiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rabbitllm.telemetry.passes import PassInput

_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
_CACHES = ("past_key_values", "cache_params")


def entry_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[PassInput, Any]:
    """The size of the input, and the KV cache (None without one).

    Args:
        args, kwargs: of a model's forward: ids (batch, length) or embeddings (batch, length, hidden).
    """
    given = next((kwargs[name] for name in _INPUTS if kwargs.get(name) is not None), args[0] if args else None)
    shape = tuple(getattr(given, "shape", ()))
    batch, length = shape[:2] if len(shape) >= 2 else (1, 0)
    cache = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
    asked = kwargs.get("logits_to_keep")
    return PassInput(batch, length, _past(cache), asked if isinstance(asked, int) and asked > 0 else None), cache


def _past(cache: Any) -> int | None:
    tell = getattr(cache, "get_seq_length", None)
    try:
        return int(tell()) if tell is not None else None
    except (ValueError, TypeError, NotImplementedError):  # a state-space model's cache has no length
        return None
