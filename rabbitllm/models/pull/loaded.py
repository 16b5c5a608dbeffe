"""The model of a `Wish`, ready to generate: split first if need be, with its progress, then loaded."""

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
        wish: what, and how.
        console: where it is said that it loads.
        split: False for out of the checkpoint's own shards; nothing is written then.
        profiling: record from the first pass on where the time goes.
        fast_bfloat16: see `AutoModel.from_pretrained`.

    Raises:
        RabbitLLMError: as `pull` and `AutoModel.from_pretrained` do.
    """
    found = pulled(wish) if split else None
    return load(wish, found, console, profiling_mode=profiling, fast_bfloat16=fast_bfloat16)


def pulled(wish: Wish) -> Pulled:
    """Split it unless that is done, with its progress; for this process to load.

    Raises:
        RabbitLLMError: as `pull` does.
    """
    with shown():
        return pull(wish, loads=True)


def load(wish: Wish, found: Pulled | None, console: Console, **more: Any) -> Any:
    """The model, as `AutoModel.from_pretrained` gives it.

    Args:
        wish: what, and how.
        found: its split; None for out of the checkpoint's own shards.
        console: where it is said that it loads.
        **more: for `from_pretrained`.

    Raises:
        RabbitLLMError: as `AutoModel.from_pretrained` does.
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
