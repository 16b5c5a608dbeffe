"""A folder or a hub repository seen as one logical checkpoint: which tensors, in which shards, of which layer."""
