"""`rabbitllm run`: one prompt to a model, and its answer."""
