"""The split directories of this machine: what there is, whose it is, and taking one away."""
