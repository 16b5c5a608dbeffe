"""Checkpoints as mappings of tensors that are read when they are used. Independent of models and devices."""

__all__ = ["load"]
