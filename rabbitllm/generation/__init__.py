"""Many generations on one model, in passes that they share: each layer's weights are brought once for all of them."""
