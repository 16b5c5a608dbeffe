"""Checks that the parts of weights that are published quantized belong together, by names, counts and sizes alone.

For conversions that cannot be tried out without bytes. Uses the parts' names, and no quantizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rabbitllm.errors import IncompleteSplitError
from rabbitllm.formats.tensor_spec import torch_dtype
from rabbitllm.store.layer_store import StoredTensor

if TYPE_CHECKING:
    import torch

_OPAQUE = ("WrapAgain", "ExpertMatrices")
"""Operations of transformers that read some of their tensors: their result depends on more than shapes."""
_STATE = ".quant_state.bitsandbytes__"
_FETCH_AGAIN = "The checkpoint is incomplete: fetch it again, its config.json and every file that its index names."


def check_alone(target: torch.Tensor, stored: StoredTensor, key: str) -> None:
    """Refuse codes without their scales: a quantizer's conversion would treat a lone tensor as a plain one.

    Raises:
        IncompleteSplitError: the stored tensor holds codes, or it is plain and the target is not.
    """
    found = torch_dtype(stored.parts[0].dtype)
    if found.is_floating_point and found.itemsize > 1:
        if target.dtype.is_floating_point:
            return
        problem = (
            f"the tensor for {key} is plain {stored.parts[0].dtype}, where the model's config says it is quantized."
        )
    else:
        problem = f"the tensor for {key} holds codes ({stored.parts[0].dtype}) and has no scales."
    raise IncompleteSplitError(problem, _FETCH_AGAIN)


def is_opaque(converter: Any) -> bool:
    """Whether a conversion reads its tensors, so that it cannot be tried out without their bytes."""
    return converter is not None and any(type(operation).__name__ in _OPAQUE for operation in converter.operations)


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
                f"the tensors for {key} lack {', '.join(f'{projection}weight{part}' for part in missing)}.",
                _FETCH_AGAIN,
            )
        experts = expected.shape[0] if projection else 1
        counts = {len(found) for found in parts.values()}
        if counts != {experts}:
            raise IncompleteSplitError(
                f"the tensors for {key} are of {' or '.join(map(str, sorted(counts)))} experts; the model's config "
                f"asks for {experts}.",
                _FETCH_AGAIN,
            )
        if not projection:
            _check_size(key, expected, parts, is_4bit)


def _missing_at_4bit(parts: Iterable[str]) -> list[str]:
    found = set(parts)
    missing = [part for part in ("", ".absmax", ".quant_map") if part not in found]
    state = any(part.startswith(_STATE) for part in found)
    return missing if state else [*missing, f"{_STATE}nf4"]


def _missing_when_compressed(parts: Mapping[str, Sequence[StoredTensor]]) -> list[str]:
    if "" not in parts and "_packed" not in parts:
        return ["_packed"]
    plain = "_packed" not in parts and torch_dtype(parts[""][0].parts[0].dtype).itemsize > 1
    return [] if plain or "_scale" in parts else ["_scale"]


def _check_size(key: str, expected: torch.Tensor, parts: Mapping[str, Sequence[StoredTensor]], is_4bit: bool) -> None:
    """Compare the codes' size as far as it is known: at 4bit their number, packed by compressed-tensors their rows."""
    codes = parts[""][0] if "" in parts else parts["_packed"][0]
    if is_4bit:
        agrees = codes.nbytes == (expected.numel() + 1) // 2
    elif "" in parts:
        agrees = codes.shape == tuple(expected.shape)
    else:
        agrees = codes.shape[:1] == tuple(expected.shape[:1])
    if not agrees:
        raise IncompleteSplitError(
            f"the codes for {key} have shape {codes.shape}; the model's config asks for {tuple(expected.shape)} "
            "elements.",
            "The config and the weights are of different models: check where each came from.",
        )
