"""What the bits of a model's results depend on, as one digest: results on disk are valid where it is the same."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rabbitllm.base.transformers_version import version_of
from rabbitllm.engine.free_memory import proc_fields
from rabbitllm.engine.transformers_api import attention_of, has_adapter
from rabbitllm.version import __version__

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

_PACKAGES = ("torch", "transformers", "numba", "bitsandbytes")
_INSTRUCTIONS = ("ATEN_CPU_", "NUMBA_CPU_", "ONEDNN_", "DNNL_", "MKL_")
"""Beginnings of environment variables that choose instructions."""
_REMOTE_CODE = "transformers_modules"
"""Package in which transformers imports a checkpoint's own code."""


def why_no_identity(model: StreamedModel) -> str:
    """Why a model's results cannot be told from those of other weights; "" if they can."""
    if getattr(model._internals.origin.store, "manifest", None) is None:
        return "its weights have no checksums: they are not in a split directory with a split.json"
    if has_adapter(model):
        return "it has an adapter"
    if getattr(model, "hosts", None) is not None:
        return "other hosts compute layers of it"
    return ""


def identity(model: StreamedModel) -> bytes:
    """Digest of the weights and of all conditions of `docs/reference/equal-bits.md` but tokens and rows.

    Args:
        model: a model for which `why_no_identity` is "".
    """
    content = json.dumps(list(_conditions(model)), sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).digest()


def _conditions(model: StreamedModel) -> Iterator[Any]:
    origin, options = model._internals.origin, model._internals.options
    manifest: Any = getattr(origin.store, "manifest", None)
    yield manifest.compression
    yield [(layer.file, layer.size, layer.crc32, (layer.blocks or b"").hex()) for layer in manifest.layers]
    config = json.dumps(model.config.to_dict(), default=str)
    anywhere = json.loads(config, object_pairs_hook=_without_path)
    yield [type(model).__qualname__, anywhere, str(model.dtype), attention_of(model.config)]
    yield [options.exact, options.fast_bfloat16]
    yield [_source_of(kind.__module__) for kind in type(model).__mro__ if kind.__module__.startswith(_REMOTE_CODE)]
    yield [__version__, sys.version_info[:2], *(version_of(package) or "" for package in _PACKAGES)]
    devices = dict.fromkeys(placed.device for placed in model.placement.units)
    yield [(name, torch.cuda.get_device_name(name) if name.startswith("cuda") else "") for name in devices]
    yield [(placed.unit, placed.device) for placed in model.placement.units] if len(devices) > 1 else []
    yield [torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), platform.machine(), _features()]
    yield sorted(item for item in os.environ.items() if item[0].startswith(_INSTRUCTIONS))


def _without_path(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A config, or one in it, without the folder that it came from."""
    return {name: value for name, value in pairs if name != "_name_or_path"}


def _source_of(module: str) -> str:
    """Digest of the source of a module of a checkpoint's own code."""
    path = getattr(sys.modules.get(module), "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path is not None else ""


def _features() -> str:
    """The processor's features (Linux), else its name."""
    fields = proc_fields(Path("/proc/cpuinfo"))
    features = fields.get("flags") or fields.get("Features", "")
    return " ".join(sorted(features.split())) if fields else platform.processor()
