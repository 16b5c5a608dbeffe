"""`rabbitllm convert`: any splittable checkpoint as sharded safetensors."""
