"""The public names of RabbitLLM 1.1, with the same meaning, on top of this implementation.

Its model classes were one per architecture; here every one of them gives what `AutoModel.from_pretrained` gives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rabbitllm import prepare
from rabbitllm.auto_model import AutoModel
from rabbitllm.base.options import RunOptions, ShardPolicy, SplitOptions, arguments_checked, check_model, expand
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.checkpoints.naming import LayerNaming, naming
from rabbitllm.display import split_display
from rabbitllm.errors import system_errors_by_name
from rabbitllm.formats.tensor_spec import TensorSpec, dtype_name
from rabbitllm.quant.schemes import DOUBLE, PRESETS, check_compression
from rabbitllm.store.manifest import SPLIT_DIRECTORY
from rabbitllm.store.stored_form import (
    StoredForm,
    constants,
    part_names,
    read_state,
    settled,
    settling,
    state_key,
    stored_form,
    stored_schemes,
)

if TYPE_CHECKING:
    import torch

StateDict = dict[str, "torch.Tensor"]


class RabbitLLMBaseModel:
    """Constructing this class, also by one of its names below, returns what `AutoModel.from_pretrained` returns."""

    def __new__(cls, model_local_path_or_repo_id: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Load a model; arguments in RabbitLLM 1.1's order, or by name as in `AutoModel.from_pretrained`.

        Raises:
            TypeError: too many arguments, or one given twice.
        """
        return AutoModel.from_pretrained(model_local_path_or_repo_id, *args, **kwargs)


RabbitLLMLlama2 = RabbitLLMMistral = RabbitLLMMixtral = RabbitLLMQWen = RabbitLLMQWen2 = RabbitLLMBaseModel
RabbitLLMQWen3 = RabbitLLMChatGLM = RabbitLLMBaichuan = RabbitLLMInternLM = RabbitLLMBaseModel


@arguments_checked()
@system_errors_by_name()
def split_and_save_layers(
    checkpoint_path: str | Path,
    layer_shards_saving_path: str | Path | None = None,
    splitted_model_dir_name: str = SPLIT_DIRECTORY,
    compression: str | None = None,
    layer_names: Mapping[str, str] | LayerNaming | None = None,
    delete_original: bool = False,
    repo_id: str | None = None,
    token: str | None = None,
    hf_token: str | None = None,
    sequential_shard_processing: bool = False,
) -> str:
    """Split a checkpoint in a folder into layer files, unless that is done.

    Args:
        checkpoint_path: folder of the checkpoint.
        layer_shards_saving_path: folder for the split directory; the default is `checkpoint_path`.
        splitted_model_dir_name: its name, without the compression's suffix.
        compression: "4bit", "4bit-double", "8bit" or None.
        layer_names: RabbitLLM's table (`embed`, `layer_prefix`, `norm`, `lm_head`), or a `LayerNaming`; by default
            the naming of the model's family.
        delete_original: delete the checkpoint's weights when the split is whole.
        repo_id: a repository to fetch shards from that the folder lacks.
        token, hf_token: access token for the hub.
        sequential_shard_processing: process one shard at a time, and delete each after its last use.

    Returns:
        Path of the split directory.

    Raises:
        RabbitLLMError: as `AutoModel.from_pretrained`.
    """
    check_compression(compression)
    check_model(checkpoint_path)
    spec = prepare.ModelSpec(
        str(checkpoint_path),
        compression,
        expand(layer_shards_saving_path, "layer_shards_saving_path") if layer_shards_saving_path else None,
        HubAccess(token=token if token is not None else hf_token),
        repo_id,
        splitted_model_dir_name,
    )
    source = prepare.find(spec)
    shards = ShardPolicy.of(sequential=sequential_shard_processing, delete_original=delete_original)
    options = SplitOptions(compression, shards)
    with split_display.shown(), contextlib.ExitStack() as stack:
        accept = None
        if shards.deletes_original:
            accept = stack.enter_context(prepare.acceptance(source, RunOptions(device="cpu")))
        prepare.ensure_split(source, options, naming=_naming(layer_names), accept=accept)
    return str(source.split_folder)


