"""A transformers model without its weights: the real class on the meta device, with real buffers.

Follows transformers' `from_pretrained` except for the loading of weights (modeling_utils.py: the dtype plan, the
placeholders of non-persistent buffers and their initialisation by the module that owns them). So values that are
computed from configs, such as rotary frequencies, have the same bits. Independent of layer files.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rabbitllm.base.building import BUILDING
from rabbitllm.base.terminal import error_line
from rabbitllm.base.transformers_version import installed_version
from rabbitllm.checkpoints.checkpoint import has_vocabulary
from rabbitllm.checkpoints.config import newer_transformers, picked_by, separate_settings
from rabbitllm.engine._published import change_modules, check_method, drop_leftover_settings, settings_in
from rabbitllm.engine.free_memory import trimming
from rabbitllm.errors import (
    CorruptVocabularyError,
    IncompleteCheckpointError,
    InvalidIndexError,
    OptionError,
    RabbitLLMError,
    UnknownArchitectureError,
)
from rabbitllm.formats.bounded import FETCH_POINTER, check_begins_json, is_pointer_file, read_json

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from rabbitllm.engine.transformers_api import HfQuantizer

logger = logging.getLogger(__name__)


def read_config(folder: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's config, from a folder that has a config.json.

    Raises:
        UnknownArchitectureError: transformers does not support the model type, its code is not trusted, or the weights
            are quantized by a method that is not supported.
        InvalidIndexError: config.json is a git-lfs pointer, or begins with a byte-order mark.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise UnknownArchitectureError(
            f"{folder} has no config.json; the model's architecture is not known.",
            "Use the model's folder; for a split in another folder set layer_shards_saving_path.",
        )
    try:
        check_begins_json(folder / "config.json")
        config = _text_part(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code))
        model_class(config)
    except RabbitLLMError:
        raise
    except Exception as error:  # values of unexpected types make transformers raise any error
        raise _unknown(folder, error) from error
    drop_leftover_settings(config)
    if settings_in(config) is None and (settings := separate_settings(folder)) is not None:
        config.quantization_config = dict(settings)
    check_method(folder, config)
    return config


def _unknown(folder: Path, error: Exception) -> UnknownArchitectureError:
    text = error_line(error).partition(" This could be because")[0]  # which advises to update transformers
    problem = f"transformers {installed_version()} cannot build the model in {folder}: {text}"
    if (version := newer_transformers(folder)) is not None:
        problem += f" The config was written by transformers {version}."
    return UnknownArchitectureError(
        problem,
        "Update transformers (pip install --upgrade transformers), or download its config.json again. If the model has "
        "its own code and you trust it, pass trust_remote_code=True.",
    )


_THINKERS = {
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
"""Model types of which one part makes text and others speak it -> the class of the first part."""


def _text_part(config: PretrainedConfig) -> PretrainedConfig:
    """The config of a model's part that makes text, where others only speak it; else the config itself.

    The whole model can be called with the voices of a file only, and has no forward.
    """
    if config.model_type not in _THINKERS:
        return config
    part = config.thinker_config
    part.architectures = [_THINKERS[config.model_type]]
    for name in ("dtype", "quantization_config"):
        if getattr(part, name, None) is None and getattr(config, name, None) is not None:
            setattr(part, name, getattr(config, name))
    return part


_CONDITIONAL = "ForConditionalGeneration"
_CAUSAL_NAMES = ("ForCausalLM", "LMHeadModel", _CONDITIONAL)
"""Suffixes of class names that the causal LM of the same type can replace."""


def model_class(config: PretrainedConfig) -> Any:
    """The class that the config names, if transformers has it for this type; else the causal LM of the type.

    The causal LM does not replace a class of another kind (a classifier, a reward model) that transformers lacks: its
    head would be omitted without an error.

    Raises:
        ValueError: neither exists, and the config names no code of the checkpoint.
    """
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

    names = [name for name in getattr(config, "architectures", None) or () if isinstance(name, str)]
    for name in names:
        class_ = getattr(transformers, name, None)
        if isinstance(class_, type) and issubclass(class_, transformers.PreTrainedModel) and _suits(class_, config):
            return class_
    if names and names[0].endswith(_CONDITIONAL) and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        # a repository that came before transformers' class has another name for it (KimiK25..., Kimi_K25...)
        return MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    auto_map = getattr(config, "auto_map", None)
    if isinstance(auto_map, dict) and (class_ := _class_of_checkpoint(auto_map, names)) is not None:
        return class_
    if names and not any(name.endswith(_CAUSAL_NAMES) for name in names):
        raise ValueError(f"it has no class {names[0]!r} for the type {config.model_type!r}")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"it has no text-generating model of type {config.model_type!r}")
    return transformers.AutoModelForCausalLM


def _suits(model: PreTrainedModel, config: PretrainedConfig) -> bool:
    """Whether a class is for configs of this type; some types share the class of another (InternLM3 has Llama's)."""
    from rabbitllm.engine.transformers_api import is_class_of_type

    expected = model.config_class
    return expected is None or isinstance(config, expected) or is_class_of_type(model.__name__, config.model_type)


def _class_of_checkpoint(auto_map: dict[str, Any], names: list[str]) -> Any:
    """The Auto class for the class that the config names in a checkpoint's own code, or else for its causal LM."""
    import transformers

    classes = {auto: str(where).rpartition(".")[2] for auto, where in auto_map.items() if auto.startswith("AutoModel")}
    auto = next((auto for auto, name in classes.items() if name in names), None)
    if auto is None and "AutoModelForCausalLM" in classes:
        auto = "AutoModelForCausalLM"
    return getattr(transformers, auto, None) if auto is not None else None


_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth")
"""Settings for the number of layers of a stack."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MANY_LAYERS = 4096
"""More layers than any model has: a skeleton with this number takes seconds."""


def check_counts(config: PretrainedConfig, tensors: int | None, label: str) -> None:
    """Refuse a config with more layers than the checkpoint has tensors, or with too many experts for a token.

    A skeleton with these layers would take all memory; these experts would fail in the first pass.

    Args:
        config: of the model.
        tensors: number of the checkpoint's tensors; None if its headers are not read yet.
        label: the checkpoint's name in messages.

    Raises:
        IncompleteCheckpointError: the config, or the part of it for one tower, has too many layers.
        UnknownArchitectureError: a router would select more experts than the model has.
    """
    from transformers import PretrainedConfig

    parts = [config, *(part for part in vars(config).values() if isinstance(part, PretrainedConfig))]
    for part in parts:
        for name in _COUNTS:
            count = getattr(part, name, None)
            if isinstance(count, int) and count > _MANY_LAYERS and (tensors is None or count > tensors):
                has = (
                    f"no model has above {_MANY_LAYERS}"
                    if tensors is None
                    else f"the checkpoint has {tensors:,} tensors"
                )
                raise IncompleteCheckpointError(
                    f"The config of {label} needs {name}={count:,}; {has}.", "Download its config.json again."
                )
        used, experts = picked_by(part), [getattr(part, name, None) for name in _EXPERTS]
        counts = [count for count in experts if isinstance(count, int) and count > 1]  # one is a dense layer
        if used is not None and counts and used > max(counts):
            raise UnknownArchitectureError(
                f"The config of {label} needs {used} experts per token; it has {max(counts)}.",
                "Download its config.json again.",
            )


def build_skeleton(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    attn_implementation: str | None,
    trust_remote_code: bool = False,
    quantizer: HfQuantizer | None = None,
) -> PreTrainedModel:
    """The model of a config, in eval mode, all parameters and buffers on the meta device.

    Args:
        folder: may hold generation_config.json and the model's own code.
        config: from `read_config`.
        dtype: of the parameters, except those that the model keeps in float32.
        attn_implementation: as in transformers; None for its default.
        quantizer: of weights that are published quantized, see `engine.published`.

    Raises:
        UnknownArchitectureError: transformers has no model for this config.
        OptionError: it lacks this attention implementation, or lacks it for this model.
    """
    import torch

    from rabbitllm.engine.transformers_api import build_model, kept_dtypes

    options: dict[str, Any] = {"dtype": dtype}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    architecture = model_class(config)
    try:
        with BUILDING, torch.device("meta"):
            model: PreTrainedModel = build_model(architecture, config, trust_remote_code, **options)
        if quantizer is not None:
            change_modules(model, quantizer, dtype)
    except RabbitLLMError:
        raise
    except Exception as error:  # sizes that contradict each other make transformers raise any error
        if attn_implementation is not None and isinstance(error, ValueError | ImportError):
            raise OptionError(
                f"The model in {folder} cannot be built with attn_implementation={attn_implementation!r}: {error}",
                "Remove attn_implementation; transformers then chooses one that works.",
            ) from error
        raise _unknown(folder, error) from error
    model.eval()
    for name, kept in kept_dtypes(model, dtype).items():  # such as the routing bias of DeepSeek-V3
        _put_empty(model, name, dtype=kept)
    set_source_folder(model, folder)
    return model


def build_heads(
    model: PreTrainedModel, count: int, dtype: torch.dtype, quantizer: HfQuantizer | None, plain: Callable[[Any], Any]
) -> Any:
    """The heads for multi-token prediction of a model, as `build_skeleton` builds the model.

    Args:
        model: the model.
        count: number of layers of heads.
        dtype: of the parameters.
        quantizer: its own one of the heads.
        plain: the heads -> paths of modules that no quantizer replaces, since their weights are stored as plain ones.
    """
    import torch

    from rabbitllm.engine.transformers_api import blocks_of_head, build_heads, kept_dtypes

    config = copy.deepcopy(model.config.get_text_config(decoder=True))
    count = -(-count // (len(blocks_of_head(config)) or 1))
    for name in ("layer_types", "mlp_layer_types"):  # Qwen's configs have no such settings for heads
        types = getattr(config, name, None)
        if types is not None and getattr(config, f"mtp_{name}", None) is None:
            setattr(config, f"mtp_{name}", ["full_attention" if "full_attention" in types else types[-1]] * count)
    config.num_mtp_layers = count
    with BUILDING, torch.device("meta"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            heads = build_heads(model, config.get_mtp_config())
        finally:
            torch.set_default_dtype(before)
    if quantizer is not None:
        kept = {name: heads.get_submodule(name) for name in plain(heads)}
        change_modules(heads, quantizer, dtype)
        for name, module in kept.items():
            heads.set_submodule(name, module)
    heads.eval()
    for name, other in kept_dtypes(heads, dtype).items():
        _put_empty(heads, name, dtype=other)
    return heads


def set_source_folder(model: PreTrainedModel, folder: Path) -> None:
    """Name a folder in a model and its config, and read its generation settings from there.

    Raises:
        UnknownArchitectureError: transformers cannot read the settings.
    """
    from transformers import GenerationConfig

    from rabbitllm.engine.transformers_api import GENERATION_SETTINGS_OF_CONFIG

    # some models (DiffusionGemma) have another class for these settings
    settings = getattr(model, "generation_config_class", GenerationConfig)
    name, options = "generation_config.json", {}
    if settings is GenerationConfig and not (folder / name).is_file():
        # older models have such settings (beams, forced tokens) in config.json, and a config object drops them
        name, options = "config.json", GENERATION_SETTINGS_OF_CONFIG
    if model.can_generate() and (options or (folder / name).is_file()):
        try:
            model.generation_config = settings.from_pretrained(folder, **options)
            vocabulary = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
            _check_generation(vars(model.generation_config), vocabulary)
        except Exception as error:  # values of unexpected types make transformers raise any error
            raise UnknownArchitectureError(
                f"transformers cannot read the generation settings in {folder / name}: {error_line(error)}",
                "Download that file again; without a generation_config.json transformers uses its own settings.",
            ) from error
    model.name_or_path = model.config.name_or_path = str(folder)


def share_dtypes(model: PreTrainedModel, ties: Mapping[str, str]) -> None:
    """Give each tied target the dtype of its owner, as transformers does where it ties them: HY-V4 keeps only a head
    with a tensor of its own in float32."""
    tensors = model.state_dict()
    for name, owner in ties.items():
        if tensors[name].dtype != tensors[owner].dtype:
            _put_empty(model, name, dtype=tensors[owner].dtype)


def _put_empty(model: PreTrainedModel, name: str, **options: Any) -> None:
    """Replace a parameter or a buffer by an empty one like it, with another dtype or device."""
    import torch

    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        module._parameters[leaf] = torch.nn.Parameter(torch.empty_like(module._parameters[leaf], **options))
    else:
        module._buffers[leaf] = torch.empty_like(module._buffers[leaf], **options)


_TOKEN_SETTINGS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
)
_NUMBER_SETTINGS = (
    *("temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "length_penalty"),
    *("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "max_time"),
)
_COUNT_SETTINGS = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "top_k", "num_beams", "num_return_sequences"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
)
_PENALTIES = ("repetition_penalty", "encoder_repetition_penalty")


_VOCABULARY_SETTINGS = ("bad_words_ids", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id")
"""Settings whose token ids index the logits."""


def _check_generation(settings: Mapping[str, Any], vocabulary: int | None = None) -> None:
    """Refuse generation settings that transformers reads without an error and that fail in a generation.

    Args:
        settings: by name.
        vocabulary: number of token ids; None if the config does not say.

    Raises:
        ValueError: names the setting.
    """

    def refuse(name: str, expected: str) -> None:
        raise ValueError(f"{name} is {str(settings[name])[:80]!r}; expected {expected}")

    values = {name: value for name, value in settings.items() if value is not None}
    for name in filter(values.__contains__, _TOKEN_SETTINGS):
        ids = values[name] if isinstance(values[name], list) else [values[name]]
        if not all(type(token) is int and abs(token) < 1 << 63 for token in ids):
            refuse(name, "token ids")
    for name in filter(values.__contains__, (*_NUMBER_SETTINGS, *_COUNT_SETTINGS)):
        value = values[name]
        if type(value) not in (int, float) or (name in _COUNT_SETTINGS and abs(value) >= 1 << 63):
            refuse(name, "a number")
        if name in _COUNT_SETTINGS and value != int(value):
            refuse(name, "a whole number")
    for name in filter(values.__contains__, _PENALTIES):
        if not values[name] > 0 or (type(values[name]) is int and values[name] != 1):
            refuse(name, "a number above 0 with a decimal point")  # like transformers' own check
    texts = values.get("stop_strings", [])
    if not all(isinstance(text, str) for text in (texts if isinstance(texts, list) else [texts])):
        refuse("stop_strings", "texts")
    words = values.get("bad_words_ids", [[0]])
    if not isinstance(words, list) or not words or not all(map(_are_ids, words)):
        refuse("bad_words_ids", "lists of token ids")
    pairs = values.get("sequence_bias", [[[0], 1.0]])
    if not isinstance(pairs, list) or not pairs or not all(map(_is_bias, pairs)):
        refuse("sequence_bias", "pairs of a list of token ids and a number with a decimal point")
    names: tuple[str, ...] = _VOCABULARY_SETTINGS
    if (decay := values.get("exponential_decay_length_penalty")) is not None:
        names = (*names, "eos_token_id")
        if not isinstance(decay, list) or [type(part) in (int, float) for part in decay] != [True, True]:
            refuse("exponential_decay_length_penalty", "two numbers")
    for name in filter(values.__contains__, names):
        if vocabulary is not None and not all(0 <= token < vocabulary for token in _token_ids(values[name])):
            refuse(name, f"token ids below {vocabulary}, the size of the vocabulary")


def _are_ids(word: object) -> bool:
    if not isinstance(word, list) or not word:
        return False
    return all(type(token) is int and 0 <= token < 1 << 63 for token in word)


def _is_bias(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and _are_ids(pair[0]) and type(pair[1]) is float


def _token_ids(ids: Any) -> list[int]:
    """The token ids in nested lists; a bias, which is a float, is none."""
    if isinstance(ids, list):
        return [token for part in ids for token in _token_ids(part)]
    return [ids] if type(ids) is int else []


def materialise_buffers(model: PreTrainedModel, device_of: Any, absent: frozenset[str] = frozenset()) -> None:
    """Give every non-persistent buffer its real value, and every parameter in `absent` its initial one.

    Each gets an empty placeholder on its device, which transformers' `initialize_weights` fills, as after loading. All
    modules are initialised, since some compute buffers of others (Falcon-H1's model those of its layers). Weights are
    marked as initialised first, since a module may own both kinds (Gemma 3's scaled embedding).

    Args:
        device_of: module path -> torch device, a callable.
        absent: full names that the checkpoint lacks and the model class allows it to lack.
    """
    from rabbitllm.engine.transformers_api import initialize_rest, mark_initialized

    mark_initialized(model, absent)
    for name in (*(name for name, _ in model.named_non_persistent_buffers()), *absent):
        _put_empty(model, name, device=device_of(name.rpartition(".")[0]))
    with BUILDING:
        initialize_rest(model)


def read_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder; None if there is none, or, with a warning, if it cannot be read."""
    try:
        return _tokenizer(folder, trust_remote_code)
    except Exception as error:  # malformed files make transformers and tokenizers raise any error
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        has_files = has_vocabulary(names) or "tokenizer_config.json" in names
        why = error_line(error) if has_files else "there is no vocabulary, such as tokenizer.json or tokenizer.model"
        logger.warning("No tokenizer could be read from %s (%s); model.tokenizer is None.", folder, why)
        return None
    finally:
        if (trim := trimming()) is not None:
            trim()  # holes of the heap: 300 MB of Gemma's


def _tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder.

    Raises:
        FileNotFoundError: there is no vocabulary, and its class needs one.
        CorruptVocabularyError, InvalidIndexError: a file is a git-lfs pointer, or chat_template.json is no JSON.
        TypeError: a setting that transformers does not check would make the first use of the tokenizer fail.
        Exception: any error of transformers.
    """
    from transformers import AutoTokenizer

    for name in _TOKENIZER_FILES:
        if is_pointer_file(folder / name):
            raise CorruptVocabularyError(f"{folder / name} is a git-lfs pointer, not the file itself.", FETCH_POINTER)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if getattr(tokenizer, "vocab_files_names", None) and not has_vocabulary(path.name for path in folder.iterdir()):
        raise FileNotFoundError("there is no vocabulary")  # transformers makes one in which each text is unknown
    longest = getattr(tokenizer, "model_max_length", 0)
    if not isinstance(longest, int | float):
        raise TypeError(f"model_max_length is {longest!r:.40}; expected a number.")
    if not getattr(tokenizer, "chat_template", None) and (folder / _PROCESSOR_TEMPLATE).is_file():
        tokenizer.chat_template = read_json(folder / _PROCESSOR_TEMPLATE).get("chat_template")
    template = getattr(tokenizer, "chat_template", None)
    texts = [*template, *template.values()] if isinstance(template, dict) else [template or ""]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"chat_template is {template!r:.40}; expected a text, or texts by name.")
    try:
        tokenizer.all_special_ids  # noqa: B018  a property that looks each token up
    except RecursionError as error:  # the unknown token is looked up as an unknown token
        raise TypeError(f"unk_token is {tokenizer.unk_token!r:.40}, which is not in the vocabulary.") from error
    return tokenizer


_PROCESSOR_TEMPLATE = "chat_template.json"
"""The chat template of older models for pictures; transformers reads it with the processor only."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def check_tokenizer(
    folder: Path, trust_remote_code: bool = False, original: Path | None = None
) -> PreTrainedTokenizerBase | None:
    """Refuse a tokenizer with malformed files.

    Args:
        folder: of the files.
        trust_remote_code: whether their code may run.
        original: of those that they are copies of; an error names these.

    Returns:
        The tokenizer; None if there is none, or it needs a package or code, which is accepted.

    Raises:
        CorruptVocabularyError: transformers cannot read or use it.
    """
    if original is not None and original != folder:
        try:
            return check_tokenizer(folder, trust_remote_code)
        except (CorruptVocabularyError, InvalidIndexError):
            check_tokenizer(original, trust_remote_code)
            raise
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return _tokenizer(folder, trust_remote_code)
    except (ImportError, OSError):
        return None
    except (CorruptVocabularyError, InvalidIndexError):
        raise
    except Exception as error:
        if type(error) is ValueError and "side should be" not in str(error):  # a class that transformers lacks
            return None
        remedy = f"Download {', '.join(_TOKENIZER_FILES[:2])} again, or remove them: model.tokenizer is then None."
        if isinstance(error, UnicodeEncodeError):  # tokenizers opens paths of valid UTF-8 only
            remedy = "Rename the folder: its path is not valid UTF-8."
        raise CorruptVocabularyError(
            f"transformers cannot read the tokenizer in {folder}: {error_line(error)}", remedy
        ) from error
