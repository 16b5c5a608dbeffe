"""`rabbitllm pull`: a model made ready, or told beforehand whether it would fit."""
