"""Requests for a model from the options of a user, as the commands build them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rabbitllm import prepare
from rabbitllm.auto_model import LoadRequest
from rabbitllm.base.options import Hosts, RunOptions, parse_max_memory
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.models.pull import shard_policy

POLICY = ("sequential", "keep_shards", "delete_original")
OF_THE_SPLIT = ("max_disk", "min_free_disk", "shard_transfer", "fit_scales", "verify_source")


def asked(
    name: str | Path,
    compression: str | None = None,
    *,
    folder: Path | None = None,
    access: HubAccess | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    hosts: Hosts | None = None,
    **options: Any,
) -> LoadRequest:
    """The request for a model; `options` are of the shard policy, of the split, and of running it."""
    policy = shard_policy(**{key: options.pop(key) for key in POLICY if key in options})
    of_split = {key: options.pop(key) for key in OF_THE_SPLIT if key in options}
    return LoadRequest(
        prepare.ModelSpec(str(name), compression, folder, access or HubAccess()),
        prepare.split_options(compression, policy, **of_split),
        RunOptions(max_memory=parse_max_memory(max_memory), **options),
        hosts,
    )
