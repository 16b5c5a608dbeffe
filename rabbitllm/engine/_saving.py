"""`model.save_pretrained`: writes the whole model as a checkpoint, from the files of its weights.

A streamed model has few of its weights in memory, so they are not read from its modules: each stored tensor is copied
from its file to its shard, under the checkpoint's name, a chunk at a time. Resident weights in stored form are written
from memory, with the caller's changes; changes of other weights are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rabbitllm.base.options import parse_size
from rabbitllm.base.terminal import listed
from rabbitllm.engine._processor import FILES
from rabbitllm.engine._weights import Recipe, WeightMap, wrapper_of
from rabbitllm.engine.placement import READY, enclosing
from rabbitllm.engine.span_reader import compare
from rabbitllm.engine.weight_tensors import AbsentWeight
from rabbitllm.errors import OptionError, RabbitLLMError, system_errors_by_name
from rabbitllm.formats.bounded import read_json
from rabbitllm.formats.tensor_spec import TensorSpec, dtype_name, torch_dtype
from rabbitllm.storage.durable import ScratchFolder
from rabbitllm.store.checkpoint_folder import PlainReader, PlainTensor, in_memory, plain, plan_shards, write_checkpoint
from rabbitllm.store.layer_store import LayerStore, WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
_WITHOUT_EFFECT = frozenset({"token", "safe_serialization", "save_peft_format"})
_REFUSED: Mapping[str, tuple[Any, str]] = {
    "state_dict": (None, "the weights come from the model's own files"),
    "push_to_hub": (False, "save into a folder, and upload that with `hf upload`"),
    "variant": (None, "rename the files afterwards"),
    "save_original_format": (True, "the names are always the checkpoint's"),
    "distributed_checkpoint": (False, "a streamed model is on one machine"),
}
"""Arguments of transformers that would change the files: the only accepted value, and an alternative."""


@dataclass(frozen=True)
class Origin:
    """The source of a model's weights and config, as needed to save it.

    Attributes:
        store: the files of its weights.
        home: the folder of its config.
        dtypes: stored name -> dtype in which the model computes with it.
        config, generation: as they were when the model was loaded, as dicts.
        names: of all parameters.
        absent: those of them that are not in memory.
        resident: resident parameter -> its recipe, and its target in that recipe.
    """

    store: WeightFiles
    home: Path
    dtypes: Mapping[str, torch.dtype]
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    names: frozenset[str] = field(repr=False)
    absent: frozenset[str] = field(repr=False)
    resident: Mapping[str, tuple[Recipe, str]] = field(repr=False)


def origin_of(
    model: PreTrainedModel, store: WeightFiles, home: Path, weights: WeightMap, *, changes_itself: bool = False
) -> Origin:
    """Record the source of a model: after all of it is bound, and before it can be changed.

    Args:
        model: a `StreamedModel`, with its placement.
        store: the files of its weights.
        home: the folder of its config.
        weights: the recipes of the parameters.
        changes_itself: whether its own forward writes to its weights; such a change is not the caller's.
    """
    dtypes = {name: recipe.dtype for recipe in weights.recipes.values() for _, name in recipe.sources if recipe.dtype}
    placed = [] if changes_itself else [*model.placement.units, *model.placement.experts]
    tiers = {p.unit: p.tier for p in placed}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names, resident = frozenset(parameters), {}
    absent = frozenset(name for name, parameter in parameters.items() if isinstance(parameter, AbsentWeight))
    for name in names:
        made = weights.recipe(name)
        if made is not None and not made[0].wraps and tiers.get(enclosing(name, tiers) or "") in READY:
            resident[name] = made
    generation = model.generation_config.to_dict() if model.can_generate() else {}
    return Origin(store, home, dtypes, model.config.to_dict(), generation, names, absent, resident)


def compare_resident(origin: Origin) -> None:
    """Compare the stored parts of resident parameters with their checksums, as far as that has not been done.

    Raises:
        IncompleteSplitError: a checksum differs.
    """
    checks, tensors = origin.store.checks, origin.store.tensors
    if checks is not None:
        names = {name for recipe, _ in origin.resident.values() for _, name in recipe.sources}
        compare(checks, (part for name in sorted(names) for part in tensors[name].parts))


def save(
    model: PreTrainedModel,
    origin: Origin,
    folder: Path,
    *,
    max_shard_size: int | str,
    tokenizer: bool,
    show_progress: bool,
    **options: Any,
) -> None:
    """Write the whole model; see `StreamedModel.save_pretrained`."""
    _check_arguments(options)
    shard_bytes = parse_size(max_shard_size, "max_shard_size")
    with PlainReader(origin.store) as reader:
        memory = _changeable(model, origin, reader)
    tensors = {tensor.placed.name: tensor for tensor in _saved_tensors(model, origin, memory)}
    shards = plan_shards((tensor.placed for tensor in tensors.values()), shard_bytes)
    sidecars = _sidecars(model, origin, tokenizer)
    from transformers import logging

    total = sum(tensor.placed.nbytes for tensor in tensors.values())
    bar: Any = logging.tqdm(
        total=total, unit="B", unit_scale=True, desc="Writing model shards", disable=not show_progress or None
    )
    with system_errors_by_name(), bar, PlainReader(origin.store) as reader:
        write_checkpoint(
            folder,
            shards,
            sidecars,
            lambda name: reader.chunks(tensors[name]),
            source=_identity(origin.store),
            tell=bar.update,
        )


def _check_arguments(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name in _REFUSED:
            accepted, instead = _REFUSED[name]
            if value is not accepted and value != accepted:
                raise OptionError(f"save_pretrained({name}={value!r}) is not possible here.", f"Instead: {instead}.")
        elif name not in _WITHOUT_EFFECT:
            raise TypeError(f"save_pretrained() got an unexpected keyword argument {name!r}")


def _changeable(model: PreTrainedModel, origin: Origin, reader: PlainReader) -> dict[str, torch.Tensor]:
    """Stored name -> its parameter, of parameters that are in memory in stored form.

    Raises:
        RabbitLLMError: parameters were added or removed; or one that is not in stored form was changed.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    replaced = {name for name in origin.absent & parameters.keys() if not isinstance(parameters[name], AbsentWeight)}
    changed = sorted((parameters.keys() ^ origin.names) | replaced)
    stored_parameters: dict[str, torch.Tensor] = {}
    for name, (recipe, target) in origin.resident.items():
        if name not in parameters:
            continue
        parameter, source = parameters[name].detach(), recipe.sources[0][1]
        stored = origin.store.tensors[source]
        earlier = stored_parameters.get(source)
        if earlier is not None:
            is_unchanged = earlier.data_ptr() == parameter.data_ptr() or torch.equal(earlier, parameter)
        elif recipe.converter is None and stored.quantized is None and _as_stored(parameter, stored.parts[0]):
            stored_parameters[source], is_unchanged = parameter, True
        else:
            fresh = recipe.make(model, lambda stored_name, dtype: reader.read(origin.store.tensors[stored_name], dtype))
            is_unchanged = _same_bits(fresh[target], parameter)
        if not is_unchanged:
            changed.append(name)
    if changed:
        raise RabbitLLMError(
            f"The model was changed since it was loaded ({listed(changed, 3)}), and save_pretrained writes the stored "
            "weights. Nothing was written.",
            "Save an adapter with save_pretrained of its PeftModel, and unload it before you save the model. For other "
            "changes use transformers' own model, if it fits into memory.",
        )
    return stored_parameters


