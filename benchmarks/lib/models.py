"""The models that can be rehearsed, by the name on the command line."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.lib import qwen2, qwen3_next
from benchmarks.lib.published import Model

SHARD_BYTES = 4 * 1000**3
"""As both published checkpoints are packed."""

MODELS: Mapping[str, Model] = {
    "qwen2.5-72b": Model(
        "Qwen2.5-72B",
        "generated/Qwen2.5-72B",
        qwen2.QWEN2_5_72B,
        {"bos_token_id": 151643, "do_sample": False, "eos_token_id": 151643, "max_new_tokens": 2048},
        qwen2.tensors,
        shard_bytes=SHARD_BYTES,
        max_disk=45 << 30,
    ),
    "coder-next": Model(
        "Qwen3-Coder-Next",
        "generated/Qwen3-Coder-Next",
        qwen3_next.QWEN3_CODER_NEXT,
        qwen3_next.QWEN3_CODER_NEXT_GENERATION,
        qwen3_next.tensors,
        shard_bytes=SHARD_BYTES,
        max_disk=48 << 30,  # its layer files are 4 GB larger, and so the next shard can be fetched here too
    ),
    "tiny": Model(
        "a tiny model",
        "generated/tiny",
        qwen2.TINY,
        {"do_sample": False},
        qwen2.tensors,
        shard_bytes=1_200_000,
        max_disk=5 << 20,
    ),
    "tiny-moe": Model(
        "a tiny model of experts",
        "generated/tiny-moe",
        qwen3_next.TINY,
        {"do_sample": False},
        qwen3_next.tensors,
        shard_bytes=1_200_000,
        max_disk=5 << 20,
    ),
}
"""The tiny ones try the machinery out, and their figures mean nothing."""
