"""Checkpoints as mappings of tensors that are read when they are used. Knows no models and no devices."""
