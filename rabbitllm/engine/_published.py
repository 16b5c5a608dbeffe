"""Weights that are published quantized, loaded by transformers' own quantizers a layer at a time.

A quantizer of transformers changes the skeleton's modules before weights are loaded, and its conversions make their
parameters from the stored codes and scales. Both are used unchanged; only the loading is ours, so the bytes of the file
are streamed. A quantizer without kernels for a device dequantizes while it loads. Then a layer is dequantized each time
it is used, by the same operation and with the same result bit for bit, and no file is written; unless a kernel of ours
multiplies its codes (`published_codes.py`).

Lists the tested methods, and the packages that they need in addition to transformers. Some conversions have no trial
without bytes; names, counts and sizes show whether their parts belong together.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

from rabbitllm.base.terminal import harmless
from rabbitllm.checkpoints.config import BITSANDBYTES, LEFTOVER, MODELOPT, TORCHAO, method_of
from rabbitllm.errors import IncompleteSplitError, MissingPackageError, UnknownArchitectureError
from rabbitllm.formats.tensor_spec import torch_dtype
from rabbitllm.quant.schemes import bitsandbytes
from rabbitllm.store.layer_store import StoredTensor

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from rabbitllm.engine.devices import Device
    from rabbitllm.engine.transformers_api import HfQuantizer, WeightTransform

logger = logging.getLogger(__name__)


KEPT = (f"{BITSANDBYTES} 4bit", f"{BITSANDBYTES} 8bit")
"""Methods whose modules compute with the stored bytes."""
_COMPRESSED_TENSORS = "compressed-tensors"
_INTEGERS = ("awq", "gptq")
DEQUANTIZED = ("fp8", "mxfp8", "mxfp4", _COMPRESSED_TENSORS, *_INTEGERS, MODELOPT, TORCHAO)
"""Methods whose layers are dequantized each time they are used."""
AUTO_ROUND = "auto-round"
"""A tool that writes parts in the layouts of `_INTEGERS`."""
_LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "auto_gptq": {"quant_method": "gptq"},
    "gptq": {"quant_method": "gptq"},
    "gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_awq": {"quant_method": "awq", "version": "gemm"},
    "awq": {"quant_method": "awq", "version": "gemm"},
}
"""auto-round's name of a layout -> the settings of the method that it belongs to."""
WRAPPING = ("WrapAgain", "Bnb8bitDeserialize")
"""Operations of transformers that make a parameter around the stored bytes, without copying them."""
BY_MATRIX = frozenset({"QuickFp8", "FusedFp8", "QuickMxfp4", "ExpertMatrices", "Dequantize"})
"""Operations that make each matrix from its parts, so that one expert can be made without the others."""


def settings_in(config: PretrainedConfig) -> Any:
    """The quantization settings of a config, as a dict or transformers' own object; None for plain weights."""
    for part in (config, config.get_text_config(decoder=True)):
        settings = getattr(part, "quantization_config", None)
        if settings:
            return settings
    return None


def drop_leftover_settings(config: PretrainedConfig) -> None:
    """Remove quantization settings that transformers leaves in a config after it has dequantized the weights."""
    for part in (config, config.get_text_config(decoder=True)):
        settings = getattr(part, "quantization_config", None)
        if settings and _method(settings) == LEFTOVER:
            del part.quantization_config


def check_method(folder: Path, config: PretrainedConfig) -> None:
    """Refuse weights that would load without their scales and give wrong results.

    Raises:
        UnknownArchitectureError: they are quantized by a method that is not supported.
    """
    settings = settings_in(config)
    if settings is None or (method := _method(settings)) in (*KEPT, *DEQUANTIZED):
        return
    if method.endswith(AUTO_ROUND):
        _of_auto_round(folder, settings)
        return
    raise UnknownArchitectureError(
        f"The weights that belong to {folder} are already quantized ({method}), which is not supported; expected "
        f"unquantized weights, or {', '.join(KEPT)}, {', '.join(DEQUANTIZED[:-1])} or {DEQUANTIZED[-1]}.",
        "Use the model's checkpoint in one of these forms, or its unquantized one with compression='4bit' or '8bit'.",
    )


