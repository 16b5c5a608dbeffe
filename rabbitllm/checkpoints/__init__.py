"""A folder or a hub repository as one logical checkpoint: its tensors, their shards and their layers."""
