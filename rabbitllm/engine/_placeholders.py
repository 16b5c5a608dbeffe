"""Placeholders: the tokens of a prompt whose places pictures, videos and sounds take.

transformers compares their number with that of the vectors for them, whose message differs by family. Some families
compute positions before that, and fail there. Here both errors say how many placeholders there are and are needed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from rabbitllm.errors import MediaError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

_KINDS = {"image": "pictures", "video": "videos", "audio": "sounds"}
_MISMATCH = re.compile(
    r"(image|video|audio) features and \w+ tokens do not match,? tokens: (\d+), features:? (\d+)", re.I
)
"""transformers' message."""
_REMEDY = "Pass all that model.processor returns for the prompt, unchanged: each placeholder stands for a part of them."


def explained(error: Exception, config: PretrainedConfig) -> MediaError | None:
    """The error for a prompt whose placeholders are not as many as its pictures or sounds need; None for other errors.

    Args:
        error: of a forward.
        config: of the model.
    """
    match = _MISMATCH.search(str(error))
    if match is None or isinstance(error, MediaError):
        return None
    placeholders, features = int(match[2]), int(match[3])
    width = getattr(config.get_text_config(), "hidden_size", None)
    # some families count the numbers in the vectors instead of the vectors
    counts = [features, features // width] if isinstance(width, int) and width and features % width == 0 else [features]
    return _mismatch(match[1].lower(), placeholders, min(counts, key=lambda count: abs(count - placeholders)))


def _mismatch(modality: str, count: int, needed: int) -> MediaError:
    return MediaError(f"The prompt has {count} placeholders for {_KINDS[modality]}, which need {needed}.", _REMEDY)


def explained_by_grids(config: PretrainedConfig, ids: torch.Tensor, arguments: Mapping[str, Any]) -> MediaError | None:
    """The same, by the numbers of patches that were given with a prompt; None if they match or were not given.

    Args:
        config: of the model.
        ids: of the prompt, (batch, tokens).
        arguments: the other ones of the call.
    """
    merged = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
    for modality in ("image", "video"):
        grid, placeholders = arguments.get(f"{modality}_grid_thw"), _count(config, modality, ids)
        if isinstance(grid, torch.Tensor) and placeholders is not None and isinstance(merged, int):
            needed = int(grid.prod(-1).sum()) // merged**2
            if placeholders != needed:
                return _mismatch(modality, placeholders, needed)
    return None


def warn_of_empty(config: PretrainedConfig, ids: torch.Tensor, arguments: Mapping[str, Any]) -> None:
    """Log a warning for a prompt that has placeholders and comes without pictures or sounds.

    Args:
        config: of the model.
        ids: of the prompt, (batch, tokens).
        arguments: the other ones of the call. A cache that is not empty has what came with the tokens in it.
    """
    cache = arguments.get("cache") or arguments.get("past_key_values")
    if arguments.get("mm_encoder_outputs") or (cache is not None and cache.get_seq_length()):
        return
    if any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in arguments.values()):
        return
    for modality, name in _KINDS.items():
        if placeholders := _count(config, modality, ids):
            logger.warning(
                "The prompt has %d placeholders for %s, and none were passed: the model reads them as words. %s",
                placeholders,
                name,
                _REMEDY,
            )


def _count(config: PretrainedConfig, modality: str, ids: torch.Tensor) -> int | None:
    """The number of placeholders among token ids; None if the config does not name their token."""
    named = (getattr(config, f"{modality}_token_{ending}", None) for ending in ("id", "index"))
    tokens = {token_id for token_id in named if isinstance(token_id, int) and token_id >= 0}
    return int(sum((ids == token).sum() for token in tokens)) if tokens else None