def _of_auto_round(folder: Path, settings: Any) -> dict[str, Any]:
    """The settings of GPTQ or AWQ that say the same as auto-round's.

    Raises:
        UnknownArchitectureError: the parts are neither GPTQ's nor AWQ's, or have several numbers of bits.
    """
    values = dict(settings if isinstance(settings, Mapping) else settings.to_dict())
    # older versions write one text for layout and kernel, such as auto_round:gptq:exllamav2
    layouts = [values[name] for name in ("packing_format", "backend") if values.get(name) not in (None, "auto")]
    layout = str(layouts[0]) if layouts else "auto_round:auto_gptq"
    parts = next((_LAYOUTS[name] for name in layout.split(":")[1:2] if name in _LAYOUTS), None)
    bits = values.get("bits")
    other_bits = {
        name: module_settings["bits"]
        for name, module_settings in (values.get("extra_config") or {}).items()
        if isinstance(module_settings, Mapping) and module_settings.get("bits", bits) not in (bits, *_PLAIN_BITS)
    }
    why = ""
    if parts is None or values.get("data_type", "int") != "int":
        why = f"{values.get('data_type', 'int')} in the layout {layout}"
    elif values.get("act_bits") not in (None, *_PLAIN_BITS):
        why = f"activations of {values['act_bits']} bits"
    elif not isinstance(bits, int):
        why = f"bits {bits!r}"
    elif other_bits:
        why = f"{bits} bits, but {next(iter(other_bits.values()))} bits for {next(iter(other_bits))}"
    if parts is None or why:
        raise UnknownArchitectureError(
            f"The weights that belong to {folder} are already quantized ({AUTO_ROUND}) with {harmless(why)}, which "
            "is not supported; expected integers of one number of bits, in the layout auto_gptq or auto_awq.",
            "Use a checkpoint of the model in that form, or its unquantized one with compression='4bit' or '8bit'.",
        )
    kept = {name: values[name] for name in ("bits", "group_size", "sym") if name in values}
    return {**kept, **parts} if parts["quant_method"] == "gptq" else {**kept, "zero_point": True, **parts}


_PLAIN_BITS = (16, 32)
"""Of what is not quantized."""


def quantizer_for(folder: Path, config: PretrainedConfig, devices: Iterable[Device]) -> Any:
    """transformers' quantizer for a checkpoint's weights, ready for these devices; None for plain weights.

    The config gets its settings as transformers' own object, as `from_pretrained` would give it.

    Raises:
        MissingPackageError: the quantizer needs a package that is not installed.
        UnknownArchitectureError: the settings are malformed.
    """
    from rabbitllm.engine.transformers_api import AutoHfQuantizer

    settings = settings_in(config)
    if settings is None:
        return None
    if _method(settings).endswith(AUTO_ROUND):
        settings = _of_auto_round(folder, settings)
    method, names = _method(settings), [str(device.torch_device) for device in devices]
    try:
        if method in (MODELOPT, TORCHAO):  # transformers does not know the first, and needs torchao for the second
            from rabbitllm.engine._published_conversions import PlainSettings
            from rabbitllm.engine._published_exports import QUANTIZERS

            config.quantization_config = PlainSettings(method, settings)
            quantizer: HfQuantizer = QUANTIZERS[method](config.quantization_config, pre_quantized=True)
        else:
            config.quantization_config = AutoHfQuantizer.merge_quantization_configs(settings, None)
            if method in (*_INTEGERS, "fp8"):
                from rabbitllm.engine._published_conversions import Fp8, PackedIntegers

                quantizer_type = PackedIntegers if method in _INTEGERS else Fp8
                quantizer = quantizer_type(config.quantization_config, pre_quantized=True)
            else:
                quantizer = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
        if method in DEQUANTIZED:
            quantizer.quantization_config.dequantize = True
        quantizer.validate_environment(device_map={"": names[0]}, weights_only=True)
    except ImportError as error:
        raise MissingPackageError(
            f"The weights that belong to {folder} are already quantized ({method}), and transformers cannot load "
            f"them here: {error}.",
            "Install the package in this message, or use the model's unquantized checkpoint.",
        ) from error
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise UnknownArchitectureError(
            f"The weights that belong to {folder} are already quantized ({method}), in a form that transformers "
            f"does not support: {error}.",
            "Download its config.json again, update RabbitLLM, or use the model's unquantized checkpoint.",
        ) from error
    return quantizer


def warn_of_dequantizing(
    quantizer: HfQuantizer | None, folder: Path, dtype: torch.dtype, devices: Iterable[Device], coded: Collection[bool]
) -> None:
    """Warn that a model's layers are dequantized for each use, if they are.

    Args:
        quantizer, folder, dtype, devices: of the model.
        coded: for each published parameter, whether it is multiplied from its codes.
    """
    if quantizer is not None and is_dequantized(quantizer) and not all(coded):
        where = ", ".join(device.name for device in devices)
        logger.warning(
            "The weights in %s are %s. On %s %s is dequantized to %s for each use; the files stay unchanged.",
            folder,
            _method(quantizer.quantization_config),
            where,
            "a part of the layers" if any(coded) else "each layer",
            str(dtype).removeprefix("torch."),
        )


