"""Checkpoints as Meta publishes Llama, made from a tiny model of transformers: ranks, params.json, tokenizer.model.

    model = tiny_llama(kv_heads=2)
    write_meta(folder, model, ranks=4)          # consolidated.00.pth to .03.pth
    write_as_transformers(folder, model)        # the same weights as safetensors

Written here by Meta's own conventions and not by what the package makes of them: Q and K are interleaved, the embedding
is cut along either dimension, norms and `rope.freqs` are in every rank.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

RANK = "consolidated.{:02}.pth"
_MODULES = {
    "self_attn.q_proj": ("attention.wq", 0),
    "self_attn.k_proj": ("attention.wk", 0),
    "self_attn.v_proj": ("attention.wv", 0),
    "self_attn.o_proj": ("attention.wo", 1),
    "mlp.gate_proj": ("feed_forward.w1", 0),
    "mlp.down_proj": ("feed_forward.w2", 1),
    "mlp.up_proj": ("feed_forward.w3", 0),
    "input_layernorm": ("attention_norm", None),
    "post_attention_layernorm": ("ffn_norm", None),
}
_OTHERS = {"model.norm.weight": ("norm.weight", None), "lm_head.weight": ("output.weight", 0)}

Tensors = Mapping[str, torch.Tensor]


def tiny_llama(
    *,
    hidden: int = 64,
    intermediate: int = 128,
    layers: int = 2,
    heads: int = 8,
    kv_heads: int = 8,
    vocabulary: int = 320,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **settings: Any,
) -> Any:
    """A random ``LlamaForCausalLM`` whose norms are no ones."""
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        initializer_range=0.08,
        **{"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "tie_word_embeddings": False, **settings},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = transformers.LlamaForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data += torch.randn_like(parameter) * 0.1
    return model.to(dtype)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Its weights under transformers' names, as they are published: a tied head is not there."""
    tied = model.config.tie_word_embeddings
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {name: tensor for name, tensor in tensors.items() if not (tied and name == "lm_head.weight")}


def write_as_transformers(folder: Path, model: Any) -> Path:
    """The same model as transformers saves it."""
    model.save_pretrained(folder)
    return folder


def params_of(model: Any, **changes: Any) -> dict[str, Any]:
    """What Meta's params.json would say of a model; a change to None leaves a field out."""
    config = model.config
    known = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": -1,
        "multiple_of": config.intermediate_size,
        "ffn_dim_multiplier": 0.5,
    }
    return {key: value for key, value in {**known, **changes}.items() if value is not None}


def ranks_of_model(model: Any, ranks: int = 1, embedding_dim: int = 0) -> list[dict[str, torch.Tensor]]:
    """What each rank's file holds."""
    config = model.config
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    cut: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
    for name, tensor in weights_of(model).items():
        if name == "model.embed_tokens.weight":
            own, dim = "tok_embeddings.weight", embedding_dim
        elif name in _OTHERS:
            own, dim = _OTHERS[name]
        else:
            _, _, layer, module = name.removesuffix(".weight").split(".", 3)
            own, dim = f"layers.{layer}.{_MODULES[module][0]}.weight", _MODULES[module][1]
            if module in heads:
                tensor = interleaved(tensor, heads[module])
        pieces = [tensor] * ranks if dim is None else tensor.chunk(ranks, dim)
        for rank, piece in zip(cut, pieces, strict=True):
            rank[own] = piece.clone()
    for rank in cut:
        rank["rope.freqs"] = torch.ones(config.hidden_size // config.num_attention_heads // 2)
    return cut


def interleaved(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of each head with its halves taking turns, as Meta has them."""
    per_head = matrix.reshape(heads, -1, matrix.shape[1])
    first, second = per_head.chunk(2, dim=1)
    return torch.stack([first, second], dim=2).reshape(matrix.shape)


def write_meta(
    folder: Path, model: Any, ranks: int = 1, embedding_dim: int = 0, tokenizer: bytes | None = None, **params: Any
) -> Path:
    """Write a whole checkpoint of Meta's; ``params`` change what params.json says."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, tensors in enumerate(ranks_of_model(model, ranks, embedding_dim)):
        torch.save(tensors, folder / RANK.format(number))
    (folder / "params.json").write_text(json.dumps(params_of(model, **params)))
    if tokenizer is not None:
        (folder / "tokenizer.model").write_bytes(tokenizer)
    return folder


def tiktoken_file(merges: int = 40) -> bytes:
    """A vocabulary in tiktoken's format: all bytes, in an order of their own, and tokens merged of earlier ones."""
    order = [*range(33, 127), *range(161, 256), *range(33), *range(127, 161)]
    tokens = [bytes([byte]) for byte in order]
    words = [b"the", b"ing", b" the", b"  ", b"    ", b"and", b" and", b"123", "é".encode(), "世界".encode(), b"\n\n"]
    for word in itertools.islice(words, merges):
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))
