"""Any number of prompts through one model in few passes: lines in, answers out, in order and durable."""

__all__ = ["answers", "api", "display", "inputs", "items", "job", "journal"]