def _as_stored(parameter: torch.Tensor, part: TensorSpec) -> bool:
    return tuple(parameter.shape) == part.shape and parameter.dtype == torch_dtype(part.dtype)


def _same_bits(fresh: torch.Tensor, parameter: torch.Tensor) -> bool:
    current = parameter.cpu()
    if fresh.dtype != current.dtype or fresh.shape != current.shape:
        return False
    return torch.equal(fresh.contiguous().view(-1).view(torch.uint8), current.contiguous().view(-1).view(torch.uint8))


def _saved_tensors(model: PreTrainedModel, origin: Origin, memory: Mapping[str, torch.Tensor]) -> list[PlainTensor]:
    """Every stored tensor, in the order of the files."""
    tensors = []
    for name, stored in origin.store.tensors.items():
        if name in memory:
            tensors.append(in_memory(stored, memory[name]))
        else:
            tensors.append(plain(stored, dtype_name(origin.dtypes.get(name, model.dtype))))
    if begin := len(wrapper_of(origin.store.tensors, model.state_dict())):  # transformers knows no such prefix
        tensors = [replace(t, placed=t.placed._replace(name=t.placed.name[begin:])) for t in tensors]
    files = {tensor.stored.parts[0].file: None for tensor in tensors}
    order = {file: index for index, file in enumerate(files)}
    return sorted(tensors, key=lambda tensor: (order[tensor.stored.parts[0].file], tensor.stored.parts[0].offset))


