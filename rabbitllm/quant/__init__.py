"""Schemes of quantization, codes, kernels and products."""

__all__ = [
    "bfloat_products",
    "block_encoders",
    "coded",
    "dequantize_kernels",
    "gguf_blocks",
    "joint",
    "joint_kernels",
    "plain",
    "products",
    "prompt_attention",
    "quantize",
    "quantize_kernels",
    "schemes",
    "turned",
]
