"""The model of a `Wish`, ready to generate: split first if necessary, with a progress display, then loaded."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from rabbitllm.auto_model import AutoModel
from rabbitllm.display.split_display import shown
from rabbitllm.models.pull.make import Pulled, Wish, pull


def loaded_model(
    wish: Wish, console: Console, *, split: bool = True, profiling: bool = False, fast_bfloat16: bool = False
) -> Any:
    """The model, as `AutoModel.from_pretrained` gives it.

    Args:
        wish: the model and the options for loading it.
        console: receives the progress messages.
        split: False to stream from the checkpoint's own shards without writing anything.
        profiling: whether to profile from the first pass on.
        fast_bfloat16: see `AutoModel.from_pretrained`.

    Raises:
        RabbitLLMError: see `pull` and `AutoModel.from_pretrained`.
    """
    found = pulled(wish) if split else None
    return load(wish, found, console, profiling_mode=profiling, fast_bfloat16=fast_bfloat16)


def pulled(wish: Wish) -> Pulled:
    """Split the model unless that is done, with a progress display; this process will load it.

    Raises:
        RabbitLLMError: see `pull`.
    """
    with shown():
        return pull(wish, loads=True)


def load(wish: Wish, found: Pulled | None, console: Console, **more: Any) -> Any:
    """The model, as `AutoModel.from_pretrained` gives it.

    Args:
        wish: the model and the options for loading it.
        found: its split; None to stream from the checkpoint's own shards.
        console: receives the progress messages.
        **more: for `from_pretrained`.

    Raises:
        RabbitLLMError: see `AutoModel.from_pretrained`.
    """
    options: dict[str, Any] = {
        "device": wish.where,
        "max_memory": wish.max_memory,
        "trust_remote_code": wish.trust_remote_code,
        "verify_checksums": wish.verify_checksums,
        "hosts": wish.hosts,
        **more,
    }
    by_name: dict[str, Any] = {
        "compression": wish.compression,
        "layer_shards_saving_path": wish.folder,
        "revision": wish.access.revision,
    }
    if found is None:
        with shown():
            return AutoModel.from_pretrained(wish.name, split=False, **by_name, **options)
    with console.status("loading …"):
        if found.config_folder == found.entry.folder:
            return AutoModel.from_pretrained(found.entry.folder, **options)
        return AutoModel.from_pretrained(wish.name, **by_name, **options)
