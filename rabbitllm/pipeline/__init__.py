"""A model whose layers are spread over processes, on one machine or several, each with a span of them."""
