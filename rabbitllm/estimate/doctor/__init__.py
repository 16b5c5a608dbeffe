"""What this machine has, which models it can run, and what is missing: `rabbitllm doctor`."""
