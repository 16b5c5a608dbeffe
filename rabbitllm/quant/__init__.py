"""Schemes of quantization, codes, kernels and products."""

__all__ = [
    "bfloat_products",
    "block_encoders",
    "coded",
    "dequantize_kernels",
    "gguf_blocks",
    "joint",
    "products",
    "quantize",
    "quantize_kernels",
    "schemes",
]
