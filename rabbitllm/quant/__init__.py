"""Schemes of quantization, codes, kernels and products."""
