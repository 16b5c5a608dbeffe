"""The model that a server answers with: split unless that is done, loaded, and where its embeddings are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from rabbitllm.model_name import meant
from rabbitllm.options import expand
from rabbitllm.pull.loaded import load, pulled
from rabbitllm.pull.make import Wish
from rabbitllm.serve.embeddings import Recipe, recipe_in


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready.

    Attributes:
        model: as `AutoModel.from_pretrained` returns it.
        split: whether the split was there already, and where it is; None without one.
        recipe: how embeddings are made; None where the checkpoint does not say.
    """

    model: Any
    split: tuple[bool, Path] | None
    recipe: Recipe | None


def loaded(wish: Wish, console: Console, *, split: bool, dtype: str | None) -> Loaded:
    """Load it.

    Args:
        wish: what, and how.
        console: where it is said that it loads.
        split: False for out of the checkpoint's own shards; nothing is written then.
        dtype: to compute in; None for the config's.

    Raises:
        RabbitLLMError: as `pull` and `AutoModel.from_pretrained` do.
    """
    found = pulled(wish) if split else None
    model = load(wish, found, console, dtype=dtype)
    if found is None:
        return Loaded(model, None, recipe_in(expand(meant(wish.name))))
    places = (found.entry.folder, found.config_folder, found.shards_at)
    recipes = (recipe_in(place) for place in places if place is not None)
    return Loaded(model, (found.before, found.entry.folder), next(filter(None, recipes), None))


def served_name(name: str) -> str:
    """A model as requests name it: a repository by its id, a folder by its last part.

    Args:
        name: as the user wrote it.
    """
    found = meant(name)
    path = expand(found)
    if not path.is_dir():
        return found
    path = path.resolve()
    while path.name.startswith("splitted_model") and path.parent.name:
        path = path.parent
    return path.name or "model"
