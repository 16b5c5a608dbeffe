"""Schemes of quantization, codes, kernels and products."""

__all__ = [
    "bfloat_products",
    "coded",
    "gguf_blocks",
    "products",
    "published_kernels",
    "quantize",
    "quantize_kernels",
    "schemes",
    "stored_blocks",
]
