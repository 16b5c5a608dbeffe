"""What the worker does with llama.cpp: writes its file from a checkpoint, and generates. Stands alone too.

The file is written with the `gguf` package (format: its README, and docs/gguf.md of ggml), from a Llama or a Qwen3. A
Llama's query and key rows are put in the order of llama.cpp's rotary embedding, which pairs neighbours where
transformers pairs halves; for a Qwen3 it pairs halves too. `quality/gguf_weights.py` is the way back.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
"""Of a decoder layer: the checkpoint's names and llama.cpp's, both without "weight"."""
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PAIRS_NEIGHBOURS = ("llama",)
"""Architectures whose query and key rows are in another order than transformers has them."""


def write_gguf(job: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of a Llama or a Qwen3 in bfloat16 as one file, `kind` being "BF16" or "Q4_0"; norms in float32.

    An embedding that is the head too is there once, as in the checkpoint.
    """
    import gguf

    folder, kind = Path(job["checkpoint"]), gguf.GGMLQuantizationType[job["kind"]]
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(job["path"], config["model_type"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{job['kind']}"])
    _add_vocabulary(writer, config["vocab_size"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    if config["model_type"] not in PAIRS_NEIGHBOURS:
        heads = {}
    for name, halves in _tensors(folder):
        module = name.removesuffix(".weight")
        if (count := heads.get(module.rpartition(".")[2])) is not None:
            rows = halves.reshape(count, 2, halves.shape[0] // count // 2, halves.shape[1])
            halves = rows.swapaxes(1, 2).reshape(halves.shape)
        if halves.ndim == 1:
            writer.add_tensor(renamed(module), _float32(halves))
        elif job["kind"] == "BF16":
            stored = np.ascontiguousarray(halves).view(np.uint8).reshape(halves.shape[0], -1)
            writer.add_tensor(renamed(module), stored, raw_dtype=kind)
        else:
            writer.add_tensor(renamed(module), gguf.quants.quantize(_float32(halves), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"nbytes": os.path.getsize(job["path"])}


def _add_vocabulary(writer: Any, size: int) -> None:
    """It loads no file without one; nothing is said in it, so any does: three special tokens, the bytes, and words."""
    tokens = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{byte:02X}>".encode() for byte in range(256)]
    tokens = (tokens + [f"w{i}".encode() for i in range(size)])[:size]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * size][:size])


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Names, and bfloat16 bits as uint16 arrays, in the order of a pass."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        start = 8 + int.from_bytes(path.open("rb").read(8), "little")
        data = np.memmap(path, mode="r", dtype=np.uint8)
        header = json.loads(bytes(data[8:start]))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = data[start + begin : start + end].view(np.uint16).reshape(entry["shape"])
    yield from sorted(found.items(), key=lambda item: _place(item[0]))


def _place(name: str) -> tuple[int, int, str]:
    if name.startswith("model.layers."):
        return 1, int(name.split(".")[2]), name
    return (0 if "embed" in name else 2), 0, name


def renamed(module: str) -> str:
    """llama.cpp's name of a module's weight."""
    if module in WHOLE:
        return f"{WHOLE[module]}.weight"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def _float32(halves: Any) -> Any:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def decode(worker: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Load the file, mapped, and generate greedily; the same figures as the other rows'."""
    from llama_cpp import Llama  # type: ignore[import-not-found,unused-ignore]

    threads = len(os.sched_getaffinity(0))
    begun = time.perf_counter()
    model = Llama(job["path"], n_ctx=512, n_threads=threads, n_threads_batch=threads, use_mmap=True, verbose=False)
    loaded = time.perf_counter()
    tokens, clock = [], worker.Clock()
    clock.put(None)
    for token in model.generate(job["prompt"], top_k=1, temp=0.0, repeat_penalty=1.0):
        clock.put(token)
        tokens.append(token)
        if len(tokens) == job["tokens"]:
            break
    return {
        "load_seconds": loaded - begun,
        "first_token_seconds": clock.times[1] - clock.times[0],
        "step_seconds": clock.steps(),
        "token_seconds": statistics.median(clock.steps()),
        "step_bytes": clock.step_bytes(),
        "tokens": tokens,
        "threads": threads,
        "dtype": job["kind"],
        "placed": "mapped",
    }


def tasks(worker: Any, job: dict[str, Any]) -> dict[str, Any]:
    """What there is to do; `worker` is the module `worker.py`."""
    return {"gguf": write_gguf, "decode": functools.partial(decode, worker)}
