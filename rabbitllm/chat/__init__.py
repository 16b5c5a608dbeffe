"""`rabbitllm chat`: a conversation with a model that keeps its KV cache from one answer to the next."""

__all__ = ["conversation", "loop"]
