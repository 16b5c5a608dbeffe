"""Many generations on one model in shared passes: each layer's weights are loaded once for all of them."""
