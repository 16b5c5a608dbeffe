"""Qwen2.5-72B as it is published, and a tiny model of its kind."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.lib.published import Config, Tensor


def tensors(config: Config) -> Iterator[Tensor]:
    """Qwen2 and Qwen2.5, in the order of the model's modules."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = hidden // config["num_attention_heads"]
    outputs = {"q": hidden, "k": config["num_key_value_heads"] * head, "v": config["num_key_value_heads"] * head}
    yield Tensor("model.embed_tokens.weight", (vocabulary, hidden))
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for which, size in outputs.items():
            yield Tensor(f"{layer}.self_attn.{which}_proj.weight", (size, hidden))
            yield Tensor(f"{layer}.self_attn.{which}_proj.bias", (size,))
        yield Tensor(f"{layer}.self_attn.o_proj.weight", (hidden, hidden))
        yield Tensor(f"{layer}.mlp.gate_proj.weight", (inner, hidden))
        yield Tensor(f"{layer}.mlp.up_proj.weight", (inner, hidden))
        yield Tensor(f"{layer}.mlp.down_proj.weight", (hidden, inner))
        yield Tensor(f"{layer}.input_layernorm.weight", (hidden,))
        yield Tensor(f"{layer}.post_attention_layernorm.weight", (hidden,))
    yield Tensor("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield Tensor("lm_head.weight", (vocabulary, hidden))


QWEN2_5_72B: Config = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "initializer_range": 0.02,
    "intermediate_size": 29568,
    "max_position_embeddings": 131072,
    "max_window_layers": 80,
    "model_type": "qwen2",
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
"""https://huggingface.co/Qwen/Qwen2.5-72B/blob/main/config.json"""
TINY: Config = {
    **QWEN2_5_72B,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
