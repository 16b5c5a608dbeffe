"""The model of a batch job, loaded so that its weights leave room for as many lines as possible.

Streamed weights cost their time once per pass, however many lines share the pass. So, while lines wait, memory for
one more line is worth more than the same memory for weights. The KV cache gets the memory that the longest lines need
together, up to half of the free memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rabbitllm.auto_model import LoadRequest
from rabbitllm.batch_jobs.input_scan import InputScan
from rabbitllm.batch_jobs.order import CHARACTERS_OF_A_TOKEN, GENERATIONS
from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.engine.devices import resolve_devices
from rabbitllm.engine.skeleton import read_config
from rabbitllm.generation.kv_cache import cost_by_config
from rabbitllm.generation.memory import cost_of_a_pass, free_memory
from rabbitllm.models.pull import load, pulled
from rabbitllm.server.loading import with_room

SPARE_TOKENS = 256
"""Allowance for the chat template of a line, and more."""
CACHE_SHARE = 2
"""The KV cache gets at most one part in this many of the free memory, if no size is given. Lines that need more do
not raise this limit, and the memory of a pass does not lower it."""
MAX_PASS_SHARE = 4
"""A pass computes in at most one part in this many of the free memory."""


@dataclass(frozen=True, slots=True)
class BatchModel:
    """A loaded model.

    Attributes:
        model: a model from `AutoModel.from_pretrained`.
        cache_bytes: limit of the KV cache; None if it could not be predicted before the model was loaded.
        folder: the split directory; None without one.
        weights: digest of their source; None where it is not recorded.
    """

    model: Any
    cache_bytes: int | None
    folder: Path | None
    weights: str | None = None


def loaded(
    request: LoadRequest, console: Console, survey: InputScan, sequences: int, cache_bytes: int | None = None
) -> BatchModel:
    """Load the model.

    Args:
        request: the model, its split and its run.
        console: receives the progress messages.
        survey: the scan of the input.
        sequences: limit of lines answered at a time.
        cache_bytes: limit of the KV cache; None for the need of the lines, up to half of the free memory.

    Raises:
        RabbitLLMError: see `pull` and `AutoModel.from_pretrained`.
    """
    run, found = request.run, pulled(request)
    is_said = cache_bytes is not None
    pass_bytes = 0
    if found is not None and run.max_memory is None:
        lengths = [length for length, kind in zip(survey.lengths, survey.kinds, strict=True) if kind == GENERATIONS]
        free = sum(device.free_bytes() for device in resolve_devices(run.device, None))
        config = read_config(found.config_folder, run.trust_remote_code)
        if cache_bytes is None:
            cache_bytes = min(needed_bytes(config, lengths, sequences, run.dtype), free // CACHE_SHARE) or None
        pass_bytes = min(good_pass_bytes(config, min(len(lengths), sequences), run.dtype), free // MAX_PASS_SHARE)
    run = replace(run, max_memory=with_room(run, cache_bytes, pass_bytes), show_progress=False)
    model = load(replace(request, run=run), found, console)
    if cache_bytes is not None and not is_said:  # less may be free now than was predicted
        cache_bytes = left_of(free_memory(model), cache_bytes, pass_bytes)
    if found is None:
        return BatchModel(model, cache_bytes, None)
    return BatchModel(model, cache_bytes, found.entry.folder, digest_of(found.entry.source))


def left_of(free: int, cache_bytes: int, pass_bytes: int) -> int:
    """Bytes of the KV cache, once the weights are loaded, if the user gave no size.

    Args:
        free: free memory in bytes.
        cache_bytes: predicted size of the KV cache.
        pass_bytes: working memory of a pass; the KV cache may take half of the free memory even so.
    """
    return min(cache_bytes, max(free - pass_bytes, free // CACHE_SHARE))


def digest_of(source: SourceIdentity | None) -> str | None:
    """A digest that identifies weights: of the fingerprints of their source shards."""
    if source is None:
        return None
    said = json.dumps(sorted(source.fingerprints.items()))
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def needed_bytes(config: Any, lengths: Sequence[int], sequences: int, dtype: str | None = None) -> int:
    """Bytes of the KV caches of the longest lines, all at the same time.

    Args:
        config: the model's config.
        lengths: estimated tokens of each line.
        sequences: limit of lines at a time.
        dtype: the dtype to compute in; None for the config's.
    """
    text = config.get_text_config(decoder=True)
    most = getattr(text, "max_position_embeddings", None)
    cost = cost_by_config(text, _dtype_of(config, dtype))
    longest = sorted(lengths, reverse=True)[:sequences]
    if not longest:
        return 0
    # the longest one has to fit alone, even where a character is a token
    longest.append(CHARACTERS_OF_A_TOKEN * longest[0] + SPARE_TOKENS)
    return sum(cost.bytes_for(min(length, most) if isinstance(most, int) else length) for length in longest)


def good_pass_bytes(config: Any, texts: int, dtype: str | None = None) -> int:
    """Bytes, without the KV cache, for a pass with enough tokens to be worth reading the weights.

    Args:
        config: the model's config.
        texts: limit of lines answered at a time.
        dtype: the dtype to compute in; None for the config's.
    """
    return cost_of_a_pass(config.get_text_config(decoder=True), _dtype_of(config, dtype).itemsize).good(texts)


def _dtype_of(config: Any, dtype: str | None) -> Any:
    import torch

    return getattr(torch, dtype) if dtype is not None else getattr(config, "dtype", None) or torch.bfloat16
