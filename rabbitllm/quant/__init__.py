"""Schemes of quantization, codes, kernels and products."""

__all__ = [
    "attention",
    "bfloat_products",
    "block_encoders",
    "coded",
    "dequantize_kernels",
    "gguf_blocks",
    "joint",
    "joint_kernels",
    "plain",
    "products",
    "quantize",
    "quantize_kernels",
    "routed",
    "schemes",
]
