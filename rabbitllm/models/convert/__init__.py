"""`rabbitllm convert`: any checkpoint that can be split, as sharded safetensors."""
