"""The short list of well-known models, from figures in the package; uses no network."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from rabbitllm.checkpoints.config import quantized_as
from rabbitllm.estimate.outline import Outline
from rabbitllm.estimate.outline_families import outline_of

FILE = "models.json"


@dataclass(frozen=True)
class Published:
    """A model on the hub.

    Attributes:
        repository: organisation/name.
        parameters: number of parameters.
        largest_shard_bytes: of its files.
        config: the entries of its config.json that determine shapes.
    """

    repository: str
    parameters: int
    largest_shard_bytes: int
    config: Mapping[str, Any]

    @functools.cached_property
    def outline(self) -> Outline:
        """The outline of its tensors."""
        return outline_of(self.config)

    @property
    def quantized(self) -> str | None:
        """The quantization of its published weights; None for plain ones."""
        return quantized_as(self.config)


@functools.cache
def published() -> tuple[Published, ...]:
    """Return all models of the list, from the smallest to the largest."""
    content = json.loads(resources.files("rabbitllm.estimate.doctor").joinpath(FILE).read_text(encoding="utf-8"))
    return tuple(
        Published(one["repository"], one["parameters"], int(one["largest_shard_gb"] * 1000**3), one["config"])
        for one in content["models"]
    )