def _sidecars(model: PreTrainedModel, origin: Origin, tokenizer: bool) -> dict[str, bytes]:
    """Config, generation config and, if wanted, the tokenizer and the processor's files: name -> content."""
    contents = {CONFIG_NAME: _config(model, origin)}
    if model.can_generate():
        contents[GENERATION_NAME] = _generation(model, origin)
    if "auto_map" in read_json(origin.home / CONFIG_NAME):  # the model has its own code
        contents |= {path.name: path.read_bytes() for path in sorted(origin.home.glob("*.py"))}
    if tokenizer:
        if model.tokenizer is None:
            raise OptionError(
                f"The model has no tokenizer: none could be read from {origin.home}.", "Remove tokenizer=True."
            )
        with ScratchFolder() as scratch:
            model.tokenizer.save_pretrained(scratch)
            files = [path for path in sorted(scratch.rglob("*")) if path.is_file()]
            contents |= {path.relative_to(scratch).as_posix(): path.read_bytes() for path in files}
        contents |= {name: (origin.home / name).read_bytes() for name in FILES if (origin.home / name).is_file()}
    return contents


def _config(model: PreTrainedModel, origin: Origin) -> bytes:
    """The checkpoint's own config, with the caller's changes, and the dtype of dequantized weights."""
    content = read_json(origin.home / CONFIG_NAME)
    changed = _changed_settings(origin.config, model.config.to_dict())
    if any(stored.quantized for stored in origin.store.tensors.values()):
        key = "torch_dtype" if "torch_dtype" in content and "dtype" not in content else "dtype"
        changed[key] = str(model.dtype).removeprefix("torch.")
    elif origin.store.dtype is not None and not (content.get("dtype") or content.get("torch_dtype")):
        # the tensors get another order
        changed["dtype"] = origin.store.dtype
    if not changed:
        return (origin.home / CONFIG_NAME).read_bytes()
    return (json.dumps({**content, **changed}, indent=2, sort_keys=True, default=str) + "\n").encode()


def _generation(model: PreTrainedModel, origin: Origin) -> bytes:
    file = origin.home / GENERATION_NAME
    if file.is_file() and not _changed_settings(origin.generation, model.generation_config.to_dict()):
        return file.read_bytes()
    text: str = model.generation_config.to_json_string()
    return text.encode()


def _changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in after.items() if key not in before or before[key] != value}


def _identity(store: WeightFiles) -> str:
    """A text that differs for other weights of the same names and shapes."""
    manifest = store.manifest if isinstance(store, LayerStore) else None
    if manifest is not None:
        return json.dumps([manifest.compression, [[layer.file, layer.crc32] for layer in manifest.layers]])
    files = sorted({stored.parts[0].file for stored in store.tensors.values()})
    stats = [(file, store.path(file).stat()) for file in files]
    return json.dumps([str(store.folder.resolve()), [(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats]])
