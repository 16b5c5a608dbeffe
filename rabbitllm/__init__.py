"""RabbitLLM: run language models that fit neither the GPU, nor RAM, nor (while they are prepared) the disk.

    from rabbitllm import AutoModel

    model = AutoModel.from_pretrained("organisation/name", sequential_shard_processing=True, compression="4bit")

The names below are imported when they are first used, so that `import rabbitllm` itself costs nothing; type checkers
and editors read them in `__init__.pyi`.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from rabbitllm.version import __version__

_HOME = {
    "AutoModel": "rabbitllm.auto_model",
    "batch": "rabbitllm.batch_jobs.api",
    "Hosts": "rabbitllm.base.options",
    "lazy_load": "rabbitllm.lazy.load",
    "plan": "rabbitllm.estimate.plan",
    "quality": "rabbitllm.evaluation.quality",
    "register_layer_naming": "rabbitllm.checkpoints.naming",
    "RabbitLLMError": "rabbitllm.errors",
    "NotEnoughSpaceException": "rabbitllm.errors",
    **dict.fromkeys(
        (
            "RabbitLLMBaseModel",
            "RabbitLLMBaichuan",
            "RabbitLLMChatGLM",
            "RabbitLLMInternLM",
            "RabbitLLMLlama2",
            "RabbitLLMMistral",
            "RabbitLLMMixtral",
            "RabbitLLMQWen",
            "RabbitLLMQWen2",
            "RabbitLLMQWen3",
            "compress_layer_state_dict",
            "split_and_save_layers",
            "uncompress_layer_state_dict",
        ),
        "rabbitllm.rabbitllm_1_names",
    ),
}

__all__ = ["__version__", *_HOME]


# huggingface_hub takes an empty path for the working folder, and an empty address for none
for _name in [name for name, value in os.environ.items() if not value]:
    if _name.startswith("HF_") or _name in ("XDG_CACHE_HOME", "HUGGINGFACE_HUB_CACHE", "GOMP_SPINCOUNT"):
        del os.environ[_name]

# libgomp reads it when torch is imported; see `base/openmp.py`
if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    os.environ["GOMP_SPINCOUNT"] = "20000"
# oneDNN reads it at torch's first product of bfloat16: it compiles code for each matrix size and length of a prompt,
# some 0.7 MB, and keeps 1,024 of these by itself
if not os.environ.keys() & {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"}:
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "256"

if os.environ.get("RABBITLLM_LOG"):
    importlib.import_module("rabbitllm.base.logs").set_up(os.environ["RABBITLLM_LOG"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rabbitllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
