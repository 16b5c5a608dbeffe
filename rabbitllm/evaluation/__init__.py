"""`rabbitllm quality`: the loss of quality by compression, measured on next-token distributions."""