def is_dequantized(quantizer: HfQuantizer) -> bool:
    """Whether its model computes with plain matrices."""
    return bool(getattr(quantizer.quantization_config, "dequantize", False))


def change_modules(model: PreTrainedModel, quantizer: HfQuantizer, dtype: torch.dtype) -> None:
    """Let a quantizer replace modules of a skeleton. New modules are in training mode, so call `eval` after it."""
    import torch

    # else transformers warns, on one of the two, that it will dequantize MXFP4
    options = {"device_map": {"": "cpu"}, "use_kernels": torch.accelerator.current_accelerator() is None}
    with torch.device("meta"):
        quantizer.preprocess_model(model=model, dtype=dtype, checkpoint_files=[], **options)
        if _method(quantizer.quantization_config) == _COMPRESSED_TENSORS:
            _quantize_activations(model, quantizer)
    for module in model.modules():
        if type(module).__name__ == "Linear8bitLt":
            _log_casts_once()
            module.forward = MethodType(_linear_8bit, module)
        elif type(module).__name__ == "Linear4bit":
            module.register_forward_hook(_restore_4bit)
        elif type(module).__name__ == "FP8Embedding":  # transformers loads its scale in the model's dtype
            module.weight_scale = torch.nn.Parameter(module.weight_scale.to(dtype), requires_grad=False)


