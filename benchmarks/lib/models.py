"""The models that can be rehearsed, by the name on the command line: configs as published, and names of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.lib.published import Config, Model, Tensor


def qwen2(config: Config) -> Iterator[Tensor]:
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
TINY_QWEN2: Config = {
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


def qwen3_next(config: Config) -> Iterator[Tensor]:
    """Names and shapes as transformers' `Qwen3NextForCausalLM` saves them.

    Their order is derived, not published: with the experts last in each layer the first shard has its published size
    (3,999,619,288 bytes), and so have all together (159,358,031,480) and the index (6,759,619). Which shard a tensor is
    in may still differ: the digest of the published index does.
    """
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield Tensor("model.embed_tokens.weight", (vocabulary, hidden))
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        full = (number + 1) % config["full_attention_interval"] == 0
        yield from _full_attention(layer, config) if full else _linear_attention(layer, config)
        yield Tensor(f"{layer}.input_layernorm.weight", (hidden,))
        yield Tensor(f"{layer}.post_attention_layernorm.weight", (hidden,))
        yield Tensor(f"{layer}.mlp.gate.weight", (config["num_experts"], hidden), plain=True)
        yield Tensor(f"{layer}.mlp.shared_expert_gate.weight", (1, hidden), plain=True)
        yield from _expert(f"{layer}.mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
        for expert in range(config["num_experts"]):
            yield from _expert(f"{layer}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
    yield Tensor("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield Tensor("lm_head.weight", (vocabulary, hidden))


def _full_attention(layer: str, config: Config) -> Iterator[Tensor]:
    """Grouped queries; `q_proj` has a gate for every element of the output in addition to the queries."""
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    for which, rows in {"q": 2 * queries, "k": keys, "v": keys}.items():
        yield Tensor(f"{layer}.self_attn.{which}_proj.weight", (rows, hidden))
    yield Tensor(f"{layer}.self_attn.o_proj.weight", (hidden, queries))
    yield Tensor(f"{layer}.self_attn.q_norm.weight", (head,))
    yield Tensor(f"{layer}.self_attn.k_norm.weight", (head,))


def _linear_attention(layer: str, config: Config) -> Iterator[Tensor]:
    """A gated delta net; `in_proj_qkvz` makes queries, keys, values and output gate, `in_proj_ba` beta and decay."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    part, mixed = f"{layer}.linear_attn", 2 * keys + values
    yield Tensor(f"{part}.dt_bias", (heads,))
    yield Tensor(f"{part}.A_log", (heads,))
    yield Tensor(f"{part}.conv1d.weight", (mixed, 1, config["linear_conv_kernel_dim"]), plain=True)
    yield Tensor(f"{part}.in_proj_qkvz.weight", (mixed + values, hidden))
    yield Tensor(f"{part}.in_proj_ba.weight", (2 * heads, hidden))
    yield Tensor(f"{part}.norm.weight", (config["linear_value_head_dim"],))
    yield Tensor(f"{part}.out_proj.weight", (hidden, values))


def _expert(name: str, hidden: int, inner: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.gate_proj.weight", (inner, hidden))
    yield Tensor(f"{name}.up_proj.weight", (inner, hidden))
    yield Tensor(f"{name}.down_proj.weight", (hidden, inner))


QWEN3_CODER_NEXT: Config = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""https://huggingface.co/Qwen/Qwen3-Coder-Next/blob/main/config.json, byte for byte once it is encoded."""
QWEN3_CODER_NEXT_GENERATION: Config = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 1.0,
    "top_k": 40,
    "top_p": 0.95,
    "transformers_version": "4.57.3",
}
"""generation_config.json of the same repository."""
TINY_QWEN3_NEXT: Config = {
    **QWEN3_CODER_NEXT,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "head_dim": 32,
    "hidden_size": 128,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "shared_expert_intermediate_size": 64,
    "vocab_size": 1000,
}

SHARD_BYTES = 4 * 1000**3
"""As both published checkpoints are packed."""

MODELS: Mapping[str, Model] = {
    "qwen2.5-72b": Model(
        "Qwen2.5-72B",
        "generated/Qwen2.5-72B",
        QWEN2_5_72B,
        {"bos_token_id": 151643, "do_sample": False, "eos_token_id": 151643, "max_new_tokens": 2048},
        qwen2,
        shard_bytes=SHARD_BYTES,
        max_disk=45 << 30,
    ),
    "coder-next": Model(
        "Qwen3-Coder-Next",
        "generated/Qwen3-Coder-Next",
        QWEN3_CODER_NEXT,
        QWEN3_CODER_NEXT_GENERATION,
        qwen3_next,
        shard_bytes=SHARD_BYTES,
        max_disk=48 << 30,  # its layer files are 4 GB larger, and so the next shard can be fetched here too
    ),
    "tiny": Model(
        "a tiny model",
        "generated/tiny",
        TINY_QWEN2,
        {"do_sample": False},
        qwen2,
        shard_bytes=1_200_000,
        max_disk=5 << 20,
    ),
    "tiny-moe": Model(
        "a tiny model of experts",
        "generated/tiny-moe",
        TINY_QWEN3_NEXT,
        {"do_sample": False},
        qwen3_next,
        shard_bytes=1_200_000,
        max_disk=5 << 20,
    ),
}
"""The tiny ones try the machinery out, and their figures mean nothing."""
