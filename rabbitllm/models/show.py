"""`rabbitllm show`: one model, split or not: its config, its tensors, and its splits.

Combines inspection and split directories. A split model is described from its split directory, without the hub;
any other from its headers, if need be on the hub.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm import prepare
from rabbitllm.base.options import expand
from rabbitllm.base.plain_json import plain as plain_record
from rabbitllm.checkpoints.config import experts_a_token, quantized_as, read_config, text_config
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.checkpoints.index import is_gguf_file
from rabbitllm.errors import InvalidIndexError, RabbitLLMError
from rabbitllm.models.inspection import Inspection, Tensors
from rabbitllm.models.inspection import look as look_inside
from rabbitllm.models.library import WHOLE, SplitEntry, as_record, of_model
from rabbitllm.models.remove import Original, original_of
from rabbitllm.store.locations import resolve_name, spelled_out


@dataclass(frozen=True, slots=True)
class ConfigSummary:
    """A summary of a model; None where its config has no value.

    Attributes:
        architecture: name of the class in transformers.
        family: `model_type`.
        layers: decoder layers.
        hidden_size, heads, key_value_heads, vocabulary: sizes.
        context: limit of positions.
        dtype: of the published weights.
        experts, experts_a_token: of a mixture of experts.
        quantized: quantization method of the published weights.
    """

    architecture: str | None
    family: str | None
    layers: int | None
    hidden_size: int | None
    heads: int | None
    key_value_heads: int | None
    vocabulary: int | None
    context: int | None
    dtype: str | None
    experts: int | None
    experts_a_token: int | None
    quantized: str | None


def config_summary(config: Mapping[str, Any]) -> ConfigSummary:
    """The summary of a `config.json`; a multimodal model has its values in `text_config`."""
    text = text_config(config)

    def first(value_type: type, names: Sequence[str], parts: Sequence[Mapping[str, Any]] = (text, config)) -> Any:
        value = next((part[name] for name in names for part in parts if part.get(name) is not None), None)
        return value if type(value) is value_type else None

    architectures = first(list, ("architectures",), [config])
    return ConfigSummary(
        architecture=architectures[0] if architectures and isinstance(architectures[0], str) else None,
        family=first(str, ("model_type",), [config]),
        dtype=first(str, ("dtype", "torch_dtype")),
        experts_a_token=experts_a_token(config),
        quantized=quantized_as(config),
        **{attribute: first(int, names) for attribute, names in _NUMBERS.items()},
    )


_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "key_value_heads": ("num_key_value_heads",),
    "vocabulary": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}
"""Attribute -> its names in configs."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A model.

    Attributes:
        name: the user's name for it, normalised.
        config: summary of its config; None without a config.
        inside: inspection of its headers; None where part of it is in an unfinished split and the original is gone.
        splits: its split directories with their originals.
    """

    name: str
    config: ConfigSummary | None
    inside: Inspection | None
    splits: tuple[tuple[SplitEntry, Original], ...]

    @property
    def tensors(self) -> Tensors | None:
        """The tensors in its headers."""
        return self.inside.content if self.inside is not None and isinstance(self.inside.content, Tensors) else None


def show(name: str, saving_path: Path | None = None, revision: str | None = None) -> Shown:
    """Look at a model.

    Args:
        name: a folder, a file of weights, a split directory or a repository.
        saving_path: folder of its split directories, if not the usual one.
        revision: of a repository that is not split here.

    Raises:
        RabbitLLMError: nothing of that name exists, or it is malformed.
    """
    plain = resolve_name(name)
    entries = of_model(plain, saving_path=saving_path)
    folder = expand(plain) if expand(plain).is_dir() and not any(e.folder == expand(plain) for e in entries) else None
    splits = tuple((entry, original_of(entry, folder)) for entry in entries)
    whole = [entry for entry in entries if entry.state == WHOLE]
    if whole and revision is None:
        best = next((entry for entry in whole if not entry.legacy), whole[0])
        config = _config_in(best.folder) or _config_in(spelled_out(best.folder).parent)
        return Shown(plain, config, look_inside(best.folder), splits)
    try:
        inside = look_inside(plain, revision=revision)
    except RabbitLLMError:
        if not entries:
            raise
        inside = None
    config = _config_in(entries[0].folder) if entries else None
    return Shown(plain, config or _config_of(plain, revision), inside, splits)


def shown_record(shown: Shown) -> dict[str, Any]:
    """For `json.dumps`; sizes in bytes."""
    tensors, inside = shown.tensors, shown.inside
    return {
        "model": shown.name,
        "config": plain_record(dataclasses.asdict(shown.config)) if shown.config is not None else None,
        "format": inside.format if inside is not None else None,
        "bytes": inside.size if inside is not None else None,
        "files": len(inside.shards) if inside is not None else None,
        "parameters": tensors.parameters if tensors is not None else None,
        "tensors": len(tensors.tensors) if tensors is not None else None,
        "dtypes": dict(tensors.dtypes) if tensors is not None else None,
        "units": list(tensors.layers) if tensors is not None else None,
        "splits": [
            {**as_record(entry), "original_there": original.there, "original": original.where}
            for entry, original in shown.splits
        ],
    }


def _config_in(folder: Path) -> ConfigSummary | None:
    try:
        config = read_config(folder)
        return config_summary(config) if config else None
    except InvalidIndexError:
        return None


def _config_of(name: str, revision: str | None) -> ConfigSummary | None:
    """The config of a source that is not split."""
    if expand(name).is_file() and not is_gguf_file(expand(name)):
        return None
    spec = prepare.ModelSpec(name, access=HubAccess(revision))
    try:
        with prepare.config_folder(prepare.find(spec, only_look=True)) as folder:
            return _config_in(folder)
    except RabbitLLMError:
        return None