def narrow(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Let bitsandbytes' modules that would compute in bfloat16, as published, compute in the dtype of the model."""
    for module in model.modules():
        if getattr(module, "compute_dtype", None) == torch_dtype("BF16"):
            module.compute_dtype = dtype


def _quantize_activations(model: PreTrainedModel, quantizer: HfQuantizer) -> None:
    """If a scheme quantizes inputs or outputs too, add compressed-tensors' own modules for that, with plain weights."""
    import torch
    from compressed_tensors.quantization import QuantizationStatus, apply_quantization_config

    config = quantizer.compressor.quantization_config
    schemes = config.config_groups.values()
    if config.kv_cache_scheme is None and not any(s.input_activations or s.output_activations for s in schemes):
        return
    before = {name for name, _ in model.named_parameters()}
    apply_quantization_config(model, config, show_progress=False)
    for name, _ in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        if name not in before and leaf.startswith("weight_"):
            delattr(model.get_submodule(path), leaf)
    for module in model.modules():
        if hasattr(module, "quantization_status"):
            module.quantization_status = QuantizationStatus.DECOMPRESSED
            if type(module) is torch.nn.Linear and "forward" in vars(module):
                vars(module)["forward"] = functools.partial(linear_with_activations, module)


def linear_with_activations(
    module: Any, input: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """What compressed-tensors' own forward of a Linear with plain weights computes; it would also write the weight.

    `rounded` rounds inputs in its place.
    """
    import torch
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    scheme = module.quantization_scheme if getattr(module, "quantization_enabled", True) else None
    if scheme is not None and scheme.input_activations:
        own = scheme.input_activations
        input = forward_quantize(module, input, "input", own) if rounded is None else rounded(input)
    output = torch.nn.functional.linear(input, module.weight, module.bias)
    if scheme is not None and scheme.output_activations:
        output = forward_quantize(module, output, "output", scheme.output_activations)
    return output


@functools.cache
def _log_casts_once() -> None:
    """Log bitsandbytes' warning of the cast to float16 once, instead of for every 8bit product."""
    logged: set[str] = set()

    def first_time(record: logging.LogRecord) -> bool:
        is_known = record.getMessage() in logged
        logged.add(record.getMessage())
        return not is_known

    logging.getLogger("bitsandbytes.autograd._functions").addFilter(first_time)


def _linear_8bit(module: Any, x: torch.Tensor) -> torch.Tensor:
    """What bitsandbytes' `Linear8bitLt.forward` computes, with a state of its own for each call.

    There the first call moves codes and scales from the weight to the module's state. In a streamed model the weight
    must have them again after each call; other threads that call the module at that time would take other codes.
    """
    state = copy.copy(module.state)
    state.CB, state.SCB, state.is_training = module.weight.CB, module.weight.SCB, module.training
    bias = None if module.bias is None else module.bias.to(x.dtype)
    return bitsandbytes().matmul(x, module.weight, bias=bias, state=state)  # type: ignore[no-any-return]


def _restore_4bit(module: Any, args: Any, output: Any) -> None:
    module.quant_state = None  # the weight has it too


def product_bytes(model: torch.nn.Module) -> int:
    """Bytes that bitsandbytes' own 4bit product takes besides weights and activations.

    Of more rows than one it dequantizes the whole matrix, to the dtype in which it was published, and casts that to the
    dtype of the product (bitsandbytes 0.50, `autograd._functions.MatMul4Bit.forward`). The first is taken for bfloat16.
    """

    def taken(module: Any) -> int:
        dtype = module.compute_dtype
        cast = 0 if dtype in (None, torch_dtype("BF16")) else dtype.itemsize
        return int(module.in_features * module.out_features * (2 + cast))

    return max((taken(module) for module in model.modules() if type(module).__name__ == "Linear4bit"), default=0)


def work_bytes(converter: WeightTransform, elements: int) -> int:
    """Bytes that a quantizer's conversion into matrices of so many elements takes at most besides these."""
    from rabbitllm.engine import _published_conversions

    return _published_conversions.work_bytes(elements) if loads(converter) else 0


def loads(converter: WeightTransform | None) -> bool:
    """Whether a conversion is a quantizer's, which gets its tensors in their stored dtype."""
    return any(getattr(operation, "hf_quantizer", None) for operation in getattr(converter, "operations", ()))


def for_many_passes(converter: WeightTransform) -> Any:
    """The same conversion, for one target that is made in each pass."""
    from rabbitllm.engine._published_conversions import ExpertMatrices, QuickFp8, QuickMxfp4, WrapAgain

    first, *following = converter.operations
    ours: Mapping[str, Callable[[], Any]] = {
        "Bnb4bitDeserialize": lambda: WrapAgain(first),
        "Fp8Dequantize": lambda: QuickFp8(first.hf_quantizer),
        "Mxfp4Dequantize": lambda: QuickMxfp4(first.hf_quantizer),
        "CompressedTensorsDequantize": lambda: ExpertMatrices(first),
    }
    result = copy.copy(converter)
    result.operations = [ours.get(type(first).__name__, lambda: first)(), *following]
    return result


def has_operation(converter: WeightTransform | None, kinds: Collection[str]) -> bool:
    """Whether a conversion has an operation of these names, such as `WRAPPING` or `OPAQUE`."""
    return converter is not None and any(type(operation).__name__ in kinds for operation in converter.operations)


def needed(sources: tuple[tuple[str, str], ...], quantizer: HfQuantizer) -> tuple[tuple[str, str], ...]:
    """Sources of a quantizer's conversion, without those that it does not need.

    Those are scales of activations, which are not quantized here, and the shape of each packed matrix of
    compressed-tensors. For experts the shape is known if an int32 has a whole number of codes; reading it would take
    one more read for each matrix of an expert.
    """
    if unread := getattr(quantizer, "unread", ()):
        sources = tuple(s for s in sources if not s[0].endswith(unread))
    if _method(quantizer.quantization_config) != _COMPRESSED_TENSORS or not any("*" in p for p, _ in sources):
        return sources
    from rabbitllm.engine.transformers_api import expert_bits

    bits = expert_bits(quantizer.compressor.quantization_config)
    return sources if 32 % bits else tuple(s for s in sources if not s[0].endswith(".weight_shape"))


def _method(settings: Any) -> str:
    return method_of(settings if isinstance(settings, Mapping) else settings.to_dict())


OPAQUE = ("WrapAgain", "ExpertMatrices")
"""Operations that read some of their tensors: their result depends on more than shapes."""
_STATE = ".quant_state.bitsandbytes__"
_FETCH_AGAIN = "The checkpoint is incomplete: download it again, its config.json and every file that its index names."


def check_alone(target: torch.Tensor, stored: StoredTensor, key: str) -> None:
    """Refuse codes without their scales: a quantizer's conversion would treat a single tensor as a plain one.

    Raises:
        IncompleteSplitError: the stored tensor contains codes, or it is plain and the target is not.
    """
    dtype = torch_dtype(stored.parts[0].dtype)
    if dtype == target.dtype:  # codes that a module looks up unchanged
        return
    if dtype.is_floating_point and dtype.itemsize > 1:
        if target.dtype.is_floating_point:
            return
        problem = f"the tensor for {key} is plain {stored.parts[0].dtype}; by the model's config it is quantized."
    else:
        problem = f"the tensor for {key} contains codes ({stored.parts[0].dtype}) and has no scales."
    raise IncompleteSplitError(problem, _FETCH_AGAIN)


def check_plain(target: torch.Tensor, sources: Iterable[StoredTensor]) -> None:
    """Refuse codes of 8 bits that no conversion of a quantizer takes: they would be used without their scales.

    Raises:
        UnknownArchitectureError: there are such codes.
    """
    if not target.dtype.is_floating_point:
        return
    for stored in sources:
        dtype = torch_dtype(stored.parts[0].dtype)
        if stored.quantized is None and dtype.is_floating_point and dtype.itemsize == 1:
            raise UnknownArchitectureError(
                f"Tensor {stored.name} has an unsupported layout of codes ({stored.parts[0].dtype}); expected the name "
                "and shape of a matrix of the model's Linear or expert.",
                "Use the model's checkpoint in another form, or its unquantized one.",
            )


def check_opaque(
    key: str, expected: torch.Tensor, sources: Iterable[tuple[str, str]], stored: Mapping[str, StoredTensor]
) -> None:
    """Check the sources of an opaque conversion, as far as names and sizes allow.

    Args:
        key: the name of the result.
        expected: the parameter as the module has it, on the meta device.
        sources: (pattern, stored name), as `Recipe` has them.
        stored: checkpoint name -> stored tensor.

    Raises:
        IncompleteSplitError: a part is missing, or the number of codes is not that of the matrix's elements.
    """
    # the text before "weight" identifies the projection of experts, the text after it the part
    projections: dict[str, dict[str, list[StoredTensor]]] = {}
    for pattern, name in sources:
        projection, _, part = pattern.rpartition("weight")
        projections.setdefault(projection, {}).setdefault(part, []).append(stored[name])
    for projection, parts in projections.items():
        is_4bit = any(part.startswith((".quant", ".absmax")) for part in parts)
        missing = _missing_at_4bit(parts) if is_4bit else _missing_when_compressed(parts)
        if missing:
            raise IncompleteSplitError(
                f"Tensors are missing for {key}: {', '.join(f'{projection}weight{part}' for part in missing)}.",
                _FETCH_AGAIN,
            )
        experts = expected.shape[0] if projection else 1
        counts = {len(tensors) for tensors in parts.values()}
        if counts != {experts}:
            raise IncompleteSplitError(
                f"the tensors for {key} belong to {' or '.join(map(str, sorted(counts)))} experts; the model's config "
                f"needs {experts}.",
                _FETCH_AGAIN,
            )
        if not projection:
            _check_size(key, expected, parts, is_4bit)


def _missing_at_4bit(parts: Iterable[str]) -> list[str]:
    names = set(parts)
    missing = [part for part in ("", ".absmax", ".quant_map") if part not in names]
    state = any(part.startswith(_STATE) for part in names)
    return missing if state else [*missing, f"{_STATE}nf4"]


def _missing_when_compressed(parts: Mapping[str, Sequence[StoredTensor]]) -> list[str]:
    if "" not in parts and "_packed" not in parts:
        return ["_packed"]
    plain = "_packed" not in parts and torch_dtype(parts[""][0].parts[0].dtype).itemsize > 1
    if plain or "_scale" not in parts:
        return [] if plain else ["_scale"]
    nvfp4 = "_packed" in parts and parts["_scale"][0].parts[0].dtype == "F8_E4M3"
    return ["_global_scale"] if nvfp4 and "_global_scale" not in parts else []


def _check_size(key: str, expected: torch.Tensor, parts: Mapping[str, Sequence[StoredTensor]], is_4bit: bool) -> None:
    """Compare the codes' size as far as it is known: at 4bit their number, packed by compressed-tensors their rows."""
    codes = parts[""][0] if "" in parts else parts["_packed"][0]
    if is_4bit:
        agrees = codes.nbytes == (expected.numel() + 1) // 2
    elif "" in parts:
        agrees = codes.shape == tuple(expected.shape)
    else:
        agrees = codes.shape[:1] == tuple(expected.shape[:1])
        if codes.parts[0].dtype == "U8":  # two codes in a byte
            agrees = agrees and 2 * codes.shape[1] == expected.shape[1]
    if not agrees:
        raise IncompleteSplitError(
            f"the codes for {key} have shape {codes.shape}; the config needs {tuple(expected.shape)} elements.",
            "The config and the weights belong to different models: check the source of each.",
        )
