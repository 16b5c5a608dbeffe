"""Makes the parameters of a model's modules from stored tensors, by transformers' conversion rules.

A checkpoint's names differ from the modules' names: keys are renamed, and some models fuse tensors (the experts of
Qwen3-MoE are 2 x 128 tensors in the checkpoint and 2 parameters in the module). These rules are in transformers'
`conversion_mapping.py`. This module applies them once to map stored tensors to parameters, and later makes these. It
follows `convert_and_load_state_dict_in_model`, also in the order: cast first, then convert.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rabbitllm.base.terminal import listed
from rabbitllm.checkpoints.config import predicts_more
from rabbitllm.checkpoints.naming import WRAPPER
from rabbitllm.engine import _published
from rabbitllm.errors import IncompleteSplitError
from rabbitllm.formats.tensor_spec import torch_dtype
from rabbitllm.store.layer_store import StoredTensor

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from rabbitllm.engine.transformers_api import HfQuantizer, WeightTransform
    from rabbitllm.store.layer_store import WeightFiles


# transformers' renaming of a checkpoint's keys, for checkpoints with tens of thousands of them.
#
# The result equals that of transformers' own functions, which take about 40 microseconds for each key. Only checkpoints
# with experts have that many keys, which differ in the expert's index: the result for two experts is used for all.

_EXPERT = re.compile(r"(.*?\bexperts\.)[0-9]+(\..+)")

Renamed = tuple[str, str | None]
"""The name in the model, and the source pattern of its converter, None without one."""


class KeyRenaming:
    """Maps a checkpoint's keys to names in a model."""

    def __init__(
        self, renamings: list[Any], converters: list[Any], prefix: str, expected: Mapping[str, torch.Tensor]
    ) -> None:
        self._transforms = renamings, converters
        self._prefix = prefix
        self._expected = expected
        self._experts: dict[tuple[str, str], list[Renamed]] = {}

    def __call__(self, name: str) -> Renamed:
        """The name of a key in the model; the model may not have that name."""
        from rabbitllm.engine.transformers_api import rename_source_key

        match = _EXPERT.fullmatch(name)
        # if one expert had another target, too few would be left for their parameter, which is refused
        last_two = self._experts.setdefault(match.groups(), []) if match is not None else []  # type: ignore[arg-type]
        if len(last_two) == 2 and last_two[0] == last_two[1]:
            return last_two[0]
        target, pattern = rename_source_key(name, *self._transforms, self._prefix, self._expected)
        if target not in self._expected and name in self._expected:  # not renamed, but it may need the prefix
            target, pattern = rename_source_key(name, [], [], self._prefix, self._expected)
        last_two[:] = [*last_two, (target, pattern)][-2:]
        return target, pattern


_DIFFERENT = "The config and the weights belong to different models: check the source of each."


