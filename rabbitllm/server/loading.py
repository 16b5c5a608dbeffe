"""The model of a server: split if necessary, loaded, with the recipe for its embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rabbitllm.auto_model import LoadRequest
from rabbitllm.base.options import RunOptions, expand
from rabbitllm.engine.devices import default_budget, resolve_devices
from rabbitllm.generation.memory import left_to_requests
from rabbitllm.models.pull import load, pulled
from rabbitllm.server.embeddings import PoolingRecipe, recipe_in
from rabbitllm.store.locations import meant


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model.

    Attributes:
        model: a model from `AutoModel.from_pretrained`.
        split: whether the split existed already, and its folder; None without a split.
        recipe: how embeddings are computed; None where the checkpoint does not say.
    """

    model: Any
    split: tuple[bool, Path] | None
    recipe: PoolingRecipe | None


def loaded(request: LoadRequest, console: Console, cache_bytes: int | None = None) -> ServedModel:
    """Load the model, and split it first if necessary.

    Args:
        request: the model, its split and its run.
        console: receives the progress messages.
        cache_bytes: limit of the KV cache; None for the default.

    Raises:
        RabbitLLMError: see `pull` and `AutoModel.from_pretrained`.
    """
    found = pulled(request)
    run = replace(request.run, max_memory=with_room(request.run, cache_bytes))
    model = load(replace(request, run=run), found, console)
    if found is None:
        return ServedModel(model, None, recipe_in(expand(meant(request.spec.name))))
    places = (found.entry.folder, found.config_folder, found.shards_at)
    recipes = (recipe_in(place) for place in places if place is not None)
    return ServedModel(model, (found.before, found.entry.folder), next(filter(None, recipes), None))


def with_room(run: RunOptions, cache_bytes: int | None, pass_bytes: int = 0) -> Mapping[str, int] | None:
    """The memory limit of the weights, which leaves room for requests: the caller's own limit, else a reduced default.

    On GPUs a margin is always left, so the limit is lower only where the size of the KV cache is given.

    Args:
        run: options for running the model.
        cache_bytes: see `loaded`; divided equally among several GPUs, as layers are.
        pass_bytes: see `left_to_requests`.
    """
    if run.max_memory is not None:
        return run.max_memory
    devices = resolve_devices(run.device, None)
    on_host = all(device.shares_host_memory for device in devices)
    if cache_bytes is None and not on_host:
        return None
    share = None if cache_bytes is None else cache_bytes // len(devices)
    left = {
        one.name: left_to_requests(one.free_bytes(), share, pass_bytes) if on_host or share is None else share
        for one in devices
    }
    return {one.name: max(default_budget(one) - left[one.name], 0) for one in devices}


def served_name(name: str) -> str:
    """The model name in requests: the id of a repository, or the last part of a folder's path.

    Args:
        name: the name as the user wrote it.
    """
    found = meant(name)
    path = expand(found)
    if not path.is_dir():
        return found
    path = path.resolve()
    while path.name.startswith("splitted_model") and path.parent.name:
        path = path.parent
    return path.name or "model"
