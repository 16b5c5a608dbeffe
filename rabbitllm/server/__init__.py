"""`rabbitllm serve`: one model behind an OpenAI-compatible HTTP interface; requests share passes over its weights."""