def _naming(layer_names: Mapping[str, str] | LayerNaming | None) -> LayerNaming | None:
    """RabbitLLM's table of prefixes as patterns."""
    import re

    if layer_names is None or isinstance(layer_names, LayerNaming):
        return layer_names
    patterns = []
    for role, prefix in layer_names.items():
        head, _, tail = prefix.rpartition(".")
        lead = re.escape(head + ".") if head else ""
        index_pattern = r"\.\d+" if role == "layer_prefix" else ""
        patterns.append(rf"{lead}(?P<id>{re.escape(tail)}{index_pattern})\.")
    return naming(patterns)


def compress_layer_state_dict(layer_state_dict: StateDict, compression: str | None = None) -> StateDict:
    """Quantize a layer's tensors as a split does, into the keys of a layer file.

    Args:
        layer_state_dict: name -> tensor of any floating dtype and shape.
        compression: "4bit", "4bit-double", "8bit", or None, which returns the same dict.

    Returns:
        Stored keys -> tensors, on the device of each given tensor: codes in uint8, scales and tables in float32.
    """
    import torch

    from rabbitllm.quant.quantize import quantize_blocks

    if compression is None:
        return layer_state_dict
    check_compression(compression)
    stored: StateDict = {}
    for name, tensor in layer_state_dict.items():
        spec = TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape), "", 0, tensor.nbytes)
        form = stored_form(spec, PRESETS.get(compression, (compression,))[0])
        if form.scheme is None:
            stored[name] = tensor
            continue
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        codes, scales = quantize_blocks(form.scheme, raw, spec.dtype, str(tensor.device))
        contents = {form.parts[0].name: codes, form.parts[1].name: scales, **constants(form)}
        if form.scheme == DOUBLE:
            contents |= _settled(form, scales)
        for part in form.parts:
            flat = torch.frombuffer(bytearray(contents[part.name]), dtype=torch.uint8)
            dtype = torch.float32 if part.dtype == "F32" else torch.uint8
            stored[part.name] = flat.view(dtype).view(part.shape).to(tensor.device)
    return stored


def uncompress_layer_state_dict(layer_state_dict: StateDict) -> StateDict:
    """Dequantize the tensors of `compress_layer_state_dict`, or of a layer file.

    Args:
        layer_state_dict: stored keys -> tensors.

    Returns:
        Name -> tensor, in the original shape: 4bit tensors in their original dtype, 8bit ones in float16, as in
        RabbitLLM 1.1. A dict without compressed tensors is returned unchanged.
    """
    import torch

    from rabbitllm.quant.quantize import dequantize, operands

    schemes = stored_schemes(layer_state_dict)
    if not any(schemes.values()):
        return layer_state_dict
    specs = {
        key: TensorSpec(key, dtype_name(tensor.dtype), tuple(tensor.shape), "", 0, tensor.nbytes)
        for key, tensor in layer_state_dict.items()
    }
    plain: StateDict = {}
    for name, scheme in schemes.items():
        if scheme is None:
            plain[name] = layer_state_dict[name]
            continue
        key = state_key(name, scheme)
        form = read_state(name, scheme, specs, bytes(layer_state_dict[key].cpu().numpy()) if key else b"")
        parts = [specs[part] for part in part_names(name, scheme)]
        dtype = getattr(torch, form.dtype) if form.dtype else torch.float16
        plain[name] = dequantize(*operands(form, parts, lambda spec: layer_state_dict[spec.name]), dtype)
    return plain


def _settled(form: StoredForm, scales: memoryview) -> dict[str, bytearray]:
    """The stored form of a tensor's scales at 4bit-double: stored key -> content."""
    import numpy as np

    waiting = settling(form, "", 0)
    contents: dict[str, bytearray] = {}
    for part, begin, content in settled(waiting, lambda first, count: np.frombuffer(scales, "<f4", count, 4 * first)):
        contents.setdefault(waiting.parts[part].name, bytearray())[begin:] = content
    return contents
