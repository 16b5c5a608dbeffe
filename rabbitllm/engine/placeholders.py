"""Placeholders: the tokens of a prompt whose places pictures, videos and sounds take.

transformers compares their number with that of the vectors for them, whose message differs by family. Some families
compute positions before that, and fail there. Here both errors say how many placeholders there are and are needed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
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
    found, features, width = int(match[2]), int(match[3]), _width(config)
    # some families count the numbers in the vectors instead of the vectors
    counts = [features, features // width] if width and features % width == 0 else [features]
    return _mismatch(match[1].lower(), found, min(counts, key=lambda count: abs(count - found)))


def _mismatch(kind: str, found: int, needed: int) -> MediaError:
    return MediaError(f"The prompt has {found} placeholders for {_KINDS[kind]}, which need {needed}.", _REMEDY)


def _width(config: PretrainedConfig) -> int:
    found = getattr(config.get_text_config(), "hidden_size", None)
    return found if isinstance(found, int) else 0


def explained_by_grids(config: PretrainedConfig, ids: torch.Tensor, given: Mapping[str, Any]) -> MediaError | None:
    """The same, by the numbers of patches that were given with a prompt; None if they match or were not given.

    Args:
        config: of the model.
        ids: of the prompt, (batch, tokens).
        given: the other arguments of the call.
    """
    merged = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
    for kind in ("image", "video"):
        grid, tokens = given.get(f"{kind}_grid_thw"), [*_tokens(config, kind)]
        if isinstance(grid, torch.Tensor) and tokens and isinstance(merged, int):
            found, needed = _count(ids, tokens), int(grid.prod(-1).sum()) // merged**2
            if found != needed:
                return _mismatch(kind, found, needed)
    return None


def warn_of_empty(config: PretrainedConfig, ids: torch.Tensor, given: Mapping[str, Any]) -> None:
    """Log a warning for a prompt that has placeholders and comes without pictures or sounds.

    Args:
        config: of the model.
        ids: of the prompt, (batch, tokens).
        given: the other arguments of the call. A cache that is not empty has what came with the tokens in it.
    """
    cache = given.get("cache") or given.get("past_key_values")
    if given.get("mm_encoder_outputs") or (cache is not None and cache.get_seq_length()):
        return
    if any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in given.values()):
        return
    for kind, name in _KINDS.items():
        if (found := _count(ids, [*_tokens(config, kind)])) > 0:
            logger.warning(
                "The prompt has %d placeholders for %s, and none were passed: the model reads them as words. %s",
                found,
                name,
                _REMEDY,
            )


def _tokens(config: PretrainedConfig, kind: str) -> Iterator[int]:
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        found = getattr(config, name, None)
        if isinstance(found, int) and found >= 0:
            yield found


def _count(ids: torch.Tensor, tokens: list[int]) -> int:
    return int(sum((ids == token).sum() for token in set(tokens)))
