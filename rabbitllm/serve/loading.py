"""The model that a server answers with: split unless that is done, loaded, and where its embeddings are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.auto_model import AutoModel
from rabbitllm.model_name import meant
from rabbitllm.options import expand
from rabbitllm.pull.make import Wish, pull
from rabbitllm.serve.embeddings import Recipe, recipe_in
from rabbitllm.split_display import shown


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


def loaded(wish: Wish, *, split: bool, dtype: str | None, show: bool) -> Loaded:
    """Load it.

    Args:
        wish: what, and how.
        split: False for out of the checkpoint's own shards; nothing is written then.
        dtype: to compute in; None for the config's.
        show: show slow passes.

    Raises:
        RabbitLLMError: as `pull` and `AutoModel.from_pretrained` do.
    """
    options: dict[str, Any] = {
        "device": wish.where,
        "max_memory": wish.max_memory,
        "trust_remote_code": wish.trust_remote_code,
        "dtype": dtype,
        "show_layer_progress": show,
    }
    by_name: dict[str, Any] = {
        "compression": wish.compression,
        "layer_shards_saving_path": wish.folder,
        "revision": wish.access.revision,
    }
    if not split:
        with shown():
            model = AutoModel.from_pretrained(wish.name, split=False, **by_name, **options)
        return Loaded(model, None, recipe_in(expand(meant(wish.name))))
    with shown():
        pulled = pull(wish)
    if pulled.config_folder == pulled.entry.folder:
        model = AutoModel.from_pretrained(pulled.entry.folder, **options)
    else:
        model = AutoModel.from_pretrained(wish.name, **by_name, **options)
    places = (pulled.entry.folder, pulled.config_folder, pulled.shards_at)
    recipes = (recipe_in(place) for place in places if place is not None)
    return Loaded(model, (pulled.before, pulled.entry.folder), next(filter(None, recipes), None))


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
