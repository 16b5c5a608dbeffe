"""`rabbitllm quality`: the loss of quality by compression, measured on next-token distributions."""

__all__ = ["compare", "quality"]