@dataclass(frozen=True)
class Recipe:
    """The conversion of stored tensors into one or more targets.

    Attributes:
        key: the target that identifies the recipe (the first one).
        targets: the full names of all targets.
        sources: (pattern, stored name), in the order that the conversion needs.
        converter: transformers' operation; None if the one source is the one target.
        dtype: floating sources are cast to it before the conversion; None if it takes them in their stored dtype.
        wraps: whether the converter's result is a view of the stored bytes, with their scales.
    """

    key: str
    targets: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]
    converter: WeightTransform | None
    dtype: torch.dtype | None
    wraps: bool = False

    def make(
        self, model: PreTrainedModel, read: Callable[[str, torch.dtype | None], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The targets' tensors.

        Args:
            model: the skeleton; some conversions use its config.
            read: stored name and dtype -> the checkpoint tensor; a floating one in that dtype, unless it is None.
        """
        if self.converter is None:
            return {self.key: read(self.sources[0][1], self.dtype)}
        operation: Any = copy.copy(self.converter)  # its operations, which keep no tensors, are shared
        operation.collected_tensors, operation.layer_targets = defaultdict(list), defaultdict(set)
        for pattern, name in self.sources:
            operation.add_tensor(self.key, name, pattern, lambda name=name: read(name, self.dtype))
        tensors = operation.convert(self.key, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class WeightMap:
    """The recipes of a model's parameters.

    Attributes:
        recipes: target name -> the recipe that makes it.
        ties: target name -> the target whose tensor it shares.
        absent: targets that the checkpoint lacks, as the model class allows.
        unused: stored tensors that the model class does not use.
        casts: see `map_weights`.
    """

    recipes: Mapping[str, Recipe]
    ties: Mapping[str, str]
    absent: frozenset[str]
    unused: tuple[str, ...]
    casts: bool

    def recipe(self, target: str) -> tuple[Recipe, str] | None:
        """The recipe of a target, or of its tie, and its name there; None if it is absent."""
        owner = target if target in self.recipes else self.ties.get(target)
        return None if owner is None else (self.recipes[owner], owner)


def map_weights(
    model: PreTrainedModel,
    stored: Mapping[str, StoredTensor],
    where: str,
    quantizer: HfQuantizer | None = None,
    *,
    casts: bool = False,
) -> WeightMap:
    """Match a split directory's tensors with a model's parameters.

    Args:
        model: the skeleton.
        stored: checkpoint name -> stored tensor.
        where: the checkpoint's name in messages.
        quantizer: transformers' own; None for plain weights.
        casts: whether plain weights of a model whose modules compute with codes get its dtype. transformers keeps
            their stored one, whatever dtype it is told.

    Raises:
        IncompleteSplitError: a parameter has no tensor, or one of another shape; all of them are named.
    """
    from rabbitllm.engine.transformers_api import may_be_absent

    expected = model.state_dict()
    recipes, unused = _recipes(model, stored, expected, quantizer, casts=casts)
    if quantizer is None:
        _check_scales(stored, unused)
    ties = _ties(model, recipes)
    absent = frozenset(name for name in expected if name not in recipes and name not in ties)
    allowed = frozenset(name for name in absent if _matches(may_be_absent(model), name))
    if absent - allowed:
        names = sorted(absent - allowed)
        raise IncompleteSplitError(
            f"{where} lacks {len(names)} of the {len(expected)} tensors that {type(model).__name__} needs: "
            f"{listed(names, 8)}.",
            "Split the checkpoint again, into another folder (--dir, layer_shards_saving_path). Keep this one until "
            "then: if the checkpoint was deleted, it holds the only copy of the rest.",
        )
    return WeightMap(recipes, ties, allowed, tuple(unused), casts)


def unexpected(model: PreTrainedModel, weights: WeightMap) -> list[str]:
    """Unused stored tensors that the model's class does not ignore."""
    from rabbitllm.engine.transformers_api import may_be_unused

    return [name for name in weights.unused if not _matches(may_be_unused(model), name)]


UNUSED_SHARE = 0.5
"""Maximum share of a checkpoint's bytes that a model may leave unused; tensors that its class ignores do not count."""


def check_unused(model: PreTrainedModel, weights: WeightMap, store: WeightFiles) -> None:
    """Refuse unused tensors if they show that the config is another model's.

    Tensors that the model's class ignores do not count.

    Raises:
        IncompleteSplitError: they are further layers, or most of the bytes.
    """
    unused = unexpected(model, weights)
    beyond = _blocks_beyond(unused, weights)
    settings = {"text_config": model.config.get_text_config().to_dict(), **model.config.to_dict()}
    if beyond and not predicts_more(settings):  # transformers omits layers for multi-token prediction
        raise IncompleteSplitError(
            f"{store.label} has more layers than its config: {', '.join(beyond[:3])}.", _DIFFERENT
        )
    nbytes, total = (sum(store.tensors[name].nbytes for name in names) for names in (unused, store.tensors))
    if nbytes > UNUSED_SHARE * total:
        raise IncompleteSplitError(
            f"{type(model).__name__} (from the config of {store.label}) uses only {1 - nbytes / total:.0%} of the "
            f"bytes; {len(unused)} tensors are unused, e.g. {unused[0]}.",
            _DIFFERENT,
        )


_BLOCK = re.compile(r"(.*?[A-Za-z_]\w*)\.(\d+)\.")


def _blocks_beyond(unused: Iterable[str], weights: WeightMap) -> list[str]:
    """Unused blocks with a higher index than all used blocks of the same list, such as "model.layers.30"."""
    last: dict[str, int] = {}
    for recipe in weights.recipes.values():
        for _, name in recipe.sources:
            if match := _BLOCK.match(name):
                last[match[1]] = max(last.get(match[1], -1), int(match[2]))
    matches = (match for name in unused if (match := _BLOCK.match(name)))
    beyond = {(match[1], int(match[2])) for match in matches if int(match[2]) > last.get(match[1], int(match[2]))}
    return [f"{stack}.{index}" for stack, index in sorted(beyond)]


def _recipes(
    model: PreTrainedModel,
    stored: Mapping[str, StoredTensor],
    expected: Mapping[str, torch.Tensor],
    quantizer: HfQuantizer,
    *,
    casts: bool,
) -> tuple[dict[str, Recipe], list[str]]:
    from transformers import WeightConverter

    from rabbitllm.engine.transformers_api import WeightRenaming, conversions_of, dot_natural_key

    mapping = conversions_of(model, quantizer)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    unused = []
    renamed = KeyRenaming(renamings, converters, model.base_model_prefix, expected)
    begin = len(wrapper_of(stored, expected))
    for name in sorted(stored, key=dot_natural_key):  # the order in which transformers loads
        target, pattern = renamed(name[begin:])
        if target not in expected:
            unused.append(name)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        groups.setdefault(target, (converter, []))[1].append((pattern or name[begin:], name))
    recipes: dict[str, Recipe] = {}
    alike: dict[tuple[Any, ...], torch.Size] = {}
    for key, (converter, sources) in groups.items():
        recipe = _recipe(key, tuple(sources), converter, stored, expected, quantizer, casts=casts)
        if recipe.dtype is not None:
            _check_kind(recipe, stored, expected)
        # layers convert alike, and a trial with hundreds of experts takes long
        shapes = tuple([(pattern, stored[name].shape, stored[name].parts[0].dtype) for pattern, name in recipe.sources])
        form = (id(converter), recipe.dtype, shapes)
        is_opaque = _published.has_operation(recipe.converter, _published.OPAQUE)
        if recipe.converter is None or is_opaque or alike.get(form) != expected[key].shape:
            recipe = _checked(recipe, model, stored, expected)
            if recipe.targets == (key,):
                alike[form] = expected[key].shape
        recipes.update(dict.fromkeys(recipe.targets, recipe))
    return recipes, unused


def wrapper_of(stored: Iterable[str], expected: Iterable[str]) -> str:
    """The prefix that `WRAPPER` finds before every name; empty if there is none, or if the model has it too."""
    prefixes = {match[0] for name in stored if (match := re.match(WRAPPER, name))}
    prefix = prefixes.pop() if len(prefixes) == 1 else ""
    return "" if prefix and any(name.startswith(prefix) for name in expected) else prefix


_PEFT = "base_model.model."
MAX_COMPARED = 8
"""Limit of missing names that are looked for under other names."""


def advice_on_names(stored: Iterable[str], expected: Iterable[str]) -> str | None:
    """Advice for weights whose names show what they are instead of the model; None if they do not."""
    names = {*stored}
    if any(".lora_" in name or "lora_magnitude" in name for name in names):
        return (
            "These are the weights of an adapter (LoRA), alone or not merged into the model. Load the base model and "
            "the adapter with PEFT, call merge_and_unload(), and save that model. Or load the base model here, and "
            "then the adapter: peft.PeftModel.from_pretrained(model, folder)."
        )
    for name in itertools.islice((name for name in expected if name not in names), MAX_COMPARED):
        longer = next((other for other in names if other.endswith("." + name)), None)
        if longer is not None:
            prefix = longer.removesuffix(name)
            by = "PEFT" if prefix == _PEFT else "the program that saved it"
            return (
                f"The tensor {name} is there as {longer}: {by} has put {prefix!r} before the names. Save the model "
                "itself instead of the module around it, or remove this prefix from the names."
            )
    return None


def _recipe(
    key: str,
    sources: tuple[tuple[str, str], ...],
    converter: WeightTransform | None,
    stored: Mapping[str, StoredTensor],
    expected: Mapping[str, torch.Tensor],
    quantizer: HfQuantizer,
    *,
    casts: bool,
) -> Recipe:
    """A recipe before its trial.

    transformers applies a quantizer's conversion to every tensor with a matching name. It returns a tensor without
    further stored parts (such as scales) unchanged, so such a tensor has no conversion.
    """
    if converter is None or not _published.loads(converter):
        if quantizer is not None and _published.is_dequantized(quantizer):
            _published.check_plain(expected[key], [stored[name] for _, name in sources])
        return Recipe(key, (key,), sources, converter, expected[key].dtype)
    if len(sources) == 1 and sources[0][0] in quantizer.serialized_names:
        alone = stored[sources[0][1]]
        _published.check_alone(expected[key], alone, key)
        casts = casts or _published.is_dequantized(quantizer)
        dtype = expected[key].dtype if casts else torch_dtype(alone.parts[0].dtype)
        return Recipe(key, (key,), sources, None, dtype)
    needed, converter = _published.needed(sources, quantizer), _published.for_many_passes(converter)
    return Recipe(key, (key,), needed, converter, None, _published.has_operation(converter, _published.WRAPPING))


_SCALES = re.compile(r"(?:\.|_)(?:weight_scale(?:_inv|_2)?|scale(?:_inv|_weight)?|scales|input_scale)$")
"""Endings of the names of scales; the codes of their weight have the same prefix."""


def _check_kind(recipe: Recipe, stored: Mapping[str, StoredTensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Refuse integers or complex numbers for a floating parameter.

    Raises:
        IncompleteSplitError: a tensor has such a dtype.
    """
    if not expected[recipe.key].dtype.is_floating_point:
        return
    for _, name in recipe.sources:
        tensor = stored[name]
        if tensor.quantized is None and not torch_dtype(tensor.parts[0].dtype).is_floating_point:
            raise IncompleteSplitError(
                f"the tensor {name} has the dtype {tensor.parts[0].dtype}; the model needs floating numbers for "
                f"{recipe.key}, and its config.json has no quantization_config.",
                _DIFFERENT,
            )


def _check_scales(stored: Mapping[str, StoredTensor], unused: Iterable[str]) -> None:
    """Refuse codes whose scales the model would not use, because its config has no quantization settings.

    Raises:
        IncompleteSplitError: there are such scales.
    """
    by_owner = {name.rpartition(".")[0]: name for name in unused if _SCALES.search(name)}
    for name, tensor in stored.items():
        owner = name.rpartition(".")[0]
        if tensor.quantized is None and torch_dtype(tensor.parts[0].dtype).itemsize == 1 and owner in by_owner:
            raise IncompleteSplitError(
                f"the tensor {name} contains codes ({tensor.parts[0].dtype}) and {by_owner[owner]} its scales, but "
                "config.json has no quantization_config that describes them.",
                "Use a checkpoint of the model whose config.json describes them, or its unquantized one.",
            )


def _checked(
    recipe: Recipe, model: PreTrainedModel, stored: Mapping[str, StoredTensor], expected: Mapping[str, torch.Tensor]
) -> Recipe:
    """The recipe with all its targets, by a trial on the meta device, which takes no memory.

    Raises:
        IncompleteSplitError: it fails, or makes a tensor of another shape than the module's.
    """
    import torch

    if _published.has_operation(recipe.converter, _published.OPAQUE):
        _published.check_opaque(recipe.key, expected[recipe.key], recipe.sources, stored)
        return recipe

    def read(name: str, dtype: torch.dtype | None) -> torch.Tensor:
        dtype = dtype or torch_dtype(stored[name].parts[0].dtype)
        return torch.empty(stored[name].shape, dtype=dtype, device="meta")

    try:
        tensors = recipe.make(model, read)
    except Exception as error:  # conversions raise any error for an unexpected number or shape of tensors
        raise IncompleteSplitError(
            f"the tensors for {recipe.key} ({listed([name for _, name in recipe.sources], 3)}) cannot be converted: "
            f"{type(error).__name__}: {error}.{_of_unlike_experts(recipe)}"
        ) from error
    for name, tensor in tensors.items():
        shape = tuple(expected[name].shape) if name in expected else None
        if shape != tuple(tensor.shape):
            raise IncompleteSplitError(
                f"the tensor for {name} has shape {tuple(tensor.shape)}; the config needs {shape}.", _DIFFERENT
            )
    return replace(recipe, targets=tuple(tensors))


def _of_unlike_experts(recipe: Recipe) -> str:
    """A sentence on an expert that has other tensors than the first one, as where only some are quantized; empty if
    none has."""
    parts = defaultdict[str, list[str]](list)
    for match in filter(None, (_EXPERT.fullmatch(name) for _, name in recipe.sources)):
        parts[match.string[match.end(1) : match.start(2)]].append(match[2][1:])
    experts = list(parts.items())
    for number, own in experts[1:]:
        first, its = experts[0]
        if {*own} != {*its}:
            have = f"Expert {first} has {listed(its, 6)}; expert {number} has {listed(own, 6)}"
            return f" {have}; expected the same of all, quantized or not."
    return ""


def _ties(model: PreTrainedModel, recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """Tied targets without a tensor of their own -> the target of the tie whose tensor the checkpoint has."""
    declared: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    groups: dict[str, set[str]] = {}
    for target, source in declared.items():
        groups.setdefault(source, {source}).add(target)
    ties: dict[str, str] = {}
    for source, members in groups.items():
        owner = next((name for name in (source, *sorted(members)) if name in recipes), None)
        if owner is not None:
            ties |= {name: owner for name in members if name not in recipes}
    return ties


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
