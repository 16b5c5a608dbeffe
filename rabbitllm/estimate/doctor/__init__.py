"""`rabbitllm doctor`: this machine's hardware, the models it can run, and missing packages or settings."""

__all__ = ["examine", "records", "report"]
