"""`rabbitllm serve`: one model behind an OpenAI-compatible HTTP interface; requests share passes over its weights."""

__all__ = ["answers", "api_error", "embeddings", "requests", "schemas", "server", "settings"]
