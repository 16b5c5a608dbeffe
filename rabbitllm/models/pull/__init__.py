"""`rabbitllm pull`: prepare a model, or predict whether it would fit."""
